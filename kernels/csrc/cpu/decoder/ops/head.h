/* The output head, as a checkpoint has it (`dense`) or in 8 bits: w ~ scale * (byte - 128) with a scale per row, x in
 * two int8 limbs with one scale, x = scale * (256 high + low).
 *
 * All sums of products are exact in int32 (255 * 128 * k < 2^31 up to k = 65,536), so the one rounding of an 8-bit
 * head's logit is the same on every instruction set, in any order. */
#ifndef TRIRUN_CPU_DECODER_OPS_HEAD_H
#define TRIRUN_CPU_DECODER_OPS_HEAD_H

#include <math.h>

#include "lanes.h"
#include "ops.h"
#include "cpu/gemm/quantize.h"
#if defined(__AVX512VNNI__)
#include "cpu/common/avx512.h"
#endif

namespace trirun {
namespace {

/* ---- fp32, fp16 and bf16 weights ------------------------------------------------------------------------ */

/* y[r][0, O) = x[r] . w[0, O) for R rows: every dot product is one chain of multiply-adds per lane. */
template <int R, int O, class W>
void dense_tile(const float* x, int64_t ldx, const W* w, int64_t k, float* y, int64_t ldy) {
  Lanes sum[R][O];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) sum[r][o] = splat(0);
  for (int64_t i = 0; i < k; i += kLanes) {
    Lanes weight[O];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) weight[o] = load(w + o * k + i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      Lanes value = load(x + r * ldx + i);
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) sum[r][o] = fma(value, weight[o], sum[r][o]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) y[r * ldy + o] = sum_of(sum[r][o]);
}

template <int O, class W>
void dense_columns(const float* x, int64_t ldx, int64_t m, const W* w, int64_t k, float* y, int64_t ldy) {
  int64_t r = 0;
  for (; r + 4 <= m; r += 4) dense_tile<4, O>(x + r * ldx, ldx, w, k, y + r * ldy, ldy);
  for (; r < m; ++r) dense_tile<1, O>(x + r * ldx, ldx, w, k, y + r * ldy, ldy);
}

template <class W>
void dense_as(const float* x, int64_t ldx, int64_t m, const W* w, int64_t k, float* y, int64_t ldy, int64_t begin,
              int64_t end) {
  constexpr int kOutputs = kTileLanes == 1 ? 2 : 6;
  int64_t o = begin;
  for (; o + kOutputs <= end; o += kOutputs) dense_columns<kOutputs>(x, ldx, m, w + o * k, k, y + o, ldy);
  for (; o < end; ++o) dense_columns<1>(x, ldx, m, w + o * k, k, y + o, ldy);
}

void dense(const float* x, int64_t ldx, int64_t m, const void* w, int dtype, int64_t k, float* y, int64_t ldy,
           int64_t begin, int64_t end) {
  if (dtype == TRIRUN_F32)
    dense_as(x, ldx, m, static_cast<const float*>(w), k, y, ldy, begin, end);
  else if (dtype == TRIRUN_F16)
    dense_as(x, ldx, m, static_cast<const uint16_t*>(w), k, y, ldy, begin, end);
  else
    dense_as(x, ldx, m, static_cast<const Bfloat*>(w), k, y, ldy, begin, end);
}

/* ---- 8-bit weights -------------------------------------------------------------------------------------- */

constexpr int64_t kHeadTileK = 64;  // bytes of a row taken at a time

/* The sum of f(x[i, i + 16)) as `join` makes it, in four parts that do not wait for each other. */
template <class F, class Join>
inline Lanes fold(const float* x, int64_t k, F&& f, Join&& join) {
  Lanes part[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= k; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) part[j] = join(f(load(x + i + j * kLanes)), part[j]);
  for (; i < k; i += kLanes) part[0] = join(f(load(x + i)), part[0]);
  return join(join(part[0], part[1]), join(part[2], part[3]));
}

float amax_of(const float* x, int64_t k) {
  return max_of(fold(x, k, [](Lanes a) { return max(a, splat(0) - a); }, [](Lanes a, Lanes b) { return max(b, a); }));
}

/* Whether a number of x is a NaN or infinite: zero times it is then a NaN. */
bool has_non_finite(const float* x, int64_t k) {
  return sum_of(fold(x, k, [](Lanes a) { return a * splat(0); }, [](Lanes a, Lanes b) { return a + b; })) != 0;
}

/* Limbs of sixteen numbers that are integers already, and what they add to the sums of each place. */
struct LimbSums {
#if defined(__AVX512F__)
  __m512i hi = _mm512_setzero_si512(), lo = _mm512_setzero_si512();
  inline void add(Lanes rounded, int8_t* high_out, int8_t* low_out) {
    const __m512i value = _mm512_cvtps_epi32(rounded.v);
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
    const __m512i low = _mm512_sub_epi32(value, _mm512_slli_epi32(high, 8));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high_out), _mm512_cvtepi32_epi8(high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low_out), _mm512_cvtepi32_epi8(low));
    hi = _mm512_add_epi32(hi, high);
    lo = _mm512_add_epi32(lo, low);
  }
  inline int32_t high_total() const { return _mm512_reduce_add_epi32(hi); }
  inline int32_t low_total() const { return _mm512_reduce_add_epi32(lo); }
