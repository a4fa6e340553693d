// Attention of one new token per row over a paged cache of 16-bit elements where three or more query heads share a key
// head, as attention_16bit.cuh does it for fewer: both products on tensor cores, with the cache as their first operand
// and up to eight query heads as the eight columns of the second, so that eight heads cost what one does.
//   scores [16 keys][8 heads]  = keys [16][16 dims] . queries
//   values [16 dims][8 heads] += values [16][16 keys] . weights
// Queries and weights are float32, cut in two 16-bit numbers, so that no bits are lost but those that the cache lacks.
// Dimensions may come in any order as long as both operands agree: the 16 bytes that a lane loads of a key are its
// registers, and those that it loads of four values become its registers by byte permutes. A lane reads back what it
// copied itself, as in attention_16bit.cuh.
//
// Weights are relative to a maximum that need not be the highest (Zadouri et al. 2026, "FlashAttention-4"): it is left
// as it is until a weight gets too large for fp16.
#pragma once

#include "attention.cuh"

namespace trirun::decoder {
namespace {

constexpr int GROUPED_RING_BYTES = 16384;  // of a warp
// A weight may be as large before the maximum that it is relative to is taken anew.
constexpr float GROUPED_MAX_WEIGHT = 256.f;

// Two numbers as 16-bit ones, and what these leave of them.
template <bool BF16>
__device__ __forceinline__ void cut_pair(float low, float high, uint32_t& most, uint32_t& rest) {
  most = narrow_pair<BF16>(low, high);
  const float2 kept = widen_pair<BF16>(most);
  rest = narrow_pair<BF16>(low - kept.x, high - kept.y);
}

// WIDTH: head_dim, rounded up to 64, 128 or 256.
template <bool BF16, int WIDTH>
__global__ void __launch_bounds__(ATTEND_WARPS * 32, WIDTH == 256 ? 2 : 3)
    attend_grouped(const __grid_constant__ AttentionArgs a) {
  using Type = std::conditional_t<BF16, __nv_bfloat16, __half>;
  constexpr int WARPS = ATTEND_WARPS, KEYS = 16, STRIDE = WIDTH + 4;
  constexpr int HALF_BYTES = KEYS * WIDTH * 2, HALVES = GROUPED_RING_BYTES / HALF_BYTES;  // of the ring: keys, values
  constexpr int KEY_LOADS = WIDTH / 32, VALUE_LOADS = WIDTH / 64;  // of a lane per key and value, 16 bytes each
  static_assert(scratch_bytes(MAX_GROUP, WIDTH, MAX_SPLITS) <= WARPS * GROUPED_RING_BYTES);
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(16) float queries[MAX_GROUP][STRIDE], key[WIDTH];
  const trirun_attention& t = a.t;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, sub = lane % 4;
  const AttentionSplit c(a, KEYS);
  const int row = c.row, length = c.length, heads = c.heads, head_dim = t.head_dim;

  const uint32_t ring = shared_address(memory) + warp * GROUPED_RING_BYTES + lane * 16;
  const int32_t* table = t.block_tables + static_cast<int64_t>(c.slot) * t.ld_blocks;
  int fill_tile = c.tile0 + warp, page = !c.idle && fill_tile < c.tile1 ? table[fill_tile * KEYS / PAGE] : 0;
  // What is not there is zeros: no weight of zero makes a number of what is none.
  const auto copy = [&](uint32_t to, const void* from, int64_t tile_at, int in_tile, int dim) {
    const bool wanted = dim < head_dim && fill_tile * KEYS + in_tile < length;
    const int64_t element = wanted ? tile_at + in_tile * head_dim + dim : 0;
    copy_async16_or_zero(to, static_cast<const uint16_t*>(from) + element, wanted);
  };
  // Keys: a lane's are `quad` and quad + 8, dimensions 8 (sub + 4i) and the seven after.
  const auto fill_keys = [&](int half) {
    if (!c.idle && fill_tile < c.tile1) {
      const int64_t at = cache_offset(page, t.kv_heads, c.kv_head, fill_tile * KEYS, head_dim);
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < KEY_LOADS; i++)
          copy(ring + half * HALF_BYTES + (r * KEY_LOADS + i) * 512, t.keys, at, quad + 8 * r, 8 * (sub + 4 * i));
    }
    copy_async_commit();
  };
  // Values: 2 sub, + 1, + 8 and + 9, dimensions 8 (quad + 8i) and the seven after.
  const auto fill_values = [&](int half) {
    if (!c.idle && fill_tile < c.tile1) {
      const int64_t at = cache_offset(page, t.kv_heads, c.kv_head, fill_tile * KEYS, head_dim);
#pragma unroll
      for (int n = 0; n < 4; n++)
#pragma unroll
        for (int i = 0; i < VALUE_LOADS; i++)
          copy(ring + half * HALF_BYTES + (n * VALUE_LOADS + i) * 512, t.values, at, 2 * sub + n % 2 + n / 2 * 8,
               8 * (quad + 8 * i));
      fill_tile += WARPS;
      // The next fill's page is asked for now, so that its latency is not in the way then.
      if (fill_tile < c.tile1) page = table[fill_tile * KEYS / PAGE];
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < HALVES; i += 2) fill_keys(i), fill_values(i + 1);
  const HeadMaker<BF16, WIDTH / 32> make(t, length, head_dim);
  const int new_page = !c.idle && c.newest ? table[length / PAGE] : 0;
  await_projection(a);
  if (c.idle) return attend_nothing(a, c);

  const auto* q_row = static_cast<const uint16_t*>(t.q) + row * t.ld_q;
  // What the warp that attends to the new key wants of its value: two dimensions of every tile of its sums.
  uint32_t new_value[WIDTH / 16] = {};
  const auto* k_row = static_cast<const uint16_t*>(t.k) + row * t.ld_kv + c.kv_head * head_dim;
  const auto* v_row = static_cast<const uint16_t*>(t.v) + row * t.ld_kv + c.kv_head * head_dim;
  const auto dim_of = [&](int tile) { return 8 * (quad + tile / 4 * 8) + tile % 4 * 2; };
  const bool appends = c.newest && warp == 0;
  if (appends) {
#pragma unroll
    for (int tile = 0; tile < WIDTH / 16; tile++)
      if (dim_of(tile) < head_dim) new_value[tile] = *reinterpret_cast<const uint32_t*>(v_row + dim_of(tile));
  }
  make.template take<MAX_GROUP + 1>(
      heads + (c.newest ? 1 : 0), head_dim, [&](int i) { return i < heads ? q_row + (c.head0 + i) * head_dim : k_row; },
      [&](int i, auto& v) { i < heads ? make.query(queries[i], v, t, 1.f) : make.key(key, v, t); });
  __syncthreads();

  // The second operand of the scores: head `quad`, dimensions 8 (sub + 4i) + 2w and + 1 in word 4i + w.
  uint32_t q_most[4 * KEY_LOADS], q_rest[4 * KEY_LOADS];
#pragma unroll
  for (int i = 0; i < KEY_LOADS; i++)
#pragma unroll
    for (int w = 0; w < 4; w++) {
      const int d = 8 * (sub + 4 * i) + 2 * w;
      const bool there = quad < heads && d < head_dim;
      const float2 v = there ? *reinterpret_cast<const float2*>(queries[quad] + d) : make_float2(0.f, 0.f);
      cut_pair<BF16>(v.x, v.y, q_most[4 * i + w], q_rest[4 * i + w]);
    }
  // A lane's scores are those of keys quad and quad + 8, heads 2 sub and 2 sub + 1; its sums those of dimensions
  // 8 (quad + 8i) + 2w and + 1, in tile 4i + w, for the same heads. Index 2h + e of four: row h, head e.
  const float scale = t.scale * LOG2E, softcap = t.softcap * LOG2E;
  float sum[WIDTH / 16][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, total[2] = {};
  // By another warp: to read v and to store it takes long.
  if (const int d = lane * 8; c.newest && warp == WARPS - 1 && c.chunk == 0 && d < head_dim) {
    const int64_t at = cache_offset(new_page, t.kv_heads, c.kv_head, length, head_dim) + d;
    const float4 low = *reinterpret_cast<const float4*>(key + d), high = *reinterpret_cast<const float4*>(key + d + 4);
    const uint4 k = make_uint4(narrow_pair<BF16>(low.x, low.y), narrow_pair<BF16>(low.z, low.w),
                               narrow_pair<BF16>(high.x, high.y), narrow_pair<BF16>(high.z, high.w));
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.keys) + at) = k;
    *reinterpret_cast<uint4*>(static_cast<uint16_t*>(t.values) + at) = *reinterpret_cast<const uint4*>(v_row + d);
  }
  if (appends) {
    // The cache holds 16-bit keys: what later steps will read is what this one attends to.
    float score = 0.f;
    for (int d = sub; d < head_dim; d += 4)
      if (quad < heads) score = fmaf(queries[quad][d], widen_one<BF16>(narrow<BF16>(key[d])), score);
    score += __shfl_xor_sync(~0u, score, 1);
    score += __shfl_xor_sync(~0u, score, 2);
    score *= scale;
    if (softcap != 0.f) score = softened(score, softcap);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      maximum[e] = __shfl_sync(~0u, score, 8 * sub + 4 * e);
      // One lane counts it, and holds its value.
      total[e] = quad == 0 ? 1.f : 0.f;
    }
#pragma unroll
    for (int tile = 0; tile < WIDTH / 16; tile++) {
      const float2 v = widen_pair<BF16>(new_value[tile]);
      sum[tile][0] = sum[tile][1] = v.x, sum[tile][2] = sum[tile][3] = v.y;
    }
  }

