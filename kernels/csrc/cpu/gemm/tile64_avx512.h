/* The weight and the sums of AVX-512 products: the transposition of tile64's blocks, and the fp32 accumulation of
 * isa.h. In an unnamed namespace: every source has its own copy, compiled with its own flags.
 *
 * A 512-byte block of tile64 holds, as a matrix of 8-byte elements, lane rows r = 0..7 by quads of k u = 2t + c; an
 * element is the pair h = 0, 1 of words. Its 8 x 8 transpose gives one vector per quad, whose dword 2r + h is the four
 * k of that quad for rows 8h + r of all four row blocks j: one mask per j, and vpdpbusd against a broadcast of four
 * activations sums 16 rows without any reduction across lanes. Masked codes stand 4^j too high; powers of two are
 * exact in fp32, so the factor is taken back in the scales.
 */
#ifndef TRIRUN_CPU_TILE64_AVX512_H
#define TRIRUN_CPU_TILE64_AVX512_H

#include "isa.h"
#include "cpu/common/avx512.h"

namespace trirun {
namespace {

/* ---- the weight ---------------------------------------------------------------------------------------- */

/* One block to quads[u], dword 2r + h. Halves of two rows are joined while loading, which leaves 16 shuffles. */
TRIRUN_INLINE void transpose_block(const uint32_t* block, __m512i quads[8]) {
  const char* bytes = reinterpret_cast<const char*>(block);
  for (int half = 0; half < 2; ++half) {
    __m512i joined[2][2];  // [r / 4][r % 2]: rows r and r + 2 side by side
    for (int i = 0; i < 2; ++i)
      for (int odd = 0; odd < 2; ++odd) {
        const char* first = bytes + 64 * (4 * i + odd) + 32 * half;
        joined[i][odd] =
            _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(first))),
                               _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first + 128)), 1);
      }
    for (int high = 0; high < 2; ++high) {
      __m512i pairs[2];
      for (int i = 0; i < 2; ++i)
        pairs[i] = high ? _mm512_unpackhi_epi64(joined[i][0], joined[i][1])
                        : _mm512_unpacklo_epi64(joined[i][0], joined[i][1]);
      quads[4 * half + high] = _mm512_shuffle_i64x2(pairs[0], pairs[1], 0x88);
      quads[4 * half + high + 2] = _mm512_shuffle_i64x2(pairs[0], pairs[1], 0xdd);
    }
  }
}

TRIRUN_INLINE __m512i code_mask(int j) { return _mm512_set1_epi8(static_cast<char>(3 << 2 * j)); }

/* 64 stored values (scales or zeros) of an n tile, four vectors in the transposed order: dword 2r + h of vector j. */
TRIRUN_INLINE void load_tile_values(const uint16_t* stored, __m512 values[4]) {
  const __m512i low = _mm512_loadu_si512(stored), high = _mm512_loadu_si512(stored + 32);
  for (int j = 0; j < 4; ++j) {
    const __m512i index =
        _mm512_add_epi32(_mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0), _mm512_set1_epi32(j));
    values[j] = _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutex2var_epi32(low, index, high)));
  }
}

/* ---- the fp32 accumulation ------------------------------------------------------------------------------- */

/* How a step ends, from the activation width and whether the weight has groups. */
enum Mode { kLong8, kGroup8, kChannel16, kGroup16 };

constexpr bool is_wide(Mode mode) { return mode >= kChannel16; }
constexpr bool is_grouped(Mode mode) { return mode == kGroup8 || mode == kGroup16; }

/* What an n tile's 64 rows need at the end of one step: w_scale / 4^j and -zero * 4^j. */
struct alignas(64) StepValues {
  __m512 scale[4], zero[4];
};

constexpr float kPower[4] = {1, 4, 16, 64}, kInverse[4] = {1, 1.0f / 4, 1.0f / 16, 1.0f / 64};

TRIRUN_INLINE void load_step(const trirun_int2& w, int64_t n_tile, int64_t group, StepValues& values) {
  load_tile_values(w.scales + group * w.n + 64 * n_tile, values.scale);
  if (w.zeros) load_tile_values(w.zeros + group * w.n + 64 * n_tile, values.zero);
  for (int j = 0; j < 4; ++j) {
    values.scale[j] = _mm512_mul_ps(values.scale[j], _mm512_set1_ps(kInverse[j]));
    const __m512 zero = w.zeros ? values.zero[j] : _mm512_set1_ps(w.zero);
    values.zero[j] = _mm512_mul_ps(zero, _mm512_set1_ps(-kPower[j]));
  }
}

/* 16 sums of acc take in those of one step, of one row of x and one row block: dot = 4^j * sum(q * limb),
 * x_sum = float(sum(limb)), x_scale the 128 columns' scale (16 bits). */
template <Mode mode>
TRIRUN_INLINE void add_row_block(float* acc, __m512i dot, __m512 scale, __m512 zero, float x_sum, float x_scale) {
  const __m512 t = _mm512_fmadd_ps(zero, _mm512_set1_ps(x_sum), _mm512_cvtepi32_ps(dot));
  __m512 sum = _mm512_loadu_ps(acc);
  if (mode == kLong8) sum = _mm512_add_ps(sum, t);
  if (mode == kGroup8) sum = _mm512_fmadd_ps(t, scale, sum);
  if (mode == kChannel16) sum = _mm512_fmadd_ps(t, _mm512_set1_ps(x_scale), sum);
  if (mode == kGroup16) sum = _mm512_fmadd_ps(_mm512_mul_ps(t, _mm512_set1_ps(x_scale)), scale, sum);
  _mm512_storeu_ps(acc, sum);
}

/* All four row blocks. */
template <Mode mode>
TRIRUN_INLINE void add_step(float* acc, const __m512i dot[4], const StepValues& w, float x_sum, float x_scale) {
  TRIRUN_UNROLL
  for (int j = 0; j < 4; ++j) add_row_block<mode>(acc + 16 * j, dot[j], w.scale[j], w.zero[j], x_sum, x_scale);
}

/* The end of the sum: acc[64] to columns 64 * n_tile .. of y's row. */
template <Mode mode>
TRIRUN_INLINE void finish_row(const Int2Job& job, int64_t n_tile, int64_t row, const float* acc, const StepValues& w) {
  // Dword 2r + h goes to column 8h + r.
  const __m512i order = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  char* y = static_cast<char*>(job.y) + row * job.ldy * bytes_of(job.dtype);
  for (int j = 0; j < 4; ++j) {
    const int64_t column = 64 * n_tile + 16 * j, left = job.n - column;
    if (left <= 0) return;
    const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
    __m512 value = _mm512_loadu_ps(acc + 16 * j);
    if (!is_wide(mode)) value = _mm512_mul_ps(value, _mm512_set1_ps(job.act->scales[row]));
    if (!is_grouped(mode)) value = _mm512_mul_ps(value, w.scale[j]);
    value = _mm512_permutexvar_ps(order, value);
    if (job.bias) value = _mm512_add_ps(value, load16(job.bias, job.dtype, column, mask));
    store16(y, job.dtype, column, mask, value);
  }
}

}  // namespace
}  // namespace trirun
#endif
