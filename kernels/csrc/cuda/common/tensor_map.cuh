// Tensor maps for the copy engine, encoded by the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include "trirun.h"

namespace trirun {

// A tensor of up to three dimensions, innermost first, and the box of it that one copy moves.
struct Box {
  CUtensorMapDataType type;
  CUtensorMapSwizzle swizzle;
  uint32_t rank;
  cuuint64_t size[3], stride[2];  // elements; bytes
  cuuint32_t box[3];
};

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's own function, found at run time: the library links no libcuda and loads on machines without one.
inline Encode tensor_map_encoder() {
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  return encode;
}

inline int encode(CUtensorMap* map, const void* data, const Box& b) {
  if (!tensor_map_encoder()) return TRIRUN_UNSUPPORTED;
  const cuuint32_t step[3] = {1, 1, 1};
  const auto call = [&] {
    return tensor_map_encoder()(map, b.type, b.rank, const_cast<void*>(data), b.size, b.stride, b.box, step,
                                CU_TENSOR_MAP_INTERLEAVE_NONE, b.swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  CUresult result = call();
  if (result == CUDA_ERROR_INVALID_CONTEXT) {
    // A thread that has not used CUDA yet, such as autograd's, has no context until the runtime gives it the device's.
    int device = 0;
    if (cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess) result = call();
  }
  return result == CUDA_SUCCESS ? TRIRUN_OK : TRIRUN_BAD_POINTER;
}

// `n_tiles` n tiles by `blocks` blocks of 32 columns of tile64 words a copy; n tiles beyond the last arrive as zeros.
inline int encode_words(CUtensorMap* map, const trirun_int2& w, uint32_t blocks, uint32_t n_tiles = 4) {
  const cuuint64_t n = w.n, k = w.k;
  return encode(map, w.words,
                {CU_TENSOR_MAP_DATA_TYPE_UINT32,
                 CU_TENSOR_MAP_SWIZZLE_NONE,
                 3,
                 {128, k / 32, n / 64},
                 {512, k / 32 * 512},
                 {128, blocks, n_tiles}});
}

}  // namespace trirun
