// What a decoder does to whole rows between its matrix products, in one pass each: a row's source (residual plus the
// last product or its norm, an embedding, act(gate) * up, or plain values), an optional norm, and the result as 16-bit
// values, as the limbs that int2_gemm_quantized reads, or as both.
//
// A warp owns k tiles of 128, in the lane order of activations.cuh, and keeps its values in registers from the
// first load to the last store. Rows of prompts, which nobody wants as limbs, are read and written 16 bytes at a time.
#include "embedding.cuh"
#include "limbs.cuh"
#include "launch.cuh"

namespace trirun::decoder {
namespace {

constexpr int MAX_WARPS = 32;

// Sources beyond those of trirun.h, and never one of them: an embedding that is packed, a residual and experts' sum.
constexpr int EMBED_PACKED = -1, RESIDUAL_MIXED = -2;

struct RowsArgs {
  trirun_rows r;
  trirun_int2 packed;
  trirun_combine mixed;
  LimbRows quantized;
  int tokens, k_tiles;
};

// Where some of a row's experts' outputs are, and what they weigh: asked for together, as then what is there.
struct Places {
  static constexpr int BATCH = 8;
  int place[BATCH];
  float weight[BATCH];

  __device__ __forceinline__ void load(const trirun_combine& c, int row, int first) {
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      const bool there = first + j < c.top_k;
      place[j] = there ? __ldcg(c.places + row * c.top_k + first + j) : -1;
      weight[j] = there ? __ldcg(c.weights + row * c.top_k + first + j) : 0.f;
    }
  }
};

// What a lane needs of the weighted sum of a row's experts' outputs, in order of rank, and of the shared expert's.
// first: the row's first places.
__device__ __forceinline__ float4 load_mixed(const trirun_combine& c, const Places& first, int row, int column) {
  constexpr int BATCH = Places::BATCH;
  float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
  const auto load = [&](const void* from, int64_t at) {
    const auto* words = reinterpret_cast<const unsigned*>(static_cast<const uint16_t*>(from) + at);
    return make_uint2(__ldcg(words), __ldcg(words + 4));
  };
  const auto add = [&](uint2 words, float weight) {
    const float4 v = widen(words, c.dtype == TRIRUN_BF16);
    sum = make_float4(fmaf(weight, v.x, sum.x), fmaf(weight, v.y, sum.y),  //
                      fmaf(weight, v.z, sum.z), fmaf(weight, v.w, sum.w));
  };
  Places p = first;
  for (int j0 = 0; j0 < c.top_k; j0 += BATCH) {
    if (j0 > 0) p.load(c, row, j0);
    uint2 words[BATCH];
#pragma unroll
    for (int j = 0; j < BATCH; j++) {
      words[j] = make_uint2(0, 0);
      if (p.place[j] >= 0) words[j] = load(c.x, p.place[j] * c.ldx + column);
    }
#pragma unroll
    for (int j = 0; j < BATCH; j++)
      if (p.place[j] >= 0) add(words[j], p.weight[j]);
  }
  if (c.shared != nullptr)
    add(load(c.shared, row * c.ld_shared + column), c.shared_weights != nullptr ? __ldcg(c.shared_weights + row) : 1.f);
  return sum;
}

template <int SOURCE>
__device__ __forceinline__ float4 load_source(const RowsArgs& a, const Places& places, int row, int token, int column) {
  const trirun_rows& r = a.r;
  const auto four = [&](const void* p, int64_t at) {
    const float2 a = load_pair(p, at, r.dtype), b = load_pair(p, at + 8, r.dtype);
    return make_float4(a.x, a.y, b.x, b.y);
  };
  if constexpr (SOURCE == TRIRUN_ROWS_PLAIN || SOURCE == TRIRUN_ROWS_POST) {
    return four(r.x, row * r.ldx + column);
  } else if constexpr (SOURCE == TRIRUN_ROWS_GATE) {
    const float4 gate = four(r.x, row * r.ldx + column);
    const float4 up = r.up != nullptr ? four(r.up, row * r.ldx + column) : make_float4(1.f, 1.f, 1.f, 1.f);
    return make_float4(activate<true>(gate.x, r.activation) * up.x, activate<true>(gate.y, r.activation) * up.y,
                       activate<true>(gate.z, r.activation) * up.z, activate<true>(gate.w, r.activation) * up.w);
  } else {
    float* at = r.residual + static_cast<int64_t>(row) * r.n + column;
    float4 v;
    if constexpr (SOURCE == EMBED_PACKED || SOURCE == TRIRUN_ROWS_EMBED) {
      if constexpr (SOURCE == EMBED_PACKED)
        v = load_packed(a.packed, token, column);
      else
        v = four(r.x, static_cast<int64_t>(token) * r.ldx + column);
      v = make_float4(v.x * r.scale, v.y * r.scale, v.z * r.scale, v.w * r.scale);
    } else {
      const float2 low = *reinterpret_cast<const float2*>(at), high = *reinterpret_cast<const float2*>(at + 8);
      v = make_float4(low.x, low.y, high.x, high.y);
      if (SOURCE == RESIDUAL_MIXED || r.x != nullptr) {
        float4 d;
        if constexpr (SOURCE == RESIDUAL_MIXED)
          d = load_mixed(a.mixed, places, row, column);
        else
          d = four(r.x, row * r.ldx + column);
        v = make_float4(fmaf(d.x, r.scale, v.x) * r.output_scale, fmaf(d.y, r.scale, v.y) * r.output_scale,
                        fmaf(d.z, r.scale, v.z) * r.output_scale, fmaf(d.w, r.scale, v.w) * r.output_scale);
      }
    }
    *reinterpret_cast<float2*>(at) = make_float2(v.x, v.y);
    *reinterpret_cast<float2*>(at + 8) = make_float2(v.z, v.w);
    return v;
  }
}

template <int SOURCE, int PER_WARP>
__global__ void __launch_bounds__(MAX_WARPS * 32, SOURCE == RESIDUAL_MIXED ? 1 : 0)
    rows(const __grid_constant__ RowsArgs a) {
  __shared__ float sums[3][MAX_WARPS];
  __shared__ uint32_t magnitudes[MAX_WARPS];
  const trirun_rows& r = a.r;
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int k_tile0 = blockIdx.y * warps * PER_WARP + warp;
  const int lane_column = (lane >> 2) * 16 + lane % 4 * 2;
  const auto four_of = [&](const float* vector, int i) {
    const int column = (k_tile0 + i * warps) * K_TILE + lane_column;
    if (column >= r.n) return make_float4(0.f, 0.f, 0.f, 0.f);
    const float2 p = __ldg(reinterpret_cast<const float2*>(vector + column));
    const float2 q = __ldg(reinterpret_cast<const float2*>(vector + column + 8));
    return make_float4(p.x, p.y, q.x, q.y);
  };
  // A CTA's sum; `of`: which of the sums, since a warp may be at the next one already.
  const auto row_sum = [&](int of, float sum) {
    sum = warp_sum(sum);
    if (lane == 0) sums[of][warp] = sum;
    __syncthreads();
    return warp_sum(lane < warps ? sums[of][lane] : 0.f);
  };
  // Weights are fetched while the previous kernel still runs, unless registers are short.
  constexpr bool EARLY = PER_WARP <= 2;
  float4 weight[EARLY ? PER_WARP : 1];
  if (EARLY && r.norm != nullptr) {
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) weight[EARLY ? i : 0] = four_of(r.norm, i);
  }
  // The experts' kernel lets others begin once what came before it is over, routing among it.
  Places places;
  constexpr bool MIXES = SOURCE == RESIDUAL_MIXED;
  const bool routed = MIXES && r.m == 1;
  if (routed) places.load(a.mixed, 0, 0);
  dependency_launch();
  dependency_wait();
  if (MIXES && !routed && row < r.m) places.load(a.mixed, row, 0);

