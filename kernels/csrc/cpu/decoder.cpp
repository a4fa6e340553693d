/* The lean decoder: one forward step of a Llama-like model in one parallel region.
 *
 * A layer is five phases with a barrier after each: q|k|v on the normalised, quantized row; rotation, cache and
 * attention; o added to the residual; gate|up with the activation; down added to the residual. Within a phase threads
 * take strips, heads or rows from shared queues. With a single row every thread quantizes it for itself, which costs
 * less than another barrier.
 */
#include <string.h>

#include <atomic>
#include <new>

#include "decoder_ops.h"
#include "kernels.h"
#include "threads.h"

#define TRIRUN_EXPORT extern "C" __attribute__((visibility("default")))

namespace trirun {
namespace {

constexpr float kLog2e = 1.44269504f;
constexpr int kMaxTeam = 512;
/* Hidden size up to which the 8-bit head's int32 sums are exact. */
constexpr int64_t kLongestHead = 65536;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
int64_t strips_of(int64_t n) { return (n + 63) / 64; }
int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* A queue of items shared out before the work begins: every thread takes its own share in order, a few at a time, and
 * then helps the others. Two queues take turns; a thread clears its place in the next one while it works on the
 * current one, which is safe because a barrier ends every phase. */
struct alignas(64) Cursor {
  std::atomic<int64_t> taken;
};

struct Queues {
  Cursor* cursors;  // [2][kMaxTeam]

  template <class Body>
  void each(Team& team, int64_t* phase, int64_t total, int64_t chunk, Body&& body) {
    Cursor* current = cursors + *phase % 2 * kMaxTeam;
    cursors[(*phase + 1) % 2 * kMaxTeam + team.rank()].taken.store(0, std::memory_order_relaxed);
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
};

/* The largest of some logits. */
struct Best {
  float value;
  int64_t index; // -1: none is a number
};

/* What trirun_cpu_decoder_greedy adds to a step. */
struct Greedy {
  int64_t steps;
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
};

/* The shared arrays of one step, in the caller's workspace. */
struct Shared {
  float* x;          // [rows][hidden], the residual stream
  float* qkv;        // [rows][q | k | v]
  float* attention;  // [rows][max(heads * head_dim, hidden)]: attention's output, at the end the normalised x
  float* h;          // [rows][ffn]
  int32_t* slot;     // [rows]
  int32_t* position; // [rows]
  char* act;
  HeadInput head;    // of the 8-bit head
  Best* best;        // [rows][kMaxTeam]: of each thread's share of the logits
  Queues queues;
};

int64_t widest_input(const trirun_decoder& d) {
  return round_up(larger(larger(d.hidden, d.ffn), d.heads * d.head_dim), 128);
}

int64_t act_bytes(const trirun_decoder& d, int64_t rows) {
  return static_cast<int64_t>(trirun_cpu_act_bytes(rows, widest_input(d), TRIRUN_ACT16));
}

/* Bytes of the workspace; fills in `shared` where there is memory. */
int64_t lay_out(const trirun_decoder& d, int64_t rows, char* memory, Shared* shared) {
  int64_t used = 0;
  auto take = [&](int64_t bytes) {
    char* here = memory ? memory + used : nullptr;
    used += round_up(bytes, 64);
    return here;
  };
  auto floats = [&](int64_t columns) { return reinterpret_cast<float*>(take(rows * columns * 4)); };
  Shared out;
  out.x = floats(d.hidden);
  out.qkv = floats((d.heads + 2 * d.kv_heads) * d.head_dim);
  out.attention = floats(larger(d.heads * d.head_dim, d.hidden));
  out.h = floats(d.ffn);
  out.slot = reinterpret_cast<int32_t*>(take(rows * 4));
  out.position = reinterpret_cast<int32_t*>(take(rows * 4));
  out.act = take(act_bytes(d, rows));
  out.head.stride = round_up(d.hidden, 64);
  out.head.digits = reinterpret_cast<int8_t*>(take(rows * 2 * out.head.stride));
  out.head.sums = reinterpret_cast<int32_t*>(take(rows * 8));
  out.head.scales = reinterpret_cast<float*>(take(rows * 4));
  out.best = reinterpret_cast<Best*>(take(rows * kMaxTeam * static_cast<int64_t>(sizeof(Best))));
  out.queues.cursors = reinterpret_cast<Cursor*>(take(2 * kMaxTeam * static_cast<int64_t>(sizeof(Cursor))));
  if (shared) *shared = out;
  return used;
}

class Step {
 public:
  Step(const trirun_decoder& decoder, const trirun_segment* segments, int64_t segment_count, const int64_t* tokens,
       int64_t rows, const int64_t* logit_rows, int64_t logit_count, float* logits, const Shared& shared,
       const Greedy* greedy = nullptr)
      : d(decoder), segments_(segments), segment_count_(segment_count), tokens_(tokens), rows_(rows),
        logit_rows_(logit_rows), logit_count_(logit_count), logits_(logits), s(shared), greedy_(greedy), isa_(isa()),
        ops_(decoder_ops()), group_(d.heads / d.kv_heads), qkv_width_((d.heads + 2 * d.kv_heads) * d.head_dim),
        head_elements_(d.context * value_stride_of(d.head_dim)) {
    single_positions_ = segment_count == rows;
    int64_t row = 0;
    for (int64_t i = 0; i < segment_count; ++i)
      for (int64_t j = 0; j < segments[i].count; ++j, ++row) {
        s.slot[row] = static_cast<int32_t>(segments[i].slot);
        s.position[row] = static_cast<int32_t>(segments[i].position + j);
      }
    for (int i = 0; i < 2 * kMaxTeam; ++i) new (s.queues.cursors + i) Cursor{{0}};
  }

