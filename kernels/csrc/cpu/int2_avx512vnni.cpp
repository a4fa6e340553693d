/* INT2 GEMM with AVX-512-VNNI. Up to four columns of digits (rows of x times their digit planes) meet the weight in
 * registers, at the speed of memory; more of them share the unpacked pieces of panel.h. */
#include "kernels.h"

#if defined(__AVX512VNNI__)
#include "panel.h"

namespace trirun {
namespace {

/* ---- few rows: decode ---------------------------------------------------------------------------------- */

/* Bytes the weight is fetched ahead of its use. */
constexpr int64_t kAhead = 2048;

/* dot[column][j] += the products of `blocks` blocks of the weight with the digits of each column. */
template <int columns>
TRIRUN_INLINE void add_blocks(const uint32_t* block, int64_t blocks, const int8_t* const digits[columns],
                              __m512i dot[columns][4]) {
  // The whole byte stands for j = 0, which saves its mask: q0 + 4 q1 + 16 q2 + 64 q3, and the rest is taken off at
  // the end. One column alone has too few sums to hide vpdpbusd's latency, so its quads alternate between two sets.
  constexpr int sets = columns == 1 ? 2 : 1;
  __m512i sum[sets][columns][4];
  TRIRUN_UNROLL
  for (int s = 0; s < sets; ++s)
    TRIRUN_UNROLL
    for (int c = 0; c < columns; ++c)
      TRIRUN_UNROLL
      for (int j = 0; j < 4; ++j) sum[s][c][j] = _mm512_setzero_si512();
  for (int64_t i = 0; i < blocks; ++i, block += 128) {
    TRIRUN_UNROLL
    for (int line = 0; line < 8; ++line)
      _mm_prefetch(reinterpret_cast<const char*>(block) + kAhead + 64 * line, _MM_HINT_T0);
    __m512i quads[8];
    transpose_block(block, quads);
    TRIRUN_UNROLL
    for (int u = 0; u < 8; ++u) {
      __m512i masked[4] = {quads[u]};
      TRIRUN_UNROLL
      for (int j = 1; j < 4; ++j) masked[j] = _mm512_and_si512(quads[u], code_mask(j));
      TRIRUN_UNROLL
      for (int c = 0; c < columns; ++c) {
        int32_t four;
        memcpy(&four, digits[c] + 32 * i + 4 * u, 4);
        const __m512i x = _mm512_set1_epi32(four);
        TRIRUN_UNROLL
        for (int j = 0; j < 4; ++j) sum[u % sets][c][j] = _mm512_dpbusd_epi32(sum[u % sets][c][j], masked[j], x);
      }
    }
  }
  TRIRUN_UNROLL
  for (int c = 0; c < columns; ++c) {
    __m512i rest = _mm512_setzero_si512();
    TRIRUN_UNROLL
    for (int j = 1; j < 4; ++j) {
      __m512i part = sets == 2 ? _mm512_add_epi32(sum[0][c][j], sum[sets - 1][c][j]) : sum[0][c][j];
      dot[c][j] = part;
      rest = _mm512_add_epi32(rest, part);
    }
    __m512i all = sets == 2 ? _mm512_add_epi32(sum[0][c][0], sum[sets - 1][c][0]) : sum[0][c][0];
    dot[c][0] = _mm512_sub_epi32(all, rest);
  }
}

/* `rows` rows of x from `row` on, one strip. x_sums: [rows][steps]. */
template <Mode mode, int rows>
TRIRUN_INLINE void decode_strip(const Int2Job& job, int64_t strip, int64_t row, const float* x_sums, int64_t steps) {
  const trirun_int2& w = *job.w;
  const trirun_act& act = *job.act;
  constexpr int planes = is_wide(mode) ? 2 : 1, columns = rows * planes;
  const int64_t step = step_of(w, act.act_bits);
  const uint32_t* words = w.words + strip * (w.k / 32) * 128;
  const int8_t* digits[columns];
  TRIRUN_UNROLL
  for (int c = 0; c < columns; ++c) digits[c] = act.digits + (row * planes + c) * act.k;
  alignas(64) float acc[rows][64] = {};
  StepValues values;
  if (!is_grouped(mode)) load_step(w, strip, 0, values);

  for (int64_t s = 0; s < steps; ++s) {
    const int64_t k = s * step, blocks = (w.k - k < step ? w.k - k : step) / 32;
    __m512i dot[columns][4];
    add_blocks<columns>(words + k * 4, blocks, digits, dot);
    if (is_grouped(mode)) {
      load_step(w, strip, s, values);
      // Scales of one strip lie a whole row apart, out of reach of the hardware's prefetch.
      const uint16_t* next = w.scales + (s + kAhead / (4 * step) + 1) * w.n + 64 * strip;
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T0);
      _mm_prefetch(reinterpret_cast<const char*>(next + 32), _MM_HINT_T0);
    }
    for (int i = 0; i < rows; ++i) {
      if (is_wide(mode))
        TRIRUN_UNROLL
        for (int j = 0; j < 4; ++j)
          dot[i * planes][j] =
              _mm512_add_epi32(_mm512_slli_epi32(dot[i * planes][j], 8), dot[i * planes + planes - 1][j]);
      const float x_scale = is_wide(mode) ? act.scales[(row + i) * (act.k / 128) + k / 128] : 0;
      add_step<mode>(acc[i], dot[i * planes], values, x_sums[i * steps + s], x_scale);
    }
    TRIRUN_UNROLL
    for (int c = 0; c < columns; ++c) digits[c] += step;
  }
  for (int i = 0; i < rows; ++i) finish_row<mode>(job, strip, row + i, acc[i], values);
}

template <Mode mode, int rows>
bool decode(const Int2Job& job, int64_t begin, int64_t end) {
  const int64_t step = step_of(*job.w, job.act->act_bits), steps = (job.w->k + step - 1) / step;
  float* x_sums = static_cast<float*>(scratch(kScratchKernel, rows * steps * 4));
  if (!x_sums) return false;
  sum_steps(*job.act, step, 0, rows, x_sums, steps);
  for (int64_t strip = begin; strip < end; ++strip) decode_strip<mode, rows>(job, strip, 0, x_sums, steps);
  return true;
}

template <Mode mode>
bool decode(const Int2Job& job, int64_t begin, int64_t end) {
  switch (job.act->m) {
    case 1: return decode<mode, 1>(job, begin, end);
    case 2: return decode<mode, 2>(job, begin, end);
    case 3:
      if (!is_wide(mode)) return decode<mode, is_wide(mode) ? 1 : 3>(job, begin, end);
      break;
    case 4:
      if (!is_wide(mode)) return decode<mode, is_wide(mode) ? 1 : 4>(job, begin, end);
      break;
  }
  return false;
}

/* ---- many rows: prefill -------------------------------------------------------------------------------- */

struct MultiplyVnni {
  /* 64 rows of them take half of a 32 KiB L1. */
  static constexpr int64_t kColumns = 256;