  int half = 0;
  for (int tile = c.tile0 + warp; tile < c.tile1; tile += WARPS) {
    copy_async_wait<HALVES - 1>();
    const uint32_t keys = ring + half * HALF_BYTES, values = keys + HALF_BYTES;
    float dots[4][4] = {};  // apart, so that no product waits for the one before
#pragma unroll
    for (int i = 0; i < KEY_LOADS; i++) {
      const uint4 k0 = load_shared4(keys + i * 512), k1 = load_shared4(keys + (KEY_LOADS + i) * 512);
      const uint32_t first[4] = {k0.x, k1.x, k0.y, k1.y}, second[4] = {k0.z, k1.z, k0.w, k1.w};
      mma_16bit<Type>(dots[0], first, q_most[4 * i], q_most[4 * i + 1]);
      mma_16bit<Type>(dots[1], first, q_rest[4 * i], q_rest[4 * i + 1]);
      mma_16bit<Type>(dots[2], second, q_most[4 * i + 2], q_most[4 * i + 3]);
      mma_16bit<Type>(dots[3], second, q_rest[4 * i + 2], q_rest[4 * i + 3]);
    }
    fill_keys(half);
    float score[4], p[4];
    bool large = false;
#pragma unroll
    for (int at = 0; at < 4; at++) {
      const int position = tile * KEYS + quad + at / 2 * 8;
      const float exact = ((dots[0][at] + dots[2][at]) + (dots[1][at] + dots[3][at])) * scale;
      const bool seen = position >= c.begin && position < length;
      score[at] = !seen ? -INFINITY : softcap != 0.f ? softened(exact, softcap) : exact;
      p[at] = exp2f(score[at] - maximum[at % 2]);
      // Of the first keys too, relative to -infinity.
      large |= !(p[at] <= GROUPED_MAX_WEIGHT);
    }
    if (__any_sync(~0u, large)) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float highest = fmaxf(maximum[e], fmaxf(score[e], score[2 + e]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
        const float kept = exp2f(maximum[e] - highest);
        maximum[e] = highest;
        total[e] *= kept;
#pragma unroll
        for (int i = 0; i < WIDTH / 16; i++) sum[i][e] *= kept, sum[i][2 + e] *= kept;
        p[e] = exp2f(score[e] - highest), p[2 + e] = exp2f(score[2 + e] - highest);
      }
    }
    uint32_t most[2], rest[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      total[0] += p[2 * h], total[1] += p[2 * h + 1];
      cut_pair<BF16>(p[2 * h], p[2 * h + 1], most[h], rest[h]);
      most[h] = transposed(most[h]), rest[h] = transposed(rest[h]);
    }
    copy_async_wait<HALVES - 1>();
#pragma unroll
    for (int i = 0; i < VALUE_LOADS; i++) {
      uint32_t v[4][4];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const uint4 words = load_shared4(values + (n * VALUE_LOADS + i) * 512);
        v[n][0] = words.x, v[n][1] = words.y, v[n][2] = words.z, v[n][3] = words.w;
      }
#pragma unroll
      for (int w = 0; w < 4; w++) {
        const uint32_t operand[4] = {__byte_perm(v[0][w], v[1][w], 0x5410), __byte_perm(v[0][w], v[1][w], 0x7632),
                                     __byte_perm(v[2][w], v[3][w], 0x5410), __byte_perm(v[2][w], v[3][w], 0x7632)};
        mma_16bit<Type>(sum[4 * i + w], operand, most[0], most[1]);
        mma_16bit<Type>(sum[4 * i + w], operand, rest[0], rest[1]);
      }
    }
    fill_values(half + 1);
    half = half + 2 == HALVES ? 0 : half + 2;
  }
  copy_async_wait<0>();

