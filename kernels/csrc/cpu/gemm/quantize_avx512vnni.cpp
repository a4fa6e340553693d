/* Activation quantization with AVX-512, limb for limb that of portable.cpp. Latency is what it fights: maxima of four
 * 128-column groups are found together, and 8-bit limbs come from a product with the reciprocal, a division only where
 * the two could differ. */
#include "quantize.h"

#if defined(__AVX512VNNI__)
#include <math.h>
#include <string.h>

#include "cpu/common/avx512.h"

namespace trirun {
namespace {

TRIRUN_INLINE __mmask16 tail_mask(int64_t i, int64_t k) {
  const int64_t left = k - i;
  return left >= 16 ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
}

/* Columns [i, i + 16) of a row of x. `whole`: fp32, and all of them are there. */
template <bool whole>
TRIRUN_INLINE __m512 load_columns(const void* x, int dtype, int64_t i, int64_t k) {
  return whole ? _mm512_loadu_ps(static_cast<const float*>(x) + i) : load16(x, dtype, i, tail_mask(i, k));
}

/* The largest magnitudes of x[first, last), lane by lane, as the bits of floats. */
template <bool whole>
TRIRUN_INLINE __m512i magnitudes(const void* x, int dtype, int64_t first, int64_t last) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  __m512i most[4];
  for (__m512i& m : most) m = _mm512_setzero_si512();
  for (int64_t i = first; i < last; i += 64)
    for (int part = 0; part < 4; ++part) {
      const int64_t at = i + 16 * part;
      __m512i bits = _mm512_castps_si512(load_columns<whole>(x, dtype, at, last));
      most[part] = _mm512_max_epu32(most[part], _mm512_and_si512(bits, magnitude));
    }
  return _mm512_max_epu32(_mm512_max_epu32(most[0], most[1]), _mm512_max_epu32(most[2], most[3]));
}

/* The largest magnitude of x[first, last) as the bits of a float; from kNotFinite up it is not finite. */
template <bool whole>
TRIRUN_INLINE uint32_t magnitude_bits(const void* x, int dtype, int64_t first, int64_t last) {
  return _mm512_reduce_max_epu32(magnitudes<whole>(x, dtype, first, last));
}

TRIRUN_INLINE __m512i round_to_int(__m512 value) {
  return _mm512_cvt_roundps_epi32(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* Two vectors of 32 int16, columns 0..63 as _mm512_packs_epi32 leaves them, to 64 limbs in the order (t, c, b) of two
 * blocks, saturated to int8. */
TRIRUN_INLINE __m512i order_limbs(__m512i first, __m512i second) {
  // The packs leave, in dword 4q + i, columns 16i + 4q .. + 3; the 16-bit pair p of it is number 8q + 2i + p. Limb
  // pair d = 0, 1 of (block, t, c) is columns 2t + 8d of i = 2 block + c: q = t / 2 + 2d, p = t % 2.
  const __m512i packed = _mm512_packs_epi16(first, second);
#define TRIRUN_PAIRS(block, t, c) \
  8 * ((t) / 2) + 2 * (2 * (block) + (c)) + (t) % 2, 8 * ((t) / 2 + 2) + 2 * (2 * (block) + (c)) + (t) % 2
#define TRIRUN_BLOCK(block)                                                                                   \
  TRIRUN_PAIRS(block, 0, 0), TRIRUN_PAIRS(block, 0, 1), TRIRUN_PAIRS(block, 1, 0), TRIRUN_PAIRS(block, 1, 1), \
      TRIRUN_PAIRS(block, 2, 0), TRIRUN_PAIRS(block, 2, 1), TRIRUN_PAIRS(block, 3, 0), TRIRUN_PAIRS(block, 3, 1)
  alignas(64) static constexpr int16_t kOrder[32] = {TRIRUN_BLOCK(0), TRIRUN_BLOCK(1)};
#undef TRIRUN_BLOCK
#undef TRIRUN_PAIRS
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), packed);
}

/* Sums of the four 32-limb blocks of 128 limbs. */
TRIRUN_INLINE __m128i block_sums(__m512i low, __m512i high) {
  const __m512i flip = _mm512_set1_epi8(-128), none = _mm512_setzero_si512();
  // Sums of eight limbs + 128; four of them make a block.
  __m512i a = _mm512_sad_epu8(_mm512_xor_si512(low, flip), none);
  __m512i b = _mm512_sad_epu8(_mm512_xor_si512(high, flip), none);
  __m512i sum = _mm512_add_epi64(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  sum = _mm512_add_epi64(sum, _mm512_shuffle_i64x2(sum, sum, 0xb1));
  sum = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 0, 0, 0, 0), sum);
  return _mm_sub_epi32(_mm256_castsi256_si128(_mm512_cvtepi64_epi32(sum)), _mm_set1_epi32(128 * 32));
}

