// Warps that finish units: they add up what the cluster's warps left, apply scales, norms and the activation, keep the
// residual stream, and send what comes of it. All that they need besides is asked for before the sums are there.
//
// Lane 16 h + 2 r + p, p of 0 and 1, ends with channel 32 h + 16 p + r of a unit and the 8th after it: half of a word.
// It adds up two sums of every row side by side: halves of one, or of a pair of n tiles both.
#pragma once

#include "cta.cuh"
#include "cuda/decoder/embedding.cuh"

#include <type_traits>

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

  // Whether each warp has some rows of every unit, all at once; of one or two rows it has units of its own.
  __device__ __forceinline__ bool shares_units() const { return BLOCKS > 1 || c.rows() > FINISHERS; }

  // Tasks are pairs of a unit and a row, the same warp's in all layers.
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
    // Some lanes for each of its rows, all rows at once. Of two limbs one or two rows are either warp's.
    const bool own_rows = LIMBS == 1 || shares_units();
    const int lanes_log = WARP_LOG - (own_rows ? max(c.rows_log() - FINISHERS_LOG, 0) : c.rows_log());
    const int nth = lane >> lanes_log, row = own_rows ? first_task() + nth * FINISHERS : nth;
    if (LIMBS == 2 ? in.norm == nullptr || (own_rows ? g.local == 0 : first_task() >= g.local)
                   : first_task() >= c.rows())
      return 1.f;
    const int count = product == O ? static_cast<int>(c.a.s.kv_heads) * attended_headers(row) : in.header_count;
    const Row r = headers(in.headers + row, count, lanes_log, tag);
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

  // Two sums of each of ROWS rows. from: address of this lane's first slot; bytes from one row to the next, and from a
  // sum to the other. count: slots of either, a multiple of four where one row is the largest clusters'.
  template <int ROWS>
  struct Added {
    float2 first[ROWS], second[ROWS];

    __device__ __forceinline__ Added(uint32_t from, uint32_t rows_apart, uint32_t sums_apart, int count) {
      constexpr int AT_ONCE = 4 / ROWS;  // slots
#pragma unroll
      for (int row = 0; row < ROWS; row++) first[row] = second[row] = make_float2(0.f, 0.f);
      const auto add = [&](auto slots) {
        constexpr int SLOTS = decltype(slots)::value;
        const auto sum_of = [&](uint32_t at) {
          float2 v[SLOTS];
#pragma unroll
          for (int i = 0; i < SLOTS; i++) v[i] = load_shared_float2(at + i * SLOT_BYTES);
#pragma unroll
          for (int apart = 1; apart < SLOTS; apart *= 2)
#pragma unroll
            for (int i = 0; i < SLOTS; i += 2 * apart) v[i] = v[i] + v[i + apart];
          return v[0];
        };
#pragma unroll
        for (int row = 0; row < ROWS; row++) {
          first[row] = first[row] + sum_of(from + row * rows_apart);
          second[row] = second[row] + sum_of(from + row * rows_apart + sums_apart);
        }
        count -= SLOTS, from += SLOTS * SLOT_BYTES;
      };
      if constexpr (Cta::ONE_ROW) {
#pragma unroll 1
        do add(std::integral_constant<int, AT_ONCE>{});
        while (count > 0);
      } else {
#pragma unroll 1
        while (count >= AT_ONCE) add(std::integral_constant<int, AT_ONCE>{});
#pragma unroll 1
        while (count > 0) add(std::integral_constant<int, 1>{});
      }
    }
  };

  // Where this lane's values go, of a row's 64.
  __device__ __forceinline__ float2* unit_half(float4* words) const {
    return reinterpret_cast<float2*>(words) + half_word();
  }

  // The headers of ROWS rows' 64 values, so many words apart. raw: as the norm sees them; sent: times its weights.
  template <int ROWS>
  __device__ __forceinline__ void send_headers(float4* header, int apart, const float2 (&raw)[ROWS],
                                               const float2 (&sent)[ROWS], uint32_t tag) const {
    constexpr int LANES = 32 / ROWS;  // that have a row in the end
    float squares[ROWS];
    uint32_t largest[ROWS];
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      squares[row] = raw[row].x * raw[row].x + raw[row].y * raw[row].y;
      largest[row] = LIMBS == 1 ? magnitude_bits(make_float4(sent[row].x, sent[row].y, 0.f, 0.f)) : 0;
    }
