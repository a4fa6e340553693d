// Warps that finish units: they add up what the cluster's warps left, apply scales, norms and the activation, keep the
// residual stream, and send what comes of it. All that they need besides is asked for before the sums are there.
//
// Lane 8 half + 2 t + p, p of 0 and 1, ends with rows 32 half + 16 p + {2t, 2t+1, 2t+8, 2t+9} of a unit, which is word
// 8 half + 4 p + t of 16, in the order in which activations.cuh quantizes. The upper sixteen lanes have other parts of
// the same sums, or, of pairs of n tiles, the second.
#pragma once

#include "cta.cuh"

namespace trirun::step {

__device__ __forceinline__ float4 load_rows(const float* from) {
  const float2 a = load_constant2(from), b = load_constant2(from + 8);
  return make_float4(a.x, a.y, b.x, b.y);
}

__device__ __forceinline__ float4 operator*(float4 a, float4 b) {
  return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ float4 from_other_half(float4 v) {
  const auto other = [](float f) { return __shfl_xor_sync(~0u, f, 16); };
  return make_float4(other(v.x), other(v.y), other(v.z), other(v.w));
}

template <int LIMBS, bool GROUPS>
struct Finisher {
  Cta& c;
  // Parity of the next sums of every unit of either buffer, in bits.
  uint32_t sums = 0;

  __device__ __forceinline__ explicit Finisher(Cta& c) : c(c) {}

  __device__ __forceinline__ int half() const { return c.lane() / 16; }  // of the lanes
  __device__ __forceinline__ int word() const { return (c.lane() & 8) + (c.lane() & 1) * 4 + (c.lane() >> 1 & 3); }
  __device__ __forceinline__ int row_in_unit() const {
    return (c.lane() & 8) * 4 + (c.lane() & 1) * 16 + (c.lane() & 6);
  }

  // Tasks are pairs of a unit and a row, the same warp's in all products.
  __device__ __forceinline__ int first_task() const { return c.warp() - WARPS; }
  __device__ __forceinline__ int unit_of(const Geometry& g, int local) const {
    return g.first + (local << c.a.cluster_log) + c.rank();
  }
  __device__ __forceinline__ float4& residual(int task) const {
    return c.at<float4>(c.a.at.residual)[task * 16 + c.lane() % 16];
  }

  // What the headers of a row come to; all lanes get it.
  struct Row {
    float squares, largest;
  };
  __device__ __forceinline__ Row headers(const float4* from, int count, uint32_t tag) const {
    constexpr int AT_ONCE = 4;
    const int lane = c.lane();
    Row row{0.f, 0.f};
    uint32_t largest = 0;
#pragma unroll 1
    for (int base = lane; base < count + lane; base += AT_ONCE * 32) {
      Word words[AT_ONCE];
      const float4* at[AT_ONCE];
      uint32_t wanted = 0;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        at[i] = from + base + i * 32, wanted |= (base + i * 32 < count) << i;
        words[i] = {0, 0, 0, 0};
      }
      receive(words, at, wanted, tag, c.patience());
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const float4 v = words[i].values();
        row.squares += v.x;
        largest = max(largest, __float_as_uint(v.y));  // as bits, so that a NaN is the largest
      }
    }
    row.squares = decoder::warp_sum(row.squares);
    row.largest = __uint_as_float(__reduce_max_sync(~0u, largest));
    return row;
  }
  __device__ __forceinline__ float factor_of(float squares, int k) const {
    return rsqrtf(__fdividef(squares, k) + c.a.s.eps);
  }

  // Of two limbs: what sums of rows are multiplied by, that of row i in lane i. Of one, whose values are multiplied
  // before they are quantized, those and the scales go to shared memory, to the warps that quantize.
  __device__ __forceinline__ float factors(const Geometry& g, int product, const Input& in, int buffer,
                                           uint32_t tag) const {
    const int k = g.all_k_tiles * K_TILE, lane = c.lane();
    const auto of_row = [&](int row) {
      // Attention has a header for every split that a row has.
      const int count = product == O ? static_cast<int>(c.a.s.kv_heads) * c.splits()[row] : in.header_stride;
      return headers(in.headers + row * in.header_stride, count, tag);
    };
    float own = 1.f;
    if constexpr (LIMBS == 2) {
      if (!in.normed || first_task() >= g.local << c.a.tokens_log) return own;
#pragma unroll 1
      for (int row = 0; row < c.rows(); row++) {
        const float factor = factor_of(of_row(row).squares, k);
        if (lane == row) own = factor;
      }
    } else {
#pragma unroll 1
      for (int row = first_task(); row < c.rows(); row += FINISHERS) {
        const Row r = of_row(row);
        const float factor = in.normed ? factor_of(r.squares, k) : 1.f;
        float* to = c.factors(buffer) + row;
        if (lane == 0) to[0] = factor, to[MAX_ROWS] = act8_scale(__float_as_uint(r.largest * factor));
      }
      __syncwarp();
      if (lane == 0 && first_task() < c.rows()) barrier_arrive(c.factor_barrier(buffer));
    }
    return own;
  }

