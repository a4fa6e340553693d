/* What a Gated DeltaNet layer does between its projections (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", eq.
 * 10): a causal convolution of few tokens, gates, and the delta rule
 *
 *   S = e^g S;   d = beta (v - k^T S);   S += k d^T;   o = q^T S
 *
 * token by token, also for prompts: the form that computes chunks at once would give other roundings for every way to
 * cut a prompt into steps. What makes the tokens of a prompt cheap is that 64 columns of the state stay in the nearest
 * cache for all of them. */
#ifndef TRIRUN_CPU_DECODER_OPS_DELTA_H
#define TRIRUN_CPU_DECODER_OPS_DELTA_H

#include <math.h>

#include "lanes.h"
#include "ops.h"
#include "rows.h"

namespace trirun {
namespace {

/* LANES * 16 columns of the state, over all rows. */
template <int LANES>
void delta_columns(const DeltaJob& job, int64_t rows, int64_t column) {
  const int64_t ld = job.value_dim, keys = job.key_dim;
  float* state = job.state + column;
  for (int64_t r = 0; r < rows; ++r) {
    const float *q = job.q + r * job.ld, *k = job.k + r * job.ld;
    const Lanes decay = splat(job.gates[r].decay), beta = splat(job.gates[r].beta);
    /* q . k, from lanes in an order that is the same everywhere. */
    Lanes products = splat(0);
    for (int64_t i = 0; i < keys; i += kLanes) products = fma(load(q + i), load(k + i), products);
    const Lanes qk = splat(sum_of(products));
    Lanes by_k[LANES], by_q[LANES];
    for (int j = 0; j < LANES; ++j) by_k[j] = by_q[j] = splat(0);
    for (int64_t i = 0; i < keys; ++i) {
      const Lanes ki = splat(k[i]), qi = splat(q[i]);
      for (int j = 0; j < LANES; ++j) {
        const Lanes s = load(state + i * ld + j * kLanes);
        by_k[j] = fma(ki, s, by_k[j]);
        by_q[j] = fma(qi, s, by_q[j]);
      }
    }
    Lanes change[LANES];
    for (int j = 0; j < LANES; ++j) {
      change[j] = (load(job.v + r * job.ld + column + j * kLanes) - decay * by_k[j]) * beta;
      store(job.out + r * job.ldo + column + j * kLanes, fma(qk, change[j], decay * by_q[j]));
    }
    for (int64_t i = 0; i < keys; ++i) {
      const Lanes ki = splat(k[i]);
      for (int j = 0; j < LANES; ++j) {
        float* at = state + i * ld + j * kLanes;
        store(at, fma(ki, change[j], decay * load(at)));
      }
    }
  }
}

void delta_rule(const DeltaJob& job, int64_t rows) {
  int64_t column = 0;
  for (; column + 4 * kLanes <= job.value_dim; column += 4 * kLanes) delta_columns<4>(job, rows, column);
  for (; column < job.value_dim; column += kLanes) delta_columns<1>(job, rows, column);
}

void convolve(float* out, const float* const* inputs, const float* weights, int64_t taps, int64_t ldw, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    Lanes sum = splat(0);
    for (int64_t t = 0; t < taps; ++t)
      if (inputs[t]) sum = fma(load(inputs[t] + i), load(weights + t * ldw + i), sum);
    store(out + i, silu(sum));
  }
}

void unit(float* x, int64_t n, float eps, float factor) {
  Lanes squares = splat(0);
  for (int64_t i = 0; i < n; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  const Lanes scale = splat(factor / sqrtf(sum_of(squares) + eps));
  for (int64_t i = 0; i < n; i += kLanes) store(x + i, load(x + i) * scale);
}

}  // namespace
}  // namespace trirun
#endif
