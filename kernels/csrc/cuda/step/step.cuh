// A whole decode step in one kernel: what the host tells it, and where everything lies.
//
// CTAs are clusters of up to eight, one CTA to a multiprocessor, all of them resident at once. A cluster owns units (n
// tiles, of gate and up pairs of them) of every weight, and each of its CTAs a part of their k; its CTAs finish the
// units in turn. Warps have roles, each with a loop of its own: sixteen take a product's input, multiply and attend,
// four of which put attention's output together; two finish units; and two stream weights, keys and values, in the
// order in which they are needed, through a ring in shared memory, past every wait. What one phase hands to the next
// goes through messages.cuh.
//
// Time goes to instructions and to waits, not to bytes: code that runs once a layer is not in the nearest caches, and
// registers that are spilled are read from L2, since shared memory leaves L1 no room (kernels/LOG.md).
#pragma once

#include "cuda/common/activations.cuh"
#include "cuda/kernels.cuh"

namespace trirun::step {

template <typename T>
__host__ __device__ constexpr T ceil_div(T a, T b) {
  return (a + b - 1) / b;
}

constexpr int SLOT_BYTES = N_TILE * 4;  // of a warp's part of the sums of an n tile and a row
constexpr int WARPS = 16;  // that multiply and attend
constexpr int FINISHERS_LOG = 1, FINISHERS = 1 << FINISHERS_LOG, STREAMS = 2;  // warps
constexpr int JOINERS = 4;  // warps of those that attend, which put their parts together
constexpr int THREADS = (WARPS + FINISHERS + STREAMS) * 32;
constexpr int CHUNK_K_TILES = 4;  // of one n tile: what the stream brings at once
constexpr int CHUNK_BYTES = CHUNK_K_TILES * WORD_TILE_BYTES;
constexpr int VALUE_BLOCKS = 4, BLOCK_PADDING = 32;  // of a chunk of keys and values: attend.cuh
constexpr int NEWEST_PADDING = (VALUE_BLOCKS - 1) * BLOCK_PADDING;  // of the new values, at most
constexpr int STAGE_BYTES = CHUNK_BYTES + VALUE_BLOCKS * BLOCK_PADDING;
constexpr int MAX_ROWS = 8;
constexpr int HEADER_WORDS = MAX_ROWS;  // headers of all rows' same values are a line, at which all CTAs look
constexpr int MAX_LAYERS = 96;
constexpr int MAX_SPLITS = 32;  // one for each lane of the warp that chooses
constexpr int MAX_GROUP = 16;  // query heads of a key head
constexpr int MAX_PASSED = 4;  // n tiles whose sums warps pass on to each other at once
constexpr int PASSED_BYTES = MAX_PASSED * MAX_ROWS * SLOT_BYTES, PASSED_ROOM = PASSED_BYTES + 256;
static_assert(PASSED_BYTES + WARPS * 12 <= PASSED_ROOM && PASSED_ROOM % 128 == 0);
constexpr int MAX_LOCAL = 4;  // units of a product that one CTA finishes
constexpr int MAX_CLUSTER_LOG = 3, MAX_CLUSTER = 1 << MAX_CLUSTER_LOG;  // CTAs
constexpr int MAX_CLUSTERS = 72, MAX_CTAS = 144;  // of a launch
constexpr int MAX_PAIRS = 128, MAX_ROW_PAIRS = 256;  // of an item's rows, and of a row, times key heads

// The products of a layer, in their order. Neighbours use buffers of their own: that of `product % 2`.
enum Product { QKV = 0, O = 1, GATE_UP = 2, DOWN = 3, PRODUCTS = 4 };

// How warps share a product.
struct Sharing {
  int parts, at_once;  // warps that share an n tile; n tiles that are multiplied at once
  int of_parts;  // 2^16 / parts, rounded up
};

// What a CTA has of a product, the same in all layers.
struct Geometry {
  int first, units, local;  // this cluster's first unit and how many; those that this CTA finishes
  int k_first, k_tiles, all_k_tiles;  // this CTA's first k tile, and how many; the product's
  int tiles, tile_chunks;  // n tiles of this cluster; chunks of one
  int n_tiles;  // of the product
  Sharing sharing;
};

// What a warp has of a product, the same in all layers: made once, since it would take as long again in every phase.
struct alignas(16) Share {
  int tile, k_first, k_last;  // its first n tile, of its CTA's k tiles the first and the end
  int chunk;  // its first in the stream
  uint32_t limbs, scales;  // where its k tiles begin in the input, bytes
  uint32_t slots, barrier;  // of its first n tile's sums: shared addresses of the CTA that finishes them
};

// A key head that this CTA attends to for a row, or for some neighbours of one text, and its part of the keys: the same
// in all layers.
struct Item {
  int row, kv_head, slot, position;  // the last row's
  int padding;  // rows at its end that are of no slot; their positions are counted on
  int fresh;  // rows of this sequence up to the last one: their keys and values are not in the cache yet
  int split, splits, member;  // of the keys, and of the CTAs that share a split
  int first, last;  // spans (division.cuh) from first to last
  int positions;  // of the cache, from the first span on
  bool newest;  // whether it has the new keys, too
  int page, first_page;  // those of the last row with a slot and of the first one
  int last_row, row_columns_log;  // the last row, counted from the first one; of its columns, as in StepArgs
  int tiles;  // of a warp each at a time: of the cache, and one of the new keys
  int parts;  // warps that have a part of the keys
  int giver, first_word, last_word;  // of the key head's output, which this CTA makes of all splits' parts
};
constexpr int MAX_ITEMS = 8;

// Splits of a row's keys, and where headers of its output are wanted, the CTAs that give it and the warps of each.
struct RowSplits {
  int splits, givers, giving_warps;
};

// Splits of a row where every key head has a number of its own: parts are sent, even the only one.
constexpr int OF_READERS = 2;

// What a CTA attends to.
struct AttentionPlan {
  Item items[MAX_ITEMS];
  RowSplits rows[MAX_ROWS];
  int item_count;
  int members_log;  // CTAs of a cluster that share a split, and put together what they have of it
  uint8_t splits[MAX_ROW_PAIRS];  // of every row and key head, where rows are several
  uint32_t begins[MAX_CTAS + 1];  // where every CTA's part begins, and the end, of a sequence (division.cuh)
};

// CTAs of a cluster put a key head's output together, of so many words of 16 bytes, each a share of it: eight
// neighbouring words are of one head and one share. From what one of them has to the next one's: behind the words of a
// share are headers of the query heads that they are of.
__host__ __device__ constexpr bool may_be_together(int words, int members_log) {
  return (words >> members_log) % 8 == 0;
}
__host__ __device__ constexpr int shared_stride(int share, int head_words) {
  return share + (share + head_words - 2) / head_words + 1;
}

// n tiles of a unit: of GATE_UP one of gate and one of up.
__host__ __device__ constexpr int tiles_of_unit(int product) { return product == GATE_UP ? 2 : 1; }

// The tile-th n tile of a cluster: units one after another, of GATE_UP each one's gate and up.
__host__ __device__ inline int n_tile_of(const Geometry& g, int product, int tile) {
  const int tiles_log = product == GATE_UP;
  return g.first + (tile >> tiles_log) + (tile & tiles_log) * (g.n_tiles / 2);
}

constexpr int HEADS = 8;  // query heads of one key head that a warp attends with
constexpr int PACKED_HEADS = 4;  // at most, where both parts of a number have a column each (attend.cuh)
// Floats of a part of a head in shared memory: values, largest score, sum of weights.
__host__ __device__ constexpr int part_floats(int head_dim) { return head_dim + 4; }
constexpr int OWN_DIMENSIONS = 128;  // of a head's values that a warp has, at most
// Warps side by side that attend with others of a key head's query heads, of its dimensions, and of either, as
// logarithms.
__host__ __device__ constexpr int groups_log_of(int group) { return group > HEADS; }
__host__ __device__ constexpr int owners_log_of(int head_dim) { return head_dim > OWN_DIMENSIONS; }
__host__ __device__ constexpr int sides_log_of(int group, int head_dim) {
  return groups_log_of(group) + owners_log_of(head_dim);
}

// Arrivals that set a chunk's stage free.
constexpr int EMPTY_ARRIVALS = 2 * CHUNK_K_TILES;

// Offsets in dynamic shared memory, bytes; the ring is at 0.
struct Memory {
  int stages;
  int slots, slot_buffer;  // float [2][local units][n tiles of a unit][rows][parts][64], and bytes of the first
  int attention;  // float [parts of attention][heads, HEADS at most][head_dim + 4]: in the place of the first slots
  int limbs, limb_buffer;  // of this CTA's k of an input, two of them: [k tile][half 2][column][t 4][16 bytes]
  int scales, scale_buffer;  // of a k tile and row its scale, and the sum of its integers: [2][k tiles][rows]
  // Of two blocks of columns, PASSED_ROOM before factors: float4 [MAX_PASSED][4][32], uint64 [WARPS], uint32 [WARPS].
  int factors;  // float [2][2][MAX_ROWS] of 8-bit inputs: 1 / rms of a row, its scale; uint64: when to give up; uint32
  int residual;  // float4 [local units of the hidden size][rows][16]
  int parked;  // Parked [WARPS]
  int heads;  // float [of a warp each][head_dim]: in the place of the second input's limbs
  int queries;  // halves [query heads of a key head][high, low][head_dim + 8] and 16 bytes more, or fewer: attend.cuh
  int newest;  // new keys and new values [rows], and float2 of each: their scales of 8 bits
  int shares;  // Share [PRODUCTS][WARPS]
  int together;  // float4: what a cluster's CTAs have of a key head's output
  int barriers;  // full[stages], empty[stages], factor[2], sums[2][MAX_LOCAL], parts, together
  int plan;  // AttentionPlan
  int layers;  // trirun_cuda_step_layer [layers]
  int total;
};

// Where everything lies, and how many warps do what; of no stages where it does not fit.
struct Layout {
  Memory at;
  Sharing sharing[PRODUCTS];
  int attending_log;  // of the warps that attend
};

struct StepArgs : Layout {
  trirun_cuda_step s;
  uint32_t* counter;  // counts inputs of layers: what messages are tagged with
  uint32_t* status;  // not 0: a wait took too long
  // Messages: words by row, and of every 64 values a line of headers, one for each row: squares' sum, and largest.
  float4 *x_attention, *x_attention_headers, *x_mlp, *x_mlp_headers, *qkv, *partial, *attended, *attended_headers,
      *gated, *gated_headers;
  int n_tiles[PRODUCTS];
  int first_k_tiles[PRODUCTS][MAX_CLUSTER + 1];  // of every CTA of a cluster, and the end
  int first_units[PRODUCTS][MAX_CLUSTERS + 1];  // of every cluster, and the end
  int tokens_log;  // of rows, a power of two
  int cluster_log;
  int group;  // query heads of a key head
  // Rows of one text that an item has, as a logarithm; query heads of all of them, its columns; and the logarithms of
  // columns and of words that are of one of its rows (30: all).
  int item_rows_log, columns, row_columns_log, row_words_log;
  int head_words_log;  // of four floats
  float key_heads_of_head;  // 1 / group
  uint32_t nought;  // 0, which the compiler does not know
  trirun_int2 packed;  // the embedding, where it is
};

}  // namespace trirun::step
