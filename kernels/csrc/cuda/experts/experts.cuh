// What the kernels of mixtures of experts have in common.
//
// A pair is a row of x and one of the experts it goes to: pair row * top_k + rank. Pairs are sorted by expert, and by
// their number within an expert; position i of that order is a sorted row. Tiles cut the sorted rows of an expert into
// pieces of at most tile_rows. Routing makes all of it on the device, so that a captured graph runs whatever is routed:
// a kernel has a CTA for every tile there can be, and those beyond the last end at once.
#pragma once

#include "cuda/common/launch.cuh"
#include "cuda/common/ptx.cuh"

namespace trirun::experts {

constexpr int MOST_EXPERTS = 512, MOST_CHOSEN = 32;

// Tiles of m rows, at most: an expert's last tile may be partly filled, and no row goes to an expert twice.
inline int64_t tile_bound(int64_t m, int64_t experts, int64_t top_k, int64_t tile_rows) {
  const int64_t pairs = m * top_k, touched = pairs < experts ? pairs : experts;
  const int64_t filled = touched + pairs / tile_rows, each = touched * ((m + tile_rows - 1) / tile_rows);
  return filled < each ? filled : each;
}

// One tile: sorted rows [first, first + count) of an expert, which is -1 beyond the last tile.
struct Tile {
  int expert, first, count;
};

__device__ __forceinline__ Tile load_tile(const int32_t* tiles, int index) {
  const int4 v = __ldcg(reinterpret_cast<const int4*>(tiles) + index);
  return {v.x, v.y, v.z};
}

__device__ __forceinline__ void store_tile(int32_t* tiles, int index, Tile tile) {
  reinterpret_cast<int4*>(tiles)[index] = make_int4(tile.expert, tile.first, tile.count, 0);
}

}  // namespace trirun::experts