  static int64_t prepared_bytes(int64_t, int64_t) { return 0; }
  static void prepare(const int8_t*, int64_t, int64_t, int8_t*) {}
  static void begin(int64_t, int64_t) {}
  static void end() {}

  /* `rows` rows of x: every step of the piece. */
  template <Mode mode, int rows>
  static TRIRUN_INLINE void rows_of(const Piece& p, int64_t row) {
    constexpr int planes = is_wide(mode) ? 2 : 1, columns = rows * planes;
    const int8_t* digits[columns];
    TRIRUN_UNROLL
    for (int c = 0; c < columns; ++c) digits[c] = p.digits + (row * planes + c) * p.k;
    const int64_t span = mode == kLong8 ? p.columns : p.step;
    for (int64_t k = 0, s = 0; k < p.columns; k += span, ++s) {
      __m512i dot[columns][4];
      TRIRUN_UNROLL
      for (int c = 0; c < columns; ++c)
        TRIRUN_UNROLL
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
            memcpy(&four, digits[c] + i + 4 * u, 4);
            const __m512i x = _mm512_set1_epi32(four);
            TRIRUN_UNROLL
            for (int j = 0; j < 4; ++j) dot[c][j] = _mm512_dpbusd_epi32(dot[c][j], masked[j], x);
          }
        }
      }
      for (int i = 0; i < rows; ++i) {
        if (mode == kLong8) {
          TRIRUN_UNROLL
          for (int j = 0; j < 4; ++j) _mm512_storeu_si512(p.dots + 64 * (row + i) + 16 * j, dot[i][j]);
          continue;
        }
        if (is_wide(mode))
          TRIRUN_UNROLL
          for (int j = 0; j < 4; ++j)
            dot[i * planes][j] =
                _mm512_add_epi32(_mm512_slli_epi32(dot[i * planes][j], 8), dot[i * planes + planes - 1][j]);
        const float x_scale = is_wide(mode) ? p.x_scales[(row + i) * p.scale_stride + k / 128] : 0;
        add_step<mode>(p.acc + 64 * (row + i), dot[i * planes], p.values[s], p.x_sums[(row + i) * p.x_stride + s],
                       x_scale);
      }
    }
  }

  /* Six columns of digits by four row blocks fill 24 registers; four hold the codes. */
  template <Mode mode>
  static void piece(const Piece& p) {
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

bool int2_gemm(const Int2Job& job, int64_t begin, int64_t end) {
  if (job.act->m * (job.act->act_bits / 8) > 4) return panel<MultiplyVnni>(job, begin, end);
  switch (mode_of(job)) {
    case kLong8: return decode<kLong8>(job, begin, end);
    case kGroup8: return decode<kGroup8>(job, begin, end);
    case kChannel16: return decode<kChannel16>(job, begin, end);
    default: return decode<kGroup16>(job, begin, end);
  }
}

}  // namespace

void quantize_avx512(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t ldx, int64_t begin,
                     int64_t end);

const Isa kAvx512Vnni = {"avx512vnni", quantize_avx512, int2_gemm};

}  // namespace trirun
#else
namespace trirun {
const Isa kAvx512Vnni = {nullptr, nullptr, nullptr};
}
#endif
