// Rows of x in the form the prefill kernels read, where the caller's own will not do: int8 codes for models trained
// with 8-bit activations, and fp16 with a power of two per row for float32. A row is read once, into registers, for its
// largest magnitude and for its codes. And the dense weight, for products that a library computes.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/common/activations.cuh"
#include "prefill.cuh"

namespace trirun::gemm_prefill {
namespace {

constexpr int kVector = 16;  // columns of one thread at a time: so many int8 codes are reordered together
constexpr int kKept = 2;  // vectors of a thread that stay in registers: rows of 16384 columns are read once
constexpr int kMostThreads = 512;

struct RowArguments {
  const void* x;
  int64_t ldx, k, k_pad;
  int dtype;
  RowFormat format;
  bool aligned;  // rows can be read 16 bytes at a time
  void* out;
  float* scale;
  int* sum;
};

// 16 columns of a row as they lie in memory, zeros from column k on.
template <typename T>
struct Vector {
  static constexpr int kWords = kVector * int(sizeof(T)) / 4;
  alignas(16) uint32_t words[kWords] = {};

  __device__ __forceinline__ void read(const RowArguments& a, const T* row, int64_t column) {
    if (a.aligned && column + kVector <= a.k) {
#pragma unroll
      for (int i = 0; i < kWords / 4; ++i)
        reinterpret_cast<uint4*>(words)[i] = reinterpret_cast<const uint4*>(row + column)[i];
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i)
        if (column + i < a.k) reinterpret_cast<T*>(words)[i] = row[column + i];
    }
  }
  __device__ __forceinline__ float value(int i) const {
    return static_cast<float>(reinterpret_cast<const T*>(words)[i]);
  }
  // The largest magnitude, as the bits of a float.
  __device__ __forceinline__ uint32_t magnitude_bits() const {
    constexpr bool kWide = sizeof(T) == 4;
    uint32_t most = 0;
#pragma unroll
    for (const uint32_t word : words) most = larger_bits(most, word, kWide);
    return largest_bits(most, kWide, std::is_same<T, __nv_bfloat16>::value);
  }
};

// A vector as it is stored: codes or scaled values. Returns the sum of the codes.
template <typename T>
__device__ __forceinline__ int write_vector(const RowArguments& a, int64_t row, int64_t column, const Vector<T>& vector,
                                            float scale, float reciprocal) {
  if (a.format == kRowsInt8) {
    uint32_t packed[4];
    int sum = 0;
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      const auto value = [&](int i) { return vector.value(2 * t + i); };
      packed[t] = act8_codes(make_float4(value(0), value(1), value(8), value(9)), scale, reciprocal);
      sum = __dp4a(int(packed[t]), 0x01010101, sum);
    }
    reinterpret_cast<uint4*>(static_cast<int8_t*>(a.out) + row * a.k_pad + column)[0] =
        make_uint4(packed[0], packed[1], packed[2], packed[3]);
    return sum;
  }
  // The reciprocal of a power of two is exact.
  const auto stored = [&](int i) {
    const float v = vector.value(i);
    return a.format == kRowsHalf ? v * reciprocal : act8_code(v, scale, reciprocal) - ROUNDER;
  };
  __half2 packed[kVector / 2];
#pragma unroll
  for (int i = 0; i < kVector; i += 2) packed[i / 2] = __floats2half2_rn(stored(i), stored(i + 1));
  uint4* to = reinterpret_cast<uint4*>(static_cast<__half*>(a.out) + row * a.k_pad + column);
  to[0] = reinterpret_cast<uint4*>(packed)[0];
  to[1] = reinterpret_cast<uint4*>(packed)[1];
  return 0;
}

