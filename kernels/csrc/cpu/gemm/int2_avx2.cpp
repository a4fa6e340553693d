/* INT2 GEMM with AVX2 (vpmaddubsw). The transposition of tile64_avx512.h by halves: a vector holds four lane rows r by
 * h of one quad of k. Codes of 0..3 times signed limbs reach 2 * 3 * 128 = 768 in vpmaddubsw's 16-bit sums, so 32 quads
 * (128 k) of them add up to 24576 at most before they must be widened. */
#include "quantize.h"

#if defined(__AVX2__)
#include <immintrin.h>
#include <string.h>

#include "cpu/common/compiler.h"
#include "cpu/common/memory.h"

namespace trirun {
namespace {

constexpr int64_t kPanelK = 128;  // k columns unpacked at a time; the 16-bit sums hold no more
constexpr int64_t kAhead = 2048; // bytes the weight is fetched ahead of its use

struct alignas(32) Workspace {
  uint8_t codes[kPanelK / 4][2][4][32];  // [quad][half][row block j][dword 2 (r % 4) + h], plain codes
  float scale[64], zero[64];            // of the group, [j][dword 2r + h]
};

/* One block of tile64, by transposes of 8-byte elements. */
TRIRUN_INLINE void unpack_block(const uint32_t* block, uint8_t (*codes)[2][4][32]) {
  const __m256i mask = _mm256_set1_epi8(3);
  const char* bytes = reinterpret_cast<const char*>(block);
  TRIRUN_UNROLL
  for (int half = 0; half < 2; ++half) {
    TRIRUN_UNROLL
    for (int q = 0; q < 4; ++q) {
      // Quads 2q and 2q + 1 of rows 4 half + {0, 2} and + {1, 3}, joined while loading.
      __m256i joined[2];
      TRIRUN_UNROLL
      for (int odd = 0; odd < 2; ++odd) {
        const __m128i* from = reinterpret_cast<const __m128i*>(bytes + 64 * (4 * half + odd) + 16 * q);
        const __m256i low = _mm256_castsi128_si256(_mm_loadu_si128(from));
        joined[odd] = _mm256_inserti128_si256(low, _mm_loadu_si128(from + 8), 1);
      }
      const __m256i quads[2] = {_mm256_unpacklo_epi64(joined[0], joined[1]),
                                _mm256_unpackhi_epi64(joined[0], joined[1])};
      TRIRUN_UNROLL
      for (int u = 0; u < 2; ++u) TRIRUN_UNROLL
      for (int j = 0; j < 4; ++j)
        _mm256_store_si256(reinterpret_cast<__m256i*>(codes[2 * q + u][half][j]),
                           _mm256_and_si256(_mm256_srli_epi32(quads[u], 2 * j), mask));
    }
  }
  for (int line = 0; line < 8; ++line) _mm_prefetch(bytes + kAhead + 64 * line, _MM_HINT_T0);
}

/* 64 stored values of an n tile (8r + 2j + h) to [j][2r + h]. */
TRIRUN_INLINE void load_tile_values(const uint16_t* stored, float* values) {
  for (int half = 0; half < 2; ++half) {
    __m256d rows[4];
    for (int r = 0; r < 4; ++r) {
      const uint16_t* from = stored + 8 * (4 * half + r);
      rows[r] = _mm256_castps_pd(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    }
    const __m256d low[2] = {_mm256_unpacklo_pd(rows[0], rows[1]), _mm256_unpacklo_pd(rows[2], rows[3])};
    const __m256d high[2] = {_mm256_unpackhi_pd(rows[0], rows[1]), _mm256_unpackhi_pd(rows[2], rows[3])};
    const __m256d column[4] = {
        _mm256_permute2f128_pd(low[0], low[1], 0x20), _mm256_permute2f128_pd(high[0], high[1], 0x20),
        _mm256_permute2f128_pd(low[0], low[1], 0x31), _mm256_permute2f128_pd(high[0], high[1], 0x31)};
    for (int j = 0; j < 4; ++j) _mm256_store_ps(values + 16 * j + 8 * half, _mm256_castpd_ps(column[j]));
  }
}

/* dot[plane][j] of one half of the n tile: quads [begin, end) of the panel with the limbs of each plane. */
template <int planes>
TRIRUN_INLINE void dot_half(const Workspace& work, int half, int64_t begin, int64_t end,
                            const int8_t* const limbs[planes], __m256i dot[planes][4]) {
  __m256i sum[planes][4];
  TRIRUN_UNROLL
  for (int c = 0; c < planes; ++c) TRIRUN_UNROLL
  for (int j = 0; j < 4; ++j) sum[c][j] = _mm256_setzero_si256();
  for (int64_t quad = begin; quad < end; ++quad) {
    __m256i x[planes];
    TRIRUN_UNROLL
    for (int c = 0; c < planes; ++c) {
      int32_t four;
      memcpy(&four, limbs[c] + 4 * quad, 4);
      x[c] = _mm256_set1_epi32(four);
    }
    TRIRUN_UNROLL
    for (int j = 0; j < 4; ++j) {
      const __m256i codes = _mm256_load_si256(reinterpret_cast<const __m256i*>(work.codes[quad][half][j]));
      TRIRUN_UNROLL
      for (int c = 0; c < planes; ++c) sum[c][j] = _mm256_add_epi16(sum[c][j], _mm256_maddubs_epi16(codes, x[c]));
    }
  }
  TRIRUN_UNROLL
  for (int c = 0; c < planes; ++c) TRIRUN_UNROLL
  for (int j = 0; j < 4; ++j) dot[c][j] = _mm256_madd_epi16(sum[c][j], _mm256_set1_epi16(1));
}

/* Rows of x taken together: their fp32 and integer sums, 64 each, stay in L1 or L2 while the n tiles pass by. */
constexpr int64_t kRows = 64;

struct Block {
  const Int2Job& job;
  int64_t n_tile, first, rows;  // rows of x [first, first + rows)
  Workspace& work;
  int32_t* dots;  // [rows][64], steps longer than a panel
  float* acc;     // [rows][64]
};

/* `count` = 1 or 2 rows of x (one with 16-bit limbs): columns [at, at + span) of the panel at column k, which is a
 * whole step, or a part of a long one. */
template <bool wide, int count>
TRIRUN_INLINE void multiply(const Block& b, int64_t k, int64_t at, int64_t span, bool partial, int64_t row) {
  const trirun_act& act = *b.job.act;
  constexpr int planes = wide ? 2 * count : count;
  const bool grouped = b.job.w->group_size > 0;
  const int8_t* limbs[planes];
  for (int c = 0; c < planes; ++c) limbs[c] = act.limbs + ((b.first + row) * (wide ? 2 : 1) + c) * act.k + k;
  for (int half = 0; half < 2; ++half) {
    __m256i dot[planes][4];
    dot_half<planes>(b.work, half, at / 4, (at + span) / 4, limbs, dot);
    TRIRUN_UNROLL
    for (int i = 0; i < count; ++i) {
      const int64_t r = b.first + row + i;
      int32_t x_sum = 0;
      for (int64_t s = 0; s < span / 32; ++s) x_sum += act.sums[r * (act.k / 32) + (k + at) / 32 + s];
      const __m256 sum = _mm256_set1_ps(static_cast<float>(x_sum));
      const __m256 x_scale = _mm256_set1_ps(wide ? act.scales[r * (act.k / 128) + k / 128] : 0.0f);
      TRIRUN_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int64_t lane = 16 * j + 8 * half;
        __m256i total = dot[wide ? 2 * i : i][j];
        if (wide) total = _mm256_add_epi32(_mm256_slli_epi32(total, 8), dot[wide ? 2 * i + 1 : i][j]);
        if (partial) {
          __m256i* to = reinterpret_cast<__m256i*>(b.dots + 64 * (row + i) + lane);
          _mm256_store_si256(to, _mm256_add_epi32(_mm256_load_si256(to), total));
          continue;
        }
        float* acc = b.acc + 64 * (row + i) + lane;
        const __m256 zero = _mm256_load_ps(b.work.zero + lane), scale = _mm256_load_ps(b.work.scale + lane);
        const __m256 t = _mm256_fnmadd_ps(zero, sum, _mm256_cvtepi32_ps(total)), old = _mm256_load_ps(acc);
        if (grouped)
          _mm256_store_ps(acc, _mm256_fmadd_ps(wide ? _mm256_mul_ps(t, x_scale) : t, scale, old));
        else
          _mm256_store_ps(acc, _mm256_fmadd_ps(t, x_scale, old));
      }
    }
  }
}

/* The end of a long step: its integer sums into fp32. */
void end_step(const Block& b, int64_t begin, int64_t end) {
  const trirun_act& act = *b.job.act;
  for (int64_t row = 0; row < b.rows; ++row) {
    int32_t x_sum = 0;
    for (int64_t i = begin / 32; i < end / 32; ++i) x_sum += act.sums[(b.first + row) * (act.k / 32) + i];
    const __m256 sum = _mm256_set1_ps(static_cast<float>(x_sum));
    for (int lane = 0; lane < 64; lane += 8) {
      const __m256i dot = _mm256_load_si256(reinterpret_cast<const __m256i*>(b.dots + 64 * row + lane));
      const __m256 t = _mm256_fnmadd_ps(_mm256_load_ps(b.work.zero + lane), sum, _mm256_cvtepi32_ps(dot));
      float* acc = b.acc + 64 * row + lane;
      _mm256_store_ps(acc, _mm256_add_ps(_mm256_load_ps(acc), t));
    }
  }
}

TRIRUN_INLINE void store8(void* y, int dtype, int64_t i, int64_t left, __m256 value) {
  if (left >= 8 && dtype == TRIRUN_F32) {
    _mm256_storeu_ps(static_cast<float*>(y) + i, value);
  } else if (left >= 8 && dtype == TRIRUN_F16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(y) + i),
                     _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
  } else {
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, value);
    for (int64_t c = 0; c < left && c < 8; ++c) store_number(y, dtype, i + c, lanes[c]);
  }
}

