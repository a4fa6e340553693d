/* The exported functions: checks, memory, the choice of instruction set, and the split over threads. */
#include <stdlib.h>
#include <string.h>

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "cpu/gemm/kernels.h"
#include "cpu/common/numbers.h"
#include "cpu/common/threads.h"

#define TRIRUN_EXPORT extern "C" __attribute__((visibility("default")))

namespace trirun {
namespace {

std::atomic<const Isa*> chosen{nullptr};

#if defined(__x86_64__)
/* AMX, and leave to use it: Linux grants the tile registers to a process on request. */
bool has_amx() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 24 & 3) != 3) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

/* __builtin_cpu_supports knows "f16c" only from GCC 11 on. */
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

/* Whether this machine runs what scripts/trirun_toolchain.py compiles for the instruction set, the operating system's
 * part included. */
bool machine_has(const Isa& candidate) {
  if (&candidate == &kPortable) return true;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512vnni = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni");
  if (&candidate == &kAvx2) return avx2;
  if (&candidate == &kAvx512Vnni) return avx512vnni;
  if (&candidate == &kAmx) return avx512vnni && has_amx();
#endif
  return false;
}

const Isa* find_isa(const char* name) {
  const Isa* candidates[] = {&kAmx, &kAvx512Vnni, &kAvx2, &kPortable};
  for (const Isa* candidate : candidates)
    if (candidate->name && (!name || !*name || !strcmp(name, candidate->name)) && machine_has(*candidate))
      return candidate;
  return nullptr;
}

/* Sizes beyond this are nonsense, and their products could leave int64. */
constexpr int64_t kMaxSize = int64_t{1} << 31;

bool bad_dtype(int dtype) { return dtype != TRIRUN_F32 && dtype != TRIRUN_F16 && dtype != TRIRUN_BF16; }

int check_weight(const trirun_int2* w, int64_t n) {
  if (!w || !w->words || !w->scales || (reinterpret_cast<uintptr_t>(w->words) & 15)) return TRIRUN_BAD_POINTER;
  if (w->n <= 0 || w->k <= 0 || w->n % 64 || w->k % 128 || w->n > kMaxSize || w->k > kMaxSize) return TRIRUN_BAD_SHAPE;
  if (n <= 0 || n > w->n) return TRIRUN_BAD_SHAPE;
  const int32_t g = w->group_size;
  return g == -1 || g == 32 || g == 64 || g == 128 ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

int check_act(const trirun_act* act) {
  if (!act || !act->digits || !act->scales || !act->sums) return TRIRUN_BAD_POINTER;
  if (act->m < 0 || act->k <= 0 || act->k % 128) return TRIRUN_BAD_SHAPE;
  return act->act_bits == TRIRUN_ACT8 || act->act_bits == TRIRUN_ACT16 ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

/* Below this many rows the caller quantizes alone: the others would wait longer for it than they could save. */
constexpr int64_t kSerialRows = 3;

int gemm(const trirun_int2* w, int64_t n, const trirun_act* act, const void* x, int dtype, int64_t k, int64_t ldx,
         const void* bias, void* y, int64_t ldy, int threads) {
  const Isa& use = isa();
  const Int2Job job = {w, act, n, bias, y, ldy, dtype};
  const bool together = act->m > kSerialRows;
  if (x && !together) use.quantize(*act, x, dtype, k, ldx, 0, act->m);
  const int64_t strips = (n + 63) / 64;
  std::atomic<bool> out_of_memory{false};
  parallel(static_cast<int>(threads < strips ? threads : strips), [&](Team& team) {
    if (x && together) {
      Range rows = team.share(act->m);
      use.quantize(*act, x, dtype, k, ldx, rows.begin, rows.end);
      team.barrier();
    }
    Range mine = team.share(strips);
    if (!use.int2_gemm(job, mine.begin, mine.end)) out_of_memory = true;
  });
  return out_of_memory ? TRIRUN_NO_WORKSPACE : TRIRUN_OK;
}

}  // namespace

const Isa& isa() {
  const Isa* current = chosen.load(std::memory_order_acquire);
  if (!current) {
    current = find_isa(getenv("TRIRUN_CPU_ISA"));
    // An unknown or missing instruction set was asked for: the library says "portable", which doctor shows.
    if (!current) current = &kPortable;
    chosen.store(current, std::memory_order_release);
  }
  return *current;
}

}  // namespace trirun

