/* The native decoder's C interface: a forward step of a Llama-like model, or several, in one parallel region. Checks of
 * arguments, and the choice between the ways to run the layers: a single row is decoded by threads that wait as little
 * as they can, more rows by threads that take their work from queues. */
#include <math.h>

#include <initializer_list>
#include <utility>

#include "batch_step.h"
#include "products.h"
#include "single_step.h"
#include "cpu/common/compiler.h"

namespace trirun {
namespace {

/* Hidden size up to which the 8-bit head's int32 sums are exact. */
constexpr int64_t kLongestHead = 65536;

int check_linear(const trirun_linear& linear, int64_t n, int64_t k) {
  if (linear.n != n || linear.k != k || linear.weight.k != round_up(k, kPaddedK)) return TRIRUN_BAD_SHAPE;
  if (!is_aligned(linear.bias, 4)) return TRIRUN_BAD_POINTER;
  return check_weight(&linear.weight, n);
}

/* Whether all of them can be arrays of floats, or null. */
bool are_floats(std::initializer_list<const void*> arrays) {
  bool all = true;
  for (const void* array : arrays) all &= is_aligned(array, 4);
  return all;
}

int check_mixture(const trirun_decoder& d, const trirun_mixture& m) {
  if (!is_array(m.gate, 8) || !is_array(m.up, 8) || !is_array(m.down, 8)) return TRIRUN_BAD_POINTER;
  if (!is_array(m.router, bytes_of(m.router_dtype))) return TRIRUN_BAD_POINTER;
  if (!are_floats({m.bias, m.correction, m.expert_scale})) return TRIRUN_BAD_POINTER;
  const int32_t group_size = m.gate[0].weight.group_size;
  for (int64_t e = 0; e < m.experts; ++e) {
    if (int error = check_linear(m.gate[e], m.size, d.hidden)) return error;
    if (int error = check_linear(m.up[e], m.size, d.hidden)) return error;
    if (int error = check_linear(m.down[e], d.hidden, m.size)) return error;
    for (const trirun_linear* each : {m.gate + e, m.up + e, m.down + e})
      if (each->weight.group_size != group_size) return TRIRUN_UNSUPPORTED;
  }
  return TRIRUN_OK;
}

/* What every layer has beside its mixer's input linears. */
int check_common(const trirun_decoder& d, const trirun_layer& l) {
  if (!are_floats({l.attention_norm, l.mlp_norm, l.q_norm, l.k_norm, l.v_norm, l.attention_sub_norm, l.mlp_sub_norm,
                   l.attention_post_norm, l.mlp_post_norm, l.shared_norm, l.shared_post_norm, l.experts_post_norm,
                   l.attention_norm_bias, l.mlp_norm_bias, l.sinks, l.input_norm, l.output_scale}))
    return TRIRUN_BAD_POINTER;
  if (int error = check_linear(l.o, d.hidden, attended_of(l))) return error;
  if (l.input_gate.n) {
    if (int error = check_linear(l.input_gate, input_size_of(d), d.hidden)) return error;
    if (int error = check_linear(l.input_out, d.hidden, input_size_of(d))) return error;
  }
  if (l.mixture)
    if (int error = check_mixture(d, *l.mixture)) return error;
  if (l.mixture && !l.ffn) return TRIRUN_OK;
  if (l.gate.n)
    if (int error = check_linear(l.gate, l.ffn, d.hidden)) return error;
  if (int error = check_linear(l.up, l.ffn, d.hidden)) return error;
  return check_linear(l.down, d.hidden, l.ffn);
}

int check_delta_layer(const trirun_decoder& d, const trirun_layer& l) {
  const trirun_delta_layer& m = *l.delta;
  for (const void* array : std::initializer_list<const void*>{m.conv, m.decay_rate, m.decay_bias, m.norm, m.state,
                                                              m.ring, l.attention_norm})
    if (!is_array(array, 4)) return TRIRUN_BAD_POINTER;
  if (!is_array(m.gates, bytes_of(m.gates_dtype))) return TRIRUN_BAD_POINTER;
  const int64_t channels = channels_of(m), values = m.value_heads * m.value_dim;
  if (int error = check_linear(m.qkv, m.z.n ? channels : channels + values, d.hidden)) return error;
  if (m.z.n)
    if (int error = check_linear(m.z, values, d.hidden)) return error;
  return check_common(d, l);
}

int check_layer(const trirun_decoder& d, const trirun_layer& l) {
  const int64_t q = attended_of(l), kv = kv_width_of(l);
  if (l.delta) return check_delta_layer(d, l);
  const int64_t kv_bytes = bytes_of(d.kv_dtype);
  if (!is_array(l.keys, kv_bytes) || !is_array(l.values, kv_bytes)) return TRIRUN_BAD_POINTER;
  if (!are_floats({l.cosines, l.sines}) || (l.rotary_half && (!l.cosines || !l.sines))) return TRIRUN_BAD_POINTER;
  const struct {
    const trirun_linear& linear;
    int64_t n, k;
  } linears[] = {{l.q, q, d.hidden}, {l.k, kv, d.hidden}, {l.v, kv, d.hidden}, {l.q_gate, q, d.hidden}};
  for (const auto& [linear, n, k] : linears) {
    if (&linear == &l.q_gate && !linear.n) continue;
    if ((&linear == &l.k || &linear == &l.v) && !l.k.n && !l.v.n) continue;
    if (int error = check_linear(linear, n, k)) return error;
  }
  return check_common(d, l);
}

/* Written so that a NaN is bad. */
bool bad_draw(const trirun_draw& draw) {
  const bool warm = draw.temperature >= 0 && draw.temperature < INFINITY;
  return !(warm && draw.top_p > 0 && draw.min_p >= 0 && draw.top_k >= 0);
}

bool is_width(int64_t n) { return n >= 0 && n <= kMaxSize; }

int check_delta_sizes(const trirun_decoder& d, const trirun_delta_layer& m) {
  for (int64_t size : {m.key_heads, m.value_heads, m.key_dim, m.value_dim})
    if (!is_size(size)) return TRIRUN_BAD_SHAPE;
  for (int64_t column : {m.key_stride, m.k_column, m.v_column, m.value_stride, m.z_column, m.z_stride})
    if (column < 0 || column > kMaxSize) return TRIRUN_BAD_SHAPE;
  if (m.key_heads * m.key_dim > kMaxSize || m.value_heads * m.value_dim > kMaxSize) return TRIRUN_BAD_SHAPE;
  if (!is_width(m.qkv.n) || !is_width(m.z.n)) return TRIRUN_BAD_SHAPE;
  if (!fits(m.value_heads * m.value_dim, m.key_dim)) return TRIRUN_BAD_SHAPE;
  if (!fits(d.slots, m.value_heads * m.value_dim * m.key_dim)) return TRIRUN_BAD_SHAPE;
  if (m.value_heads % m.key_heads || m.key_dim % 16 || m.value_dim % 16) return TRIRUN_BAD_SHAPE;
  if (m.taps < 1 || m.taps > kMaxTaps) return TRIRUN_BAD_SHAPE;
  const int64_t keys = m.key_dim, values = m.value_heads / m.key_heads * m.value_dim, last = m.key_heads - 1;
  const int64_t width = channels_of(m) + m.value_heads * m.value_dim;
  const int64_t ends[] = {last * m.key_stride + keys, m.k_column + last * m.key_stride + keys,
                          m.v_column + last * m.value_stride + values, m.z_column + last * m.z_stride + values};
  for (int64_t end : ends)
    if (end > width) return TRIRUN_BAD_SHAPE;
  return is_float_type(m.gates_dtype) ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

int check_mixture_sizes(const trirun_mixture& m, const trirun_layer& l) {
  if (m.experts < 1 || m.experts > kMostExperts || m.top_k < 1 || m.top_k > smaller(m.experts, kMostChosen))
    return TRIRUN_BAD_SHAPE;
  if (m.size <= 0 || m.size > kMaxSize || m.groups < 1 || m.groups > kMostExpertGroups || m.experts % m.groups)
    return TRIRUN_BAD_SHAPE;
  if (m.top_groups < 1 || m.top_groups > m.groups || l.mlp_sub_norm) return TRIRUN_BAD_SHAPE;
  if (m.shared_gate != (m.shared_gate && l.ffn) || (l.ffn && !l.gate.n)) return TRIRUN_BAD_SHAPE;
  if (m.score != TRIRUN_ROUTE_SOFTMAX && m.score != TRIRUN_ROUTE_SIGMOID) return TRIRUN_UNSUPPORTED;
  if (m.activation < TRIRUN_SILU || m.activation > TRIRUN_CLIPPED_SWIGLU) return TRIRUN_UNSUPPORTED;
  return is_float_type(m.router_dtype) ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

int check_layer_sizes(const trirun_decoder& d, const trirun_layer& l) {
  if (l.ffn < 0 || l.ffn > kMaxSize || (!l.ffn && !l.mixture)) return TRIRUN_BAD_SHAPE;
  if ((l.shared_norm || l.shared_post_norm) && !(l.ffn && l.mixture)) return TRIRUN_BAD_SHAPE;
  if (l.experts_post_norm && !l.mixture) return TRIRUN_BAD_SHAPE;
  if (l.mixture)
    if (int error = check_mixture_sizes(*l.mixture, l)) return error;
  if (l.activation < TRIRUN_SILU || l.activation > TRIRUN_GELU_TANH) return TRIRUN_UNSUPPORTED;
  if (l.input_gate.n && l.input_gate.n != input_size_of(d)) return TRIRUN_BAD_SHAPE;
  if (l.delta) return check_delta_sizes(d, *l.delta);
  for (int64_t size : {l.heads, l.kv_heads, l.head_dim, l.context})
    if (!is_size(size)) return TRIRUN_BAD_SHAPE;
  if (l.heads * l.head_dim > kMaxSize || l.kv_heads > l.heads || !is_width(l.q_gate.n)) return TRIRUN_BAD_SHAPE;
  if (!fits(d.slots * l.context, l.kv_heads * value_stride_of(l.head_dim))) return TRIRUN_BAD_SHAPE;
  if (l.heads % l.kv_heads || l.context % kKeyBlock || l.context > d.context) return TRIRUN_BAD_SHAPE;
  if (l.rotary_half < 0 || l.rotary_half > l.head_dim / 2 || l.window < 0) return TRIRUN_BAD_SHAPE;
  return l.context < d.context && (!l.window || l.window >= l.context) ? TRIRUN_BAD_SHAPE : TRIRUN_OK;
}

int check_inputs_sizes(const trirun_decoder& d, const trirun_layer_inputs& own) {
  if (!is_size(own.size) || own.size % 16 || !is_size(d.layers * own.size)) return TRIRUN_BAD_SHAPE;
  if (!fits(d.vocab, d.layers * own.size) || !fits(d.hidden, d.layers * own.size)) return TRIRUN_BAD_SHAPE;
  if (own.projection_dtype != TRIRUN_PACKED && !is_float_type(own.projection_dtype)) return TRIRUN_UNSUPPORTED;
  return is_float_type(own.table_dtype) ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

int check_sizes(const trirun_decoder* d) {
  if (!d || !is_array(d->layer, 8) || !is_aligned(d->inputs, 8)) return TRIRUN_BAD_POINTER;
  for (int64_t size : {d->layers, d->hidden, d->vocab, d->slots, d->context})
    if (!is_size(size)) return TRIRUN_BAD_SHAPE;
  if (!fits(d->vocab, d->hidden)) return TRIRUN_BAD_SHAPE;
  if (d->hidden % 16 || d->context % kKeyBlock) return TRIRUN_BAD_SHAPE;
  if (d->inputs)
    if (int error = check_inputs_sizes(*d, *d->inputs)) return error;
  for (int64_t i = 0; i < d->layers; ++i)
    if (int error = check_layer_sizes(*d, d->layer[i])) return error;
  if (d->norm != TRIRUN_RMS_NORM && d->norm != TRIRUN_LAYER_NORM) return TRIRUN_UNSUPPORTED;
  if (d->kv_dtype != TRIRUN_F16 && d->kv_dtype != TRIRUN_F32) return TRIRUN_UNSUPPORTED;
  if (d->embedding_dtype != TRIRUN_PACKED && !is_float_type(d->embedding_dtype)) return TRIRUN_UNSUPPORTED;
  const bool int8_head = d->head_dtype == TRIRUN_HEAD_INT8;
  if (!int8_head && d->head_dtype != TRIRUN_PACKED && !is_float_type(d->head_dtype)) return TRIRUN_UNSUPPORTED;
  if (int8_head && d->hidden > kLongestHead) return TRIRUN_UNSUPPORTED;
  return d->act_bits == TRIRUN_ACT8 || d->act_bits == TRIRUN_ACT16 ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

/* Most tokens of a sequence that a step can run: the first one's window must not lose to the last one's place. */
int64_t most_rows(const trirun_decoder& d) {
  int64_t most = kMaxSize;
  for (int64_t i = 0; i < d.layers; ++i)
    if (!d.layer[i].delta && d.layer[i].context < d.context)
      most = smaller(most, d.layer[i].context - d.layer[i].window);
  return most;
}

/* Whether the workspace of so many rows has a size. */
bool workspace_fits(const trirun_decoder& d, int64_t rows) {
  const int64_t expert = round_up(widest_expert(d), kPaddedK) + 2 * round_up(d.hidden, kPaddedK);
  const int64_t row = widest(d, qkv_width_of) + 8 * widest_input(d) + widest_mixture(d, router_outputs);
  return is_size(rows) && fits(rows, row + most_chosen(d) * expert + inputs_width_of(d));
}

int check_batch(const trirun_decoder& d, const Batch& batch) {
  const auto& [segments, segment_count, tokens, rows, logit_rows, logit_count, logits, states] = batch;
  if (!is_array(segments, 8) || !is_array(tokens, 8) || !is_aligned(logit_rows, 8)) return TRIRUN_BAD_POINTER;
  if (logit_count && !is_array(logits, 4)) return TRIRUN_BAD_POINTER;
  if (segment_count > rows || segment_count > d.slots || !workspace_fits(d, rows)) return TRIRUN_BAD_SHAPE;
  int64_t total = 0;
  const int64_t most = most_rows(d);
  for (int64_t i = 0; i < segment_count; ++i) {
    const trirun_segment& segment = segments[i];
    if (segment.slot < 0 || segment.slot >= d.slots) return TRIRUN_BAD_SHAPE;
    if (segment.count <= 0 || segment.count > rows || segment.count > most) return TRIRUN_BAD_SHAPE;
    if (i > 0 && segment.slot <= segments[i - 1].slot) return TRIRUN_BAD_SHAPE;
    if (segment.position < 0 || segment.position > d.context - segment.count) return TRIRUN_BAD_SHAPE;
    total += segment.count;
  }
  if (total != rows || logit_count < 0 || logit_count > rows) return TRIRUN_BAD_SHAPE;
  for (int64_t r = 0; r < rows; ++r)
    if (tokens[r] < 0 || tokens[r] >= d.vocab) return TRIRUN_BAD_SHAPE;
  for (int64_t i = 0; logit_rows && i < logit_count; ++i)
    if (logit_rows[i] < 0 || logit_rows[i] >= rows) return TRIRUN_BAD_SHAPE;
  return TRIRUN_OK;
}

/* Of an embedding or a head. */
int64_t alignment_of(int dtype) {
  return dtype == TRIRUN_PACKED ? int64_t{alignof(trirun_linear)} : dtype == TRIRUN_HEAD_INT8 ? 1 : bytes_of(dtype);
}

int check_inputs(const trirun_decoder& d, const trirun_layer_inputs& own) {
  if (!is_array(own.table, bytes_of(own.table_dtype)) || !is_array(own.norm, 4)) return TRIRUN_BAD_POINTER;
  if (!is_array(own.projection, alignment_of(own.projection_dtype))) return TRIRUN_BAD_POINTER;
  if (own.projection_dtype != TRIRUN_PACKED) return TRIRUN_OK;
  return check_linear(*static_cast<const trirun_linear*>(own.projection), inputs_width_of(d), d.hidden);
}

int check_decoder(const trirun_decoder* d) {
  if (int error = check_sizes(d)) return error;
  if (!is_array(d->final_norm, 4) || !are_floats({d->final_norm_bias, d->head_scales})) return TRIRUN_BAD_POINTER;
  if (!is_array(d->embedding, alignment_of(d->embedding_dtype))) return TRIRUN_BAD_POINTER;
  if (!is_array(d->head, alignment_of(d->head_dtype))) return TRIRUN_BAD_POINTER;
  if (d->head_dtype == TRIRUN_HEAD_INT8 && !d->head_scales) return TRIRUN_BAD_POINTER;
  for (const auto& [dtype, packed] : {std::pair(d->embedding_dtype, d->embedding), {d->head_dtype, d->head}})
    if (dtype == TRIRUN_PACKED)
      if (int error = check_linear(*static_cast<const trirun_linear*>(packed), d->vocab, d->hidden)) return error;
  if (d->inputs)
    if (int error = check_inputs(*d, *d->inputs)) return error;
  for (int64_t i = 0; i < d->layers; ++i)
    if (int error = check_layer(*d, d->layer[i])) return error;
  return TRIRUN_OK;
}

int place(const trirun_decoder& d, int64_t rows, void* workspace, size_t bytes, Shared* shared) {
  if (!is_array(workspace, 64)) return TRIRUN_BAD_POINTER;
  const int64_t needed = lay_out(d, rows, workspace, shared);
  return needed > static_cast<int64_t>(bytes) ? TRIRUN_NO_WORKSPACE : TRIRUN_OK;
}

template <class Step>
int run(Step&& step, int threads) {
  parallel(threads < kMaxTeam ? threads : kMaxTeam, [&](Team& team) { step.run(team); });
  return step.failed ? TRIRUN_NO_WORKSPACE : TRIRUN_OK;
}

int run_batch(const trirun_decoder& d, const Batch& batch, void* workspace, size_t bytes, int threads,
              const Generation* generation) {
  if (int error = check_batch(d, batch)) return error;
  Shared shared;
  if (int error = place(d, batch.rows, workspace, bytes, &shared)) return error;
  if (generation) *generation->done = 0;
  if (batch.rows == 1) return run(SingleStep(d, batch, shared, generation), threads);
  return run(BatchStep(d, batch, shared, generation), threads);
}

}  // namespace

const DecoderOps& decoder_ops() {
  const Isa* chosen = &isa();
  if (kDecoderAvx512 && (chosen == &kAmx || chosen == &kAvx512Vnni)) return *kDecoderAvx512;
  if (kDecoderAvx2 && chosen == &kAvx2) return *kDecoderAvx2;
  return *kDecoderPortable;
}

}  // namespace trirun

using namespace trirun;

TRIRUN_EXPORT int trirun_cpu_head_int8(const void* x, int dtype, int64_t n, int64_t k, uint8_t* rows, float* scales,
                                       int threads) {
  if (!is_size(n) || k <= 0 || k % 16 || k > kLongestHead || !fits(n, k) || threads < 1) return TRIRUN_BAD_SHAPE;
  if (!is_float_type(dtype)) return TRIRUN_UNSUPPORTED;
  if (!is_array(x, bytes_of(dtype)) || !rows || !is_array(scales, 4)) return TRIRUN_BAD_POINTER;
  const DecoderOps& ops = decoder_ops();
  const int64_t stride = head_stride_of(k), width = bytes_of(dtype);
  std::atomic<bool> failed{false};
  parallel(threads < kMaxTeam ? threads : kMaxTeam, [&](Team& team) {
    float* row = static_cast<float*>(scratch(kScratchDecoder, k * 4));
    if (!row) {
      failed = true;
      return;
    }
    const Range mine = team.share(n);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      ops.load_row(row, static_cast<const char*>(x) + i * k * width, dtype, k);
      ops.head_bytes(rows + i * stride, scales + i, row, k, stride);
    }
  });
  return failed ? TRIRUN_NO_WORKSPACE : TRIRUN_OK;
}

TRIRUN_EXPORT int64_t trirun_cpu_head_stride(int64_t k) { return is_size(k) ? head_stride_of(k) : 0; }

TRIRUN_EXPORT int64_t trirun_cpu_decoder_context(int64_t positions) {
  return is_size(positions) ? round_up(positions, kKeyBlock) : 0;
}

TRIRUN_EXPORT size_t trirun_cpu_decoder_cache_bytes(const trirun_decoder* d, int64_t layer) {
  if (check_sizes(d) || layer < 0 || layer >= d->layers) return 0;
  const trirun_layer& l = d->layer[layer];
  if (l.delta || shares_cache(l)) return 0;
  const int64_t elements = d->slots * l.kv_heads * l.context * value_stride_of(l.head_dim);
  return static_cast<size_t>(elements * bytes_of(d->kv_dtype));
}

TRIRUN_EXPORT size_t trirun_cpu_decoder_workspace(const trirun_decoder* d, int64_t rows) {
  if (check_sizes(d) || !workspace_fits(*d, rows)) return 0;
  return static_cast<size_t>(lay_out(*d, rows, nullptr, nullptr));
}

TRIRUN_EXPORT int trirun_cpu_decoder_step(const trirun_decoder* d, const trirun_segment* segments,
                                          int64_t segment_count, const int64_t* tokens, int64_t rows,
                                          const int64_t* logit_rows, int64_t logit_count, float* logits,
                                          void* workspace, size_t workspace_bytes, int threads) {
  if (int error = check_decoder(d)) return error;
  if (rows <= 0 || segment_count <= 0 || threads < 1) return TRIRUN_BAD_SHAPE;
  const Batch batch = {segments, segment_count, tokens, rows, logit_rows, logit_count, logits, false};
  return run_batch(*d, batch, workspace, workspace_bytes, threads, nullptr);
}

TRIRUN_EXPORT int trirun_cpu_decoder_states(const trirun_decoder* d, const trirun_segment* segments,
                                            int64_t segment_count, const int64_t* tokens, int64_t rows,
                                            const int64_t* state_rows, int64_t state_count, float* states,
                                            void* workspace, size_t workspace_bytes, int threads) {
  if (int error = check_decoder(d)) return error;
  if (rows <= 0 || segment_count <= 0 || threads < 1) return TRIRUN_BAD_SHAPE;
  const Batch batch = {segments, segment_count, tokens, rows, state_rows, state_count, states, true};
  return run_batch(*d, batch, workspace, workspace_bytes, threads, nullptr);
}

TRIRUN_EXPORT int trirun_cpu_decoder_generate(const trirun_decoder* d, const trirun_segment* segments,
                                              int64_t segment_count, const int64_t* tokens, int64_t steps,
                                              const trirun_draw* draws, const int64_t* stop, int64_t stop_count,
                                              int64_t* out, int64_t* done, float* logits, void* workspace,
                                              size_t workspace_bytes, int threads) {
  if (int error = check_decoder(d)) return error;
  if (segment_count <= 0 || steps <= 0 || stop_count < 0 || threads < 1) return TRIRUN_BAD_SHAPE;
  if (segment_count > d->slots) return TRIRUN_BAD_SHAPE;
  if (!is_array(segments, 8) || !is_array(out, 8) || !is_array(done, 8) || !is_aligned(draws, 8))
    return TRIRUN_BAD_POINTER;
  if (stop_count && !is_array(stop, 8)) return TRIRUN_BAD_POINTER;
  for (int64_t i = 0; i < segment_count; ++i)
    if (segments[i].count != 1 || segments[i].position > d->context - steps) return TRIRUN_BAD_SHAPE;
  for (int64_t i = 0; draws && i < segment_count; ++i)
    if (bad_draw(draws[i])) return TRIRUN_UNSUPPORTED;
  const Batch batch = {segments, segment_count, tokens, segment_count, nullptr, segment_count, logits, false};
  const Generation generation = {steps, draws, stop, stop_count, out, done};
  return run_batch(*d, batch, workspace, workspace_bytes, threads, &generation);
}

TRIRUN_EXPORT int trirun_cpu_draw(const float* logits, int64_t vocab, const trirun_draw* draw, int64_t* token) {
  if (!is_array(logits, 4) || !is_array(draw, 8) || !is_array(token, 8)) return TRIRUN_BAD_POINTER;
  if (vocab <= 0 || vocab > kMaxVocabulary) return TRIRUN_BAD_SHAPE;
  if (bad_draw(*draw) || draw->temperature == 0) return TRIRUN_UNSUPPORTED;
  void* memory = scratch(kScratchSampling, draw_bytes(vocab));
  if (!memory) return TRIRUN_NO_WORKSPACE;
  Best best;
  best.index = decoder_ops().largest(logits, vocab, &best.value);
  *token = draw_token(logits, vocab, best, *draw, memory);
  return TRIRUN_OK;
}

TRIRUN_EXPORT int trirun_cpu_decoder_products(const trirun_decoder* d, int64_t steps, int apart, int threads) {
  if (int error = check_decoder(d)) return error;
  if (steps <= 0 || threads < 1) return TRIRUN_BAD_SHAPE;
  if (!Products::can_run(*d)) return TRIRUN_UNSUPPORTED;
  Products products(*d, threads);
  if (products.failed) return TRIRUN_NO_WORKSPACE;
  if (apart) return products.run_apart(steps, threads);
  parallel(threads, [&](Team& team) { products.run(team, steps); });
  return products.failed ? TRIRUN_NO_WORKSPACE : TRIRUN_OK;
}