  constexpr bool EMBEDS = SOURCE == TRIRUN_ROWS_EMBED || SOURCE == EMBED_PACKED;
  const bool embeds = EMBEDS && row < r.m;
  const int slot = embeds && r.slots != nullptr ? r.slots[row] : 0;
  const int token = embeds ? token_of(r.tokens[row], slot, r.latest, r.vocab) : 0;
  float4 v[PER_WARP];
#pragma unroll
  for (int i = 0; i < PER_WARP; i++) {
    const int column = (k_tile0 + i * warps) * K_TILE + lane_column;
    v[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (row < r.m && column < r.n) v[i] = load_source<SOURCE>(a, places, row, token, column);
  }
  const auto squares = [&] {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) sum += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z + v[i].w * v[i].w;
    return sum;
  };
  if constexpr (SOURCE == TRIRUN_ROWS_POST) {
    const float inverse = rsqrtf(row_sum(0, squares()) / r.n + r.eps) * r.scale;
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
      const int column = (k_tile0 + i * warps) * K_TILE + lane_column;
      if (row >= r.m || column >= r.n) continue;
      const float4 w = four_of(r.post_norm, i);
      float* at = r.residual + static_cast<int64_t>(row) * r.n + column;
      float2 p = *reinterpret_cast<const float2*>(at), q = *reinterpret_cast<const float2*>(at + 8);
      p = make_float2(fmaf(v[i].x * inverse, w.x, p.x), fmaf(v[i].y * inverse, w.y, p.y));
      q = make_float2(fmaf(v[i].z * inverse, w.z, q.x), fmaf(v[i].w * inverse, w.w, q.y));
      p = make_float2(p.x * r.output_scale, p.y * r.output_scale);
      q = make_float2(q.x * r.output_scale, q.y * r.output_scale);
      *reinterpret_cast<float2*>(at) = p;
      *reinterpret_cast<float2*>(at + 8) = q;
      v[i] = make_float4(p.x, p.y, q.x, q.y);
    }
  }
  if (r.norm != nullptr) {
    if (r.centered) {
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < PER_WARP; i++) sum += v[i].x + v[i].y + v[i].z + v[i].w;
      const float mean = row_sum(1, sum) / r.n;
#pragma unroll
      for (int i = 0; i < PER_WARP; i++)
        if ((k_tile0 + i * warps) * K_TILE + lane_column < r.n)
          v[i] = make_float4(v[i].x - mean, v[i].y - mean, v[i].z - mean, v[i].w - mean);
    }
    const float inverse = rsqrtf(row_sum(2, squares()) / r.n + r.eps);
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
      const float4 w = EARLY ? weight[EARLY ? i : 0] : four_of(r.norm, i);
      v[i] = make_float4(v[i].x * inverse * w.x, v[i].y * inverse * w.y,  //
                         v[i].z * inverse * w.z, v[i].w * inverse * w.w);
    }
    if (r.norm_bias != nullptr) {
#pragma unroll
      for (int i = 0; i < PER_WARP; i++) {
        const float4 bias = four_of(r.norm_bias, i);
        v[i] = make_float4(v[i].x + bias.x, v[i].y + bias.y, v[i].z + bias.z, v[i].w + bias.w);
      }
    }
  }
  if (r.y != nullptr && row < r.m) {
#pragma unroll
    for (int i = 0; i < PER_WARP; i++) {
      const int column = (k_tile0 + i * warps) * K_TILE + lane_column;
      if (column >= r.n) continue;
      uint32_t words[2];
      if (r.dtype == TRIRUN_BF16)
        words[0] = narrow_pair<true>(v[i].x, v[i].y), words[1] = narrow_pair<true>(v[i].z, v[i].w);
      else
        words[0] = narrow_pair<false>(v[i].x, v[i].y), words[1] = narrow_pair<false>(v[i].z, v[i].w);
      uint16_t* to = static_cast<uint16_t*>(r.y) + row * r.ldy + column;
      *reinterpret_cast<uint32_t*>(to) = words[0];
      *reinterpret_cast<uint32_t*>(to + 8) = words[1];
    }
  }
  if (a.quantized.limbs == nullptr) return;
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
    const int k_tile = k_tile0 + i * warps;
    if (k_tile >= a.k_tiles) continue;
    const QuantizedKTile q = two ? quantize_k_tile16(v[i]) : quantize_k_tile8(v[i], scale);
    a.quantized.store(q, row, k_tile, two);
  }
}