  __device__ __forceinline__ float4 bias_of(const void* bias, int row) const {
    if (bias == nullptr) return make_float4(0.f, 0.f, 0.f, 0.f);
    const int dtype = c.a.s.dtype;
    return make_float4(load_element(bias, row, dtype), load_element(bias, row + 1, dtype),
                       load_element(bias, row + 8, dtype), load_element(bias, row + 9, dtype));
  }

  // Scales of output channels lie in the order of fragments: [n tile][row % 8][row / 8].
  __device__ __forceinline__ static uint2 weights_of(const trirun_int2& weight, int row) {
    if constexpr (GROUPS) return make_uint2(0, 0);
    const auto* from = weight.scales + row / 64 * 64 + row % 8 * 8 + row % 64 / 8;
    return make_uint2(load_constant(from), load_constant(from + 8));
  }

  __device__ __forceinline__ static float4 weighted(float4 v, uint2 weights) {
    if constexpr (GROUPS) return v;
    const float2 a = decoder::widen_pair<false>(weights.x), b = decoder::widen_pair<false>(weights.y);
    return v * make_float4(a.x, b.x, a.y, b.y);
  }

  // from: shared address of this lane's first slot; step: bytes to the next.
  __device__ __forceinline__ static float4 added(uint32_t from, int count, int step) {
    float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
#pragma unroll 1
    for (; count >= 4; count -= 4, from += 4 * step) {
      const float4 v0 = load_shared_float4(from), v1 = load_shared_float4(from + step);
      const float4 v2 = load_shared_float4(from + 2 * step), v3 = load_shared_float4(from + 3 * step);
      a = a + (v0 + v1), b = b + (v2 + v3);
    }
#pragma unroll 1
    for (; count > 0; count--, from += step) a = a + load_shared_float4(from);
    return a + b;
  }

  // Neighbouring lanes have rows 8h + g of two row blocks each, and take one.
  __device__ __forceinline__ float4 exchanged(float4 v) const {
    const bool odd = c.lane() & 1;
    const float low = __shfl_xor_sync(~0u, odd ? v.x : v.z, 1), high = __shfl_xor_sync(~0u, odd ? v.y : v.w, 1);
    return odd ? make_float4(low, v.z, high, v.w) : make_float4(v.x, low, v.y, high);
  }