  void run(Team& team) {
    Thread t(team, *this);
    if (!t.memory) failed = true;
    team.barrier();
    if (failed) return;
    const Range mine = team.share(rows_);
    for (int64_t r = mine.begin; r < mine.end; ++r) embed(r, tokens_[r]);
    team.barrier();
    forward(t);
    if (greedy_) decode(t, *greedy_);
  }

  std::atomic<bool> failed{false};

 private:
  /* One thread's private memory. */
  struct Thread {
    Team& team;
    int64_t phase = 0;
    char* memory;
    float* row;        // [widest_input]
    float* tile;       // [rows][columns of one helping]
    float* attention;  // attention_scratch
    char* act;         // for a single row
    trirun_act current;

    Thread(Team& team, const Step& step) : team(team) {
      const int64_t widest_output = larger(strips_of(step.d.ffn), strips_of(step.d.hidden));
      const int64_t row_bytes = widest_input(step.d) * 4;
      const int64_t tile_bytes = step.rows_ * step.chunk_of(team.size(), widest_output) * 256;
      const int64_t attention_bytes = round_up(attention_scratch(step.d.head_dim) * 4, 64);
      memory = static_cast<char*>(
          scratch(kScratchDecoder, row_bytes + tile_bytes + attention_bytes + act_bytes(step.d, 1)));
      if (!memory) return;
      row = reinterpret_cast<float*>(memory);
      tile = reinterpret_cast<float*>(memory + row_bytes);
      attention = reinterpret_cast<float*>(memory + row_bytes + tile_bytes);
      act = memory + row_bytes + tile_bytes + attention_bytes;
    }
  };

  void forward(Thread& t) {
    for (int64_t i = 0; i < d.layers; ++i) layer(t, i);
    if (logit_count_) head(t);
  }