#pragma unroll
  for (int e = 0; e < 2; e++)
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) total[e] += __shfl_xor_sync(~0u, total[e], offset);
  __syncthreads();  // the rings are read no more: their memory takes the parts
  constexpr int PART = part_floats(WIDTH);
  float* parts = reinterpret_cast<float*>(memory);
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const int head = 2 * sub + e;
    if (head >= heads) continue;
    float* part = parts + (warp * a.room + head) * PART;
#pragma unroll
    for (int tile = 0; tile < WIDTH / 16; tile++) {
      *reinterpret_cast<float2*>(part + dim_of(tile)) = make_float2(sum[tile][e], sum[tile][2 + e]);
    }
    if (quad == 0) part[WIDTH] = maximum[e], part[WIDTH + 1] = total[e];
  }
  __syncthreads();
  put_together<BF16>(a, c, parts, a.room, WIDTH, 1, reinterpret_cast<float*>(memory + WARPS * GROUPED_RING_BYTES));
}

// no-spill(90a): attend_grouped<*, *>
template <bool BF16>
AttentionKernel grouped_for_head(int head_dim, int& shared_bytes) {
  shared_bytes = ATTEND_WARPS * GROUPED_RING_BYTES;
  if (head_dim <= 64) return attend_grouped<BF16, 64>;
  return head_dim <= 128 ? attend_grouped<BF16, 128> : attend_grouped<BF16, 256>;
}

}  // namespace
}  // namespace trirun::decoder
