// The Hopper prefill kernel: y[m][n] = x[m][k] . w[n][k]^T with w as stored in tile64.
//
// One CTA computes 256 rows of w (four strips) by Tokens rows of x. A producer warp keeps a ring of stages full by
// bulk tensor copies; two consumer warpgroups multiply. Warp i of a warpgroup owns strip i, and the warpgroup owns
// two of the four row blocks of every strip, so each masked word is already an A fragment of wgmma and no weight
// ever passes through shared memory a second time. w is the M side of the product: tokens are its N.
#pragma once

#include <cuda.h>

#include <type_traits>

#include "../trirun.h"
#include "prefill_dequantize.cuh"
#include "prefill_hopper.cuh"

namespace trirun {

struct PrefillArguments {
  CUtensorMap x;       // [m][k], boxes of Tokens x 128 bytes, 128-byte swizzle
  CUtensorMap words;   // [n/64][k/32][128]
  CUtensorMap scales;  // [k/g][n] in strip order; grouped kernels only
  CUtensorMap zeros;
  CUtensorMap outputs;  // [m][n], boxes of 32 columns (64-byte swizzle) by 8 tokens, or by Tokens where splits is 1
  const __half* channel_scales;  // one row of scales, or null when scales enter the fragments
  const __half* channel_zeros;   // one row of real zeros (group size -1), or null
  const float* row_scale;        // [m] factor of every row of x, or null
  const int* row_sum;            // [m] sum of the int8 codes of every row of x; int8 kernels only
  const void* bias;              // [n] in the type of y, or null
  void* y;
  int64_t ldy;
  int m, n, padded_n;       // true sizes of y; rows of w as stored
  int k_stages;             // stages along k
  int row_tiles, token_tiles;  // of 256 rows of w, of Tokens rows of x
  int raster;               // token tiles that run side by side
  int splits;               // CTAs of the cluster that share one tile along k
  int first_tile, last_tile;
  bool remainder;           // launched behind the tiles before first_tile, to fill the CTAs that those leave idle
  int group_size;
  bool has_zeros;           // zeros come with every group
  bool split_zero;          // zero points that q - zero is not exact for: subtracted in two parts
  float zero;
  int y_dtype;
  bool tensor_stores;       // y's rows start at multiples of 16 bytes and hold 16-bit values
};

constexpr int kRowTile = 256;
constexpr int kConsumers = 256;
constexpr int kThreads = kConsumers + 128;
constexpr int kStageBytesOfX = 128;  // per row: one swizzle span

template <typename T, int Tokens, bool Grouped>
struct PrefillShape {
  // Two accumulators of 64 tokens per warpgroup would leave the tensor cores waiting for their own sums: with 64 tokens
  // a warpgroup takes all four row blocks of a strip, and the two warpgroups take turns at the stages.
  static constexpr int kRowBlocks = Tokens == 64 ? 4 : 2;
  static constexpr int kTurns = kRowBlocks / 2;
  static constexpr int kColumns = kStageBytesOfX / int(sizeof(T));  // of k in a stage
  static constexpr int kBlocks = kColumns / 32;
  static constexpr int kTokens = Tokens;
  static constexpr int kX = Tokens * kStageBytesOfX;
  static constexpr int kWords = 4 * kBlocks * 512;
  static constexpr int kGroups = Grouped ? 2 * 512 : 0;  // two groups of 256 scales; as much again for zeros
  static constexpr int kStage = kX + kWords + 2 * kGroups;
  static constexpr int kOutput = 8 * Tokens * 64;   // per warp: 32 values of 16 bits for every token
  static constexpr int kRows = 2 * Tokens * 8;      // per warpgroup: factor and sum of every token
  static constexpr int kExchange = kTurns == 2 ? 8 * Tokens * 128 : 0;  // sums that one warpgroup hands to the other
  static constexpr int kBarriers = 256;
  static constexpr int kFixed = kOutput + kExchange + kRows + kBarriers;
  static constexpr int kRoom = (227 * 1024 - kFixed) / kStage;
  static constexpr int kStages = kRoom < 12 ? kRoom : 12;
  static constexpr int kBytes = kStages * kStage + kFixed;
  // What other CTAs of a cluster send takes the place of the stages once all are consumed.
  static constexpr int received(int splits) { return (splits - 1) * ((Tokens / 8 + splits - 1) / splits) * 8192; }
};

#ifdef TRIRUN_HOPPER

// The four sums of a row block that belong to one block of 8 tokens.
template <typename A, int Count>
__device__ __forceinline__ A (&four(A (&sum)[Count], int block))[4] {
  return *reinterpret_cast<A(*)[4]>(&sum[4 * block]);
}

// Pins sums to this place in the program: without it the compiler copies them before the wait that makes them complete,
// since it takes a wgmma's results to be there at once.
template <int Count>
__device__ __forceinline__ void hold(float (&sum)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sum[i])::"memory");
}
template <int Count>
__device__ __forceinline__ void hold(int (&sum)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(sum[i])::"memory");
}

