// What the CUDA kernels of this folder share on the host side: one description of a product, one launch function per
// kernel family. api.cu fills a Problem from the C interface, checks it, and dispatches on plan.kernel.
#pragma once

#include "cuda/common/launch.cuh"

namespace trirun {

constexpr int COUNTERS = 16384;
constexpr int DECODE_ROWS = 64;  // of x, at most, in one product on quantized activations
constexpr int MAX_SHARED = 227 * 1024;  // bytes that one CTA may have on the devices with the most

// One product y[m][n] = x[m][k] . w^T + bias on the current device. Padded sizes are those of the stored weight.
struct Problem {
  trirun_int2 w;           // words, scales, zeros (or null), w.n = n_pad, w.k = k_pad, group_size, zero
  int64_t n, k, m;         // true sizes
  const void* x;           // [m][ldx] of dtype; null where `activations` holds x already quantized
  int64_t ldx;             // elements
  const void* bias;        // [n] of dtype, or null
  void* y;                 // [m][ldy] of dtype
  int64_t ldy;             // elements
  int dtype;               // TRIRUN_F32, _F16, _BF16
  int act_bits;            // TRIRUN_ACT8 or _ACT16
  trirun_cuda_plan plan;   // which kernel, with which tile
  const void* activations; // x quantized by trirun_cuda_quantize, or null
  unsigned* counters;      // COUNTERS zeros at the start of the workspace, left zero by every kernel that uses them
  void* workspace;         // what follows them
  size_t workspace_bytes;
  cudaStream_t stream;
  int device;
  int arch;                // compute capability, 10 * major + minor
  int sms;                 // multiprocessors
};

// Each family answers three questions: how much shared memory (bytes, dynamic) one CTA takes under the plan, or -1 where
// no kernel of this library runs it; how much workspace (bytes) this problem needs; and the launch. The first two look at
// sizes, and of pointers only whether they are null. A launch returns TRIRUN_OK, a negative TRIRUN_ code, or a cudaError_t. It must refuse (TRIRUN_UNSUPPORTED) an
// architecture for which its body was not compiled, and a plan it has no instance for.
int64_t shared_bytes_stream(const Problem& p);
size_t workspace_stream(const Problem& p);
int launch_stream(const Problem& p);  // gemm_decode/stream.cu: mma.sync; TRIRUN_KERNEL_STREAM and _STREAM_SM80

int64_t shared_bytes_columns(const Problem& p);
size_t workspace_columns(const Problem& p);
int launch_columns(const Problem& p);  // gemm_decode/groups.cu: wgmma u8.s8, A in registers (sm_90a)

int64_t shared_bytes_runs(const Problem& p);
size_t workspace_runs(const Problem& p);
int launch_runs(const Problem& p);  // gemm_decode/spans.cu: the same with sums over several units of k

int64_t shared_bytes_prefill(const Problem& p);
size_t workspace_prefill(const Problem& p);
int launch_prefill(const Problem& p);  // prefill*.cu: every plan.kernel from TRIRUN_KERNEL_PREFILL_WGMMA on

// The quantized form of m rows of x (see activations.cuh for the layout): its bytes, and the kernel that writes it, and
// zeros to `count` counters for the kernel behind it. With two digits, `run` (1 or RUN) units have one scale.
size_t activation_bytes(int64_t m, int64_t k_pad, int act_bits);
int launch_quantize(const Problem& p, void* activations, int run = 1, unsigned* counters = nullptr, int count = 0);

}  // namespace trirun
