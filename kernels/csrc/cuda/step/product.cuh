// One product of the step: this cluster's n tiles, this CTA's half of k.
//
// A warp multiplies a chunk, up to four k tiles of one n tile, or a part of it where chunks are few. The sums of an n
// tile's chunks meet in shared memory, and those of the two CTAs in the shared memory of the CTA that finishes them:
// each has 32 of an n tile's 64 rows. Compact on purpose: little of this code is run twice in a row, and instructions
// cost what it takes to fetch them.
#pragma once

#include "cta.cuh"
#include "cuda/gemm_decode/stream_tile.cuh"

namespace trirun::step {

// Sums of one n tile and up to eight columns. EXACT: scales are applied in the end.
template <int LIMBS, int SCALE>
struct Sums {
  using Base = gemm_decode::Partial<LIMBS, 1, SCALE>;
  using RowScales = typename Base::RowScales;
  static constexpr int TOKENS = Base::TOKENS;
  static constexpr bool EXACT = Base::EXACT, GROUPS = Base::OF_K_TILES;

  typename Base::Sum sum[4][2][TOKENS];  // row block j (4^j times too large), rows r and r + 8, token
  float x_sum[TOKENS];                   // of x, which the zero point multiplies: not of GROUPS

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8 * TOKENS; i++) (&sum[0][0][0])[i] = 0;
#pragma unroll
    for (int e = 0; e < TOKENS; e++) x_sum[e] = 0.f;
  }

  // One k tile. words: shared address of this lane's 16 bytes of its first block of 32 k. limbs: of this lane's column
  // and bytes; half: bytes from one half of a block of limbs to the next. scales: of its float2 of the first row.
  __device__ __forceinline__ void add(uint32_t words, uint32_t limbs, uint32_t half, uint32_t scales, int tokens,
                                      const RowScales& rows, float zero) {
    int c[4][4];
    uint4 following = load_shared4(words);
#pragma unroll
    for (int block = 0; block < 4; block++) {
      const uint4 w = following;
      if (block < 3) following = load_shared4(words + (block + 1) * 512);
      const uint32_t b0 = load_shared(limbs + block * 2 * half), b1 = load_shared(limbs + (block * 2 + 1) * half);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t a[4];
        Base::masked(a, w, j);
        if constexpr (EXACT) {
          int (&d)[4] = reinterpret_cast<int (&)[4]>(sum[j]);
          mma_u8s8(d, a, b0, b1, d);
        } else if (block == 0) {
          mma_u8s8(c[j], a, b0, b1, {0, 0, 0, 0});
        } else {
          mma_u8s8(c[j], a, b0, b1, c[j]);
        }
      }
    }
#pragma unroll
    for (int e = 0; e < TOKENS; e++) {
      const float2 s = load_shared_float2(scales + Base::token(0, e, tokens) * 8);
      if constexpr (!GROUPS) x_sum[e] += s.y;
      if constexpr (EXACT) continue;
      float zero_sum = GROUPS ? zero * s.y : 0.f;
#pragma unroll
      for (int j = 0; j < 4; j++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float v = static_cast<float>(Base::combine(c[j], h, e));
          if constexpr (GROUPS)
            sum[j][h][e] += Base::half_of(rows.scales, j, h) * (s.x * v - zero_sum);
          else
            sum[j][h][e] += s.x * v;
        }
        zero_sum *= 4.f;
      }
    }
  }

  // To the slots of all rows of x, float [64] each. x_scales: of EXACT, float [tokens].
  __device__ __forceinline__ void leave(uint32_t slots, int tokens, float zero, uint32_t x_scales) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < TOKENS; e++) {
      const int token = LIMBS == 2 ? lane % 4 : lane % 4 * 2 + e;
      if (token >= tokens) continue;
      const float x_scale = EXACT ? load_shared_float(x_scales + token * 4) : 1.f;
      const float zero_sum = GROUPS ? 0.f : zero * x_sum[e];
      const uint32_t to = slots + token * 256 + lane / 4 * 4;
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int h = 0; h < 2; h++)
          store_shared(to + 64 * j + 32 * h,
                       static_cast<float>(sum[j][h][e]) * (gemm_decode::quarter_power(j) * x_scale) - zero_sum);
    }
  }
};

// A warp's task at the end of a round: one row of x of one unit, to send to the other CTA or to finish. All of it is
// made before the input is waited for.
struct Finish {
  bool busy, sends;
  uint32_t from;          // shared address of its first sum
  uint32_t place;         // where the other CTA's sum will be; of a sender, there
  uint32_t residual;      // shared address, or 0
  float weight[2], bias[2], norm;
  float4 *words, *header;  // where it goes; null: no header
};

template <int LIMBS, int SCALE>
struct Multiplier {
  using S = Sums<LIMBS, SCALE>;

