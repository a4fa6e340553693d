// Prompts, in chunks of C tokens. With G_i the sum of log decays up to token i of the chunk (Yang et al. 2024, "Gated
// Delta Networks", section 3.3, and "Parallelizing Linear Transformers with the Delta Rule over Sequence Length",
// eq. 7 to 10, of which this is the form that solves for d instead of inverting the matrix):
//
//   (I + A) D = beta (V - e^G K S),   A_ij = beta_i e^(G_i - G_j) k_i . k_j  below the diagonal
//   O = e^G Q S + P D,                P_ij = e^(G_i - G_j) q_i . k_j         up to it
//   S = e^G_C S + (e^(G_C - G) K)^T D
//
// Three kernels: `mix` (convolution, lengths, gates, to float32), `chunks` (a CTA for 32 columns of a value head walks
// through a segment) and `finish` (the gated norm). Products are of tf32 tensor cores on operands cut in two, which
// gives the precision of float32: the state is read and written thousands of times.
#include "delta.cuh"

namespace trirun::delta {
namespace {

// ---- mix: a warp per row and head of q, k or v, and per 32 heads' gates --------------------------------------------

constexpr int MIX_WARPS = 8;

template <bool BF16>
__global__ void __launch_bounds__(MIX_WARPS * 32) mix(const __grid_constant__ trirun_delta d) {
  const Columns columns(d);
  const int row = blockIdx.x, lane = threadIdx.x % 32, unit = blockIdx.y * MIX_WARPS + threadIdx.x / 32;
  const int channels = columns.channels();
  const int64_t width = channels + 2 * d.value_heads;
  dependency_launch();
  dependency_wait();
  const int slot = d.slots[row];
  float* mixed = d.mixed + row * width;
  if (unit >= 2 * d.key_heads + d.value_heads) {
    const int head = (unit - 2 * d.key_heads - d.value_heads) * 32 + lane;
    if (head >= d.value_heads) return;
    const auto* gates = static_cast<const uint16_t*>(d.gates) + row * d.ld_gates;
    const float b = widen_one<BF16>(gates[head]), a = widen_one<BF16>(gates[d.value_heads + head]);
    mixed[channels + head] = log_decay(a, d.decay_rate[head], d.decay_bias[head]);
    mixed[channels + d.value_heads + head] = sigmoid(b);
    return;
  }
  const int part = unit < d.key_heads ? 0 : unit < 2 * d.key_heads ? 1 : 2;
  const int head = unit - part * d.key_heads, dim = part == 2 ? d.value_dim : d.key_dim;
  const int channel0 = part == 0 ? head * dim : part == 1 ? columns.keys + head * dim : 2 * columns.keys + head * dim;
  const int column0 = part == 0 ? columns.q(d, head, 0) : part == 1 ? columns.k(d, head, 0) : columns.v(d, head, 0);
  const auto* x = static_cast<const uint16_t*>(d.x);
  const auto* ring = static_cast<const uint16_t*>(d.ring) + static_cast<int64_t>(slot) * d.taps * channels;
  const int position = d.positions[row];
  // Tokens of this sequence that are in the batch before this row; a row of another slot ends them.
  int before = 0;
  while (before < d.taps - 1 && before < position && row > before && d.slots[row - before - 1] == slot) before++;
  // Four channels for each lane.
  const int i = lane * 4;
  const bool there = i < dim;
  float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
  if (there) {
    for (int t = d.taps - 1; t >= 0; t--) {
      if (t > position) continue;
      const uint16_t* from = t <= before ? x + (row - t) * d.ld_x + column0
                                         : ring + static_cast<int64_t>((position - t) % d.taps) * channels + channel0;
      const uint2 four = *reinterpret_cast<const uint2*>(from + i);
      const float4 w = __ldg(reinterpret_cast<const float4*>(d.conv + (d.taps - 1 - t) * channels + channel0 + i));
      const float2 low = widen_pair<BF16>(four.x), high = widen_pair<BF16>(four.y);
      v.x += low.x * w.x, v.y += low.y * w.y, v.z += high.x * w.z, v.w += high.y * w.w;
    }
    v = make_float4(silu(v.x), silu(v.y), silu(v.z), silu(v.w));
  }
  float scale = 1.f;
  if (part < 2) {
    const float squares = warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w);
    scale = rsqrtf(squares + UNIT_EPS) * (part == 0 ? rsqrtf(static_cast<float>(dim)) : 1.f);
  }
  if (there)
    *reinterpret_cast<float4*>(mixed + channel0 + i) = make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale);
}

// ---- chunks --------------------------------------------------------------------------------------------------------

