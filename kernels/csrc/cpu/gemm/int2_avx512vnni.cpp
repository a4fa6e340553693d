/* INT2 GEMM with AVX-512-VNNI (vpdpbusd). Up to four planes of limbs (rows of x times limbs per value) meet the weight
 * in registers, at the speed of memory; more of them share the unpacked panels of panel.h. */
#include "quantize.h"

#if defined(__AVX512VNNI__)
#include "panel.h"

namespace trirun {
namespace {

/* ---- few rows: decode ---------------------------------------------------------------------------------- */

/* n tiles are read side by side, one block of each in turn, and fetched some way ahead: a single stream, however far it
 * is fetched ahead, leaves a fifth of the memory's bandwidth unused. */
constexpr int kStreams = 4;
constexpr int64_t kAhead = 2048, kAheadGrouped = 1024;  // bytes of each stream; scales take their part of the queue

/* One n tile (64 rows of the weight) whose k is being summed. */
template <Mode mode, int rows>
struct NTile {
  static constexpr int planes = is_wide(mode) ? 2 : 1, columns = rows * planes;

  alignas(64) int32_t sums[columns][4][16];  // of the step so far, of whole bytes for j = 0
  alignas(64) float acc[rows][64];
  const Int2Job* job;
  int64_t index;
  const uint32_t* words;
  int64_t ahead;  // bytes from there to what is fetched
};

/* The n tiles of several products, one after another. */
class NTileIterator {
 public:
  NTileIterator(const Int2Part* parts, int count) : part_(parts), end_(parts + count), index_(parts->begin) {
    settle();
  }

  bool done() const { return part_ == end_; }
  const Int2Job& job() const { return part_->job; }
  int64_t index() const { return index_; }
  const uint32_t* words() const { return job().w->words + index_ * (job().w->k / 32) * 128; }
  void step() {
    ++index_;
    settle();
  }

 private:
  void settle() {
    while (part_ != end_ && index_ == part_->end)
      if (++part_ != end_) index_ = part_->begin;
  }