// One CTA per row: its largest magnitude, then the codes. Rows longer than the registers hold are read twice.
template <typename T>
__global__ void __launch_bounds__(kMostThreads) prepare_rows(const __grid_constant__ RowArguments a) {
  dependency_launch();
  dependency_wait();
  __shared__ uint32_t of_warp[2][kMostThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t m = blockIdx.x, step = blockDim.x * kVector, column0 = threadIdx.x * kVector;
  const T* row = static_cast<const T*>(a.x) + m * a.ldx;
  Vector<T> kept[kKept];
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (column0 + i * step < a.k) kept[i].read(a, row, column0 + i * step);
  uint32_t most = 0;
#pragma unroll
  for (const Vector<T>& vector : kept) most = max(most, vector.magnitude_bits());
  for (int64_t column = column0 + kKept * step; column < a.k; column += step) {
    Vector<T> vector;
    vector.read(a, row, column);
    most = max(most, vector.magnitude_bits());
  }
  most = __reduce_max_sync(~0u, most);
  if (lane == 0) of_warp[0][warp] = most;
  __syncthreads();
  most = __reduce_max_sync(~0u, lane < warps ? of_warp[0][lane] : 0);
  // Where a row holds a NaN or an infinity a NaN, so that it does not come out as numbers.
  float scale = act8_scale(most);
  if (a.format == kRowsHalf && scale == scale) {
    // The largest value lands in [2^13, 2^14): far from fp16's overflow, and 2^27 above its smallest number.
    int exponent = 0;
    if (most > 0) frexpf(__uint_as_float(most), &exponent);
    scale = ldexpf(1.f, max(exponent - 14, -126));
  }
  const float reciprocal = 1.f / scale;
  int sum = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i)
    if (column0 + i * step < a.k_pad) sum += write_vector(a, m, column0 + i * step, kept[i], scale, reciprocal);
  for (int64_t column = column0 + kKept * step; column < a.k_pad; column += step) {
    Vector<T> vector;
    vector.read(a, row, column);
    sum += write_vector(a, m, column, vector, scale, reciprocal);
  }
  sum = __reduce_add_sync(~0u, sum);
  if (lane == 0) of_warp[1][warp] = uint32_t(sum);
  __syncthreads();
  if (warp != 0) return;
  sum = __reduce_add_sync(~0u, lane < warps ? int(of_warp[1][lane]) : 0);
  if (lane == 0) {
    a.scale[m] = scale;
    a.sum[m] = sum;
  }
}

struct DenseArguments {
  trirun_int2 w;
  int64_t n, k, ldy;
  void* y;
  // Of every expert `tiles` n tiles from `first_tile` on are wanted, and expert_tiles and expert_groups (of scales) lie
  // before the next one. A single weight is one expert.
  int64_t tiles, first_tile, expert_tiles, expert_groups;
};

// Two neighbours of a row, read and written together.
template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T low, high;
};

// One warp writes 64 rows by 64 columns, transposed through shared memory so that every row leaves as whole lines.
template <typename T>
__global__ void __launch_bounds__(32 * 8 / sizeof(T)) dequantize(DenseArguments a) {
  constexpr int kWarps = 8 / sizeof(T);
  constexpr int kPitch = 72;  // the eight rows of a lane column start in different banks
  __shared__ Pair<T> shared[kWarps][64 * kPitch / 2];
  Pair<T>* tile = shared[threadIdx.x / 32];
  const int lane = threadIdx.x % 32;
  const int64_t block0 = 2 * (blockIdx.x * int64_t(kWarps) + threadIdx.x / 32), blocks = a.w.k / 32;
  const int64_t n_tile = blockIdx.y, expert = n_tile / a.tiles, tile_of_expert = a.first_tile + n_tile % a.tiles;
  const int64_t word_tile = expert * a.expert_tiles + tile_of_expert;
  if (block0 >= blocks) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t block = block0 + half;
    const uint4 raw = reinterpret_cast<const uint4*>(a.w.words)[(word_tile * blocks + block) * 32 + lane];
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    const int64_t group = a.w.group_size > 0 ? block * 32 / a.w.group_size : 0,
                  at = expert * a.expert_groups + group * a.w.n + tile_of_expert * 64 + lane / 4 * 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = i / 2, h = i % 2;
      const float scale = __half2float(__ushort_as_half(a.w.scales[at + i]));
      const float zero = a.w.zeros ? __half2float(__ushort_as_half(a.w.zeros[at + i])) : a.w.zero;
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const int c = e / 4, b = e % 4, column = 32 * half + 16 * c + 2 * (lane % 4) + 4 * b;
        const uint32_t codes = words[2 * c + h] >> (8 * b + 2 * j);
        tile[((16 * j + 8 * h + lane / 4) * kPitch + column) / 2] = {T(scale * (float(codes & 3) - zero)),
                                                                     T(scale * (float(codes >> 8 & 3) - zero))};
      }
    }
  }
  __syncwarp();
  const int64_t column = block0 * 32 + 2 * lane, rows = min(int64_t(64), a.n - n_tile * 64);
  T* to = static_cast<T*>(a.y) + n_tile * 64 * a.ldy + column;
  const bool paired = a.ldy % 2 == 0 && reinterpret_cast<uintptr_t>(a.y) % (2 * sizeof(T)) == 0 && column + 1 < a.k;
