// Warps that finish units: they add up what the cluster's warps left, apply scales, norms and the activation, keep the
// residual stream, and send what comes of it. All that they need besides is asked for before the sums are there.
//
// Lane 16 h + 2 r + p, p of 0 and 1, ends with row 32 h + 16 p + r of a unit and the 8th after it: half of a word.
// It adds up two sums side by side: halves of one, of a pair of n tiles both, or those of two rows.
#pragma once

#include "cta.cuh"

namespace trirun::step {

// Of a lane's two rows.
__device__ __forceinline__ float2 load_rows(const float* from) {
  return make_float2(__uint_as_float(load_constant(from)), __uint_as_float(load_constant(from + 8)));
}

__device__ __forceinline__ float2 operator*(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }
__device__ __forceinline__ float2 operator+(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }

template <int LIMBS, bool GROUPS, int BLOCKS, typename Cta>
struct Finisher {
  Cta& c;
  uint32_t sums = 0;  // parity of the next sums of every unit of either buffer, in bits

  __device__ __forceinline__ explicit Finisher(Cta& c) : c(c) {}

  __device__ __forceinline__ uint32_t row_in_unit() const {
    return (c.lane_number & 16) * 2 + (c.lane_number & 1) * 16 + (c.lane_number >> 1 & 7);
  }
  // Of the unit's words.
  __device__ __forceinline__ uint32_t half_word() const {
    return (c.lane_number & 16) + (c.lane_number & 1) * 8 + (c.lane_number >> 1 & 6) + (c.lane_number >> 1 & 1);
  }

  // Tasks are pairs of a unit and a row, the same warp's in all products.
  __device__ __forceinline__ int first_task() const { return c.warp() - WARPS; }
  __device__ __forceinline__ int unit_of(const Geometry& g, int local) const {
    return g.first + (local << c.cluster_log()) + c.rank();
  }
  __device__ __forceinline__ float2& residual(int task) const {
    return c.template at<float2>(c.a.at.residual)[task * 32 + c.lane()];
  }

  static constexpr int WARP_LOG = 5;  // of its lanes

