// What the decoder's kernels share: launching with programmatic dependent launch, element types, warp sums.
#pragma once

#include "cuda/common/elements.cuh"
#include "cuda/common/ptx.cuh"
#include "cuda/common/launch.cuh"

namespace trirun::decoder {

// Every kernel launched this way must call dependency_wait() in every thread before it touches what an earlier kernel
// wrote or still reads: only then does "the previous kernel has ended" carry over from kernel to kernel.
// `cluster` consecutive CTAs along x are a cluster (sm_90).
template <typename Args>
int launch_dependent(void (*kernel)(Args), const Args& args, dim3 grid, int threads, int shared, void* stream,
                     int cluster = 1) {
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  if (facts.arch < 80) return TRIRUN_UNSUPPORTED;
  const Launch how{grid, threads, shared, static_cast<cudaStream_t>(stream), facts.arch >= 90, cluster};
  return launch_kernel(kernel, how, args);
}

inline bool aligned_to(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline bool half_dtype(int dtype) { return dtype == TRIRUN_F16 || dtype == TRIRUN_BF16; }

// Two 16-bit values of one word.
template <bool BF16>
__device__ __forceinline__ float2 widen_pair(uint32_t v) {
  if constexpr (BF16) return make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xffff0000u));
  return __half22float2(*reinterpret_cast<const __half2*>(&v));
}

template <bool BF16>
__device__ __forceinline__ void widen_eight(float (&v)[8], uint4 words) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = widen_pair<BF16>(w[i]);
    v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
  }
}

template <bool BF16>
__device__ __forceinline__ float widen_one(uint16_t v) {
  if constexpr (BF16) return __uint_as_float(static_cast<uint32_t>(v) << 16);
  return __half2float(__ushort_as_half(v));
}

template <bool BF16>
__device__ __forceinline__ uint16_t narrow(float v) {
  if constexpr (BF16) return __bfloat16_as_ushort(__float2bfloat16_rn(v));
  return __half_as_ushort(__float2half_rn(v));
}

template <bool BF16>
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  return narrow<BF16>(low) | static_cast<uint32_t>(narrow<BF16>(high)) << 16;
}

// In a fixed order, so that runs repeat bitwise.
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

// The bits of a float as an unsigned integer in the order of floats.
__device__ __forceinline__ uint32_t ordered_bits(float v) {
  const uint32_t bits = __float_as_uint(v);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}
__device__ __forceinline__ float from_ordered(uint32_t bits) {
  return __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
}

__device__ __forceinline__ float warp_max(float v) { return from_ordered(__reduce_max_sync(~0u, ordered_bits(v))); }

__device__ __forceinline__ float squared_relu(float gate) {
  const float positive = fmaxf(gate, 0.f);
  return positive * positive;
}

// The tanh form of GELU is a logistic function too: x/2 (1 + tanh(u)) = x / (1 + e^(-2u)).
template <bool SIGMOID>
__device__ __forceinline__ float logistic(float gate, int activation) {
  const float u = activation == TRIRUN_GELU_TANH ? 1.59576912f * gate * fmaf(0.044715f * gate, gate, 1.f) : gate;
  return __fdividef(SIGMOID && activation == TRIRUN_SIGMOID ? 1.f : gate, 1.f + __expf(-u));
}

// The activation of a gate. SIGMOID: it may be that of attention's output gate.
template <bool SIGMOID>
__device__ __forceinline__ float activate(float gate, int activation) {
  return activation == TRIRUN_RELU2 ? squared_relu(gate) : logistic<SIGMOID>(gate, activation);
}

// That of several, which are computed side by side.
template <int COUNT>
__device__ __forceinline__ void activate(float (&gates)[COUNT], int activation) {
  if (activation == TRIRUN_RELU2) {
    for (float& gate : gates) gate = squared_relu(gate);
    return;
  }
  for (float& gate : gates) gate = logistic<false>(gate, activation);
}

}  // namespace trirun::decoder
