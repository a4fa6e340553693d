// y = x . w^T for 1 to 8 rows of x (16 of 8-bit activations) at the speed of memory: mma.sync u8 . s8, sm_80 and newer.
//
// Reading w is all that takes time here, so nothing may interrupt it:
// - Every warp has a pipeline of its own: cp.async into a private ring in shared memory, of which each lane reads back
//   what it copied itself. No barrier guards the ring, and it runs on from one n tile (64 out_features) to the next.
// - The first loads are under way before the stream's previous kernel has ended (programmatic dependent launch).
// - Masked words are the A fragments as they are (stream_tile.cuh): no instruction unpacks a code.
// - An n tile is split along k by warp_split warps of a CTA times cta_split CTAs, so that few out_features still occupy
//   all multiprocessors. Each warp hands its partial sums to the warp that owns those rows, which adds them in a fixed
// order (bitwise repeatable) and writes y. Between CTAs they travel through distributed shared memory (sm_90: the CTAs
//   are a cluster) or through the workspace (elsewhere). After the prologue nothing synchronizes a whole CTA.
#include "stream_tile.cuh"
#include "cuda/common/hopper.cuh"

namespace trirun::gemm_decode {
namespace {

constexpr int MAX_WARPS = 16;
constexpr int MAX_PARTS = 32;  // of an n tile along k: a lane of each warp arrives at one part's owner
constexpr int MAX_FUSED = 8;  // rows of x that a prologue quantizes
constexpr int FUSED_BATCH = 4;  // activation groups one warp has in flight while quantizing in the prologue

struct StreamArgs {
  const uint8_t* words;
  const __half* scales;
  const __half* zeros;  // or null
  float zero;
  int n_tiles, k_tiles, group_rows;  // group_rows: groups along one k tile (1, 2, 4), 0 for per-channel scales
  int64_t n_pad;
  int n, m, k;
  const void* x;  // to be quantized here, or null: then `limbs` and what follows hold it
  int64_t ldx;
  const uint8_t* limbs;
  const float2* x_scales;
  const float4* x_sums;
  int tokens, columns;
  const void* bias;
  void* y;
  int64_t ldy;
  int dtype;
  // Splits are powers of two, kept as logarithms: integer division is slow where it matters here.
  int warp_split_log, cta_split_log, parts_log;  // parts: warps that exchange through shared memory
  int stages, stage_bytes, cta_n_tiles;
  unsigned* counters;  // workspace exchange: arrivals per (n tile, owner), and the parts; null with a cluster
  float* partials;
  int scales_at, sums_at, slots_at, slot_bytes, slot_sets, barriers_at, amax_at, x_at, ring_at;  // in shared memory
};

// All but the newest stages - 1 groups have landed. wait_group takes an immediate; comparisons rather than a switch,
// whose jump table is a constant that every launch would fetch from L2 with all warps waiting (measured: 1500 cycles).
__device__ __forceinline__ void wait_oldest(int stages) {
  if (stages < 4) {
    if (stages == 2)
      copy_async_wait<1>();
    else
      copy_async_wait<2>();
  } else {
    if (stages == 4)
      copy_async_wait<3>();
    else
      copy_async_wait<5>();
  }
}

// What the end of an n tile needs from memory, asked for long before: scale and bias of the row that this lane writes
// (row lane % rows of its part), and the zero points of the rows it multiplies.
struct RowConstants {
  float scale, bias;
  uint4 zeros;
};

__device__ __forceinline__ int stored_row(int row) { return row % 8 * 8 + row / 16 * 2 + row / 8 % 2; }

template <int SCALE>
__device__ __forceinline__ RowConstants load_constants(const StreamArgs& a, int n_tile, int row) {
  RowConstants c{1.f, 0.f, {}};
  if (SCALE == PER_CHANNEL) c.scale = __half2float(a.scales[n_tile * 64 + stored_row(row)]);
  if (a.bias != nullptr && n_tile * 64 + row < a.n) c.bias = load_element(a.bias, n_tile * 64 + row, a.dtype);
  if (SCALE == PER_CHANNEL && a.zeros != nullptr)
    c.zeros = __ldg(reinterpret_cast<const uint4*>(a.zeros + n_tile * 64) + threadIdx.x % 32 / 4);
  return c;
}

// What one warp made of a k tile of one row of x, to where products read it.
template <int LIMBS, int SCALE>
__device__ __forceinline__ void put_k_tile(const StreamArgs& a, uint8_t* memory, const QuantizedKTile& q, int k_tile,
                                           int token) {
  const int lane = threadIdx.x % 32, pair = k_tile * a.tokens + token;
  uint8_t* block = memory + ((k_tile * 8 + lane / 4) * a.columns + token * LIMBS) * 16 + lane % 4 * 4;
  *reinterpret_cast<uint32_t*>(block) = q.limb[0];
  if (LIMBS == 2) *reinterpret_cast<uint32_t*>(block + 16) = q.limb[1];
  const float sum128 = q.sum128();  // by the whole warp
  if (lane == 0) *reinterpret_cast<float2*>(memory + a.scales_at + pair * 8) = make_float2(q.scale, sum128);
  if (SCALE == PER_BLOCK) {
    const float sum32 = q.sum32();
    if (lane % 8 == 0) *reinterpret_cast<float*>(memory + a.sums_at + pair * 16 + lane / 2) = sum32;
  }
}

// Quantizes this CTA's k tiles of every row into shared memory, to two limbs. Compact on purpose: a launch runs this
// code once, and every line of it is fetched anew.
template <int SCALE>
__device__ __forceinline__ void quantize_here(const StreamArgs& a, uint8_t* memory, int cta_k_tile0, int cta_k_tiles) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const uint16_t* lane_x = static_cast<const uint16_t*>(a.x) + (lane >> 2) * 16 + lane % 4 * 2;
  const bool bf16 = a.dtype == TRIRUN_BF16;
  // (k tile, token) pairs, token fastest; the loads of a batch are in flight together.
  const int pairs = cta_k_tiles * a.tokens, tokens_log = __popc(a.tokens - 1);
#pragma unroll 1
  for (int first = warp; first < pairs; first += warps * FUSED_BATCH) {
    uint2 v[FUSED_BATCH];
#pragma unroll
    for (int i = 0; i < FUSED_BATCH; i++) {
      const int pair = first + i * warps, token = pair & (a.tokens - 1), k_tile = cta_k_tile0 + (pair >> tokens_log);
      v[i] = make_uint2(0, 0);
      if (pair < pairs && token < a.m)
        v[i] = load_k_tile_paired16(lane_x + token * a.ldx + k_tile * K_TILE,
                                    k_tile * K_TILE + (lane >> 2) * 16 + lane % 4 * 2, a.k);
    }
#pragma unroll 1
    for (int pair = first; pair < min(first + warps * FUSED_BATCH, pairs); pair += warps) {
      const QuantizedKTile q = quantize_k_tile16(widen(v[0], bf16));
#pragma unroll
      for (int i = 1; i < FUSED_BATCH; i++) v[i - 1] = v[i];
      put_k_tile<2, SCALE>(a, memory, q, pair >> tokens_log, pair & (a.tokens - 1));
    }
  }
}

// The same to one limb, of rows of x as they are, in shared memory from `a.x_at` on: whole ones, since every CTA finds
// a row's largest magnitude for itself.
template <int SCALE>
__device__ __forceinline__ void quantize_rows_here(const StreamArgs& a, uint8_t* memory, int cta_k_tile0,
                                                   int cta_k_tiles) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const uint32_t x = shared_address(memory) + a.x_at, row = a.k_tiles * K_TILE * 2;  // bytes
  const bool bf16 = a.dtype == TRIRUN_BF16;
  const int tokens_log = __popc(a.tokens - 1), of_row = max(warps >> tokens_log, 1);  // warps for one row
  uint32_t* amax = reinterpret_cast<uint32_t*>(memory + a.amax_at);
#pragma unroll 1
  for (int part = warp; part < of_row << tokens_log; part += warps) {
    const int token = part & (a.tokens - 1), at = part >> tokens_log;
    uint32_t most = 0;
#pragma unroll 4
    for (int i = at * 32 + lane; i < (token < a.m ? a.k / 8 : 0); i += of_row * 32) {
      const uint4 v = load_shared4(x + token * row + i * 16);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (uint32_t word : words) most = larger_bits(most, word, false);
    }
    amax[token * MAX_WARPS + at] = __reduce_max_sync(~0u, largest_bits(most, false, bf16));
  }
  __syncthreads();
#pragma unroll 1
  for (int pair = warp; pair < cta_k_tiles << tokens_log; pair += warps) {
    const int token = pair & (a.tokens - 1), k_tile = pair >> tokens_log;
    const int column = (cta_k_tile0 + k_tile) * K_TILE + (lane >> 2) * 16 + lane % 4 * 2, end = token < a.m ? a.k : 0;
    const uint32_t from = x + token * row + column * 2;
    const uint2 v = make_uint2(column < end ? load_shared(from) : 0, column + 8 < end ? load_shared(from + 16) : 0);
    const uint32_t bits = lane < of_row ? amax[token * MAX_WARPS + lane] : 0;
    const QuantizedKTile q = quantize_k_tile8(widen(v, bf16), act8_scale(__reduce_max_sync(~0u, bits)));
    put_k_tile<1, SCALE>(a, memory, q, k_tile, token);
  }
}

