// Attention of one new token per row over a paged cache (flash decoding, Dao et al. 2023): the keys of a row are split
// among CTAs and warps, each keeps a running maximum, sum and weighted value (online softmax, fp32), and the parts are
// added in a fixed order by the CTA that finishes last.
//
// The kernel starts with what lies between the projection and the attention: it norms and rotates its query heads, and
// the CTA that has a row's last keys makes the new key and value, appends them to the cache, and attends to them from
// its registers. Everything older is in the cache before the step begins, so warps request it ahead of
// griddepcontrol.wait, while the projection is still running. Where the layer attends to another one's keys and values,
// the newest are in the cache too, but only since this step: they are read behind that wait, and not through L1, which
// may have what lay there before. Up to eight CTAs that share a row's keys are a cluster and put their parts together
// in the first one's shared memory; more of them meet in the workspace.
//
// A warp has its own pipeline, as in gemm_decode/stream.cu: it streams its tiles of keys and values through a private
// cp.async ring, of which every lane reads back what it copied itself. A lane holds eight dimensions of a key, so LANES
// lanes hold a key. It has one or two query heads; attention_grouped.cuh attends for more, and for two of 256.
//
// Instances are many and take long to compile: those for bf16 and those for fp16 are files of their own
// (attention_bf16.cu, attention_fp16.cu), which two cores share. attention.cu has the C interface.
#pragma once

#include "attention.cuh"