// What a consumer warp does with its sums: 32 rows of w (one strip's two row blocks) by Tokens rows of x.
template <typename T, int Tokens, bool Grouped>
struct Consumer {
  static constexpr bool kInt8 = sizeof(T) == 1;
  using Accumulator = typename std::conditional<kInt8, int, float>::type;
  static constexpr int kBlocks = Tokens / 8;

  const PrefillArguments& args;
  const uint32_t output, rows;  // shared memory: this warp's staged outputs, this warpgroup's row factors
  int lane;
  const int warp, group;        // warp = strip of the tile; group = warpgroup, owner of row blocks 2 group, 2 group + 1
  int row0, token0;             // first row of w and first token of the tile
  // Of this lane's four rows, [row block][row half]. What `begin` asks for is converted only when it is used, so that no
  // multiplication waits for it.
  uint2 raw_scale;
  uint32_t raw_bias[2][2];
  float scale[2][2], bias[2][2], zero[2][2];

  __device__ Consumer(const PrefillArguments& a, uint32_t out, uint32_t factors, int l, int w, int g)
      : args(a), output(out), rows(factors), lane(l), warp(w), group(g) {}

  __device__ __forceinline__ int first_row() const { return row0 + 64 * warp + 32 * group; }
  __device__ __forceinline__ int row(int j, int h) const { return first_row() + 16 * j + 8 * h + lane / 4; }

  // Where the stored (strip) order keeps this lane's row.
  __device__ __forceinline__ int stored(int j, int h) const {
    return row0 + 64 * warp + 8 * (lane / 4) + 4 * group + 2 * j + h;
  }

  // Zero point of a row, given by its row block in the strip.
  __device__ __forceinline__ float channel_zero(int block, int h) const {
    const int at = row0 + 64 * warp + 8 * (lane / 4) + 2 * block + h;
    if (!args.channel_zeros) return args.zero;
    return at < args.padded_n ? __half2float(args.channel_zeros[at]) : 0.f;
  }

