/* The decoder's operations, written once on Lanes; each decoder_<isa>.cpp includes this file and names its table. */
#ifndef TRIRUN_CPU_DECODER_OPS_IMPL_H
#define TRIRUN_CPU_DECODER_OPS_IMPL_H

#include <math.h>

#include "decoder_draw_impl.h"
#include "decoder_head_impl.h"
#include "decoder_ops.h"
#include "decoder_simd.h"

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

constexpr float kLog2e = 1.44269504f;

template <class X>
inline void load_row_as(float* out, const X* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, load(x + i));
}

void load_row(float* out, const void* x, int dtype, int64_t n) {
  if (dtype == TRIRUN_F32)
    load_row_as(out, static_cast<const float*>(x), n);
  else if (dtype == TRIRUN_F16)
    load_row_as(out, static_cast<const uint16_t*>(x), n);
  else
    load_row_as(out, static_cast<const Bfloat*>(x), n);
}

void rms_norm(float* out, const float* x, const float* weight, int64_t n, float eps) {
  /* Four sums hide the latency of the multiply-add. */
  Lanes squares[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      Lanes a = load(x + i + j * kLanes);
      squares[j] = fma(a, a, squares[j]);
    }
  for (; i < n; i += kLanes) {
    Lanes a = n - i >= kLanes ? load(x + i) : load_first(x + i, static_cast<int>(n - i));
    squares[0] = fma(a, a, squares[0]);
  }
  float total = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
  float inverse = 1.0f / sqrtf(total / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * splat(inverse) * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

void add(float* x, const float* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) + load(y + i));
  for (; i < n; ++i) x[i] += y[i];
}

inline Lanes silu(Lanes x) {
  /* Beyond 2^126 the quotient is below fp32's normal range; a larger power would overflow exp2. The second operand of
   * min is what comes back for a NaN. */
  Lanes power = min(splat(126.0f), x * splat(-kLog2e));
  return x / (splat(1.0f) + exp2(power));
}

inline Lanes relu2(Lanes x) {
  Lanes positive = max(splat(0), x);
  return positive * positive;
}

void gate(float* h, const float* up, int64_t n, int activation) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int count = n - i >= kLanes ? kLanes : static_cast<int>(n - i);
    Lanes a = count == kLanes ? load(h + i) : load_first(h + i, count);
    Lanes b = count == kLanes ? load(up + i) : load_first(up + i, count);
    Lanes y = (activation == TRIRUN_RELU2 ? relu2(a) : silu(a)) * b;
    if (count == kLanes)
      store(h + i, y);
    else
      store_first(h + i, y, count);
  }
}

void rotate(float* x, const float* cosines, const float* sines, int64_t half, int64_t n, float scale) {
  Lanes factor = splat(scale);
  for (int64_t i = 0; i < half; i += kLanes) {
    int count = half - i >= kLanes ? kLanes : static_cast<int>(half - i);
    Lanes a = load_first(x + i, count), b = load_first(x + half + i, count);
    Lanes c = load_first(cosines + i, count), s = load_first(sines + i, count);
    store_first(x + i, fma(a, c, splat(0) - b * s) * factor, count);
    store_first(x + half + i, fma(b, c, a * s) * factor, count);
  }
  for (int64_t i = 2 * half; i < n; ++i) x[i] *= scale;
}

template <class KV>
inline void convert(KV* out, const float* x, int count) {
  Lanes a = count == kLanes ? load(x) : load_first(x, count);
  store(out, a);
}

template <class KV>
void store_key_as(KV* keys, const float* x, int64_t head_dim, int64_t position) {
  KV* column = keys + position / kLanes * kLanes * head_dim + position % kLanes;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    int count = head_dim - d >= kLanes ? kLanes : static_cast<int>(head_dim - d);
    KV converted[kLanes];
    convert(converted, x + d, count);
    for (int i = 0; i < count; ++i) column[(d + i) * kLanes] = converted[i];
  }
}

template <class KV>
void store_value_as(KV* values, const float* x, int64_t head_dim, int64_t position) {
  /* The padding up to value_stride is written as zeros: attend multiplies it. */
  KV* row = values + position * value_stride_of(head_dim);
  for (int64_t d = 0; d < head_dim; d += kLanes)
    convert(row + d, x + d, head_dim - d >= kLanes ? kLanes : static_cast<int>(head_dim - d));
}

void store_key(void* keys, int kv_dtype, const float* x, int64_t head_dim, int64_t position) {
  if (kv_dtype == TRIRUN_F16)
    store_key_as(static_cast<uint16_t*>(keys), x, head_dim, position);
  else
    store_key_as(static_cast<float*>(keys), x, head_dim, position);
}

void store_value(void* values, int kv_dtype, const float* x, int64_t head_dim, int64_t position) {
  if (kv_dtype == TRIRUN_F16)
    store_value_as(static_cast<uint16_t*>(values), x, head_dim, position);
  else
    store_value_as(static_cast<float*>(values), x, head_dim, position);
}

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

