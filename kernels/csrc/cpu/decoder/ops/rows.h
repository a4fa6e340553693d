/* What a decoder layer does to a row between its products: norm, residual sum, gate, rotation, and keys and values to
 * the cache. */
#ifndef TRIRUN_CPU_DECODER_OPS_ROWS_H
#define TRIRUN_CPU_DECODER_OPS_ROWS_H

#include <math.h>

#include "lanes.h"
#include "ops.h"

namespace trirun {
namespace {

template <class X>
inline void load_row_as(float* out, const X* x, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) store(out + i, load(x + i));
}

void load_row(float* out, const void* x, int dtype, int64_t n) {
  if (dtype == TRIRUN_F32)
    load_row_as(out, static_cast<const float*>(x), n);
  else if (dtype == TRIRUN_F16)
    load_row_as(out, static_cast<const uint16_t*>(x), n);
  else
    load_row_as(out, static_cast<const Bfloat*>(x), n);
}

void rms_norm(float* out, const float* x, const float* weight, int64_t n, float eps) {
  /* Four sums hide the latency of the multiply-add. */
  Lanes squares[4] = {splat(0), splat(0), splat(0), splat(0)};
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) {
      Lanes a = load(x + i + j * kLanes);
      squares[j] = fma(a, a, squares[j]);
    }
  for (; i < n; i += kLanes) {
    Lanes a = n - i >= kLanes ? load(x + i) : load_first(x + i, static_cast<int>(n - i));
    squares[0] = fma(a, a, squares[0]);
  }
  float total = sum_of((squares[0] + squares[1]) + (squares[2] + squares[3]));
  float inverse = 1.0f / sqrtf(total / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) store(out + i, load(x + i) * splat(inverse) * load(weight + i));
  for (; i < n; ++i) out[i] = x[i] * inverse * weight[i];
}

void layer_norm(float* out, const float* x, const float* weight, const float* bias, int64_t n, float eps) {
  Lanes sums = splat(0);
  for (int64_t i = 0; i < n; i += kLanes)
    sums = sums + (n - i >= kLanes ? load(x + i) : load_first(x + i, static_cast<int>(n - i)));
  const float mean = sum_of(sums) / static_cast<float>(n);
  Lanes squares = splat(0);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Lanes a = load(x + i) - splat(mean);
    squares = fma(a, a, squares);
  }
  float total = sum_of(squares);
  for (; i < n; ++i) total = __builtin_fmaf(x[i] - mean, x[i] - mean, total);
  const float inverse = 1.0f / sqrtf(total / static_cast<float>(n) + eps);
  for (i = 0; i + kLanes <= n; i += kLanes) {
    Lanes y = (load(x + i) - splat(mean)) * splat(inverse) * load(weight + i);
    store(out + i, bias ? y + load(bias + i) : y);
  }
  for (; i < n; ++i) {
    const float y = (x[i] - mean) * inverse * weight[i];
    out[i] = bias ? y + bias[i] : y;
  }
}

void add(float* x, const float* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) + load(y + i));
  for (; i < n; ++i) x[i] += y[i];
}

void add_scaled(float* x, const float* y, int64_t n, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, fma(load(y + i), splat(factor), load(x + i)));
  for (; i < n; ++i) x[i] = __builtin_fmaf(y[i], factor, x[i]);
}

void scale(float* x, int64_t n, float factor) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(x + i, load(x + i) * splat(factor));
  for (; i < n; ++i) x[i] *= factor;
}

void soften(float* x, int64_t n, float cap) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = n - i >= kLanes ? kLanes : static_cast<int>(n - i);
    store_first(x + i, softcap(load_first(x + i, count), cap, 1 / cap), count);
  }
}

inline Lanes silu(Lanes x) {
  /* Beyond 2^126 the quotient is below fp32's normal range; a larger power would overflow exp2. The second operand of
   * min is what comes back for a NaN. */
  Lanes power = min(splat(126.0f), x * splat(-kLog2e));
  return x / (splat(1.0f) + exp2(power));
}

inline Lanes sigmoid(Lanes x) {
  Lanes power = min(splat(126.0f), x * splat(-kLog2e));
  return splat(1.0f) / (splat(1.0f) + exp2(power));
}

inline Lanes relu2(Lanes x) {
  Lanes positive = max(splat(0), x);
  return positive * positive;
}

/* x/2 (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3) */
inline Lanes gelu_tanh(Lanes x) {
  Lanes u = splat(0.79788456f) * x * fma(splat(0.044715f) * x, x, splat(1.0f));
  Lanes power = min(splat(126.0f), u * splat(-2 * kLog2e));
  return x / (splat(1.0f) + exp2(power));
}