namespace trirun::decoder {
namespace {

constexpr int WARPS = ATTEND_WARPS, STAGES = 2;
constexpr int LOADS = 8;  // 16-byte loads of a lane per tile, of keys and of values each
constexpr int STAGE_BYTES = 2 * LOADS * 512;
constexpr int RING_BYTES = WARPS * STAGES * STAGE_BYTES;

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

// Eight dimensions of a value head of LANES lanes, through the norm of values.
template <bool BF16, int LANES>
__device__ __forceinline__ uint4 normed_value(uint4 words, const trirun_attention& t) {
  const int first = threadIdx.x % LANES * 8;
  float v[8], sum = 0.f;
  widen_eight<BF16>(v, words);
#pragma unroll
  for (int d = 0; d < 8; d++) sum += v[d] * v[d];
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  const float inverse = rsqrtf(sum / t.head_dim + t.eps);
#pragma unroll
  for (int d = 0; d < 8; d++)
    if (first + d < t.head_dim) v[d] *= inverse * __ldg(t.v_norm + first + d);
  return make_uint4(narrow_pair<BF16>(v[0], v[1]), narrow_pair<BF16>(v[2], v[3]), narrow_pair<BF16>(v[4], v[5]),
                    narrow_pair<BF16>(v[6], v[7]));
}

template <bool BF16, int LANES, int GROUP>
__global__ void __launch_bounds__(WARPS * 32, 3) attend(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float queries[GROUP][LANES * 8], key[LANES * 8];
  constexpr int KEYS = 32 / LANES * LOADS;  // of one tile
  const trirun_attention& t = a.t;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, sub = lane % LANES;
  const AttentionSplit c(a, KEYS, false);
  if (c.idle && c.split > 0) return;
  const int row = c.row, length = c.length, heads = c.heads, head_dim = t.head_dim;
  const bool holds = sub * 8 < head_dim;

  const uint32_t ring = shared_address(memory) + warp * STAGES * STAGE_BYTES + lane * 16;
  const int32_t* table = t.block_tables + static_cast<int64_t>(c.slot) * t.ld_blocks;
  int fill_tile = c.tile0 + warp, page = !c.idle && fill_tile < c.tile1 ? table[fill_tile * KEYS / PAGE] : 0;
  const auto fill = [&](int stage) {
    if (!c.idle && fill_tile < c.tile1) {
      const int first = fill_tile * KEYS + lane / LANES;
      const int64_t at = cache_offset(page, t.kv_heads, c.kv_head, first, head_dim) + sub * 8;
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
      if (fill_tile < c.tile1) page = table[fill_tile * KEYS / PAGE];
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) fill(i);
  constexpr int PER_LANE = LANES / 4;
  const HeadMaker<BF16, PER_LANE> maker(t, length);
  await_projection(a);
  if (c.idle) return attend_nothing(a, c);

  const auto* q_row = static_cast<const uint16_t*>(t.q) + row * t.ld_q;
  maker.take(
      heads + (c.newest && !all_stored(t) ? 1 : 0), WARPS, head_dim,
      [&](int i) {
        return i < heads ? q_row + (c.head0 + i) * head_dim
                         : static_cast<const uint16_t*>(t.k) + row * t.ld_kv + c.kv_head * head_dim;
      },
      [&](int i, float (&v)[PER_LANE]) {
        float* to = i < heads ? queries[i] : key;
        maker.make(v, i < heads, to, t);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
          if (lane + 32 * j < head_dim) to[lane + 32 * j] = i < heads ? v[j] * (t.scale * LOG2E) : v[j];
      });
  __syncthreads();

  const float softcap = t.softcap * LOG2E;
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
  if (c.newest && warp == 0) {
    // The cache holds 16-bit keys: what later steps will read is what this one attends to.
    float k[8], v[8] = {};
    uint4 k_words = make_uint4(0, 0, 0, 0), v_words = make_uint4(0, 0, 0, 0);
    const auto in_cache = [&](void* elements) {
      const int64_t at = cache_offset(table[length / PAGE], t.kv_heads, c.kv_head, length, head_dim) + sub * 8;
      return reinterpret_cast<uint4*>(static_cast<uint16_t*>(elements) + at);
    };
    if (holds && all_stored(t)) {
      k_words = __ldcg(in_cache(t.keys)), v_words = __ldcg(in_cache(t.values));
    } else if (holds) {
      const float* from = key + sub * 8;
      k_words = make_uint4(narrow<BF16>(from[0]) | static_cast<uint32_t>(narrow<BF16>(from[1])) << 16,
                           narrow<BF16>(from[2]) | static_cast<uint32_t>(narrow<BF16>(from[3])) << 16,
                           narrow<BF16>(from[4]) | static_cast<uint32_t>(narrow<BF16>(from[5])) << 16,
                           narrow<BF16>(from[6]) | static_cast<uint32_t>(narrow<BF16>(from[7])) << 16);
      v_words = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(t.v) + row * t.ld_kv +
                                                c.kv_head * head_dim + sub * 8);
    }
    if (t.v_norm != nullptr) v_words = normed_value<BF16, LANES>(v_words, t);
    if (holds && c.chunk == 0 && lane < LANES && !all_stored(t))
      *in_cache(t.keys) = k_words, *in_cache(t.values) = v_words;
    widen_eight<BF16>(k, k_words);
    widen_eight<BF16>(v, v_words);
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
      float s = 0.f;
#pragma unroll
      for (int d = 0; d < 8; d++) s = fmaf(q[g][d], k[d], s);
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2) s += __shfl_xor_sync(~0u, s, offset);
      if (softcap != 0.f) s = softened(s, softcap);
      maximum[g] = s;
      // One lane counts it, and one group of lanes holds its value.
      total[g] = lane == 0 ? 1.f : 0.f;
#pragma unroll
      for (int d = 0; d < 8; d++) sum[g][d] = lane < LANES ? v[d] : 0.f;
    }
  }

  int stage = 0;
  for (int tile = c.tile0 + warp; tile < c.tile1; tile += WARPS) {
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
      float score = transposed_sum<LANES>(s[g]);
      if (softcap != 0.f) score = softened(score, softcap);
      const float seen = mine >= c.begin && mine < length ? score : -INFINITY;
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
  constexpr int PART = part_floats(LANES * 8);
  static_assert(scratch_bytes(WARPS, GROUP, LANES * 8) <= RING_BYTES);
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
  put_together<BF16>(a, c, parts, GROUP, LANES * 8, 1, reinterpret_cast<float*>(memory + RING_BYTES));
}

// no-spill(90a): attend<*, *, *>
template <bool BF16, int LANES>
AttentionKernel for_group(int group) {
  return group == 1 ? attend<BF16, LANES, 1> : attend<BF16, LANES, 2>;
}

template <bool BF16>
AttentionKernel for_head(int head_dim, int group, int& shared_bytes) {
  shared_bytes = RING_BYTES;
  if (head_dim <= 64) return for_group<BF16, 8>(group);
  return head_dim <= 128 ? for_group<BF16, 16>(group) : attend<BF16, 32, 1>;
}

}  // namespace
}  // namespace trirun::decoder
