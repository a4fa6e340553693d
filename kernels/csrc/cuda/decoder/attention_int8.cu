// Attention of one new token per row over a paged cache of 8-bit elements, as attention.cu does it over one of
// 16 bits: half the bytes to read per step, and half the memory per sequence.
//
// Both products run on tensor cores, with the cache as their first operand and up to eight query heads as the eight
// columns of the second, so that heads which share keys cost no more than one:
//   scores [16 keys][8 heads]    = keys s8 [16][32 dims] . queries s8, two limbs: x = s (256 hi + lo), sums exact
//   values [16 dims][8 heads]   += values fp16 [16][16 keys] . weights fp16, sums fp32
// Dimensions and keys may come in any order as long as both operands agree: a lane loads 16 bytes and they are its
// registers. The key's scale multiplies its score, the value's its weight; no element is scaled. Values become fp16 by
// a byte permute and a subtraction, both exact.
//
// A weight must not lose its bits where a value's scale is small: weights are relative to a maximum of score +
// log2(scale), and as that need not be the highest (Zadouri et al. 2026, "FlashAttention-4"), it is left as it is until
// a weight gets too large for fp16.
#include "attention.cuh"
#include "int8.cuh"

namespace trirun::decoder {
namespace {

constexpr int WARPS = ATTEND_WARPS;
// A weight may be as large before the maximum that it is relative to is taken anew.
constexpr float MAX_WEIGHT = 256.f;

template <int WORDS>
__device__ __forceinline__ void load_words(uint32_t (&w)[WORDS], uint32_t address) {
  if constexpr (WORDS == 4) {
    const uint4 v = load_shared4(address);
    w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
  } else {
    const uint2 v = load_shared2(address);
    w[0] = v.x, w[1] = v.y;
  }
}

// Two int8 of z (bytes 0 and 2, or 1 and 3) as fp16: 0x6400 | byte + 128 is 1024 + 128 + the number.
__device__ __forceinline__ uint32_t widen_bytes(uint32_t z) {
  const uint32_t biased = (z & 0x00ff00ffu) ^ 0x64806480u;
  const __half2 v = __hsub2(*reinterpret_cast<const __half2*>(&biased), __float2half2_rn(1152.f));
  return *reinterpret_cast<const uint32_t*>(&v);
}

// log2 of a value's scale; of 0, that of fp16's smallest number, since its codes are 0.
__device__ __forceinline__ float log2_scale(float scale) { return scale == 0.f ? -24.f : __log2f(scale); }

// The queries of a CTA as the second operand of the scores. Lane 4g + t: head g, dimensions 16 (t + 4i) to + 15 in
// words 4i to 4i + 3.
template <int LOADS>
struct QueryLimbs {
  uint32_t high[4 * LOADS], low[4 * LOADS];
  float scale;  // of this lane's head

