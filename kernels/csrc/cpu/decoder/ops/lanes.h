/* Sixteen fp32 lanes on every instruction set, for the decoder's element-wise and attention code.
 *
 * The code that uses them is written once and compiled per instruction set. There are always sixteen lanes (one
 * AVX-512 register, two AVX2 registers, or an array) and every multiply-add is fused, so all builds add the same
 * numbers in the same order and agree bit for bit. Everything is in an unnamed namespace: a copy compiled with one
 * instruction set's flags must never serve another's.
 */
#ifndef TRIRUN_CPU_DECODER_OPS_LANES_H
#define TRIRUN_CPU_DECODER_OPS_LANES_H

#include <stdint.h>
#include <string.h>

#include "cpu/common/numbers.h"

#if defined(__AVX2__)
/* GCC 12 sees its own headers' undefined-on-purpose registers as a mistake (GCC bug 105593). */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>
#endif

namespace trirun {
namespace {

constexpr int kLanes = 16;

/* The upper half of an fp32, told apart from fp16 by its type. */
struct Bfloat {
  uint16_t bits;
};

#if defined(__AVX512F__)

struct Lanes {
  __m512 v;
};
inline Lanes splat(float x) { return {_mm512_set1_ps(x)}; }
inline Lanes load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Lanes load(const uint16_t* half) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(half)))};
}
inline Lanes load(const Bfloat* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
inline Lanes load_first(const float* p, int count) {
  return {_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), p)};
}
inline void store(float* p, Lanes a) { _mm512_storeu_ps(p, a.v); }
inline void store(uint16_t* half, Lanes a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(half), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline void store_first(float* p, Lanes a, int count) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1u << count) - 1), a.v);
}
inline Lanes operator+(Lanes a, Lanes b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Lanes operator-(Lanes a, Lanes b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Lanes operator*(Lanes a, Lanes b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Lanes operator/(Lanes a, Lanes b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Lanes max(Lanes a, Lanes b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Lanes round_even(Lanes a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
/* a * 2^n for integral n in -126..127. */
inline Lanes scale_by_power(Lanes a, Lanes n) {
  __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127)), 23);
  return a * Lanes{_mm512_castsi512_ps(bits)};
}
/* The first `count` lanes of a, `other` in the rest; count may be anything. */
inline Lanes keep_first(Lanes a, int count, float other) {
  uint32_t mask = count >= kLanes ? 0xffff : count <= 0 ? 0 : (1u << count) - 1;
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(mask), _mm512_set1_ps(other), a.v)};
}

#elif defined(__AVX2__)

struct Lanes {
  __m256 v[2];
};
inline Lanes splat(float x) { return {{_mm256_set1_ps(x), _mm256_set1_ps(x)}}; }
inline Lanes load(const float* p) { return {{_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}}; }
inline Lanes load(const uint16_t* half) {
  const __m128i* p = reinterpret_cast<const __m128i*>(half);
  return {{_mm256_cvtph_ps(_mm_loadu_si128(p)), _mm256_cvtph_ps(_mm_loadu_si128(p + 1))}};
}
inline Lanes load(const Bfloat* p) {
  Lanes a;
  for (int i = 0; i < 2; ++i) {
    __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
    a.v[i] = _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  return a;
}
inline void store(float* p, Lanes a) {
  _mm256_storeu_ps(p, a.v[0]);
  _mm256_storeu_ps(p + 8, a.v[1]);
}
inline void store(uint16_t* half, Lanes a) {
  __m128i* p = reinterpret_cast<__m128i*>(half);
  _mm_storeu_si128(p, _mm256_cvtps_ph(a.v[0], _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(p + 1, _mm256_cvtps_ph(a.v[1], _MM_FROUND_TO_NEAREST_INT));
}
inline Lanes operator+(Lanes a, Lanes b) { return {{_mm256_add_ps(a.v[0], b.v[0]), _mm256_add_ps(a.v[1], b.v[1])}}; }
inline Lanes operator-(Lanes a, Lanes b) { return {{_mm256_sub_ps(a.v[0], b.v[0]), _mm256_sub_ps(a.v[1], b.v[1])}}; }
inline Lanes operator*(Lanes a, Lanes b) { return {{_mm256_mul_ps(a.v[0], b.v[0]), _mm256_mul_ps(a.v[1], b.v[1])}}; }
inline Lanes operator/(Lanes a, Lanes b) { return {{_mm256_div_ps(a.v[0], b.v[0]), _mm256_div_ps(a.v[1], b.v[1])}}; }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
  return {{_mm256_fmadd_ps(a.v[0], b.v[0], c.v[0]), _mm256_fmadd_ps(a.v[1], b.v[1], c.v[1])}};
}
inline Lanes max(Lanes a, Lanes b) { return {{_mm256_max_ps(a.v[0], b.v[0]), _mm256_max_ps(a.v[1], b.v[1])}}; }
inline Lanes min(Lanes a, Lanes b) { return {{_mm256_min_ps(a.v[0], b.v[0]), _mm256_min_ps(a.v[1], b.v[1])}}; }
inline Lanes round_even(Lanes a) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {{_mm256_round_ps(a.v[0], mode), _mm256_round_ps(a.v[1], mode)}};
}
inline Lanes scale_by_power(Lanes a, Lanes n) {
  Lanes power;
  for (int i = 0; i < 2; ++i) {
    __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n.v[i]), _mm256_set1_epi32(127));
    power.v[i] = _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
  }
  return a * power;
}
inline Lanes keep_first(Lanes a, int count, float other) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  Lanes kept;
  for (int i = 0; i < 2; ++i) {
    __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(count - 8 * i), index);
    kept.v[i] = _mm256_blendv_ps(_mm256_set1_ps(other), a.v[i], _mm256_castsi256_ps(mask));
  }
  return kept;
}

