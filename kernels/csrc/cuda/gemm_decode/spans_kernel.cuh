// y = x . w^T for about 5 to 64 rows of x by a weight with one scale per output channel, or per group of 128: the
// per-span kernel, wgmma u8 . s8 on sm_90a.
//
// - x has one scale per span of 512 k (SPAN_K_TILES k tiles), so int32 sums run on over a span and become floats once
//   per span; once per 128 k that takes as long as the products (groups of 128, and float32 x, have to).
// - As in groups_sm90.cu, masked words of four n tiles are the A registers of a warpgroup (warp w: n tile w), and the
//   limbs of x, in the order of quantize.cu, the B operand in shared memory. A CTA computes 256 rows of w (a tile) by
//   up to 32 rows of x (a slice); each of two warpgroups has two row blocks of every stage, its fragments made 32 k
//   ahead. Low tiles have 192 rows: each of three warpgroups has an n tile, warp w row block w of it, two steps side by
//   side.
// - Two producer threads keep a ring of stages of 128 k full: some words before the previous kernel has ended, then x,
//   then the other words, in whose way x would be.
// - FUSED activation quantization: no kernel before this one quantizes x. Two more warpgroups do, all the columns of x
//   that the CTA multiplies, into shared memory beside the ring (spans_quantize.cuh), while the products of what they
//   have quantized begin.
// - Stream-k: the k tiles of all tiles are divided equally among the CTAs of a slice. Where a tile is cut, its CTAs
//   leave their sums in the workspace, and the warp that comes last adds them, in the order of the CTAs. Nobody waits
//   for anybody but in pairs: where all tiles have an even number of CTAs, two are a cluster, and each finishes the
//   sums of one warpgroup of both.
#pragma once

#include "spans.cuh"
#include "cuda/common/tensor_map.cuh"
#include "cuda/common/wgmma.cuh"

namespace trirun::gemm_decode {
namespace {

template <int LIMBS, int N, bool FUSED, bool GROUPED, int HEIGHT>
__global__ void __maxnreg__((SpansShape<LIMBS, N, FUSED, HEIGHT>::LAUNCH_REGISTERS))
    gemm_spans(const __grid_constant__ SpansArgs a) {
#ifdef TRIRUN_HOPPER
  using S = SpansShape<LIMBS, N, FUSED, HEIGHT>;
  constexpr int N_TILES = S::N_TILES, J = S::J;
  extern __shared__ __align__(1024) uint8_t memory[];
  // Read from a lane, so that the compiler knows it is the same for the warp, and keeps it.
  const uint32_t shared = __shfl_sync(~0u, shared_address(memory), 0);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const uint32_t full = shared + a.barriers_at, empty = full + MAX_STAGES * 8, totals_ready = empty + MAX_STAGES * 8;
  const uint32_t x_ready = totals_ready;  // fused, of every piece of x; there are no totals
  const uint32_t x_asked = totals_ready + 8;
  const uint32_t counters_ready = x_ready + PIECES * 8, received = counters_ready + 8;
  float* totals = reinterpret_cast<float*>(memory + a.totals_at);
  const int rank = blockIdx.x & a.pairs, of_slices = blockIdx.x >> a.pairs;
  const int cta = of_slices / a.slices << a.pairs | rank, slice = of_slices % a.slices;
  const int first = a.start(cta), last = a.start(cta + 1);

  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; i++) {
      barrier_init(full + i * 8, FUSED ? 1 : 2);
      barrier_init(empty + i * 8, S::CONSUMERS / 32);
    }
    if constexpr (FUSED) {
      for (int i = 0; i < a.pieces; i++) barrier_init(x_ready + i * 8, S::PRODUCERS * 4);
      barrier_init(counters_ready, 1);
    } else {
      barrier_init(totals_ready, 2);
      barrier_init(x_asked, 1);
    }
    barrier_init(received, 1);
    barrier_init_fence();
    fence_async_shared();
    if (a.pairs) barrier_expect(received, S::QUARTERS * S::CONSUMERS / 2 * 16);
  }
  __syncthreads();
  if (a.pairs) cluster_arrive();
  dependency_launch();

