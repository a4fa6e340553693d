// Routing: which rows go to which experts, with which weights, and in which order the experts' products take them.
//
// One row: one cluster (route_one.cuh). Few rows (decoding): one launch. CTAs compute the logits of a few experts each;
// the last of them to arrive chooses and sorts, so that nothing but the launch itself lies between the router and the
// products. The router's weights are asked for while the kernel before still runs. Many rows: logits come from the
// caller; a warp chooses for a row, then a CTA per expert finds its pairs. No step depends on the order in which CTAs
// or atomics arrive: the same rows are routed the same way, of equals to the expert with the smaller index.
// no-spill: choose_rows<4>
// no-spill: route_few<*, 4>
// no-spill: sort_many
#include "choose.cuh"
#include "route_one.cuh"

#include <type_traits>

namespace trirun::experts {
namespace {

using decoder::aligned_to;

constexpr int FEW_THREADS = 512;
constexpr int FEW_PAIRS = 1024, FEW_ROWS = 64;  // pairs that one CTA sorts, rows that it multiplies
constexpr int CTA_EXPERTS = 4, K_PARTS = FEW_THREADS / 32 / CTA_EXPERTS;  // of a CTA of the router's product
constexpr int SORT_THREADS = 1024;

// Inclusive sums over the threads of a CTA, of at most 1024; `shared`: [32].
__device__ __forceinline__ int inclusive_sum(int v, int* shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const int other = __shfl_up_sync(~0u, v, offset);
    if (lane >= offset) v += other;
  }
  if (lane == 31) shared[warp] = v;
  __syncthreads();
  for (int w = 0; w < warp; w++) v += shared[w];
  __syncthreads();
  return v;
}

// Where every expert's rows and tiles begin, from its number of pairs. By a whole CTA of at least MOST_EXPERTS threads.
struct Starts {
  int rows[MOST_EXPERTS + 1], tiles[MOST_EXPERTS + 1];
  int sums[32];

  __device__ __forceinline__ void set(int experts, int tile_rows, int count) {
    const int e = threadIdx.x, mine = e < experts ? count : 0, of_tiles = (mine + tile_rows - 1) / tile_rows;
    const int row = inclusive_sum(mine, sums), tile = inclusive_sum(of_tiles, sums);
    if (e < experts) rows[e + 1] = row, tiles[e + 1] = tile;
    if (e == 0) rows[0] = tiles[0] = 0;
    __syncthreads();
  }
};

__device__ __forceinline__ void store_tiles(const trirun_route& r, const Starts& starts, int expert) {
  if (r.ends != nullptr) r.ends[expert] = starts.rows[expert + 1];
  const int first = starts.rows[expert], end = starts.rows[expert + 1];
  for (int i = 0; i < starts.tiles[expert + 1] - starts.tiles[expert]; i++) {
    const int row = first + i * r.tile_rows, left = end - row;
    store_tile(r.tiles, starts.tiles[expert] + i, {expert, row, left < r.tile_rows ? left : r.tile_rows});
  }
}

struct FewArgs {
  trirun_route r;
  int tile_bound;
};

// Sorts at most FEW_PAIRS pairs by their experts, `ids`. By one CTA of FEW_THREADS.
__device__ __forceinline__ void sort_few(const FewArgs& a, const int* ids) {
  __shared__ int counts[MOST_EXPERTS];
  __shared__ Starts starts;
  const trirun_route& r = a.r;
  const int pairs = static_cast<int>(r.m) * r.top_k;
  for (int e = threadIdx.x; e < r.experts; e += FEW_THREADS) counts[e] = 0;
  __syncthreads();
  for (int p = threadIdx.x; p < pairs; p += FEW_THREADS)
    if (ids[p] >= 0) atomicAdd(counts + ids[p], 1);
  __syncthreads();
  starts.set(r.experts, r.tile_rows, threadIdx.x < r.experts ? counts[threadIdx.x] : 0);
  for (int p = threadIdx.x; p < pairs; p += FEW_THREADS) {
    const int mine = ids[p];
    int before = 0;
#pragma unroll 8
    for (int q = 0; q < p; q++) before += ids[q] == mine;
    const int at = mine < 0 ? -1 : starts.rows[mine] + before;
    r.places[p] = at;
    if (at >= 0) r.order[at] = p;
  }
  for (int e = threadIdx.x; e < r.experts; e += FEW_THREADS) store_tiles(r, starts, e);
  for (int i = starts.tiles[r.experts] + threadIdx.x; i < a.tile_bound; i += FEW_THREADS)
    store_tile(r.tiles, i, {-1, 0, 0});
}

// Eight products of 16-bit values.
template <bool BF16>
__device__ __forceinline__ float dot8(uint4 x, uint4 w, float sum) {
  const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 a = decoder::widen_pair<BF16>(xs[i]), b = decoder::widen_pair<BF16>(ws[i]);
    sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
  }
  return sum;
}

