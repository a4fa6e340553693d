// Warps that multiply: this CTA's part of k of its cluster's n tiles.
//
// They take the input together, and meet. Then warps share an n tile where tiles are few, each with some of its k
// tiles, which are the same for all n tiles that it multiplies. Sums go to the shared memory of the CTA that finishes
// the unit, one slot for each warp of the cluster that had a part in it, and are counted there by a barrier: nobody
// meets anybody on the way. Of sixteen columns, warps that share an n tile pass their sums on to each other instead.
#pragma once

#include "parts.cuh"
#include "cuda/gemm_decode/stream_tile.cuh"

namespace trirun::step {

// Sums of one n tile and BLOCKS times eight columns. EXACT: scales are applied in the end.
template <int LIMBS, int SCALE, int BLOCKS>
struct Sums {
  using Base = gemm_decode::Partial<LIMBS, 1, SCALE>;
  using RowScales = typename Base::RowScales;
  static constexpr int TOKENS = Base::TOKENS;  // of a lane in a block
  static constexpr int BLOCK_BYTES = 8 * 64;  // of a block of columns, of two blocks of 32 k
  static constexpr bool EXACT = Base::EXACT, GROUPS = Base::OF_K_TILES;
  static constexpr bool ZEROS = SCALE == gemm_decode::PER_K_TILE;  // one of every row and k tile
  static constexpr int WORDS = 2 * TOKENS * BLOCKS;  // of four rows and one token, that a lane has in the end
  static_assert(BLOCKS == 1 || (LIMBS == 2 && !GROUPS));

  // Codes of row blocks 0 to j as an A register: a mask less than one for each block, and their products' differences
  // are those of a block.
  __device__ __forceinline__ static void up_to(uint32_t (&a)[4], uint4 w, int j) {
    const uint32_t mask = (4u << 2 * j) - 1, masks = mask * 0x01010101u;
    a[0] = w.x & masks, a[1] = w.y & masks, a[2] = w.z & masks, a[3] = w.w & masks;
  }
  // As an integer what 1.5 * 2^23 is as a float: added to one below 2^22, the sum is that number as a float, too.
  // Products of 128 k are: 255 * 128 * 128.
  static constexpr int FLOAT_ZERO = 0x4b400000;

  // Row block j (4^j times too large; but of GROUPS with those before it), rows r and r + 8, token.
  typename Base::Sum sum[BLOCKS][4][2][TOKENS];
  float x_sum[BLOCKS][TOKENS];  // of x, which the zero point multiplies: not of GROUPS

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 8 * TOKENS * BLOCKS; i++) (&sum[0][0][0][0])[i] = 0, forget((&sum[0][0][0][0])[i]);
#pragma unroll
    for (int i = 0; i < TOKENS * BLOCKS; i++) (&x_sum[0][0])[i] = 0.f, forget((&x_sum[0][0])[i]);
  }

  // A lane's e-th token of a block; of one block there may be fewer.
  __device__ __forceinline__ static int token_of(int lane, int n, int e) {
    return LIMBS == 2 ? n * 4 + lane % 4 : lane % 4 * 2 + e;
  }

  // One k tile. words: shared address of this lane's 16 bytes of its first block of 32 k. limbs: of this lane's column
  // and bytes; half: bytes from the first two blocks to the others. scales: of its float2 of the first row. Of one
  // block of columns, following and b are the first of words and limbs, loaded before, and afterwards, if there is
  // `more`, those of the next k tile: of two there are no registers for them.
  __device__ __forceinline__ void add(uint4& following, uint4& b, bool more, uint32_t words, uint32_t limbs,
                                      uint32_t half, uint32_t scales, int tokens, const RowScales& rows, float zero) {
    constexpr int AT_ONCE = 4 / BLOCKS;  // row blocks: of more there were too many sums on their way
    uint4 low[BLOCKS], high[BLOCKS];
    low[0] = BLOCKS == 1 ? b : load_shared4(limbs);
    const uint4 w0 = BLOCKS == 1 ? following : load_shared4(words), w1 = load_shared4(words + 512);
#pragma unroll
    for (int n = 1; n < BLOCKS; n++) low[n] = load_shared4(limbs + n * BLOCK_BYTES);
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) high[n] = load_shared4(limbs + half + n * BLOCK_BYTES);
    const uint4 w2 = load_shared4(words + 1024);
    uint4 w3{};
