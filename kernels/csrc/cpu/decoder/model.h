/* What all ways of running the decoder's layers (single_step.h, batch_step.h, products.h) share: the workspace, one
 * decoder's derived sizes, and the parts of a layer that a single thread computes. A class per way, each a body of one
 * parallel region; decoder.cpp chooses. */
#ifndef TRIRUN_CPU_DECODER_MODEL_H
#define TRIRUN_CPU_DECODER_MODEL_H

#include <math.h>
#include <string.h>

#include <atomic>
#include <new>

#include "cpu/common/memory.h"
#include "cpu/common/numbers.h"
#include "cpu/common/threads.h"
#include "cpu/decoder/ops/ops.h"
#include "cpu/gemm/isa.h"

namespace trirun {
namespace {

constexpr float kLog2e = 1.44269504f;
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
  float* logits;
};

/* The shared arrays of a step, in the caller's workspace. */
struct Shared {
  float* x;          // [rows][hidden], the residual stream; of a single row what is to be added to it
  float* qkv;        // [rows][q | k | v]
  float* attention;  // [rows][max(heads * head_dim, hidden)]: attention's output, at the end the normalised x
  float* h;          // [rows][ffn]
  int32_t* slot;     // [rows]
  int32_t* position; // [rows]
  char* act;
  HeadInput head;    // of the 8-bit head
  Best* best;        // [rows][kMaxTeam]: of each thread's share of the logits
  Cursor* cursors;   // [2][kMaxTeam]
};

inline int64_t widest_input(const trirun_decoder& d) {
  return round_up(larger(larger(d.hidden, d.ffn), d.heads * d.head_dim), kPaddedK);
}

inline int64_t act_bytes(const trirun_decoder& d, int64_t rows) {
  return static_cast<int64_t>(trirun_cpu_act_bytes(rows, widest_input(d), TRIRUN_ACT16));
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
  out.qkv = memory.take<float>(rows * (d.heads + 2 * d.kv_heads) * d.head_dim);
  out.attention = memory.take<float>(rows * larger(d.heads * d.head_dim, d.hidden));
  out.h = memory.take<float>(rows * d.ffn);
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
  explicit Model(const trirun_decoder& decoder)
      : d(decoder), isa_(isa()), ops_(decoder_ops()), group_(d.heads / d.kv_heads),
        qkv_width_((d.heads + 2 * d.kv_heads) * d.head_dim), head_elements_(d.context * value_stride_of(d.head_dim)) {}

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
    const int64_t width = bytes_of(d.embedding_dtype);
    ops_.load_row(x, static_cast<const char*>(d.embedding) + token * d.hidden * width, d.embedding_dtype, d.hidden);
  }

  /* Where the cache of (layer, slot, kv head) begins. */
  void* cache(void* base, int64_t layer, int64_t slot, int64_t kv_head) const {
    const int64_t head = (layer * d.slots + slot) * d.kv_heads + kv_head;
    return static_cast<char*>(base) + head * head_elements_ * bytes_of(d.kv_dtype);
  }

  /* Norm, rotation and cache of one kv head of one row of q | k | v, and of the query heads that share it. */
  void rotate_and_store(int64_t layer, int64_t slot, int64_t position, float* row, int64_t kv_head) const {
    const trirun_layer& l = d.layer[layer];
    const int64_t n = d.head_dim;
    const float* cosines = d.cosines + position * d.rotary_half;
    const float* sines = d.sines + position * d.rotary_half;
    float* key = row + (d.heads + kv_head) * n;
    float* value = row + (d.heads + d.kv_heads + kv_head) * n;
    for (int64_t head = kv_head * group_; head < (kv_head + 1) * group_; ++head) {
      float* query = row + head * n;
      if (l.q_norm) ops_.rms_norm(query, query, l.q_norm, n, d.norm_eps);
      ops_.rotate(query, cosines, sines, d.rotary_half, n, d.attention_scale * kLog2e);
    }
    if (l.k_norm) ops_.rms_norm(key, key, l.k_norm, n, d.norm_eps);
    ops_.rotate(key, cosines, sines, d.rotary_half, n, 1.0f);
    ops_.store_key(cache(d.keys, layer, slot, kv_head), d.kv_dtype, key, n, position);
    ops_.store_value(cache(d.values, layer, slot, kv_head), d.kv_dtype, value, n, position);
  }

  /* Of rows of q | k | v and of outputs that lie at consecutive positions, the first at `position`. */
  AttentionJob job_of(int64_t layer, int64_t slot, int64_t position, const float* qkv, float* out,
                      int64_t kv_head) const {
    const int64_t column = kv_head * group_ * d.head_dim;
    return {qkv + column,
            qkv_width_,
            out + column,
            d.heads * d.head_dim,
            cache(d.keys, layer, slot, kv_head),
            cache(d.values, layer, slot, kv_head),
            d.kv_dtype,
            d.head_dim,
            group_,
            position};
  }

  void attend_one(const AttentionJob& job, float* memory) const {
    for (int64_t f = 0; f < group_; f += kMaxQueries)
      ops_.attend(job, f, f + kMaxQueries < group_ ? f + kMaxQueries : group_, memory);
  }

  /* Logits of rows of normalised x, n tiles [begin, end) of the vocabulary. */
  void head_tiles(const float* x, const HeadInput& input, int64_t rows, float* logits, int64_t begin,
                  int64_t end) const {
    const int64_t first = begin * kTileN, last = end * kTileN < d.vocab ? end * kTileN : d.vocab;
    if (d.head_dtype == TRIRUN_HEAD_INT8)
      ops_.head_int8(input, rows, static_cast<const uint8_t*>(d.head), d.head_scales, logits, d.vocab, first, last);
    else
      ops_.dense(x, d.hidden, rows, d.head, d.head_dtype, d.hidden, logits, d.vocab, first, last);
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
  int64_t group_;          // query heads per kv head
  int64_t qkv_width_;
  int64_t head_elements_;  // of the cache of one (layer, slot, kv head)
};

}  // namespace
}  // namespace trirun
#endif