  // 64 values of a row to whoever takes them. raw: as the norm sees them; sent: times its weights.
  __device__ __forceinline__ void send_unit(float4* words, float4* header, float4 raw, float4 sent, uint32_t tag,
                                            bool real = true) const {
    if (half() == 0 && real) send(words + word(), sent, tag);
    float squares = raw.x * raw.x + raw.y * raw.y + raw.z * raw.z + raw.w * raw.w;
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) squares += __shfl_xor_sync(~0u, squares, offset);
    const uint32_t largest = LIMBS == 1 ? __reduce_max_sync(~0u, magnitude_bits(sent)) : 0;
    if (c.lane() == 0 && real) send(header, make_float4(squares, __uint_as_float(largest), 0.f, 0.f), tag);
  }

  __device__ __forceinline__ void run(int index, int product, uint32_t tag, uint32_t next) {
    c.begin_phase();
    const Geometry& g = c.geometry(product);
    const trirun_cuda_step& s = c.a.s;
    const trirun_cuda_step_layer& layer = c.layer(index);
    const int lane = c.lane(), half = this->half(), rows_log = c.a.tokens_log, rows = c.rows(), buffer = product & 1;
    const bool pairs = product == GATE_UP;
    const int parts = c.cluster() << g.parts_log, units = pairs ? g.n_tiles / 2 : g.n_tiles;
    const trirun_int2& weight = (&layer.qkv)[product];
    const void* bias = (&layer.qkv_bias)[product];
    const float* norm = nullptr;
    float4 *words = c.a.qkv, *to_headers = nullptr;
    const uint32_t in_tag = tag;
    if (pairs) {
      norm = layer.mlp_sub_norm, words = c.a.gated, to_headers = c.a.gated_headers;
    } else if (product == O) {
      norm = layer.mlp_norm, words = c.a.x_mlp, to_headers = c.a.x_mlp_headers;
    } else if (product == DOWN) {
      norm = index + 1 < s.layer_count ? c.layer(index + 1).attention_norm : s.final_norm;
      words = c.a.x_attention, to_headers = c.a.x_attention_headers, tag = next;
    }
    const uint32_t step = 256 << rows_log, tile_bytes = parts * step;
    const uint32_t slots = c.shared + c.a.at.slots + buffer * c.a.at.slot_buffer + lane % 16 * 16;
    bool known = false;
    float of_rows = 1.f;
#pragma unroll 1
    for (int task = first_task(); task < g.local << rows_log; task += FINISHERS) {
      const int local = task >> rows_log, row = task & (rows - 1), unit = unit_of(g, local);
      const int n = unit * N_TILE + row_in_unit(), own_n = pairs ? n + half * units * N_TILE : n;
      const uint2 weights = weights_of(weight, own_n);
      const float4 biases = bias_of(bias, own_n);
      const float4 norms = norm == nullptr ? make_float4(1.f, 1.f, 1.f, 1.f) : load_rows(norm + n);
      const uint32_t barrier = c.sums_barrier(buffer, local);
      if (row == 0 && lane == 0) barrier_expect(barrier, pairs ? 2 * tile_bytes : tile_bytes);
      if (!known) of_rows = factors(g, product, input_of(c.a, layer, product), buffer, in_tag), known = true;
      const float factor = __shfl_sync(~0u, of_rows, row);
      const uint32_t from = slots + (pairs ? 2 * local + half : local) * tile_bytes + row * 256;
      // Twice, the first time for nothing but the instructions, which are there then when the sums come.
#pragma unroll 1
      for (int real = 0; real < 2; real++) {
        if (real) barrier_wait(barrier, sums >> (buffer * MAX_LOCAL + local) & 1);
        float4 v = pairs ? added(from, parts, step) : added(from + half * step, (parts + 1 - half) / 2, 2 * step);
        if (!pairs) v = v + from_other_half(v);
        float4 raw = weighted(scaled(exchanged(v), factor), weights) + biases;
        if (pairs) {
          const auto active = [&](float f) { return decoder::activate<false>(f, s.activation); };
          const float4 up = from_other_half(raw);
          raw = make_float4(active(raw.x), active(raw.y), active(raw.z), active(raw.w)) * up;
        }
        const int at = row * units + unit;
        if (product == QKV) {
          if (half == 0 && real) send(words + at * 16 + word(), raw, tag);
          continue;
        }
        if (!pairs) {
          raw = raw + residual(task);
          __syncwarp();
          if (half == 0 && real) residual(task) = raw;
        }
        send_unit(words + at * 16, to_headers + at, raw, raw * norms, tag, real);
      }
    }
    if (LIMBS == 1 && !known) factors(g, product, input_of(c.a, layer, product), buffer, in_tag);
    sums ^= ((1 << g.local) - 1) << buffer * MAX_LOCAL;
  }

  // The residual stream of this CTA's units, and the first layer's input.
  __device__ __forceinline__ void begin(uint32_t tag) const {
    const trirun_cuda_step& s = c.a.s;
    const Geometry& g = c.geometry(O);
    const int rows_log = c.a.tokens_log;
#pragma unroll 1
    for (int task = first_task(); task < g.local << rows_log; task += FINISHERS) {
      const int row = task & (c.rows() - 1), unit = unit_of(g, task >> rows_log), n = unit * N_TILE + row_in_unit();
      const float4 v = load_rows(s.residual + row * s.hidden + n);
      if (half() == 0) residual(task) = v;
      const int at = row * g.n_tiles + unit;
      send_unit(c.a.x_attention + at * 16, c.a.x_attention_headers + at, v,
                v * load_rows(c.layer(0).attention_norm + n), tag);
    }
  }

  // The final norm of this CTA's units.
  __device__ __forceinline__ void end(uint32_t tag) const {
    const trirun_cuda_step& s = c.a.s;
    const Geometry& g = c.geometry(O);
    const int rows_log = c.a.tokens_log, hidden = static_cast<int>(s.hidden);
#pragma unroll 1
    for (int task = first_task(); task < g.local << rows_log; task += FINISHERS) {
      const int row = task & (c.rows() - 1), unit = unit_of(g, task >> rows_log), n = unit * N_TILE + row_in_unit();
      const float squares = headers(c.a.x_attention_headers + row * g.n_tiles, g.n_tiles, tag).squares;
      const float4 y = scaled(residual(task), factor_of(squares, hidden)) * load_rows(s.final_norm + n);
      if (half() == 1) continue;
      const bool failed = *reinterpret_cast<volatile uint32_t*>(c.a.status) != 0;
      const auto put = [&](int row_of, float value) {
        store_element(s.y, row * s.hidden + n + row_of, failed ? NAN : value, s.dtype);
      };
      put(0, y.x), put(1, y.y), put(8, y.z), put(9, y.w);
    }
  }
};

}  // namespace trirun::step