#pragma unroll
    for (int first = 0; first < 4; first += AT_ONCE) {
      int c[BLOCKS][AT_ONCE][4];
#pragma unroll
      for (int block = 0; block < 4; block++) {
        const uint4 w = block == 0 ? w0 : block == 1 ? w1 : block == 2 ? w2 : w3;
        if (first == 0 && block == 1) w3 = load_shared4(words + 1536);
        if (BLOCKS == 1 && block == 2 && more)
          following = load_shared4(words + WORD_TILE_BYTES), b = load_shared4(limbs + 2 * half);
#pragma unroll
        for (int j = 0; j < AT_ONCE; j++) {
          uint32_t a[4];
          up_to(a, w, first + j);
#pragma unroll
          for (int n = 0; n < BLOCKS; n++) {
            const uint4 x = block < 2 ? low[n] : high[n];
            const uint32_t b0 = block % 2 == 0 ? x.x : x.z, b1 = block % 2 == 0 ? x.y : x.w;
            if constexpr (EXACT) {
              int (&d)[4] = reinterpret_cast<int (&)[4]>(sum[n][j]);
              mma_u8s8(d, a, b0, b1, d);
            } else if (block == 0) {
              mma_u8s8(c[n][j], a, b0, b1, {FLOAT_ZERO, FLOAT_ZERO, FLOAT_ZERO, FLOAT_ZERO});
            } else {
              mma_u8s8(c[n][j], a, b0, b1, c[n][j]);
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < BLOCKS; n++)
#pragma unroll
        for (int e = 0; e < TOKENS; e++) {
          const int token = BLOCKS == 1 ? Base::token(0, e, tokens) : token_of(threadIdx.x, n, e);
          const uint2 words_of_x = load_shared2(scales + token * 8);
          const float x_scale = __uint_as_float(words_of_x.x);
          const float sum_of_x = x_scale * static_cast<float>(static_cast<int>(words_of_x.y));
          if (!GROUPS && first == 0) x_sum[n][e] += sum_of_x;
          if constexpr (!EXACT) scale(c[n], n, first, e, make_float2(x_scale, sum_of_x), rows, zero);
        }
    }
  }

  // Of a k tile's products of token e those of row blocks from the first on, times its scale.
  template <int COUNT>
  __device__ __forceinline__ void scale(const int (&c)[COUNT][4], int n, int first, int e, float2 s,
                                        const RowScales& rows, float zero) {
    // 256 times the high limb's and the low one's, rounded once: both came with FLOAT_ZERO, a multiple of 256.
    const auto both = [&](int j, int h) {
      const auto of = [&](int i) { return __uint_as_float(static_cast<uint32_t>(c[j][2 * h + i])); };
      return fmaf(of(0), 256.f, -257.f * ROUNDER) + of(1);
    };
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float zero_sum = GROUPS ? (ZEROS ? s.y : zero * s.y) : 0.f;
#pragma unroll
      for (int j = 0; j < COUNT; j++) {
        auto& to = sum[n][first + j][h][e];
        if constexpr (GROUPS) {
          const float v = j > 0 ? both(j, h) - both(j - 1, h) : both(j, h);
          const float row_zero = ZEROS ? Base::half_of(rows.zeros, j, h) : 1.f;
          to += Base::half_of(rows.scales, j, h) * (s.x * v - row_zero * zero_sum);
        } else {
          to = fmaf(s.x, both(j, h), to);
        }
        zero_sum *= 4.f;
      }
    }
  }

  // What the sums come to: the eight of a lane's e-th token of a block are two words. x_scale: of EXACT.
  __device__ __forceinline__ void values(float4 (&words)[2], int n, int e, float zero, float x_scale) const {
    const float zero_sum = GROUPS ? 0.f : zero * x_sum[n][e];
    const auto value = [&](int j, int h) {
      const auto own = !GROUPS && j > 0 ? sum[n][j][h][e] - sum[n][j - 1][h][e] : sum[n][j][h][e];
      return static_cast<float>(own) * (gemm_decode::quarter_power(j) * x_scale) - zero_sum;
    };
    words[0] = make_float4(value(0, 0), value(0, 1), value(1, 0), value(1, 1));
    words[1] = make_float4(value(2, 0), value(2, 1), value(3, 0), value(3, 1));
  }

  // To a slot of every row of x, so many bytes apart, of the CTA that counts them, of one block. x_scales: of EXACT,
  // float [tokens].
  __device__ __forceinline__ void leave(uint32_t slots, uint32_t apart, uint32_t barrier, int tokens, float zero,
                                        const float* x_scales) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < TOKENS; e++) {
      const int token = token_of(lane, 0, e);
      if (token >= tokens) continue;
      float4 words[2];
      values(words, 0, e, zero, EXACT ? x_scales[token] : 1.f);
      const uint32_t to = slots + token * apart + lane / 4 * 16;
      store_peer_counted(to, words[0], barrier), store_peer_counted(to + 128, words[1], barrier);
    }
  }
};