template <class Act>
inline void gate_by(float* h, const float* up, int64_t n, Act act) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int count = n - i >= kLanes ? kLanes : static_cast<int>(n - i);
    Lanes y = act(count == kLanes ? load(h + i) : load_first(h + i, count));
    if (up) y = y * (count == kLanes ? load(up + i) : load_first(up + i, count));
    if (count == kLanes)
      store(h + i, y);
    else
      store_first(h + i, y, count);
  }
}

void gate(float* h, const float* up, int64_t n, int activation) {
  switch (activation) {
    case TRIRUN_SILU: return gate_by(h, up, n, [](Lanes x) { return silu(x); });
    case TRIRUN_RELU2: return gate_by(h, up, n, [](Lanes x) { return relu2(x); });
    case TRIRUN_SIGMOID: return gate_by(h, up, n, [](Lanes x) { return sigmoid(x); });
    default: return gate_by(h, up, n, [](Lanes x) { return gelu_tanh(x); });
  }
}

void clipped_swiglu(float* h, const float* up, int64_t n, float limit) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int count = n - i >= kLanes ? kLanes : static_cast<int>(n - i);
    /* The second operand of min and max is what comes back for a NaN. */
    Lanes g = min(splat(limit), load_first(h + i, count));
    Lanes u = max(splat(-limit), min(splat(limit), load_first(up + i, count)));
    Lanes power = min(splat(126.0f), g * splat(-1.702f * kLog2e));
    store_first(h + i, (u + splat(1.0f)) * (g / (splat(1.0f) + exp2(power))), count);
  }
}

void rotate(float* x, const float* cosines, const float* sines, int64_t half, int64_t n, float scale) {
  Lanes factor = splat(scale);
  for (int64_t i = 0; i < half; i += kLanes) {
    int count = half - i >= kLanes ? kLanes : static_cast<int>(half - i);
    Lanes a = load_first(x + i, count), b = load_first(x + half + i, count);
    Lanes c = load_first(cosines + i, count), s = load_first(sines + i, count);
    store_first(x + i, fma(a, c, splat(0) - b * s) * factor, count);
    store_first(x + half + i, fma(b, c, a * s) * factor, count);
  }
  for (int64_t i = 2 * half; i < n; ++i) x[i] *= scale;
}

void rotate_pairs(float* x, const float* cosines, const float* sines, int64_t half, int64_t n, float scale) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = __builtin_fmaf(a, cosines[i], -(b * sines[i])) * scale;
    x[2 * i + 1] = __builtin_fmaf(b, cosines[i], a * sines[i]) * scale;
  }
  for (int64_t i = 2 * half; i < n; ++i) x[i] *= scale;
}

template <class KV>
inline void convert(KV* out, const float* x, int count) {
  Lanes a = count == kLanes ? load(x) : load_first(x, count);
  store(out, a);
}

template <class KV>
void store_key_as(KV* keys, const float* x, int64_t head_dim, int64_t position) {
  KV* column = keys + position / kLanes * kLanes * head_dim + position % kLanes;
  for (int64_t d = 0; d < head_dim; d += kLanes) {
    int count = head_dim - d >= kLanes ? kLanes : static_cast<int>(head_dim - d);
    KV converted[kLanes];
    convert(converted, x + d, count);
    for (int i = 0; i < count; ++i) column[(d + i) * kLanes] = converted[i];
  }
}

template <class KV>
void store_value_as(KV* values, const float* x, int64_t head_dim, int64_t position) {
  /* The padding up to value_stride is written as zeros: attend multiplies it. */
  KV* row = values + position * value_stride_of(head_dim);
  for (int64_t d = 0; d < head_dim; d += kLanes)
    convert(row + d, x + d, head_dim - d >= kLanes ? kLanes : static_cast<int>(head_dim - d));
}

void store_key(void* keys, int kv_dtype, const float* x, int64_t head_dim, int64_t position) {
  if (kv_dtype == TRIRUN_F16)
    store_key_as(static_cast<uint16_t*>(keys), x, head_dim, position);
  else
    store_key_as(static_cast<float*>(keys), x, head_dim, position);
}

void store_value(void* values, int kv_dtype, const float* x, int64_t head_dim, int64_t position) {
  if (kv_dtype == TRIRUN_F16)
    store_value_as(static_cast<uint16_t*>(values), x, head_dim, position);
  else
    store_value_as(static_cast<float*>(values), x, head_dim, position);
}

}  // namespace
}  // namespace trirun
#endif
