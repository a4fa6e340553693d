// The same by low tiles: two or three n tiles, 128 or 192 rows of w, by Tokens rows of x, where tall tiles would leave
// multiprocessors idle, or split more of their sums. Tiles of two n tiles have room for the next kernel's CTAs.
//
// - Every n tile has a warpgroup of its own, whose warp i has row block i of it: one product a step, and sums that need
//   no other warpgroup's. Words are read by four warps, each of which masks its own two bits of every byte.
// - Scales of groups enter the one fma that makes weights of codes: s (q - zero) 2^-e, where e brings the largest scale
//   of a row, of those that the CTA meets, to where the factor of masked codes does not overflow and small weights keep
//   the bits that count beside the largest ones. Sums are multiplied by 2^e, exactly, when the CTA has them.
//
// The rest is as in sm90.cuh: producer (schedule.cuh), sums and outputs (epilogue.cuh).
#pragma once

#include "epilogue.cuh"
#include "schedule.cuh"

namespace trirun::gemm_prefill {

template <typename T, int Tokens, int NTiles, LowScales Scales>
__global__ void __launch_bounds__(LowShape<T, Tokens, NTiles, Scales>::kThreads,
                                  LowShape<T, Tokens, NTiles, Scales>::kCtas)
    prefill_low_kernel(const __grid_constant__ PrefillArguments args) {
#ifdef TRIRUN_HOPPER
  using Shape = LowShape<T, Tokens, NTiles, Scales>;
  using Part = Consumer<T, Tokens, Shape::kNTiles>;
  using Accumulator = typename Part::Accumulator;
  using Half = typename std::conditional<Part::kInt8, __half, T>::type;
  using D = Dequantize<Half>;
  constexpr int kStages = Shape::kStages, kConsumers = Shape::kConsumers, kBlocks = Shape::kBlocks;
  constexpr int kOfBlock = Part::kInt8 ? 1 : 2, kSteps = kBlocks * kOfBlock;  // of wgmma: in 32 columns of k, a stage
  constexpr int kSets = 4, kWordSets = 4 / kOfBlock;  // in registers: fragments of steps, words of blocks of 32 columns

  extern __shared__ __align__(1024) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const uint32_t words_at = base + kStages * Shape::kX, output_at = words_at + kStages * Shape::kWords;
  const uint32_t rows_at = output_at + Shape::kOutput, groups_at = rows_at + Shape::kRows;
  const uint32_t full = groups_at + kStages * 2 * Shape::kGroups, empty = full + 8 * kStages;
  const uint32_t received = empty + 8 * kStages, sums_ready = received + 8;
  const uint32_t spare = sums_ready + 8;  // what nobody waits for

  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(full + 8 * i, producers<Shape>(args));
      barrier_init(empty + 8 * i, kConsumers / 32);
    }
    barrier_init(spare, kConsumers / 32);
    barrier_init(sums_ready, 1);
    init_received<Shape, Part>(args, received);
  }
  __syncthreads();
  if (args.pairs) cluster_arrive();

  if (threadIdx.x < 128) {
    decrease_registers<32>();
    copy_and_announce<Shape>(args, base, words_at, groups_at, full, empty, received, sums_ready);
  } else {
    increase_registers<NTiles == 2 ? 104 : 160>();
    const int thread = threadIdx.x - 128, lane = thread % 32;
    // Read from a lane, so that the compiler knows it is the same for the warp.
    const int n_tile = __shfl_sync(~0u, thread / 128, 0), block = __shfl_sync(~0u, thread / 32 % 4, 0);
    Part part(args, output_at + thread / 32 * Tokens * 32, rows_at + n_tile * Tokens * 8, lane, block, n_tile);
    Walk walk(args, Shape::kKTile);
    const int tile0 = walk.tile;
    int row_tile, token_tile;
    place(args, walk.tile, row_tile, token_tile);
    GroupFactors<Half> factors(args.zero_near, args.zero_rest, block);
    const int group_log = Scales == kSmallGroups ? __ffs(args.group_size) - 1 : 7;
    const auto measure_scales = [&] {
      if constexpr (Shape::kGrouped) {
        const int stored = row_tile * Shape::kRowTile + n_tile * 64 + lane / 4 * 8 + block * 2;
        const int end = stored < args.padded_n ? (walk.last * Shape::kColumns - 1 >> group_log) + 1 : 0;
        factors.measure(reinterpret_cast<const uint32_t*>(args.group_scales + stored), args.padded_n / 2,
                        walk.first * Shape::kColumns >> group_log, end, lane);
      }
    };
    measure_scales();
    if (!args.remainder) dependency_wait();  // a remainder at its end: see sm90.cuh
    dependency_launch();

    const uint32_t mask = kept(0x03030303u << 2 * block, lane), factor = kept(D::factor(block), lane);
    const uint32_t shrunk_zero = D::pair(-args.zero / kShrink), one = D::pair(1.f);
    const uint32_t words_of_lane = kept(words_at + n_tile * kBlocks * 512 + lane * 16, lane);
    const uint32_t groups_of_lane = kept(groups_at + n_tile * 128 + lane / 4 * 16 + block * 4, lane);

    int stage = 0, phase = 0;
    do {
      const int first = walk.first, last = walk.last;
      if (walk.tile != tile0) {
        place(args, walk.tile, row_tile, token_tile);
        measure_scales();
      }
      part.begin(row_tile, token_tile);
      Accumulator sum[Tokens / 2] = {};
      uint32_t fragment[kSets][4];
      uint4 words[kWordSets];
      const auto read_block = [&](int stage, int i) {
        words[i % kWordSets] = load_shared4(words_of_lane + stage * Shape::kWords + i * 512);
      };
      uint32_t scales = 0;  // of this lane's two rows, for the fragments that come next
      const auto read_scales = [&](int stage, int block) {
        const int group = Scales == kSmallGroups ? block * 32 >> group_log : 0;
        scales = load_shared(groups_of_lane + (stage * Shape::kGroups + group * Shape::kRowTile) * 2);
      };
      const auto make_fragment = [&](int step) {
        const uint4& w = words[step / kOfBlock % kWordSets];
        uint32_t (&a)[4] = fragment[step % kSets];
        if constexpr (Part::kInt8) {
          const uint32_t raw[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = pinned_and(raw[i], mask);
        } else {
          uint32_t pairs[4];
          spread(pairs, (step % 2 ? w.z : w.x) & mask, (step % 2 ? w.w : w.y) & mask);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if constexpr (Shape::kGrouped)
              a[i] = D::fma(pairs[i], factors.scale[i % 2], factors.offset[i % 2]);
            else
              a[i] = D::fma(pairs[i], factor, shrunk_zero);
            if constexpr (Scales >= kGroupsWithRest) a[i] = D::fma(a[i], one, factors.rest[i % 2]);
          }
        }
      };
      uint32_t done = spare;
      barrier_wait(full + 8 * stage, phase);
#pragma unroll
      for (int i = 0; i < kWordSets; ++i) read_block(stage, i);
      if constexpr (Shape::kGrouped) {
        read_scales(stage, 0);
        factors.set(scales);
      }
      make_fragment(0), make_fragment(1);
      for (int k = first; k < last; ++k) {
        const int now = stage;
        const uint64_t b = descriptor_swizzled(base + now * Shape::kX);
        if (++stage == kStages) stage = 0, phase ^= 1;
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
          wgmma_fence();
#pragma unroll
          for (int i = step; i < step + 2; ++i) {
            // Only the low word counts on: two instructions where a sum of 64 bits takes four.
            const uint64_t b_step = b >> 32 << 32 | (uint32_t(b) + i / 4 * (Shape::kPanel >> 4) + i % 4 * 2);
            Wgmma<T, Tokens>::run(sum, fragment[i % kSets], b_step);
            wgmma_commit();
          }
          // The words of the steps after the next two, in the place of those of these.
          const int next = (step + 4) / kOfBlock;
          if (next == kBlocks && k + 1 < last) barrier_wait(full + 8 * stage, phase);
#pragma unroll
          for (int i = next; i < next + 2 / kOfBlock; ++i) read_block(i < kBlocks ? now : stage, i % kBlocks);
          const int later = (step + 2) % kSteps;  // what fragments are made for
          if (Scales == kSmallGroups)
            read_scales(later ? now : stage, later / kOfBlock);
          else if (Shape::kGrouped && next == kBlocks)
            read_scales(stage, 0);
          wgmma_wait<2>();  // the products whose fragments are to be replaced are complete
          if (step == 0 && lane == 0) barrier_arrive(done);  // and with them the stage before
          if (Shape::kGrouped && (Scales == kSmallGroups || later == 0)) factors.set(scales);
          // Beyond the last stage fragments are made of what is there, and not used: no branch between products.
          make_fragment(later), make_fragment(later + 1);
        }
        done = empty + 8 * now;
      }
      // While the last products run.
      const SharedTile<kConsumers> tile(args, walk.tile, tile0, thread);
      const uint64_t seen = tile.is_shared() ? tile.counter.glance() : 0;
      wgmma_wait<0>();
      wgmma_hold(sum);
      if (lane == 0) barrier_arrive(done);
      // Says that the lane may have changed: addresses of the outputs are then computed here, not kept in registers.
      int thread_now = thread;
      forget(thread_now);
      part.lane = thread_now % 32;
      // A copy: sums written here would be read by the next tile's first wgmma, as the compiler sees it.
      Accumulator total[Tokens / 2];
#pragma unroll
      for (int i = 0; i < Tokens / 2; ++i) {
        if constexpr (Shape::kGrouped)
          total[i] = sum[i] * __uint_as_float(factors.grown[i / 2 % 2]);
        else
          total[i] = sum[i];
      }
      finish_tile<Shape>(part, tile, seen, total, base, stage, received, sums_ready, thread_now);
    } while (walk.next());
    if (lane == 0) store_wait_read();  // the copies end before the kernel does
    if (args.remainder) dependency_wait();
  }
#endif
}

}  // namespace trirun::gemm_prefill