constexpr int CHUNK = 32, SPAN = 32;  // tokens; columns of v of a CTA
constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int KEY_LD = MAX_DIM + 4, STATE_LD = SPAN + 8, PAIR_LD = CHUNK + 4;  // without conflicts of banks

struct ChunkShared {
  float q[CHUNK][KEY_LD], k[CHUNK][KEY_LD];
  float state[MAX_DIM][STATE_LD], d[CHUNK][STATE_LD];
  float a[CHUNK][PAIR_LD], p[CHUNK][PAIR_LD];
  float log_decay[CHUNK], beta[CHUNK];
};

// A float32 as two operands of tf32.
struct Halves {
  uint32_t high, low;
  __device__ __forceinline__ explicit Halves(float v) {
    high = __float_as_uint(v) & 0xffffe000u;
    low = __float_as_uint(v - __uint_as_float(high));
  }
};

struct FragmentA {
  uint32_t high[4], low[4];
  // Rows r and r + 8 of columns t and t + 4, given as element(row, column) with the lane's r and t.
  template <class Element>
  __device__ __forceinline__ explicit FragmentA(Element element) {
    const int r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Halves v(element(r + i % 2 * 8, t + i / 2 * 4));
      high[i] = v.high, low[i] = v.low;
    }
  }
};

struct FragmentB {
  uint32_t high[2], low[2];
  // Rows t and t + 4 of column r.
  template <class Element>
  __device__ __forceinline__ explicit FragmentB(Element element) {
    const int r = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const Halves v(element(t + i * 4, r));
      high[i] = v.high, low[i] = v.low;
    }
  }
};

__device__ __forceinline__ void multiply(float (&sum)[4], const FragmentA& a, const FragmentB& b) {
  mma_tf32(sum, a.low, b.high[0], b.high[1]);
  mma_tf32(sum, a.high, b.low[0], b.low[1]);
  mma_tf32(sum, a.high, b.high[0], b.high[1]);
}

// What the last tokens of a segment leave in the ring: q and k by the first of the heads that share them.
__device__ __forceinline__ void keep_inputs(const trirun_delta& d, const Columns& columns, int first, int last,
                                            int head, int span) {
  const int channels = columns.channels(), slot = d.slots[first], key_head = head / columns.group;
  const bool keys = span == 0 && head % columns.group == 0;
  const auto* x = static_cast<const uint16_t*>(d.x);
  auto* ring = static_cast<uint16_t*>(d.ring) + static_cast<int64_t>(slot) * d.taps * channels;
  for (int row = max(first, last - d.taps); row < last; row++) {
    const auto* from = x + row * d.ld_x;
    auto* to = ring + static_cast<int64_t>(d.positions[row] % d.taps) * channels;
    const int i = threadIdx.x, column = span * SPAN + i;
    if (i < SPAN && column < d.value_dim)
      to[2 * columns.keys + head * d.value_dim + column] = from[columns.v(d, head, column)];
    if (keys && i < d.key_dim) {
      to[key_head * d.key_dim + i] = from[columns.q(d, key_head, i)];
      to[columns.keys + key_head * d.key_dim + i] = from[columns.k(d, key_head, i)];
    }
  }
}

