// How attention is divided among CTAs: rows and key heads, and the keys of each. Made once a step, since positions are
// known on the device alone.
#pragma once

#include "parts.cuh"
#include "cuda/decoder/heads.cuh"

#include <algorithm>

namespace trirun::step {

// What the cache has of an element.
enum Element { FP16 = 0, BF16 = 1, INT8 = 2 };
template <int ELEMENT>
constexpr int ELEMENT_BYTES = ELEMENT == INT8 ? 1 : 2;

// Positions of a chunk: as many as fill it with keys and values, and are of one page.
__host__ __device__ constexpr int positions_of_chunk(int head_dim, int element_bytes) {
  const int positions = CHUNK_BYTES / (2 * head_dim * element_bytes);
  return positions < decoder::PAGE ? positions : decoder::PAGE;
}
template <int HD, int ELEMENT>
constexpr int CHUNK_POSITIONS = positions_of_chunk(HD, ELEMENT_BYTES<ELEMENT>);

constexpr int TILE_POSITIONS = 16;  // of a warp at a time

// New keys, and new values, lie as in a chunk, at the positions of its first tile: four of each quarter. Where those of
// so many rows end.
__host__ __device__ constexpr int newest_positions(int of_chunk, int rows) {
  constexpr int OF_QUARTER = TILE_POSITIONS / 4;
  static_assert(MAX_ROWS <= 2 * OF_QUARTER);
  return of_chunk / 4 <= OF_QUARTER || rows <= OF_QUARTER ? rows : of_chunk / 4 + rows - OF_QUARTER;
}

// Positions by which a split of the keys begins and ends: of a chunk, or of the two that have one tile.
template <int HD, int ELEMENT>
constexpr int SPAN_POSITIONS = std::max(CHUNK_POSITIONS<HD, ELEMENT>, TILE_POSITIONS);

// As of the decoder, of a position that the compiler knows is not negative.
__device__ __forceinline__ int64_t cache_offset(int page, int kv_heads, int kv_head, uint32_t position, int head_dim) {
  return decoder::cache_offset(page, kv_heads, kv_head, static_cast<int>(position % decoder::PAGE), head_dim);
}

// Warps that attend to other keys than each other.
__device__ __forceinline__ int workers_of(const StepArgs& a, int sides_log) {
  return 1 << (a.attending_log - sides_log);
}

// Either way of dividing is counted in keys, which take as long as what is beside them: an item, and of few keys a tile
// of eight warps.
constexpr uint32_t OF_ITEM = 256, FEWEST_KEYS = 128, TOO_MUCH = 1 << 24;

// Whole rows and key heads in rounds, each of which has so many splits of its keys at most, each of them among
// neighbouring CTAs of a cluster, which have one item then.
struct Rounds {
  int splits, members_log;
  uint32_t cost;  // keys
};

// A warp's lanes try a number of splits each. Beside items and keys it costs to put together what a cluster's CTAs
// have, and to join splits where readers do not do it.
template <typename Cta>
__device__ __forceinline__ Rounds rounds_of(const Cta& c, int items, int longest, int words) {
  constexpr int TOGETHER = 64, JOINING = 128, TRIED = 4;
  const int ctas = static_cast<int>(gridDim.x), splits = lane_anew() + 1;
  const bool by_readers = splits <= SPLITS_AT_ONCE && !sends_attended_headers(c.a.s);
  const int joining = splits == 1 || by_readers ? 0 : ceil_div(splits, SPLITS_AT_ONCE) * JOINING;
  const bool joinable = joining == 0 || c.item_rows_log() == 0;  // else by readers alone
  uint32_t least = ~0u;
#pragma unroll 1
  for (int log = 0; log <= c.cluster_log() && may_be_together(words, log); log++) {
    const int groups = ctas >> log, rounds = ceil_div(items, max(groups / splits, 1)), parts = splits << log;
    const bool fits = splits <= groups && rounds <= (log == 0 ? MAX_ITEMS : 1) && parts <= MAX_SPLITS && joinable;
    const uint32_t keys = max(static_cast<uint32_t>(ceil_div(longest, parts)), FEWEST_KEYS);
    const uint32_t of_item = OF_ITEM + keys + (log > 0 ? TOGETHER : 0) + joining;
    least = min(least, (fits ? rounds * of_item : TOO_MUCH) * (MAX_SPLITS * TRIED) + (splits - 1) * TRIED + log);
  }
  least = __reduce_min_sync(~0u, least);
  return {static_cast<int>(least / TRIED % MAX_SPLITS) + 1, static_cast<int>(least % TRIED),
          least / (MAX_SPLITS * TRIED)};
}

// The keys of all pairs of a row and a key head as one sequence, of which every CTA has an equal part, as stream-K
// divides a product (Osama et al., PPoPP 2023): rounds would leave CTAs idle. Counted in spans. No part of a pair is
// shorter than FEWEST, and a pair counts as so many at least.
template <int HD, int ELEMENT>
struct Sequence {
  static constexpr uint32_t SPAN = SPAN_POSITIONS<HD, ELEMENT>, FEWEST = FEWEST_KEYS / SPAN;
  // What another item costs where keys and values come without a pause: as many keys as have 32 KiB.
  static constexpr uint32_t OF_PIECE = 32768 / (2 * HD * ELEMENT_BYTES<ELEMENT>);
  uint32_t kv_heads, pairs, ctas;
  uint32_t of_pair, end;  // of the row that this lane has: a pair's spans, and where its pairs end
  uint32_t all;

