// Products of few rows with each of many experts: mma.sync u8 . s8, one launch for all tiles, sm_80 and newer.
//
// A CTA has one tile (experts.cuh) and some pairs of n tiles of its expert: those of gate and of up for the same 64
// outputs, whose activation it then applies, or two neighbours. Half of its warps have each n tile of a pair, shared
// along k. As in gemm_decode/stream.cu, whose arithmetic this is, every warp has a ring of its own in shared memory, of
// which each lane reads back the words that it copied, and which runs on from one pair to the next; weights are asked
// for as soon as the tile is known, and the CTA quantizes its rows of x, or copies them where they are quantized
// already, while they are under way. Parts are added in a fixed order, so that results repeat bitwise.
//
// What is older than the previous kernel does not wait for its end: the weights of tiles where that kernel made their
// rows (down, behind gate | up), the quantized x where it routed a single row. Routing and this kernel let the next one
// begin only when their own wait is over, so that what they waited for is there for it.
#include "experts.cuh"
#include "cuda/decoder/launch.cuh"
#include "cuda/decoder/limbs.cuh"
#include "cuda/gemm_decode/stream_tile.cuh"
#include "cuda/gemm_prefill/prefill.cuh"

namespace trirun::experts {
namespace {

using namespace gemm_decode;

constexpr int MAX_WARPS = 16, COLUMNS = 8, STAGES = 4;
constexpr int QUANTIZED_BATCH = 4;  // k tiles of x that a warp has asked for while it quantizes one

struct Args {
  const uint8_t* words;
  const __half* scales;
  const __half* zeros;  // or null
  float zero;
  const float* bias;  // [experts][n_pad] or null
  int n_tiles, k_tiles, group_rows;  // n tiles of one expert; groups along one k tile, 0 for per-channel scales
  int64_t n_pad, expert_groups;  // expert_groups: elements of an expert's scales
  int n, k;  // true sizes: n of y
  const void* x;
  int64_t ldx;
  decoder::LimbRows quantized;  // x, where its limbs are not null
  const int32_t* order;  // or null
  int top_k;
  const int32_t* tiles;
  void* y;
  int64_t ldy;
  bool bf16, gated;
  int activation;
  float limit;
  int tokens, columns, split_log, stage_bytes;
  int pairs;  // of n tiles
  bool single;  // there is one row of x
  int scales_at, sums_at, parts_at, ring_at;  // in shared memory
};

// fminf and fmaxf would make numbers of what is none.
__device__ __forceinline__ float gated_value(float gate, float up, int activation, float limit) {
  if (activation == TRIRUN_CLIPPED_SWIGLU) {
    gate = gate > limit ? limit : gate, up = up > limit ? limit : up < -limit ? -limit : up;
    return (up + 1.f) * gate / (1.f + __expf(-1.702f * gate));
  }
  if (activation == TRIRUN_RELU2) {
    const float positive = gate < 0.f ? 0.f : gate;
    return positive * positive * up;
  }
  return decoder::activate<false>(gate, activation) * up;
}

__device__ __forceinline__ int stored_row(int row) { return row % 8 * 8 + row / 16 * 2 + row / 8 % 2; }

// The row of x of a token of a tile.
__device__ __forceinline__ int row_of(const Args& a, Tile tile, int token) {
  const int at = tile.first + token;
  return a.order == nullptr ? at : a.single ? 0 : __ldcg(a.order + at) / a.top_k;
}

// The rows of x of a tile to where Partial reads them, of what is quantized already.
template <int LIMBS, int SCALE>
__device__ __forceinline__ void copy_rows(const Args& a, Tile tile, uint8_t* memory) {
  const int tokens_log = __popc(a.tokens - 1), columns_log = tokens_log + LIMBS - 1;
  for (int i = threadIdx.x; i < a.k_tiles * 8 << columns_log; i += blockDim.x) {
    const int block = i >> columns_log, column = i & (a.columns - 1), token = column / LIMBS;
    if (token >= tile.count) continue;
    const int from = row_of(a, tile, token) * LIMBS + column % LIMBS;
    const auto* limbs = a.quantized.limbs + (static_cast<int64_t>(block) * a.quantized.columns + from) * 16;
    *reinterpret_cast<uint4*>(memory + i * 16) = __ldcg(reinterpret_cast<const uint4*>(limbs));
  }
  for (int i = threadIdx.x; i < a.k_tiles << tokens_log; i += blockDim.x) {
    const int k_tile = i >> tokens_log, token = i & (a.tokens - 1);
    if (token >= tile.count) continue;
    const int cell = k_tile * a.quantized.tokens + row_of(a, tile, token);
    *reinterpret_cast<float2*>(memory + a.scales_at + i * 8) = __ldcg(a.quantized.scales + cell);
    if (SCALE == PER_BLOCK) *reinterpret_cast<float4*>(memory + a.sums_at + i * 16) = __ldcg(a.quantized.sums + cell);
  }
}

// The same of a single row, in two steps: asked for behind weights it would come behind them.
template <int LIMBS, int SCALE>
struct CopiedRow {
  static constexpr int BATCH = 4;
  uint4 limbs[BATCH];
  float2 scale;
  float4 sums;

