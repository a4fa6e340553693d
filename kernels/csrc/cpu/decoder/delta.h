/* Gated DeltaNet layers between their projections: what one thread does for a key head and the value heads that share
 * it, over consecutive rows of one sequence. Formulas are in ops/delta.h.
 *
 * A slot keeps the state of every value head and, in a ring, the inputs of the convolution of its last `taps` tokens. A
 * slot at position 0 has no past, whatever they hold: nothing is cleared when a slot changes hands. */
#ifndef TRIRUN_CPU_DECODER_DELTA_H
#define TRIRUN_CPU_DECODER_DELTA_H

#include <math.h>
#include <string.h>

#include "cpu/common/memory.h"
#include "cpu/decoder/ops/ops.h"

namespace trirun {
namespace {

constexpr int64_t kMaxTaps = 8;
constexpr float kUnitEps = 1e-6f;

inline int64_t channels_of(const trirun_delta_layer& l) {
  return 2 * l.key_heads * l.key_dim + l.value_heads * l.value_dim;
}

/* Of a row of the projections, behind whose outputs lie those of the gates: b and a of all value heads. */
inline int64_t gates_column_of(const trirun_delta_layer& l) { return l.qkv.n + l.z.n; }
inline int64_t delta_width_of(const trirun_delta_layer& l) { return gates_column_of(l) + 2 * l.value_heads; }

inline int64_t delta_scratch(const trirun_delta_layer& l, int64_t rows) {
  const int64_t group = l.value_heads / l.key_heads;
  return 2 * rows + l.taps * (2 * l.key_dim + group * l.value_dim);
}

class DeltaHead {
 public:
  DeltaHead(const DecoderOps& ops, const trirun_delta_layer& layer, float eps, int64_t key_head)
      : ops_(ops), l(layer), eps_(eps), key_head_(key_head), group_(l.value_heads / l.key_heads),
        parts_{{key_head * l.key_stride, key_head * l.key_dim, l.key_dim},
               {l.k_column + key_head * l.key_stride, (l.key_heads + key_head) * l.key_dim, l.key_dim},
               {l.v_column + key_head * l.value_stride, 2 * l.key_heads * l.key_dim + key_head * group_ * l.value_dim,
                group_ * l.value_dim}} {}

  /* `rows` of the projections, [count][delta_width_of], the first of position `position`; they are overwritten. out:
   * [count][ldo], the input of the output projection. scratch: delta_scratch floats. */
  void run(int64_t slot, int64_t position, int64_t count, float* rows, float* out, int64_t ldo, float* scratch) const {
    const int64_t ld = delta_width_of(l);
    convolve(slot, position, count, rows, scratch + 2 * count);
    DeltaGates* gates = reinterpret_cast<DeltaGates*>(scratch);
    float *q = rows + parts_[0].column, *k = rows + parts_[1].column;
    for (int64_t r = 0; r < count; ++r) {
      ops_.unit(q + r * ld, l.key_dim, kUnitEps, 1.0f / sqrtf(static_cast<float>(l.key_dim)));
      ops_.unit(k + r * ld, l.key_dim, kUnitEps, 1.0f);
    }
    for (int64_t j = 0; j < group_; ++j) {
      const int64_t head = key_head_ * group_ + j, state_size = l.key_dim * l.value_dim;
      for (int64_t r = 0; r < count; ++r) gates[r] = gates_of(rows + r * ld + gates_column_of(l), head);
      float* state = l.state + (slot * l.value_heads + head) * state_size;
      if (position == 0) memset(state, 0, static_cast<size_t>(state_size) * sizeof(float));
      float* y = out + head * l.value_dim;
      const float* v = rows + parts_[2].column + j * l.value_dim;
      ops_.delta_rule({q, k, v, ld, gates, y, ldo, state, l.key_dim, l.value_dim}, count);
      for (int64_t r = 0; r < count; ++r) {
        float* z = rows + r * ld + l.z_column + key_head_ * l.z_stride + j * l.value_dim;
        ops_.rms_norm(y + r * ldo, y + r * ldo, l.norm, l.value_dim, eps_);
        ops_.gate(z, y + r * ldo, l.value_dim, TRIRUN_SILU);
        memcpy(y + r * ldo, z, static_cast<size_t>(l.value_dim) * sizeof(float));
      }
    }
  }

 private:
  struct Part {
    int64_t column, channel, size;
  };

  /* In place, from the last row to the first: a row is the input of later ones only. `kept`: the last inputs, which go
   * to the ring once the first rows have read what is there. */
  void convolve(int64_t slot, int64_t position, int64_t count, float* rows, float* kept) const {
    const int64_t ld = delta_width_of(l), channels = channels_of(l);
    const int64_t last = count < l.taps ? count : l.taps;
    float* ring = l.ring + slot * l.taps * channels;
    const auto place = [&](int64_t at) { return ring + at % l.taps * channels; };
    float* save = kept;
    for (const Part& part : parts_)
      for (int64_t r = count - last; r < count; ++r, save += part.size)
        memcpy(save, rows + r * ld + part.column, static_cast<size_t>(part.size) * sizeof(float));
    for (const Part& part : parts_)
      for (int64_t r = count - 1; r >= 0; --r) {
        const float* inputs[kMaxTaps];
        for (int64_t t = 0; t < l.taps; ++t) {
          const int64_t row = r - (l.taps - 1 - t), at = position + row;
          inputs[t] = row >= 0 ? rows + row * ld + part.column : at >= 0 ? place(at) + part.channel : nullptr;
        }
        float* to = rows + r * ld + part.column;
        ops_.convolve(to, inputs, l.conv + part.channel, l.taps, channels, part.size);
      }
    for (const Part& part : parts_)
      for (int64_t r = count - last; r < count; ++r, kept += part.size)
        memcpy(place(position + r) + part.channel, kept, static_cast<size_t>(part.size) * sizeof(float));
  }

  DeltaGates gates_of(const float* b_and_a, int64_t head) const {
    const float b = b_and_a[head], a = b_and_a[l.value_heads + head] + l.decay_bias[head];
    const float soft = a > 20 ? a : log1pf(expf(a));
    return {expf(l.decay_rate[head] * soft), 1 / (1 + expf(-b))};
  }

  const DecoderOps& ops_;
  const trirun_delta_layer& l;
  float eps_;
  int64_t key_head_, group_;
  Part parts_[3];  // q, k and v
};

}  // namespace
}  // namespace trirun
#endif
