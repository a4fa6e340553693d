/* What the decoder computes besides matrix products, one table per instruction set. Internal to libtrirun_cpu.so.
 *
 * Single-threaded functions on fp32 rows; single_step.h and batch_step.h share the work out. They are written once on
 * the sixteen lanes of lanes.h, in the headers of this folder, and compiled three times, by portable.cpp, avx2.cpp and
 * avx512vnni.cpp. Every table gives bitwise the same results, and a row's results do not depend on which other rows are
 * computed beside it.
 *
 * Layout of the cache of one (layer, slot, kv head), context padded to kKeyBlock positions:
 *   keys   [context/16][head_dim][16]: sixteen positions side by side, so that scores of sixteen keys accumulate over
 *          d in one register, without a horizontal sum in decode or a transposition in prefill
 *   values [context][value_stride], value_stride = head_dim rounded up to 16
 */
#ifndef TRIRUN_CPU_DECODER_OPS_H
#define TRIRUN_CPU_DECODER_OPS_H

#include <stdint.h>

#include "trirun.h"
#include "cpu/common/memory.h"

namespace trirun {

constexpr int64_t kKeyBlock = 64;   /* keys per step of the online softmax, at absolute positions */
constexpr int64_t kMaxQueries = 48; /* queries that meet the keys together */

constexpr float kLog2e = 1.44269504f;

constexpr int64_t kMaximumSpan = 16; /* numbers that share a maximum in `block_maxima` */
constexpr int64_t kMassBlock = 64;  /* masses that share a sum in `masses` */
constexpr double kMassOne = 1 << 30; /* the likeliest token's mass */

/* Sizes of vocabularies are int32 in places. */
constexpr int64_t kMaxVocabulary = int64_t{1} << 24;

static inline int64_t value_stride_of(int64_t head_dim) { return round_up(head_dim, 16); }

/* One kv head of one sequence: rows at consecutive positions times the `group` query heads that share the kv head.
 * Query f = row * group + head reads q + row * ldq + head * head_dim and writes the same place of out. */
struct AttentionJob {
  const float* q;  /* scaled by the attention scale and log2(e) */
  int64_t ldq;
  float* out;
  int64_t ldo;
  const void* keys;
  const void* values;
  int kv_dtype;
  int64_t head_dim;
  int64_t group;
  int64_t position; /* of row 0; it sees the keys up to its own */
  int64_t window;   /* how many of them; 0: all */
  int64_t held;     /* positions of the cache: position p lies at p % held */
  float softcap;    /* in units of the scores; 0: none */
  const float* sinks; /* [group], natural; or null */
};

/* Floats of scratch that `attend` needs. */
static inline int64_t attention_scratch(int64_t head_dim) {
  return kMaxQueries * (value_stride_of(head_dim) + kKeyBlock + 16 + 1);
}

/* What a token does to the state of a value head: decay is e^g. */
struct DeltaGates {
  float decay;
  float beta;
};

/* One value head over consecutive rows of a sequence. */
struct DeltaJob {
  const float* q; /* of unit length, times key_dim^-1/2 */
  const float* k; /* of unit length */
  const float* v;
  int64_t ld; /* from one row of q, k, v to the next */
  const DeltaGates* gates; /* of each row */
  float* out;
  int64_t ldo;
  float* state; /* [key_dim][value_dim] */
  int64_t key_dim;
  int64_t value_dim;
};

/* Rows of x for the 8-bit head, as two int8 limbs per value (head.h). */
struct HeadInput {
  int8_t* limbs;  /* [m][high, low][stride] */
  int32_t* sums;  /* [m][high, low] */
  float* scales;  /* [m] */
  int64_t stride; /* head_stride_of(k) */
};

/* Bytes of a row of the 8-bit head, and from one plane of its input's limbs to the next. */
static inline int64_t head_stride_of(int64_t k) { return round_up(k, 64); }

struct DecoderOps {
  /* out[n] = x of dtype, n a multiple of 16 */
  void (*load_row)(float* out, const void* x, int dtype, int64_t n);
  /* out = x / sqrt(mean(x^2) + eps) * weight; out may be x (Zhang & Sennrich 2019) */
  void (*rms_norm)(float* out, const float* x, const float* weight, int64_t n, float eps);
  /* out = (x - mean) / sqrt(variance + eps) * weight + bias, which may be null; out may be x (Ba et al. 2016) */
  void (*layer_norm)(float* out, const float* x, const float* weight, const float* bias, int64_t n, float eps);
  /* x += y */
  void (*add)(float* x, const float* y, int64_t n);
  /* x += factor * y */
  void (*add_scaled)(float* x, const float* y, int64_t n, float factor);
  /* x *= factor */
  void (*scale)(float* x, int64_t n, float factor);
  /* x = cap * tanh(x / cap) */
  void (*soften)(float* x, int64_t n, float cap);
  /* h = act(h) * up, or act(h) where up is null; act one of TRIRUN_SILU, ..., TRIRUN_SIGMOID */
  void (*gate)(float* h, const float* up, int64_t n, int activation);
  /* h = (up + 1) * h * sigmoid(1.702 h), h at most and up within the limit (gpt-oss). */
  void (*clipped_swiglu)(float* h, const float* up, int64_t n, float limit);
  /* Rotates pairs (i, i + half) of x[0, 2 half) by the angles of cos and sin [half] (Su et al. 2021), then multiplies
   * all of x[n] by scale. */
  void (*rotate)(float* x, const float* cos, const float* sin, int64_t half, int64_t n, float scale);
  /* The same for pairs (2i, 2i + 1). */
  void (*rotate_pairs)(float* x, const float* cos, const float* sin, int64_t half, int64_t n, float scale);
  void (*store_key)(void* keys, int kv_dtype, const float* x, int64_t head_dim, int64_t position);
  void (*store_value)(void* values, int kv_dtype, const float* x, int64_t head_dim, int64_t position);
  /* Queries [begin, end) of a job, at most kMaxQueries: softmax(q . keys) . values, in one pass over the keys
   * (Milakov & Gimelshein 2018; Dao et al. 2022). */
  void (*attend)(const AttentionJob& job, int64_t begin, int64_t end, float* scratch);
  /* All queries of one row of several kv heads, which differ in where they lie only: bitwise what `attend` gives. */
  void (*attend_row)(const AttentionJob* jobs, int64_t heads, float* scratch);
  /* The gated delta rule (delta.h), row by row. */
  void (*delta_rule)(const DeltaJob& job, int64_t rows);
  /* out[n] = silu(sum over t of inputs[t] * weights[t]), weights [taps][ldw]; a null input is zero, and out may
   * be any of them */
  void (*convolve)(float* out, const float* const* inputs, const float* weights, int64_t taps, int64_t ldw, int64_t n);
  /* x *= factor / sqrt(sum of x^2 + eps) */
  void (*unit)(float* x, int64_t n, float eps, float factor);
  /* y[m][begin, end) = x[m][k] . w^T in fp32, w [.][k] of dtype, k a multiple of 16: the head as a checkpoint has it */
  void (*dense)(const float* x, int64_t ldx, int64_t m, const void* w, int dtype, int64_t k, float* y, int64_t ldy,
                int64_t begin, int64_t end);
  /* Row r of the input from x[k], k a multiple of 16. */
  void (*head_limbs)(const HeadInput& input, int64_t r, const float* x, int64_t k);
  /* One row of the 8-bit head from x[k], and its scale. */
  void (*head_bytes)(uint8_t* out, float* scale, const float* x, int64_t k, int64_t stride);
  /* y[m][begin, end) from the 8-bit head w [.][stride] */
  void (*head_int8)(const HeadInput& input, int64_t m, const uint8_t* w, const float* scales, float* y, int64_t ldy,
                    int64_t begin, int64_t end);
  /* Index of the largest of x[n], the first of equals, NaNs left out, and its value; -1 where none is above
   * -infinity. */
  int64_t (*largest)(const float* x, int64_t n, float* value);
  /* Maxima of disjoint parts of x[n], kMaximumSpan numbers each or fewer, NaNs left out; returns how many parts: a
   * multiple of 16, n / kMaximumSpan rounded up to it. Parts without a number have -infinity. */
  int64_t (*block_maxima)(float* out, const float* x, int64_t n);
  /* A number that k of x[n] reach at least, or -infinity; not many more reach it where `top` is the largest of them. */
  float (*threshold)(const float* x, int64_t n, int64_t k, float top);
  /* The numbers of x[n] that are at least `least`, and where they are, ascending; returns how many. Both outputs have
   * room for n + 16, which is written. */
  int64_t (*filter)(int32_t* ids, float* values, const float* x, int64_t n, float least);
  /* out = round(2^30 * 2^((x - top) * factor)), 0 for a NaN; top is the largest of x. sums[n/kMassBlock, rounded up].
   */
  void (*masses)(uint32_t* out, uint64_t* sums, const float* x, int64_t n, float top, float factor);
};

/* Bytes of memory of a draw, 64-byte aligned. */
int64_t draw_bytes(int64_t vocab);

/* The largest of some logits. */
struct Best {
  float value;
  int64_t index; /* -1: none is a number */
};

/* A token drawn from logits[vocab], of which `best` is the largest, by a checked draw with a temperature. */
int64_t draw_token(const float* logits, int64_t vocab, Best best, const trirun_draw& draw, void* memory);

/* The table that belongs to the instruction set in use. */
const DecoderOps& decoder_ops();

/* One table per translation unit, null where the compiler did not know the instruction set. Constants: nothing of a
 * translation unit runs before its instruction set is known to be there. */
extern const DecoderOps* const kDecoderPortable;
extern const DecoderOps* const kDecoderAvx2;
extern const DecoderOps* const kDecoderAvx512;

}  // namespace trirun
#endif