  struct Pair {
    int row, kv_head;
    uint32_t begin, end;
  };

  // spans: of the row that this lane has, where there is one.
  __device__ __forceinline__ Sequence(int rows, int kv_heads, int spans)
      : kv_heads(kv_heads), pairs(rows * kv_heads), ctas(gridDim.x) {
    const int lane = lane_anew();
    of_pair = lane < rows ? max(static_cast<uint32_t>(spans), FEWEST) : 0, end = of_pair * kv_heads;
#pragma unroll
    for (int offset = 1; offset < MAX_ROWS; offset *= 2) {
      const uint32_t before = __shfl_sync(~0u, end, max(lane - offset, 0));
      if (lane >= offset) end += before;
    }
    all = __shfl_sync(~0u, end, MAX_ROWS - 1);
  }

  // The pair that has a span. Every lane asks for one of its own.
  __device__ __forceinline__ Pair pair_of(uint32_t span) const {
    int row = 0;
#pragma unroll
    for (int i = 0; i < MAX_ROWS - 1; i++) row += span >= __shfl_sync(~0u, end, i);
    const uint32_t spans = __shfl_sync(~0u, of_pair, row), first = __shfl_sync(~0u, end, row) - spans * kv_heads;
    const uint32_t kv_head = (span - first) / spans, begin = first + kv_head * spans;
    return {row, static_cast<int>(kv_head), begin, begin + spans};
  }

  // Where a CTA's part begins.
  __device__ __forceinline__ uint32_t begin_of(uint32_t cta) const {
    const uint32_t span = all * cta / ctas;
    const Pair pair = pair_of(span);
    return span - pair.begin < FEWEST ? pair.begin : pair.end - span < FEWEST ? pair.end : span;
  }

  // What it would cost; too much where there is no room for it, or readers do not join parts.
  __device__ __forceinline__ uint32_t cost(bool readers_join) const {
    const uint32_t part = ceil_div(all, ctas), longest = __reduce_max_sync(~0u, of_pair);
    const uint32_t shortest = __reduce_min_sync(~0u, of_pair > 0 ? of_pair : ~0u);
    if (!readers_join || part < 2 * FEWEST || all > ~0u / ctas) return TOO_MUCH;
    // Pieces of a part that begins and ends where a pair does, of one that does either, and of others.
    const uint32_t pieces =
        max(max((part + 2 * FEWEST) / shortest, part / shortest + 1), (part - 2 * FEWEST) / shortest + 2);
    const bool fits = pieces <= MAX_ITEMS && longest / (part - 1) + 2 <= SPLITS_AT_ONCE;
    return fits ? OF_ITEM + part * SPAN + (pieces - 1) * OF_PIECE : TOO_MUCH;
  }