  __device__ __forceinline__ static Finish prepared(const Cta& c, int index, int product, const Geometry& g, int first,
                                                    int count) {
    const bool pairs = product == GATE_UP;
    const trirun_cuda_step& s = c.a.s;
    const trirun_cuda_step_layer& layer = c.layer(index);
    const trirun_int2& weight = (&layer.qkv)[product];
    const int lane = c.lane(), warp = c.warp(), rank = c.rank(), rows_log = c.a.tokens_log, rows = 1 << rows_log;
    const int row = warp >> 1 & (rows - 1), unit = warp >> 1 >> rows_log;
    Finish f{};
    f.busy = unit < count, f.sends = (warp & 1) == 0;
    if (!f.busy) return f;
    const int in_tile = (f.sends ? 1 - rank : rank) * 32 + lane, n = (first + unit) * 64 + in_tile;
    const int sums = g.tile_chunks << g.sharing;  // of an n tile
    f.from = c.shared + c.a.at.slots + ((((unit << (pairs ? 1 : 0)) * sums) << rows_log) + row) * 256 + in_tile * 4;
    f.place = c.shared + c.a.at.exchange + (((c.exchanges & 1) * WARPS + (warp & ~1)) * 32 + lane) * 4;
    if (f.sends) {
      f.place = peer_address(f.place, 1 - rank);
      return f;
    }
    const void* bias = (&layer.qkv_bias)[product];
#pragma unroll
    for (int part = 0; part < 2; part++) {
      f.weight[part] = 1.f, f.bias[part] = 0.f;
      if (part == 1 && !pairs) break;
      const int tile = n - in_tile + part * (g.n_tiles / 2) * 64;
      if constexpr (!S::GROUPS)
        f.weight[part] = __half2float(
            __ushort_as_half(__ldg(weight.scales + tile + in_tile % 8 * 8 + in_tile / 16 * 2 + in_tile / 8 % 2)));
      if (bias != nullptr) f.bias[part] = load_element(bias, tile + in_tile, s.dtype);
    }
    const float* norm = nullptr;
    float4 *words = c.a.qkv, *headers = nullptr;
    int width = g.n_tiles * 64;
    if (pairs) {
      norm = layer.mlp_sub_norm, words = c.a.gated, width = static_cast<int>(s.ffn);
      if (LIMBS == 1 || norm != nullptr) headers = c.a.gated_headers;
    } else if (product != QKV) {
      const bool mlp = product == O;
      norm = mlp ? layer.mlp_norm : index + 1 < s.layer_count ? c.layer(index + 1).attention_norm : s.final_norm;
      words = mlp ? c.a.x_mlp : c.a.x_attention, headers = mlp ? c.a.x_mlp_headers : c.a.x_attention_headers;
      f.residual = c.shared + c.a.at.residual + (((first + unit - c.geometry(O).first) * rows + row) * 32 + lane) * 4;
    }
    f.norm = norm == nullptr ? 1.f : __ldg(norm + n);
    f.words = words + (row * width + n - lane) / 4;
    f.header = headers == nullptr ? nullptr : headers + (row * width + n) / 32;
    return f;
  }

