// Attention's parts, each over some of the keys, and how they are put together: joining warps add up those of their CTA
// (join.cuh), whoever reads the result those of the splits where they are few, and else a CTA of each split its share.
#pragma once

#include "cta.cuh"

namespace trirun::step {

constexpr float NOTHING = -1e30f;  // a score below all others, of which differences are numbers

// Values times weights, which are 2^(score - most): that part of the keys' largest score.
struct Part {
  float4 values = {0.f, 0.f, 0.f, 0.f};
  float most = NOTHING, weights = 0.f;

  __device__ __forceinline__ void rescale(float to) {
    const float factor = exp2_approximate(most - to);
    values = scaled(values, factor), weights *= factor, most = to;
  }
  __device__ __forceinline__ void add_values(float4 v, float factor) {
    values = make_float4(fmaf(v.x, factor, values.x), fmaf(v.y, factor, values.y), fmaf(v.z, factor, values.z),
                         fmaf(v.w, factor, values.w));
  }
  __device__ __forceinline__ float4 attended() const { return scaled(values, reciprocal_approximate(weights)); }
};

constexpr int SPLITS_AT_ONCE = 8;  // that are added up

// Parts as messages: [row][key head][split][words of the group's heads, then a header of each head].
template <typename Cta>
struct Parts {
  const Cta& c;
  int row, kv_head;

  __device__ __forceinline__ int words() const { return c.a.group << c.a.head_words_log; }
  __device__ __forceinline__ float4* of_split(int split) const {
    const int kv_heads = static_cast<int>(c.a.s.kv_heads);
    return c.a.partial + ((row * kv_heads + kv_head) * MAX_SPLITS + split) * (words() + c.a.group);
  }

  // Adds up to SPLITS_AT_ONCE splits' parts of a word, those from `first` on. As many neighbouring lanes want words of
  // one head: each waits for another split's header, which is sent last, and asks for words once a header is there. All
  // words from the beginning would be more to ask for, again and again, than L2 can bring.
  __device__ __forceinline__ void join(Part& part, int word, int first, int splits, bool wanted, uint32_t tag) const {
    const int lane = lane_anew(), mine = lane % SPLITS_AT_ONCE, stride = words() + c.a.group;
    const float4* own = of_split(first);
    const bool there = first + mine < splits;
    const float4* at_header = own + (there ? mine : 0) * stride + words() + (word >> c.a.head_words_log);
    Word header_word, in[SPLITS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < SPLITS_AT_ONCE; i++) in[i] = {0, 0, 0, 0};
    uint32_t missing = wanted ? (1 << min(splits - first, SPLITS_AT_ONCE)) - 1 : 0;
    bool waits = true, begun = false;
    int spins = SPINS;
#pragma unroll 1
    for (;;) {
      if (waits) header_word = Word::load(at_header);
      if (begun) {
#pragma unroll
        for (int i = 0; i < SPLITS_AT_ONCE; i++)
          if (missing >> i & 1) in[i] = Word::load(own + word + i * stride);
#pragma unroll
        for (int i = 0; i < SPLITS_AT_ONCE; i++)
          if (in[i].carries(tag)) missing &= ~(1u << i);
      }
      waits = !header_word.carries(tag);
      if (!__any_sync(~0u, waits || missing != 0)) break;
      begun = begun || __any_sync(~0u, !waits);
      if (--spins > 0) continue;
      spins = SPINS;
      if (__any_sync(~0u, patience_over(c.patience().status, c.patience().deadline))) break;
    }
    const float4 header = header_word.values();
    float most = there ? header.x : NOTHING;
#pragma unroll
    for (int offset = 1; offset < SPLITS_AT_ONCE; offset *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    most = fmaxf(most, part.most);
    const float factor = there ? exp2_approximate(header.x - most) : 0.f;
    float weights = factor * header.y;
#pragma unroll
    for (int offset = 1; offset < SPLITS_AT_ONCE; offset *= 2) weights += __shfl_xor_sync(~0u, weights, offset);
    if (first > 0) part.rescale(most);
    part.most = most, part.weights += weights;
#pragma unroll
    for (int i = 0; i < SPLITS_AT_ONCE; i++)
      part.add_values(in[i].values(), __shfl_sync(~0u, factor, (lane & ~(SPLITS_AT_ONCE - 1)) + i));
  }
};

template <typename Cta>
Parts(const Cta&, int, int) -> Parts<Cta>;

// Whether a header of each row is wanted of attention's output: then its values have to be known before they are read.
__host__ __device__ __forceinline__ bool sends_attended_headers(const trirun_cuda_step& s) {
  return s.act_bits == TRIRUN_ACT8 || s.attention_sub_norm != 0;
}

// Parts of a row and key head's keys.
template <typename Cta>
__device__ __forceinline__ int splits_of(const Cta& c, int row, int kv_head) {
  if constexpr (Cta::ONE_ROW) return c.plan().rows[row].splits;
  return c.plan().splits[row * static_cast<int>(c.a.s.kv_heads) + kv_head];
}

// Whether the splits' parts of a row are joined where they are read.
template <typename Cta>
__device__ __forceinline__ bool joined_by_readers(const Cta& c, int row) {
  const int splits = c.plan().rows[row].splits;
  return splits > 1 && splits <= SPLITS_AT_ONCE && !sends_attended_headers(c.a.s);
}

}  // namespace trirun::step