  __device__ __forceinline__ void load(const Args& a, int first) {
    const auto* from = reinterpret_cast<const uint4*>(a.quantized.limbs);
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int at = first + i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
      if (at < a.k_tiles * 8 * LIMBS) limbs[i] = __ldcg(from + at / LIMBS * a.quantized.columns + at % LIMBS);
    }
    if (const int k_tile = first / BATCH + static_cast<int>(threadIdx.x); k_tile < a.k_tiles) {
      scale = __ldcg(a.quantized.scales + k_tile * a.quantized.tokens);
      if (SCALE == PER_BLOCK) sums = __ldcg(a.quantized.sums + k_tile * a.quantized.tokens);
    }
  }

  __device__ __forceinline__ void store(const Args& a, int first, uint8_t* memory) const {
#pragma unroll
    for (int i = 0; i < BATCH; i++) {
      const int at = first + i * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x);
      const int to = at / LIMBS * a.columns + at % LIMBS;
      if (at < a.k_tiles * 8 * LIMBS) *reinterpret_cast<uint4*>(memory + to * 16) = limbs[i];
    }
    if (const int k_tile = first / BATCH + static_cast<int>(threadIdx.x); k_tile < a.k_tiles) {
      const int cell = k_tile * a.tokens;
      *reinterpret_cast<float2*>(memory + a.scales_at + cell * 8) = scale;
      if (SCALE == PER_BLOCK) *reinterpret_cast<float4*>(memory + a.sums_at + cell * 16) = sums;
    }
  }
};

// The same of rows that this CTA quantizes. largest: [tokens] in shared memory.
template <int LIMBS, int SCALE>
__device__ __forceinline__ void quantize_rows(const Args& a, Tile tile, uint8_t* memory, uint32_t* largest) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int tokens_log = __popc(a.tokens - 1);
  const auto load = [&](int token, int k_tile) {
    const int at = k_tile * K_TILE + (lane >> 2) * 16 + lane % 4 * 2;
    if (token >= tile.count) return make_float4(0.f, 0.f, 0.f, 0.f);
    const auto* row = static_cast<const uint16_t*>(a.x) + row_of(a, tile, token) * a.ldx;
    return widen(load_k_tile_paired16(row + at, at, a.k), a.bf16);
  };
  if (LIMBS == 1) {
    for (int token = warp; token < a.tokens; token += warps) {
      uint32_t most = 0;
      for (int k_tile = 0; k_tile < a.k_tiles; k_tile++) most = max(most, magnitude_bits(load(token, k_tile)));
      most = __reduce_max_sync(~0u, most);
      if (lane == 0) largest[token] = most;
    }
    __syncthreads();
  }
  const int pairs = a.k_tiles << tokens_log;
  float4 next[QUANTIZED_BATCH] = {};  // on their way together
  for (int pair = warp, at = 0; pair < pairs; pair += warps, at++) {
    const int token = pair & (a.tokens - 1), k_tile = pair >> tokens_log;
    if (at % QUANTIZED_BATCH == 0) {
#pragma unroll
      for (int i = 0; i < QUANTIZED_BATCH; i++)
        if (const int of = pair + i * warps; of < pairs) next[i] = load(of & (a.tokens - 1), of >> tokens_log);
    }
    const float4 v = next[0];
#pragma unroll
    for (int i = 1; i < QUANTIZED_BATCH; i++) next[i - 1] = next[i];
    const QuantizedKTile q = LIMBS == 2 ? quantize_k_tile16(v) : quantize_k_tile8(v, act8_scale(largest[token]));
    uint8_t* block = memory + ((k_tile * 8 + lane / 4) * a.columns + token * LIMBS) * 16 + lane % 4 * 4;
    *reinterpret_cast<uint32_t*>(block) = q.limb[0];
    if (LIMBS == 2) *reinterpret_cast<uint32_t*>(block + 16) = q.limb[1];
    const float sum128 = q.sum128();
    if (lane == 0) *reinterpret_cast<float2*>(memory + a.scales_at + pair * 8) = make_float2(q.scale, sum128);
    if (SCALE == PER_BLOCK) {
      const float sum32 = q.sum32();
      if (lane % 8 == 0) *reinterpret_cast<float*>(memory + a.sums_at + pair * 16 + lane / 2) = sum32;
    }
  }
}