// Copies x, or what quantize.cu made of it. The copy engine has a path of its own: loads by threads would queue behind
// the weights that this multiprocessor has in flight.
__device__ __forceinline__ void copy_here(uint8_t* to, const void* from, int bytes, uint32_t barrier) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) bulk_load(shared_address(to), from, bytes, barrier);
#else
  constexpr int BATCH = 8;
  const uint4* source = static_cast<const uint4*>(from);
#pragma unroll 1
  for (int first = threadIdx.x; first < bytes / 16; first += blockDim.x * BATCH) {
    uint4 v[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (first + i * blockDim.x < bytes / 16) v[i] = __ldcg(source + first + i * blockDim.x);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (first + i * blockDim.x < bytes / 16) reinterpret_cast<uint4*>(to)[first + i * blockDim.x] = v[i];
  }
#endif
}

template <int LIMBS, int NT, int SCALE>
__global__ void __launch_bounds__(MAX_WARPS * 32) gemm_stream(const __grid_constant__ StreamArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = blockIdx.x & ((1 << a.cta_split_log) - 1), group = blockIdx.x >> a.cta_split_log;
  const int wk = warp & ((1 << a.warp_split_log) - 1), wn = warp >> a.warp_split_log;
  const int split_log = a.warp_split_log + a.cta_split_log, chunk = (rank << a.warp_split_log) + wk;
  const int k_tile0 = chunk * a.k_tiles >> split_log;
  const int k_tiles = kept(((chunk + 1) * a.k_tiles >> split_log) - k_tile0, lane);
  const int cta_k_tile0 = (rank << a.warp_split_log) * a.k_tiles >> split_log;
  const int cta_k_tiles = (((rank + 1) << a.warp_split_log) * a.k_tiles >> split_log) - cta_k_tile0;
  const bool real_zeros = a.zeros != nullptr, clustered = a.parts_log > a.warp_split_log;
  // Of the warps that exchange through shared memory this one is `part`, and owns `rows` rows of the n tile.
  const int part = clustered ? chunk : wk, rows_log = 6 - a.parts_log, rows = 1 << rows_log;

  // The ring: stage after stage takes k tile after k tile of n tile after n tile.
  const uint32_t ring = kept(shared + a.ring_at + warp * a.stages * a.stage_bytes + lane * 16, lane);
  const int n_tile0 = group * a.cta_n_tiles + wn, n_tile_step = (gridDim.x >> a.cta_split_log) * a.cta_n_tiles;
  int fill_n_tile = n_tile0, fill_k_tile = 0;
  const uint8_t* fill_from =
      a.words + (static_cast<int64_t>(n_tile0) * a.k_tiles + k_tile0) * WORD_TILE_BYTES + lane * 16;
  // Of a k tile's scales, and zeros: the row of its first group, and from one k tile to the next.
  const int group_rows = Partial<LIMBS, NT, SCALE>::OF_K_TILES ? 1 : a.group_rows;
  const int64_t scale_step = group_rows * a.n_pad;
  int64_t scales_at = k_tile0 * scale_step + lane / 8 * a.n_pad + n_tile0 * 64 + lane % 8 * 8;
  const auto fill = [&](int stage) {
    if (fill_n_tile < a.n_tiles) {
      const uint32_t target = ring + stage * a.stage_bytes;
#pragma unroll
      for (int i = 0; i < 4; i++) copy_async16(target + i * 512, fill_from + i * 512);
      if constexpr (SCALE != PER_CHANNEL) {
        if (lane < group_rows * 8) {
          copy_async16(target + WORD_TILE_BYTES, a.scales + scales_at);
          if (SCALE != PER_K_TILE_PLAIN && real_zeros)
            copy_async16(target + WORD_TILE_BYTES + group_rows * 128, a.zeros + scales_at);
        }
        scales_at += scale_step;
      }
      fill_from += WORD_TILE_BYTES;
      if (++fill_k_tile == k_tiles) {
        fill_k_tile = 0, fill_n_tile += n_tile_step;
        fill_from += (static_cast<int64_t>(n_tile_step) * a.k_tiles - k_tiles) * WORD_TILE_BYTES;
        scales_at += n_tile_step * 64 - k_tiles * scale_step;
      }
    }
    copy_async_commit();
  };
#pragma unroll 1
  for (int i = 0; i < a.stages; i++) fill(i);
  const int my_row = (part << rows_log) + (lane & (rows - 1));
  RowConstants next_constants{};
  if (n_tile0 < a.n_tiles) next_constants = load_constants<SCALE>(a, n_tile0, my_row);

  const uint32_t barriers = shared + a.barriers_at, x_ready = barriers + MAX_WARPS * 16;
  if (lane == 0) {
    barrier_init(barriers + warp * 16, 1 << a.parts_log);
    barrier_init(barriers + warp * 16 + 8, 1 << a.parts_log);
    if (warp == 0) barrier_init(x_ready, 1);
#if __CUDA_ARCH__ >= 900
    barrier_init_fence();
    fence_async_shared();
#endif
  }
  __syncthreads();
#if __CUDA_ARCH__ >= 900
  if (clustered) cluster_arrive();
#endif
  dependency_launch();
  dependency_wait();

  const auto await_x = [&] {
#if __CUDA_ARCH__ >= 900
    barrier_wait(x_ready, 0);
#else
    __syncthreads();
#endif
  };
  if (a.x != nullptr) {
    if constexpr (LIMBS == 1) {
#if __CUDA_ARCH__ >= 900
      if (threadIdx.x == 0) barrier_expect(x_ready, a.m * a.k * 2);
#endif
#pragma unroll 1
      for (int token = 0; token < a.m; token++)
        copy_here(memory + a.x_at + token * a.k_tiles * K_TILE * 2, static_cast<const uint16_t*>(a.x) + token * a.ldx,
                  a.k * 2, x_ready);
      await_x();
      quantize_rows_here<SCALE>(a, memory, cta_k_tile0, cta_k_tiles);
    } else {
      quantize_here<SCALE>(a, memory, cta_k_tile0, cta_k_tiles);
    }
    __syncthreads();
  } else {
    const int limb_bytes = cta_k_tiles * K_TILE * a.columns, scale_bytes = cta_k_tiles * a.tokens * 8;
    const int sum_bytes = SCALE == PER_BLOCK ? scale_bytes * 2 : 0;
    const int64_t first = static_cast<int64_t>(cta_k_tile0) * a.tokens;
#if __CUDA_ARCH__ >= 900
    if (threadIdx.x == 0) barrier_expect(x_ready, limb_bytes + scale_bytes + sum_bytes);
#endif
    copy_here(memory, a.limbs + static_cast<int64_t>(cta_k_tile0) * K_TILE * a.columns, limb_bytes, x_ready);
    copy_here(memory + a.scales_at, a.x_scales + first, scale_bytes, x_ready);
    if (SCALE == PER_BLOCK) copy_here(memory + a.sums_at, a.x_sums + first, sum_bytes, x_ready);
    await_x();
  }
#if __CUDA_ARCH__ >= 900
  if (clustered) cluster_wait();
#endif

  const uint32_t half = a.columns * 16;
  const uint32_t x_limbs = shared + (NT == 1 ? (lane / 4 & (a.columns - 1)) : lane / 4) * 16 + lane % 4 * 4 +
                           (k_tile0 - cta_k_tile0) * 8 * half;
  const uint32_t x_scales = shared + a.scales_at + (k_tile0 - cta_k_tile0) * a.tokens * 8;
  const uint32_t x_sums = shared + a.sums_at + (k_tile0 - cta_k_tile0) * a.tokens * 16;
  int stage = 0, round = 0;
  Partial<LIMBS, NT, SCALE> partial;
  for (int n_tile = n_tile0; n_tile < a.n_tiles; n_tile += n_tile_step, round++) {
    const RowConstants constants = next_constants;
    if (n_tile + n_tile_step < a.n_tiles) next_constants = load_constants<SCALE>(a, n_tile + n_tile_step, my_row);
    partial.clear();
    for (int k_tile = 0; k_tile < k_tiles; k_tile++) {
      wait_oldest(a.stages);
      // Scales were copied by other lanes.
      if constexpr (SCALE != PER_CHANNEL) __syncwarp();
      const uint32_t source = ring + stage * a.stage_bytes;
      uint4 w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = load_shared4(source + i * 512);
      const KTileActivations x{x_limbs + k_tile * 8 * half, half, x_scales + k_tile * a.tokens * 8,
                               x_sums + k_tile * a.tokens * 16};
      const uint32_t scales = source - lane * 16 + WORD_TILE_BYTES;
      const auto rows = partial.row_scales(scales);
      // What the stage held is in registers, but for scales of every 32 k: it is refilled while that is multiplied.
      if constexpr (partial.OF_K_TILES) __syncwarp();
      if constexpr (SCALE != PER_BLOCK) fill(stage);
      partial.add(w, x, a.tokens, rows, scales, real_zeros, a.zero, group_rows);
      if constexpr (SCALE == PER_BLOCK) {
        __syncwarp();
        fill(stage);
      }
      if (++stage == a.stages) stage = 0;
    }

    // Every partial sum goes to the slots of its row's owner. With two sets of slots, one round in each: a peer that
    // writes round i + 2 has seen every peer's round i + 1, so every peer has finished reading round i.
    const int set = round & (a.slot_sets - 1);
    const uint32_t slots = shared + a.slots_at + set * a.slot_bytes;
    const uint32_t slot_stride = a.slot_sets * a.slot_bytes;
    const uint32_t wn_slots = slots + (wn << a.warp_split_log) * slot_stride;
    const uint32_t mine = ((part * a.tokens + (LIMBS == 2 ? lane % 4 : lane % 4 * 2)) << rows_log) * 4;
    const int owner_mask = (1 << a.warp_split_log) - 1;
    const bool stored[2] = {(LIMBS == 2 ? lane % 4 : lane % 4 * 2) < a.m, lane % 4 * 2 + 1 < a.m};
    const auto push = [&](auto store, auto address) {
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int row = j * 16 + h * 8 + lane / 4, owner = row >> rows_log;
          const uint32_t to = address(wn_slots + (owner & owner_mask) * slot_stride + mine + (row & (rows - 1)) * 4,
                                      owner >> a.warp_split_log);
#pragma unroll
          for (int n = 0; n < NT; n++)
#pragma unroll
            for (int e = 0; e < partial.TOKENS; e++) {
              const float x_scale =
                  partial.EXACT ? load_shared_float(x_scales + partial.token(n, e, a.tokens) * 8) : 0.f;
              const float v = partial.value(j, n, h, e, x_scale, constants.zeros, real_zeros, a.zero);
              const int token = n * (8 / LIMBS) + e;
              if (NT == 1 ? stored[e] : token + (LIMBS == 2 ? lane % 4 : lane % 4 * 2) < a.m)
                store(to + (token << rows_log) * 4, v);
            }
        }
    };
    const uint32_t peer_barrier = barriers + (((wn << a.warp_split_log) + (lane & owner_mask)) * 2 + set) * 8;
    const uint32_t my_barrier = barriers + (warp * 2 + set) * 8;
    const uint32_t parity = a.slot_sets == 2 ? round >> 1 & 1 : round & 1;
    if (!clustered) {
      push([](uint32_t to, float v) { store_shared(to, v); }, [](uint32_t to, int) { return to; });
      __syncwarp();
      if (lane < 1 << a.parts_log) barrier_arrive(peer_barrier);
      barrier_wait(my_barrier, parity);
    } else {
#if __CUDA_ARCH__ >= 900
      push([](uint32_t to, float v) { store_peer(to, v); },
           [](uint32_t to, int rank) { return peer_address(to, rank); });
      __syncwarp();
      if (lane < 1 << a.parts_log) barrier_arrive_peer(peer_address(peer_barrier, lane >> a.warp_split_log));
      barrier_wait_cluster(my_barrier, parity);
#endif
    }

    const uint32_t received = slots + warp * a.slot_sets * a.slot_bytes;
    const int outputs = a.m << rows_log, row0 = n_tile * 64 + (part << rows_log);
    const auto gathered = [&](int i) {
      float v = 0.f;
      uint32_t source = received + i * 4;
#pragma unroll 4
      for (int p = 0; p < 1 << a.parts_log; p++, source += (a.tokens << rows_log) * 4) v += load_shared_float(source);
      return v;
    };
    const auto finish = [&](int i, float v) {
      const int n = row0 + (i & (rows - 1));
      if (n >= a.n) return;
      // A part of 64 rows has two per lane; only weights of a single k tile have such parts.
      const RowConstants c = rows < 64 ? constants : load_constants<SCALE>(a, n_tile, i & 63);
      store_element(a.y, (i >> rows_log) * a.ldy + n, v * c.scale + c.bias, a.dtype);
    };
    if (a.counters == nullptr) {
#pragma unroll 1
      for (int i = lane; i < outputs; i += 32) finish(i, gathered(i));
    } else {
      // Parts of several CTAs meet in the workspace; the last to arrive adds them, in rank order.
      const int cell = n_tile << a.parts_log | part;
      float* parts = a.partials + static_cast<int64_t>(cell << a.cta_split_log) * outputs;
#pragma unroll 1
      for (int i = lane; i < outputs; i += 32) __stcg(parts + rank * outputs + i, gathered(i));
      __threadfence();
      __syncwarp();
      unsigned before = 0;
      if (lane == 0) before = atomicAdd(a.counters + cell, 1u);
      if (__shfl_sync(~0u, before, 0) == (1u << a.cta_split_log) - 1) {
        __threadfence();
        if (lane == 0) a.counters[cell] = 0;
#pragma unroll 1
        for (int i = lane; i < outputs; i += 32) {
          float v = 0.f;
#pragma unroll 1
          for (int r = 0; r < 1 << a.cta_split_log; r++) v += __ldcg(parts + r * outputs + i);
          finish(i, v);
        }
      }
    }
    __syncwarp();
  }
}