  /* After a step: its tokens, and further steps on them. */
  void decode(Thread& t, const Greedy& greedy) {
    const Range mine = t.team.share(rows_), columns = t.team.share(d.vocab);
    for (int64_t step = 0;; ++step) {
      for (int64_t r = 0; r < rows_; ++r) {
        Best& best = s.best[r * kMaxTeam + t.team.rank()];
        const float* share = logits_ + r * d.vocab + columns.begin;
        best.index = ops_.largest(share, columns.end - columns.begin, &best.value);
        if (best.index >= 0) best.index += columns.begin;
      }
      t.team.barrier();
      int64_t* chosen = greedy.out + step * rows_;
      for (int64_t r = mine.begin; r < mine.end; ++r) {
        chosen[r] = winner(s.best + r * kMaxTeam, t.team.size());
        ++s.position[r];
        if (chosen[r] >= 0) embed(r, chosen[r]);
      }
      t.team.barrier();
      if (t.team.rank() == 0) *greedy.done = step + 1;
      if (step + 1 == greedy.steps || greedy.ends(chosen, rows_)) return;
      forward(t);
    }
  }

  void embed(int64_t r, int64_t token) {
    const int64_t width = d.embedding_dtype == TRIRUN_F32 ? 4 : 2;
    const char* row = static_cast<const char*>(d.embedding) + token * d.hidden * width;
    ops_.load_row(s.x + r * d.hidden, row, d.embedding_dtype, d.hidden);
  }

  /* Of equals the first: a share that comes earlier has the smaller indices. */
  static int64_t winner(const Best* parts, int count) {
    Best best = parts[0];
    for (int i = 1; i < count; ++i)
      if (parts[i].index >= 0 && (best.index < 0 || parts[i].value > best.value)) best = parts[i];
    return best.index;
  }

  /* Strips taken from a queue at once. Few rows: four helpings per thread, for balance, but four strips, which kernels
   * read side by side, where a thread gets so many. Many rows: two helpings, because a kernel brings the rows into an
   * order of its own on every call. */
  int64_t chunk_of(int threads, int64_t strips) const {
    const int64_t share = (strips + threads - 1) / threads;
    if (rows_ > 16) return larger(1, share / 2);
    const int64_t helping = larger(4, share / 16 * 4);
    return helping < share ? helping : share;
  }

  template <class Body>
  void each(Thread& t, int64_t total, int64_t chunk, Body&& body) {
    s.queues.each(t.team, &t.phase, total, chunk, body);
    t.team.barrier();
  }

  /* Leaves rows of `source`, through an RMS norm where there is one, quantized in t.current. */
  void quantize(Thread& t, const float* source, int64_t ld, int64_t count, int64_t k, int64_t padded, int act_bits,
                const float* norm) {
    const bool alone = count == 1;
    const size_t bytes = static_cast<size_t>(act_bytes(d, count));
    trirun_cpu_act_init(&t.current, alone ? t.act : s.act, bytes, count, padded, act_bits);
    const Range rows = alone ? Range{0, 1} : t.team.share(count);
    if (!norm) {
      isa_.quantize(t.current, source, TRIRUN_F32, k, ld, rows.begin, rows.end);
    } else {
      for (int64_t r = rows.begin; r < rows.end; ++r) {
        ops_.rms_norm(t.row, source + r * ld, norm, k, d.norm_eps);
        /* A stride of 0: row r is read where row 0 lies. */
        isa_.quantize(t.current, t.row, TRIRUN_F32, k, 0, r, r + 1);
      }
    }
    if (!alone) t.team.barrier();
  }

  void product(Thread& t, const trirun_linear& linear, float* y, int64_t ldy, int64_t begin, int64_t end) {
    const Int2Job job = {&linear.weight, &t.current, linear.n, linear.bias, y, ldy, TRIRUN_F32};
    if (!isa_.int2_gemm(job, begin, end)) failed = true;
  }

  /* The product of strips [begin, end) into t.tile, [rows][columns]; returns how many columns there are. */
  int64_t product_tile(Thread& t, const trirun_linear& linear, int64_t begin, int64_t end) {
    const int64_t first = begin * 64, columns = (end * 64 < linear.n ? end * 64 : linear.n) - first;
    /* Kernels count columns from the weight's first row. */
    const uintptr_t origin = reinterpret_cast<uintptr_t>(t.tile) - static_cast<uintptr_t>(first) * sizeof(float);
    product(t, linear, reinterpret_cast<float*>(origin), columns, begin, end);
    return columns;
  }