  __device__ __forceinline__ float bias_value(uint32_t raw) const {
    if (args.y_dtype == TRIRUN_F32) return __uint_as_float(raw);
    if (args.y_dtype == TRIRUN_BF16) return __uint_as_float(raw << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(raw)));
  }

  __device__ __forceinline__ void warpgroup_sync() const {
    asm volatile("bar.sync %0, 128;" ::"r"(2 + group) : "memory");
  }

  // Everything the outputs need beside the sums, asked for before the sums are computed.
  __device__ __forceinline__ void begin(int row_tile, int token_tile) {
    row0 = row_tile * kRowTile, token0 = token_tile * Tokens;
    raw_scale = make_uint2(0, 0);
    if (args.channel_scales && stored(0, 0) < args.padded_n)
      raw_scale = *reinterpret_cast<const uint2*>(args.channel_scales + stored(0, 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row(i / 2, i % 2);
      raw_bias[i / 2][i % 2] = 0;
      if (args.bias && r < args.n)
        raw_bias[i / 2][i % 2] = args.y_dtype == TRIRUN_F32 ? static_cast<const uint32_t*>(args.bias)[r]
                                                            : static_cast<const uint16_t*>(args.bias)[r];
    }
    if (args.row_scale) {
      warpgroup_sync();
      const int local = threadIdx.x % 128, token = token0 + local;
      if (local < Tokens) {
        const float s = token < args.m ? args.row_scale[token] : 0.f;
        const float sum = token < args.m ? float(args.row_sum[token]) : 0.f;
        hopper::shared_store_pair(rows + 8 * local, __float_as_uint(s), __float_as_uint(sum));
      }
    }
  }

  // Before the first staged output: the stores of the tile before have read their staging memory.
  __device__ __forceinline__ void begin_outputs() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = i / 2, h = i % 2;
      scale[j][h] = args.channel_scales ? half_bits(j ? raw_scale.y : raw_scale.x, h) : 1.f;
      bias[j][h] = bias_value(raw_bias[j][h]);
      if (kInt8) zero[j][h] = channel_zero(2 * group + j, h);
    }
    if (args.row_scale) warpgroup_sync();
    if (lane == 0) hopper::store_wait_read();
    __syncwarp();
  }

  __device__ __forceinline__ uint32_t packed(float lo, float hi) const {
    if (args.y_dtype == TRIRUN_BF16) {
      __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
      return reinterpret_cast<uint32_t&>(h);
    }
    __half2 h = __floats2half2_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(h);
  }

  // Whether the outputs take the short way: 16 bits, and factors per row of x exactly where the type of x implies them.
  // A kernel runs through its outputs once or twice, so that every instruction on the way is fetched for the first time
  // and costs more than it computes.
  __device__ __forceinline__ bool is_plain() const {
    if (kInt8) return args.y_dtype != TRIRUN_F32;
    return !args.row_scale && args.y_dtype == (std::is_same<T, __half>::value ? TRIRUN_F16 : TRIRUN_BF16);
  }

  // A staged row is 64 bytes, its four 16-byte parts permuted as the 64-byte swizzle of the copy engine has it.
  __device__ __forceinline__ uint32_t staged(int token, int part) const {
    return output + token * 64 + ((part ^ (token >> 1 & 3)) << 4);
  }

  // The sums of eight tokens from 8 block on: staged transposed for 16-bit outputs, written at once for float32.
  template <bool Plain>
  __device__ __forceinline__ void put(const Accumulator (&s0)[4], const Accumulator (&s1)[4], int block) const {
    const int local = 8 * block + 2 * (lane % 4);
    float v[2][4];
    // Factor and sum of the codes of tokens 2t and 2t + 1.
    uint4 factors = make_uint4(0x3f800000, 0, 0x3f800000, 0);
    if (kInt8 || (!Plain && args.row_scale)) factors = hopper::shared_load(rows + 8 * local);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = i / 4, e = i % 4, h = e / 2;
      const Accumulator sum = j ? s1[e] : s0[e];
      const float factor = __uint_as_float(e % 2 ? factors.z : factors.x);
      if constexpr (kInt8) {
        // The codes were shifted up by their place in the byte: the sums shift down exactly.
        const float codes = __uint_as_float(e % 2 ? factors.w : factors.y);
        v[j][e] = fmaf(fmaf(-zero[j][h], codes, float(sum >> (4 * group + 2 * j))), scale[j][h] * factor, bias[j][h]);
      } else {
        v[j][e] = fmaf(sum, Plain ? scale[j][h] : scale[j][h] * factor, bias[j][h]);
      }
    }
    if (Plain || args.y_dtype != TRIRUN_F32) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float lo = v[i / 2][i % 2 * 2], hi = v[i / 2][i % 2 * 2 + 1];
        if constexpr (kInt8 || !Plain) {
          r[i] = packed(lo, hi);
        } else if constexpr (std::is_same<T, __half>::value) {
          const __half2 p = __floats2half2_rn(lo, hi);
          r[i] = reinterpret_cast<const uint32_t&>(p);
        } else {
          const __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
          r[i] = reinterpret_cast<const uint32_t&>(p);
        }
      }
      hopper::store_transposed(staged(lane % 8, lane / 8) + 512 * block, r[0], r[1], r[2], r[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int r = row(e / 4, e / 2 % 2), token = token0 + local + e % 2;
        if (r < args.n && token < args.m) static_cast<float*>(args.y)[token * args.ldy + r] = v[e / 4][e % 4];
      }
    }
  }

  // Staged tokens [8 first, 8 last) to y. `whole` stands for the box of a full tile.
  __device__ __forceinline__ void end_outputs(int first, int last, bool whole) const {
    if (args.y_dtype == TRIRUN_F32) return;
    const int n = first_row();
    if (args.tensor_stores) {
      hopper::fence_async();
      __syncwarp();
      if (lane == 0 && n < args.n) {
        for (int block = first; block < last; block += whole ? kBlocks : 1)
          hopper::tensor_store(&args.outputs, output + block * 512, n, token0 + 8 * block);
        hopper::store_commit();
      }
      return;
    }
    __syncwarp();
    for (int local = 8 * first + lane / 4; local < 8 * last; local += 8) {
      const int token = token0 + local, column = n + lane % 4 * 8;
      if (token >= args.m || column >= args.n) continue;
      const uint4 v = hopper::shared_load(staged(local, lane % 4));
      const uint32_t part[4] = {v.x, v.y, v.z, v.w};
      uint16_t* to = static_cast<uint16_t*>(args.y) + token * args.ldy + column;
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < args.n) to[e] = static_cast<uint16_t>(part[e / 2] >> 16 * (e % 2));
    }
    __syncwarp();
  }
};

