// The next token of every row, chosen on the GPU, and the inputs of the next step: one CTA per row over its logits, or,
// where rows are few, a cluster of CTAs.
//
// Order: bias and penalties, the mask of a grammar, temperature, top-k, top-p (of what top-k left), min-p, then the
// inverse of the cumulative distribution over ascending token ids at one number of SplitMix64 (Steele et al. 2014), a
// function of the request's stream and of how many tokens it has drawn: its draws are the same in any batch. Thresholds
// of top-k and top-p are found digit by digit (radix selection) among the tokens that are likely enough to matter.
// Masses are added as integers, so nothing depends on the order of additions, nor on how many CTAs share a row.
#include "cuda/common/hopper.cuh"
#include "launch.cuh"

namespace trirun::decoder {
namespace {

constexpr int THREADS = 512, WARPS_LOG = 4, WARPS = 1 << WARPS_LOG, BINS = 256;
static_assert(WARPS == THREADS / 32);
constexpr int EACH = 8;  // tokens that a lane takes at once
// Threads whose registers are left: its CTAs begin beside those of the head.
constexpr int BESIDE = 128;
constexpr int MAX_PARTS = 8;  // CTAs that share a row
// Of a mask that a warp holds at once: words, and groups of EACH tokens, wherever in its first word they begin.
constexpr int MASK_WORDS = 256, MASK_GROUPS = MASK_WORDS * 32 / EACH - 32 / EACH;

struct SampleArgs {
  trirun_sample s;
  int parts_log;  // CTAs that share a row: 1, 2, 4 or 8
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
constexpr float SUM_ONE = 549755813888.f;  // 2^39: of the sum of all probabilities

struct Best {
  float value = -INFINITY;
  int token = 0x7fffffff;
  // Tokens come in ascending order to a thread, so the first of equals stays. A NaN is never the largest.
  __device__ __forceinline__ void take(float v, int i) {
    if (v > value) value = v, token = i;
  }
  // The larger value has the larger key; of equals the lower token has.
  __device__ __forceinline__ Mass key() const {
    return static_cast<Mass>(ordered_bits(value)) << 32 | static_cast<uint32_t>(~token);
  }
  __device__ __forceinline__ static Best of(Mass key) {
    return {from_ordered(static_cast<uint32_t>(key >> 32)), static_cast<int>(~static_cast<uint32_t>(key))};
  }
};

struct Sum {
  __device__ __forceinline__ Mass operator()(Mass a, Mass b) const { return a + b; }
};
struct Most {
  __device__ __forceinline__ Mass operator()(Mass a, Mass b) const { return a > b ? a : b; }
};

__device__ __forceinline__ void add_shared(Mass* to, Mass v) {
  asm volatile("red.shared.add.u64 [%0], %1;" ::"r"(shared_address(to)), "l"(v) : "memory");
}

__device__ __forceinline__ Mass warp_sum(Mass v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

// The sum over the lanes up to this one.
__device__ __forceinline__ Mass sum_through(Mass v) {
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    const Mass earlier = __shfl_up_sync(~0u, v, offset);
    if (static_cast<int>(threadIdx.x) % 32 >= offset) v += earlier;
  }
  return v;
}

// The CTAs that share a row, and what they hand to each other. All threads of all of them make the same calls.
struct Team {
  static constexpr int WIDEST = 5;  // numbers of one exchange

  int parts, rank, turn;
  Mass (*warps)[WARPS];  // [WIDEST] of each warp
  Mass (*given)[WIDEST][MAX_PARTS];  // [2] of each CTA; by turns, so that one meeting an exchange is enough
  Mass (*bins)[BINS], *merged;  // [2]

  // Others may write to a CTA's shared memory once all have begun: to be called before and after the kernel's own wait.
  __device__ __forceinline__ void begin() const {
#if __CUDA_ARCH__ >= 900
    if (parts > 1) cluster_arrive();
#endif
  }
  __device__ __forceinline__ void begun() const {
#if __CUDA_ARCH__ >= 900
    if (parts > 1) cluster_wait();
#endif
  }