#else

struct Lanes {
  float v[kLanes];
};
#define TRIRUN_LANEWISE(expression)                         \
  Lanes out;                                                \
  for (int i = 0; i < kLanes; ++i) out.v[i] = (expression); \
  return out
inline Lanes splat(float x) { TRIRUN_LANEWISE(x); }
inline Lanes load(const float* p) { TRIRUN_LANEWISE(p[i]); }
inline Lanes load(const uint16_t* half) { TRIRUN_LANEWISE(half_to_float(half[i])); }
inline Lanes load(const Bfloat* p) { TRIRUN_LANEWISE(bfloat_to_float(p[i].bits)); }
inline void store(float* p, Lanes a) { memcpy(p, a.v, sizeof a.v); }
inline void store(uint16_t* half, Lanes a) {
  for (int i = 0; i < kLanes; ++i) half[i] = float_to_half(a.v[i]);
}
inline Lanes operator+(Lanes a, Lanes b) { TRIRUN_LANEWISE(a.v[i] + b.v[i]); }
inline Lanes operator-(Lanes a, Lanes b) { TRIRUN_LANEWISE(a.v[i] - b.v[i]); }
inline Lanes operator*(Lanes a, Lanes b) { TRIRUN_LANEWISE(a.v[i] * b.v[i]); }
inline Lanes operator/(Lanes a, Lanes b) { TRIRUN_LANEWISE(a.v[i] / b.v[i]); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { TRIRUN_LANEWISE(__builtin_fmaf(a.v[i], b.v[i], c.v[i])); }
inline Lanes max(Lanes a, Lanes b) { TRIRUN_LANEWISE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline Lanes min(Lanes a, Lanes b) { TRIRUN_LANEWISE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
inline Lanes round_even(Lanes a) { TRIRUN_LANEWISE(__builtin_rintf(a.v[i])); }
inline Lanes scale_by_power(Lanes a, Lanes n) {
  TRIRUN_LANEWISE(a.v[i] * float_of(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23));
}
inline Lanes keep_first(Lanes a, int count, float other) { TRIRUN_LANEWISE(i < count ? a.v[i] : other); }
#undef TRIRUN_LANEWISE

#endif

#if !defined(__AVX512F__)
/* `count` lanes from memory, zero in the rest. */
inline Lanes load_first(const float* p, int count) {
  float padded[kLanes] = {};
  memcpy(padded, p, sizeof(float) * static_cast<size_t>(count));
  return load(padded);
}
inline void store_first(float* p, Lanes a, int count) {
  float padded[kLanes];
  store(padded, a);
  memcpy(p, padded, sizeof(float) * static_cast<size_t>(count));
}
#endif

/* -infinity in the first `count` lanes, whatever they held, and a in the rest; count is any. The second operand
 * of min is what comes back for a NaN. */
inline Lanes drop_first(Lanes a, int count) {
  constexpr float kInfinity = __builtin_inff();
  return min(a, keep_first(splat(-kInfinity), count, kInfinity));
}

/* The lanes added as a tree, (i, i + 8), (i, i + 4), (i, i + 2), (0, 1), on every instruction set; likewise max_of. */
#if defined(__AVX2__)
inline __m128 halves_of(Lanes a, __m256 (*join)(__m256, __m256), __m128 (*join_quads)(__m128, __m128)) {
#if defined(__AVX512F__)
  const __m256 low = _mm512_castps512_ps256(a.v);
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
#else
  const __m256 low = a.v[0], high = a.v[1];
#endif
  const __m256 eight = join(low, high);
  const __m128 four = join_quads(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = join_quads(four, _mm_movehl_ps(four, four));
  return join_quads(two, _mm_movehdup_ps(two));
}
inline float sum_of(Lanes a) {
  return _mm_cvtss_f32(halves_of(
      a, [](__m256 x, __m256 y) { return _mm256_add_ps(x, y); }, [](__m128 x, __m128 y) { return _mm_add_ps(x, y); }));
}
inline float max_of(Lanes a) {
  return _mm_cvtss_f32(halves_of(
      a, [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); }, [](__m128 x, __m128 y) { return _mm_max_ps(x, y); }));
}
#else
inline float sum_of(Lanes a) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] += a.v[i + width];
  return a.v[0];
}
inline float max_of(Lanes a) {
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) a.v[i] = a.v[i] > a.v[i + width] ? a.v[i] : a.v[i + width];
  return a.v[0];
}
#endif