constexpr int PROMPT_THREADS = 256;
constexpr int PROMPT_ROWS = 64;  // from so many rows on bytes count, not the way from load to store

// Eight columns of what `load_source` loads.
template <int SOURCE, bool BF16>
__device__ __forceinline__ void load_eight(float (&v)[8], const trirun_rows& r, int64_t row, int column) {
  const auto widen = [](float (&to)[8], const void* p, int64_t at) {
    const uint4 w = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(p) + at);
    widen_eight<BF16>(to, w);
  };
  if constexpr (SOURCE == TRIRUN_ROWS_GATE) {
    float up[8] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
    widen(v, r.x, row * r.ldx + column);
    if (r.up != nullptr) widen(up, r.up, row * r.ldx + column);
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = activate<true>(v[i], r.activation) * up[i];
  } else {
    auto* at = reinterpret_cast<float4*>(r.residual + row * r.n + column);
    float x[8] = {};
    const float4 low = at[0], high = at[1];
    if (r.x != nullptr) widen(x, r.x, row * r.ldx + column);
    v[0] = fmaf(x[0], r.scale, low.x), v[1] = fmaf(x[1], r.scale, low.y);
    v[2] = fmaf(x[2], r.scale, low.z), v[3] = fmaf(x[3], r.scale, low.w);
    v[4] = fmaf(x[4], r.scale, high.x), v[5] = fmaf(x[5], r.scale, high.y);
    v[6] = fmaf(x[6], r.scale, high.z), v[7] = fmaf(x[7], r.scale, high.w);
    if (r.x != nullptr)
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] *= r.output_scale;
    at[0] = make_float4(v[0], v[1], v[2], v[3]), at[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}