  __device__ __forceinline__ void meet() const {
#if __CUDA_ARCH__ >= 900
    if (parts > 1) {
      cluster_arrive();
      cluster_wait();
      return;
    }
#endif
    __syncthreads();
  }

  __device__ __forceinline__ void give(int n, int to, Mass v) const {
    Mass* at = &given[turn][n][rank];
#if __CUDA_ARCH__ >= 900
    if (parts > 1) return store_peer(peer_address(shared_address(at), to), v);
#endif
    *at = v;
  }

  __device__ __forceinline__ Mass look(const Mass* at, int whose) const {
#if __CUDA_ARCH__ >= 900
    if (parts > 1) return load_peer(peer_address(shared_address(at), whose));
#endif
    return *at;
  }

  // Every thread's numbers become those of the row. 0 changes nothing for either operation.
  template <int N, typename Op>
  __device__ __forceinline__ void reduce(Mass (&v)[N], Op op) {
    static_assert(N <= WIDEST);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    turn ^= 1;
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll 1
      for (int offset = 16; offset > 0; offset /= 2) v[n] = op(v[n], __shfl_xor_sync(~0u, v[n], offset));
      if (lane == 0) warps[n][warp] = v[n];
    }
    __syncthreads();
    if (warp < N) {
      Mass all = lane < WARPS ? warps[warp][lane] : 0;
#pragma unroll 1
      for (int offset = 16; offset > 0; offset /= 2) all = op(all, __shfl_xor_sync(~0u, all, offset));
      if (lane < parts) give(warp, lane, all);
    }
    meet();
#pragma unroll
    for (int n = 0; n < N; n++) {
      v[n] = given[turn][n][0];
      for (int part = 1; part < parts; part++) v[n] = op(v[n], given[turn][n][part]);
    }
  }

  // Of numbers of whole warps: the sum over the row; `before` becomes that over the warps before this one.
  __device__ __forceinline__ Mass scan(Mass mine, Mass& before) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    turn ^= 1;
    if (lane == 0) warps[0][warp] = mine;
    __syncthreads();
    before = 0;
    if (warp == 0) {
      const Mass all = warp_sum(lane < WARPS ? warps[0][lane] : Mass{0});
      if (lane < parts) give(0, lane, all);
    }
    for (int w = 0; w < warp; w++) before += warps[0][w];
    meet();
    Mass total = 0;
    for (int part = 0; part < parts; part++) {
      if (part == rank) before += total;
      total += given[turn][0][part];
    }
    return total;
  }
};

// One row of logits: f(first token, eight logits) for all of this warp's share, in ascending order. Beyond the row's
// end a logit is -infinity. WHOLE: it begins at 16 bytes and has a multiple of eight tokens.
template <int DTYPE, bool WHOLE>
struct Row {
  const void* at;
  int vocab;
  int first, last;  // groups of eight tokens that are this warp's

  __device__ __forceinline__ float operator[](int i) const { return load_element(at, i, DTYPE); }

  __device__ __forceinline__ void load(float (&v)[EACH], int group) const {
    const int token = group * EACH;
    if constexpr (!WHOLE) {
#pragma unroll
      for (int j = 0; j < EACH; j++) v[j] = token + j < vocab ? (*this)[token + j] : -INFINITY;
    } else if constexpr (DTYPE == TRIRUN_F32) {
      const auto* from = static_cast<const float4*>(at) + group * 2;
      const float4 low = __ldcg(from), high = __ldcg(from + 1);
      v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
      v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
      widen_eight<DTYPE == TRIRUN_BF16>(v, __ldcg(static_cast<const uint4*>(at) + group));
    }
  }

