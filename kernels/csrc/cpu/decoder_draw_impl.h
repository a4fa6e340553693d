/* The vector parts of drawing a token (decoder_draw.cpp), on Lanes. Included by decoder_ops_impl.h. */
#ifndef TRIRUN_CPU_DECODER_DRAW_IMPL_H
#define TRIRUN_CPU_DECODER_DRAW_IMPL_H

#include <math.h>

#include "decoder_ops.h"
#include "decoder_simd.h"

namespace trirun {
namespace {

constexpr int64_t kTopChunk = kTopSpan * kLanes;  // numbers that leave one vector of maxima

/* The second operand of max is what comes back for a NaN. */
inline Lanes larger_of(Lanes mine, Lanes other) { return max(other, mine); }

int64_t tops(float* out, const float* x, int64_t n) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kTopChunk, count += kLanes) {
    const int64_t end = i + kTopChunk < n ? i + kTopChunk : n;
    Lanes top = splat(-INFINITY);
    int64_t j = i;
    for (; j + kLanes <= end; j += kLanes) top = larger_of(top, load(x + j));
    if (j < end) top = larger_of(top, keep_first(load_first(x + j, static_cast<int>(end - j)), static_cast<int>(end - j), -INFINITY));
    store(out + count, top);
  }
  return count;
}

int64_t gather(int32_t* ids, float* values, const float* x, int64_t n, float least) {
  constexpr int64_t kStretch = 4 * kLanes;
  int64_t count = 0;
  for (int64_t i = 0; i < n; i += kStretch) {
    const int64_t end = i + kStretch < n ? i + kStretch : n;
    if (end - i == kStretch) {
      Lanes top = splat(-INFINITY);
      for (int64_t j = i; j < end; j += kLanes) top = larger_of(top, load(x + j));
      if (!(max_of(top) >= least)) continue;
    }
    for (int64_t j = i; j < end; ++j)
      if (x[j] >= least) {
        ids[count] = static_cast<int32_t>(j);
        values[count++] = x[j];
      }
  }
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
      for (int lane = 0; lane < count; ++lane) out[j + lane] = static_cast<uint32_t>(static_cast<int32_t>(rounded[lane]));
    }
    uint64_t sum = 0;
    for (int64_t j = i; j < end; ++j) sum += out[j];
    sums[i / kMassBlock] = sum;
  }
}

}  // namespace
}  // namespace trirun
#endif
