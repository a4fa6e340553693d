// An output head of bfloat16 weights in 12 bits each, without loss: y[m][n] = w[n][k] . x[m][k], sums in fp32. From
// sm_90 on.
//
// Exponents of a row's weights lie close together: of normal values one in 9,000 is less than 2^-14 of the largest. So
// four bits say how far a weight's exponent is above the row's base, and the few below it are kept apart and added in
// the end (that exponents of trained models have little information: Zhang et al., "70% Size, 100% Accuracy",
// NeurIPS 2025). In memory a head takes three quarters of its time.
//
// Memory is what it takes. Teams of warps take eight rows of the weight at a time, a part of their columns each,
// whichever are next: all are through at once then, though some are faster. A warp asks the copy engine for its part
// itself, a few KiB at a time, and is asking for the next rows before it has multiplied the last. Rings are filled
// before x is there, and the next kernel's CTAs find room beside this one's.
//
// Of a block of 64 columns lane 4g + t has row g's columns 16t to 16t + 15: sums do not care for the order of k.
#include <algorithm>

#include "cuda/common/hopper.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/decoder/launch.cuh"
#include "cuda/kernels.cuh"

namespace trirun::decoder {
namespace {

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int TEAM = 4, TEAMS = WARPS / TEAM;  // warps that share rows
constexpr int ROWS = 8, BLOCK = 64;  // of the weight
constexpr int BLOCK_BYTES = BLOCK * ROWS * 3 / 2, EXPONENTS = BLOCK * ROWS;  // these begin behind a byte of each weight
constexpr int STAGES = 2, MOST_BLOCKS = 4;  // of a warp's ring; of a stage
constexpr int RECORD_WORDS = 32;  // of eight rows
constexpr int SUM_BYTES = 32 * 8;  // of a warp
// Weights are 2^-126 or more times a row's power of two, so x is raised by as much as bfloat16 has room for.
constexpr int RAISED_LOG = 64;

struct HeadArgs {
  const uint16_t* x;
  const uint8_t* w;
  const uint32_t* records;
  uint32_t* counter;
  uint16_t* y;
  int64_t ldx, ldy;
  int m, k, groups;  // groups: of ROWS rows of the weight
  int piece;  // blocks that come at once
};

// x in shared memory, raised: of every block 16 bytes of a lane are a product's operand, which are four columns as two
// bfloat16 whose sum each is. Rows are half of the banks apart.
constexpr int X_BLOCK_BYTES = BLOCK * 4;
__host__ __device__ constexpr int row_bytes(int k) { return k / BLOCK * X_BLOCK_BYTES + 64; }
// Where the four columns from this one on are.
__device__ __forceinline__ int place_of(int column) {
  return column / BLOCK * X_BLOCK_BYTES + column % 16 / 4 * 64 + column % BLOCK / 16 * 16;
}

__host__ __device__ constexpr int rings_bytes(int blocks) { return WARPS * STAGES * blocks * BLOCK_BYTES; }
int shared_bytes(const HeadArgs& a) {
  return rings_bytes(a.piece) + a.m * row_bytes(a.k) + 2 * WARPS * SUM_BYTES + WARPS * STAGES * 8;
}

// Eight columns of x.
template <bool BF16>
__device__ __forceinline__ void raise(uint32_t to, uint4 words) {
  const float raised = __uint_as_float((127 + RAISED_LOG) << 23);
  float v[8];
  widen_eight<BF16>(v, words);
#pragma unroll
  for (int i = 0; i < 8; i += 4) {
    uint32_t high[2], low[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float first = v[i + 2 * j] * raised, second = v[i + 2 * j + 1] * raised;
      high[j] = narrow_pair<true>(first, second);
      const float2 kept = widen_pair<true>(high[j]);
      low[j] = narrow_pair<true>(first - kept.x, second - kept.y);
    }
    store_shared4(to + i * 16, make_uint4(high[0], low[0], high[1], low[1]));
  }
}

__device__ __forceinline__ uint32_t rotated_left(uint32_t v, int by) { return v << by | v >> (32 - by); }

// Two pairs of neighbouring weights. rest: signs and mantissas of the first pair where they belong, of the second in
// the eight bits of each half between them, turned by a byte. exponents: at bits 7 to 10 of either half.
__device__ __forceinline__ void weights_of(uint32_t (&pair)[2], uint32_t rest, uint32_t first, uint32_t second) {
  constexpr uint32_t REST = 0x807f807fu, EXPONENT = 0x07800780u;
  pair[0] = (rest & REST) | (first & EXPONENT);
  pair[1] = (rotated_left(rest, 8) & REST) | (second & EXPONENT);
}

// The sums of a row and two neighbouring rows of the weight to y. record: a lane's word of the group's.
template <bool BF16>
__device__ __forceinline__ void finish(float2 sum, uint32_t record, int group, uint32_t x, const HeadArgs& a) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t scales = __shfl_sync(~0u, record, t / 2) >> t % 2 * 16;
  sum.x *= __uint_as_float((scales & 255) << 23), sum.y *= __uint_as_float((scales >> 8 & 255) << 23);
  const int kept_apart = __shfl_sync(~0u, record, 2);
  const float back = __uint_as_float((127 - RAISED_LOG) << 23);
#pragma unroll 1
  for (int i = 0; i < kept_apart; i++) {
    const uint32_t one = __shfl_sync(~0u, record, 3 + i);
    const int row = one >> 13 & 7, column = one & 8191;
    if (g >= a.m || row / 2 != t) continue;
    const uint2 words = load_shared2(x + g * row_bytes(a.k) + place_of(column) + column % 4 / 2 * 8);
    const float2 high = widen_pair<true>(words.x), low = widen_pair<true>(words.y);
    const float v = column % 2 ? high.y + low.y : high.x + low.x;
    const float product = __uint_as_float(one & 0xffff0000u) * (v * back);
    (row % 2 ? sum.y : sum.x) += product;
  }
  if (g < a.m) *reinterpret_cast<uint32_t*>(a.y + g * a.ldy + group * ROWS + 2 * t) = narrow_pair<BF16>(sum.x, sum.y);
}

// no-spill: head_12bit<*>
template <bool BF16>
__global__ void __launch_bounds__(THREADS, 1) head_12bit(const __grid_constant__ HeadArgs a) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) uint8_t memory[];
  const uint32_t x = shared_address(memory) + rings_bytes(a.piece), stage_bytes = a.piece * BLOCK_BYTES;
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0), lane = threadIdx.x % 32;
  const uint32_t ring = shared_address(memory) + warp * STAGES * stage_bytes;
  const uint32_t sums = x + a.m * row_bytes(a.k), barriers = sums + 2 * WARPS * SUM_BYTES + warp * STAGES * 8;
  const int team = warp / TEAM, nth = warp % TEAM, teams = static_cast<int>(gridDim.x) * TEAMS;
  // Of every group this warp's blocks.
  const int of_group = a.k / BLOCK, begin = of_group * nth / TEAM, count = of_group * (nth + 1) / TEAM - begin;
  const uint64_t once = evict_first_policy();
  // By turns, which of the groups that come after the first of every team is behind the next one.
  __shared__ uint32_t claimed[2][TEAMS];

  // The group, and how many of its blocks have been asked for.
  int group = team * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x), asked_group = group, asked = 0;
  const auto ask = [&](uint32_t stage, int following) {
    if (asked_group >= a.groups) return;
    if (lane == 0) {
      const uint32_t bytes = min(count - asked, a.piece) * BLOCK_BYTES, barrier = barriers + stage * 8;
      barrier_expect(barrier, bytes);
      bulk_load(ring + stage * stage_bytes,
                a.w + (static_cast<int64_t>(asked_group) * of_group + begin + asked) * BLOCK_BYTES, bytes, barrier,
                once);
    }
    asked += a.piece;
    if (asked >= count) asked_group = following, asked = 0;
  };
  if (lane == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(barriers + i * 8, 1);
    barrier_init_fence();
  }
  __syncwarp();
  // x is asked for behind one stage, not behind all.
  ask(0, group);
  dependency_launch();
  dependency_wait();
  // Not before: another product's claims may not be over.
  const bool claims = nth == 0 && lane == 0;
  uint32_t behind = 0;
  if (claims && group < a.groups) behind = count_around(a.counter, a.groups - 1);
  const int eighths = a.k / 8, all_eighths = a.m * eighths;
