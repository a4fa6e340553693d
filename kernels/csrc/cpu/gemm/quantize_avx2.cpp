/* Activation quantization with AVX2, limb for limb that of portable.cpp: 32 columns at a time, whose saturating packs
 * end one byte shuffle away from tile64's order. */
#include "quantize.h"

#if defined(__AVX2__)
#include <immintrin.h>
#include <math.h>

namespace trirun {
namespace {

/* Columns [first, first + 32) of a row as fp32; those from `last` on are zero and not read. */
inline void load32(const void* x, int dtype, int64_t first, int64_t last, __m256 value[4]) {
  if (first + 32 > last) {
    alignas(32) float padded[32] = {};
    for (int64_t i = first; i < last; ++i) padded[i - first] = load_number(x, dtype, i);
    for (int q = 0; q < 4; ++q) value[q] = _mm256_load_ps(padded + 8 * q);
    return;
  }
  for (int q = 0; q < 4; ++q) {
    if (dtype == TRIRUN_F32) {
      value[q] = _mm256_loadu_ps(static_cast<const float*>(x) + first + 8 * q);
      continue;
    }
    const uint16_t* from = static_cast<const uint16_t*>(x) + first + 8 * q;
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    value[q] = dtype == TRIRUN_F16 ? _mm256_cvtph_ps(bits)
                                   : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
}

/* The largest magnitude of columns [first, last) as the bits of a float; from 0x7f800000 up it is not finite. */
inline uint32_t magnitude_bits(const void* x, int dtype, int64_t first, int64_t last) {
  __m256i most = _mm256_setzero_si256();
  for (int64_t i = first; i < last; i += 32) {
    __m256 value[4];
    load32(x, dtype, i, last, value);
    for (const __m256& v : value)
      most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(v), _mm256_set1_epi32(0x7fffffff)));
  }
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), most);
  uint32_t largest = 0;
  for (uint32_t lane : lanes) largest = lane > largest ? lane : largest;
  return largest;
}

inline __m256i round_to_int(__m256 value) {
  return _mm256_cvtps_epi32(_mm256_round_ps(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

/* Columns 0..31 of a block, saturated to int8, in the order (t, c, b). */
inline __m256i order_limbs(const __m256i value[4]) {
  // Each half of the packs holds four columns of each input: 0..3, 8..11, 16..19, 24..27, and in the upper half + 4.
  const __m256i packed =
      _mm256_packs_epi16(_mm256_packs_epi32(value[0], value[1]), _mm256_packs_epi32(value[2], value[3]));
  const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  return _mm256_shuffle_epi8(packed, _mm256_broadcastsi128_si256(order));
}

inline int32_t block_sum(__m256i limbs) {
  const __m256i eights = _mm256_sad_epu8(_mm256_xor_si256(limbs, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(eights), _mm256_extracti128_si256(eights, 1));
  return static_cast<int32_t>(_mm_cvtsi128_si64(two) + _mm_extract_epi64(two, 1)) - 128 * 32;
}

inline void store_block(int8_t* to, __m256i limbs) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), limbs); }

void quantize8(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t row) {
  const uint32_t amax = magnitude_bits(x, dtype, 0, k);
  const bool finite = amax < kNotFinite;
  const float scale = fmaxf(float_of(amax), kAmaxFloor8) / kRange8;
  act.scales[row] = finite ? scale : NAN;
  for (int64_t i = 0; i < act.k; i += 32) {
    __m256 value[4];
    __m256i rounded[4];
    load32(x, dtype, i, finite ? k : 0, value);
    for (int q = 0; q < 4; ++q) rounded[q] = round_to_int(_mm256_div_ps(value[q], _mm256_set1_ps(scale)));
    const __m256i limbs = order_limbs(rounded);
    store_block(act.limbs + row * act.k + i, limbs);
    act.sums[row * (act.k / 32) + i / 32] = block_sum(limbs);
  }
}

void quantize16(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t row) {
  int8_t *high = act.limbs + row * 2 * act.k, *low = high + act.k;
  float* scales = act.scales + row * (act.k / 128);
  bool finite = true;
  for (int64_t group = 0; group < act.k; group += 128) {
    const uint32_t bits = magnitude_bits(x, dtype, group, k < group + 128 ? k : group + 128);
    const bool here = bits < kNotFinite;
    finite = finite && here;
    const float amax = here ? fmaxf(float_of(bits), kAmaxFloor16) : 1.0f;
    scales[group / 128] = amax / kRange16;
    const __m256 inverse = _mm256_set1_ps(kRange16 / amax);
    for (int64_t i = group; i < group + 128; i += 32) {
      __m256 value[4];
      __m256i upper[4], lower[4];
      load32(x, dtype, i, here ? k : 0, value);
      for (int q = 0; q < 4; ++q) {
        __m256i fixed = round_to_int(_mm256_mul_ps(value[q], inverse));
        fixed = _mm256_min_epi32(fixed, _mm256_set1_epi32(static_cast<int32_t>(kRange16)));
        fixed = _mm256_max_epi32(fixed, _mm256_set1_epi32(-static_cast<int32_t>(kRange16)));
        upper[q] = _mm256_srai_epi32(_mm256_add_epi32(fixed, _mm256_set1_epi32(128)), 8);
        lower[q] = _mm256_sub_epi32(fixed, _mm256_slli_epi32(upper[q], 8));
      }
      const __m256i hi = order_limbs(upper), lo = order_limbs(lower);
      store_block(high + i, hi);
      store_block(low + i, lo);
      act.sums[row * (act.k / 32) + i / 32] = 256 * block_sum(hi) + block_sum(lo);
    }
  }
  if (!finite)
    for (int64_t i = 0; i < act.k / 128; ++i) scales[i] = NAN;
}

}  // namespace

void quantize_avx2(const trirun_act& act, const void* x, int dtype, int64_t k, int64_t ldx, int64_t begin,
                   int64_t end) {
  quantize_rows(act, x, dtype, k, ldx, begin, end, quantize8, quantize16);
}

}  // namespace trirun
#endif