/* 2^x for x <= 127; exactly 0 for x <= -126; NaN for NaN. Taylor's series of 2^f = e^(f ln 2) for |f| <= 1/2, to the
 * term (f ln 2)^7 / 7!: the first one left out is below 6e-9. */
inline Lanes exp2(Lanes x) {
  /* The second operand of max is what comes back for a NaN. */
  Lanes bounded = max(splat(-126.0f), x);
  Lanes whole = round_even(bounded), f = bounded - whole;
  Lanes y = splat(1.5252734e-5f);
  y = fma(y, f, splat(1.5403530e-4f));
  y = fma(y, f, splat(1.3333558e-3f));
  y = fma(y, f, splat(9.6181291e-3f));
  y = fma(y, f, splat(5.5504109e-2f));
  y = fma(y, f, splat(2.4022651e-1f));
  y = fma(y, f, splat(6.9314718e-1f));
  y = fma(y, f, splat(1.0f));
  /* A masked score is -infinity and must weigh exactly 0, not 2^-126. */
  return scale_by_power(y, whole) - splat(0x1p-126f);
}

/* cap * tanh(x / cap), as tanh(y) = 1 - 2 / (e^(2y) + 1); inverse: 1 / cap. */
inline Lanes softcap(Lanes x, float cap, float inverse) {
  constexpr float kTwoLog2e = 2.88539008f;
  Lanes power = min(splat(126.0f), x * splat(inverse * kTwoLog2e));
  return splat(cap) - splat(2 * cap) / (exp2(power) + splat(1.0f));
}

}  // namespace
}  // namespace trirun
#endif
