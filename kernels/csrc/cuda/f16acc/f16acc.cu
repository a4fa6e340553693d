// y[m][n] = a[m][k] . b[n][k]^T with fp16 sums on every GPU since Ampere: mma.sync, which GeForce GPUs run at twice the
// rate with fp16 sums; and the C interface of both kernels.
//
// - Sums of a chunk of k stay in fp16 and are then added to fp32 ones; a tile whose fp16 sums left their range is
//   computed again with fp32 sums.
// - A CTA computes 128 x 128 with 8 warps of 64 x 32. Stages of 64 columns are copied by cp.async, their 16-byte parts
//   permuted so that ldmatrix meets no bank conflict; a warp's fragments are read one step ahead of its products.
// no-spill: f16acc_mma_kernel
// no-spill: f16acc_reduce_kernel
#include "f16acc.cuh"

namespace trirun::f16acc {
namespace {

constexpr int kThreads = 256, kTileN = 128, kStages = 3, kSteps = kStage / 16;
constexpr int kOperand = 128 * kStage * 2, kBytes = kStages * 2 * kOperand;
constexpr int kStaged = kTileN * 2 + 16;  // bytes of a row of outputs in shared memory: no two rows on the same banks
static_assert(kTileM * kStaged <= kBytes);

// 16-byte part `part` of a row of 128 bytes: eight rows that ldmatrix reads together meet all banks once.
__device__ __forceinline__ uint32_t position(int row, int part) { return row * 128 + ((part ^ row & 7) << 4); }

// One tile's part of k. Half: sums in fp16, promoted every chunk; otherwise in fp32 throughout.
template <bool Half>
__device__ __forceinline__ void accumulate(const Arguments& args, uint32_t base, int m0, int n0, int first, int last,
                                           float (&total)[4][4][4]) {
  const int thread = threadIdx.x, lane = thread % 32, row0 = thread / 32 % 2 * 64, column0 = thread / 64 * 32;
  // Rows beyond the end are the last one again, whose sums nobody stores; columns beyond the end are zeros.
  const int a_first = min(m0 + thread / 8, args.m - 1), b_first = min(n0 + thread / 8, args.n - 1);
  const __half* a_from = args.a + a_first * args.a_row + int64_t(first) * kStage + thread % 8 * 8;
  const __half* b_from = args.b + b_first * args.b_row + int64_t(first) * kStage + thread % 8 * 8;
  const uint32_t to = base + position(thread / 8, thread % 8);  // 32 rows further down parts lie in the same order
  int left = args.k - first * kStage - thread % 8 * 8;
  const auto load_stage = [&](int stage) {
    const int bytes = left >= 8 ? 16 : left > 0 ? left * 2 : 0;
    const uint32_t at = to + 2 * stage * kOperand;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __half* a = a_from + min(32 * i, args.m - 1 - a_first) * args.a_row;
      const __half* b = b_from + min(32 * i, args.n - 1 - b_first) * args.b_row;
      copy_async16_partly(at + i * 32 * 128, bytes ? a : args.a, bytes);
      copy_async16_partly(at + kOperand + i * 32 * 128, bytes ? b : args.b, bytes);
    }
    a_from += kStage, b_from += kStage, left -= kStage;
  };
  // What this lane names to ldmatrix, of the first 16 rows and columns; further columns differ in two bits.
  const uint32_t a_lane = base + position(row0 + lane % 16, lane / 16);
  const uint32_t b_lane = base + kOperand + position(column0 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  uint32_t a[2][4][4], b[2][2][4];
  const auto load_fragments = [&](int stage, int step) {
    const uint32_t at = 2 * stage * kOperand;
#pragma unroll
    for (int j = 0; j < 2; ++j) load_matrices(b[step % 2][j], (b_lane ^ step * 32) + at + j * 16 * 128);
#pragma unroll
    for (int i = 0; i < 4; ++i) load_matrices(a[step % 2][i], (a_lane ^ step * 32) + at + i * 16 * 128);
  };
  const auto next_stage_arrives = [] {
    copy_async_wait<kStages - 2>();
    __syncthreads();
  };

  uint32_t half[4][4][2] = {};
#pragma unroll
  for (int i = 0; i < 64; ++i) total[i / 16][i / 4 % 4][i % 4] = 0.f;
  for (int i = 0; i < kStages - 1; ++i) {
    if (first + i < last) load_stage(i);
    copy_async_commit();
  }
  next_stage_arrives();
  load_fragments(0, 0);
  int stage = 0, until = args.chunk;
  for (int k = first; k < last; ++k) {
    // Everyone has read the fragments of the stage that this one replaces.
    if (k + kStages - 1 < last) load_stage(stage == 0 ? kStages - 1 : stage - 1);
    copy_async_commit();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step + 1 == kSteps) {
        if (++stage == kStages) stage = 0;
        next_stage_arrives();
      }
      load_fragments(stage, (step + 1) % kSteps);  // after the last stage: of no use, and no harm
      const uint32_t (&x)[4][4] = a[step % 2], (&w)[2][4] = b[step % 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if constexpr (Half)
            mma_f16_sums(half[i][j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
          else
            mma_16bit<__half>(total[i][j], x[i], w[j / 2][j % 2 * 2], w[j / 2][j % 2 * 2 + 1]);
        }
      }
    }
    if (Half && (--until == 0 || k + 1 == last)) {
      until = args.chunk;
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        uint32_t& sums = half[i / 8][i / 2 % 4][i % 2];
        promote(total[i / 8][i / 2 % 4][i % 2 * 2], total[i / 8][i / 2 % 4][i % 2 * 2 + 1], sums);
        sums = 0;
      }
    }
  }
  copy_async_wait<0>();
}

