// What the per-span kernel is told, its instances' shapes, and how its stages are filled (spans_sm90.cu).
#pragma once

#include "spans_quantize.cuh"
#include "split_k.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/common/tensor_map.cuh"

namespace trirun::gemm_decode {
namespace {

constexpr int STEPS = 4;       // of a stage, 32 k each
constexpr int SLICE = 32;      // rows of x whose limbs one CTA multiplies, at most
constexpr int PIECES = 32;     // of x that a CTA quantizes itself, at most
constexpr int QUANTIZERS = 2;  // warpgroups that do

struct SpansArgs : StreamK {
  CUtensorMap words, limbs;
  uint32_t nought;  // see release_stage
  const __half* scales;
  const __half* zeros;  // or null
  float zero;
  int n_tiles, k_tiles;
  int span_mask;     // k tiles of one scale of x, less one: 0, 3, or all
  int n, m;
  const float2* x_scales;
  int tokens, slices;
  int pairs;  // 1 where the CTAs of a tile are clusters of two, else 0
  const void* x;  // what the fused kernel quantizes itself: [m][ldx]
  int64_t ldx;
  int k, pieces;  // columns of x; spans of them that a CTA has, or has a part of, at most
  const void* bias;
  void* y;
  int64_t ldy;
  int dtype;
  bool vectors;  // y can be written 16 bytes at a time
  int early, x_first;  // stages of words asked for before the wait; of x asked for before other words
  int scales_at;  // of groups, within a stage
  int stages, stage_bytes, x_at, x_scales_at;  // offsets within a stage, words at 0; fused: in shared memory
  int staged_at, totals_at, barriers_at;       // offsets in shared memory; stages at 0
  unsigned* counters;  // warps that have left their sums of a tile; of its first CTA, one for every warp
  float4* parts;       // [CTA][slice][first, last tile][quarter of a thread's sums][consumer]
};

template <int LIMBS, int N, bool FUSED, int HEIGHT = 4>
struct SpansShape {
  static constexpr int N_TILES = HEIGHT;  // 4, or 3 of low tiles
  static constexpr bool TALL = N_TILES == 4;  // a warp has an n tile, a warpgroup row blocks of all; else the other way
  static constexpr int J = TALL ? 2 : 1;  // row blocks of one warp
  static constexpr int BURST = TALL ? 1 : 2;  // steps whose products stand side by side
  static constexpr int GROUPS = TALL ? 4 / J : N_TILES;  // warpgroups that multiply
  static constexpr int PRODUCERS = FUSED ? QUANTIZERS : 1;  // and that copy, or copy and quantize
  static constexpr int CONSUMERS = GROUPS * 128, THREADS = CONSUMERS + PRODUCERS * 128;
  static constexpr int ROWS = N / LIMBS;  // of x in a slice
  static constexpr int TOKENS = LIMBS == 2 ? N / 8 : N / 4;  // of one thread: per 8 columns one or two
  // One limb and one scale per row: int32 sums over all of k are exact and nothing is converted on the way.
  static constexpr bool EXACT = LIMBS == 1;
  static constexpr int QUARTERS = J * TOKENS * 2 / 4;
  // Of fragments: one in use, one being made, and where there are registers for them two that may still be read.
  static constexpr int SETS = FUSED && N == 64 ? 2 : 4;
  // Rows of x that a quantizing warp has on their way from memory.
  static constexpr int AHEAD = FUSED ? ROWS / (PRODUCERS * 4) : 0;
  // Where a warp's outputs are put in order: rows of tokens, 16 bytes apart in banks.
  static constexpr int STAGED_ROW = J * 32 + 16, STAGED = ROWS * STAGED_ROW;
  // Registers of a thread at launch, of a copying and of a multiplying one: what the first give up must cover what the
  // others add, or the kernel waits forever. Some of a multiprocessor's are left over, so that CTAs of the kernel that
  // comes next, or quantizes its x, are there before this one ends. Given to the compiler as they are: launch bounds
  // come to a register count only in steps of a warp for every scheduler.
  static constexpr int LAUNCH_REGISTERS = !TALL ? 112 : FUSED ? (N < 64 ? 112 : 128) : N < 64 ? 128 : 136;
  static constexpr int PRODUCER_REGISTERS = !FUSED ? 24 : N < 64 ? 72 : 80;
  static constexpr int CONSUMER_REGISTERS = !TALL ? 136 : FUSED ? (N < 64 ? 152 : 176) : N < 64 ? 176 : 192;
  static_assert(PRODUCERS * PRODUCER_REGISTERS + GROUPS * CONSUMER_REGISTERS <=
                LAUNCH_REGISTERS * (GROUPS + PRODUCERS));
};

// Calls copy(stage's address, its barrier, tile, k tile of the tile, whether it is the last of the CTA) for every k
// tile [from, last) of this CTA, once its stage is free: by one thread. from: the first, or the first after a whole
// ring.
template <typename Copy, typename Count>
__device__ __forceinline__ void produce(const SpansArgs& a, uint32_t shared, uint32_t full, uint32_t empty, int first,
                                        int from, int last, Copy copy, Count count) {
  int tile = from / a.k_tiles, k_tile = from - tile * a.k_tiles;
  Ring ring;
  ring.phase = from != first;
#pragma unroll 1
  for (int i = from; i < last; i++) {
    count(i - first);
    if (i - first >= a.stages) barrier_wait(empty + ring.stage * 8, ring.phase ^ 1);
    copy(shared + ring.stage * a.stage_bytes, full + ring.stage * 8, tile, k_tile, i + 1 == last);
    ring.advance(a.stages);
    if (++k_tile == a.k_tiles) k_tile = 0, tile++;
  }
}

// Whether int32 sums end with this k tile of a tile, and become floats.
__device__ __forceinline__ bool closes(const SpansArgs& a, int k_tile, bool last) {
  return (k_tile & a.span_mask) == a.span_mask || k_tile + 1 == a.k_tiles || last;
}

__device__ __forceinline__ float half_of(uint32_t pair, int h) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(h ? pair >> 16 : pair)));
}

