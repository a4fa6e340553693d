// An output head in 16 bits of few rows: y[m][n] = w[n][k] . x[m][k], sums in fp32. From sm_90 on.
//
// Memory is what it takes. One warp of a CTA asks the copy engine for pieces of eight rows of the weight, which go
// through a ring; the others multiply them, each some columns of every piece. The ring is filled before the previous
// kernel, which makes x, has ended, and the next one's CTAs find room beside this one's.
//
// Sums do not care for the order of k, so lane t of a quad takes 16 bytes of a row in one load: what fragments hold in
// places 2t, 2t + 1, 2t + 8 and 2t + 9 of two products.
#include <algorithm>
#include <type_traits>

#include "cuda/common/hopper.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/decoder/launch.cuh"
#include "cuda/kernels.cuh"

namespace trirun::decoder {
namespace {

constexpr int WARPS = 8, THREADS = (WARPS + 1) * 32;
constexpr int ROWS = 8;    // of the weight, in a piece
constexpr int BLOCK = 32;  // columns that a quad loads at once
constexpr int MAX_STAGES = 5;
constexpr int WARP_SUMS = HEAD_16BIT_ROWS * ROWS * 4, SUM_BYTES = WARPS * WARP_SUMS;

// Neighbouring rows of a piece, and of x, are half of the banks apart.
__host__ __device__ constexpr int row_bytes(int columns) { return columns * 2 | 64; }

struct HeadArgs {
  const uint16_t* x;
  const uint16_t* w;
  uint16_t* y;
  int64_t ldx, ldy;
  int m, k, groups;     // groups: of ROWS rows of the weight
  int columns, stages;  // of a piece; of the ring
};

// Bytes of shared memory: the ring, x, two buffers of sums, barriers.
int shared_bytes(const HeadArgs& a) {
  return a.stages * ROWS * row_bytes(a.columns) + a.m * row_bytes(a.k) + 2 * SUM_BYTES + (2 * MAX_STAGES + 1) * 8;
}

// no-spill: head_16bit<*>
template <bool BF16>
__global__ void __launch_bounds__(THREADS, 5) head_16bit(const __grid_constant__ HeadArgs a) {
#if __CUDA_ARCH__ >= 900
  using Half = std::conditional_t<BF16, __nv_bfloat16, __half>;
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t ring = shared_address(memory), piece_row = row_bytes(a.columns), x_row = row_bytes(a.k);
  const uint32_t x = ring + a.stages * ROWS * piece_row, sums = x + a.m * x_row, barriers = sums + 2 * SUM_BYTES;
  const auto full = [&](uint32_t stage) { return barriers + stage * 8; };
  const auto empty = [&](uint32_t stage) { return barriers + (MAX_STAGES + stage) * 8; };
  const uint32_t x_barrier = barriers + 2 * MAX_STAGES * 8;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; i++) barrier_init(full(i), 1), barrier_init(empty(i), WARPS);
    barrier_init(x_barrier, 1);
    barrier_init_fence();
  }
  __syncthreads();
  dependency_launch();
  Ring at;

  if (warp == WARPS) {
    const uint64_t once = evict_first_policy();
    int before_x = a.stages;  // pieces: x is waited for when the ring is full, or all pieces are on their way
    const auto bring_x = [&] {
      dependency_wait();
      fence_async();
      if (lane == 0) barrier_expect(x_barrier, a.m * a.k * 2);
      __syncwarp();
      if (lane < a.m) bulk_load(x + lane * x_row, a.x + lane * a.ldx, a.k * 2, x_barrier);
    };
#pragma unroll 1
    for (int group = blockIdx.x; group < a.groups; group += gridDim.x)
#pragma unroll 1
      for (int column = 0; column < a.k; column += a.columns) {
        if (before_x-- == 0) bring_x();
        barrier_wait_warp(empty(at.stage), at.phase ^ 1);
        const int bytes = min(a.columns, a.k - column) * 2;
        if (lane == 0) barrier_expect(full(at.stage), ROWS * bytes);
        __syncwarp();
        if (lane < ROWS)
          bulk_load(ring + (at.stage * ROWS + lane) * piece_row,
                    a.w + (static_cast<int64_t>(group) * ROWS + lane) * a.k + column, bytes, full(at.stage), once);
        at.advance(a.stages);
      }
    if (before_x >= 0) bring_x();
    return;
  }