#pragma unroll 1
  for (int i = threadIdx.x; i < max(all_eighths, THREADS); i += THREADS) {
    const int row = i / eighths, column = i % eighths * 8;
    uint4 words{};
    if (i < all_eighths) words = load_global4(a.x + row * a.ldx + column);
    if (i < THREADS)
      for (int stage = 1; stage < STAGES; stage++) ask(stage, group);
    if (i < all_eighths) raise<BF16>(x + row * row_bytes(a.k) + place_of(column), words);
  }
  if (claims) claimed[0][team] = behind;
  __syncthreads();

  // Row g of x times rows 2t and 2t + 1 of a group: what a lane ends with. Lanes beyond the last row have what others
  // have, which nobody reads.
  const int g = lane / 4, t = lane % 4;
  const uint32_t of_x = x + min(g, a.m - 1) * row_bytes(a.k) + t * 16;
  int following = teams + claimed[0][team];
  Ring at;
#pragma unroll 1
  for (int turn = 0; group < a.groups; turn++) {
    // All of the group was asked for before it was known what follows.
    if (asked_group == group && asked == 0) asked_group = following;
    const bool finishes = turn % TEAM == nth;
    uint32_t record = 0;
    if (finishes) record = __ldg(a.records + static_cast<int64_t>(group) * RECORD_WORDS + lane);
    // A team claims one more than there are for it, so that the count ends where it began.
    if (claims && following < a.groups) behind = count_around(a.counter, a.groups - 1);
    uint32_t at_x = of_x + begin * X_BLOCK_BYTES;
    float c[2][4] = {};
#pragma unroll 1
    for (int block = 0; block < count; block += a.piece) {
      uint32_t of_w = ring + at.stage * stage_bytes + lane * 8;
      barrier_wait_warp(barriers + at.stage * 8, at.phase);
#pragma unroll 1
      for (int left = min(count - block, a.piece); left > 0; left--, of_w += BLOCK_BYTES, at_x += X_BLOCK_BYTES) {
        const uint4 rest = load_shared4(of_w + lane * 8);
        const uint2 exponents = load_shared2(of_w + EXPONENTS);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const uint32_t e = i == 0 ? exponents.x : exponents.y;
          const uint4 v = load_shared4(at_x + i * 128), w = load_shared4(at_x + i * 128 + 64);
          uint32_t pair[2];
          weights_of(pair, i == 0 ? rest.x : rest.z, e, e >> 4);
          mma_16bit<__nv_bfloat16>(c[0], {v.x, v.y, v.z, v.w}, pair[0], pair[1]);
          weights_of(pair, i == 0 ? rest.y : rest.w, e << 4, rotated_left(e, 24));
          mma_16bit<__nv_bfloat16>(c[1], {w.x, w.y, w.z, w.w}, pair[0], pair[1]);
        }
      }
      __syncwarp();
      ask(at.stage, following);
      at.advance(STAGES);
    }
    // Warps take turns in adding up what all of the team have. By the next turn but one they have met again.
    const uint32_t of_team = sums + ((turn & 1) * WARPS + team * TEAM) * SUM_BYTES + lane * 8;
    store_shared2(of_team + nth * SUM_BYTES, c[0][0] + c[1][0] + (c[0][2] + c[1][2]),
                  c[0][1] + c[1][1] + (c[0][3] + c[1][3]));
    if (claims) claimed[turn + 1 & 1][team] = behind;
    named_barrier<TEAM * 32>(1 + team);
    if (finishes) {
      float2 sum = make_float2(0.f, 0.f);
#pragma unroll
      for (int i = 0; i < TEAM; i++) {
        const float2 v = load_shared_float2(of_team + i * SUM_BYTES);
        sum.x += v.x, sum.y += v.y;
      }
      finish<BF16>(sum, record, group, x, a);
    }
    group = following, following = teams + claimed[turn + 1 & 1][team];
  }