  if (warp >= S::CONSUMERS / 32) {
    decrease_registers<S::PRODUCER_REGISTERS>();
    const int role = warp - S::CONSUMERS / 32, token0 = slice * S::ROWS, tokens = min(S::ROWS, a.tokens - token0);
    const auto copy_words = [&](uint32_t to, uint32_t barrier, int tile, int k_tile, bool) {
      const uint64_t policy = evict_first_policy();
      const int row_bytes = GROUPED ? min(N_TILES, a.n_tiles - tile * N_TILES) * 128 : 0;
      barrier_expect(barrier, N_TILES * WORD_TILE_BYTES + row_bytes * (a.zeros != nullptr ? 2 : 1));
      tensor_load(to, &a.words, barrier, 0, k_tile * STEPS, tile * N_TILES, policy);
      if constexpr (GROUPED) {
        const int64_t row = (static_cast<int64_t>(k_tile) * a.n_tiles + tile * N_TILES) * 64;
        bulk_load(to + a.scales_at, a.scales + row, row_bytes, barrier, policy);
        if (a.zeros != nullptr) bulk_load(to + a.scales_at + N_TILES * 128, a.zeros + row, row_bytes, barrier, policy);
      }
    };
    if constexpr (FUSED) {
      constexpr int WARPS = S::PRODUCERS * 4;
      // A copy holds its thread for a while: every warp asks for some of the first round.
      const int round = min(last, first + a.stages);
      if (lane == 0)
        for (int i = first + role; i < round; i += WARPS)
          copy_words(shared + (i - first) * a.stage_bytes, full + (i - first) * 8, i / a.k_tiles, i % a.k_tiles, false);
      __syncwarp();
      dependency_wait();
      const uint32_t x = shared + a.x_at, scales = shared + a.x_scales_at;
      if (a.dtype == TRIRUN_BF16)
        quantize_pieces<true, GROUPED, N, WARPS, S::AHEAD>(a, token0, x, scales, x_ready, role, first, last);
      else
        quantize_pieces<false, GROUPED, N, WARPS, S::AHEAD>(a, token0, x, scales, x_ready, role, first, last);
      if (role == 0) {
        if (lane == 0) produce(a, shared, full, empty, first, round, last, copy_words, [](int) {});
      } else if (role == 1) {
        // Counters of the tiles that this CTA shares, at most two, for each warp that multiplies: zeroed by nobody.
        static_assert(!FUSED || S::CONSUMERS == 256);
        const int begin = (first / a.k_tiles + lane / 8) * a.k_tiles;
        if (lane < 16 && begin < last && a.owner(begin + a.k_tiles - 1) - a.owner(begin) > a.pairs)
          prepare_counter(reinterpret_cast<uint64_t*>(a.counters) +
                          (a.owner(begin) * a.slices + slice) * (S::CONSUMERS / 32) + lane % 8);
        __syncwarp();
        if (lane == 0) barrier_arrive(counters_ready);
      }
    } else if (role == 0) {
      const auto wait = [&](int i) {
        if (i == a.early) barrier_wait(x_asked, 0);
      };
      if (lane == 0) produce(a, shared, full, empty, first, first, last, copy_words, wait);
    } else if (role == 1) {
      const uint64_t policy = evict_last_policy();
      tensor_map_prefetch(&a.limbs);
      dependency_wait();
      if (lane == 0)
        produce(
            a, shared, full, empty, first, first, last,
            [&](uint32_t to, uint32_t barrier, int, int k_tile, bool ends) {
              const bool scaled = !S::EXACT && closes(a, k_tile, ends);
              barrier_expect(barrier, K_TILE * N + (scaled ? tokens * 8 : 0));
              tensor_load(to + a.x_at, &a.limbs, barrier, slice * N * 4, 0, k_tile * STEPS, policy);
              if (scaled)
                bulk_load(to + a.x_scales_at, a.x_scales + static_cast<int64_t>(k_tile) * a.tokens + token0, tokens * 8,
                          barrier);
            },
            [&](int i) {
              if (i == a.x_first) barrier_arrive(x_asked);
            });
    } else if (!GROUPED) {
      dependency_wait();
      add_totals(a, totals, token0, tokens, TOTALS_AT + 64);
      __syncwarp();
      if (lane == 0) barrier_arrive(totals_ready);
    }
  } else {
    increase_registers<S::CONSUMER_REGISTERS>();
    const int group = warp / 4, n_tile = S::TALL ? warp % 4 : group, block0 = S::TALL ? group * J : warp % 4;
    const bool real_zeros = a.zeros != nullptr;
    const auto keep = [&](uint32_t v) { return GROUPED ? kept(v, lane) : v; };
    uint32_t masks[J];
#pragma unroll
    for (int j = 0; j < J; j++) masks[j] = keep(0x03030303u << 2 * (block0 + j));
    float sum[J][S::TOKENS][2];
    int c[J][N / 2];
    uint32_t fragment[S::SETS][J][4];
    uint4 words[STEPS];
    float total[S::TOKENS];  // of x, of the spans of a tile
    constexpr int HALF = FUSED ? half_step(N) : N * 16;  // bytes from 16 k to the next
    const uint64_t x0 = descriptor_plain(shared + a.x_at, HALF, 128);
    const uint32_t x_step = (FUSED ? 8 * HALF : a.stage_bytes) >> 4;
    Ring ring;
    uint32_t base = shared;  // of the stage in hand

    const uint32_t words_of_lane = keep(n_tile * WORD_TILE_BYTES + lane * 16);
    const auto read_words = [&](int s) { words[s] = load_shared4(base + words_of_lane + s * 512); };
    const auto read_stage = [&] {
#pragma unroll
      for (int s = 0; s < STEPS; s++) read_words(s);
    };
    const auto make_fragment = [&](int s, int j) {
      const uint32_t w[4] = {words[s].x, words[s].y, words[s].z, words[s].w};
#pragma unroll
      for (int i = 0; i < 4; i++) fragment[s % S::SETS][j][i] = pinned_and(w[i], masks[j]);
    };
    const auto make_fragments = [&](auto steps) {
#pragma unroll
      for (int i = 0; i < steps.value * J; i++) make_fragment(i / J, i % J);
    };
    // The integer sums of a span become floats: of the stage at `from`, or, fused, of a piece. Returns bits of all that
    // it reads of that stage.
    const auto convert = [&](uint32_t from) {
      uint32_t loaded = 0;
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < J; j++) wgmma_hold(c[j]);
      const uint32_t x_scales = (FUSED ? shared + a.x_scales_at + from : from + a.x_scales_at) + (lane & 3) * 8;
#pragma unroll
      for (int i = 0; i < N / 8; i++) {
        float2 x = make_float2(1.f, 0.f);  // scale, and what the zero point multiplies
        if constexpr (FUSED)
          x = load_shared_float2(x_scales + i * 32);
        else if constexpr (!S::EXACT)
          loaded |= __float_as_uint(x.x = load_shared_float(x_scales + i * 32));
        if constexpr (FUSED) total[i] += x.y;
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
          for (int e = 0; e < 4; e += LIMBS) {
            const int hi = c[j][i * 4 + e], lo = c[j][i * 4 + e + LIMBS - 1];
            if constexpr (S::EXACT)
              sum[j][i * 2 + e % 2][e / 2] = static_cast<float>(hi);  // there is but one span
            else  // over several k tiles 256 hi + lo need not fit an int32, though each limb's sum does
              sum[j][i][e / 2] += x.x * fmaf(static_cast<float>(hi), 256.f, static_cast<float>(lo));
          }
      }
      return loaded;
    };
    int at = first;
    const auto release = [&](uint32_t stage, uint32_t loaded) { release_stage(empty + stage * 8, loaded, a.nought); };

