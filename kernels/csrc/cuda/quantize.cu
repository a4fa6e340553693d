// x to the digits of activations.cuh by a kernel of its own, once per layer input and however many CTAs read it.
#include "activations.cuh"
#include "kernels.cuh"

namespace trirun {
namespace {

struct QuantizeArgs {
  const void* x;
  int64_t k, ldx;
  int m, dtype;
  bool paired;
  uint8_t* digits;
  float2* scales;
  float4* sums;
  int tokens, columns, units;
  unsigned* counters;  // to be zeroed
  int count;
};

__device__ __forceinline__ void clear_counters(const QuantizeArgs& a) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < a.count; i += gridDim.x * blockDim.x) a.counters[i] = 0;
}

__device__ __forceinline__ void store_unit(const QuantizeArgs& a, const QuantizedUnit& q, int token, int unit,
                                           int digits) {
  const int lane = threadIdx.x % 32;
  uint8_t* block =
      a.digits + (static_cast<int64_t>(unit * 8 + lane / 4) * a.columns + token * digits) * 16 + lane % 4 * 4;
  *reinterpret_cast<uint32_t*>(block) = q.digit[0];
  if (digits == 2) *reinterpret_cast<uint32_t*>(block + 16) = q.digit[1];
  const int64_t row = static_cast<int64_t>(unit) * a.tokens + token;
  const float sum128 = q.sum128(), sum32 = q.sum32();
  if (lane == 0) a.scales[row] = make_float2(q.scale, sum128);
  if (lane % 8 == 0) reinterpret_cast<float*>(a.sums + row)[lane / 8] = sum32;
}

// One warp per (token, 128 k).
__global__ void __launch_bounds__(128) quantize16(const __grid_constant__ QuantizeArgs a) {
  dependency_launch();
  const int id = blockIdx.x * 4 + threadIdx.x / 32, unit = id / a.tokens, token = id % a.tokens;
  dependency_wait();
  clear_counters(a);
  if (unit >= a.units) return;
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (token < a.m) {
    const int64_t bytes = a.dtype == TRIRUN_F32 ? 4 : 2;
    v = load_unit(static_cast<const char*>(a.x) + token * a.ldx * bytes, static_cast<int64_t>(unit) * UNIT, a.k,
                  a.dtype, a.paired);
  }
  store_unit(a, quantize_unit16(v), token, unit, 2);
}

// One CTA per token: the scale is the row's. The first units of every warp stay in registers between the two passes.
__global__ void __launch_bounds__(512) quantize8(const __grid_constant__ QuantizeArgs a) {
  constexpr int HELD = 4;
  __shared__ uint32_t amax[16];
  dependency_launch();
  const int token = blockIdx.x, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const char* row = static_cast<const char*>(a.x) + token * a.ldx * (a.dtype == TRIRUN_F32 ? 4 : 2);
  const auto load = [&](int unit) {
    if (token >= a.m || unit >= a.units) return make_float4(0.f, 0.f, 0.f, 0.f);
    return load_unit(row, static_cast<int64_t>(unit) * UNIT, a.k, a.dtype, a.paired);
  };
  dependency_wait();
  clear_counters(a);
  uint32_t bits = 0;
  float4 held[HELD];
#pragma unroll
  for (int i = 0; i < HELD; i++) {
    held[i] = load(warp + i * warps);
    bits = max(bits, magnitude_bits(held[i]));
  }
  for (int unit = warp + HELD * warps; unit < a.units; unit += warps) bits = max(bits, magnitude_bits(load(unit)));
  bits = __reduce_max_sync(~0u, bits);
  if (threadIdx.x % 32 == 0) amax[warp] = bits;
  __syncthreads();
  for (int i = 0; i < warps; i++) bits = max(bits, amax[i]);
  const float scale = act8_scale(bits);
#pragma unroll
  for (int i = 0; i < HELD; i++)
    if (warp + i * warps < a.units) store_unit(a, quantize_unit8(held[i], scale), token, warp + i * warps, 1);
  for (int unit = warp + HELD * warps; unit < a.units; unit += warps)
    store_unit(a, quantize_unit8(load(unit), scale), token, unit, 1);
}

}  // namespace

size_t activation_bytes(int64_t m, int64_t k_pad, int act_bits) { return ActivationLayout(m, k_pad, act_bits).bytes; }

int launch_quantize(const Problem& p, void* activations, unsigned* counters, int count) {
  const ActivationLayout layout(p.m, p.w.k, p.act_bits);
  auto* base = static_cast<uint8_t*>(activations);
  const int element = p.dtype == TRIRUN_F32 ? 4 : 2;
  QuantizeArgs a{p.x,
                 p.k,
                 p.ldx,
                 static_cast<int>(p.m),
                 p.dtype,
                 p.ldx % 2 == 0 && reinterpret_cast<uintptr_t>(p.x) % (2 * element) == 0,
                 base,
                 reinterpret_cast<float2*>(base + layout.scales_offset),
                 reinterpret_cast<float4*>(base + layout.sums_offset),
                 layout.tokens,
                 layout.columns,
                 static_cast<int>(layout.units),
                 counters,
                 count};
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.stream = p.stream;
  config.attrs = &attribute;
  config.numAttrs = p.arch >= 90 ? 1 : 0;
  if (p.act_bits == TRIRUN_ACT16) {
    config.gridDim = dim3(static_cast<unsigned>((layout.units * layout.tokens + 3) / 4));
    config.blockDim = dim3(128);
    return cudaLaunchKernelEx(&config, quantize16, a);
  }
  config.gridDim = dim3(static_cast<unsigned>(layout.tokens));
  config.blockDim = dim3(512);
  return cudaLaunchKernelEx(&config, quantize8, a);
}

}  // namespace trirun
