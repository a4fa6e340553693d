// The choice of a row's experts from the router's logits, by one warp. No step depends on the order in which others
// arrive: of equals the expert with the smaller index is taken.
#pragma once

#include "experts.cuh"
#include "cuda/common/elements.cuh"
#include "cuda/decoder/launch.cuh"

namespace trirun::experts {

using decoder::from_ordered;
using decoder::ordered_bits;
using decoder::warp_sum;

__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + expf(-v)); }

// The place of the largest value of a warp, of equals the first: the values are `keys` of expert lane + 32 i. Taken
// ones are 0, which no other key is.
template <int PER_LANE>
__device__ __forceinline__ int take_largest(uint32_t (&keys)[PER_LANE]) {
  const int lane = threadIdx.x % 32;
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) most = max(most, keys[i]);
  most = __reduce_max_sync(~0u, most);
  int at = MOST_EXPERTS;
#pragma unroll
  for (int i = PER_LANE - 1; i >= 0; i--)
    if (keys[i] == most) at = lane + 32 * i;
  at = static_cast<int>(__reduce_min_sync(~0u, static_cast<unsigned>(at)));
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (lane + 32 * i == at) keys[i] = 0;
  return at;
}

__device__ __forceinline__ uint32_t key_of(float v) { return max(ordered_bits(v), 1u); }

// Experts outside of the best groups are not to be chosen; a group's score is the sum of its two best (DeepSeek-V3).
template <int PER_LANE>
__device__ __forceinline__ void mask_groups(const trirun_route& r, float (&scores)[PER_LANE], float* shared) {
  const int lane = threadIdx.x % 32, size = r.experts / r.groups;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (lane + 32 * i < r.experts) shared[lane + 32 * i] = scores[i];
  __syncwarp();
  float best = -INFINITY, second = -INFINITY;
  for (int i = 0; lane < r.groups && i < size; i++) {
    const float v = shared[lane * size + i];
    second = fmaxf(second, fminf(best, v)), best = fmaxf(best, v);
  }
  const float mine = lane < r.groups ? best + second : -INFINITY;
  int rank = 0;
  for (int g = 0; g < r.groups; g++) {
    const float other = __shfl_sync(~0u, mine, g);
    rank += other > mine || (other == mine && g < lane);
  }
  const unsigned chosen = __ballot_sync(~0u, lane < r.groups && rank < r.top_groups);
#pragma unroll
  for (int i = 0; i < PER_LANE; i++)
    if (!(chosen >> (lane + 32 * i) / size % 32 & 1)) scores[i] = -INFINITY;
  __syncwarp();
}

// Writes which experts a row goes to and what they weigh: lane j has the j-th, and is left with it, or with -1.
// padding: the row goes nowhere.
__device__ __forceinline__ int store_choice(const trirun_route& r, int row, bool padding, int expert, float score,
                                            float sum) {
  const int lane = threadIdx.x % 32;
  const bool chosen = lane < r.top_k;
  const float total = warp_sum(chosen ? score : 0.f);
  if (!chosen || padding) expert = -1;
  if (chosen) {
    const int64_t pair = static_cast<int64_t>(row) * r.top_k + lane;
    r.ids[pair] = expert;
    const float by = r.normalize ? total + (r.score == TRIRUN_ROUTE_SIGMOID ? 1e-20f : 0.f) : sum;
    const float factor = r.expert_scale != nullptr && expert >= 0 ? __ldg(r.expert_scale + expert) : 1.f;
    r.weights[pair] = padding ? 0.f : score / by * r.scale * factor;
  }
  return expert;
}

// By one warp: the experts of the row whose logits are in r.logits; lane j is left with the j-th, or -1. shared:
// [max(64, experts)] of this warp.
template <int PER_LANE>
__device__ __forceinline__ int choose(const trirun_route& r, int row, float* shared) {
  const int lane = threadIdx.x % 32;
  const float* logits = r.logits + static_cast<int64_t>(row) * r.ld;
  const bool padding = r.slots != nullptr && r.slots[row] < 0;
  float scores[PER_LANE];
  float most = -INFINITY;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int expert = lane + 32 * i;
    scores[i] = -INFINITY;
    if (expert < r.experts) scores[i] = __ldcg(logits + expert) + (r.bias != nullptr ? r.bias[expert] : 0.f);
    most = fmaxf(most, scores[i]);
  }
  float sum = 1.f;  // of all scores, if that is what weights are relative to
  if (r.score == TRIRUN_ROUTE_SOFTMAX) {
    most = from_ordered(__reduce_max_sync(~0u, ordered_bits(most)));
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
      scores[i] = lane + 32 * i < r.experts ? expf(scores[i] - most) : 0.f;
      sum += scores[i];
    }
    // Of a softmax that is normalised, its own sum cancels, but not beside a correction.
    sum = !r.normalize || r.correction != nullptr ? warp_sum(sum) : 1.f;
  } else {
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) scores[i] = lane + 32 * i < r.experts ? sigmoid(scores[i]) : 0.f;
  }
  float choice[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const int expert = lane + 32 * i;
    choice[i] = scores[i] / sum + (r.correction != nullptr && expert < r.experts ? r.correction[expert] : 0.f);
  }
  if (r.groups > 1) mask_groups(r, choice, shared);
  uint32_t keys[PER_LANE];  // 0 where there is no expert
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) keys[i] = lane + 32 * i < r.experts ? key_of(choice[i]) : 0;
  // The j-th one's score and number: nothing in the loop waits for what goes through shared memory.
#pragma unroll 1  // unrolled, it takes registers that the router needs
  for (int j = 0; j < r.top_k; j++) {
    const int at = take_largest(keys);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++)
      if (lane + 32 * i == at) shared[j] = scores[i], shared[32 + j] = __int_as_float(at);
  }
  __syncwarp();
  if (r.shared_weights != nullptr && lane == 0) r.shared_weights[row] = sigmoid(__ldcg(logits + r.experts));
  return store_choice(r, row, padding, __float_as_int(shared[32 + lane]), shared[lane], sum);
}

// Sorts the pairs of a single row, whose experts the lanes of a warp have: none has more than one of its tiles.
template <int PER_LANE>
__device__ __forceinline__ void sort_one(const trirun_route& r, int tile_bound, int expert) {
  const int lane = threadIdx.x % 32;
  const uint32_t up_to = 0xffffffffu >> (31 - lane);  // lanes up to this one
  int place = 0, before = 0;
#pragma unroll
  for (int i = 0; i < PER_LANE; i++) {
    const bool within = expert >= 0 && expert / 32 == i;
    const uint32_t taken = __reduce_or_sync(~0u, within ? 1u << expert % 32 : 0u);
    if (within) place = before + __popc(taken & ((1u << expert % 32) - 1));
    if (r.ends != nullptr && lane + 32 * i < r.experts) r.ends[lane + 32 * i] = before + __popc(taken & up_to);
    before += __popc(taken);
  }
  if (lane < r.top_k) r.places[lane] = expert < 0 ? -1 : place;
  if (expert >= 0) {
    r.order[place] = lane;
    store_tile(r.tiles, place, {expert, place, 1});
  }
  for (int i = before + lane; i < tile_bound; i += 32) store_tile(r.tiles, i, {-1, 0, 0});
}

}  // namespace trirun::experts