template <int LIMBS, int SCALE>
__global__ void __launch_bounds__(MAX_WARPS * 32, 1) experts_decode(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint32_t largest[COLUMNS];
  const uint32_t shared = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int parts = 1 << a.split_log, part = warp & (parts - 1), side = warp >> a.split_log;
  const int half = a.n_tiles / 2;  // of gate | up
  const int pair0 = blockIdx.x * a.pairs / gridDim.x, pair_end = (blockIdx.x + 1) * a.pairs / gridDim.x;
  const auto n_tile_of = [&](int pair, int of_side) { return a.gated ? of_side * half + pair : 2 * pair + of_side; };
  const bool real_zeros = a.zeros != nullptr;
  const int k_tile0 = part * a.k_tiles >> a.split_log, k_end = (part + 1) * a.k_tiles >> a.split_log;
  const int group_rows = Partial<LIMBS, 1, SCALE>::OF_K_TILES ? 1 : a.group_rows;
  const uint32_t ring = shared + a.ring_at + warp * STAGES * a.stage_bytes;
  int fill_pair = pair0, fill_k_tile = k_tile0;
  Tile tile{-1, 0, 0};
  const auto fill = [&](int stage) {
    const int n_tile = n_tile_of(fill_pair, side);
    if (fill_pair < pair_end && fill_k_tile < k_end && n_tile < a.n_tiles) {
      const uint32_t to = ring + stage * a.stage_bytes;
      const int64_t block = (static_cast<int64_t>(tile.expert) * a.n_tiles + n_tile) * a.k_tiles + fill_k_tile;
      const uint8_t* words = a.words + block * WORD_TILE_BYTES + lane * 16;
#pragma unroll
      for (int i = 0; i < 4; i++) copy_async16(to + i * 512 + lane * 16, words + i * 512);
      if constexpr (SCALE != PER_CHANNEL) {
        if (lane < group_rows * 8) {
          const int64_t at = tile.expert * a.expert_groups + (fill_k_tile * group_rows + lane / 8) * a.n_pad +
                             n_tile * 64 + lane % 8 * 8;
          copy_async16(to + WORD_TILE_BYTES + lane * 16, a.scales + at);
          if (SCALE != PER_K_TILE_PLAIN && real_zeros)
            copy_async16(to + WORD_TILE_BYTES + group_rows * 128 + lane * 16, a.zeros + at);
        }
      }
    }
    copy_async_commit();
    if (++fill_k_tile >= k_end) fill_k_tile = k_tile0, fill_pair++;
  };
  // What a thread's outputs of a pair need beside their sums: it has the same row of 64 in each. Asked for long before,
  // and as it is stored, so that nobody waits for it; but not where registers are short.
  constexpr bool AHEAD = SCALE != PER_BLOCK;
  const int sides = a.gated ? 1 : 2, own_row = threadIdx.x % 64, own_side = threadIdx.x / 64 % sides;
  __half own_scale[2];  // of gate and of up, or of its one side
  float own_bias[2];
  const auto ask = [&](int pair) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      own_scale[i] = __half{}, own_bias[i] = 0.f;
      const int n_tile = n_tile_of(pair, a.gated ? i : own_side);
      if ((i > 0 && !a.gated) || n_tile >= a.n_tiles) continue;
      if (SCALE == PER_CHANNEL)
        own_scale[i] = __ldg(a.scales + tile.expert * a.expert_groups + n_tile * 64 + stored_row(own_row));
      if (a.bias != nullptr) own_bias[i] = __ldg(a.bias + tile.expert * a.n_pad + n_tile * 64 + own_row);
    }
  };
  const auto begin = [&] {
    if (tile.expert < 0) return;
#pragma unroll
    for (int i = 0; i < STAGES; i++) fill(i);
  };
  const bool known = a.order == nullptr;  // the previous kernel ran the same tiles
  // Of a single row every tile has the same x; where it is quantized already the previous kernel may have done that.
  const bool copied = a.quantized.limbs != nullptr, early = a.single && !known && !copied;
  if (known) {
    tile = load_tile(a.tiles, blockIdx.y);
    begin();
    if (AHEAD && tile.expert >= 0) ask(pair0);
  }
  if (early) quantize_rows<LIMBS, SCALE>(a, {0, 0, 1}, memory, largest);
  dependency_wait();
  dependency_launch();
  if (!known) tile = load_tile(a.tiles, blockIdx.y);
  CopiedRow<LIMBS, SCALE> row;
  if (copied && a.single) row.load(a, 0);
  if (!known) begin();
  if (tile.expert < 0) return copy_async_wait_all();
  if (copied && a.single) {
    row.store(a, 0, memory);
    const int step = CopiedRow<LIMBS, SCALE>::BATCH * static_cast<int>(blockDim.x);
#pragma unroll 1
    for (int first = step; first < a.k_tiles * 8 * LIMBS; first += step)
      row.load(a, first), row.store(a, first, memory);
  } else if (copied) {
    copy_rows<LIMBS, SCALE>(a, tile, memory);
  } else if (!early) {
    quantize_rows<LIMBS, SCALE>(a, tile, memory, largest);
  }
  if (AHEAD && !known) ask(pair0);  // not before: what is asked for later may come later
  __syncthreads();

  Partial<LIMBS, 1, SCALE> partial;
  const uint32_t x_half = a.columns * 16;
  const uint32_t x_limbs = shared + (lane / 4 & (a.columns - 1)) * 16 + lane % 4 * 4;
  int stage = 0;
