/* A step of several rows: prompts, and sequences that decode together.
 *
 * A layer is five phases with a barrier after each: q|k|v on the normalised, quantized rows; rotation, cache and
 * attention; o added to the residual; gate|up with the activation; down added to the residual. Within a phase threads
 * take n tiles, heads or rows from shared queues. */
#ifndef TRIRUN_CPU_DECODER_BATCH_STEP_H
#define TRIRUN_CPU_DECODER_BATCH_STEP_H

#include "model.h"

namespace trirun {
namespace {

class BatchStep : public Model {
 public:
  BatchStep(const trirun_decoder& decoder, const Batch& batch, const Shared& shared, const Generation* generation)
      : Model(decoder), batch_(batch), rows_(batch.rows), s(shared), queues_(shared.cursors), generation_(generation),
        single_positions_(batch.segment_count == batch.rows) {
    int64_t row = 0;
    for (int64_t i = 0; i < batch.segment_count; ++i)
      for (int64_t j = 0; j < batch.segments[i].count; ++j, ++row) {
        s.slot[row] = static_cast<int32_t>(batch.segments[i].slot);
        s.position[row] = static_cast<int32_t>(batch.segments[i].position + j);
      }
  }

  void run(Team& team) {
    Thread t(team, *this);
    if (!t.memory) failed = true;
    team.barrier();
    if (failed) return;
    const Range mine = team.share(rows_);
    for (int64_t r = mine.begin; r < mine.end; ++r) embed(s.x + r * d.hidden, batch_.tokens[r]);
    team.barrier();
    forward(t, batch_.tokens);
    if (generation_) generate(t, *generation_);
  }

 private:
  /* One thread's private memory. */
  struct Thread {
    Team& team;
    int64_t phase = 0;
    void* memory;
    float* row;        // [widest_input]
    float* block;      // [rows][columns of one chunk]
    float* attention;  // attention_scratch
    float* delta;      // delta_scratch
    trirun_act act;

    Thread(Team& own_team, const BatchStep& step) : team(own_team) {
      Arena sizes(nullptr);
      lay_out(step, sizes);
      memory = scratch(kScratchDecoder, sizes.used());
      Arena arrays(memory);
      lay_out(step, arrays);
    }

    void lay_out(const BatchStep& step, Arena& arrays) {
      const int64_t widest_output = larger(n_tiles_of(widest_ffn(step.d)), n_tiles_of(step.d.hidden));
      const int64_t chunk = larger(step.chunk_of(team.size(), widest_output), n_tiles_of(widest_expert(step.d)));
      row = arrays.take<float>(widest_input(step.d));
      block = arrays.take<float>(step.rows_ * chunk * kTileN);
      attention = arrays.take<float>(attention_scratch(widest_head(step.d)));
      delta = arrays.take<float>(widest_delta(step.d, step.rows_));
    }
  };

  void forward(Thread& t, const int64_t* tokens) {
    if (d.inputs) make_inputs(t, tokens);
    for (int64_t i = 0; i < d.layers; ++i) layer(t, i);
    if (batch_.logit_count) head(t);
  }

  /* After a step: its tokens, and further steps on them. */
  void generate(Thread& t, const Generation& generation) {
    const Range mine = t.team.share(rows_), columns = t.team.share(d.vocab);
    for (int64_t step = 0;; ++step) {
      for (int64_t r = 0; r < rows_; ++r)
        s.best[r * kMaxTeam + t.team.rank()] = best_of(batch_.logits + r * d.vocab, columns.begin, columns.end);
      t.team.barrier();
      int64_t* tokens = generation.out + step * rows_;
      for (int64_t r = mine.begin; r < mine.end; ++r) {
        const Best best = winner(s.best + r * kMaxTeam, t.team.size());
        tokens[r] = chosen(generation, r, step, batch_.logits + r * d.vocab, best);
        ++s.position[r];
        if (tokens[r] >= 0) embed(s.x + r * d.hidden, tokens[r]);
      }
      t.team.barrier();
      if (t.team.rank() == 0) *generation.done = step + 1;
      if (step + 1 == generation.steps || generation.ends(tokens, rows_)) return;
      forward(t, tokens);
    }
  }

