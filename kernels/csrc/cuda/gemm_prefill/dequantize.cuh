// Codes of tile64 to the A fragments of fp16 and bf16 matrix instructions (m16n8k16 and wgmma m64nNk16 have the same).
#pragma once

#include "cuda/common/ptx.cuh"

namespace trirun::gemm_prefill {

__device__ __forceinline__ float half_bits(uint32_t pair, int high) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(high ? pair >> 16 : pair)));
}

// Codes to fp16 or bf16, exactly, in either of two ways.
// - Four at a time they become low mantissa bits of a number whose exponent makes them integers above `kBase`; one fma
//   takes the base away and leaves q - zero.
// - A masked pair of codes as it is, q 4^block smallest subnormal numbers (a carry into the exponent changes nothing,
//   numbers up to there are equally spaced), takes one fma by `factor(block)` and leaves (q - zero) / kShrink: any row
//   block, wherever in the byte it is. fp16 has no factor large enough to leave q - zero itself.
template <typename T>
struct Dequantize;

constexpr float kShrink = 512.f;

template <>
struct Dequantize<__half> {
  static constexpr int kSmallest = 24;  // 2^-24 is the smallest number
  static constexpr uint32_t kMagic = 0x64006400;  // 1024
  static constexpr float kBase = 1024.f;
  static __device__ __forceinline__ uint32_t factor(int block) { return (30 - 2 * block) * 0x04000400; }  // 2^(24-9-2b)
  static __device__ __forceinline__ uint32_t pair(float v) {
    __half2 h = __float2half2_rn(v);
    return reinterpret_cast<uint32_t&>(h);
  }
  static __device__ __forceinline__ float first(uint32_t pair) { return half_bits(pair, 0); }
  // One of two fp16 values, twice in this type.
  static __device__ __forceinline__ uint32_t broadcast(uint32_t halves, int high) {
    return __byte_perm(halves, 0, high ? 0x3232 : 0x1010);
  }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) { return fma_f16x2(a, b, c); }
};

template <>
struct Dequantize<__nv_bfloat16> {
  static constexpr int kSmallest = 133;
  static constexpr uint32_t kMagic = 0x43004300;  // 128
  static constexpr float kBase = 128.f;
  static __device__ __forceinline__ uint32_t factor(int block) {
    return (251 - 2 * block) * 0x00800080;
  }  // 2^(133-9-2b)
  static __device__ __forceinline__ uint32_t pair(float v) {
    __nv_bfloat162 h = __float2bfloat162_rn(v);
    return reinterpret_cast<uint32_t&>(h);
  }
  static __device__ __forceinline__ float first(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ uint32_t broadcast(uint32_t halves, int high) {
    return pair(half_bits(halves, high));
  }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) { return fma_bf16x2(a, b, c); }
};

// What makes weights of masked codes of one row block, two rows of a lane, where scales are of groups: code times scale
// + offset (+ rest) is s (q - zero) 2^-e. e: of every row, such that the largest of the scales measured comes to 2^-10
// and more; then the factor of masked codes is at most 2^15, and what small scales lose to the smallest numbers is
// little beside the rounding of the largest ones' weights. bf16 has room for any scale: one e.
template <typename T>
struct GroupFactors {
  using D = Dequantize<T>;
  static constexpr bool kMeasures = D::kSmallest == 24;
  static constexpr uint32_t kBias = 127 << 23;  // bits of 2^0

  uint32_t scale[2], offset[2], rest[2];  // pairs, of rows r and r + 8
  uint32_t grown[2];  // bits of 2^e
  uint32_t near, rest_of_near;  // of the offset: what it is of the scale; of the rest: of the offset
  uint32_t powers;  // bits of 2^(smallest - 2 block), as a product's exponent

  // zero_near: 1 or 2, the zero point less zero_rest.
  __device__ __forceinline__ GroupFactors(float zero_near, float zero_rest, int block) {
    // As codes are: so many smallest numbers.
    near = 0x80008000u | (static_cast<uint32_t>(zero_near) << 2 * block) * 0x00010001u;
    rest_of_near = D::pair(zero_rest / zero_near);
    grown[0] = grown[1] = kBias + (24 << 23);
    powers = kBias + (D::kSmallest - 2 * block << 23);
  }

  // By all lanes of a warp, of which 4i to 4i + 3 have the same two rows: the scales of these, at `scales` and then
  // every `stride` pairs, of groups [first, last).
  __device__ __forceinline__ void measure(const uint32_t* scales, int stride, int first, int last, int lane) {
    if constexpr (kMeasures) {
      uint32_t most = 0;
#pragma unroll 4
      for (int group = first + lane % 4; group < last; group += 4)
        most = __vmaxu2(most, __ldg(scales + static_cast<int64_t>(group) * stride) & 0x7fff7fffu);
      most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 1));
      most = __vmaxu2(most, __shfl_xor_sync(~0u, most, 2));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int exponent = max(most >> (16 * h + 10) & 31, 1);  // of fp16: 15 is that of 1
        grown[h] = kBias + (exponent - 15 + 10 << 23);
      }
    }
  }

  // From now on, scales of both rows, in fp16.
  __device__ __forceinline__ void set(uint32_t scales) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      scale[h] = D::pair(half_bits(scales, h) * __uint_as_float(powers + kBias - grown[h]));
      offset[h] = D::fma(scale[h], near, 0);
      rest[h] = D::fma(offset[h], rest_of_near, 0);
    }
  }
};

// Bytes 0, 1 of a word are k = 2t, 2t + 1 and bytes 2, 3 are k + 8: registers {0, 1} and {2, 3} of the fragment.
__device__ __forceinline__ void spread(uint32_t (&p)[4], uint32_t low, uint32_t high) {
  p[0] = __byte_perm(low, 0, 0x4140), p[1] = __byte_perm(high, 0, 0x4140);
  p[2] = __byte_perm(low, 0, 0x4342), p[3] = __byte_perm(high, 0, 0x4342);
}

template <typename T>
__device__ __forceinline__ void load_fragments(uint32_t (&a0)[4], uint32_t (&a1)[4], const uint4& words, int half,
                                               int turn, uint32_t magic, const uint32_t (&factor)[2],
                                               const uint32_t (&offset)[2]) {
  using D = Dequantize<T>;
  uint32_t low = half ? words.z : words.x, high = half ? words.w : words.y;
  low = __funnelshift_r(low, low, turn), high = __funnelshift_r(high, high, turn);
  uint32_t p[4];
  spread(p, low, high);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t v0 = and_or<0x000C000C>(p[i], magic), v1 = and_or<0x00300030>(p[i], magic);
    a0[i] = D::fma(v0, factor[0], offset[0]);
    a1[i] = D::fma(v1, factor[1], offset[1]);
  }
}

}  // namespace trirun::gemm_prefill
