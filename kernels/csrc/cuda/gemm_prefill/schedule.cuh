// Who does what of a Hopper prefill launch: which tiles, and k tiles of them, a CTA has; how the sums of a tile that is
// cut come together; and the threads that keep the ring of stages full.
#pragma once

#include "arguments.cuh"
#include "cuda/common/wgmma.cuh"

namespace trirun::gemm_prefill {

#ifdef TRIRUN_HOPPER

// Where a tile lies. Token tiles are taken `raster` at a time, so that the CTAs running together share rows of w and of
// x in L2.
__device__ __forceinline__ void place(const PrefillArguments& a, int tile, int& row_tile, int& token_tile) {
  const int band = tile / (a.raster * a.row_tiles), inside = tile - band * a.raster * a.row_tiles;
  const int width = min(a.raster, a.token_tiles - band * a.raster);
  row_tile = inside / width;
  token_tile = band * a.raster + inside % width;
}

// CTAs of stream-k are numbered along its line, and the hardware starts them from the last to the first: a CTA
// that goes on to its next tile was started before those that wait for what it left of the one before.
__device__ __forceinline__ int cta_number() { return int(gridDim.x - 1 - blockIdx.x); }

// The tiles of a CTA, one after another, and of each the stages [first, last).
struct Walk {
  const PrefillArguments& args;
  const int turns;
  int tile, first, last;
  int left = 0;  // k tiles of later tiles

  __device__ __forceinline__ Walk(const PrefillArguments& a, int t) : args(a), turns(t) {
    if (a.each > 0) {
      const int at = a.start(cta_number());
      left = a.start(cta_number() + 1) - at;
      tile = at / a.k_tiles;
      enter(at - tile * a.k_tiles);
    } else {
      const int rank = blockIdx.x % a.splits;
      tile = a.first_tile + blockIdx.x / a.splits;
      first = a.k_stages * rank / a.splits, last = a.k_stages * (rank + 1) / a.splits;
    }
  }
  __device__ __forceinline__ void enter(int k_tile) {
    const int count = min(left, args.k_tiles - k_tile);
    first = k_tile * turns, last = (k_tile + count) * turns, left -= count;
  }
  __device__ __forceinline__ bool next() {
    if (args.each > 0) {
      if (left == 0) return false;
      ++tile;
      enter(0);
      return true;
    }
    tile += gridDim.x / args.splits;
    return tile < args.last_tile;
  }
};

// Counts the warps that have left their sums of a tile, in memory that may begin as anything (that of a graph does): it
// counts only under a mark in its upper 48 bits, so that no kernel before this one has to zero it, and ends as zero.
struct ArrivalCounter {
  static constexpr uint64_t kMark = 0x7c3a91e5b64dull << 16;
  static constexpr int kLooks = 24;  // each takes about 700 cycles
  uint64_t* at;
  int total;

  static __device__ __forceinline__ int count(uint64_t seen) {
    return seen >> 16 == kMark >> 16 ? int(seen & 0xffff) : 0;
  }
  __device__ __forceinline__ uint64_t look() const { return load_acquire(at); }
  // What may have changed since: for a first guess.
  __device__ __forceinline__ uint64_t glance() const { return load_relaxed(at); }
  __device__ __forceinline__ void set(uint64_t v) const { store_relaxed(at, v); }
  // The loops below belong to a whole warp and end by what its first lane sees. Were they a lane's, the compiler would
  // take all that follows for divergent and keep stages and descriptors of the next tiles in vector registers.
  static __device__ __forceinline__ uint64_t of_first(uint64_t v) { return __shfl_sync(~0u, v, 0); }

