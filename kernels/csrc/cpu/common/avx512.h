/* What all AVX-512 code shares: sixteen numbers of any type in and out, and reductions of four vectors together, which
 * take a third of the steps of four alone. In an unnamed namespace: every source has its own copy, compiled with its
 * own flags. */
#ifndef TRIRUN_CPU_AVX512_H
#define TRIRUN_CPU_AVX512_H

#include <immintrin.h>

#include "compiler.h"
#include "numbers.h"

namespace trirun {
namespace {

// GCC's own intrinsics start from variables that are uninitialised on purpose, and -Wall reports them here.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

/* 16 numbers of x, bias or another array as fp32; lanes outside the mask are zero and not read. */
TRIRUN_INLINE __m512 load16(const void* array, int dtype, int64_t i, __mmask16 mask) {
  if (dtype == TRIRUN_F32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(array) + i);
  __m256i bits = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(array) + i);
  if (dtype == TRIRUN_F16) return _mm512_cvtph_ps(bits);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

/* fp32 to bf16, half to even, NaN kept quiet. */
TRIRUN_INLINE __m256i to_bfloat(__m512 value) {
  __m512i bits = _mm512_castps_si512(value);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

TRIRUN_INLINE void store16(void* array, int dtype, int64_t i, __mmask16 mask, __m512 value) {
  if (dtype == TRIRUN_F32) {
    _mm512_mask_storeu_ps(static_cast<float*>(array) + i, mask, value);
  } else {
    __m256i bits = dtype == TRIRUN_F16 ? _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT) : to_bfloat(value);
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(array) + i, mask, bits);
  }
}

/* ---- across lanes ---------------------------------------------------------------------------------------- */

struct AddLanes {
  TRIRUN_INLINE __m512i operator()(__m512i a, __m512i b) const { return _mm512_add_epi32(a, b); }
  TRIRUN_INLINE __m256i operator()(__m256i a, __m256i b) const { return _mm256_add_epi32(a, b); }
  TRIRUN_INLINE __m128i operator()(__m128i a, __m128i b) const { return _mm_add_epi32(a, b); }
};

struct MaxLanes {  // of unsigned numbers
  TRIRUN_INLINE __m512i operator()(__m512i a, __m512i b) const { return _mm512_max_epu32(a, b); }
  TRIRUN_INLINE __m256i operator()(__m256i a, __m256i b) const { return _mm256_max_epu32(a, b); }
  TRIRUN_INLINE __m128i operator()(__m128i a, __m128i b) const { return _mm_max_epu32(a, b); }
};

/* The sum, or the largest, of the 16 lanes of each of four vectors: together, in a third of the steps. */
template <class Join>
TRIRUN_INLINE __m128i join_lanes(Join join, __m512i a, __m512i b, __m512i c, __m512i d) {
  const __m512i low = join(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i high = join(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i quads = join(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  const __m256i halves = join(_mm512_castsi512_si256(quads), _mm512_extracti64x4_epi64(quads, 1));
  return join(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

}  // namespace
}  // namespace trirun
#endif
