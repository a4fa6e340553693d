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
      if (d.inputs) make_inputs(t, token);
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
    Range hidden, vocab;  // n tiles of o and down, of the head
    Range input;          // n tiles of a layer's input_gate
    const trirun_layer* like = nullptr;  // a layer of the sizes of the following ones
    Range ffn;       // n tiles of gate and up
    Range heads;     // kv heads, of which own_heads says whether no other thread needs to know
    bool own_heads;
    float* x;         // [hidden], the residual stream
    float* before;    // [hidden], the residual stream before a parallel layer; a shared expert's output
    float* row;       // [widest_input]
    float* up;        // [columns of its share of up, of all of a row's experts]
    float* part;      // [columns of its share of hidden]
    char* expert_act; // of a row of each of the experts
    float* attention; // attention_scratch
    float* delta;     // delta_scratch
    char* act_memory;
    HeadInput head;
    trirun_act of_hidden, of_attention, of_ffn, of_input;  // one at a time

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
      vocab = team.share(n_tiles_of(d.vocab));
      input = team.share(n_tiles_of(input_size_of(d)));
      const size_t bytes = static_cast<size_t>(act_bytes(d, 1));
      trirun_cpu_act_init(&of_hidden, act_memory, bytes, 1, round_up(d.hidden, kPaddedK), d.act_bits);
      if (d.inputs)
        trirun_cpu_act_init(&of_input, act_memory, bytes, 1, round_up(d.inputs->size, kPaddedK), d.act_bits);
    }

    /* The shares of a layer. */
    void begin(const trirun_decoder& d, const trirun_layer& l) {
      if (like && like->ffn == l.ffn && like->heads == l.heads && like->kv_heads == l.kv_heads &&
          like->head_dim == l.head_dim && like->row_norms == l.row_norms && like->delta == l.delta &&
          like->q_gate.n == l.q_gate.n)
        return;
      like = &l;
      ffn = team.share(n_tiles_of(l.ffn));
      heads = team.share(l.delta ? l.delta->key_heads : l.kv_heads);
      own_heads = l.head_dim % kTileN == 0 && l.kv_heads % team.size() == 0 && !l.row_norms && !l.q_gate.n && !l.delta;
      const size_t bytes = static_cast<size_t>(act_bytes(d, 1));
      trirun_cpu_act_init(&of_attention, act_memory, bytes, 1, round_up(attended_of(l), kPaddedK), d.act_bits);
      trirun_cpu_act_init(&of_ffn, act_memory, bytes, 1, round_up(l.ffn, kPaddedK), d.act_bits);
    }

    void lay_out(const trirun_decoder& d, Arena& memory) {
      x = memory.take<float>(d.hidden);
      before = memory.take<float>(d.hidden);
      row = memory.take<float>(widest_input(d));
      const int64_t tiles = n_tiles_of(widest_ffn(d)) + most_chosen(d) * n_tiles_of(widest_expert(d));
      up = memory.take<float>(kTileN * (tiles / team.size() + 1));
      part = memory.take<float>(kTileN * (n_tiles_of(d.hidden) / team.size() + 1));
      expert_act = memory.take<char>(expert_act_bytes(d, most_chosen(d)));
      attention = memory.take<float>(attention_scratch(widest_head(d)));
      delta = memory.take<float>(widest_delta(d, 1));
      act_memory = memory.take<char>(act_bytes(d, 1));
      head = take_head_input(memory, d, 1);
    }
  };

  /* Fetches what other threads have just written, all lines at once: one after another they would take longer than
   * the work on them. */
  static void fetch(const float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += 16) __builtin_prefetch(x + i);
  }

  /* The residual stream, through a norm where there is one, quantized. */
  void quantize_x(Thread& t, const float* x, const float* weight, const float* bias) {
    if (weight) norm(t.row, x, weight, bias);
    isa_.quantize(t.of_hidden, weight ? t.row : x, TRIRUN_F32, d.hidden, d.hidden, 0, 1);
  }

  /* The feed-forward part's output, and where it is the last one the scale behind it. */
  void add_ffn(Thread& t, const trirun_layer& l) {
    add_part(t, l.mlp_post_norm);
    scale_ffn(t, l);
  }

  void scale_ffn(Thread& t, const trirun_layer& l) const {
    if (const float* scale = ffn_scale_of(l)) ops_.scale(t.x, d.hidden, *scale);
  }

  /* Every layer's own input; the first layer's barriers make them known to all threads. */
  void make_inputs(Thread& t, int64_t token) {
    if (d.inputs->projection_dtype == TRIRUN_PACKED) quantize_x(t, t.x, nullptr, nullptr);
    const Range tiles = t.team.share(n_tiles_of(inputs_width_of(d))), layers = t.team.share(d.layers);
    project_inputs(t.x, t.of_hidden, 1, s.inputs, tiles.begin, tiles.end);
    t.team.barrier();
    finish_inputs(s.inputs, token, layers.begin, layers.end, t.row);
  }

  /* The part of the layer's own input. */
  void add_input(Thread& t, const trirun_layer& l, int64_t index) {
    const int64_t size = l.input_gate.n;
    quantize_x(t, t.x, nullptr, nullptr);
    if (const auto [begin, end] = t.input; begin < end) {
      product(part_of(l.input_gate, t.of_hidden, s.h, size, begin, end));
      ops_.gate(s.h + begin * kTileN, s.inputs + index * size + begin * kTileN, columns_of(l.input_gate, begin, end),
                l.activation);
    }
    t.team.barrier();
    fetch(s.h, size);
    quantize(t, t.of_input, s.h, size, nullptr);
    multiply(t, l.input_out, t.of_input);
    t.team.barrier();
    add_part(t, l.input_norm);
    if (l.output_scale) ops_.scale(t.x, d.hidden, *l.output_scale);
  }

  /* A part's output, computed by all threads, to the residual stream. */
  void add_part(Thread& t, const float* post_norm) {
    if (!post_norm && d.residual_scale == 1) return ops_.add(t.x, s.x, d.hidden);
    memcpy(t.row, s.x, static_cast<size_t>(d.hidden) * sizeof(float));
    finish_part(t.row, post_norm);
    ops_.add(t.x, t.row, d.hidden);
  }

  /* A row of k numbers, through an RMS norm where there is one, quantized. */
  void quantize(Thread& t, const trirun_act& act, const float* x, int64_t k, const float* norm) {
    if (norm) ops_.rms_norm(t.row, x, norm, k, d.norm_eps);
    isa_.quantize(act, norm ? t.row : x, TRIRUN_F32, k, k, 0, 1);
  }

  void layer(Thread& t, int64_t index) {
    const trirun_layer& l = d.layer[index];
    const int64_t attended = attended_of(l);
    t.begin(d, l);
    if (l.parallel) memcpy(t.before, t.x, static_cast<size_t>(d.hidden) * sizeof(float));
    quantize_x(t, t.x, l.attention_norm, l.attention_norm_bias);
    if (t.own_heads)
      attend_own_heads(t, l);
    else
      attend_any_heads(t, l);
    t.team.barrier();
    fetch(s.attention, attended);
    if (l.q_gate.n) {
      gate_attended(l, t.row, s.attention, s.qkv);
      quantize(t, t.of_attention, t.row, attended, nullptr);
    } else {
      quantize(t, t.of_attention, s.attention, attended, l.attention_sub_norm);
    }
    multiply(t, l.o, t.of_attention);
    t.team.barrier();
    add_part(t, l.attention_post_norm);
    quantize_x(t, l.parallel ? t.before : t.x, l.mlp_norm, l.mlp_norm_bias);
    if (l.mixture)
      mixture(t, l, *l.mixture, l.mlp_norm ? t.row : l.parallel ? t.before : t.x);
    else
      feed_forward(t, l);
    if (l.input_gate.n) add_input(t, l, index);
  }

  /* On the row in t.of_hidden. */
  void feed_forward(Thread& t, const trirun_layer& l) {
    gate_up(t, l);
    t.team.barrier();
    fetch(s.h, l.ffn);
    quantize(t, t.of_ffn, s.h, l.ffn, l.mlp_sub_norm);
    multiply(t, l.down, t.of_ffn);
    t.team.barrier();
    add_ffn(t, l);
  }

  /* The feed-forward part of experts, of a row x: router, gate | up of all chosen experts and the shared one, down. */
  void mixture(Thread& t, const trirun_layer& l, const trirun_mixture& m, const float* x) {
    const Range outputs = t.team.share(router_outputs(m));
    route(m, x, 1, s.router, outputs.begin, outputs.end);
    trirun_act act;
    const size_t bytes = static_cast<size_t>(expert_act_bytes(d, most_chosen(d)));
    if (l.shared_norm) {
      /* The shared expert's own input, beside the others'. */
      norm(t.row, l.parallel ? t.before : t.x, l.shared_norm, nullptr);
      trirun_cpu_act_init(&act, t.expert_act, bytes, 1, l.up.weight.k, d.act_bits);
      isa_.quantize(act, t.row, TRIRUN_F32, d.hidden, d.hidden, 0, 1);
    }
    t.team.barrier();
    Choice choice;
    choose_experts(m, s.router, &choice);
    experts_gate_up(t, l, m, choice, l.shared_norm ? act : t.of_hidden);
    t.team.barrier();
    fetch(s.expert_h, m.top_k * m.size);
    trirun_cpu_act_init(&act, t.expert_act, bytes, m.top_k, m.down[0].weight.k, d.act_bits);
    isa_.quantize(act, s.expert_h, TRIRUN_F32, m.size, m.size, 0, m.top_k);
    if (l.ffn) quantize(t, t.of_ffn, s.h, l.ffn, nullptr);
    const bool normed = l.shared_post_norm || l.experts_post_norm;
    const auto [begin, end] = t.hidden;
    if (begin < end) {
      float* sum = s.x + begin * kTileN;
      const int64_t columns = smaller(end * kTileN, d.hidden) - begin * kTileN;
      memset(sum, 0, static_cast<size_t>(columns) * sizeof(float));
      for (int64_t j = 0; j < m.top_k; ++j) {
        product(block_of(m.down[choice.ids[j]], rows_of(act, j, 1), t.part, begin, end));
        ops_.add_scaled(sum, t.part, columns, choice.weights[j]);
      }
      if (l.ffn && normed) {
        product(part_of(l.down, t.of_ffn, s.shared_out, d.hidden, begin, end));
      } else if (l.ffn) {
        product(block_of(l.down, t.of_ffn, t.part, begin, end));
        ops_.add_scaled(sum, t.part, columns, choice.shared);
      }
    }
    t.team.barrier();
    if (!normed) return add_ffn(t, l);
    const size_t row_bytes = static_cast<size_t>(d.hidden) * sizeof(float);
    memcpy(t.row, s.x, row_bytes);
    if (l.ffn) memcpy(t.before, s.shared_out, row_bytes);
    finish_mixture(l, t.row, t.before, choice.shared);
    ops_.add(t.x, t.row, d.hidden);
    scale_ffn(t, l);
  }

  /* n tiles of all chosen experts and the shared one, one after another, are shared out. of_shared: its input. */
  void experts_gate_up(Thread& t, const trirun_layer& l, const trirun_mixture& m, const Choice& choice,
                       const trirun_act& of_shared) {
    const int64_t tiles = n_tiles_of(m.size);
    const Range mine = t.team.share(m.top_k * tiles + n_tiles_of(l.ffn));
    Int2Part parts[2 * (kMostChosen + 1)];
    struct Gated {
      float *h, *up;
      int64_t columns;
    } gated[kMostChosen + 1];
    int count = 0, alike = 0; /* alike: those that read the same row */
    float* up = t.up;
    for (int64_t j = 0; j <= m.top_k; ++j) {
      const bool shared = j == m.top_k;
      const trirun_linear &gate_of = shared ? l.gate : m.gate[choice.ids[j]],
                          &up_of = shared ? l.up : m.up[choice.ids[j]];
      const int64_t first = j * tiles, last = first + (shared ? n_tiles_of(l.ffn) : tiles);
      const int64_t begin = larger(mine.begin, first) - first, end = smaller(mine.end, last) - first;
      if (begin >= end) continue;
      float* h = shared ? s.h : s.expert_h + j * m.size;
      const trirun_act& input = shared ? of_shared : t.of_hidden;
      parts[2 * count] = part_of(gate_of, input, h, gate_of.n, begin, end);
      parts[2 * count + 1] = block_of(up_of, input, up, begin, end);
      gated[count++] = {h + begin * kTileN, up, columns_of(up_of, begin, end)};
      up += (end - begin) * kTileN;
      if (!shared || !l.shared_norm) alike = count;
    }
    if (alike) products(parts, 2 * alike);
    if (count > alike) products(parts + 2 * alike, 2 * (count - alike));
    for (int i = 0; i < count; ++i) activate(gated[i].h, gated[i].up, gated[i].columns, m.activation, m.limit);
  }

  /* A thread projects what its kv heads need, and attends with them. */
  void attend_own_heads(Thread& t, const trirun_layer& l) {
    const int64_t n_tiles = l.head_dim / kTileN, begin = t.heads.begin * n_tiles, end = t.heads.end * n_tiles;
    const int64_t width = qkv_width_of(l), group = group_of(l);
    float *key = s.qkv + attended_of(l), *value = key + kv_width_of(l);
    const Int2Part parts[] = {
        part_of(l.q, t.of_hidden, s.qkv, width, begin * group, end * group),
        part_of(l.k, t.of_hidden, key, width, begin, end),
        part_of(l.v, t.of_hidden, value, width, begin, end),
    };
    products(parts, shares_cache(l) ? 1 : 3);
    attend(t, l);
  }

  void attend_any_heads(Thread& t, const trirun_layer& l) {
    const int64_t width = qkv_width_of(l);
    const trirun_linear* inputs[kMostInputs];
    const int linears = inputs_of(l, inputs);
    int64_t n_tiles = 0;
    for (int i = 0; i < linears; ++i) n_tiles += n_tiles_of(inputs[i]->n);
    const Range mine = t.team.share(n_tiles);
    Int2Part parts[kMostInputs];
    int count = 0;
    int64_t first = 0;
    float* y = s.qkv;
    for (int i = 0; i < linears; ++i) {
      const trirun_linear* linear = inputs[i];
      const int64_t last = first + n_tiles_of(linear->n);
      const int64_t begin = larger(mine.begin, first), end = mine.end < last ? mine.end : last;
      if (begin < end) parts[count++] = part_of(*linear, t.of_hidden, y, width, begin - first, end - first);
      first = last;
      y += linear->n;
    }
    if (count) products(parts, count);
    if (l.delta) {
      const Range gates = t.team.share(2 * l.delta->value_heads);
      delta_gates(*l.delta, t.row, s.qkv, gates.begin, gates.end);
    }
    t.team.barrier();
    if (l.delta) return mix(t, *l.delta);
    if (l.row_norms) {
      if (t.team.rank() == 0) norm_rows(l, s.qkv);
      t.team.barrier();
    }
    attend(t, l);
  }

  /* Gated DeltaNet, with the thread's key heads. */
  void mix(Thread& t, const trirun_delta_layer& l) const {
    for (int64_t head = t.heads.begin; head < t.heads.end; ++head)
      DeltaHead(ops_, l, d.norm_eps, head)
          .run(t.slot, t.position, 1, s.qkv, s.attention, l.value_heads * l.value_dim, t.delta);
  }

  /* With the thread's kv heads, a few at a time. */
  void attend(Thread& t, const trirun_layer& l) const {
    constexpr int64_t kMost = 8;
    AttentionJob jobs[kMost];
    for (int64_t first = t.heads.begin, count; first < t.heads.end; first += count) {
      count = t.heads.end - first < kMost ? t.heads.end - first : kMost;
      for (int64_t i = 0; i < count; ++i) {
        rotate_and_store(l, t.slot, t.position, s.qkv, first + i);
        jobs[i] = job_of(l, t.slot, t.position, s.qkv, s.attention, first + i);
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
    float* h = s.h + begin * kTileN;
    if (l.gate.n) {
      const Int2Part parts[] = {part_of(l.gate, t.of_hidden, s.h, l.ffn, begin, end),
                                block_of(l.up, t.of_hidden, t.up, begin, end)};
      products(parts, 2);
    } else {
      product(part_of(l.up, t.of_hidden, s.h, l.ffn, begin, end));
    }
    ops_.gate(h, l.gate.n ? t.up : nullptr, columns_of(l.up, begin, end), l.activation);
  }

  void head(Thread& t) {
    if (batch_.states) {
      if (t.team.rank() == 0) norm(batch_.logits, t.x, d.final_norm, d.final_norm_bias);
      return;
    }
    norm(t.row, t.x, d.final_norm, d.final_norm_bias);
    const HeadRows input = {t.row, t.head, head_act(t.act_memory, 1)};
    prepare_head_row(input, 0);
    head_tiles(input, 1, batch_.logits, t.vocab.begin, t.vocab.end);
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