    // Of groups: a stage's products side by side, meanwhile what makes its sums floats, and then the fragments of the
    // next. Beyond the last stage they are made of what is there, and not used.
    const uint32_t x_scales_of_lane = keep(a.x_scales_at + (lane & 3) * 8 + (FUSED ? shared : 0));
    const uint32_t row_scales_of_lane = keep(a.scales_at + n_tile * 128 + lane / 4 * 16 + block0 * 4);
    uint32_t quarter[J], fours[J];  // 4^-j, and 4^j or that times the one zero point, as bits
#pragma unroll
    for (int j = 0; j < J; j++) {
      quarter[j] = keep((127 - 2 * (block0 + j)) << 23);
      const float power = __uint_as_float((127 + 2 * (block0 + j)) << 23);
      fours[j] = keep(__float_as_uint(real_zeros ? power : power * a.zero));
    }
    const auto multiply_group = [&](auto has_zeros) {
      constexpr bool ZEROS = decltype(has_zeros)::value;
      const uint32_t now = base, stage = ring.stage;
      const uint64_t x = x0 + (FUSED ? at - first : stage) * x_step;
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < STEPS; s++)
#pragma unroll
        for (int j = 0; j < J; j++) wgmma_u8s8(c[j], fragment[s % S::SETS][j], x + s * (HALF * 2 >> 4), s > 0);
      wgmma_commit();
      const uint32_t x_scales = x_scales_of_lane + (FUSED ? (at - first) * (S::ROWS * 8) : now);
      float2 x_scale[N / 8];  // and what the zero point multiplies
      float row_scale[J][2], row_zero[J][ZEROS ? 2 : 1];  // for codes * 4^j
      uint32_t loaded = 0;
#pragma unroll
      for (int i = 0; i < N / 8; i++) {
        x_scale[i] = load_shared_float2(x_scales + i * 32);
        if (!FUSED) loaded |= __float_as_uint(x_scale[i].x);
      }
#pragma unroll
      for (int j = 0; j < J; j++) {
        const uint32_t row = now + row_scales_of_lane + j * 4, scales = load_shared(row);
        const uint32_t zeros = ZEROS ? load_shared(row + N_TILES * 128) : 0;
        loaded |= scales | zeros;
#pragma unroll
        for (int h = 0; h < 2; h++) row_scale[j][h] = half_of(scales, h) * __uint_as_float(quarter[j]);
#pragma unroll
        for (int h = 0; h < (ZEROS ? 2 : 1); h++)
          row_zero[j][h] = (ZEROS ? half_of(zeros, h) : 1.f) * __uint_as_float(fours[j]);
      }
      ring.advance(a.stages);
      base = shared + ring.stage * a.stage_bytes;
      if (++at < last) barrier_wait(full + ring.stage * 8, ring.phase);
      read_stage();
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < J; j++) wgmma_hold(c[j]);
      make_fragments(std::integral_constant<int, STEPS>{});