  // row: the head in shared memory, zeros where there is none.
  __device__ __forceinline__ void make(const float* row, bool there, int head_dim) {
    const int t = threadIdx.x % 4;
    float4 v[4 * LOADS];
    uint32_t bits = 0;
#pragma unroll
    for (int w = 0; w < 4 * LOADS; w++) {
      const int d = 16 * (t + w / 4 * 4) + w % 4 * 4;
      v[w] = there && d < head_dim ? *reinterpret_cast<const float4*>(row + d) : make_float4(0.f, 0.f, 0.f, 0.f);
      bits = max(bits, magnitude_bits(v[w]));
    }
    bits = max(bits, __shfl_xor_sync(~0u, bits, 1));
    bits = max(bits, __shfl_xor_sync(~0u, bits, 2));
    const float amax = __uint_as_float(bits);
    const bool vanishes = amax < 1e-30f;
    const float inverse = vanishes ? 0.f : __fdividef(ACT16_MAX, amax);
    scale = vanishes ? 0.f : amax * (1.f / ACT16_MAX);
    // As quantize_k_tile16.
#pragma unroll
    for (int w = 0; w < 4 * LOADS; w++) {
      const uint32_t q0 = __float_as_uint(fmaf(v[w].x, inverse, ROUNDER));
      const uint32_t q1 = __float_as_uint(fmaf(v[w].y, inverse, ROUNDER));
      const uint32_t q2 = __float_as_uint(fmaf(v[w].z, inverse, ROUNDER));
      const uint32_t q3 = __float_as_uint(fmaf(v[w].w, inverse, ROUNDER));
      high[w] = __byte_perm(__byte_perm(q0 + 128, q1 + 128, 0x0051), __byte_perm(q2 + 128, q3 + 128, 0x0051), 0x5410);
      low[w] = low_bytes(q0, q1, q2, q3);
    }
  }
};

// What a lane copies of a tile and reads back. WIDTH: head_dim, rounded up to 64, 128 or 256.
// FEW: where CTAs are no more than multiprocessors a tile has half the keys, so that short rows keep every warp busy.
template <int WIDTH, bool FEW>
struct Tile {
  static constexpr int BLOCKS = FEW || WIDTH == 256 ? 1 : 2, KEYS = 16 * BLOCKS;
  static constexpr int KEY_LOADS = WIDTH / 64;  // of a lane per key, 16 bytes each
  static constexpr int VALUE_BYTES = WIDTH == 64 ? 8 : 16, VALUE_LOADS = WIDTH / (8 * VALUE_BYTES);
  static constexpr int KEY_BYTES = KEYS * WIDTH, BYTES = 2 * KEY_BYTES + 128;  // with a word of scales per lane
};

// Stages of a warp's ring: two CTAs to a multiprocessor of sm_90 (227 KiB), one to that of sm_86, 89 and 120 (99 KiB).
// Few CTAs have one to themselves: 66 KiB on the way are enough, and leave room for the CTAs of the products around.
__host__ __device__ constexpr int ring_stages(int width, bool few, bool sm90) {
  if (few) return width == 64 ? 8 : width == 128 ? 4 : 2;
  return width == 64 ? (sm90 ? 6 : 5) : width == 128 && sm90 ? 3 : 2;
}

// Shared memory that takes the rings of all warps and, after them, what puts their parts together.
template <int WIDTH, bool FEW>
__host__ __device__ constexpr int ring_bytes(bool sm90) {
  const int rings = WARPS * ring_stages(WIDTH, FEW, sm90) * Tile<WIDTH, FEW>::BYTES;
  const int scratch = scratch_bytes(WARPS, MAX_GROUP, WIDTH);
  return rings > scratch ? rings : scratch;
}

#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1000
constexpr bool SM90 = true;
#else
constexpr bool SM90 = false;
#endif

// A team of warps attends to the keys of one key head. Where a row's heads are many, a CTA has several teams: parts of
// fewer warps are put together, and what begins and ends is a larger piece of work.
template <bool BF16, int WIDTH, bool FEW>
__global__ void __launch_bounds__(WARPS * 32, FEW&& WIDTH < 256 ? 4 : 2)
    attend_int8(const __grid_constant__ AttentionArgs a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ __align__(16) float queries[MAX_GROUP][WIDTH], key[WARPS][WIDTH];
  __shared__ __align__(16) uint32_t new_key[WARPS][WIDTH / 4], new_value[WARPS][WIDTH / 4];
  using T = Tile<WIDTH, FEW>;
  constexpr int BLOCKS = T::BLOCKS, KEYS = T::KEYS, KEY_LOADS = T::KEY_LOADS, VALUE_LOADS = T::VALUE_LOADS;
  constexpr int VALUE_BYTES = T::VALUE_BYTES, STAGES = ring_stages(WIDTH, FEW, SM90);
  const trirun_attention& t = a.t;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quad = lane / 4, sub = lane % 4;
  const AttentionSplit c(a, KEYS, false);
  if (c.idle && c.split > 0) return;
  const int row = c.row, length = c.length, head_dim = t.head_dim, bytes = int8_row_bytes(head_dim);
  const int team_warps = WARPS / a.teams, team = warp / team_warps, kv_head = c.kv_head + team;
  const int heads = c.heads / a.teams;  // of this team

  const uint32_t ring = shared_address(memory) + warp * STAGES * T::BYTES;
  const int32_t* table = t.block_tables + static_cast<int64_t>(c.slot) * t.ld_blocks;
  int fill_tile = c.tile0 + warp % team_warps;
  int page = !c.idle && fill_tile < c.tile1 ? table[fill_tile * KEYS / PAGE] : 0;
  // Codes of positions that are not there and of dimensions beyond the head are numbers too, whatever they are: weights
  // and limbs of zero meet them. Only scales must be zeros then.
  const uint32_t key_target = ring + lane * 16, value_target = ring + T::KEY_BYTES + lane * VALUE_BYTES;
  const int key_from = quad * bytes + min(16 * sub, bytes - 16);
  const int value_from = 2 * sub * bytes + min(VALUE_BYTES * quad, bytes - VALUE_BYTES);
  const auto fill = [&](int stage) {
    if (!c.idle && fill_tile < c.tile1) {
      const int first = fill_tile * KEYS, left = length - first;
      const int64_t at = cache_offset(page, t.kv_heads, kv_head, first, 1);
      const auto* keys = static_cast<const uint8_t*>(t.keys) + at * bytes + key_from;
      const auto* values = static_cast<const uint8_t*>(t.values) + at * bytes + value_from;
      const uint32_t offset = stage * T::BYTES;
#pragma unroll
      for (int eight = 0; eight < 2 * BLOCKS; eight++) {
        if (8 * eight >= left) break;
#pragma unroll
        for (int i = 0; i < KEY_LOADS; i++)
          copy_async<16>(key_target + offset + (eight * KEY_LOADS + i) * 512,
                         keys + 8 * eight * bytes + (i == 0 ? 0 : min(64 * i, bytes - 16 - min(16 * sub, bytes - 16))));
#pragma unroll
        for (int one = 0; one < 2; one++)
#pragma unroll
          for (int i = 0; i < VALUE_LOADS; i++)
            copy_async<VALUE_BYTES>(value_target + offset + ((2 * eight + one) * VALUE_LOADS + i) * 32 * VALUE_BYTES,
                                    values + (8 * eight + one) * bytes +
                                        (i == 0 ? 0 : min(128 * i, bytes - 16 - min(16 * quad, bytes - 16))));
      }
      copy_async4_or_zero(ring + offset + 2 * T::KEY_BYTES + lane * 4,
                          static_cast<const __half2*>(t.scales) + at + lane % KEYS, lane < KEYS && lane < left);
      fill_tile += team_warps;
      // The next fill's page is asked for now, so that its latency is not in the way then.
      if (fill_tile < c.tile1) page = table[fill_tile * KEYS / PAGE];
    }
    copy_async_commit();
  };
#pragma unroll
  for (int i = 0; i < STAGES; i++) fill(i);
  constexpr int PER_LANE = WIDTH / 32;
  const HeadMaker<BF16, PER_LANE> make(t, length);
  await_projection(a);
  if (c.idle) return attend_nothing(a, c);

  const auto* q_row = static_cast<const uint16_t*>(t.q) + row * t.ld_q;
  const auto* k_row = static_cast<const uint16_t*>(t.k) + row * t.ld_kv;
  const auto* v_row = static_cast<const uint16_t*>(t.v) + row * t.ld_kv;
  make.take(
      c.heads + (c.newest && !all_stored(t) ? a.teams : 0), WARPS, head_dim,
      [&](int i) {
        return i < c.heads ? q_row + (c.head0 + i) * head_dim : k_row + (c.kv_head + i - c.heads) * head_dim;
      },
      [&](int i, float (&v)[PER_LANE]) {
        float* mine = i < c.heads ? queries[i] : key[i - c.heads];
        make.make(v, i < c.heads, mine, t);
#pragma unroll
        for (int j = 0; j < PER_LANE; j++)
          if (lane + 32 * j < head_dim) mine[lane + 32 * j] = i < c.heads ? v[j] * (t.scale * LOG2E) : v[j];
        __syncwarp();
        mix_head<PER_LANE>(mine, head_dim);
      });
  __syncthreads();

  QueryLimbs<KEY_LOADS> q;
  q.make(queries[team * heads + min(quad, heads - 1)], quad < heads, head_dim);
  // A lane's scores are those of keys quad and quad + 8 of a block, heads 2 sub and 2 sub + 1; its sums those of
  // dimensions VALUE_BYTES (quad + 8i) + 2w and + 1, in tile i * VALUE_BYTES / 2 + w, for the same heads.
  const float q_scale[2] = {__shfl_sync(~0u, q.scale, 8 * sub), __shfl_sync(~0u, q.scale, 8 * sub + 4)};
  const float softcap = t.softcap * LOG2E;
  float sum[WIDTH / 16][4] = {}, maximum[2] = {-INFINITY, -INFINITY}, total[2] = {};
  if (c.newest && warp % team_warps == 0) {
    constexpr int WORDS = WIDTH == 256 ? 2 : 1;
    Int8Token<WORDS> token;
    if (all_stored(t)) {
      token = load_token<WORDS>(t, table[length / PAGE], kv_head, length);
    } else {
      token = quantize_token<BF16, WORDS>(key[team], v_row + kv_head * head_dim, head_dim, t.v_norm, t.eps);
      if (c.chunk == 0) store_token(t, token, table[length / PAGE], kv_head, length);
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++)
      if (lane + 32 * i < WIDTH / 4)
        new_key[team][lane + 32 * i] = token.key[i], new_value[team][lane + 32 * i] = token.value[i];
    __syncwarp();
    // What later steps will read is what this one attends to.
    const float2 scales = __half22float2(token.scales);
    int high = 0, low = 0;
#pragma unroll
    for (int w = 0; w < 4 * KEY_LOADS; w++) {
      const int word = static_cast<int>(new_key[team][4 * (sub + w / 4 * 4) + w % 4]);
      high = __dp4a(word, static_cast<int>(q.high[w]), high), low = __dp4a(word, static_cast<int>(q.low[w]), low);
    }
    int dot = 256 * high + low;
    dot += __shfl_xor_sync(~0u, dot, 1);
    dot += __shfl_xor_sync(~0u, dot, 2);
    float score = static_cast<float>(dot) * (q.scale * scales.x);
    if (softcap != 0.f) score = softened(score, softcap);
    const float shift = log2_scale(scales.y);
#pragma unroll
    for (int e = 0; e < 2; e++) {
      maximum[e] = __shfl_sync(~0u, score, 8 * sub + 4 * e) + shift;
      // One lane counts it.
      total[e] = quad == 0 ? exp2f(-shift) : 0.f;
    }
    const auto* codes = reinterpret_cast<const int8_t*>(new_value[team]);
#pragma unroll
    for (int tile = 0; tile < WIDTH / 16; tile++) {
      const int d = VALUE_BYTES * (quad + tile / (VALUE_BYTES / 2) * 8) + tile % (VALUE_BYTES / 2) * 2;
#pragma unroll
      for (int e = 0; e < 4; e++) sum[tile][e] = codes[d + e / 2];
    }
  }

  int stage = 0;
  for (int tile = c.tile0 + warp % team_warps; tile < c.tile1; tile += team_warps) {
    copy_async_wait<STAGES - 1>();
    const uint32_t offset = stage * T::BYTES;
    const uint32_t own_scales = load_shared(ring + offset + 2 * T::KEY_BYTES + lane * 4);
    // Index 2h + e of a block: key quad + 8h, head 2 sub + e.
    float score[BLOCKS][4], p[BLOCKS][4], weight[BLOCKS][4], value_scale[BLOCKS][2];
    bool large = false;
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      int high[4] = {}, low[4] = {};
#pragma unroll
      for (int i = 0; i < KEY_LOADS; i++) {
        const uint4 k0 = load_shared4(key_target + offset + (2 * b * KEY_LOADS + i) * 512);
        const uint4 k1 = load_shared4(key_target + offset + ((2 * b + 1) * KEY_LOADS + i) * 512);
        mma_s8(high, k0.x, k1.x, k0.y, k1.y, q.high[4 * i], q.high[4 * i + 1]);
        mma_s8(low, k0.x, k1.x, k0.y, k1.y, q.low[4 * i], q.low[4 * i + 1]);
        mma_s8(high, k0.z, k1.z, k0.w, k1.w, q.high[4 * i + 2], q.high[4 * i + 3]);
        mma_s8(low, k0.z, k1.z, k0.w, k1.w, q.low[4 * i + 2], q.low[4 * i + 3]);
      }
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const uint32_t word = __shfl_sync(~0u, own_scales, 16 * b + 8 * h + quad);
        const float2 scales = __half22float2(*reinterpret_cast<const __half2*>(&word));
        const int position = tile * KEYS + 16 * b + 8 * h + quad;
        const bool seen = position >= c.begin && position < length;
        value_scale[b][h] = scales.y;
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int at = 2 * h + e;
          const float dot = static_cast<float>(256 * high[at] + low[at]);
          const float exact = dot * (q_scale[e] * scales.x);
          score[b][at] = !seen ? -INFINITY : softcap != 0.f ? softened(exact, softcap) : exact;
          p[b][at] = exp2f(score[b][at] - maximum[e]);
          weight[b][at] = p[b][at] * scales.y;
          // Of the first keys too, relative to -infinity.
          large |= !(weight[b][at] <= MAX_WEIGHT);
        }
      }
    }
    if (__any_sync(~0u, large)) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float highest = maximum[e];
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; n++)
          highest = fmaxf(highest, score[n / 2][n % 2 * 2 + e] + log2_scale(value_scale[n / 2][n % 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
        const float kept = exp2f(maximum[e] - highest);
        maximum[e] = highest;
        total[e] *= kept;
#pragma unroll
        for (int i = 0; i < WIDTH / 16; i++) sum[i][e] *= kept, sum[i][2 + e] *= kept;
#pragma unroll
        for (int n = 0; n < 2 * BLOCKS; n++) {
          const int b = n / 2, at = n % 2 * 2 + e;
          p[b][at] = exp2f(score[b][at] - highest);
          weight[b][at] = p[b][at] * value_scale[b][n % 2];
        }
      }
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
      uint32_t weights[2];
#pragma unroll
      for (int h = 0; h < 2; h++) {
        total[0] += p[b][2 * h], total[1] += p[b][2 * h + 1];
        const __half2 pair = __floats2half2_rn(weight[b][2 * h], weight[b][2 * h + 1]);
        weights[h] = transposed(*reinterpret_cast<const uint32_t*>(&pair));
      }
#pragma unroll
      for (int i = 0; i < VALUE_LOADS; i++) {
        uint32_t v[4][VALUE_BYTES / 4];
#pragma unroll
        for (int n = 0; n < 4; n++)
          load_words(v[n], value_target + offset + ((4 * b + n) * VALUE_LOADS + i) * 32 * VALUE_BYTES);
#pragma unroll
        for (int w = 0; w < VALUE_BYTES / 2; w++) {
          // Two dimensions of keys 2 sub, + 1, + 8 and + 9.
          const uint32_t near = __byte_perm(v[0][w / 2], v[1][w / 2], w % 2 ? 0x7632 : 0x5410);
          const uint32_t far = __byte_perm(v[2][w / 2], v[3][w / 2], w % 2 ? 0x7632 : 0x5410);
          const uint32_t operand[4] = {widen_bytes(near), widen_bytes(near >> 8), widen_bytes(far),
                                       widen_bytes(far >> 8)};
          mma_16bit<__half>(sum[i * (VALUE_BYTES / 2) + w], operand, weights[0], weights[1]);
        }
      }
    }
    fill(stage);
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
  copy_async_wait<0>();

  auto* parts = reinterpret_cast<float*>(memory);  // where the rings were
  leave_parts<WIDTH>(parts, a.room, heads, sum, maximum, total, [&](int tile) {
    return VALUE_BYTES * (quad + tile / (VALUE_BYTES / 2) * 8) + tile % (VALUE_BYTES / 2) * 2;
  });
  auto* received = reinterpret_cast<float*>(memory + ring_bytes<WIDTH, FEW>(SM90));
  put_together<BF16>(a, c, parts, a.room, WIDTH, a.teams, received);
}

// no-spill(90a): attend_int8<*, *, *>
template <int WIDTH, bool FEW>
AttentionKernel instance(bool sm90, bool bf16, int& shared_bytes) {
  shared_bytes = ring_bytes<WIDTH, FEW>(sm90);
  return bf16 ? attend_int8<true, WIDTH, FEW> : attend_int8<false, WIDTH, FEW>;
}

template <bool FEW>
AttentionKernel for_head(bool sm90, bool bf16, int head_dim, int& shared_bytes) {
  if (head_dim <= 64) return instance<64, FEW>(sm90, bf16, shared_bytes);
  return head_dim <= 128 ? instance<128, FEW>(sm90, bf16, shared_bytes) : instance<256, FEW>(sm90, bf16, shared_bytes);
}

}  // namespace

AttentionKernel int8_attention(const DeviceFacts& device, bool bf16, int head_dim, bool few, int& shared_bytes) {
  const bool sm90 = device.ptx >= 90 && device.ptx < 100;  // as the code for the device was compiled
  return few ? for_head<true>(sm90, bf16, head_dim, shared_bytes) : for_head<false>(sm90, bf16, head_dim, shared_bytes);
}

}  // namespace trirun::decoder