// Logits of CTA_EXPERTS rows of the router; the last CTA chooses and sorts.
template <bool BF16, int PER_LANE>
__global__ void __launch_bounds__(FEW_THREADS, 1) route_few(const __grid_constant__ FewArgs a) {
  constexpr int ROWS = 4, EARLY = 4;  // rows of x at once; 16-byte loads of a lane that do not wait for x
  __shared__ float parts[K_PARTS][CTA_EXPERTS][FEW_ROWS];
  __shared__ float scores[FEW_THREADS / 32][PER_LANE * 32];
  __shared__ int ids[FEW_PAIRS];
  __shared__ bool last;
  const trirun_route& r = a.r;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int local = warp % CTA_EXPERTS, part = warp / CTA_EXPERTS, rows = static_cast<int>(r.m);
  const int outputs = r.experts + (r.shared_weights != nullptr), output = blockIdx.x * CTA_EXPERTS + local;
  const int chunks = r.k / 8, begin = chunks * part / K_PARTS, end = chunks * (part + 1) / K_PARTS;
  const auto* w =
      reinterpret_cast<const uint4*>(r.router) + static_cast<int64_t>(output < outputs ? output : 0) * chunks;
  uint4 early[EARLY];
#pragma unroll
  for (int i = 0; i < EARLY; i++) {
    early[i] = make_uint4(0, 0, 0, 0);
    if (begin + lane + 32 * i < end) early[i] = __ldg(w + begin + lane + 32 * i);
  }
  // In this order: experts_decode reads x before it waits.
  dependency_wait();
  dependency_launch();
  // The next `count` rows, of which `there` exist.
  const auto dots = [&](auto count, int row0, int there) {
    constexpr int COUNT = decltype(count)::value;
    float sum[COUNT] = {};
    const auto* x = static_cast<const uint16_t*>(r.x) + row0 * r.ldx;
    const auto add = [&](int at, uint4 v) {
#pragma unroll
      for (int j = 0; j < COUNT; j++)
        if (j < there) sum[j] = dot8<BF16>(__ldcg(reinterpret_cast<const uint4*>(x + j * r.ldx) + at), v, sum[j]);
    };
#pragma unroll
    for (int i = 0; i < EARLY; i++)
      if (begin + lane + 32 * i < end) add(begin + lane + 32 * i, early[i]);
#pragma unroll 2
    for (int at = begin + lane + 32 * EARLY; at < end; at += 32) add(at, __ldg(w + at));
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
      sum[j] = warp_sum(sum[j]);
      if (lane == 0 && j < there) parts[part][local][row0 + j] = sum[j];
    }
  };
  if (rows == 1)
    dots(std::integral_constant<int, 1>{}, 0, 1);
  else
    for (int row0 = 0; row0 < rows; row0 += ROWS)
      dots(std::integral_constant<int, ROWS>{}, row0, min(ROWS, rows - row0));
  __syncthreads();
  for (int i = threadIdx.x; i < CTA_EXPERTS * rows; i += FEW_THREADS) {
    const int row = i / CTA_EXPERTS, at = i % CTA_EXPERTS;
    float v = 0.f;
#pragma unroll
    for (int q = 0; q < K_PARTS; q++) v += parts[q][at][row];
    if (blockIdx.x * CTA_EXPERTS + at < outputs) __stcg(r.logits + row * r.ld + blockIdx.x * CTA_EXPERTS + at, v);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = count_arrival(r.counter) == gridDim.x - 1;
    if (last) *r.counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  if (rows == 1) {
    if (warp == 0) sort_one<PER_LANE>(r, a.tile_bound, choose<PER_LANE>(r, 0, scores[0]));
    return;
  }
  for (int row = warp; row < rows; row += FEW_THREADS / 32) {
    const int expert = choose<PER_LANE>(r, row, scores[warp]);
    if (lane < r.top_k) ids[row * r.top_k + lane] = expert;
  }
  __syncthreads();
  sort_few(a, ids);
}

