// Attention of one new token per row over a paged cache (flash decoding, Dao et al. 2023): the keys of a row are split
// among CTAs and warps, each keeps a running maximum, sum and weighted value (online softmax, fp32), and the parts are
// added in a fixed order by the CTA that finishes last.
//
// The kernel starts with what lies between the projection and the attention: it norms and rotates its query heads, and
// the CTA that has a row's last keys makes the new key and value, appends them to the cache, and attends to them from
// its registers. Everything older is in the cache before the step begins, so warps request it ahead of
// griddepcontrol.wait, while the projection is still running. Up to eight CTAs that share a row's keys are a cluster
// and put their parts together in the first one's shared memory; more of them meet in the workspace.
//
// A warp is an agent, as in decode.cu: it streams its own tiles of keys and values through a private cp.async ring, in
// which every lane reads back what it copied itself. A lane holds eight dimensions of a key, so LANES lanes hold a key.
#include "decoder_digits.cuh"
#include "decoder_heads.cuh"

namespace trirun {
namespace {

constexpr int WARPS = 4, STAGES = 2;
constexpr int LOADS = 8;                                // 16-byte loads of a lane per tile, of keys and of values each
constexpr int STAGE_BYTES = 2 * LOADS * 512;
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;
constexpr int MAX_GROUP = 8;                            // query heads of one CTA
constexpr int MAX_CLUSTER = 8;
constexpr int APPEND_WARPS = 8;
constexpr float LOG2E = 1.4426950408889634f;

struct AttentionArgs {
  trirun_attention t;
  float* partials;     // [m][heads][splits][head_dim + 2]: weighted values, then maximum (log2) and sum
  unsigned* counters;  // [m * kv_heads * chunks], zero between launches
  int group, chunks;   // query heads per key head; CTAs that share them
  bool clustered;      // the splits of a row are a cluster
  DigitRows quantized; // of y, if it is wanted so
};

// 16 bytes, or zeros.
__device__ __forceinline__ void copy_async16_or_zero(uint32_t shared, const void* global, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
               "r"(wanted ? 16 : 0)
               : "memory");
}

template <bool BF16>
__device__ __forceinline__ void widen_eight(float (&v)[8], uint4 words) {
  const uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 pair = widen_pair<BF16>(w[i]);
    v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
  }
}

__device__ __forceinline__ float warp_max(float v) { return from_ordered(__reduce_max_sync(~0u, ordered_bits(v))); }

// Adds each of eight values over the LANES lanes that share a key; a lane is left with the sum of value
// (lane % LANES) / (LANES / 8). Halving what is exchanged takes 8 shuffles where eight reductions take 8 log2(LANES).
template <int LANES>
__device__ __forceinline__ float transposed_sum(float (&s)[LOADS]) {
  const int lane = threadIdx.x % 32;
  int offset = LANES / 2;
#pragma unroll
  for (int count = LOADS / 2; count > 0; count /= 2, offset /= 2) {
    const bool upper = lane & offset;
#pragma unroll
    for (int j = 0; j < count; j++) {
      const float sent = upper ? s[j] : s[j + count], kept = upper ? s[j + count] : s[j];
      s[j] = kept + __shfl_xor_sync(~0u, sent, offset);
    }
  }
#pragma unroll
  for (int rest = LANES / 16; rest > 0; rest /= 2) s[0] += __shfl_xor_sync(~0u, s[0], rest);
  return s[0];
}

