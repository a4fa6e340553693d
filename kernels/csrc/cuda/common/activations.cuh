// Quantized activations as the decode kernels read them: int8 limbs in tensor-core order, a scale and sums per 128
// columns.
//
//   x[token][k] ~ scale * (256 * high + low)   act_bits 16: two limbs, scale = amax of the row's 128 k / 32639
//   x[token][k] ~ scale * limb                 act_bits 8: one limb, scale = amax of the row / 127
//
// One buffer, three parts, tokens padded to `tokens` (zeros beyond m), columns = tokens * limbs:
//   limbs   int8   [k/32][c 2][columns][16]    column = token * limbs + limb (high first). The 16 bytes of half c hold
//                                              k % 16 = {0,1,8,9, 2,3,10,11, 4,5,12,13, 6,7,14,15}: tile64's order, so
//                                              lane (r, t) of mma finds its B register at column r, bytes 4t..4t+3; and
//                                              8 columns are one 128-byte core matrix of wgmma.
//   scales  float2 [k/128][tokens]             scale, and scale * (sum of the 128 integers)
//   sums    float4 [k/128][tokens]             scale * (sum of each 32 integers): zero points of groups of 32 and 64
#pragma once

#include "elements.cuh"
#include "ptx.cuh"

namespace trirun {

constexpr float ACT16_MAX = 32639.f;  // 127 * 256 + 127: the largest integer whose two balanced limbs are both s8
constexpr int K_TILE = 128;  // k of one scale of x, and of one stage of every decode kernel
// k whose int32 sum of products of a code, shifted by up to six bits, and one limb cannot overflow: 2^31 / (3 * 64 *
// 128), rounded down to whole k tiles.
constexpr int64_t EXACT_SUM_K = 87296;
constexpr int SPAN_K_TILES = 4;  // k tiles of a span, which may have one scale, so that int32 sums run on over them

__host__ __device__ inline int padded_tokens(int64_t m) {
  if (m > 16) return static_cast<int>((m + 15) / 16 * 16);
  int tokens = 2;
  while (tokens < m) tokens *= 2;
  return tokens;
}

struct ActivationLayout {
  int tokens, limbs, columns;
  int64_t k_tiles, scales_offset, sums_offset, bytes;  // offsets from the start of the buffer

  __host__ __device__ ActivationLayout(int64_t m, int64_t k_pad, int act_bits)
      : tokens(padded_tokens(m)), limbs(act_bits == TRIRUN_ACT16 ? 2 : 1), columns(tokens * limbs),
        k_tiles(k_pad / K_TILE) {
    scales_offset = k_pad * columns;
    sums_offset = scales_offset + k_tiles * tokens * 8;
    bytes = sums_offset + k_tiles * tokens * 16;
  }
};

// What one warp makes of 128 consecutive values of one row; lane 8*kb + 4*c + t holds the four values of (kb, c, t).
struct QuantizedKTile {
  uint32_t limb[2];  // four bytes each: high and low, or the one limb and nothing
  float scale;
  int sum;  // of this lane's four integers

  // scale * (sum over all 128), and over this lane's block of 32: integer sums, so the order does not matter.
  __device__ __forceinline__ float sum128() const { return scale * static_cast<float>(__reduce_add_sync(~0u, sum)); }
  __device__ __forceinline__ float sum32() const {
    int v = sum;
    v += __shfl_xor_sync(~0u, v, 1);
    v += __shfl_xor_sync(~0u, v, 2);
    v += __shfl_xor_sync(~0u, v, 4);
    return scale * static_cast<float>(v);
  }
};

// The four values of a lane: x[k0 + 32*kb + 16*c + {2t, 2t+1, 2t+8, 2t+9}], zero from column k on.
__device__ __forceinline__ float4 load_k_tile(const void* row, int64_t k0, int64_t k, int dtype, bool paired) {
  const int lane = threadIdx.x % 32;
  const int64_t i = k0 + (lane >> 3) * 32 + (lane >> 2 & 1) * 16 + (lane & 3) * 2;
  if (paired && i + 9 < k) {
    const float2 a = load_pair(row, i, dtype), b = load_pair(row, i + 8, dtype);
    return make_float4(a.x, a.y, b.x, b.y);
  }
  return make_float4(i < k ? load_element(row, i, dtype) : 0.f, i + 1 < k ? load_element(row, i + 1, dtype) : 0.f,
                     i + 8 < k ? load_element(row, i + 8, dtype) : 0.f,
                     i + 9 < k ? load_element(row, i + 9, dtype) : 0.f);
}

// The same four values of a 16-bit row as two words, k even and the row 4-byte aligned. at: the lane's first column.
__device__ __forceinline__ uint2 load_k_tile_paired16(const uint16_t* lane_row, int at, int k) {
  uint2 v = make_uint2(0, 0);
  if (at < k) v.x = __ldcg(reinterpret_cast<const unsigned*>(lane_row));
  if (at + 8 < k) v.y = __ldcg(reinterpret_cast<const unsigned*>(lane_row + 8));
  return v;
}

// Without a branch: both readings of the bits are cheaper than a second copy of the code around them.
__device__ __forceinline__ float4 widen(uint2 v, bool bf16) {
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&v.x));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&v.y));
  return make_float4(bf16 ? __uint_as_float(v.x << 16) : a.x, bf16 ? __uint_as_float(v.x & 0xffff0000u) : a.y,
                     bf16 ? __uint_as_float(v.y << 16) : b.x, bf16 ? __uint_as_float(v.y & 0xffff0000u) : b.y);
}

