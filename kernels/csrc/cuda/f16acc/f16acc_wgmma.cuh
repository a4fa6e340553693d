// wgmma with fp16 sums and both operands in shared memory, and the multicast copy that feeds it.
#pragma once

#include "cuda/gemm_prefill/hopper.cuh"

#ifdef TRIRUN_HOPPER

namespace trirun::hopper {

// An operand stored along its rows (of a or b) rather than along k: 128 bytes hold 64 of them under the 128-byte
// swizzle, one such line per k; the next 64 rows follow 8192 bytes further on.
__device__ __forceinline__ uint64_t operand_descriptor_rows(uint32_t address) {
  return uint64_t((address & 0x3FFFF) >> 4) | uint64_t(512) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

// d (+)= a . b: a 64 x 16, b 16 x N, under the 128-byte swizzle; d two neighbouring sums to a register. TransA, TransB:
// the operand is stored along its rows. accumulate 0 starts a new sum.
template <bool TransA, bool TransB>
__device__ __forceinline__ void wgmma_half(uint32_t (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f16.f16.f16 " TRIRUN_D32 "%32, %33, p, 1, 1, %35, %36;\n}\n"
      : TRIRUN_R32("+r", 0)
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(TransA)), "n"(int(TransB)));
}
template <bool TransA, bool TransB>
__device__ __forceinline__ void wgmma_half(uint32_t (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n256k16.f16.f16.f16 " TRIRUN_D64 "%64, %65, p, 1, 1, %67, %68;\n}\n"
      : TRIRUN_R64("+r", 0)
      : "l"(a), "l"(b), "r"(accumulate), "n"(int(TransA)), "n"(int(TransB)));
}

// A box of a 2-D tensor to the same place in every CTA of the cluster that `ctas` names by bits; each one's barrier
// counts its bytes.
__device__ __forceinline__ void tensor_load_multicast(uint32_t dst, const void* map, uint32_t bar, int c0, int c1,
                                                      uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "h"(ctas)
      : "memory");
}

// An arrival at a barrier of any CTA of the cluster, by its cluster address. It releases nothing to the other CTA: what
// must be over is a product's reading, and that was waited for. (.release.cluster would be a fence of all memory.)
__device__ __forceinline__ void barrier_arrive_cluster(uint32_t remote) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote) : "memory");
}

__device__ __forceinline__ uint32_t shared_load_one(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
  return v;
}

// Four 8x8 tiles of 16-bit values from the fragments of a product to rows of shared memory.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Uses the sums, as the compiler sees it, so that no copy of them moves ahead of the wait for the product.
template <int N>
__device__ __forceinline__ void hold(uint32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

}  // namespace trirun::hopper

#endif  // TRIRUN_HOPPER