  // What the headers of a row come to. 2^lanes_log neighbouring lanes have the same row: from and count are theirs.
  struct Row {
    float squares, largest;
  };
  __device__ __forceinline__ Row headers(const float4* from, int count, int lanes_log, uint32_t tag) const {
    constexpr int AT_ONCE = 4;
    const int lanes = 1 << lanes_log, lane = c.lane() & (lanes - 1);
    const int most = __reduce_max_sync(~0u, count);
    Row row{0.f, 0.f};
    uint32_t largest = 0;
#pragma unroll 1
    for (int first = 0; first < most; first += AT_ONCE * lanes) {
      const int base = first + lane;
      Word words[AT_ONCE];
      uint32_t wanted = 0;
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) wanted |= (base + i * lanes < count) << i, words[i] = {0, 0, 0, 0};
      receive(words, from + base * HEADER_WORDS, lanes * HEADER_WORDS, wanted, tag, c.patience());
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const float4 v = words[i].values();
        row.squares += v.x;
        largest = max(largest, __float_as_uint(v.y));  // as bits, so that a NaN is the largest
      }
    }
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) {
      const float other_squares = __shfl_xor_sync(~0u, row.squares, offset);
      const uint32_t other_largest = LIMBS == 1 ? __shfl_xor_sync(~0u, largest, offset) : 0;
      if (offset < lanes) row.squares += other_squares, largest = max(largest, other_largest);
    }
    row.largest = __uint_as_float(largest);
    return row;
  }
  __device__ __forceinline__ float factor_of(float squares, int k) const {
    return rsqrtf(__fdividef(squares, k) + c.a.s.eps);
  }

  // Of two limbs: what sums of rows are multiplied by, that of the warp's i-th row in lane i. Of one, whose values are
  // multiplied before they are quantized, those and the scales go to shared memory, to the warps that quantize.
  __device__ __forceinline__ float factors(const Geometry& g, int product, const Input& in, int buffer,
                                           uint32_t tag) const {
    const int k = g.all_k_tiles * K_TILE, lane = c.lane();
    // Some lanes for each of its rows, all rows at once. Of two limbs a single row is both warps'.
    const int lanes_log = WARP_LOG - max(c.rows_log() - FINISHERS_LOG, 0), nth = lane >> lanes_log;
    const int row = LIMBS == 2 && c.rows() == 1 ? 0 : first_task() + nth * FINISHERS;
    if (LIMBS == 2 ? in.norm == nullptr || first_task() >= g.local << c.rows_log() : first_task() >= c.rows())
      return 1.f;
    const int count = product == O ? static_cast<int>(c.a.s.kv_heads) * attended_headers(row) : in.header_stride;
    const Row r = headers(in.headers + row * in.header_stride * HEADER_WORDS, count, lanes_log, tag);
    const float factor = in.norm != nullptr ? factor_of(r.squares, k) : 1.f;
    if constexpr (LIMBS == 1) {
      float* to = c.factors(buffer) + row;
      if (lane % (1 << lanes_log) == 0) to[0] = factor, to[MAX_ROWS] = act8_scale(__float_as_uint(r.largest * factor));
      __syncwarp();
      if (lane == 0) barrier_arrive(c.factor_barrier(buffer));
    }
    return __shfl_sync(~0u, factor, lane << lanes_log);
  }

  __device__ __forceinline__ float2 bias_of(const void* bias, int row) const {
    if (bias == nullptr) return make_float2(0.f, 0.f);
    return make_float2(load_element(bias, row, c.a.s.dtype), load_element(bias, row + 8, c.a.s.dtype));
  }

  // Scales of output channels lie in the order of fragments: [n tile][row % 8][row / 8].
  __device__ __forceinline__ static uint32_t weights_of(const trirun_cuda_step_weight& weight, uint32_t row) {
    if constexpr (GROUPS) return 0;
    return load_constant(weight.scales + row / 64 * 64 + row % 8 * 8 + row % 64 / 8);
  }

  __device__ __forceinline__ static float2 weighted(float factor, uint32_t weights) {
    const float2 both = make_float2(factor, factor);
    if constexpr (GROUPS) return both;
    return decoder::widen_pair<false>(weights) * both;
  }

  // Two sums, so many bytes apart. from: address of this lane's first slot. count: slots of either, a multiple of four
  // where one row is the largest clusters'.
  struct Added {
    float2 first, second;
  };
  __device__ __forceinline__ Added added(uint32_t from, uint32_t apart, int count) const {
    float4 a = make_float4(0.f, 0.f, 0.f, 0.f), b = a;
    const auto slot = [&](uint32_t i) {
      const uint32_t at = from + i * SLOT_BYTES;
      const float2 first = load_shared_float2(at), second = load_shared_float2(at + apart);
      return make_float4(first.x, first.y, second.x, second.y);
    };
    const auto add_four = [&] {
      const float4 v0 = slot(0), v1 = slot(1), v2 = slot(2), v3 = slot(3);
      a = a + (v0 + v1), b = b + (v2 + v3);
      count -= 4, from += 4 * SLOT_BYTES;
    };
    if constexpr (Cta::ONE_ROW) {
#pragma unroll 1
      do add_four();
      while (count > 0);
    } else {
#pragma unroll 1
      while (count >= 4) add_four();
#pragma unroll 1
      for (; count > 0; count--, from += SLOT_BYTES) a = a + slot(0);
    }
    a = a + b;
    return {make_float2(a.x, a.y), make_float2(a.z, a.w)};
  }

  // Where this lane's values go, of a row's 64.
  __device__ __forceinline__ float2* unit_half(float4* words) const {
    return reinterpret_cast<float2*>(words) + half_word();
  }

  // The header of a row's 64 values, or those of two rows, which are so many words apart. raw: as the norm sees them;
  // sent: times its weights.
  __device__ __forceinline__ void send_headers(float4* header, float2 raw, float2 sent, bool two, int apart,
                                               float2 other_raw, float2 other_sent, uint32_t tag) const {
    const bool upper = c.lane() >= 16, other = two && upper;  // a half of the lanes has each row
    const auto squared = [](float2 v) { return v.x * v.x + v.y * v.y; };
    const float first = squared(raw), second = two ? squared(other_raw) : first;
    float squares = (other ? second : first) + __shfl_xor_sync(~0u, other ? first : second, 16);
    uint32_t largest = 0;
    if constexpr (LIMBS == 1) {
      const auto bits = [](float2 v) { return magnitude_bits(make_float4(v.x, v.y, 0.f, 0.f)); };
      const uint32_t first_bits = bits(sent), second_bits = two ? bits(other_sent) : first_bits;
      largest = max(other ? second_bits : first_bits, __shfl_xor_sync(~0u, other ? first_bits : second_bits, 16));
    }
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(~0u, squares, offset);
      if (LIMBS == 1) largest = max(largest, __shfl_xor_sync(~0u, largest, offset));
    }
    if (two ? c.lane() % 16 == 0 : c.lane() == 0)
      send(header + (upper ? apart : 0), make_float4(squares, __uint_as_float(largest), 0.f, 0.f), tag);
  }

  __device__ __forceinline__ void run(uint32_t phase) {
    c.begin_phase();
    const int product = phase % PRODUCTS, index = phase / PRODUCTS;
    const Geometry g = c.geometry(product);
    const trirun_cuda_step& s = c.a.s;
    const trirun_cuda_step_layer& layer = c.layer(index);
    uint32_t tag = c.tag(index);
    const int lane = c.lane(), rows_log = c.rows_log(), rows = c.rows(), buffer = product & 1;
    const bool pairs = product == GATE_UP, to_residual = product == O || product == DOWN;
    const int parts = slots_of_row<BLOCKS>(c, g), units = pairs ? g.n_tiles / 2 : g.n_tiles;
    const trirun_cuda_step_weight& weight = weight_of(layer, product);
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
      words = c.a.x_attention, to_headers = c.a.x_attention_headers, tag = c.tag(index + 1);
    }
    if (LIMBS == 2 && norm == nullptr) to_headers = nullptr;  // nobody reads them
    const uint32_t row_bytes = parts * SLOT_BYTES, tile_bytes = row_bytes << rows_log;
    const uint32_t slots = c.shared + c.a.at.slots + buffer * c.a.at.slot_buffer + lane * 8;
    // Of one limb others wait for these; of two they are wanted with the sums.
    bool known = LIMBS == 1;
    float of_rows = 1.f;
    if (known && g.units > 0) factors(g, product, input_of(c.a, layer, product), buffer, in_tag);
    // Of several rows each warp has some of every unit, else units of its own. Of four or more it has two at once.
    const bool shares = rows > 1, two = rows > FINISHERS && !pairs, halves = !pairs && !two;
    const int first_row = shares ? first_task() : 0, row_step = shares ? FINISHERS << two : 1;
