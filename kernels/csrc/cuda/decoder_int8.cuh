// Keys and values of a cache of 8-bit elements: a head of a token is int8 [head_dim rounded up to 16], with one scale
// for its key and one for its value. Keys of a head differ most between dimensions and tokens, least within a token
// once they are rotated: one scale per token and head keeps an element's step at 1/127 of the largest beside it.
#pragma once

#include "activations.cuh"
#include "decoder_heads.cuh"

namespace trirun {

constexpr float INT8_MAX_CODE = 127.f;

// Bytes of a head of one token, a whole number of 16-byte loads.
__host__ __device__ __forceinline__ int int8_row_bytes(int head_dim) { return (head_dim + 15) / 16 * 16; }

// One token of one head, of a warp: lane l holds dimensions 4(l + 32 i) to 4(l + 32 i) + 3 in word i.
template <int WORDS>
struct Int8Token {
  uint32_t key[WORDS], value[WORDS];
  __half2 scales;  // of the key, of the value
};

// The scale is rounded up, so that no code leaves -127..127; a NaN or an infinity becomes a scale that is not a number
// or not finite, and reaches whatever attends to the token.
template <int WORDS>
__device__ __forceinline__ __half quantize_head(uint32_t (&words)[WORDS], const float4 (&v)[WORDS]) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < WORDS; i++) bits = max(bits, magnitude_bits(v[i]));
  const __half rounded = __float2half_ru(__fdiv_rn(__uint_as_float(__reduce_max_sync(~0u, bits)), INT8_MAX_CODE));
  const float scale = __half2float(rounded);
#pragma unroll
  for (int i = 0; i < WORDS; i++) {
    const float f[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
    words[i] = 0;
#pragma unroll
    for (int b = 0; b < 4; b++) {
      // Of zeros the quotient is NaN, which as an integer is 0.
      const int code = min(max(__float2int_rn(__fdiv_rn(f[b], scale)), -127), 127);
      words[i] |= static_cast<uint32_t>(code & 255) << 8 * b;
    }
  }
  return rounded;
}

// From a rotated key in shared memory (16-byte aligned, complete for this warp) and a 16-bit value.
template <bool BF16, int WORDS>
__device__ __forceinline__ Int8Token<WORDS> quantize_token(const float* key, const uint16_t* value, int head_dim) {
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
  Int8Token<WORDS> token;
  const __half key_scale = quantize_head(token.key, k), value_scale = quantize_head(token.value, v);
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

}  // namespace trirun
