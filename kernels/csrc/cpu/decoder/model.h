/* What all ways of running the decoder's layers (single_step.h, batch_step.h, products.h) share: the workspace, one
 * decoder's derived sizes, and the parts of a layer that a single thread computes. A class per way, each a body of one
 * parallel region; decoder.cpp chooses. */
#ifndef TRIRUN_CPU_DECODER_MODEL_H
#define TRIRUN_CPU_DECODER_MODEL_H

#include <math.h>
#include <string.h>

#include <atomic>
#include <initializer_list>
#include <new>

#include "cpu/common/memory.h"
#include "cpu/common/numbers.h"
#include "cpu/common/threads.h"
#include "cpu/decoder/delta.h"
#include "cpu/decoder/experts.h"
#include "cpu/decoder/ops/ops.h"
#include "cpu/gemm/isa.h"
#include "cpu/gemm/unpack_row.h"

namespace trirun {
namespace {

constexpr int kMaxTeam = 512;

/* One thread's place in a queue of items. */
struct alignas(64) Cursor {
  std::atomic<int64_t> taken;
};

/* A queue of items shared out before the work begins: every thread takes its own share in order, a few at a time, and
 * then helps the others. Two queues take turns; a thread clears its place in the next one while it works on the
 * current one, which is safe because a barrier ends every phase. */
class Queues {
 public:
  explicit Queues(Cursor* cursors) : cursors_(cursors) {
    for (int i = 0; i < 2 * kMaxTeam; ++i) new (cursors_ + i) Cursor{{0}};
  }

  template <class Body>
  void each(Team& team, int64_t* phase, int64_t total, int64_t chunk, Body&& body) {
    Cursor* current = cursors_ + *phase % 2 * kMaxTeam;
    cursors_[(*phase + 1) % 2 * kMaxTeam + team.rank()].taken.store(0, std::memory_order_relaxed);
    ++*phase;
    for (int offset = 0; offset < team.size(); ++offset) {
      const int owner = (team.rank() + offset) % team.size();
      const Range share = share_of(total, owner, team.size());
      for (;;) {
        const int64_t begin = share.begin + current[owner].taken.fetch_add(chunk, std::memory_order_relaxed);
        if (begin >= share.end) break;
        body(begin, begin + chunk < share.end ? begin + chunk : share.end);
      }
    }
  }

