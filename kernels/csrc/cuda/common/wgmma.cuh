// wgmma, the asynchronous tensor cores of sm_90a: d (64 x N, in registers) += a . b, b in shared memory.
//
// A warp does not wait for its products, so their registers must be guarded by hand: wgmma_fence after they were
// written and before the product, wgmma_commit and wgmma_wait before sums are read or fragments replaced, wgmma_hold
// after the wait.
#pragma once

#include "hopper.cuh"

namespace trirun {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the newest PENDING groups of products are complete.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Pins sums to this place in the program: without it the compiler may read them before the wait that completes them,
// since it takes a wgmma's results to be there at once.
__device__ __forceinline__ void wgmma_hold(float& sum) { asm volatile("" : "+f"(sum)::"memory"); }
__device__ __forceinline__ void wgmma_hold(int& sum) { asm volatile("" : "+r"(sum)::"memory"); }
__device__ __forceinline__ void wgmma_hold(uint32_t& sum) { asm volatile("" : "+r"(sum)::"memory"); }
template <typename T, int COUNT>
__device__ __forceinline__ void wgmma_hold(T (&sums)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) wgmma_hold(sums[i]);
}

// ---- operands in shared memory (PTX ISA, "Matrix Descriptor": all in units of 16 bytes) --------------------------

// Rows of 16 bytes along k, eight of them to a 128-byte core matrix, no swizzle. rows_step: bytes from one group of
// eight rows to the next; k_step: bytes from k 0..15 to k 16..31.
__device__ __forceinline__ uint64_t descriptor_plain(uint32_t address, uint32_t k_step, uint32_t rows_step) {
  return static_cast<uint64_t>((address & 0x3ffff) >> 4) | static_cast<uint64_t>(k_step >> 4) << 16 |
         static_cast<uint64_t>(rows_step >> 4) << 32;
}