template <bool BF16, int LANES, int GROUP>
__global__ void __launch_bounds__(WARPS * 32) attend(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float queries[GROUP][LANES * 8], key[LANES * 8];
  __shared__ bool last;
  constexpr int KEYS = 32 / LANES * LOADS;  // of one tile
  const trirun_attention& t = a.t;
  const int split = blockIdx.x, kv_head = blockIdx.y / a.chunks, chunk = blockIdx.y % a.chunks, row = blockIdx.z;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sub = lane % LANES;
  // Rows beyond the batch belong to no slot.
  const int slot = row < t.m ? t.slots[row] : -1;
  const int length = slot < 0 ? 0 : t.positions[row];  // keys in the cache; the new one comes on top
  const int tiles = (length + KEYS - 1) / KEYS, per_split = max(1, (tiles + t.splits - 1) / t.splits);
  const int active = max(1, (tiles + per_split - 1) / per_split);
  const int tile0 = split * per_split, tile1 = min(tiles, tile0 + per_split);
  const bool idle = slot < 0 || split >= active, newest = split == active - 1;
  const int head0 = kv_head * a.group + chunk * GROUP, heads = min(GROUP, a.group - chunk * GROUP);
  const int head_dim = t.head_dim;
  const bool holds = sub * 8 < head_dim;

  const uint32_t ring = shared_address(memory) + warp * STAGES * STAGE_BYTES + lane * 16;
  const int32_t* table = t.block_tables + static_cast<int64_t>(slot) * t.ld_blocks;
  int fill_tile = tile0 + warp, page = !idle && fill_tile < tile1 ? table[fill_tile * KEYS / PAGE] : 0;
  const auto fill = [&](int stage) {
    if (!idle && fill_tile < tile1) {
      const int first = fill_tile * KEYS + lane / LANES;
      const int64_t at = cache_offset(page, t.kv_heads, kv_head, first, head_dim) + sub * 8;
      const uint32_t target = ring + stage * STAGE_BYTES;
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const bool wanted = holds && first + i * (32 / LANES) < length;
        const int64_t element = wanted ? at + i * (32 / LANES) * head_dim : 0;
        copy_async16_or_zero(target + i * 512, static_cast<const uint16_t*>(t.keys) + element, wanted);
        copy_async16_or_zero(target + (LOADS + i) * 512, static_cast<const uint16_t*>(t.values) + element, wanted);
      }
      fill_tile += WARPS;
      // The next fill's page is asked for now, so that its latency is not in the way then.
      if (fill_tile < tile1) page = table[fill_tile * KEYS / PAGE];
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) fill(i);
  constexpr int PER_LANE = LANES / 4;
  const float* cosines = t.cosines + static_cast<int64_t>(length) * t.rotary_half;
  const float* sines = t.sines + static_cast<int64_t>(length) * t.rotary_half;
  HeadConstants<PER_LANE> query_constants, key_constants;
  query_constants.load(cosines, sines, t.q_norm, t.rotary_half, head_dim);
  key_constants.load(cosines, sines, t.k_norm, t.rotary_half, head_dim);
#if __CUDA_ARCH__ >= 900
  // Others may write to a CTA's shared memory once all have begun.
  if (a.clustered) cluster_arrive();
#endif
  dependency_launch();
  dependency_wait();
  if (idle) {
    if (slot < 0 && split == 0 && a.quantized.digits != nullptr)
      for (int unit = warp; unit < heads * head_dim / UNIT; unit += WARPS)
        a.quantized.store({{0, 0}, 0.f, 0}, row, head0 * head_dim / UNIT + unit, true);
    return;
  }

  const auto* q_row = static_cast<const uint16_t*>(t.q) + row * t.ld_q;
  // The warps take the query heads and the new key in turn.
  for (int i = warp; i < heads + (newest ? 1 : 0); i += WARPS) {
    if (i < heads) {
      prepare_head<BF16>(queries[i], q_row + (head0 + i) * head_dim, query_constants, head_dim, t.q_norm != nullptr,
                         t.eps, t.rotary_half, t.scale * LOG2E);
    } else {
      prepare_head<BF16>(key, static_cast<const uint16_t*>(t.k) + row * t.ld_kv + kv_head * head_dim, key_constants,
                         head_dim, t.k_norm != nullptr, t.eps, t.rotary_half, 1.f);
    }
  }
  __syncthreads();

  float q[GROUP][8], sum[GROUP][8], maximum[GROUP], total[GROUP];
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    maximum[g] = -INFINITY, total[g] = 0.f;
#pragma unroll
    for (int d = 0; d < 8; d++) {
      q[g][d] = g < heads && holds && sub * 8 + d < head_dim ? queries[g][sub * 8 + d] : 0.f;
      sum[g][d] = 0.f;
    }
  }
  if (newest && warp == 0) {
    // The cache holds 16-bit keys: what later steps will read is what this one attends to.
    float k[8], v[8] = {};
    uint4 k_words = make_uint4(0, 0, 0, 0), v_words = make_uint4(0, 0, 0, 0);
    if (holds) {
      const float* from = key + sub * 8;
      k_words = make_uint4(narrow<BF16>(from[0]) | static_cast<uint32_t>(narrow<BF16>(from[1])) << 16,
                           narrow<BF16>(from[2]) | static_cast<uint32_t>(narrow<BF16>(from[3])) << 16,
                           narrow<BF16>(from[4]) | static_cast<uint32_t>(narrow<BF16>(from[5])) << 16,
                           narrow<BF16>(from[6]) | static_cast<uint32_t>(narrow<BF16>(from[7])) << 16);
      v_words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(t.v) + row * t.ld_kv + kv_head * head_dim +
                                                sub * 8);
      if (chunk == 0 && lane < LANES) {
        const int64_t at =
            cache_offset(table[length / PAGE], t.kv_heads, kv_head, length, head_dim) + sub * 8;
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.keys) + at) = k_words;
        *reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.values) + at) = v_words;
      }
    }
    widen_eight<BF16>(k, k_words);
    widen_eight<BF16>(v, v_words);
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float s = 0.f;
#pragma unroll
      for (int d = 0; d < 8; d++) s = fmaf(q[g][d], k[d], s);
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2) s += __shfl_xor_sync(~0u, s, offset);
      maximum[g] = s;
      // One lane counts it, and one group of lanes holds its value.
      total[g] = lane == 0 ? 1.f : 0.f;
