// y = x . w^T for more rows of x than mma.sync has columns for, up to 64, whatever the group size: the per-group
// kernel, wgmma u8 . s8 on sm_90a.
//
// - The words of four n tiles, masked, are the A registers of a warpgroup: warp w holds rows of n tile w, row block j
//   of each. Weights never pass through shared memory a second time.
// - The limbs of x are the B operand, in shared memory exactly as quantize.cu wrote them: they are copied, not
//   arranged.
// - A CTA computes 256 rows of w (a tile). Two producer threads keep a ring of stages of 128 k full, weights before the
//   previous kernel has ended and x after.
// - Scales of groups turn int32 sums into floats once per group, which takes as long as the products. So the two
//   warpgroups of a team have two row blocks each and alternate between them: while the tensor cores work on one, the
//   sums of the other become floats. Few columns leave registers for a second team, which takes every other stage.
// - Stream-k: the k tiles of all tiles are divided equally among the CTAs. Where a tile is cut, its CTAs leave their
//   sums in the workspace, and the warp that comes last adds them, in the order of the CTAs. Nobody waits for anybody:
//   the CTAs need not run at the same time.
#include "split_k.cuh"
#include "cuda/common/tensor_map.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/wgmma.cuh"

namespace trirun::gemm_decode {
namespace {

constexpr int TEAM = 256;  // threads that multiply the same stage
constexpr int J = 2;  // row blocks of one warpgroup

struct GroupsArgs : StreamK {
  CUtensorMap words;
  uint32_t nought;  // see release_stage
  const __half* scales;
  const __half* zeros;  // or null
  float zero;
  int n_tiles, k_tiles, group_rows;
  int64_t n_pad;
  int n, m;
  const uint8_t* limbs;
  const float2* x_scales;
  const float4* x_sums;
  int tokens, columns;
  const void* bias;
  void* y;
  int64_t ldy;
  int dtype;
  int early, x_first;  // stages of weights asked for before the wait; of x asked for before other weights
  int stages, stage_bytes, scales_at, x_at, x_scales_at, x_sums_at;  // offsets within a stage; words at 0
  int exchange_at, totals_at, barriers_at;  // offsets in shared memory; stages at 0
  unsigned* counters;  // warps that have left their sums of a tile; of its first CTA, one for every warp
  float4* parts;  // [CTA][first, last tile][quarter of a thread's sums][consumer]
};

template <int LIMBS, int N, int SCALE>
struct Shape {
  static constexpr bool HALVED = LIMBS == 2 && N == 64;  // products of half the columns: half the registers
  static constexpr int TEAMS = N <= 32 || HALVED ? 2 : 1;
  static constexpr int HALVES = HALVED ? 2 : 1, WIDTH = N / HALVES;
  static constexpr int CONSUMERS = TEAMS * TEAM, THREADS = CONSUMERS + 128;  // and a warpgroup that copies
  static constexpr int TOKENS = LIMBS == 2 ? N / 8 : N / 4;  // of one thread: per 8 columns one or two
  // One limb and one scale per row: int32 sums over all of k are exact and nothing is converted on the way.
  static constexpr bool EXACT = LIMBS == 1 && SCALE == PER_CHANNEL;
  static constexpr int OWN = J / TEAMS;  // row blocks whose sums a thread finishes
  static constexpr int QUARTERS = OWN * TOKENS * 2 / 4;
  // Whether registers hold the fragments of two products at a time.
  static constexpr bool AHEAD = N == 64 && !HALVED;
  // Registers of a thread at launch, of a copying and of a multiplying one: what the first give up must cover what the
  // others add, or the kernel waits forever.
  static constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
  static constexpr int PRODUCER_REGISTERS = TEAMS == 2 ? 32 : 24, CONSUMER_REGISTERS = TEAMS == 2 ? 112 : 240;
  static_assert(PRODUCER_REGISTERS + TEAMS * 2 * CONSUMER_REGISTERS <= LAUNCH_REGISTERS * (TEAMS * 2 + 1));
};

template <int N>
using Step = std::integral_constant<int, N>;

// The weights of every k tile of this CTA, by one thread.
template <int SCALE>
__device__ __forceinline__ void produce_weights(const GroupsArgs& a, uint32_t shared, uint32_t full, uint32_t empty,
                                                uint32_t x_asked, int first, int count) {
  const int scale_rows = SCALE == PER_CHANNEL ? 0 : a.group_rows * (a.zeros != nullptr ? 2 : 1);
  const uint64_t policy = evict_first_policy();
  int tile = first / a.k_tiles, k_tile = first - tile * a.k_tiles;
  Ring ring;
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    if (i == a.early) barrier_wait(x_asked, 0);
    if (i >= a.stages) barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
    const uint32_t base = shared + ring.stage * a.stage_bytes, barrier = full + ring.stage * 8;
    const int row_bytes = min(CTA_N_TILES, a.n_tiles - tile * CTA_N_TILES) * 128;
    barrier_expect(barrier, CTA_N_TILES * WORD_TILE_BYTES + scale_rows * row_bytes);
    tensor_load(base, &a.words, barrier, 0, k_tile * 4, tile * CTA_N_TILES, policy);
    if constexpr (SCALE != PER_CHANNEL) {
      // The tile's scales of one group row are contiguous.
      for (int g = 0; g < scale_rows; g++) {
        const bool is_zero = g >= a.group_rows;
        const int64_t row = static_cast<int64_t>(k_tile) * a.group_rows + (is_zero ? g - a.group_rows : g);
        bulk_load(base + a.scales_at + g * CTA_N_TILES * 128,
                  (is_zero ? a.zeros : a.scales) + row * a.n_pad + tile * CTA_N_TILES * 64, row_bytes, barrier, policy);
      }
    }
    ring.advance(a.stages, 1);
    if (++k_tile == a.k_tiles) k_tile = 0, tile++;
  }
}

// x's limbs, scales and sums of every k tile, by another thread.
template <int SCALE>
__device__ __forceinline__ void produce_x(const GroupsArgs& a, uint32_t shared, uint32_t full, uint32_t empty,
                                          uint32_t x_asked, int first, int count) {
  const int x_bytes = K_TILE * a.columns;
  int k_tile = first % a.k_tiles;
  Ring ring;
#pragma unroll 1
  for (int i = 0; i < count; i++) {
    if (i == a.x_first) barrier_arrive(x_asked);
    if (i >= a.stages) barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
    const uint32_t base = shared + ring.stage * a.stage_bytes, barrier = full + ring.stage * 8;
    barrier_expect(barrier, x_bytes + a.tokens * (SCALE == PER_BLOCK ? 24 : 8));
    bulk_load(base + a.x_at, a.limbs + static_cast<int64_t>(k_tile) * x_bytes, x_bytes, barrier);
    const int64_t row = static_cast<int64_t>(k_tile) * a.tokens;
    bulk_load(base + a.x_scales_at, a.x_scales + row, a.tokens * 8, barrier);
    if (SCALE == PER_BLOCK) bulk_load(base + a.x_sums_at, a.x_sums + row, a.tokens * 16, barrier);
    ring.advance(a.stages, 1);
    if (++k_tile == a.k_tiles) k_tile = 0;
  }
}

template <int LIMBS, int N, int SCALE>
__global__ void __launch_bounds__(Shape<LIMBS, N, SCALE>::THREADS, 1)
    gemm_groups(const __grid_constant__ GroupsArgs a) {
#ifdef TRIRUN_HOPPER
  using S = Shape<LIMBS, N, SCALE>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const uint32_t full = shared + a.barriers_at, empty = full + MAX_STAGES * 8, totals_ready = empty + MAX_STAGES * 8;
  const uint32_t x_asked = totals_ready + 8;
  float* totals = reinterpret_cast<float*>(memory + a.totals_at);
  const int first = a.start(blockIdx.x), last = a.start(blockIdx.x + 1);

  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; i++) {
      barrier_init(full + i * 8, 2);
      barrier_init(empty + i * 8, TEAM / 32);
    }
    barrier_init(totals_ready, 2);
    barrier_init(x_asked, 1);
    barrier_init_fence();
    fence_async_shared();
  }
  __syncthreads();
  dependency_launch();

  if (warp >= S::CONSUMERS / 32) {
    decrease_registers<S::PRODUCER_REGISTERS>();
    if (warp == S::CONSUMERS / 32) {
      if (lane == 0) produce_weights<SCALE>(a, shared, full, empty, x_asked, first, last - first);
    } else {
      dependency_wait();
      if (warp == S::CONSUMERS / 32 + 1) {
        if (lane == 0) produce_x<SCALE>(a, shared, full, empty, x_asked, first, last - first);
      } else if (SCALE == PER_CHANNEL) {
        add_totals(a, totals, 0, a.tokens, TOTALS_AT + a.tokens);
        __syncwarp();
        if (lane == 0) barrier_arrive(totals_ready);
      }
    }
  } else {
    increase_registers<S::CONSUMER_REGISTERS>();
    const int n_tile = warp % 4, group = warp / 4 % 2, team = warp / 8;
    const uint32_t masks[J] = {0x03030303u << 4 * group, 0x0c0c0c0cu << 4 * group};
    const bool real_zeros = a.zeros != nullptr;
    // Of row block j, which came in as code * 4^j.
    const float power[J] = {static_cast<float>(1 << 4 * group), static_cast<float>(4 << 4 * group)};
    const float quarter[J] = {__uint_as_float((127 - 4 * group) << 23), __uint_as_float((125 - 4 * group) << 23)};
    constexpr int PIECES = SCALE == PER_BLOCK ? 4 : 1, BLOCKS = 4 / PIECES;  // of a k tile; of a piece, 32 k each
    float sum[J][S::TOKENS][2];
    int c[2][S::WIDTH / 2];  // of the products in flight, and of those before
    uint32_t fragment[S::AHEAD ? J : 1][BLOCKS][4];
    uint4 words[BLOCKS];
    Ring ring;
    ring.stage = team;
    uint32_t base = 0;  // of the stage in hand
    float row_scale[2], row_zero[2];  // of the two rows being converted

    // The stage in hand, once it has come.
    const auto await_stage = [&] {
      barrier_wait(full + ring.stage * 8, ring.phase);
      base = shared + ring.stage * a.stage_bytes;
    };
    const auto read_words = [&](int piece) {
#pragma unroll
      for (int b = 0; b < BLOCKS; b++)
        words[b] = load_shared4(base + n_tile * WORD_TILE_BYTES + (piece * BLOCKS + b) * 512 + lane * 16);
    };
    // Starts the products of a step, which is a row block and a half of the columns, with a piece of x, when those of
    // the step before are done. A product holds its warp until its registers have been read, so other work stands
    // between them: between(b) after product b.
    const auto multiply = [&](auto step, int piece, int fresh, auto between) {
      constexpr int j = decltype(step)::value / S::HALVES, half = decltype(step)::value % S::HALVES;
      constexpr int buffer = decltype(step)::value % 2;
      uint32_t (&r)[BLOCKS][4] = fragment[S::AHEAD ? j : 0];
      if constexpr (!S::AHEAD) wgmma_wait<0>();
      if constexpr (half == 0) {
        if constexpr (S::HALVED) read_words(piece);  // not kept for the other row block: registers are short
#pragma unroll
        for (int b = 0; b < BLOCKS; b++) {
          const uint32_t w[4] = {words[b].x, words[b].y, words[b].z, words[b].w};
#pragma unroll
          for (int i = 0; i < 4; i++) r[b][i] = pinned_and(w[i], masks[j]);
        }
      }
      const uint64_t limbs = descriptor_plain(base + a.x_at + half * S::WIDTH * 16, a.columns * 16, 128);
      // All of them, not all but one: of products still on their way around a loop ptxas loses track, and serializes.
      if constexpr (S::AHEAD) wgmma_wait<0>();
      wgmma_fence();
#pragma unroll
      for (int b = 0; b < BLOCKS; b++) {
        wgmma_u8s8(c[buffer], r[b], limbs + (piece * BLOCKS + b) * (a.columns * 32 >> 4),
                   S::EXACT ? !(fresh && b == 0) : b > 0);
        if (b == BLOCKS - 1) wgmma_commit();
        between(b);
      }
    };
    uint32_t loaded = 0;  // bits of what the last step of a stage has read there
    // Of the integer sums of a step over a piece of the stage at `at`, those that the `part`-th product of the next
    // step leaves time for become floats.
    const auto convert = [&](auto step, uint32_t at, int piece, int part) {
      constexpr int j = decltype(step)::value / S::HALVES, half = decltype(step)::value % S::HALVES;
      int (&sums)[S::WIDTH / 2] = c[decltype(step)::value % 2];
      const auto note = [&](uint32_t v) { loaded |= decltype(step)::value == J * S::HALVES - 1 ? v : 0; };
      if (part == 0) wgmma_hold(sums);
      if constexpr (S::EXACT) return;
      if (SCALE != PER_CHANNEL && half == 0 && part == 0) {
        const uint32_t from = at + a.scales_at + (piece * a.group_rows / PIECES) * CTA_N_TILES * 128 + n_tile * 128 +
                              lane / 4 * 16 + group * 8 + j * 4;
        // Without zeros the scales stand in, unused: no branch between wgmmas.
        const uint32_t s = load_shared(from),
                       z = load_shared(from + (real_zeros ? a.group_rows * CTA_N_TILES * 128 : 0));
        note(s | z);
        const float2 scales = __half22float2(reinterpret_cast<const __half2&>(s));
        const float2 zeros = __half22float2(reinterpret_cast<const __half2&>(z));
        row_scale[0] = scales.x * quarter[j], row_scale[1] = scales.y * quarter[j];
        row_zero[0] = (real_zeros ? zeros.x : a.zero) * power[j];
        row_zero[1] = (real_zeros ? zeros.y : a.zero) * power[j];
      }
      const uint32_t x_scales = at + a.x_scales_at + (lane & 3) * (LIMBS == 2 ? 8 : 16);
#pragma unroll
      for (int i = S::WIDTH / 8 * part / BLOCKS; i < S::WIDTH / 8 * (part + 1) / BLOCKS; i++)
#pragma unroll
        for (int e = 0; e < 2 / LIMBS; e++) {
          const int n = half * (S::WIDTH / 8) + i, t = LIMBS == 2 ? n : n * 2 + e;
          const float2 s = load_shared_float2(x_scales + n * (LIMBS == 2 ? 32 : 64) + e * 8);
          float x_sum = s.y;
          if constexpr (SCALE == PER_BLOCK)
            x_sum =
                load_shared_float(at + a.x_sums_at + ((lane & 3) * (2 / LIMBS) + e + n * (8 / LIMBS)) * 16 + piece * 4);
          note(__float_as_uint(s.x) | (SCALE == PER_BLOCK ? __float_as_uint(x_sum) : 0));
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float v = static_cast<float>(LIMBS == 2 ? sums[i * 4 + 2 * h] * 256 + sums[i * 4 + 2 * h + 1]
                                                          : sums[i * 4 + 2 * h + e]);
            if constexpr (SCALE == PER_CHANNEL)
              sum[j][t][h] += s.x * v;
            else
              sum[j][t][h] += row_scale[h] * (s.x * v - row_zero[h] * x_sum);
          }
        }
    };
    const auto release = [&](uint32_t stage) {
      release_stage(empty + stage * 8, loaded, a.nought);
      loaded = 0;
    };
    // Steps of a piece but the first, each with the one before.
    const auto go_on = [&](int piece, int fresh) {
      const uint32_t at = base;
      const auto follow = [&](auto step, auto before) {
        multiply(step, piece, fresh, [&](int part) { convert(before, at, piece, part); });
      };
      follow(Step<1>{}, Step<0>{});
      if constexpr (S::HALVED) follow(Step<2>{}, Step<1>{}), follow(Step<3>{}, Step<2>{});
    };
    using Last = Step<J * S::HALVES - 1>;

    // Finished sums of this thread to y: of `OWN` row blocks, rows 8 apart and every token.
    float own[S::OWN][S::TOKENS][2];
    const auto store = [&](int tile) {
      if constexpr (SCALE == PER_CHANNEL) barrier_wait(totals_ready, 0);
#pragma unroll
      for (int i = 0; i < S::OWN; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int block = 2 * group + (S::TEAMS == 2 ? team : i), n_tile0 = tile * CTA_N_TILES + n_tile;
          const int row = n_tile0 * 64 + block * 16 + h * 8 + lane / 4;
          const int stored = n_tile0 * 64 + lane / 4 * 8 + block * 2 + h;
          if (row >= a.n) continue;
          float scale = 1.f, z = a.zero, bias = 0.f;
          if constexpr (SCALE == PER_CHANNEL) {
            scale = __half2float(a.scales[stored]);
            if (real_zeros) z = __half2float(a.zeros[stored]);
          }
          if (a.bias != nullptr) bias = load_element(a.bias, row, a.dtype);
          const float fourth = __uint_as_float((127 - 2 * block) << 23);
          // One address, one conversion to either 16-bit type: this code runs once or twice, and is fetched to be run.
          const int token0 = LIMBS == 2 ? lane % 4 : lane % 4 * 2, size = a.dtype == TRIRUN_F32 ? 4 : 2;
          uint8_t* to = static_cast<uint8_t*>(a.y) + (token0 * a.ldy + row) * size;
#pragma unroll
          for (int t = 0; t < S::TOKENS; t++) {
            const int offset = LIMBS == 2 ? t * 4 : t / 2 * 8 + t % 2, token = token0 + offset;
            if (token >= a.m) continue;
            float v = own[i][t][h];
            if constexpr (S::EXACT) v *= totals[TOTALS_AT + a.tokens + token];
            if constexpr (SCALE == PER_CHANNEL) v = v * fourth - z * totals[TOTALS_AT + token];
            v = v * scale + bias;
            uint8_t* element = to + offset * a.ldy * size;
            if (a.dtype == TRIRUN_F32)
              *reinterpret_cast<float*>(element) = v;
            else
              *reinterpret_cast<uint16_t*>(element) = a.dtype == TRIRUN_F16
                                                          ? __half_as_ushort(__float2half_rn(v))
                                                          : __bfloat16_as_ushort(__float2bfloat16_rn(v));
          }
        }
    };

    const int tile0 = first / a.k_tiles;
    int at = first, tile = tile0;