template <int LIMBS, int SCALE, int BLOCKS, typename Cta>
struct Multiplier {
  using S = Sums<LIMBS, SCALE, BLOCKS>;

  // A word of attention's output, of the parts of all splits.
  __device__ __forceinline__ static float4 joined(const Cta& c, int row, int word, uint32_t tag) {
    const int head = word >> c.a.head_words_log;
    const Parts parts{c, row, static_cast<int>((static_cast<float>(head) + 0.5f) * c.a.key_heads_of_head)};
    Part part;
    parts.join(part, word - parts.kv_head * parts.words(), 0, splits_of(c, row, parts.kv_head), true, tag);
    return part.attended();
  }

  // Quantizes this CTA's k of an input into shared memory. The registers of two neighbouring blocks of 32 k are side by
  // side, so that a lane finds its B registers of both in one load. One word after another: several at once would be
  // more instructions, which is worse where there is one (kernels/LOG.md).
  __device__ __forceinline__ static void take_input(const Cta& c, const Geometry& g, uint32_t phase) {
    const int product = phase % PRODUCTS;
    const trirun_cuda_step_layer& layer = c.layer(phase / PRODUCTS);
    const uint32_t tag = c.tag(phase / PRODUCTS);
    const int lane = c.lane(), rows_log = c.rows_log(), rows = c.rows(), columns = rows * LIMBS, buffer = product & 1;
    const int pairs = g.k_tiles << rows_log;
    const float4* words = input_of(c.a, layer, product).words;
    const float* of_rows = c.factors(buffer);
    const uint32_t limbs = c.shared + c.a.at.limbs + buffer * c.a.at.limb_buffer + lane / 16 * columns * 64 +
                           lane % 4 * 16 + lane / 4 % 4 * 4;
    const uint32_t scales = c.shared + c.a.at.scales + buffer * c.a.at.scale_buffer;
    // Factors are made for products of which the CTA has units: of a buffer's two, or of one, once a layer.
    const int parity = LIMBS == 1 && c.geometry(product ^ 2).units == 0 ? phase / PRODUCTS & 1 : product >> 1;
    bool waits = LIMBS == 1;
#pragma unroll 1
    for (int pair = c.warp(); pair < pairs; pair += WARPS) {
      const int row = pair & (rows - 1), k_tile = pair >> rows_log, word = (g.k_first + k_tile) * 32 + lane;
      float4 v;
      if (LIMBS == 2 && product == O && joined_by_readers(c, row))
        v = joined(c, row, word, tag);
      else
        v = reordered(received(words + row * g.all_k_tiles * 32 + word, tag, c.patience()));
      if (waits) barrier_wait_warp(c.factor_barrier(buffer), parity), waits = false;
      QuantizedKTile q;
      if constexpr (LIMBS == 1)
        q = quantize_k_tile8(scaled(v, of_rows[row]), of_rows[MAX_ROWS + row]);
      else
        q = quantize_k_tile16(v);
      const uint32_t at = limbs + k_tile * K_TILE * columns + row * LIMBS * 64;
      store_shared(at, q.limb[0]);
      if constexpr (LIMBS == 2) store_shared(at + 64, q.limb[1]);
      const int sum = __reduce_add_sync(~0u, q.sum);
      if (lane == 0) store_shared2(scales + pair * 8, __float_as_uint(q.scale), static_cast<uint32_t>(sum));
    }
    if (waits) barrier_wait_warp(c.factor_barrier(buffer), parity);
    meet();
  }