using Kernel = void (*)(StreamArgs);

struct Instance {
  int limbs, tiles, scale;
  Kernel kernel;
};

// How a plan is launched; without an instance where no kernel runs it.
struct Config {
  const Instance* instance = nullptr;
  int ctas = 0;
  int shared = -1;  // bytes of one CTA, dynamic
};

// limbs of x, 8-column tiles (limbs * rows of x <= 8 * tiles), where weight scales enter
// no-spill(90a): gemm_stream<2, 1, *>
// no-spill(90a): gemm_stream<2, 2, 0>
// no-spill(90a): gemm_stream<2, 2, 1>
// no-spill(90a): gemm_stream<2, 2, 3>
// no-spill(90a): gemm_stream<1, 1, 0>
constexpr Instance INSTANCES[] = {
    {2, 1, PER_CHANNEL, gemm_stream<2, 1, PER_CHANNEL>},
    {2, 1, PER_K_TILE, gemm_stream<2, 1, PER_K_TILE>},
    {2, 1, PER_BLOCK, gemm_stream<2, 1, PER_BLOCK>},
    {2, 2, PER_CHANNEL, gemm_stream<2, 2, PER_CHANNEL>},
    {2, 2, PER_K_TILE, gemm_stream<2, 2, PER_K_TILE>},
    {2, 2, PER_BLOCK, gemm_stream<2, 2, PER_BLOCK>},
    {1, 1, PER_CHANNEL, gemm_stream<1, 1, PER_CHANNEL>},
    {1, 1, PER_K_TILE, gemm_stream<1, 1, PER_K_TILE>},
    {1, 1, PER_BLOCK, gemm_stream<1, 1, PER_BLOCK>},
    {1, 2, PER_CHANNEL, gemm_stream<1, 2, PER_CHANNEL>},
    {1, 2, PER_K_TILE, gemm_stream<1, 2, PER_K_TILE>},
    {1, 2, PER_BLOCK, gemm_stream<1, 2, PER_BLOCK>},
    {2, 1, PER_K_TILE_PLAIN, gemm_stream<2, 1, PER_K_TILE_PLAIN>},
    {2, 2, PER_K_TILE_PLAIN, gemm_stream<2, 2, PER_K_TILE_PLAIN>},
    {1, 1, PER_K_TILE_PLAIN, gemm_stream<1, 1, PER_K_TILE_PLAIN>},
    {1, 2, PER_K_TILE_PLAIN, gemm_stream<1, 2, PER_K_TILE_PLAIN>},
};

