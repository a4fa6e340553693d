// What one launch of the Hopper prefill kernel is told, and the shared memory of its instances.
#pragma once

#include <cuda.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <algorithm>

#include "cuda/common/stream_k.cuh"

namespace trirun::gemm_prefill {

struct PrefillArguments {
  CUtensorMap x;       // [m][k], boxes of Tokens x 128 bytes, 128-byte swizzle
  CUtensorMap last_x;  // boxes of as many rows as the last token tile has: rows out of range take longer to copy
  CUtensorMap words;   // [n/64][k/32][128]
  CUtensorMap scales;  // [k/g][n] in n tile order; grouped kernels only
  CUtensorMap zeros;
  CUtensorMap outputs;  // [m][n], boxes of 32 columns (64-byte swizzle) by 8 tokens, or by Tokens where splits is 1
  const __half* channel_scales;  // one row of scales, or null when scales enter the fragments
  const __half* group_scales;    // those, as the map `scales` has them
  const __half* channel_zeros;   // one row of real zeros (group size -1), or null
  const float* row_scale;        // [m] factor of every row of x, or null
  const int* row_sum;            // [m] sum of the int8 codes of every row of x; int8 kernels only
  const void* bias;              // [n] in the type of y, or null
  void* y;
  int64_t ldy;
  int m, n, padded_n;          // true sizes of y; rows of w as stored
  int k_stages;                // stages along k
  int row_tiles, token_tiles;  // of 256, 192 or 128 rows of w, of Tokens rows of x
  int raster;                  // token tiles that run side by side
  int last_rows;               // of x in a box of last_x, a multiple of 8
  int splits;                  // CTAs of the cluster that share one tile along k
  int first_tile, last_tile;
  int early;  // stages of words asked for before the kernel before this one has ended
  // Stream-k: all CTAs (numbered by cta_number) divide the k tiles (`kKTile` stages) of all tiles equally: see StreamK.
  // With each 0 every CTA, or cluster, takes whole tiles.
  int each, rest;
  int k_tiles;  // of one tile
  int pairs;  // 1 where two CTAs of a tile are a cluster, and no CTA has two tiles; else 0
  bool ahead;  // a CTA has a tile of k or more: what it adds to its last tile is stored before it begins with that
  // Of a tile's first CTA, one for every warp: CTAs that end with the tile and have left their sums; behind those of
  // all CTAs as many more, set once the CTA that goes on from the tile has left its own.
  uint64_t* counters;
  uint4* parts;  // [CTA][first, last tile][four of a thread's sums][thread]
  bool remainder;  // launched behind the tiles before first_tile, to fill the CTAs that those leave idle
  int group_size;
  bool has_zeros;  // zeros come with every group
  bool split_zero;  // zero points that q - zero is not exact for: subtracted in two parts
  float zero;
  float zero_near, zero_rest;  // the zero point in two: 1 or 2, from which codes are 0 or a power of two away; the rest
  int y_dtype;
  bool tensor_stores;  // y's rows start and end at multiples of 16 bytes and hold 16-bit values

