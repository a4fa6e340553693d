// Attention of one new token per row over a paged cache of 16-bit elements where three or more query heads share a key
// head, or two of 256, or any of 512, as attention_16bit.cuh does it for fewer: both products on tensor cores, with the
// cache as their first operand and up to eight query heads as the eight columns of the second, so that eight heads cost
// what one does.
//   scores [16 keys][8 heads]  = keys [16][16 dims] . queries
//   values [16 dims][8 heads] += values [16][16 keys] . weights
// Queries and weights are float32, cut in two 16-bit numbers, so that no bits are lost but those that the cache lacks.
// Dimensions may come in any order as long as both operands agree: the 16 bytes that a lane reads of a key are its
// registers, and those that it reads of four values become its registers by byte permutes. The new key and value are
// put where they belong in the tile that they are the last of.
//
// Weights are relative to a maximum that need not be the highest (Zadouri et al. 2026, "FlashAttention-4"): it is left
// as it is until a weight gets too large for fp16.
#pragma once

#include "attention.cuh"

namespace trirun::decoder {
namespace {

// Warps of a CTA where CTAs are few, and a warp waits mostly for its own results. With larger rings CTAs of the kernels
// around would have no room to begin early.
constexpr int FEW_WARPS = 8;
// Of a CTA of heads of 512: the parts that more of them leave have no room in shared memory.
constexpr int WIDE_WARPS = 2;
__host__ __device__ constexpr int ring_bytes(int warps) { return warps > ATTEND_WARPS ? 8192 : 16384; }  // of a warp
// A weight may be as large before the maximum that it is relative to is taken anew.
constexpr float GROUPED_MAX_WEIGHT = 256.f;

// Two numbers as 16-bit ones, and what these leave of them.
template <bool BF16>
__device__ __forceinline__ void cut_pair(float low, float high, uint32_t& most, uint32_t& rest) {
  most = narrow_pair<BF16>(low, high);
  const float2 kept = widen_pair<BF16>(most);
  rest = narrow_pair<BF16>(low - kept.x, high - kept.y);
}

// Bytes of shared memory for the rings of a CTA, and in their place for the parts that its warps leave.
__host__ __device__ constexpr int grouped_bytes(int warps, int width) {
  const int rings = warps * ring_bytes(warps), parts = scratch_bytes(warps, MAX_GROUP, width);
  return rings > parts ? rings : parts;
}

// WIDTH: head_dim, rounded up to 64, 128, 256 or 512. WARPS: of a CTA, ATTEND_WARPS, FEW_WARPS or WIDE_WARPS.
template <bool BF16, int WIDTH, int WARPS>
__global__ void __launch_bounds__(WARPS * 32, WARPS > ATTEND_WARPS ? 1
                                              : WIDTH >= 256       ? 2
                                                                   : 3)
    attend_grouped(const __grid_constant__ AttentionArgs a) {
  using Type = std::conditional_t<BF16, __nv_bfloat16, __half>;
  constexpr int KEYS = 16, PER_LANE = WIDTH / 32;
  constexpr int STRIDE = WIDTH + 8;  // of the rows of 16-bit numbers in shared memory
  // Keys and values of 512 come in two parts each.
  constexpr int PARTS = WIDTH > 256 ? WIDTH / 256 : 1, PART = WIDTH / PARTS, PHASES = 2 * PARTS;
  constexpr int HALF_BYTES = KEYS * PART * 2, RING_BYTES = ring_bytes(WARPS);
  constexpr int HALVES = RING_BYTES / HALF_BYTES;  // keys, values, or parts of them
  constexpr int KEY_LOADS = PART / 32, VALUE_LOADS = PART / 64;  // of a lane per part of a key and value, 16 bytes each
  constexpr int CHUNKS = PART / 8;  // of a part of a key or value, 16 bytes each
  static_assert(HALVES >= 2 && (PARTS == 1 || PHASES % HALVES == 0));
  extern __shared__ __align__(128) uint8_t memory[];
  // Query heads, cut in two; in the last row, the new key and value.
  __shared__ __align__(16) uint16_t made[MAX_GROUP + 1][2][STRIDE];
  const trirun_attention& t = a.t;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, sub = lane % 4;
  const AttentionSplit c(a, KEYS, true);
  if (c.idle && c.split > 0) return;
  const int row = c.row, length = c.length, heads = c.heads, head_dim = t.head_dim;

  const uint32_t ring = shared_address(memory) + warp * RING_BYTES;
  const int32_t* table = t.block_tables + static_cast<int64_t>(c.slot) * t.ld_blocks;
  int fill_tile = c.tile0 + warp, page = !c.idle && fill_tile < c.tile1 ? table[fill_tile * KEYS / PAGE] : 0;
  // Whole rows at a time, in chunks of 16 bytes. Where a chunk lies in its row depends on the row, so that lanes that
  // read chunks of several rows find them in different banks.
  const int chunk = lane % CHUNKS, chunk_row = lane / CHUNKS;
  const auto key_chunk = [](int in_row, int at) { return at ^ (in_row & 1) << 2; };
  const auto value_chunk = [](int in_row, int at) { return at ^ (in_row & 6); };
  const auto fill = [&](uint32_t to, const void* from, auto chunk_of, int part) {
    if (!c.idle && fill_tile < c.tile1) {
      const int first = part * PART + chunk * 8;
      const int64_t at = cache_offset(page, t.kv_heads, c.kv_head, fill_tile * KEYS, head_dim) + first;
#pragma unroll
      for (int n = 0; n < KEYS; n += 32 / CHUNKS) {
        const int in_tile = n + chunk_row;
        // What is not there is zeros: no weight of zero makes a number of what is none.
        const bool wanted = first < head_dim && fill_tile * KEYS + in_tile < length;
        const int64_t element = wanted ? at + in_tile * head_dim : 0;
        copy_async16_or_zero(to + in_tile * PART * 2 + chunk_of(in_tile, chunk) * 16,
                             static_cast<const uint16_t*>(from) + element, wanted);
      }
    }
    copy_async_commit();
  };
  // A phase of a tile has a part of its keys, or, once they are through, of its values.
  const auto fill_phase = [&](int half, int phase) {
    if (phase < PARTS) return fill(ring + half * HALF_BYTES, t.keys, key_chunk, phase);
    fill(ring + half * HALF_BYTES, t.values, value_chunk, phase - PARTS);
    if (phase < PHASES - 1) return;
    fill_tile += WARPS;
    // The next fill's page is asked for now, so that its latency is not in the way then.
    if (!c.idle && fill_tile < c.tile1) page = table[fill_tile * KEYS / PAGE];
  };
#pragma unroll
  for (int i = 0; i < HALVES; i++) fill_phase(i, i % PHASES);
  const HeadMaker<BF16, PER_LANE> maker(t, length);
  await_projection(a);
  if (c.idle) return attend_nothing(a, c);

  const auto* q_row = static_cast<const uint16_t*>(t.q) + row * t.ld_q + c.head0 * head_dim;
  const auto* k_row = static_cast<const uint16_t*>(t.k) + row * t.ld_kv + c.kv_head * head_dim;
  const auto* v_row = static_cast<const uint16_t*>(t.v) + row * t.ld_kv + c.kv_head * head_dim;
  const bool appends = c.newest && !all_stored(t);
  const auto in_cache = [&](void* elements, int d) {
    const int64_t at = cache_offset(table[length / PAGE], t.kv_heads, c.kv_head, length, head_dim) + d;
    return reinterpret_cast<uint4*>(static_cast<uint16_t*>(elements) + at);
  };
  uint16_t value[PER_LANE] = {};  // the new one, of the warp that makes its key
  if (appends && warp == heads % WARPS) {
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
      if (lane + 32 * j < head_dim) value[j] = v_row[lane + 32 * j];
    if (t.v_norm != nullptr) {
      float v[PER_LANE];
      load_head<BF16>(v, v_row, head_dim);
      norm_value(v, t.v_norm, head_dim, t.eps);
#pragma unroll
      for (int j = 0; j < PER_LANE; j++) value[j] = narrow<BF16>(v[j]);
    }
  }
  maker.take(
      heads + (appends ? 1 : 0), WARPS, head_dim, [&](int i) { return i < heads ? q_row + i * head_dim : k_row; },
      [&](int i, float (&v)[PER_LANE]) {
        const bool query = i < heads;
        uint16_t* to = made[query ? i : MAX_GROUP][0];
        maker.make(v, query, reinterpret_cast<float*>(to), t);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++) {
          const uint16_t most = narrow<BF16>(v[j]);
          to[lane + 32 * j] = most;
          to[STRIDE + lane + 32 * j] = query ? narrow<BF16>(v[j] - widen_one<BF16>(most)) : value[j];
        }
      });
  // As attention_16bit.cuh reads them, where another layer has made them.
  if (c.newest && !appends && warp == heads % WARPS)
    for (int d = lane * 8; d < WIDTH; d += 256) {
      const bool there = d < head_dim;
      auto* to = reinterpret_cast<uint4*>(made[MAX_GROUP][0] + d);
      to[0] = there ? __ldcg(in_cache(t.keys, d)) : make_uint4(0, 0, 0, 0);
      to[STRIDE / 8] = there ? __ldcg(in_cache(t.values, d)) : make_uint4(0, 0, 0, 0);
    }
  __syncthreads();

