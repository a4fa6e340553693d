// What the two kernels of decode attention share, on a cache of 16-bit and of 8-bit elements: which keys a
// CTA attends to, and how the parts of a row are put together.
#pragma once

#include "limbs.cuh"
#include "heads.cuh"
#include "cuda/common/hopper.cuh"

#include <type_traits>

namespace trirun::decoder {

constexpr int ATTEND_WARPS = 4;  // of a CTA, but of attend_grouped where CTAs are few
constexpr int MAX_GROUP = 8;  // query heads of one CTA
constexpr int MAX_CLUSTER = 8;
constexpr int NEAR_TILES = 4;  // of a warp, up to which the CTAs of one cluster have all keys of a row

struct AttentionArgs {
  trirun_attention t;
  float* partials;  // weighted values of [m][heads][splits][head_dim] numbers, then their maxima (log2) and sums
  unsigned* counters;  // [m * kv_heads * chunks][MAX_GROUP], zero between launches
  int group, chunks;   // query heads per key head; CTAs that share them
  int room;            // query heads that a warp leaves parts of, at most MAX_GROUP
  int warps;           // of a CTA
  int teams;           // of warps in a CTA, with a key head each; more than one only where chunks are 1
  int cluster;         // CTAs of a cluster, which share a row's keys; 1 where there are none
  int unit_log;        // query heads that one CTA of a cluster puts together: whole k tiles, if limbs are wanted
  LimbRows quantized;  // of y, if it is wanted so
};

using AttentionKernel = void (*)(AttentionArgs);

// Of attention_bf16.cu and attention_fp16.cu: the kernel whose warps have room for so many query heads. few: there are
// no more CTAs than multiprocessors. warps: of a CTA. shared_bytes: its dynamic shared memory, but what is received.
AttentionKernel bf16_attention(int head_dim, int room, bool few, int& warps, int& shared_bytes);
AttentionKernel fp16_attention(int head_dim, int room, bool few, int& warps, int& shared_bytes);

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

  // new_in_tiles: the new key is of the last tile.
  __device__ __forceinline__ AttentionSplit(const AttentionArgs& a, int keys, bool new_in_tiles) {
    const trirun_attention& t = a.t;
    split = blockIdx.x, kv_head = blockIdx.y / a.chunks * a.teams, chunk = blockIdx.y % a.chunks, row = blockIdx.z;
    // Rows beyond the batch belong to no slot.
    slot = row < t.m ? t.slots[row] : -1;
    length = slot < 0 ? 0 : t.positions[row];  // keys in the cache; the new one comes on top
    // The new one is of the window too.
    begin = t.window > 0 ? max(0, length + 1 - t.window) : 0;
    const int count = length + (new_in_tiles ? 1 : 0);
    const int first = begin / keys, end = begin < count ? (count + keys - 1) / keys : first;
    // A cluster puts its parts together long before two of them would: one does it all while its warps have few tiles,
    // and its CTAs share them evenly. Without clusters every warp gets as many tiles as the first one: fewer CTAs leave
    // fewer parts, and none takes longer.
    const int tiles = end - first, warps = a.warps / a.teams, most = static_cast<int>(t.splits) / a.cluster;
    const int near = a.cluster * warps * NEAR_TILES;
    const int sharing = (a.cluster == 1 ? most * warps : max(1, min(most, (tiles + near - 1) / near)) * a.cluster);
    const int share = (tiles + sharing - 1) / sharing,
              per_split = a.cluster == 1 ? max(1, share) * warps : max(warps, share);
    active = max(1, (tiles + per_split - 1) / per_split);
    clusters = (active + a.cluster - 1) / a.cluster, of_clusters = split / a.cluster, rank = split % a.cluster;
    members = min(a.cluster, active - of_clusters * a.cluster);
    tile0 = first + split * per_split, tile1 = min(end, tile0 + per_split);
    idle = slot < 0 || split >= active, newest = split == active - 1;
    head0 = kv_head * a.group + chunk * MAX_GROUP, heads = min(MAX_GROUP, a.teams * a.group - chunk * MAX_GROUP);
  }
};

// Whether the cache has the newest keys and values too: another layer has written them in this step.
__device__ __forceinline__ bool all_stored(const trirun_attention& t) { return t.k == nullptr; }

// What makes the query heads and keys of a row whose next position is `position`: each by a warp.
template <bool BF16, int PER_LANE>
struct HeadMaker {
  HeadConstants<PER_LANE> constants;  // with the norm of queries
  float key_weight[PER_LANE];