#pragma unroll 1
    while (at < last) {
      const int begin = tile * a.k_tiles, end = min(begin + a.k_tiles, last);
      // This team's stages up to here, of all that this CTA has.
      const auto turns = [&](int k_tile) { return (k_tile - first + S::TEAMS - 1 - team) / S::TEAMS; };
      const int pieces = (turns(end) - turns(at)) * PIECES;
#pragma unroll
      for (int i = 0; i < J * S::TOKENS * 2; i++) (&sum[0][0][0])[i] = 0.f;
      if (S::TEAMS == 1 || pieces > 0) {
        await_stage();
        if constexpr (!S::HALVED) read_words(0);
        multiply(Step<0>{}, 0, 1, [](int) {});
#pragma unroll 1
        for (int i = 0; i + 1 < pieces; i++) {
          const int piece = i % PIECES, next = (i + 1) % PIECES;
          const uint32_t now = base, stage = ring.stage;
          go_on(piece, i == 0);
          if (next == 0) {
            ring.advance(a.stages, S::TEAMS);
            await_stage();
          }
          if constexpr (!S::HALVED) read_words(next);
          multiply(Step<0>{}, next, 0, [&](int part) { convert(Last{}, now, piece, part); });
          if (next == 0) release(stage);
        }
        go_on(PIECES - 1, pieces == 1);
        wgmma_wait<0>();
#pragma unroll
        for (int part = 0; part < BLOCKS; part++) convert(Last{}, base, PIECES - 1, part);
        release(ring.stage);
        ring.advance(a.stages, S::TEAMS);
        if constexpr (S::EXACT) {
          static_assert(S::TOKENS == N / 4);
#pragma unroll
          for (int i = 0; i < J * N / 2; i++) {
            const int j = i / (N / 2), e = i % (N / 2);
            sum[j][e / 4 * 2 + e % 2][e / 2 % 2] = static_cast<float>(c[j][e]);
          }
        }
      }

      float (&flat)[S::QUARTERS * 4] = reinterpret_cast<float (&)[S::QUARTERS * 4]>(own);
      if constexpr (S::TEAMS == 2) {
        // Each team finishes one row block of every warpgroup and gives its sums of the other to the other team. Two
        // buffers: whoever writes one again has met everybody after they read it.
        float (&low)[S::QUARTERS * 4] = reinterpret_cast<float (&)[S::QUARTERS * 4]>(sum[0]);
        float (&high)[S::QUARTERS * 4] = reinterpret_cast<float (&)[S::QUARTERS * 4]>(sum[1]);
        const uint32_t buffer = shared + a.exchange_at + (tile - tile0) % 2 * S::QUARTERS * 16 * S::CONSUMERS;
#pragma unroll
        for (int i = 0; i < S::QUARTERS * 4; i++) {
          store_shared(buffer + (i * S::CONSUMERS + (threadIdx.x ^ TEAM)) * 4, team ? low[i] : high[i]);
          flat[i] = team ? high[i] : low[i];
        }
        named_barrier<S::CONSUMERS>(2);
#pragma unroll
        for (int i = 0; i < S::QUARTERS * 4; i++) {
          const float other = load_shared_float(buffer + (i * S::CONSUMERS + threadIdx.x) * 4);
          flat[i] = flat[i] + other;  // two terms: the order does not matter
        }
      } else {
#pragma unroll
        for (int i = 0; i < S::QUARTERS * 4; i++) flat[i] = (&sum[0][0][0])[i];
      }

      bool mine = true;
      if (end - at < a.k_tiles) {
        const int first_cta = a.owner(begin), last_cta = a.owner(begin + a.k_tiles - 1);
        const auto part = [&](int cta) {
          const int of_both = 2 * cta + (a.start(cta) < begin);  // its first tile, or its last
          return a.parts + static_cast<int64_t>(of_both) * S::QUARTERS * S::CONSUMERS + threadIdx.x;
        };
        mine = add_partial_sums<S::QUARTERS, S::CONSUMERS, S::QUARTERS <= 4 ? 4 : 1>(
            flat, blockIdx.x, first_cta, last_cta, a.counters + first_cta * (S::CONSUMERS / 32) + warp, part);
      }
      if (mine) store(tile);
      at = end, tile++;
    }
  }
