// The next token of every row, chosen on the GPU, and the inputs of the next step: one CTA per row over its logits.
//
// Order: bias and penalties, temperature, top-k, top-p (of what top-k left), min-p, then a draw by the Gumbel maximum
// (Gumbel 1954; Maddison et al. 2014): the argmax of logit + noise over the tokens left is a sample of their
// renormalised distribution, and needs no normalisation. The noise is a function of the request's seed, of how many
// tokens it has drawn, and of the token, so a request's draws are the same in any batch. Thresholds of top-k and top-p
// are found digit by digit (radix selection); masses are added as integers, so nothing depends on the order of atomics.
#include "decoder_launch.cuh"

namespace trirun {
namespace {

constexpr int THREADS = 1024, WARPS = THREADS / 32, BINS = 256;
constexpr double MASS_ONE = 4294967296.0;  // fixed point of a probability relative to the likeliest token's

struct SampleArgs {
  trirun_sample s;
};

// Philox4x32-10 (Salmon et al. 2011).
__device__ __forceinline__ uint4 philox(uint64_t seed, uint32_t draw, uint32_t index) {
  uint4 c = make_uint4(index, draw, 0, 0);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const uint32_t h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
    const uint32_t h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
    c = make_uint4(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return c;
}

__device__ __forceinline__ float gumbel(uint64_t seed, uint32_t draw, uint32_t token) {
  const uint4 bits = philox(seed, draw, token / 4);
  const uint32_t word = token % 4 == 0 ? bits.x : token % 4 == 1 ? bits.y : token % 4 == 2 ? bits.z : bits.w;
  // 23 bits and a half: never 0, never 1.
  const float uniform = (static_cast<float>(word >> 9) + 0.5f) * (1.f / 8388608.f);
  return -__logf(-logf(uniform));
}

struct Best {
  float value;
  int token;
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

// The largest threshold t (as ordered bits) for which the measure of {x : x >= t} reaches `wanted`; measure(i, bits)
// is what token i weighs, 0 for one that is out. Digits of eight bits, the highest first.
template <typename Bits, typename Measure>
__device__ uint32_t radix_threshold(int vocab, unsigned long long wanted, unsigned long long* bins, Bits bits_of,
                                    Measure measure) {
  __shared__ uint32_t chosen;
  __shared__ unsigned long long above;
  uint32_t prefix = 0;
  unsigned long long counted = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    const uint32_t mask = shift == 24 ? 0 : ~0u << (shift + 8);
    for (int i = threadIdx.x; i < vocab; i += THREADS) {
      const uint32_t bits = bits_of(i);
      if ((bits & mask) != prefix) continue;
      if (const unsigned long long weight = measure(i, bits)) atomicAdd(bins + (bits >> shift & 255), weight);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      // Lane l has the l-th highest eight bins.
      constexpr int EACH = BINS / 32;
      const int lane = threadIdx.x, first = BINS - 1 - lane * EACH;
      unsigned long long mine = 0;
      for (int i = 0; i < EACH; i++) mine += bins[first - i];
      unsigned long long through = mine;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const unsigned long long before = __shfl_up_sync(~0u, through, offset);
        if (lane >= offset) through += before;
      }
      const uint32_t enough = __ballot_sync(~0u, counted + through >= wanted);
      if (lane == (enough != 0 ? __ffs(enough) - 1 : 31)) {
        unsigned long long reached = counted + through - mine;
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
  __shared__ unsigned long long bins[BINS];
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
  const char* raw = static_cast<const char*>(s.logits) + row * s.ld * (s.dtype == TRIRUN_F32 ? 4 : 2);
  int32_t* counts = s.counts == nullptr ? nullptr : s.counts + static_cast<int64_t>(slot) * vocab;
  const bool penalised =
      counts != nullptr && (p.repetition != 1.f || p.presence != 0.f || p.frequency != 0.f);
  const bool changed = penalised || p.bias_count > 0;

  float* work = s.work + static_cast<int64_t>(row) * vocab;
  Best top{-INFINITY, 0x7fffffff}, raw_top{-INFINITY, 0x7fffffff};
  for (int i = threadIdx.x; i < vocab; i += THREADS) {
    const float logit = load_element(raw, i, s.dtype);
    raw_top = better(raw_top, {logit, i});
    if (!changed) continue;
    float v = logit;
    if (penalised) {
      // Bit 31 marks a token of the prompt, the others count what was generated.
      const uint32_t count = static_cast<uint32_t>(counts[i]), generated = count & 0x7fffffffu;
      if (count != 0) v = v > 0.f ? v / p.repetition : v * p.repetition;
      if (generated != 0) v -= p.presence + p.frequency * generated;
    }
    work[i] = v;
  }
  raw_top = cta_best(raw_top, best_scratch);
  if (changed) {
    for (int i = threadIdx.x; i < p.bias_count; i += THREADS) {
      const int32_t token = s.bias_tokens[static_cast<int64_t>(slot) * s.bias_capacity + i];
      if (token >= 0 && token < vocab) work[token] += s.bias_values[static_cast<int64_t>(slot) * s.bias_capacity + i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < vocab; i += THREADS) top = better(top, {work[i], i});
    top = cta_best(top, best_scratch);
  } else {
    top = raw_top;
  }
  const auto logit_at = [&](int i) { return changed ? work[i] : load_element(raw, i, s.dtype); };

  int token = top.token;
  if (p.temperature > 0.f) {
    const float inverse = 1.f / p.temperature;
    uint32_t threshold = 0;
    const auto bits_of = [&](int i) { return ordered_bits(logit_at(i)); };
    if (p.top_k > 0 && p.top_k < vocab)
      threshold = radix_threshold(vocab, p.top_k, bins, bits_of, [](int, uint32_t) { return 1ull; });
    if (p.top_p < 1.f) {
      const auto mass = [&](int, uint32_t bits) {
        if (bits < threshold) return 0ull;
        return static_cast<unsigned long long>(MASS_ONE * __expf((from_ordered(bits) - top.value) * inverse));
      };
      __shared__ unsigned long long total;
      __syncthreads();
      if (threadIdx.x == 0) total = 0;
      __syncthreads();
      unsigned long long mine = 0;
      for (int i = threadIdx.x; i < vocab; i += THREADS) mine += mass(i, bits_of(i));
      atomicAdd(&total, mine);
      __syncthreads();
      const auto wanted = static_cast<unsigned long long>(static_cast<double>(p.top_p) * static_cast<double>(total));
      threshold = max(threshold, radix_threshold(vocab, max(wanted, 1ull), bins, bits_of, mass));
    }
    if (p.min_p > 0.f) threshold = max(threshold, ordered_bits(top.value + __logf(p.min_p) * p.temperature));
    Best drawn{-INFINITY, 0x7fffffff};
    for (int i = threadIdx.x; i < vocab; i += THREADS) {
      const float v = logit_at(i);
      if (ordered_bits(v) >= threshold && v > -INFINITY)
        drawn = better(drawn, {(v - top.value) * inverse + gumbel(p.seed, p.drawn, i), i});
    }
    drawn = cta_best(drawn, best_scratch);
    if (drawn.token < vocab) token = drawn.token;
  }
  // Logits that are not numbers leave no largest one.
  if (token >= vocab) token = 0;

  float logprob = 0.f;
  if (s.logprobs != nullptr && p.wants_logprobs) {
    float sum = 0.f;
    for (int i = threadIdx.x; i < vocab; i += THREADS) sum += __expf(load_element(raw, i, s.dtype) - raw_top.value);
    sum = cta_sum(sum, sum_scratch);
    logprob = load_element(raw, token, s.dtype) - raw_top.value - logf(sum);
  }
  if (threadIdx.x == 0) {
    s.sampled[row] = token;
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
}  // namespace trirun

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int trirun_cuda_sample(const trirun_sample* s, void* stream) {
  using namespace trirun;
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