#pragma unroll
      for (int i = 0; i < N / 8; i++)
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float of_x = row_zero[j][ZEROS ? h : 0] * x_scale[i].y;
            // At most 3 * 4^3 * ACT16_MAX * 128 < 2^31.
            const int v = c[j][i * 4 + h * 2] * 256 + c[j][i * 4 + h * 2 + 1];
            sum[j][i][h] += row_scale[j][h] * (x_scale[i].x * static_cast<float>(v) - of_x);
          }
      release(stage, loaded);
    };

    using Counter = std::conditional_t<FUSED, uint64_t, unsigned>;
    const auto counter_of = [&](int first_cta) {
      return reinterpret_cast<Counter*>(a.counters) + (first_cta * a.slices + slice) * (S::CONSUMERS / 32) + warp;
    };
    const auto row_of = [&](int tile, int j, int h) {
      return (tile * N_TILES + n_tile) * 64 + (block0 + j) * 16 + h * 8 + lane / 4;
    };
    // What the end of a tile needs from memory, asked for at its beginning: pairs of scales and zeros, and biases.
    uint32_t channel_scale[J] = {}, channel_zero[J] = {};
    float channel_bias[J][2] = {};
    const auto load_channels = [&](int tile) {
      if (tile * N_TILES + n_tile >= a.n_tiles) return;
#pragma unroll
      for (int j = 0; j < J; j++) {
        const int64_t stored = (tile * N_TILES + n_tile) * 64 + lane / 4 * 8 + (block0 + j) * 2;
        if constexpr (!GROUPED) {
          channel_scale[j] = load_constant(a.scales + stored);
          if (real_zeros) channel_zero[j] = load_constant(a.zeros + stored);
        }
#pragma unroll
        for (int h = 0; h < 2; h++)
          if (a.bias != nullptr && row_of(tile, j, h) < a.n)
            channel_bias[j][h] = load_element(a.bias, row_of(tile, j, h), a.dtype);
      }
    };

    // Sums of token t less the zero point times what it multiplies. Row block j came in as code * 4^j.
    const auto subtract_zeros = [&](int t, float of_x, float x_scale) {
#pragma unroll
      for (int j = 0; j < J; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const float quarter = __uint_as_float((127 - 2 * (block0 + j)) << 23);
          const float z = real_zeros ? half_of(channel_zero[j], h) : a.zero;
          sum[j][t][h] = sum[j][t][h] * (S::EXACT ? quarter * x_scale : quarter) - z * of_x;
        }
    };

    // Of two CTAs, each finishes the sums of one warpgroup: those warps have twice the room.
    const uint32_t staged_at = a.staged_at + (a.pairs ? n_tile * 2 : warp) * S::STAGED;
    static_assert(S::QUARTERS * 512 <= 2 * S::STAGED);

    // Finished sums of this warp to y: 32 rows and every token, put in order in shared memory, so that 16 bytes at a
    // time are written. Few instructions: this code runs once or twice, and is fetched to be run.
    const auto store = [&](int tile) {
      if constexpr (!FUSED && !GROUPED) barrier_wait(totals_ready, 0);
      const int lane_token = LIMBS == 2 ? lane % 4 : lane % 4 * 2, tokens = a.m - slice * S::ROWS;
      const auto token_of = [&](int t) { return lane_token + (LIMBS == 2 ? t * 4 : t / 2 * 8 + t % 2); };
#pragma unroll
      for (int t = 0; t < S::TOKENS; t++) {
        if constexpr (!FUSED && !GROUPED) {
          const float* total = totals + TOTALS_AT + token_of(t);
          subtract_zeros(t, total[0], S::EXACT ? total[64] : 1.f);
        }
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
          for (int h = 0; h < 2; h++)
            sum[j][t][h] = sum[j][t][h] * (GROUPED ? 1.f : half_of(channel_scale[j], h)) + channel_bias[j][h];
      }
      if (a.dtype == TRIRUN_F32) {
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int t = 0; t < S::TOKENS; t++)
              if (row_of(tile, j, h) < a.n && token_of(t) < tokens)
                static_cast<float*>(a.y)[(slice * S::ROWS + token_of(t)) * a.ldy + row_of(tile, j, h)] = sum[j][t][h];
        return;
      }
      const bool is_half = a.dtype == TRIRUN_F16;
      const uint32_t staged = shared + staged_at;
