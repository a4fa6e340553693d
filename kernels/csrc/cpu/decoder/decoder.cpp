/* The native decoder's C interface: a forward step of a Llama-like model, or several, in one parallel region. Checks of
 * arguments, and the choice between the ways to run the layers: a single row is decoded by threads that wait as little
 * as they can, more rows by threads that take their work from queues. */
#include <math.h>

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
  return check_weight(&linear.weight, n);
}

int check_layer(const trirun_decoder& d, const trirun_layer& l) {
  const int64_t q = d.heads * d.head_dim, kv = d.kv_heads * d.head_dim;
  if (!l.attention_norm || !l.mlp_norm) return TRIRUN_BAD_POINTER;
  const struct {
    const trirun_linear& linear;
    int64_t n, k;
  } linears[] = {{l.q, q, d.hidden},        {l.k, kv, d.hidden},     {l.v, kv, d.hidden},      {l.o, d.hidden, q},
                 {l.gate, d.ffn, d.hidden}, {l.up, d.ffn, d.hidden}, {l.down, d.hidden, d.ffn}};
  for (const auto& [linear, n, k] : linears)
    if (int error = check_linear(linear, n, k)) return error;
  return TRIRUN_OK;
}

/* Written so that a NaN is bad. */
bool bad_draw(const trirun_draw& draw) {
  const bool warm = draw.temperature >= 0 && draw.temperature < INFINITY;
  return !(warm && draw.top_p > 0 && draw.min_p >= 0 && draw.top_k >= 0);
}

