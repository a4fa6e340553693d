/* INT2 GEMM with AMX: the panels of panel.h multiplied as 16 x 16 tiles of int32 over 64 k at a time. Limbs are the
 * signed operand (16 rows of 64 k), masked codes the unsigned one (16 quads by 16 rows of the weight). While the tile
 * unit multiplies one step, the vector units take the sums of the step before to fp32.
 *
 * The tile instructions are written out: the compiler's intrinsics do not tell it that they read memory.
 */
#include "quantize.h"

#if defined(__AMX_INT8__)
#include "panel.h"

namespace trirun {
namespace {

#define TILE_ZERO(t) asm volatile("tilezero %%tmm" #t::)
#define TILE_LOAD(t, at, stride) \
  asm volatile("tileloadd (%0,%1,1), %%tmm" #t::"r"(at), "r"(static_cast<int64_t>(stride)) : "memory")
#define TILE_STORE(t, at, stride) \
  asm volatile("tilestored %%tmm" #t ", (%0,%1,1)" ::"r"(at), "r"(static_cast<int64_t>(stride)) : "memory")
#define TILE_MULTIPLY(sum, limbs, codes) asm volatile("tdpbsud %%tmm" #codes ", %%tmm" #limbs ", %%tmm" #sum::)

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

constexpr int64_t kTile = 1024;  // bytes

/* Sums are tiles 0..3, limbs 4 and 5, codes 6 and 7. */
inline void configure(int rows, int64_t columns) {
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = static_cast<uint8_t>(t < 6 ? rows : columns / 4);
    config.row_bytes[t] = static_cast<uint16_t>(t == 4 || t == 5 ? columns : 64);
  }
  asm volatile("ldtilecfg %0" ::"m"(config));
}

struct MultiplyAmx {
  static constexpr int64_t kPanelK = 256;

  /* Rows of limbs lie whole rows apart, often a power of two: copied to tiles, they do not fight for cache sets. */
  static int64_t prepared_bytes(int64_t planes, int64_t k) { return (planes + 15) / 16 * 16 * k; }

  static void prepare(const int8_t* limbs, int64_t planes, int64_t k, int8_t* tiles) {
    for (int64_t row = 0; row < planes; row += 16)
      for (int64_t i = 0; i < k; i += 64)
        for (int64_t r = row; r < row + 16; ++r, tiles += 64)
          _mm512_store_si512(tiles, r < planes ? _mm512_loadu_si512(limbs + r * k + i) : _mm512_setzero_si512());
  }

  static void begin(int64_t planes, int64_t step) {
    configure(planes < 16 ? static_cast<int>(planes) : 16, step < 64 ? step : 64);
  }
  static void end() { asm volatile("tilerelease" ::); }

  /* Sums of `depth` columns into tiles 0..3: two tiles of limbs by two of codes. */
  static TRIRUN_INLINE void two_by_two(const int8_t* first, const int8_t* second, const uint8_t* codes, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 64, first += kTile, second += kTile, codes += 4 * kTile) {
      TILE_LOAD(6, codes, 64);
      TILE_LOAD(4, first, 64);
      TILE_MULTIPLY(0, 4, 6);
      TILE_LOAD(7, codes + kTile, 64);
      TILE_MULTIPLY(1, 4, 7);
      TILE_LOAD(5, second, 64);
      TILE_MULTIPLY(2, 5, 6);
      TILE_MULTIPLY(3, 5, 7);
    }
  }

  /* The same for one tile of limbs and all four row blocks. */
  static TRIRUN_INLINE void one_by_four(const int8_t* limbs, const uint8_t* codes, int64_t depth) {
    for (int64_t k = 0; k < depth; k += 64, limbs += kTile, codes += 4 * kTile) {
      TILE_LOAD(4, limbs, 64);
      TILE_LOAD(6, codes, 64);
      TILE_MULTIPLY(0, 4, 6);
      TILE_LOAD(7, codes + kTile, 64);
      TILE_MULTIPLY(1, 4, 7);
      TILE_LOAD(6, codes + 2 * kTile, 64);
      TILE_MULTIPLY(2, 4, 6);
      TILE_LOAD(7, codes + 3 * kTile, 64);
      TILE_MULTIPLY(3, 4, 7);
    }
  }

  /* Long steps: the sums stay integers in p.dots from panel to panel. */
  static void long_panel(const Panel& p) {
    const int64_t tiles = (p.rows + 15) / 16;
    for (int64_t tile = 0; tile + 1 < tiles; tile += 2)
      for (int pair = 0; pair < 2; ++pair) {
        int32_t* sums = p.dots + tile * kTile + 32 * pair;
        TILE_LOAD(0, sums, 256);
        TILE_LOAD(1, sums + 16, 256);
        TILE_LOAD(2, sums + kTile, 256);
        TILE_LOAD(3, sums + kTile + 16, 256);
        const int8_t* limbs = p.prepared + tile * 16 * p.k;
        two_by_two(limbs, limbs + 16 * p.k, p.codes + 2 * pair * kTile, p.columns);
        TILE_STORE(0, sums, 256);
        TILE_STORE(1, sums + 16, 256);
        TILE_STORE(2, sums + kTile, 256);
        TILE_STORE(3, sums + kTile + 16, 256);
      }
    if (tiles % 2 == 0) return;
    int32_t* sums = p.dots + (tiles - 1) * kTile;
    TILE_LOAD(0, sums, 256);
    TILE_LOAD(1, sums + 16, 256);
    TILE_LOAD(2, sums + 32, 256);
    TILE_LOAD(3, sums + 48, 256);
    one_by_four(p.prepared + (tiles - 1) * 16 * p.k, p.codes, p.columns);
    TILE_STORE(0, sums, 256);
    TILE_STORE(1, sums + 16, 256);
    TILE_STORE(2, sums + 32, 256);
    TILE_STORE(3, sums + 48, 256);
  }

  /* Integer sums of one step on their way to fp32: four tiles, of rows [row, row + rows) of x by the row blocks from j
   * on, `across` of them side by side. */
  struct Stage {
    alignas(64) int32_t tiles[4][16][16];
    int64_t row, rows, step;
    int j, across;
  };

  template <Mode mode, int across>
  static TRIRUN_INLINE void take_in(const Panel& p, const Stage& stage) {
    constexpr int planes = is_wide(mode) ? 2 : 1, rows_per_tile = 16 / planes;
    const StepValues& values = p.values[stage.step];
    __m512 scale[across], zero[across];
    TRIRUN_UNROLL
    for (int a = 0; a < across; ++a) {
      scale[a] = values.scale[stage.j + a];
      zero[a] = values.zero[stage.j + a];
    }
    const float* x_sums = p.x_sums + stage.step * p.x_stride + stage.row;
    const float* x_scales = p.x_scales + stage.step * p.x_stride + stage.row;
    float* acc = p.acc + 64 * stage.row + 16 * stage.j;
    for (int64_t first = 0, tile = 0; first < stage.rows; first += rows_per_tile, tile += across) {
      const int64_t last = stage.rows - first < rows_per_tile ? stage.rows - first : rows_per_tile;
      for (int64_t i = 0; i < last; ++i, acc += 64) {
        const float x_sum = *x_sums++, x_scale = *x_scales++;
        TRIRUN_UNROLL
        for (int a = 0; a < across; ++a) {
          const int32_t* row = stage.tiles[tile + a][i * planes];
          __m512i dot = _mm512_load_si512(row);
          if (is_wide(mode)) dot = _mm512_add_epi32(_mm512_slli_epi32(dot, 8), _mm512_load_si512(row + 16));
          add_row_block<mode>(acc + 16 * a, dot, scale[a], zero[a], x_sum, x_scale);
        }
      }
    }
  }

  template <Mode mode>
  static TRIRUN_INLINE void take_in(const Panel& p, const Stage& stage) {
    if (stage.across == 2)
      take_in<mode, 2>(p, stage);
    else
      take_in<mode, 4>(p, stage);
  }

  /* Short steps: every sum leaves for fp32. The tiles of one step are multiplied while those of the step before are
   * taken in. */
  template <Mode mode>
  static void short_panel(const Panel& p) {
    constexpr int planes = is_wide(mode) ? 2 : 1, rows_per_tile = 16 / planes;
    const int64_t tiles = (p.rows * planes + 15) / 16, depth = p.step < 64 ? 64 : p.step;
    Stage stages[2];
    int64_t count = 0;
    for (int64_t tile = 0; tile < tiles; tile += 2) {
      const bool both = tile + 1 < tiles;
      for (int pair = 0; pair < (both ? 2 : 1); ++pair)
        for (int64_t step = 0; step < p.columns / p.step; ++step, ++count) {
          Stage& stage = stages[count % 2];
          const int64_t k = step * p.step;
          // Of a step of 32, half a tile: the second half of the rows of limbs, the second half of the quads.
          const uint8_t* codes = p.codes + k / 64 * 4 * kTile + k % 64 * 16 + 2 * pair * kTile;
          const int8_t* limbs = p.prepared + tile * 16 * p.k + k / 64 * kTile + k % 64;
          TILE_ZERO(0);
          TILE_ZERO(1);
          TILE_ZERO(2);
          TILE_ZERO(3);
          if (both)
            two_by_two(limbs, limbs + 16 * p.k, codes, depth);
          else
            one_by_four(limbs, codes, depth);
          TILE_STORE(0, stage.tiles[0], 64);
          TILE_STORE(1, stage.tiles[1], 64);
          TILE_STORE(2, stage.tiles[2], 64);
          TILE_STORE(3, stage.tiles[3], 64);
          stage.row = tile * rows_per_tile;
          stage.rows = (both ? 2 : 1) * rows_per_tile;
          if (stage.rows > p.rows - stage.row) stage.rows = p.rows - stage.row;
          stage.step = step;
          stage.j = 2 * pair;
          stage.across = both ? 2 : 4;
          if (count > 0) take_in<mode>(p, stages[(count - 1) % 2]);
        }
    }
    take_in<mode>(p, stages[(count - 1) % 2]);
  }

  template <Mode mode>
  static void multiply(const Panel& p) {
    if (mode == kLong8)
      long_panel(p);
    else
      short_panel<mode>(p);
  }
};

/* Up to this many planes of limbs, the vectors of AVX-512-VNNI are as fast as memory, and need no tiles. */
constexpr int64_t kVectorPlanes = 4;

bool int2_gemm(const Int2Job& job, int64_t begin, int64_t end) {
  if (job.act->m * (job.act->act_bits / 8) <= kVectorPlanes) return kAvx512Vnni.int2_gemm(job, begin, end);
  return gemm_panels<MultiplyAmx>(job, begin, end);
}

bool int2_gemm_parts(const Int2Part* parts, int count) {
  const trirun_act& act = *parts[0].job.act;
  if (act.m * (act.act_bits / 8) <= kVectorPlanes) return kAvx512Vnni.int2_gemm_parts(parts, count);
  for (int i = 0; i < count; ++i)
    if (!gemm_panels<MultiplyAmx>(parts[i].job, parts[i].begin, parts[i].end)) return false;
  return true;
}

}  // namespace

const Isa kAmx = {"amx", quantize_avx512, int2_gemm, int2_gemm_parts};

}  // namespace trirun
#else
namespace trirun {
const Isa kAmx = {};
}
#endif