constexpr int CHOOSE_WARPS = 8;

template <int PER_LANE>
__global__ void __launch_bounds__(CHOOSE_WARPS * 32) choose_rows(const __grid_constant__ trirun_route r) {
  __shared__ float scores[CHOOSE_WARPS][PER_LANE * 32];
  dependency_launch();
  dependency_wait();
  const int row = blockIdx.x * CHOOSE_WARPS + threadIdx.x / 32;
  if (row < r.m) choose<PER_LANE>(r, row, scores[threadIdx.x / 32]);
}

// CTA e finds the pairs of expert e among all; the first one also writes where experts begin.
__global__ void __launch_bounds__(SORT_THREADS) sort_many(const __grid_constant__ FewArgs a) {
  __shared__ int counts[MOST_EXPERTS], found[SORT_THREADS / 32];
  __shared__ Starts starts;
  const trirun_route& r = a.r;
  const int pairs = static_cast<int>(r.m) * r.top_k, expert = blockIdx.x, lane = threadIdx.x % 32,
            warp = threadIdx.x / 32;
  for (int e = threadIdx.x; e < r.experts; e += SORT_THREADS) counts[e] = 0;
  __syncthreads();
  dependency_launch();
  dependency_wait();
  for (int p = threadIdx.x; p < pairs; p += SORT_THREADS) {
    const int id = __ldcg(r.ids + p);
    if (id >= 0) atomicAdd(counts + id, 1);
    if (id < 0 && expert == 0) r.places[p] = -1;
  }
  __syncthreads();
  starts.set(r.experts, r.tile_rows, threadIdx.x < r.experts ? counts[threadIdx.x] : 0);
  int at = starts.rows[expert];
  for (int p0 = 0; p0 < pairs && at < starts.rows[expert + 1]; p0 += SORT_THREADS) {
    const int p = p0 + threadIdx.x;
    const bool mine = p < pairs && __ldcg(r.ids + p) == expert;
    const unsigned votes = __ballot_sync(~0u, mine);
    if (lane == 0) found[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1)), all = 0;
    for (int w = 0; w < SORT_THREADS / 32; w++) {
      if (w < warp) before += found[w];
      all += found[w];
    }
    if (mine) r.places[p] = at + before, r.order[at + before] = p;
    at += all;
    __syncthreads();
  }
  if (threadIdx.x == 0) store_tiles(r, starts, expert);
  if (expert == 0)
    for (int i = starts.tiles[r.experts] + threadIdx.x; i < a.tile_bound; i += SORT_THREADS)
      store_tile(r.tiles, i, {-1, 0, 0});
}