// Where a tile lies. Token tiles are taken `raster` at a time, so that the CTAs running together share rows of w and of x
// in L2.
__device__ __forceinline__ void place(const PrefillArguments& a, int tile, int& row_tile, int& token_tile) {
  const int band = tile / (a.raster * a.row_tiles), inside = tile - band * a.raster * a.row_tiles;
  const int width = min(a.raster, a.token_tiles - band * a.raster);
  row_tile = inside / width;
  token_tile = band * a.raster + inside % width;
}

// One thread that keeps the stages full.
template <typename Shape, bool Grouped>
__device__ __forceinline__ void produce(const PrefillArguments& args, uint32_t base, uint32_t words_at, uint32_t groups_at,
                                        uint32_t full, uint32_t empty, int tile, int tile_step, int first, int last) {
  using namespace hopper;
  const bool grouped = Grouped && args.group_size > 0;
  const int group_rows = args.group_size == 32 ? 2 : 1;
  const uint32_t bytes = Shape::kX + Shape::kWords + (grouped ? group_rows * 512 * (args.has_zeros ? 2 : 1) : 0);
  const auto load_weights = [&](int stage, int k, int row_tile) {
    const uint32_t bar = full + 8 * stage;
    barrier_expect(bar, bytes);
    tensor_load(words_at + stage * Shape::kWords, &args.words, bar, 0, k * Shape::kBlocks, row_tile * 4);
    if (grouped) {
      const int group = k * Shape::kColumns / args.group_size;
      const uint32_t to = groups_at + stage * 2 * Shape::kGroups;
      tensor_load(to, &args.scales, bar, row_tile * kRowTile, group);
      if (args.has_zeros) tensor_load(to + Shape::kGroups, &args.zeros, bar, row_tile * kRowTile, group);
    }
  };
  const auto load_x = [&](int stage, int k, int token_tile) {
    tensor_load(base + stage * Shape::kX, &args.x, full + 8 * stage, k * Shape::kColumns, token_tile * Shape::kTokens);
  };
  int row_tile, token_tile;
  place(args, tile, row_tile, token_tile);
  // Weights never depend on the kernel before this one: the first stages are asked for before it has ended.
  const int early = min(Shape::kStages, last - first);
  for (int i = 0; i < early; ++i) load_weights(i, first + i, row_tile);
  if (!args.remainder) grid_dependency_wait();
  for (int i = 0; i < early; ++i) load_x(i, first + i, token_tile);
  int stage = early % Shape::kStages, parity = early == Shape::kStages ? 0 : 1;
  for (int k = first + early;;) {
    for (; k < last; ++k) {
      barrier_wait(empty + 8 * stage, parity);
      load_weights(stage, k, row_tile);
      load_x(stage, k, token_tile);
      if (++stage == Shape::kStages) stage = 0, parity ^= 1;
    }
    tile += tile_step;
    if (tile >= args.last_tile) return;
    place(args, tile, row_tile, token_tile);
    k = first;
  }
}

