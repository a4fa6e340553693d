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

struct AttentionArgs {
  trirun_attention t;
  float* partials;  // weighted values of [m][heads][splits][head_dim] numbers, then their maxima (log2) and sums
  unsigned* counters;  // [m * kv_heads * chunks], zero between launches
  int group, chunks;   // query heads per key head; CTAs that share them
  int room;            // query heads that a warp leaves parts of, at most MAX_GROUP
  int teams;           // of warps in a CTA, with a key head each; more than one only where chunks are 1
  bool clustered;      // the splits of a row are a cluster
  LimbRows quantized; // of y, if it is wanted so
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
struct AttentionSplit {
  int split, kv_head, chunk, row, slot, length, begin, tile0, tile1, active, head0, heads;
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
    // Every warp gets as many tiles as the first one: fewer CTAs leave fewer parts, and none takes longer.
    const int tiles = end - first, warps = ATTEND_WARPS / a.teams;
    const int per_split = max(1, (tiles + t.splits * warps - 1) / (t.splits * warps)) * warps;
    active = max(1, (tiles + per_split - 1) / per_split);
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

  __device__ __forceinline__ void query(float* values, const uint16_t* x, const trirun_attention& t, int head_dim,
                                        float scale) const {
    prepare_head<BF16>(values, x, query_constants, head_dim, t.q_norm != nullptr, t.eps, t.rotary_half, t.interleaved,
                       scale);
  }