  __device__ __forceinline__ HeadMaker(const trirun_attention& t, int position) {
    const float* cosines = t.cosines + static_cast<int64_t>(position) * t.rotary_half;
    const float* sines = t.sines + static_cast<int64_t>(position) * t.rotary_half;
    constants.load(cosines, sines, t.q_norm, t.rotary_half, t.head_dim, t.interleaved);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      const int d = threadIdx.x % 32 + j * 32;
      key_weight[j] = t.k_norm != nullptr && d < t.head_dim ? __ldg(t.k_norm + d) : 1.f;
    }
  }

  // v, as HeadConstants has it, of a query head or of a key; scratch as of `turn`.
  __device__ __forceinline__ void make(float (&v)[PER_LANE], bool query, float* scratch,
                                       const trirun_attention& t) const {
    HeadConstants<PER_LANE> mine = constants;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) mine.weight[j] = query ? constants.weight[j] : key_weight[j];
    const bool normed = (query ? t.q_norm : t.k_norm) != nullptr;
    turn(v, scratch, mine, t.head_dim, normed, t.eps, t.rotary_half, t.interleaved);
  }

  // made(i, v) of `count` heads, which `warps` take in turn; of(i): where the i-th lies. While one head is made the
  // next is on its way.
  template <typename Of, typename Made>
  __device__ __forceinline__ static void take(int count, int warps, int head_dim, Of of, Made made) {
    const int warp = threadIdx.x / 32;
    float next[PER_LANE] = {};
    if (warp < count) load_head<BF16>(next, of(warp), head_dim);
#pragma unroll 1
    for (int i = warp; i < count; i += warps) {
      float v[PER_LANE];
#pragma unroll
      for (int j = 0; j < PER_LANE; j++) v[j] = next[j];
      if (i + warps < count) load_head<BF16>(next, of(i + warps), head_dim);
      made(i, v);
    }
  }
};

// Waits for the projection, once what can be asked for before it has been. CTAs without keys have ended before, but
// for a row's first: one of a grid has to wait, for what comes behind to wait for the projection too.
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
  for (int k_tile = threadIdx.x / 32; k_tile < c.heads * a.t.head_dim / K_TILE; k_tile += a.warps)
    a.quantized.store({{0, 0}, 0.f, 0}, c.row, c.head0 * a.t.head_dim / K_TILE + k_tile, true);
}

// Floats from one part of a warp to the next: `width` values, the maximum that they are relative to (log2), the sum of
// weights, and two that keep the next part on 16 bytes.
__host__ __device__ constexpr int part_floats(int width) { return width + 4; }

// Bytes of shared memory that put_together needs of its CTA, of so many query heads at most.
__host__ __device__ constexpr int scratch_bytes(int warps, int room, int width) {
  return (warps * room * part_floats(width) + MAX_GROUP * width) * 4;
}

__device__ __forceinline__ void add_scaled(float4& sum, float4 v, float factor) {
  sum.x = fmaf(v.x, factor, sum.x), sum.y = fmaf(v.y, factor, sum.y);
  sum.z = fmaf(v.z, factor, sum.z), sum.w = fmaf(v.w, factor, sum.w);
}

// What a warp of tensor-core tiles leaves of its team's heads where put_together reads it. sum[tile]: of dimensions
// dim_of(tile) and the one after, for heads 2 sub and 2 sub + 1, as mma has them; a lane's totals are its own part. All
// warps are through with the memory of `parts` behind the first barrier.
template <int WIDTH, typename DimOf>
__device__ __forceinline__ void leave_parts(float* parts, int room, int heads, const float (&sum)[WIDTH / 16][4],
                                            const float (&maximum)[2], float (&total)[2], DimOf dim_of) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, sub = lane % 4;
#pragma unroll
  for (int e = 0; e < 2; e++)
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) total[e] += __shfl_xor_sync(~0u, total[e], offset);
  __syncthreads();
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int head = 2 * sub + e;
    if (head >= heads) continue;
    float* part = parts + (warp * room + head) * part_floats(WIDTH);
#pragma unroll
    for (int tile = 0; tile < WIDTH / 16; tile++) {
      const int d = dim_of(tile);
      part[d] = sum[tile][e], part[d + 1] = sum[tile][2 + e];
    }
    if (quad == 0) part[WIDTH] = maximum[e], part[WIDTH + 1] = total[e];
  }
  __syncthreads();
}

// A unit so large that no more than `members` CTAs have one of so many heads.
__host__ __device__ inline int shared_unit_log(int heads, int unit_log, int members) {
  while ((heads + (1 << unit_log) - 1) >> unit_log > members) unit_log++;
  return unit_log;
}

