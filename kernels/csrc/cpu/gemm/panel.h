/* The loop nest of products with many rows of x, shared by the AVX-512 instruction sets. A panel, one k tile of one
 * n tile, is transposed and masked into L1 once and then meets every row of a block of x. What differs is the inner
 * product:
 *
 *   struct Multiply {
 *     static constexpr int64_t kPanelK;                      // k of a panel: a multiple of 128
 *     // Memory for, and the making of, a copy of the limbs in an order of its own; planes = rows * limbs per value.
 *     static int64_t prepared_bytes(int64_t planes, int64_t k);
 *     static void prepare(const int8_t* limbs, int64_t planes, int64_t k, int8_t* prepared);
 *     static void begin(int64_t planes, int64_t step);       // before the panels of a block of rows
 *     template <Mode mode> static void multiply(const Panel& panel);
 *     static void end();
 *   };
 */
#ifndef TRIRUN_CPU_PANEL_H
#define TRIRUN_CPU_PANEL_H

#include <string.h>

#include "tile64_avx512.h"
#include "cpu/common/memory.h"

namespace trirun {
namespace {

/* One unpacked k tile of an n tile, and the rows of x it meets. */
struct Panel {
  /* Masked codes, [columns/64][row block j][16 quads][dword 2r + h]: tiles of 1 KiB that AMX takes as they are. */
  const uint8_t* codes;
  int64_t columns;          /* of k in the panel */
  int64_t step;             /* columns per step of the fp32 sum; at least `columns` for kLong8 */
  const StepValues* values; /* [columns/step] */
  const int8_t* limbs;      /* of the first row, at the panel's first column */
  const int8_t* prepared;   /* the limbs as Multiply::prepare left them, from the panel's first column on */
  int64_t k;                /* bytes from one plane of limbs to the next (high to low, or row to row) */
  int64_t rows;
  const float* x_sums;      /* [step][x_stride] of each row, from the panel's first step on */
  const float* x_scales;    /* the same of the 128 columns that the step is part of (16 bits) */
  int64_t x_stride;
  int32_t* dots;            /* kLong8: [row][64], sums so far; zeroed at the start of a step */
  float* acc;               /* [row][64] */
};

/* Bytes the weight is fetched ahead of its unpacking. */
constexpr int64_t kPanelAhead = 4096;

/* `columns` of k from a block on, to the form of Panel::codes. */
TRIRUN_INLINE void unpack_panel(const uint32_t* block, int64_t columns, uint8_t* codes) {
  for (int64_t i = 0; i < columns; i += 32, block += 128) {
    __m512i quads[8];
    transpose_block(block, quads);
    uint8_t* tile = codes + i / 64 * 4096 + i % 64 * 16;
    for (int u = 0; u < 8; ++u)
      for (int j = 0; j < 4; ++j)
        _mm512_store_si512(tile + 1024 * j + 64 * u, _mm512_and_si512(quads[u], code_mask(j)));
    // The n tile continues in memory, and the next one follows it: a panel ahead is always worth fetching.
    for (int line = 0; line < 8; ++line)
      _mm_prefetch(reinterpret_cast<const char*>(block) + kPanelAhead + 64 * line, _MM_HINT_T1);
  }
}

/* Per step and row, rows [begin, begin + rows): the sum of the limbs, an exact float, to sums[step * stride + row],
 * and for 16 bits the scale of its columns to scales, likewise. */
inline void gather_steps(const trirun_act& act, int64_t step, int64_t begin, int64_t rows, int64_t stride, float* sums,
                         float* scales) {
  const int64_t blocks = act.k / 32, per_step = step / 32;
  for (int64_t row = 0; row < rows; ++row) {
    const int32_t* parts = act.sums + (begin + row) * blocks;
    for (int64_t first = 0, s = 0; first < blocks; first += per_step, ++s) {
      int32_t sum = 0;
      for (int64_t i = first; i < first + per_step && i < blocks; ++i) sum += parts[i];
      sums[s * stride + row] = static_cast<float>(sum);
      if (act.act_bits == 16) scales[s * stride + row] = act.scales[(begin + row) * (blocks / 4) + first / 4];
    }
  }
}

/* Rows of x taken together: their limbs stay in half of a 1 MiB L2 while the n tiles pass by. */
inline int64_t row_block(const trirun_act& act) {
  int64_t rows = (int64_t{1} << 19) / (act.k * (act.act_bits / 8)) / 48 * 48;
  return rows < 48 ? 48 : rows > 240 ? 240 : rows;
}

/* The integer sums of a long step into fp32. */
TRIRUN_INLINE void add_long_step(float* acc, const int32_t* dots, const StepValues& values, float x_sum) {
  __m512i dot[4];
  TRIRUN_UNROLL
  for (int j = 0; j < 4; ++j) dot[j] = _mm512_load_si512(dots + 16 * j);
  add_step<kLong8>(acc, dot, values, x_sum, 0);
}

template <class Multiply, Mode mode>
bool gemm_panels(const Int2Job& job, int64_t begin, int64_t end) {
  const trirun_int2& w = *job.w;
  const trirun_act& act = *job.act;
  const int64_t planes = act.act_bits / 8, step = step_of(w, act.act_bits), steps = (w.k + step - 1) / step;
  const int64_t most_rows = act.m < row_block(act) ? act.m : row_block(act);

  constexpr int64_t kPanelK = Multiply::kPanelK;
  const int64_t codes_bytes = 64 * kPanelK, values_bytes = kPanelK / 32 * sizeof(StepValues);
  const int64_t rows_bytes = (most_rows + 15) / 16 * 16 * 256;  // 64 fp32 or int32 per row
  const int64_t prepared_bytes = Multiply::prepared_bytes(most_rows * planes, w.k);
  char* memory = static_cast<char*>(scratch(
      kScratchKernel, codes_bytes + values_bytes + 2 * rows_bytes + prepared_bytes + 2 * most_rows * steps * 4));
  if (!memory) return false;
  uint8_t* codes = reinterpret_cast<uint8_t*>(memory);
  StepValues* values = reinterpret_cast<StepValues*>(memory + codes_bytes);
  int32_t* dots = reinterpret_cast<int32_t*>(memory + codes_bytes + values_bytes);
  float* acc = reinterpret_cast<float*>(dots) + rows_bytes / 4;
  int8_t* prepared = reinterpret_cast<int8_t*>(acc + rows_bytes / 4);
  float* x_sums = reinterpret_cast<float*>(prepared + prepared_bytes);
  float* x_scales = x_sums + most_rows * steps;

  for (int64_t first = 0; first < act.m; first += most_rows) {
    const int64_t rows = act.m - first < most_rows ? act.m - first : most_rows;
    const int8_t* limbs = act.limbs + first * planes * act.k;
    gather_steps(act, step, first, rows, most_rows, x_sums, x_scales);
    Multiply::prepare(limbs, rows * planes, act.k, prepared);
    Multiply::begin(rows * planes, step);
    for (int64_t n_tile = begin; n_tile < end; ++n_tile) {
      // A single long step goes from its integers to y without a stop in memory.
      const bool straight = mode == kLong8 && steps == 1;
      if (!straight) memset(acc, 0, static_cast<size_t>(rows) * 256);
      if (!is_grouped(mode)) load_step(w, n_tile, 0, values[0]);
      for (int64_t k = 0, columns; k < w.k; k += columns) {
        columns = w.k - k < kPanelK ? w.k - k : kPanelK;
        if (mode == kLong8 && k % kLongStep == 0) memset(dots, 0, static_cast<size_t>(rows) * 256);
        unpack_panel(w.words + (n_tile * (w.k / 32) + k / 32) * 128, columns, codes);
        if (is_grouped(mode))
          for (int64_t i = 0; i < columns / step; ++i) load_step(w, n_tile, k / step + i, values[i]);
        else if (mode == kChannel16 && k == 0)
          for (int64_t i = 1; i < kPanelK / step; ++i) values[i] = values[0];
        const int64_t at = k / step * most_rows;
        Multiply::template multiply<mode>({codes, columns, step, values, limbs + k, prepared + 16 * k, act.k, rows,
                                           x_sums + at, x_scales + at, most_rows, dots, acc});
        if (mode == kLong8 && !straight && ((k + columns) % kLongStep == 0 || k + columns == w.k))
          for (int64_t row = 0; row < rows; ++row)
            add_long_step(acc + 64 * row, dots + 64 * row, values[0], x_sums[at + row]);
      }
      for (int64_t row = 0; row < rows; ++row) {
        alignas(64) float sum[64] = {};
        if (straight) add_long_step(sum, dots + 64 * row, values[0], x_sums[row]);
        finish_row<mode>(job, n_tile, first + row, straight ? sum : acc + 64 * row, values[0]);
      }
    }
    Multiply::end();
  }
  return true;
}

inline Mode mode_of(const Int2Job& job) {
  const bool grouped = job.w->group_size > 0;
  return job.act->act_bits == 8 ? (grouped ? kGroup8 : kLong8) : grouped ? kGroup16 : kChannel16;
}

template <class Multiply>
bool gemm_panels(const Int2Job& job, int64_t begin, int64_t end) {
  switch (mode_of(job)) {
    case kLong8: return gemm_panels<Multiply, kLong8>(job, begin, end);
    case kGroup8: return gemm_panels<Multiply, kGroup8>(job, begin, end);
    case kChannel16: return gemm_panels<Multiply, kChannel16>(job, begin, end);
    default: return gemm_panels<Multiply, kGroup16>(job, begin, end);
  }
}

}  // namespace
}  // namespace trirun
#endif