/* 128 columns of 8-bit limbs from column i on, and their sums. */
template <bool whole>
TRIRUN_INLINE void limbs8(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t row, int64_t i,
                          __m512 divisor, __m512 inverse) {
  int8_t* limbs = act.limbs + row * act.k;
  __m512i ordered[2];
  for (int part = 0; part < 2; ++part) {
    // The limb is that of a true division. The product with the reciprocal is off by less than 3e-5 where quotients
    // reach 127: it gives another limb only if it lies that near to a tie, and only then there is a division.
    __m512 quotient[4], furthest = _mm512_setzero_ps();
    TRIRUN_UNROLL
    for (int q = 0; q < 4; ++q) {
      quotient[q] = _mm512_mul_ps(load_columns<whole>(x, dtype, i + 64 * part + 16 * q, k), inverse);
      const __m512 nearest = _mm512_roundscale_ps(quotient[q], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
      furthest = _mm512_max_ps(furthest, _mm512_abs_ps(_mm512_sub_ps(quotient[q], nearest)));
    }
    if (_mm512_cmp_ps_mask(furthest, _mm512_set1_ps(0.4999f), _CMP_GT_OQ))
      for (int q = 0; q < 4; ++q)
        quotient[q] = _mm512_div_ps(load_columns<whole>(x, dtype, i + 64 * part + 16 * q, k), divisor);
    ordered[part] = order_limbs(_mm512_packs_epi32(round_to_int(quotient[0]), round_to_int(quotient[1])),
                                _mm512_packs_epi32(round_to_int(quotient[2]), round_to_int(quotient[3])));
    _mm512_storeu_si512(limbs + i + 64 * part, ordered[part]);
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(act.sums + row * (act.k / 32) + i / 32),
                   block_sums(ordered[0], ordered[1]));
}

void quantize8(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t row) {
  const int64_t whole = dtype == TRIRUN_F32 ? k / 128 * 128 : 0;
  uint32_t amax = magnitude_bits<true>(x, dtype, 0, whole);
  const uint32_t rest = magnitude_bits<false>(x, dtype, whole, k);
  amax = amax > rest ? amax : rest;
  if (amax >= kNotFinite) {
    act.scales[row] = NAN;
    memset(act.limbs + row * act.k, 0, static_cast<size_t>(act.k));
    memset(act.sums + row * (act.k / 32), 0, static_cast<size_t>(act.k / 32 * 4));
    return;
  }
  const float scale = fmaxf(float_of(amax), kAmaxFloor8) / kRange8;
  act.scales[row] = scale;
  const __m512 divisor = _mm512_set1_ps(scale), inverse = _mm512_set1_ps(1.0f / scale);
  for (int64_t i = 0; i < whole; i += 128) limbs8<true>(act, x, dtype, k, row, i, divisor, inverse);
  for (int64_t i = whole; i < act.k; i += 128) limbs8<false>(act, x, dtype, k, row, i, divisor, inverse);
}

/* Sums of four vectors of 32 int16 each. */
TRIRUN_INLINE __m128i vector_sums(const __m512i v[4]) {
  const __m512i ones = _mm512_set1_epi16(1);
  return join_lanes(AddLanes(), _mm512_madd_epi16(v[0], ones), _mm512_madd_epi16(v[1], ones),
                    _mm512_madd_epi16(v[2], ones), _mm512_madd_epi16(v[3], ones));
}

/* 128 columns of 16-bit limbs from column i on, and their sums. */
template <bool whole>
TRIRUN_INLINE void limbs16(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t row, int64_t i,
                           __m512 inverse) {
  int8_t *high = act.limbs + row * 2 * act.k + i, *low = high + act.k;
  // 32 columns each. No value leaves +-32639, as two roundings move the largest by less than half: with 128 added,
  // which rounds to the upper limb, it is an int16 still.
  __m512i value[4];
  TRIRUN_UNROLL
  for (int q = 0; q < 4; ++q) {
    const __m512 first = load_columns<whole>(x, dtype, i + 32 * q, k);
    const __m512 second = load_columns<whole>(x, dtype, i + 32 * q + 16, k);
    value[q] =
        _mm512_packs_epi32(round_to_int(_mm512_mul_ps(first, inverse)), round_to_int(_mm512_mul_ps(second, inverse)));
  }
  TRIRUN_UNROLL
  for (int part = 0; part < 2; ++part) {
    __m512i upper[2], lower[2];
    TRIRUN_UNROLL
    for (int j = 0; j < 2; ++j) {
      const __m512i v = value[2 * part + j];
      upper[j] = _mm512_srai_epi16(_mm512_add_epi16(v, _mm512_set1_epi16(128)), 8);
      lower[j] = _mm512_sub_epi16(v, _mm512_slli_epi16(upper[j], 8));
    }
    _mm512_storeu_si512(high + 64 * part, order_limbs(upper[0], upper[1]));
    _mm512_storeu_si512(low + 64 * part, order_limbs(lower[0], lower[1]));
  }
  _mm_storeu_si128(reinterpret_cast<__m128i*>(act.sums + row * (act.k / 32) + i / 32), vector_sums(value));
}

/* Up to 512 columns of 16-bit limbs, [i, i + 128 groups), and their scales and sums; whether all are finite. Their
 * scales are found together: one after another, each would wait for the end of a chain of its own. */
template <bool whole>
TRIRUN_INLINE bool groups16(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t row, int64_t i,
                            int groups) {
  const __mmask8 there = static_cast<__mmask8>((1u << groups) - 1);
  __m512i most[4];
  for (int g = 0; g < 4; ++g) {
    const int64_t first = i + 128 * g, last = k < first + 128 ? k : first + 128;
    most[g] = g < groups ? magnitudes<whole>(x, dtype, first, last) : _mm512_setzero_si512();
  }
  const __m128i bits = join_lanes(MaxLanes(), most[0], most[1], most[2], most[3]);
  const bool finite = !_mm_cmpge_epu32_mask(bits, _mm_set1_epi32(static_cast<int32_t>(kNotFinite)));
  if (!finite) {
    memset(act.limbs + row * 2 * act.k + i, 0, static_cast<size_t>(128 * groups));
    memset(act.limbs + (row * 2 + 1) * act.k + i, 0, static_cast<size_t>(128 * groups));
    memset(act.sums + row * (act.k / 32) + i / 32, 0, static_cast<size_t>(16 * groups));
    return false;
  }
  const __m128 amax = _mm_max_ps(_mm_castsi128_ps(bits), _mm_set1_ps(kAmaxFloor16)), full = _mm_set1_ps(kRange16);
  _mm_mask_storeu_ps(act.scales + row * (act.k / 128) + i / 128, there, _mm_div_ps(amax, full));
  alignas(16) float inverse[4];
  _mm_store_ps(inverse, _mm_div_ps(full, amax));
  for (int g = 0; g < groups; ++g) limbs16<whole>(act, x, dtype, k, row, i + 128 * g, _mm512_set1_ps(inverse[g]));
  return true;
}

void quantize16(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t row) {
  const int64_t whole = dtype == TRIRUN_F32 ? k / 128 : 0, all = act.k / 128;
  bool finite = true;
  for (int64_t g = 0, count; g < whole; g += count) {
    count = whole - g < 4 ? whole - g : 4;
    finite &= groups16<true>(act, x, dtype, k, row, 128 * g, static_cast<int>(count));
  }
  for (int64_t g = whole, count; g < all; g += count) {
    count = all - g < 4 ? all - g : 4;
    finite &= groups16<false>(act, x, dtype, k, row, 128 * g, static_cast<int>(count));
  }
  if (!finite)
    for (int64_t i = 0; i < all; ++i) act.scales[row * all + i] = NAN;
}

}  // namespace

void quantize_avx512(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t ldx, int64_t begin,
                     int64_t end) {
  quantize_rows(act, x, dtype, k, ldx, begin, end, quantize8, quantize16);
}

}  // namespace trirun
#endif
