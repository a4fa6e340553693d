// Warps that put attention's output together, some of those that attend: they add up what their CTA's warps have of a
// key head, share it with the cluster's CTAs where these share its keys, and join the splits' parts or leave that to
// readers.
#pragma once

#include "parts.cuh"

#include <type_traits>

namespace trirun::step {

template <typename Cta>
struct Joiner {
  Cta& c;

  __device__ __forceinline__ int joiner() const { return c.warp() - (WARPS - JOINERS); }

  // What this CTA's warps have of its part of the keys: a word a lane. A warp's part is the words of a head, then its
  // header, head by head.
  __device__ __forceinline__ Part joined(int word, int parts, int stride) const {
    const int head = word >> c.a.head_words_log;
    const uint32_t of_parts = c.shared + c.a.at.attention;
    uint32_t from = of_parts + (word + head) * 16;
    uint32_t header = of_parts + (((head + 1) << c.a.head_words_log) + head) * 16;
    // Neighbouring lanes, whose words are of the same head, look for its largest score.
    const int mine = c.lane() % WARPS;
    Part part;
    if (mine < parts) part.most = load_shared_float(header + mine * stride);
#pragma unroll
    for (int offset = 1; offset < WARPS; offset *= 2)
      part.most = fmaxf(part.most, __shfl_xor_sync(~0u, part.most, offset));
    const auto add = [&](auto at_once) {
      constexpr int COUNT = decltype(at_once)::value;
      float4 values[COUNT];
      float2 headers[COUNT];
#pragma unroll
      for (int i = 0; i < COUNT; i++)
        headers[i] = load_shared_float2(header + i * stride), values[i] = load_shared_float4(from + i * stride);
#pragma unroll
      for (int i = 0; i < COUNT; i++) {
        const float factor = exp2_approximate(headers[i].x - part.most);
        part.add_values(values[i], factor), part.weights += factor * headers[i].y;
      }
      from += COUNT * stride, header += COUNT * stride, parts -= COUNT;
    };
#pragma unroll 1
    while (parts >= 4) add(std::integral_constant<int, 4>{});
#pragma unroll 1
    while (parts > 0) add(std::integral_constant<int, 1>{});
    return part;
  }

  // The CTAs of a cluster that share an item, and put together what they have of its output: each a share of its words.
  struct Team {
    int log, member, share, head_words_log;
    uint32_t buffer;  // shared address, of every CTA
    float of_share;  // 1 / share

    __device__ __forceinline__ int stride() const { return shared_stride(share, 1 << head_words_log); }
    __device__ __forceinline__ int first_head(int owner) const { return (owner * share) >> head_words_log; }
    __device__ __forceinline__ int bytes() const {
      const int heads = (((member + 1) * share - 1) >> head_words_log) - first_head(member) + 1;
      return (share + heads) << log << 4;
    }
  };

  // A word of what this CTA has, to the CTA that puts it together; with the first of a head its header.
  __device__ __forceinline__ void share_word(const Team& team, int word, const Part& part) const {
    const int owner = static_cast<int>((static_cast<float>(word) + 0.5f) * team.of_share);
    const int within = word - owner * team.share, head = word >> team.head_words_log;
    const int rank = (c.rank() & ~((1 << team.log) - 1)) | owner;
    const uint32_t to = peer_address(team.buffer + team.member * team.stride() * 16, rank);
    const uint32_t barrier = peer_address(c.together_barrier(), rank);
    store_peer_counted(to + within * 16, part.values, barrier);
    if (within == 0 || word == head << team.head_words_log)
      store_peer_counted(to + (team.share + head - team.first_head(owner)) * 16,
                         make_float4(part.most, part.weights, 0.f, 0.f), barrier);
  }

  // What all of them have of one of this CTA's words. As many neighbouring lanes as there may be CTAs want words of one
  // head, and have a header each.
  __device__ __forceinline__ Part shared_part(const Team& team, int within) const {
    constexpr int LANES = SPLITS_AT_ONCE;
    static_assert(LANES >= MAX_CLUSTER && may_be_together(LANES, 0) && !may_be_together(LANES, 1));
    const int lane = c.lane(), members = 1 << team.log, mine = lane % LANES;
    const int head = ((team.member * team.share + within) >> team.head_words_log) - team.first_head(team.member);
    const uint32_t from = team.buffer + within * 16, step = team.stride() * 16;
    const bool there = mine < members;
    const float2 header = load_shared_float2(team.buffer + (there ? mine : 0) * step + (team.share + head) * 16);
    Part part;
    part.most = header.x;
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2)
      part.most = fmaxf(part.most, __shfl_xor_sync(~0u, part.most, offset));
    const float factor = there ? exp2_approximate(header.x - part.most) : 0.f, weights = factor * header.y;
#pragma unroll 2
    for (int i = 0; i < members; i++) {
      const int of_member = (lane & ~(LANES - 1)) + i;
      part.add_values(load_shared_float4(from + i * step), __shfl_sync(~0u, factor, of_member));
      part.weights += __shfl_sync(~0u, weights, of_member);
    }
    return part;
  }

