// One new token of every row: convolution, gates, delta rule, gated norm, in one CTA per value head, which keeps the
// head's state in registers from the one load to the one store. Everything that earlier steps have left (state, ring,
// weights) is asked for while the projection still runs; b and a, two outputs of a projection too narrow for a kernel
// of its own, are computed here.
#include "delta.cuh"

namespace trirun::delta {
namespace {

constexpr int WARPS = 16, THREADS = WARPS * 32, ROWS = MAX_DIM / WARPS;
constexpr int GATE_WARPS = WARPS / 2;  // for b, and as many for a

struct DecodeArgs {
  trirun_delta d;
  LimbRows quantized;
};

template <bool BF16>
__device__ __forceinline__ float dot_eight(uint4 a, uint4 b) {
  const uint32_t x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float2 p = widen_pair<BF16>(x[i]), q = widen_pair<BF16>(y[i]);
    sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
  }
  return sum;
}

// The gated norm of a head's outputs, by one warp in the lane order of activations.cuh; zeros of a row without a slot.
template <bool BF16>
__device__ __forceinline__ void finish(const DecodeArgs& a, const float* outputs, const float* gates, int row, int head,
                                       bool idle) {
  const trirun_delta& d = a.d;
  const int lane = threadIdx.x % 32, column = (lane >> 2) * 16 + lane % 4 * 2;
  float v[4] = {};
  if (!idle && column < d.value_dim) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = outputs[column + i % 2 + i / 2 * 8];
  }
  const float inverse = rsqrtf(warp_sum(v[0] * v[0] + v[1] * v[1] + v[2] * v[2] + v[3] * v[3]) / d.value_dim + d.eps);
  if (!idle && column < d.value_dim) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = column + i % 2 + i / 2 * 8;
      v[i] *= inverse * __ldg(d.norm + at) * gates[at];
    }
  }
  if (a.quantized.limbs != nullptr) {
    a.quantized.store(quantize_k_tile16(make_float4(v[0], v[1], v[2], v[3])), row, head, true);
  } else if (row < d.m && column < d.value_dim) {
    auto* to = reinterpret_cast<uint32_t*>(static_cast<uint16_t*>(d.y) + row * d.ld_y + head * d.value_dim + column);
    to[0] = narrow_pair<BF16>(v[0], v[1]);
    to[4] = narrow_pair<BF16>(v[2], v[3]);
  }
}

// One output of the convolution from the newest input and those before it; `weights` is at the channel.
__device__ __forceinline__ float convolve(float newest, const float (&past)[MAX_TAPS], const float* weights,
                                          int channels, int taps) {
  float sum = newest * __ldg(weights + (taps - 1) * channels);
#pragma unroll
  for (int j = 1; j < MAX_TAPS; j++)
    if (j < taps) sum += past[j] * __ldg(weights + (taps - 1 - j) * channels);
  return silu(sum);
}