  // Waits a while for all others, and leaves the counter at zero if they have come. A wait without end would need all
  // CTAs that end with a tile on the GPU at once, which nothing promises.
  __device__ __forceinline__ bool others_come() const {
#pragma unroll 1
    for (int looks = 0; looks < kLooks; ++looks)
      if (count(of_first(look())) == total - 1) {
        set(0);
        return true;
      }
    return false;
  }
  // Waits for the one who sets it, and leaves zero: by one thread. Only for what has been started: see cta_number.
  __device__ __forceinline__ void await() const {
    while (look() != kMark) {
    }
    set(0);
  }
  // The same by a warp.
  __device__ __forceinline__ void take() const {
    while (of_first(look()) != kMark) {
    }
    set(0);
  }
  // When the warp's lanes have stored what belongs to the count; `seen` is what the counter was a moment ago. True for
  // the last, which sees what all of them stored.
  __device__ __forceinline__ bool arrive(uint64_t seen, int lane) const {
    fence_gpu();
    for (;;) {
      const int before = count(seen);
      const uint64_t next = before + 1 == total ? 0 : kMark + (before + 1);
      uint64_t found = 0;
      if (lane == 0) found = compare_and_swap(at, seen, next);
      found = of_first(found);
      if (found == seen) {
        if (next == 0) fence_gpu();
        return next == 0;
      }
      seen = found;
    }
  }
};

// The sums of a tile that several CTAs have parts of. The last of these may go on to its next tile: it leaves its sums
// and does not look back. The others end with this tile, and each warp's rows have an owner among them, which keeps its
// own sums in registers, waits for the others' a while, and adds them. Only if they do not come does it leave its sums
// too, and then the last to come adds all. Either way the owner's are first and the others' follow in the order of the
// CTAs. kConsumers: threads that multiply.
//
// In pairs, the two CTAs of a cluster have added up what they have, each for half of the tokens, before they come here:
// a tile then has half as many CTAs, numbered by their clusters, for each half of its tokens.
template <int kConsumers>
struct SharedTile {
  const PrefillArguments& args;
  const int thread, begin;
  const int half, self;  // of a pair's tokens; this CTA, or pair
  const int first, last;  // of the tile
  const bool later;  // not the first tile of this CTA
  const int ending;  // CTAs that have nothing to do after this tile
  const int owner;
  const ArrivalCounter counter;  // of those that end
  const ArrivalCounter left;  // set by the one that goes on

  __device__ __forceinline__ SharedTile(const PrefillArguments& a, int tile, int tile0, int t)
      : args(a), thread(t), begin(tile * a.k_tiles), half(cta_number() & a.pairs), self(cta_number() >> a.pairs),
        first(a.each > 0 ? a.owner(begin) >> a.pairs : 0),
        last(a.each > 0 ? a.owner(begin + a.k_tiles - 1) >> a.pairs : 0), later(tile != tile0),
        ending(last - first + (a.start((last + 1) << a.pairs) == begin + a.k_tiles)),
        owner(first + __shfl_sync(~0u, t / 32, 0) * ending / (kConsumers / 32)),
        counter{a.counters + ((first << a.pairs) + half) * (kConsumers / 32) + t / 32, ending},
        left{counter.at + gridDim.x * (kConsumers / 32), 1} {}

  __device__ __forceinline__ uint4* part(int cta, bool later, int quarters) const {
    return args.parts + static_cast<int64_t>(2 * cta + (later | half)) * quarters * kConsumers + thread;
  }
  // Whether a CTA of this tile has one before it; in pairs none has.
  __device__ __forceinline__ bool is_later(int cta) const { return args.start(cta << args.pairs) < begin; }

  // By a warp that has nothing else to do: once all consumer warps have arrived at `stored`, tells the owners of the
  // tile that this CTA goes on from, if there is one, that its sums are in the workspace. The fence takes as long as
  // the stores do to reach L2, and the consumers are at the next tile by then.
  static __device__ __forceinline__ void announce(const PrefillArguments& a, uint32_t stored, int lane) {
    const int at = a.start(cta_number()), begin = at / a.k_tiles * a.k_tiles;
    if (at == begin || a.start(cta_number() + 1) <= begin + a.k_tiles) return;
    barrier_wait(stored, 0);
    fence_gpu();
    constexpr int kWarps = kConsumers / 32;
    if (lane < (a.ahead ? 1 : kWarps))  // for the one that copies them, or for every warp that adds them
      ArrivalCounter{a.counters + (gridDim.x + a.owner(begin)) * kWarps + lane, 1}.set(ArrivalCounter::kMark);
  }

  // Whether this CTA has but a part of the tile.
  __device__ __forceinline__ bool is_shared() const { return last != first; }