#pragma unroll
      for (int d = 0; d < 8; d++) sum[g][d] = lane < LANES ? v[d] : 0.f;
    }
  }

  int stage = 0;
  for (int tile = tile0 + warp; tile < tile1; tile += WARPS) {
    copy_async_wait<STAGES - 1>();
    const uint32_t source = ring + stage * STAGE_BYTES;
    float s[GROUP][LOADS];
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      float k[8];
      widen_eight<BF16>(k, load_shared4(source + i * 512));
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        s[g][i] = 0.f;
#pragma unroll
        for (int d = 0; d < 8; d++) s[g][i] = fmaf(q[g][d], k[d], s[g][i]);
      }
    }
    // After the exchange a lane has the score of one key, LANES / 8 lanes the same one.
    const int mine = tile * KEYS + sub / (LANES / 8) * (32 / LANES) + lane / LANES;
    float p[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      const float score = transposed_sum<LANES>(s[g]);
      const float seen = mine < length ? score : -INFINITY;
      const float highest = fmaxf(maximum[g], warp_max(seen));
      const float kept = exp2f(maximum[g] - highest);
      p[g] = exp2f(seen - highest);
      total[g] = total[g] * kept + (sub % (LANES / 8) == 0 ? p[g] : 0.f);
      maximum[g] = highest;
#pragma unroll
      for (int d = 0; d < 8; d++) sum[g][d] *= kept;
    }