template <bool BF16>
__global__ void __launch_bounds__(THREADS, 2) decode(const __grid_constant__ DecodeArgs a) {
  __shared__ __align__(16) float mixed[3][MAX_DIM];  // q, k, v
  __shared__ float gate[MAX_DIM], outputs[MAX_DIM];
  __shared__ __align__(16) float read[2][WARPS][MAX_DIM], deltas[MAX_DIM];
  __shared__ float gate_sums[WARPS];
  const trirun_delta& d = a.d;
  const Columns columns(d);
  const int head = blockIdx.x, row = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int key_head = head / columns.group, slot = row < d.m ? d.slots[row] : -1;
  if (slot < 0) {
    dependency_launch();
    dependency_wait();
    if (warp == 0) finish<BF16>(a, outputs, gate, row, head, true);
    return;
  }
  const int position = d.positions[row];

  // The state: eight rows of keys for each warp, four columns for each lane.
  float* state = d.state + (static_cast<int64_t>(slot) * d.value_heads + head) * d.key_dim * d.value_dim;
  const bool wide = lane * 4 < d.value_dim;
  float4 s[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; i++) {
    const int key = warp * ROWS + i;
    s[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (position > 0 && wide && key < d.key_dim)
      s[i] = __ldcg(reinterpret_cast<const float4*>(state + key * d.value_dim + lane * 4));
  }
  // The convolution: a channel for each thread, q, k and v a third each. Beyond them, z.
  const int part = threadIdx.x / MAX_DIM, i = threadIdx.x % MAX_DIM;
  const bool convolved = part < 3 && i < (part == 2 ? d.value_dim : d.key_dim);
  const int channel = part == 0   ? key_head * d.key_dim + i
                      : part == 1 ? columns.keys + key_head * d.key_dim + i
                                  : 2 * columns.keys + head * d.value_dim + i;
  const int channels = columns.channels();
  uint16_t* ring = static_cast<uint16_t*>(d.ring) + static_cast<int64_t>(slot) * d.taps * channels + channel;
  float past[MAX_TAPS] = {};
  if (convolved) {
#pragma unroll
    for (int j = 1; j < MAX_TAPS; j++)
      if (j < d.taps && j <= position)
        past[j] = widen_one<BF16>(__ldcg(ring + static_cast<int64_t>((position - j) % d.taps) * channels));
  }
  const int gate_row = (warp < GATE_WARPS ? 0 : d.value_heads) + head, gate_thread = threadIdx.x % (GATE_WARPS * 32);
  const int eights = static_cast<int>(d.hidden_size / 8);
  const auto* gate_weight =
      reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(d.gate_weight) + gate_row * d.hidden_size);
  // Registers are short: to L2, from where they come as fast as what they are multiplied by.
  for (int at = gate_thread; at < eights; at += GATE_WARPS * 32)
    if (at % 8 == 0) prefetch_l2(gate_weight + at);
  dependency_launch();
  dependency_wait();

  const auto* x = static_cast<const uint16_t*>(d.x) + row * d.ld_x;
  if (convolved) {
    const int column = part == 0   ? columns.q(d, key_head, i)
                       : part == 1 ? columns.k(d, key_head, i)
                                   : columns.v(d, head, i);
    const uint16_t newest = x[column];
    mixed[part][i] = convolve(widen_one<BF16>(newest), past, d.conv + channel, channels, d.taps);
    // Heads that share keys compute them all, and one of them keeps them.
    if (part == 2 || head % columns.group == 0) ring[static_cast<int64_t>(position % d.taps) * channels] = newest;
  } else if (part < 3) {
    mixed[part][i] = 0.f;
  } else if (i < d.value_dim) {
    const auto* z = static_cast<const uint16_t*>(d.z) + row * d.ld_z;
    gate[i] = silu(widen_one<BF16>(z[columns.z(d, head, i)]));
  }
  const auto* hidden = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(d.hidden) + row * d.ld_hidden);
  float sum = 0.f;
#pragma unroll 3
  for (int at = gate_thread; at < eights; at += GATE_WARPS * 32)
    sum += dot_eight<BF16>(load_global4_once(gate_weight + at), hidden[at]);
  sum = warp_sum(sum);
  if (lane == 0) gate_sums[warp] = sum;
  __syncthreads();

  float gate_b = 0.f, gate_a = 0.f;
#pragma unroll
  for (int w = 0; w < GATE_WARPS; w++) gate_b += gate_sums[w], gate_a += gate_sums[GATE_WARPS + w];
  const float beta = sigmoid(gate_b), decay = __expf(log_decay(gate_a, d.decay_rate[head], d.decay_bias[head]));
  const float4 q = *reinterpret_cast<const float4*>(mixed[0] + lane * 4);
  const float4 k = *reinterpret_cast<const float4*>(mixed[1] + lane * 4);
  const float q_unit = rsqrtf(warp_sum(q.x * q.x + q.y * q.y + q.z * q.z + q.w * q.w) + UNIT_EPS) *
                       rsqrtf(static_cast<float>(d.key_dim));
  const float k_unit = rsqrtf(warp_sum(k.x * k.x + k.y * k.y + k.z * k.z + k.w * k.w) + UNIT_EPS);
  const float qk = warp_sum(q.x * k.x + q.y * k.y + q.z * k.z + q.w * k.w) * q_unit * k_unit;
  float4 by_k = make_float4(0.f, 0.f, 0.f, 0.f), by_q = by_k;
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const float ki = mixed[1][warp * ROWS + r], qi = mixed[0][warp * ROWS + r];
    by_k.x += ki * s[r].x, by_k.y += ki * s[r].y, by_k.z += ki * s[r].z, by_k.w += ki * s[r].w;
    by_q.x += qi * s[r].x, by_q.y += qi * s[r].y, by_q.z += qi * s[r].z, by_q.w += qi * s[r].w;
  }
  *reinterpret_cast<float4*>(read[0][warp] + lane * 4) = by_k;
  *reinterpret_cast<float4*>(read[1][warp] + lane * 4) = by_q;
  __syncthreads();
  if (threadIdx.x < MAX_DIM) {
    float at_k = 0.f, at_q = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) at_k += read[0][w][threadIdx.x], at_q += read[1][w][threadIdx.x];
    const float delta = beta * (mixed[2][threadIdx.x] - decay * k_unit * at_k);
    deltas[threadIdx.x] = delta;
    outputs[threadIdx.x] = decay * q_unit * at_q + qk * delta;
  }
  __syncthreads();
  if (warp == 0) finish<BF16>(a, outputs, gate, row, head, false);
  const float4 delta = *reinterpret_cast<const float4*>(deltas + lane * 4);