  const Int2Part *part_, *end_;
  int64_t index_;
};

/* Zeroes whole vectors. GCC makes `rep stos` of a memset of this size, which takes as long as a block of the weight. */
TRIRUN_INLINE void clear(void* memory, int64_t bytes) {
  char* at = static_cast<char*>(memory);
  for (int64_t i = 0; i < bytes; i += 64) _mm512_store_si512(at + i, _mm512_setzero_si512());
}

/* One block of the weight meets every plane of limbs. The whole byte q0 + 4 q1 + 16 q2 + 64 q3 stands in for row
 * block 0, which saves its mask; the rest is taken off at the end of the step. */
template <Mode mode, int rows>
TRIRUN_INLINE void add_block(NTile<mode, rows>& tile, const int8_t* limbs, int64_t stride) {
  constexpr int columns = NTile<mode, rows>::columns;
  TRIRUN_UNROLL
  for (int line = 0; line < 8; ++line)
    _mm_prefetch(reinterpret_cast<const char*>(tile.words) + tile.ahead + 64 * line, _MM_HINT_T0);
  __m512i quads[8], sum[columns][4];
  TRIRUN_UNROLL
  for (int c = 0; c < columns; ++c) TRIRUN_UNROLL
  for (int j = 0; j < 4; ++j) sum[c][j] = _mm512_load_si512(tile.sums[c][j]);
  transpose_block(tile.words, quads);
  TRIRUN_UNROLL
  for (int u = 0; u < 8; ++u) {
    __m512i masked[4] = {quads[u]};
    TRIRUN_UNROLL
    for (int j = 1; j < 4; ++j) masked[j] = _mm512_and_si512(quads[u], code_mask(j));
    TRIRUN_UNROLL
    for (int c = 0; c < columns; ++c) {
      int32_t four;
      memcpy(&four, limbs + c * stride + 4 * u, 4);
      const __m512i x = _mm512_set1_epi32(four);
      TRIRUN_UNROLL
      for (int j = 0; j < 4; ++j) sum[c][j] = _mm512_dpbusd_epi32(sum[c][j], masked[j], x);
    }
  }
  TRIRUN_UNROLL
  for (int c = 0; c < columns; ++c) TRIRUN_UNROLL
  for (int j = 0; j < 4; ++j) _mm512_store_si512(tile.sums[c][j], sum[c][j]);
  tile.words += 128;
}

/* The sums of a step leave for fp32. */
template <Mode mode, int rows>
TRIRUN_INLINE void end_step(NTile<mode, rows>& tile, int64_t step, const float* x_sums, const float* x_scales) {
  constexpr int planes = NTile<mode, rows>::planes;
  const trirun_int2& w = *tile.job->w;
  StepValues values;
  load_step(w, tile.index, is_grouped(mode) ? step : 0, values);
  TRIRUN_UNROLL
  for (int i = 0; i < rows; ++i) {
    __m512i dot[planes][4];
    TRIRUN_UNROLL
    for (int c = 0; c < planes; ++c) {
      TRIRUN_UNROLL
      for (int j = 0; j < 4; ++j) dot[c][j] = _mm512_load_si512(tile.sums[i * planes + c][j]);
      TRIRUN_UNROLL
      for (int j = 1; j < 4; ++j) dot[c][0] = _mm512_sub_epi32(dot[c][0], dot[c][j]);
    }
    if (is_wide(mode)) {
      TRIRUN_UNROLL
      for (int j = 0; j < 4; ++j) dot[0][j] = _mm512_add_epi32(_mm512_slli_epi32(dot[0][j], 8), dot[planes - 1][j]);
    }
    add_step<mode>(tile.acc[i], dot[0], values, x_sums[step * rows + i], x_scales[step * rows + i]);
  }
  clear(tile.sums, sizeof tile.sums);
  if (is_grouped(mode)) {
    // Scales of one n tile lie a whole row apart, out of reach of the hardware's prefetch.
    const int64_t ahead = step + 1 + kAheadGrouped / (16 * w.group_size);
    const char* scales = reinterpret_cast<const char*>(w.scales + ahead * w.n + 64 * tile.index);
    _mm_prefetch(scales, _MM_HINT_T0);
    _mm_prefetch(scales + 64, _MM_HINT_T0);
  }
}

template <Mode mode, int rows>
bool decode(const Int2Part* parts, int count) {
  const trirun_act& act = *parts->job.act;
  const int64_t k = parts->job.w->k, step = step_of(*parts->job.w, act.act_bits), steps = (k + step - 1) / step;
  using Tile = NTile<mode, rows>;
  char* memory = static_cast<char*>(scratch(kScratchKernel, kStreams * sizeof(Tile) + 2 * rows * steps * 4));
  if (!memory) return false;
  Tile* tiles = reinterpret_cast<Tile*>(memory);
  float* x_sums = reinterpret_cast<float*>(tiles + kStreams);
  float* x_scales = x_sums + rows * steps;
  gather_steps(act, step, 0, rows, rows, x_sums, x_scales);
  constexpr int64_t near = is_grouped(mode) ? kAheadGrouped : kAhead;
  // Neighbouring n tiles run together: their scales lie side by side.
  for (NTileIterator coming(parts, count); !coming.done();) {
    int streams = 0;
    for (; streams < kStreams && !coming.done(); ++streams, coming.step()) {
      Tile& tile = tiles[streams];
      clear(tile.sums, sizeof tile.sums);
      clear(tile.acc, sizeof tile.acc);
      tile.job = &coming.job();
      tile.index = coming.index();
      tile.words = coming.words();
      tile.ahead = near;
    }
    for (int64_t i = 0; i < k; i += 32) {
      if (16 * i + near == 16 * k) {
        // What is fetched from here on belongs to the n tile that follows in this stream, or lies where that of a
        // larger weight would be: there, often, the next weight begins.
        NTileIterator next = coming;
        for (int s = 0; s < streams; ++s) {
          tiles[s].ahead += (kStreams - 1) * 16 * k;
          if (next.done()) continue;
          const auto* words = reinterpret_cast<const char*>(tiles[s].words);
          tiles[s].ahead = reinterpret_cast<const char*>(next.words()) - words;
          next.step();
        }
      }
      for (int s = 0; s < streams; ++s) add_block(tiles[s], act.limbs + i, act.k);
      if ((i + 32) % step == 0 || i + 32 == k)
        for (int s = 0; s < streams; ++s) end_step(tiles[s], i / step, x_sums, x_scales);
    }
    for (int s = 0; s < streams; ++s) {
      StepValues values;
      load_step(*tiles[s].job->w, tiles[s].index, 0, values);
      for (int row = 0; row < rows; ++row)
        finish_row<mode>(*tiles[s].job, tiles[s].index, row, tiles[s].acc[row], values);
    }
  }
  return true;
}

template <Mode mode>
bool decode(const Int2Part* parts, int count) {
  switch (parts->job.act->m) {
    case 1: return decode<mode, 1>(parts, count);
    case 2: return decode<mode, 2>(parts, count);
    case 3:
      if (!is_wide(mode)) return decode<mode, is_wide(mode) ? 1 : 3>(parts, count);
      break;
    case 4:
      if (!is_wide(mode)) return decode<mode, is_wide(mode) ? 1 : 4>(parts, count);
      break;
  }
  return false;
}

/* ---- many rows: prefill -------------------------------------------------------------------------------- */

/* vpdpbusd in place. With the intrinsic, GCC moves two dozen sums from register to register in every turn of the
 * loop, which takes a tenth of its time. */
TRIRUN_INLINE void dot_add(__m512i& sum, __m512i codes, __m512i limbs) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(limbs));
}