  // Compact on purpose: code that is run a few times costs what it takes to fetch it. Two groups are on their way.
  template <typename F>
  __device__ __forceinline__ void each(F f) const {
    const int begin = first + static_cast<int>(threadIdx.x) % 32;
    float following[EACH], second[EACH];
#pragma unroll 1
    for (int group = begin - 64; group < last; group += 32) {
      float v[EACH];
#pragma unroll
      for (int j = 0; j < EACH; j++) v[j] = following[j], following[j] = second[j];
      if (group + 64 < last) load(second, group + 64);
      if (group >= begin) f(group * EACH, v);
    }
  }
};

// f(first token, eight logits, bits of those that are allowed) for all of this warp's share. The mask is in the host's
// memory, microseconds away: its words are asked for all at once, not one after another. held: [MASK_WORDS] of the
// warp's.
template <typename R, typename F>
__device__ __forceinline__ void each_masked(R row, const uint32_t* mask, uint32_t* held, F f) {
  const int lane = threadIdx.x % 32, end = row.last;
#pragma unroll 1
  for (; row.first < end; row.first += MASK_GROUPS) {
    row.last = min(end, row.first + MASK_GROUPS);
    const int word = row.first * EACH / 32;
    uint32_t words[MASK_WORDS / 32];
#pragma unroll
    for (int i = 0; i < MASK_WORDS / 32; i++) {
      const int at = word + i * 32 + lane;
      words[i] = at * 32 < row.last * EACH ? __ldcg(mask + at) : 0;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < MASK_WORDS / 32; i++) held[i * 32 + lane] = words[i];
    __syncwarp();
    row.each([&](int token, const float (&v)[EACH]) { f(token, v, held[token / 32 - word] >> token % 32); });
  }
}

// How far below the likeliest token, in powers of two of its probability, others are looked at for top-k and top-p: the
// first of these within which there are enough. Few tokens of most rows are so likely, and few add to the bins.
constexpr int LEVELS = 4;
__device__ __forceinline__ float level(int l) { return l == 0 ? 4.f : l == 1 ? 8.f : l == 2 ? 14.f : 22.f; }

// The largest threshold t (as ordered bits) for which the measure of {x : x >= t} reaches `wanted(total)`;
// measure(bits) is what a logit weighs, 0 for one that is out. Digits of eight bits, the highest first.
template <typename R, typename Wanted, typename Measure>
__device__ __forceinline__ uint32_t threshold_of(const R& row, Team& team, float top, float temperature,
                                                 Wanted wanted_of, Measure measure) {
  __shared__ uint32_t chosen;
  __shared__ Mass above;
  uint32_t floors[LEVELS];
#pragma unroll
  for (int l = 0; l < LEVELS; l++) floors[l] = ordered_bits(top - level(l) * 0.693147181f * temperature);
  Mass within[LEVELS + 1] = {};
  row.each([&](int, const float (&v)[EACH]) {
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      const uint32_t bits = ordered_bits(v[j]);
      const Mass weight = measure(bits);
      within[LEVELS] += weight;
#pragma unroll
      for (int l = 0; l < LEVELS; l++) within[l] += bits >= floors[l] ? weight : 0;
    }
  });
  team.reduce(within, Sum{});
  const Mass wanted = wanted_of(within[LEVELS]);
  uint32_t floor = 0;
#pragma unroll
  for (int l = LEVELS - 1; l >= 0; l--)
    if (within[l] >= wanted) floor = floors[l];
  // Of bits above the floor.
  const uint32_t range = ordered_bits(top) - floor;
  uint32_t prefix = 0;
  Mass counted = 0;
#pragma unroll 1
  for (int shift = (31 - __clz(static_cast<int>(range | 1))) / 8 * 8, turn = 0; shift >= 0; shift -= 8, turn ^= 1) {
    Mass* bins = team.bins[turn];
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
    const uint32_t mask = shift == 24 ? 0 : ~0u << (shift + 8);
    row.each([&](int, const float (&v)[EACH]) {
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        const uint32_t bits = ordered_bits(v[j]), key = bits - floor;
        if (bits < floor || (key & mask) != prefix) continue;
        if (const Mass weight = measure(bits)) add_shared(bins + (key >> shift & 255), weight);
      }
    });
    team.meet();
    for (int i = threadIdx.x; i < BINS; i += THREADS) {
      Mass all = 0;
      for (int part = 0; part < team.parts; part++) all += team.look(bins + i, part);
      team.merged[i] = all;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      // Lane l has the l-th highest eight bins.
      constexpr int LANE_BINS = BINS / 32;
      const int lane = threadIdx.x, highest = BINS - 1 - lane * LANE_BINS;
      Mass mine = 0;
      for (int i = 0; i < LANE_BINS; i++) mine += team.merged[highest - i];
      const Mass through = sum_through(mine);
      const uint32_t enough = __ballot_sync(~0u, counted + through >= wanted);
      if (lane == (enough != 0 ? __ffs(enough) - 1 : 31)) {
        Mass reached = counted + through - mine;
        int bin = highest;
        while (bin > highest - LANE_BINS + 1 && reached + team.merged[bin] < wanted) reached += team.merged[bin--];
        chosen = prefix | static_cast<uint32_t>(bin) << shift;
        above = reached;
      }
    }
    __syncthreads();
    prefix = chosen, counted = above;
  }
  return floor + prefix;
}

