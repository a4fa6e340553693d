/* What an instruction set implements, and the arithmetic they all share. Internal to libtrirun_cpu.so.
 *
 * Every instruction set computes the same numbers, bit for bit, for any thread count and any number of rows. For one
 * row of x, one output n and the k steps in ascending order (a step is a group of the weight; without groups, 128 k
 * with 16-bit and kLongStep k with 8-bit activations):
 *
 *   dot = sum of q * digit, an exact int32, q = code                 (16 bits: 256 * dot_hi + dot_lo)
 *   t   = fma(-zero, float(sum of digits), float(dot))               both conversions are exact
 *   u   = 16 bits: t * x_scale of the 128 columns, 8 bits: t
 *   acc = fma(u, w_scale, acc) with groups; without: 16 bits fma(t, x_scale, acc), 8 bits acc + t
 *
 * and at the end acc * x_scale (8 bits), acc * w_scale (no groups), + bias, one rounding to y's type.
 */
#ifndef TRIRUN_CPU_KERNELS_H
#define TRIRUN_CPU_KERNELS_H

#include <stdint.h>

#include "trirun.h"

namespace trirun {

/* 3 * 128 * 2^15 < 2^24: a longer step could round when it is converted to float. */
constexpr int64_t kLongStep = 32768;

/* One product: everything a kernel needs to compute rows [0, act->m) of y for any range of weight strips. */
struct Int2Job {
  const trirun_int2* w;
  const trirun_act* act;
  int64_t n;         /* true n: columns from here on exist in w, not in y */
  const void* bias;  /* [n] of dtype, or null */
  void* y;           /* [m][ldy] of dtype */
  int64_t ldy;
  int dtype;
};

/* k columns per step of the fp32 accumulation above. */
static inline int64_t step_of(const trirun_int2& w, int act_bits) {
  return w.group_size > 0 ? w.group_size : act_bits == 8 ? kLongStep : 128;
}

/* Strips [begin, end) of a product's weight. */
struct Int2Part {
  Int2Job job;
  int64_t begin, end;
};

struct Isa {
  const char* name;
  /* Digits, scales and sums of rows [begin, end) of act from x[.][k] of dtype; x points at row 0. */
  void (*quantize)(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t ldx, int64_t begin, int64_t end);
  /* All rows of y, columns of the 64-row strips [begin, end) of the weight. False when memory has run out. */
  bool (*int2_gemm)(const Int2Job& job, int64_t begin, int64_t end);
  /* The same of several products that read one act with weights of one k and group size, strips of different weights
   * side by side; null where nothing is gained by that. */
  bool (*int2_gemm_parts)(const Int2Part* parts, int count);
};

/* The instruction set in use. */
const Isa& isa();

/* One table per instruction set; constants, so that nothing compiled for it runs before the machine is known to have
 * it. The name is null where the compiler or the processor's family lacks it. */
extern const Isa kPortable, kAvx2, kAvx512Vnni, kAmx;

}  // namespace trirun
#endif
