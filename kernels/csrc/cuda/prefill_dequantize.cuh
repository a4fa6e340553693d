// Codes of tile64 to the A fragments of fp16 and bf16 matrix instructions (m16n8k16 and wgmma m64nNk16 have the same).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace trirun {

__device__ __forceinline__ float half_bits(uint32_t pair, int high) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>(high ? pair >> 16 : pair)));
}

// Codes to fp16 or bf16, exactly, in either of two ways.
// - Four at a time they become low mantissa bits of a number whose exponent makes them integers above `kBase`; one fma
//   takes the base away and leaves q - zero.
// - A masked pair of codes as it is, q 4^block smallest subnormal numbers (a carry into the exponent changes nothing,
//   numbers up to there are equally spaced), takes one fma by `unit(block)` and leaves (q - zero) / kShrink: any row
//   block, wherever in the byte it is. fp16 has no unit large enough to leave q - zero itself.
template <typename T>
struct Dequantize;

constexpr float kShrink = 512.f;

template <>
struct Dequantize<__half> {
  static constexpr uint32_t kMagic = 0x64006400;  // 1024
  static constexpr float kBase = 1024.f;
  static __device__ __forceinline__ uint32_t unit(int block) { return (30 - 2 * block) * 0x04000400; }  // 2^(24-9-2b)
  static __device__ __forceinline__ uint32_t pair(float v) {
    __half2 h = __float2half2_rn(v);
    return reinterpret_cast<uint32_t&>(h);
  }
  static __device__ __forceinline__ float first(uint32_t pair) { return half_bits(pair, 0); }
  // One of two fp16 values, twice in this type.
  static __device__ __forceinline__ uint32_t broadcast(uint32_t halves, int high) {
    return __byte_perm(halves, 0, high ? 0x3232 : 0x1010);
  }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
};

template <>
struct Dequantize<__nv_bfloat16> {
  static constexpr uint32_t kMagic = 0x43004300;  // 128
  static constexpr float kBase = 128.f;
  static __device__ __forceinline__ uint32_t unit(int block) { return (251 - 2 * block) * 0x00800080; }  // 2^(133-9-2b)
  static __device__ __forceinline__ uint32_t pair(float v) {
    __nv_bfloat162 h = __float2bfloat162_rn(v);
    return reinterpret_cast<uint32_t&>(h);
  }
  static __device__ __forceinline__ float first(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ uint32_t broadcast(uint32_t halves, int high) {
    return pair(half_bits(halves, high));
  }
  static __device__ __forceinline__ uint32_t fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
  }
};

// (value & mask) | magic as the one instruction it is: given both constants as immediates the compiler takes two.
template <uint32_t Mask>
__device__ __forceinline__ uint32_t mask_or(uint32_t value, uint32_t magic) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(value), "n"(Mask), "r"(magic));
  return r;
}

// Bytes 0, 1 of a word are k = 2t, 2t + 1 and bytes 2, 3 are k + 8: registers {0, 1} and {2, 3} of the fragment.
__device__ __forceinline__ void spread(uint32_t (&p)[4], uint32_t low, uint32_t high) {
  p[0] = __byte_perm(low, 0, 0x4140), p[1] = __byte_perm(high, 0, 0x4140);
  p[2] = __byte_perm(low, 0, 0x4342), p[3] = __byte_perm(high, 0, 0x4342);
}

template <typename T>
__device__ __forceinline__ void load_fragments(uint32_t (&a0)[4], uint32_t (&a1)[4], const uint4& words, int half,
                                               int turn, uint32_t magic, const uint32_t (&unit)[2],
                                               const uint32_t (&offset)[2]) {
  using D = Dequantize<T>;
  uint32_t low = half ? words.z : words.x, high = half ? words.w : words.y;
  low = __funnelshift_r(low, low, turn), high = __funnelshift_r(high, high, turn);
  uint32_t p[4];
  spread(p, low, high);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t v0 = mask_or<0x000C000C>(p[i], magic), v1 = mask_or<0x00300030>(p[i], magic);
    a0[i] = D::fma(v0, unit[0], offset[0]);
    a1[i] = D::fma(v1, unit[1], offset[1]);
  }
}

}  // namespace trirun
