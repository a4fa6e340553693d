/* The vector parts of choosing a token (decoder/sample.cpp): the largest logit, and for a draw block maxima, a
 * threshold, a filter and probability masses. A whole vocabulary is read a few times, without a branch on a single
 * number. */
#ifndef TRIRUN_CPU_DECODER_OPS_SAMPLE_H
#define TRIRUN_CPU_DECODER_OPS_SAMPLE_H

#include <math.h>

#include "ops.h"
#include "lanes.h"

namespace trirun {
namespace {

int64_t largest(const float* x, int64_t n, float* value) {
  /* The best block is remembered, and searched in the end. */
  constexpr int64_t kBlock = 16 * kLanes;
  float best = -INFINITY;
  int64_t from = 0;
  for (int64_t i = 0; i < n; i += kBlock) {
    const int64_t end = i + kBlock < n ? i + kBlock : n;
    Lanes lanes[2] = {splat(-INFINITY), splat(-INFINITY)};
    int64_t j = i;
    /* The second operand of max is what comes back for a NaN. */
    for (; j + 2 * kLanes <= end; j += 2 * kLanes)
      for (int half = 0; half < 2; ++half) lanes[half] = max(load(x + j + half * kLanes), lanes[half]);
    float top = max_of(max(lanes[0], lanes[1]));
    for (; j < end; ++j) top = x[j] > top ? x[j] : top;
    if (top > best) {
      best = top;
      from = i;
    }
  }
  *value = best;
  if (best == -INFINITY) return -1;
  while (x[from] != best) ++from;
  return from;
}

constexpr int64_t kMaximaChunk = kMaximumSpan * kLanes;  // numbers that leave one vector of maxima

/* The second operand of max is what comes back for a NaN. */
inline Lanes larger_of(Lanes mine, Lanes other) { return max(other, mine); }

int64_t block_maxima(float* out, const float* x, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kMaximaChunk, count += kLanes) {
    const int64_t end = i + kMaximaChunk < n ? i + kMaximaChunk : n;
    Lanes top = splat(-INFINITY);
    int64_t j = i;
    for (; j + kLanes <= end; j += kLanes) top = larger_of(top, load(x + j));
    const int left = static_cast<int>(end - j);
    if (left > 0) top = larger_of(top, keep_first(load_first(x + j, left), left, -INFINITY));
    store(out + count, top);
  }
  return count;
}

/* Counted again and again, without a branch that depends on a single number: a partial sort guesses every other one
 * wrong, which takes longer. */
float threshold(const float* x, int64_t n, int64_t k, float top) {
  constexpr int kHalvings = 6;
  auto enough = [&](float least) {
    int32_t count = 0;
    for (int64_t i = 0; i < n; ++i) count += x[i] >= least;
    return count >= k;
  };
  float width = 1, low = top - width;
  while (!enough(low)) {
    if (low == -INFINITY) return low;
    width *= 2;
    low = top - width;
  }
  float high = top - width / 2;
  for (int i = 0; i < kHalvings; ++i) {
    const float middle = low + (high - low) / 2;
    if (enough(middle))
      low = middle;
    else
      high = middle;
  }
  return low;
}

int64_t filter(int32_t* ids, float* values, const float* x, int64_t n, float least) {
  int64_t count = 0, i = 0;
#if defined(__AVX512F__)
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (; i < n; i += kLanes) {
    const __mmask16 inside = n - i >= kLanes ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __m512 value = _mm512_maskz_loadu_ps(inside, x + i);
    const __mmask16 kept = _mm512_mask_cmp_ps_mask(inside, value, _mm512_set1_ps(least), _CMP_GE_OQ);
    if (!kept) continue;
    const __m512i id = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int32_t>(i)));
    /* Whole vectors are stored: the next ones begin within them. */
    _mm512_storeu_si512(ids + count, _mm512_maskz_compress_epi32(kept, id));
    _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(kept, value));
    count += __builtin_popcount(kept);
  }
#else
  for (; i < n; i += kLanes) {
    const int64_t end = n - i >= kLanes ? i + kLanes : n;
    if (end - i == kLanes && !(max_of(larger_of(splat(-INFINITY), load(x + i))) >= least)) continue;
    for (int64_t j = i; j < end; ++j)
      if (x[j] >= least) {
        ids[count] = static_cast<int32_t>(j);
        values[count++] = x[j];
      }
  }
#endif
  return count;
}

void masses(uint32_t* out, uint64_t* sums, const float* x, int64_t n, float top, float factor) {
  const Lanes reference = splat(top), scale = splat(factor), one = splat(static_cast<float>(kMassOne));
  for (int64_t i = 0; i < n; i += kMassBlock) {
    const int64_t end = i + kMassBlock < n ? i + kMassBlock : n;
    for (int64_t j = i; j < end; j += kLanes) {
      const int count = end - j >= kLanes ? kLanes : static_cast<int>(end - j);
      const Lanes value = count == kLanes ? load(x + j) : load_first(x + j, count);
      float rounded[kLanes];
      /* The first operand of max is left out where it is a NaN. */
      store(rounded, max(round_even(exp2((value - reference) * scale) * one), splat(0)));
      for (int lane = 0; lane < count; ++lane)
        out[j + lane] = static_cast<uint32_t>(static_cast<int32_t>(rounded[lane]));
    }
    uint64_t sum = 0;
    for (int64_t j = i; j < end; ++j) sum += out[j];
    sums[i / kMassBlock] = sum;
  }
}

}  // namespace
}  // namespace trirun
#endif