void finish(const Block& b) {
  const Int2Job& job = b.job;
  for (int64_t row = 0; row < b.rows; ++row) {
    char* y = static_cast<char*>(job.y) + (b.first + row) * job.ldy * bytes_of(job.dtype);
    for (int j = 0; j < 4; ++j) {
      __m256 value[2];
      for (int half = 0; half < 2; ++half) {
        const int lane = 16 * j + 8 * half;
        value[half] = _mm256_load_ps(b.acc + 64 * row + lane);
        const float x_scale = job.act->act_bits == 8 ? job.act->scales[b.first + row] : 0.0f;
        if (job.act->act_bits == 8) value[half] = _mm256_mul_ps(value[half], _mm256_set1_ps(x_scale));
        if (job.w->group_size < 0) value[half] = _mm256_mul_ps(value[half], _mm256_load_ps(b.work.scale + lane));
      }
      // Dword 2r + h goes to column 8h + r.
      const __m256 h[2] = {_mm256_shuffle_ps(value[0], value[1], 0x88), _mm256_shuffle_ps(value[0], value[1], 0xdd)};
      for (int i = 0; i < 2; ++i) {
        const int64_t column = 64 * b.n_tile + 16 * j + 8 * i, left = job.n - column;
        if (left <= 0) break;
        __m256 out = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(h[i]), 0xd8));
        if (job.bias) {
          alignas(32) float bias[8] = {};
          for (int64_t c = 0; c < left && c < 8; ++c) bias[c] = load_number(job.bias, job.dtype, column + c);
          out = _mm256_add_ps(out, _mm256_load_ps(bias));
        }
        store8(y, job.dtype, column, left, out);
      }
    }
  }
}