  // True in the warp that has turned its sums into those of all CTAs; others leave theirs in the workspace. `stored`:
  // the barrier that `announce` waits at. `seen`: what the counter was a moment ago, asked for before it is needed.
  template <typename Accumulator, int Quarters, typename TakeAhead>
  __device__ __forceinline__ bool add(Accumulator (&total)[Quarters][4], uint32_t stored, uint64_t seen,
                                      TakeAhead take_ahead) const {
    constexpr int kChunk = Quarters < 16 ? Quarters : 16;  // as many loads in flight as there are registers for
    if (!is_shared()) return true;
    const int lane = thread % 32;
    const bool goes_on = ending == last - first;
    const bool kept = owner == self && (ending == 1 || counter.others_come());
    if (!kept) {
      uint4* to = part(self, later, Quarters);
#pragma unroll
      for (int q = 0; q < Quarters; ++q) __stcg(to + q * kConsumers, reinterpret_cast<const uint4&>(total[q]));
      __syncwarp();
      if (goes_on && self == last) {
        if (lane == 0) barrier_arrive(stored);
        return false;
      }
      if (!counter.arrive(ArrivalCounter::of_first(seen), lane)) return false;
      const uint4* from = part(owner, is_later(owner), Quarters);
#pragma unroll
      for (int q = 0; q < Quarters; ++q) reinterpret_cast<uint4&>(total[q]) = __ldcg(from + q * kConsumers);
    }
    if (args.ahead && take_ahead()) return true;
    if (goes_on) left.take();  // without an end: that CTA was started before this one, and waits for nobody
#pragma unroll 1
    for (int i = 1; i <= last - first; ++i) {
      const int cta = owner + i > last ? owner + i - (last - first + 1) : owner + i;
      const uint4* from = part(cta, is_later(cta), Quarters);
#pragma unroll
      for (int chunk = 0; chunk < Quarters; chunk += kChunk) {
        uint4 v[kChunk];
#pragma unroll
        for (int q = 0; q < kChunk; ++q) v[q] = __ldcg(from + (chunk + q) * kConsumers);
#pragma unroll
        for (int q = 0; q < kChunk; ++q) {
          const uint32_t words[4] = {v[q].x, v[q].y, v[q].z, v[q].w};
#pragma unroll
          for (int e = 0; e < 4; ++e) total[chunk + q][e] += reinterpret_cast<const Accumulator&>(words[e]);
        }
      }
    }
    return true;
  }
};

// Whether every stage has scales.
template <typename Shape>
__device__ __forceinline__ bool has_groups(const PrefillArguments& args) {
  return Shape::kGrouped && args.group_size > 0;
}

// A thread's way through the stages of all its CTA's tiles, each of which it fills when those that multiply have given
// it back; slot: of the stage's barrier.
template <typename Shape>
struct Producer {
  const PrefillArguments& args;
  const uint32_t empty;
  Walk walk;
  int row_tile, token_tile;
  int stage = 0, slot = 0, parity = 1;

