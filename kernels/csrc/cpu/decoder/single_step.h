/* A step of a single row, the decoding of one sequence: little work, so what counts is how often threads wait.
 *
 * Every thread keeps the residual stream for itself and normalises and quantizes it for itself, which costs less than
 * waiting for another to do it. A layer has four barriers: threads meet where a product has read what others computed
 * (o, gate | up, down), and, where kv heads divide evenly among them, q | k | v and attention go head by head on one
 * thread. Shares are fixed: a thread meets the same weights in every step, and the same keys. */
#ifndef TRIRUN_CPU_DECODER_SINGLE_STEP_H
#define TRIRUN_CPU_DECODER_SINGLE_STEP_H

#include <initializer_list>

#include "model.h"

namespace trirun {
namespace {

class SingleStep : public Model {
 public:
  SingleStep(const trirun_decoder& decoder, const Batch& batch, const Shared& shared, const Generation* generation)
      : Model(decoder), batch_(batch), s(shared), generation_(generation) {}

  void run(Team& team) {
    Thread t(team, *this);
    if (!t.ready) failed = true;
    team.barrier();
    if (failed) return;
    int64_t token = batch_.tokens[0];
    for (int64_t step = 0;; ++step) {
      embed(t.x, token);
      for (int64_t i = 0; i < d.layers; ++i) layer(t, i);
      if (batch_.logit_count) head(t);
      if (!generation_) return;
      token = choose(t, step);
      if (step + 1 == generation_->steps || generation_->ends(&token, 1)) return;
      ++t.position;
    }
  }

 private:
  /* One thread's private memory, and its shares: divisions are slow enough to be made once. */
  struct Thread {
    Team& team;
    int64_t slot, position;
    bool ready;
    Range hidden, ffn, vocab;  // n tiles of o and down, of gate and up, of the head
    Range heads;               // kv heads, of which own_heads says whether no other thread needs to know
    bool own_heads;
    float* x;         // [hidden], the residual stream
    float* row;       // [widest_input]
    float* up;        // [columns of its share of up]
    float* attention; // attention_scratch
    char* act_memory;
    HeadInput head;
    trirun_act of_hidden, of_attention, of_ffn;  // one at a time

    Thread(Team& own_team, const SingleStep& step)
        : team(own_team), slot(step.batch_.segments[0].slot), position(step.batch_.segments[0].position) {
      Arena sizes(nullptr);
      lay_out(step.d, sizes);
      void* base = scratch(kScratchDecoder, sizes.used());
      ready = base != nullptr;
      Arena memory(base);
      lay_out(step.d, memory);
      const trirun_decoder& d = step.d;
      hidden = team.share(n_tiles_of(d.hidden));
      ffn = team.share(n_tiles_of(d.ffn));
      vocab = team.share(n_tiles_of(d.vocab));
      heads = team.share(d.kv_heads);
      own_heads = d.head_dim % kTileN == 0 && d.kv_heads % team.size() == 0;
      const size_t bytes = static_cast<size_t>(act_bytes(d, 1));
      trirun_cpu_act_init(&of_hidden, act_memory, bytes, 1, round_up(d.hidden, kPaddedK), d.act_bits);
      trirun_cpu_act_init(&of_attention, act_memory, bytes, 1, round_up(d.heads * d.head_dim, kPaddedK), d.act_bits);
      trirun_cpu_act_init(&of_ffn, act_memory, bytes, 1, round_up(d.ffn, kPaddedK), d.act_bits);
    }

    void lay_out(const trirun_decoder& d, Arena& memory) {
      x = memory.take<float>(d.hidden);
      row = memory.take<float>(widest_input(d));
      up = memory.take<float>(kTileN * (n_tiles_of(d.ffn) / team.size() + 1));
      attention = memory.take<float>(attention_scratch(d.head_dim));
      act_memory = memory.take<char>(act_bytes(d, 1));
      head = take_head_input(memory, d, 1);
    }
  };

  /* Fetches what other threads have just written, all lines at once: one after another they would take longer than
   * the work on them. */
  static void fetch(const float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(x + i);
  }

  /* A row of k numbers, through an RMS norm where there is one, quantized. */
  void quantize(Thread& t, const trirun_act& act, const float* x, int64_t k, const float* norm) {
    if (norm) ops_.rms_norm(t.row, x, norm, k, d.norm_eps);
    isa_.quantize(act, norm ? t.row : x, TRIRUN_F32, k, k, 0, 1);
  }