  /* Every layer's own inputs; the layers' barriers make them known to all threads. */
  void make_inputs(Thread& t, const int64_t* tokens) {
    const int64_t width = inputs_width_of(d), n_tiles = n_tiles_of(width);
    if (d.inputs->projection_dtype == TRIRUN_PACKED) quantize(t, s.x, d.hidden, round_up(d.hidden, kPaddedK), nullptr);
    each(t, n_tiles, chunk_of(t.team.size(), n_tiles),
         [&](int64_t begin, int64_t end) { project_inputs(s.x, t.act, rows_, s.inputs, begin, end); });
    const Range mine = t.team.share(rows_);
    for (int64_t r = mine.begin; r < mine.end; ++r) finish_inputs(s.inputs + r * width, tokens[r], 0, d.layers, t.row);
  }

  /* n tiles taken from a queue at once. Few rows: four chunks per thread, for balance, but four n tiles, which kernels
   * read side by side, where a thread gets so many. Many rows: two chunks, because a kernel brings the rows into an
   * order of its own on every call. */
  int64_t chunk_of(int threads, int64_t n_tiles) const {
    const int64_t share = (n_tiles + threads - 1) / threads;
    if (rows_ > 16) return larger(1, share / 2);
    return smaller(larger(4, share / 16 * 4), share);
  }

  template <class Body>
  void each(Thread& t, int64_t total, int64_t chunk, Body&& body) {
    queues_.each(t.team, &t.phase, total, chunk, body);
    t.team.barrier();
  }

  /* Leaves rows of `source`, through a norm where there is one, quantized in t.act. */
  void quantize(Thread& t, const float* source, int64_t k, int64_t padded, const float* norm) {
    quantize_by(t, source, k, padded, norm != nullptr,
                [&](const float* row) { ops_.rms_norm(t.row, row, norm, k, d.norm_eps); });
  }

  /* The same of the residual stream. */
  void quantize_x(Thread& t, const float* x, int64_t padded, const float* weight, const float* bias) {
    quantize_by(t, x, d.hidden, padded, weight != nullptr, [&](const float* row) { norm(t.row, row, weight, bias); });
  }

  /* `norm` leaves a row in t.row. */
  template <class Norm>
  void quantize_by(Thread& t, const float* source, int64_t k, int64_t padded, bool normed, Norm&& norm) {
    trirun_cpu_act_init(&t.act, s.act, static_cast<size_t>(act_bytes(d, rows_)), rows_, padded, d.act_bits);
    const Range rows = t.team.share(rows_);
    if (!normed) {
      isa_.quantize(t.act, source, TRIRUN_F32, k, k, rows.begin, rows.end);
    } else {
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        norm(source + r * k);
        /* A stride of 0: row r is read where row 0 lies. */
        isa_.quantize(t.act, t.row, TRIRUN_F32, k, 0, r, r + 1);
      }
    }
    t.team.barrier();
  }

  void layer(Thread& t, int64_t index) {
    const trirun_layer& l = d.layer[index];
    quantize_mixer_input(t, l);
    if (l.parallel) {
      const Range rows = t.team.share(rows_);
      memcpy(s.before + rows.begin * d.hidden, s.x + rows.begin * d.hidden,
             static_cast<size_t>((rows.end - rows.begin) * d.hidden) * sizeof(float));
    }
    project_qkv(t, l);
    if (l.delta)
      mix(t, *l.delta);
    else
      attend(t, l);
    if (l.q_gate.n)
      quantize_gated(t, l);
    else
      quantize(t, s.attention, attended_of(l), l.o.weight.k, l.attention_sub_norm);
    add_to_residual(t, l.o, l.attention_post_norm);
    if (l.mixture) {
      mixture(t, l, *l.mixture);
    } else {
      quantize_x(t, l.parallel ? s.before : s.x, l.up.weight.k, l.mlp_norm, l.mlp_norm_bias);
      gate_up(t, l);
      quantize(t, s.h, l.ffn, l.down.weight.k, l.mlp_sub_norm);
      add_to_residual(t, l.down, l.mlp_post_norm, ffn_scale_of(l));
    }
    if (l.input_gate.n) add_input(t, l, index);
  }