 private:
  Cursor* cursors_;  // [2][kMaxTeam]
};

/* Of equals the one with the smaller index. */
inline Best better(Best a, Best b) {
  if (a.index < 0 || b.index < 0) return a.index < 0 ? b : a;
  return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

inline Best winner(const Best* parts, int count) {
  Best best = parts[0];
  for (int i = 1; i < count; ++i) best = better(best, parts[i]);
  return best;
}

/* What trirun_cpu_decoder_generate adds to a step: every step's tokens are chosen from the logits of the one before. */
struct Generation {
  int64_t steps;
  const trirun_draw* draws; // [rows], or null: all greedy
  const int64_t* stop;
  int64_t stop_count;
  int64_t* out; // [steps][rows]
  int64_t* done;

  bool ends(const int64_t* chosen, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r) {
      if (chosen[r] < 0) return true;
      for (int64_t i = 0; i < stop_count; ++i)
        if (chosen[r] == stop[i]) return true;
    }
    return false;
  }

  bool draws_row(int64_t r) const { return draws && draws[r].temperature > 0; }

  /* How row r's token of a step is drawn. */
  trirun_draw draw(int64_t r, int64_t step) const {
    trirun_draw own = draws[r];
    own.index += static_cast<uint64_t>(step);
    return own;
  }
};

/* What one call computes. */
struct Batch {
  const trirun_segment* segments;
  int64_t segment_count;
  const int64_t* tokens;
  int64_t rows;
  const int64_t* logit_rows; // null: all rows
  int64_t logit_count;
  float* logits; // or, where states are wanted, those of the same rows
  bool states;
};

/* The shared arrays of a step, in the caller's workspace. */
struct Shared {
  float* x;          // [rows][hidden], the residual stream; of a single row what is to be added to it
  float* before;     // [rows][hidden]: the residual stream before a parallel layer
  float* qkv;        // [rows][q | k | v]
  float* attention;  // [rows][max(heads * head_dim, hidden)]: attention's output, at the end the normalised x
  float* h;          // [rows][ffn], or of the size of a layer's own input
  float* inputs;     // [rows][layers][size]: every layer's own
  float* router;     // [rows][router_outputs]
  Choice* choices;   // [rows]
  SortedPairs pairs;
  float* expert_h;   // [pairs][size]
  float* expert_out; // [pairs][hidden]
  float* shared_out; // [rows][hidden]: of shared experts; of a single row where norms follow
  char* expert_act;  // [pairs] of the wider of hidden and size
  int32_t* slot;     // [rows]
  int32_t* position; // [rows]
  char* act;
  HeadInput head;    // of the 8-bit head
  Best* best;        // [rows][kMaxTeam]: of each thread's share of the logits
  Cursor* cursors;   // [2][kMaxTeam]
};

/* Of the mixer: what it gives to the output projection. */
inline int64_t attended_of(const trirun_layer& l) {
  return l.delta ? l.delta->value_heads * l.delta->value_dim : l.heads * l.head_dim;
}
inline int64_t kv_width_of(const trirun_layer& l) { return l.kv_heads * l.head_dim; }
/* Whether keys and values are those of an earlier layer. */
inline bool shares_cache(const trirun_layer& l) { return !l.delta && !l.k.n; }
/* Of a row of the projections: q | k | v | q_gate, or what delta.h says. */
inline int64_t qkv_width_of(const trirun_layer& l) {
  if (l.delta) return delta_width_of(*l.delta);
  return attended_of(l) + (shares_cache(l) ? 0 : 2 * kv_width_of(l)) + l.q_gate.n;
}
/* The linears that read the mixer's input, whose outputs lie one after another in that row; returns how many. */
constexpr int kMostInputs = 4;
inline int inputs_of(const trirun_layer& l, const trirun_linear* (&out)[kMostInputs]) {
  int count = 0;
  if (l.delta) {
    for (const trirun_linear* linear : {&l.delta->qkv, &l.delta->z})
      if (linear->n) out[count++] = linear;
  } else {
    for (const trirun_linear* linear : {&l.q, &l.k, &l.v, &l.q_gate})
      if (linear->n) out[count++] = linear;
  }
  return count;
}
inline int64_t group_of(const trirun_layer& l) { return l.heads / l.kv_heads; }

/* The largest of a size of all layers. */
template <class Size>
inline int64_t widest(const trirun_decoder& d, Size&& size) {
  int64_t most = 0;
  for (int64_t i = 0; i < d.layers; ++i) most = larger(most, size(d.layer[i]));
  return most;
}

inline int64_t widest_ffn(const trirun_decoder& d) {
  return widest(d, [](const trirun_layer& l) { return l.ffn; });
}

/* The largest of a size of all mixtures. */
template <class Size>
inline int64_t widest_mixture(const trirun_decoder& d, Size&& size) {
  return widest(d, [&](const trirun_layer& l) { return l.mixture ? size(*l.mixture) : 0; });
}

inline int64_t widest_expert(const trirun_decoder& d) {
  return widest_mixture(d, [](const trirun_mixture& m) { return m.size; });
}

inline int64_t most_chosen(const trirun_decoder& d) {
  return widest_mixture(d, [](const trirun_mixture& m) { return m.top_k; });
}

inline int64_t widest_attended(const trirun_decoder& d) { return widest(d, attended_of); }

inline int64_t widest_head(const trirun_decoder& d) {
  return widest(d, [](const trirun_layer& l) { return l.head_dim; });
}

/* Of a layer's own input, and of all layers'. */
inline int64_t input_size_of(const trirun_decoder& d) { return d.inputs ? d.inputs->size : 0; }
inline int64_t inputs_width_of(const trirun_decoder& d) { return d.layers * input_size_of(d); }

inline int64_t widest_input(const trirun_decoder& d) {
  const int64_t parts = larger(widest_ffn(d), input_size_of(d));
  return round_up(larger(larger(d.hidden, parts), widest_attended(d)), kPaddedK);
}

/* Where the feed-forward part is the last one, the scale behind it. */
inline const float* ffn_scale_of(const trirun_layer& l) { return l.input_gate.n ? nullptr : l.output_scale; }

/* Floats of scratch for a key head of a Gated DeltaNet layer. */
inline int64_t widest_delta(const trirun_decoder& d, int64_t rows) {
  return widest(d, [rows](const trirun_layer& l) { return l.delta ? delta_scratch(*l.delta, rows) : int64_t{0}; });
}

inline int64_t act_bytes(const trirun_decoder& d, int64_t rows) {
  return static_cast<int64_t>(trirun_cpu_act_bytes(rows, widest_input(d), TRIRUN_ACT16));
}

/* Of the rows of pairs. */
inline int64_t expert_act_bytes(const trirun_decoder& d, int64_t pairs) {
  const int64_t k = round_up(larger(d.hidden, widest_expert(d)), kPaddedK);
  return pairs ? static_cast<int64_t>(trirun_cpu_act_bytes(pairs, k, d.act_bits)) : 0;
}

inline HeadInput take_head_input(Arena& memory, const trirun_decoder& d, int64_t rows) {
  HeadInput head;
  head.stride = head_stride_of(d.hidden);
  head.limbs = memory.take<int8_t>(rows * 2 * head.stride);
  head.sums = memory.take<int32_t>(rows * 2);
  head.scales = memory.take<float>(rows);
  return head;
}

/* Bytes of the workspace; fills in `shared` where there is memory. */
inline int64_t lay_out(const trirun_decoder& d, int64_t rows, void* base, Shared* shared) {
  Arena memory(base);
  Shared out;
  out.x = memory.take<float>(rows * d.hidden);
  const bool parallel = widest(d, [](const trirun_layer& l) { return int64_t{l.parallel}; }) != 0;
  out.before = memory.take<float>(parallel ? rows * d.hidden : 0);
  out.qkv = memory.take<float>(rows * widest(d, qkv_width_of));
  out.attention = memory.take<float>(rows * larger(widest_attended(d), d.hidden));
  out.h = memory.take<float>(rows * larger(widest_ffn(d), input_size_of(d)));
  out.inputs = memory.take<float>(rows * inputs_width_of(d));
  const int64_t top_k = most_chosen(d), pairs = rows * top_k;
  out.router = memory.take<float>(rows * widest_mixture(d, router_outputs));
  out.choices = memory.take<Choice>(top_k ? rows : 0);
  out.pairs.take(memory, rows, top_k);
  out.expert_h = memory.take<float>(pairs * widest_expert(d));
  out.expert_out = memory.take<float>(rows > 1 ? pairs * d.hidden : 0);
  out.shared_out = memory.take<float>(top_k ? rows * d.hidden : 0);
  out.expert_act = memory.take<char>(rows > 1 ? expert_act_bytes(d, pairs) : 0);
  out.slot = memory.take<int32_t>(rows);
  out.position = memory.take<int32_t>(rows);
  out.act = memory.take<char>(act_bytes(d, rows));
  out.head = take_head_input(memory, d, rows);
  out.best = memory.take<Best>(rows * kMaxTeam);
  out.cursors = memory.take<Cursor>(2 * kMaxTeam);
  if (shared) *shared = out;
  return memory.used();
}

/* A decoder, what follows from its sizes, and what a single thread does. */
class Model {
 public:
  explicit Model(const trirun_decoder& decoder) : d(decoder), isa_(isa()), ops_(decoder_ops()) {}

