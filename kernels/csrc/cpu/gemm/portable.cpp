/* Quantization and INT2 GEMM in plain C++, for any processor: the reference that every instruction set must match bit
 * for bit, and what runs where there is none. Correct first; rows of x share an unpacked panel, and the inner loop is
 * one that a compiler can vectorize. */
#include "quantize.h"

#include <math.h>

#include "cpu/common/memory.h"

namespace trirun {
namespace {

constexpr int kRows = 32;    // rows of x that share one unpacked panel of the weight
constexpr int kPanelK = 128;  // k columns unpacked at a time

struct Workspace {
  uint8_t codes[64][kPanelK];  // [row of the n tile][k in the order of the limbs]
  int32_t dot[kRows][64];
  float acc[kRows][64];
};

/* Position of column k of a block of 32 in the order (t, c, b). */
int limb_position(int k) {
  int c = k / 16, t = k % 8 / 2, b = k % 2 + 2 * (k % 16 / 8);
  return 8 * t + 4 * c + b;
}

void quantize(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t ldx, int64_t begin, int64_t end) {
  const int planes = act.act_bits / 8;
  constexpr int32_t kMost = static_cast<int32_t>(kRange16);
  for (int64_t row = begin; row < end; ++row) {
    int8_t* limbs = act.limbs + row * planes * act.k;
    int32_t* sums = act.sums + row * (act.k / 32);
    const int64_t span = act.act_bits == 8 ? act.k : 128;
    bool finite = true;
    for (int64_t first = 0; first < act.k; first += span) {
      float amax = 0;
      for (int64_t i = first; i < first + span && i < k; ++i) {
        float value = load_number(x, dtype, row * ldx + i);
        finite = finite && isfinite(value);
        amax = fmaxf(amax, fabsf(value));
      }
      float scale, inverse = 0;
      if (act.act_bits == 8) {
        scale = fmaxf(amax, kAmaxFloor8) / kRange8;
      } else {
        amax = fmaxf(amax, kAmaxFloor16);
        scale = amax / kRange16;
        inverse = kRange16 / amax;
      }
      act.scales[row * (act.k / span) + first / span] = finite ? scale : NAN;
      for (int64_t block = first; block < first + span; block += 32) {
        int32_t sum = 0;
        for (int i = 0; i < 32; ++i) {
          float value = finite && block + i < k ? load_number(x, dtype, row * ldx + block + i) : 0.0f;
          int8_t* limb = limbs + block + limb_position(i);
          if (act.act_bits == 8) {
            float rounded = nearbyintf(value / scale);
            *limb = static_cast<int8_t>(fminf(fmaxf(rounded, -128.0f), 127.0f));
            sum += *limb;
          } else {
            int32_t fixed = static_cast<int32_t>(nearbyintf(value * inverse));
            fixed = fixed > kMost ? kMost : fixed < -kMost ? -kMost : fixed;
            limb[act.k] = static_cast<int8_t>(fixed & 0xff);
            *limb = static_cast<int8_t>((fixed - limb[act.k]) >> 8);
            sum += fixed;
          }
        }
        sums[block / 32] = sum;
      }
    }
    // With 128-column scales, one that was written before the first NaN was met must fall too.
    if (!finite)
      for (int64_t i = 0; i < act.k / span; ++i) act.scales[row * (act.k / span) + i] = NAN;
  }
}

/* One 512-byte block of tile64 to codes[64][32] of the given row stride. */
void unpack_block(const uint32_t* block, uint8_t (*codes)[kPanelK]) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(block);
  for (int h = 0; h < 2; ++h)
    for (int r = 0; r < 8; ++r)
      for (int quad = 0; quad < 8; ++quad)
        for (int b = 0; b < 4; ++b) {
          uint8_t packed = bytes[64 * r + 8 * quad + 4 * h + b];
          for (int j = 0; j < 4; ++j) codes[16 * j + 8 * h + r][4 * quad + b] = packed >> 2 * j & 3;
        }
}

int32_t dot_product(const uint8_t* codes, const int8_t* limbs, int64_t count) {
  int32_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += static_cast<int16_t>(codes[i]) * static_cast<int16_t>(limbs[i]);
  return sum;
}

/* Rows [row, row + rows) of y, columns of n tile s. */
void multiply_tile(const Int2Job& job, int64_t s, int64_t row, int rows, Workspace& work) {
  const trirun_int2& w = *job.w;
  const trirun_act& act = *job.act;
  const bool wide = act.act_bits == 16, grouped = w.group_size > 0;
  const int planes = act.act_bits / 8;
  const int64_t step = step_of(w, act.act_bits);
  memset(work.acc, 0, sizeof work.acc);

  for (int64_t first = 0; first < w.k; first += step) {
    const int64_t last = first + step < w.k ? first + step : w.k;
    memset(work.dot, 0, sizeof work.dot);
    for (int64_t k = first; k < last; k += kPanelK) {
      const int64_t width = last - k < kPanelK ? last - k : kPanelK;
      for (int64_t i = 0; i < width; i += 32)
        unpack_block(w.words + (s * (w.k / 32) + (k + i) / 32) * 128,
                     reinterpret_cast<uint8_t (*)[kPanelK]>(&work.codes[0][i]));
      for (int m = 0; m < rows; ++m) {
        const int8_t* limbs = act.limbs + (row + m) * planes * act.k + k;
        for (int n = 0; n < 64; ++n) {
          int32_t dot = dot_product(work.codes[n], limbs, width);
          work.dot[m][n] += wide ? 256 * dot + dot_product(work.codes[n], limbs + act.k, width) : dot;
        }
      }
    }
    const int64_t group = grouped ? first / w.group_size : 0;
    for (int m = 0; m < rows; ++m) {
      int32_t sum = 0;
      for (int64_t i = first / 32; i < last / 32; ++i) sum += act.sums[(row + m) * (act.k / 32) + i];
      const float x_scale = wide ? act.scales[(row + m) * (act.k / 128) + first / 128] : 1.0f;
      for (int n = 0; n < 64; ++n) {
        const int64_t stored = group * w.n + 64 * s + 8 * (n % 8) + 2 * (n / 16) + n % 16 / 8;
        const float zero = w.zeros ? half_to_float(w.zeros[stored]) : w.zero;
        const float t = fmaf(-zero, static_cast<float>(sum), static_cast<float>(work.dot[m][n]));
        float& acc = work.acc[m][n];
        if (grouped)
          acc = fmaf(wide ? t * x_scale : t, half_to_float(w.scales[stored]), acc);
        else
          acc = wide ? fmaf(t, x_scale, acc) : acc + t;
      }
    }
  }

  for (int m = 0; m < rows; ++m)
    for (int n = 0; n < 64 && 64 * s + n < job.n; ++n) {
      float value = work.acc[m][n];
      if (!wide) value *= act.scales[row + m];
      if (!grouped) value *= half_to_float(w.scales[64 * s + 8 * (n % 8) + 2 * (n / 16) + n % 16 / 8]);
      if (job.bias) value += load_number(job.bias, job.dtype, 64 * s + n);
      store_number(job.y, job.dtype, (row + m) * job.ldy + 64 * s + n, value);
    }
}

bool int2_gemm(const Int2Job& job, int64_t begin, int64_t end) {
  Workspace* work = static_cast<Workspace*>(scratch(kScratchKernel, sizeof(Workspace)));
  if (!work) return false;
  for (int64_t row = 0; row < job.act->m; row += kRows)
    for (int64_t s = begin; s < end; ++s)
      multiply_tile(job, s, row, static_cast<int>(job.act->m - row < kRows ? job.act->m - row : kRows), *work);
  return true;
}

}  // namespace

const Isa kPortable = {"portable", quantize, int2_gemm, nullptr};

}  // namespace trirun
