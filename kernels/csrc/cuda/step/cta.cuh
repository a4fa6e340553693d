// What a thread knows throughout a step.
#pragma once

#include "cuda/common/hopper.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/decoder/launch.cuh"
#include "messages.cuh"
#include "step.cuh"

namespace trirun::step {

__device__ __forceinline__ void meet() { named_barrier<WARPS * 32>(1); }  // of all warps that multiply
// Of them, once those that finish have read what is to be written over: attention's parts are where the sums of q, k
// and v were.
__device__ __forceinline__ void meet_after_reading() { named_barrier<(WARPS + FINISHERS) * 32>(2); }
__device__ __forceinline__ void have_read() { named_barrier_arrive<(WARPS + FINISHERS) * 32>(2); }
// Attention's parts are there: of all warps that attend, those that join them wait for the others.
__device__ __forceinline__ void have_left() { named_barrier_arrive<WARPS * 32>(3); }
__device__ __forceinline__ void meet_parts() { named_barrier<WARPS * 32>(3); }
__device__ __forceinline__ void meet_finishers() { named_barrier<FINISHERS * 32>(4); }

__device__ __forceinline__ float4 scaled(float4 a, float f) { return make_float4(a.x * f, a.y * f, a.z * f, a.w * f); }
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// What a warp knows of the items that it attends to. Of several rows it lies in shared memory meanwhile: attention
// wants all registers.
struct Parked {
  uint32_t phase;
  Ring ring;
  int item;
};

// ONE: of a step of one row by the largest clusters, the usual one. To look these up takes instructions in every phase.
// FULL: of an instance that has more to keep than registers.
template <bool ONE, bool FULL>
struct CtaOf {
  static constexpr bool ONE_ROW = ONE, CROWDED = FULL;
  const StepArgs& a;
  uint32_t shared;  // address of all its memory
  uint32_t lane_number;
  // The compiler knows of a shuffled value that all lanes have it alike: what follows from it is computed once for a
  // warp, and behind a branch on it lanes need not be brought together again.
  const int warp_number = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
  Ring ring{};  // where the stream's next chunk will be: of warps that multiply
  Parked now{};  // of one row

  __device__ __forceinline__ explicit CtaOf(const StepArgs& a) : a(a) { begin_phase(); }

  // What follows from these is computed anew in every phase. Else the compiler does so once for all layers, and keeps
  // in local memory what it has no registers for, which takes time in every phase (kernels/LOG.md).
  __device__ __forceinline__ void begin_phase() {
    extern __shared__ __align__(1024) uint8_t memory[];
    shared = kept_anew(shared_address(memory)), lane_number = lane_anew();
  }

