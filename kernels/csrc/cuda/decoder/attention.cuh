// What the two kernels of decode attention share, on a cache of 16-bit and of 8-bit elements: which keys a
// CTA attends to, and how the parts of a row are put together.
#pragma once

#include "limbs.cuh"
#include "heads.cuh"
#include "cuda/common/hopper.cuh"

#include <type_traits>

namespace trirun::decoder {

constexpr int ATTEND_WARPS = 4;
constexpr int MAX_GROUP = 8;  // query heads of one CTA
constexpr int MAX_CLUSTER = 8;
constexpr int NEAR_TILES = 4;  // of a warp, up to which the CTAs of one cluster have all keys of a row

struct AttentionArgs {
  trirun_attention t;
  float* partials;  // weighted values of [m][heads][splits][head_dim] numbers, then their maxima (log2) and sums
  unsigned* counters;  // [m * kv_heads * chunks][MAX_GROUP], zero between launches
  int group, chunks;   // query heads per key head; CTAs that share them
  int room;            // query heads that a warp leaves parts of, at most MAX_GROUP
  int teams;           // of warps in a CTA, with a key head each; more than one only where chunks are 1
  int cluster;         // CTAs of a cluster, which share a row's keys; 1 where there are none
  int unit;            // query heads that one CTA of a cluster puts together: whole k tiles, if limbs are wanted
  LimbRows quantized;  // of y, if it is wanted so
};

using AttentionKernel = void (*)(AttentionArgs);

// Of attention_bf16.cu and attention_fp16.cu: the kernel whose warps have room for so many query heads. shared_bytes:
// its dynamic shared memory, beside which the parts of all splits may lie.
AttentionKernel bf16_attention(int head_dim, int room, int& shared_bytes);
AttentionKernel fp16_attention(int head_dim, int room, int& shared_bytes);

// Of attention_int8.cu: the same on such a device. few: the instance for no more CTAs than multiprocessors.
AttentionKernel int8_attention(const DeviceFacts& device, bool bf16, int head_dim, bool few, int& shared_bytes);

// c * tanh(score / c), as tanh(y) = 1 - 2 / (e^(2y) + 1), of a score and a c in units of log2(e).
__device__ __forceinline__ float softened(float score, float softcap) {
  return softcap - __fdividef(2.f * softcap, exp2f(score * __fdividef(2.f * LOG2E, softcap)) + 1.f);
}

// Which keys, of which row, for which query heads, a CTA attends to; kv_head is its first team's. Tiles of `keys`
// positions from that of `begin`, the first that the row sees, are dealt to the splits one after another.
// `clusters` have some; this CTA is the `rank`-th of the `members` that have some in the `of_clusters`-th.
struct AttentionSplit {
  int split, kv_head, chunk, row, slot, length, begin, tile0, tile1, active, head0, heads;
  int of_clusters, clusters, rank, members;
  bool idle, newest;

  __device__ __forceinline__ AttentionSplit(const AttentionArgs& a, int keys) {
    const trirun_attention& t = a.t;
    split = blockIdx.x, kv_head = blockIdx.y / a.chunks * a.teams, chunk = blockIdx.y % a.chunks, row = blockIdx.z;
    // Rows beyond the batch belong to no slot.
    slot = row < t.m ? t.slots[row] : -1;
    length = slot < 0 ? 0 : t.positions[row];  // keys in the cache; the new one comes on top
    // The new one is of the window too.
    begin = t.window > 0 ? max(0, length + 1 - t.window) : 0;
    const int first = begin / keys, end = begin < length ? (length + keys - 1) / keys : first;
    // Every warp gets as many tiles as the first one: fewer CTAs leave fewer parts, and none takes longer. A cluster
    // puts its parts together long before two of them would: one does it all while its warps have few tiles.
    const int tiles = end - first, warps = ATTEND_WARPS / a.teams, most = static_cast<int>(t.splits) / a.cluster;
    const int near = a.cluster * warps * NEAR_TILES;
    const int sharing = (a.cluster == 1 ? most : max(1, min(most, (tiles + near - 1) / near))) * a.cluster * warps;
    const int per_split = max(1, (tiles + sharing - 1) / sharing) * warps;
    active = max(1, (tiles + per_split - 1) / per_split);
    clusters = (active + a.cluster - 1) / a.cluster, of_clusters = split / a.cluster, rank = split % a.cluster;
    members = min(a.cluster, active - of_clusters * a.cluster);
    tile0 = first + split * per_split, tile1 = min(end, tile0 + per_split);
    idle = slot < 0 || split >= active, newest = split == active - 1;
    head0 = kv_head * a.group + chunk * MAX_GROUP, heads = min(MAX_GROUP, a.teams * a.group - chunk * MAX_GROUP);
  }
};

// What makes the query heads and keys of a row whose next position is `position`: each by a warp, in shared memory.
template <bool BF16, int PER_LANE>
struct HeadMaker {
  HeadConstants<PER_LANE> query_constants, key_constants;