// Floats that a CTA receives of the CTAs of its cluster: of every unit that it puts together values, then maxima and
// sums.
__host__ __device__ inline int received_floats(int heads, int unit_log, int cluster, int head_dim) {
  int most = 0;
  for (int members = 1; members <= cluster; members++)
    for (int sharers : {members, cluster}) {  // of one cluster, and of several
      const int log = shared_unit_log(heads, unit_log, sharers), units = (heads + (1 << log) - 1) >> log;
      const int parts = (units + members - 1) / members * members << log;
      most = parts > most ? parts : most;
    }
  return most * (head_dim + 2);
}

// The sum of the parts of one head by one warp, as put_together adds them. stat: of part `lane`, its maximum (log2) and
// sum of weights; of(s, quad): four values of part s; done(quad, v, highest, l): what becomes of the sum.
template <typename Of, typename Done>
__device__ __forceinline__ void add_parts(int count, int quads, float2 stat, Of of, Done done) {
  const int lane = threadIdx.x % 32;
  const float highest = warp_max(stat.x), factor = exp2f(stat.x - highest), weight = factor * stat.y;
#pragma unroll 1
  for (int quad0 = 0; quad0 < quads; quad0 += 32) {
    const int quad = min(quad0 + lane, quads - 1);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    float l = 0.f;
#pragma unroll 1
    for (int s0 = 0; s0 < count; s0 += 4) {
      float4 part[4];
#pragma unroll
      for (int j = 0; j < 4; j++) part[j] = of(min(s0 + j, count - 1), quad);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const bool there = s0 + j < count;
        add_scaled(v, part[j], there ? __shfl_sync(~0u, factor, s0 + j) : 0.f);
        l += there ? __shfl_sync(~0u, weight, s0 + j) : 0.f;
      }
    }
    if (quad0 + lane < quads) done(quad, v, highest, l);
  }
}

