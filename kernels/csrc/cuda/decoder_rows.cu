// What a decoder does to whole rows between its matrix products, in one pass each: a row's source (residual plus the
// last product, an embedding, act(gate) * up, or plain values), an optional RMS norm, and the result as 16-bit values,
// as the digits that int2_gemm_quantized reads, or as both.
//
// A warp owns units of 128 columns, in the lane order of activations.cuh, and keeps its values in registers from the
// first load to the last store.
#include "decoder_digits.cuh"
#include "decoder_launch.cuh"

namespace trirun {
namespace {

constexpr int MAX_WARPS = 32;

struct RowsArgs {
  trirun_rows r;
  DigitRows quantized;
  int tokens, units;
};

__device__ __forceinline__ float activate(float gate, int activation) {
  if (activation == TRIRUN_RELU2) {
    const float positive = fmaxf(gate, 0.f);
    return positive * positive;
  }
  return gate / (1.f + __expf(-gate));
}

template <int SOURCE>
__device__ __forceinline__ float4 load_source(const trirun_rows& r, int row, int token, int column) {
  const auto four = [&](const void* p, int64_t at) {
    const float2 a = load_pair(p, at, r.dtype), b = load_pair(p, at + 8, r.dtype);
    return make_float4(a.x, a.y, b.x, b.y);
  };
  if constexpr (SOURCE == TRIRUN_ROWS_PLAIN) {
    return four(r.x, row * r.ldx + column);
  } else if constexpr (SOURCE == TRIRUN_ROWS_GATE) {
    const float4 gate = four(r.x, row * r.ldx + column), up = four(r.up, row * r.ldx + column);
    return make_float4(activate(gate.x, r.activation) * up.x, activate(gate.y, r.activation) * up.y,
                       activate(gate.z, r.activation) * up.z, activate(gate.w, r.activation) * up.w);
  } else {
    float* at = r.residual + static_cast<int64_t>(row) * r.n + column;
    float4 v;
    if constexpr (SOURCE == TRIRUN_ROWS_EMBED) {
      v = four(r.x, static_cast<int64_t>(token) * r.ldx + column);
    } else {
      const float2 a = *reinterpret_cast<const float2*>(at), b = *reinterpret_cast<const float2*>(at + 8);
      v = make_float4(a.x, a.y, b.x, b.y);
      if (r.x != nullptr) {
        const float4 d = four(r.x, row * r.ldx + column);
        v = make_float4(v.x + d.x, v.y + d.y, v.z + d.z, v.w + d.w);
      }
    }
    *reinterpret_cast<float2*>(at) = make_float2(v.x, v.y);
    *reinterpret_cast<float2*>(at + 8) = make_float2(v.z, v.w);
    return v;
  }
}

template <int SOURCE, int PER_WARP>
__global__ void __launch_bounds__(MAX_WARPS * 32) rows(const __grid_constant__ RowsArgs a) {
  __shared__ float squares[MAX_WARPS];
  __shared__ uint32_t magnitudes[MAX_WARPS];
  const trirun_rows& r = a.r;
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int unit0 = blockIdx.y * warps * PER_WARP + warp;
  const int lane_column = (lane >> 2) * 16 + lane % 4 * 2;
  const auto norm_weight = [&](int i) {
    const int column = (unit0 + i * warps) * UNIT + lane_column;
    if (column >= r.n) return make_float4(0.f, 0.f, 0.f, 0.f);
    const float2 p = __ldg(reinterpret_cast<const float2*>(r.norm + column));
    const float2 q = __ldg(reinterpret_cast<const float2*>(r.norm + column + 8));
    return make_float4(p.x, p.y, q.x, q.y);
  };
  // Weights are fetched while the previous kernel still runs, unless registers are short.
  constexpr bool EARLY = PER_WARP <= 2;
  float4 weight[EARLY ? PER_WARP : 1];
  if (EARLY && r.norm != nullptr) {
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) weight[EARLY ? i : 0] = norm_weight(i);
  }
  dependency_launch();
  dependency_wait();

  int token = 0;
  if (SOURCE == TRIRUN_ROWS_EMBED && row < r.m) {
    // A row without a token of its own goes on with the one its slot sampled last; one without a slot is padding.
    token = r.tokens[row];
    const int slot = r.slots != nullptr ? r.slots[row] : 0;
    if (token < 0 && slot >= 0 && r.latest != nullptr) token = r.latest[slot];
    if (token < 0 || token >= r.vocab) token = 0;
  }
  float4 v[PER_WARP];
#pragma unroll
  for (int i = 0; i < PER_WARP; i++) {
    const int column = (unit0 + i * warps) * UNIT + lane_column;
    v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row < r.m && column < r.n) v[i] = load_source<SOURCE>(r, row, token, column);
  }
  if (r.norm != nullptr) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++)
      sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    sum = warp_sum(sum);
    if (lane == 0) squares[warp] = sum;
    __syncthreads();
    const float inverse = rsqrtf(warp_sum(lane < warps ? squares[lane] : 0.f) / r.n + r.eps);
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
      const float4 w = EARLY ? weight[EARLY ? i : 0] : norm_weight(i);
      v[i] = make_float4(v[i].x * inverse * w.x, v[i].y * inverse * w.y,  //
                         v[i].z * inverse * w.z, v[i].w * inverse * w.w);
    }
  }
  if (r.y != nullptr && row < r.m) {
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
      const int column = (unit0 + i * warps) * UNIT + lane_column;
      if (column >= r.n) continue;
      uint32_t words[2];
      if (r.dtype == TRIRUN_BF16) {
        words[0] = narrow<true>(v[i].x) | static_cast<uint32_t>(narrow<true>(v[i].y)) << 16;
        words[1] = narrow<true>(v[i].z) | static_cast<uint32_t>(narrow<true>(v[i].w)) << 16;
      } else {
        words[0] = narrow<false>(v[i].x) | static_cast<uint32_t>(narrow<false>(v[i].y)) << 16;
        words[1] = narrow<false>(v[i].z) | static_cast<uint32_t>(narrow<false>(v[i].w)) << 16;
      }
      uint16_t* to = static_cast<uint16_t*>(r.y) + row * r.ldy + column;
      *reinterpret_cast<uint32_t*>(to) = words[0];
      *reinterpret_cast<uint32_t*>(to + 8) = words[1];
    }
  }
  if (a.quantized.digits == nullptr) return;
  const bool two = r.act_bits == TRIRUN_ACT16;
  float scale = 0.f;
  if (!two) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) bits = max(bits, magnitude_bits(v[i]));
    bits = __reduce_max_sync(~0u, bits);
    if (lane == 0) magnitudes[warp] = bits;
    __syncthreads();
    scale = act8_scale(__reduce_max_sync(~0u, lane < warps ? magnitudes[lane] : 0));
  }