#pragma unroll 1
  for (int pair = pair0; pair < pair_end; pair++) {
    const int n_tile = n_tile_of(pair, side);
    const bool there = n_tile < a.n_tiles;
    partial.clear();
    for (int k_tile = k_tile0; k_tile < k_end; k_tile++) {
      copy_async_wait<STAGES - 1>();
      if constexpr (SCALE != PER_CHANNEL) __syncwarp();  // scales were copied by other lanes
      const uint32_t source = ring + stage * a.stage_bytes, scales = source + WORD_TILE_BYTES;
      uint4 w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = load_shared4(source + i * 512 + lane * 16);
      const KTileActivations x{x_limbs + k_tile * 8 * x_half, x_half, shared + a.scales_at + k_tile * a.tokens * 8,
                               shared + a.sums_at + k_tile * a.tokens * 16};
      if (there) partial.add(w, x, a.tokens, partial.row_scales(scales), scales, real_zeros, a.zero, group_rows);
      __syncwarp();
      fill(stage);
      if (++stage == STAGES) stage = 0;
    }
    uint4 row_zeros{};
    if (SCALE == PER_CHANNEL && real_zeros && there)
      row_zeros =
          __ldg(reinterpret_cast<const uint4*>(a.zeros + tile.expert * a.expert_groups + n_tile * 64) + lane / 4);
    // Sums: [side][part][token][64].
    const uint32_t slot = shared + a.parts_at + (warp * a.tokens << 8);
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int h = 0; h < 2; h++)
#pragma unroll
        for (int e = 0; e < partial.TOKENS; e++) {
          const int token = LIMBS == 2 ? lane % 4 : lane % 4 * 2 + e;
          if (token >= tile.count) continue;
          const float x_scale = partial.EXACT ? load_shared_float(shared + a.scales_at + token * 8) : 0.f;
          store_shared(slot + (token * 64 + j * 16 + h * 8 + lane / 4) * 4,
                       partial.value(j, 0, h, e, x_scale, row_zeros, real_zeros, a.zero));
        }
    if (!AHEAD) ask(pair);
    __syncthreads();

    const auto output = [&](int of_side, int token, int own) {
      float v = 0.f;
      const uint32_t from = shared + a.parts_at + ((of_side << a.split_log) * a.tokens + token) * 256 + own_row * 4;
#pragma unroll 4
      for (int p = 0; p < parts; p++) v += load_shared_float(from + (p * a.tokens << 8));
      return (SCALE == PER_CHANNEL ? v * __half2float(own_scale[own]) : v) + own_bias[own];
    };
    const int dtype = a.bf16 ? TRIRUN_BF16 : TRIRUN_F16, column = n_tile_of(pair, own_side) * 64 + own_row;
    for (int token = threadIdx.x / 64 / sides; token < tile.count && column < a.n; token += blockDim.x / 64 / sides) {
      const float v = a.gated ? gated_value(output(0, token, 0), output(1, token, 1), a.activation, a.limit)
                              : output(own_side, token, 0);
      store_element(a.y, (tile.first + token) * a.ldy + column, v, dtype);
    }
    if (pair + 1 < pair_end) {
      if (AHEAD) ask(pair + 1);
      __syncthreads();
    }
  }
  copy_async_wait_all();
}