  // The second operand of the scores: head `quad`, dimensions 8 (sub + 4i) + 2w and + 1 in word w of i. Of heads of 256
  // what is left after cutting stays in shared memory, of heads of 512 all: registers do not hold both.
  constexpr bool KEEPS = WIDTH < 256, KEEPS_MOST = PARTS == 1;
  uint4 q_most[KEEPS_MOST ? KEY_LOADS : 1], q_rest[KEEPS ? KEY_LOADS : 1];
  const auto part_of = [&](int which, int i) {
    return quad < heads ? *reinterpret_cast<const uint4*>(made[quad][which] + 8 * (sub + 4 * i))
                        : make_uint4(0, 0, 0, 0);
  };
#pragma unroll
  for (int i = 0; i < (KEEPS_MOST ? KEY_LOADS : 0); i++) {
    q_most[i] = part_of(0, i);
    if constexpr (KEEPS) q_rest[i] = part_of(1, i);
  }
  // A lane's scores are those of keys quad and quad + 8, heads 2 sub and 2 sub + 1; its sums those of dimensions
  // 8 (quad + 8i) + 2w and + 1, in tile 4i + w, for the same heads. Index 2h + e of four: row h, head e.
  const float scale = t.scale * LOG2E, softcap = t.softcap * LOG2E;
  float sum[WIDTH / 16][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, total[2] = {};
  const int new_row = length % KEYS;  // of the last tile of the CTA that has it
  const uint16_t *new_key = made[MAX_GROUP][0], *new_value = made[MAX_GROUP][1];
  int half = 0;
  for (int tile = c.tile0 + warp; tile < c.tile1; tile += WARPS) {
    // Where phase n of this tile lies, and what comes there next.
    const auto half_of = [&](int phase) { return PARTS == 1 ? half + phase : phase % HALVES; };
    const auto fill_next = [&](int phase) { fill_phase(half_of(phase), (phase + HALVES) % PHASES); };
    float dots[4][4] = {};  // apart, so that no product waits for the one before
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      copy_async_wait<HALVES - 1>();
      __syncwarp();  // other lanes have copied too
      const uint32_t keys = ring + half_of(part) * HALF_BYTES;
      // The cache holds 16-bit keys: what later steps will read is what this one attends to.
      if (c.newest && tile + 1 == c.tile1) {
        if (lane < CHUNKS)
          store_shared4(keys + new_row * PART * 2 + key_chunk(new_row, lane) * 16,
                        *reinterpret_cast<const uint4*>(new_key + part * PART + 8 * lane));
        __syncwarp();
      }
#pragma unroll(KEEPS_MOST ? KEY_LOADS : 4)
      for (int i = 0; i < KEY_LOADS; i++) {
        // A lane's are keys `quad` and quad + 8, dimensions 8 (sub + 4i) of the part and the seven after.
        const uint32_t from = keys + quad * PART * 2 + key_chunk(quad, sub + 4 * i) * 16;
        const uint4 k0 = load_shared4(from), k1 = load_shared4(from + 8 * PART * 2);
        const uint32_t first[4] = {k0.x, k1.x, k0.y, k1.y}, second[4] = {k0.z, k1.z, k0.w, k1.w};
        const uint4 most = KEEPS_MOST ? q_most[KEEPS_MOST ? i : 0] : part_of(0, part * KEY_LOADS + i);
        const uint4 rest = KEEPS ? q_rest[KEEPS ? i : 0] : part_of(1, part * KEY_LOADS + i);
        mma_16bit<Type>(dots[0], first, most.x, most.y);
        mma_16bit<Type>(dots[1], first, rest.x, rest.y);
        mma_16bit<Type>(dots[2], second, most.z, most.w);
        mma_16bit<Type>(dots[3], second, rest.z, rest.w);
      }
      __syncwarp();
      fill_next(part);
    }
    float score[4], p[4];
    bool large = false;
#pragma unroll
    for (int at = 0; at < 4; at++) {
      const int position = tile * KEYS + quad + at / 2 * 8;
      const float exact = ((dots[0][at] + dots[2][at]) + (dots[1][at] + dots[3][at])) * scale;
      const bool seen = position >= c.begin && position <= length;
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
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
      copy_async_wait<HALVES - 1>();
      __syncwarp();
      const uint32_t values = ring + half_of(PARTS + part) * HALF_BYTES;
      if (c.newest && tile + 1 == c.tile1) {
        if (lane < CHUNKS)
          store_shared4(values + new_row * PART * 2 + value_chunk(new_row, lane) * 16,
                        *reinterpret_cast<const uint4*>(new_value + part * PART + 8 * lane));
        __syncwarp();
      }
#pragma unroll
      for (int i = 0; i < VALUE_LOADS; i++) {
        uint32_t v[4][4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          // Values 2 sub, + 1, + 8 and + 9, dimensions 8 (quad + 8i) of the part and the seven after.
          const int in_tile = 2 * sub + n % 2 + n / 2 * 8;
          const uint4 words = load_shared4(values + in_tile * PART * 2 + value_chunk(2 * sub, quad + 8 * i) * 16);
          v[n][0] = words.x, v[n][1] = words.y, v[n][2] = words.z, v[n][3] = words.w;
        }
#pragma unroll
        for (int w = 0; w < 4; w++) {
          const uint32_t operand[4] = {__byte_perm(v[0][w], v[1][w], 0x5410), __byte_perm(v[0][w], v[1][w], 0x7632),
                                       __byte_perm(v[2][w], v[3][w], 0x5410), __byte_perm(v[2][w], v[3][w], 0x7632)};
          float (&of)[4] = sum[part * (PART / 16) + 4 * i + w];
          mma_16bit<Type>(of, operand, most[0], most[1]);
          mma_16bit<Type>(of, operand, rest[0], rest[1]);
        }
      }
      __syncwarp();
      fill_next(PARTS + part);
    }
    if constexpr (PARTS == 1) half = half + 2 == HALVES ? 0 : half + 2;
  }
  copy_async_wait<0>();
#pragma unroll
  for (int part = 0; part < PARTS; part++)
    if (const int d = part * 256 + lane * 8; appends && c.chunk == 0 && warp == WARPS - 1 && d < head_dim) {
      *in_cache(t.keys, d) = *reinterpret_cast<const uint4*>(new_key + d);
      *in_cache(t.values, d) = *reinterpret_cast<const uint4*>(new_value + d);
    }