#pragma unroll
  for (int i = 0; i < PER_WARP; i++) {
    const int unit = unit0 + i * warps;
    if (unit >= a.units) continue;
    const QuantizedUnit q = two ? quantize_unit16(v[i]) : quantize_unit8(v[i], scale);
    a.quantized.store(q, row, unit, two);
  }
}

using Kernel = void (*)(RowsArgs);

// no-spill: rows<*, 1>
// no-spill: rows<*, 2>
// no-spill: rows<*, 4>
template <int SOURCE>
Kernel instance(int per_warp) {
  if (per_warp <= 1) return rows<SOURCE, 1>;
  if (per_warp <= 2) return rows<SOURCE, 2>;
  if (per_warp <= 4) return rows<SOURCE, 4>;
  return per_warp <= 8 ? rows<SOURCE, 8> : nullptr;
}

}  // namespace
}  // namespace trirun

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int trirun_cuda_rows(const trirun_rows* r, void* stream) {
  using namespace trirun;
  if (r == nullptr) return TRIRUN_BAD_POINTER;
  if (r->m == 0) return TRIRUN_OK;
  if (r->m < 0 || r->n <= 0 || r->n % 16 || r->n > (1 << 20) || r->ldx % 2 || r->ldy % 2) return TRIRUN_BAD_SHAPE;
  if (!half_dtype(r->dtype) || r->source < TRIRUN_ROWS_RESIDUAL || r->source > TRIRUN_ROWS_PLAIN)
    return TRIRUN_UNSUPPORTED;
  const bool residual = r->source == TRIRUN_ROWS_RESIDUAL || r->source == TRIRUN_ROWS_EMBED;
  if ((residual && r->residual == nullptr) || (r->source != TRIRUN_ROWS_RESIDUAL && r->x == nullptr) ||
      (r->source == TRIRUN_ROWS_GATE && r->up == nullptr) ||
      (r->source == TRIRUN_ROWS_EMBED && (r->tokens == nullptr || r->vocab <= 0)))
    return TRIRUN_BAD_POINTER;
  if (!aligned_to(r->residual, 8) || !aligned_to(r->x, 4) || !aligned_to(r->up, 4) || !aligned_to(r->norm, 8) ||
      !aligned_to(r->y, 4) || !aligned_to(r->activations, 256))
    return TRIRUN_BAD_POINTER;
  RowsArgs a{};
  a.r = *r;
  a.units = static_cast<int>((r->n + UNIT - 1) / UNIT);
  a.tokens = static_cast<int>(r->m);
  if (r->activations != nullptr) {
    if (r->act_bits != TRIRUN_ACT8 && r->act_bits != TRIRUN_ACT16) return TRIRUN_UNSUPPORTED;
    const int64_t k_pad = static_cast<int64_t>(a.units) * UNIT;
    if (r->m > 128 || r->activation_bytes < ActivationLayout(r->m, k_pad, r->act_bits).bytes)
      return TRIRUN_NO_WORKSPACE;
    a.quantized = DigitRows(r->activations, r->m, k_pad, r->act_bits);
    a.tokens = a.quantized.tokens;
  }
  // Where a row has no common norm or scale its units go to as many CTAs as there are; else one CTA owns the row.
  const bool whole = r->norm != nullptr || (r->activations != nullptr && r->act_bits == TRIRUN_ACT8);
  const int most = whole ? MAX_WARPS : 4, warps = a.units < most ? a.units : most;
  const int per_warp = whole ? (a.units + warps - 1) / warps : 1;
  Kernel kernel = nullptr;
  switch (r->source) {
    case TRIRUN_ROWS_RESIDUAL: kernel = instance<TRIRUN_ROWS_RESIDUAL>(per_warp); break;
    case TRIRUN_ROWS_EMBED: kernel = instance<TRIRUN_ROWS_EMBED>(per_warp); break;
    case TRIRUN_ROWS_GATE: kernel = instance<TRIRUN_ROWS_GATE>(per_warp); break;
    default: kernel = instance<TRIRUN_ROWS_PLAIN>(per_warp); break;
  }
  if (kernel == nullptr) return TRIRUN_UNSUPPORTED;
  const int parts = whole ? 1 : (a.units + warps - 1) / warps;
  const dim3 grid(static_cast<unsigned>(a.tokens), static_cast<unsigned>(parts));
  return launch_dependent(kernel, a, grid, warps * 32, 0, stream);
}