#pragma unroll
    for (int offset = 16, rows = ROWS; offset > 0; offset /= 2) {
      // Each half of the lanes keeps half of the rows.
      const bool upper = rows > 1 && (c.lane() & offset);
      const int kept = rows > 1 ? rows / 2 : 1;
#pragma unroll
      for (int row = 0; row < kept; row++) {
        const int other = rows > 1 ? row + kept : row;
        squares[row] = (upper ? squares[other] : squares[row]) +
                       __shfl_xor_sync(~0u, upper ? squares[row] : squares[other], offset);
        if constexpr (LIMBS == 1)
          largest[row] = max(upper ? largest[other] : largest[row],
                             __shfl_xor_sync(~0u, upper ? largest[row] : largest[other], offset));
      }
      rows = kept;
    }
    if (c.lane() % LANES == 0)
      send(header + c.lane() / LANES * apart, make_float4(squares[0], __uint_as_float(largest[0]), 0.f, 0.f), tag);
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
    // Rows at once, and from one to the next: a single one of an instance of several is finished twice.
    constexpr int ROWS = Cta::ONE_ROW ? 1 : BLOCKS == 1 ? 2 : 4;
    // Each anew, or what follows from them would be kept for all layers, in local memory.
    const int apart = Cta::ONE_ROW ? 0 : BLOCKS == 1 ? kept_anew(rows) / 2 : FINISHERS;
    const bool shares = BLOCKS > 1 || (!Cta::ONE_ROW && kept_anew(rows) > FINISHERS);
