// Gated DeltaNet (Yang, Kautz, Hatamizadeh 2024, "Gated Delta Networks", eq. 10): what a token does to the state of a
// value head, S [key_dim][value_dim] in float32, with q and k of unit length and q scaled by key_dim^-1/2:
//
//   S = e^g S;   d = beta (v - k^T S);   S += k d^T;   o = q^T S
//
// q, k and v come out of a causal convolution of `taps` tokens and SiLU; its inputs of the last `taps` tokens are kept
// in a ring, that of position p at p % taps, so that no one reads what the same step writes. A slot whose position is 0
// has no past: neither state nor ring is read, and nothing has to be cleared when a slot changes hands.
#pragma once

#include "cuda/decoder/launch.cuh"
#include "cuda/decoder/limbs.cuh"

namespace trirun::delta {

using namespace trirun::decoder;

constexpr int MAX_DIM = 128;  // of a head's keys and values
constexpr int MAX_TAPS = 4;
constexpr float UNIT_EPS = 1e-6f;  // of the length of q and k

__device__ __forceinline__ float silu(float v) { return v / (1.f + __expf(-v)); }

__device__ __forceinline__ float sigmoid(float v) { return 1.f / (1.f + __expf(-v)); }

// g, the logarithm of the decay: -e^A softplus(a + bias), decay_rate = -e^A.
__device__ __forceinline__ float log_decay(float a, float rate, float bias) {
  const float x = a + bias;
  return rate * (x > 20.f ? x : log1pf(__expf(x)));
}

// Where things lie in a row of the projection: of channel c of the convolution (q of all heads, k of all heads, v of
// all heads), and of the first column of a value head's z.
struct Columns {
  int keys, values, group;  // channels of q (or k), of v; value heads of a key head

  __device__ __forceinline__ explicit Columns(const trirun_delta& d)
      : keys(d.key_heads * d.key_dim), values(d.value_heads * d.value_dim), group(d.value_heads / d.key_heads) {}

  __device__ __forceinline__ int channels() const { return 2 * keys + values; }
  __device__ __forceinline__ int q(const trirun_delta& d, int key_head, int i) const {
    return key_head * d.key_stride + i;
  }
  __device__ __forceinline__ int k(const trirun_delta& d, int key_head, int i) const {
    return d.k_column + key_head * d.key_stride + i;
  }
  __device__ __forceinline__ int v(const trirun_delta& d, int head, int i) const {
    return d.v_column + head / group * d.value_stride + head % group * d.value_dim + i;
  }
  __device__ __forceinline__ int z(const trirun_delta& d, int head, int i) const {
    return head / group * d.z_stride + head % group * d.value_dim + i;
  }
};

// TRIRUN_OK, or what is wrong with what both kernels read.
int check_delta(const trirun_delta* d);

}  // namespace trirun::delta