#endif  // TRIRUN_HOPPER

template <typename T, int Tokens, bool Grouped>
__global__ void __launch_bounds__(kThreads, 1) prefill_kernel(const __grid_constant__ PrefillArguments args) {
#ifdef TRIRUN_HOPPER
  using namespace hopper;
  using Shape = PrefillShape<T, Tokens, Grouped>;
  using Part = Consumer<T, Tokens, Grouped>;
  using Accumulator = typename Part::Accumulator;
  using Half = typename std::conditional<Part::kInt8, __half, T>::type;
  using D = Dequantize<Half>;
  constexpr int kStages = Shape::kStages, kTurns = Shape::kTurns, kRowBlocks = Shape::kRowBlocks;
  constexpr int kSteps = 4;                    // wgmma steps along k in a stage
  // Fragments are made this many steps ahead; those of the step in flight and of the one before may still be read.
  constexpr int kAhead = Grouped ? 2 : 1;

  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = smem_address(shared);
  const uint32_t words_at = base + kStages * Shape::kX, groups_at = words_at + kStages * Shape::kWords;
  const uint32_t output_at = groups_at + kStages * 2 * Shape::kGroups, exchange_at = output_at + Shape::kOutput;
  const uint32_t rows_at = exchange_at + Shape::kExchange, full = rows_at + Shape::kRows, empty = full + 8 * kStages;

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kConsumers / 32 / kTurns);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const int splits = args.splits, rank = splits > 1 ? blockIdx.x % splits : 0;
  const int first = args.k_stages * rank / splits, last = args.k_stages * (rank + 1) / splits;
  const int tile0 = args.first_tile + blockIdx.x / splits, tile_step = gridDim.x / splits;

  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0)
      produce<Shape, Grouped>(args, base, words_at, groups_at, full, empty, tile0, tile_step, first, last);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int thread = threadIdx.x - 128, lane = thread % 32;
    // Read from a lane, so that the compiler knows it is the same for the warp and keeps what follows in uniform registers.
    const int group = __shfl_sync(~0u, thread / 128, 0);
    Part part(args, output_at + thread / 32 * Tokens * 64, rows_at + group * Tokens * 8, lane, thread / 32 % 4, group);
    // A remainder starts when every CTA of the launch before it has passed this wait: the rows of x are there. It waits
    // at its end instead, so that a kernel behind it finds both launches complete.
    if (!args.remainder) grid_dependency_wait();
    grid_launch_dependents();

    uint32_t magic, unit[2], offset[2];
    const float whole_zero = Grouped && args.split_zero ? 0.f : args.zero;
    asm volatile("mov.b32 %0, %1;" : "=r"(magic) : "n"(D::kMagic));
    unit[0] = D::pair(0.25f), unit[1] = D::pair(0.0625f);
    offset[0] = D::pair(-D::kBase * 0.25f - whole_zero), offset[1] = D::pair(-D::kBase * 0.0625f - whole_zero);
    const uint32_t one = D::pair(1.f);
    uint32_t int8_mask[kRowBlocks];