#pragma unroll
      for (int t = 0; t < S::TOKENS; t++)
#pragma unroll
        for (int j = 0; j < J; j++)
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const uint16_t half = __half_as_ushort(__float2half_rn(sum[j][t][h]));
            const uint16_t narrow = is_half ? half : __bfloat16_as_ushort(__float2bfloat16_rn(sum[j][t][h]));
            store_shared16(staged + token_of(t) * S::STAGED_ROW + (j * 16 + h * 8 + lane / 4) * 2, narrow);
          }
      __syncwarp();
#pragma unroll 1
      for (int i = lane; i < S::ROWS * J * 2; i += 32) {
        const int token = i / (J * 2), eight = i % (J * 2);
        const int row = (tile * N_TILES + n_tile) * 64 + block0 * 16 + eight * 8;
        const uint4 v = load_shared4(staged + token * S::STAGED_ROW + eight * 16);
        if (token >= tokens || row >= a.n) continue;
        uint16_t* to = static_cast<uint16_t*>(a.y) + (slice * S::ROWS + token) * a.ldy + row;
        if (a.vectors && row + 8 <= a.n) {
          *reinterpret_cast<uint4*>(to) = v;
        } else {
          const uint32_t pairs[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int e = 0; e < 8; e++)
            if (row + e < a.n) to[e] = static_cast<uint16_t>(pairs[e / 2] >> 16 * (e % 2));
        }
      }
      __syncwarp();
    };

    int tile = first / a.k_tiles;
    uint32_t piece = 0;
    barrier_wait(full, 0);
    read_stage();
    make_fragments(std::integral_constant<int, GROUPED ? STEPS : S::BURST>{});