// As `rows`, for what every layer does: 16-bit values alone, of two sources, pointers and strides of whole 16 bytes.
template <int SOURCE, bool BF16, int EIGHTS>
__global__ void __launch_bounds__(PROMPT_THREADS) prompt_rows(const __grid_constant__ trirun_rows r) {
  __shared__ float squares[PROMPT_THREADS / 32];
  const int row = blockIdx.x, first = (blockIdx.y * PROMPT_THREADS * EIGHTS + threadIdx.x) * 8;
  const auto column_of = [&](int i) { return first + i * PROMPT_THREADS * 8; };
  dependency_launch();
  dependency_wait();
  float v[EIGHTS][8];
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
#pragma unroll
    for (int e = 0; e < 8; e++) v[i][e] = 0.f;
    if (column_of(i) < r.n) load_eight<SOURCE, BF16>(v[i], r, row, column_of(i));
  }
  if (r.norm != nullptr) {
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++)
#pragma unroll
      for (int e = 0; e < 8; e++) sum += v[i][e] * v[i][e];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int w = 0; w < PROMPT_THREADS / 32; w++) sum += squares[w];
    const float inverse = rsqrtf(sum / r.n + r.eps);
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
      if (column_of(i) >= r.n) continue;
      const auto* norm = reinterpret_cast<const float4*>(r.norm + column_of(i));
      const float4 low = __ldg(norm), high = __ldg(norm + 1);
      const float weight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int e = 0; e < 8; e++) v[i][e] *= inverse * weight[e];
    }
  }