  __device__ __forceinline__ HeadMaker(const trirun_attention& t, int position, int head_dim) {
    const float* cosines = t.cosines + static_cast<int64_t>(position) * t.rotary_half;
    const float* sines = t.sines + static_cast<int64_t>(position) * t.rotary_half;
    query_constants.load(cosines, sines, t.q_norm, t.rotary_half, head_dim, t.interleaved);
    key_constants.load(cosines, sines, t.k_norm, t.rotary_half, head_dim, t.interleaved);
  }

  __device__ __forceinline__ void query(float* values, float (&v)[PER_LANE], const trirun_attention& t,
                                        float scale) const {
    turn_head(values, v, query_constants, static_cast<int>(t.head_dim), t.q_norm != nullptr, t.eps, t.rotary_half,
              t.interleaved, scale);
  }

  __device__ __forceinline__ void key(float* values, float (&v)[PER_LANE], const trirun_attention& t) const {
    turn_head(values, v, key_constants, static_cast<int>(t.head_dim), t.k_norm != nullptr, t.eps, t.rotary_half,
              t.interleaved, 1.f);
  }

  // Query heads and the new keys behind them, which the warps take in turn. A warp asks for all of its own before it
  // makes the first; of(i): where the i-th lies; made(i, v).
  template <int MOST, typename Of, typename Made>
  __device__ __forceinline__ static void take(int count, int head_dim, Of of, Made made) {
    constexpr int OF_WARP = (MOST + ATTEND_WARPS - 1) / ATTEND_WARPS;
    const int warp = threadIdx.x / 32;
    float v[OF_WARP][PER_LANE];
#pragma unroll
    for (int j = 0; j < OF_WARP; j++)
      if (warp + j * ATTEND_WARPS < count) load_head<BF16>(v[j], of(warp + j * ATTEND_WARPS), head_dim);
#pragma unroll
    for (int j = 0; j < OF_WARP; j++)
      if (warp + j * ATTEND_WARPS < count) made(warp + j * ATTEND_WARPS, v[j]);
  }
};

// Waits for the projection, once what can be asked for before it has been.
__device__ __forceinline__ void await_projection(const AttentionArgs& a) {
#if __CUDA_ARCH__ >= 900
  if (a.cluster > 1) cluster_arrive();
#endif
  dependency_launch();
  dependency_wait();
}

// What an idle CTA leaves behind: limbs of zero for a row that belongs to no slot.
__device__ __forceinline__ void attend_nothing(const AttentionArgs& a, const AttentionSplit& c) {
  if (c.slot >= 0 || c.split != 0 || a.quantized.limbs == nullptr) return;
  for (int k_tile = threadIdx.x / 32; k_tile < c.heads * a.t.head_dim / K_TILE; k_tile += ATTEND_WARPS)
    a.quantized.store({{0, 0}, 0.f, 0}, c.row, c.head0 * a.t.head_dim / K_TILE + k_tile, true);
}

// Floats from one part of a warp to the next: `width` values, the maximum that they are relative to (log2), the sum of
// weights, and two that keep the next part on 16 bytes.
__host__ __device__ constexpr int part_floats(int width) { return width + 4; }

// Bytes of shared memory that put_together needs of its CTA, of so many query heads at most.
__host__ __device__ constexpr int scratch_bytes(int room, int width, int splits) {
  return (ATTEND_WARPS * room * part_floats(width) + MAX_GROUP * width + 2 * MAX_GROUP * splits) * 4;
}

__device__ __forceinline__ void add_scaled(float4& sum, float4 v, float factor) {
  sum.x = fmaf(v.x, factor, sum.x), sum.y = fmaf(v.y, factor, sum.y);
  sum.z = fmaf(v.z, factor, sum.z), sum.w = fmaf(v.w, factor, sum.w);
}

// Floats that a CTA receives of the CTAs of its cluster: of every unit that it puts together values, then maxima and
// sums.
__host__ __device__ inline int received_floats(int heads, int unit, int cluster, int head_dim) {
  const int units = (heads + unit - 1) / unit;
  int most = 0;
  for (int members = 1; members <= cluster; members++) {
    const int parts = (units + members - 1) / members * members;
    most = parts > most ? parts : most;
  }
  return most * unit * (head_dim + 2);
}

// The end of a CTA whose warps have left their parts in shared memory: that of warp w and its team's head g is at
// parts[(w * room + g) * part_floats(width)], of whose values head_dim are read; behind all of them is memory for
// scratch_bytes. Adds them in the order of warps, of CTAs and then of clusters, and writes y or its limbs. The CTAs of a
// cluster put a unit of heads together each, in received_floats of `received`; clusters meet in the workspace.
template <bool BF16>
__device__ __forceinline__ void put_together(const AttentionArgs& a, const AttentionSplit& c, float* parts, int room,
                                             int width, int teams, float* received) {
  constexpr int THREADS = ATTEND_WARPS * 32;
  __shared__ bool last;
  __shared__ float denominators[MAX_GROUP];
  const trirun_attention& t = a.t;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head_dim = t.head_dim, heads = c.heads, part_size = part_floats(width), quads = head_dim / 4;
  const int unit = a.unit, units = (heads + unit - 1) / unit, members = c.members;
  const int team_warps = ATTEND_WARPS / teams;
  // The units of a CTA are its rank and every `members`-th from there on. received: [its units][members][unit] parts.
  const int stats_at = (units + members - 1) / members * members * unit * head_dim;
  const auto part_at = [&](int of_mine, int member, int of_unit) {
    return (of_mine * members + member) * unit + of_unit;
  };

  // Others may write to a CTA's shared memory once all have begun.
#if __CUDA_ARCH__ >= 900
  if (members > 1) cluster_wait();
#endif
  // This CTA's parts, one per warp; weighted by how far a part's maximum lies below the highest.
  for (int i = threadIdx.x; i < heads * quads; i += THREADS) {
    const int g = i / quads, quad = i % quads, team = teams == 1 ? 0 : g / a.group;
    const auto part_of = [&](int w) {
      return parts + ((team * team_warps + w) * room + g - team * a.group) * part_size;
    };
    float highest = -INFINITY, l = 0.f;
    for (int w = 0; w < team_warps; w++) highest = fmaxf(highest, part_of(w)[width]);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int w = 0; w < team_warps; w++) {
      const float* part = part_of(w);
      const float factor = exp2f(part[width] - highest);
      add_scaled(v, reinterpret_cast<const float4*>(part)[quad], factor);
      l += part[width + 1] * factor;
    }
    const int u = g / unit, place = part_at(u / members, c.rank, g % unit);
    float* values = received + place * head_dim + quad * 4;
    float* stats = received + stats_at + place * 2;
#if __CUDA_ARCH__ >= 900
    if (members > 1) {
      store_peer4(peer_address(shared_address(values), u % members), v);
      if (quad == 0) store_peer2(peer_address(shared_address(stats), u % members), make_float2(highest, l));
      continue;
    }
#endif
    *reinterpret_cast<float4*>(values) = v;
    if (quad == 0) *reinterpret_cast<float2*>(stats) = make_float2(highest, l);
  }
#if __CUDA_ARCH__ >= 900
  if (members > 1) {
    __syncwarp();
    cluster_arrive();
    if (c.rank >= units) return;
    cluster_wait();
  }
#endif
  __syncthreads();

