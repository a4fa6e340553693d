/* One row of a packed weight: what looking up a token in a packed embedding reads. */
#ifndef TRIRUN_CPU_UNPACK_ROW_H
#define TRIRUN_CPU_UNPACK_ROW_H

#include "cpu/common/numbers.h"
#include "cpu/gemm/isa.h"

namespace trirun {
namespace {

/* x[k] = row `row` of w, k its true width: scale * (code - zero) in fp32. Of every block of 32 columns the row's codes
 * are two bits of each byte of eight words, every other word of the 64 bytes that eight rows of a lane share. */
inline void unpack_row(float* x, const trirun_int2& w, int64_t row, int64_t k) {
  const int64_t n_tile = row / kTileN, j = row % kTileN / 16, h = row % 16 / 8, r = row % 8;
  const int64_t place = n_tile * kTileN + 8 * r + 2 * j + h;
  const int64_t group_size = w.group_size > 0 ? w.group_size : w.k;
  const uint32_t* block = w.words + n_tile * (w.k / 32) * 128 + 16 * r + h;
  for (int64_t first = 0; first < k; first += 32, block += 128) {
    const int64_t at = first / group_size * w.n + place;
    const float scale = half_to_float(w.scales[at]), zero = w.zeros ? half_to_float(w.zeros[at]) : w.zero;
    float values[4];
    for (int code = 0; code < 4; ++code) values[code] = scale * (static_cast<float>(code) - zero);
    for (int64_t c = 0; c < 2 && first + 16 * c < k; ++c)
      for (int64_t t = 0; t < 4; ++t) {
        const uint32_t word = block[4 * t + 2 * c] >> (2 * j);
        float* out = x + first + 16 * c + 2 * t;
        out[0] = values[word & 3];
        out[1] = values[word >> 8 & 3];
        out[8] = values[word >> 16 & 3];
        out[9] = values[word >> 24 & 3];
      }
  }
}

}  // namespace
}  // namespace trirun
#endif