  /* The part of the layer's own input. */
  void add_input(Thread& t, const trirun_layer& l, int64_t index) {
    const int64_t size = l.input_gate.n, n_tiles = n_tiles_of(size), width = inputs_width_of(d);
    quantize_x(t, s.x, l.input_gate.weight.k, nullptr, nullptr);
    each(t, n_tiles, chunk_of(t.team.size(), n_tiles), [&](int64_t begin, int64_t end) {
      product(part_of(l.input_gate, t.act, s.h, size, begin, end));
      const float* input = s.inputs + index * size + begin * kTileN;
      for (int64_t r = 0; r < rows_; ++r)
        ops_.gate(s.h + r * size + begin * kTileN, input + r * width, columns_of(l.input_gate, begin, end),
                  l.activation);
    });
    quantize(t, s.h, size, l.input_out.weight.k, nullptr);
    add_to_residual(t, l.input_out, l.input_norm, l.output_scale);
  }

  /* The rows of the mixer's input, quantized; of Gated DeltaNet, the gates that follow from them too. */
  void quantize_mixer_input(Thread& t, const trirun_layer& l) {
    const trirun_linear* inputs[kMostInputs];
    inputs_of(l, inputs);
    const int64_t padded = inputs[0]->weight.k;
    if (!l.delta) return quantize_x(t, s.x, padded, l.attention_norm, l.attention_norm_bias);
    quantize_by(t, s.x, d.hidden, padded, true, [&](const float* x) {
      norm(t.row, x, l.attention_norm, l.attention_norm_bias);
      float* row = s.qkv + (x - s.x) / d.hidden * qkv_width_of(l);
      delta_gates(*l.delta, t.row, row, 0, 2 * l.delta->value_heads);
    });
  }

  void quantize_gated(Thread& t, const trirun_layer& l) {
    const int64_t k = attended_of(l);
    quantize_by(t, s.attention, k, l.o.weight.k, true, [&](const float* attended) {
      gate_attended(l, t.row, attended, s.qkv + (attended - s.attention) / k * qkv_width_of(l));
    });
  }

  /* Gated DeltaNet: key heads of sequences. */
  void mix(Thread& t, const trirun_delta_layer& l) {
    const int64_t width = delta_width_of(l), ldo = l.value_heads * l.value_dim;
    each(t, batch_.segment_count * l.key_heads, 1, [&](int64_t item, int64_t) {
      const int64_t segment = item / l.key_heads;
      int64_t first = 0;
      for (int64_t i = 0; i < segment; ++i) first += batch_.segments[i].count;
      DeltaHead(ops_, l, d.norm_eps, item % l.key_heads)
          .run(s.slot[first], s.position[first], batch_.segments[segment].count, s.qkv + first * width,
               s.attention + first * ldo, ldo, t.delta);
    });
  }

