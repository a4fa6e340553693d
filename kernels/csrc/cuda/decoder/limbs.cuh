// Where decoder kernels leave rows that they have quantized: the buffer of activations.cuh; and what rows may be.
#pragma once

#include "cuda/common/activations.cuh"

namespace trirun::decoder {

// TRIRUN_OK, or what is wrong with rows, of which there is at least one (rows.cu).
int check_rows(const trirun_rows& rows);

struct LimbRows {
  uint8_t* limbs = nullptr;  // null: the rows are not wanted quantized
  float2* scales = nullptr;
  float4* sums = nullptr;
  int tokens = 0, columns = 0, k_tiles = 0;

  LimbRows() = default;
  LimbRows(void* buffer, int64_t m, int64_t k_pad, int act_bits) {
    const ActivationLayout layout(m, k_pad, act_bits);
    limbs = static_cast<uint8_t*>(buffer);
    scales = reinterpret_cast<float2*>(limbs + layout.scales_offset);
    sums = reinterpret_cast<float4*>(limbs + layout.sums_offset);
    tokens = layout.tokens, columns = layout.columns, k_tiles = static_cast<int>(layout.k_tiles);
  }

  // One warp's 128 columns of a row, in one limb or two.
  __device__ __forceinline__ void store(const QuantizedKTile& q, int row, int k_tile, bool two) const {
    const int lane = threadIdx.x % 32;
    uint8_t* block =
        limbs + (static_cast<int64_t>(k_tile * 8 + lane / 4) * columns + row * (two ? 2 : 1)) * 16 + lane % 4 * 4;
    *reinterpret_cast<uint32_t*>(block) = q.limb[0];
    if (two) *reinterpret_cast<uint32_t*>(block + 16) = q.limb[1];
    const int64_t cell = static_cast<int64_t>(k_tile) * tokens + row;
    const float sum128 = q.sum128(), sum32 = q.sum32();
    if (lane == 0) scales[cell] = make_float2(q.scale, sum128);
    if (lane % 8 == 0) reinterpret_cast<float*>(sums + cell)[lane / 8] = sum32;
  }
};

}  // namespace trirun::decoder