  // An item, from what this CTA's warps have of it to what the output projection reads.
  __device__ __forceinline__ void run() const {
    c.begin_phase();
    const int index = c.in_hand().phase / PRODUCTS;
    const trirun_cuda_step_layer& layer = c.layer(index);
    const uint32_t tag = c.tag(index);
    const Item& span = c.item();
    const bool headers = sends_attended_headers(c.a.s);
    const int members_log = c.plan().members_log;
    const int splits = span.splits, lane = c.lane(), parity = c.item_parity(index, c.in_hand().item);
    const int first_row = span.row - (c.item_rows() - 1), kv_heads = static_cast<int>(c.a.s.kv_heads);
    const Parts of_row{c, first_row, span.kv_head};
    const int row_words = of_row.words(), words = c.a.columns << c.a.head_words_log;
    float4* split_words = of_row.of_split(span.split);
    float squares = 0.f;
    uint32_t largest = 0;
    const auto give = [&](int word, const Part& part) {
      const float4 v = part.attended();
      float4 sent = v;
      const int row = c.row_of_word(word);
      const uint32_t at = span.kv_head * row_words + word - row * row_words;
      if (layer.attention_sub_norm != nullptr) {
        const float* norm = layer.attention_sub_norm + at / 4 * 16 + at % 4 * 2;
        const float2 low = load_constant2(norm), high = load_constant2(norm + 8);
        sent = make_float4(v.x * low.x, v.y * low.y, v.z * high.x, v.w * high.y);
      }
      send(c.a.attended + kv_heads * row_words * (first_row + row) + at, reordered(sent), tag);
      squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      largest = max(largest, magnitude_bits(sent));
    };
    // The output of all keys, or a part for whoever joins the splits.
    const auto hand = [&](int word, const Part& part) {
      if (splits == 1) return give(word, part);
      const int row = c.row_of_word(word), of_row = word - row * row_words, head = of_row >> c.a.head_words_log;
      float4* to = split_words + row * kv_heads * MAX_SPLITS * (row_words + c.a.group);
      send(to + of_row, part.values, tag);
      if (of_row == head << c.a.head_words_log)
        send(to + row_words + head, make_float4(part.most, part.weights, 0.f, 0.f), tag);
    };
    const int share = words >> members_log, parts_of_item = kept(span.parts, lane);
    const int part_bytes = min(c.a.columns, HEADS) * part_floats(c.a.s.head_dim) * 4;
    const int stride = kept(part_bytes << groups_log_of(c.a.columns), lane);
    const Team team{members_log,           span.member, share, c.a.head_words_log, c.shared + c.a.at.together,
                    __fdividef(1.f, share)};
    if (members_log > 0 && joiner() == 0 && lane == 0) barrier_expect(c.together_barrier(), team.bytes());
    meet_parts();
    if (joiner() == 0 && lane == 0) barrier_arrive(c.parts_barrier());
#pragma unroll 1
    for (int base = joiner() * 32; base < words; base += JOINERS * 32) {
      const bool mine = base + lane < words;
      const int word = mine ? base + lane : base;
      const Part part = joined(word, parts_of_item, stride);
      if (mine && members_log > 0)
        share_word(team, word, part);
      else if (mine)
        hand(word, part);
    }
    if (members_log > 0) {
      barrier_wait_warp(c.together_barrier(), parity);
#pragma unroll 1
      for (int base = joiner() * 32; base < share; base += JOINERS * 32) {
        const bool mine = base + lane < share;
        const int within = mine ? base + lane : base;
        const Part part = shared_part(team, within);
        if (mine) hand(span.member * share + within, part);
      }
    }
    if (splits > 1 && !joined_by_readers(c, span.row)) {
#pragma unroll 1
      for (int base = span.first_word + joiner() * 32; base < span.last_word; base += JOINERS * 32) {
        const bool mine = base + lane < span.last_word;
        const int word = mine ? base + lane : base;
        Part part;
#pragma unroll 1
        for (int split = 0; split < splits; split += SPLITS_AT_ONCE) of_row.join(part, word, split, splits, mine, tag);
        if (mine) give(word, part);
      }
    }
    if (!headers || joiner() >= c.plan().rows[span.row].giving_warps) return;
    squares = decoder::warp_sum(squares);
    largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) send(header(span), make_float4(squares, __uint_as_float(largest), 0.f, 0.f), tag);
  }

  // Takes away what was sent of an item, when all have read it. Another step may have another number of splits, whose
  // parts and headers lie elsewhere, and a later one could find the tag that it looks for on what was left here.
  __device__ __forceinline__ void clear(const Item& span) const {
    constexpr Relaxed16 NONE{0, 0};
    if (span.splits > 1)
      for (int back = 0; back < c.item_rows(); back++) {
        const Parts of_row{c, span.row - back, span.kv_head};
        for (int i = c.warp() * 32 + c.lane(); i < of_row.words() + c.a.group; i += WARPS * 32)
          store_relaxed16(of_row.of_split(span.split) + i, NONE);
      }
    const RowSplits of_header = c.plan().rows[span.row];
    if (sends_attended_headers(c.a.s) && joiner() >= 0 && joiner() < of_header.giving_warps && c.lane() == 0)
      store_relaxed16(header(span), NONE);
  }

  // Where this warp's header of what it gave of an item goes.
  __device__ __forceinline__ float4* header(const Item& span) const {
    const RowSplits of_header = c.plan().rows[span.row];
    const int nth = (span.kv_head * of_header.givers + span.giver) * of_header.giving_warps + joiner();
    return c.a.attended_headers + nth * HEADER_WORDS + span.row;
  }
};

}  // namespace trirun::step
