// What the wgmma decode kernels share (decode_wgmma.cu, decode_runs.cu): k cut into equal shares, and the sums of a cut
// tile that come together again.
#pragma once

#include "activations.cuh"
#include "kernels.cuh"

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

// Leaves a thread's sums in the workspace, a quarter (16 bytes) every CONSUMERS; the warp whose arrival is the last of
// CTAs [first, last] adds up all of theirs, in their order, and returns true. part(cta): where that CTA leaves this
// thread's; counter: of this tile and warp.
template <int QUARTERS, int CONSUMERS, int UNROLL, typename Counter, typename Part>
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
#pragma unroll(UNROLL)
  for (int of = first; of <= last; of++) {
    const float4* from = part(of);
#pragma unroll
    for (int q = 0; q < QUARTERS; q++) {
      const float4 v = __ldcg(from + q * CONSUMERS);
      flat[4 * q] += v.x, flat[4 * q + 1] += v.y, flat[4 * q + 2] += v.z, flat[4 * q + 3] += v.w;
    }
  }
  return true;
}

// What the zero point multiplies, every token's sum over k, and its scale for one digit: by two warps, while the others
// multiply. Of `tokens` from token0 on, of a.tokens; totals: float [64] parts, [tokens] sums, scales from scales_at on.
template <typename Args>
__device__ __forceinline__ void add_totals(const Args& a, float* totals, int token0, int tokens, int scales_at) {
  const int thread = threadIdx.x % 64, ways = 64 / tokens, token = thread % tokens, way = thread / tokens;
  float sum = 0.f;
  if (way < ways) {
#pragma unroll 4
    for (int unit = way; unit < a.units; unit += ways) sum += __ldcg(&a.x_scales[unit * a.tokens + token0 + token].y);
  }
  totals[thread] = sum;
  asm volatile("bar.sync 1, 64;" ::: "memory");
  if (thread < tokens) {
    float total = 0.f;
    for (int w = 0; w < ways; w++) total += totals[w * tokens + thread];
    totals[64 + thread] = total;
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

// The kernel, behind the one that quantizes x if the stream says so (programmatic dependent launch).
template <typename Args>
int launch_chained(void (*kernel)(Args), const Args& args, int ctas, int threads, int bytes, cudaStream_t stream) {
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = bytes;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

}  // namespace trirun