  auto* parts = reinterpret_cast<float*>(memory);  // where the rings were
  leave_parts<WIDTH>(parts, a.room, heads, sum, maximum, total,
                     [&](int tile) { return 8 * (quad + tile / 4 * 8) + tile % 4 * 2; });
  put_together<BF16>(a, c, parts, a.room, WIDTH, 1, reinterpret_cast<float*>(memory + grouped_bytes(WARPS, WIDTH)));
}

// Two heads of 256 are enough: one sequence takes 0.8 % longer (Gemma-3-12B's shape), eight take 3 % less.
constexpr bool is_grouped(int head_dim, int room) {
  return room > 2 || (room == 2 && head_dim > 128) || head_dim > 256;
}

// no-spill(90a): attend_grouped<*, *, *>
template <bool BF16>
AttentionKernel grouped_for_head(int head_dim, bool few, int& warps, int& shared_bytes) {
  warps = head_dim > 256 ? WIDE_WARPS : few && head_dim <= 128 ? FEW_WARPS : ATTEND_WARPS;
  shared_bytes = grouped_bytes(warps, head_dim > 256 ? 512 : head_dim > 128 ? 256 : 128);
  if (head_dim > 256) return attend_grouped<BF16, 512, WIDE_WARPS>;
  if (head_dim > 128) return attend_grouped<BF16, 256, ATTEND_WARPS>;
  if (few) return head_dim <= 64 ? attend_grouped<BF16, 64, FEW_WARPS> : attend_grouped<BF16, 128, FEW_WARPS>;
  return head_dim <= 64 ? attend_grouped<BF16, 64, ATTEND_WARPS> : attend_grouped<BF16, 128, ATTEND_WARPS>;
}

}  // namespace
}  // namespace trirun::decoder