#else
  int32_t hi = 0, lo = 0;
  inline void add(Lanes rounded, int8_t* high_out, int8_t* low_out) {
    float values[kLanes];
    store(values, rounded);
    for (int j = 0; j < kLanes; ++j) {
      const int32_t value = static_cast<int32_t>(values[j]), high = (value + 128) >> 8, low = value - 256 * high;
      high_out[j] = static_cast<int8_t>(high);
      low_out[j] = static_cast<int8_t>(low);
      hi += high;
      lo += low;
    }
  }
  inline int32_t high_total() const { return hi; }
  inline int32_t low_total() const { return lo; }
#endif
};

void head_limbs(const HeadInput& input, int64_t r, const float* x, int64_t k) {
  int8_t* hi = input.limbs + r * 2 * input.stride;
  int8_t* lo = hi + input.stride;
  if (has_non_finite(x, k)) {
    /* Every logit shall be a NaN. */
    memset(hi, 0, static_cast<size_t>(2 * input.stride));
    input.sums[2 * r] = input.sums[2 * r + 1] = 0;
    input.scales[r] = NAN;
    return;
  }
  const float amax = amax_of(x, k), range = amax > kAmaxFloor16 ? amax : kAmaxFloor16;
  const Lanes inverse = splat(kRange16 / range);
  LimbSums sums;
  for (int64_t i = 0; i < k; i += kLanes) sums.add(round_even(load(x + i) * inverse), hi + i, lo + i);
  memset(hi + k, 0, static_cast<size_t>(input.stride - k));
  memset(lo + k, 0, static_cast<size_t>(input.stride - k));
  input.sums[2 * r] = sums.high_total();
  input.sums[2 * r + 1] = sums.low_total();
  input.scales[r] = range / kRange16;
}

void head_bytes(uint8_t* out, float* scale, const float* x, int64_t k, int64_t stride) {
  const float amax = amax_of(x, k), range = amax > kAmaxFloor16 ? amax : kAmaxFloor16;
  const Lanes inverse = splat(kRange8 / range);
  for (int64_t i = 0; i < k; i += kLanes) {
    float rounded[kLanes];
    store(rounded, round_even(load(x + i) * inverse));
    for (int j = 0; j < kLanes; ++j) out[i + j] = static_cast<uint8_t>(static_cast<int32_t>(rounded[j]) + 128);
  }
  memset(out + k, 128, static_cast<size_t>(stride - k));
  *scale = range / kRange8;
}

/* The sums of bytes * limbs over a row, for R rows of x and O outputs, high and low limbs apart. */
template <int R, int O>
struct Products {
#if defined(__AVX512VNNI__)
  __m512i sum[R][O][2];
  inline void clear() {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) sum[r][o][0] = sum[r][o][1] = _mm512_setzero_si512();
  }
  inline void add(const uint8_t* w, int64_t stride, const int8_t* limbs) {
    __m512i weight[O];
#pragma GCC unroll 8
    for (int o = 0; o < O; ++o) weight[o] = _mm512_loadu_si512(w + o * stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int plane = 0; plane < 2; ++plane) {
        const __m512i limb = _mm512_loadu_si512(limbs + (2 * r + plane) * stride);
#pragma GCC unroll 8
        for (int o = 0; o < O; ++o)
          /* In place: with the intrinsic, GCC moves sums from register to register, and out of them. */
          asm("vpdpbusd %2, %1, %0" : "+v"(sum[r][o][plane]) : "v"(weight[o]), "v"(limb));
      }
  }
  inline int32_t total(int r, int o, int plane) const { return _mm512_reduce_add_epi32(sum[r][o][plane]); }
  /* Of four outputs together. */
  inline __m128i four_totals(int r, int plane) const {
    return join_lanes(AddLanes(), sum[r][0][plane], sum[r][1 % O][plane], sum[r][2 % O][plane], sum[r][3 % O][plane]);
  }
