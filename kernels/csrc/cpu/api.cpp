/* The C interface of products: checks of arguments, memory for quantized activations, and the split over threads.
 *
 * n tiles are shared out before the work begins and never change hands: a thread meets the same weights in every call,
 * and results do not depend on the number of threads. */
#include <atomic>

#include "cpu/common/compiler.h"
#include "cpu/common/memory.h"
#include "cpu/common/numbers.h"
#include "cpu/common/threads.h"
#include "cpu/gemm/isa.h"

namespace trirun {
namespace {

bool is_act_bits(int bits) { return bits == TRIRUN_ACT8 || bits == TRIRUN_ACT16; }

int check_act(const trirun_act* act) {
  if (!act || !act->limbs || !is_array(act->scales, 4) || !is_array(act->sums, 4)) return TRIRUN_BAD_POINTER;
  if (act->m < 0 || act->m > kMaxSize || !is_size(act->k) || act->k % kPaddedK) return TRIRUN_BAD_SHAPE;
  if (!fits(act->m, act->k)) return TRIRUN_BAD_SHAPE;
  return is_act_bits(act->act_bits) ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

/* Whether `rows` of `used` elements can be so many elements apart. */
bool is_stride(int64_t stride, int64_t used, int64_t rows) {
  return stride >= used && stride <= kMaxSize && fits(rows, stride);
}

/* The arrays of an act from `memory` on, where there is any; returns how many bytes they take. */
int64_t lay_out(void* memory, int64_t m, int64_t k, int act_bits, trirun_act* act) {
  Arena arena(memory);
  act->limbs = arena.take<int8_t>(m * (act_bits / 8) * k);
  act->scales = arena.take<float>(act_bits == TRIRUN_ACT8 ? m : m * (k / 128));
  act->sums = arena.take<int32_t>(m * (k / 32));
  act->m = m;
  act->k = k;
  act->act_bits = act_bits;
  /* Never 0, which would say that a size is bad. */
  return arena.used() + 64;
}

/* Below this many rows the caller quantizes alone: the others would wait longer for it than they could save. */
constexpr int64_t kSerialRows = 3;

int gemm(const trirun_int2* w, int64_t n, const trirun_act* act, const void* x, int dtype, int64_t k, int64_t ldx,
         const void* bias, void* y, int64_t ldy, int threads) {
  const Isa& use = isa();
  const Int2Job job = {w, act, n, bias, y, ldy, dtype};
  const bool together = act->m > kSerialRows;
  if (x && !together) use.quantize(*act, x, dtype, k, ldx, 0, act->m);
  const int64_t n_tiles = n_tiles_of(n);
  std::atomic<bool> out_of_memory{false};
  parallel(static_cast<int>(threads < n_tiles ? threads : n_tiles), [&](Team& team) {
    if (x && together) {
      Range rows = team.share(act->m);
      use.quantize(*act, x, dtype, k, ldx, rows.begin, rows.end);
      team.barrier();
    }
    Range mine = team.share(n_tiles);
    if (!use.int2_gemm(job, mine.begin, mine.end)) out_of_memory = true;
  });
  return out_of_memory ? TRIRUN_NO_WORKSPACE : TRIRUN_OK;
}

}  // namespace
}  // namespace trirun

using namespace trirun;

TRIRUN_EXPORT int trirun_cpu_abi_version(void) { return TRIRUN_ABI_VERSION; }

TRIRUN_EXPORT const char* trirun_cpu_isa(void) { return isa().name; }

TRIRUN_EXPORT int trirun_cpu_set_isa(const char* name) { return set_isa(name) ? TRIRUN_OK : TRIRUN_UNSUPPORTED; }

TRIRUN_EXPORT size_t trirun_cpu_act_bytes(int64_t m, int64_t k, int act_bits) {
  if (m < 0 || m > kMaxSize || !is_size(k) || k % kPaddedK || !fits(m, k) || !is_act_bits(act_bits)) return 0;
  trirun_act act;
  return static_cast<size_t>(lay_out(nullptr, m, k, act_bits, &act));
}

TRIRUN_EXPORT int trirun_cpu_act_init(trirun_act* act, void* memory, size_t bytes, int64_t m, int64_t k, int act_bits) {
  const size_t needed = trirun_cpu_act_bytes(m, k, act_bits);
  if (!needed) return TRIRUN_BAD_SHAPE;
  if (!act || !is_array(memory, 64)) return TRIRUN_BAD_POINTER;
  if (bytes < needed) return TRIRUN_NO_WORKSPACE;
  lay_out(memory, m, k, act_bits, act);
  return TRIRUN_OK;
}

TRIRUN_EXPORT int trirun_cpu_quantize(trirun_act* act, const void* x, int dtype, int64_t k, int64_t ldx, int threads) {
  if (int error = check_act(act)) return error;
  if (act->m == 0) return TRIRUN_OK;
  if (k <= 0 || k > act->k || threads < 1 || !is_stride(ldx, k, act->m)) return TRIRUN_BAD_SHAPE;
  if (!is_float_type(dtype)) return TRIRUN_UNSUPPORTED;
  if (!is_array(x, bytes_of(dtype))) return TRIRUN_BAD_POINTER;
  const Isa& use = isa();
  parallel(act->m > kSerialRows ? threads : 1, [&](Team& team) {
    Range rows = team.share(act->m);
    use.quantize(*act, x, dtype, k, ldx, rows.begin, rows.end);
  });
  return TRIRUN_OK;
}

TRIRUN_EXPORT int trirun_cpu_int2_gemm_act(const trirun_int2* w, int64_t n, const trirun_act* act, int dtype,
                                           const void* bias, void* y, int64_t ldy, int threads) {
  if (int error = check_weight(w, n)) return error;
  if (int error = check_act(act)) return error;
  if (act->k != w->k || threads < 1 || !is_stride(ldy, n, act->m)) return TRIRUN_BAD_SHAPE;
  if (!is_float_type(dtype)) return TRIRUN_UNSUPPORTED;
  if (act->m == 0) return TRIRUN_OK;
  if (!is_array(y, bytes_of(dtype)) || !is_aligned(bias, bytes_of(dtype))) return TRIRUN_BAD_POINTER;
  return gemm(w, n, act, nullptr, dtype, 0, 0, bias, y, ldy, threads);
}

TRIRUN_EXPORT int trirun_cpu_int2_gemm(const trirun_int2* w, int64_t n, int64_t k, const void* x, int dtype, int64_t m,
                                       int64_t ldx, const void* bias, void* y, int64_t ldy, int act_bits, int threads) {
  if (int error = check_weight(w, n)) return error;
  if (k <= 0 || k > w->k || m < 0 || m > kMaxSize || threads < 1) return TRIRUN_BAD_SHAPE;
  if (!is_stride(ldx, k, m) || !is_stride(ldy, n, m)) return TRIRUN_BAD_SHAPE;
  if (!is_float_type(dtype) || !is_act_bits(act_bits)) return TRIRUN_UNSUPPORTED;
  if (m == 0) return TRIRUN_OK;
  const int64_t width = bytes_of(dtype);
  if (!is_array(x, width) || !is_array(y, width) || !is_aligned(bias, width)) return TRIRUN_BAD_POINTER;
  const size_t bytes = trirun_cpu_act_bytes(m, w->k, act_bits);
  if (!bytes) return TRIRUN_BAD_SHAPE;
  void* memory = scratch(kScratchActivations, static_cast<int64_t>(bytes));
  if (!memory) return TRIRUN_NO_WORKSPACE;
  trirun_act act;
  if (int error = trirun_cpu_act_init(&act, memory, bytes, m, w->k, act_bits)) return error;
  return gemm(w, n, &act, x, dtype, k, ldx, bias, y, ldy, threads);
}
