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
  uint64_t* at;
  int total;

  static __device__ __forceinline__ int count(uint64_t seen) {
    return seen >> 16 == kMark >> 16 ? int(seen & 0xffff) : 0;
  }
  // By one lane of a warp whose lanes have stored what belongs to the count. True for the last, which sees what all of
  // them stored.
  __device__ __forceinline__ bool arrive() const {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    uint64_t seen = kMark + (total - 1);  // a guess, right for the last one
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

// The sums of a tile that several CTAs share.
struct SharedTile {
  const PrefillArguments& args;
  const int thread, begin, first, last;  // the tile's first unit, its first and last CTA
  const bool later;                      // not the first tile of this CTA
  const ArrivalCounter counter;

  __device__ __forceinline__ SharedTile(const PrefillArguments& a, int tile, int tile0, int t)
      : args(a), thread(t), begin(tile * a.units), first(a.owner(begin)), last(a.owner(begin + a.units - 1)),
        later(tile != tile0), counter{a.counters + first * (kConsumers / 32) + t / 32, last - first + 1} {}

  __device__ __forceinline__ uint4* part(int cta, bool later, int quarters) const {
    return args.parts + static_cast<int64_t>(2 * cta + later) * quarters * kConsumers + thread;
  }

  // Leaves this thread's sums in the workspace; in the warp that comes last turns them into the sums of all CTAs, added
  // in their order, and returns true.
  template <typename Accumulator, int Quarters>
  __device__ __forceinline__ bool add(Accumulator (&total)[Quarters][4]) const {
    constexpr int kChunk = Quarters < 16 ? Quarters : 16;  // as many loads in flight as there are registers for
    if (last == first) return true;
    uint4* to = part(blockIdx.x, later, Quarters);
#pragma unroll
    for (int q = 0; q < Quarters; ++q) __stcg(to + q * kConsumers, reinterpret_cast<const uint4&>(total[q]));
    bool is_last = false;
    __syncwarp();
    if (thread % 32 == 0) is_last = counter.arrive();
    if (!__shfl_sync(~0u, is_last, 0)) return false;
#pragma unroll
    for (int i = 0; i < 4 * Quarters; ++i) total[i / 4][i % 4] = 0;
#pragma unroll
    for (int chunk = 0; chunk < Quarters; chunk += kChunk) {
#pragma unroll 1
      for (int cta = first; cta <= last; ++cta) {
        const uint4* from = part(cta, args.start(cta) < begin, Quarters);
#pragma unroll
        for (int q = chunk; q < chunk + kChunk; ++q) {
          const uint4 v = __ldcg(from + q * kConsumers);
          const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int e = 0; e < 4; ++e) total[q][e] += reinterpret_cast<const Accumulator&>(words[e]);
        }
      }
    }
    return true;
  }
};

#endif  // TRIRUN_HOPPER

}  // namespace trirun