  /* The feed-forward part of experts. Normalised rows, and what is to be added in the end, lie where attention's output
   * was. */
  void mixture(Thread& t, const trirun_layer& l, const trirun_mixture& m) {
    const Range rows = t.team.share(rows_), outputs = t.team.share(router_outputs(m));
    const float* x = l.parallel ? s.before : s.x;
    if (l.mlp_norm) {
      for (int64_t r = rows.begin; r < rows.end; ++r)
        norm(s.attention + r * d.hidden, x + r * d.hidden, l.mlp_norm, l.mlp_norm_bias);
      x = s.attention;
    }
    quantize(t, x, d.hidden, m.gate[0].weight.k, nullptr);
    route(m, x, rows_, s.router, outputs.begin, outputs.end);
    t.team.barrier();
    for (int64_t r = rows.begin; r < rows.end; ++r) choose_experts(m, s.router + r * router_outputs(m), s.choices + r);
    t.team.barrier();
    if (t.team.rank() == 0) s.pairs.sort(m, s.choices, rows_);
    t.team.barrier();
    const Range pairs = t.team.share(rows_ * m.top_k);
    const size_t bytes = static_cast<size_t>(expert_act_bytes(d, rows_ * most_chosen(d)));
    trirun_act act;
    trirun_cpu_act_init(&act, s.expert_act, bytes, rows_ * m.top_k, m.gate[0].weight.k, d.act_bits);
    for (int64_t i = pairs.begin; i < pairs.end; ++i) copy_row(act, i, t.act, s.pairs.order[i] / m.top_k);
    t.team.barrier();
    if (l.ffn) shared_expert(t, l);
    each_expert(t, n_tiles_of(m.size), [&](int64_t e, int64_t first, int64_t count, int64_t begin, int64_t end) {
      const trirun_act input = rows_of(act, first, count);
      float* h = s.expert_h + first * m.size;
      product(part_of(m.gate[e], input, h, m.size, begin, end));
      product(block_of(m.up[e], input, t.block, begin, end));
      const int64_t columns = columns_of(m.up[e], begin, end);
      for (int64_t r = 0; r < count; ++r)
        activate(h + r * m.size + begin * kTileN, t.block + r * columns, columns, m.activation, m.limit);
    });
    trirun_cpu_act_init(&act, s.expert_act, bytes, rows_ * m.top_k, m.down[0].weight.k, d.act_bits);
    isa_.quantize(act, s.expert_h, TRIRUN_F32, m.size, m.size, pairs.begin, pairs.end);
    t.team.barrier();
    each_expert(t, n_tiles_of(d.hidden), [&](int64_t e, int64_t first, int64_t count, int64_t begin, int64_t end) {
      product(part_of(m.down[e], rows_of(act, first, count), s.expert_out + first * d.hidden, d.hidden, begin, end));
    });
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      float* sum = s.attention + r * d.hidden;
      memset(sum, 0, static_cast<size_t>(d.hidden) * sizeof(float));
      for (int64_t j = 0; j < m.top_k; ++j)
        ops_.add_scaled(sum, s.expert_out + s.pairs.places[r * m.top_k + j] * d.hidden, d.hidden,
                        s.choices[r].weights[j]);
      finish_mixture(l, sum, s.shared_out + r * d.hidden, s.choices[r].shared);
      ops_.add(s.x + r * d.hidden, sum, d.hidden);
      if (const float* scale = ffn_scale_of(l)) ops_.scale(s.x + r * d.hidden, d.hidden, *scale);
    }
    t.team.barrier();
  }

  /* The shared expert's output for the rows in t.act, or those that its own norm makes, to s.shared_out. */
  void shared_expert(Thread& t, const trirun_layer& l) {
    if (l.shared_norm) quantize_x(t, l.parallel ? s.before : s.x, l.up.weight.k, l.shared_norm, nullptr);
    gate_up(t, l);
    quantize(t, s.h, l.ffn, l.down.weight.k, nullptr);
    const int64_t n_tiles = n_tiles_of(d.hidden);
    each(t, n_tiles, chunk_of(t.team.size(), n_tiles),
         [&](int64_t begin, int64_t end) { product(part_of(l.down, t.act, s.shared_out, d.hidden, begin, end)); });
  }