using Kernel = void (*)(Args);

struct Instance {
  int limbs, scale;
  Kernel kernel;
};

// limbs of x, where weight scales enter
// no-spill(90a): experts_decode<2, *>
constexpr Instance INSTANCES[] = {
    {2, PER_CHANNEL, experts_decode<2, PER_CHANNEL>},
    {1, PER_CHANNEL, experts_decode<1, PER_CHANNEL>},
    {2, PER_K_TILE, experts_decode<2, PER_K_TILE>},
    {1, PER_K_TILE, experts_decode<1, PER_K_TILE>},
    {2, PER_BLOCK, experts_decode<2, PER_BLOCK>},
    {1, PER_BLOCK, experts_decode<1, PER_BLOCK>},
    {2, PER_K_TILE_PLAIN, experts_decode<2, PER_K_TILE_PLAIN>},
    {1, PER_K_TILE_PLAIN, experts_decode<1, PER_K_TILE_PLAIN>},
};

// Fills in what follows from the sizes; the bytes of shared memory of a CTA with so many warps.
int configure(const trirun_experts& e, int warps, Args& a) {
  const int limbs = e.act_bits == TRIRUN_ACT16 ? 2 : 1;
  a.n_tiles = static_cast<int>(e.w.n / 64), a.k_tiles = static_cast<int>(e.w.k / K_TILE);
  a.group_rows = e.w.group_size == -1 ? 0 : K_TILE / e.w.group_size;
  a.n_pad = e.w.n, a.expert_groups = e.w.n * (e.w.group_size == -1 ? 1 : e.w.k / e.w.group_size);
  a.tokens = static_cast<int>(e.tile_rows), a.columns = a.tokens * limbs;
  a.split_log = 30 - __builtin_clz(warps);  // half of the warps to an n tile
  a.stage_bytes = WORD_TILE_BYTES + a.group_rows * 128 * (e.w.zeros != nullptr ? 2 : 1);
  a.scales_at = align(a.k_tiles * K_TILE * a.columns);
  a.sums_at = align(a.scales_at + a.k_tiles * a.tokens * 8);
  a.parts_at = align(a.sums_at + (a.group_rows > 1 ? a.k_tiles * a.tokens * 16 : 0));
  a.ring_at = align(a.parts_at + warps * a.tokens * 256);
  return a.ring_at + warps * STAGES * a.stage_bytes;
}