#endif
}

using Kernel = void (*)(GroupsArgs);

struct Instance {
  int limbs, columns, scale, threads, teams, registers, quarters;
  Kernel kernel;

  int consumers() const { return threads - 128; }
};

// How a plan is launched; without an instance where no kernel runs it.
struct Config {
  const Instance* instance = nullptr;
  int ctas = 0;
  int shared = -1;  // bytes of one CTA, dynamic
};

template <int LIMBS, int N, int SCALE>
constexpr Instance instance() {
  using S = Shape<LIMBS, N, SCALE>;
  return {LIMBS, N, SCALE, S::THREADS, S::TEAMS, S::LAUNCH_REGISTERS, S::QUARTERS, gemm_groups<LIMBS, N, SCALE>};
}

#define TRIRUN_GROUPS(D, N) instance<D, N, PER_CHANNEL>(), instance<D, N, PER_K_TILE>(), instance<D, N, PER_BLOCK>()
// limbs of x, columns (limbs * rows of x, at most), where weight scales enter
// no-spill(90a): gemm_groups<2, 16, *>
// no-spill(90a): gemm_groups<2, 32, *>
// no-spill(90a): gemm_groups<1, 16, *>
// no-spill(90a): gemm_groups<1, 32, 0>
constexpr Instance INSTANCES[] = {
    TRIRUN_GROUPS(2, 16),  TRIRUN_GROUPS(2, 32), TRIRUN_GROUPS(2, 64), TRIRUN_GROUPS(2, 96),
    TRIRUN_GROUPS(2, 128), TRIRUN_GROUPS(1, 16), TRIRUN_GROUPS(1, 32), TRIRUN_GROUPS(1, 64),
};

