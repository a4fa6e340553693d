// Routing of a single row among at most 128 experts by one cluster, which may make the row before: what a layer's
// attention adds to the residual stream, and the norm behind it. What one row takes is not work but the way from one
// result to the next, so everything is done by as many as can:
// - Every CTA makes the row for itself. What others read of it is stored by CTAs that have nothing to choose.
// - A CTA has sixteen experts, which tensor cores multiply at once, and each of its warps a sixteenth of k.
// - Logits meet in the first CTA's shared memory, which takes a third of the time of a counter in L2. An expert's place
//   is the number of those before it, which four threads count.
// no-spill: route_one<*, *>
#pragma once

#include "choose.cuh"
#include "cuda/common/hopper.cuh"
#include "cuda/decoder/limbs.cuh"

namespace trirun::experts {

constexpr int ONE_THREADS = 512, ONE_WARPS = ONE_THREADS / 32;
constexpr int ONE_CLUSTER = 8, CTA_ROUTES = 16, ONE_EXPERTS = ONE_CLUSTER * CTA_ROUTES;  // experts of a CTA, of all
constexpr int ONE_TILES = 4;  // k tiles of a warp that makes the row, at most
constexpr int ONE_K = ONE_TILES * ONE_WARPS * K_TILE;
constexpr int ONE_CHUNK = 32;  // k of two products of tensor cores

struct OneArgs {
  trirun_route r;
  int tile_bound;
  trirun_rows rows;  // what makes x, of one row
  decoder::LimbRows quantized;
};

// The row of a.rows, of which a thread has four columns in each of its warp's k tiles.
template <bool BF16, int TILES>
struct MadeRow {
  float4 residual[TILES], value[TILES];  // value: the norm's weights, until `normalise`

  static __device__ __forceinline__ int k_tile_of(int i) { return threadIdx.x / 32 + i * ONE_WARPS; }
  static __device__ __forceinline__ int column_of(int i) {
    const int lane = threadIdx.x % 32;
    return k_tile_of(i) * K_TILE + (lane >> 2) * 16 + lane % 4 * 2;
  }

  static __device__ __forceinline__ float4 four(const float* vector, int column) {
    const float2 low = __ldcg(reinterpret_cast<const float2*>(vector + column));
    const float2 high = __ldcg(reinterpret_cast<const float2*>(vector + column + 8));
    return make_float4(low.x, low.y, high.x, high.y);
  }

  __device__ __forceinline__ void load_norm(const trirun_rows& r) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
      value[i] = column_of(i) < r.n ? four(r.norm, column_of(i)) : make_float4(0.f, 0.f, 0.f, 0.f);
  }