  std::atomic<bool> failed{false};

 protected:
  static Int2Part part_of(const trirun_linear& linear, const trirun_act& act, float* y, int64_t ldy, int64_t begin,
                          int64_t end) {
    return {{&linear.weight, &act, linear.n, linear.bias, y, ldy, TRIRUN_F32}, begin, end};
  }

  /* The same into `block`, [rows][columns of the n tiles]. */
  static Int2Part block_of(const trirun_linear& linear, const trirun_act& act, float* block, int64_t begin,
                           int64_t end) {
    /* Kernels count columns from the weight's first row. */
    const uintptr_t origin =
        reinterpret_cast<uintptr_t>(block) - static_cast<uintptr_t>(begin) * kTileN * sizeof(float);
    return part_of(linear, act, reinterpret_cast<float*>(origin), columns_of(linear, begin, end), begin, end);
  }

  static int64_t columns_of(const trirun_linear& linear, int64_t begin, int64_t end) {
    return (end * kTileN < linear.n ? end * kTileN : linear.n) - begin * kTileN;
  }

  void product(const Int2Part& part) {
    if (!isa_.int2_gemm(part.job, part.begin, part.end)) failed = true;
  }

  /* Products that read the same rows. */
  void products(const Int2Part* parts, int count) {
    bool alike = isa_.int2_gemm_parts != nullptr;
    for (int i = 1; i < count; ++i) alike &= parts[i].job.w->group_size == parts[0].job.w->group_size;
    if (alike) {
      if (!isa_.int2_gemm_parts(parts, count)) failed = true;
    } else {
      for (int i = 0; i < count; ++i) product(parts[i]);
    }
  }

