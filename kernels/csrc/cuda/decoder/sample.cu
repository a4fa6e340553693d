// The next token of every row, chosen on the GPU, and the inputs of the next step: one CTA per row over its logits.
//
// Order: bias and penalties, the mask of a grammar, temperature, top-k, top-p (of what top-k left), min-p, then the
// inverse of the cumulative distribution over ascending token ids at one number of SplitMix64 (Steele et al. 2014), a
// function of the request's stream and of how many tokens it has drawn: its draws are the same in any batch. Thresholds
// of top-k and top-p are found digit by digit (radix selection). Masses are added as integers, so nothing depends on
// the order of additions.
#include "launch.cuh"

namespace trirun::decoder {
namespace {

constexpr int THREADS = 1024, WARPS = THREADS / 32, BINS = 256;

struct SampleArgs {
  trirun_sample s;
};

// The number in [0, 1) that chooses token `drawn` of a stream.
__device__ __forceinline__ double uniform(uint64_t stream, uint32_t drawn) {
  uint64_t z = stream + (static_cast<uint64_t>(drawn) + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

using Mass = unsigned long long;  // of a probability relative to the likeliest token's, times 2^32
constexpr float MASS_ONE = 4294967296.f;

struct Best {
  float value;
  int token;
  // Tokens come in ascending order to a thread, so the first of equals stays. A NaN is never the largest.
  __device__ __forceinline__ void take(float v, int i) {
    if (v > value) value = v, token = i;
  }
};

// One row of logits: f(token, logit) for every token of this thread, 16 bytes at a time where the row allows it.
struct Row {
  const void* at;
  int dtype, vocab;

  __device__ __forceinline__ float operator[](int i) const { return load_element(at, i, dtype); }

  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    const int per_load = dtype == TRIRUN_F32 ? 4 : 8;
    const int vectors = reinterpret_cast<uintptr_t>(at) % 16 == 0 ? vocab / per_load : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += THREADS) {
      const uint4 v = __ldcg(static_cast<const uint4*>(at) + i);
      const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (dtype == TRIRUN_F32) {
          f(i * 4 + j, __uint_as_float(words[j]));
        } else {
          const float2 pair = dtype == TRIRUN_BF16 ? widen_pair<true>(words[j]) : widen_pair<false>(words[j]);
          f(i * 8 + j * 2, pair.x);
          f(i * 8 + j * 2 + 1, pair.y);
        }
      }
    }
    for (int i = vectors * per_load + threadIdx.x; i < vocab; i += THREADS) f(i, (*this)[i]);
  }
};

// The larger value; of equals the lower token.
__device__ __forceinline__ Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.token < a.token) ? b : a;
}

__device__ __forceinline__ Best cta_best(Best mine, Best* scratch) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    mine = better(mine, {__shfl_xor_sync(~0u, mine.value, offset), __shfl_xor_sync(~0u, mine.token, offset)});
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  __syncthreads();
  mine = scratch[threadIdx.x % 32];
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2)
    mine = better(mine, {__shfl_xor_sync(~0u, mine.value, offset), __shfl_xor_sync(~0u, mine.token, offset)});
  return mine;
}

__device__ __forceinline__ float cta_sum(float mine, float* scratch) {
  mine = warp_sum(mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = mine;
  __syncthreads();
  return warp_sum(scratch[threadIdx.x % 32]);
}

// The sum over the CTA; `before` becomes that over the threads before this one.
__device__ __forceinline__ Mass cta_scan(Mass mine, Mass& before, Mass* scratch) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Mass through = mine;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const Mass earlier = __shfl_up_sync(~0u, through, offset);
    if (lane >= offset) through += earlier;
  }
  __syncthreads();
  if (lane == 31) scratch[warp] = through;
  __syncthreads();
  Mass warps_through = scratch[lane];
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const Mass earlier = __shfl_up_sync(~0u, warps_through, offset);
    if (lane >= offset) warps_through += earlier;
  }
  const Mass warps_before = __shfl_sync(~0u, warps_through, warp == 0 ? 0 : warp - 1);
  before = (warp == 0 ? 0 : warps_before) + through - mine;
  return __shfl_sync(~0u, warps_through, 31);
}