int check_sizes(const trirun_decoder* d) {
  if (!d) return TRIRUN_BAD_POINTER;
  const int64_t sizes[] = {d->layers,   d->hidden, d->ffn,   d->heads,  d->kv_heads,
                           d->head_dim, d->vocab,  d->slots, d->context};
  for (int64_t size : sizes)
    if (size <= 0 || size > kMaxSize) return TRIRUN_BAD_SHAPE;
  if (d->heads % d->kv_heads || d->hidden % 16 || d->context % kKeyBlock) return TRIRUN_BAD_SHAPE;
  if (d->rotary_half < 0 || 2 * d->rotary_half > d->head_dim) return TRIRUN_BAD_SHAPE;
  if (d->kv_dtype != TRIRUN_F16 && d->kv_dtype != TRIRUN_F32) return TRIRUN_UNSUPPORTED;
  if (!is_float_type(d->embedding_dtype)) return TRIRUN_UNSUPPORTED;
  const bool bad_head = d->head_dtype == TRIRUN_HEAD_INT8 ? d->hidden > kLongestHead : !is_float_type(d->head_dtype);
  if (bad_head) return TRIRUN_UNSUPPORTED;
  if (d->activation != TRIRUN_SILU && d->activation != TRIRUN_RELU2) return TRIRUN_UNSUPPORTED;
  return d->act_bits == TRIRUN_ACT8 || d->act_bits == TRIRUN_ACT16 ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

int check_batch(const trirun_decoder& d, const Batch& batch) {
  const auto& [segments, segment_count, tokens, rows, logit_rows, logit_count, logits] = batch;
  if (!segments || !tokens || (logit_count && !logits)) return TRIRUN_BAD_POINTER;
  int64_t total = 0;
  for (int64_t i = 0; i < segment_count; ++i) {
    const trirun_segment& segment = segments[i];
    if (segment.slot < 0 || segment.slot >= d.slots) return TRIRUN_BAD_SHAPE;
    if (segment.count <= 0 || segment.count > rows) return TRIRUN_BAD_SHAPE;
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

int check_decoder(const trirun_decoder* d) {
  if (int error = check_sizes(d)) return error;
  if (!d->layer || !d->embedding || !d->head || !d->final_norm || !d->cosines || !d->sines || !d->keys || !d->values)
    return TRIRUN_BAD_POINTER;
  if (d->head_dtype == TRIRUN_HEAD_INT8 && !d->head_scales) return TRIRUN_BAD_POINTER;
  for (int64_t i = 0; i < d->layers; ++i)
    if (int error = check_layer(*d, d->layer[i])) return error;
  return TRIRUN_OK;
}

int place(const trirun_decoder& d, int64_t rows, void* workspace, size_t bytes, Shared* shared) {
  if (!workspace || (reinterpret_cast<uintptr_t>(workspace) & 63)) return TRIRUN_BAD_POINTER;
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
  if (!x || !rows || !scales) return TRIRUN_BAD_POINTER;
  if (n <= 0 || k <= 0 || k % 16 || k > kLongestHead || threads < 1) return TRIRUN_BAD_SHAPE;
  if (!is_float_type(dtype)) return TRIRUN_UNSUPPORTED;
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

TRIRUN_EXPORT int64_t trirun_cpu_head_stride(int64_t k) { return head_stride_of(k); }

TRIRUN_EXPORT int64_t trirun_cpu_decoder_context(int64_t positions) { return round_up(positions, kKeyBlock); }

TRIRUN_EXPORT size_t trirun_cpu_decoder_cache_bytes(const trirun_decoder* d) {
  if (check_sizes(d)) return 0;
  const int64_t heads = d->layers * d->slots * d->kv_heads, width = bytes_of(d->kv_dtype);
  return static_cast<size_t>(heads * d->context * value_stride_of(d->head_dim) * width);
}

TRIRUN_EXPORT size_t trirun_cpu_decoder_workspace(const trirun_decoder* d, int64_t rows) {
  if (check_sizes(d) || rows <= 0) return 0;
  return static_cast<size_t>(lay_out(*d, rows, nullptr, nullptr));
}

TRIRUN_EXPORT int trirun_cpu_decoder_step(const trirun_decoder* d, const trirun_segment* segments,
                                          int64_t segment_count, const int64_t* tokens, int64_t rows,
                                          const int64_t* logit_rows, int64_t logit_count, float* logits,
                                          void* workspace, size_t workspace_bytes, int threads) {
  if (int error = check_decoder(d)) return error;
  if (rows <= 0 || segment_count <= 0 || threads < 1) return TRIRUN_BAD_SHAPE;
  const Batch batch = {segments, segment_count, tokens, rows, logit_rows, logit_count, logits};
  return run_batch(*d, batch, workspace, workspace_bytes, threads, nullptr);
}

TRIRUN_EXPORT int trirun_cpu_decoder_generate(const trirun_decoder* d, const trirun_segment* segments,
                                              int64_t segment_count, const int64_t* tokens, int64_t steps,
                                              const trirun_draw* draws, const int64_t* stop, int64_t stop_count,
                                              int64_t* out, int64_t* done, float* logits, void* workspace,
                                              size_t workspace_bytes, int threads) {
  if (int error = check_decoder(d)) return error;
  if (segment_count <= 0 || steps <= 0 || stop_count < 0 || threads < 1) return TRIRUN_BAD_SHAPE;
  if (!segments || !out || !done || (stop_count && !stop)) return TRIRUN_BAD_POINTER;
  for (int64_t i = 0; i < segment_count; ++i)
    if (segments[i].count != 1 || segments[i].position > d->context - steps) return TRIRUN_BAD_SHAPE;
  for (int64_t i = 0; draws && i < segment_count; ++i)
    if (bad_draw(draws[i])) return TRIRUN_UNSUPPORTED;
  const Batch batch = {segments, segment_count, tokens, segment_count, nullptr, segment_count, logits};
  const Generation generation = {steps, draws, stop, stop_count, out, done};
  return run_batch(*d, batch, workspace, workspace_bytes, threads, &generation);
}

TRIRUN_EXPORT int trirun_cpu_draw(const float* logits, int64_t vocab, const trirun_draw* draw, int64_t* token) {
  if (!logits || !draw || !token) return TRIRUN_BAD_POINTER;
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
  Products products(*d);
  if (products.failed) return TRIRUN_NO_WORKSPACE;
  if (apart) return products.run_apart(steps, threads);
  parallel(threads, [&](Team& team) { products.run(team, steps); });
  return products.failed ? TRIRUN_NO_WORKSPACE : TRIRUN_OK;
}