  void embed(float* x, int64_t token) const {
    if (d.embedding_dtype == TRIRUN_PACKED) {
      unpack_row(x, static_cast<const trirun_linear*>(d.embedding)->weight, token, d.hidden);
    } else {
      const int64_t width = bytes_of(d.embedding_dtype);
      ops_.load_row(x, static_cast<const char*>(d.embedding) + token * d.hidden * width, d.embedding_dtype, d.hidden);
    }
    if (d.embedding_scale != 1) ops_.scale(x, d.hidden, d.embedding_scale);
  }

  /* n tiles [begin, end) of the projections of all layers' inputs, to y [rows][inputs_width_of(d)]. act: of x [rows],
   * where the projection is packed. */
  void project_inputs(const float* x, const trirun_act& act, int64_t rows, float* y, int64_t begin, int64_t end) {
    const int64_t width = inputs_width_of(d), last = smaller(end * kTileN, width);
    if (begin >= end) return;
    if (d.inputs->projection_dtype == TRIRUN_PACKED)
      product(part_of(*static_cast<const trirun_linear*>(d.inputs->projection), act, y, width, begin, end));
    else
      ops_.dense(x, d.hidden, rows, d.inputs->projection, d.inputs->projection_dtype, d.hidden, y, width,
                 begin * kTileN, last);
  }

  /* Makes the inputs of layers [begin, end) for a token from their projections, `inputs`. memory: [size]. */
  void finish_inputs(float* inputs, int64_t token, int64_t begin, int64_t end, float* memory) const {
    const trirun_layer_inputs& own = *d.inputs;
    const int64_t width = bytes_of(own.table_dtype);
    const char* row = static_cast<const char*>(own.table) + token * inputs_width_of(d) * width;
    for (int64_t i = begin; i < end; ++i) {
      float* input = inputs + i * own.size;
      ops_.scale(input, own.size, own.projection_scale);
      ops_.rms_norm(input, input, own.norm, own.size, d.norm_eps);
      ops_.load_row(memory, row + i * own.size * width, own.table_dtype, own.size);
      ops_.add_scaled(input, memory, own.size, own.table_scale);
      ops_.scale(input, own.size, own.scale);
    }
  }

  /* A norm of hidden elements. */
  void norm(float* out, const float* x, const float* weight, const float* bias) const {
    if (d.norm == TRIRUN_LAYER_NORM)
      ops_.layer_norm(out, x, weight, bias, d.hidden, d.norm_eps);
    else
      ops_.rms_norm(out, x, weight, d.hidden, d.norm_eps);
  }

  /* What a part of a layer has computed for a row, on its way to the residual stream; in place. */
  void finish_part(float* y, const float* post_norm) const {
    if (post_norm) ops_.rms_norm(y, y, post_norm, d.hidden, d.norm_eps);
    if (d.residual_scale != 1) ops_.scale(y, d.hidden, d.residual_scale);
  }

  /* The same of a mixture: `sum` of a row's experts, and the shared expert's output, which this changes too. */
  void finish_mixture(const trirun_layer& l, float* sum, float* shared_out, float shared) const {
    if (l.experts_post_norm) ops_.rms_norm(sum, sum, l.experts_post_norm, d.hidden, d.norm_eps);
    if (l.shared_post_norm) ops_.rms_norm(shared_out, shared_out, l.shared_post_norm, d.hidden, d.norm_eps);
    if (l.ffn) ops_.add_scaled(sum, shared_out, d.hidden, shared);
    finish_part(sum, l.mlp_post_norm);
  }