  // Says in a plan where all parts begin, and of how many CTAs every pair has one: of each of an item's rows.
  __device__ __forceinline__ void divide(AttentionPlan& plan, int item_rows_log) const {
#pragma unroll 1
    for (uint32_t base = 0; base < ctas; base += 32) {
      const uint32_t cta = base + lane_anew(), begin = begin_of(min(cta, ctas - 1));
      if (cta < ctas) plan.begins[cta] = begin;
    }
    if (lane_anew() == 0) plan.begins[ctas] = all;
    __syncwarp();
#pragma unroll 1
    for (uint32_t base = 0; base < pairs; base += 32) {
      const uint32_t pair = min(base + lane_anew(), pairs - 1), row = pair / kv_heads;
      const uint32_t spans = __shfl_sync(~0u, of_pair, row);
      const uint32_t to = __shfl_sync(~0u, end, row) - (kv_heads - 1 - pair % kv_heads) * spans;
      const int splits = cta_of(plan, to - 1) - cta_of(plan, to - spans) + 1;
      for (uint32_t i = row << item_rows_log; i < (row + 1) << item_rows_log; i++)
        plan.splits[i * kv_heads + pair % kv_heads] = splits;
    }
    __syncwarp();
  }

  // The CTA whose part has a span.
  __device__ __forceinline__ int cta_of(const AttentionPlan& plan, uint32_t span) const {
    uint32_t cta = span * ctas / all;
    while (plan.begins[cta] > span) cta--;
    while (plan.begins[cta + 1] <= span) cta++;
    return static_cast<int>(cta);
  }
};

// What a CTA attends to, one row and key head after another, and with which part of their keys: made once, by a warp.
template <int HD, int ELEMENT, typename Cta>
__device__ __forceinline__ void plan_items(const Cta& c) {
  constexpr int SPAN = SPAN_POSITIONS<HD, ELEMENT>;
  const trirun_cuda_step& s = c.a.s;
  const int workers = workers_of(c.a, sides_log_of(c.a.columns, s.head_dim)), kv_heads = static_cast<int>(s.kv_heads);
  const int rows_log = c.item_rows_log(), last_row = c.item_rows() - 1;
  const int all_rows = static_cast<int>(s.m), rows = all_rows >> rows_log, all = rows * kv_heads, lane = lane_anew();
  AttentionPlan& plan = const_cast<AttentionPlan&>(c.plan());
  // What a lane knows of an item's rows, asked for at once, and of any item's from the lane that has it. Here an item's
  // rows, all of one text, count as one.
  const int mine = min(lane, rows - 1), first_row = mine << rows_log, slot = s.slots[first_row];
  int padding = 0;
  for (int row = 1; row <= last_row; row++) padding += slot >= 0 && s.slots[first_row + row] < 0;
  const int position = slot < 0 ? last_row : max(s.positions[first_row + last_row - padding], 0) + padding;
  const auto page_of = [&](int of) { return slot < 0 ? 0 : s.block_tables[slot * s.ld_blocks + of / decoder::PAGE]; };
  const int page = page_of(position - padding), first_page = Cta::ONE_ROW ? page : page_of(position - last_row);
  const auto of_row = [&](int value, int row) { return Cta::ONE_ROW ? value : __shfl_sync(~0u, value, row); };
  // Rows of the same sequence up to the last one, whose keys the cache does not have yet.
  int before = 0;
  if constexpr (!Cta::ONE_ROW)
    for (int back = 1; back < MAX_ROWS; back++)
      before += of_row(slot, max(mine - back, 0)) == slot && slot >= 0 && before == back - 1 && mine >= back;
  const int fresh = (before + 1) << rows_log, length = slot < 0 ? 0 : position - fresh + 1;
  // A part of the keys of a row and key head; newest: with the new ones.
  const auto item_of = [&](int row, int kv_head, int first, int last, bool newest) {
    Item item{};
    item.row = (row << rows_log) + last_row, item.kv_head = kv_head, item.slot = of_row(slot, row);
    item.position = of_row(position, row), item.padding = of_row(padding, row), item.fresh = of_row(fresh, row);
    item.page = of_row(page, row), item.first_page = of_row(first_page, row);
    item.last_row = last_row, item.row_columns_log = c.a.row_columns_log;
    item.first = first, item.last = last, item.newest = newest, item.positions = of_row(length, row) - first * SPAN;
    item.tiles = (last - first) * (SPAN / TILE_POSITIONS) + newest;
    item.parts = min(workers, item.tiles);
    return item;
  };
  int count = 0;
  const auto add = [&](const Item& item) {
    if (lane == 0) plan.items[count] = item;
    count++;
  };
  const int longest = Cta::ONE_ROW ? length : __reduce_max_sync(~0u, length), words = c.a.columns * HD / 4;
  const Rounds in_rounds = rounds_of(c, all, longest, words);
  if constexpr (!Cta::ONE_ROW) {
    const int spans = lane < rows ? ceil_div(length, SPAN) : 0;
    const Sequence<HD, ELEMENT> sequence(rows, kv_heads, spans);
    if (sequence.cost(!sends_attended_headers(s)) < in_rounds.cost) {
      sequence.divide(plan, rows_log);
      const uint32_t end = plan.begins[blockIdx.x + 1];
      for (uint32_t from = plan.begins[blockIdx.x], to; from < end; from = to) {
        const auto pair = sequence.pair_of(from);
        const int of_pair = __shfl_sync(~0u, spans, pair.row);
        to = min(end, pair.end);
        Item item = item_of(pair.row, pair.kv_head, min(static_cast<int>(from - pair.begin), of_pair),
                            min(static_cast<int>(to - pair.begin), of_pair), to == pair.end);
        item.split = static_cast<int>(blockIdx.x) - sequence.cta_of(plan, pair.begin), item.splits = OF_READERS;
        add(item);
      }
      if (lane < all_rows) plan.rows[lane] = {OF_READERS, 1, 1};
      if (lane == 0) plan.item_count = count, plan.members_log = 0;
      return;
    }
  }
  const int log = in_rounds.members_log, group = static_cast<int>(blockIdx.x) >> log;
  const int stride = static_cast<int>(gridDim.x >> log) / in_rounds.splits, split = group % in_rounds.splits;
  // A row of few keys has fewer splits: so many that every warp has one tile.
  const int of_split = (min(workers, 8) * TILE_POSITIONS) << log;
  const auto share_of = [&](int givers) {
    return ceil_div(words, givers * SPLITS_AT_ONCE) * SPLITS_AT_ONCE;  // as they are joined
  };
  for (int row = 0; row < all_rows; row++) {
    const int keys = of_row(length, row >> rows_log);
    const int splits = max(1, min(in_rounds.splits, ceil_div(keys, of_split))), givers = splits << log;
    const int given = splits == 1 ? words >> log : share_of(givers);
    if (lane == 0) plan.rows[row] = {splits, givers, min(JOINERS, ceil_div(given, 32))};
    if constexpr (!Cta::ONE_ROW)
      for (int kv_head = lane; kv_head < kv_heads; kv_head += 32) plan.splits[row * kv_heads + kv_head] = splits;
  }
  __syncwarp();
  // CTAs beyond the last whole group of splits have nothing to do.
  for (int at = group / in_rounds.splits; group / in_rounds.splits < stride && at < all; at += stride) {
    const int row = at / kv_heads, member = static_cast<int>(blockIdx.x) & ((1 << log) - 1);
    const int giver = (split << log) + member, spans = ceil_div(of_row(length, row), SPAN);
    const RowSplits parts = plan.rows[row << rows_log];
    const int part = min(giver, parts.givers);
    Item item = item_of(row, at % kv_heads, spans * part / parts.givers,
                        spans * min(part + 1, parts.givers) / parts.givers, giver == parts.givers - 1);
    item.split = split, item.splits = parts.splits, item.member = member, item.giver = giver;
    item.first_word = min(share_of(parts.givers) * giver, words);
    item.last_word = min(item.first_word + share_of(parts.givers), words);
    if (item.split < item.splits) add(item);
  }
  if (lane == 0) plan.item_count = count, plan.members_log = log;
}

}  // namespace trirun::step
