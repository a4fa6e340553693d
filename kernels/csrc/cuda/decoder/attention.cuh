// What the two kernels of decode attention share, on a cache of 16-bit and of 8-bit elements: which keys a
// CTA attends to, and how the parts of a row are put together.
#pragma once

#include "limbs.cuh"
#include "heads.cuh"
#include "cuda/common/hopper.cuh"

namespace trirun::decoder {

constexpr int ATTEND_WARPS = 4;
constexpr int MAX_GROUP = 8;  // query heads of one CTA
constexpr int MAX_CLUSTER = 8;
constexpr float LOG2E = 1.4426950408889634f;

struct AttentionArgs {
  trirun_attention t;
  float* partials;     // [m][heads][splits][head_dim + 2]: weighted values, then maximum (log2) and sum
  unsigned* counters;  // [m * kv_heads * chunks], zero between launches
  int group, chunks;   // query heads per key head; CTAs that share them
  int room;            // query heads that a warp leaves parts of, at most MAX_GROUP
  int teams;           // of warps in a CTA, with a key head each; more than one only where chunks are 1
  bool clustered;      // the splits of a row are a cluster
  LimbRows quantized; // of y, if it is wanted so
};

using AttentionKernel = void (*)(AttentionArgs);

// Of attention_bf16.cu and attention_fp16.cu: the kernel whose warps have room for so many query heads (1, 2, 4
// or MAX_GROUP). shared_bytes: its dynamic shared memory, beside which the parts of all splits may lie.
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
    const int tiles = end - first, per_split = max(1, (tiles + t.splits - 1) / t.splits);
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

// The end of a CTA whose warps have left their parts in shared memory: part w of its team's head g, at
// parts[(w * room + g) * (width + 2)], is `width` values (head_dim of them are read), the maximum they are relative to
// (log2), and the sum of weights. Adds them in the order of warps and then of splits and writes y or its limbs;
// `received` is shared memory for the parts of all splits, where they are a cluster.
template <bool BF16>
__device__ __forceinline__ void put_together(const AttentionArgs& a, const AttentionSplit& c, const float* parts,
                                             int room, int width, int teams, uint32_t received) {
  __shared__ bool last;
  const trirun_attention& t = a.t;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int head_dim = t.head_dim, heads = c.heads, active = c.active, part_size = width + 2, size = head_dim + 2;
  // y from where its parts are: 16-bit values, or the limbs of whole k tiles of 128.
  const auto finish = [&](auto value) {
    if (a.quantized.limbs != nullptr) {
      for (int k_tile = warp; k_tile < heads * head_dim / K_TILE; k_tile += ATTEND_WARPS) {
        const int column = k_tile * K_TILE + (lane >> 2) * 16 + lane % 4 * 2;
        const auto at = [&](int i) { return value(i / head_dim, i % head_dim); };
        const float4 v = make_float4(at(column), at(column + 1), at(column + 8), at(column + 9));
        a.quantized.store(quantize_k_tile16(v), c.row, c.head0 * head_dim / K_TILE + k_tile, true);
      }
    } else {
      uint16_t* y = static_cast<uint16_t*>(t.y) + c.row * t.ld_y + c.head0 * head_dim;
      for (int i = threadIdx.x; i < heads * head_dim; i += ATTEND_WARPS * 32)
        y[i] = narrow<BF16>(value(i / head_dim, i % head_dim));
    }
  };
  // What a head's sink adds to its sum of weights, which are relative to 2^highest.
  const auto sink = [&](int g, float highest) {
    return t.sinks == nullptr ? 0.f : exp2f(t.sinks[c.head0 + g] * LOG2E - highest);
  };
  // This CTA's parts, one per warp; weighted by how far a part's maximum lies below the highest.
  const auto gathered = [&](int head, int d, float& highest, float& l) {
    const int team = teams == 1 ? 0 : head / a.group, g = head - team * a.group;
    const int w0 = team * (ATTEND_WARPS / teams), w1 = w0 + ATTEND_WARPS / teams;
    highest = -INFINITY, l = 0.f;
    for (int w = w0; w < w1; w++) highest = fmaxf(highest, parts[(w * room + g) * part_size + width]);
    float v = 0.f;
    for (int w = w0; w < w1; w++) {
      const float* part = parts + (w * room + g) * part_size;
      const float factor = exp2f(part[width] - highest);
      v += part[d] * factor, l += part[width + 1] * factor;
    }
    return v;
  };
  if (active == 1) {
    finish([&](int g, int d) {
      float highest, l;
      const float v = gathered(g, d, highest, l);
      return v / (l + sink(g, highest));
    });
    return;
  }
  // Parts of all CTAs in their order; read(s, g, i) is number i of part s.
  const auto combined = [&](auto read) {
    return [=](int g, int d) {
      float highest = -INFINITY, v = 0.f, l = 0.f;
      for (int s = 0; s < active; s++) highest = fmaxf(highest, read(s, g, head_dim));
#pragma unroll 4
      for (int s = 0; s < active; s++) {
        const float factor = exp2f(read(s, g, head_dim) - highest);
        v += read(s, g, d) * factor, l += read(s, g, head_dim + 1) * factor;
      }
      return v / (l + sink(g, highest));
    };
  };
  const auto each_part = [&](auto store) {
    for (int i = threadIdx.x; i < heads * head_dim; i += ATTEND_WARPS * 32) {
      const int g = i / head_dim, d = i % head_dim;
      float highest, l;
      store(g, d, gathered(g, d, highest, l));
      if (d == 0) store(g, head_dim, highest), store(g, head_dim + 1, l);
    }
  };
#if __CUDA_ARCH__ >= 900
  if (a.clustered) {
    cluster_wait();
    const uint32_t first = peer_address(received, 0);
    each_part([&](int g, int d, float v) { store_peer(first + ((c.split * heads + g) * size + d) * 4, v); });
    __syncwarp();
    cluster_arrive();
    if (c.split != 0) return;
    cluster_wait();
    finish(
        combined([=](int s, int g, int i) { return load_shared_float(received + ((s * heads + g) * size + i) * 4); }));
    return;
  }
#endif
  float* mine = a.partials + (static_cast<int64_t>(c.row) * t.heads + c.head0) * t.splits * size;
  each_part([&](int g, int d, float v) { __stcg(mine + (g * t.splits + c.split) * size + d, v); });
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
  finish(combined([=](int s, int g, int i) { return __ldcg(mine + (g * t.splits + s) * size + i); }));
}

}  // namespace trirun::decoder