#pragma unroll 1
    for (int local = shares ? 0 : first_task(); local < g.local; local += shares ? 1 : FINISHERS) {
      const int unit = unit_of(g, local), n = unit * N_TILE + row_in_unit(), other_n = pairs ? n + units * N_TILE : n;
      const uint32_t weights = weights_of(weight, n), other_weights = pairs ? weights_of(weight, other_n) : weights;
      const float2 biases = bias_of(bias, n), other_biases = pairs ? bias_of(bias, other_n) : biases;
      const float2 norms = norm == nullptr ? make_float2(1.f, 1.f) : load_rows(norm + n);
      const uint32_t barrier = c.sums_barrier(buffer, local);
      int row = shares ? first_task() : 0;
      if (row == 0 && lane == 0) barrier_expect(barrier, pairs ? 2 * tile_bytes : tile_bytes);
      // Kept, or the compiler would compute them anew where they are waited for.
      const uint32_t from = kept(slots + (pairs ? 2 * local : local) * tile_bytes, lane);
      const uint32_t sums_apart = kept(pairs ? tile_bytes : row_bytes / 2, lane);
      const int count = kept(pairs ? parts : parts / 2, lane);
#pragma unroll 1
      do {
        const int task = (local << rows_log) + row;
        float2 beside[ROWS], scales[ROWS], other_scales[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) beside[i] = to_residual ? biases + residual(task + i * apart) : biases;
        if (!known) of_rows = factors(g, product, input_of(c.a, layer, product), buffer, in_tag), known = true;
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
          const float factor = __shfl_sync(~0u, of_rows, i);
          scales[i] = weighted(factor, weights), other_scales[i] = weighted(factor, other_weights);
        }
        const int at = row * units + unit, words_apart = apart * units;
        void* place = unit_half(words + at * 16);
        forget(place);
        auto* to = static_cast<float2*>(place);
        barrier_wait_warp(barrier, sums >> (buffer * MAX_LOCAL + local) & 1);
        const Added<ROWS> added(from + row * row_bytes, apart * row_bytes, sums_apart, count);
        float2 raw[ROWS], sent[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++)
          raw[i] = (pairs ? added.first[i] : added.first[i] + added.second[i]) * scales[i] + beside[i];
        if (pairs) {
          float gates[2 * ROWS];
#pragma unroll
          for (int i = 0; i < ROWS; i++) gates[2 * i] = raw[i].x, gates[2 * i + 1] = raw[i].y;
          decoder::activate(gates, s.activation);
#pragma unroll
          for (int i = 0; i < ROWS; i++)
            raw[i] = make_float2(gates[2 * i], gates[2 * i + 1]) * (added.second[i] * other_scales[i] + other_biases);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
          sent[i] = raw[i] * norms;
          send_half(to + i * words_apart * 32, sent[i], tag);
        }
        if (to_headers != nullptr) send_headers(to_headers + unit * HEADER_WORDS + row, apart, raw, sent, tag);
        if (to_residual)
#pragma unroll
          for (int i = 0; i < ROWS; i++) residual(task + i * apart) = raw[i];
        __syncwarp();
        row += FINISHERS;
      } while (LIMBS == 1 && row < apart);
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

  // Of a token's embedding, this lane's two values.
  __device__ __forceinline__ float2 embedded(int token, int n) const {
    const trirun_cuda_step& s = c.a.s;
    if (s.embedding == nullptr) {
      const float4 v = decoder::load_packed(c.a.packed, token, n & ~1);
      return n & 1 ? make_float2(v.y, v.w) : make_float2(v.x, v.z);
    }
    const int64_t at = token * s.hidden + n;
    return make_float2(load_element(s.embedding, at, s.dtype), load_element(s.embedding, at + 8, s.dtype));
  }

  // The residual stream of this CTA's units, and the first layer's input, of every apart-th task from the first on: of
  // any warp, while others fetch the layers.
  __device__ __forceinline__ void begin(int first, int apart) const {
    const trirun_cuda_step& s = c.a.s;
    const Geometry g = c.geometry(O);
    const int rows_log = c.rows_log();
#pragma unroll 1
    for (int task = first; task < g.local << rows_log; task += apart) {
      const int row = task & (c.rows() - 1), unit = unit_of(g, task >> rows_log), n = unit * N_TILE + row_in_unit();
      const float* norm = s.layers->attention_norm;
      const uint32_t tag = tag_of(c.counted_before());
      const int token = decoder::token_of(s.tokens[row], s.slots[row], s.latest, s.vocab);
      const float2 norms = load_rows(norm + n), scale = make_float2(s.embedding_scale, s.embedding_scale);
      const float2 v = embedded(token, n) * scale;
      residual(task) = v;
      const int at = row * g.n_tiles + unit;
      const float2 sent = v * norms;
      send_half(unit_half(c.a.x_attention + at * 16), sent, tag);
      send_headers<1>(c.a.x_attention_headers + unit * HEADER_WORDS + row, 0, {v}, {sent}, tag);
    }
  }

  // The final norm of this CTA's units.
  __device__ __forceinline__ void end() const {
    const trirun_cuda_step& s = c.a.s;
    const uint32_t tag = c.tag(static_cast<int>(s.layer_count));
    const Geometry g = c.geometry(O);
    const int rows_log = c.rows_log(), hidden = static_cast<int>(s.hidden);
    if constexpr (!Cta::ONE_ROW) meet_finishers();  // of two rows they have other tasks than before
#pragma unroll 1
    for (int task = first_task(); task < g.local << rows_log; task += FINISHERS) {
      const int row = task & (c.rows() - 1), unit = unit_of(g, task >> rows_log), n = unit * N_TILE + row_in_unit();
      const float squares = headers(c.a.x_attention_headers + row, g.n_tiles, WARP_LOG, tag).squares;
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