  // This thread's part of the sum of squares.
  __device__ __forceinline__ float load(const trirun_rows& r) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const int column = column_of(i);
      residual[i] = make_float4(0.f, 0.f, 0.f, 0.f);
      if (column >= r.n) continue;
      const auto* words = reinterpret_cast<const unsigned*>(static_cast<const uint16_t*>(r.x) + column);
      const float2 low = decoder::widen_pair<BF16>(__ldcg(words)), high = decoder::widen_pair<BF16>(__ldcg(words + 4));
      float4 v = four(r.residual, column);
      v = make_float4(fmaf(low.x, r.scale, v.x), fmaf(low.y, r.scale, v.y),  //
                      fmaf(high.x, r.scale, v.z), fmaf(high.y, r.scale, v.w));
      sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      residual[i] = v;
    }
    return sum;
  }

  // words: the row as 16-bit values, two to a word, in shared memory.
  __device__ __forceinline__ void normalise(const trirun_rows& r, float inverse, uint32_t* words) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const float4 v = residual[i], w = value[i];
      value[i] = make_float4(v.x * inverse * w.x, v.y * inverse * w.y, v.z * inverse * w.z, v.w * inverse * w.w);
      const int at = column_of(i) / 2;
      if (column_of(i) >= r.n) continue;
      words[at] = decoder::narrow_pair<BF16>(value[i].x, value[i].y);
      words[at + 4] = decoder::narrow_pair<BF16>(value[i].z, value[i].w);
    }
  }

  // The stream and the row, as values and quantized: every k tile by one of the CTAs but the first. Once all have read
  // the stream. maxima: [ONE_WARPS].
  __device__ __forceinline__ void store(const OneArgs& a, uint32_t rank, const uint32_t* words, uint32_t* maxima) {
    const trirun_rows& r = a.rows;
    const int lane = threadIdx.x % 32;
    const bool wanted = a.quantized.limbs != nullptr, two = r.act_bits == TRIRUN_ACT16;
    float scale = 0.f;
    if (wanted && !two) {
      uint32_t most = 0;
#pragma unroll
      for (int i = 0; i < TILES; i++) most = max(most, magnitude_bits(value[i]));
      most = __reduce_max_sync(~0u, most);
      if (lane == 0) maxima[threadIdx.x / 32] = most;
      __syncthreads();
      scale = act8_scale(__reduce_max_sync(~0u, lane < ONE_WARPS ? maxima[lane] : 0));
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
      const int column = column_of(i), k_tile = k_tile_of(i);
      if (k_tile % (ONE_CLUSTER - 1) + 1 != rank) continue;
      if (column < r.n) {
        *reinterpret_cast<float2*>(r.residual + column) = make_float2(residual[i].x, residual[i].y);
        *reinterpret_cast<float2*>(r.residual + column + 8) = make_float2(residual[i].z, residual[i].w);
        auto* y = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(r.y) + column);
        y[0] = words[column / 2], y[4] = words[column / 2 + 4];
      }
      if (wanted && k_tile < a.quantized.k_tiles)
        a.quantized.store(two ? quantize_k_tile16(value[i]) : quantize_k_tile8(value[i], scale), 0, k_tile, two);
    }
  }
};