  // What a head's sink adds to its sum of weights, which are relative to 2^highest.
  const auto sink = [&](int head, float highest) {
    return t.sinks == nullptr ? 0.f : exp2f(t.sinks[c.head0 + head] * LOG2E - highest);
  };
  const auto normalised = [&](float4 v, float denominator) {
    return make_float4(v.x / denominator, v.y / denominator, v.z / denominator, v.w / denominator);
  };
  auto* out = reinterpret_cast<float4*>(parts + ATTEND_WARPS * room * part_size);  // [unit][head_dim / 4]
  auto* factors = reinterpret_cast<float2*>(out + unit * quads);  // [unit][clusters]: maximum, then factor, and sum
  const int64_t before = (static_cast<int64_t>(c.row) * t.heads + c.head0) * (t.splits / a.cluster);
  const int64_t all = t.m * t.heads * (t.splits / a.cluster);
  for (int u = c.rank, mine = 0; u < units; u += members, mine++) {
    const int head0 = u * unit, unit_heads = min(unit, heads - head0), items = unit_heads * quads;
    // Of all clusters: [clusters][unit_heads] values, maxima and sums.
    auto* values = reinterpret_cast<float4*>(a.partials + (before + head0 * (t.splits / a.cluster)) * head_dim);
    auto* maxima = reinterpret_cast<float2*>(a.partials + all * head_dim) + before + head0 * (t.splits / a.cluster);
    for (int i = threadIdx.x; i < items; i += THREADS) {
      const int g = i / quads, quad = i % quads;
      const auto stats_of = [&](int s) {
        return *reinterpret_cast<const float2*>(received + stats_at + part_at(mine, s, g) * 2);
      };
      float highest = -INFINITY, l = 0.f;
      for (int s = 0; s < members; s++) highest = fmaxf(highest, stats_of(s).x);
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int s = 0; s < members; s++) {
        const float2 stat = stats_of(s);
        const float factor = exp2f(stat.x - highest);
        add_scaled(v, reinterpret_cast<const float4*>(received + part_at(mine, s, g) * head_dim)[quad], factor);
        l += stat.y * factor;
      }
      if (c.clusters == 1) {
        out[i] = normalised(v, l + sink(head0 + g, highest));
      } else {
        __stcg(values + c.of_clusters * items + i, v);
        if (quad == 0) __stcg(maxima + c.of_clusters * unit_heads + g, make_float2(highest, l));
      }
    }
    if (c.clusters > 1) {
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        unsigned* counter = a.counters + (c.row * gridDim.y + blockIdx.y) * MAX_GROUP + u;
        last = atomicAdd(counter, 1u) == static_cast<unsigned>(c.clusters - 1);
        if (last) *counter = 0;
      }
      __syncthreads();
      if (!last) continue;
      __threadfence();
      // Many parts, far away: factors are made once a part, and a thread asks for many before it adds the first.
      constexpr int BATCH = 16;
      for (int i = threadIdx.x; i < unit_heads * c.clusters; i += THREADS)
        factors[i] = __ldcg(maxima + i % c.clusters * unit_heads + i / c.clusters);
      __syncthreads();
      for (int g = warp; g < unit_heads; g += ATTEND_WARPS) {
        float2* of_head = factors + g * c.clusters;
        float highest = -INFINITY, l = 0.f;
        for (int s = lane; s < c.clusters; s += 32) highest = fmaxf(highest, of_head[s].x);
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, offset));
        for (int s = lane; s < c.clusters; s += 32) {
          of_head[s].x = exp2f(of_head[s].x - highest);
          l += of_head[s].x * of_head[s].y;
        }
        l = warp_sum(l);
        if (lane == 0) denominators[g] = l + sink(head0 + g, highest);
      }
      __syncthreads();
      for (int i = threadIdx.x; i < items; i += THREADS) {
        const int g = i / quads;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int s0 = 0; s0 < c.clusters; s0 += BATCH) {
          float4 part[BATCH];
#pragma unroll
          for (int j = 0; j < BATCH; j++)
            part[j] = s0 + j < c.clusters ? __ldcg(values + (s0 + j) * items + i) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
          for (int j = 0; j < BATCH; j++)
            if (s0 + j < c.clusters) add_scaled(v, part[j], factors[g * c.clusters + s0 + j].x);
        }
        out[i] = normalised(v, denominators[g]);
      }
    }
    __syncthreads();
    // y from `out`: 16-bit values, or the limbs of whole k tiles of 128.
    const auto* from = reinterpret_cast<const float*>(out);
    const int column = (c.head0 + head0) * head_dim;
    if (a.quantized.limbs != nullptr) {
      for (int k_tile = warp; k_tile < unit_heads * head_dim / K_TILE; k_tile += ATTEND_WARPS) {
        const float* at = from + k_tile * K_TILE + (lane >> 2) * 16 + lane % 4 * 2;
        a.quantized.store(quantize_k_tile16(make_float4(at[0], at[1], at[8], at[9])), c.row, column / K_TILE + k_tile,
                          true);
      }
    } else {
      uint16_t* y = static_cast<uint16_t*>(t.y) + c.row * t.ld_y + column;
      for (int i = threadIdx.x; i < unit_heads * head_dim; i += THREADS) y[i] = narrow<BF16>(from[i]);
    }
    if (u + members < units) __syncthreads();
  }
}

}  // namespace trirun::decoder