// The end of a CTA whose warps have left their parts in shared memory: that of warp w and its team's head g is at
// parts[(w * room + g) * part_floats(width)], of whose values head_dim are read; behind all of them is memory for
// scratch_bytes. Adds them in the order of warps, of CTAs and then of clusters, and writes y or its limbs. The CTAs of
// a cluster put a unit of heads together each, in received_floats of `received`: as large a unit as it takes for one
// each, if they are the row's only cluster. Clusters meet in the workspace, about units that are the same in all.
template <bool BF16>
__device__ __forceinline__ void put_together(const AttentionArgs& a, const AttentionSplit& c, float* parts, int room,
                                             int width, int teams, float* received) {
  __shared__ bool last;
  const trirun_attention& t = a.t;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head_dim = t.head_dim, heads = c.heads, part_size = part_floats(width), quads = head_dim / 4;
  const int members = c.members, unit_log = shared_unit_log(heads, a.unit_log, c.clusters == 1 ? members : a.cluster);
  const int unit = 1 << unit_log, units = (heads + unit - 1) >> unit_log;
  const int team_warps = a.warps / teams;
  // The units of a CTA are its rank and every `members`-th from there on. received: [its units][members][unit] parts.
  const int of_cta = units <= members ? 1 : (units + members - 1) / members;
  const int stats_at = ((of_cta * members) << unit_log) * head_dim;
  const auto part_at = [&](int mine, int member, int of_unit) {
    return ((mine * members + member) << unit_log) + of_unit;
  };

#if __CUDA_ARCH__ >= 900
  // Others may write to a CTA's shared memory once all have begun.
  if (members > 1) cluster_wait();
#endif
  // This CTA's parts, one per warp; weighted by how far a part's maximum lies below the highest.
#pragma unroll 1
  for (int g = warp; g < heads; g += a.warps) {
    const int team = teams == 1 ? 0 : g / a.group, stride = room * part_size;
    const float* of_head = parts + team * team_warps * stride + (g - team * a.group) * part_size;
    float2 stat = make_float2(-INFINITY, 0.f);
    if (lane < team_warps) stat = *reinterpret_cast<const float2*>(of_head + lane * stride + width);
    int owner = g >> unit_log, mine = 0;
    while (owner >= members) owner -= members, mine++;
    const int place = part_at(mine, c.rank, g & (unit - 1));
    float* values = received + place * head_dim;
    float* stats = received + stats_at + place * 2;
    add_parts(
        team_warps, quads, stat,
        [&](int w, int quad) { return reinterpret_cast<const float4*>(of_head + w * stride)[quad]; },
        [&](int quad, float4 v, float highest, float l) {
#if __CUDA_ARCH__ >= 900
          if (members > 1) {
            store_peer4(peer_address(shared_address(values + quad * 4), owner), v);
            if (quad == 0) store_peer2(peer_address(shared_address(stats), owner), make_float2(highest, l));
            return;
          }
#endif
          reinterpret_cast<float4*>(values)[quad] = v;
          if (quad == 0) *reinterpret_cast<float2*>(stats) = make_float2(highest, l);
        });
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

  auto* out = reinterpret_cast<float4*>(parts + a.warps * room * part_size);  // [unit][head_dim / 4]
  const auto finish = [&](int head, float4* to, float4 v, float highest, float l) {
    // A head's sink adds to its sum of weights, which are relative to 2^highest.
    if (t.sinks != nullptr) l += exp2f(t.sinks[c.head0 + head] * LOG2E - highest);
    const float inverse = 1.f / l;
    *to = make_float4(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse);
  };
  const int most_clusters = t.splits / a.cluster;
  const int64_t before = (static_cast<int64_t>(c.row) * t.heads + c.head0) * most_clusters;
  const int64_t all = t.m * t.heads * most_clusters;
#pragma unroll 1
  for (int u = c.rank, mine = 0; u < units; u += members, mine++) {
    const int head0 = u << unit_log, unit_heads = min(unit, heads - head0);
    // Of all clusters: [unit_heads][clusters] values, maxima and sums.
    auto* values = reinterpret_cast<float4*>(a.partials + (before + head0 * most_clusters) * head_dim);
    auto* maxima = reinterpret_cast<float2*>(a.partials + all * head_dim) + before + head0 * most_clusters;
#pragma unroll 1
    for (int g = warp; g < unit_heads; g += a.warps) {
      const int first = part_at(mine, 0, g);
      float2 stat = make_float2(-INFINITY, 0.f);
      if (lane < members)
        stat = *reinterpret_cast<const float2*>(received + stats_at + (first + (lane << unit_log)) * 2);
      add_parts(
          members, quads, stat,
          [&](int s, int quad) {
            return reinterpret_cast<const float4*>(received + (first + (s << unit_log)) * head_dim)[quad];
          },
          [&](int quad, float4 v, float highest, float l) {
            if (c.clusters == 1) return finish(head0 + g, out + g * quads + quad, v, highest, l);
            const int place = g * most_clusters + c.of_clusters;
            __stcg(values + place * quads + quad, v);
            if (quad == 0) __stcg(maxima + place, make_float2(highest, l));
          });
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
#pragma unroll 1
      for (int g = warp; g < unit_heads; g += a.warps) {
        // Far away and, without clusters, many: a lane keeps the maxima of every 32nd, and asks for 16 parts before it
        // adds the first.
        constexpr int BATCH = 16;
        const float2* stats = maxima + g * most_clusters;
        float highest = -INFINITY, l = 0.f;
        for (int s = lane; s < c.clusters; s += 32) highest = fmaxf(highest, __ldcg(stats + s).x);
        highest = warp_max(highest);
        for (int s = lane; s < c.clusters; s += 32) {
          const float2 stat = __ldcg(stats + s);
          l += exp2f(stat.x - highest) * stat.y;
        }
        l = warp_sum(l);
        for (int quad = lane; quad < quads; quad += 32) {
          const float4* of_head = values + static_cast<int64_t>(g) * most_clusters * quads + quad;
          float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
          for (int s0 = 0; s0 < c.clusters; s0 += BATCH) {
            float4 part[BATCH];
            float highest_of[BATCH];
#pragma unroll
            for (int j = 0; j < BATCH; j++) {
              const int s = min(s0 + j, c.clusters - 1);
              part[j] = __ldcg(of_head + s * quads), highest_of[j] = __ldcg(&stats[s].x);
            }
#pragma unroll
            for (int j = 0; j < BATCH; j++)
              if (s0 + j < c.clusters) add_scaled(v, part[j], exp2f(highest_of[j] - highest));
          }
          finish(head0 + g, out + g * quads + quad, v, highest, l);
        }
      }
    }
    __syncthreads();
    // y from `out`: 16-bit values, or the limbs of whole k tiles of 128.
    const auto* from = reinterpret_cast<const float*>(out);
    const int column = (c.head0 + head0) * head_dim;
    if (a.quantized.limbs != nullptr) {
#pragma unroll 1
      for (int k_tile = warp; k_tile < unit_heads * head_dim / K_TILE; k_tile += a.warps) {
        const float* at = from + k_tile * K_TILE + (lane >> 2) * 16 + lane % 4 * 2;
        a.quantized.store(quantize_k_tile16(make_float4(at[0], at[1], at[8], at[9])), c.row, column / K_TILE + k_tile,
                          true);
      }
    } else {
      uint16_t* y = static_cast<uint16_t*>(t.y) + c.row * t.ld_y + column;
#pragma unroll 1
      for (int i = threadIdx.x; i < unit_heads * head_dim; i += a.warps * 32) y[i] = narrow<BF16>(from[i]);
    }
    if (u + members < units) __syncthreads();
  }
}

}  // namespace trirun::decoder