  void layer(Thread& t, int64_t index) {
    const trirun_layer& l = d.layer[index];
    const int64_t attended = d.heads * d.head_dim;
    quantize(t, t.of_hidden, t.x, d.hidden, l.attention_norm);
    if (t.own_heads)
      attend_own_heads(t, index);
    else
      attend_any_heads(t, index);
    t.team.barrier();
    fetch(s.attention, attended);
    quantize(t, t.of_attention, s.attention, attended, l.attention_sub_norm);
    multiply(t, l.o, t.of_attention);
    t.team.barrier();
    ops_.add(t.x, s.x, d.hidden);
    quantize(t, t.of_hidden, t.x, d.hidden, l.mlp_norm);
    gate_up(t, l);
    t.team.barrier();
    fetch(s.h, d.ffn);
    quantize(t, t.of_ffn, s.h, d.ffn, l.mlp_sub_norm);
    multiply(t, l.down, t.of_ffn);
    t.team.barrier();
    ops_.add(t.x, s.x, d.hidden);
  }

  /* A thread projects what its kv heads need, and attends with them. */
  void attend_own_heads(Thread& t, int64_t index) {
    const trirun_layer& l = d.layer[index];
    const int64_t n_tiles = d.head_dim / kTileN, begin = t.heads.begin * n_tiles, end = t.heads.end * n_tiles;
    float *key = s.qkv + d.heads * d.head_dim, *value = key + d.kv_heads * d.head_dim;
    const Int2Part parts[] = {
        part_of(l.q, t.of_hidden, s.qkv, qkv_width_, begin * group_, end * group_),
        part_of(l.k, t.of_hidden, key, qkv_width_, begin, end),
        part_of(l.v, t.of_hidden, value, qkv_width_, begin, end),
    };
    products(parts, 3);
    attend(t, index);
  }

  void attend_any_heads(Thread& t, int64_t index) {
    const trirun_layer& l = d.layer[index];
    const Range mine = t.team.share(n_tiles_of(l.q.n) + n_tiles_of(l.k.n) + n_tiles_of(l.v.n));
    Int2Part parts[3];
    int count = 0;
    int64_t first = 0;
    float* y = s.qkv;
    for (const trirun_linear* linear : {&l.q, &l.k, &l.v}) {
      const int64_t last = first + n_tiles_of(linear->n);
      const int64_t begin = larger(mine.begin, first), end = mine.end < last ? mine.end : last;
      if (begin < end) parts[count++] = part_of(*linear, t.of_hidden, y, qkv_width_, begin - first, end - first);
      first = last;
      y += linear->n;
    }
    if (count) products(parts, count);
    t.team.barrier();
    attend(t, index);
  }

  /* With the thread's kv heads, a few at a time. */
  void attend(Thread& t, int64_t layer) const {
    constexpr int64_t kMost = 8;
    AttentionJob jobs[kMost];
    for (int64_t first = t.heads.begin, count; first < t.heads.end; first += count) {
      count = t.heads.end - first < kMost ? t.heads.end - first : kMost;
      for (int64_t i = 0; i < count; ++i) {
        rotate_and_store(layer, t.slot, t.position, s.qkv, first + i);
        jobs[i] = job_of(layer, t.slot, t.position, s.qkv, s.attention, first + i);
      }
      ops_.attend_row(jobs, count, t.attention);
    }
  }

  /* What is to be added to the residual stream. */
  void multiply(Thread& t, const trirun_linear& linear, const trirun_act& act) {
    if (t.hidden.begin < t.hidden.end) product(part_of(linear, act, s.x, linear.n, t.hidden.begin, t.hidden.end));
  }

  void gate_up(Thread& t, const trirun_layer& l) {
    const auto [begin, end] = t.ffn;
    if (begin == end) return;
    const Int2Part parts[] = {part_of(l.gate, t.of_hidden, s.h, d.ffn, begin, end),
                              block_of(l.up, t.of_hidden, t.up, begin, end)};
    products(parts, 2);
    ops_.gate(s.h + begin * kTileN, t.up, columns_of(l.up, begin, end), d.activation);
  }

  void head(Thread& t) {
    ops_.rms_norm(t.row, t.x, d.final_norm, d.hidden, d.norm_eps);
    if (d.head_dtype == TRIRUN_HEAD_INT8) ops_.head_limbs(t.head, 0, t.row, d.hidden);
    head_tiles(t.row, t.head, 1, batch_.logits, t.vocab.begin, t.vocab.end);
  }

  /* The token that follows, from the logits of all threads. */
  int64_t choose(Thread& t, int64_t step) {
    const int64_t end = t.vocab.end * kTileN < d.vocab ? t.vocab.end * kTileN : d.vocab;
    s.best[t.team.rank()] = best_of(batch_.logits, t.vocab.begin * kTileN, end);
    t.team.barrier();
    const Best best = winner(s.best, t.team.size());
    if (t.team.rank() == 0) {
      generation_->out[step] = chosen(*generation_, 0, step, batch_.logits, best);
      *generation_->done = step + 1;
    }
    if (!generation_->draws_row(0)) return best.index;
    t.team.barrier();
    return generation_->out[step];
  }

  const Batch& batch_;
  Shared s;
  const Generation* generation_;
};

}  // namespace
}  // namespace trirun
#endif