// A row's outputs; one thread calls it.
template <typename R>
__device__ __forceinline__ void finish(const trirun_sample& s, const trirun_sampler& p, const R& raw, int row, int slot,
                                       int token, bool none, float log_sum) {
  s.sampled[row] = none ? -1 : token;
  if (s.logprobs != nullptr) s.logprobs[row] = p.wants_logprobs ? raw[token] - log_sum : 0.f;
  if (s.counts != nullptr) s.counts[static_cast<int64_t>(slot) * s.vocab + token]++;
  s.latest[slot] = token;
  s.samplers[slot].drawn = p.drawn + 1;
  // The next step goes on from here unless the host says otherwise.
  if (s.positions != nullptr) s.positions[row]++;
  if (s.tokens != nullptr) s.tokens[row] = -1;
}

// The token that is drawn, in one thread of the row; -1 in the others.
template <typename R>
__device__ __forceinline__ int drawn_token(const R& logits, Team& team, const trirun_sampler& p, float top) {
  const int lane = threadIdx.x % 32;
  const float inverse = 1.f / p.temperature;
  uint32_t threshold = 0;
  if (p.top_k > 0 && p.top_k < logits.vocab)
    threshold = threshold_of(
        logits, team, top, p.temperature, [&](Mass) { return static_cast<Mass>(p.top_k); },
        [](uint32_t) { return Mass{1}; });
  const auto mass = [&](uint32_t bits) {
    if (bits < threshold) return Mass{0};
    return static_cast<Mass>(MASS_ONE * __expf((from_ordered(bits) - top) * inverse));
  };
  if (p.top_p < 1.f) {
    const auto wanted = [&](Mass total) {
      return max(static_cast<Mass>(static_cast<double>(p.top_p) * static_cast<double>(total)), Mass{1});
    };
    threshold = max(threshold, threshold_of(logits, team, top, p.temperature, wanted, mass));
  }
  if (p.min_p > 0.f) threshold = max(threshold, ordered_bits(top + __logf(p.min_p) * p.temperature));

  const auto mass_of = [&](const float (&v)[EACH]) {
    Mass all = 0;
#pragma unroll
    for (int j = 0; j < EACH; j++) all += mass(ordered_bits(v[j]));
    return all;
  };
  Mass mine = 0, before;
  logits.each([&](int, const float (&v)[EACH]) { mine += mass_of(v); });
  mine = warp_sum(mine);
  const Mass total = team.scan(mine, before);
  const Mass target = min(static_cast<Mass>(uniform(p.seed, p.drawn) * static_cast<double>(total)), total - 1);
  if (target < before || target >= before + mine) return -1;
  // The drawn mass is in this warp's share: it walks along.
#pragma unroll 1
  for (int group = logits.first + lane;; group += 32) {
    float v[EACH];
#pragma unroll
    for (int j = 0; j < EACH; j++) v[j] = -INFINITY;
    if (group < logits.last) logits.load(v, group);
    const Mass own = mass_of(v), through = sum_through(own);
    const uint32_t past = __ballot_sync(~0u, before + through > target);
    if (past == 0) {
      before += __shfl_sync(~0u, through, 31);
      continue;
    }
    if (lane != __ffs(past) - 1) return -1;
    Mass reached = before + through - own;
    int token = group * EACH;
#pragma unroll
    for (int j = 0; j < EACH; j++) {
      reached += mass(ordered_bits(v[j]));
      if (reached <= target) token++;
    }
    return token;
  }
}

