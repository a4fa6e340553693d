// One head of one row: its optional RMS norm and its rotary embedding, by one warp, through shared memory.
#pragma once

#include "launch.cuh"

namespace trirun::decoder {

constexpr int MAX_HEAD_DIM = 512, MAX_INT8_HEAD_DIM = 256, MAX_SPLITS = 256;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int PAGE = 64;  // positions of one page of the cache

// A warp's part of one head: lane l holds dimensions l, l + 32, ... The angles and the norm are constants of the step,
// so they can be asked for before the head itself is there.
template <int PER_LANE>
struct HeadConstants {
  float cosine[PER_LANE], sine[PER_LANE], weight[PER_LANE];

  __device__ __forceinline__ void load(const float* cosines, const float* sines, const float* norm, int half,
                                       int head_dim, bool interleaved, int lane = threadIdx.x % 32) {
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      const int d = lane + j * 32, pair = interleaved ? d / 2 : d < half ? d : d - half;
      cosine[j] = 1.f, sine[j] = 0.f, weight[j] = 1.f;
      if (d < 2 * half) {
        cosine[j] = __ldg(cosines + pair), sine[j] = __ldg(sines + pair);
        if (interleaved ? d % 2 == 0 : d < half) sine[j] = -sine[j];
      }
      if (norm != nullptr && d < head_dim) weight[j] = __ldg(norm + d);
    }
  }
};

// One dimension of a rotated pair; rounded in the same way wherever it is computed.
__device__ __forceinline__ float rotated(float v, float cosine, float other, float sine) {
  return fmaf(v, cosine, __fmul_rn(other, sine));
}

// v = rotate(norm(v)) of one head, as HeadConstants has it. The rotation turns the pairs (i, i + half), or (2i, 2i + 1)
// where they are interleaved; dimensions from 2 * half on stay. scratch: [head_dim] of shared memory, this warp's own.
template <int PER_LANE>
__device__ __forceinline__ void turn(float (&v)[PER_LANE], float* scratch, const HeadConstants<PER_LANE>& c,
                                     int head_dim, bool normed, float eps, int half, bool interleaved,
                                     int lane = threadIdx.x % 32) {
  if (normed) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) sum += v[j] * v[j];
    const float inverse = rsqrtf(warp_sum(sum) / head_dim + eps);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) v[j] *= inverse * c.weight[j];
  }
  if (PER_LANE > 1 && 2 * half == PER_LANE * 32 && !interleaved) {
    // The other half of every pair is in the same lane.
    float turned[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) turned[j] = rotated(v[j], c.cosine[j], v[j ^ PER_LANE / 2], c.sine[j]);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) v[j] = turned[j];
  } else if (half > 0) {
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
      if (lane + j * 32 < head_dim) scratch[lane + j * 32] = v[j];
    __syncwarp();
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      const int d = lane + j * 32;
      const int other = interleaved ? d ^ 1 : d < half ? d + half : d - half;
      if (d < 2 * half) v[j] = rotated(v[j], c.cosine[j], scratch[other], c.sine[j]);
    }
    __syncwarp();
  }
}

// values[head_dim] (shared memory, this warp's own) = the same, times scale.
template <int PER_LANE>
__device__ __forceinline__ void turn_head(float* values, float (&v)[PER_LANE], const HeadConstants<PER_LANE>& c,
                                          int head_dim, bool normed, float eps, int half, bool interleaved,
                                          float scale) {
  const int lane = threadIdx.x % 32;
  turn(v, values, c, head_dim, normed, eps, half, interleaved);
#pragma unroll
  for (int j = 0; j < PER_LANE; j++)
    if (lane + j * 32 < head_dim) values[lane + j * 32] = v[j] * scale;
  __syncwarp();
}

// The same of a head where it is, in shared memory.
template <int PER_LANE>
__device__ __forceinline__ void turn_head(float* values, const HeadConstants<PER_LANE>& c, int head_dim, bool normed,
                                          float eps, int half, bool interleaved, float scale) {
  const int lane = threadIdx.x % 32;
  float v[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) v[j] = lane + j * 32 < head_dim ? values[lane + j * 32] : 0.f;
  __syncwarp();
  turn_head(values, v, c, head_dim, normed, eps, half, interleaved, scale);
}

