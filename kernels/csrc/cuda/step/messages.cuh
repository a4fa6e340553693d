// What CTAs hand to each other: 16-byte words of four floats that say themselves when they are there. The two lowest
// bits of each float are a tag, which differs from that of the word's last use: whoever finds it in all four has the
// values, whichever way they were stored and loaded. One trip to L2 there and one back, and no fence, counter or
// barrier (the idea: NCCL's "LL" protocol).
//
// A word can be written again once everyone has read it: every CTA that reads a phase's input has a part in its
// output, and all output of one phase is input of the next. What not every step writes (attention's parts, where
// their number varies) is taken away in the end: it could have the tag that a later step looks for.
#pragma once

#include "cuda/common/ptx.cuh"

namespace trirun::step {

constexpr uint32_t TAG = 3;

// Of the n-th use, never 0, which is what memory holds at first. Another one than that of the two uses before.
__device__ __forceinline__ uint32_t tag_of(uint32_t n) { return n % TAG + 1; }

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
  __device__ __forceinline__ static Word load(const float4* from) {
    const Relaxed16 word = load_relaxed16(from);
    return {static_cast<uint32_t>(word.low), static_cast<uint32_t>(word.low >> 32), static_cast<uint32_t>(word.high),
            static_cast<uint32_t>(word.high >> 32)};
  }
};

__device__ __forceinline__ uint64_t tagged(float low, float high, uint32_t tag) {
  const auto one = [&](float f) { return (__float_as_uint(f) & ~TAG) | tag; };
  return one(low) | static_cast<uint64_t>(one(high)) << 32;
}
__device__ __forceinline__ void send(float4* to, float4 v, uint32_t tag) {
  store_relaxed16(to, {tagged(v.x, v.y, tag), tagged(v.z, v.w, tag)});
}
// Half of a word: each float says itself when it is there.
__device__ __forceinline__ void send_half(float2* to, float2 v, uint32_t tag) {
  store_relaxed8(to, tagged(v.x, v.y, tag));
}

// Values of rows of the model are in words in the order in which products end with them, {2t, 2t+8, 2t+1, 2t+9} of 16:
// from there to {2t, 2t+1, 2t+8, 2t+9}, in which activations.cuh quantizes, and back.
__device__ __forceinline__ float4 reordered(float4 v) { return make_float4(v.x, v.z, v.y, v.w); }

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

// Waits for the words of a warp's lanes that are `stride` words apart, of which bit i of wanted is set: asks for all at
// once, and again for those that were not there. Lanes leave together, as the compiler knows by the vote.
template <int COUNT>
__device__ __forceinline__ void receive(Word (&words)[COUNT], const float4* from, int stride, uint32_t wanted,
                                        uint32_t tag, const Patience& patience) {
  int spins = SPINS;
#pragma unroll 1
  for (;;) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (wanted >> i & 1) words[i] = Word::load(from + i * stride);
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (words[i].carries(tag)) wanted &= ~(1u << i);
    if (!__any_sync(~0u, wanted != 0)) break;
    if (--spins > 0) continue;
    spins = SPINS;
    if (__any_sync(~0u, patience_over(patience.status, patience.deadline))) break;
  }
}

__device__ __forceinline__ float4 received(const float4* from, uint32_t tag, const Patience& patience) {
  int spins = SPINS;
  Word word;
#pragma unroll 1
  for (;;) {
    word = Word::load(from);
    if (!__any_sync(~0u, !word.carries(tag))) break;
    if (--spins > 0) continue;
    spins = SPINS;
    if (__any_sync(~0u, patience_over(patience.status, patience.deadline))) break;
  }
  return word.values();
}

}  // namespace trirun::step
