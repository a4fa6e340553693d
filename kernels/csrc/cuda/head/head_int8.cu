// An output head in 8 bits: y[m][n] = scale[n] * (x . (byte - 128)), x of 16 bits, sums in fp32.
//
// Memory is what it takes: every byte of the weight is read once. A CTA owns neighbouring rows of it and streams them
// through a ring of copies that does not drain between its tiles; rows of x, of which every CTA needs all, come along
// from L2. A byte becomes an exact 16-bit number in registers, so the products are those of a 16-bit head.
//
// Sums do not care for the order of k, so lane t of a quad takes 16 bytes of a row in one load: columns 16 t + 4 q + i
// of 64 are what the fragments of step q hold in places 2 t, 2 t + 1, 2 t + 8 and 2 t + 9.
#include <type_traits>

#include "cuda/decoder/launch.cuh"
#include "cuda/kernels.cuh"

namespace trirun::decoder {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int K_STEP = 128;  // columns of a stage

struct HeadArgs {
  const uint16_t* x;
  const uint8_t* rows;
  const float* scales;
  uint16_t* y;
  int64_t m, n, k, ldx, stride, ldy;
  int64_t rows_per_cta;
};

// Two bytes of a word, 128 more than the weights, as two exact 16-bit numbers. SELECT: 0x4140 or 0x4342.
template <bool BF16, uint32_t SELECT>
__device__ __forceinline__ uint32_t widen_bytes(uint32_t word) {
  if constexpr (!BF16) {
    // 0x6400 + byte is 1024 + byte.
    const uint32_t pair = __byte_perm(word, 0x64646464u, SELECT);
    const __half2 v = __hsub2(*reinterpret_cast<const __half2*>(&pair), __half2half2(__ushort_as_half(0x6480)));
    return *reinterpret_cast<const uint32_t*>(&v);
  } else {
    // bfloat16 has room for seven bits: 128 + (byte & 127), less 128 where the eighth is set and 256 where it is not.
    const uint32_t pair = __byte_perm(word, 0, SELECT);
    const uint32_t low = (pair & 0x007f007fu) | 0x43004300u, high = (pair & 0x00800080u) ^ 0x43804380u;
    const __nv_bfloat162 v =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low), *reinterpret_cast<const __nv_bfloat162*>(&high));
    return *reinterpret_cast<const uint32_t*>(&v);
  }
}

// COLUMNS: tensor-core tiles of 8 rows of x. BANDS: 16 rows of the weight each, of a warp.
template <int COLUMNS, int BANDS, int STAGES>
struct HeadTile {
  static constexpr int ROWS = WARPS * 16 * BANDS, X_ROWS = 8 * COLUMNS;
  static constexpr int WEIGHT_BYTES = ROWS * K_STEP, STAGE_BYTES = WEIGHT_BYTES + X_ROWS * 2 * K_STEP;
  static constexpr int SHARED = STAGES * STAGE_BYTES;
};