// A head of 16-bit values, as HeadConstants has it.
template <bool BF16, int PER_LANE>
__device__ __forceinline__ void load_head(float (&v)[PER_LANE], const uint16_t* x, int head_dim) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) v[j] = lane + j * 32 < head_dim ? widen_one<BF16>(x[lane + j * 32]) : 0.f;
}

// turn_head of such a head.
template <bool BF16, int PER_LANE>
__device__ __forceinline__ void prepare_head(float* values, const uint16_t* x, const HeadConstants<PER_LANE>& c,
                                             int head_dim, bool normed, float eps, int half, bool interleaved,
                                             float scale) {
  float v[PER_LANE];
  load_head<BF16>(v, x, head_dim);
  turn_head(values, v, c, head_dim, normed, eps, half, interleaved, scale);
}

// The value head of a row through the norm of values, as HeadConstants has it.
template <int PER_LANE>
__device__ __forceinline__ void norm_value(float (&v)[PER_LANE], const float* norm, int head_dim, float eps) {
  const int lane = threadIdx.x % 32;
  float sum = 0.f;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) sum += v[j] * v[j];
  const float inverse = rsqrtf(warp_sum(sum) / head_dim + eps);
#pragma unroll
  for (int j = 0; j < PER_LANE; j++)
    if (lane + j * 32 < head_dim) v[j] *= inverse * __ldg(norm + lane + j * 32);
}

// Where position p of a slot lies in the keys or values of a layer: [pages][kv_heads][PAGE][head_dim].
__device__ __forceinline__ int64_t cache_offset(int page, int kv_heads, int kv_head, int position, int head_dim) {
  return ((static_cast<int64_t>(page) * kv_heads + kv_head) * PAGE + position % PAGE) * head_dim;
}

// Checks what would corrupt memory.
inline int check_attention(const trirun_attention* t) {
  if (t == nullptr) return TRIRUN_BAD_POINTER;
  if (t->m < 0 || t->m > 65535 || t->heads <= 0 || t->kv_heads <= 0 || t->heads % t->kv_heads || t->head_dim <= 0 ||
      t->head_dim % 8 || t->head_dim > MAX_HEAD_DIM || t->rotary_half < 0 || 2 * t->rotary_half > t->head_dim ||
      t->splits < 1 || t->splits > MAX_SPLITS || t->ld_q < t->heads * t->head_dim || t->ld_y < t->heads * t->head_dim ||
      t->ld_blocks <= 0 || t->window < 0)
    return TRIRUN_BAD_SHAPE;
  if (!half_dtype(t->dtype) || (t->scales != nullptr && t->head_dim > MAX_INT8_HEAD_DIM)) return TRIRUN_UNSUPPORTED;
  for (const void* p : {t->q, static_cast<const void*>(t->keys), static_cast<const void*>(t->values)})
    if (p == nullptr || !aligned_to(p, 16)) return TRIRUN_BAD_POINTER;
  if ((t->k == nullptr) != (t->v == nullptr) || !aligned_to(t->k, 16) || !aligned_to(t->v, 16) ||
      !aligned_to(t->scales, 4))
    return TRIRUN_BAD_POINTER;
  if (t->k != nullptr && (t->ld_kv < t->kv_heads * t->head_dim || t->ld_kv % 8)) return TRIRUN_BAD_SHAPE;
  if (t->k == nullptr && (t->k_norm != nullptr || t->v_norm != nullptr)) return TRIRUN_BAD_POINTER;
  if ((t->y == nullptr && t->activations == nullptr) || !aligned_to(t->y, 2) || !aligned_to(t->activations, 256))
    return TRIRUN_BAD_POINTER;
  if (t->block_tables == nullptr || t->slots == nullptr || t->positions == nullptr ||
      (t->rotary_half > 0 && (t->cosines == nullptr || t->sines == nullptr)))
    return TRIRUN_BAD_POINTER;
  return TRIRUN_OK;
}

}  // namespace trirun::decoder