  // tag: of this layer's messages. next: of the next one's.
  __device__ __forceinline__ static void run(Cta& c, int index, int product, const Input& in, uint32_t tag,
                                             uint32_t next) {
    const Geometry g = c.geometry(product);
    if (g.units == 0) return;
    const bool pairs = product == GATE_UP;
    const trirun_int2& weight = (&c.layer(index).qkv)[product];
    const int lane = c.lane(), warp = c.warp(), rows = 1 << c.a.tokens_log, columns = rows * LIMBS;
    const int part = warp & ((1 << g.sharing) - 1), mine = CHUNK_K_TILES >> g.sharing;
    const int chunk0 = warp >> g.sharing, chunk_step = WARPS >> g.sharing;
    const uint32_t slots = c.shared + c.a.at.slots + ((warp * rows) << 8), slot_step = (WARPS * rows) << 8;
    const uint32_t words0 = part * mine * WORD_TILE_BYTES + lane * 16;
    const uint32_t limbs0 = c.shared + c.a.at.limbs + (lane / 4 & (columns - 1)) * 16 + lane % 4 * 4;
    const uint32_t x_scales = c.shared + c.a.at.factors + MAX_ROWS * 4;
    const float zero = weight.zero;
    int count = min(g.round, g.units);
    Finish f = prepared(c, index, product, g, g.first, count);
    take_input<LIMBS>(c, in, g.half, g.k_tiles, tag);
    for (int first = 0;;) {
      const int tiles = count << (pairs ? 1 : 0), chunks = tiles * g.tile_chunks;
      if (threadIdx.x == 0) barrier_expect(c.exchange_barrier(), static_cast<uint32_t>(tiles * rows * 32 * 4));
      Ring at = c.ring;
      c.move(at, chunk0);
      int tile = 0, chunk = chunk0;  // of the tile
      uint32_t slot = slots;
#pragma unroll 1
      for (int i = chunk0; i < chunks; i += chunk_step) {
        while (chunk >= g.tile_chunks) chunk -= g.tile_chunks, tile++;
        S sums;
        sums.clear();
        int k = chunk * CHUNK_K_TILES + part * mine;
        const int end = min(k + mine, g.k_tiles);
        const uint16_t* scales = nullptr;
        typename S::RowScales row_scales{};
        if constexpr (S::GROUPS) {
          const int n_tile = g.first + first + (pairs ? tile / 2 + (tile & 1) * (g.n_tiles / 2) : tile);
          scales = weight.scales + static_cast<int64_t>(g.half + k) * weight.n + n_tile * 64 + lane / 4 * 8;
          // A chunk may have fewer k tiles than warps share it.
          if (k < end) row_scales.scales = __ldg(reinterpret_cast<const uint4*>(scales));
        }
        uint32_t words = c.shared + at.stage * CHUNK_BYTES + words0, limbs = limbs0 + k * K_TILE * columns;
        uint32_t scale = c.shared + c.a.at.scales + k * rows * 8;
        barrier_wait(c.full(at.stage), at.phase);
#pragma unroll 1
        for (; k < end; k++) {
          const typename S::RowScales these = row_scales;
          if constexpr (S::GROUPS) {
            scales += weight.n;
            if (k + 1 < end) row_scales.scales = __ldg(reinterpret_cast<const uint4*>(scales));
          }
          sums.add(words, limbs, columns * 16, scale, rows, these, zero);
          words += WORD_TILE_BYTES, limbs += K_TILE * columns, scale += rows * 8;
        }
        // Its words have been multiplied by now: an arrival may overtake loads, but not what depends on them.
        __syncwarp();
        if (lane == 0) barrier_arrive_counted(c.empty(at.stage), WARPS / 4 >> g.sharing);
        sums.leave(slot, rows, zero, x_scales);
        slot += slot_step, chunk += chunk_step;
        c.move(at, chunk_step);
      }
      c.move(c.ring, chunks);
      meet();
      if (f.busy) finish(c, product, f, g.tile_chunks << g.sharing, in.normed, product == DOWN ? next : tag);
      c.exchanges++;
      first += g.round;
      if (first >= g.units) break;
      count = min(g.round, g.units - first);
      f = prepared(c, index, product, g, g.first + first, count);
      meet();
    }
  }

  // Adds up the sums of an n tile that warps left, exchanges them with the other CTA, and hands on what they come to.
  __device__ __forceinline__ static void finish(const Cta& c, int product, const Finish& f, int sums, bool normed,
                                                uint32_t tag) {
    const bool pairs = product == GATE_UP;
    const int rows_log = c.a.tokens_log, step = 256 << rows_log;
    const auto added = [&](uint32_t from) {
      float low = 0.f, high = 0.f;
      int left = sums;
#pragma unroll 1
      for (; left >= 4; left -= 4, from += 4 * step) {
        const float a = load_shared_float(from), b = load_shared_float(from + step);
        const float d = load_shared_float(from + 2 * step), e = load_shared_float(from + 3 * step);
        low += a + b, high += d + e;
      }
#pragma unroll 1
      for (; left > 0; left--, from += step) low += load_shared_float(from);
      return low + high;
    };
    float total = added(f.from), up = pairs ? added(f.from + sums * step) : 0.f;
    if (f.sends) {
      const uint32_t barrier = peer_address(c.exchange_barrier(), 1 - c.rank());
      store_peer_counted(f.place, total, barrier);
      if (pairs) store_peer_counted(f.place + 128, up, barrier);
      return;
    }
    const float factor = LIMBS == 2 && normed ? c.floats(c.a.at.factors)[c.warp() >> 1 & ((1 << rows_log) - 1)] : 1.f;
    barrier_wait_cluster(c.exchange_barrier(), c.exchanges & 1);
    float raw = (total + load_shared_float(f.place)) * factor * f.weight[0] + f.bias[0];
    if (pairs) {
      up = (up + load_shared_float(f.place + 128)) * factor * f.weight[1] + f.bias[1];
      raw = decoder::activate<false>(raw, c.a.s.activation) * up;
    }
    if (f.residual != 0) {
      raw += load_shared_float(f.residual);
      store_shared(f.residual, raw);
    }
    const float sent = raw * f.norm;
    send_lanes(f.words, sent, tag);
    if (f.header != nullptr) c.send_header(f.header, raw, sent, tag);
  }
};

}  // namespace trirun::step
