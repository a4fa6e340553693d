/* Mixtures of experts: the choice of a row's experts, the order in which products take pairs of a row and an expert,
 * and the arrays that they need. */
#ifndef TRIRUN_CPU_DECODER_EXPERTS_H
#define TRIRUN_CPU_DECODER_EXPERTS_H

#include <math.h>
#include <string.h>

#include "cpu/common/memory.h"
#include "cpu/decoder/ops/ops.h"
#include "cpu/gemm/isa.h"

namespace trirun {
namespace {

constexpr int64_t kMostExperts = 512, kMostChosen = 32, kMostExpertGroups = 32;

/* What the router computes: a logit of every expert, and one of the shared expert's gate behind them. */
inline int64_t router_outputs(const trirun_mixture& m) { return m.experts + m.shared_gate; }

/* A row's experts, in descending order of the choice, and their weights; and the shared expert's. */
struct Choice {
  int32_t ids[kMostChosen];
  float weights[kMostChosen];
  float shared;
};

inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* Experts outside of the best groups are not to be chosen; a group's score is the sum of its two best (DeepSeek-V3). */
inline void mask_groups(const trirun_mixture& m, float* scores) {
  const int64_t size = m.experts / m.groups;
  float sums[kMostExpertGroups];
  for (int64_t g = 0; g < m.groups; ++g) {
    float best = -INFINITY, second = -INFINITY;
    for (int64_t i = g * size; i < (g + 1) * size; ++i) {
      if (scores[i] > best) {
        second = best;
        best = scores[i];
      } else if (scores[i] > second) {
        second = scores[i];
      }
    }
    sums[g] = best + second;
  }
  for (int64_t g = 0; g < m.groups; ++g) {
    int64_t rank = 0;
    for (int64_t other = 0; other < m.groups; ++other)
      rank += sums[other] > sums[g] || (sums[other] == sums[g] && other < g);
    for (int64_t i = 0; rank >= m.top_groups && i < size; ++i) scores[g * size + i] = -INFINITY;
  }
}

/* From a row's logits. Of equals the expert with the smaller index is taken. A logit that is no number makes all of the
 * row's weights none. */
inline void choose_experts(const trirun_mixture& m, const float* logits, Choice* out) {
  float scores[kMostExperts], choice[kMostExperts], most = -INFINITY, sum = 0;
  bool numbers = true;
  for (int64_t e = 0; e < m.experts; ++e) {
    scores[e] = logits[e] + (m.bias ? m.bias[e] : 0.0f);
    numbers &= scores[e] == scores[e];
    most = scores[e] > most ? scores[e] : most;
  }
  for (int64_t e = 0; e < m.experts; ++e) {
    scores[e] = m.score == TRIRUN_ROUTE_SOFTMAX ? expf(scores[e] - most) : sigmoid(scores[e]);
    sum += scores[e];
    choice[e] = scores[e] + (m.correction ? m.correction[e] : 0.0f);
  }
  if (m.groups > 1) mask_groups(m, choice);
  float total = 0;
  for (int64_t j = 0; j < m.top_k; ++j) {
    int64_t best = -1;
    for (int64_t e = 0; e < m.experts; ++e) {
      bool taken = false;
      for (int64_t i = 0; i < j; ++i) taken |= out->ids[i] == e;
      if (!taken && (best < 0 || choice[e] > choice[best])) best = e;
    }
    out->ids[j] = static_cast<int32_t>(best);
    out->weights[j] = scores[best];
    total += scores[best];
  }
  /* Of a softmax that is normalised, its own sum cancels. */
  const float tiny = m.score == TRIRUN_ROUTE_SIGMOID ? 1e-20f : 0.0f;
  const float by = m.normalize ? total + tiny : m.score == TRIRUN_ROUTE_SOFTMAX ? sum : 1.0f;
  for (int64_t j = 0; j < m.top_k; ++j) out->weights[j] = numbers ? out->weights[j] / by * m.scale : NAN;
  for (int64_t j = 0; m.expert_scale && j < m.top_k; ++j) out->weights[j] *= m.expert_scale[out->ids[j]];
  out->shared = m.shared_gate ? sigmoid(logits[m.experts]) : 1.0f;
}

/* Rows [first, first + count) of an act. */
inline trirun_act rows_of(const trirun_act& act, int64_t first, int64_t count) {
  trirun_act rows = act;
  rows.limbs += first * (act.act_bits / 8) * act.k;
  rows.scales += first * (act.act_bits == TRIRUN_ACT8 ? 1 : act.k / 128);
  rows.sums += first * (act.k / 32);
  rows.m = count;
  return rows;
}

/* Row `from` of one act to row `to` of another of the same width. */
inline void copy_row(const trirun_act& target, int64_t to, const trirun_act& source, int64_t from) {
  const trirun_act a = rows_of(target, to, 1), b = rows_of(source, from, 1);
  memcpy(a.limbs, b.limbs, static_cast<size_t>(a.act_bits / 8 * a.k));
  memcpy(a.scales, b.scales, static_cast<size_t>(a.act_bits == TRIRUN_ACT8 ? 1 : a.k / 128) * sizeof(float));
  memcpy(a.sums, b.sums, static_cast<size_t>(a.k / 32) * sizeof(int32_t));
}

/* Pairs of a row and one of its experts, sorted by expert and by row within one. */
struct SortedPairs {
  int32_t* places;  // [rows][top_k]: of a pair
  int32_t* order;   // [rows * top_k]: pair at a place
  int32_t* firsts;  // [touched + 1]: first place of each expert that has pairs
  int32_t* experts; // [touched]
  int64_t* touched; // [1]

  void take(Arena& memory, int64_t rows, int64_t top_k) {
    places = memory.take<int32_t>(rows * top_k);
    order = memory.take<int32_t>(rows * top_k);
    firsts = memory.take<int32_t>(kMostExperts + 1);
    experts = memory.take<int32_t>(kMostExperts);
    touched = memory.take<int64_t>(1);
  }

  void sort(const trirun_mixture& m, const Choice* choices, int64_t rows) const {
    int32_t counts[kMostExperts + 1] = {0};
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < m.top_k; ++j) ++counts[choices[r].ids[j] + 1];
    *touched = 0;
    for (int64_t e = 0; e < m.experts; ++e) {
      if (counts[e + 1]) {
        firsts[*touched] = counts[e];
        experts[(*touched)++] = static_cast<int32_t>(e);
      }
      counts[e + 1] += counts[e];
    }
    firsts[*touched] = counts[m.experts];
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t j = 0; j < m.top_k; ++j) {
        const int32_t place = counts[choices[r].ids[j]]++, pair = static_cast<int32_t>(r * m.top_k + j);
        places[pair] = place;
        order[place] = pair;
      }
  }
};

}  // namespace
}  // namespace trirun
#endif
