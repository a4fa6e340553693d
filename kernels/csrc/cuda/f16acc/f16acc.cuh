// What the two kernels of the fp16-accumulating product share: the problem, and how a sum leaves fp16.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "cuda/common/launch.cuh"
#include "cuda/common/ptx.cuh"

namespace trirun::f16acc {

// The parts' sums have rows of whole 32-byte sectors.
__host__ __device__ constexpr int64_t sum_columns(int64_t n) { return (n + 7) / 8 * 8; }

constexpr int kTileM = 128, kStage = 64;  // rows of a of one CTA; columns of k that chunks are multiples of

// y[m][n] = a[m][k] . b[n][k]^T + bias, or with parts > 1 sums[parts][m][sum_columns(n)], each part over its own chunks
// of k. Element (row, column) of a lies at row * a_row + column * a_column; one of the two is 1.
struct Arguments {
  const __half *a, *b, *bias;
  __half* y;
  float* sums;
  int64_t a_row, a_column, b_row, b_column, ldy;
  int m, n, k;
  int chunk;  // stages of a chunk
  int parts;
  int m_tiles, n_tiles, raster;

  __host__ __device__ int stages() const { return int((unsigned(k) + kStage - 1) / kStage); }

  // The stages of k that a part multiplies: whole chunks, shared out evenly.
  __host__ __device__ int first_stage(int part) const {
    if (parts == 1) return part * stages();
    const unsigned chunks = (unsigned(stages()) + chunk - 1) / chunk;  // 2^25 at most, and 64 parts
    const unsigned stage = chunks * part / parts * chunk;
    return stage < unsigned(stages()) ? int(stage) : stages();
  }
};

// Where a tile lies: row tiles are taken `raster` at a time, so that the CTAs running together share rows of a and of b
// in L2.
__device__ __forceinline__ void place(const Arguments& a, int tile, int& m_tile, int& n_tile) {
  const int band = tile / (a.raster * a.n_tiles), inside = tile - band * a.raster * a.n_tiles;
  const int width = min(a.raster, a.m_tiles - band * a.raster);
  n_tile = inside / width;
  m_tile = band * a.raster + inside % width;
}

__device__ __forceinline__ void promote(float& lo, float& hi, uint32_t sums) {
  const float2 v = __half22float2(reinterpret_cast<const __half2&>(sums));
  lo += v.x;
  hi += v.y;
}

// Infinities and NaNs: of fp16 sums that overflowed, or of operands that are no numbers.
__device__ __forceinline__ bool is_finite(float v) { return (__float_as_uint(v) & 0x7F800000u) != 0x7F800000u; }

int launch_mma(const Arguments& a, cudaStream_t stream);  // f16acc.cu: sm_80 and newer
int launch_wgmma(const Arguments& a, int tile_n, int sms, cudaStream_t stream);  // f16acc_sm90.cu: sm_90a

}  // namespace trirun::f16acc
