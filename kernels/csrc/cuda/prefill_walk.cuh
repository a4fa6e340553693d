// How tiles are divided among the CTAs of a Hopper prefill launch, and how the sums of a divided tile come together.
#pragma once

#include "prefill_arguments.cuh"
#include "prefill_hopper.cuh"

namespace trirun {

#ifdef TRIRUN_HOPPER

// Where a tile lies. Token tiles are taken `raster` at a time, so that the CTAs running together share rows of w and of
// x in L2.
__device__ __forceinline__ void place(const PrefillArguments& a, int tile, int& row_tile, int& token_tile) {
  const int band = tile / (a.raster * a.row_tiles), inside = tile - band * a.raster * a.row_tiles;
  const int width = min(a.raster, a.token_tiles - band * a.raster);
  row_tile = inside / width;
  token_tile = band * a.raster + inside % width;
}

// The tiles of a CTA, one after another, and of each the stages [first, last).
struct Walk {
  const PrefillArguments& args;
  const int turns;
  int tile, first, last;
  int left = 0;  // units of later tiles

  __device__ __forceinline__ Walk(const PrefillArguments& a, int t) : args(a), turns(t) {
    if (a.share > 0) {
      const int at = a.start(blockIdx.x);
      left = a.start(blockIdx.x + 1) - at;
      tile = at / a.units;
      enter(at - tile * a.units);
    } else {
      const int rank = blockIdx.x % a.splits;
      tile = a.first_tile + blockIdx.x / a.splits;
      first = a.k_stages * rank / a.splits, last = a.k_stages * (rank + 1) / a.splits;
    }
  }
  __device__ __forceinline__ void enter(int unit) {
    const int count = min(left, args.units - unit);
    first = unit * turns, last = (unit + count) * turns, left -= count;
  }
  __device__ __forceinline__ bool next() {
    if (args.share > 0) {
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
  // By one lane: waits a while for all others, and leaves the counter at zero if they have come. A wait without end
  // would need all CTAs of a tile on the GPU at once, which nothing promises.
  __device__ __forceinline__ bool others_come() const {
#pragma unroll 1
    for (int look = 0; look < kLooks; ++look) {
      uint64_t seen;
      asm volatile("ld.relaxed.gpu.global.b64 %0, [%1];" : "=l"(seen) : "l"(at) : "memory");
      if (count(seen) == total - 1) {
        asm volatile("fence.acq_rel.gpu;\nst.relaxed.gpu.global.b64 [%0], %1;" ::"l"(at), "l"(0ull) : "memory");
        return true;
      }
    }
    return false;
  }
  // By one lane of a warp whose lanes have stored what belongs to the count. True for the last, which sees what all of
  // them stored.
  __device__ __forceinline__ bool arrive() const {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    uint64_t seen = 0;  // a guess, right for the first one
    for (;;) {
      const int before = count(seen);
      const uint64_t next = before + 1 == total ? 0 : kMark + (before + 1);
      uint64_t found;
      asm volatile("atom.relaxed.gpu.global.cas.b64 %0, [%1], %2, %3;"
                   : "=l"(found)
                   : "l"(at), "l"(seen), "l"(next)
                   : "memory");
      if (found == seen) {
        if (next == 0) asm volatile("fence.acq_rel.gpu;" ::: "memory");
        return next == 0;
      }
      seen = found;
    }
  }
};

// The sums of a tile that several CTAs share. Each warp's rows have an owner among the CTAs that end with this tile:
// it keeps its own sums in registers, waits for the others' a while, and adds them. Only if they do not come does it
// leave its sums too, and then the last to come adds all. Either way the owner's are the first and the others' follow
// in the order of the CTAs.
struct SharedTile {
  const PrefillArguments& args;
  const int thread, begin, first, last;  // the tile's first unit, its first and last CTA
  const bool later;                      // not the first tile of this CTA
  const int owner;
  const ArrivalCounter counter;

  __device__ __forceinline__ SharedTile(const PrefillArguments& a, int tile, int tile0, int t)
      : args(a),
        thread(t),
        begin(tile * a.units),
        first(a.owner(begin)),
        last(a.owner(begin + a.units - 1)),
        later(tile != tile0),
        owner(first + __shfl_sync(~0u, t / 32, 0) * ending(a) / (kConsumers / 32)),
        counter{a.counters + first * (kConsumers / 32) + t / 32, last - first + 1} {}

  // CTAs that have nothing to do after this tile: all but the last, unless its share ends with the tile.
  __device__ __forceinline__ int ending(const PrefillArguments& a) const {
    return last - first + (a.start(last + 1) == begin + a.units);
  }

  __device__ __forceinline__ uint4* part(int cta, bool later, int quarters) const {
    return args.parts + static_cast<int64_t>(2 * cta + later) * quarters * kConsumers + thread;
  }

  // True in the warp that has turned its sums into those of all CTAs; others leave theirs in the workspace.
  template <typename Accumulator, int Quarters>
  __device__ __forceinline__ bool add(Accumulator (&total)[Quarters][4]) const {
    constexpr int kChunk = Quarters < 16 ? Quarters : 16;  // as many loads in flight as there are registers for
    if (last == first) return true;
    const int lane = thread % 32;
    const bool kept = __any_sync(~0u, owner == int(blockIdx.x) && lane == 0 && counter.others_come());
    bool complete = kept;
    if (!kept) {
      uint4* to = part(blockIdx.x, later, Quarters);
#pragma unroll
      for (int q = 0; q < Quarters; ++q) __stcg(to + q * kConsumers, reinterpret_cast<const uint4&>(total[q]));
      __syncwarp();
      complete = __any_sync(~0u, lane == 0 && counter.arrive());
    }
    if (!complete) return false;
    if (!kept) {
      const uint4* from = part(owner, args.start(owner) < begin, Quarters);
#pragma unroll
      for (int q = 0; q < Quarters; ++q) reinterpret_cast<uint4&>(total[q]) = __ldcg(from + q * kConsumers);
    }
#pragma unroll 1
    for (int i = 1; i < counter.total; ++i) {
      const int cta = owner + i > last ? owner + i - counter.total : owner + i;
      const uint4* from = part(cta, args.start(cta) < begin, Quarters);
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

#endif  // TRIRUN_HOPPER

}  // namespace trirun