#pragma unroll
    for (int i = 0; i < LOADS; i++) {
      float v[8];
      widen_eight<BF16>(v, load_shared4(source + (LOADS + i) * 512));
#pragma unroll
      for (int g = 0; g < GROUP; g++) {
        const float weight = __shfl_sync(~0u, p[g], lane / LANES * LANES + i * (LANES / 8));
#pragma unroll
        for (int d = 0; d < 8; d++) sum[g][d] = fmaf(weight, v[d], sum[g][d]);
      }
    }
    fill(stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  copy_async_wait<0>();

  // Lanes to warp, warps to CTA: part w of head g is [head_dim] weighted values, maximum, sum.
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    total[g] = warp_sum(total[g]);
#pragma unroll
    for (int d = 0; d < 8; d++)
#pragma unroll
      for (int offset = LANES; offset < 32; offset *= 2) sum[g][d] += __shfl_xor_sync(~0u, sum[g][d], offset);
  }
  __syncthreads();  // the rings are read no more: their memory takes the parts
  constexpr int PART = LANES * 8 + 2;
  float* parts = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int g = 0; g < GROUP; g++) {
    float* part = parts + (warp * GROUP + g) * PART;
    if (lane < LANES)
#pragma unroll
      for (int d = 0; d < 8; d++) part[sub * 8 + d] = sum[g][d];
    if (lane == 0) part[LANES * 8] = maximum[g], part[LANES * 8 + 1] = total[g];
  }
  __syncthreads();
  const int width = head_dim + 2;
  // y from where its parts are: 16-bit values, or the digits of whole units of 128 columns.
  const auto finish = [&](auto value) {
    if (a.quantized.digits != nullptr) {
      for (int unit = warp; unit < heads * head_dim / UNIT; unit += WARPS) {
        const int column = unit * UNIT + (lane >> 2) * 16 + lane % 4 * 2;
        const auto at = [&](int c) { return value(c / head_dim, c % head_dim); };
        const float4 v = make_float4(at(column), at(column + 1), at(column + 8), at(column + 9));
        a.quantized.store(quantize_unit16(v), row, head0 * head_dim / UNIT + unit, true);
      }
    } else {
      uint16_t* y = static_cast<uint16_t*>(t.y) + row * t.ld_y + head0 * head_dim;
      for (int i = threadIdx.x; i < heads * head_dim; i += WARPS * 32)
        y[i] = narrow<BF16>(value(i / head_dim, i % head_dim));
    }
  };
  // This CTA's parts, one per warp; weighted by how far a part's maximum lies below the highest.
  const auto gathered = [&](int g, int d, float& highest, float& l) {
    highest = -INFINITY, l = 0.f;
    for (int w = 0; w < WARPS; w++) highest = fmaxf(highest, parts[(w * GROUP + g) * PART + LANES * 8]);
    float v = 0.f;
    for (int w = 0; w < WARPS; w++) {
      const float* part = parts + (w * GROUP + g) * PART;
      const float factor = exp2f(part[LANES * 8] - highest);
      v += part[d] * factor, l += part[LANES * 8 + 1] * factor;
    }
    return v;
  };
  if (active == 1) {
    finish([&](int g, int d) {
      float highest, l;
      const float v = gathered(g, d, highest, l);
      return v / l;
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
      return v / l;
    };
  };
  const auto each_part = [&](auto store) {
    for (int i = threadIdx.x; i < heads * head_dim; i += WARPS * 32) {
      const int g = i / head_dim, d = i % head_dim;
      float highest, l;
      store(g, d, gathered(g, d, highest, l));
      if (d == 0) store(g, head_dim, highest), store(g, head_dim + 1, l);
    }
  };
#if __CUDA_ARCH__ >= 900
  if (a.clustered) {
    const uint32_t received = shared_address(memory + RING_BYTES);
    cluster_wait();
    const uint32_t first = peer_address(received, 0);
    each_part([&](int g, int d, float v) { store_peer(first + ((split * GROUP + g) * width + d) * 4, v); });
    __syncwarp();
    cluster_arrive();
    if (split != 0) return;
    cluster_wait();
    finish(combined([=](int s, int g, int i) {
      return load_shared_float(received + ((s * GROUP + g) * width + i) * 4);
    }));
    return;
  }
#endif
  float* mine = a.partials + (static_cast<int64_t>(row) * t.heads + head0) * t.splits * width;
  each_part([&](int g, int d, float v) { __stcg(mine + (g * t.splits + split) * width + d, v); });
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned* counter = a.counters + row * gridDim.y + blockIdx.y;
    last = atomicAdd(counter, 1u) == static_cast<unsigned>(active - 1);
    if (last) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  finish(combined([=](int s, int g, int i) { return __ldcg(mine + (g * t.splits + s) * width + i); }));
}