template <bool BF16, int COLUMNS, int BANDS, int STAGES>
__global__ void __launch_bounds__(THREADS, BANDS == 1 ? 2 : 1) head_int8(const __grid_constant__ HeadArgs a) {
  using Tile = HeadTile<COLUMNS, BANDS, STAGES>;
  using Half = std::conditional_t<BF16, __nv_bfloat16, __half>;
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t ring = shared_address(memory);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int64_t begin = blockIdx.x * a.rows_per_cta;
  const int64_t end = begin + a.rows_per_cta < a.n ? begin + a.rows_per_cta : a.n;
  const int k_steps = static_cast<int>((a.k + K_STEP - 1) / K_STEP);
  const int tiles = begin < end ? static_cast<int>((end - begin + Tile::ROWS - 1) / Tile::ROWS) : 0;
  const int steps = tiles * k_steps;

  // 16 bytes are a chunk. Chunks of odd rows change places, so that the rows of a load meet different banks.
  const auto copy_weights = [&](int step) {
    const uint32_t stage = ring + step % STAGES * Tile::STAGE_BYTES;
    const int64_t first = begin + static_cast<int64_t>(step / k_steps) * Tile::ROWS;
    const int column = step % k_steps * K_STEP;
#pragma unroll
    for (int i = thread; i < Tile::ROWS * 8; i += THREADS) {
      const int row = i / 8, chunk = i % 8;
      if (first + row < end && column + chunk * 16 < a.stride)
        copy_async16(stage + row * K_STEP + (chunk ^ (row & 1) << 2) * 16,
                     a.rows + (first + row) * a.stride + column + chunk * 16);
    }
  };
  const auto copy_x = [&](int step) {
    const uint32_t stage = ring + step % STAGES * Tile::STAGE_BYTES + Tile::WEIGHT_BYTES;
    const int column = step % k_steps * K_STEP;
#pragma unroll
    for (int i = thread; i < Tile::X_ROWS * 16; i += THREADS) {
      const int row = i / 16, chunk = i % 16;
      // Columns beyond k are zeros: whatever lies in the weight's place must not count.
      const bool there = column + chunk * 8 < a.k;
      if (row < a.m)
        copy_async16_or_zero(stage + row * 2 * K_STEP + (chunk ^ (row & 1)) * 16,
                             a.x + (there ? row * a.ldx + column + chunk * 8 : 0), there);
    }
  };

#pragma unroll
  for (int step = 0; step < STAGES - 1; step++)
    if (step < steps) copy_weights(step);
  dependency_launch();
  dependency_wait();
#pragma unroll
  for (int step = 0; step < STAGES - 1; step++) {
    if (step < steps) copy_x(step);
    copy_async_commit();
  }

  float sums[BANDS][COLUMNS][4] = {};
  for (int step = 0; step < steps; step++) {
    copy_async_wait<STAGES - 2>();
    // All see the stage, and all are done with the one that is overwritten next.
    __syncthreads();
    if (const int next = step + STAGES - 1; next < steps) {
      copy_weights(next);
      copy_x(next);
    }
    copy_async_commit();

    const uint32_t stage = ring + step % STAGES * Tile::STAGE_BYTES;
    const uint32_t x_stage = stage + Tile::WEIGHT_BYTES;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 words[BANDS][2];
#pragma unroll
      for (int band = 0; band < BANDS; band++)
#pragma unroll
        for (int upper = 0; upper < 2; upper++) {
          const int row = (warp * BANDS + band) * 16 + upper * 8 + g;
          words[band][upper] = load_shared4(stage + row * K_STEP + ((4 * half + t) ^ (row & 1) << 2) * 16);
        }
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        uint4 x[COLUMNS];
#pragma unroll
        for (int c = 0; c < COLUMNS; c++) {
          const int row = c * 8 + g;
          x[c] = load_shared4(x_stage + row * 2 * K_STEP + ((8 * half + 2 * t + pair) ^ (row & 1)) * 16);
        }
#pragma unroll
        for (int q = 0; q < 2; q++) {
#pragma unroll
          for (int band = 0; band < BANDS; band++) {
            const auto word = [&](int upper) {
              const uint4& w = words[band][upper];
              return pair == 0 ? (q == 0 ? w.x : w.y) : (q == 0 ? w.z : w.w);
            };
            const uint32_t weight[4] = {widen_bytes<BF16, 0x4140>(word(0)), widen_bytes<BF16, 0x4140>(word(1)),
                                        widen_bytes<BF16, 0x4342>(word(0)), widen_bytes<BF16, 0x4342>(word(1))};
#pragma unroll
            for (int c = 0; c < COLUMNS; c++)
              mma_16bit<Half>(sums[band][c], weight, q == 0 ? x[c].x : x[c].z, q == 0 ? x[c].y : x[c].w);
          }
        }
      }
    }
    if (step % k_steps != k_steps - 1) continue;
    const int64_t first = begin + static_cast<int64_t>(step / k_steps) * Tile::ROWS;
