// y[m][n] = a[m][k] . b[n][k]^T with fp16 sums on sm_90a: wgmma, both operands in shared memory.
//
// - Two CTAs of a cluster compute 256 x TileN: each 128 rows of a, both the same rows of b, of which each fetches half
//   for both (multicast): a quarter to a third less comes from L2.
// - A producer warp keeps a ring of stages of 64 columns full; two consumer warpgroups multiply 64 rows each in fp16,
//   and add what a chunk of k gave to their fp32 sums. They end their chunks at different stages, so that the tensor
//   cores always have one warpgroup's products while the other one adds.
// no-spill(90a): f16acc_wgmma_kernel<*>
#include <cuda.h>

#include "f16acc.cuh"
#include "cuda/common/tensor_map.cuh"
#include "cuda/common/wgmma.cuh"

namespace trirun::f16acc {
namespace {

constexpr int kThreads = 384, kStages = 4, kCluster = 2, kBoxRows = 16, kBox = kBoxRows * 128;
constexpr int kSquare = 64 * kStage * 2;  // bytes of 64 rows of an operand stored along them

struct Tensors {
  CUtensorMap a, b, y, bias;
};

template <int TileN>
struct Shape {
  static constexpr int kA = kTileM * kStage * 2, kB = TileN * kStage * 2, kBytes = kA + kB;
  static constexpr int kStaging = kStages * kBytes;      // of outputs: two boxes of 64 columns x 16 rows per warp
  static constexpr int kBarriers = kStaging + 8 * 2 * kBox;
  static constexpr int kBias = kBarriers + 128, kBiasBytes = TileN * 2;  // one for every stage
  static constexpr int kShared = kBias + kStages * kBiasBytes;
};

#ifdef TRIRUN_HOPPER

// A warp's 16 x columns of y once more, with fp32 sums and from memory: slow, and only for sums that left fp16's range.
// Eight columns at a time, so that the usual way keeps the registers and little code lies beside it.
__device__ __forceinline__ void recompute(const Arguments& args, int lane, int row, int column, int columns, int part) {
  const int quad = lane % 4 * 2;
  const auto load = [&](const __half* matrix, int64_t row_step, int64_t column_step, int64_t at, int rows, int64_t k) {
    if (at >= rows || k >= args.k) return 0u;
    const __half* from = matrix + at * row_step + k * column_step;
    return __half_as_ushort(*from) | (k + 1 < args.k ? uint32_t(__half_as_ushort(from[column_step])) << 16 : 0u);
  };
  const int64_t begin = int64_t(args.first_stage(part)) * kStage, end = int64_t(args.first_stage(part + 1)) * kStage;
#pragma unroll 1
  for (int tile = column; tile < column + columns; tile += 8) {
    float sum[4] = {};
#pragma unroll 1
    for (int64_t k = begin + quad; k < end; k += 16) {
      uint32_t a[4], b[2];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        a[i] = load(args.a, args.a_row, args.a_column, row + lane / 4 + i % 2 * 8, args.m, k + i / 2 * 8);
#pragma unroll
      for (int i = 0; i < 2; ++i) b[i] = load(args.b, args.b_row, args.b_column, tile + lane / 4, args.n, k + i * 8);
      mma_16bit<__half>(sum, a, b[0], b[1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t to = row + lane / 4 + i / 2 * 8;
      const int at = tile + quad + i % 2;
      if (to >= args.m || at >= args.n) continue;
      if (args.parts > 1)
        args.sums[(int64_t(part) * args.m + to) * sum_columns(args.n) + at] = sum[i];
      else
        args.y[to * args.ldy + at] = __float2half_rn(sum[i] + (args.bias ? __half2float(args.bias[at]) : 0.f));
    }
  }
}

#endif

template <int TileN, bool TransA, bool TransB>
__global__ void __launch_bounds__(kThreads, 1)
    f16acc_wgmma_kernel(const __grid_constant__ Arguments args, const __grid_constant__ Tensors maps) {
#ifdef TRIRUN_HOPPER
  using S = Shape<TileN>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const uint32_t full = base + S::kBarriers, empty = full + 8 * kStages;
  const uint32_t rank = cluster_rank();
  if (threadIdx.x == 0) {
    tensor_map_prefetch(&maps.a);
    tensor_map_prefetch(&maps.b);
    tensor_map_prefetch(&maps.y);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kCluster * 8);
    }
    barrier_init_fence();
  }
  cluster_arrive();
  cluster_wait();

  const bool has_bias = args.bias && args.parts == 1;
  const int items = args.m_tiles * args.n_tiles * args.parts, step = gridDim.x / kCluster;
  if (threadIdx.x < 128) {
    decrease_registers<40>();
    if (threadIdx.x == 0) {
      int stage = 0, parity = 1;
      for (int item = blockIdx.x / kCluster; item < items; item += step) {
        int m_tile, n_tile;
        const int part = item % args.parts;
        place(args, item / args.parts, m_tile, n_tile);
        const int row = (2 * m_tile + int(rank)) * kTileM, column = n_tile * TileN + int(rank) * (TileN / 2);
        const int first = args.first_stage(part), last = args.first_stage(part + 1);
        for (int k = first; k < last; ++k) {
          barrier_wait(empty + 8 * stage, parity);
          const uint32_t to = base + stage * S::kBytes, bar = full + 8 * stage;
          const bool with_bias = has_bias && k == first;
          barrier_expect(bar, S::kBytes + (with_bias ? S::kBiasBytes : 0));
          if (with_bias) tensor_load(base + S::kBias + stage * S::kBiasBytes, &maps.bias, bar, n_tile * TileN, 0);
          const uint32_t b_to = to + S::kA + rank * (S::kB / 2);
          if constexpr (TransA) {
            for (int i = 0; i < kTileM / 64; ++i) tensor_load(to + i * kSquare, &maps.a, bar, row + i * 64, k * kStage);
          } else {
            tensor_load(to, &maps.a, bar, k * kStage, row);
          }
          if constexpr (TransB) {
            for (int i = 0; i < TileN / 128; ++i)
              tensor_load_multicast(b_to + i * kSquare, &maps.b, bar, column + i * 64, k * kStage, 3);
          } else {
            tensor_load_multicast(b_to, &maps.b, bar, k * kStage, column, 3);
          }
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    }
    __syncwarp();
  } else {
    increase_registers<232>();
    const int this_lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    // Read from a lane: the same for the warp, as the compiler then knows, and kept in uniform registers.
    const int group = __shfl_sync(~0u, warp / 4, 0);
    const uint32_t staging = base + S::kStaging + warp * 2 * kBox;
    // Lane 0 tells this CTA's producer that a stage is free, lane 1 the other's: its half of b comes here too.
    const uint32_t peer = peer_address(empty, rank ^ (this_lane & 1));
    const auto release = [&](int stage) {
      if (this_lane < kCluster) barrier_arrive_peer_unordered(peer + 8 * stage);
    };
    int stage = 0, parity = 0;
    for (int item = blockIdx.x / kCluster; item < items; item += step) {
      int m_tile, n_tile;
      const int part = item % args.parts;
      place(args, item / args.parts, m_tile, n_tile);
      const int first = args.first_stage(part), last = args.first_stage(part + 1);
      const int row = (2 * m_tile + int(rank)) * kTileM + warp * 16, column = n_tile * TileN;
      uint32_t half[TileN / 4] = {};
      float total[TileN / 8][4];  // [8 columns][row half, neighbour]
      // From what arrived with the first stage, while the tensor cores work on that.
      const auto begin_sums = [&] {
        const uint32_t at = base + S::kBias + stage * S::kBiasBytes + this_lane % 4 * 4;
#pragma unroll
        for (int i = 0; i < TileN / 2; ++i) total[i / 4][i % 4] = 0.f;
        if (!has_bias) return;
#pragma unroll
        for (int i = 0; i < TileN / 8; ++i) {
          const uint32_t pair = load_shared(at + i * 16);
          promote(total[i][0], total[i][1], pair);
          promote(total[i][2], total[i][3], pair);
        }
      };
      // The second warpgroup's first chunk is shorter.
      int until = first + (group ? (args.chunk + 1) / 2 : args.chunk);
      for (int k = first; k < last;) {
        const int end = min(until, last);
        for (int accumulate = 0; k < end; ++k) {
          const int begun = accumulate, before = stage == 0 ? kStages - 1 : stage - 1;
          barrier_wait(full + 8 * stage, parity);
          const uint32_t a_at = base + stage * S::kBytes + group * (S::kA / 2), b_at = base + stage * S::kBytes + S::kA;
          const uint64_t a = TransA ? descriptor_along_rows(a_at) : descriptor_swizzled(a_at);
          const uint64_t b = TransB ? descriptor_along_rows(b_at) : descriptor_swizzled(b_at);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kStage / 16; ++i, accumulate = 1)  // 16 columns on: 32 bytes, or 16 rows of 128 bytes
            wgmma_half<TransA, TransB>(half, a + i * (TransA ? 128 : 2), b + i * (TransB ? 128 : 2), accumulate);
          wgmma_commit();
          if (k == first) begin_sums();
          if (begun) {
            wgmma_wait<1>();
            release(before);
          }
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        wgmma_hold(half);
        release(stage == 0 ? kStages - 1 : stage - 1);
#pragma unroll
        for (int i = 0; i < TileN / 4; ++i) promote(total[i / 2][i % 2 * 2], total[i / 2][i % 2 * 2 + 1], half[i]);
        until += args.chunk;
      }

      // Says that the lane may have changed: addresses of outputs are then computed here, not kept all the while.
      int lane = this_lane;
      forget(lane);
      // 0 times a sum is 0, or NaN where the sum is not finite.
      float probe[4] = {};
#pragma unroll
      for (int i = 0; i < TileN / 2; ++i) probe[i % 4] = fmaf(total[i / 4][i % 4], 0.f, probe[i % 4]);
      if (__any_sync(~0u, !is_finite(probe[0] + probe[1] + probe[2] + probe[3]))) {
        recompute(args, lane, row, column, TileN, part);
        continue;
      }
      if (args.parts > 1) {
        const int64_t columns = sum_columns(args.n);
        float* sums = args.sums + (int64_t(part) * args.m + row + lane / 4) * columns + column + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < TileN / 4; ++i) {
          const int down = i % 2 * 8, right = i / 2 * 8;
          if (row + lane / 4 + down < args.m && column + right < args.n)
            *reinterpret_cast<float2*>(sums + down * columns + right) =
                make_float2(total[i / 2][i % 2 * 2], total[i / 2][i % 2 * 2 + 1]);
        }
        continue;
      }
      // Out by boxes of 64 columns; a warp waits only for itself.
#pragma unroll
      for (int box = 0; box < TileN / 64; ++box) {
        const uint32_t to = staging + box % 2 * kBox;
        if (lane == 0) store_wait_read<1>();
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          uint32_t v[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int tile = box * 8 + j + i / 2;
            const __half2 h = __floats2half2_rn(total[tile][i % 2 * 2], total[tile][i % 2 * 2 + 1]);
            v[i] = reinterpret_cast<const uint32_t&>(h);
          }
          const int r = lane % 16;
          store_matrices(to + r * 128 + ((j + lane / 16 ^ r & 7) << 4), v[0], v[1], v[2], v[3]);
        }
        fence_async_shared();
        __syncwarp();
        if (lane == 0) {
          tensor_store(&maps.y, to, column + box * 64, row);
          store_commit();
        }
      }
    }
    if (this_lane == 0) store_wait();
    __syncwarp();
  }
  // The other CTA may still write here and count on these barriers.
  cluster_arrive();
  cluster_wait();
#endif
}

// Boxes of box_rows x box_columns of a matrix [rows][columns] of fp16; those of 64 columns under the 128-byte swizzle.
int encode(CUtensorMap* map, const void* data, int64_t stride, int rows, int columns, int box_rows,
           int box_columns = 64) {
  return trirun::encode(map, data,
                        {CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
                         box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
                         2,
                         {cuuint64_t(columns), cuuint64_t(rows), 1},
                         {cuuint64_t(stride) * 2, 0},
                         {cuuint32_t(box_columns), cuuint32_t(box_rows), 1}});
}

template <int TileN, bool TransA, bool TransB>
int launch(Arguments args, int sms, cudaStream_t stream) {
  using S = Shape<TileN>;
  const auto kernel = f16acc_wgmma_kernel<TileN, TransA, TransB>;
  Tensors maps = {};
  int code = TransA ? encode(&maps.a, args.a, args.a_column, args.k, args.m, kStage)
                    : encode(&maps.a, args.a, args.a_row, args.m, args.k, kTileM);
  if (code == TRIRUN_OK)
    code = TransB ? encode(&maps.b, args.b, args.b_column, args.k, args.n, kStage)
                  : encode(&maps.b, args.b, args.b_row, args.n, args.k, TileN / 2);
  if (code == TRIRUN_OK) code = encode(&maps.y, args.y, args.ldy, args.m, args.n, kBoxRows);
  if (code == TRIRUN_OK && args.bias) code = encode(&maps.bias, args.bias, sum_columns(args.n), 1, args.n, 1, TileN);
  if (code != TRIRUN_OK) return code;
  const int64_t items = int64_t((args.m_tiles + 1) / 2) * args.n_tiles * args.parts;
  if (items > INT32_MAX / 2) return TRIRUN_BAD_SHAPE;
  // place() counts pairs of row tiles here.
  args.m_tiles = (args.m_tiles + 1) / 2;
  args.raster /= 2;
  const dim3 grid(kCluster * unsigned(items < sms / kCluster ? items : sms / kCluster));
  return launch_kernel(kernel, {grid, kThreads, S::kShared, stream, false, kCluster}, args, maps);
}

// What a product and its two gradients need: a . b^T, a . b, a^T . b.
template <int TileN>
int launch_layout(const Arguments& args, int sms, cudaStream_t stream) {
  const bool trans_a = args.a_column != 1, trans_b = args.b_column != 1;
  if (!trans_a && !trans_b) return launch<TileN, false, false>(args, sms, stream);
  if (!trans_a && trans_b) return launch<TileN, false, true>(args, sms, stream);
  if (trans_a && trans_b) return launch<TileN, true, true>(args, sms, stream);
  return TRIRUN_UNSUPPORTED;
}

}  // namespace

int launch_wgmma(const Arguments& args, int tile_n, int sms, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(args.y) % 16 || args.ldy % 8) return TRIRUN_UNSUPPORTED;
  return tile_n == 256 ? launch_layout<256>(args, sms, stream) : launch_layout<128>(args, sms, stream);
}

}  // namespace trirun::f16acc
