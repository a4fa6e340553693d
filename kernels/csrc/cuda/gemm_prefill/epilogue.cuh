// The end of a Hopper prefill tile: sums that are split among several CTAs come together, and become outputs.
#pragma once

#include "outputs.cuh"
#include "schedule.cuh"

namespace trirun::gemm_prefill {

#ifdef TRIRUN_HOPPER

// Of the quad pairs of a tile's sums (see Consumer), those that one CTA of a cluster finishes; `most` is what any does.
struct ClusterSplit {
  int rank, most, own, end;

  __device__ __forceinline__ ClusterSplit(const PrefillArguments& args, int quad_pairs)
      : rank(args.splits > 1 ? blockIdx.x % args.splits : 0), most((quad_pairs + args.splits - 1) / args.splits),
        own(quad_pairs * rank / args.splits), end(quad_pairs * (rank + 1) / args.splits) {}
};

// The barrier that counts what comes from other CTAs of the cluster; without one, the warps that have stored what
// `SharedTile::announce` waits for. By the thread that initializes barriers, last.
template <typename Shape, typename Part>
__device__ __forceinline__ void init_received(const PrefillArguments& args, uint32_t received) {
  constexpr int kQuadPairBytes = 2 * Shape::kConsumers * 16;  // bytes
  barrier_init(received, args.each > 0 && !args.pairs ? Shape::kConsumers / 32 : 1);
  barrier_init_fence();
  const ClusterSplit mine(args, Part::kQuadPairs);
  if (args.splits > 1) barrier_expect(received, (args.splits - 1) * (mine.end - mine.own) * kQuadPairBytes);
  if (args.pairs) barrier_expect(received, Part::kQuadPairs / 2 * kQuadPairBytes);
}

// Outputs of the quad pairs from `first` on, from their quads.
template <typename Part, int QuadPairs>
__device__ __forceinline__ void put_quad_pairs(const Part& part,
                                               const typename Part::Accumulator (&sums)[QuadPairs][2][4], int first) {
  part.by_plainness([&](auto plain) {
#pragma unroll
    for (int i = 0; i < QuadPairs; ++i)
      part.template put<decltype(plain)::value>(sums[i][0], sums[i][1], (first + i) * Part::kQuadPairBlocks);
  });
}

// In pairs: the other CTA of the cluster gets the sums of its half of the tokens, where its warp of the same rows will
// put outputs in order, and sends those of this one's half.
template <typename Shape, typename Part>
__device__ __forceinline__ void finish_half(Part& part, const SharedTile<Shape::kConsumers>& tile, uint64_t seen,
                                            const typename Part::Accumulator (&total)[Part::kQuads][4],
                                            uint32_t received) {
  using Accumulator = typename Part::Accumulator;
  constexpr int kHalf = Part::kQuadPairs / 2;
  Accumulator mine[kHalf][2][4];
  part.begin_outputs();
  cluster_wait();  // the other has begun
  const uint32_t slot = part.output + part.lane * 16, other = blockIdx.x & 1 ^ 1;
  const uint32_t to = peer_address(slot, other), arrived = peer_address(received, other);
#pragma unroll
  for (int i = 0; i < 2 * kHalf; ++i) {
    const int quad_pair = i / 2, j = i % 2;
    Accumulator theirs[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const Accumulator low = total[Part::quad(quad_pair, j)][e], high = total[Part::quad(kHalf + quad_pair, j)][e];
      mine[quad_pair][j][e] = tile.half ? high : low, theirs[e] = tile.half ? low : high;
    }
    store_peer_counted(to + i * 512, reinterpret_cast<const uint4&>(theirs), arrived);
  }
  barrier_wait_cluster(received, 0);
#pragma unroll
  for (int i = 0; i < 2 * kHalf; ++i) {
    const uint4 v = load_shared4(slot + i * 512);
    const uint32_t of_other[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) mine[i / 2][i % 2][e] += reinterpret_cast<const Accumulator&>(of_other[e]);
  }
  __syncwarp();
  const auto none = [] { return false; };
  if (!tile.add(reinterpret_cast<Accumulator(&)[2 * kHalf][4]>(mine), received, seen, none)) return;
  put_quad_pairs(part, mine, kHalf * tile.half);
  part.end_outputs(Part::kBlocks / 2 * tile.half, Part::kBlocks / 2 * (tile.half + 1), false);
}

// Every CTA of the cluster owns some of the tokens and is sent everybody's sums of them, its own too, which land
// where the stages were. They are added by rank: the order is fixed. A loop over what has landed, not over registers:
// this code runs once, and is fetched to be run.
template <typename Shape, typename Part>
__device__ __forceinline__ void finish_split(Part& part, const typename Part::Accumulator (&total)[Part::kQuads][4],
                                             uint32_t stages_at, uint32_t received, int thread) {
  using Accumulator = typename Part::Accumulator;
  constexpr int kConsumers = Shape::kConsumers, kQuadPairs = Part::kQuadPairs;
  const int splits = part.args.splits;
  const ClusterSplit mine(part.args, kQuadPairs);
  cluster_meet();
  int owner = 0, owner_end = kQuadPairs / splits;
  const uint32_t slot = stages_at + (mine.rank * mine.most * 2 * kConsumers + thread) * 16;
  uint32_t to = peer_address(slot, 0), arrived = peer_address(received, 0);
#pragma unroll
  for (int quad_pair = 0; quad_pair < kQuadPairs; ++quad_pair) {
    while (quad_pair >= owner_end) {
      ++owner;
      owner_end = kQuadPairs * (owner + 1) / splits;
      to = peer_address(slot, owner), arrived = peer_address(received, owner);
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint4& v = reinterpret_cast<const uint4&>(total[Part::quad(quad_pair, j)]);
      if (owner == mine.rank)  // read back by this very thread
        store_shared4(slot + ((quad_pair - mine.own) * 2 + j) * kConsumers * 16, v);
      else
        store_peer_counted(to + j * kConsumers * 16, v, arrived);
    }
    to += 2 * kConsumers * 16;
  }
  part.begin_outputs();
  barrier_wait_cluster(received, 0);
  part.by_plainness([&](auto plain) {
#pragma unroll 1
    for (int quad_pair = mine.own; quad_pair < mine.end; ++quad_pair) {
      uint32_t from = stages_at + ((quad_pair - mine.own) * 2 * kConsumers + thread) * 16;
      Accumulator all[2][4] = {};
#pragma unroll 2
      for (int source = 0; source < splits; ++source, from += mine.most * 2 * kConsumers * 16)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4 v = load_shared4(from + j * kConsumers * 16);
          Accumulator(&s)[4] = all[j];
          s[0] += reinterpret_cast<const Accumulator&>(v.x), s[1] += reinterpret_cast<const Accumulator&>(v.y);
          s[2] += reinterpret_cast<const Accumulator&>(v.z), s[3] += reinterpret_cast<const Accumulator&>(v.w);
        }
      part.template put<decltype(plain)::value>(all[0], all[1], quad_pair * Part::kQuadPairBlocks);
    }
  });
  part.end_outputs(mine.own * Part::kQuadPairBlocks, mine.end * Part::kQuadPairBlocks, false);
}