using namespace trirun;

TRIRUN_EXPORT int trirun_cpu_abi_version(void) { return TRIRUN_ABI_VERSION; }

TRIRUN_EXPORT const char* trirun_cpu_isa(void) { return isa().name; }

TRIRUN_EXPORT int trirun_cpu_set_isa(const char* name) {
  const Isa* found = find_isa(name);
  if (!found) return TRIRUN_UNSUPPORTED;
  chosen.store(found);
  return TRIRUN_OK;
}

TRIRUN_EXPORT size_t trirun_cpu_act_bytes(int64_t m, int64_t k, int act_bits) {
  if (m < 0 || m > kMaxSize || k <= 0 || k > kMaxSize || k % 128 || (act_bits != 8 && act_bits != 16)) return 0;
  const int64_t scales = act_bits == 8 ? m : m * (k / 128), sums = m * (k / 32);
  return static_cast<size_t>(m * (act_bits / 8) * k + ((scales + 15) / 16 + (sums + 15) / 16) * 64 + 64);
}

TRIRUN_EXPORT int trirun_cpu_act_init(trirun_act* act, void* memory, size_t bytes, int64_t m, int64_t k, int act_bits) {
  const size_t needed = trirun_cpu_act_bytes(m, k, act_bits);
  if (!needed) return TRIRUN_BAD_SHAPE;
  if (!act || !memory || (reinterpret_cast<uintptr_t>(memory) & 63)) return TRIRUN_BAD_POINTER;
  if (bytes < needed) return TRIRUN_NO_WORKSPACE;
  char* next = static_cast<char*>(memory);
  act->digits = reinterpret_cast<int8_t*>(next);
  next += m * (act_bits / 8) * k;
  act->scales = reinterpret_cast<float*>(next);
  next += ((act_bits == 8 ? m : m * (k / 128)) + 15) / 16 * 64;
  act->sums = reinterpret_cast<int32_t*>(next);
  act->m = m;
  act->k = k;
  act->act_bits = act_bits;
  return TRIRUN_OK;
}

TRIRUN_EXPORT int trirun_cpu_quantize(trirun_act* act, const void* x, int dtype, int64_t k, int64_t ldx, int threads) {
  if (int error = check_act(act)) return error;
  if (act->m == 0) return TRIRUN_OK;
  if (!x) return TRIRUN_BAD_POINTER;
  if (k <= 0 || k > act->k || ldx < k || threads < 1) return TRIRUN_BAD_SHAPE;
  if (bad_dtype(dtype)) return TRIRUN_UNSUPPORTED;
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
  if (act->k != w->k || ldy < n || threads < 1) return TRIRUN_BAD_SHAPE;
  if (bad_dtype(dtype)) return TRIRUN_UNSUPPORTED;
  if (act->m == 0) return TRIRUN_OK;
  if (!y) return TRIRUN_BAD_POINTER;
  return gemm(w, n, act, nullptr, dtype, 0, 0, bias, y, ldy, threads);
}

TRIRUN_EXPORT int trirun_cpu_int2_gemm(const trirun_int2* w, int64_t n, int64_t k, const void* x, int dtype, int64_t m,
                                       int64_t ldx, const void* bias, void* y, int64_t ldy, int act_bits, int threads) {
  if (int error = check_weight(w, n)) return error;
  if (k <= 0 || k > w->k || m < 0 || m > kMaxSize || ldx < k || ldy < n || threads < 1) return TRIRUN_BAD_SHAPE;
  if (bad_dtype(dtype) || (act_bits != TRIRUN_ACT8 && act_bits != TRIRUN_ACT16)) return TRIRUN_UNSUPPORTED;
  if (m == 0) return TRIRUN_OK;
  if (!x || !y) return TRIRUN_BAD_POINTER;
  const size_t bytes = trirun_cpu_act_bytes(m, w->k, act_bits);
  void* memory = scratch(kScratchActivations, static_cast<int64_t>(bytes));
  if (!memory) return TRIRUN_NO_WORKSPACE;
  trirun_act act;
  if (int error = trirun_cpu_act_init(&act, memory, bytes, m, w->k, act_bits)) return error;
  return gemm(w, n, &act, x, dtype, k, ldx, bias, y, ldy, threads);
}