// The largest threshold t (as ordered bits) for which the measure of {x : x >= t} reaches `wanted`; measure(bits) is
// what a logit weighs, 0 for one that is out. Digits of eight bits, the highest first.
template <typename Measure>
__device__ uint32_t radix_threshold(const Row& row, Mass wanted, Mass* bins, Measure measure) {
  __shared__ uint32_t chosen;
  __shared__ Mass above;
  uint32_t prefix = 0;
  Mass counted = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    const uint32_t mask = shift == 24 ? 0 : ~0u << (shift + 8);
    row.each([&](int, float v) {
      const uint32_t bits = ordered_bits(v);
      if ((bits & mask) != prefix) return;
      if (const Mass weight = measure(bits)) atomicAdd(bins + (bits >> shift & 255), weight);
    });
    __syncthreads();
    if (threadIdx.x < 32) {
      // Lane l has the l-th highest eight bins.
      constexpr int EACH = BINS / 32;
      const int lane = threadIdx.x, first = BINS - 1 - lane * EACH;
      Mass mine = 0;
      for (int i = 0; i < EACH; i++) mine += bins[first - i];
      Mass through = mine;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const Mass before = __shfl_up_sync(~0u, through, offset);
        if (lane >= offset) through += before;
      }
      const uint32_t enough = __ballot_sync(~0u, counted + through >= wanted);
      if (lane == (enough != 0 ? __ffs(enough) - 1 : 31)) {
        Mass reached = counted + through - mine;
        int bin = first;
        while (bin > first - EACH + 1 && reached + bins[bin] < wanted) reached += bins[bin--];
        chosen = prefix | static_cast<uint32_t>(bin) << shift;
        above = reached;
      }
    }
    __syncthreads();
    prefix = chosen, counted = above;
  }
  return prefix;
}