int check(const trirun_route& r) {
  if (r.m < 0 || r.experts < 1 || r.experts > MOST_EXPERTS || r.top_k < 1 || r.top_k > MOST_CHOSEN ||
      r.top_k > r.experts || r.ld < r.experts + (r.shared_weights != nullptr) || r.tile_rows < 1 ||
      r.m * r.top_k > (1 << 30))
    return TRIRUN_BAD_SHAPE;
  if (r.groups < 1 || r.groups > 32 || r.experts % r.groups || r.top_groups < 1 || r.top_groups > r.groups)
    return TRIRUN_BAD_SHAPE;
  // Experts of the chosen groups alone must fill the choice.
  if (r.groups > 1 && (r.experts / r.groups < 2 || r.top_groups * (r.experts / r.groups) < r.top_k))
    return TRIRUN_BAD_SHAPE;
  if (r.score != TRIRUN_ROUTE_SOFTMAX && r.score != TRIRUN_ROUTE_SIGMOID) return TRIRUN_UNSUPPORTED;
  if (r.logits == nullptr || r.weights == nullptr || r.ids == nullptr || r.places == nullptr || r.order == nullptr ||
      r.tiles == nullptr || !aligned_to(r.tiles, 16))
    return TRIRUN_BAD_POINTER;
  if (r.rows != nullptr && (r.x == nullptr || r.rows->y != r.x)) return TRIRUN_BAD_POINTER;
  if (r.rows != nullptr && (r.rows->m != r.m || r.rows->n != r.k || r.rows->dtype != r.dtype)) return TRIRUN_BAD_SHAPE;
  if (r.x == nullptr) return TRIRUN_OK;
  if (!decoder::half_dtype(r.dtype)) return TRIRUN_UNSUPPORTED;
  if (r.m > FEW_ROWS || r.m * r.top_k > FEW_PAIRS || r.k < 8 || r.k % 8 || r.ldx % 8) return TRIRUN_BAD_SHAPE;
  const bool there = r.router != nullptr && r.counter != nullptr && aligned_to(r.x, 16) && aligned_to(r.router, 16);
  return there ? TRIRUN_OK : TRIRUN_BAD_POINTER;
}

}  // namespace
}  // namespace trirun::experts

extern "C" int64_t trirun_cuda_expert_tiles(int64_t m, int64_t experts, int64_t top_k, int64_t tile_rows) {
  return m < 0 || experts < 1 || top_k < 1 || tile_rows < 1 ? 0
                                                            : trirun::experts::tile_bound(m, experts, top_k, tile_rows);
}

extern "C" int trirun_cuda_route(const trirun_route* route, void* stream) {
  using namespace trirun;
  using namespace trirun::experts;
  using decoder::launch_dependent;
  if (route == nullptr) return TRIRUN_BAD_POINTER;
  if (const int code = check(*route)) return code;
  if (route->m == 0) return TRIRUN_OK;
  const trirun_route& r = *route;
  const FewArgs a{r, static_cast<int>(tile_bound(r.m, r.experts, r.top_k, r.tile_rows))};
  if (r.x != nullptr) {
    const int outputs = r.experts + (r.shared_weights != nullptr);
    const dim3 grid(static_cast<unsigned>((outputs + CTA_EXPERTS - 1) / CTA_EXPERTS));
    const bool bf16 = r.dtype == TRIRUN_BF16;
    DeviceFacts facts;
    if (const int code = device_facts(facts)) return code;
    const bool one = facts.arch >= 90 && is_one(r);
    const bool makes = one && r.rows != nullptr && makes_row(*r.rows);
    if (r.rows != nullptr && !makes)
      if (const int code = trirun_cuda_rows(r.rows, stream)) return code;
    if (one) return launch_one(r, makes ? r.rows : nullptr, static_cast<cudaStream_t>(stream));
    const auto small = bf16 ? route_few<true, 4> : route_few<false, 4>;
    const auto large = bf16 ? route_few<true, MOST_EXPERTS / 32> : route_few<false, MOST_EXPERTS / 32>;
    return launch_dependent(r.experts <= 128 ? small : large, a, grid, FEW_THREADS, 0, stream);
  }
  const dim3 grid(static_cast<unsigned>((r.m + CHOOSE_WARPS - 1) / CHOOSE_WARPS));
  const auto kernel = r.experts <= 128 ? choose_rows<4> : choose_rows<MOST_EXPERTS / 32>;
  if (const int code = launch_dependent(kernel, r, grid, CHOOSE_WARPS * 32, 0, stream)) return code;
  return launch_dependent(sort_many, a, dim3(static_cast<unsigned>(r.experts)), SORT_THREADS, 0, stream);
}