#pragma unroll 1
    for (int local = shares ? 0 : first_task(); local < g.local; local += shares ? 1 : FINISHERS) {
      const int unit = unit_of(g, local), n = unit * N_TILE + row_in_unit(), other_n = pairs ? n + units * N_TILE : n;
      const uint32_t weights = weights_of(weight, n), other_weights = pairs ? weights_of(weight, other_n) : weights;
      const float2 biases = bias_of(bias, n), other_biases = pairs ? bias_of(bias, other_n) : biases;
      const float2 norms = norm == nullptr ? make_float2(1.f, 1.f) : load_rows(norm + n);
      const uint32_t barrier = c.sums_barrier(buffer, local);
      if (first_row == 0 && lane == 0) barrier_expect(barrier, pairs ? 2 * tile_bytes : tile_bytes);
      // Kept, or the compiler would compute them anew where they are waited for.
      const uint32_t from = kept(slots + (pairs ? 2 * local : local) * tile_bytes, lane);
      const uint32_t sums_apart = kept(pairs ? tile_bytes : two ? FINISHERS * row_bytes : row_bytes / 2, lane);
      const int count = kept(halves ? parts / 2 : parts, lane);
#pragma unroll 1
      for (int row = first_row; row < rows; row += row_step) {
        const int task = (local << rows_log) + row, other_task = two ? task + FINISHERS : task;
        float2 beside = biases, other_beside = other_biases;
        if (to_residual) beside = beside + residual(task);
        if (to_residual && two) other_beside = other_beside + residual(other_task);
        if (!known) of_rows = factors(g, product, input_of(c.a, layer, product), buffer, in_tag), known = true;
        const float factor = __shfl_sync(~0u, of_rows, row >> FINISHERS_LOG);
        const float2 scales = weighted(factor, weights);
        const float2 other_scales =
            weighted(two ? __shfl_sync(~0u, of_rows, (row >> FINISHERS_LOG) + 1) : factor, other_weights);
        const int at = row * units + unit, apart = FINISHERS * units;
        void* to = unit_half(words + at * 16);
        forget(to);
        barrier_wait_warp(barrier, sums >> (buffer * MAX_LOCAL + local) & 1);
        Added v = added(from + row * row_bytes, sums_apart, count);
        if (halves) v.first = v.first + v.second;
        float2 raw = v.first * scales + beside;
        const float2 other = v.second * other_scales + other_beside;
        if (pairs) {
          float gates[] = {raw.x, raw.y};
          decoder::activate(gates, s.activation);
          raw = make_float2(gates[0], gates[1]) * other;
        }
        const float2 sent = raw * norms, other_sent = other * norms;
        send_half(static_cast<float2*>(to), sent, tag);
        if (two) send_half(static_cast<float2*>(to) + apart * 32, other_sent, tag);
        if (to_headers != nullptr)
          send_headers(to_headers + at * HEADER_WORDS, raw, sent, two, apart * HEADER_WORDS, other, other_sent, tag);
        if (to_residual) {
          residual(task) = raw;
          if (two) residual(other_task) = other;
        }
        __syncwarp();
      }
    }
    sums ^= ((1 << g.local) - 1) << buffer * MAX_LOCAL;
  }

  // Headers of a key head's output.
  __device__ __forceinline__ int attended_headers(int row) const {
    return c.plan().rows[row].givers * c.plan().rows[row].giving_warps;
  }

  // Keeps step with attention, whose parts lie where the sums of q, k and v were. So do warps that have no units: else
  // they were a layer ahead, and counted in the wrong meeting.
  __device__ __forceinline__ void attend(int index) const {
#pragma unroll 1
    for (int at_item = 0; at_item < c.plan().item_count; at_item++) {
      have_read();
      barrier_wait_warp(c.parts_barrier(), c.item_parity(index, at_item));
    }
  }

  // The residual stream of this CTA's units, and the first layer's input.
  __device__ __forceinline__ void begin() const {
    const uint32_t tag = c.tag(0);
    const trirun_cuda_step& s = c.a.s;
    const Geometry g = c.geometry(O);
    const int rows_log = c.rows_log();
#pragma unroll 1
    for (int task = first_task(); task < g.local << rows_log; task += FINISHERS) {
      const int row = task & (c.rows() - 1), unit = unit_of(g, task >> rows_log), n = unit * N_TILE + row_in_unit();
      const float2 v = load_rows(s.residual + row * s.hidden + n);
      residual(task) = v;
      const int at = row * g.n_tiles + unit;
      const float2 sent = v * load_rows(c.layer(0).attention_norm + n);
      send_half(unit_half(c.a.x_attention + at * 16), sent, tag);
      send_headers(c.a.x_attention_headers + at * HEADER_WORDS, v, sent, false, 0, v, sent, tag);
    }
  }

  // The final norm of this CTA's units.
  __device__ __forceinline__ void end() const {
    const trirun_cuda_step& s = c.a.s;
    const uint32_t tag = c.tag(static_cast<int>(s.layer_count));
    const Geometry g = c.geometry(O);
    const int rows_log = c.rows_log(), hidden = static_cast<int>(s.hidden);
#pragma unroll 1
    for (int task = first_task(); task < g.local << rows_log; task += FINISHERS) {
      const int row = task & (c.rows() - 1), unit = unit_of(g, task >> rows_log), n = unit * N_TILE + row_in_unit();
      const float squares =
          headers(c.a.x_attention_headers + row * g.n_tiles * HEADER_WORDS, g.n_tiles, WARP_LOG, tag).squares;
      const float factor = factor_of(squares, hidden);
      const float2 y = residual(task) * make_float2(factor, factor) * load_rows(s.final_norm + n);
      const bool failed = *reinterpret_cast<volatile uint32_t*>(c.a.status) != 0;
      const auto put = [&](int row_of, float value) {
        store_element(s.y, row * s.hidden + n + row_of, failed ? NAN : value, s.dtype);
      };
      put(0, y.x), put(8, y.y);
    }
  }
};

}  // namespace trirun::step
