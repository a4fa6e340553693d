// The weighted sum of what a row's experts have computed, in order of rank, and of the shared expert's output; either
// through a norm of its own, where there is one.
#include "experts.cuh"
#include "cuda/decoder/launch.cuh"

namespace trirun::experts {
namespace {

constexpr int COMBINE_THREADS = 128;

// Eight 16-bit values times a factor to eight sums.
template <bool BF16>
__device__ __forceinline__ void add_eight(float (&sum)[8], const void* from, int64_t at, float factor) {
  const uint4 v = load_global4(static_cast<const uint16_t*>(from) + at);
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = decoder::widen_pair<BF16>(words[i]);
    sum[2 * i] = fmaf(factor, pair.x, sum[2 * i]), sum[2 * i + 1] = fmaf(factor, pair.y, sum[2 * i + 1]);
  }
}

// The weighted sum of eight columns of a row's experts.
template <bool BF16>
__device__ __forceinline__ void add_experts(float (&sum)[8], const trirun_combine& c, int64_t row, int column) {
#pragma unroll 4
  for (int j = 0; j < c.top_k; j++) {
    const int place = __ldcg(c.places + row * c.top_k + j);
    if (place >= 0) add_eight<BF16>(sum, c.x, place * c.ldx + column, __ldcg(c.weights + row * c.top_k + j));
  }
}

template <bool BF16>
__device__ __forceinline__ void store_eight(const trirun_combine& c, int64_t row, int column, const float (&v)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = decoder::narrow_pair<BF16>(v[2 * i], v[2 * i + 1]);
  auto* to = static_cast<uint16_t*>(c.y) + row * c.ldy + column;
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ float shared_weight(const trirun_combine& c, int64_t row) {
  return c.shared_weights != nullptr ? __ldcg(c.shared_weights + row) : 1.f;
}

template <bool BF16>
__global__ void __launch_bounds__(COMBINE_THREADS) combine(const __grid_constant__ trirun_combine c) {
  const int row = blockIdx.x, column = (blockIdx.y * COMBINE_THREADS + threadIdx.x) * 8;
  dependency_launch();
  dependency_wait();
  if (column >= c.n) return;
  float sum[8] = {};
  add_experts<BF16>(sum, c, row, column);
  if (c.shared != nullptr) add_eight<BF16>(sum, c.shared, row * c.ld_shared + column, shared_weight(c, row));
  store_eight<BF16>(c, row, column, sum);
}

// The same where the experts' sum or the shared output has a norm of its own: a CTA owns a row.
constexpr int NORMED_THREADS = 512;

template <bool BF16, int EIGHTS>
__global__ void __launch_bounds__(NORMED_THREADS) combine_normed(const __grid_constant__ trirun_combine c) {
  constexpr int WARPS = NORMED_THREADS / 32;
  __shared__ float2 squares[WARPS];  // of the experts' sum, and of the shared output
  const int row = blockIdx.x;
  const auto column_of = [&](int i) { return static_cast<int>(i * NORMED_THREADS + threadIdx.x) * 8; };
  dependency_launch();
  dependency_wait();
  float experts[EIGHTS][8] = {}, shared[EIGHTS][8] = {};
  float2 sum = make_float2(0.f, 0.f);
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    if (column_of(i) >= c.n) continue;
    add_experts<BF16>(experts[i], c, row, column_of(i));
    if (c.shared != nullptr) add_eight<BF16>(shared[i], c.shared, row * c.ld_shared + column_of(i), 1.f);
#pragma unroll
    for (int e = 0; e < 8; e++) sum.x += experts[i][e] * experts[i][e], sum.y += shared[i][e] * shared[i][e];
  }
  sum = make_float2(decoder::warp_sum(sum.x), decoder::warp_sum(sum.y));
  if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = threadIdx.x % 32 < WARPS ? squares[threadIdx.x % 32] : make_float2(0.f, 0.f);
  const auto factor = [&](const float* norm, float of) {
    return norm != nullptr ? rsqrtf(decoder::warp_sum(of) / c.n + c.eps) : 1.f;
  };
  const float of_experts = factor(c.norm, sum.x), of_shared = factor(c.shared_norm, sum.y) * shared_weight(c, row);
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    const int column = column_of(i);
    if (column >= c.n) continue;
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const float first = c.norm != nullptr ? __ldg(c.norm + column + e) : 1.f;
      const float second = c.shared_norm != nullptr ? __ldg(c.shared_norm + column + e) : 1.f;
      experts[i][e] = experts[i][e] * of_experts * first + shared[i][e] * of_shared * second;
    }
    store_eight<BF16>(c, row, column, experts[i]);
  }
}

// no-spill: combine_normed<*, *>
template <bool BF16>
auto normed_instance(int64_t n) {
  return n <= NORMED_THREADS * 8 ? combine_normed<BF16, 1> : combine_normed<BF16, 2>;
}

}  // namespace
}  // namespace trirun::experts

extern "C" int trirun_cuda_combine(const trirun_combine* combined, void* stream) {
  using namespace trirun;
  using namespace trirun::experts;
  if (combined == nullptr) return TRIRUN_BAD_POINTER;
  const trirun_combine& c = *combined;
  if (c.m < 0 || c.n <= 0 || c.n % 8 || c.n > (1 << 20) || c.ldx % 8 || c.ldy % 8 || c.ld_shared % 8 || c.top_k < 1)
    return TRIRUN_BAD_SHAPE;
  if (!decoder::half_dtype(c.dtype)) return TRIRUN_UNSUPPORTED;
  if (c.x == nullptr || c.places == nullptr || c.weights == nullptr || c.y == nullptr ||
      !decoder::aligned_to(c.x, 16) || !decoder::aligned_to(c.shared, 16) || !decoder::aligned_to(c.y, 16))
    return TRIRUN_BAD_POINTER;
  if (c.m == 0) return TRIRUN_OK;
  const bool bf16 = c.dtype == TRIRUN_BF16;
  if (c.norm != nullptr || c.shared_norm != nullptr) {
    if (c.n > NORMED_THREADS * 16) return TRIRUN_BAD_SHAPE;
    const auto kernel = bf16 ? normed_instance<true>(c.n) : normed_instance<false>(c.n);
    return decoder::launch_dependent(kernel, c, dim3(static_cast<unsigned>(c.m)), NORMED_THREADS, 0, stream);
  }
  const dim3 grid(static_cast<unsigned>(c.m), static_cast<unsigned>((c.n / 8 + COMBINE_THREADS - 1) / COMBINE_THREADS));
  const auto kernel = bf16 ? combine<true> : combine<false>;
  return decoder::launch_dependent(kernel, c, grid, COMBINE_THREADS, 0, stream);
}
