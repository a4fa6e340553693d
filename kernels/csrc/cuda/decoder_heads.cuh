// One head of one row: its optional RMS norm and its rotary embedding, by one warp, through shared memory.
#pragma once

#include "decoder_launch.cuh"

namespace trirun {

constexpr int MAX_HEAD_DIM = 256;
constexpr int PAGE = 64;  // positions of one page of the cache

// values[head_dim] (shared memory, this warp's own) = rotate(norm(x[head_dim])) * scale. The rotation turns the pairs
// (i, i + half) by the angle of `position`; dimensions from 2 * half on stay as they are.
template <bool BF16>
__device__ __forceinline__ void prepare_head(float* values, const uint16_t* x, int head_dim, const float* norm,
                                             float eps, const float* cosines, const float* sines, int half,
                                             float scale) {
  const int lane = threadIdx.x % 32;
  constexpr int PER_LANE = MAX_HEAD_DIM / 32;
  float v[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const int d = lane + j * 32;
    v[j] = d < head_dim ? widen_one<BF16>(x[d]) : 0.f;
  }
  if (norm != nullptr) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) sum += v[j] * v[j];
    const float inverse = rsqrtf(warp_sum(sum) / head_dim + eps);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
      if (lane + j * 32 < head_dim) v[j] *= inverse * norm[lane + j * 32];
  }
#pragma unroll
  for (int j = 0; j < PER_LANE; j++)
    if (lane + j * 32 < head_dim) values[lane + j * 32] = v[j];
  __syncwarp();
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const int d = lane + j * 32;
    if (d < half) {
      v[j] = v[j] * cosines[d] - values[d + half] * sines[d];
    } else if (d < 2 * half) {
      v[j] = v[j] * cosines[d - half] + values[d - half] * sines[d - half];
    }
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < PER_LANE; j++)
    if (lane + j * 32 < head_dim) values[lane + j * 32] = v[j] * scale;
  __syncwarp();
}

// Where position p of a slot lies in the keys or values of a layer: [pages][kv_heads][PAGE][head_dim].
__device__ __forceinline__ int64_t cache_offset(int page, int kv_heads, int kv_head, int position, int head_dim) {
  return ((static_cast<int64_t>(page) * kv_heads + kv_head) * PAGE + position % PAGE) * head_dim;
}

}  // namespace trirun
