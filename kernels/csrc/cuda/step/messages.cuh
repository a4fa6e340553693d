// What CTAs hand to each other: 16-byte words of four floats that say themselves when they are there. The two lowest
// bits of each float are a tag, which differs from that of the word's last use: whoever finds it in all four has the
// values, whichever way they were stored and loaded. One trip to L2 there and one back, and no fence, counter or
// barrier (the idea: NCCL's "LL" protocol).
//
// A word can be written again once everyone has read it: every CTA that reads a phase's input has a part in its
// output, and all output of one phase is input of the next.
#pragma once

#include "cuda/common/ptx.cuh"

namespace trirun::step {

constexpr uint32_t TAG = 3;

// Of the n-th use, never 0, which is what memory holds at first. Another one than that of the two uses before.
__device__ __forceinline__ uint32_t tag_of(uint32_t n) { return n % TAG + 1; }

__device__ __forceinline__ uint64_t global_nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

struct Word {
  uint32_t x, y, z, w;

  __device__ __forceinline__ bool carries(uint32_t tag) const {
    return (((x ^ tag) | (y ^ tag) | (z ^ tag) | (w ^ tag)) & TAG) == 0;
  }
  // Without the tag, of which nothing may depend on: a step's results are the same whichever step it is.
  __device__ __forceinline__ float4 values() const {
    const auto bare = [](uint32_t v) { return __uint_as_float(v & ~TAG); };
    return make_float4(bare(x), bare(y), bare(z), bare(w));
  }
};

__device__ __forceinline__ Word load_word(const float4* from) {
  uint64_t low, high;
  asm volatile("{\n\t.reg .b128 v;\n\tld.relaxed.gpu.global.b128 v, [%2];\n\tmov.b128 {%0, %1}, v;\n\t}"
               : "=l"(low), "=l"(high)
               : "l"(from)
               : "memory");
  return {static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32), static_cast<uint32_t>(high),
          static_cast<uint32_t>(high >> 32)};
}

__device__ __forceinline__ void send(float4* to, float4 v, uint32_t tag) {
  const auto tagged = [&](float f) { return (__float_as_uint(f) & ~TAG) | tag; };
  const uint64_t low = tagged(v.x) | static_cast<uint64_t>(tagged(v.y)) << 32;
  const uint64_t high = tagged(v.z) | static_cast<uint64_t>(tagged(v.w)) << 32;
  asm volatile("{\n\t.reg .b128 v;\n\tmov.b128 v, {%1, %2};\n\tst.relaxed.gpu.global.b128 [%0], v;\n\t}" ::"l"(to),
               "l"(low), "l"(high)
               : "memory");
}

// Whether to go on waiting. Once a CTA has waited for so long, something else holds multiprocessors that this kernel
// needs: it says so, everyone stops waiting, and the step ends without a result.
constexpr uint64_t PATIENCE = 4000000000u;  // nanoseconds
constexpr int SPINS = 1 << 12;  // between two looks at the clock

struct Patience {
  uint32_t* status;
  uint32_t deadline;  // shared address: nanoseconds, 64 bits
};

// Apart: code that does not run takes no place among code that does.
__device__ __noinline__ bool patience_over(uint32_t* status, uint32_t deadline) {
  if (*reinterpret_cast<volatile uint32_t*>(status) != 0) return true;
  const uint2 end = load_shared2(deadline);
  if (global_nanoseconds() < (end.x | static_cast<uint64_t>(end.y) << 32)) return false;
  *reinterpret_cast<volatile uint32_t*>(status) = 1;
  return true;
}

// Waits for a word of which `v` was the first look.
__device__ __forceinline__ float4 awaited(Word v, const float4* from, uint32_t tag, const Patience& patience) {
#pragma unroll 1
  for (int spins = SPINS; !v.carries(tag); v = load_word(from))
    if (--spins == 0) {
      if (patience_over(patience.status, patience.deadline)) break;
      spins = SPINS;
    }
  return v.values();
}

__device__ __forceinline__ float4 receive(const float4* from, uint32_t tag, const Patience& patience) {
  return awaited(load_word(from), from, tag, patience);
}

// The 32 values of a warp's lanes as eight words: word w holds values 16 (w / 4) + 2 (w % 4) + {0, 1, 8, 9}, the order
// in which activations.cuh quantizes. All lanes call it.
__device__ __forceinline__ void send_lanes(float4* to, float v, uint32_t tag) {
  const int lane = threadIdx.x % 32, first = (lane & 4) * 4 + (lane & 3) * 2;
  const float a = __shfl_sync(~0u, v, first), b = __shfl_sync(~0u, v, first + 1);
  const float c = __shfl_sync(~0u, v, first + 8), d = __shfl_sync(~0u, v, first + 9);
  if (lane < 8) send(to + lane, make_float4(a, b, c, d), tag);
}

}  // namespace trirun::step
