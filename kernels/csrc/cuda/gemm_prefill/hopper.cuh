// Hopper instructions of prefill and fp16 sums beside those of common/ptx.cuh: tensor copies, clusters, wgmma.
#pragma once

#include "cuda/common/ptx.cuh"

// Architecture-specific code exists only in the sm_90a part of the fatbin; every other part compiles empty bodies.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TRIRUN_HOPPER 1
#endif

namespace trirun::hopper {

#ifdef TRIRUN_HOPPER

// A box of a 2-D or 3-D tensor into shared memory; out-of-range elements arrive as zeros and still count as bytes.
__device__ __forceinline__ void tensor_load(uint32_t dst, const void* map, uint32_t bar, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1)
      : "memory");
}

__device__ __forceinline__ void tensor_load(uint32_t dst, const void* map, uint32_t bar, int c0, int c1, int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}

// Every thread of the cluster is here. Orders no memory: whoever has data to hand over uses cluster_store.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// 16 bytes into the shared memory of a CTA of the cluster, which that CTA's barrier counts as they arrive.
__device__ __forceinline__ void cluster_store(uint32_t remote, uint4 v, uint32_t remote_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(remote_barrier)
      : "memory");
}

__device__ __forceinline__ uint4 shared_load(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 shared_load_pair(uint32_t address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address) : "memory");
  return v;
}

__device__ __forceinline__ void shared_store(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void shared_store_pair(uint32_t address, uint32_t a, uint32_t b) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(a), "r"(b) : "memory");
}

// A box of shared memory to a 2-D tensor, asynchronously; elements out of range are not written.
__device__ __forceinline__ void tensor_store(const void* map, uint32_t from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(c0), "r"(c1)
               : "memory");
}
// What threads wrote to shared memory becomes visible to the copy engine.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// The staging memory of all stores committed by this thread may be written again.
__device__ __forceinline__ void store_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Four 8x8 tiles of 16-bit values, transposed on the way: fragment rows (n) become contiguous in shared memory.
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// K-major B operand, rows of 128 bytes under the 128-byte swizzle: 8-row groups follow each other at 1024 bytes.
__device__ __forceinline__ uint64_t operand_descriptor(uint32_t address) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// d += a . b for a 64 x (16 or 32) tile of A in registers and N columns of B in shared memory.
template <typename T, int N>
struct Wgmma;

// clang-format off
#define TRIRUN_D32                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define TRIRUN_D64                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define TRIRUN_R4(c, o) c(d[o]), c(d[o + 1]), c(d[o + 2]), c(d[o + 3])
#define TRIRUN_R8(c, o) TRIRUN_R4(c, o), TRIRUN_R4(c, o + 4)
#define TRIRUN_R32(c, o) TRIRUN_R8(c, o), TRIRUN_R8(c, o + 8), TRIRUN_R8(c, o + 16), TRIRUN_R8(c, o + 24)
#define TRIRUN_R64(c, o) TRIRUN_R32(c, o), TRIRUN_R32(c, o + 32)

#define TRIRUN_WGMMA(TYPE, ACC, COLUMNS, SHAPE, TYPES, CONSTRAINT, COUNT, A, B, TAIL)                             \
  template <>                                                                                                     \
  struct Wgmma<TYPE, COLUMNS> {                                                                                   \
    static __device__ __forceinline__ void run(ACC (&d)[COUNT], const uint32_t (&a)[4], uint64_t b) {                 \
      asm volatile("wgmma.mma_async.sync.aligned." SHAPE "." TYPES " " TRIRUN_D##COUNT A ", " B ", 1" TAIL ";\n"   \
                   : TRIRUN_R##COUNT(CONSTRAINT, 0)                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                         \
    }                                                                                                             \
  };
#define TRIRUN_A32 "{%32, %33, %34, %35}"
#define TRIRUN_A64 "{%64, %65, %66, %67}"
TRIRUN_WGMMA(__half, float, 64, "m64n64k16", "f32.f16.f16", "+f", 32, TRIRUN_A32, "%36", ", 1, 1, 0")
TRIRUN_WGMMA(__half, float, 128, "m64n128k16", "f32.f16.f16", "+f", 64, TRIRUN_A64, "%68", ", 1, 1, 0")
TRIRUN_WGMMA(__nv_bfloat16, float, 64, "m64n64k16", "f32.bf16.bf16", "+f", 32, TRIRUN_A32, "%36", ", 1, 1, 0")
TRIRUN_WGMMA(__nv_bfloat16, float, 128, "m64n128k16", "f32.bf16.bf16", "+f", 64, TRIRUN_A64, "%68", ", 1, 1, 0")
TRIRUN_WGMMA(int8_t, int, 64, "m64n64k32", "s32.u8.s8", "+r", 32, TRIRUN_A32, "%36", "")
TRIRUN_WGMMA(int8_t, int, 128, "m64n128k32", "s32.u8.s8", "+r", 64, TRIRUN_A64, "%68", "")
#undef TRIRUN_WGMMA
// clang-format on

#endif  // TRIRUN_HOPPER

}  // namespace trirun::hopper
