// Prompts and the cache: appending their keys and values, and reading slots back as the 16-bit tensors that flash
// attention of sequences of different lengths takes.
#include "int8.cuh"

namespace trirun::decoder {
namespace {

constexpr int WARPS = 8;

struct AppendArgs {
  trirun_attention t;
  uint16_t* rotated_keys;  // or null
};

// Cached values of one row: all threads of a CTA.
__device__ __forceinline__ void append_values(const trirun_attention& t, int row, int page, int position) {
  const auto* v = static_cast<const uint16_t*>(t.v) + row * t.ld_kv;
  for (int i = threadIdx.x; i < t.kv_heads * t.head_dim / 8; i += WARPS * 32) {
    const int head = i * 8 / t.head_dim, d = i * 8 % t.head_dim;
    auto* to = static_cast<uint16_t*>(t.values) + cache_offset(page, t.kv_heads, head, position, t.head_dim) + d;
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(v + head * t.head_dim + d);
  }
}

// The same of values that have a norm: a warp has a head.
template <bool BF16, int PER_LANE>
__device__ __forceinline__ void append_normed_values(const trirun_attention& t, int row, int page, int position) {
  const auto* v = static_cast<const uint16_t*>(t.v) + row * t.ld_kv;
  for (int head = threadIdx.x / 32; head < t.kv_heads; head += WARPS) {
    float value[PER_LANE];
    load_head<BF16>(value, v + head * t.head_dim, t.head_dim);
    norm_value(value, t.v_norm, t.head_dim, t.eps);
    auto* to = static_cast<uint16_t*>(t.values) + cache_offset(page, t.kv_heads, head, position, t.head_dim);
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
      if (const int d = threadIdx.x % 32 + j * 32; d < t.head_dim) to[d] = narrow<BF16>(value[j]);
  }
}

// Norms and rotates every head of a row and writes its keys and values to the cache: what `attend` does for itself, for
// rows of prompts, a CTA each. Its warps take the heads in turn. Without keys it does so for queries alone.
template <bool BF16, bool INT8, int LANES>
__global__ void __launch_bounds__(WARPS * 32) append(const __grid_constant__ AppendArgs a) {
  __shared__ __align__(16) float values[WARPS][LANES * 8];
  const trirun_attention& t = a.t;
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, head_dim = t.head_dim;
  // No early launch of what follows: `attend` reads the cache ahead of its wait.
  dependency_wait();
  const int slot = t.slots[row], position = t.positions[row];
  if (slot < 0) return;
  const int page = t.block_tables[static_cast<int64_t>(slot) * t.ld_blocks + position / PAGE];
  const float* cosines = t.cosines + static_cast<int64_t>(position) * t.rotary_half;
  const float* sines = t.sines + static_cast<int64_t>(position) * t.rotary_half;
  HeadConstants<LANES / 4> query_constants, key_constants;
  query_constants.load(cosines, sines, t.q_norm, t.rotary_half, head_dim, t.interleaved);
  key_constants.load(cosines, sines, t.k_norm, t.rotary_half, head_dim, t.interleaved);
  float* mine = values[warp];
  const auto* q = static_cast<const uint16_t*>(t.q) + row * t.ld_q;
  const auto* k = static_cast<const uint16_t*>(t.k) + row * t.ld_kv;
  const auto* v = static_cast<const uint16_t*>(t.v) + row * t.ld_kv;
  const auto store = [&](uint16_t* to) {
    for (int d = lane; d < head_dim; d += 32) to[d] = narrow<BF16>(mine[d]);
  };
  for (int head = warp; head < t.heads; head += WARPS) {
    prepare_head<BF16>(mine, q + head * head_dim, query_constants, head_dim, t.q_norm != nullptr, t.eps, t.rotary_half,
                       t.interleaved, 1.f);
    if constexpr (INT8) mix_head<LANES / 4>(mine, head_dim);
    store(static_cast<uint16_t*>(t.y) + row * t.ld_y + head * head_dim);
  }
  if (t.k == nullptr) return;
  for (int head = warp; head < t.kv_heads; head += WARPS) {
    prepare_head<BF16>(mine, k + head * head_dim, key_constants, head_dim, t.k_norm != nullptr, t.eps, t.rotary_half,
                       t.interleaved, 1.f);
    if constexpr (INT8) {
      constexpr int WORDS = LANES == 32 ? 2 : 1;
      mix_head<LANES / 4>(mine, head_dim);
      const auto token = quantize_token<BF16, WORDS>(mine, v + head * head_dim, head_dim, t.v_norm, t.eps);
      store_token(t, token, page, head, position);
      __syncwarp();
    } else {
      store(static_cast<uint16_t*>(t.keys) + cache_offset(page, t.kv_heads, head, position, head_dim));
      if (a.rotated_keys != nullptr) store(a.rotated_keys + row * t.ld_kv + head * head_dim);
    }
  }
  if constexpr (!INT8) {
    if (t.v_norm != nullptr)
      append_normed_values<BF16, LANES / 4>(t, row, page, position);
    else
      append_values(t, row, page, position);
  }
}

// The same, for a 16-bit cache and heads without norms that are rotated whole: eight pairs of dimensions a thread, 16
// bytes at a time.
template <bool BF16, int HALF>
__global__ void __launch_bounds__(WARPS * 32) append_pairs(const __grid_constant__ AppendArgs a) {
  constexpr int LANES = HALF / 8, HEADS = WARPS * 32 / LANES;  // threads of a head, heads at a time
  const trirun_attention& t = a.t;
  const int row = blockIdx.x, d = threadIdx.x % LANES * 8;
  dependency_wait();
  const int slot = t.slots[row], position = t.positions[row];
  if (slot < 0) return;
  const int page = t.block_tables[static_cast<int64_t>(slot) * t.ld_blocks + position / PAGE];
  float cosine[8], sine[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    cosine[i] = __ldg(t.cosines + static_cast<int64_t>(position) * HALF + d + i);
    sine[i] = __ldg(t.sines + static_cast<int64_t>(position) * HALF + d + i);
  }
  const auto turn = [&](const uint16_t* from, uint16_t* to, uint16_t* also) {
    const uint4 low = *reinterpret_cast<const uint4*>(from + d);
    const uint4 high = *reinterpret_cast<const uint4*>(from + HALF + d);
    const uint32_t low_words[4] = {low.x, low.y, low.z, low.w}, high_words[4] = {high.x, high.y, high.z, high.w};
    uint32_t first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 x = widen_pair<BF16>(low_words[i]), y = widen_pair<BF16>(high_words[i]);
      const float2 c = make_float2(cosine[2 * i], cosine[2 * i + 1]), s = make_float2(sine[2 * i], sine[2 * i + 1]);
      first[i] = narrow_pair<BF16>(rotated(x.x, c.x, y.x, -s.x), rotated(x.y, c.y, y.y, -s.y));
      second[i] = narrow_pair<BF16>(rotated(y.x, c.x, x.x, s.x), rotated(y.y, c.y, x.y, s.y));
    }
    const auto put = [&](uint16_t* target) {
      *reinterpret_cast<uint4*>(target + d) = make_uint4(first[0], first[1], first[2], first[3]);
      *reinterpret_cast<uint4*>(target + HALF + d) = make_uint4(second[0], second[1], second[2], second[3]);
    };
    put(to);
    if (also != nullptr) put(also);
  };
  const int head0 = threadIdx.x / LANES;
  for (int head = head0; head < t.heads; head += HEADS)
    turn(static_cast<const uint16_t*>(t.q) + row * t.ld_q + head * 2 * HALF,
         static_cast<uint16_t*>(t.y) + row * t.ld_y + head * 2 * HALF, nullptr);
  if (t.k == nullptr) return;
  for (int head = head0; head < t.kv_heads; head += HEADS)
    turn(static_cast<const uint16_t*>(t.k) + row * t.ld_kv + head * 2 * HALF,
         static_cast<uint16_t*>(t.keys) + cache_offset(page, t.kv_heads, head, position, 2 * HALF),
         a.rotated_keys == nullptr ? nullptr : a.rotated_keys + row * t.ld_kv + head * 2 * HALF);
  append_values(t, row, page, position);
}

// Null where `append` does it.
template <bool BF16>
void (*append_pairs_for(const trirun_attention& t))(AppendArgs) {
  if (2 * t.rotary_half != t.head_dim || t.q_norm != nullptr || t.k_norm != nullptr || t.v_norm != nullptr ||
      t.scales != nullptr || t.interleaved || t.ld_q % 8 || t.ld_y % 8 || !aligned_to(t.y, 16))
    return nullptr;
  switch (t.rotary_half) {
    case 32: return append_pairs<BF16, 32>;
    case 64: return append_pairs<BF16, 64>;
    case 128: return append_pairs<BF16, 128>;
    default: return nullptr;
  }
}

template <bool BF16, bool INT8>
void (*append_for(int head_dim))(AppendArgs) {
  if constexpr (!INT8)
    if (head_dim > 256) return append<BF16, INT8, 64>;
  if (head_dim <= 64) return append<BF16, INT8, 8>;
  return head_dim <= 128 ? append<BF16, INT8, 16> : append<BF16, INT8, 32>;
}

// A CTA per page of a slot, key head, and keys or values.
template <bool BF16, bool INT8>
__global__ void __launch_bounds__(WARPS * 32) gather(const __grid_constant__ trirun_gather g) {
  dependency_wait();
  const bool values = blockIdx.z % 2;
  const int head = blockIdx.z / 2, first = blockIdx.x * PAGE, start = g.starts[blockIdx.y];
  const int count = min(PAGE, g.starts[blockIdx.y + 1] - start - first);
  if (count <= 0) return;
  const int bytes = INT8 ? int8_row_bytes(g.head_dim) : 2 * g.head_dim, parts = g.head_dim / 8;
  const int block = blockIdx.x + (g.pages != nullptr ? g.pages[blockIdx.y] : 0);
  const int page = g.block_tables[g.slots[blockIdx.y] * g.ld_blocks + block];
  const int64_t from = cache_offset(page, g.kv_heads, head, 0, 1), row = g.kv_heads * g.head_dim;
  const auto* codes = static_cast<const uint8_t*>(values ? g.values : g.keys) + from * bytes;
  const auto* scales = static_cast<const __half2*>(g.scales) + from;
  auto* to = static_cast<uint16_t*>(values ? g.values_out : g.keys_out) + (start + first) * row + head * g.head_dim;
  for (int i = threadIdx.x; i < count * parts; i += WARPS * 32) {
    const int position = i / parts, d = i % parts * 8;
    uint4 eight;
    if constexpr (INT8) {
      const uint2 read = *reinterpret_cast<const uint2*>(codes + position * bytes + d);
      const float2 both = __half22float2(scales[position]);
      const float scale = values ? both.y : both.x;
      uint32_t out[4];
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const uint32_t word = (j < 2 ? read.x : read.y) >> j % 2 * 16;
        const float low = static_cast<int8_t>(word) * scale, high = static_cast<int8_t>(word >> 8) * scale;
        out[j] = narrow<BF16>(low) | static_cast<uint32_t>(narrow<BF16>(high)) << 16;
      }
      eight = make_uint4(out[0], out[1], out[2], out[3]);
    } else {
      eight = *reinterpret_cast<const uint4*>(codes + position * bytes + d * 2);
    }
    *reinterpret_cast<uint4*>(to + position * row + d) = eight;
  }
}

}  // namespace
}  // namespace trirun::decoder