// TILES: k tiles of the row that a warp makes; 0: x is there.
template <bool BF16, int TILES>
__global__ void __launch_bounds__(ONE_THREADS, 1) route_one(const __grid_constant__ OneArgs a) {
#if __CUDA_ARCH__ >= 900
  using Type = std::conditional_t<BF16, __nv_bfloat16, __half>;
  constexpr int EARLY = TILES > 2 ? 3 : 4;  // chunks of a warp whose weights are in registers before x is there
  __shared__ float parts[ONE_WARPS][CTA_ROUTES], sums[ONE_WARPS];
  __shared__ float logits[ONE_EXPERTS + CTA_ROUTES], best_scores[32];
  __shared__ int before[ONE_EXPERTS], best[32];
  __shared__ uint32_t maxima[ONE_WARPS];
  __shared__ __align__(16) uint32_t keys[ONE_EXPERTS], made[TILES > 0 ? TILES * ONE_WARPS * K_TILE / 2 : 4];
  const trirun_route& r = a.r;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, sub = lane % 4;
  const uint32_t rank = cluster_rank();
  const int outputs = r.experts + (r.shared_weights != nullptr), k = static_cast<int>(r.k);
  const int chunks = (k + ONE_CHUNK - 1) / ONE_CHUNK, mine = chunks * warp / ONE_WARPS,
            end = chunks * (warp + 1) / ONE_WARPS;
  // A lane's operands, of k in any order that is the same in all: eight of k of experts quad and quad + 8, or of x.
  const auto column_of = [&](int chunk) { return chunk * ONE_CHUNK + sub * 8; };
  const auto weight_at = [&](int expert, int chunk) {
    return static_cast<const uint16_t*>(r.router) + static_cast<int64_t>(expert) * k + column_of(chunk);
  };
  const auto weights = [&](int expert, int chunk) {
    const bool there = expert < outputs && chunk < end && column_of(chunk) < k;
    return there ? __ldg(reinterpret_cast<const uint4*>(weight_at(expert, chunk))) : make_uint4(0, 0, 0, 0);
  };
  const int expert = static_cast<int>(rank) * CTA_ROUTES + quad;
  uint4 early[EARLY][2];
#pragma unroll
  for (int i = 0; i < EARLY; i++) early[i][0] = weights(expert, mine + i), early[i][1] = weights(expert + 8, mine + i);
  for (int chunk = mine + EARLY; chunk < end; chunk++)
    for (int e : {expert, expert + 8})
      if (e < outputs && column_of(chunk) < k) prefetch_l2(weight_at(e, chunk));
  // Of the expert that a thread of the first CTA chooses or not.
  const int candidate = static_cast<int>(threadIdx.x) % ONE_EXPERTS;
  float bias = 0.f, correction = 0.f;
  bool padding = false;
  if (rank == 0) {
    if (candidate < r.experts) {
      if (r.bias != nullptr) bias = __ldg(r.bias + candidate);
      if (r.correction != nullptr) correction = __ldg(r.correction + candidate);
      // Which of them are wanted is known when nothing else is left to wait for.
      if (r.expert_scale != nullptr) prefetch_l2(r.expert_scale + candidate);
    }
    padding = r.slots != nullptr && __ldg(r.slots) < 0;
    if (threadIdx.x < ONE_EXPERTS) before[threadIdx.x] = 0;
  }
  MadeRow<BF16, (TILES > 0 ? TILES : 1)> row;
  if (TILES > 0) row.load_norm(a.rows);
  if (TILES == 0) cluster_arrive();
  // In this order: experts_decode may read an x that is older than this kernel before it waits.
  dependency_wait();
  dependency_launch();
  if (TILES > 0) {
    const float sum = warp_sum(row.load(a.rows));
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    cluster_arrive();  // the residual stream is read
    const float all = warp_sum(lane < ONE_WARPS ? sums[lane] : 0.f);
    row.normalise(a.rows, rsqrtf(all / static_cast<float>(a.rows.n) + a.rows.eps), made);
    __syncthreads();
  }
  const auto x = [&](int chunk) {
    if (column_of(chunk) >= k) return make_uint4(0, 0, 0, 0);
    if (TILES > 0) return *reinterpret_cast<const uint4*>(made + column_of(chunk) / 2);
    return __ldcg(reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(r.x) + column_of(chunk)));
  };
  bool met = false;
  for (int first = static_cast<int>(rank) * CTA_ROUTES; first < outputs; first += ONE_EXPERTS) {
    float sum[2][4] = {};
    const auto add = [&](uint4 low, uint4 high, uint4 v) {
      mma_16bit<Type>(sum[0], {low.x, high.x, low.y, high.y}, v.x, v.y);
      mma_16bit<Type>(sum[1], {low.z, high.z, low.w, high.w}, v.z, v.w);
    };
    int chunk = mine;
    if (first + quad == expert) {
#pragma unroll
      for (int i = 0; i < EARLY; i++)
        if (mine + i < end) add(early[i][0], early[i][1], x(mine + i));
      chunk += EARLY;
    }
#pragma unroll 2
    for (; chunk < end; chunk++) add(weights(first + quad, chunk), weights(first + quad + 8, chunk), x(chunk));
    // All eight columns are x.
    if (sub == 0) parts[warp][quad] = sum[0][0] + sum[1][0], parts[warp][quad + 8] = sum[0][2] + sum[1][2];
    __syncthreads();
    if (!met) cluster_wait();
    met = true;
    if (threadIdx.x < CTA_ROUTES) {
      float logit = 0.f;
#pragma unroll
      for (int w = 0; w < ONE_WARPS; w++) logit += parts[w][threadIdx.x];
      store_peer(peer_address(shared_address(logits + first + threadIdx.x), 0), logit);
    }
    if (first + ONE_EXPERTS < outputs) __syncthreads();
  }
  if (!met) cluster_wait();
  __syncwarp();
  cluster_arrive();
  if (TILES > 0 && rank > 0) row.store(a, rank, made, maxima);
  if (rank > 0) return;
  cluster_wait();
  // The logits of a softmax have the order of its values.
  float score = candidate < r.experts ? logits[candidate] + bias : -INFINITY;
  if (r.score == TRIRUN_ROUTE_SIGMOID) score = sigmoid(score);
  const uint32_t key = candidate < r.experts ? key_of(score + correction) : 0;
  if (threadIdx.x < ONE_EXPERTS) keys[threadIdx.x] = key;
  __syncthreads();
  // Before an expert are those with a higher key, and of the same those with a smaller index: of 32 that all lanes of a
  // warp compare with theirs, either all or none have, or those of lanes before.
  const int first = static_cast<int>(threadIdx.x) / ONE_EXPERTS * 32, own = candidate & ~31;
  const uint32_t smaller = first < own ? ~0u : first > own ? 0u : (1u << lane) - 1;
  int higher = 0;