// Norms and rotates every head of a row and writes its keys and values to the cache: what `attend` does for itself, for
// rows of prompts, a CTA each. Its warps take the heads in turn.
template <bool BF16, int LANES>
__global__ void __launch_bounds__(APPEND_WARPS * 32) append(const __grid_constant__ AttentionArgs a) {
  __shared__ float values[APPEND_WARPS][LANES * 8];
  const trirun_attention& t = a.t;
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, head_dim = t.head_dim;
  // No early launch of what follows: `attend` reads the cache ahead of its wait.
  dependency_wait();
  const int slot = t.slots[row], position = t.positions[row];
  if (slot < 0) return;
  const int page = t.block_tables[static_cast<int64_t>(slot) * t.ld_blocks + position / PAGE];
  const float* cosines = t.cosines + static_cast<int64_t>(position) * t.rotary_half;
  const float* sines = t.sines + static_cast<int64_t>(position) * t.rotary_half;
  HeadConstants<LANES / 4> query_constants, key_constants;
  query_constants.load(cosines, sines, t.q_norm, t.rotary_half, head_dim);
  key_constants.load(cosines, sines, t.k_norm, t.rotary_half, head_dim);
  float* mine = values[warp];
  const auto* q = static_cast<const uint16_t*>(t.q) + row * t.ld_q;
  const auto* k = static_cast<const uint16_t*>(t.k) + row * t.ld_kv;
  const auto* v = static_cast<const uint16_t*>(t.v) + row * t.ld_kv;
  const auto store = [&](uint16_t* to) {
    for (int d = lane; d < head_dim; d += 32) to[d] = narrow<BF16>(mine[d]);
  };
  for (int head = warp; head < t.heads; head += APPEND_WARPS) {
    prepare_head<BF16>(mine, q + head * head_dim, query_constants, head_dim, t.q_norm != nullptr, t.eps, t.rotary_half,
                       1.f);
    store(static_cast<uint16_t*>(t.y) + row * t.ld_y + head * head_dim);
  }
  for (int head = warp; head < t.kv_heads; head += APPEND_WARPS) {
    prepare_head<BF16>(mine, k + head * head_dim, key_constants, head_dim, t.k_norm != nullptr, t.eps, t.rotary_half,
                       1.f);
    store(static_cast<uint16_t*>(t.keys) + cache_offset(page, t.kv_heads, head, position, head_dim));
  }
  for (int i = threadIdx.x; i < t.kv_heads * head_dim / 8; i += APPEND_WARPS * 32) {
    const int head = i * 8 / head_dim, d = i * 8 % head_dim;
    auto* to = static_cast<uint16_t*>(t.values) + cache_offset(page, t.kv_heads, head, position, head_dim) + d;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(v + head * head_dim + d);
  }
}

using Kernel = void (*)(AttentionArgs);

// no-spill(90a): attend<*, 16, *>
template <bool BF16, int LANES>
Kernel for_group(int group) {
  if (group == 1) return attend<BF16, LANES, 1>;
  if (group == 2) return attend<BF16, LANES, 2>;
  return group == 4 ? attend<BF16, LANES, 4> : attend<BF16, LANES, MAX_GROUP>;
}

// Query heads that an instance for a group of so many has room for.
int room_for(int group) { return group <= 2 ? group : group <= 4 ? 4 : MAX_GROUP; }

template <bool BF16>
Kernel for_head(int head_dim, int group) {
  if (head_dim <= 64) return for_group<BF16, 8>(group);
  return head_dim <= 128 ? for_group<BF16, 16>(group) : for_group<BF16, 32>(group);
}

int check(const trirun_attention* t) {
  if (t == nullptr) return TRIRUN_BAD_POINTER;
  if (t->m < 0 || t->m > 65535 || t->heads <= 0 || t->kv_heads <= 0 || t->heads % t->kv_heads || t->head_dim <= 0 ||
      t->head_dim % 8 || t->head_dim > MAX_HEAD_DIM || t->rotary_half < 0 || 2 * t->rotary_half > t->head_dim ||
      t->splits < 1 || t->splits > 256 || t->ld_q < t->heads * t->head_dim ||
      t->ld_kv < t->kv_heads * t->head_dim || t->ld_y < t->heads * t->head_dim || t->ld_kv % 8 || t->ld_blocks <= 0)
    return TRIRUN_BAD_SHAPE;
  if (!half_dtype(t->dtype)) return TRIRUN_UNSUPPORTED;
  for (const void* p : {t->q, t->k, t->v, static_cast<const void*>(t->keys), static_cast<const void*>(t->values)})
    if (p == nullptr || !aligned_to(p, 16)) return TRIRUN_BAD_POINTER;
  if ((t->y == nullptr && t->activations == nullptr) || !aligned_to(t->y, 2) || !aligned_to(t->activations, 256))
    return TRIRUN_BAD_POINTER;
  if (t->block_tables == nullptr || t->slots == nullptr || t->positions == nullptr || t->cosines == nullptr ||
      t->sines == nullptr)
    return TRIRUN_BAD_POINTER;
  return TRIRUN_OK;
}

