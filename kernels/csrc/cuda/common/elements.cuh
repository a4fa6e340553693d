// Elements of tensors whose type is known at run time: TRIRUN_F32, _F16 or _BF16.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "trirun.h"

namespace trirun {

__device__ __forceinline__ float load_element(const void* p, int64_t i, int dtype) {
  if (dtype == TRIRUN_F16) return __half2float(static_cast<const __half*>(p)[i]);
  if (dtype == TRIRUN_BF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
  return static_cast<const float*>(p)[i];
}

// Elements i and i + 1, i even, the row aligned to two elements.
__device__ __forceinline__ float2 load_pair(const void* p, int64_t i, int dtype) {
  if (dtype == TRIRUN_F16) return __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(p) + i));
  if (dtype == TRIRUN_BF16)
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(static_cast<const __nv_bfloat16*>(p) + i));
  return *reinterpret_cast<const float2*>(static_cast<const float*>(p) + i);
}

__device__ __forceinline__ void store_element(void* p, int64_t i, float v, int dtype) {
  if (dtype == TRIRUN_F16)
    static_cast<__half*>(p)[i] = __float2half_rn(v);
  else if (dtype == TRIRUN_BF16)
    static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(v);
  else
    static_cast<float*>(p)[i] = v;
}

}  // namespace trirun