#pragma unroll
  for (int e = 0; e < 32; e += 4) {
    const uint4 other = *reinterpret_cast<const uint4*>(keys + first + e);
    const uint32_t others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int i = 0; i < 4; i++) higher += others[i] > key - (smaller >> (e + i) & 1);
  }
  atomicAdd(before + candidate, higher);
  __syncthreads();
  if (threadIdx.x < ONE_EXPERTS && key != 0 && before[candidate] < r.top_k)
    best[before[candidate]] = candidate, best_scores[before[candidate]] = score;
  __syncthreads();
  if (warp > 0) return;
  score = lane < r.top_k ? best_scores[lane] : -INFINITY;
  float sum = 1.f;
  if (r.score == TRIRUN_ROUTE_SOFTMAX) {
    const float most = best_scores[0];
    score = expf(score - most);
    if (!r.normalize) {
      sum = 0.f;
      for (int e = lane; e < r.experts; e += 32) sum += expf(logits[e] + (r.bias != nullptr ? r.bias[e] : 0.f) - most);
      sum = warp_sum(sum);
    }
  }
  if (r.shared_weights != nullptr && lane == 0) r.shared_weights[0] = sigmoid(logits[r.experts]);
  sort_one<ONE_EXPERTS / 32>(r, a.tile_bound, store_choice(r, 0, padding, best[lane], score, sum));
#endif
}

using OneKernel = void (*)(OneArgs);

template <bool BF16>
OneKernel one_kernel(int tiles) {
  if (tiles == 0) return route_one<BF16, 0>;
  if (tiles == 1) return route_one<BF16, 1>;
  return tiles == 2 ? route_one<BF16, 2> : route_one<BF16, ONE_TILES>;
}

// Whether route_one can make the row that it routes.
inline bool makes_row(const trirun_rows& r) {
  return r.source == TRIRUN_ROWS_RESIDUAL && r.mixed == nullptr && r.x != nullptr && r.norm != nullptr &&
         r.norm_bias == nullptr && !r.centered && r.output_scale == 1 && r.m == 1 && r.n <= ONE_K;
}

// Whether route_one runs a route: choices of groups, and of a softmax's values themselves, need all of them.
inline bool is_one(const trirun_route& r) {
  return r.m == 1 && r.experts <= ONE_EXPERTS && r.groups == 1 &&
         (r.score == TRIRUN_ROUTE_SIGMOID || r.correction == nullptr);
}

// rows: what makes x, or null.
inline int launch_one(const trirun_route& r, const trirun_rows* rows, cudaStream_t stream) {
  OneArgs a{r, static_cast<int>(tile_bound(1, r.experts, r.top_k, r.tile_rows))};
  int tiles = 0;
  if (rows != nullptr) {
    if (const int code = decoder::check_rows(*rows)) return code;
    const int64_t k_tiles = (rows->n + K_TILE - 1) / K_TILE;
    a.rows = *rows, tiles = static_cast<int>((k_tiles + ONE_WARPS - 1) / ONE_WARPS);
    if (rows->activations != nullptr)
      a.quantized = decoder::LimbRows(rows->activations, 1, k_tiles * K_TILE, rows->act_bits);
  }
  const OneKernel kernel = r.dtype == TRIRUN_BF16 ? one_kernel<true>(tiles) : one_kernel<false>(tiles);
  return decoder::launch_dependent(kernel, a, dim3(ONE_CLUSTER), ONE_THREADS, 0, stream, ONE_CLUSTER);
}

}  // namespace trirun::experts