extern "C" int trirun_cuda_attention_append(const trirun_attention* t, void* rotated_keys, void* stream) {
  using namespace trirun;
  using namespace trirun::decoder;
  if (const int code = check_attention(t)) return code;
  if (t->m == 0) return TRIRUN_OK;
  if (t->y == nullptr || !aligned_to(rotated_keys, 16) || (t->k == nullptr && rotated_keys != nullptr))
    return TRIRUN_BAD_POINTER;
  const bool bf16 = t->dtype == TRIRUN_BF16, int8 = t->scales != nullptr;
  if (int8 && rotated_keys != nullptr) return TRIRUN_UNSUPPORTED;
  auto kernel = bf16 ? append_pairs_for<true>(*t) : append_pairs_for<false>(*t);
  if (kernel == nullptr)
    kernel = bf16 ? (int8 ? append_for<true, true>(t->head_dim) : append_for<true, false>(t->head_dim))
                  : (int8 ? append_for<false, true>(t->head_dim) : append_for<false, false>(t->head_dim));
  const AppendArgs args{*t, static_cast<uint16_t*>(rotated_keys)};
  return launch_dependent(kernel, args, dim3(static_cast<unsigned>(t->m)), WARPS * 32, 0, stream);
}

extern "C" int trirun_cuda_attention_gather(const trirun_gather* g, void* stream) {
  using namespace trirun;
  using namespace trirun::decoder;
  if (g == nullptr) return TRIRUN_BAD_POINTER;
  if (g->count < 0 || g->count > 65535 || g->longest < 0 || g->longest > g->ld_blocks * PAGE || g->kv_heads <= 0 ||
      g->kv_heads > 32767 || g->head_dim <= 0 || g->head_dim % 8 || g->head_dim > MAX_HEAD_DIM)
    return TRIRUN_BAD_SHAPE;
  if (!half_dtype(g->dtype)) return TRIRUN_UNSUPPORTED;
  for (const void* p :
       {g->keys, g->values, static_cast<const void*>(g->keys_out), static_cast<const void*>(g->values_out)})
    if (p == nullptr || !aligned_to(p, 16)) return TRIRUN_BAD_POINTER;
  if (!aligned_to(g->scales, 4) || g->block_tables == nullptr || g->slots == nullptr || g->starts == nullptr)
    return TRIRUN_BAD_POINTER;
  if (g->count == 0 || g->longest == 0) return TRIRUN_OK;
  const dim3 grid(static_cast<unsigned>((g->longest + PAGE - 1) / PAGE), static_cast<unsigned>(g->count),
                  static_cast<unsigned>(2 * g->kv_heads));
  const auto kernel = g->scales == nullptr      ? gather<false, false>
                      : g->dtype == TRIRUN_BF16 ? gather<true, true>
                                                : gather<false, true>;
  return launch_dependent(kernel, *g, grid, WARPS * 32, 0, stream);
}