  void layer(Thread& t, int64_t index) {
    const trirun_layer& l = d.layer[index];
    const int64_t attended = d.heads * d.head_dim;
    quantize(t, s.x, d.hidden, rows_, d.hidden, l.q.weight.k, d.act_bits, l.attention_norm);
    project_qkv(t, l);
    attend(t, l, index);
    quantize(t, s.attention, attended, rows_, attended, l.o.weight.k, d.act_bits, l.attention_sub_norm);
    add_to_residual(t, l.o);
    quantize(t, s.x, d.hidden, rows_, d.hidden, l.gate.weight.k, d.act_bits, l.mlp_norm);
    gate_up(t, l);
    quantize(t, s.h, d.ffn, rows_, d.ffn, l.down.weight.k, d.act_bits, l.mlp_sub_norm);
    add_to_residual(t, l.down);
  }

  void project_qkv(Thread& t, const trirun_layer& l) {
    const trirun_linear* parts[] = {&l.q, &l.k, &l.v};
    float* outputs[] = {s.qkv, s.qkv + d.heads * d.head_dim, s.qkv + (d.heads + d.kv_heads) * d.head_dim};
    int64_t firsts[4] = {0};
    for (int i = 0; i < 3; ++i) firsts[i + 1] = firsts[i] + strips_of(parts[i]->n);
    each(t, firsts[3], chunk_of(t.team.size(), firsts[3]), [&](int64_t begin, int64_t end) {
      for (int i = 0; i < 3; ++i) {
        const int64_t from = larger(begin, firsts[i]), to = end < firsts[i + 1] ? end : firsts[i + 1];
        if (from < to) product(t, *parts[i], outputs[i], qkv_width_, from - firsts[i], to - firsts[i]);
      }
    });
  }

  void add_to_residual(Thread& t, const trirun_linear& linear) {
    const int64_t strips = strips_of(linear.n);
    each(t, strips, chunk_of(t.team.size(), strips), [&](int64_t begin, int64_t end) {
      const int64_t columns = product_tile(t, linear, begin, end);
      for (int64_t r = 0; r < rows_; ++r) ops_.add(s.x + r * d.hidden + begin * 64, t.tile + r * columns, columns);
    });
  }

  void gate_up(Thread& t, const trirun_layer& l) {
    const int64_t strips = strips_of(d.ffn);
    each(t, strips, chunk_of(t.team.size(), strips), [&](int64_t begin, int64_t end) {
      product(t, l.gate, s.h, d.ffn, begin, end);
      const int64_t columns = product_tile(t, l.up, begin, end);
      for (int64_t r = 0; r < rows_; ++r)
        ops_.gate(s.h + r * d.ffn + begin * 64, t.tile + r * columns, columns, d.activation);
    });
  }

  /* Where the cache of (layer, slot of the row, kv head) begins. */
  void* cache(void* base, int64_t layer, int64_t slot, int64_t kv_head) const {
    const int64_t head = (layer * d.slots + slot) * d.kv_heads + kv_head;
    return static_cast<char*>(base) + head * head_elements_ * (d.kv_dtype == TRIRUN_F16 ? 2 : 4);
  }

  /* Norm, rotation and cache of one kv head of one row, and of the query heads that share it. */
  void rotate_and_store(const trirun_layer& l, int64_t layer, int64_t r, int64_t kv_head) {
    const int64_t position = s.position[r], n = d.head_dim;
    const float* cosines = d.cosines + position * d.rotary_half;
    const float* sines = d.sines + position * d.rotary_half;
    float* row = s.qkv + r * qkv_width_;
    float* key = row + (d.heads + kv_head) * n;
    float* value = row + (d.heads + d.kv_heads + kv_head) * n;
    for (int64_t head = kv_head * group_; head < (kv_head + 1) * group_; ++head) {
      float* query = row + head * n;
      if (l.q_norm) ops_.rms_norm(query, query, l.q_norm, n, d.norm_eps);
      ops_.rotate(query, cosines, sines, d.rotary_half, n, d.attention_scale * kLog2e);
    }
    if (l.k_norm) ops_.rms_norm(key, key, l.k_norm, n, d.norm_eps);
    ops_.rotate(key, cosines, sines, d.rotary_half, n, 1.0f);
    ops_.store_key(cache(d.keys, layer, s.slot[r], kv_head), d.kv_dtype, key, n, position);
    ops_.store_value(cache(d.values, layer, s.slot[r], kv_head), d.kv_dtype, value, n, position);
  }