__global__ void __launch_bounds__(THREADS) sample(const __grid_constant__ SampleArgs a) {
  __shared__ Best best_scratch[WARPS];
  __shared__ float sum_scratch[WARPS];
  __shared__ Mass bins[BINS], scan_scratch[WARPS];
  __shared__ int drawn;
  const trirun_sample& s = a.s;
  const int row = blockIdx.x, vocab = static_cast<int>(s.vocab);
  // No early launch of the next kernel: what starts the next step reads positions and tokens ahead of its own wait.
  dependency_wait();
  const int slot = s.slots[row];
  if (slot < 0) return;
  if (s.wanted != nullptr && s.wanted[row] == 0) {
    if (threadIdx.x == 0) s.sampled[row] = -1;
    return;
  }
  trirun_sampler& state = s.samplers[slot];
  const trirun_sampler p = state;
  const Row raw{static_cast<const char*>(s.logits) + row * s.ld * (s.dtype == TRIRUN_F32 ? 4 : 2), s.dtype, vocab};
  int32_t* counts = s.counts == nullptr ? nullptr : s.counts + static_cast<int64_t>(slot) * vocab;
  const bool penalised = counts != nullptr && (p.repetition != 1.f || p.presence != 0.f || p.frequency != 0.f);
  const bool masked = s.masks != nullptr && p.masked != 0;
  const uint32_t* mask = masked ? s.masks + static_cast<int64_t>(slot) * ((vocab + 31) / 32) : nullptr;
  const bool changed = penalised || p.bias_count > 0 || masked;

  float* work = s.work + static_cast<int64_t>(row) * vocab;
  constexpr Best NOTHING{-INFINITY, 0x7fffffff};
  Best top = NOTHING, raw_top = NOTHING;
  raw.each([&](int i, float v) {
    raw_top.take(v, i);
    if (!changed) return;
    if (penalised) {
      // Bit 31 marks a token of the prompt, the others count what was generated.
      const uint32_t count = static_cast<uint32_t>(counts[i]), generated = count & 0x7fffffffu;
      if (count != 0) v = v > 0.f ? v / p.repetition : v * p.repetition;
      if (generated != 0) v -= p.presence + p.frequency * generated;
    }
    work[i] = masked && (mask[i / 32] >> i % 32 & 1) == 0 ? -INFINITY : v;
  });
  raw_top = cta_best(raw_top, best_scratch);
  if (changed) {
    for (int i = threadIdx.x; i < p.bias_count; i += THREADS) {
      const int32_t token = s.bias_tokens[static_cast<int64_t>(slot) * s.bias_capacity + i];
      if (token >= 0 && token < vocab) work[token] += s.bias_values[static_cast<int64_t>(slot) * s.bias_capacity + i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += THREADS) top.take(work[i], i);
    top = cta_best(top, best_scratch);
  } else {
    top = raw_top;
  }
  const Row logits = changed ? Row{work, TRIRUN_F32, vocab} : raw;

  // Nothing is allowed, or no logit is a finite number.
  const bool none = top.token >= vocab || !isfinite(top.value);
  int token = none ? 0 : top.token;
  if (p.temperature > 0.f && !none) {
    const float inverse = 1.f / p.temperature;
    uint32_t threshold = 0;
    if (p.top_k > 0 && p.top_k < vocab)
      threshold = radix_threshold(logits, p.top_k, bins, [](uint32_t) { return Mass{1}; });
    const auto mass = [&](uint32_t bits) {
      if (bits < threshold) return Mass{0};
      return static_cast<Mass>(MASS_ONE * __expf((from_ordered(bits) - top.value) * inverse));
    };
    if (p.top_p < 1.f) {
      Mass total = 0;
      logits.each([&](int, float v) { total += mass(ordered_bits(v)); });
      Mass before;
      total = cta_scan(total, before, scan_scratch);
      const auto wanted = static_cast<Mass>(static_cast<double>(p.top_p) * static_cast<double>(total));
      threshold = max(threshold, radix_threshold(logits, max(wanted, Mass{1}), bins, mass));
    }
    if (p.min_p > 0.f) threshold = max(threshold, ordered_bits(top.value + __logf(p.min_p) * p.temperature));
    // Every thread has some consecutive tokens; the one into whose tokens the drawn mass falls walks along them.
    const int span = (vocab + THREADS - 1) / THREADS, first = min(vocab, static_cast<int>(threadIdx.x) * span);
    const int end = min(vocab, first + span);
    Mass mine = 0, before;
    for (int i = first; i < end; i++) mine += mass(ordered_bits(logits[i]));
    const Mass total = cta_scan(mine, before, scan_scratch);
    const auto target = static_cast<Mass>(uniform(p.seed, p.drawn) * static_cast<double>(total));
    if (threadIdx.x == 0) drawn = top.token;
    __syncthreads();
    if (before <= target && target < before + mine) {
      int i = first;
      for (Mass reached = before; i < end - 1; i++)
        if ((reached += mass(ordered_bits(logits[i]))) > target) break;
      drawn = i;
    }
    __syncthreads();
    token = drawn;
  }

  float logprob = 0.f;
  if (s.logprobs != nullptr && p.wants_logprobs) {
    float sum = 0.f;
    raw.each([&](int, float v) { sum += __expf(v - raw_top.value); });
    sum = cta_sum(sum, sum_scratch);
    logprob = raw[token] - raw_top.value - logf(sum);
  }
  if (threadIdx.x == 0) {
    s.sampled[row] = none ? -1 : token;
    if (s.logprobs != nullptr) s.logprobs[row] = logprob;
    if (counts != nullptr) counts[token]++;
    s.latest[slot] = token;
    state.drawn = p.drawn + 1;
    // The next step goes on from here unless the host says otherwise.
    if (s.positions != nullptr) s.positions[row]++;
    if (s.tokens != nullptr) s.tokens[row] = -1;
  }
}

}  // namespace
}  // namespace trirun::decoder

extern "C" int trirun_cuda_sample(const trirun_sample* s, void* stream) {
  using namespace trirun;
  using namespace trirun::decoder;
  if (s == nullptr) return TRIRUN_BAD_POINTER;
  if (s->m == 0) return TRIRUN_OK;
  if (s->m < 0 || s->vocab <= 0 || s->vocab > (1 << 24) || s->ld < s->vocab || s->bias_capacity < 0)
    return TRIRUN_BAD_SHAPE;
  if (!half_dtype(s->dtype) && s->dtype != TRIRUN_F32) return TRIRUN_UNSUPPORTED;
  if (s->logits == nullptr || s->slots == nullptr || s->samplers == nullptr || s->work == nullptr ||
      s->sampled == nullptr || s->latest == nullptr || (s->bias_capacity > 0 && (!s->bias_tokens || !s->bias_values)))
    return TRIRUN_BAD_POINTER;
  if (!aligned_to(s->samplers, 8)) return TRIRUN_BAD_POINTER;
  return launch_dependent(sample, SampleArgs{*s}, dim3(static_cast<unsigned>(s->m)), THREADS, 0, stream);
}