int chunks_of(const trirun_attention& t) {
  const int64_t group = t.heads / t.kv_heads;
  return static_cast<int>((group + MAX_GROUP - 1) / MAX_GROUP);
}

size_t counter_bytes(const trirun_attention& t) {
  return (t.m * t.kv_heads * chunks_of(t) * sizeof(unsigned) + 255) / 256 * 256;
}

}  // namespace
}  // namespace trirun

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT size_t trirun_cuda_attention_workspace(const trirun_attention* t) {
  if (trirun::check(t)) return 0;
  return trirun::counter_bytes(*t) + t->m * t->heads * t->splits * (t->head_dim + 2) * sizeof(float);
}

EXPORT int trirun_cuda_attention_decode(const trirun_attention* t, void* workspace, size_t workspace_bytes,
                                        void* stream) {
  using namespace trirun;
  if (const int code = check(t)) return code;
  if (t->m == 0) return TRIRUN_OK;
  if (workspace == nullptr || workspace_bytes < trirun_cuda_attention_workspace(t)) return TRIRUN_NO_WORKSPACE;
  if (!aligned_to(workspace, 256)) return TRIRUN_BAD_POINTER;
  AttentionArgs a{};
  a.t = *t;
  a.counters = static_cast<unsigned*>(workspace);
  a.partials = reinterpret_cast<float*>(static_cast<uint8_t*>(workspace) + counter_bytes(*t));
  a.group = static_cast<int>(t->heads / t->kv_heads);
  a.chunks = chunks_of(*t);
  const int room = room_for(a.group);
  const Kernel kernel =
      t->dtype == TRIRUN_BF16 ? for_head<true>(t->head_dim, room) : for_head<false>(t->head_dim, room);
  int64_t rows = t->m;
  if (t->activations != nullptr) {
    // A CTA quantizes whole units: its heads must fill them.
    const int64_t part = (a.chunks > 1 ? MAX_GROUP : a.group) * t->head_dim, width = t->heads * t->head_dim;
    if (part % UNIT || a.group * t->head_dim % UNIT || t->m > 128) return TRIRUN_UNSUPPORTED;
    if (t->activation_bytes < ActivationLayout(t->m, width, TRIRUN_ACT16).bytes) return TRIRUN_NO_WORKSPACE;
    a.quantized = DigitRows(t->activations, t->m, width, TRIRUN_ACT16);
    rows = a.quantized.tokens;
  }
  const dim3 grid(t->splits, static_cast<unsigned>(t->kv_heads * a.chunks), static_cast<unsigned>(rows));
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  a.clustered = facts.arch >= 90 && t->splits > 1 && t->splits <= MAX_CLUSTER;
  const int width = t->head_dim + 2, parts = a.clustered ? t->splits * room * width * 4 : 0;
  return launch_dependent(kernel, a, grid, WARPS * 32, RING_BYTES + parts, stream, a.clustered ? t->splits : 1);
}

EXPORT int trirun_cuda_attention_append(const trirun_attention* t, void* stream) {
  using namespace trirun;
  if (const int code = check(t)) return code;
  if (t->m == 0) return TRIRUN_OK;
  if (t->y == nullptr) return TRIRUN_BAD_POINTER;
  AttentionArgs a{};
  a.t = *t;
  const dim3 grid(static_cast<unsigned>(t->m));
  const bool bf16 = t->dtype == TRIRUN_BF16;
  const Kernel kernel = t->head_dim <= 64    ? (bf16 ? append<true, 8> : append<false, 8>)
                        : t->head_dim <= 128 ? (bf16 ? append<true, 16> : append<false, 16>)
                                             : (bf16 ? append<true, 32> : append<false, 32>);
  return launch_dependent(kernel, a, grid, APPEND_WARPS * 32, 0, stream);
}