#pragma unroll 1
    while (at < last) {
      const int begin = tile * a.k_tiles, end = min(begin + a.k_tiles, last), from = at;
      load_channels(tile);
      // Divisions are slow: here they are hidden.
      const int first_cta = a.owner(begin), last_cta = a.owner(begin + a.k_tiles - 1);
      if constexpr (!S::EXACT) {
#pragma unroll
        for (int i = 0; i < J * S::TOKENS * 2; i++) (&sum[0][0][0])[i] = 0.f;
      }
      if constexpr (FUSED) {
#pragma unroll
        for (int i = 0; i < S::TOKENS; i++) total[i] = 0.f;
      }
      if constexpr (GROUPED) {
        const auto multiply_groups = [&](auto has_zeros) {
#pragma unroll 1
          do {
            if (FUSED && (at == first || (at - begin) % SPAN_K_TILES == 0)) barrier_wait(x_ready + piece++ * 8, 0);
            multiply_group(has_zeros);
          } while (at < end);
        };
        if (real_zeros)
          multiply_groups(std::true_type{});
        else
          multiply_groups(std::false_type{});
      } else {
#pragma unroll 1
        do {
          const int from_span = at, stop = min(end, begin + ((at - begin) | a.span_mask) + 1);
          uint32_t now = base, stage = ring.stage;
          // Set to zero rather than overwritten by the first product, which counts as reading them.
#pragma unroll
          for (int i = 0; i < J * N / 2; i++) (&c[0][0])[i] = 0;
          if constexpr (FUSED) barrier_wait(x_ready + piece * 8, 0);
#pragma unroll 1
          do {
            const uint32_t before = stage;
            now = base, stage = ring.stage;
            const uint64_t x = x0 + (FUSED ? at - first : stage) * x_step;
#pragma unroll
            for (int s = 0; s < STEPS; s += S::BURST) {
              // The products of a step, or of two, side by side: with fragments made between them they would be groups
              // of their own, and fewer on their way. Beyond the last stage fragments are made of what is there, and
              // not used.
              const int end_step = s + S::BURST;
              wgmma_fence();
#pragma unroll
              for (int i = 0; i < S::BURST * J; i++)
                wgmma_u8s8(c[i % J], fragment[(s + i / J) % S::SETS][i % J], x + (s + i / J) * (HALF * 2 >> 4), 1);
              wgmma_commit();
              if (end_step == 2) {
                ring.advance(a.stages);
                base = shared + ring.stage * a.stage_bytes;
                if (at + 1 < last) barrier_wait(full + ring.stage * 8, ring.phase);
                read_words(0);
              }
              wgmma_wait<S::SETS / 2 / S::BURST>();
              // The stage before is complete.
              if (end_step == 2 && at > from_span) release(before, 0);
#pragma unroll
              for (int i = 0; i < S::BURST * J; i++) make_fragment((end_step + i / J) % STEPS, i % J);
#pragma unroll
              for (int i = s; i < end_step; i++)
                if (i > 0) read_words(i);
            }
          } while (++at < stop);
          const uint32_t loaded = convert(FUSED ? piece++ * (S::ROWS * 8) : now);
          release(stage, loaded);
        } while (!S::EXACT && at < end);
      }
      if constexpr (FUSED && !GROUPED) {
        // Of the CTA's own k, which is all it has quantized.
#pragma unroll
        for (int t = 0; t < S::TOKENS; t++) subtract_zeros(t, total[t], 1.f);
      }

      float (&flat)[S::QUARTERS * 4] = reinterpret_cast<float (&)[S::QUARTERS * 4]>(sum);
      bool mine = true;
      if (end - from < a.k_tiles) {
        const auto part = [&](int of) {
          of = of << a.pairs | rank;
          const int of_both = 2 * (of * a.slices + slice) + (a.start(of) < begin);  // its first tile, or its last
          return a.parts + static_cast<int64_t>(of_both) * S::QUARTERS * S::CONSUMERS + threadIdx.x;
        };
        const uint32_t slot = shared + staged_at + lane * 16;
        if (a.pairs && group != rank) {
          give_sums<S::QUARTERS>(flat, slot, received, rank);
          mine = false;
        } else {
          if (a.pairs) take_sums<S::QUARTERS>(flat, slot, received);
          if (last_cta - first_cta > a.pairs) {
            constexpr int BATCH = N == 64 || LIMBS == 1 ? 2 : 4;  // CTAs whose sums are on their way at once
            if constexpr (FUSED) barrier_wait(counters_ready, 0);
            mine = add_partial_sums<S::QUARTERS, S::CONSUMERS, BATCH>(flat, cta >> a.pairs, first_cta >> a.pairs,
                                                                      last_cta >> a.pairs, counter_of(first_cta), part);
          }
        }
      }
      if (mine) store(tile);
      at = end, tile++;
    }
  }
#endif
}

}  // namespace
}  // namespace trirun::gemm_decode