__global__ void __launch_bounds__(THREADS) chunks(const __grid_constant__ trirun_delta d) {
  extern __shared__ __align__(16) unsigned char memory[];
  ChunkShared& s = *reinterpret_cast<ChunkShared*>(memory);
  const Columns columns(d);
  const int spans = (d.value_dim + SPAN - 1) / SPAN, head = blockIdx.x / spans, span = blockIdx.x % spans;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, r = lane / 4, t = lane % 4;
  const int channels = columns.channels(), key_head = head / columns.group;
  const int64_t width = channels + 2 * d.value_heads;
  dependency_launch();
  dependency_wait();
  const int first = d.starts[blockIdx.y], last = d.starts[blockIdx.y + 1];
  if (first >= last) return;
  const int slot = d.slots[first];
  float* kept = d.state + (static_cast<int64_t>(slot) * d.value_heads + head) * d.key_dim * d.value_dim;
  const bool fresh = d.positions[first] == 0;
  const int steps = (d.key_dim + 7) / 8;
  // A warp's share of the state: 16 keys, four tiles of 8 columns, as sums of mma lie.
  float state[SPAN / 8][4];
  const auto each_state = [&](auto body) {
#pragma unroll
    for (int n = 0; n < SPAN / 8; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = warp * 16 + r + i / 2 * 8, column = n * 8 + t * 2 + i % 2;
        body(state[n][i], key, column, key < d.key_dim && span * SPAN + column < d.value_dim);
      }
  };
  each_state([&](float& v, int key, int column, bool there) {
    v = there && !fresh ? __ldcg(kept + key * d.value_dim + span * SPAN + column) : 0.f;
    s.state[key][column] = v;
  });

  for (int chunk = first; chunk < last; chunk += CHUNK) {
    const int count = min(CHUNK, last - chunk);
    __syncthreads();
    for (int i = threadIdx.x; i < CHUNK * MAX_DIM / 4; i += THREADS) {
      const int row = i / (MAX_DIM / 4), column = i % (MAX_DIM / 4) * 4;
      float4 q = make_float4(0.f, 0.f, 0.f, 0.f), k = q;
      if (row < count && column < d.key_dim) {
        const float* from = d.mixed + (chunk + row) * width + key_head * d.key_dim + column;
        q = *reinterpret_cast<const float4*>(from);
        k = *reinterpret_cast<const float4*>(from + columns.keys);
      }
      *reinterpret_cast<float4*>(&s.q[row][column]) = q;
      *reinterpret_cast<float4*>(&s.k[row][column]) = k;
    }
    if (warp == 0) {
      const float* gates = d.mixed + (chunk + lane) * width + channels + head;
      float sum = lane < count ? gates[0] : 0.f;
#pragma unroll
      for (int offset = 1; offset < CHUNK; offset *= 2) {
        const float other = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += other;
      }
      s.log_decay[lane] = sum;
      s.beta[lane] = lane < count ? gates[d.value_heads] : 0.f;
    }
    // Of this warp's tile of 16 tokens by 8 tokens or columns.
    const int row0 = warp / 4 * 16, column0 = warp % 4 * 8;
    float* outputs[2];
    float2 values[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = row0 + r + i * 8, column = span * SPAN + column0 + t * 2;
      const bool there = row < count && column < d.value_dim;
      outputs[i] = there ? d.mixed + (chunk + row) * width + 2 * columns.keys + head * d.value_dim + column : nullptr;
      values[i] = there ? *reinterpret_cast<const float2*>(outputs[i]) : make_float2(0.f, 0.f);
    }
    __syncthreads();

    float kk[4] = {}, qk[4] = {}, ks[4] = {}, qs[4] = {};
    for (int step = 0; step < steps; step++) {
      const FragmentA k([&](int row, int column) { return s.k[row0 + row][step * 8 + column]; });
      const FragmentA q([&](int row, int column) { return s.q[row0 + row][step * 8 + column]; });
      const FragmentB keys([&](int row, int column) { return s.k[column0 + column][step * 8 + row]; });
      const FragmentB old([&](int row, int column) { return s.state[step * 8 + row][column0 + column]; });
      multiply(kk, k, keys), multiply(qk, q, keys), multiply(ks, k, old), multiply(qs, q, old);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = row0 + r + i / 2 * 8, column = column0 + t * 2 + i % 2;
      const float beta = s.beta[row], at = s.log_decay[row], grown = __expf(at);
      const float between = column <= row ? __expf(at - s.log_decay[column]) : 0.f;
      s.a[row][column] = column < row ? beta * kk[i] * between : 0.f;
      s.p[row][column] = qk[i] * between;
      const float v = i % 2 == 0 ? values[i / 2].x : values[i / 2].y;
      s.d[row][column] = beta * (v - grown * ks[i]);
      qs[i] *= grown;
    }
    __syncthreads();
    if (warp == 0) {
      // A column for each lane, from the first token to the last.
      float solved[CHUNK];
#pragma unroll
      for (int i = 0; i < CHUNK; i++) {
        float v = s.d[i][lane];
#pragma unroll
        for (int j = 0; j < i; j++) v -= s.a[i][j] * solved[j];
        solved[i] = v;
        s.d[i][lane] = v;
      }
    }
    __syncthreads();
    const float whole = s.log_decay[CHUNK - 1], decay = __expf(whole);
    each_state([&](float& v, int, int, bool) { v *= decay; });
#pragma unroll
    for (int step = 0; step < CHUNK / 8; step++) {
      const FragmentA p([&](int row, int column) { return s.p[row0 + row][step * 8 + column]; });
      const FragmentB mine([&](int row, int column) { return s.d[step * 8 + row][column0 + column]; });
      multiply(qs, p, mine);
      const FragmentA k([&](int row, int column) {
        const int token = step * 8 + column;
        return s.k[token][warp * 16 + row] * __expf(whole - s.log_decay[token]);
      });
#pragma unroll
      for (int n = 0; n < SPAN / 8; n++) {
        const FragmentB each([&](int row, int column) { return s.d[step * 8 + row][n * 8 + column]; });
        multiply(state[n], k, each);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (outputs[i] != nullptr) *reinterpret_cast<float2*>(outputs[i]) = make_float2(qs[2 * i], qs[2 * i + 1]);
    each_state([&](float& v, int key, int column, bool) { s.state[key][column] = v; });
  }
  each_state([&](float& v, int key, int column, bool there) {
    if (there) __stcg(kept + key * d.value_dim + span * SPAN + column, v);
  });
  keep_inputs(d, columns, first, last, head, span);
}

// ---- finish: a warp per row and value head

template <bool BF16>
__global__ void __launch_bounds__(MIX_WARPS * 32) finish(const __grid_constant__ trirun_delta d) {
  const Columns columns(d);
  const int row = blockIdx.x, lane = threadIdx.x % 32, head = blockIdx.y * MIX_WARPS + threadIdx.x / 32;
  dependency_launch();
  dependency_wait();
  if (head >= d.value_heads) return;
  const float* o = d.mixed + row * static_cast<int64_t>(columns.channels() + 2 * d.value_heads) + 2 * columns.keys +
                   head * d.value_dim;
  const auto* z = static_cast<const uint16_t*>(d.z) + row * d.ld_z + columns.z(d, head, 0);
  auto* y = static_cast<uint16_t*>(d.y) + row * d.ld_y + head * d.value_dim;
  const int i = lane * 4;
  const bool there = i < d.value_dim;
  const float4 v = there ? *reinterpret_cast<const float4*>(o + i) : make_float4(0.f, 0.f, 0.f, 0.f);
  const float inverse = rsqrtf(warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w) / d.value_dim + d.eps);
  if (!there) return;
  const uint2 four = *reinterpret_cast<const uint2*>(z + i);
  const float2 low = widen_pair<BF16>(four.x), high = widen_pair<BF16>(four.y);
  const float4 w = __ldg(reinterpret_cast<const float4*>(d.norm + i));
  *reinterpret_cast<uint2*>(y + i) =
      make_uint2(narrow_pair<BF16>(v.x * inverse * w.x * silu(low.x), v.y * inverse * w.y * silu(low.y)),
                 narrow_pair<BF16>(v.z * inverse * w.z * silu(high.x), v.w * inverse * w.w * silu(high.y)));
}

// no-spill: mix<*>
// no-spill: chunks
// no-spill: finish<*>

template <bool BF16>
int run(const trirun_delta& d, void* stream) {
  const auto warps = [&](int64_t units) {
    return dim3(static_cast<unsigned>(d.m), static_cast<unsigned>((units + MIX_WARPS - 1) / MIX_WARPS));
  };
  const int64_t units = 2 * d.key_heads + d.value_heads + (d.value_heads + 31) / 32;
  if (const int code = launch_dependent(mix<BF16>, d, warps(units), MIX_WARPS * 32, 0, stream)) return code;
  const int spans = (d.value_dim + SPAN - 1) / SPAN;
  const dim3 grid(static_cast<unsigned>(d.value_heads * spans), static_cast<unsigned>(d.segments));
  if (const int code = launch_dependent(chunks, d, grid, THREADS, sizeof(ChunkShared), stream)) return code;
  return launch_dependent(finish<BF16>, d, warps(d.value_heads), MIX_WARPS * 32, 0, stream);
}

}  // namespace
}  // namespace trirun::delta

extern "C" int trirun_cuda_delta_prompt(const trirun_delta* d, void* stream) {
  using namespace trirun;
  using namespace trirun::delta;
  if (const int code = check_delta(d)) return code;
  if (d->m == 0) return TRIRUN_OK;
  if (d->segments <= 0 || d->segments > 65535) return TRIRUN_BAD_SHAPE;
  if (d->gates == nullptr || d->y == nullptr || d->starts == nullptr || d->mixed == nullptr ||
      !aligned_to(d->mixed, 16))
    return TRIRUN_BAD_POINTER;
  // Four values at a time.
  if (d->value_heads % 2 ||
      (d->ld_x | d->ld_z | d->ld_y | d->key_stride | d->k_column | d->v_column | d->value_stride | d->z_stride) % 4)
    return TRIRUN_BAD_SHAPE;
  if (!aligned_to(d->x, 8) || !aligned_to(d->z, 8) || !aligned_to(d->y, 8) || !aligned_to(d->ring, 8) ||
      !aligned_to(d->conv, 16) || !aligned_to(d->norm, 16))
    return TRIRUN_BAD_POINTER;
  return d->dtype == TRIRUN_BF16 ? run<true>(*d, stream) : run<false>(*d, stream);
}
