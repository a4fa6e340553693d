// y[m][n] = x[m][k] . w[n][k]^T for many rows of x on sm_90a, tall tiles: wgmma on fp16, bf16 or int8.
//
// - w is the M side of the product, rows of x (tokens) its N: so weights are the operand that may come from registers,
//   a masked word is already an A fragment, and no weight passes through shared memory a second time.
// - One CTA computes 256 rows of w (four n tiles) by Tokens rows of x. A producer warp keeps a ring of stages full by
//   tensor copies; two consumer warpgroups multiply. Warp i of a warpgroup has n tile i, and the warpgroup two of the
//   four row blocks of every n tile: the same words serve both, by other masks.
// - Fragments are made between the products of other fragments, at a place that the text fixes: tensor cores are busy
//   only if the next ones are ready when they end.
// - A CTA takes whole tiles; or the CTAs of a cluster split a tile along k; or, stream-k, all CTAs divide the k tiles
//   of all tiles equally, and whoever comes last at a tile that is cut adds what the others left in the workspace.
#pragma once

#include "epilogue.cuh"
#include "schedule.cuh"

namespace trirun::gemm_prefill {

template <typename T, int Tokens, Scaling Mode>
__global__ void __launch_bounds__(PrefillShape<T, Tokens, Mode>::kThreads, 1)
    prefill_kernel(const __grid_constant__ PrefillArguments args) {
#ifdef TRIRUN_HOPPER
  using Shape = PrefillShape<T, Tokens, Mode>;
  using Part = Consumer<T, Tokens>;
  using Accumulator = typename Part::Accumulator;
  using Half = typename std::conditional<Part::kInt8, __half, T>::type;
  using D = Dequantize<Half>;
  constexpr int kStages = Shape::kStages, kFull = Shape::kFull, kTurns = Shape::kTurns;
  constexpr int kRowBlocks = Shape::kRowBlocks, kConsumers = Shape::kConsumers;
  constexpr int kSteps = 4 * Shape::kPanels;  // wgmma steps along k in a stage
  // Fragments are made this many steps ahead; those of the step in flight and of the one before may still be read.
  constexpr bool kAny = Mode == kAnyScales;
  constexpr int kAhead = kAny ? 2 : 1;
  // Four row blocks and scales per channel: fragments are made behind every two products, for the two of the next step
  // in their place, by one mask and one fma (see Dequantize).
  constexpr bool kPaced = kRowBlocks == 4 && Mode == kChannelScales && !Part::kInt8;
  constexpr int kSets = kPaced ? 2 : kSteps;
  constexpr int kWordSets = Shape::kBlocks < 2 ? Shape::kBlocks : 2;  // blocks of 32 columns in registers

  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const uint32_t words_at = base + kStages * Shape::kX, groups_at = words_at + kStages * Shape::kWords;
  const uint32_t output_at = groups_at + kStages * 2 * Shape::kGroups, exchange_at = output_at + Shape::kOutput;
  const uint32_t rows_at = exchange_at + Shape::kExchange, full = rows_at + Shape::kRows, empty = full + 8 * kFull;
  const uint32_t received = empty + 8 * kStages, sums_ready = received + 8;
  const uint32_t spare = sums_ready + 8;  // what nobody waits for

  if (threadIdx.x == 0) {
    for (int i = 0; i < kFull; ++i) barrier_init(full + 8 * i, producers<Shape>(args));
    for (int i = 0; i < kStages; ++i) barrier_init(empty + 8 * i, kConsumers / 32 / kTurns);
    barrier_init(spare, kConsumers / 32);
    barrier_init(sums_ready, 1);
    init_received<Shape, Part>(args, received);
  }
  __syncthreads();
  if (args.pairs) cluster_arrive();

  if (threadIdx.x < 128) {
    decrease_registers<40>();
    copy_and_announce<Shape>(args, base, words_at, groups_at, full, empty, received, sums_ready);
  } else {
    increase_registers<232>();
    const int thread = threadIdx.x - 128, lane = thread % 32;
    // Read from a lane, so that the compiler knows it is the same for the warp and keeps what follows in uniform
    // registers.
    const int group = __shfl_sync(~0u, thread / 128, 0);
    Part part(args, output_at + thread / 32 * Tokens * 64, rows_at + group * Tokens * 8, lane, thread / 32 % 4, group);
    // A remainder starts when every CTA of the launch before it has passed this wait: the rows of x are there. It waits
    // at its end instead, so that a kernel behind it finds both launches complete.
    if (!args.remainder) dependency_wait();
    dependency_launch();

    const uint32_t magic = constant_in_register<D::kMagic>();
    uint32_t factor[2], offset[2];
    const float whole_zero = kAny && args.split_zero ? 0.f : args.zero;
    factor[0] = D::pair(0.25f), factor[1] = D::pair(0.0625f);
    offset[0] = D::pair(-D::kBase * 0.25f - whole_zero), offset[1] = D::pair(-D::kBase * 0.0625f - whole_zero);
    const uint32_t one = D::pair(1.f);
    uint32_t block_mask[kRowBlocks], block_factor[kRowBlocks];
    uint32_t words_of_lane = 0;
    if constexpr (kPaced) {
#pragma unroll
      for (int j = 0; j < kRowBlocks; ++j) {
        const int block = j ^ 2 * group;
        block_mask[j] = kept(0x00030003u << 2 * block, lane), block_factor[j] = kept(D::factor(block), lane);
      }
      words_of_lane = kept(words_at + part.n_tile * Shape::kBlocks * 512 + lane * 16, lane);
    }
    const uint32_t shrunk_zero = D::pair(-args.zero / kShrink);
    uint32_t int8_mask[kRowBlocks];
#pragma unroll
    for (int j = 0; j < kRowBlocks; ++j) int8_mask[j] = 0x03030303u << 2 * (j ^ 2 * group);

    int ring = kTurns == 1 ? 0 : group;  // stages before this warpgroup's next one, of all tiles
    Walk walk(args, Shape::kKTile);
    const int tile0 = walk.tile;
    do {
      const int first = walk.first, last = walk.last;
      int row_tile, token_tile;
      place(args, walk.tile, row_tile, token_tile);
      if (kTurns == 1)
        part.begin(row_tile, token_tile);
      else
        part.expect(row_tile);
      // Row block j ^ (2 group) of the n tile: the two that this warpgroup writes come first. Set to zero rather than
      // overwritten by the first wgmma, which counts as reading them and would keep them alive through the outputs.
      Accumulator sum[kRowBlocks][Tokens / 2] = {};
      uint32_t fragment[kSets][kRowBlocks][4], spread_words[4];
      uint4 words[kWordSets];
      // [row block][row half], as pairs: scale, and the zero point in two parts, the second multiplied by the scale.
      uint32_t group_scale[kRowBlocks][2] = {}, group_zero[kRowBlocks][2] = {}, group_rest[kRowBlocks][2] = {};
      const auto set_zero = [&](int j, int h, float zero) {
        group_zero[j][h] = D::pair(-zero);
        const float rest = args.split_zero ? -zero - D::first(group_zero[j][h]) : 0.f;
        group_rest[j][h] = D::pair(rest * D::first(group_scale[j][h]));
      };
      const auto read_groups = [&](int stage, int index) {
        const uint32_t at = groups_at + stage * 2 * Shape::kGroups + index * 512 + part.n_tile * 128 + lane / 4 * 16;
        // Eight values of 16 bits, two per row block; this warpgroup's own row blocks first.
        uint32_t s[4], z[4] = {};
#pragma unroll
        for (int pair = 0; pair < kRowBlocks / 2; ++pair) {
          const uint32_t from = at + 8 * (group ^ pair);
          const uint2 s2 = load_shared2(from);
          s[2 * pair] = s2.x, s[2 * pair + 1] = s2.y;
          if (kAny && args.has_zeros) {
            const uint2 z2 = load_shared2(from + Shape::kGroups);
            z[2 * pair] = z2.x, z[2 * pair + 1] = z2.y;
          }
        }
#pragma unroll
        for (int i = 0; i < 2 * kRowBlocks; ++i) group_scale[i / 2][i % 2] = D::broadcast(s[i / 2], i % 2);
        if constexpr (kAny) {
          if (!args.split_zero) return;
#pragma unroll
          for (int i = 0; i < 2 * kRowBlocks; ++i)
            set_zero(i / 2, i % 2, args.has_zeros ? half_bits(z[i / 2], i % 2) : args.zero);
        }
      };
      const auto await_stage = [&] { barrier_wait(full + 8 * (ring % kFull), ring / kFull & 1); };
      const auto read_block = [&](int stage, int i) {  // 32 columns of k
        if (Part::kInt8) return;
        const uint32_t at = words_at + stage * Shape::kWords + part.n_tile * Shape::kBlocks * 512 + lane * 16;
        words[i % kWordSets] = load_shared4((kPaced ? words_of_lane + stage * Shape::kWords : at) + i * 512);
      };
      const auto read_words = [&](int stage, bool new_group) {
#pragma unroll
        for (int i = 0; i < kWordSets; ++i) read_block(stage, i);
        if (Mode == kGroupScales || (kAny && new_group)) read_groups(stage, 0);
      };
      // Fragments of two row blocks of a step.
      const auto make_pair = [&](int stage, int step, int pair) {
        uint32_t (&a)[kRowBlocks][4] = fragment[step % kSets];
        if constexpr (Part::kInt8) {
          if (pair == 0)
            words[0] = load_shared4(words_at + stage * Shape::kWords + (part.n_tile * Shape::kBlocks + step) * 512 +
                                    lane * 16);
          const uint32_t raw[4] = {words[0].x, words[0].y, words[0].z, words[0].w};
#pragma unroll
          for (int i = 8 * pair; i < 8 * pair + 8; ++i) a[i / 4][i % 4] = pinned_and(raw[i % 4], int8_mask[i / 4]);
        } else if constexpr (kPaced) {
          const uint4& w = words[step / 2 % 2];
          if (pair == 0) spread(spread_words, step % 2 ? w.z : w.x, step % 2 ? w.w : w.y);
#pragma unroll
          for (int i = 8 * pair; i < 8 * pair + 8; ++i)
            a[i / 4][i % 4] = D::fma(spread_words[i % 4] & block_mask[i / 4], block_factor[i / 4], shrunk_zero);
        } else {
          // Codes of two row blocks move to bits 2..5 of every byte: higher ones would leave the mantissa of bf16,
          // lower ones would leave no room for zero points in quarters.
          load_fragments<Half>(a[2 * pair], a[2 * pair + 1], words[step / 2], step % 2, pair != group ? 2 : 30, magic,
                               factor, offset);
          if constexpr (Mode == kGroupScales) {
#pragma unroll
            for (int i = 8 * pair; i < 8 * pair + 8; ++i)
              a[i / 4][i % 4] = D::fma(a[i / 4][i % 4], group_scale[i / 4][i % 2], 0);
          }
          if constexpr (kAny) {
            if (step == 2 && args.group_size == 32) read_groups(stage, 1);
#pragma unroll
            for (int i = 0; i < 4 * kRowBlocks; ++i) {
              uint32_t& v = a[i / 4][i % 4];
              const int j = i / 4, h = i % 2;
              if (args.split_zero) v = D::fma(v, one, group_zero[j][h]);
              v = D::fma(v, group_scale[j][h], group_rest[j][h]);
            }
          }
        }
      };
      const auto make_fragments = [&](int stage, int step) {
#pragma unroll
        for (int pair = 0; pair < kRowBlocks / 2; ++pair) make_pair(stage, step, pair);
      };
      if constexpr (kAny) {
#pragma unroll
        for (int i = 0; i < 2 * kRowBlocks; ++i) {
          group_scale[i / 2][i % 2] = one;
          set_zero(i / 2, i % 2, args.group_size < 0 ? part.channel_zero(i / 2 ^ 2 * group, i % 2) : args.zero);
        }
      }

      const auto multiply = [&](int step, uint64_t b) {
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < kRowBlocks; ++j) Wgmma<T, Tokens>::run(sum[j], fragment[step][j], b + 2 * step);
        wgmma_commit();
      };
      const int begin = first + (kTurns == 1 ? 0 : group);
      int stage = ring % kStages, before = 0, slot = ring % kFull, phase = ring / kFull & 1;
      uint32_t done = spare;
      if (Shape::kKTile >= kTurns || begin < last) await_stage();  // of a single stage one warpgroup has none
      read_words(stage, args.group_size > 0);
#pragma unroll
      for (int step = 0; step < kAhead; ++step) make_fragments(stage, step);
      for (int k = begin; k < last; k += kTurns) {
        const uint64_t b = descriptor_swizzled(base + stage * Shape::kX);
        const int now = stage, next_k = k + kTurns;
        if constexpr (kPaced) {
          // Beside a busy tensor core a scheduler issues an instruction every other cycle, which two warps share: their
          // work has to be little and to stand evenly between the products. Every product is a group of its own: where
          // a fence stands inside a group the compiler ends the group there, and a wait for all but the last one would
          // be a wait for almost all. Beyond the last stage fragments are made of what is there, and not used.
          ring += kTurns, slot += kTurns;
          if (slot >= kFull) slot -= kFull, phase ^= 1;
          stage = slot < kStages ? slot : slot - kStages;
#pragma unroll
          for (int half = 0; half < 2 * kSteps; ++half) {
            const int step = half / 2, pair = half % 2, to_go = 2 * kSteps - half;
            // Only the low word counts on: two instructions where a sum of 64 bits takes four.
            const uint64_t b_step = b >> 32 << 32 | (uint32_t(b) + step / 4 * (Shape::kPanel >> 4) + step % 4 * 2);
            wgmma_fence();  // behind the fragments made since the last products
#pragma unroll
            for (int j = 2 * pair; j < 2 * pair + 2; ++j) {
              Wgmma<T, Tokens>::run(sum[j], fragment[step % kSets][j], b_step);
              wgmma_commit();
            }
            wgmma_wait<4>();  // the products whose fragments are to be replaced are complete
            if (half == 1 && lane == 0) barrier_arrive(done);
            if (to_go == 5 && next_k < last) barrier_wait(full + 8 * slot, phase);
            // Words are asked for one pair of products and more before the first fragment is made of them.
            if (to_go == 4) read_block(stage, 0);
            if (to_go == 2) read_block(stage, 1);
            if (half % 4 == 2 && half / 4 + 2 < Shape::kBlocks) read_block(now, half / 4 + 2);
            make_pair(step + 1 < kSteps ? now : stage, (step + 1) % kSteps, pair);
          }
          done = empty + 8 * now;
        } else {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            // While the tensor cores work: the fragments of `kAhead` steps from here.
            const int later = (step + kAhead) % kSteps;
            const bool enters = later == 0;
            if (enters) {
              ring += kTurns;
              stage = ring % kStages;
              if (next_k < last) await_stage();
            }
            if constexpr (kAny) {
              multiply(step, b);
              if (enters && next_k < last)
                read_words(stage, args.group_size > 0 && (next_k * Shape::kColumns & (args.group_size - 1)) == 0);
              if (step + kAhead < kSteps || next_k < last) make_fragments(step + kAhead < kSteps ? now : stage, later);
            } else {
              // A product holds its warp until its fragments have been read, so the work stands between the products.
              // Beyond the last stage fragments are made of what is there, and not used: no branch between products.
              wgmma_fence();
#pragma unroll
              for (int j = 0; j < kRowBlocks; ++j) {
                if (j > 1) wgmma_fence();  // behind fragments made between the products
                Wgmma<T, Tokens>::run(sum[j], fragment[step][j], b + 2 * step);
                if (j == kRowBlocks - 1) wgmma_commit();
                if (j == 0 && enters) read_words(stage, false);
                if (j > 0 && j <= kRowBlocks / 2) make_pair(step + kAhead < kSteps ? now : stage, later, j - 1);
              }
            }
            // The step before is complete, and with it, at the first step, the stage before.
            wgmma_wait<1>();
            if (step == 0 && k > begin && lane == 0) barrier_arrive(empty + 8 * before);
          }
          before = now;
        }
      }
      wgmma_wait<0>();
#pragma unroll
      for (int j = 0; j < kRowBlocks; ++j) wgmma_hold(sum[j]);
      if (lane == 0) barrier_arrive(kPaced ? done : empty + 8 * before);
      // Says that the lane may have changed: addresses of the outputs are then computed here, not kept in registers
      // all through the multiplications.
      int thread_now = thread;
      forget(thread_now);
      part.lane = thread_now % 32;
      if (kTurns == 2) part.begin(row_tile, token_tile);
      // The next tile's first stage follows the last of this one, whichever warpgroup had that.
      if (kTurns == 2 && (last - first) % 2) ring += group ? 1 : -1;

      const SharedTile<kConsumers> tile(args, walk.tile, tile0, thread_now);
      const uint64_t seen = tile.is_shared() ? tile.counter.glance() : 0;

      // Sums of the two row blocks this warpgroup writes. Copies, where they are added to: sums written here would be
      // read by the next tile's first wgmma, as the compiler sees it.
      Accumulator total[2][Tokens / 2];
      if constexpr (kTurns == 2) {
        const uint32_t to = exchange_at + thread_now * 16, from = exchange_at + (thread_now ^ 128) * 16;
        named_barrier<kConsumers>(1);
#pragma unroll
        for (int i = 0; i < 2 * Part::kBlocks; ++i)
          store_shared4(to + i * kConsumers * 16,
                        *reinterpret_cast<const uint4*>(&four(sum[2 + i / Part::kBlocks], i % Part::kBlocks)));
        named_barrier<kConsumers>(1);
#pragma unroll
        for (int i = 0; i < 2 * Part::kBlocks; ++i) {
          const int j = i / Part::kBlocks, at = 4 * (i % Part::kBlocks);
          const uint4 v = load_shared4(from + i * kConsumers * 16);
          const uint32_t received[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int e = 0; e < 4; ++e)
            total[j][at + e] = sum[j][at + e] + reinterpret_cast<const Accumulator&>(received[e]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < Tokens; ++i)
          total[i / (Tokens / 2)][i % (Tokens / 2)] = sum[i / (Tokens / 2)][i % (Tokens / 2)];
      }
      const int next_stage = (kTurns == 1 ? ring : ring - group) % kStages;
      finish_tile<Shape>(part, tile, seen, total, base, next_stage, received, sums_ready, thread_now);
    } while (walk.next());
    if (lane == 0) store_wait_read();  // the copies end before the kernel does
    if (args.remainder) dependency_wait();
  }
#endif
}

}  // namespace trirun::gemm_prefill