bool power_of_2(int v) { return v > 0 && (v & (v - 1)) == 0; }
// The prologue reads 16-bit values two at a time, or copies rows of them in pieces of 16 bytes.
bool fuses(const Problem& p) {
  const int at_once = p.act_bits == TRIRUN_ACT8 ? 8 : 2;
  return p.plan.fused && p.activations == nullptr && p.dtype != TRIRUN_F32 && p.k % at_once == 0 &&
         p.ldx % at_once == 0 && reinterpret_cast<uintptr_t>(p.x) % (2 * at_once) == 0;
}

bool uses_workspace(const trirun_cuda_plan& plan) {
  return plan.kernel == TRIRUN_KERNEL_STREAM_SM80 && plan.cta_split > 1;
}

// n tiles are taken cta_n_tiles at a time: how often, and by how many groups of CTAs.
int tiles_of(const StreamArgs& a) { return (a.n_tiles + a.cta_n_tiles - 1) / a.cta_n_tiles; }
int groups_of(const StreamArgs& a, const trirun_cuda_plan& plan) {
  const int wanted = plan.ctas / plan.cta_split, tiles = tiles_of(a);
  return wanted > 0 && wanted < tiles ? wanted : tiles;
}

// A plan as the kernel is told it: sizes, and where it keeps what in shared memory. Of pointers only whether they are
// null is looked at.
Config configure(const Problem& p, StreamArgs& a, bool fused) {
  const trirun_cuda_plan& plan = p.plan;
  const bool clustered = plan.kernel == TRIRUN_KERNEL_STREAM && plan.cta_split > 1;
  if (p.arch < 80 || (clustered && p.arch < 90)) return {};
  const int limbs = p.act_bits == TRIRUN_ACT16 ? 2 : 1, tiles = static_cast<int>((p.m * limbs + 7) / 8);
  const int of_k_tiles = p.w.zeros != nullptr ? PER_K_TILE : PER_K_TILE_PLAIN;
  const int scale = p.w.group_size == -1 ? PER_CHANNEL : p.w.group_size == K_TILE ? of_k_tiles : PER_BLOCK;
  const Instance* instance = nullptr;
  for (const Instance& i : INSTANCES)
    if (i.limbs == limbs && i.tiles == tiles && i.scale == scale) instance = &i;
  const bool known_depth = (plan.stages >= 2 && plan.stages <= 4) || plan.stages == 6;
  if (instance == nullptr || plan.warps < 1 || plan.warps > MAX_WARPS || !power_of_2(plan.warp_split) ||
      !power_of_2(plan.cta_split) || plan.warps % plan.warp_split || !known_depth || plan.ctas < 0 ||
      plan.cta_split > 8 || plan.warp_split * plan.cta_split > MAX_PARTS ||
      plan.warp_split * plan.cta_split > p.w.k / K_TILE || (plan.fused && p.m > MAX_FUSED))
    return {};
  // int32 holds the sum of so many products of a code shifted by six bits and a limb.
  const int64_t k_tiles = p.w.k / K_TILE,
                part = (k_tiles + plan.warp_split * plan.cta_split - 1) / (plan.warp_split * plan.cta_split);
  if (limbs == 1 && scale == PER_CHANNEL && part * K_TILE > EXACT_SUM_K) return {};

  ActivationLayout layout(p.m, p.w.k, p.act_bits);
  if (fused && p.m == 1) layout.tokens = 1, layout.columns = limbs;
  a.n_tiles = static_cast<int>(p.w.n / 64);
  a.k_tiles = static_cast<int>(p.w.k / K_TILE);
  a.group_rows = scale == PER_CHANNEL ? 0 : K_TILE / p.w.group_size;
  a.n_pad = p.w.n, a.n = static_cast<int>(p.n), a.m = static_cast<int>(p.m), a.k = static_cast<int>(p.k);
  a.tokens = layout.tokens, a.columns = layout.columns;
  if (uses_workspace(plan) && a.n_tiles * plan.warp_split > COUNTERS) return {};
  a.warp_split_log = log2_of(plan.warp_split), a.cta_split_log = log2_of(plan.cta_split);
  a.parts_log = a.warp_split_log + (clustered ? a.cta_split_log : 0);
  a.cta_n_tiles = plan.warps / plan.warp_split;
  // A ring is no longer than what a warp multiplies: what it leaves is room for CTAs of the kernels beside it.
  const int64_t rounds = (tiles_of(a) + groups_of(a, plan) - 1) / groups_of(a, plan);
  a.stages = plan.stages;
  for (const int fewer : {4, 3, 2})
    if (fewer < a.stages && part * rounds <= fewer) a.stages = fewer;
  a.stage_bytes = WORD_TILE_BYTES + a.group_rows * 128 * (p.w.zeros != nullptr ? 2 : 1);

  // Shared memory: x's limbs, scales and sums, the slots, barriers, the ring.
  int x_k_tiles = 0;
  for (int rank = 0; rank < plan.cta_split; rank++) {
    const int first = rank * a.k_tiles / plan.cta_split, last = (rank + 1) * a.k_tiles / plan.cta_split;
    x_k_tiles = last - first > x_k_tiles ? last - first : x_k_tiles;
  }
  a.scales_at = align(x_k_tiles * K_TILE * layout.columns);
  a.sums_at = align(a.scales_at + x_k_tiles * layout.tokens * 8);
  a.slots_at = align(a.sums_at + (scale == PER_BLOCK ? x_k_tiles * layout.tokens * 16 : 0));
  a.slot_bytes = 64 * layout.tokens * 4;
  a.slot_sets = groups_of(a, plan) < tiles_of(a) ? 2 : 1;
  a.barriers_at = align(a.slots_at + plan.warps * a.slot_sets * a.slot_bytes);
  a.amax_at = a.barriers_at + MAX_WARPS * 16 + 16;
  const bool whole_rows = limbs == 1 && fused;
  a.x_at = align(a.amax_at + (whole_rows ? MAX_FUSED * MAX_WARPS * 4 : 0));
  a.ring_at = align(a.x_at + (whole_rows ? a.m * a.k_tiles * K_TILE * 2 : 0));
  const int bytes = a.ring_at + plan.warps * a.stages * a.stage_bytes;
  if (bytes > MAX_SHARED) return {};
  return {instance, groups_of(a, plan) * plan.cta_split, bytes};
}

