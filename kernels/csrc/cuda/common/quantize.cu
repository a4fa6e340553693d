// x to the quantized form of activations.cuh by a kernel of its own: once per layer input, however many CTAs and
// weights read it. For any rows up to 128, on every architecture; it takes as long as a launch, so what counts is to be
// there early: its CTAs wait beside those of the kernel before it.
#include "activations.cuh"
#include "cuda/kernels.cuh"

namespace trirun {
namespace {

struct QuantizeArgs {
  const void* x;
  int64_t k, ldx;
  int m, dtype;
  bool paired, vectors;  // x can be read two elements, 16 bytes at a time
  uint8_t* limbs;
  float2* scales;
  float4* sums;
  int tokens, columns, k_tiles, span;
  unsigned* counters;  // to be zeroed
  int count;
};

__device__ __forceinline__ void clear_counters(const QuantizeArgs& a) {
  // By the first row of CTAs.
  if (blockIdx.y == 0)
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += gridDim.x * blockDim.x) a.counters[i] = 0;
}

__device__ __forceinline__ void store_k_tile(const QuantizeArgs& a, const QuantizedKTile& q, int token, int k_tile,
                                             int limbs) {
  const int lane = threadIdx.x % 32;
  uint8_t* block =
      a.limbs + (static_cast<int64_t>(k_tile * 8 + lane / 4) * a.columns + token * limbs) * 16 + lane % 4 * 4;
  *reinterpret_cast<uint32_t*>(block) = q.limb[0];
  if (limbs == 2) *reinterpret_cast<uint32_t*>(block + 16) = q.limb[1];
  const int64_t row = static_cast<int64_t>(k_tile) * a.tokens + token;
  const float sum128 = q.sum128(), sum32 = q.sum32();
  if (lane == 0) a.scales[row] = make_float2(q.scale, sum128);
  if (lane % 8 == 0) reinterpret_cast<float*>(a.sums + row)[lane / 8] = sum32;
}

// One warp per (token, 128 k), four in a row for a span. Few registers: a CTA fits beside one of the per-group kernel,
// and waits there for what is before it.
__global__ void __launch_bounds__(256, 6) quantize16(const __grid_constant__ QuantizeArgs a) {
  __shared__ __align__(16) uint32_t amax[2 * SPAN_K_TILES];
  dependency_launch();
  const int warp = threadIdx.x / 32, id = blockIdx.x * 2 + warp / SPAN_K_TILES, token = id % a.tokens;
  const int k_tile = id / a.tokens * SPAN_K_TILES + warp % SPAN_K_TILES;
  dependency_wait();
  clear_counters(a);
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (token < a.m && k_tile < a.k_tiles) {
    const int64_t bytes = a.dtype == TRIRUN_F32 ? 4 : 2;
    v = load_k_tile(static_cast<const char*>(a.x) + token * a.ldx * bytes, static_cast<int64_t>(k_tile) * K_TILE, a.k,
                    a.dtype, a.paired);
  }
  uint32_t bits = __reduce_max_sync(~0u, magnitude_bits(v));
  if (a.span > 1) {
    amax[warp] = bits;
    __syncthreads();
    const uint4 span = reinterpret_cast<const uint4*>(amax)[warp / SPAN_K_TILES];
    bits = max(max(span.x, span.y), max(span.z, span.w));
  }
  if (k_tile < a.k_tiles) store_k_tile(a, quantize_k_tile16(v, bits), token, k_tile, 2);
}

// The bits of the largest magnitude among this thread's part of a row, whose columns the CTA reads 16 bytes at a time.
__device__ __forceinline__ uint32_t row_magnitude(const QuantizeArgs& a, const uint4* row) {
  const bool wide = a.dtype == TRIRUN_F32;
  const int count = static_cast<int>(a.k * (wide ? 4 : 2) / 16);
  uint32_t most = 0;
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const uint4 v = __ldcg(row + i);
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (uint32_t word : words) most = larger_bits(most, word, wide);
  }
  return largest_bits(most, a.dtype == TRIRUN_F32, a.dtype == TRIRUN_BF16);
}

// A CTA per token and 16 k tiles, one for each warp: the scale is the row's, and every CTA of a token finds it for
// itself, since the row is small and in L2.
__global__ void __launch_bounds__(512) quantize8(const __grid_constant__ QuantizeArgs a) {
  __shared__ uint32_t amax[16];
  dependency_launch();
  const int token = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, k_tile = blockIdx.y * 16 + warp;
  const char* row = static_cast<const char*>(a.x) + token * a.ldx * (a.dtype == TRIRUN_F32 ? 4 : 2);
  const auto load = [&](int u) {
    if (token >= a.m || u >= a.k_tiles) return make_float4(0.f, 0.f, 0.f, 0.f);
    return load_k_tile(row, static_cast<int64_t>(u) * K_TILE, a.k, a.dtype, a.paired);
  };
  dependency_wait();
  clear_counters(a);
  const float4 v = load(k_tile);
  uint32_t bits = 0;
  if (!a.vectors)
    for (int u = warp; u < a.k_tiles; u += 16) bits = max(bits, magnitude_bits(load(u)));
  else if (token < a.m)
    bits = row_magnitude(a, reinterpret_cast<const uint4*>(row));
  bits = __reduce_max_sync(~0u, bits);
  if (lane == 0) amax[warp] = bits;
  __syncthreads();
  bits = __reduce_max_sync(~0u, amax[lane % 16]);
  if (k_tile < a.k_tiles) store_k_tile(a, quantize_k_tile8(v, act8_scale(bits)), token, k_tile, 1);
}

}  // namespace

size_t activation_bytes(int64_t m, int64_t k_pad, int act_bits) { return ActivationLayout(m, k_pad, act_bits).bytes; }

int launch_quantize(const Problem& p, void* activations, int span, unsigned* counters, int count) {
  const ActivationLayout layout(p.m, p.w.k, p.act_bits);
  auto* base = static_cast<uint8_t*>(activations);
  const int element = p.dtype == TRIRUN_F32 ? 4 : 2;
  QuantizeArgs a{p.x,
                 p.k,
                 p.ldx,
                 static_cast<int>(p.m),
                 p.dtype,
                 p.ldx % 2 == 0 && reinterpret_cast<uintptr_t>(p.x) % (2 * element) == 0,
                 p.ldx * element % 16 == 0 && p.k * element % 16 == 0 && reinterpret_cast<uintptr_t>(p.x) % 16 == 0,
                 base,
                 reinterpret_cast<float2*>(base + layout.scales_offset),
                 reinterpret_cast<float4*>(base + layout.sums_offset),
                 layout.tokens,
                 layout.columns,
                 static_cast<int>(layout.k_tiles),
                 span,
                 counters,
                 count};
  const bool dependent = p.arch >= 90;
  if (p.act_bits == TRIRUN_ACT16) {
    const dim3 grid(
        static_cast<unsigned>(((layout.k_tiles + SPAN_K_TILES - 1) / SPAN_K_TILES * layout.tokens + 1) / 2));
    return launch_kernel(quantize16, {grid, 2 * SPAN_K_TILES * 32, 0, p.stream, dependent}, a);
  }
  const dim3 grid(static_cast<unsigned>(layout.tokens), static_cast<unsigned>((layout.k_tiles + 15) / 16));
  return launch_kernel(quantize8, {grid, 512, 0, p.stream, dependent}, a);
}

}  // namespace trirun