#pragma unroll
  for (int r = 0; r < ROWS; r++) {
    const int key = warp * ROWS + r;
    if (!wide || key >= d.key_dim) continue;
    const float ki = mixed[1][key] * k_unit;
    const float4 next = make_float4(decay * s[r].x + ki * delta.x, decay * s[r].y + ki * delta.y,
                                    decay * s[r].z + ki * delta.z, decay * s[r].w + ki * delta.w);
    __stcg(reinterpret_cast<float4*>(state + key * d.value_dim + lane * 4), next);
  }
}

}  // namespace

int check_delta(const trirun_delta* d) {
  if (d == nullptr) return TRIRUN_BAD_POINTER;
  if (!half_dtype(d->dtype)) return TRIRUN_UNSUPPORTED;
  if (d->m < 0 || d->m > 65535 || d->key_heads <= 0 || d->value_heads <= 0 || d->value_heads % d->key_heads ||
      d->key_dim <= 0 || d->key_dim > MAX_DIM || d->key_dim % 16 || d->value_dim <= 0 || d->value_dim > MAX_DIM ||
      d->value_dim % 16 || d->taps < 1 || d->taps > MAX_TAPS || d->ld_y % 2)
    return TRIRUN_BAD_SHAPE;
  for (const void* p :
       {d->x, d->z, static_cast<const void*>(d->conv), static_cast<const void*>(d->decay_rate),
        static_cast<const void*>(d->decay_bias), static_cast<const void*>(d->norm), static_cast<const void*>(d->slots),
        static_cast<const void*>(d->positions), static_cast<const void*>(d->ring)})
    if (p == nullptr) return TRIRUN_BAD_POINTER;
  if (d->state == nullptr || !aligned_to(d->state, 16)) return TRIRUN_BAD_POINTER;
  return TRIRUN_OK;
}

}  // namespace trirun::delta

extern "C" int trirun_cuda_delta_decode(const trirun_delta* d, void* stream) {
  using namespace trirun;
  using namespace trirun::delta;
  if (const int code = check_delta(d)) return code;
  if (d->m == 0) return TRIRUN_OK;
  if (d->hidden_size <= 0 || d->hidden_size % 8 || d->ld_hidden % 8) return TRIRUN_BAD_SHAPE;
  if (d->hidden == nullptr || d->gate_weight == nullptr || !aligned_to(d->hidden, 16) ||
      !aligned_to(d->gate_weight, 16) || !aligned_to(d->activations, 256) || !aligned_to(d->y, 4))
    return TRIRUN_BAD_POINTER;
  if ((d->y == nullptr) == (d->activations == nullptr)) return TRIRUN_BAD_POINTER;
  DecodeArgs args{*d, {}};
  int rows = static_cast<int>(d->m);
  if (d->activations != nullptr) {
    // A head is one k tile.
    if (d->value_dim != K_TILE) return TRIRUN_UNSUPPORTED;
    const int64_t k = static_cast<int64_t>(d->value_heads) * K_TILE;
    if (d->m > 128 || d->activation_bytes < ActivationLayout(d->m, k, TRIRUN_ACT16).bytes) return TRIRUN_NO_WORKSPACE;
    args.quantized = LimbRows(d->activations, d->m, k, TRIRUN_ACT16);
    rows = args.quantized.tokens;
  }
  const dim3 grid(static_cast<unsigned>(d->value_heads), static_cast<unsigned>(rows));
  const auto kernel = d->dtype == TRIRUN_BF16 ? decode<true> : decode<false>;
  return launch_dependent(kernel, args, grid, THREADS, 0, stream);
}
