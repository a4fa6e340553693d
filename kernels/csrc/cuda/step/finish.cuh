// Warps that finish units: they add up what the cluster's warps left, apply scales, norms and the activation, keep the
// residual stream, and send what comes of it. All that they need besides is asked for before the sums are there.
//
// Lane 8 half + 2 t + p, p of 0 and 1, ends with rows 32 half + 16 p + {2t, 2t+1, 2t+8, 2t+9} of a unit, which is word
// 8 half + 4 p + t of 16, in the order in which activations.cuh quantizes. The upper sixteen lanes have other parts of
// the same sums; of pairs of n tiles the second; of four rows, where they are no pairs, another row.
#pragma once

#include "parts.cuh"

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
__device__ __forceinline__ float2 from_other_half(float2 v) {
  return make_float2(__shfl_xor_sync(~0u, v.x, 16), __shfl_xor_sync(~0u, v.y, 16));
}
__device__ __forceinline__ float4 from_other_half(float4 v) {
  const float2 a = from_other_half(make_float2(v.x, v.y)), b = from_other_half(make_float2(v.z, v.w));
  return make_float4(a.x, a.y, b.x, b.y);
}

template <int LIMBS, bool GROUPS, typename Cta>
struct Finisher {
  Cta& c;
  // Parity of the next sums of every unit of either buffer, in bits; of attention's next parts; of what CTAs put
  // together.
  uint32_t sums = 0, parts = 0, together = 0;

  __device__ __forceinline__ explicit Finisher(Cta& c) : c(c) {}

  __device__ __forceinline__ int half() const { return c.lane() / 16; }  // of the lanes
  __device__ __forceinline__ int word() const { return (c.lane() & 8) + (c.lane() & 1) * 4 + (c.lane() >> 1 & 3); }
  __device__ __forceinline__ int row_in_unit() const {
    return (c.lane() & 8) * 4 + (c.lane() & 1) * 16 + (c.lane() & 6);
  }