  /* Of rows from first_row on, which lie at consecutive positions of one slot. */
  AttentionJob job_of(int64_t layer, int64_t first_row, int64_t kv_head) const {
    const int64_t column = kv_head * group_ * d.head_dim, attended = d.heads * d.head_dim;
    return {s.qkv + first_row * qkv_width_ + column, qkv_width_,
            s.attention + first_row * attended + column, attended,
            cache(d.keys, layer, s.slot[first_row], kv_head), cache(d.values, layer, s.slot[first_row], kv_head),
            d.kv_dtype, d.head_dim, group_, s.position[first_row]};
  }

  void attend(Thread& t, const trirun_layer& l, int64_t layer) {
    if (single_positions_) {
      /* No row needs another row's keys: cache and attention are one phase. */
      each(t, rows_ * d.kv_heads, 1, [&](int64_t item, int64_t) {
        const int64_t r = item / d.kv_heads, kv_head = item % d.kv_heads;
        rotate_and_store(l, layer, r, kv_head);
        const AttentionJob job = job_of(layer, r, kv_head);
        for (int64_t f = 0; f < group_; f += kMaxQueries)
          ops_.attend(job, f, f + kMaxQueries < group_ ? f + kMaxQueries : group_, t.attention);
      });
      return;
    }
    /* Sixteen rows of one kv head, whose keys lie interleaved, while the block they go to is in the nearest cache. */
    const int64_t blocks = (rows_ + 15) / 16;
    each(t, blocks * d.kv_heads, 1, [&](int64_t item, int64_t) {
      const int64_t first = item % blocks * 16, last = first + 16 < rows_ ? first + 16 : rows_;
      for (int64_t r = first; r < last; ++r) rotate_and_store(l, layer, r, item / blocks);
    });
    int64_t tiles = 0;
    for (int64_t i = 0; i < segment_count_; ++i) tiles += tiles_of(segments_[i]);
    each(t, tiles * d.kv_heads, 1, [&](int64_t item, int64_t) {
      /* The tiles of one kv head are neighbours: a thread meets the same keys again. */
      const int64_t kv_head = item / tiles;
      int64_t tile = item % tiles, first_row = 0, i = 0;
      for (; tile >= tiles_of(segments_[i]); ++i) {
        tile -= tiles_of(segments_[i]);
        first_row += segments_[i].count;
      }
      const int64_t begin = tile * kMaxQueries, queries = segments_[i].count * group_;
      const int64_t end = begin + kMaxQueries < queries ? begin + kMaxQueries : queries;
      ops_.attend(job_of(layer, first_row, kv_head), begin, end, t.attention);
    });
  }

  int64_t tiles_of(const trirun_segment& segment) const {
    return (segment.count * group_ + kMaxQueries - 1) / kMaxQueries;
  }

  void head(Thread& t) {
    const bool int8 = d.head_dtype == TRIRUN_HEAD_INT8;
    const Range mine = t.team.share(logit_count_);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      float* row = s.attention + i * d.hidden;
      ops_.rms_norm(row, s.x + (logit_rows_ ? logit_rows_[i] : i) * d.hidden, d.final_norm, d.hidden, d.norm_eps);
      if (int8) ops_.head_digits(s.head, i, row, d.hidden);
    }
    t.team.barrier();
    const int64_t strips = strips_of(d.vocab);
    each(t, strips, larger(1, strips / (8 * t.team.size())), [&](int64_t begin, int64_t end) {
      const int64_t first = begin * 64, last = end * 64 < d.vocab ? end * 64 : d.vocab;
      if (int8)
        ops_.head_int8(s.head, logit_count_, static_cast<const uint8_t*>(d.head), d.head_scales, logits_, d.vocab, first,
                       last);
      else
        ops_.dense(s.attention, d.hidden, logit_count_, d.head, d.head_dtype, d.hidden, logits_, d.vocab, first, last);
    });
  }