  // Row g of x times rows 2t and 2t + 1 of a group: what a lane ends with.
  const int g = lane / 4, t = lane % 4;
  const bool there = g < a.m;
  dependency_wait();
  barrier_wait_warp(x_barrier, 0);
  int turn = 0;
#pragma unroll 1
  for (int group = blockIdx.x; group < a.groups; group += gridDim.x, turn++) {
    float c[2][4] = {};
#pragma unroll 1
    for (int column = 0; column < a.k; column += a.columns) {
      const int blocks = min(a.columns, a.k - column) / BLOCK;
      const uint32_t of_w = ring + (at.stage * ROWS + g) * piece_row + t * 16;
      const uint32_t of_x = x + g * x_row + column * 2 + t * 16;
      barrier_wait_warp(full(at.stage), at.phase);
#pragma unroll 1
      for (int block = warp; block < blocks; block += WARPS) {
        const uint4 w = load_shared4(of_w + block * BLOCK * 2);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (there) v = load_shared4(of_x + block * BLOCK * 2);
        mma_16bit<Half>(c[0], {v.x, 0, v.y, 0}, w.x, w.y);
        mma_16bit<Half>(c[1], {v.z, 0, v.w, 0}, w.z, w.w);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty(at.stage));
      at.advance(a.stages);
    }
    // Warps take turns in adding up what all of them have. By the next turn but one they have met again.
    const uint32_t of_lane = sums + turn % 2 * SUM_BYTES + lane * 8;
    store_shared2(of_lane + warp * WARP_SUMS, c[0][0] + c[1][0], c[0][1] + c[1][1]);
    named_barrier<WARPS * 32>(1);
    if (turn % WARPS != warp || !there) continue;
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < WARPS; i++) {
      const float2 v = load_shared_float2(of_lane + i * WARP_SUMS);
      sum.x += v.x, sum.y += v.y;
    }
    *reinterpret_cast<uint32_t*>(a.y + g * a.ldy + group * ROWS + 2 * t) = narrow_pair<BF16>(sum.x, sum.y);
  }
#endif
}

// Pieces of 2 KiB a row where k is at most three of them. The copy engine takes as long for smaller ones, on some GPUs
// too long for these where rows are longer, and of others memory becomes slower when more than 72 KiB of a CTA are on
// their way (kernels/LOG.md).
void set_pieces(HeadArgs& a) {
  constexpr int COLUMNS = 1024, MAX_COLUMNS = 1536, OF_LINE = 64;
  if (a.k % COLUMNS == 0 && a.k <= 3 * COLUMNS) {
    a.columns = COLUMNS, a.stages = MAX_STAGES;
    return;
  }
  const int pieces = (a.k + MAX_COLUMNS - 1) / MAX_COLUMNS, columns = (a.k + pieces - 1) / pieces;
  a.columns = (columns + OF_LINE - 1) / OF_LINE * OF_LINE, a.stages = 3;
}

}  // namespace
}  // namespace trirun::decoder

extern "C" int trirun_cuda_head_16bit(const void* x, int dtype, int64_t m, int64_t k, int64_t ldx, const void* w,
                                      int64_t n, void* y, int64_t ldy, void* stream) {
  using namespace trirun;
  using namespace trirun::decoder;
  if (m == 0) return TRIRUN_OK;
  if (x == nullptr || w == nullptr || y == nullptr) return TRIRUN_BAD_POINTER;
  if (!aligned_to(x, 16) || !aligned_to(w, 16) || !aligned_to(y, 4)) return TRIRUN_BAD_POINTER;
  if (m < 0 || m > HEAD_16BIT_ROWS || n <= 0 || n > (1 << 24) || n % ROWS || k <= 0 || k > HEAD_16BIT_COLUMNS ||
      k % BLOCK || ldx < k || ldx % 8 || ldy < n || ldy % 2)
    return TRIRUN_BAD_SHAPE;
  if (!half_dtype(dtype)) return TRIRUN_UNSUPPORTED;
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  if (facts.arch < 90) return TRIRUN_UNSUPPORTED;
  const auto kernel = dtype == TRIRUN_BF16 ? head_16bit<true> : head_16bit<false>;
  HeadArgs args{static_cast<const uint16_t*>(x), static_cast<const uint16_t*>(w), static_cast<uint16_t*>(y), ldx, ldy};
  args.m = static_cast<int>(m), args.k = static_cast<int>(k), args.groups = static_cast<int>(n / ROWS);
  set_pieces(args);
  int room = 0;
  if (const int code = shared_room(reinterpret_cast<const void*>(kernel), room)) return code;
  // So much that no two CTAs are on one multiprocessor: they would be where some are free before others.
  const int shared = std::max(shared_bytes(args), room / 2 + 1);
  if (shared > room) return TRIRUN_UNSUPPORTED;
  const dim3 grid(static_cast<unsigned>(std::min(args.groups, facts.sms)));
  return launch_dependent(kernel, args, grid, THREADS, shared, stream);
}