  // Tasks are pairs of a unit and a row, the same warp's in all products.
  __device__ __forceinline__ int first_task() const { return c.warp() - WARPS; }
  __device__ __forceinline__ int unit_of(const Geometry& g, int local) const {
    return g.first + (local << c.cluster_log()) + c.rank();
  }
  __device__ __forceinline__ float4& residual(int task) const {
    return c.template at<float4>(c.a.at.residual)[task * 16 + c.lane() % 16];
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

  // Of two limbs: what sums of rows are multiplied by, that of row i in lane i. Of one, whose values are multiplied
  // before they are quantized, those and the scales go to shared memory, to the warps that quantize.
  __device__ __forceinline__ float factors(const Geometry& g, int product, const Input& in, int buffer,
                                           uint32_t tag) const {
    const int k = g.all_k_tiles * K_TILE, lane = c.lane();
    // Some lanes for each of its rows, all rows at once.
    const int rows_log = LIMBS == 2 ? c.rows_log() : max(c.rows_log() - FINISHERS_LOG, 0);
    const int lanes_log = WARP_LOG - rows_log, nth = lane >> lanes_log;
    const int row = LIMBS == 2 ? nth : first_task() + nth * FINISHERS;
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

  __device__ __forceinline__ float4 bias_of(const void* bias, int row) const {
    if (bias == nullptr) return make_float4(0.f, 0.f, 0.f, 0.f);
    const int dtype = c.a.s.dtype;
    return make_float4(load_element(bias, row, dtype), load_element(bias, row + 1, dtype),
                       load_element(bias, row + 8, dtype), load_element(bias, row + 9, dtype));
  }

  // Scales of output channels lie in the order of fragments: [n tile][row % 8][row / 8].
  __device__ __forceinline__ static uint2 weights_of(const trirun_cuda_step_weight& weight, uint32_t row) {
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

  // 64 values of a row to whoever takes them, from the lanes that send. raw: as the norm sees them; sent: times its
  // weights.
  __device__ __forceinline__ void send_unit(float4* words, float4* header, float4 raw, float4 sent, uint32_t tag,
                                            bool sends) const {
    if (sends) send(words + word(), sent, tag);
    float squares = raw.x * raw.x + raw.y * raw.y + raw.z * raw.z + raw.w * raw.w;
    uint32_t largest = LIMBS == 1 ? magnitude_bits(sent) : 0;
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) {
      squares += __shfl_xor_sync(~0u, squares, offset);
      if (LIMBS == 1) largest = max(largest, __shfl_xor_sync(~0u, largest, offset));
    }
    if (c.lane() % 16 == 0 && sends) send(header, make_float4(squares, __uint_as_float(largest), 0.f, 0.f), tag);
  }

  __device__ __forceinline__ void run(uint32_t phase) {
    c.begin_phase();
    const int product = phase % PRODUCTS, index = phase / PRODUCTS;
    const Geometry g = c.geometry(product);
    const trirun_cuda_step& s = c.a.s;
    const trirun_cuda_step_layer& layer = c.layer(index);
    uint32_t tag = c.tag(index);
    const int lane = c.lane(), half = this->half(), rows_log = c.rows_log(), rows = c.rows(), buffer = product & 1;
    const bool pairs = product == GATE_UP, to_residual = product == O || product == DOWN;
    const int parts = c.cluster() * g.sharing.parts, units = pairs ? g.n_tiles / 2 : g.n_tiles;
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
    const uint32_t step = 256 << rows_log, tile_bytes = parts * step;
    const uint32_t slots = c.shared + c.a.at.slots + buffer * c.a.at.slot_buffer + lane % 16 * 16;
    // Of one limb others wait for these; of two they are wanted with the sums.
    bool known = LIMBS == 1;
    float of_rows = 1.f;
    if (known && g.units > 0) factors(g, product, input_of(c.a, layer, product), buffer, in_tag);
    // Of several rows each warp has some of every unit, else units of its own. Of four or more it has two at once.
    const bool shares = rows > 1, two = rows > FINISHERS && !pairs;
    const int first_row = shares ? first_task() : 0, row_step = shares ? FINISHERS << two : 1;
    // The first one twice, once for nothing but the instructions, which are there then when the sums come.
    bool real = false;
#pragma unroll 1
    for (int local = shares ? 0 : first_task(); local < g.local; local += shares ? 1 : FINISHERS) {
      const int unit = unit_of(g, local);
      const int n = unit * N_TILE + row_in_unit(), own_n = pairs ? n + half * units * N_TILE : n;
      const uint2 weights = weights_of(weight, own_n);
      const float4 biases = bias_of(bias, own_n);
      const float4 norms = norm == nullptr ? make_float4(1.f, 1.f, 1.f, 1.f) : load_rows(norm + n);
      const uint32_t barrier = c.sums_barrier(buffer, local);
      if (first_row == 0 && lane == 0) barrier_expect(barrier, pairs ? 2 * tile_bytes : tile_bytes);
      float4 scales = make_float4(1.f, 1.f, 1.f, 1.f);
      // The halves of the lanes take every other part of a sum, one of two n tiles, or one of two rows. Kept, or the
      // compiler would compute them anew where they are waited for.
      const bool whole = pairs || two;
      const uint32_t from =
          kept(slots + (pairs ? 2 * local + half : local) * tile_bytes + (whole ? 0 : half) * step, lane);
      const int count = kept(whole ? parts : (parts + 1 - half) >> 1, lane);
      const uint32_t stride = kept(whole ? step : 2 * step, lane);
#pragma unroll 1
      for (int first = first_row; first < rows;) {
        const int row = first + (two ? half * FINISHERS : 0), task = (local << rows_log) + row;
        const bool sends = (half == 0 || two) && real;
        const float4 before = to_residual ? residual(task) : make_float4(0.f, 0.f, 0.f, 0.f);
        const float4 beside = biases + before;
        if (real) {
          if (!known) of_rows = factors(g, product, input_of(c.a, layer, product), buffer, in_tag), known = true;
          const float factor = __shfl_sync(~0u, of_rows, row);
          scales = weighted(make_float4(factor, factor, factor, factor), weights);
          barrier_wait_warp(barrier, sums >> (buffer * MAX_LOCAL + local) & 1);
        }
        float4 v = added(from + row * 256, count, stride);
        if (!whole) v = v + from_other_half(v);
        float4 raw = exchanged(v) * scales + beside;
        if (pairs) {
          // The lower lanes have gates, the upper ones what they multiply: either takes two of the four.
          const float2 own = half == 0 ? make_float2(raw.x, raw.y) : make_float2(raw.z, raw.w);
          const float2 other = from_other_half(half == 0 ? make_float2(raw.z, raw.w) : make_float2(raw.x, raw.y));
          float gates[] = {half == 0 ? own.x : other.x, half == 0 ? own.y : other.y};
          decoder::activate(gates, s.activation);
          const float2 made =
              make_float2(gates[0] * (half == 0 ? other.x : own.x), gates[1] * (half == 0 ? other.y : own.y));
          const float2 rest = from_other_half(made);
          raw = half == 0 ? make_float4(made.x, made.y, rest.x, rest.y) : make_float4(rest.x, rest.y, made.x, made.y);
        }
        const int at = row * units + unit;
        if (product == QKV) {
          if (sends) send(words + at * 16 + word(), raw, tag);
        } else {
          send_unit(words + at * 16, to_headers + at * HEADER_WORDS, raw, raw * norms, tag, sends);
          if (to_residual && sends) residual(task) = raw;
          __syncwarp();
        }
        if (real) first += row_step;
        real = true;
      }
    }
    sums ^= ((1 << g.local) - 1) << buffer * MAX_LOCAL;
  }

  // Headers of a key head's output.
  __device__ __forceinline__ int attended_headers(int row) const {
    return c.plan().rows[row].givers * c.plan().rows[row].giving_warps;
  }

  // What this CTA's warps have of its part of the keys, by weights of the same score, added up: a word a lane. A warp's
  // part is the words of a head, then its header, head by head.
  __device__ __forceinline__ Part joined(int word, int parts) const {
    const int head = word >> c.a.head_words_log;
    const uint32_t of_parts = c.shared + c.a.at.attention, from = of_parts + (word + head) * 16;
    const uint32_t header = of_parts + (((head + 1) << c.a.head_words_log) + head) * 16;
    const int stride = (min(c.a.group, HEADS) * part_floats(c.a.s.head_dim) * 4) << groups_log_of(c.a.group);
    Part part;
    if (parts > 0) part.most = load_shared_float(header);  // a split may have no keys
#pragma unroll 4
    for (int i = 0; i < parts; i++) {
      part.values = part.values + load_shared_float4(from + i * stride);
      part.weights += load_shared_float(header + 4 + i * stride);
    }
    return part;
  }

  // The CTAs of a cluster that share an item, and put together what they have of its output: each a share of its words.
  struct Team {
    int log, member, share, head_words_log;
    uint32_t buffer;  // shared address, of every CTA
    float of_share;  // 1 / share

    __device__ __forceinline__ int stride() const { return shared_stride(share, 1 << head_words_log); }
    __device__ __forceinline__ int first_head(int owner) const { return (owner * share) >> head_words_log; }
    __device__ __forceinline__ int bytes() const {
      const int heads = (((member + 1) * share - 1) >> head_words_log) - first_head(member) + 1;
      return (share + heads) << log << 4;
    }
  };

  // A word of what this CTA has, to the CTA that puts it together; with the first of a head its header.
  __device__ __forceinline__ void share_word(const Team& team, int word, const Part& part) const {
    const int owner = static_cast<int>((static_cast<float>(word) + 0.5f) * team.of_share);
    const int within = word - owner * team.share, head = word >> team.head_words_log;
    const int rank = (c.rank() & ~((1 << team.log) - 1)) | owner;
    const uint32_t to = peer_address(team.buffer + team.member * team.stride() * 16, rank);
    const uint32_t barrier = peer_address(c.together_barrier(), rank);
    store_peer_counted(to + within * 16, part.values, barrier);
    if (within == 0 || word == head << team.head_words_log)
      store_peer_counted(to + (team.share + head - team.first_head(owner)) * 16,
                         make_float4(part.most, part.weights, 0.f, 0.f), barrier);
  }

  // What all of them have of one of this CTA's words. As many neighbouring lanes as there may be CTAs want words of one
  // head, and have a header each.
  __device__ __forceinline__ Part shared_part(const Team& team, int within) const {
    constexpr int LANES = SPLITS_AT_ONCE;
    static_assert(LANES >= MAX_CLUSTER && may_be_together(LANES, 0) && !may_be_together(LANES, 1));
    const int lane = c.lane(), members = 1 << team.log, mine = lane % LANES;
    const int head = ((team.member * team.share + within) >> team.head_words_log) - team.first_head(team.member);
    const uint32_t from = team.buffer + within * 16, step = team.stride() * 16;
    const bool there = mine < members;
    const float2 header = load_shared_float2(team.buffer + (there ? mine : 0) * step + (team.share + head) * 16);
    Part part;
    part.most = header.x;
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2)
      part.most = fmaxf(part.most, __shfl_xor_sync(~0u, part.most, offset));
    const float factor = there ? exp2_approximate(header.x - part.most) : 0.f;
    part.weights = factor * header.y;
#pragma unroll
    for (int offset = 1; offset < LANES; offset *= 2) part.weights += __shfl_xor_sync(~0u, part.weights, offset);
#pragma unroll 2
    for (int i = 0; i < members; i++)
      part.add_values(load_shared_float4(from + i * step), __shfl_sync(~0u, factor, (lane & ~(LANES - 1)) + i));
    return part;
  }

  // Attention of this CTA's items, from what its warps have of it to what the output projection reads.
  __device__ __forceinline__ void attend(int index) {
    c.begin_phase();
    const trirun_cuda_step_layer& layer = c.layer(index);
    const uint32_t tag = c.tag(index);
    const bool headers = sends_attended_headers(c.a.s);
    const int members_log = c.plan().members_log;
#pragma unroll 1
    for (int at_item = 0; at_item < c.plan().item_count; at_item++) {
      const Item& span = c.plan().items[at_item];
      const int splits = span.splits, lane = c.lane();
      if (span.split >= splits) continue;
      have_read();
      const Parts of_row{c, span.row, span.kv_head};
      const int words = of_row.words();
      float4* split_words = of_row.of_split(span.split);
      float squares = 0.f;
      uint32_t largest = 0;
      const auto give = [&](int word, const Part& part) {
        const float4 v = part.attended();
        float4 sent = v;
        const uint32_t at = span.kv_head * words + word;
        if (layer.attention_sub_norm != nullptr)
          sent = v * load_rows(layer.attention_sub_norm + at / 4 * 16 + at % 4 * 2);
        send(c.a.attended + static_cast<int>(c.a.s.kv_heads) * words * span.row + at, sent, tag);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
        largest = max(largest, magnitude_bits(sent));
      };
      // The output of all keys, or a part for whoever joins the splits.
      const auto hand = [&](int word, const Part& part) {
        if (splits == 1) return give(word, part);
        send(split_words + word, part.values, tag);
        const int head = word >> c.a.head_words_log;
        if (word == head << c.a.head_words_log)
          send(split_words + words + head, make_float4(part.most, part.weights, 0.f, 0.f), tag);
      };
      const int share = words >> members_log;
      const Team team{members_log,           span.member, share, c.a.head_words_log, c.shared + c.a.at.together,
                      __fdividef(1.f, share)};
      if (members_log > 0 && first_task() == 0 && lane == 0) barrier_expect(c.together_barrier(), team.bytes());
      // As run does: once for nothing but the instructions.
#pragma unroll 1
      for (int real = 0; real < 2; real++) {
        if (real) barrier_wait_warp(c.parts_barrier(), parts);
#pragma unroll 1
        for (int word = first_task() * 32 + lane; word < words; word += FINISHERS * 32) {
          const Part part = joined(word, span.parts);
          if (!real) continue;
          if (members_log > 0)
            share_word(team, word, part);
          else
            hand(word, part);
        }
        if (members_log == 0) continue;
        if (real) barrier_wait_warp(c.together_barrier(), together), together ^= 1;
#pragma unroll 1
        for (int base = first_task() * 32; base < share; base += FINISHERS * 32) {
          const bool mine = base + lane < share;
          const int within = mine ? base + lane : base;
          const Part part = shared_part(team, within);
          if (real && mine) hand(span.member * share + within, part);
        }
      }
      parts ^= 1;
      if (splits > 1 && !joined_by_readers(c, span.row)) {
#pragma unroll 1
        for (int base = span.first_word + first_task() * 32; base < span.last_word; base += FINISHERS * 32) {
          const bool mine = base + lane < span.last_word;
          const int word = mine ? base + lane : base;
          Part part;
#pragma unroll 1
          for (int split = 0; split < splits; split += SPLITS_AT_ONCE)
            of_row.join(part, word, split, splits, mine, tag);
          if (mine) give(word, part);
        }
      }
      const RowSplits of_header = c.plan().rows[span.row];
      if (!headers || first_task() >= of_header.giving_warps) continue;
      squares = decoder::warp_sum(squares);
      largest = __reduce_max_sync(~0u, largest);
      float4* to = c.a.attended_headers +
                   (span.row * input_of(c.a, layer, O).header_stride +
                    (span.kv_head * of_header.givers + span.giver) * of_header.giving_warps + first_task()) *
                       HEADER_WORDS;
      if (lane == 0) send(to, make_float4(squares, __uint_as_float(largest), 0.f, 0.f), tag);
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
      const float4 v = load_rows(s.residual + row * s.hidden + n);
      if (half() == 0) residual(task) = v;
      const int at = row * g.n_tiles + unit;
      send_unit(c.a.x_attention + at * 16, c.a.x_attention_headers + at * HEADER_WORDS, v,
                v * load_rows(c.layer(0).attention_norm + n), tag, half() == 0);
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
