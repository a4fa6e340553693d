/* The bound of decoding: a step's packed products and its head, and nothing that lies between them. */

#include <atomic>
#include <initializer_list>

#include "ops.h"
#include "cpu/gemm/kernels.h"
#include "cpu/common/threads.h"

using namespace trirun;

namespace {

int64_t padded(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* What products read, made once, and where their outputs go. */
struct Inputs {
  float* x;
  float* y;
  trirun_act act[3];  // of hidden, heads * head_dim and ffn columns
  HeadInput head;
};

/* Lays the arrays out from `memory` on, where there is any; returns how many bytes they take. */
int64_t lay_out(const trirun_decoder& d, char* memory, Inputs* inputs) {
  int64_t used = 0;
  auto take = [&](int64_t bytes) {
    char* here = memory ? memory + used : nullptr;
    used += padded(bytes, 64);
    return here;
  };
  const int64_t sizes[] = {d.hidden, d.heads * d.head_dim, d.ffn};
  const int64_t widest = padded(larger(larger(sizes[0], sizes[1]), larger(sizes[2], d.vocab)), 128);
  inputs->x = reinterpret_cast<float*>(take(widest * 4));
  inputs->y = reinterpret_cast<float*>(take(widest * 4));
  for (int i = 0; i < 3; ++i) {
    const size_t bytes = trirun_cpu_act_bytes(1, padded(sizes[i], 128), d.act_bits);
    char* act = take(static_cast<int64_t>(bytes));
    if (act) trirun_cpu_act_init(&inputs->act[i], act, bytes, 1, padded(sizes[i], 128), d.act_bits);
  }
  inputs->head.stride = padded(d.hidden, 64);
  inputs->head.digits = reinterpret_cast<int8_t*>(take(2 * inputs->head.stride));
  inputs->head.sums = reinterpret_cast<int32_t*>(take(8));
  inputs->head.scales = reinterpret_cast<float*>(take(4));
  return used;
}

void fill(const trirun_decoder& d, const Inputs& inputs) {
  const int64_t sizes[] = {d.hidden, d.heads * d.head_dim, d.ffn};
  for (int64_t i = 0; i < padded(larger(larger(sizes[0], sizes[1]), sizes[2]), 128); ++i)
    inputs.x[i] = static_cast<float>(i * 37 % 101) / 50 - 1;
  for (int i = 0; i < 3; ++i) isa().quantize(inputs.act[i], inputs.x, TRIRUN_F32, sizes[i], sizes[i], 0, 1);
  decoder_ops().head_digits(inputs.head, 0, inputs.x, d.hidden);
}

/* This thread's share of the head. */
void head_share(const trirun_decoder& d, const Inputs& inputs, const Team& team) {
  const Range strips = team.share((d.vocab + 63) / 64);
  const int64_t first = strips.begin * 64, last = strips.end * 64 < d.vocab ? strips.end * 64 : d.vocab;
  if (d.head_dtype == TRIRUN_HEAD_INT8)
    decoder_ops().head_int8(inputs.head, 1, static_cast<const uint8_t*>(d.head), d.head_scales, inputs.y, d.vocab,
                            first, last);
  else
    decoder_ops().dense(inputs.x, d.hidden, 1, d.head, d.head_dtype, d.hidden, inputs.y, d.vocab, first, last);
}

/* f(linear, its input) in the order of a step. */
template <class F>
void each_linear(const trirun_decoder& d, const Inputs& inputs, F&& f) {
  for (int64_t i = 0; i < d.layers; ++i) {
    const trirun_layer& l = d.layer[i];
    for (const trirun_linear* linear : {&l.q, &l.k, &l.v}) f(*linear, inputs.act[0]);
    f(l.o, inputs.act[1]);
    for (const trirun_linear* linear : {&l.gate, &l.up}) f(*linear, inputs.act[0]);
    f(l.down, inputs.act[2]);
  }
}

}  // namespace

#define TRIRUN_EXPORT extern "C" __attribute__((visibility("default")))

TRIRUN_EXPORT int trirun_cpu_decoder_products(const trirun_decoder* d, int64_t steps, int apart, int threads) {
  if (!trirun_cpu_decoder_workspace(d, 1) || steps <= 0 || threads < 1) return TRIRUN_BAD_SHAPE;
  if (!d->layer || !d->head) return TRIRUN_BAD_POINTER;
  Inputs inputs;
  char* memory = static_cast<char*>(scratch(kScratchDecoder, lay_out(*d, nullptr, &inputs)));
  if (!memory) return TRIRUN_NO_WORKSPACE;
  lay_out(*d, memory, &inputs);
  fill(*d, inputs);
  std::atomic<int> error{TRIRUN_OK};
  if (apart) {
    for (int64_t step = 0; step < steps && !error; ++step) {
      each_linear(*d, inputs, [&](const trirun_linear& linear, const trirun_act& act) {
        const int code = trirun_cpu_int2_gemm_act(&linear.weight, linear.n, &act, TRIRUN_F32, linear.bias, inputs.y,
                                                  linear.n, threads);
        if (code) error = code;
      });
      parallel(threads, [&](Team& team) { head_share(*d, inputs, team); });
    }
    return error;
  }
  parallel(threads, [&](Team& team) {
    for (int64_t step = 0; step < steps; ++step) {
      each_linear(*d, inputs, [&](const trirun_linear& linear, const trirun_act& act) {
        const Int2Job job = {&linear.weight, &act, linear.n, linear.bias, inputs.y, linear.n, TRIRUN_F32};
        const Range mine = team.share((linear.n + 63) / 64);
        if (!isa().int2_gemm(job, mine.begin, mine.end)) error = TRIRUN_NO_WORKSPACE;
      });
      head_share(*d, inputs, team);
    }
  });
  return error;
}
