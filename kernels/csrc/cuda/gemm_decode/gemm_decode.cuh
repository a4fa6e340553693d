// What the kernels for few rows of x have in common.
#pragma once

#include "cuda/common/activations.cuh"
#include "cuda/kernels.cuh"

namespace trirun::gemm_decode {

// Where weight scales enter: never inside the loop, per k tile, or per block of 32 k (groups of 32 and 64).
// PER_K_TILE_PLAIN, of the stream kernel: per k tile, and the zero point is one number.
enum { PER_CHANNEL = 0, PER_K_TILE = 1, PER_BLOCK = 2, PER_K_TILE_PLAIN = 3 };

// Offsets in shared memory: the copy engine and swizzles want 128 bytes at most.
inline int align(int v) { return (v + 127) / 128 * 128; }

}  // namespace trirun::gemm_decode
