/* What an instruction set implements, and the arithmetic they all share. Internal to libtrirun_cpu.so.
 *
 * Every instruction set computes the same numbers, bit for bit, for any thread count and any number of rows. For one
 * row of x, one output n and the k steps in ascending order (a step is a group of the weight; without groups, 128 k
 * with 16-bit and kLongStep k with 8-bit activations):
 *
 *   dot = sum of q * limb, an exact int32, q = code                 (16 bits: 256 * dot_high + dot_low)
 *   t   = fma(-zero, float(sum of limbs), float(dot))               both conversions are exact
 *   u   = 16 bits: t * x_scale of the 128 columns, 8 bits: t
 *   acc = fma(u, w_scale, acc) with groups; without: 16 bits fma(t, x_scale, acc), 8 bits acc + t
 *
 * and at the end acc * x_scale (8 bits), acc * w_scale (no groups), + bias, one rounding to y's type.
 *
 * The weight is cut into n tiles of 64 rows. An n tile's k is unpacked a panel (a k tile) at a time.
 */
#ifndef TRIRUN_CPU_ISA_H
#define TRIRUN_CPU_ISA_H

#include <stdint.h>

#include "trirun.h"
#include "cpu/common/numbers.h"

namespace trirun {

constexpr int64_t kTileN = 64;     /* rows of the weight in an n tile */
constexpr int64_t kPaddedK = 128;  /* columns of weights and activations are padded to a multiple of this */

static inline int64_t n_tiles_of(int64_t n) { return (n + kTileN - 1) / kTileN; }

/* 3 * 128 * 2^15 < 2^24: a longer step could round when it is converted to float. */
constexpr int64_t kLongStep = 32768;

/* One product: everything a kernel needs to compute rows [0, act->m) of y for any range of n tiles. */
struct Int2Job {
  const trirun_int2* w;
  const trirun_act* act;
  int64_t n;         /* true n: columns from here on exist in w, not in y */
  const void* bias;  /* [n] of dtype, or null */
  void* y;           /* [m][ldy] of dtype */
  int64_t ldy;
  int dtype;
};

/* TRIRUN_OK, or what is wrong with a weight whose first n rows are wanted. */
static inline int check_weight(const trirun_int2* w, int64_t n) {
  if (!w || !is_array(w->words, 16) || !is_array(w->scales, 2) || !is_aligned(w->zeros, 2)) return TRIRUN_BAD_POINTER;
  if (!is_size(w->n) || !is_size(w->k) || w->n % kTileN || w->k % kPaddedK) return TRIRUN_BAD_SHAPE;
  if (n <= 0 || n > w->n || !fits(w->n, w->k)) return TRIRUN_BAD_SHAPE;
  const int32_t g = w->group_size;
  return g == -1 || g == 32 || g == 64 || g == 128 ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

/* k columns per step of the fp32 accumulation above. */
static inline int64_t step_of(const trirun_int2& w, int act_bits) {
  return w.group_size > 0 ? w.group_size : act_bits == 8 ? kLongStep : 128;
}

/* n tiles [begin, end) of a product's weight. */
struct Int2Part {
  Int2Job job;
  int64_t begin, end;
};

struct Isa {
  const char* name;
  /* Limbs, scales and sums of rows [begin, end) of act from x[.][k] of dtype; x points at row 0. */
  void (*quantize)(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t ldx, int64_t begin, int64_t end);
  /* All rows of y, columns of n tiles [begin, end) of the weight. False when memory has run out. */
  bool (*int2_gemm)(const Int2Job& job, int64_t begin, int64_t end);
  /* The same of several products that read one act with weights of one k and group size, n tiles of different weights
   * side by side; null where nothing is gained by that. */
  bool (*int2_gemm_parts)(const Int2Part* parts, int count);
};

/* One table per instruction set; constants, so that nothing compiled for it runs before the machine is known to have
 * it. The name is null where the compiler or the processor's family lacks it. */
extern const Isa kPortable, kAvx2, kAvx512Vnni, kAmx;

/* The instruction set in use. */
const Isa& isa();

/* Chooses one by name for every later call, the machine's best for null or "". False where the machine lacks it. */
bool set_isa(const char* name);

}  // namespace trirun
#endif