#elif defined(__AVX2__)
  __m256i sum[R][O][2];
  inline void clear() {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o) sum[r][o][0] = sum[r][o][1] = _mm256_setzero_si256();
  }
  inline void add(const uint8_t* w, int64_t stride, const int8_t* limbs) {
    for (int64_t part = 0; part < kHeadTileK; part += 16) {
      __m256i weight[O];
#pragma GCC unroll 8
      for (int o = 0; o < O; ++o)
        weight[o] = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + o * stride + part)));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
        for (int plane = 0; plane < 2; ++plane) {
          const int8_t* from = limbs + (2 * r + plane) * stride + part;
          /* Sixteen-bit products: the eight-bit instruction would saturate. */
          const __m256i limb = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#pragma GCC unroll 8
          for (int o = 0; o < O; ++o)
            sum[r][o][plane] = _mm256_add_epi32(sum[r][o][plane], _mm256_madd_epi16(weight[o], limb));
        }
    }
  }
  inline int32_t total(int r, int o, int plane) const {
    int32_t lane[8], all = 0;
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(lane), sum[r][o][plane]);
    for (int i = 0; i < 8; ++i) all += lane[i];
    return all;
  }
#else
  int32_t sum[R][O][2];
  inline void clear() { memset(sum, 0, sizeof sum); }
  inline void add(const uint8_t* w, int64_t stride, const int8_t* limbs) {
    for (int r = 0; r < R; ++r)
      for (int plane = 0; plane < 2; ++plane)
        for (int o = 0; o < O; ++o) {
          const uint8_t* weight = w + o * stride;
          const int8_t* limb = limbs + (2 * r + plane) * stride;
          for (int i = 0; i < kHeadTileK; ++i) sum[r][o][plane] += weight[i] * limb[i];
        }
  }
  inline int32_t total(int r, int o, int plane) const { return sum[r][o][plane]; }
#endif
};

template <int R, int O>
void head_tile(const HeadInput& input, int64_t r, const uint8_t* w, const float* scales, float* y, int64_t ldy) {
  Products<R, O> products;
  products.clear();
  const int8_t* limbs = input.limbs + r * 2 * input.stride;
  for (int64_t i = 0; i < input.stride; i += kHeadTileK) {
    products.add(w + i, input.stride, limbs + i);
    /* The rows that come next, while these are multiplied. */
    for (int o = 0; o < O; ++o) __builtin_prefetch(w + (O + o) * input.stride + i, 0, 2);
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i) {
    const int32_t* sums = input.sums + 2 * (r + i);
    /* byte = weight + 128 */
    const int64_t excess = int64_t{128} * (int64_t{256} * sums[0] + sums[1]);
    float* out = y + (r + i) * ldy;
#if defined(__AVX512VNNI__)
    if (O == 4) {
      const __m256i hi = _mm256_cvtepi32_epi64(products.four_totals(i, 0));
      const __m256i lo = _mm256_cvtepi32_epi64(products.four_totals(i, 1));
      const __m256i dot = _mm256_sub_epi64(_mm256_add_epi64(_mm256_slli_epi64(hi, 8), lo), _mm256_set1_epi64x(excess));
      const __m128 scale = _mm_mul_ps(_mm_loadu_ps(scales), _mm_set1_ps(input.scales[r + i]));
      _mm_storeu_ps(out, _mm_mul_ps(_mm256_cvtepi64_ps(dot), scale));
      continue;
    }
#endif
    for (int o = 0; o < O; ++o) {
      const int64_t dot = int64_t{256} * products.total(i, o, 0) + products.total(i, o, 1) - excess;
      out[o] = static_cast<float>(dot) * (scales[o] * input.scales[r + i]);
    }
  }
}

/* Rows [first, last) of the input by O outputs. */
template <int O>
void head_columns(const HeadInput& input, int64_t first, int64_t last, const uint8_t* w, const float* scales, float* y,
                  int64_t ldy) {
  int64_t r = first;
  for (; r + 3 <= last; r += 3) head_tile<3, O>(input, r, w, scales, y, ldy);
  for (; r < last; ++r) head_tile<1, O>(input, r, w, scales, y, ldy);
}

void head_int8(const HeadInput& input, int64_t m, const uint8_t* w, const float* scales, float* y, int64_t ldy,
               int64_t begin, int64_t end) {
#if defined(__AVX512F__)
  constexpr int kOutputs = 4;
#else
  constexpr int kOutputs = 2;
#endif
  /* Rows whose limbs fill half of L1 while the weights, which are in L2 after the first of them, pass by. */
  constexpr int64_t kLimbBytes = 24 << 10;
  const int64_t fit = kLimbBytes / (2 * input.stride) / 3 * 3, block = fit < 3 ? 3 : fit;
  for (int64_t first = 0; first < m; first += block) {
    const int64_t last = first + block < m ? first + block : m;
    int64_t o = begin;
    for (; o + kOutputs <= end; o += kOutputs)
      head_columns<kOutputs>(input, first, last, w + o * input.stride, scales + o, y + o, ldy);
    for (; o < end; ++o) head_columns<1>(input, first, last, w + o * input.stride, scales + o, y + o, ldy);
  }
}

}  // namespace
}  // namespace trirun
#endif
