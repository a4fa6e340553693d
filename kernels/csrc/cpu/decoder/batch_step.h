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
    forward(t);
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
    trirun_act act;

    Thread(Team& own_team, const BatchStep& step) : team(own_team) {
      Arena sizes(nullptr);
      lay_out(step, sizes);
      memory = scratch(kScratchDecoder, sizes.used());
      Arena arrays(memory);
      lay_out(step, arrays);
    }

    void lay_out(const BatchStep& step, Arena& arrays) {
      const int64_t widest_output = larger(n_tiles_of(step.d.ffn), n_tiles_of(step.d.hidden));
      row = arrays.take<float>(widest_input(step.d));
      block = arrays.take<float>(step.rows_ * step.chunk_of(team.size(), widest_output) * kTileN);
      attention = arrays.take<float>(attention_scratch(step.d.head_dim));
    }
  };

  void forward(Thread& t) {
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
      forward(t);
    }
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

  /* Leaves rows of `source`, through an RMS norm where there is one, quantized in t.act. */
  void quantize(Thread& t, const float* source, int64_t k, int64_t padded, const float* norm) {
    trirun_cpu_act_init(&t.act, s.act, static_cast<size_t>(act_bytes(d, rows_)), rows_, padded, d.act_bits);
    const Range rows = t.team.share(rows_);
    if (!norm) {
      isa_.quantize(t.act, source, TRIRUN_F32, k, k, rows.begin, rows.end);
    } else {
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        ops_.rms_norm(t.row, source + r * k, norm, k, d.norm_eps);
        /* A stride of 0: row r is read where row 0 lies. */
        isa_.quantize(t.act, t.row, TRIRUN_F32, k, 0, r, r + 1);
      }
    }
    t.team.barrier();
  }

  void layer(Thread& t, int64_t index) {
    const trirun_layer& l = d.layer[index];
    quantize(t, s.x, d.hidden, l.q.weight.k, l.attention_norm);
    project_qkv(t, l);
    attend(t, index);
    quantize(t, s.attention, d.heads * d.head_dim, l.o.weight.k, l.attention_sub_norm);
    add_to_residual(t, l.o);
    quantize(t, s.x, d.hidden, l.gate.weight.k, l.mlp_norm);
    gate_up(t, l);
    quantize(t, s.h, d.ffn, l.down.weight.k, l.mlp_sub_norm);
    add_to_residual(t, l.down);
  }

  void project_qkv(Thread& t, const trirun_layer& l) {
    const trirun_linear* parts[] = {&l.q, &l.k, &l.v};
    float* outputs[] = {s.qkv, s.qkv + d.heads * d.head_dim, s.qkv + (d.heads + d.kv_heads) * d.head_dim};
    int64_t firsts[4] = {0};
    for (int i = 0; i < 3; ++i) firsts[i + 1] = firsts[i] + n_tiles_of(parts[i]->n);
    each(t, firsts[3], chunk_of(t.team.size(), firsts[3]), [&](int64_t begin, int64_t end) {
      for (int i = 0; i < 3; ++i) {
        const int64_t from = larger(begin, firsts[i]), to = end < firsts[i + 1] ? end : firsts[i + 1];
        if (from < to) product(part_of(*parts[i], t.act, outputs[i], qkv_width_, from - firsts[i], to - firsts[i]));
      }
    });
  }

  void add_to_residual(Thread& t, const trirun_linear& linear) {
    const int64_t n_tiles = n_tiles_of(linear.n);
    each(t, n_tiles, chunk_of(t.team.size(), n_tiles), [&](int64_t begin, int64_t end) {
      const int64_t columns = columns_of(linear, begin, end);
      product(block_of(linear, t.act, t.block, begin, end));
      for (int64_t r = 0; r < rows_; ++r) ops_.add(s.x + r * d.hidden + begin * kTileN, t.block + r * columns, columns);
    });
  }

  void gate_up(Thread& t, const trirun_layer& l) {
    const int64_t n_tiles = n_tiles_of(d.ffn);
    each(t, n_tiles, chunk_of(t.team.size(), n_tiles), [&](int64_t begin, int64_t end) {
      product(part_of(l.gate, t.act, s.h, d.ffn, begin, end));
      const int64_t columns = columns_of(l.up, begin, end);
      product(block_of(l.up, t.act, t.block, begin, end));
      for (int64_t r = 0; r < rows_; ++r)
        ops_.gate(s.h + r * d.ffn + begin * kTileN, t.block + r * columns, columns, d.activation);
    });
  }

  void store(int64_t layer, int64_t r, int64_t kv_head) const {
    rotate_and_store(layer, s.slot[r], s.position[r], s.qkv + r * qkv_width_, kv_head);
  }

  AttentionJob job(int64_t layer, int64_t first_row, int64_t kv_head) const {
    return job_of(layer, s.slot[first_row], s.position[first_row], s.qkv + first_row * qkv_width_,
                  s.attention + first_row * d.heads * d.head_dim, kv_head);
  }

  void attend(Thread& t, int64_t layer) {
    if (single_positions_) {
      /* No row needs another row's keys: cache and attention are one phase. */
      each(t, rows_ * d.kv_heads, 1, [&](int64_t item, int64_t) {
        const int64_t r = item / d.kv_heads, kv_head = item % d.kv_heads;
        store(layer, r, kv_head);
        attend_one(job(layer, r, kv_head), t.attention);
      });
      return;
    }
    /* Sixteen rows of one kv head, whose keys lie interleaved, while the block they go to is in the nearest cache. */
    const int64_t blocks = (rows_ + 15) / 16;
    each(t, blocks * d.kv_heads, 1, [&](int64_t item, int64_t) {
      const int64_t first = item % blocks * 16, last = first + 16 < rows_ ? first + 16 : rows_;
      for (int64_t r = first; r < last; ++r) store(layer, r, item / blocks);
    });
    int64_t tiles = 0;
    for (int64_t i = 0; i < batch_.segment_count; ++i) tiles += tiles_of(batch_.segments[i]);
    each(t, tiles * d.kv_heads, 1, [&](int64_t item, int64_t) {
      /* The tiles of one kv head are neighbours: a thread meets the same keys again. */
      const int64_t kv_head = item / tiles;
      int64_t tile = item % tiles, first_row = 0, i = 0;
      for (; tile >= tiles_of(batch_.segments[i]); ++i) {
        tile -= tiles_of(batch_.segments[i]);
        first_row += batch_.segments[i].count;
      }
      const int64_t begin = tile * kMaxQueries, queries = batch_.segments[i].count * group_;
      const int64_t end = begin + kMaxQueries < queries ? begin + kMaxQueries : queries;
      ops_.attend(job(layer, first_row, kv_head), begin, end, t.attention);
    });
  }

  int64_t tiles_of(const trirun_segment& segment) const {
    return (segment.count * group_ + kMaxQueries - 1) / kMaxQueries;
  }

  void head(Thread& t) {
    const Range mine = t.team.share(batch_.logit_count);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int64_t r = batch_.logit_rows ? batch_.logit_rows[i] : i;
      float* row = s.attention + i * d.hidden;
      ops_.rms_norm(row, s.x + r * d.hidden, d.final_norm, d.hidden, d.norm_eps);
      if (d.head_dtype == TRIRUN_HEAD_INT8) ops_.head_limbs(s.head, i, row, d.hidden);
    }
    t.team.barrier();
    each(t, n_tiles_of(d.vocab), head_chunk(t.team.size()), [&](int64_t begin, int64_t end) {
      head_tiles(s.attention, s.head, batch_.logit_count, batch_.logits, begin, end);
    });
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