const Instance* instance_of(const Problem& p, const ActivationLayout& layout) {
  const int scale = p.w.group_size == -1 ? PER_CHANNEL : p.w.group_size == K_TILE ? PER_K_TILE : PER_BLOCK;
  const Instance* best = nullptr;
  for (const Instance& i : INSTANCES)
    if (i.limbs == layout.limbs && i.scale == scale && i.columns >= layout.columns &&
        (best == nullptr || i.columns < best->columns))
      best = &i;
  return best;
}

// Sums of tiles that several CTAs share.
size_t parts_bytes(const Problem& p, const Instance& instance) {
  return p.plan.ctas > 0 ? size_t(p.plan.ctas) * 2 * instance.quarters * instance.consumers() * sizeof(float4) : 0;
}

// A plan as the kernel is told it: sizes, and where it keeps what in shared memory. Of pointers only whether they are
// null is looked at.
Config configure(const Problem& p, GroupsArgs& a) {
  const trirun_cuda_plan& plan = p.plan;
  const ActivationLayout layout(p.m, p.w.k, p.act_bits);
  const Instance* instance = instance_of(p, layout);
  const int64_t n_tiles = p.w.n / 64, k_tiles = p.w.k / K_TILE,
                total = (n_tiles + CTA_N_TILES - 1) / CTA_N_TILES * k_tiles;
  // A team gives a stage back when the next one of its own, two further on, has come: three at least. And every stage
  // is one team's: at the other's barrier it could look a phase too early, which parity does not tell from too late.
  if (p.arch != 90 || instance == nullptr || layout.columns % 8 || plan.stages < 3 || plan.stages > MAX_STAGES ||
      (instance->teams == 2 && plan.stages % 2) || plan.ctas < 1 || plan.ctas > COUNTERS / 16 || total > INT32_MAX)
    return {};
  const int ctas = static_cast<int>(plan.ctas < total ? plan.ctas : total);
  const int64_t longest = (total + ctas - 1) / ctas;
  if (layout.limbs == 1 && instance->scale == PER_CHANNEL &&
      (longest < k_tiles ? longest : k_tiles) * K_TILE > EXACT_SUM_K)
    return {};
  a.n_tiles = static_cast<int>(n_tiles), a.k_tiles = static_cast<int>(k_tiles);
  static_cast<StreamK&>(a) = stream_k(total, ctas);
  a.group_rows = instance->scale == PER_CHANNEL ? 0 : K_TILE / p.w.group_size;
  a.n_pad = p.w.n, a.n = static_cast<int>(p.n), a.m = static_cast<int>(p.m);
  a.tokens = layout.tokens, a.columns = layout.columns;
  a.stages = plan.stages;
  a.early = plan.early > 0 && plan.early < a.stages ? plan.early : a.stages;
  a.x_first = plan.x_first;
  if (a.x_first < 0 || a.x_first > a.early) return {};
  a.scales_at = CTA_N_TILES * WORD_TILE_BYTES;
  a.x_at = a.scales_at + CTA_N_TILES * a.group_rows * 128 * (p.w.zeros != nullptr ? 2 : 1);
  // A tile wider than the columns there are reads on into what follows; the stage must hold that much.
  a.x_scales_at = align(a.x_at + K_TILE * instance->columns);
  a.x_sums_at = align(a.x_scales_at + layout.tokens * 8);
  a.stage_bytes = align(a.x_sums_at + (instance->scale == PER_BLOCK ? layout.tokens * 16 : 0));
  a.exchange_at = plan.stages * a.stage_bytes;
  a.totals_at = a.exchange_at + (instance->teams == 2 ? 2 * instance->quarters * 16 * instance->consumers() : 0);
  a.barriers_at = a.totals_at + align((TOTALS_AT + 2 * layout.tokens) * 4);
  const int bytes = a.barriers_at + 2 * MAX_STAGES * 8 + 16;
  if (bytes > MAX_SHARED) return {};
  return {instance, ctas, bytes};
}

