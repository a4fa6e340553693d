// The fp16-accumulating product on Hopper: y[m][n] = a[m][k] . b[n][k]^T.
//
// Two CTAs of a cluster compute 256 x TileN: each 128 rows of a, both the same rows of b, of which each fetches half
// for both. A producer warp keeps a ring of stages of 64 columns full; two consumer warpgroups multiply 64 rows each
// in fp16, and add what a chunk of k gave to their fp32 sums. They end their chunks at different stages, so that the
// tensor cores always have one warpgroup's products while the other one adds.
// no-spill(90a): f16acc_wgmma_kernel<*>
#include <cuda.h>

#include "f16acc.cuh"
#include "f16acc_wgmma.cuh"

namespace trirun::f16acc {
namespace {

constexpr int kThreads = 384, kStages = 4, kCluster = 2, kBoxRows = 16, kBox = kBoxRows * 128;
constexpr int kSquare = 64 * kStage * 2;  // bytes of 64 rows of an operand stored along them

struct Tensors {
  CUtensorMap a, b, y;
};

template <int TileN>
struct Shape {
  static constexpr int kA = kTileM * kStage * 2, kB = TileN * kStage * 2, kBytes = kA + kB;
  static constexpr int kStaging = kStages * kBytes;      // of outputs: two boxes of 64 columns x 16 rows per warp
  static constexpr int kBarriers = kStaging + 8 * 2 * kBox;
  static constexpr int kShared = kBarriers + 2 * kStages * 8 + 1024;  // the ring starts on 1024 bytes
};

#ifdef TRIRUN_HOPPER

// A warp's 16 x TileN sums once more, in fp32 and from memory: slow, and only for sums that left fp16's range.
template <int Tiles>
__device__ __forceinline__ void recompute(const Arguments& args, int row, int column, int first, int last,
                                          float (&total)[Tiles][4]) {
  const int lane = threadIdx.x % 32, quad = lane % 4 * 2;
  const auto load = [&](const __half* matrix, int64_t row_step, int64_t column_step, int64_t at, int rows, int64_t k) {
    if (at >= rows || k >= args.k) return 0u;
    const __half* from = matrix + at * row_step + k * column_step;
    return __half_as_ushort(*from) | (k + 1 < args.k ? uint32_t(__half_as_ushort(from[column_step])) << 16 : 0u);
  };
#pragma unroll
  for (int i = 0; i < 4 * Tiles; ++i) total[i / 4][i % 4] = 0.f;
  for (int64_t k = int64_t(first) * kStage + quad; k < int64_t(last) * kStage; k += 16) {
    uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      a[i] = load(args.a, args.a_row, args.a_column, row + i % 2 * 8, args.m, k + i / 2 * 8);
#pragma unroll
    for (int j = 0; j < Tiles; ++j) {
      const int64_t at = column + j * 8 + lane / 4;
      multiply(total[j], a, load(args.b, args.b_row, args.b_column, at, args.n, k),
               load(args.b, args.b_row, args.b_column, at, args.n, k + 8));
    }
  }
}

#endif

template <int TileN, bool TransA, bool TransB>
__global__ void __launch_bounds__(kThreads, 1)
    f16acc_wgmma_kernel(const __grid_constant__ Arguments args, const __grid_constant__ Tensors maps) {
#ifdef TRIRUN_HOPPER
  using namespace hopper;
  using S = Shape<TileN>;
  extern __shared__ uint8_t unaligned[];
  const uint32_t base = (smem_address(unaligned) + 1023) & ~1023u;
  const uint32_t full = base + S::kBarriers, empty = full + 8 * kStages;
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  if (threadIdx.x == 0) {
    prefetch_map(&maps.a);
    prefetch_map(&maps.b);
    prefetch_map(&maps.y);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kCluster * 8);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();

  const int units = args.m_tiles * args.n_tiles * args.parts, step = gridDim.x / kCluster;
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) {
      int stage = 0, parity = 1;
      for (int unit = blockIdx.x / kCluster; unit < units; unit += step) {
        int m_tile, n_tile;
        const int part = unit % args.parts;
        place(args, unit / args.parts, m_tile, n_tile);
        const int row = (2 * m_tile + int(rank)) * kTileM, column = n_tile * TileN + int(rank) * (TileN / 2);
        const int last = args.first_stage(part + 1);
        for (int k = args.first_stage(part); k < last; ++k) {
          barrier_wait(empty + 8 * stage, parity);
          const uint32_t to = base + stage * S::kBytes, bar = full + 8 * stage;
          barrier_expect(bar, S::kBytes);
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
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 - 4;
    // Read from a lane: the same for the warp, as the compiler then knows, and kept in uniform registers.
    const int group = __shfl_sync(~0u, warp / 4, 0);
    const uint32_t staging = base + S::kStaging + warp * 2 * kBox;
    const int chunk = args.chunk / kStage;
    // Lane 0 tells this CTA's producer that a stage is free, lane 1 the other's: its half of b comes here too.
    const uint32_t peer = cluster_address(empty, rank ^ (lane & 1));
    const auto release = [&](int stage) {
      if (lane < kCluster) barrier_arrive_cluster(peer + 8 * stage);
    };
    int stage = 0, parity = 0;
    for (int unit = blockIdx.x / kCluster; unit < units; unit += step) {
      int m_tile, n_tile;
      const int part = unit % args.parts;
      place(args, unit / args.parts, m_tile, n_tile);
      const int first = args.first_stage(part), last = args.first_stage(part + 1);
      float total[TileN / 8][4] = {};  // [8 columns][row half, neighbour]
      uint32_t half[TileN / 4];
      // The second warpgroup's first chunk is shorter.
      int until = first + (group ? (chunk + 1) / 2 : chunk);
      for (int k = first; k < last;) {
        const int end = min(until, last);
        int before = -1;
        for (int accumulate = 0; k < end; ++k) {
          barrier_wait(full + 8 * stage, parity);
          const uint32_t a_at = base + stage * S::kBytes + group * (S::kA / 2), b_at = base + stage * S::kBytes + S::kA;
          const uint64_t a = TransA ? operand_descriptor_rows(a_at) : operand_descriptor(a_at);
          const uint64_t b = TransB ? operand_descriptor_rows(b_at) : operand_descriptor(b_at);
          wgmma_fence();
#pragma unroll
          for (int i = 0; i < kStage / 16; ++i, accumulate = 1)  // 16 columns on: 32 bytes, or 16 rows of 128 bytes
            wgmma_half<TransA, TransB>(half, a + i * (TransA ? 128 : 2), b + i * (TransB ? 128 : 2), accumulate);
          wgmma_commit();
          if (before >= 0) {
            wgmma_wait<1>();
            release(before);
          }
          before = stage;
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
        wgmma_wait<0>();
        hold(half);
        release(before);
#pragma unroll
        for (int i = 0; i < TileN / 4; ++i) promote(total[i / 2][i % 2 * 2], total[i / 2][i % 2 * 2 + 1], half[i]);
        until += chunk;
      }

      bool finite = true;
#pragma unroll
      for (int i = 0; i < TileN / 2; ++i) finite = finite && is_finite(total[i / 4][i % 4]);
      const int row = (2 * m_tile + int(rank)) * kTileM + warp * 16, column = n_tile * TileN;
      if (__any_sync(~0u, !finite)) recompute(args, row + lane / 4, column, first, last, total);

      if (args.parts > 1) {
        float* sums = args.sums + (int64_t(part) * args.m + row + lane / 4) * args.n + column + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < TileN / 4; ++i) {
          const int down = i % 2 * 8, right = i / 2 * 8;
          if (row + lane / 4 + down < args.m && column + right < args.n)
            *reinterpret_cast<float2*>(sums + int64_t(down) * args.n + right) =
                make_float2(total[i / 2][i % 2 * 2], total[i / 2][i % 2 * 2 + 1]);
        }
        continue;
      }
      // Out by boxes of 64 columns; a warp waits only for itself.
#pragma unroll
      for (int box = 0; box < TileN / 64; ++box) {
        const uint32_t to = staging + box % 2 * kBox;
        if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
        __syncwarp();
#pragma unroll
        for (int j = 0; j < 8; j += 2) {
          uint32_t v[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int tile = box * 8 + j + i / 2;
            float2 bias = make_float2(0.f, 0.f);
            if (args.bias) {
              const int at = column + tile * 8 + lane % 4 * 2;
              if (at < args.n) bias = make_float2(__half2float(args.bias[at]), __half2float(args.bias[at + 1]));
            }
            const __half2 h = __floats2half2_rn(total[tile][i % 2 * 2] + bias.x, total[tile][i % 2 * 2 + 1] + bias.y);
            v[i] = reinterpret_cast<const uint32_t&>(h);
          }
          const int r = lane % 16;
          store_matrices(to + r * 128 + ((j + lane / 16 ^ r & 7) << 4), v[0], v[1], v[2], v[3]);
        }
        fence_async();
        __syncwarp();
        if (lane == 0) {
          tensor_store(&maps.y, to, column + box * 64, row);
          store_commit();
        }
      }
    }
    if (lane == 0) store_wait();
    __syncwarp();
  }
  // The other CTA may still write here and count on these barriers.
  cluster_sync();
#endif
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's own function, found at run time: the library links no libcuda and loads on machines without one.
Encode tensor_map_encoder() {
  static const Encode encode = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(entry) : nullptr;
  }();
  return encode;
}

// Boxes of box_rows x 64 of a matrix [rows][columns] of fp16.
int encode(CUtensorMap* map, const void* data, int64_t stride, int rows, int columns, int box_rows) {
  const cuuint64_t size[2] = {cuuint64_t(columns), cuuint64_t(rows)}, bytes[1] = {cuuint64_t(stride) * 2};
  const cuuint32_t box[2] = {64, cuuint32_t(box_rows)}, step[2] = {1, 1};
  const CUresult result = tensor_map_encoder()(
      map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, const_cast<void*>(data), size, bytes, box, step,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? TRIRUN_OK : TRIRUN_BAD_POINTER;
}

template <int TileN, bool TransA, bool TransB>
int launch(Arguments args, int sms, cudaStream_t stream) {
  using S = Shape<TileN>;
  Tensors maps = {};
  if (!tensor_map_encoder()) return TRIRUN_UNSUPPORTED;
  int code = TransA ? encode(&maps.a, args.a, args.a_column, args.k, args.m, kStage)
                    : encode(&maps.a, args.a, args.a_row, args.m, args.k, kTileM);
  if (code == TRIRUN_OK)
    code = TransB ? encode(&maps.b, args.b, args.b_column, args.k, args.n, kStage)
                  : encode(&maps.b, args.b, args.b_row, args.n, args.k, TileN / 2);
  if (code == TRIRUN_OK) code = encode(&maps.y, args.y, args.ldy, args.m, args.n, kBoxRows);
  if (code != TRIRUN_OK) return code;
  const auto kernel = f16acc_wgmma_kernel<TileN, TransA, TransB>;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, S::kShared))
    return e;
  const int64_t units = int64_t((args.m_tiles + 1) / 2) * args.n_tiles * args.parts;
  if (units > INT32_MAX / 2) return TRIRUN_BAD_SHAPE;
  // place() counts pairs of row tiles here.
  args.m_tiles = (args.m_tiles + 1) / 2;
  args.raster /= 2;
  cudaLaunchAttribute cluster;
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {kCluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(kCluster * unsigned(units < sms / kCluster ? units : sms / kCluster));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = S::kShared;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args, maps);
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
  if (reinterpret_cast<uintptr_t>(args.y) % 16 || args.ldy % 8 || args.n % 8) return TRIRUN_UNSUPPORTED;
  return tile_n == 256 ? launch_layout<256>(args, sms, stream) : launch_layout<128>(args, sms, stream);
}

}  // namespace trirun::f16acc
