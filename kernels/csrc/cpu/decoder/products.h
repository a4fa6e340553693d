/* The bound of decoding: a step's packed products and its head on inputs quantized beforehand, and nothing that lies
 * between them. Outputs are dropped; the cache is neither read nor written. */
#ifndef TRIRUN_CPU_DECODER_PRODUCTS_H
#define TRIRUN_CPU_DECODER_PRODUCTS_H

#include <initializer_list>

#include "model.h"

namespace trirun {
namespace {

class Products : public Model {
 public:
  /* Inputs are made once, for layers of one width; and which experts a step reads is known when it runs. */
  static bool can_run(const trirun_decoder& d) {
    bool alike = true;
    for (int64_t i = 0; i < d.layers; ++i)
      alike &=
          !d.layer[i].mixture && d.layer[i].ffn == d.layer->ffn && attended_of(d.layer[i]) == attended_of(*d.layer);
    return alike && !d.inputs;
  }

  /* Of layers that can_run. Inputs lie in the calling thread's scratch memory; `failed` where there is none. */
  Products(const trirun_decoder& decoder, int threads)
      : Model(decoder), threads_(threads < kMaxTeam ? threads : kMaxTeam) {
    Arena sizes(nullptr);
    lay_out(sizes);
    void* base = scratch(kScratchDecoder, sizes.used());
    failed = base == nullptr;
    if (failed) return;
    Arena memory(base);
    lay_out(memory);
    for (int64_t i = 0; i < widest_input(d); ++i) x_[i] = static_cast<float>(i * 37 % 101) / 50 - 1;
    for (int i = 0; i < 3; ++i) isa_.quantize(acts_[i], x_, TRIRUN_F32, inputs_[i], inputs_[i], 0, 1);
    prepare_head_row(head_, 0);
  }

  /* One call after another, as trirun_cpu_int2_gemm_act makes them. */
  int run_apart(int64_t steps, int threads) {
    int error = TRIRUN_OK;
    for (int64_t step = 0; step < steps && !error; ++step) {
      each_linear([&](const trirun_linear& linear, const trirun_act& act) {
        const int code =
            trirun_cpu_int2_gemm_act(&linear.weight, linear.n, &act, TRIRUN_F32, linear.bias, y_, linear.n, threads);
        if (code) error = code;
      });
      parallel(threads, [&](Team& team) { head(team); });
    }
    return error;
  }

  /* In one parallel region, whose threads never wait for each other. */
  void run(Team& team, int64_t steps) {
    for (int64_t step = 0; step < steps; ++step) {
      each_linear([&](const trirun_linear& linear, const trirun_act& act) {
        const Range mine = team.share(n_tiles_of(linear.n));
        product(part_of(linear, act, outputs_of(team), linear.n, mine.begin, mine.end));
      });
      head(team);
    }
  }

 private:
  void lay_out(Arena& memory) {
    x_ = memory.take<float>(widest_input(d));
    width_ = round_up(larger(larger(widest_input(d), widest(d, qkv_width_of)), d.vocab), 16);
    y_ = memory.take<float>(threads_ * width_);
    for (int i = 0; i < 3; ++i) {
      const int64_t k = round_up(inputs_[i], kPaddedK);
      const size_t bytes = trirun_cpu_act_bytes(1, k, d.act_bits);
      char* act = memory.take<char>(static_cast<int64_t>(bytes));
      if (act) trirun_cpu_act_init(&acts_[i], act, bytes, 1, k, d.act_bits);
    }
    head_.x = x_;
    head_.limbs = take_head_input(memory, d, 1);
    if (char* act = memory.take<char>(act_bytes(d, 1))) head_.act = head_act(act, 1);
  }

  /* Outputs of a thread's own: another may be at another product. */
  float* outputs_of(const Team& team) const { return y_ + team.rank() * width_; }

  /* This thread's share of the head. */
  void head(const Team& team) {
    const Range mine = team.share(n_tiles_of(d.vocab));
    head_tiles(head_, 1, outputs_of(team), mine.begin, mine.end);
  }

  /* f(linear, its input) in the order of a step. */
  template <class F>
  void each_linear(F&& f) const {
    for (int64_t i = 0; i < d.layers; ++i) {
      const trirun_layer& l = d.layer[i];
      const trirun_linear* inputs[kMostInputs];
      const int count = inputs_of(l, inputs);
      for (int j = 0; j < count; ++j) f(*inputs[j], acts_[0]);
      f(l.o, acts_[1]);
      for (const trirun_linear* linear : {&l.gate, &l.up})
        if (linear->n) f(*linear, acts_[0]);
      f(l.down, acts_[2]);
    }
  }

  const int64_t inputs_[3] = {d.hidden, attended_of(d.layer[0]), d.layer[0].ffn};  // in_features of acts_
  float* x_;
  float* y_;  // [threads][width_]
  int64_t width_;
  const int64_t threads_;
  trirun_act acts_[3];
  HeadRows head_;
};

}  // namespace
}  // namespace trirun
#endif