struct MultiplyVnni {
  /* 64 rows of them take half of a 32 KiB L1. */
  static constexpr int64_t kPanelK = 256;

  static int64_t prepared_bytes(int64_t, int64_t) { return 0; }
  static void prepare(const int8_t*, int64_t, int64_t, int8_t*) {}
  static void begin(int64_t, int64_t) {}
  static void end() {}

  /* `rows` rows of x: every step of the panel. */
  template <Mode mode, int rows>
  static TRIRUN_INLINE void rows_of(const Panel& p, int64_t row) {
    constexpr int planes = is_wide(mode) ? 2 : 1, columns = rows * planes;
    const int8_t* limbs[columns];
    TRIRUN_UNROLL
    for (int c = 0; c < columns; ++c) limbs[c] = p.limbs + (row * planes + c) * p.k;
    const int64_t span = mode == kLong8 ? p.columns : p.step;
    for (int64_t k = 0, s = 0; k < p.columns; k += span, ++s) {
      __m512i dot[columns][4];
      TRIRUN_UNROLL
      for (int c = 0; c < columns; ++c) TRIRUN_UNROLL
      for (int j = 0; j < 4; ++j)
        dot[c][j] = mode == kLong8 ? _mm512_loadu_si512(p.dots + 64 * (row + c) + 16 * j) : _mm512_setzero_si512();
      for (int64_t i = k; i < k + span; i += 32) {
        const uint8_t* codes = p.codes + i / 64 * 4096 + i % 64 * 16;
        TRIRUN_UNROLL
        for (int u = 0; u < 8; ++u) {
          __m512i masked[4];
          TRIRUN_UNROLL
          for (int j = 0; j < 4; ++j) masked[j] = _mm512_load_si512(codes + 1024 * j + 64 * u);
          TRIRUN_UNROLL
          for (int c = 0; c < columns; ++c) {
            int32_t four;
            memcpy(&four, limbs[c] + i + 4 * u, 4);
            const __m512i x = _mm512_set1_epi32(four);
            TRIRUN_UNROLL
            for (int j = 0; j < 4; ++j) dot_add(dot[c][j], masked[j], x);
          }
        }
      }
      for (int i = 0; i < rows; ++i) {
        if (mode == kLong8) {
          TRIRUN_UNROLL
          for (int j = 0; j < 4; ++j) _mm512_storeu_si512(p.dots + 64 * (row + i) + 16 * j, dot[i][j]);
          continue;
        }
        if (is_wide(mode)) TRIRUN_UNROLL
        for (int j = 0; j < 4; ++j)
          dot[i * planes][j] =
              _mm512_add_epi32(_mm512_slli_epi32(dot[i * planes][j], 8), dot[i * planes + planes - 1][j]);
        const int64_t at = s * p.x_stride + row + i;
        add_step<mode>(p.acc + 64 * (row + i), dot[i * planes], p.values[s], p.x_sums[at],
                       is_wide(mode) ? p.x_scales[at] : 0);
      }
    }
  }

  /* Six planes of limbs by four row blocks fill 24 registers; four hold the codes. */
  template <Mode mode>
  static void multiply(const Panel& p) {
    constexpr int most = is_wide(mode) ? 3 : 6;
    int64_t row = 0;
    for (; row + most <= p.rows; row += most) rows_of<mode, most>(p, row);
    const int64_t left = p.rows - row;
    if (!is_wide(mode)) {
      if (left == 5) return rows_of<mode, is_wide(mode) ? 1 : 5>(p, row);
      if (left == 4) return rows_of<mode, is_wide(mode) ? 1 : 4>(p, row);
      if (left == 3) return rows_of<mode, is_wide(mode) ? 1 : 3>(p, row);
    }
    if (left == 2) return rows_of<mode, 2>(p, row);
    if (left == 1) return rows_of<mode, 1>(p, row);
  }
};

bool int2_gemm_parts(const Int2Part* parts, int count) {
  const trirun_act& act = *parts->job.act;
  if (act.m * (act.act_bits / 8) > 4) {
    for (int i = 0; i < count; ++i)
      if (!gemm_panels<MultiplyVnni>(parts[i].job, parts[i].begin, parts[i].end)) return false;
    return true;
  }
  switch (mode_of(parts->job)) {
    case kLong8: return decode<kLong8>(parts, count);
    case kGroup8: return decode<kGroup8>(parts, count);
    case kChannel16: return decode<kChannel16>(parts, count);
    default: return decode<kGroup16>(parts, count);
  }
}

bool int2_gemm(const Int2Job& job, int64_t begin, int64_t end) {
  const Int2Part part = {job, begin, end};
  return int2_gemm_parts(&part, 1);
}

}  // namespace

const Isa kAvx512Vnni = {"avx512vnni", quantize_avx512, int2_gemm, int2_gemm_parts};

}  // namespace trirun
#else
namespace trirun {
const Isa kAvx512Vnni = {};
}
#endif