// What the producer put into the stages from `next_stage` on (see produce): another CTA's sums, quads of this thread.
template <typename Shape, typename Accumulator>
__device__ __forceinline__ void add_ahead(Accumulator (&total)[Shape::kQuads][4], uint32_t stages_at, int next_stage,
                                          uint32_t sums_ready, int thread) {
  barrier_wait(sums_ready, 0);
#pragma unroll
  for (int q = 0; q < Shape::kQuads; ++q) {
    int stage = next_stage + q / Shape::kStageQuads;
    if (stage >= Shape::kStages) stage -= Shape::kStages;
    const int quad = q % Shape::kStageQuads * Shape::kConsumers + thread;
    const uint4 v = load_shared4(stages_at + stage * Shape::kX + quad * 16);
    const uint32_t of_other[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) total[q][e] += reinterpret_cast<const Accumulator&>(of_other[e]);
  }
}

// By all consumer warps; `thread`: counted from their first. This CTA's sums of a tile to outputs, or those of all CTAs
// that have parts of it. seen: what the tile's counter was a moment ago. next_stage: where the producer put what comes
// after the stages of the tile; sums_ready: the barrier that counts it.
template <typename Shape, typename Part, typename Sums>
__device__ __forceinline__ void finish_tile(Part& part, const SharedTile<Shape::kConsumers>& tile, uint64_t seen,
                                            Sums& sums, uint32_t stages_at, int next_stage, uint32_t received,
                                            uint32_t sums_ready, int thread) {
  auto& total = reinterpret_cast<typename Part::Accumulator(&)[Part::kQuads][4]>(sums);
  static_assert(sizeof total == sizeof sums);
  if (part.args.pairs) {
    finish_half<Shape>(part, tile, seen, total, received);
  } else if (part.args.splits > 1) {
    finish_split<Shape>(part, total, stages_at, received, thread);
  } else {
    part.begin_outputs();
    const auto take_ahead = [&] {
      if constexpr (Shape::kAhead) add_ahead<Shape>(total, stages_at, next_stage, sums_ready, thread);
      return Shape::kAhead;
    };
    if (!tile.add(total, received, seen, take_ahead)) return;
    part.by_plainness([&](auto plain) {
#pragma unroll
      for (int quad_pair = 0; quad_pair < Part::kQuadPairs; ++quad_pair)
        part.template put<decltype(plain)::value>(total[Part::quad(quad_pair, 0)], total[Part::quad(quad_pair, 1)],
                                                  quad_pair * Part::kQuadPairBlocks);
    });
    part.end_outputs(0, Part::kBlocks, true);
  }
}

#endif  // TRIRUN_HOPPER

}  // namespace trirun::gemm_prefill
