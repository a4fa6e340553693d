// Rows of an embedding by their tokens.
#pragma once

#include <cuda_fp16.h>

#include "trirun.h"

namespace trirun::decoder {

// A row without a token of its own goes on with the one its slot sampled last; one without a slot is padding.
__device__ __forceinline__ int token_of(int token, int slot, const int32_t* latest, int64_t vocab) {
  if (token < 0 && slot >= 0 && latest != nullptr) token = latest[slot];
  return token < 0 || token >= vocab ? 0 : token;
}

// Columns `column` + {0, 1, 8, 9} of a token's row, where `column` is a lane's own: one word of tile64, a byte each.
__device__ __forceinline__ float4 load_packed(const trirun_int2& w, int token, int column) {
  const int n_tile = token / 64, j = token % 64 / 16, h = token % 16 / 8, r = token % 8;
  const int64_t block = static_cast<int64_t>(n_tile) * (w.k / 32) + column / 32;
  const uint32_t word = w.words[block * 128 + 16 * r + 4 * (column % 8 / 2) + 2 * (column % 32 / 16) + h] >> (2 * j);
  const int64_t group = w.group_size > 0 ? column / w.group_size : 0;
  const int64_t at = group * w.n + n_tile * 64 + 8 * r + 2 * j + h;
  const float scale = __half2float(__ushort_as_half(w.scales[at]));
  const float zero = w.zeros != nullptr ? __half2float(__ushort_as_half(w.zeros[at])) : w.zero;
  const auto value = [&](int byte) { return scale * (static_cast<float>(word >> (8 * byte) & 3) - zero); };
  return make_float4(value(0), value(1), value(2), value(3));
}

}  // namespace trirun::decoder
