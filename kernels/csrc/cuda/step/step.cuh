// A whole decode step in one kernel: what the host tells it, and where everything lies.
//
// CTAs are clusters of two, one CTA to a multiprocessor, all of them resident at once. A cluster owns n tiles (64 rows)
// of every weight, and each of its CTAs a half of their k. Sixteen warps compute; one more thread streams
// weights, keys and values, in the order in which they are needed, through a ring in shared memory, past every wait.
// What one phase hands to the next goes through messages.cuh.
#pragma once

#include "cuda/common/activations.cuh"
#include "cuda/kernels.cuh"

namespace trirun::step {

constexpr int WARPS = 16;  // that compute
constexpr int THREADS = (WARPS + 4) * 32;  // a warpgroup that streams gives its registers to the others
constexpr int REGISTERS = 104, STREAM_REGISTERS = 56;
constexpr int CHUNK_K_TILES = 4;  // of one n tile: what the stream brings at once
constexpr int CHUNK_BYTES = CHUNK_K_TILES * WORD_TILE_BYTES;
constexpr int MAX_ROWS = 8;
constexpr int MAX_LAYERS = 96;
constexpr int MAX_SPLITS = 32;
constexpr int MAX_GROUP = 16;  // query heads of a key head

// The products of a layer, in their order.
enum Product { QKV = 0, O = 1, GATE_UP = 2, DOWN = 3, PRODUCTS = 4 };

// Sums that warps leave at once, of 64 rows of w and one row of x each: the slots.
constexpr int SLOTS = 128;

// What a CTA has of a product, the same in all layers: made once, since integer divisions take long where they matter.
// A round is what is multiplied before sums are added up.
struct Geometry {
  int first, units;  // this cluster's units: n tiles, of GATE_UP pairs of them
  int half, k_tiles;  // this CTA's first k tile, and how many
  int tile_chunks, round;  // chunks of an n tile; units of a round
  int sharing;  // warps that share a chunk, as a logarithm
  int n_tiles;
};

// A row and key head that this CTA attends to, and its part of the keys, in chunks: the same in all layers.
struct Item {
  int row, kv_head, slot, position;
  int split, first, last, length;  // length: of the cache
  int page;  // that of the position
};
constexpr int MAX_ITEMS = 8;

// Warps that share one of so many chunks, as a logarithm: they take the longest one's k tiles, and as much as 0.7 of a
// k tile for beginning and ending each task.
__host__ __device__ constexpr int sharing_log(int chunks, int most) {
  int best = 0, least = 1 << 30;
  for (int log = 0; log <= most; log++) {
    const int cost = ((chunks << log) + WARPS - 1) / WARPS * (10 * (CHUNK_K_TILES >> log) + 7);
    if (cost < least) best = log, least = cost;
  }
  return best;
}

// Query heads that one warp attends with, and groups of them, for heads of a key head.
__host__ __device__ constexpr int heads_of_warp(int group, int head_dim) {
  return group == 1 ? 1 : head_dim == 256 ? 2 : 4;
}
__host__ __device__ constexpr int head_groups(int group, int head_dim) {
  const int each = heads_of_warp(group, head_dim), groups = (group + each - 1) / each;
  return groups <= 2 ? groups : 4;
}

// Offsets in dynamic shared memory, bytes; the ring is at 0.
struct Memory {
  int stages;
  int slots;  // float [SLOTS][64], or of attention [WARPS][heads][head_dim + 4], [MAX_GROUP][WARPS]
  int limbs;  // of this CTA's half of an input (activations.cuh), columns = rows * limbs
  int scales;  // float2 [k tiles of the half][rows]
  int exchange;  // float [2][WARPS][32], written by the other CTA
  int residual;  // float [tiles of the hidden size][rows][32]
  int factors;  // float [MAX_ROWS]: 1 / rms of a row; [MAX_ROWS]: its scale of 8 bits; [2][WARPS] of headers; then
  // uint64: when to give up
  int heads;  // float [query heads + 2][head_dim]: queries, the new key, the new value
  int barriers;  // full[stages], empty[stages], exchange
  int plan;  // Geometry [PRODUCTS]; Item [MAX_ITEMS]; int: items
  int layers;  // trirun_cuda_step_layer [layers]
  int total;
};

struct StepArgs {
  trirun_cuda_step s;
  Memory at;
  uint32_t* counter;  // counts inputs of layers: what messages are tagged with
  uint32_t* status;  // not 0: a wait took too long
  // Messages, by row: words, and headers of 32 values.
  float4 *x_attention, *x_attention_headers, *x_mlp, *x_mlp_headers, *qkv, *partial, *attended, *attended_headers,
      *gated, *gated_headers;
  int tokens_log;  // of rows, a power of two
  int group;  // query heads of a key head
  int share;  // words of a key head's result that each of its splits finishes
  int lanes_log;  // of the splits, rounded up to a power of two
  uint32_t nought;  // 0, which the compiler does not know
};

}  // namespace trirun::step