#pragma unroll
    for (int band = 0; band < BANDS; band++)
#pragma unroll
      for (int upper = 0; upper < 2; upper++) {
        const int64_t row = first + (warp * BANDS + band) * 16 + upper * 8 + g;
        const float scale = row < end ? __ldg(a.scales + row) : 0.f;
#pragma unroll
        for (int c = 0; c < COLUMNS; c++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const int column = c * 8 + 2 * t + e;
            float& sum = sums[band][c][2 * upper + e];
            if (row < end && column < a.m) a.y[column * a.ldy + row] = narrow<BF16>(sum * scale);
            sum = 0.f;
          }
      }
  }
}

using HeadKernel = void (*)(HeadArgs);

struct HeadInstance {
  HeadKernel kernel;
  int shared, ctas_per_sm;
};

template <bool BF16, int COLUMNS, int BANDS, int STAGES>
HeadInstance instance() {
  return {head_int8<BF16, COLUMNS, BANDS, STAGES>, HeadTile<COLUMNS, BANDS, STAGES>::SHARED, BANDS == 1 ? 2 : 1};
}

// The kernel for m rows of x, with the longest ring that the device has room for.
// no-spill: head_int8<*, *, *, *>
template <bool BF16>
int instance_for(int64_t m, HeadInstance& found) {
  if (m <= 16) {
    found = m <= 8 ? instance<BF16, 1, 1, 4>() : instance<BF16, 2, 1, 4>();
    return TRIRUN_OK;
  }
  found = m <= 32 ? instance<BF16, 4, 2, 4>() : instance<BF16, 8, 2, 4>();
  int room = 0;
  if (const int code = shared_room(reinterpret_cast<const void*>(found.kernel), room)) return code;
  if (room < found.shared) found = m <= 32 ? instance<BF16, 4, 2, 2>() : instance<BF16, 8, 2, 2>();
  return TRIRUN_OK;
}

}  // namespace
}  // namespace trirun::decoder

extern "C" int trirun_cuda_head_int8(const void* x, int dtype, int64_t m, int64_t k, int64_t ldx, const uint8_t* rows,
                                     const float* scales, int64_t n, int64_t stride, void* y, int64_t ldy,
                                     void* stream) {
  using namespace trirun;
  using namespace trirun::decoder;
  if (m == 0) return TRIRUN_OK;
  if (x == nullptr || rows == nullptr || scales == nullptr || y == nullptr) return TRIRUN_BAD_POINTER;
  if (!aligned_to(x, 16) || !aligned_to(rows, 16) || !aligned_to(scales, 4) || !aligned_to(y, 2))
    return TRIRUN_BAD_POINTER;
  if (m < 0 || m > HEAD_INT8_ROWS || n <= 0 || n > (1 << 24) || k <= 0 || k > (1 << 20) || k % 8 || ldx % 8)
    return TRIRUN_BAD_SHAPE;
  if (ldx < k || ldy < n || stride < k || stride % 16) return TRIRUN_BAD_SHAPE;
  if (!half_dtype(dtype)) return TRIRUN_UNSUPPORTED;
  HeadInstance found{};
  if (const int code = dtype == TRIRUN_BF16 ? instance_for<true>(m, found) : instance_for<false>(m, found)) return code;
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  // Rows in equal parts, of whole bands.
  const int64_t ctas = static_cast<int64_t>(facts.sms) * found.ctas_per_sm;
  const int64_t rows_per_cta = ((n + ctas - 1) / ctas + 15) / 16 * 16;
  const HeadArgs args{static_cast<const uint16_t*>(x),
                      rows,
                      scales,
                      static_cast<uint16_t*>(y),
                      m,
                      n,
                      k,
                      ldx,
                      stride,
                      ldy,
                      rows_per_cta};
  const dim3 grid(static_cast<unsigned>((n + rows_per_cta - 1) / rows_per_cta));
  return launch_dependent(found.kernel, args, grid, THREADS, found.shared, stream);
}