int check(const trirun_experts& e) {
  if (e.w.words == nullptr || e.w.scales == nullptr || e.x == nullptr || e.tiles == nullptr || e.y == nullptr ||
      (e.activations != nullptr && e.order == nullptr) || !decoder::aligned_to(e.activations, 256) ||
      !decoder::aligned_to(e.w.words, 16) || !decoder::aligned_to(e.w.scales, 16) ||
      !decoder::aligned_to(e.w.zeros, 16) || !decoder::aligned_to(e.x, 4) || !decoder::aligned_to(e.tiles, 16))
    return TRIRUN_BAD_POINTER;
  if (e.w.n <= 0 || e.w.k <= 0 || e.w.n % 64 || e.w.k % K_TILE || e.k <= 0 || e.k > e.w.k || e.k % 2 || e.ldx % 2 ||
      (e.activations != nullptr && (e.rows < 1 || e.w.k - e.k >= K_TILE)) || e.n <= 0 ||
      e.n > (e.gated ? e.w.n / 2 : e.w.n) || (e.gated && e.w.n % 128) || e.w.k > EXACT_SUM_K || e.w.n > (1 << 22) ||
      e.top_k < 1 || e.tile_bound < 0 || e.tile_bound > 65535)
    return TRIRUN_BAD_SHAPE;
  const int g = e.w.group_size;
  const bool known = (g == -1 || g == 32 || g == 64 || g == 128) && decoder::half_dtype(e.dtype) &&
                     (e.act_bits == TRIRUN_ACT16 || e.act_bits == TRIRUN_ACT8);
  return known && e.tile_rows > 0 && !(e.tile_rows & (e.tile_rows - 1)) ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

// Whether the kernel of this file runs tiles of so many rows.
bool few_rows(const trirun_experts& e) { return e.tile_rows * (e.act_bits == TRIRUN_ACT16 ? 2 : 1) <= COLUMNS; }

}  // namespace
}  // namespace trirun::experts

extern "C" int trirun_cuda_experts(const trirun_experts* experts, void* stream) {
  using namespace trirun;
  using namespace trirun::experts;
  if (experts == nullptr) return TRIRUN_BAD_POINTER;
  const trirun_experts& e = *experts;
  if (const int code = check(e)) return code;
  if (e.tile_bound == 0) return TRIRUN_OK;
  if (!few_rows(e)) return gemm_prefill::launch_experts_sm80(e, stream);
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  Args a{};
  // As many CTAs as the multiprocessors hold side by side, if every one has a pair of n tiles; more of them would
  // quantize the same rows more often.
  const int64_t pairs = (e.w.n / 64 + 1) / 2, wanted = (2 * facts.sms + e.tile_bound - 1) / e.tile_bound;
  const int64_t blocks = pairs < wanted ? pairs : wanted;
  // CTAs that have a multiprocessor each read faster with twice the warps, if there is k enough for them.
  int warps = blocks * e.tile_bound <= facts.sms && e.w.k >= 16 * K_TILE ? MAX_WARPS : MAX_WARPS / 2;
  int shared = configure(e, warps, a), room = 0;
  const int limbs = e.act_bits == TRIRUN_ACT16 ? 2 : 1;
  const int of_k_tiles = e.w.zeros != nullptr ? PER_K_TILE : PER_K_TILE_PLAIN;
  const int scale = e.w.group_size == -1 ? PER_CHANNEL : e.w.group_size == K_TILE ? of_k_tiles : PER_BLOCK;
  const Instance* instance = nullptr;
  for (const Instance& i : INSTANCES)
    if (i.limbs == limbs && i.scale == scale) instance = &i;
  if (instance == nullptr) return TRIRUN_UNSUPPORTED;
  if (const int code = shared_room(reinterpret_cast<const void*>(instance->kernel), room)) return code;
  if (shared > room && warps == MAX_WARPS) shared = configure(e, warps = MAX_WARPS / 2, a);
  if (shared > room) return TRIRUN_UNSUPPORTED;
  a.words = reinterpret_cast<const uint8_t*>(e.w.words);
  a.scales = reinterpret_cast<const __half*>(e.w.scales);
  a.zeros = reinterpret_cast<const __half*>(e.w.zeros);
  a.zero = e.w.zero, a.bias = e.bias, a.n = static_cast<int>(e.n), a.k = static_cast<int>(e.k);
  a.x = e.x, a.ldx = e.ldx, a.order = e.order, a.top_k = e.top_k, a.tiles = e.tiles, a.y = e.y, a.ldy = e.ldy;
  a.pairs = static_cast<int>(pairs), a.single = e.rows == 1;
  if (e.activations != nullptr)
    a.quantized = decoder::LimbRows(const_cast<void*>(e.activations), e.rows, e.w.k, e.act_bits);
  a.bf16 = e.dtype == TRIRUN_BF16, a.gated = e.gated != 0, a.activation = e.activation, a.limit = e.limit;
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(e.tile_bound));
  return decoder::launch_dependent(instance->kernel, a, grid, warps * 32, shared, stream);
}
