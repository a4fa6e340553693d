// The two prefill kernels and what prepares rows of x for them.
#pragma once

#include "cuda/kernels.cuh"

namespace trirun::gemm_prefill {

// Rows of x as a prefill kernel reads them: the caller's own, or a copy in the workspace.
struct PreparedRows {
  const void* x;       // [m][ldx] of fp16, bf16 or int8
  int64_t ldx;         // elements; rows start at multiples of 16 bytes
  int64_t columns;     // stored columns; the kernels take zeros beyond them
  int dtype;           // TRIRUN_F16 or TRIRUN_BF16; int8 is known from the plan
  const float* scale;  // [m] factor of every row, or null
  const int* sum;      // [m] sum of the int8 codes of every row, or null
  void* rest;          // workspace behind what the rows take of it
};

// int8 codes stand in the order of tile64's bytes: byte 4t + b of 16 is column {2t, 2t + 1, 2t + 8, 2t + 9}[b].
enum RowFormat { kRowsAsGiven, kRowsHalf, kRowsInt8InHalf, kRowsInt8 };

// Zero points in quarters are exact beside the codes; any other one is subtracted on its own, in two parts.
inline bool quarters(float zero) { return zero * 4.f == float(int(zero * 4.f)) && zero >= -7.75f && zero <= 7.75f; }

// k that PREFILL_W2A8 sums in int32, less than EXACT_SUM_K: in whole turns of its warpgroups, 256 columns.
constexpr int64_t W2A8_MAX_K = 87040;

size_t prepared_bytes(int64_t m, int64_t k_pad, RowFormat format);
int launch_prepare(const Problem& p, RowFormat format, void* memory, PreparedRows* rows);  // prepare.cu

int launch_dequantize(const Problem& p);  // prepare.cu

// Workspace of the sums of tiles that several CTAs share under a plan of the Hopper kernel.
size_t stream_k_bytes(const trirun_cuda_plan& plan);  // sm90.cu

// dtype: of rows of x as the kernel reads them, TRIRUN_F16 or TRIRUN_BF16.
int64_t shared_bytes_sm90(const Problem& p, int dtype);
int64_t shared_bytes_sm80(const Problem& p);
int launch_sm90(const Problem& p, const PreparedRows& rows);  // sm90.cu
int launch_sm80(const Problem& p, const PreparedRows& rows);  // sm80.cu
int launch_experts_sm80(const trirun_experts& experts, void* stream);

}  // namespace trirun::gemm_prefill