  __device__ __forceinline__ static int over_parts(const Geometry& g, int v) { return v * g.sharing.of_parts >> 16; }

  // A warp among those that share an n tile.
  __device__ __forceinline__ static int nth_of(const Geometry& g, int warp) {
    return warp - over_parts(g, warp) * g.sharing.parts;
  }

  // Where this warp's sums of an n tile go, in the shared memory of the CTA that finishes its unit.
  struct Target {
    uint32_t slots, barrier;
  };
  __device__ __forceinline__ static Target target_of(const Cta& c, const Geometry& g, int product, uint32_t tile) {
    const uint32_t tiles_log = product == GATE_UP, unit = tile >> tiles_log, within = tile & tiles_log;
    const uint32_t local = unit >> c.cluster_log(), owner = unit & (c.cluster() - 1), buffer = product & 1;
    // Anew: of the first n tile it is known, and what the others want shall not be waited for before it.
    const uint32_t of_tile = (local << tiles_log) + within, rank = kept_anew(c.rank());
    const uint32_t of_warp = BLOCKS == 1 ? rank * g.sharing.parts + nth_of(g, kept_anew(c.warp())) : rank;
    const uint32_t slot = (of_tile << c.rows_log()) * slots_of_row<BLOCKS>(c, g) + of_warp;
    const uint32_t slots = kept_anew(c.shared) + c.a.at.slots + buffer * c.a.at.slot_buffer + slot * SLOT_BYTES;
    return {peer_address(slots, owner), peer_address(c.sums_barrier(buffer, local), owner)};
  }

  // Made once, by a thread of the warp. Warps share an n tile, or have none.
  __device__ __forceinline__ static void make_share(const Cta& c, int product) {
    const Geometry g = c.geometry(product);
    const int buffer = product & 1, columns = c.rows() * LIMBS;
    const int group = over_parts(g, c.warp()), part = nth_of(g, c.warp());
    Share share;
    share.tile = group < g.sharing.at_once ? group : g.tiles;
    share.k_first = over_parts(g, g.k_tiles * part), share.k_last = over_parts(g, g.k_tiles * (part + 1));
    share.limbs = c.a.at.limbs + buffer * c.a.at.limb_buffer + share.k_first * K_TILE * columns;
    share.scales = c.a.at.scales + buffer * c.a.at.scale_buffer + share.k_first * c.rows() * 8;
    const Target target = target_of(c, g, product, share.tile);
    share.slots = target.slots, share.barrier = target.barrier;
    share.chunk = share.tile * g.tile_chunks + share.k_first / CHUNK_K_TILES;
    c.share(product) = share;
  }

  // Waits until another warp hands something to this one.
  __device__ __forceinline__ static void wait_turn(const Cta& c) {
    uint32_t& turns = c.turns(c.warp());
    const uint32_t turn = turns;
    barrier_wait_warp(c.turn_barrier(c.warp()), turn & 1);
    if (c.lane() == 0) turns = turn + 1;
    __syncwarp();
  }