/* The state of kMaxQueries queries on their way along the keys. */
struct Walk {
  float* out;      /* [queries][stride], not yet divided by the weights' sum */
  float* p;        /* [queries][kKeyBlock]: scores, then weights */
  float* weights;  /* [queries][16], lane-wise sums of the weights */
  float* highest;  /* [queries] */
  int64_t stride;
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

/* Scores to weights for one query, `seen` of whose block's keys count; out and the sum of weights are rescaled when
 * the highest score so far grows. */
inline void softmax_step(const Walk& walk, int64_t query, int64_t seen, int64_t sixteens) {
  float* p = walk.p + query * kKeyBlock;
  Lanes score[kKeyBlock / kLanes], top = splat(-INFINITY);
  for (int64_t j = 0; j < sixteens; ++j) {
    score[j] = keep_first(load(p + j * kLanes), static_cast<int>(seen - j * kLanes), -INFINITY);
    top = max(top, score[j]);
  }
  float before = walk.highest[query], block_top = max_of(top);
  float highest = before > block_top ? before : block_top;
  Lanes reference = splat(highest), added = splat(0);
  for (int64_t j = 0; j < sixteens; ++j) {
    Lanes weight = exp2(score[j] - reference);
    store(p + j * kLanes, weight);
    added = added + weight;
  }
  float* weights = walk.weights + query * kLanes;
  if (highest == before) {
    store(weights, load(weights) + added);
    return;
  }
  walk.highest[query] = highest;
  if (before == -INFINITY) {
    /* The first block: there is nothing to rescale. */
    store(weights, added);
    return;
  }
  Lanes shrink = exp2(splat(before) - reference);
  store(weights, fma(load(weights), shrink, added));
  float* out = walk.out + query * walk.stride;
  for (int64_t d = 0; d < walk.stride; d += kLanes) store(out + d, load(out + d) * shrink);
}

/* Q queries, from walk entry `first` on, over one block of keys at absolute position `base`; `ahead`: another follows,
 * and is worth fetching. */
template <int Q, bool ahead, class KV>
void block_step(const AttentionJob& job, const Walk& walk, int64_t begin, int64_t first, int64_t base) {
  const float* q[Q];
  int64_t seen[Q];
  for (int i = 0; i < Q; ++i) {
    int64_t f = begin + first + i, row = f / job.group;
    q[i] = job.q + row * job.ldq + f % job.group * job.head_dim;
    int64_t keys = job.position + row + 1 - base;
    seen[i] = keys < kKeyBlock ? keys : kKeyBlock;
  }
  /* Later queries see more keys. */
  int64_t most = seen[Q - 1], sixteens = (most + kLanes - 1) / kLanes;
  float* p = walk.p + first * kKeyBlock;
  scores_of<Q, ahead>(q, static_cast<const KV*>(job.keys) + base * job.head_dim, job.head_dim, sixteens, p);
  for (int i = 0; i < Q; ++i) softmax_step(walk, first + i, seen[i], sixteens);
  const KV* values = static_cast<const KV*>(job.values) + base * walk.stride;
  float* out = walk.out + first * walk.stride;
  weigh<Q, ahead>(out, walk.stride, p, values, seen[0]);
  /* What only later queries see: a weight of 0 would not keep a NaN of the future out of the past. */
  for (int i = 1; i < Q; ++i)
    if (seen[i] > seen[0])
      weigh<1, ahead>(out + i * walk.stride, walk.stride, p + i * kKeyBlock + seen[0], values + seen[0] * walk.stride,
               seen[i] - seen[0]);
}

/* The walk's entries [first, queries), a few at a time. */
template <bool ahead, class KV>
void few_steps(const AttentionJob& job, const Walk& walk, int64_t begin, int64_t first, int64_t queries, int64_t base) {
  for (; first + kFewQueries <= queries; first += kFewQueries)
    block_step<kFewQueries, ahead, KV>(job, walk, begin, first, base);
  for (; first < queries; ++first) block_step<1, ahead, KV>(job, walk, begin, first, base);
}

template <class KV>
void attend_as(const AttentionJob& job, int64_t begin, int64_t end, float* scratch) {
  int64_t queries = end - begin;
  Walk walk;
  walk.stride = value_stride_of(job.head_dim);
  walk.out = scratch;
  walk.p = walk.out + kMaxQueries * walk.stride;
  walk.weights = walk.p + kMaxQueries * kKeyBlock;
  walk.highest = walk.weights + kMaxQueries * kLanes;
  memset(walk.out, 0, sizeof(float) * static_cast<size_t>(queries * walk.stride));
  memset(walk.weights, 0, sizeof(float) * static_cast<size_t>(queries * kLanes));
  for (int64_t i = 0; i < queries; ++i) walk.highest[i] = -INFINITY;
  int64_t last = job.position + (end - 1) / job.group;
  for (int64_t base = 0; base <= last; base += kKeyBlock) {
    /* Rows before the block's first position do not see it. */
    int64_t row = base > job.position ? base - job.position : 0;
    int64_t first = row * job.group > begin ? row * job.group - begin : 0;
    for (; first + kTileQueries <= queries; first += kTileQueries)
      block_step<kTileQueries, false, KV>(job, walk, begin, first, base);
    if (base + kKeyBlock <= last)
      few_steps<true, KV>(job, walk, begin, first, queries, base);
    else
      few_steps<false, KV>(job, walk, begin, first, queries, base);
  }
  for (int64_t i = 0; i < queries; ++i) {
    int64_t f = begin + i;
    float* out = job.out + f / job.group * job.ldo + f % job.group * job.head_dim;
    Lanes inverse = splat(1.0f / sum_of(load(walk.weights + i * kLanes)));
    for (int64_t d = 0; d < job.head_dim; d += kLanes) {
      Lanes y = load(walk.out + i * walk.stride + d) * inverse;
      store_first(out + d, y, job.head_dim - d >= kLanes ? kLanes : static_cast<int>(job.head_dim - d));
    }
  }
}

void attend(const AttentionJob& job, int64_t begin, int64_t end, float* scratch) {
  if (job.kv_dtype == TRIRUN_F16)
    attend_as<uint16_t>(job, begin, end, scratch);
  else
    attend_as<float>(job, begin, end, scratch);
}

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

}  // namespace

#define TRIRUN_DECODER_TABLE \
  { load_row, rms_norm, add, gate, rotate, store_key, store_value, attend, dense, head_digits, head_bytes, \
    head_int8, largest, tops, reached, gather, masses }

}  // namespace trirun
#endif