  const trirun_decoder& d;
  const trirun_segment* segments_;
  int64_t segment_count_;
  const int64_t* tokens_;
  int64_t rows_;
  const int64_t* logit_rows_;  // null: all rows
  int64_t logit_count_;
  float* logits_;
  Shared s;
  const Greedy* greedy_;
  const Isa& isa_;
  const DecoderOps& ops_;
  int64_t group_;          // query heads per kv head
  int64_t qkv_width_;
  int64_t head_elements_;  // of the cache of one (layer, slot, kv head)
  bool single_positions_;  // every segment has one token
};

bool bad_linear(const trirun_linear& linear, int64_t n, int64_t k) {
  const trirun_int2& w = linear.weight;
  return !w.words || !w.scales || linear.n != n || linear.k != k || w.n < n || w.k < k || w.n % 64 || w.k % 128 ||
         (reinterpret_cast<uintptr_t>(w.words) & 15) || w.k != round_up(k, 128);
}

int check_layer(const trirun_decoder& d, const trirun_layer& l) {
  const int64_t q = d.heads * d.head_dim, kv = d.kv_heads * d.head_dim;
  if (!l.attention_norm || !l.mlp_norm) return TRIRUN_BAD_POINTER;
  if (bad_linear(l.q, q, d.hidden) || bad_linear(l.k, kv, d.hidden) || bad_linear(l.v, kv, d.hidden) ||
      bad_linear(l.o, d.hidden, q) || bad_linear(l.gate, d.ffn, d.hidden) || bad_linear(l.up, d.ffn, d.hidden) ||
      bad_linear(l.down, d.hidden, d.ffn))
    return TRIRUN_BAD_SHAPE;
  return TRIRUN_OK;
}

bool bad_float(int dtype) { return dtype != TRIRUN_F32 && dtype != TRIRUN_F16 && dtype != TRIRUN_BF16; }

int check_sizes(const trirun_decoder* d) {
  if (!d) return TRIRUN_BAD_POINTER;
  const int64_t sizes[] = {d->layers, d->hidden, d->ffn, d->heads, d->kv_heads, d->head_dim, d->vocab, d->slots, d->context};
  for (int64_t size : sizes)
    if (size <= 0 || size > (int64_t{1} << 31)) return TRIRUN_BAD_SHAPE;
  if (d->heads % d->kv_heads || d->hidden % 16 || d->context % kKeyBlock) return TRIRUN_BAD_SHAPE;
  if (d->rotary_half < 0 || 2 * d->rotary_half > d->head_dim) return TRIRUN_BAD_SHAPE;
  if (d->kv_dtype != TRIRUN_F16 && d->kv_dtype != TRIRUN_F32) return TRIRUN_UNSUPPORTED;
  if (bad_float(d->embedding_dtype)) return TRIRUN_UNSUPPORTED;
  if (d->head_dtype == TRIRUN_HEAD_INT8 ? d->hidden > kLongestHead : bad_float(d->head_dtype)) return TRIRUN_UNSUPPORTED;
  if (d->activation != TRIRUN_SILU && d->activation != TRIRUN_RELU2) return TRIRUN_UNSUPPORTED;
  return d->act_bits == TRIRUN_ACT8 || d->act_bits == TRIRUN_ACT16 ? TRIRUN_OK : TRIRUN_UNSUPPORTED;
}

int check_batch(const trirun_decoder& d, const trirun_segment* segments, int64_t segment_count, const int64_t* tokens,
                int64_t rows, const int64_t* logit_rows, int64_t logit_count, const float* logits) {
  if (!segments || !tokens || (logit_count && !logits)) return TRIRUN_BAD_POINTER;
  int64_t total = 0;
  for (int64_t i = 0; i < segment_count; ++i) {
    const trirun_segment& segment = segments[i];
    if (segment.slot < 0 || segment.slot >= d.slots || segment.count <= 0 || segment.count > rows) return TRIRUN_BAD_SHAPE;
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
  const int64_t needed = lay_out(d, rows, static_cast<char*>(workspace), shared);
  return needed > static_cast<int64_t>(bytes) ? TRIRUN_NO_WORKSPACE : TRIRUN_OK;
}

int run(Step& step, int threads) {
  parallel(threads < kMaxTeam ? threads : kMaxTeam, [&](Team& team) { step.run(team); });
  return step.failed ? TRIRUN_NO_WORKSPACE : TRIRUN_OK;
}

}  // namespace

const DecoderOps& decoder_ops() {
  const char* name = isa().name;
  if (kDecoderAvx512 && (!strcmp(name, "amx") || !strcmp(name, "avx512vnni"))) return *kDecoderAvx512;
  if (kDecoderAvx2 && !strcmp(name, "avx2")) return *kDecoderAvx2;
  return *kDecoderPortable;
}

}  // namespace trirun

using namespace trirun;

TRIRUN_EXPORT int trirun_cpu_head_int8(const void* x, int dtype, int64_t n, int64_t k, uint8_t* rows, float* scales,
                                       int threads) {
  if (!x || !rows || !scales) return TRIRUN_BAD_POINTER;
  if (n <= 0 || k <= 0 || k % 16 || k > kLongestHead || threads < 1) return TRIRUN_BAD_SHAPE;
  if (bad_float(dtype)) return TRIRUN_UNSUPPORTED;
  const DecoderOps& ops = decoder_ops();
  const int64_t stride = round_up(k, 64), width = dtype == TRIRUN_F32 ? 4 : 2;
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

TRIRUN_EXPORT size_t trirun_cpu_decoder_cache_bytes(const trirun_decoder* d) {
  if (check_sizes(d)) return 0;
  const int64_t heads = d->layers * d->slots * d->kv_heads, width = d->kv_dtype == TRIRUN_F16 ? 2 : 4;
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
  if (int error = check_batch(*d, segments, segment_count, tokens, rows, logit_rows, logit_count, logits)) return error;
  Shared shared;
  if (int error = place(*d, rows, workspace, workspace_bytes, &shared)) return error;
  Step step(*d, segments, segment_count, tokens, rows, logit_rows, logit_count, logits, shared);
  return run(step, threads);
}

TRIRUN_EXPORT int trirun_cpu_decoder_greedy(const trirun_decoder* d, const trirun_segment* segments,
                                            int64_t segment_count, const int64_t* tokens, int64_t steps,
                                            const int64_t* stop, int64_t stop_count, int64_t* out, int64_t* done,
                                            float* logits, void* workspace, size_t workspace_bytes, int threads) {
  if (int error = check_decoder(d)) return error;
  if (segment_count <= 0 || steps <= 0 || stop_count < 0 || threads < 1) return TRIRUN_BAD_SHAPE;
  if (!segments || !out || !done || (stop_count && !stop)) return TRIRUN_BAD_POINTER;
  for (int64_t i = 0; i < segment_count; ++i)
    if (segments[i].count != 1 || segments[i].position > d->context - steps) return TRIRUN_BAD_SHAPE;
  if (int error = check_batch(*d, segments, segment_count, tokens, segment_count, nullptr, segment_count, logits))
    return error;
  Shared shared;
  if (int error = place(*d, segment_count, workspace, workspace_bytes, &shared)) return error;
  const Greedy greedy = {steps, stop, stop_count, out, done};
  *done = 0;
  Step step(*d, segments, segment_count, tokens, segment_count, nullptr, segment_count, logits, shared, &greedy);
  return run(step, threads);
}
