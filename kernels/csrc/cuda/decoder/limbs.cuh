// Where decoder kernels leave rows that they have quantized: the buffer of activations.cuh.
#pragma once

#include "cuda/common/activations.cuh"

namespace trirun {

struct DigitRows {
  uint8_t* digits = nullptr;  // null: the rows are not wanted quantized
  float2* scales = nullptr;
  float4* sums = nullptr;
  int tokens = 0, columns = 0, units = 0;

  DigitRows() = default;
  DigitRows(void* buffer, int64_t m, int64_t k_pad, int act_bits) {
    const ActivationLayout layout(m, k_pad, act_bits);
    digits = static_cast<uint8_t*>(buffer);
    scales = reinterpret_cast<float2*>(digits + layout.scales_offset);
    sums = reinterpret_cast<float4*>(digits + layout.sums_offset);
    tokens = layout.tokens, columns = layout.columns, units = static_cast<int>(layout.units);
  }

  // One warp's 128 columns of a row, in one digit or two.
  __device__ __forceinline__ void store(const QuantizedUnit& q, int row, int unit, bool two) const {
    const int lane = threadIdx.x % 32;
    uint8_t* block =
        digits + (static_cast<int64_t>(unit * 8 + lane / 4) * columns + row * (two ? 2 : 1)) * 16 + lane % 4 * 4;
    *reinterpret_cast<uint32_t*>(block) = q.digit[0];
    if (two) *reinterpret_cast<uint32_t*>(block + 16) = q.digit[1];
    const int64_t cell = static_cast<int64_t>(unit) * tokens + row;
    const float sum128 = q.sum128(), sum32 = q.sum32();
    if (lane == 0) scales[cell] = make_float2(q.scale, sum128);
    if (lane % 8 == 0) reinterpret_cast<float*>(sums + cell)[lane / 8] = sum32;
  }
};

}  // namespace trirun
