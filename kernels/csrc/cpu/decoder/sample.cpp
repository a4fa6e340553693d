/* A token drawn from logits: temperature, top-k, top-p, min-p, in this order, then the inverse of the cumulative
 * distribution over ascending token ids at one number of SplitMix64 (Steele et al. 2014), a function of the request's
 * stream and of how many tokens it has drawn.
 *
 * Masses are integers, probabilities relative to the likeliest token's times 2^30: nothing depends on the order of
 * additions or on the instruction set, and a draw is a comparison of integers. What is sorted here is compiled for the
 * baseline: instances of the standard library's templates are shared between translation units. */
#include <math.h>
#include <string.h>

#include <algorithm>
#include <iterator>

#include "cpu/common/memory.h"
#include "cpu/decoder/ops/ops.h"

namespace trirun {
namespace {

/* A nucleus is looked for among tokens of at least this mass; the first are mostly enough. */
constexpr uint32_t kLikely[] = {1 << 22, 1 << 18, 1 << 14};

/* The number in [0, 1) that chooses token `index` of a stream. */
double uniform(uint64_t stream, uint64_t index) {
  uint64_t z = stream + (index + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

/* The mass to stop at: the draw falls on the first token up to which there is more. */
uint64_t target_of(const trirun_draw& draw, uint64_t total) {
  const uint64_t target = static_cast<uint64_t>(uniform(draw.stream, draw.index) * static_cast<double>(total));
  return target < total ? target : total - 1;
}

/* Tokens that may be drawn, ascending. */
struct Tokens {
  const int32_t* ids;  /* null: 0, 1, 2, ... */
  const float* logits;
  uint32_t* mass;
  uint64_t* sums;      /* of kMassBlock tokens each */
  int64_t count;

  int64_t id(int64_t i) const { return ids ? ids[i] : i; }
  uint64_t total() const {
    uint64_t all = 0;
    for (int64_t block = 0; block * kMassBlock < count; ++block) all += sums[block];
    return all;
  }
};

/* Larger masses first, of equal ones the first token. */
uint64_t key_of(uint32_t mass, int64_t i) { return uint64_t{mass} << 32 | (0xffffffffu - static_cast<uint32_t>(i)); }

/* Masses by their size, sixteen bins to a power of two. */
constexpr int kBins = 31 * 16;

int bin_of(uint32_t mass) {
  const int power = 31 - __builtin_clz(mass);
  return power * 16 + static_cast<int>(uint64_t{mass} << 4 >> power & 15);
}

/* Memory of a draw; what is in use together lies apart. */
struct Work {
  float* maxima;     /* [vocab/kMaximumSpan + 16] */
  int32_t* ids;      /* [vocab + 16] each: what top-k left */
  float* logits;
  uint32_t* mass;    /* [vocab] */
  uint64_t* sums;    /* [vocab/kMassBlock + 1] */
  int32_t* likely;   /* [vocab + 16] each: where a nucleus is looked for */
  float* likely_logits;
  uint64_t* found;   /* [vocab] each, keys */
  uint64_t* sorted;
};

/* The arrays of a draw from `memory` on, where there is any; returns how many bytes they take. */
int64_t lay_out(int64_t vocab, void* memory, Work* work) {
  Arena arena(memory);
  work->maxima = arena.take<float>(vocab / kMaximumSpan + 16);
  work->ids = arena.take<int32_t>(vocab + 16);
  work->logits = arena.take<float>(vocab + 16);
  work->mass = arena.take<uint32_t>(vocab);
  work->sums = arena.take<uint64_t>(vocab / kMassBlock + 1);
  work->likely = arena.take<int32_t>(vocab + 16);
  work->likely_logits = arena.take<float>(vocab + 16);
  work->found = arena.take<uint64_t>(vocab);
  work->sorted = arena.take<uint64_t>(vocab);
  return arena.used();
}

bool falls(float a, float b) { return a > b; }

/* The k largest of logits[n], 0 < k < n, and what ties with the last of them; masses are left out. `top` is the
 * largest. */
Tokens k_largest(const DecoderOps& ops, const float* logits, int64_t n, int64_t k, float top, const Work& work) {
  /* What k maxima of disjoint parts reach is no larger than the k-th largest of all: few are above. */
  const int64_t parts = ops.block_maxima(work.maxima, logits, n);
  float least = k <= parts ? ops.threshold(work.maxima, parts, k, top) : -INFINITY;
  int64_t count = ops.filter(work.ids, work.logits, logits, n, least);
  /* There are fewer where others are NaNs. */
  if (count > k) {
    memcpy(work.likely_logits, work.logits, static_cast<size_t>(count) * 4);
    std::nth_element(work.likely_logits, work.likely_logits + k - 1, work.likely_logits + count, falls);
    least = work.likely_logits[k - 1];
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i)
      if (work.logits[i] >= least) {
        work.ids[kept] = work.ids[i];
        work.logits[kept++] = work.logits[i];
      }
    count = kept;
  }
  return {work.ids, work.logits, work.mass, work.sums, count};
}

/* The smallest key that stays of found[0, count), whose masses add up to `wanted` at least: a token stays while the
 * mass before it is below that. */
uint64_t last_of_nucleus(const Work& work, int64_t count, double wanted) {
  uint64_t bins[kBins] = {};
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t mass = static_cast<uint32_t>(work.found[i] >> 32);
    bins[bin_of(mass)] += mass;
  }
  uint64_t before = 0;
  int bin = kBins - 1;
  for (; bin > 0 && static_cast<double>(before + bins[bin]) < wanted; --bin) before += bins[bin];
  int64_t inside = 0;
  for (int64_t i = 0; i < count; ++i)
    if (bin_of(static_cast<uint32_t>(work.found[i] >> 32)) == bin) work.sorted[inside++] = work.found[i];
  std::sort(work.sorted, work.sorted + inside, [](uint64_t a, uint64_t b) { return a > b; });
  uint64_t last = ~uint64_t{0};
  for (int64_t i = 0; i < inside && static_cast<double>(before) < wanted; ++i) {
    last = work.sorted[i];
    before += last >> 32;
  }
  return last;
}

/* A draw among the tokens that top-p and min-p leave. */
int64_t draw_likely(const DecoderOps& ops, const Tokens& tokens, const trirun_draw& draw, float top, float factor,
                    const Work& work) {
  const uint32_t least = std::max<uint32_t>(1, static_cast<uint32_t>(ceil(std::min(draw.min_p, 1.0) * kMassOne)));
  const double wanted = draw.top_p < 1 ? draw.top_p * static_cast<double>(tokens.total()) : INFINITY;
  int64_t found = 0;
  uint64_t mass = 0;
  /* Keys of the tokens of at least so much mass, ascending by token; whether they are enough. */
  auto search = [&](uint32_t bound) {
    /* Half a power of two is more than a mass's rounding. */
    const float floor = top + static_cast<float>(log2(bound / kMassOne) - 0.5) / factor;
    const int64_t likely = ops.filter(work.likely, work.likely_logits, tokens.logits, tokens.count, floor);
    found = 0;
    mass = 0;
    for (int64_t j = 0; j < likely; ++j) {
      const int64_t i = work.likely[j];
      if (tokens.mass[i] < bound) continue;
      work.found[found++] = key_of(tokens.mass[i], i);
      mass += tokens.mass[i];
    }
    return static_cast<double>(mass) >= wanted || bound == least;
  };
  uint64_t last = 0;
  if (draw.top_p < 1) {
    const bool enough = std::any_of(std::begin(kLikely), std::end(kLikely),
                                    [&](uint32_t bound) { return search(std::max(least, bound)); });
    if (!enough) search(least);
    /* Where min-p leaves less than the nucleus, all of it stays. */
    if (static_cast<double>(mass) >= wanted) last = last_of_nucleus(work, found, wanted);
    mass = 0;
    for (int64_t i = 0; i < found; ++i)
      if (work.found[i] >= last) mass += work.found[i] >> 32;
  } else {
    search(least);
  }
  const uint64_t target = target_of(draw, mass);
  uint64_t reached = 0;
  for (int64_t i = 0;; ++i) {
    if (work.found[i] < last) continue;
    reached += work.found[i] >> 32;
    if (reached > target) return tokens.id(0xffffffffu - static_cast<uint32_t>(work.found[i]));
  }
}

/* A draw among all of them. */
int64_t draw_any(const Tokens& tokens, const trirun_draw& draw) {
  const uint64_t target = target_of(draw, tokens.total());
  uint64_t reached = 0;
  int64_t block = 0;
  while (reached + tokens.sums[block] <= target) reached += tokens.sums[block++];
  int64_t i = block * kMassBlock;
  while ((reached += tokens.mass[i]) <= target) ++i;
  return tokens.id(i);
}

}  // namespace

int64_t draw_bytes(int64_t vocab) {
  Work work;
  return lay_out(vocab, nullptr, &work);
}

int64_t draw_token(const float* logits, int64_t vocab, Best best, const trirun_draw& draw, void* memory) {
  if (best.index < 0 || best.value == INFINITY) return best.index;
  const DecoderOps& ops = decoder_ops();
  Work work;
  lay_out(vocab, memory, &work);
  Tokens tokens = {nullptr, logits, work.mass, work.sums, vocab};
  if (draw.top_k > 0 && draw.top_k < vocab) tokens = k_largest(ops, logits, vocab, draw.top_k, best.value, work);
  /* Bounded: zero times infinity would be a NaN. */
  const float factor = static_cast<float>(std::min(1.4426950408889634 / draw.temperature, 1e30));
  ops.masses(work.mass, work.sums, tokens.logits, tokens.count, best.value, factor);
  if (draw.top_p < 1 || draw.min_p > 0) return draw_likely(ops, tokens, draw, best.value, factor, work);
  return draw_any(tokens, draw);
}

}  // namespace trirun