__global__ void __launch_bounds__(kThreads) f16acc_mma_kernel(const __grid_constant__ Arguments args) {
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread % 32, row0 = thread / 32 % 2 * 64, column0 = thread / 64 * 32;
  const int part = blockIdx.x % args.parts;
  int m_tile, n_tile;
  place(args, blockIdx.x / args.parts, m_tile, n_tile);
  const int m0 = m_tile * kTileM, n0 = n_tile * kTileN;
  const int first = args.first_stage(part), last = args.first_stage(part + 1);

  float total[4][4][4];
  accumulate<true>(args, base, m0, n0, first, last, total);
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 64; ++i) finite = finite && is_finite(total[i / 16][i / 4 % 4][i % 4]);
  // The barrier also says that nobody reads the stages any more.
  if (__syncthreads_or(!finite)) {
    accumulate<false>(args, base, m0, n0, first, last, total);
    __syncthreads();
  }

  const int column = n0 + column0 + lane % 4 * 2;
  if (args.parts > 1) {
    const int64_t columns = sum_columns(args.n);
    float* sums = args.sums + part * args.m * columns;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int64_t row = m0 + row0 + i / 16 * 16 + i / 2 % 2 * 8 + lane / 4;
      const int at = column + i / 4 % 4 * 8 + i % 2;
      if (row < args.m && at < args.n) sums[row * columns + at] = total[i / 16][i / 4 % 4][i % 4];
    }
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int at = column + j * 8;
    const float lo = args.bias && at < args.n ? __half2float(args.bias[at]) : 0.f;
    const float hi = args.bias && at + 1 < args.n ? __half2float(args.bias[at + 1]) : 0.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = row0 + i * 8 + lane / 4;
      const float (&v)[4] = total[i / 2][j];
      *reinterpret_cast<__half2*>(shared + row * kStaged + (column0 + j * 8 + lane % 4 * 2) * 2) =
          __floats2half2_rn(v[i % 2 * 2] + lo, v[i % 2 * 2 + 1] + hi);
    }
  }
  __syncthreads();
  const bool whole = args.ldy % 8 == 0 && reinterpret_cast<uintptr_t>(args.y) % 16 == 0;
  for (int i = thread; i < kTileM * kTileN / 8; i += kThreads) {
    const int row = i / (kTileN / 8), at = i % (kTileN / 8) * 8;
    if (m0 + row >= args.m) break;
    __half* to = args.y + (m0 + row) * args.ldy + n0 + at;
    const uint8_t* from = shared + row * kStaged + at * 2;
    if (whole && n0 + at + 8 <= args.n) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
    } else {
      for (int c = 0; c < 8 && n0 + at + c < args.n; ++c) to[c] = reinterpret_cast<const __half*>(from)[c];
    }
  }
}

// y = the parts' sums, added in order, + bias.
__global__ void __launch_bounds__(kThreads) f16acc_reduce_kernel(const __grid_constant__ Arguments args) {
  const int64_t columns = sum_columns(args.n), size = args.m * columns, step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < size; i += step) {
    const int64_t row = i / columns;
    const int column = int(i - row * columns);
    if (column >= args.n) continue;
    float sum = 0.f;
    for (int part = 0; part < args.parts; ++part) sum += args.sums[part * size + i];
    if (args.bias) sum += __half2float(args.bias[column]);
    args.y[row * args.ldy + column] = __float2half_rn(sum);
  }
}

}  // namespace

