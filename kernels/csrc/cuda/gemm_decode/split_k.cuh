// What the wgmma kernels of this folder share (groups_sm90.cu, spans_sm90.cu): how a stage is given back, and how the
// sums of a tile that is split along k come together.
#pragma once

#include <type_traits>

#include "cuda/common/hopper.cuh"
#include "cuda/common/stream_k.cuh"
#include "gemm_decode.cuh"

namespace trirun::gemm_decode {

constexpr int MAX_STAGES = 16;
constexpr int CTA_N_TILES = 4;  // of the 256 out_features of one CTA

// A warp gives a stage of its ring back. An arrival overtakes loads from shared memory, even those of its own thread,
// and the copy engine may fill the stage anew while they wait (kernels/README.md): so the address depends on what they
// bring. loaded: bits of what may still be on its way; nought: 0, which the compiler does not know.
__device__ __forceinline__ void release_stage(uint32_t barrier, uint32_t loaded, uint32_t nought) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier + loaded * nought);
}

// Arrivals of warps are counted by an unsigned that a kernel before this one has set to zero. Where none has, by 64
// bits that may begin as anything: they count under a mark in their upper 48. Whoever counts there has prepared it
// before.
constexpr uint64_t COUNTER_MARK = 0x5ea1c0de7a6bull << 16;

__device__ __forceinline__ void prepare_counter(uint64_t* counter) {
  uint64_t seen = load_relaxed(counter);
  while (seen >> 16 != COUNTER_MARK >> 16) {
    const uint64_t found = compare_and_swap(counter, seen, COUNTER_MARK);
    if (found == seen) break;
    seen = found;
  }
}
__device__ __forceinline__ unsigned arrivals_before(unsigned* counter) { return count_arrival(counter); }
__device__ __forceinline__ unsigned arrivals_before(uint64_t* counter) { return count_arrival(counter) & 0xffff; }

// Leaves a thread's sums of a tile in the workspace, a quarter (16 bytes) every CONSUMERS; the warp whose arrival is
// the last of CTAs [first, last] adds up all of theirs, in their order, and returns true. The others are gone by then,
// and the next kernel's CTAs fetch their weights. part(cta): where that CTA leaves this thread's; counter: of this
// tile and warp.
template <int QUARTERS, int CONSUMERS, int BATCH, typename Counter, typename Part>
__device__ __forceinline__ bool add_partial_sums(float (&flat)[QUARTERS * 4], int cta, int first, int last,
                                                 Counter* counter, Part part) {
  float4* to = part(cta);
#pragma unroll
  for (int q = 0; q < QUARTERS; q++)
    __stcg(to + q * CONSUMERS, make_float4(flat[4 * q], flat[4 * q + 1], flat[4 * q + 2], flat[4 * q + 3]));
  __syncwarp();
  unsigned before = 0;
  if (threadIdx.x % 32 == 0) before = arrivals_before(counter);
  if (__shfl_sync(~0u, before, 0) != static_cast<unsigned>(last - first)) return false;
  if (threadIdx.x % 32 == 0) *counter = 0;
#pragma unroll
  for (int i = 0; i < QUARTERS * 4; i++) flat[i] = 0.f;
  int of = first;
  const auto add = [&](auto count) {
#pragma unroll
    for (int u = 0; u < decltype(count)::value; u++, of++) {
      const float4* from = part(of);
#pragma unroll
      for (int q = 0; q < QUARTERS; q++) {
        const float4 v = __ldcg(from + q * CONSUMERS);
        flat[4 * q] += v.x, flat[4 * q + 1] += v.y, flat[4 * q + 2] += v.z, flat[4 * q + 3] += v.w;
      }
    }
  };
  // Several on their way from L2 at a time, also of the last ones.
#pragma unroll 1
  while (last + 1 - of >= BATCH) add(std::integral_constant<int, BATCH>{});
  if constexpr (BATCH > 2)
    if (last + 1 - of >= 2) add(std::integral_constant<int, 2>{});
#pragma unroll 1
  while (of <= last) add(std::integral_constant<int, 1>{});
  return true;
}

// What the zero point multiplies, every token's sum over k, and its scale for one limb: by two warps, while the others
// multiply. Of `tokens` from token0 on, of a.tokens; totals: float [TOTALS_AT] parts,
// [tokens] sums, scales from scales_at on.
constexpr int TOTALS_AT = 128;

template <typename Args>
__device__ __forceinline__ void add_totals(const Args& a, float* totals, int token0, int tokens, int scales_at) {
  // Two tokens a load and many loads on their way: with long rows of x it would end last of all otherwise.
  const int thread = threadIdx.x % 64, pairs = tokens / 2, ways = 64 / pairs, pair = thread % pairs,
            way = thread / pairs;
  float sum[2] = {};
  if (way < ways) {
    const float4* from = reinterpret_cast<const float4*>(a.x_scales + token0) + pair;
#pragma unroll 4
    for (int k_tile = way; k_tile < a.k_tiles; k_tile += ways) {
      const float4 v = __ldcg(from + static_cast<int64_t>(k_tile) * a.tokens / 2);
      sum[0] += v.y, sum[1] += v.w;
    }
    totals[way * tokens + pair * 2] = sum[0], totals[way * tokens + pair * 2 + 1] = sum[1];
  }
  named_barrier<64>(1);
  if (thread < tokens) {
    float total = 0.f;
    for (int w = 0; w < ways; w++) total += totals[w * tokens + thread];
    totals[TOTALS_AT + thread] = total;
    totals[scales_at + thread] = __ldcg(&a.x_scales[token0 + thread].x);
  }
}

// Whether this binary's kernel starts with the registers that its warpgroups redistribute: a compiler that had given
// it fewer would have made a kernel that never ends. `whole`: what is known of it so far.
inline bool starts_whole(bool& whole, const void* kernel, int registers) {
  cudaFuncAttributes attributes;
  if (!whole && cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) whole = attributes.numRegs >= registers;
  return whole;
}

// Between the two CTAs of a cluster that share a tile: each gives the sums of half of its warps to the other, whose
// warps of the same rows take and add them. slot: shared address of this thread's first 16 bytes, QUARTERS of them,
// 512 apart.
template <int QUARTERS>
__device__ __forceinline__ void give_sums(const float (&flat)[QUARTERS * 4], uint32_t slot, uint32_t received,
                                          uint32_t rank) {
  cluster_wait();  // the other has begun
  const uint32_t to = peer_address(slot, rank ^ 1), barrier = peer_address(received, rank ^ 1);
#pragma unroll
  for (int q = 0; q < QUARTERS; q++)
    store_peer_counted(to + q * 512, make_float4(flat[4 * q], flat[4 * q + 1], flat[4 * q + 2], flat[4 * q + 3]),
                       barrier);
}
template <int QUARTERS>
__device__ __forceinline__ void take_sums(float (&flat)[QUARTERS * 4], uint32_t slot, uint32_t received) {
  barrier_wait_cluster(received, 0);
#pragma unroll
  for (int q = 0; q < QUARTERS; q++) {
    const uint4 v = load_shared4(slot + q * 512);
    flat[4 * q] += __uint_as_float(v.x), flat[4 * q + 1] += __uint_as_float(v.y);
    flat[4 * q + 2] += __uint_as_float(v.z), flat[4 * q + 3] += __uint_as_float(v.w);
  }
}

}  // namespace trirun::gemm_decode