  /* body(expert, its first pair, its pairs, n tiles) for every expert that has pairs, its n tiles in as many pieces as
   * keep the threads busy. */
  template <class Body>
  void each_expert(Thread& t, int64_t n_tiles, Body&& body) {
    const int64_t touched = *s.pairs.touched;
    const int64_t pieces = smaller(n_tiles, larger(1, 4 * t.team.size() / touched));
    each(t, touched * pieces, 1, [&](int64_t item, int64_t) {
      const int64_t i = item / pieces, first = s.pairs.firsts[i];
      const Range tiles = share_of(n_tiles, static_cast<int>(item % pieces), static_cast<int>(pieces));
      body(s.pairs.experts[i], first, s.pairs.firsts[i + 1] - first, tiles.begin, tiles.end);
    });
  }

  void project_qkv(Thread& t, const trirun_layer& l) {
    const trirun_linear* parts[kMostInputs];
    const int count = inputs_of(l, parts);
    float* outputs[kMostInputs] = {s.qkv};
    int64_t firsts[kMostInputs + 1] = {0};
    for (int i = 0; i < count; ++i) firsts[i + 1] = firsts[i] + n_tiles_of(parts[i]->n);
    for (int i = 1; i < count; ++i) outputs[i] = outputs[i - 1] + parts[i - 1]->n;
    each(t, firsts[count], chunk_of(t.team.size(), firsts[count]), [&](int64_t begin, int64_t end) {
      for (int i = 0; i < count; ++i) {
        const int64_t from = larger(begin, firsts[i]), to = end < firsts[i + 1] ? end : firsts[i + 1];
        if (from < to)
          product(part_of(*parts[i], t.act, outputs[i], qkv_width_of(l), from - firsts[i], to - firsts[i]));
      }
    });
    if (!l.row_norms) return;
    const Range rows = t.team.share(rows_);
    for (int64_t r = rows.begin; r < rows.end; ++r) norm_rows(l, s.qkv + r * qkv_width_of(l));
    t.team.barrier();
  }

  /* output_scale: of the whole stream behind it, or null. */
  void add_to_residual(Thread& t, const trirun_linear& linear, const float* post_norm,
                       const float* output_scale = nullptr) {
    if (post_norm || d.residual_scale != 1 || output_scale) return add_finished(t, linear, post_norm, output_scale);
    const int64_t n_tiles = n_tiles_of(linear.n);
    each(t, n_tiles, chunk_of(t.team.size(), n_tiles), [&](int64_t begin, int64_t end) {
      const int64_t columns = columns_of(linear, begin, end);
      product(block_of(linear, t.act, t.block, begin, end));
      for (int64_t r = 0; r < rows_; ++r) ops_.add(s.x + r * d.hidden + begin * kTileN, t.block + r * columns, columns);
    });
  }

  /* The same where whole rows are needed first: in the place of the attention's output, which is read no more. */
  void add_finished(Thread& t, const trirun_linear& linear, const float* post_norm, const float* output_scale) {
    const int64_t n_tiles = n_tiles_of(linear.n);
    each(t, n_tiles, chunk_of(t.team.size(), n_tiles),
         [&](int64_t begin, int64_t end) { product(part_of(linear, t.act, s.attention, d.hidden, begin, end)); });
    const Range rows = t.team.share(rows_);
    for (int64_t r = rows.begin; r < rows.end; ++r) {
      finish_part(s.attention + r * d.hidden, post_norm);
      ops_.add(s.x + r * d.hidden, s.attention + r * d.hidden, d.hidden);
      if (output_scale) ops_.scale(s.x + r * d.hidden, d.hidden, *output_scale);
    }
    t.team.barrier();
  }

