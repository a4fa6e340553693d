// What the decoder's kernels share: launching with programmatic dependent launch, element types, warp sums.
#pragma once

#include "device.cuh"

namespace trirun {

struct DeviceFacts {
  int arch, sms;
};

// What a device is never changes, and asking costs more than launching.
inline int device_facts(DeviceFacts& facts) {
  constexpr int DEVICES = 64;
  static DeviceFacts known[DEVICES];  // written whole and with the same values by every thread that gets there
  int device = 0, major = 0, minor = 0, sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  if (device < DEVICES && known[device].sms != 0) {
    facts = known[device];
    return TRIRUN_OK;
  }
  if (const cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  facts.arch = 10 * major + minor, facts.sms = sms;
  if (device < DEVICES) known[device] = facts;
  return TRIRUN_OK;
}

// Every kernel launched this way must call dependency_wait() in every thread before it touches what an earlier kernel
// wrote or still reads: only then does "the previous kernel has ended" carry over from kernel to kernel.
// `cluster` consecutive CTAs along x are a cluster (sm_90).
template <typename Args>
int launch_dependent(void (*kernel)(Args), const Args& args, dim3 grid, int threads, int shared, void* stream,
                     int cluster = 1) {
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  if (facts.arch < 80) return TRIRUN_UNSUPPORTED;
  if (shared > 48 * 1024)
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared))
      return e;
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = cluster;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = facts.arch < 90 ? 0 : cluster > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, args);
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

}  // namespace trirun