#pragma unroll
    for (int j = 0; j < kRowBlocks; ++j) int8_mask[j] = 0x03030303u << 2 * (j ^ 2 * group);

    int ring = kTurns == 1 ? 0 : group;  // stages before this warpgroup's next one, of all tiles
    for (int tile = tile0; tile < args.last_tile; tile += tile_step) {
      int row_tile, token_tile;
      place(args, tile, row_tile, token_tile);
      if (kTurns == 1) part.begin(row_tile, token_tile);
      // Row block j ^ (2 group) of the strip: the two that this warpgroup writes come first. Set to zero rather than
      // overwritten by the first wgmma, which counts as reading them and would keep them alive through the outputs.
      Accumulator sum[kRowBlocks][Tokens / 2] = {};
      uint32_t fragment[kSteps][kRowBlocks][4];
      uint4 words[Shape::kBlocks];
      // [row block][row half], as pairs: scale, and the zero point in two parts, the second multiplied by the scale.
      uint32_t group_scale[kRowBlocks][2] = {}, group_zero[kRowBlocks][2] = {}, group_rest[kRowBlocks][2] = {};
      const auto set_zero = [&](int j, int h, float zero) {
        group_zero[j][h] = D::pair(-zero);
        const float rest = args.split_zero ? -zero - D::first(group_zero[j][h]) : 0.f;
        group_rest[j][h] = D::pair(rest * D::first(group_scale[j][h]));
      };
      const auto read_groups = [&](int stage, int index) {
        const uint32_t at = groups_at + stage * 2 * Shape::kGroups + index * 512 + part.warp * 128 + lane / 4 * 16;
        // Eight values of 16 bits, two per row block; this warpgroup's own row blocks first.
        const uint2 s2 = shared_load_pair(at + 8 * group), z2 = args.has_zeros ? shared_load_pair(at + Shape::kGroups + 8 * group)
                                                                               : make_uint2(0, 0);
        static_assert(!Grouped || kRowBlocks == 2);
        const uint32_t s[2] = {s2.x, s2.y}, z[2] = {z2.x, z2.y};
#pragma unroll
        for (int i = 0; i < 2 * kRowBlocks; ++i) {
          const int j = i / 2, h = i % 2;
          group_scale[j][h] = D::broadcast(s[j], h);
        }
        if (!args.split_zero) return;
#pragma unroll
        for (int i = 0; i < 2 * kRowBlocks; ++i)
          set_zero(i / 2, i % 2, args.has_zeros ? half_bits(z[i / 2], i % 2) : args.zero);
      };
      const auto read_words = [&](int stage, bool new_group) {
        barrier_wait(full + 8 * stage, ring / kStages & 1);
        if (Part::kInt8) return;
        const uint32_t at = words_at + stage * Shape::kWords + part.warp * Shape::kBlocks * 512 + lane * 16;
#pragma unroll
        for (int i = 0; i < Shape::kBlocks; ++i) words[i] = shared_load(at + i * 512);
        if (Grouped && new_group) read_groups(stage, 0);
      };
      const auto make_fragments = [&](int stage, int step) {
        uint32_t(&a)[kRowBlocks][4] = fragment[step];
        if constexpr (Part::kInt8) {
          const uint4 w = shared_load(words_at + stage * Shape::kWords + (part.warp * Shape::kBlocks + step) * 512 + lane * 16);
          const uint32_t raw[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
          for (int i = 0; i < 4 * kRowBlocks; ++i)  // volatile: stays ahead of the fence that hands over the registers
            asm volatile("and.b32 %0, %1, %2;" : "=r"(a[i / 4][i % 4]) : "r"(raw[i % 4]), "r"(int8_mask[i / 4]));
        } else {
          // Codes of two row blocks move to bits 2..5 of every byte: higher ones would leave the mantissa of bf16, lower
          // ones would leave no room for zero points in quarters.
#pragma unroll
          for (int pair = 0; pair < kRowBlocks / 2; ++pair)
            load_fragments<Half>(a[2 * pair], a[2 * pair + 1], words[step / 2], step % 2,
                                 pair != group ? 2 : 30, magic, unit, offset);
          if constexpr (Grouped) {
            if (step == 2 && args.group_size == 32) read_groups(stage, 1);
#pragma unroll
            for (int i = 0; i < 4 * kRowBlocks; ++i) {
              uint32_t& v = a[i / 4][i % 4];
              const int j = i / 4, h = i % 2;
              if (args.split_zero) v = D::fma(v, one, group_zero[j][h]);
              v = D::fma(v, group_scale[j][h], group_rest[j][h]);
            }
          }
        }
      };
      if constexpr (Grouped) {
#pragma unroll
        for (int i = 0; i < 2 * kRowBlocks; ++i) {
          group_scale[i / 2][i % 2] = one;
          set_zero(i / 2, i % 2, args.group_size < 0 ? part.channel_zero(i / 2 ^ 2 * group, i % 2) : args.zero);
        }
      }

      const int begin = first + (kTurns == 1 ? 0 : group);
      int stage = ring % kStages, before = 0;
      read_words(stage, args.group_size > 0);
#pragma unroll
      for (int step = 0; step < kAhead; ++step) make_fragments(stage, step);
      for (int k = begin; k < last; k += kTurns) {
        const uint64_t b = operand_descriptor(base + stage * Shape::kX);
        const int now = stage, next_k = k + kTurns;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < kRowBlocks; ++j)
            Wgmma<T, Tokens>::run(sum[j], fragment[step][j], b + 2 * step);
          wgmma_commit();
          // While the tensor cores work: the fragments of `kAhead` steps from here.
          if (step + kAhead < kSteps) {
            make_fragments(now, step + kAhead);
          } else {
            if (step + kAhead == kSteps) {
              ring += kTurns;
              stage = ring % kStages;
              if (next_k < last) read_words(stage, args.group_size > 0 && (next_k * Shape::kColumns & (args.group_size - 1)) == 0);
            }
            if (next_k < last) make_fragments(stage, step + kAhead - kSteps);
          }
          // The step before is complete, and with it, at the first step, the stage before.
          wgmma_wait<1>();
          if (step == 0 && k > begin && lane == 0) barrier_arrive(empty + 8 * before);
        }
        before = now;
      }
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < kRowBlocks; ++j) hold(sum[j]);
      if (lane == 0) barrier_arrive(empty + 8 * before);
      // Says that the lane may have changed: addresses of the outputs are then computed here, not kept in registers
      // all through the multiplications.
      int thread_now = thread;
      asm volatile("" : "+r"(thread_now));
      part.lane = thread_now % 32;
      if (kTurns == 2) part.begin(row_tile, token_tile);
      // The next tile's first stage follows the last of this one, whichever warpgroup had that.
      if (kTurns == 2 && (last - first) % 2) ring += group ? 1 : -1;

      // Sums of the two row blocks this warpgroup writes. Copies, where they are added to: sums written here would be
      // read by the next tile's first wgmma, as the compiler sees it.
      Accumulator total[2][Tokens / 2];
      if constexpr (kTurns == 2) {
        const uint32_t to = exchange_at + thread_now * 16, from = exchange_at + (thread_now ^ 128) * 16;
        asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
#pragma unroll
        for (int i = 0; i < 2 * Part::kBlocks; ++i)
          shared_store(to + i * kConsumers * 16,
                       *reinterpret_cast<const uint4*>(&four(sum[2 + i / Part::kBlocks], i % Part::kBlocks)));
        asm volatile("bar.sync 1, %0;" ::"n"(kConsumers) : "memory");
#pragma unroll
        for (int i = 0; i < 2 * Part::kBlocks; ++i) {
          const int j = i / Part::kBlocks, at = 4 * (i % Part::kBlocks);
          const uint4 v = shared_load(from + i * kConsumers * 16);
          const uint32_t received[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int e = 0; e < 4; ++e)
            total[j][at + e] = sum[j][at + e] + reinterpret_cast<const Accumulator&>(received[e]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < Tokens; ++i) total[i / (Tokens / 2)][i % (Tokens / 2)] = sum[i / (Tokens / 2)][i % (Tokens / 2)];
      }
      if (splits == 1) {
        part.begin_outputs();
        if (part.is_plain()) {
#pragma unroll
          for (int block = 0; block < Part::kBlocks; ++block)
            part.template put<true>(four(total[0], block), four(total[1], block), block);
        } else {
#pragma unroll
          for (int block = 0; block < Part::kBlocks; ++block)
            part.template put<false>(four(total[0], block), four(total[1], block), block);
        }
        part.end_outputs(0, Part::kBlocks, true);
      } else {
        // Every CTA of the cluster owns a share of the tokens and is sent the others' sums of them, which land where the
        // stages were. Own sums first, then by rank: the order is fixed.
        const int share = (Part::kBlocks + splits - 1) / splits, own = Part::kBlocks * rank / splits;
        const int end = Part::kBlocks * (rank + 1) / splits;
        cluster_sync();
        int owner = 0, owner_end = Part::kBlocks / splits;
        uint32_t to = cluster_address(base + ((rank - 1) * share * 2 * kConsumers + thread_now) * 16, 0);
#pragma unroll
        for (int block = 0; block < Part::kBlocks; ++block) {
          if (block == owner_end) {
            ++owner;
            owner_end = Part::kBlocks * (owner + 1) / splits;
            to = cluster_address(base + ((rank - (rank > owner)) * share * 2 * kConsumers + thread_now) * 16, owner);
          }
          if (owner != rank) {
#pragma unroll
            for (int j = 0; j < 2; ++j)
              cluster_store(to + j * kConsumers * 16, *reinterpret_cast<const uint4*>(&four(total[j], block)));
            to += 2 * kConsumers * 16;
          }
        }
        cluster_sync();
        part.begin_outputs();
        const uint32_t from = base + thread_now * 16;
        const auto finish = [&](auto plain) {
#pragma unroll
          for (int block = 0; block < Part::kBlocks; ++block) {
            if (block < own || block >= end) continue;
            Accumulator all[2][4];
#pragma unroll
            for (int e = 0; e < 8; ++e) all[e / 4][e % 4] = total[e / 4][4 * block + e % 4];
#pragma unroll 1
            for (int slot = 0; slot < splits - 1; ++slot)
#pragma unroll
              for (int j = 0; j < 2; ++j) {
                const uint4 v = shared_load(from + ((slot * share + block - own) * 2 + j) * kConsumers * 16);
                Accumulator(&s)[4] = all[j];
                s[0] += reinterpret_cast<const Accumulator&>(v.x), s[1] += reinterpret_cast<const Accumulator&>(v.y);
                s[2] += reinterpret_cast<const Accumulator&>(v.z), s[3] += reinterpret_cast<const Accumulator&>(v.w);
              }
            part.template put<decltype(plain)::value>(all[0], all[1], block);
          }
        };
        if (part.is_plain())
          finish(std::true_type{});
        else
          finish(std::false_type{});
        part.end_outputs(own, end, false);
      }
    }
    if (lane == 0) store_wait();
    if (args.remainder) grid_dependency_wait();
  }
#endif
}

}  // namespace trirun
