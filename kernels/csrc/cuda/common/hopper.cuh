// PTX that begins with sm_90: the copy engine, clusters, and registers that warpgroups hand to each other. A kernel
// that uses it stands behind #if __CUDA_ARCH__ >= 900, or TRIRUN_HOPPER where it needs what sm_90a alone has.
#pragma once

#include "ptx.cuh"

// Defined where code of sm_90a is made: setmaxnreg and wgmma are not in other architectures' code, newer ones included.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TRIRUN_HOPPER 1
#endif

namespace trirun {

// ---- registers ---------------------------------------------------------------------------------------------------

// From here on a thread of this warpgroup has REGISTERS: warps that copy give up what warps that multiply then take.
template <int REGISTERS>
__device__ __forceinline__ void decrease_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void increase_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- barriers that count bytes -----------------------------------------------------------------------------------

// Makes initialised barriers visible to the other CTAs of the cluster, and to the copy engine.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and announces bytes that copies will count there.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// As barrier_wait, with an acquire that covers what other CTAs of the cluster wrote.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n\t.reg .pred done;\n"
      "again:\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n\t@!done bra again;\n\t}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}

// As barrier_wait, of all lanes of a warp: the compiler knows that they come out of it together, which it does not of
// a loop that each lane leaves by itself.
__device__ __forceinline__ void barrier_wait_warp(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n\t.reg .pred done;\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
        "selp.u32 %0, 1, 0, done;\n\t}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (!__all_sync(~0u, done));
}

// ---- the copy engine ---------------------------------------------------------------------------------------------

// Between what threads wrote to shared memory and what the copy engine or the tensor cores then read of it.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for all memory: what other CTAs stored, and the copy engine is to read.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Weights are read once: evict_first keeps them from displacing in L2 what is read again; x has evict_last.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// One contiguous piece of global memory into shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// Fetches a tensor map, which the first copy would have to wait for.
__device__ __forceinline__ void tensor_map_prefetch(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A box of a tensor of two or three dimensions into shared memory; what lies outside arrives as zeros and still counts
// as bytes.
__device__ __forceinline__ void tensor_load(uint32_t shared, const void* map, uint32_t barrier, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void tensor_load(uint32_t shared, const void* map, uint32_t barrier, int c0, int c1,
                                            int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::
          "r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2)
      : "memory");
}
__device__ __forceinline__ void tensor_load(uint32_t shared, const void* map, uint32_t barrier, int c0, int c1, int c2,
                                            uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%3, %4, "
      "%5}], [%2], %6;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}
// To the same place in every CTA of the cluster that `ctas` names by bits; each one's barrier counts its bytes.
__device__ __forceinline__ void tensor_load_multicast(uint32_t shared, const void* map, uint32_t barrier, int c0,
                                                      int c1, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, "
      "%4}], [%2], %5;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "h"(ctas)
      : "memory");
}

// A box of shared memory to a tensor, asynchronously; elements out of range are not written.
__device__ __forceinline__ void tensor_store(const void* map, uint32_t from, int c0, int c1) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map), "r"(from),
               "r"(c0), "r"(c1)
               : "memory");
}
__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Of this thread's committed stores all but the newest PENDING have read their shared memory, which may be written
// again.
template <int PENDING = 0>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// All of them have arrived.
__device__ __forceinline__ void store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- fragments to shared memory ----------------------------------------------------------------------------------

// Four 8 x 8 tiles of 16-bit values to rows of shared memory; lane i names row i % 8 of tile i / 8.
__device__ __forceinline__ void store_matrices(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}
// Transposed on the way: rows of a fragment (of w) become contiguous.
__device__ __forceinline__ void store_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// ---- clusters ----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// Every thread of the cluster is here. Orders no memory: whoever has data to hand over uses store_peer_counted.
__device__ __forceinline__ void cluster_meet() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// The address of the same shared-memory location in another CTA of the cluster.
__device__ __forceinline__ uint32_t peer_address(uint32_t shared, uint32_t rank) {
  uint32_t v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(v) : "r"(shared), "r"(rank));
  return v;
}
__device__ __forceinline__ void store_peer(uint32_t address, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ void store_peer(uint32_t address, unsigned long long v) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(address), "l"(v) : "memory");
}
__device__ __forceinline__ unsigned long long load_peer(uint32_t address) {
  unsigned long long v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_peer2(uint32_t address, float2 v) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1,%2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}
__device__ __forceinline__ void store_peer4(uint32_t address, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}
// 16 bytes, which the peer's barrier counts as they arrive. Of floats as floats: by way of integers the compiler
// moves every one of them.
__device__ __forceinline__ void store_peer_counted(uint32_t address, uint4 v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(barrier)
      : "memory");
}
__device__ __forceinline__ void store_peer_counted(uint32_t address, float4 v, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier)
      : "memory");
}
// An arrival at a peer's barrier, behind what this thread stored there.
__device__ __forceinline__ void barrier_arrive_peer(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// The same without a release to the other CTA, which would be a fence of all memory: where what must be over is a
// product's reading, and that was waited for.
__device__ __forceinline__ void barrier_arrive_peer_unordered(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

}  // namespace trirun
