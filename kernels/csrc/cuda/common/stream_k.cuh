// Stream-k (Osama et al. 2023): the work of a product, not its tiles, is divided equally among the CTAs.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace trirun {

// All k tiles of all CTA tiles form one line: CTA c has `each` of them, and one more if c < rest. A CTA may end one
// tile and begin another; a tile that is cut is summed by several CTAs.
//
// The CTA that has this k tile. Line: StreamK, or arguments of a kernel with the same two fields.
template <typename Line>
__host__ __device__ __forceinline__ int stream_k_owner(const Line& line, int k_tile) {
  const int large = line.rest * (line.each + 1);
  return k_tile < large ? k_tile / (line.each + 1) : line.rest + (k_tile - large) / line.each;
}

struct StreamK {
  int each, rest;

  // The first k tile of a CTA.
  __device__ __forceinline__ int start(int cta) const { return cta * each + min(cta, rest); }
  __device__ __forceinline__ int owner(int k_tile) const { return stream_k_owner(*this, k_tile); }
};

inline StreamK stream_k(int64_t k_tiles, int ctas) {
  return {static_cast<int>(k_tiles / ctas), static_cast<int>(k_tiles % ctas)};
}

}  // namespace trirun
