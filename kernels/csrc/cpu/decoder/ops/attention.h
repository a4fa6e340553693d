/* Attention in one pass over the keys, with an online softmax (Milakov & Gimelshein 2018; Dao et al. 2022). Tiles of
 * queries by keys stay in registers; a lane holds one key, so that a score is a chain of multiply-adds without a sum
 * across lanes, the same on every instruction set. */
#ifndef TRIRUN_CPU_DECODER_OPS_ATTENTION_H
#define TRIRUN_CPU_DECODER_OPS_ATTENTION_H

#include <math.h>

#include "lanes.h"
#include "ops.h"

namespace trirun {
namespace {

/* How many accumulators a tile of attention may hold: queries x sixteen keys (or sixteen dimensions). 24 of 32
 * registers with AVX-512; with AVX2, where Lanes are two registers, 4 x 2 of 16. */
#if defined(__AVX512F__)
constexpr int kTileQueries = 6, kTileLanes = 4;
#else
constexpr int kTileQueries = 4, kTileLanes = 1;
#endif

/* Up to so many queries a tile waits for memory, and fetches the next block of keys while it works on this one: one
 * block of a head is a few pages, each too short for the processor's own prefetching. */
constexpr int kFewQueries = 2;

/* p[i][16 j ..] = q[i] . key for Q queries and 16 K keys: each sum runs over d in ascending order in one lane. */
template <int Q, int K, bool ahead, class KV>
void scores_tile(const float* const* q, const KV* keys, int64_t head_dim, float* p) {
  Lanes sum[Q][K];
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < K; ++j) sum[i][j] = splat(0);
  for (int64_t d = 0; d < head_dim; ++d) {
    Lanes key[K];
#pragma GCC unroll 8
    for (int j = 0; j < K; ++j) key[j] = load(keys + (j * head_dim + d) * kLanes);
    if (ahead)
#pragma GCC unroll 8
      for (int j = 0; j < K; ++j)
        __builtin_prefetch(keys + (j * head_dim + d + kKeyBlock / kLanes * head_dim) * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) {
      Lanes value = splat(q[i][d]);
#pragma GCC unroll 8
      for (int j = 0; j < K; ++j) sum[i][j] = fma(value, key[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < K; ++j) store(p + i * kKeyBlock + j * kLanes, sum[i][j]);
}

/* out[i][0, 16 D) += p[i][0, keys) . values for Q queries, keys in ascending order. */
template <int Q, int D, bool ahead, class KV>
void weigh_tile(float* out, int64_t ldo, const float* p, const KV* values, int64_t stride, int64_t keys) {
  Lanes sum[Q][D];
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < D; ++j) sum[i][j] = load(out + i * ldo + j * kLanes);
  for (int64_t key = 0; key < keys; ++key) {
    Lanes value[D];
#pragma GCC unroll 8
    for (int j = 0; j < D; ++j) value[j] = load(values + key * stride + j * kLanes);
    if (ahead)
#pragma GCC unroll 8
      for (int j = 0; j < D; ++j) __builtin_prefetch(values + (key + kKeyBlock) * stride + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) {
      Lanes weight = splat(p[i * kKeyBlock + key]);
#pragma GCC unroll 8
      for (int j = 0; j < D; ++j) sum[i][j] = fma(weight, value[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < Q; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < D; ++j) store(out + i * ldo + j * kLanes, sum[i][j]);
}

/* The online softmax of kMaxQueries queries: what the keys so far have come to. */
struct Softmax {
  float* out;      /* [queries][stride], not yet divided by the weights' sum */
  float* p;        /* [queries][kKeyBlock]: scores, then weights */
  float* weights;  /* [queries][16], lane-wise sums of the weights */
  float* highest;  /* [queries] */
  int64_t stride;
  float softcap;   /* of the job */
};

template <int Q, bool ahead, class KV>
void scores_of(const float* const* q, const KV* keys, int64_t head_dim, int64_t sixteens, float* p) {
  int64_t j = 0;
  /* For a few queries a tile takes as long as one multiply-add after another, however wide it is: rather some scores
   * that nobody reads, of keys that are yet to come, than another tile. */
  if (Q <= kFewQueries && kTileLanes == 4 && sixteens == 2) return scores_tile<Q, 2, ahead>(q, keys, head_dim, p);
  if (Q <= kFewQueries && kTileLanes == 4 && sixteens == 3) sixteens = 4;
  for (; j + kTileLanes <= sixteens; j += kTileLanes)
    scores_tile<Q, kTileLanes, ahead>(q, keys + j * kLanes * head_dim, head_dim, p + j * kLanes);
  for (; j < sixteens; ++j) scores_tile<Q, 1, ahead>(q, keys + j * kLanes * head_dim, head_dim, p + j * kLanes);
}

template <int Q, bool ahead, class KV>
void weigh(float* out, int64_t stride, const float* p, const KV* values, int64_t keys) {
  int64_t d = 0;
  /* A single query has registers for twice the columns, and needs them to hide latency. */
  if (Q == 1)
    for (; d + 8 * kLanes <= stride; d += 8 * kLanes)
      weigh_tile<1, 8, ahead>(out + d, stride, p, values + d, stride, keys);
  for (; d + kTileLanes * kLanes <= stride; d += kTileLanes * kLanes)
    weigh_tile<Q, kTileLanes, ahead>(out + d, stride, p, values + d, stride, keys);
  for (; d < stride; d += kLanes) weigh_tile<Q, 1, ahead>(out + d, stride, p, values + d, stride, keys);
}

/* Scores to weights for one query, of whose block's keys those from `skip` up to `seen` count; out and the sum of
 * weights are rescaled when the highest score so far grows. */
inline void softmax_step(const Softmax& state, int64_t query, int64_t skip, int64_t seen, int64_t sixteens) {
  float* p = state.p + query * kKeyBlock;
  Lanes score[kKeyBlock / kLanes], top = splat(-INFINITY);
  if (state.softcap != 0)
    for (int64_t j = 0; j < sixteens; ++j)
      store(p + j * kLanes, softcap(load(p + j * kLanes), state.softcap, 1 / state.softcap));
  if (skip > 0) {
    if (skip >= seen) {
      for (int64_t j = 0; j < sixteens; ++j) store(p + j * kLanes, splat(0));
      return;
    }
    for (int64_t j = 0; j < sixteens; ++j)
      store(p + j * kLanes, drop_first(load(p + j * kLanes), static_cast<int>(skip - j * kLanes)));
  }
  for (int64_t j = 0; j < sixteens; ++j) {
    score[j] = keep_first(load(p + j * kLanes), static_cast<int>(seen - j * kLanes), -INFINITY);
    top = max(top, score[j]);
  }
  float before = state.highest[query], block_top = max_of(top);
  float highest = before > block_top ? before : block_top;
  Lanes reference = splat(highest), added = splat(0);
  for (int64_t j = 0; j < sixteens; ++j) {
    Lanes weight = exp2(score[j] - reference);
    store(p + j * kLanes, weight);
    added = added + weight;
  }
  float* weights = state.weights + query * kLanes;
  if (highest == before) {
    store(weights, load(weights) + added);
    return;
  }
  state.highest[query] = highest;
  if (before == -INFINITY) {
    /* The first block: there is nothing to rescale. */
    store(weights, added);
    return;
  }
  Lanes shrink = exp2(splat(before) - reference);
  store(weights, fma(load(weights), shrink, added));
  float* out = state.out + query * state.stride;
  for (int64_t d = 0; d < state.stride; d += kLanes) store(out + d, load(out + d) * shrink);
}

/* Q queries, from entry `first` of the state on, over one block of keys at absolute position `base`, which lies at
 * `at`; `ahead`: another follows, and is worth fetching. */
template <int Q, bool ahead, class KV>
void block_step(const AttentionJob& job, const Softmax& state, int64_t begin, int64_t first, int64_t base, int64_t at) {
  const float* q[Q];
  int64_t seen[Q], skip[Q];
  for (int i = 0; i < Q; ++i) {
    int64_t f = begin + first + i, row = f / job.group;
    q[i] = job.q + row * job.ldq + f % job.group * job.head_dim;
    int64_t keys = job.position + row + 1 - base;
    seen[i] = keys < kKeyBlock ? keys : kKeyBlock;
    skip[i] = job.window && keys > job.window ? keys - job.window : 0;
  }
  /* The windows of all begin later. */
  if (skip[0] >= kKeyBlock) return;
  /* Later queries see more keys. */
  int64_t most = seen[Q - 1], sixteens = (most + kLanes - 1) / kLanes;
  float* p = state.p + first * kKeyBlock;
  scores_of<Q, ahead>(q, static_cast<const KV*>(job.keys) + at * job.head_dim, job.head_dim, sixteens, p);
  for (int i = 0; i < Q; ++i) softmax_step(state, first + i, skip[i], seen[i], sixteens);
  const KV* values = static_cast<const KV*>(job.values) + at * state.stride;
  float* out = state.out + first * state.stride;
  /* What lies before the first window may be another sequence's. */
  weigh<Q, ahead>(out, state.stride, p + skip[0], values + skip[0] * state.stride, seen[0] - skip[0]);
  /* What only later queries see: a weight of 0 would not keep a NaN of the future out of the past. */
  for (int i = 1; i < Q; ++i)
    if (seen[i] > seen[0])
      weigh<1, ahead>(out + i * state.stride, state.stride, p + i * kKeyBlock + seen[0],
                      values + seen[0] * state.stride, seen[i] - seen[0]);
}

/* The state's entries [first, queries), a few at a time. */
template <bool ahead, class KV>
void few_steps(const AttentionJob& job, const Softmax& state, int64_t begin, int64_t first, int64_t queries,
               int64_t base, int64_t at) {
  for (; first + kFewQueries <= queries; first += kFewQueries)
    block_step<kFewQueries, ahead, KV>(job, state, begin, first, base, at);
  for (; first < queries; ++first) block_step<1, ahead, KV>(job, state, begin, first, base, at);
}

/* The state in `scratch` before the first key. */
inline Softmax begin_softmax(const AttentionJob& job, int64_t queries, float* scratch) {
  Softmax state;
  state.softcap = job.softcap;
  state.stride = value_stride_of(job.head_dim);
  state.out = scratch;
  state.p = state.out + kMaxQueries * state.stride;
  state.weights = state.p + kMaxQueries * kKeyBlock;
  state.highest = state.weights + kMaxQueries * kLanes;
  memset(state.out, 0, sizeof(float) * static_cast<size_t>(queries * state.stride));
  memset(state.weights, 0, sizeof(float) * static_cast<size_t>(queries * kLanes));
  for (int64_t i = 0; i < queries; ++i) state.highest[i] = -INFINITY;
  return state;
}

/* Before the first key: a sink is a key of that score, natural, whose value is zero. */
inline void begin_sink(const Softmax& state, int64_t entry, float sink) {
  state.highest[entry] = sink * kLog2e;
  state.weights[entry * kLanes] = 1.0f;
}

/* After the last key: an entry of the state becomes the output of query f. */
inline void finish(const Softmax& state, int64_t entry, const AttentionJob& job, int64_t f) {
  float* out = job.out + f / job.group * job.ldo + f % job.group * job.head_dim;
  Lanes inverse = splat(1.0f / sum_of(load(state.weights + entry * kLanes)));
  for (int64_t d = 0; d < job.head_dim; d += kLanes) {
    Lanes y = load(state.out + entry * state.stride + d) * inverse;
    store_first(out + d, y, job.head_dim - d >= kLanes ? kLanes : static_cast<int>(job.head_dim - d));
  }
}

template <class KV>
void attend_as(const AttentionJob& job, int64_t begin, int64_t end, float* scratch) {
  int64_t queries = end - begin;
  Softmax state = begin_softmax(job, queries, scratch);
  for (int64_t i = 0; job.sinks && i < queries; ++i) begin_sink(state, i, job.sinks[(begin + i) % job.group]);
  int64_t last = job.position + (end - 1) / job.group;
  /* The first block that the first query sees, and where it lies. */
  int64_t base = 0, at = 0;
  if (job.window && job.position + begin / job.group >= job.window) {
    base = (job.position + begin / job.group + 1 - job.window) / kKeyBlock * kKeyBlock;
    at = base % job.held;
  }
  for (; base <= last; base += kKeyBlock, at = at + kKeyBlock == job.held ? 0 : at + kKeyBlock) {
    /* Rows before the block's first position do not see it. */
    int64_t row = base > job.position ? base - job.position : 0;
    int64_t first = row * job.group > begin ? row * job.group - begin : 0;
    for (; first + kTileQueries <= queries; first += kTileQueries)
      block_step<kTileQueries, false, KV>(job, state, begin, first, base, at);
    if (base + kKeyBlock <= last)
      few_steps<true, KV>(job, state, begin, first, queries, base, at);
    else
      few_steps<false, KV>(job, state, begin, first, queries, base, at);
  }
  for (int64_t i = 0; i < queries; ++i) finish(state, i, job, begin + i);
}

void attend(const AttentionJob& job, int64_t begin, int64_t end, float* scratch) {
  if (job.kv_dtype == TRIRUN_F16)
    attend_as<uint16_t>(job, begin, end, scratch);
  else
    attend_as<float>(job, begin, end, scratch);
}

/* ---- two kv heads of one row ----------------------------------------------------------------------------- */

/* Near their end the keys of two heads are read side by side, and two blocks of scores are taken at a time: with one or
 * two queries each, a tile of a single head takes as long as one multiply-add after another. The numbers are those of
 * attend_as, added in its order. */
constexpr int64_t kTail = 2 * kKeyBlock;

/* Where a query's scores of a sixteen of the tail lie. */
inline float* tail_score(float* p, int64_t queries, int64_t query, int64_t sixteen) {
  constexpr int64_t kSixteens = kKeyBlock / kLanes;
  return p + (sixteen / kSixteens * queries + query) * kKeyBlock + sixteen % kSixteens * kLanes;
}

/* Scores of 2 x Q queries and the keys of K sixteens, of which `first` is the first. */
template <int Q, int K, class KV>
void pair_scores_tile(const float* const* q, const KV* const* keys, int64_t head_dim, int64_t first, float* p) {
  Lanes sum[2][Q][K];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < K; ++j) sum[h][i][j] = splat(0);
  for (int64_t d = 0; d < head_dim; ++d)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      Lanes value[Q];
#pragma GCC unroll 2
      for (int i = 0; i < Q; ++i) value[i] = splat(q[h * Q + i][d]);
#pragma GCC unroll 8
      for (int j = 0; j < K; ++j) {
        Lanes key = load(keys[h] + ((first + j) * head_dim + d) * kLanes);
#pragma GCC unroll 2
        for (int i = 0; i < Q; ++i) sum[h][i][j] = fma(value[i], key, sum[h][i][j]);
      }
    }
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < K; ++j) store(tail_score(p, 2 * Q, h * Q + i, first + j), sum[h][i][j]);
}

template <int Q, class KV>
void pair_scores(const float* const* q, const KV* const* keys, int64_t head_dim, int64_t sixteens, float* p) {
  switch (sixteens) {
    case 1: return pair_scores_tile<Q, 1>(q, keys, head_dim, 0, p);
    case 2: return pair_scores_tile<Q, 2>(q, keys, head_dim, 0, p);
    case 3: return pair_scores_tile<Q, 3>(q, keys, head_dim, 0, p);
    case 4: return pair_scores_tile<Q, 4>(q, keys, head_dim, 0, p);
    case 5: return pair_scores_tile<Q, 5>(q, keys, head_dim, 0, p);
    case 6: return pair_scores_tile<Q, 6>(q, keys, head_dim, 0, p);
    case 7: pair_scores_tile<Q, 4>(q, keys, head_dim, 0, p); return pair_scores_tile<Q, 3>(q, keys, head_dim, 4, p);
    default: pair_scores_tile<Q, 4>(q, keys, head_dim, 0, p); return pair_scores_tile<Q, 4>(q, keys, head_dim, 4, p);
  }
}

/* out[h][i][d, d + 16 D) += p[h][i][0, keys) . values[h] for 2 x Q queries. */
template <int Q, int D, class KV>
void pair_weigh_tile(const Softmax& state, const KV* const* values, int64_t d, int64_t keys) {
  float* out = state.out + d;
  Lanes sum[2][Q][D];
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < D; ++j) sum[h][i][j] = load(out + (h * Q + i) * state.stride + j * kLanes);
  for (int64_t key = 0; key < keys; ++key)
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      Lanes weight[Q];
#pragma GCC unroll 2
      for (int i = 0; i < Q; ++i) weight[i] = splat(state.p[(h * Q + i) * kKeyBlock + key]);
#pragma GCC unroll 8
      for (int j = 0; j < D; ++j) {
        Lanes value = load(values[h] + key * state.stride + d + j * kLanes);
#pragma GCC unroll 2
        for (int i = 0; i < Q; ++i) sum[h][i][j] = fma(weight[i], value, sum[h][i][j]);
      }
    }
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
#pragma GCC unroll 2
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 8
      for (int j = 0; j < D; ++j) store(out + (h * Q + i) * state.stride + j * kLanes, sum[h][i][j]);
}

/* The last keys, from position `base` on. */
template <int Q, class KV>
void pair_tail(const AttentionJob* jobs, Softmax state, int64_t base) {
  const int64_t head_dim = jobs->head_dim, seen = jobs->position + 1 - base;
  const float* q[2 * Q];
  const KV *keys[2], *values[2];
  for (int i = 0; i < 2 * Q; ++i) q[i] = jobs[i / Q].q + i % Q * head_dim;
  for (int h = 0; h < 2; ++h) {
    keys[h] = static_cast<const KV*>(jobs[h].keys) + base * head_dim;
    values[h] = static_cast<const KV*>(jobs[h].values) + base * state.stride;
  }
  pair_scores<Q>(q, keys, head_dim, (seen + kLanes - 1) / kLanes, state.p);
  for (int64_t block = 0; block < seen; block += kKeyBlock) {
    const int64_t count = seen - block < kKeyBlock ? seen - block : kKeyBlock;
    for (int i = 0; i < 2 * Q; ++i) softmax_step(state, i, 0, count, (count + kLanes - 1) / kLanes);
    int64_t d = 0;
    for (; d + 4 * kLanes <= state.stride; d += 4 * kLanes) pair_weigh_tile<Q, 4>(state, values, d, count);
    for (; d < state.stride; d += kLanes) pair_weigh_tile<Q, 1>(state, values, d, count);
    state.p += 2 * Q * kKeyBlock;
    for (int h = 0; h < 2; ++h) values[h] += kKeyBlock * state.stride;
  }
}

/* Two kv heads of Q queries each. */
template <int Q, class KV>
void attend_pair_as(const AttentionJob* jobs, float* scratch) {
  const Softmax state = begin_softmax(*jobs, 2 * Q, scratch);
  for (int i = 0; jobs->sinks && i < 2 * Q; ++i) begin_sink(state, i, jobs[i / Q].sinks[i % Q]);
  const int64_t blocks = jobs->position / kKeyBlock + 1;
  const int64_t tail = blocks * kKeyBlock > kTail ? blocks * kKeyBlock - kTail : 0;
  /* Far from it each head is by itself: what is read then is in order. */
  for (int64_t h = 0; h < 2; ++h)
    for (int64_t base = 0; base < tail; base += kKeyBlock)
      block_step<Q, true, KV>(jobs[h], state, -h * Q, h * Q, base, base);
  pair_tail<Q, KV>(jobs, state, tail);
  for (int i = 0; i < 2 * Q; ++i) finish(state, i, jobs[i / Q], i % Q);
}

void attend_pair(const AttentionJob* jobs, float* scratch) {
  const bool half = jobs->kv_dtype == TRIRUN_F16;
  if (jobs->group == 1)
    half ? attend_pair_as<1, uint16_t>(jobs, scratch) : attend_pair_as<1, float>(jobs, scratch);
  else
    half ? attend_pair_as<2, uint16_t>(jobs, scratch) : attend_pair_as<2, float>(jobs, scratch);
}

void attend_row(const AttentionJob* jobs, int64_t heads, float* scratch) {
  int64_t head = 0;
  /* Registers are too few for two heads' queries elsewhere. */
  if (kTileLanes == 4 && jobs->group <= kFewQueries && (!jobs->window || jobs->position < jobs->window))
    for (; head + 2 <= heads; head += 2) attend_pair(jobs + head, scratch);
  for (; head < heads; ++head)
    for (int64_t f = 0; f < jobs->group; f += kMaxQueries)
      attend(jobs[head], f, f + kMaxQueries < jobs->group ? f + kMaxQueries : jobs->group, scratch);
}

}  // namespace
}  // namespace trirun
#endif