// The largest magnitude of a lane's four values, as the bits of a float: integer order is float order there, and a
// NaN is the largest of all, so it reaches the scale and poisons the row instead of vanishing.
__device__ __forceinline__ uint32_t magnitude_bits(float4 v) {
  const auto bits = [](float f) { return __float_as_uint(f) & 0x7fffffffu; };
  return max(max(bits(v.x), bits(v.y)), max(bits(v.z), bits(v.w)));
}

// The largest magnitude so far, and of one more word: as integers, which have the order of the magnitudes they are the
// bits of; infinities and NaN are above all others. A float32 (wide), or two values of 16 bits.
__device__ __forceinline__ uint32_t larger_bits(uint32_t most, uint32_t word, bool wide) {
  const uint32_t magnitude = word & (wide ? 0x7fffffffu : 0x7fff7fffu);
  return wide ? max(most, magnitude) : __vmaxu2(most, magnitude);
}

// What that comes to in the end, as the bits of a float.
__device__ __forceinline__ uint32_t largest_bits(uint32_t most, bool wide, bool bf16) {
  if (wide) return most;
  const uint32_t half = max(most & 0xffffu, most >> 16);
  return bf16 ? half << 16 : __float_as_uint(__half2float(__ushort_as_half(half)));
}

// 1.5 * 2^23: added to a float it rounds to an integer, half to even, and leaves that in the low bits.
constexpr float ROUNDER = 12582912.f;

// Byte 0 of four words.
__device__ __forceinline__ uint32_t low_bytes(uint32_t q0, uint32_t q1, uint32_t q2, uint32_t q3) {
  return __byte_perm(__byte_perm(q0, q1, 0x0040), __byte_perm(q2, q3, 0x0040), 0x5410);
}

// amax_bits: of the largest magnitude that shares the scale, this k tile's or a span's.
__device__ __forceinline__ QuantizedKTile quantize_k_tile16(float4 v, uint32_t amax_bits) {
  const float amax = __uint_as_float(amax_bits);
  // Below 1e-30 the inverse would overflow; such a group is zero beside anything else a layer computes.
  const bool vanishes = amax < 1e-30f;
  const float inverse = vanishes ? 0.f : ACT16_MAX * reciprocal_approximate(amax);
  // The low limb is byte 0 of the integer q, the high limb byte 1 of q + 128.
  const uint32_t q0 = __float_as_uint(fmaf(v.x, inverse, ROUNDER)), q1 = __float_as_uint(fmaf(v.y, inverse, ROUNDER));
  const uint32_t q2 = __float_as_uint(fmaf(v.z, inverse, ROUNDER)), q3 = __float_as_uint(fmaf(v.w, inverse, ROUNDER));
  QuantizedKTile q;
  q.limb[0] = __byte_perm(__byte_perm(q0 + 128, q1 + 128, 0x0051), __byte_perm(q2 + 128, q3 + 128, 0x0051), 0x5410);
  q.limb[1] = low_bytes(q0, q1, q2, q3);
  q.scale = vanishes ? 0.f : amax * (1.f / ACT16_MAX);
  q.sum = static_cast<int>(q0 + q1 + q2 + q3 - 4 * 0x4b400000u);
  return q;
}

__device__ __forceinline__ QuantizedKTile quantize_k_tile16(float4 v) {
  return quantize_k_tile16(v, __reduce_max_sync(~0u, magnitude_bits(v)));
}

// BitNet b1.58's rule: round(x / scale) half to even, scale = max(amax, 1e-5) / 127 over the whole row. A row that
// holds an infinity or a NaN has a NaN for its scale, so that none of its outputs is a number.
__device__ __forceinline__ float act8_scale(uint32_t amax_bits) {
  return amax_bits < 0x7f800000u ? fmaxf(__uint_as_float(amax_bits), 1e-5f) / 127.f : __uint_as_float(0x7fffffffu);
}

// A quotient as a division rounds it, given 1 / divisor, rounded (Markstein 1990; Muller et al., Handbook of
// Floating-Point Arithmetic, 4.7): in three instructions where that takes a dozen.
__device__ __forceinline__ float quotient_of(float value, float divisor, float reciprocal) {
  const float quotient = value * reciprocal;
  return fmaf(fmaf(-quotient, divisor, value), reciprocal, quotient);
}

// The code of a value in the low byte of what is returned, given 1 / scale, rounded. None is beyond 127, by what a
// scale is.
__device__ __forceinline__ float act8_code(float value, float scale, float reciprocal) {
  return quotient_of(value, scale, reciprocal) + ROUNDER;
}

// Four codes, one byte each.
__device__ __forceinline__ uint32_t act8_codes(float4 v, float scale, float reciprocal) {
  const auto bits = [&](float value) { return __float_as_uint(act8_code(value, scale, reciprocal)); };
  return low_bytes(bits(v.x), bits(v.y), bits(v.z), bits(v.w));
}

__device__ __forceinline__ QuantizedKTile quantize_k_tile8(float4 v, float scale) {
  const uint32_t codes = act8_codes(v, scale, 1.f / scale);
  return {{codes, 0}, scale, __dp4a(static_cast<int>(codes), 0x01010101, 0)};
}

}  // namespace trirun
