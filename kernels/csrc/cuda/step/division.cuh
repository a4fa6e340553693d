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
template <int HD, int ELEMENT>
constexpr int CHUNK_POSITIONS = std::min(CHUNK_BYTES / (2 * HD * ELEMENT_BYTES<ELEMENT>), decoder::PAGE);

constexpr int TILE_POSITIONS = 16;  // of a warp at a time

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

// How keys are divided: into so many splits at most, each of them among neighbouring CTAs of a cluster, which have one
// item then.
struct Division {
  int splits, members_log;
};

// A warp's lanes try a number of splits each. All is counted in keys, which take as long: an item beside its own keys,
// of which few take as long as a tile of eight warps; putting together what a cluster's CTAs have; and joining splits,
// where readers do not do it.
template <typename Cta>
__device__ __forceinline__ Division divide_keys(const Cta& c, int items, int longest, int words) {
  constexpr int OF_ITEM = 256, FEWEST = 128, TOGETHER = 64, JOINING = 128, TRIED = 4;
  const int ctas = static_cast<int>(gridDim.x), splits = lane_anew() + 1;
  const bool by_readers = splits <= SPLITS_AT_ONCE && !sends_attended_headers(c.a.s);
  const int joining = splits == 1 || by_readers ? 0 : ceil_div(splits, SPLITS_AT_ONCE) * JOINING;
  uint32_t least = ~0u;
#pragma unroll 1
  for (int log = 0; log <= c.cluster_log() && may_be_together(words, log); log++) {
    const int groups = ctas >> log, rounds = ceil_div(items, max(groups / splits, 1)), parts = splits << log;
    const bool fits = splits <= groups && rounds <= (log == 0 ? MAX_ITEMS : 1) && parts <= MAX_SPLITS;
    const uint32_t of_item = OF_ITEM + max(ceil_div(longest, parts), FEWEST) + (log > 0 ? TOGETHER : 0) + joining;
    least = min(least, (fits ? rounds * of_item : 1u << 24) * (MAX_SPLITS * TRIED) + (splits - 1) * TRIED + log);
  }
  least = __reduce_min_sync(~0u, least);
  return {static_cast<int>(least / TRIED % MAX_SPLITS) + 1, static_cast<int>(least % TRIED)};
}

// What a CTA attends to, one row and key head after another, and with which part of their keys: made once, by a warp.
// A row of few keys has fewer splits: so many that every warp has one tile.
template <int HD, int ELEMENT, typename Cta>
__device__ __forceinline__ void plan_items(const Cta& c) {
  constexpr int SPAN = SPAN_POSITIONS<HD, ELEMENT>;
  const trirun_cuda_step& s = c.a.s;
  const int workers = workers_of(c.a, sides_log_of(c.a.group, s.head_dim)), kv_heads = static_cast<int>(s.kv_heads);
  const int all = static_cast<int>(s.m) * kv_heads;
  AttentionPlan& plan = const_cast<AttentionPlan&>(c.plan());
  // The first of a row's neighbours of the same sequence, whose keys the cache does not have yet.
  const auto first_of = [&](int row) {
    int first = row;
    while (first > 0 && row - first < MAX_FRESH - 1 && s.slots[row] >= 0 && s.slots[first - 1] == s.slots[row]) first--;
    return first;
  };
  const auto length_of = [&](int row) { return s.slots[row] < 0 ? 0 : max(s.positions[first_of(row)], 0); };
  int longest = 0;
  for (int row = 0; row < static_cast<int>(s.m); row++) longest = max(longest, length_of(row));
  const int words = c.a.group * HD / 4;
  const Division division = divide_keys(c, all, longest, words);
  const int log = division.members_log, group = static_cast<int>(blockIdx.x) >> log;
  const int stride = static_cast<int>(gridDim.x >> log) / division.splits, split = group % division.splits;
  if (lane_anew() != 0) return;
  const int of_split = (min(workers, 8) * TILE_POSITIONS) << log;
  const auto share_of = [&](int givers) {
    return ceil_div(words, givers * SPLITS_AT_ONCE) * SPLITS_AT_ONCE;  // as they are joined
  };
  for (int row = 0; row < static_cast<int>(s.m); row++) {
    const int splits = max(1, min(division.splits, ceil_div(length_of(row), of_split))), givers = splits << log;
    const int given = splits == 1 ? words >> log : share_of(givers);
    plan.rows[row] = {splits, givers, min(JOINERS, ceil_div(given, 32))};
  }
  int count = 0;
  // CTAs beyond the last whole group of splits have nothing to do.
  for (int at = group / division.splits; group / division.splits < stride && at < all; at += stride) {
    Item item;
    item.row = at / kv_heads, item.kv_head = at % kv_heads, item.slot = s.slots[item.row];
    const int first_row = first_of(item.row);
    item.position = max(s.positions[item.row], 0), item.fresh = item.row - first_row + 1;
    const RowSplits of_row = plan.rows[item.row];
    item.split = split, item.splits = of_row.splits;
    item.member = static_cast<int>(blockIdx.x) & ((1 << log) - 1), item.giver = (split << log) + item.member;
    const int length = length_of(item.row), spans = ceil_div(length, SPAN), part = min(item.giver, of_row.givers);
    item.first = spans * part / of_row.givers;
    item.last = spans * min(part + 1, of_row.givers) / of_row.givers;
    item.positions = length - item.first * SPAN;
    item.newest = item.giver == of_row.givers - 1;
    item.page = item.slot < 0 ? 0 : s.block_tables[item.slot * s.ld_blocks + item.position / decoder::PAGE];
    item.tiles = (item.last - item.first) * (SPAN / TILE_POSITIONS) + item.newest;
    item.parts = min(workers, item.tiles);
    item.first_word = min(share_of(of_row.givers) * item.giver, words);
    item.last_word = min(item.first_word + share_of(of_row.givers), words);
    if (item.split < item.splits) plan.items[count++] = item;
  }
  plan.item_count = count, plan.members_log = log;
}

}  // namespace trirun::step
