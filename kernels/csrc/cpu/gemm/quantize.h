/* The rule by which activations become int8 limbs, for every instruction set and for the decoder's 8-bit output head.
 *
 * 8 bits, per row: scale = max(amax, kAmaxFloor8) / 127, limb = round(x / scale), a true division (BitNet b1.58, Ma et
 * al. 2024, section 2). 16 bits, per 128 columns: 256 high + low = round(x * (kRange16 / amax)), scale = amax /
 * kRange16, with amax at least kAmaxFloor16. Halves go to the even neighbour. */
#ifndef TRIRUN_CPU_QUANTIZE_H
#define TRIRUN_CPU_QUANTIZE_H

#include "isa.h"
#include "cpu/common/numbers.h"

namespace trirun {
namespace {

constexpr float kRange8 = 127, kAmaxFloor8 = 1e-5f;

/* The largest 256 high + low with both limbs in -128..127, high at most 127: 256 * 127 + 127. */
constexpr float kRange16 = 32639;

/* Keeps the inverse finite; what lies below is zero in every type's product. */
constexpr float kAmaxFloor16 = 1e-30f;

/* The bits of a float's magnitude from which on it is an infinity or a NaN. */
constexpr uint32_t kNotFinite = 0x7f800000;

/* Rows [begin, end) of x by an instruction set's functions for one row: f(act, x's row, dtype, k, row). */
template <class Row8, class Row16>
inline void quantize_rows(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t ldx, int64_t begin,
                          int64_t end, Row8&& row8, Row16&& row16) {
  for (int64_t row = begin; row < end; ++row) {
    const void* start = static_cast<const char*>(x) + row * ldx * bytes_of(dtype);
    if (act.act_bits == 8)
      row8(act, start, dtype, k, row);
    else
      row16(act, start, dtype, k, row);
  }
}

}  // namespace

/* Isa::quantize of two instruction sets, whose products are in other sources. */
void quantize_avx2(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t ldx, int64_t begin, int64_t end);
void quantize_avx512(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t ldx, int64_t begin,
                     int64_t end);

}  // namespace trirun
#endif