int launch_mma(const Arguments& args, cudaStream_t stream) {
  const int64_t ctas = int64_t(args.m_tiles) * args.n_tiles * args.parts;
  if (ctas > INT32_MAX) return TRIRUN_BAD_SHAPE;
  return launch_kernel(f16acc_mma_kernel, {dim3(unsigned(ctas)), kThreads, kBytes, stream, false}, args);
}

}  // namespace trirun::f16acc

extern "C" size_t trirun_cuda_f16acc_workspace(int64_t m, int64_t n, const trirun_f16acc_plan* plan) {
  using trirun::f16acc::sum_columns;
  return plan && plan->parts > 1 && m > 0 && n > 0 ? size_t(plan->parts) * m * sum_columns(n) * sizeof(float) : 0;
}

extern "C" int trirun_cuda_f16acc_gemm(const void* a, int64_t lda, const void* b, int64_t ldb, const void* bias,
                                       void* y, int64_t ldy, int64_t m, int64_t n, int64_t k,
                                       const trirun_f16acc_plan* plan, void* workspace, size_t workspace_bytes,
                                       void* stream) {
  using namespace trirun::f16acc;
  const auto aligned = [](const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; };
  if (!plan || !a || !b || !y || !aligned(a, 16) || !aligned(b, 16) || !aligned(bias, 2) || !aligned(y, 2))
    return TRIRUN_BAD_POINTER;
  constexpr int64_t most = INT32_MAX - 256;  // tiles may reach past the end
  if (m <= 0 || n <= 0 || k <= 0 || m > most || n > most || k > most) return TRIRUN_BAD_SHAPE;
  const bool a_rows = plan->along_rows & TRIRUN_F16ACC_A, b_rows = plan->along_rows & TRIRUN_F16ACC_B;
  if (lda < (a_rows ? m : k) || ldb < (b_rows ? n : k) || ldy < n || lda % 8 || ldb % 8) return TRIRUN_BAD_SHAPE;
  if (plan->tile_n != 128 && plan->tile_n != 256) return TRIRUN_UNSUPPORTED;
  if (plan->chunk <= 0 || plan->chunk % kStage || plan->parts < 1 || plan->parts > 64) return TRIRUN_UNSUPPORTED;
  if (workspace_bytes < trirun_cuda_f16acc_workspace(m, n, plan)) return TRIRUN_NO_WORKSPACE;
  if (plan->parts > 1 && (!workspace || !aligned(workspace, 16))) return TRIRUN_BAD_POINTER;
  trirun::DeviceFacts device;
  if (const int code = trirun::device_facts(device)) return code;
  if (device.arch < 80) return TRIRUN_UNSUPPORTED;

  Arguments args = {};
  args.a = static_cast<const __half*>(a), args.b = static_cast<const __half*>(b);
  args.bias = static_cast<const __half*>(bias), args.y = static_cast<__half*>(y);
  args.sums = static_cast<float*>(workspace);
  args.a_row = a_rows ? 1 : lda, args.a_column = a_rows ? lda : 1;
  args.b_row = b_rows ? 1 : ldb, args.b_column = b_rows ? ldb : 1;
  args.ldy = ldy, args.m = int(m), args.n = int(n), args.k = int(k);
  args.chunk = plan->chunk / kStage, args.parts = plan->parts;
  args.m_tiles = int((m + kTileM - 1) / kTileM), args.n_tiles = int((n + plan->tile_n - 1) / plan->tile_n);
  args.raster = 16;
  const auto on = static_cast<cudaStream_t>(stream);
  int code = TRIRUN_UNSUPPORTED;
  if (plan->kernel == TRIRUN_F16ACC_WGMMA && device.arch == 90)
    code = launch_wgmma(args, plan->tile_n, device.sms, on);
  else if (plan->kernel == TRIRUN_F16ACC_MMA && plan->tile_n == kTileN && !plan->along_rows)
    code = launch_mma(args, on);
  if (code != TRIRUN_OK || plan->parts == 1) return code;
  const int64_t blocks = (m * n + kThreads - 1) / kThreads;
  const dim3 grid(unsigned(blocks < 8 * device.sms ? blocks : 8 * device.sms));
  return trirun::launch_kernel(f16acc_reduce_kernel, {grid, kThreads, 0, on, false}, args);
}