  // Sums of an n tile and two blocks of columns to their slots. Warps that share the n tile add theirs up on the way,
  // one after another: slots for each of them would leave the ring no room.
  __device__ __forceinline__ static void pass_on(const Cta& c, const Geometry& g, const S& sums, int warp, int product,
                                                 int tile, float zero) {
    const int lane = lane_anew(), parts = g.sharing.parts, part = nth_of(g, warp);
    float4 words[BLOCKS][2];
#pragma unroll
    for (int n = 0; n < BLOCKS; n++) sums.values(words[n], n, 0, zero, 1.f);
    float4* passed = c.template at<float4>(c.passed()) + over_parts(g, warp) * S::WORDS * 32 + lane;
    // Of the one before it; the first waits until the last has read what it passed on of its last n tile.
    if (part > 0 || (parts > 1 && tile != c.share(product).tile)) wait_turn(c);
#pragma unroll
    for (int i = 0; i < S::WORDS; i++)
      if (part > 0) words[i / 2][i % 2] = words[i / 2][i % 2] + passed[i * 32];
    const bool last = part + 1 == parts;
    if (!last) {
#pragma unroll
      for (int i = 0; i < S::WORDS; i++) passed[i * 32] = words[i / 2][i % 2];
    } else {
      const uint32_t apart = slots_of_row<BLOCKS>(c, g) * SLOT_BYTES;
      const Target target = target_of(c, g, product, tile);
#pragma unroll
      for (int i = 0; i < S::WORDS; i++)
        store_peer_counted(target.slots + S::token_of(lane, i / 2, 0) * apart + i % 2 * 128 + lane / 4 * 16,
                           words[i / 2][i % 2], target.barrier);
    }
    __syncwarp();
    if (lane == 0 && parts > 1 && (!last || tile + g.sharing.at_once < g.tiles))
      barrier_arrive(c.turn_barrier(last ? warp - part : warp + 1));
  }