  __host__ __device__ int start(int cta) const { return cta * each + (cta < rest ? cta : rest); }
  __host__ __device__ int owner(int k_tile) const { return stream_k_owner(*this, k_tile); }
};

constexpr int kStageBytesOfX = 128;  // of x, per row: a panel is as wide as the 128-byte swizzle

// Where weight scales enter: with the sums; in the fragments, where the zero point is exact beside the codes and a
// group fills whole stages (groups of 64 and 128); in the fragments, whatever the group and the zero points.
enum Scaling { kChannelScales, kGroupScales, kAnyScales };

// A tile of NTiles n tiles by Tokens rows of x, stages of so many panels of x, the warpgroups that multiply, and
// the CTAs that have room in shared memory: with two, those of the next kernel begin beside these.
template <typename T, int Tokens, int NTiles, int Warpgroups, int Panels, int Ctas = 1>
struct TileShape {
  static constexpr int kShared = (228 / Ctas - 1) * 1024;
  static constexpr int kNTiles = NTiles, kRowTile = NTiles * 64, kTokens = Tokens;
  static constexpr int kConsumers = Warpgroups * 128, kThreads = kConsumers + 128;
  static constexpr int kStoreColumns = kRowTile * 32 / kConsumers;  // rows of w of one warp's outputs
  static constexpr int kPanels = Panels, kPanelColumns = kStageBytesOfX / int(sizeof(T));
  static constexpr int kColumns = kPanels * kPanelColumns;  // of k in a stage
  static constexpr int kBlocks = kColumns / 32;
  static constexpr int kPanel = Tokens * kStageBytesOfX, kX = kPanels * kPanel;
  static constexpr int kWords = kNTiles * kBlocks * 512;
  static constexpr int kOutput = kRowTile * Tokens * 2;  // values of 16 bits
  static constexpr int kRows = Warpgroups * Tokens * 8;  // per warpgroup: factor and sum of every token
  static constexpr int kBarriers = 256, kRoom = kShared - kOutput - kRows - kBarriers;
  // Of every consumer thread's sums, four at a time.
  static constexpr int kQuads = kRowTile * Tokens / kConsumers / 4;
  // What the CTAs of a cluster send, in pairs of quads, takes the place of the stages once all are consumed.
  static constexpr int received(int splits) {
    return splits * ((kQuads / 2 + splits - 1) / splits) * 2 * kConsumers * 16;
  }
  // Sums of another CTA, a quad of all threads after another, take the places of x in consumed stages.
  static constexpr int kStageQuads = kX / (kConsumers * 16);
  static constexpr int kSumStages = (kQuads + kStageQuads - 1) / kStageQuads;
};

// Two accumulators of 64 tokens per warpgroup would leave the tensor cores waiting for their own sums: with 64 tokens a
// warpgroup takes all four row blocks of an n tile, and the two warpgroups take turns at the stages. Looking for a
// stage costs as much as converting 32 columns: scales per channel have room for stages of two panels.
template <typename T, int Tokens, Scaling Mode>
struct PrefillShape : TileShape<T, Tokens, 4, 2, Tokens == 64 && Mode == kChannelScales && sizeof(T) == 2 ? 2 : 1> {
  using Tile = TileShape<T, Tokens, 4, 2, Tokens == 64 && Mode == kChannelScales && sizeof(T) == 2 ? 2 : 1>;
  static constexpr bool kGrouped = Mode != kChannelScales;
  static constexpr int kRowBlocks = Tokens == 64 ? 4 : 2, kTurns = kRowBlocks / 2;
  static constexpr int kKTile = kTurns / Tile::kPanels;  // stages of a k tile, which CTAs divide k by
  static constexpr int kGroups = kGrouped ? 2 * 512 : 0;  // two groups of 256 scales; as much again for zeros
  static constexpr int kStage = Tile::kX + Tile::kWords + 2 * kGroups;
  static constexpr int kExchange = kTurns == 2 ? 8 * Tokens * 128 : 0;  // sums that one warpgroup hands to the other
  static constexpr int kStages = std::min((Tile::kRoom - kExchange) / kStage, 12);
  // Barriers of full stages. Warpgroups that take turns at an odd number of stages would wait at each other's barriers,
  // where parity does not tell a phase too early from one too late: a round later, every stage has another barrier.
  static constexpr int kFull = kStages * (kTurns == 2 && kStages % 2 ? 2 : 1);
  static_assert((kFull + kStages + 3) * 8 <= Tile::kBarriers);
  static constexpr bool kAhead = Tile::kSumStages < kStages;
  static constexpr int kBytes = Tile::kShared - Tile::kRoom + kExchange + kStages * kStage;
};

// What the codes of a tile of two or three n tiles are multiplied by: nothing but a constant, scales being per channel;
// the scale of their group of 128 columns; the same, where zero_rest is not 0; that of a smaller group, with any rest.
enum LowScales { kNoGroups, kGroupsOf128, kGroupsWithRest, kSmallGroups };

// Of such tiles, whose n tiles have a warpgroup each (sm90_tiles.cuh). Of 8 bits two CTAs do not share a
// multiprocessor: there the kernel that prepares x stands between them, and where it has CTAs the next ones' would
// rather go together elsewhere.
template <typename T, int Tokens, int NTiles>
using LowTile =
    TileShape<T, Tokens, NTiles, NTiles, Tokens == 64 && sizeof(T) == 2 ? 2 : 1, NTiles == 2 && sizeof(T) == 2 ? 2 : 1>;

template <typename T, int Tokens, int NTiles, LowScales Scales>
struct LowShape : LowTile<T, Tokens, NTiles> {
  using Tile = LowTile<T, Tokens, NTiles>;
  static constexpr int kCtas = NTiles == 2 ? 2 : 1;  // that registers are shared out for
  static constexpr bool kGrouped = Scales != kNoGroups;
  // 16-bit scales of a stage, as a number of them.
  static constexpr int kGroups = kGrouped ? Tile::kRowTile * (Scales == kSmallGroups ? Tile::kBlocks : 1) : 0;
  static constexpr int kKTile = 1, kStage = Tile::kX + Tile::kWords + 2 * kGroups;
  static constexpr int kStages = std::min(Tile::kRoom / kStage, 12), kFull = kStages;
  static constexpr bool kAhead = Tile::kSumStages < kStages;
  static constexpr int kBytes = Tile::kShared - Tile::kRoom + kStages * kStage;
};

}  // namespace trirun::gemm_prefill