using Kernel = void (*)(SpansArgs);

struct Instance {
  int n_tiles, limbs, columns;
  bool fused, grouped;
  int consumers, threads, registers, quarters, staged;
  Kernel kernel;
};

// How a plan is launched; without an instance where no kernel runs it.
struct Config {
  const Instance* instance = nullptr;
  int ctas = 0;
  int shared = -1;  // bytes of one CTA, dynamic
};

// Where the kernel keeps what, and how much that is in all. longest: k tiles of one CTA, at most. shrinks: there may
// be fewer stages.
inline int lay_out(SpansArgs& a, const Instance& i, int stages, int longest, bool has_zeros, bool shrinks) {
  const int rows = i.columns / i.limbs, words = i.n_tiles * WORD_TILE_BYTES;
  const int group_bytes = i.grouped ? i.n_tiles * 128 * (has_zeros ? 2 : 1) : 0;
  const int beside = i.staged + (TOTALS_AT + 128) * 4 + (2 * MAX_STAGES + PIECES + 2) * 8;
  a.stages = stages;
  if (i.fused) {
    a.scales_at = words;
    a.stage_bytes = a.scales_at + group_bytes;
    a.x_at = a.stages * a.stage_bytes;
    a.x_scales_at = a.x_at + longest * 8 * half_step(i.columns);
    a.staged_at = align(a.x_scales_at + (i.grouped ? longest : a.pieces) * rows * 8);
  } else {
    a.x_at = words;
    a.x_scales_at = a.x_at + K_TILE * i.columns;
    a.scales_at = a.x_scales_at + align(rows * 8);
    a.stage_bytes = align(a.scales_at + group_bytes);
    const int fitting = (MAX_SHARED - beside) / a.stage_bytes;
    if (shrinks && fitting < a.stages) a.stages = fitting;
    a.staged_at = a.stages * a.stage_bytes;
  }
  a.totals_at = a.staged_at + i.staged;
  a.barriers_at = a.totals_at + (TOTALS_AT + 128) * 4;
  return a.staged_at + beside;
}

// Rows of x of one CTA; those beyond are other CTAs'.
inline int slice_rows(const Problem& p, const ActivationLayout& layout) {
  return p.plan.tile_m >= 16 ? p.plan.tile_m / layout.limbs : SLICE;
}
inline int slices_of(const Problem& p, const ActivationLayout& layout) {
  const int rows = slice_rows(p, layout);
  return (layout.tokens + rows - 1) / rows;
}

// Whether x can be read, in 16-byte pieces of 16-bit values, by a kernel that quantizes it itself.
inline bool fuses(const Problem& p) {
  return p.plan.fused && (p.w.group_size == -1 || p.w.group_size == K_TILE) && p.activations == nullptr &&
         p.dtype != TRIRUN_F32 && p.k % 8 == 0 && p.ldx % 8 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0;
}

// One slice's limbs of 128 k a copy, each 16 k apart; columns beyond the last arrive as zeros.
inline int encode_limbs(CUtensorMap* map, const uint8_t* limbs, const ActivationLayout& layout, uint32_t columns) {
  const cuuint64_t bytes = static_cast<cuuint64_t>(layout.columns) * 16;
  return encode(map, limbs,
                {CU_TENSOR_MAP_DATA_TYPE_UINT32,
                 CU_TENSOR_MAP_SWIZZLE_NONE,
                 3,
                 {bytes / 4, 2, static_cast<cuuint64_t>(layout.k_tiles) * STEPS},
                 {bytes, bytes * 2},
                 {columns * 4, 2, STEPS}});
}

// Sums of tiles that several CTAs share.
inline size_t parts_bytes(const Problem& p, const Instance& instance, int slices) {
  const size_t ctas = p.plan.ctas > 0 ? size_t(p.plan.ctas) * slices : 0;
  return ctas * 2 * instance.quarters * instance.consumers * sizeof(float4);
}

}  // namespace
}  // namespace trirun::gemm_decode
