// Keys and values of a cache of 8-bit elements: a head of a token is int8 [head_dim rounded up to 16], with one scale
// for its key and one for its value, so that an element's step is 1/127 of the largest beside it. Keys of language
// models have a few dimensions that are many times as large as the rest: they and the queries are mixed by a Hadamard
// matrix first (Ashkboos et al. 2024, "QuaRot"), which changes no score and leaves no dimension larger than the others.
#pragma once

#include "cuda/common/activations.cuh"
#include "heads.cuh"

namespace trirun::decoder {

constexpr float INT8_MAX_CODE = 127.f;

// Bytes of a head of one token, a whole number of 16-byte loads.
__host__ __device__ __forceinline__ int int8_row_bytes(int head_dim) { return (head_dim + 15) / 16 * 16; }

// One token of one head, of a warp: lane l holds dimensions 4(l + 32 i) to 4(l + 32 i) + 3 in word i.
template <int WORDS>
struct Int8Token {
  uint32_t key[WORDS], value[WORDS];
  __half2 scales;  // of the key, of the value
};

// Sums and differences of two elements each, 1, 2, 4, ... below `end` apart: of lanes, and of a lane's own. Over all of
// 2^n elements that is a Hadamard matrix, which 2^(-n/2) makes orthogonal.
template <int PER_LANE>
__device__ __forceinline__ void mix_lanes(float (&v)[PER_LANE], int end) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    if (offset >= end) break;
    const float sign = lane & offset ? -1.f : 1.f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) v[j] = fmaf(v[j], sign, __shfl_xor_sync(~0u, v[j], offset));
  }
}
template <int PER_LANE>
__device__ __forceinline__ void mix_own(float (&v)[PER_LANE], int end) {
#pragma unroll
  for (int step = 1; step < PER_LANE; step *= 2) {
    if (step >= end) break;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
      if (!(j & step)) {
        const float low = v[j], high = v[j + step];
        v[j] = low + high, v[j + step] = low - high;
      }
  }
}

// Multiplies a head, as HeadConstants has it, by the orthogonal Hadamard matrix, in blocks of the largest power of two
// that divides head_dim.
template <int PER_LANE>
__device__ __forceinline__ void mix(float (&v)[PER_LANE], int head_dim) {
  const int block = head_dim & -head_dim;
  mix_lanes(v, block);
  mix_own(v, (block + 31) / 32);
  const float scale = rsqrtf(static_cast<float>(block));
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) v[j] *= scale;
}

// The same of a head of a warp's own in shared memory.
template <int PER_LANE>
__device__ __forceinline__ void mix_head(float* values, int head_dim) {
  const int lane = threadIdx.x % 32;
  float v[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) v[j] = lane + j * 32 < head_dim ? values[lane + j * 32] : 0.f;
  mix(v, head_dim);
#pragma unroll
  for (int j = 0; j < PER_LANE; j++)
    if (lane + j * 32 < head_dim) values[lane + j * 32] = v[j];
  __syncwarp();
}

// The scale is rounded up, so that no code leaves -127..127; a NaN or an infinity becomes a scale that is not a number
// or not finite, and reaches whatever attends to the token. largest: bits of the largest magnitude.
template <int WORDS>
__device__ __forceinline__ __half quantize_head(uint32_t (&words)[WORDS], const float4 (&v)[WORDS], uint32_t largest) {
  const __half rounded = __float2half_ru(quotient_of(__uint_as_float(largest), INT8_MAX_CODE, 1.f / INT8_MAX_CODE));
  const float scale = __half2float(rounded), about = reciprocal_approximate(scale);
  const float inverse = fmaf(fmaf(-scale, about, 1.f), about, about);  // as a division rounds it, too
  const bool number = __float_as_uint(scale) - 1 < 0x7f7fffffu;  // above 0, and finite
  const auto code = [&](float value) { return __float_as_uint(__fmul_rn(value, inverse) + ROUNDER); };
#pragma unroll
  for (int i = 0; i < WORDS; i++)
    words[i] = number ? low_bytes(code(v[i].x), code(v[i].y), code(v[i].z), code(v[i].w)) : 0;
  return rounded;
}
template <int WORDS>
__device__ __forceinline__ uint32_t largest_of_head(const float4 (&v)[WORDS]) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < WORDS; i++) bits = max(bits, magnitude_bits(v[i]));
  return __reduce_max_sync(~0u, bits);
}

// From a rotated and mixed key in shared memory (16-byte aligned, complete for this warp) and a 16-bit value, which
// goes through a norm if there is one.
template <bool BF16, int WORDS>
__device__ __forceinline__ Int8Token<WORDS> quantize_token(const float* key, const uint16_t* value, int head_dim,
                                                           const float* value_norm, float eps) {
  const int lane = threadIdx.x % 32;
  float4 k[WORDS], v[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const int d = 4 * (lane + 32 * i);
    k[i] = v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (d < head_dim) {
      const uint2 pair = *reinterpret_cast<const uint2*>(value + d);
      const float2 low = widen_pair<BF16>(pair.x), high = widen_pair<BF16>(pair.y);
      k[i] = *reinterpret_cast<const float4*>(key + d);
      v[i] = make_float4(low.x, low.y, high.x, high.y);
    }
  }
  if (value_norm != nullptr) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < WORDS; i++) sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    const float inverse = rsqrtf(warp_sum(sum) / head_dim + eps);
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const float* weight = value_norm + 4 * (lane + 32 * i);
      if (4 * (lane + 32 * i) < head_dim)
        v[i] = make_float4(v[i].x * inverse * weight[0], v[i].y * inverse * weight[1], v[i].z * inverse * weight[2],
                           v[i].w * inverse * weight[3]);
    }
  }
  Int8Token<WORDS> token;
  const __half key_scale = quantize_head(token.key, k, largest_of_head(k));
  const __half value_scale = quantize_head(token.value, v, largest_of_head(v));
  token.scales = __halves2half2(key_scale, value_scale);
  return token;
}

template <int WORDS>
__device__ __forceinline__ void store_token(const trirun_attention& t, const Int8Token<WORDS>& token, int page,
                                            int kv_head, int position) {
  const int lane = threadIdx.x % 32, bytes = int8_row_bytes(t.head_dim);
  const int64_t at = cache_offset(page, t.kv_heads, kv_head, position, 1);
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const int d = 4 * (lane + 32 * i);
    if (d >= bytes) break;
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(t.keys) + at * bytes + d) = token.key[i];
    *reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(t.values) + at * bytes + d) = token.value[i];
  }
  if (lane == 0) static_cast<__half2*>(t.scales)[at] = token.scales;
}

// The same, read back past L1, which may have what lay there before; zeros beyond the head.
template <int WORDS>
__device__ __forceinline__ Int8Token<WORDS> load_token(const trirun_attention& t, int page, int kv_head, int position) {
  const int lane = threadIdx.x % 32, bytes = int8_row_bytes(t.head_dim);
  const int64_t at = cache_offset(page, t.kv_heads, kv_head, position, 1);
  Int8Token<WORDS> token;
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const int d = 4 * (lane + 32 * i);
    token.key[i] = token.value[i] = 0;
    if (d >= bytes) continue;
    token.key[i] = __ldcg(reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(t.keys) + at * bytes + d));
    token.value[i] = __ldcg(reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(t.values) + at * bytes + d));
  }
  token.scales = __ldcg(static_cast<const __half2*>(t.scales) + at);
  return token;
}

}  // namespace trirun::decoder
