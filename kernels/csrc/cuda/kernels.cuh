// What stands between the C interface (api.cu) and the kernels of packed products: one description of a product, and
// one table of functions per kernel family, which api.cu chooses by plan.kernel.
#pragma once

#include "cuda/common/launch.cuh"

namespace trirun {

constexpr int N_TILE = 64;             // out_features whose words, scales and zeros lie together (tile64)
constexpr int WORD_TILE_BYTES = 2048;  // of the words of one n tile by one k tile (K_TILE, activations.cuh)
constexpr int DECODE_ROWS = 64;        // rows of x of one product on quantized activations, at most
constexpr int COUNTERS = 16384;  // at the start of a workspace: zeros, kept zero by every kernel that counts there
constexpr int HEAD_INT8_ROWS = 64;     // rows of x of one product with an 8-bit head, at most
// Rows of x and columns of one product with a 16-bit head, at most.
constexpr int HEAD_16BIT_ROWS = 8, HEAD_16BIT_COLUMNS = 8192, HEAD_12BIT_COLUMNS = 4096;
constexpr int MAX_SHARED = 227 * 1024;  // bytes of shared memory of one CTA on the devices with the most

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
  const void* activations;  // x quantized by trirun_cuda_quantize, or null
  unsigned* counters;  // [COUNTERS]
  void* workspace;         // what follows them
  size_t workspace_bytes;
  cudaStream_t stream;
  int device;
  int arch;   // compute capability, 10 * major + minor
  int sms;    // multiprocessors
};

// shared_bytes: dynamic shared memory of one CTA under the plan, or -1 where no kernel runs it. workspace_bytes: device
// memory behind the counters. Both look at sizes, and of pointers only whether they are null. launch: TRIRUN_OK, a
// negative TRIRUN_ code or a cudaError_t; it must refuse (TRIRUN_UNSUPPORTED) a plan without an instance, and an
// architecture for which its code was not compiled.
struct KernelFamily {
  int64_t (*shared_bytes)(const Problem& p);
  size_t (*workspace_bytes)(const Problem& p);
  int (*launch)(const Problem& p);
};

namespace gemm_decode {
extern const KernelFamily stream;  // mma.sync: TRIRUN_KERNEL_STREAM and _STREAM_SM80
extern const KernelFamily groups;  // wgmma u8.s8: TRIRUN_KERNEL_GROUPS (sm_90a)
extern const KernelFamily spans;  // wgmma u8.s8, sums over several k tiles: TRIRUN_KERNEL_SPANS (sm_90a)
}  // namespace gemm_decode

namespace gemm_prefill {
extern const KernelFamily prefill;  // TRIRUN_KERNEL_PREFILL_WGMMA, _SM80, _W2A8, and TRIRUN_KERNEL_DEQUANTIZE
}  // namespace gemm_prefill

// The quantized form of m rows of x (layout: activations.cuh): its bytes, and the kernel that writes it, and zeros to
// `count` counters for the kernel behind it. 16 bits: `span` k tiles (1 or SPAN_K_TILES) have one scale.
size_t activation_bytes(int64_t m, int64_t k_pad, int act_bits);
int launch_quantize(const Problem& p, void* activations, int span = 1, unsigned* counters = nullptr, int count = 0);

}  // namespace trirun