  __device__ __forceinline__ void key(float* values, const uint16_t* x, const trirun_attention& t, int head_dim) const {
    prepare_head<BF16>(values, x, key_constants, head_dim, t.k_norm != nullptr, t.eps, t.rotary_half, t.interleaved,
                       1.f);
  }
};

// Waits for the projection, once what can be asked for before it has been.
__device__ __forceinline__ void await_projection(const AttentionArgs& a) {
#if __CUDA_ARCH__ >= 900
  // Others may write to a CTA's shared memory once all have begun.
  if (a.clustered) cluster_arrive();
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

// The end of a CTA whose warps have left their parts in shared memory: that of warp w and its team's head g is at
// parts[(w * room + g) * part_floats(width)], of whose values head_dim are read; behind all of them is memory for
// scratch_bytes. Adds them in the order of warps and then of splits and writes y or its limbs; `received` is shared
// memory for the parts of all splits, where they are a cluster.
template <bool BF16>
__device__ __forceinline__ void put_together(const AttentionArgs& a, const AttentionSplit& c, float* parts, int room,
                                             int width, int teams, uint32_t received) {
  constexpr int THREADS = ATTEND_WARPS * 32;
  __shared__ bool last;
  __shared__ float denominators[MAX_GROUP];
  const trirun_attention& t = a.t;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head_dim = t.head_dim, heads = c.heads, active = c.active, part_size = part_floats(width);
  const int quads = head_dim / 4, items = heads * quads;
  auto* out = reinterpret_cast<float4*>(parts + ATTEND_WARPS * room * part_size);  // [heads][head_dim / 4]
  auto* stats = reinterpret_cast<float2*>(out + items);  // [heads][active]: maximum, then factor, and sum
  const int team_warps = ATTEND_WARPS / teams;
  // What a head's sink adds to its sum of weights, which are relative to 2^highest.
  const auto sink = [&](int g, float highest) {
    return t.sinks == nullptr ? 0.f : exp2f(t.sinks[c.head0 + g] * LOG2E - highest);
  };
  // This CTA's parts, one per warp; weighted by how far a part's maximum lies below the highest.
  const auto part_of = [&](int g, int w) {
    const int team = teams == 1 ? 0 : g / a.group;
    return parts + ((team * team_warps + w) * room + g - team * a.group) * part_size;
  };
  const auto gathered = [&](int g, int quad, float& highest, float& l) {
    highest = -INFINITY, l = 0.f;
    for (int w = 0; w < team_warps; w++) highest = fmaxf(highest, part_of(g, w)[width]);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int w = 0; w < team_warps; w++) {
      const float* part = part_of(g, w);
      const float factor = exp2f(part[width] - highest);
      add_scaled(v, reinterpret_cast<const float4*>(part)[quad], factor);
      l += part[width + 1] * factor;
    }
    return v;
  };
  // y from `out`: 16-bit values, or the limbs of whole k tiles of 128.
  const auto finish = [&] {
    __syncthreads();
    const auto* values = reinterpret_cast<const float*>(out);
    if (a.quantized.limbs != nullptr) {
      for (int k_tile = warp; k_tile < heads * head_dim / K_TILE; k_tile += ATTEND_WARPS) {
        const float* at = values + k_tile * K_TILE + (lane >> 2) * 16 + lane % 4 * 2;
        a.quantized.store(quantize_k_tile16(make_float4(at[0], at[1], at[8], at[9])), c.row,
                          c.head0 * head_dim / K_TILE + k_tile, true);
      }
    } else {
      uint16_t* y = static_cast<uint16_t*>(t.y) + c.row * t.ld_y + c.head0 * head_dim;
      for (int i = threadIdx.x; i < heads * head_dim; i += THREADS) y[i] = narrow<BF16>(values[i]);
    }
  };
  const auto normalised = [&](float4 v, float denominator) {
    return make_float4(v.x / denominator, v.y / denominator, v.z / denominator, v.w / denominator);
  };
  if (active == 1) {
    for (int i = threadIdx.x; i < items; i += THREADS) {
      float highest, l;
      const float4 v = gathered(i / quads, i % quads, highest, l);
      out[i] = normalised(v, l + sink(i / quads, highest));
    }
    return finish();
  }
  // Hands this CTA's parts on: four values, and by one thread a head the maximum and the sum.
  const auto each_part = [&](auto store_values, auto store_stats) {
    for (int i = threadIdx.x; i < items; i += THREADS) {
      float highest, l;
      store_values(i, gathered(i / quads, i % quads, highest, l));
      if (i % quads == 0) store_stats(i / quads, highest, l);
    }
  };
  // Where a part lies among those of all splits: values of all of them, then maxima and sums.
  const int stats_at = static_cast<int>(t.splits) * heads * head_dim;
#if __CUDA_ARCH__ >= 900
  if (a.clustered) {
    cluster_wait();
    const uint32_t first = peer_address(received, 0);
    each_part([&](int i, float4 v) { store_peer4(first + (c.split * items + i) * 16, v); },
              [&](int g, float highest, float l) {
                const uint32_t at = first + (stats_at + (c.split * heads + g) * 2) * 4;
                store_peer(at, highest), store_peer(at + 4, l);
              });
    __syncwarp();
    cluster_arrive();
    if (c.split != 0) return;
    cluster_wait();
    // Few parts, near at hand: every thread makes its factors itself.
    for (int i = threadIdx.x; i < items; i += THREADS) {
      const int g = i / quads;
      const auto stats_of = [&](int s) { return load_shared_float2(received + (stats_at + (s * heads + g) * 2) * 4); };
      float highest = -INFINITY, l = 0.f;
      for (int s = 0; s < active; s++) highest = fmaxf(highest, stats_of(s).x);
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int s = 0; s < active; s++) {
        const float2 stat = stats_of(s);
        const float factor = exp2f(stat.x - highest);
        add_scaled(v, load_shared_float4(received + (s * items + i) * 16), factor);
        l += stat.y * factor;
      }
      out[i] = normalised(v, l + sink(g, highest));
    }
    return finish();
  }
#endif
  const int64_t before = (static_cast<int64_t>(c.row) * t.heads + c.head0) * t.splits, all = t.m * t.heads * t.splits;
  auto* values = reinterpret_cast<float4*>(a.partials + before * head_dim);
  auto* maxima = reinterpret_cast<float2*>(a.partials + all * head_dim) + before;
  each_part([&](int i, float4 v) { __stcg(values + c.split * items + i, v); },
            [&](int g, float highest, float l) { __stcg(maxima + c.split * heads + g, make_float2(highest, l)); });
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* counter = a.counters + c.row * gridDim.y + blockIdx.y;
    last = atomicAdd(counter, 1u) == static_cast<unsigned>(active - 1);
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  // Many parts, far away: factors are made once a part, and a thread asks for many parts before it adds the first.
  constexpr int BATCH = 16;
  for (int i = threadIdx.x; i < heads * active; i += THREADS)
    stats[i] = __ldcg(maxima + i % active * heads + i / active);
  __syncthreads();
  for (int g = warp; g < heads; g += ATTEND_WARPS) {
    float2* of_head = stats + g * active;
    float highest = -INFINITY, l = 0.f;
    for (int s = lane; s < active; s += 32) highest = fmaxf(highest, of_head[s].x);
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, offset));
    for (int s = lane; s < active; s += 32) {
      of_head[s].x = exp2f(of_head[s].x - highest);
      l += of_head[s].x * of_head[s].y;
    }
    l = warp_sum(l);
    if (lane == 0) denominators[g] = l + sink(g, highest);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < items; i += THREADS) {
    const int g = i / quads;
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int s0 = 0; s0 < active; s0 += BATCH) {
      float4 part[BATCH];
#pragma unroll
      for (int j = 0; j < BATCH; j++)
        part[j] = s0 + j < active ? __ldcg(values + (s0 + j) * items + i) : make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
      for (int j = 0; j < BATCH; j++)
        if (s0 + j < active) add_scaled(v, part[j], stats[g * active + s0 + j].x);
    }
    out[i] = normalised(v, denominators[g]);
  }
  finish();
}

}  // namespace trirun::decoder
