// What the wgmma decode kernels share (groups.cu, spans.cu): k cut into equal shares, and the sums of a cut
// tile that come together again.
#pragma once

#include <type_traits>

#include "cuda/common/activations.cuh"
#include "cuda/kernels.cuh"

namespace trirun {

constexpr int UNIT_BYTES = 2048;  // one strip x 128 k
constexpr int MAX_STAGES = 16;
constexpr int STRIPS = 4;  // of a tile

// All units of k of all tiles form one line: CTA b has `share` of them, and one more if b < rest.
struct EqualShares {
  int share, rest;

  __device__ __forceinline__ int start(int cta) const { return cta * share + min(cta, rest); }
  // The CTA that has this unit.
  __device__ __forceinline__ int owner(int unit) const {
    const int large = rest * (share + 1);
    return unit < large ? unit / (share + 1) : rest + (unit - large) / share;
  }
};

inline EqualShares equal_shares(int64_t total, int ctas) {
  return {static_cast<int>(total / ctas), static_cast<int>(total % ctas)};
}

// A warp gives a stage of its ring back. An arrival overtakes loads from shared memory, even those of its own thread,
// and the copy engine may fill the stage anew while they wait (kernels/README.md): so the address depends on what they
// bring. loaded: bits of what may still be on its way; nought: 0, which the compiler does not know.
__device__ __forceinline__ void release_stage(uint32_t barrier, uint32_t loaded, uint32_t nought) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(barrier + loaded * nought);
}

// Counts this warp, whose lanes have stored what belongs to the count; returns how many came before. Whoever sees the
// last count sees what all of them stored.
__device__ __forceinline__ unsigned arrive_counted(unsigned* counter) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// The same where no kernel before this one has written zeros: a counter that may begin as anything counts under a mark
// in its upper 48 bits. Whoever counts there has prepared it before.
constexpr uint64_t COUNTER_MARK = 0x5ea1c0de7a6bull << 16;

__device__ __forceinline__ void prepare_counter(uint64_t* counter) {
  uint64_t seen;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(counter) : "memory");
  while (seen >> 16 != COUNTER_MARK >> 16) {
    uint64_t found;
    asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(found)
                 : "l"(counter), "l"(seen), "l"(COUNTER_MARK)
                 : "memory");
    if (found == seen) break;
    seen = found;
  }
}
__device__ __forceinline__ unsigned arrive_counted(uint64_t* counter) {
  uint64_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u64 %0, [%1], 1;" : "=l"(before) : "l"(counter) : "memory");
  return before & 0xffff;
}

// Leaves a thread's sums of a tile in the workspace, a quarter (16 bytes) every CONSUMERS; the warp whose arrival is
// the last of CTAs [first, last] adds up all of theirs, in their order, and returns true. The others are gone by then,
// and the next kernel's CTAs fetch their weights. part(cta): where that CTA leaves this thread's; counter: of this
// tile and warp.
template <int QUARTERS, int CONSUMERS, int BATCH, typename Counter, typename Part>
__device__ __forceinline__ bool add_shares(float (&flat)[QUARTERS * 4], int cta, int first, int last, Counter* counter,
                                           Part part) {
  float4* to = part(cta);
#pragma unroll
  for (int q = 0; q < QUARTERS; q++)
    __stcg(to + q * CONSUMERS, make_float4(flat[4 * q], flat[4 * q + 1], flat[4 * q + 2], flat[4 * q + 3]));
  __syncwarp();
  unsigned before = 0;
  if (threadIdx.x % 32 == 0) before = arrive_counted(counter);
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

// What the zero point multiplies, every token's sum over k, and its scale for one digit: by two warps, while the others
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
    for (int unit = way; unit < a.units; unit += ways) {
      const float4 v = __ldcg(from + static_cast<int64_t>(unit) * a.tokens / 2);
      sum[0] += v.y, sum[1] += v.w;
    }
    totals[way * tokens + pair * 2] = sum[0], totals[way * tokens + pair * 2 + 1] = sum[1];
  }
  asm volatile("bar.sync 1, 64;" ::: "memory");
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

}  // namespace trirun