  /* A product's share of act(gate) * up, in place of gate. */
  void activate(float* h, const float* up, int64_t n, int activation, float limit) const {
    if (activation == TRIRUN_CLIPPED_SWIGLU)
      ops_.clipped_swiglu(h, up, n, limit);
    else
      ops_.gate(h, up, n, activation);
  }

  /* Logits [begin, end) of the router of normalised rows. */
  void route(const trirun_mixture& m, const float* x, int64_t rows, float* logits, int64_t begin, int64_t end) const {
    if (begin < end)
      ops_.dense(x, d.hidden, rows, m.router, m.router_dtype, d.hidden, logits, router_outputs(m), begin, end);
  }

  /* Where the cache of (slot, kv head) of a layer begins. */
  void* cache(void* base, const trirun_layer& l, int64_t slot, int64_t kv_head) const {
    const int64_t elements = l.context * value_stride_of(l.head_dim);
    return static_cast<char*>(base) + (slot * l.kv_heads + kv_head) * elements * bytes_of(d.kv_dtype);
  }

  /* The norms of a row of q | k | v over all its heads. */
  void norm_rows(const trirun_layer& l, float* row) const {
    if (!l.row_norms) return;
    if (l.q_norm) ops_.rms_norm(row, row, l.q_norm, attended_of(l), d.norm_eps);
    float* keys = row + attended_of(l);
    if (l.k_norm && !shares_cache(l)) ops_.rms_norm(keys, keys, l.k_norm, kv_width_of(l), d.norm_eps);
  }

  /* Norm, rotation and cache of one kv head of one row of q | k | v, and of the query heads that share it; of those
   * alone where the cache is another layer's. */
  void rotate_and_store(const trirun_layer& l, int64_t slot, int64_t position, float* row, int64_t kv_head) const {
    const int64_t n = l.head_dim, group = group_of(l), half = l.rotary_half;
    const float* cosines = l.cosines + position * half;
    const float* sines = l.sines + position * half;
    const auto rotate = l.interleaved ? ops_.rotate_pairs : ops_.rotate;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      float* query = row + head * n;
      if (l.q_norm && !l.row_norms) ops_.rms_norm(query, query, l.q_norm, n, d.norm_eps);
      rotate(query, cosines, sines, half, n, l.attention_scale * kLog2e);
    }
    if (shares_cache(l)) return;
    float* key = row + (l.heads + kv_head) * n;
    float* value = row + (l.heads + l.kv_heads + kv_head) * n;
    if (l.k_norm && !l.row_norms) ops_.rms_norm(key, key, l.k_norm, n, d.norm_eps);
    rotate(key, cosines, sines, half, n, 1.0f);
    if (l.v_norm) ops_.rms_norm(value, value, l.v_norm, n, d.norm_eps);
    const int64_t place = l.context == d.context ? position : position % l.context;
    ops_.store_key(cache(l.keys, l, slot, kv_head), d.kv_dtype, key, n, place);
    ops_.store_value(cache(l.values, l, slot, kv_head), d.kv_dtype, value, n, place);
  }

  /* b and a of value heads, rows [begin, end) of the gates' weight, from a row of the mixer's input. */
  void delta_gates(const trirun_delta_layer& l, const float* x, float* row, int64_t begin, int64_t end) const {
    ops_.dense(x, d.hidden, 1, l.gates, l.gates_dtype, d.hidden, row + gates_column_of(l), 2 * l.value_heads, begin,
               end);
  }

  /* A row of attention's outputs times the sigmoid of its gate, to `out`. row: its q | k | v | q_gate. */
  void gate_attended(const trirun_layer& l, float* out, const float* attended, const float* row) const {
    memcpy(out, row + qkv_width_of(l) - l.q_gate.n, static_cast<size_t>(l.q_gate.n) * sizeof(float));
    ops_.gate(out, attended, l.q_gate.n, TRIRUN_SIGMOID);
  }