  __device__ __forceinline__ int lane() const { return static_cast<int>(lane_number); }
  __device__ __forceinline__ int warp() const { return warp_number; }
  // Of the warps that attend, whether this one joins their parts.
  __device__ __forceinline__ bool joins() const { return warp() >= WARPS - JOINERS; }
  __device__ __forceinline__ int cluster_log() const { return ONE ? MAX_CLUSTER_LOG : a.cluster_log; }
  __device__ __forceinline__ int cluster() const { return 1 << cluster_log(); }
  __device__ __forceinline__ int rank() const { return static_cast<int>(blockIdx.x) & (cluster() - 1); }
  __device__ __forceinline__ int rows_log() const { return ONE ? 0 : a.tokens_log; }
  __device__ __forceinline__ int rows() const { return 1 << rows_log(); }
  __device__ __forceinline__ int item_rows_log() const { return ONE ? 0 : a.item_rows_log; }
  __device__ __forceinline__ int item_rows() const { return 1 << item_rows_log(); }
  // From an item's first row, that of a word.
  __device__ __forceinline__ int row_of_word(int word) const { return ONE ? 0 : word >> a.row_words_log; }

  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return shared + a.at.barriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const {
    return shared + a.at.barriers + (a.at.stages + stage) * 8;
  }
  // The factors of an input's rows are there; all sums of a unit are.
  __device__ __forceinline__ uint32_t factor_barrier(int buffer) const { return full(2 * a.at.stages + buffer); }
  __device__ __forceinline__ uint32_t sums_barrier(int buffer, int local) const {
    return full(2 * a.at.stages + 2 + buffer * MAX_LOCAL + local);
  }
  // This CTA's parts of attention are there; what the cluster's CTAs have of it is.
  __device__ __forceinline__ uint32_t parts_barrier() const { return full(2 * a.at.stages + 2 + 2 * MAX_LOCAL); }
  __device__ __forceinline__ uint32_t together_barrier() const { return full(2 * a.at.stages + 3 + 2 * MAX_LOCAL); }
  // Of two blocks of columns: sums that warps pass on, and of each warp a barrier, its turn, and how many it has had.
  __device__ __forceinline__ int passed() const { return a.at.factors - PASSED_ROOM; }
  __device__ __forceinline__ uint32_t turn_barrier(int warp) const {
    return shared + passed() + PASSED_BYTES + warp * 8;
  }
  __device__ __forceinline__ uint32_t& turns(int warp) const {
    return at<uint32_t>(passed() + PASSED_BYTES + WARPS * 8)[warp];
  }
  __device__ __forceinline__ Patience patience() const { return {a.status, shared + a.at.factors + 4 * MAX_ROWS * 4}; }
  template <typename T>
  __device__ __forceinline__ T* at(int offset) const {
    return static_cast<T*>(generic_pointer(shared + offset));
  }
  __device__ __forceinline__ float* floats(int offset) const { return at<float>(offset); }
  __device__ __forceinline__ float* factors(int buffer) const { return floats(a.at.factors) + buffer * 2 * MAX_ROWS; }
  __device__ __forceinline__ const trirun_cuda_step_layer& layer(int i) const {
    return at<const trirun_cuda_step_layer>(a.at.layers)[i];
  }
  __device__ __forceinline__ Parked& parked() const { return at<Parked>(a.at.parked)[warp()]; }
  __device__ __forceinline__ void park(uint32_t phase) {
    if constexpr (ONE) {
      now = {phase, ring, 0};
    } else {
      if (lane() == 0) parked() = {phase, ring, 0};
      __syncwarp();
    }
  }
  __device__ __forceinline__ Parked in_hand() const {
    if constexpr (ONE)
      return now;
    else
      return parked();
  }
  // The item, of this CTA's.
  __device__ __forceinline__ const Item& item() const { return plan().items[in_hand().item]; }
  __device__ __forceinline__ bool has_item() const { return in_hand().item < plan().item_count; }
  __device__ __forceinline__ void next_item() {
    if constexpr (ONE) {
      now.item++;
    } else {
      if (lane() == 0) parked().item++;
      __syncwarp();
    }
  }
  // Its keys and values have gone through the ring.
  __device__ __forceinline__ void pass(int chunks) {
    if constexpr (ONE) {
      move(now.ring, chunks);
    } else {
      if (lane() == 0) {
        Ring ring = parked().ring;
        move(ring, chunks);
        parked().ring = ring;
      }
      __syncwarp();
    }
  }
  __device__ __forceinline__ uint32_t unpark() {
    begin_phase();
    if constexpr (!ONE) asm volatile("" ::: "memory");  // or the compiler would still know, and need registers
    ring = in_hand().ring;
    return in_hand().phase;
  }
  // How many inputs of layers there were before this step, modulo TAG, as memory has it and as the CTA keeps it; what a
  // layer's is tagged with.
  __device__ __forceinline__ uint32_t counted_before() const {
    return *reinterpret_cast<volatile uint32_t*>(a.counter) % TAG;
  }
  __device__ __forceinline__ uint32_t& counted() const { return at<uint32_t>(a.at.factors)[4 * MAX_ROWS + 2]; }
  __device__ __forceinline__ uint32_t tag(int layer) const { return tag_of(counted() + layer); }
  __device__ __forceinline__ Geometry geometry(int product) const {
    const int* first_unit = a.first_units[product] + (blockIdx.x >> cluster_log());
    Geometry g;
    g.first = first_unit[0], g.units = first_unit[1] - g.first;
    g.local = (g.units - rank() + cluster() - 1) >> cluster_log();
    const int* first_k_tile = a.first_k_tiles[product];
    g.all_k_tiles = first_k_tile[cluster()], g.n_tiles = a.n_tiles[product];
    g.k_first = first_k_tile[rank()], g.k_tiles = first_k_tile[rank() + 1] - g.k_first;
    g.tiles = g.units * tiles_of_unit(product), g.tile_chunks = ceil_div<uint32_t>(g.k_tiles, CHUNK_K_TILES);
    g.sharing = a.sharing[product];
    return g;
  }
  __device__ __forceinline__ Share& share(int product) const {
    return at<Share>(a.at.shares)[product * WARPS + warp()];
  }
  __device__ __forceinline__ const AttentionPlan& plan() const { return *at<const AttentionPlan>(a.at.plan); }

  // Of these barriers, which every item of every layer goes through.
  __device__ __forceinline__ int item_parity(int layer, int item) const {
    return (layer * plan().item_count + item) & 1;
  }

  __device__ __forceinline__ void move(Ring& at, int chunks) const {
    at.stage += chunks;
    while (at.stage >= static_cast<uint32_t>(a.at.stages)) at.stage -= a.at.stages, at.phase ^= 1;
  }
};

// Slots of a row's sum of an n tile: one of each warp of the cluster that has a part in it; of two blocks of columns
// warps of a CTA add theirs up.
template <int BLOCKS, typename Cta>
__device__ __forceinline__ int slots_of_row(const Cta& c, const Geometry& g) {
  return (BLOCKS == 1 ? g.sharing.parts : 1) << c.cluster_log();
}

__device__ __forceinline__ const trirun_cuda_step_weight& weight_of(const trirun_cuda_step_layer& layer, int product) {
  return (&layer.qkv)[product];
}

// An input of a product: its values, those of a norm times its weights, but without its factor.
struct Input {
  const float4 *words, *headers;
  int header_count;  // of a row; of attention's output as its plan says
  const float* norm;  // its weights, or nullptr
};

__device__ __forceinline__ Input input_of(const StepArgs& a, const trirun_cuda_step_layer& layer, int product) {
  const int units = static_cast<int>(a.s.hidden) / N_TILE;
  switch (product) {
    case QKV: return {a.x_attention, a.x_attention_headers, units, layer.attention_norm};
    case O: return {a.attended, a.attended_headers, 0, layer.attention_sub_norm};
    case GATE_UP: return {a.x_mlp, a.x_mlp_headers, units, layer.mlp_norm};
    default: return {a.gated, a.gated_headers, static_cast<int>(a.s.ffn) / N_TILE, layer.mlp_sub_norm};
  }
}

}  // namespace trirun::step