// Rows of 128 bytes along k under the 128-byte swizzle: groups of eight rows follow each other at 1024 bytes.
__device__ __forceinline__ uint64_t descriptor_swizzled(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// The operand stored along its rows rather than along k: 128 bytes hold 64 rows under the 128-byte swizzle, one such
// line per k; the next 64 rows follow 8192 bytes further on.
__device__ __forceinline__ uint64_t descriptor_along_rows(uint32_t address) {
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(512) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// ---- products ----------------------------------------------------------------------------------------------------

// The operand lists of the instruction: COUNT sums, as text and as constraints, then what follows them.
// clang-format off
#define TRIRUN_L8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define TRIRUN_L16 TRIRUN_L8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define TRIRUN_L32 TRIRUN_L16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define TRIRUN_L48 TRIRUN_L32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define TRIRUN_L64 TRIRUN_L48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define TRIRUN_C8(c, o) \
  c(d[o]), c(d[o + 1]), c(d[o + 2]), c(d[o + 3]), c(d[o + 4]), c(d[o + 5]), c(d[o + 6]), c(d[o + 7])
#define TRIRUN_C16(c, o) TRIRUN_C8(c, o), TRIRUN_C8(c, o + 8)
#define TRIRUN_C32(c, o) TRIRUN_C16(c, o), TRIRUN_C16(c, o + 16)
#define TRIRUN_C48(c, o) TRIRUN_C32(c, o), TRIRUN_C16(c, o + 32)
#define TRIRUN_C64(c, o) TRIRUN_C32(c, o), TRIRUN_C32(c, o + 32)

// Weights in registers, int8: d (+)= a . b, a 64 x 32 u8 (the A registers of mma m16n8k32, warp w of the group holding
// rows 16w..16w+15), b 32 x N s8, N = 2 COUNT. accumulate 0 starts a new sum.
#define TRIRUN_WGMMA_U8S8(N, COUNT, A0, A1, A2, A3, B, P)                                                          \
  __device__ __forceinline__ void wgmma_u8s8(int (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" P ", 0;\n\t"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" N "k32.s32.u8.s8 {" TRIRUN_L##COUNT "}, "                      \
                 "{%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B ", p;\n\t}"                                               \
                 : TRIRUN_C##COUNT("+r", 0)                                                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                            \
  }
TRIRUN_WGMMA_U8S8("16", 8, "8", "9", "10", "11", "12", "13")
TRIRUN_WGMMA_U8S8("32", 16, "16", "17", "18", "19", "20", "21")
TRIRUN_WGMMA_U8S8("64", 32, "32", "33", "34", "35", "36", "37")
TRIRUN_WGMMA_U8S8("96", 48, "48", "49", "50", "51", "52", "53")
TRIRUN_WGMMA_U8S8("128", 64, "64", "65", "66", "67", "68", "69")

// The same by the type of x, always adding: d += a . b, a 64 x (16 of 16 bits, or 32 u8), b as deep x N of T.
template <typename T, int N>
struct Wgmma;
using bf16 = __nv_bfloat16;

#define TRIRUN_WGMMA(T, SUM, N, SHAPE, TYPES, CONSTRAINT, COUNT, A0, A1, A2, A3, B, TAIL)                          \
  template <>                                                                                                       \
  struct Wgmma<T, N> {                                                                                              \
    static __device__ __forceinline__ void run(SUM (&d)[COUNT], const uint32_t (&a)[4], uint64_t b) {               \
      asm volatile("wgmma.mma_async.sync.aligned." SHAPE "." TYPES " {" TRIRUN_L##COUNT "}, "                       \
                   "{%" A0 ",%" A1 ",%" A2 ",%" A3 "}, %" B ", 1" TAIL ";"                                          \
                   : TRIRUN_C##COUNT(CONSTRAINT, 0)                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                           \
    }                                                                                                               \
  };
TRIRUN_WGMMA(__half, float, 64, "m64n64k16", "f32.f16.f16", "+f", 32, "32", "33", "34", "35", "36", ", 1, 1, 0")
TRIRUN_WGMMA(__half, float, 128, "m64n128k16", "f32.f16.f16", "+f", 64, "64", "65", "66", "67", "68", ", 1, 1, 0")
TRIRUN_WGMMA(bf16, float, 64, "m64n64k16", "f32.bf16.bf16", "+f", 32, "32", "33", "34", "35", "36", ", 1, 1, 0")
TRIRUN_WGMMA(bf16, float, 128, "m64n128k16", "f32.bf16.bf16", "+f", 64, "64", "65", "66", "67", "68", ", 1, 1, 0")
TRIRUN_WGMMA(int8_t, int, 64, "m64n64k32", "s32.u8.s8", "+r", 32, "32", "33", "34", "35", "36", "")
TRIRUN_WGMMA(int8_t, int, 128, "m64n128k32", "s32.u8.s8", "+r", 64, "64", "65", "66", "67", "68", "")

// Both operands in shared memory, fp16 sums, two neighbours to a register: d (+)= a . b, a 64 x 16, b 16 x N, under the
// 128-byte swizzle. TransA, TransB: the operand is stored along its rows. accumulate 0 starts a new sum.
#define TRIRUN_WGMMA_HALF(N, COUNT, A, B, P, TA, TB)                                                                \
  template <bool TransA, bool TransB>                                                                               \
  __device__ __forceinline__ void wgmma_half(uint32_t (&d)[COUNT], uint64_t a, uint64_t b, int accumulate) {        \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %" P ", 0;\n\t"                                              \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f16.f16.f16 {" TRIRUN_L##COUNT "}, "                    \
                 "%" A ", %" B ", p, 1, 1, %" TA ", %" TB ";\n\t}"                                                  \
                 : TRIRUN_C##COUNT("+r", 0)                                                                         \
                 : "l"(a), "l"(b), "r"(accumulate), "n"(int(TransA)), "n"(int(TransB)));                            \
  }
TRIRUN_WGMMA_HALF("128", 32, "32", "33", "34", "35", "36")
TRIRUN_WGMMA_HALF("256", 64, "64", "65", "66", "67", "68")
// clang-format on

#undef TRIRUN_WGMMA_U8S8
#undef TRIRUN_WGMMA
#undef TRIRUN_WGMMA_HALF

}  // namespace trirun
