// wgmma u8 . s8 with the weights in registers: the accumulator lists are long, so they have a file of their own.
#pragma once

#include "ptx.cuh"

namespace trirun {

// The shared-memory operand: columns of 16-byte rows, eight columns to a 128-byte core matrix, no swizzle.
// columns_step: bytes from one group of eight columns to the next; k_step: bytes from k 0..15 to k 16..31.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t k_step, uint32_t columns_step) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(k_step >> 4) << 16 |
         static_cast<uint64_t>(columns_step >> 4) << 32;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Pins sums to this place in the program: without it the compiler may read them before the wait that completes them,
// since it takes a wgmma's results to be there at once.
template <int COUNT>
__device__ __forceinline__ void wgmma_hold(int (&d)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+r"(d[i])::"memory");
}

#define TRIRUN_D8(d, i)                                                                                       \
  "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3]), "+r"(d[i + 4]), "+r"(d[i + 5]), "+r"(d[i + 6]), \
      "+r"(d[i + 7])
#define TRIRUN_D16(d, i) TRIRUN_D8(d, i), TRIRUN_D8(d, i + 8)
#define TRIRUN_D32(d, i) TRIRUN_D16(d, i), TRIRUN_D16(d, i + 16)
#define TRIRUN_WGMMA(N, LIST, A0, A1, A2, A3, B, P, ...)                                                       \
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" P                                                      \
               ", 0;\n\t"                                                                                      \
               "wgmma.mma_async.sync.aligned.m64n" N "k32.s32.u8.s8 {" LIST "}, {%" A0 ",%" A1 ",%" A2 ",%" A3 \
               "}, %" B ", p;\n\t}"                                                                            \
               : __VA_ARGS__                                                                                   \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define TRIRUN_L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TRIRUN_L16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define TRIRUN_L32 TRIRUN_L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TRIRUN_L48 TRIRUN_L32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define TRIRUN_L64 TRIRUN_L48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// d[64 rows][N] (+)= a (64 x 32 u8: the A registers of mma m16n8k32, warp w of the group holding rows 16w..16w+15)
// . b (32 x N s8). accumulate 0 starts a new sum.
__device__ __forceinline__ void wgmma_u8s8(int (&d)[8], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  TRIRUN_WGMMA("16", TRIRUN_L8, "8", "9", "10", "11", "12", "13", TRIRUN_D8(d, 0));
}
__device__ __forceinline__ void wgmma_u8s8(int (&d)[16], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  TRIRUN_WGMMA("32", TRIRUN_L16, "16", "17", "18", "19", "20", "21", TRIRUN_D16(d, 0));
}
__device__ __forceinline__ void wgmma_u8s8(int (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  TRIRUN_WGMMA("64", TRIRUN_L32, "32", "33", "34", "35", "36", "37", TRIRUN_D32(d, 0));
}
__device__ __forceinline__ void wgmma_u8s8(int (&d)[48], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  TRIRUN_WGMMA("96", TRIRUN_L48, "48", "49", "50", "51", "52", "53", TRIRUN_D32(d, 0), TRIRUN_D16(d, 32));
}
__device__ __forceinline__ void wgmma_u8s8(int (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  TRIRUN_WGMMA("128", TRIRUN_L64, "64", "65", "66", "67", "68", "69", TRIRUN_D32(d, 0), TRIRUN_D32(d, 32));
}

#endif

}  // namespace trirun