  __device__ __forceinline__ Producer(const PrefillArguments& a, uint32_t e)
      : args(a), empty(e), walk(a, Shape::kKTile) {
    place(args, walk.tile, row_tile, token_tile);
  }
  __device__ __forceinline__ void await() const { barrier_wait(empty + 8 * stage, parity); }
  __device__ __forceinline__ void advance() {
    if (++stage == Shape::kStages) stage = 0, parity ^= 1;
    if (++slot == Shape::kFull) slot = 0;
  }
  // load(k): of the stage in hand; begin(): when a tile has come. All but the first `from` stages, which are taken.
  template <typename Begin, typename Load>
  __device__ __forceinline__ void fill(int from, const Begin& begin, const Load& load) {
    stage = from % Shape::kStages, slot = from % Shape::kFull, parity = from == Shape::kStages ? 0 : 1;
    for (int k = walk.first + from;;) {
      for (; k < walk.last; ++k, advance()) {
        await();
        load(k);
      }
      if (!walk.next()) return;
      place(args, walk.tile, row_tile, token_tile);
      begin();
      k = walk.first;
    }
  }
};

// The thread that copies words and x.
template <typename Shape>
__device__ __forceinline__ void produce(const PrefillArguments& args, uint32_t base, uint32_t words_at, uint32_t full,
                                        uint32_t empty, uint32_t sums_ready) {
  Producer<Shape> at(args, empty);
  const void* map_of_x;  // of this token tile, and its bytes in a stage
  uint32_t bytes_of_x;
  const auto begin = [&] {
    const bool is_last = at.token_tile == args.token_tiles - 1;
    map_of_x = is_last ? &args.last_x : &args.x;
    bytes_of_x = is_last ? Shape::kPanels * args.last_rows * kStageBytesOfX : Shape::kX;
  };
  const auto load_words = [&](int stage, int slot, int k) {
    barrier_expect(full + 8 * slot, bytes_of_x + Shape::kWords);
    tensor_load(words_at + stage * Shape::kWords, &args.words, full + 8 * slot, 0, k * Shape::kBlocks,
                at.row_tile * Shape::kNTiles);
  };
  const auto load_x = [&](int stage, int slot, int k) {
#pragma unroll
    for (int panel = 0; panel < Shape::kPanels; ++panel)
      tensor_load(base + stage * Shape::kX + panel * Shape::kPanel, map_of_x, full + 8 * slot,
                  k * Shape::kColumns + panel * Shape::kPanelColumns, at.token_tile * Shape::kTokens);
  };
  begin();
  tensor_map_prefetch(map_of_x);
  // Words never depend on the kernel before this one: some are asked for before it has ended, others behind x, in whose
  // way they would be.
  const int early = min(args.early, at.walk.last - at.walk.first);
  for (int i = 0; i < early; ++i) load_words(i, i, at.walk.first + i);
  if (!args.remainder) dependency_wait();
  for (int i = 0; i < early; ++i) load_x(i, i, at.walk.first + i);
  at.fill(early, begin, [&](int k) { load_words(at.stage, at.slot, k), load_x(at.stage, at.slot, k); });
  if constexpr (Shape::kAhead) {
    // The rest of the last tile was the next CTA's first, which has left its sums by now: they come to the stages that
    // are free, while the last ones are multiplied.
    if (!args.ahead || at.walk.last == args.k_stages) return;
    constexpr int kQuad = Shape::kConsumers * 16;
    const ArrivalCounter left{args.counters + (gridDim.x + cta_number()) * (Shape::kConsumers / 32), 1};
    left.await();
    fence_async();
    const uint4* from = args.parts + int64_t(2) * (cta_number() + 1) * Shape::kQuads * Shape::kConsumers;
    barrier_expect(sums_ready, Shape::kQuads * kQuad);
    for (int quad = 0; quad < Shape::kQuads; quad += Shape::kStageQuads, at.advance()) {
      const int quads = min(Shape::kStageQuads, Shape::kQuads - quad);
      at.await();
      bulk_load(base + at.stage * Shape::kX, from + quad * Shape::kConsumers, quads * kQuad, sums_ready);
    }
  }
}

// The thread that copies scales and zero points of groups: with one more copy a stage, the other would be what all wait
// for. So would this one, if it divided.
template <typename Shape>
__device__ __forceinline__ void produce_groups(const PrefillArguments& args, uint32_t groups_at, uint32_t full,
                                               uint32_t empty) {
  const uint32_t bytes = max(1, Shape::kColumns / args.group_size) * Shape::kRowTile * 2;
  const int group_log = __ffs(args.group_size) - 1;
  Producer<Shape> at(args, empty);
  at.fill(
      0, [] {},
      [&](int k) {
        const uint32_t to = groups_at + at.stage * 2 * Shape::kGroups, bar = full + 8 * at.slot;
        const int row = at.row_tile * Shape::kRowTile, group = k * Shape::kColumns >> group_log;
        barrier_expect(bar, args.has_zeros ? 2 * bytes : bytes);
        tensor_load(to, &args.scales, bar, row, group);
        if (args.has_zeros) tensor_load(to + Shape::kGroups, &args.zeros, bar, row, group);
      });
}

// Threads that fill a stage, each of which arrives at its barrier.
template <typename Shape>
__device__ __forceinline__ int producers(const PrefillArguments& args) {
  return has_groups<Shape>(args) ? 2 : 1;
}

// By the warpgroup that does not multiply: those, and a warp that announces what the others stored.
template <typename Shape>
__device__ __forceinline__ void copy_and_announce(const PrefillArguments& args, uint32_t stages_at, uint32_t words_at,
                                                  uint32_t groups_at, uint32_t full, uint32_t empty, uint32_t stored,
                                                  uint32_t sums_ready) {
  if (threadIdx.x == 0)
    produce<Shape>(args, stages_at, words_at, full, empty, sums_ready);
  else if (threadIdx.x == 32 && has_groups<Shape>(args))
    produce_groups<Shape>(args, groups_at, full, empty);
  else if (threadIdx.x >= 96 && args.each > 0)
    SharedTile<Shape::kConsumers>::announce(args, stored, threadIdx.x - 96);
}

#endif  // TRIRUN_HOPPER

}  // namespace trirun::gemm_prefill