template <bool wide>
void multiply_tile(const Block& b) {
  const trirun_int2& w = *b.job.w;
  const int64_t step = step_of(w, wide ? 16 : 8), span = step < kPanelK ? step : kPanelK;
  const bool partial = step > kPanelK;
  const auto load_group = [&](int64_t group) {
    load_tile_values(w.scales + group * w.n + 64 * b.n_tile, b.work.scale);
    if (w.zeros) return load_tile_values(w.zeros + group * w.n + 64 * b.n_tile, b.work.zero);
    for (float& zero : b.work.zero) zero = w.zero;
  };
  memset(b.acc, 0, static_cast<size_t>(b.rows) * 256);
  if (w.group_size < 0) load_group(0);
  for (int64_t k = 0; k < w.k; k += kPanelK) {
    if (partial && k % step == 0) memset(b.dots, 0, static_cast<size_t>(b.rows) * 256);
    for (int64_t i = 0; i < kPanelK; i += 32)
      unpack_block(w.words + (b.n_tile * (w.k / 32) + (k + i) / 32) * 128, b.work.codes + i / 4);
    for (int64_t at = 0; at < kPanelK; at += span) {
      if (w.group_size > 0) load_group((k + at) / step);
      int64_t row = 0;
      if (!wide)
        for (; row + 2 <= b.rows; row += 2) multiply<wide, wide ? 1 : 2>(b, k, at, span, partial, row);
      for (; row < b.rows; ++row) multiply<wide, 1>(b, k, at, span, partial, row);
    }
    if (partial && ((k + kPanelK) % step == 0 || k + kPanelK == w.k)) end_step(b, k / step * step, k + kPanelK);
  }
  finish(b);
}

bool int2_gemm(const Int2Job& job, int64_t begin, int64_t end) {
  const int64_t most = job.act->m < kRows ? job.act->m : kRows;
  char* memory = static_cast<char*>(scratch(kScratchKernel, sizeof(Workspace) + 2 * most * 256));
  if (!memory) return false;
  Workspace& work = *reinterpret_cast<Workspace*>(memory);
  int32_t* dots = reinterpret_cast<int32_t*>(memory + sizeof(Workspace));
  for (int64_t first = 0; first < job.act->m; first += most) {
    const int64_t rows = job.act->m - first < most ? job.act->m - first : most;
    for (int64_t s = begin; s < end; ++s) {
      const Block block = {job, s, first, rows, work, dots, reinterpret_cast<float*>(dots + 64 * most)};
      if (job.act->act_bits == 8)
        multiply_tile<false>(block);
      else
        multiply_tile<true>(block);
    }
  }
  return true;
}

}  // namespace

const Isa kAvx2 = {"avx2", quantize_avx2, int2_gemm, nullptr};

}  // namespace trirun
#else
namespace trirun {
const Isa kAvx2 = {};
}
#endif