template <int DTYPE, bool WHOLE>
__global__ void __launch_bounds__(THREADS + BESIDE, 1) sample(const __grid_constant__ SampleArgs a) {
  __shared__ Mass warps[Team::WIDEST][WARPS], given[2][Team::WIDEST][MAX_PARTS], bins[2][BINS], merged[BINS];
  __shared__ uint32_t held[WARPS][MASK_WORDS];
  const trirun_sample& s = a.s;
  const int row = blockIdx.x >> a.parts_log, parts = 1 << a.parts_log, vocab = static_cast<int>(s.vocab),
            warp = threadIdx.x / 32;
  Team team{parts, static_cast<int>(blockIdx.x) & (parts - 1), 0, warps, given, bins, merged};
  team.begin();
  // Known before the step began, and looked up before it ends.
  const int slot = s.slots[row];
  const bool wanted = s.wanted == nullptr || s.wanted[row] != 0;
  const trirun_sampler p = s.samplers[max(slot, 0)];
  // No early launch of the next kernel: what starts the next step reads positions and tokens ahead of its own wait.
  dependency_wait();
  if (slot < 0) return;
  const bool first_thread = team.rank == 0 && threadIdx.x == 0;
  if (!wanted) {
    if (first_thread) s.sampled[row] = -1;
    return;
  }
  team.begun();
  const int groups = (vocab + EACH - 1) / EACH, share = (groups + parts * WARPS - 1) >> (a.parts_log + WARPS_LOG);
  const int first = min(groups, (team.rank * WARPS + warp) * share), last = min(groups, first + share);
  const Row<DTYPE, WHOLE> raw{static_cast<const char*>(s.logits) + row * s.ld * (DTYPE == TRIRUN_F32 ? 4 : 2), vocab,
                              first, last};
  const bool penalised = s.counts != nullptr && (p.repetition != 1.f || p.presence != 0.f || p.frequency != 0.f);
  const bool masked = s.masks != nullptr && p.masked != 0, biased = p.bias_count > 0;
  const uint32_t* mask = s.masks + (masked ? static_cast<int64_t>(slot) * ((vocab + 31) / 32) : 0);
  const bool changed = penalised || biased || masked, reports = s.logprobs != nullptr && p.wants_logprobs != 0;
  // Nothing is allowed, or no logit is a finite number.
  const auto none_of = [&](Best top) { return top.token >= vocab || !isfinite(top.value); };

  Best raw_best;
  const auto take_raw = [&](int token, const float (&v)[EACH]) {
#pragma unroll
    for (int j = 0; j < EACH; j++) raw_best.take(v[j], token + j);
  };
  if (!penalised && !biased && !reports && p.temperature <= 0.f) {
    // The usual cases, by themselves: after the weights of a whole model no cache has this code, and each 128 bytes of
    // it come from memory.
    if (masked) {
      each_masked(raw, mask, held[warp], [&](int token, const float (&v)[EACH], uint32_t allowed) {
#pragma unroll
        for (int j = 0; j < EACH; j++) raw_best.take((allowed >> j & 1) != 0 ? v[j] : -INFINITY, token + j);
      });
    } else {
      raw.each(take_raw);
    }
    Mass key[1] = {raw_best.key()};
    team.reduce(key, Most{});
    const Best top = Best::of(key[0]);
    const bool none = none_of(top);
    if (first_thread) finish(s, p, raw, row, slot, none ? 0 : top.token, none, 0.f);
    return;
  }

  float* work = s.work + static_cast<int64_t>(row) * vocab;
  const Row<TRIRUN_F32, WHOLE> altered{work, vocab, first, last};
  Best best;
  if (changed) {
    const int32_t* counts = s.counts + (penalised ? static_cast<int64_t>(slot) * vocab : 0);
    const auto alter = [&](int token, const float (&v)[EACH], uint32_t allowed) {
      take_raw(token, v);
      float w[EACH];
#pragma unroll
      for (int j = 0; j < EACH; j++) {
        w[j] = v[j];
        if (penalised && token + j < vocab) {
          // Bit 31 marks a token of the prompt, the others count what was generated.
          const uint32_t count = static_cast<uint32_t>(__ldcg(counts + token + j)), generated = count & 0x7fffffffu;
          if (count != 0) w[j] = w[j] > 0.f ? w[j] / p.repetition : w[j] * p.repetition;
          if (generated != 0) w[j] -= p.presence + p.frequency * generated;
        }
        if ((allowed >> j & 1) == 0) w[j] = -INFINITY;
        best.take(w[j], token + j);
      }
      if constexpr (WHOLE) {
        reinterpret_cast<float4*>(work + token)[0] = make_float4(w[0], w[1], w[2], w[3]);
        reinterpret_cast<float4*>(work + token)[1] = make_float4(w[4], w[5], w[6], w[7]);
      } else {
#pragma unroll
        for (int j = 0; j < EACH; j++)
          if (token + j < vocab) work[token + j] = w[j];
      }
    };
    if (masked) {
      each_masked(raw, mask, held[warp], alter);
    } else {
      raw.each([&](int token, const float (&v)[EACH]) { alter(token, v, ~0u); });
    }
    __syncthreads();
    if (biased) {
      // The CTA in whose share a token is adds its bias.
      const int from = team.rank * WARPS * share * EACH, to = min(vocab, from + WARPS * share * EACH);
      for (int i = threadIdx.x; i < p.bias_count; i += THREADS) {
        const int32_t token = s.bias_tokens[static_cast<int64_t>(slot) * s.bias_capacity + i];
        if (token >= from && token < to) work[token] += s.bias_values[static_cast<int64_t>(slot) * s.bias_capacity + i];
      }
      __syncthreads();
      best = {};
      altered.each([&](int token, const float (&v)[EACH]) {
#pragma unroll
        for (int j = 0; j < EACH; j++) best.take(v[j], token + j);
      });
    }
  } else {
    raw.each(take_raw);
    best = raw_best;
  }
  Mass keys[2] = {raw_best.key(), best.key()};
  team.reduce(keys, Most{});
  const Best raw_top = Best::of(keys[0]), top = Best::of(keys[1]);

  float log_sum = 0.f;
  if (reports) {
    Mass masses[1] = {};
    raw.each([&](int, const float (&v)[EACH]) {
#pragma unroll
      for (int j = 0; j < EACH; j++) masses[0] += static_cast<Mass>(SUM_ONE * __expf(v[j] - raw_top.value));
    });
    team.reduce(masses, Sum{});
    log_sum = raw_top.value + logf(static_cast<float>(masses[0]) * (1.f / SUM_ONE));
  }
  const bool none = none_of(top);
  int token = first_thread ? (none ? 0 : top.token) : -1;
  if (!none && p.temperature > 0.f)
    token = changed ? drawn_token(altered, team, p, top.value) : drawn_token(raw, team, p, top.value);
  if (token >= 0) finish(s, p, raw, row, slot, token, none, log_sum);
}

template <int DTYPE>
int launch_sample(const SampleArgs& a, bool whole, void* stream) {
  const int parts = 1 << a.parts_log;
  const dim3 grid(static_cast<unsigned>(a.s.m * parts));
  return launch_dependent(whole ? sample<DTYPE, true> : sample<DTYPE, false>, a, grid, THREADS, 0, stream, parts);
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
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  // Of a row as many CTAs as have a group of tokens for every thread, as long as all rows run at once.
  int log = 0;
  while (facts.arch >= 90 && 1 << log < MAX_PARTS && s->m << (log + 1) <= facts.sms &&
         (THREADS * EACH) << log < s->vocab)
    log++;
  const bool narrow = s->dtype != TRIRUN_F32, whole = s->vocab % EACH == 0 && aligned_to(s->logits, 16) &&
                                                      s->ld % (narrow ? 8 : 4) == 0 && aligned_to(s->work, 16);
  const SampleArgs args{*s, log};
  if (s->dtype == TRIRUN_F16) return launch_sample<TRIRUN_F16>(args, whole, stream);
  if (s->dtype == TRIRUN_BF16) return launch_sample<TRIRUN_BF16>(args, whole, stream);
  return launch_sample<TRIRUN_F32>(args, whole, stream);
}