  __device__ __forceinline__ static void run(Cta& c, uint32_t phase) {
    c.begin_phase();
    const int product = phase % PRODUCTS;
    const Geometry g = c.geometry(product);
    if (g.units == 0) return;
    const trirun_cuda_step_weight& weight = weight_of(c.layer(phase / PRODUCTS), product);
    const int lane = c.lane(), rows = c.rows(), columns = rows * LIMBS, buffer = product & 1;
    S sums;
    Ring first;
    Target target;
    uint32_t limbs0, scales0, k_first, k_last, words0, barriers, first_words, first_end;
    int tile = BLOCKS == 1 ? 0 : kept_anew(c.share(product).tile), tiles;
    float zero;
    const auto begin = [&](int chunk) {
      first = c.ring;
      c.move(first, chunk);
      const Share share = c.share(product);
      limbs0 = kept_anew(c.shared + share.limbs + (lane / 4 & ((BLOCKS == 1 ? columns : 8) - 1)) * 64 + lane % 4 * 16);
      scales0 = kept_anew(c.shared + share.scales), k_first = kept_anew(share.k_first);
      k_last = kept_anew(share.k_last);
      if constexpr (BLOCKS == 1)
        tile = kept_anew(share.tile), target = {kept_anew(share.slots), kept_anew(share.barrier)};
      words0 = kept_anew(c.shared + lane * 16), barriers = kept_anew(c.full(0));
      first_words = kept_anew(words0 + share.k_first % CHUNK_K_TILES * WORD_TILE_BYTES);
      first_end = kept_anew(min((share.k_first / CHUNK_K_TILES + 1) * CHUNK_K_TILES, share.k_last));
      tiles = kept_anew(g.tiles);
      zero = c.layer(phase / PRODUCTS).grid_zeros[product];
      forget(zero);
      sums.clear();
    };
    // Known before the input is there, or it would be waited for behind it.
    if constexpr (BLOCKS == 1) begin(c.share(product).chunk);
    // Before weights are waited for: what was needed before this product has gone through the ring, so that none of its
    // first chunks is more than once round ahead.
    take_input(c, g, phase);
    const int padded = g.tile_chunks * CHUNK_K_TILES;
#pragma unroll 1
    while (tile < (BLOCKS == 1 ? tiles : g.tiles)) {
      // For each anew: there are no registers to keep it in.
      if constexpr (BLOCKS > 1) begin(tile * g.tile_chunks + c.share(product).k_first / CHUNK_K_TILES);
      uint32_t limbs = limbs0, scale = scales0;
      // Of GROUPS, scales and zero points of the next k tile, on their way while one is multiplied.
      const int n = g.n_tiles * N_TILE;
      int64_t from =
          static_cast<int64_t>(g.k_first + k_first) * n + n_tile_of(g, product, tile) * N_TILE + lane / 4 * 8;
      typename S::RowScales row_scales{};
      const auto next_rows = [&](bool wanted) {
        if (!wanted) return;
        row_scales.scales = __ldg(reinterpret_cast<const uint4*>(weight.scales + from));
        if constexpr (S::ZEROS) row_scales.zeros = __ldg(reinterpret_cast<const uint4*>(weight.zeros + from));
        from += n;
      };
      if constexpr (S::GROUPS) next_rows(k_first < k_last);
      Ring at = first;
      uint32_t k = k_first, end = first_end, base = first_words;
#pragma unroll 1
      do {
        const uint32_t begun = k, barrier = barriers + at.stage * 8;
        uint32_t words = base + at.stage * STAGE_BYTES;
        uint4 w{}, b{};
        if (begun < end) {
          barrier_wait_warp(barrier, at.phase);
          if constexpr (BLOCKS == 1) w = load_shared4(words), b = load_shared4(limbs);
        }
#pragma unroll 1
        for (; k < end; k++) {
          const typename S::RowScales these = row_scales;
          if constexpr (S::GROUPS) next_rows(k + 1 < k_last);
          sums.add(w, b, k + 1 < end, words, limbs, columns * 64, scale, rows, these, zero);
          words += WORD_TILE_BYTES, limbs += K_TILE * columns, scale += rows * 8;
        }
        // Before the stage is set free: others wait for the sums.
        if (BLOCKS == 1 && k >= k_last)
          sums.leave(target.slots, slots_of_row<BLOCKS>(c, g) * SLOT_BYTES, target.barrier, rows, zero,
                     c.factors(buffer) + MAX_ROWS);
        // Its words have been multiplied by now: an arrival may overtake loads, but not what depends on them. Two
        // arrivals for each k tile of a chunk, of which an n tile's last may have fewer.
        __syncwarp();
        if (begun < end && lane == 0)
          barrier_arrive_counted(barrier + c.a.at.stages * 8, 2 * ((end == g.k_tiles ? padded : end) - begun));
        at.advance(c.a.at.stages);
        base = words0, end = min(end + CHUNK_K_TILES, k_last);
      } while (k < k_last);
      if constexpr (BLOCKS > 1) {
        // Where attention leaves too few registers, what follows from these is not kept meanwhile.
        const auto anew = [](uint32_t v) { return Cta::CROWDED ? kept_anew(v) : v; };
        c.shared = anew(c.shared);
        pass_on(c, g, sums, anew(c.warp()), anew(product), anew(tile), zero);
      }
      // As the compiler does not know, or it would find what the next n tile needs before the first one.
      const uint32_t step = kept_anew(g.sharing.at_once);
      tile += step;
      if (tile >= tiles) break;
      if constexpr (BLOCKS == 1) {
        sums.clear();
        c.move(first, step * g.tile_chunks);
        target = target_of(c, g, kept_anew(product), tile);
      }
    }
    c.move(c.ring, g.tiles * g.tile_chunks);
  }
};

}  // namespace trirun::step