int64_t shared_bytes(const Problem& p) {
  StreamArgs a{};
  return configure(p, a, fuses(p)).shared;
}

size_t workspace_bytes(const Problem& p) {
  // Also for a fused plan: whether x can be read that way is known only when x is.
  size_t bytes = p.activations != nullptr ? 0 : activation_bytes(p.m, p.w.k, p.act_bits);
  if (uses_workspace(p.plan)) bytes += p.w.n * p.plan.cta_split * p.m * sizeof(float);
  return bytes;
}

int launch(const Problem& p) {
  const trirun_cuda_plan& plan = p.plan;
  // Any other x takes the kernel of its own.
  const bool fused = fuses(p);
  StreamArgs a{};
  const Config config = configure(p, a, fused);
  if (config.instance == nullptr) return TRIRUN_UNSUPPORTED;
  a.words = reinterpret_cast<const uint8_t*>(p.w.words);
  a.scales = reinterpret_cast<const __half*>(p.w.scales);
  a.zeros = reinterpret_cast<const __half*>(p.w.zeros);
  a.zero = p.w.zero;
  a.ldx = p.ldx, a.bias = p.bias, a.y = p.y, a.ldy = p.ldy, a.dtype = p.dtype;
  auto* workspace = static_cast<uint8_t*>(p.workspace);
  if (uses_workspace(plan)) {
    a.counters = p.counters;
    a.partials = reinterpret_cast<float*>(workspace);
    workspace += p.w.n * plan.cta_split * p.m * sizeof(float);
  }
  if (fused) {
    a.x = p.x;
  } else {
    const ActivationLayout layout(p.m, p.w.k, p.act_bits);
    auto* base = static_cast<const uint8_t*>(p.activations != nullptr ? p.activations : workspace);
    a.limbs = base;
    a.x_scales = reinterpret_cast<const float2*>(base + layout.scales_offset);
    a.x_sums = reinterpret_cast<const float4*>(base + layout.sums_offset);
    if (p.activations == nullptr)
      if (const int code = launch_quantize(p, workspace)) return code;
  }
  const dim3 grid(static_cast<unsigned>(config.ctas));
  const int cluster = plan.kernel == TRIRUN_KERNEL_STREAM ? plan.cta_split : 1;
  return launch_kernel(config.instance->kernel, {grid, plan.warps * 32, config.shared, p.stream, p.arch >= 90, cluster},
                       a);
}

}  // namespace

const KernelFamily stream = {shared_bytes, workspace_bytes, launch};

}  // namespace trirun::gemm_decode