#pragma unroll
  for (int i = 0; i < EIGHTS; i++) {
    if (column_of(i) >= r.n) continue;
    uint32_t words[4];
#pragma unroll
    for (int e = 0; e < 4; e++) words[e] = narrow_pair<BF16>(v[i][2 * e], v[i][2 * e + 1]);
    auto* to = static_cast<uint16_t*>(r.y) + row * r.ldy + column_of(i);
    *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

using PromptKernel = void (*)(trirun_rows);

// no-spill: prompt_rows<*, *, *>
template <int SOURCE, bool BF16>
PromptKernel prompt_instance(int64_t eights) {
  if (eights <= 2 * PROMPT_THREADS) return prompt_rows<SOURCE, BF16, 2>;
  if (eights <= 4 * PROMPT_THREADS) return prompt_rows<SOURCE, BF16, 4>;
  return eights <= 8 * PROMPT_THREADS ? prompt_rows<SOURCE, BF16, 8> : nullptr;
}

template <int SOURCE>
PromptKernel prompt_instance(int64_t eights, int dtype) {
  return dtype == TRIRUN_BF16 ? prompt_instance<SOURCE, true>(eights) : prompt_instance<SOURCE, false>(eights);
}

// The kernel for rows of prompts, and how many CTAs share a row; null where `rows` does it.
PromptKernel prompt_kernel(const trirun_rows& r, unsigned& parts) {
  if (r.m < PROMPT_ROWS || r.activations != nullptr || r.y == nullptr || r.n % 8 || r.ldx % 8 || r.ldy % 8 ||
      (r.norm != nullptr && (r.centered || r.norm_bias != nullptr)))
    return nullptr;
  for (const void* p : {r.x, r.up, static_cast<const void*>(r.residual), static_cast<const void*>(r.norm),
                        static_cast<const void*>(r.y)})
    if (!aligned_to(p, 16)) return nullptr;
  const int64_t eights = r.n / 8, each = r.norm != nullptr ? eights : PROMPT_THREADS * 2;
  parts = static_cast<unsigned>((eights + each - 1) / each);
  if (r.source == TRIRUN_ROWS_RESIDUAL) return prompt_instance<TRIRUN_ROWS_RESIDUAL>(each, r.dtype);
  return r.source == TRIRUN_ROWS_GATE ? prompt_instance<TRIRUN_ROWS_GATE>(each, r.dtype) : nullptr;
}

using Kernel = void (*)(RowsArgs);

// no-spill: rows<*, 1>
// no-spill: rows<*, 2>
// no-spill: rows<*, 4>
template <int SOURCE>
Kernel instance(int per_warp) {
  if (per_warp <= 1) return rows<SOURCE, 1>;
  if constexpr (SOURCE != RESIDUAL_MIXED) {
    if (per_warp <= 2) return rows<SOURCE, 2>;
    if (per_warp <= 4) return rows<SOURCE, 4>;
    if (per_warp <= 8) return rows<SOURCE, 8>;
  }
  return nullptr;
}

}  // namespace

int check_rows(const trirun_rows& r) {
  if (r.m < 0 || r.n <= 0 || r.n % 16 || r.n > (1 << 20) || r.ldx % 2 || r.ldy % 2) return TRIRUN_BAD_SHAPE;
  if (!half_dtype(r.dtype) || r.source < TRIRUN_ROWS_RESIDUAL || r.source > TRIRUN_ROWS_POST) return TRIRUN_UNSUPPORTED;
  const bool post = r.source == TRIRUN_ROWS_POST;
  const bool residual = post || r.source == TRIRUN_ROWS_RESIDUAL || r.source == TRIRUN_ROWS_EMBED;
  const bool packed = r.source == TRIRUN_ROWS_EMBED && r.packed != nullptr;
  if (packed) {
    const trirun_int2& w = *r.packed;
    if (w.words == nullptr || w.scales == nullptr || !aligned_to(w.words, 4) || !aligned_to(w.scales, 2))
      return TRIRUN_BAD_POINTER;
    if (w.n % 64 || w.k % 128 || r.n > w.k || r.vocab > w.n) return TRIRUN_BAD_SHAPE;
    if (w.group_size != -1 && w.group_size != 32 && w.group_size != 64 && w.group_size != 128)
      return TRIRUN_UNSUPPORTED;
  }
  if (r.mixed != nullptr) {
    const trirun_combine& c = *r.mixed;
    if (r.source != TRIRUN_ROWS_RESIDUAL || c.m != r.m || c.n != r.n || c.ldx % 2 || c.ld_shared % 2 || c.top_k < 1)
      return TRIRUN_BAD_SHAPE;
    if (!half_dtype(c.dtype) || c.norm != nullptr || c.shared_norm != nullptr) return TRIRUN_UNSUPPORTED;
    if (c.x == nullptr || c.places == nullptr || c.weights == nullptr || !aligned_to(c.x, 4) ||
        !aligned_to(c.shared, 4))
      return TRIRUN_BAD_POINTER;
  }
  if ((residual && r.residual == nullptr) || (r.source != TRIRUN_ROWS_RESIDUAL && r.x == nullptr && !packed) ||
      (post && r.post_norm == nullptr) || (r.source == TRIRUN_ROWS_EMBED && (r.tokens == nullptr || r.vocab <= 0)))
    return TRIRUN_BAD_POINTER;
  if (!aligned_to(r.residual, 8) || !aligned_to(r.x, 4) || !aligned_to(r.up, 4) || !aligned_to(r.norm, 8) ||
      !aligned_to(r.norm_bias, 8) || !aligned_to(r.post_norm, 8) || !aligned_to(r.y, 4) ||
      !aligned_to(r.activations, 256))
    return TRIRUN_BAD_POINTER;
  if (r.activations != nullptr) {
    if (r.act_bits != TRIRUN_ACT8 && r.act_bits != TRIRUN_ACT16) return TRIRUN_UNSUPPORTED;
    const int64_t k_pad = (r.n + K_TILE - 1) / K_TILE * K_TILE;
    if (r.m > 128 || r.activation_bytes < ActivationLayout(r.m, k_pad, r.act_bits).bytes) return TRIRUN_NO_WORKSPACE;
  }
  return TRIRUN_OK;
}

}  // namespace trirun::decoder