  void gate_up(Thread& t, const trirun_layer& l) {
    const int64_t n_tiles = n_tiles_of(l.ffn);
    each(t, n_tiles, chunk_of(t.team.size(), n_tiles), [&](int64_t begin, int64_t end) {
      const int64_t columns = columns_of(l.up, begin, end);
      product(part_of(l.gate.n ? l.gate : l.up, t.act, s.h, l.ffn, begin, end));
      if (l.gate.n) product(block_of(l.up, t.act, t.block, begin, end));
      for (int64_t r = 0; r < rows_; ++r)
        ops_.gate(s.h + r * l.ffn + begin * kTileN, l.gate.n ? t.block + r * columns : nullptr, columns, l.activation);
    });
  }

  void store(const trirun_layer& l, int64_t r, int64_t kv_head) const {
    rotate_and_store(l, s.slot[r], s.position[r], s.qkv + r * qkv_width_of(l), kv_head);
  }

  AttentionJob job(const trirun_layer& l, int64_t first_row, int64_t kv_head) const {
    return job_of(l, s.slot[first_row], s.position[first_row], s.qkv + first_row * qkv_width_of(l),
                  s.attention + first_row * attended_of(l), kv_head);
  }

  void attend(Thread& t, const trirun_layer& l) {
    const int64_t group = group_of(l);
    if (single_positions_) {
      /* No row needs another row's keys: cache and attention are one phase. */
      each(t, rows_ * l.kv_heads, 1, [&](int64_t item, int64_t) {
        const int64_t r = item / l.kv_heads, kv_head = item % l.kv_heads;
        store(l, r, kv_head);
        attend_one(job(l, r, kv_head), t.attention);
      });
      return;
    }
    /* Sixteen rows of one kv head, whose keys lie interleaved, while the block they go to is in the nearest cache. */
    const int64_t blocks = (rows_ + 15) / 16;
    each(t, blocks * l.kv_heads, 1, [&](int64_t item, int64_t) {
      const int64_t first = item % blocks * 16, last = first + 16 < rows_ ? first + 16 : rows_;
      for (int64_t r = first; r < last; ++r) store(l, r, item / blocks);
    });
    int64_t tiles = 0;
    for (int64_t i = 0; i < batch_.segment_count; ++i) tiles += tiles_of(batch_.segments[i], group);
    each(t, tiles * l.kv_heads, 1, [&](int64_t item, int64_t) {
      /* The tiles of one kv head are neighbours: a thread meets the same keys again. */
      const int64_t kv_head = item / tiles;
      int64_t tile = item % tiles, first_row = 0, i = 0;
      for (; tile >= tiles_of(batch_.segments[i], group); ++i) {
        tile -= tiles_of(batch_.segments[i], group);
        first_row += batch_.segments[i].count;
      }
      const int64_t begin = tile * kMaxQueries, queries = batch_.segments[i].count * group;
      const int64_t end = begin + kMaxQueries < queries ? begin + kMaxQueries : queries;
      ops_.attend(job(l, first_row, kv_head), begin, end, t.attention);
    });
  }

  static int64_t tiles_of(const trirun_segment& segment, int64_t group) {
    return (segment.count * group + kMaxQueries - 1) / kMaxQueries;
  }

  void head(Thread& t) {
    const Range mine = t.team.share(batch_.logit_count);
    const HeadRows input = {s.attention, s.head, head_act(s.act, batch_.logit_count)};
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t r = batch_.logit_rows ? batch_.logit_rows[i] : i;
      float* row = (batch_.states ? batch_.logits : s.attention) + i * d.hidden;
      norm(row, s.x + r * d.hidden, d.final_norm, d.final_norm_bias);
      if (!batch_.states) prepare_head_row(input, i);
    }
    if (batch_.states) return;
    t.team.barrier();
    each(t, n_tiles_of(d.vocab), head_chunk(t.team.size()),
         [&](int64_t begin, int64_t end) { head_tiles(input, batch_.logit_count, batch_.logits, begin, end); });
  }

  const Batch& batch_;
  const int64_t rows_;
  Shared s;
  Queues queues_;
  const Generation* generation_;
  const bool single_positions_;  // every segment has one token
};

}  // namespace
}  // namespace trirun
#endif