#pragma unroll 8
  for (int row = 0; row < rows; ++row, to += a.ldy) {
    const Pair<T> v = tile[row * kPitch / 2 + lane];
    if (paired) {
      *reinterpret_cast<Pair<T>*>(to) = v;
    } else {
      if (column < a.k) to[0] = v.low;
      if (column + 1 < a.k) to[1] = v.high;
    }
  }
}

size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

size_t prepared_bytes(int64_t m, int64_t k_pad, RowFormat format) {
  if (format == kRowsAsGiven) return 0;
  return aligned(size_t(m) * k_pad * (format == kRowsInt8 ? 1 : 2)) + 2 * aligned(size_t(m) * 4);
}

int launch_prepare(const Problem& p, RowFormat format, void* memory, PreparedRows* rows) {
  uint8_t* at = static_cast<uint8_t*>(memory);
  RowArguments a = {p.x, p.ldx, p.k, p.w.k, p.dtype, format};
  const size_t element = p.dtype == TRIRUN_F32 ? 4 : 2;
  a.aligned = reinterpret_cast<uintptr_t>(p.x) % 16 == 0 && p.ldx * element % 16 == 0;
  a.out = at;
  at += aligned(size_t(p.m) * p.w.k * (format == kRowsInt8 ? 1 : 2));
  a.scale = reinterpret_cast<float*>(at);
  a.sum = reinterpret_cast<int*>(at + aligned(size_t(p.m) * 4));
  *rows = {a.out, p.w.k, p.w.k, TRIRUN_F16, a.scale, a.sum, rows->rest};

  // A vector for every thread, as far as there are threads.
  const int threads = int(std::min<int64_t>((p.w.k / kVector + 31) / 32 * 32, kMostThreads));
  const auto kernel = p.dtype == TRIRUN_F32   ? prepare_rows<float>
                      : p.dtype == TRIRUN_F16 ? prepare_rows<__half>
                                              : prepare_rows<__nv_bfloat16>;
  return launch_kernel(kernel, {dim3(unsigned(p.m)), threads, 0, p.stream, p.arch >= 90}, a);
}

int launch_dequantize(const Problem& p) {
  const int64_t n_tiles = (p.n + 63) / 64;
  const DenseArguments a = {p.w, p.n, p.k, p.ldy, p.y, n_tiles, 0, n_tiles, 0};
  if (n_tiles > 65535) return TRIRUN_BAD_SHAPE;
  const int warps = p.dtype == TRIRUN_F32 ? 2 : 4;
  const dim3 grid(unsigned((p.w.k / 64 + warps - 1) / warps), unsigned(n_tiles));
  const auto kernel = p.dtype == TRIRUN_F32   ? dequantize<float>
                      : p.dtype == TRIRUN_F16 ? dequantize<__half>
                                              : dequantize<__nv_bfloat16>;
  return launch_kernel(kernel, {grid, 32 * warps, 0, p.stream, false}, a);
}

}  // namespace trirun::gemm_prefill

extern "C" int trirun_cuda_dequantize_experts(const trirun_int2* w, int64_t experts, int64_t first, int64_t n,
                                              int dtype, void* y, void* stream) {
  using namespace trirun;
  using namespace trirun::gemm_prefill;
  if (w == nullptr || w->words == nullptr || w->scales == nullptr || y == nullptr ||
      reinterpret_cast<uintptr_t>(w->words) % 16 || reinterpret_cast<uintptr_t>(y) % 4)
    return TRIRUN_BAD_POINTER;
  const int64_t g = w->group_size;
  if (w->n <= 0 || w->n % 64 || w->k <= 0 || w->k % 128 || experts < 1 || first < 0 || first % 64 || n < 1 || n % 64 ||
      first + n > w->n || n / 64 * experts > 65535)
    return TRIRUN_BAD_SHAPE;
  if ((g != -1 && g != 32 && g != 64 && g != 128) || (dtype != TRIRUN_F16 && dtype != TRIRUN_BF16))
    return TRIRUN_UNSUPPORTED;
  DenseArguments a = {*w, n * experts, w->k, w->k, y};
  a.tiles = n / 64, a.first_tile = first / 64;
  a.expert_tiles = w->n / 64, a.expert_groups = w->n * (g == -1 ? 1 : w->k / g);
  const dim3 grid(unsigned((w->k / 64 + 3) / 4), unsigned(a.tiles * experts));
  const auto kernel = dtype == TRIRUN_F16 ? dequantize<__half> : dequantize<__nv_bfloat16>;
  return launch_kernel(kernel, {grid, 32 * 4, 0, static_cast<cudaStream_t>(stream), false}, a);
}
