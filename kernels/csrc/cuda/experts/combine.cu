// The weighted sum of what a row's experts have computed, in order of rank, and of the shared expert's output.
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

template <bool BF16>
__global__ void __launch_bounds__(COMBINE_THREADS) combine(const __grid_constant__ trirun_combine c) {
  const int64_t row = blockIdx.x, column = (blockIdx.y * COMBINE_THREADS + threadIdx.x) * 8;
  dependency_launch();
  dependency_wait();
  if (column >= c.n) return;
  float sum[8] = {};
#pragma unroll 4
  for (int j = 0; j < c.top_k; j++) {
    const int place = __ldcg(c.places + row * c.top_k + j);
    if (place >= 0) add_eight<BF16>(sum, c.x, place * c.ldx + column, __ldcg(c.weights + row * c.top_k + j));
  }
  if (c.shared != nullptr) {
    const float weight = c.shared_weights != nullptr ? __ldcg(c.shared_weights + row) : 1.f;
    add_eight<BF16>(sum, c.shared, row * c.ld_shared + column, weight);
  }
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; i++) words[i] = decoder::narrow_pair<BF16>(sum[2 * i], sum[2 * i + 1]);
  auto* to = static_cast<uint16_t*>(c.y) + row * c.ldy + column;
  *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
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
  const dim3 grid(static_cast<unsigned>(c.m), static_cast<unsigned>((c.n / 8 + COMBINE_THREADS - 1) / COMBINE_THREADS));
  const auto kernel = c.dtype == TRIRUN_BF16 ? combine<true> : combine<false>;
  return decoder::launch_dependent(kernel, c, grid, COMBINE_THREADS, 0, stream);
}