#endif
}

}  // namespace
}  // namespace trirun::decoder

extern "C" int trirun_cuda_head_12bit(const void* x, int dtype, int64_t m, int64_t k, int64_t ldx, const void* blocks,
                                      const uint32_t* records, uint32_t* counter, int64_t n, void* y, int64_t ldy,
                                      void* stream) {
  using namespace trirun;
  using namespace trirun::decoder;
  if (m == 0) return TRIRUN_OK;
  if (x == nullptr || blocks == nullptr || records == nullptr || counter == nullptr || y == nullptr)
    return TRIRUN_BAD_POINTER;
  if (!aligned_to(x, 16) || !aligned_to(blocks, 16) || !aligned_to(records, 4) || !aligned_to(counter, 4) ||
      !aligned_to(y, 4))
    return TRIRUN_BAD_POINTER;
  if (m < 0 || m > HEAD_16BIT_ROWS || n <= 0 || n > (1 << 24) || n % ROWS || k < STAGES * TEAM * BLOCK ||
      k > HEAD_12BIT_COLUMNS || k % BLOCK || ldx < k || ldx % 8 || ldy < n || ldy % 2)
    return TRIRUN_BAD_SHAPE;
  if (!half_dtype(dtype)) return TRIRUN_UNSUPPORTED;
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  if (facts.arch < 90) return TRIRUN_UNSUPPORTED;
  const bool bf16 = dtype == TRIRUN_BF16;
  const auto kernel = bf16 ? head_12bit<true> : head_12bit<false>;
  HeadArgs args{};
  args.x = static_cast<const uint16_t*>(x), args.ldx = ldx, args.y = static_cast<uint16_t*>(y), args.ldy = ldy;
  args.w = static_cast<const uint8_t*>(blocks), args.records = records, args.counter = counter;
  args.m = static_cast<int>(m), args.k = static_cast<int>(k), args.groups = static_cast<int>(n / ROWS);
  int room = 0;
  if (const int code = shared_room(reinterpret_cast<const void*>(kernel), room)) return code;
  // No more than half of a warp's blocks: of those behind them it asks for as many as it has stages.
  args.piece = std::min(MOST_BLOCKS, args.k / (BLOCK * TEAM * STAGES));
  while (args.piece > 1 && shared_bytes(args) > room) args.piece--;
  // So much that no two CTAs are on one multiprocessor: they would be where some are free before others.
  const int shared = std::max(shared_bytes(args), room / 2 + 1);
  if (shared > room) return TRIRUN_UNSUPPORTED;
  const dim3 grid(static_cast<unsigned>(std::min(args.groups, facts.sms)));
  return launch_dependent(kernel, args, grid, THREADS, shared, stream);
}