int64_t shared_bytes(const Problem& p) {
  GroupsArgs a{};
  return configure(p, a).shared;
}

size_t workspace_bytes(const Problem& p) {
  const ActivationLayout layout(p.m, p.w.k, p.act_bits);
  const Instance* instance = instance_of(p, layout);
  if (instance == nullptr) return 0;
  return parts_bytes(p, *instance) + (p.activations != nullptr ? 0 : layout.bytes);
}

int launch(const Problem& p) {
  GroupsArgs a{};
  const Config config = configure(p, a);
  const Instance* instance = config.instance;
  if (instance == nullptr) return TRIRUN_UNSUPPORTED;
  static bool whole[sizeof(INSTANCES) / sizeof(INSTANCES[0])];
  if (!starts_whole(whole[instance - INSTANCES], reinterpret_cast<const void*>(instance->kernel), instance->registers))
    return TRIRUN_UNSUPPORTED;
  if (const int code = encode_words(&a.words, p.w, 4)) return code;
  a.scales = reinterpret_cast<const __half*>(p.w.scales);
  a.zeros = reinterpret_cast<const __half*>(p.w.zeros);
  a.zero = p.w.zero;
  a.bias = p.bias, a.y = p.y, a.ldy = p.ldy, a.dtype = p.dtype;
  const ActivationLayout layout(p.m, p.w.k, p.act_bits);
  auto* workspace = static_cast<uint8_t*>(p.workspace);
  a.counters = p.counters;
  a.parts = reinterpret_cast<float4*>(workspace);
  workspace += parts_bytes(p, *instance);
  auto* base = static_cast<const uint8_t*>(p.activations != nullptr ? p.activations : workspace);
  a.limbs = base;
  a.x_scales = reinterpret_cast<const float2*>(base + layout.scales_offset);
  a.x_sums = reinterpret_cast<const float4*>(base + layout.sums_offset);
  if (p.activations == nullptr)
    if (const int code = launch_quantize(p, workspace, 1, p.counters, config.ctas * instance->consumers() / 32))
      return code;
  return launch_kernel(instance->kernel, {dim3(config.ctas), instance->threads, config.shared, p.stream, true}, a);
}

}  // namespace

const KernelFamily groups = {shared_bytes, workspace_bytes, launch};

}  // namespace trirun::gemm_decode