  /* Of rows of q | k | v and of outputs that lie at consecutive positions, the first at `position`. */
  AttentionJob job_of(const trirun_layer& l, int64_t slot, int64_t position, const float* qkv, float* out,
                      int64_t kv_head) const {
    const int64_t head = kv_head * group_of(l), column = head * l.head_dim;
    return {qkv + column,
            qkv_width_of(l),
            out + column,
            attended_of(l),
            cache(l.keys, l, slot, kv_head),
            cache(l.values, l, slot, kv_head),
            d.kv_dtype,
            l.head_dim,
            group_of(l),
            position,
            l.window,
            l.context,
            l.softcap * kLog2e,
            l.sinks ? l.sinks + head : nullptr};
  }

  void attend_one(const AttentionJob& job, float* memory) const {
    for (int64_t f = 0; f < job.group; f += kMaxQueries)
      ops_.attend(job, f, f + kMaxQueries < job.group ? f + kMaxQueries : job.group, memory);
  }

  /* The head's input: rows of normalised x, [rows][hidden], and what its kind of head reads of them. */
  struct HeadRows {
    const float* x;
    HeadInput limbs;  // of the 8-bit head
    trirun_act act;   // of a packed one
  };

  /* Memory for a packed head's input, of act_bytes(d, rows). */
  trirun_act head_act(char* memory, int64_t rows) const {
    trirun_act act;
    trirun_cpu_act_init(&act, memory, static_cast<size_t>(act_bytes(d, rows)), rows, round_up(d.hidden, kPaddedK),
                        TRIRUN_ACT16);
    return act;
  }

  /* Makes row r of the head's input ready. */
  void prepare_head_row(const HeadRows& input, int64_t r) const {
    const float* row = input.x + r * d.hidden;
    if (d.head_dtype == TRIRUN_HEAD_INT8)
      ops_.head_limbs(input.limbs, r, row, d.hidden);
    else if (d.head_dtype == TRIRUN_PACKED)
      isa_.quantize(input.act, input.x, TRIRUN_F32, d.hidden, d.hidden, r, r + 1);
  }

  /* Logits of `rows` rows, n tiles [begin, end) of the vocabulary. */
  void head_tiles(const HeadRows& input, int64_t rows, float* logits, int64_t begin, int64_t end) {
    if (begin >= end) return;
    const int64_t first = begin * kTileN, last = end * kTileN < d.vocab ? end * kTileN : d.vocab;
    if (d.head_dtype == TRIRUN_PACKED)
      product(part_of(*static_cast<const trirun_linear*>(d.head), input.act, logits, d.vocab, begin, end));
    else if (d.head_dtype == TRIRUN_HEAD_INT8)
      ops_.head_int8(input.limbs, rows, static_cast<const uint8_t*>(d.head), d.head_scales, logits, d.vocab, first,
                     last);
    else
      ops_.dense(input.x, d.hidden, rows, d.head, d.head_dtype, d.hidden, logits, d.vocab, first, last);
    for (int64_t r = 0; d.logit_softcap != 0 && r < rows; ++r)
      ops_.soften(logits + r * d.vocab + first, last - first, d.logit_softcap);
  }

  /* n tiles of the head that a thread takes at once: eight chunks each, for balance. */
  int64_t head_chunk(int threads) const { return larger(1, n_tiles_of(d.vocab) / (8 * threads)); }

  /* The largest of logits [begin, end) of a row. */
  Best best_of(const float* logits, int64_t begin, int64_t end) const {
    Best best;
    best.index = ops_.largest(logits + begin, end - begin, &best.value);
    if (best.index >= 0) best.index += begin;
    return best;
  }

  /* Row r's token after a step, from its logits and the largest of them. */
  int64_t chosen(const Generation& generation, int64_t r, int64_t step, const float* logits, Best best) {
    if (!generation.draws_row(r)) return best.index;
    void* memory = scratch(kScratchSampling, draw_bytes(d.vocab));
    if (!memory) failed = true;
    return memory ? draw_token(logits, d.vocab, best, generation.draw(r, step), memory) : -1;
  }

  const trirun_decoder& d;
  const Isa& isa_;
  const DecoderOps& ops_;
};

}  // namespace
}  // namespace trirun
#endif