extern "C" int trirun_cuda_rows(const trirun_rows* r, void* stream) {
  using namespace trirun;
  using namespace trirun::decoder;
  if (r == nullptr) return TRIRUN_BAD_POINTER;
  if (r->m == 0) return TRIRUN_OK;
  if (const int code = check_rows(*r)) return code;
  const bool post = r->source == TRIRUN_ROWS_POST, packed = r->source == TRIRUN_ROWS_EMBED && r->packed != nullptr;
  unsigned shared_by = 1;
  if (const PromptKernel kernel = r->mixed == nullptr ? prompt_kernel(*r, shared_by) : nullptr)
    return launch_dependent(kernel, *r, dim3(static_cast<unsigned>(r->m), shared_by), PROMPT_THREADS, 0, stream);
  RowsArgs a{};
  a.r = *r;
  if (packed) a.packed = *r->packed;
  if (r->mixed != nullptr) a.mixed = *r->mixed;
  a.k_tiles = static_cast<int>((r->n + K_TILE - 1) / K_TILE);
  a.tokens = static_cast<int>(r->m);
  if (r->activations != nullptr) {
    a.quantized = LimbRows(r->activations, r->m, static_cast<int64_t>(a.k_tiles) * K_TILE, r->act_bits);
    a.tokens = a.quantized.tokens;
  }
  // Where a row has no common norm or scale its k tiles go to as many CTAs as there are; else one CTA owns the row.
  const bool whole = post || r->norm != nullptr || (r->activations != nullptr && r->act_bits == TRIRUN_ACT8);
  const int most = whole ? MAX_WARPS : 4, warps = a.k_tiles < most ? a.k_tiles : most;
  const int per_warp = whole ? (a.k_tiles + warps - 1) / warps : 1;
  Kernel kernel = nullptr;
  switch (r->source) {
    case TRIRUN_ROWS_RESIDUAL:
      kernel = r->mixed ? instance<RESIDUAL_MIXED>(per_warp) : instance<TRIRUN_ROWS_RESIDUAL>(per_warp);
      break;
    case TRIRUN_ROWS_EMBED:
      kernel = packed ? instance<EMBED_PACKED>(per_warp) : instance<TRIRUN_ROWS_EMBED>(per_warp);
      break;
    case TRIRUN_ROWS_GATE: kernel = instance<TRIRUN_ROWS_GATE>(per_warp); break;
    case TRIRUN_ROWS_POST: kernel = instance<TRIRUN_ROWS_POST>(per_warp); break;
    default: kernel = instance<TRIRUN_ROWS_PLAIN>(per_warp); break;
  }
  if (kernel == nullptr) return TRIRUN_UNSUPPORTED;
  const int parts = whole ? 1 : (a.k_tiles + warps - 1) / warps;
  const dim3 grid(static_cast<unsigned>(a.tokens), static_cast<unsigned>(parts));
  return launch_dependent(kernel, a, grid, warps * 32, 0, stream);
}
