// The kernel of a whole decode step, and its launch. step.cuh says how it is divided among CTAs.
//
// A layer is five phases: q | k | v, attention, its output projection, gate | up, down. Each takes its input from
// messages, and the stream goes on through all of them: while CTAs wait for each other, the weights, keys and values of
// what follows arrive. Few bytes may be on their way at a time (`in_flight` chunks), or messages queue behind them.
// A CTA is at most a phase ahead of another, which slots and barriers of two buffers rely on: each has k tiles of every
// product, and so waits for its input.
#include "attend.cuh"
#include "finish.cuh"
#include "product.cuh"

#include <algorithm>
#include <array>

namespace trirun::step {
namespace {

// Everything that this CTA reads of weights and caches, in the order in which it is needed: a warp brings every
// STREAMS-th chunk, since asking for one takes as long as a chunk takes to come. Once a chunk is asked for, all but the
// `in_flight` before it have come, whichever warp brought them: who waits for a chunk ahead relies on that.
template <int HD, int ELEMENT, bool GROUPS, typename Cta>
struct Stream {
  const Cta& c;
  const uint64_t once = evict_first_policy();
  Ring filled, landed;  // where this warp's next chunk goes, and the next one, of any warp, that it waits for
  int on_way = 0, next;  // chunks; how many there are before this warp's next one

  __device__ __forceinline__ Stream(const Cta& c, uint32_t which)
      : c(c), filled{which, 0}, landed{which, 0}, next(static_cast<int>(which)) {
    // Behind one of its own it waits for those of the others before it; the first of them may be none.
    for (int i = 1; i < STREAMS; i++) landed.retreat(c.a.at.stages);
  }

  // Makes room, and announces a chunk.
  __device__ __forceinline__ void announce(uint32_t bytes) {
    barrier_wait_warp(c.empty(filled.stage), filled.phase ^ 1);
    if (on_way * STREAMS == c.a.s.in_flight) {
#pragma unroll
      for (int i = 0; i < STREAMS; i++)
        barrier_wait_warp(c.full(landed.stage), landed.phase), landed.advance(c.a.at.stages);
    } else {
      on_way++;
    }
    if (c.lane() == 0) barrier_expect(c.full(filled.stage), bytes);
  }
  __device__ __forceinline__ void copy(int to, const void* from, uint32_t bytes) const {
    bulk_load(c.shared + filled.stage * STAGE_BYTES + to, from, bytes, c.full(filled.stage), once);
  }

  // What warps that finish read of a product: from memory it would come too late.
  __device__ __forceinline__ void prefetch(const trirun_cuda_step_layer& layer, int which) const {
    constexpr int OF_LINE = 32;  // floats
    const Geometry g = c.geometry(which);
    const float* norm = input_of(c.a, layer, which).norm;
    if (norm != nullptr)
#pragma unroll 1
      for (int line = c.lane(); line < g.k_tiles * K_TILE / OF_LINE; line += 32)
        prefetch_l2(norm + g.k_first * K_TILE + line * OF_LINE);
    if (!GROUPS && c.lane() < g.tiles)
      prefetch_l2(weight_of(layer, which).scales + n_tile_of(g, which, c.lane()) * N_TILE);
  }

  // Scales and zero points of groups, of so many k tiles.
  __device__ __forceinline__ void prefetch_groups(const trirun_cuda_step_weight& weight, const Geometry& g, int n_tile,
                                                  int k_tile, int count) const {
    if (!GROUPS || c.lane() >= count) return;
    const int64_t at = (static_cast<int64_t>(k_tile + c.lane()) * g.n_tiles + n_tile) * N_TILE;
    prefetch_l2(weight.scales + at);
    if (weight.zeros != nullptr) prefetch_l2(weight.zeros + at);
  }

  __device__ __forceinline__ void product(const trirun_cuda_step_layer& layer, int which) {
    const Geometry g = c.geometry(which);
    const int tiles = g.tiles, tile_chunks = g.tile_chunks, k_tiles = g.k_tiles;
    const trirun_cuda_step_weight& weight = weight_of(layer, which);
    const auto* words = reinterpret_cast<const uint8_t*>(weight.words);
    if (c.warp() == WARPS + FINISHERS) prefetch(layer, which);
    int tile = 0, chunk = next;
#pragma unroll 1
    for (;; chunk += STREAMS) {
      while (chunk >= tile_chunks && tile < tiles) chunk -= tile_chunks, tile++;
      if (tile >= tiles) break;
      const int k_tile = chunk * CHUNK_K_TILES;
      const int64_t at = static_cast<int64_t>(n_tile_of(g, which, tile)) * g.all_k_tiles + g.k_first + k_tile;
      const uint32_t bytes = min(CHUNK_K_TILES, k_tiles - k_tile) * WORD_TILE_BYTES;
      announce(bytes);
      if (c.lane() == 0) copy(0, words + at * WORD_TILE_BYTES, bytes);
      prefetch_groups(weight, g, n_tile_of(g, which, tile), g.k_first + k_tile, min(CHUNK_K_TILES, k_tiles - k_tile));
      filled.advance(c.a.at.stages, STREAMS);
    }
    next = chunk;
  }

  __device__ __forceinline__ void cache(const trirun_cuda_step_layer& layer) {
    constexpr int POSITIONS = CHUNK_POSITIONS<HD, ELEMENT>, BYTES = CHUNK_BYTES / 2, BLOCK = BYTES / VALUE_BLOCKS;
    static_assert(POSITIONS * HD * ELEMENT_BYTES<ELEMENT> == BYTES);
    constexpr int CHUNKS = SPAN_POSITIONS<HD, ELEMENT> / POSITIONS;
    const trirun_cuda_step& s = c.a.s;
#pragma unroll 1
    for (int i = 0; i < c.plan().item_count; i++) {
      const Item& item = c.plan().items[i];
      const uint32_t last = item.last * CHUNKS;
      const int32_t* table = s.block_tables + item.slot * s.ld_blocks;
      constexpr uint32_t OF_PAGE = decoder::PAGE / POSITIONS;
      const uint32_t last_page = (max(last, 1u) - 1) / OF_PAGE;
      uint32_t chunk = item.first * CHUNKS + next;
      // The next chunk's page, asked for before this one is waited for.
      int page = chunk < last ? __ldg(table + chunk / OF_PAGE) : 0;
#pragma unroll 1
      for (; chunk < last; chunk += STREAMS) {
        const int64_t at = cache_offset(page, static_cast<int>(s.kv_heads), item.kv_head, chunk * POSITIONS,
                                        HD * ELEMENT_BYTES<ELEMENT>);
        page = __ldg(table + min((chunk + STREAMS) / OF_PAGE, last_page));
        announce(CHUNK_BYTES);
        __syncwarp();
        const int block = c.lane() - 1;
        if (block < 0)
          copy(0, static_cast<const uint8_t*>(layer.keys) + at, BYTES);
        else if (block < VALUE_BLOCKS)
          copy(BYTES + block * (BLOCK + BLOCK_PADDING), static_cast<const uint8_t*>(layer.values) + at + block * BLOCK,
               BLOCK);
        filled.advance(c.a.at.stages, STREAMS);
      }
      next = chunk - last;
    }
  }

  __device__ __forceinline__ void run() {
#pragma unroll 1
    for (int i = 0; i < c.a.s.layer_count; i++)
#pragma unroll 1
      for (int which = QKV; which < PRODUCTS; which++) {
        product(c.layer(i), which);
        if (which == QKV) cache(c.layer(i));
      }
  }
};

template <int LIMBS, int SCALE, int HD, int ELEMENT, bool PACKED, bool ONE_ROW, int BLOCKS>
__global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ StepArgs a) {
  constexpr bool GROUPS = SCALE != gemm_decode::PER_CHANNEL;
  const trirun_cuda_step& s = a.s;
  using Cta = CtaOf<ONE_ROW, (BLOCKS > 1 && (!PACKED || HD > OWN_DIMENSIONS))>;
  Cta c(a);
  const int warp = c.warp();
  if (threadIdx.x == 32) {
    for (int i = 0; i < a.at.stages; i++) barrier_init(c.full(i), 1), barrier_init(c.empty(i), EMPTY_ARRIVALS);
    for (int buffer = 0; buffer < 2; buffer++) {
      barrier_init(c.factor_barrier(buffer), min(c.rows(), FINISHERS));
      for (int i = 0; i < MAX_LOCAL; i++) barrier_init(c.sums_barrier(buffer, i), 1);
    }
    barrier_init(c.parts_barrier(), 1);
    barrier_init(c.together_barrier(), 1);
    if constexpr (BLOCKS > 1)
      for (int i = 0; i < WARPS; i++) barrier_init(c.turn_barrier(i), 1), c.turns(i) = 0;
    const uint64_t end = global_nanoseconds() + PATIENCE;
    store_shared2(c.patience().deadline, static_cast<uint32_t>(end), static_cast<uint32_t>(end >> 32));
    barrier_init_fence();
    fence_async_shared();
  }
  // One warp finds out where rows are, and some look up their tokens, while the others fetch the layers.
  dependency_wait();
  constexpr int STREAM = WARPS + FINISHERS;  // the first warp that streams
  if (warp == 0) {
    plan_items<HD, ELEMENT>(c);
  } else if (warp < WARPS) {
    const int words = static_cast<int>(s.layer_count * sizeof(trirun_cuda_step_layer) / 8);
    for (int i = threadIdx.x - 32; i < words; i += (WARPS - 1) * 32)
      c.template at<uint64_t>(a.at.layers)[i] = reinterpret_cast<const uint64_t*>(s.layers)[i];
  }
  if (threadIdx.x == THREADS - 1) c.counted() = c.counted_before();
  if (warp > 0 && warp < STREAM) Finisher<LIMBS, GROUPS, BLOCKS, Cta>(c).begin(STREAM - 1 - warp, STREAM - 1);
  if (warp < WARPS && c.lane() < PRODUCTS) Multiplier<LIMBS, SCALE, BLOCKS, Cta>::make_share(c, c.lane());
  __syncthreads();
  // Nothing is sent to the cluster's CTAs until all have their barriers. Meanwhile weights come.
  cluster_arrive();
  if (warp >= STREAM) Stream<HD, ELEMENT, GROUPS, Cta>(c, warp - STREAM).run();
  cluster_wait();

  const uint32_t phases = static_cast<uint32_t>(s.layer_count) * PRODUCTS;
  if (warp < WARPS) {
#pragma unroll 1
    for (uint32_t phase = 0; phase < phases; phase++) {
      Multiplier<LIMBS, SCALE, BLOCKS, Cta>::run(c, phase);
      if (phase % PRODUCTS != QKV) continue;
      c.park(phase);
#pragma unroll 1
      for (; c.has_item(); c.next_item()) {
        Attention<HD, ELEMENT, PACKED, Cta>::run(c);
        if (c.joins()) Joiner<Cta>{c}.run();
      }
      phase = c.unpark();
    }
    // Once anything of gate | up is there, the last layer's output projection has been multiplied everywhere.
    received(c.a.gated, c.tag(static_cast<int>(s.layer_count) - 1), c.patience());
    for (int i = 0; i < c.plan().item_count; i++) Joiner<Cta>{c}.clear(c.plan().items[i]);
  } else if (warp < STREAM) {
    Finisher<LIMBS, GROUPS, BLOCKS, Cta> finisher(c);
#pragma unroll 1
    for (uint32_t phase = 0; phase < phases; phase++) {
      finisher.run(phase);
      if (phase % PRODUCTS == QKV) finisher.attend(phase / PRODUCTS);
    }
    finisher.end();
  }
  __syncwarp();
  // A CTA's shared memory is there until the others have written to it.
  __syncthreads();
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.counter = c.counted() + static_cast<uint32_t>(s.layer_count) + 1;
  cluster_arrive();
  cluster_wait();
}

// Rows of one text that an item has: keys and values are read once for all of them. As many as a warp has columns for.
int rows_of_item(const trirun_cuda_step& s) {
  const int group = static_cast<int>(s.heads / s.kv_heads);
  if (!s.one_text || sends_attended_headers(s) || group > PACKED_HEADS || (group & (group - 1))) return 1;
  return std::min(static_cast<int>(s.m), HEADS / group);
}
int columns_of(const trirun_cuda_step& s) { return rows_of_item(s) * static_cast<int>(s.heads / s.kv_heads); }
int pairs_of(const trirun_cuda_step& s) { return static_cast<int>(s.m / rows_of_item(s) * s.kv_heads); }

using Kernel = void (*)(StepArgs);

// Whether x has two blocks of eight columns.
bool of_two_blocks(const trirun_cuda_step& s) { return s.m * s.act_bits / 8 > 8; }

template <int LIMBS, int SCALE, int HD, int ELEMENT, bool PACKED>
Kernel of_rows(const trirun_cuda_step& s) {
  if (s.m == 1 && s.cluster == MAX_CLUSTER) return decode_step<LIMBS, SCALE, HD, ELEMENT, PACKED, true, 1>;
  if constexpr (LIMBS == 2 && SCALE == gemm_decode::PER_CHANNEL)
    if (of_two_blocks(s)) return decode_step<LIMBS, SCALE, HD, ELEMENT, PACKED, false, 2>;
  return decode_step<LIMBS, SCALE, HD, ELEMENT, PACKED, false, 1>;
}

template <int LIMBS, int SCALE, int HD, int ELEMENT>
Kernel of_group(const trirun_cuda_step& s) {
  return columns_of(s) <= PACKED_HEADS ? of_rows<LIMBS, SCALE, HD, ELEMENT, true>(s)
                                       : of_rows<LIMBS, SCALE, HD, ELEMENT, false>(s);
}

template <int LIMBS, int SCALE, int ELEMENT>
Kernel of_heads(const trirun_cuda_step& s) {
  switch (s.head_dim) {
    case 64: return of_group<LIMBS, SCALE, 64, ELEMENT>(s);
    case 128: return of_group<LIMBS, SCALE, 128, ELEMENT>(s);
    case 256:
      if constexpr (SCALE == gemm_decode::PER_CHANNEL) return of_group<LIMBS, SCALE, 256, ELEMENT>(s);
      return nullptr;  // groups besides would want more registers than there are
    default: return nullptr;
  }
}

template <int LIMBS, int SCALE>
Kernel of_elements(const trirun_cuda_step& s) {
  if (s.int8_cache) return of_heads<LIMBS, SCALE, INT8>(s);
  return s.dtype == TRIRUN_BF16 ? of_heads<LIMBS, SCALE, BF16>(s) : of_heads<LIMBS, SCALE, FP16>(s);
}

Kernel kernel_of(const trirun_cuda_step& s) {
  using namespace gemm_decode;
  if (s.group_size == -1 && !s.real_zeros) {
    if (s.act_bits == TRIRUN_ACT8) return of_elements<1, PER_CHANNEL>(s);
    return of_elements<2, PER_CHANNEL>(s);
  }
  if (s.group_size != K_TILE || s.act_bits == TRIRUN_ACT8 || s.m > 4) return nullptr;
  return s.real_zeros ? of_elements<2, PER_K_TILE>(s) : of_elements<2, PER_K_TILE_PLAIN>(s);
}

int rounded(int64_t bytes) { return static_cast<int>((bytes + 127) / 128 * 128); }

// Of a product, in n tiles and k tiles.
int n_tiles_of(const trirun_cuda_step& s, int product) {
  const int64_t kv = s.kv_heads * s.head_dim;
  return static_cast<int>((product == QKV       ? s.heads * s.head_dim + 2 * kv
                           : product == GATE_UP ? 2 * s.ffn
                                                : s.hidden) /
                          N_TILE);
}
int k_tiles_of(const trirun_cuda_step& s, int product) {
  return static_cast<int>((product == O ? s.heads * s.head_dim : product == DOWN ? s.ffn : s.hidden) / K_TILE);
}

// Units of a product that one cluster has, at most, and k tiles that a CTA has.
int units_of(const trirun_cuda_step& s, int product) {
  return ceil_div(n_tiles_of(s, product) / tiles_of_unit(product), s.ctas / s.cluster);
}
int local_of(const trirun_cuda_step& s, int product) { return ceil_div(units_of(s, product), s.cluster); }
int depth_of(const trirun_cuda_step& s, int product) { return ceil_div(k_tiles_of(s, product), s.cluster); }

// What the kernel has no check for.
int check_sizes(const trirun_cuda_step& s) {
  if (s.m < 1 || s.m > MAX_ROWS || (s.m & (s.m - 1)) || s.layer_count < 1 || s.layer_count > MAX_LAYERS ||
      s.hidden <= 0 || s.hidden % 128 || s.ffn <= 0 || s.ffn % 128 || s.heads <= 0 || s.kv_heads <= 0 ||
      s.heads % s.kv_heads || s.heads / s.kv_heads > MAX_GROUP || s.head_dim <= 0 || s.head_dim % 64 ||
      s.heads * s.head_dim % 128 || s.kv_heads * s.head_dim % 64 ||
      (s.cluster != 2 && s.cluster != 4 && s.cluster != 8) || s.ctas < s.cluster || s.ctas % s.cluster ||
      s.ctas / s.cluster > MAX_CLUSTERS || s.ctas > MAX_CTAS || pairs_of(s) > std::min(s.ctas * MAX_ITEMS, MAX_PAIRS) ||
      s.m * s.kv_heads > MAX_ROW_PAIRS || s.in_flight < STREAMS || s.in_flight % STREAMS || s.rotary_half < 0 ||
      2 * s.rotary_half > s.head_dim || s.hidden > (1 << 20) || s.ffn > (1 << 20) || local_of(s, QKV) > MAX_LOCAL ||
      local_of(s, O) > MAX_LOCAL || local_of(s, GATE_UP) > MAX_LOCAL ||
      s.cluster > std::min({k_tiles_of(s, QKV), k_tiles_of(s, O), k_tiles_of(s, DOWN)}))
    return TRIRUN_BAD_SHAPE;
  if (!decoder::half_dtype(s.dtype) || (s.act_bits != TRIRUN_ACT8 && s.act_bits != TRIRUN_ACT16))
    return TRIRUN_UNSUPPORTED;
  return kernel_of(s) == nullptr ? TRIRUN_UNSUPPORTED : TRIRUN_OK;
}

int check_pointers(const trirun_cuda_step& s) {
  const void* embedding = s.embedding != nullptr ? s.embedding : s.packed;
  for (const void* p : {static_cast<const void*>(s.layers), embedding, static_cast<const void*>(s.tokens),
                        static_cast<const void*>(s.y), static_cast<const void*>(s.final_norm),
                        static_cast<const void*>(s.slots), static_cast<const void*>(s.positions),
                        static_cast<const void*>(s.block_tables), static_cast<const void*>(s.plan)})
    if (p == nullptr) return TRIRUN_BAD_POINTER;
  return s.rotary_half > 0 && (s.cosines == nullptr || s.sines == nullptr) ? TRIRUN_BAD_POINTER : TRIRUN_OK;
}

// That every unit is somebody's, and none has more than there is room for.
int check_plan(const trirun_cuda_step& s) {
  const int clusters = s.ctas / s.cluster;
  for (int product = QKV; product < PRODUCTS; product++) {
    const int32_t* first = s.plan + product * (clusters + 1);
    if (first[0] != 0 || first[clusters] != n_tiles_of(s, product) / tiles_of_unit(product)) return TRIRUN_BAD_SHAPE;
    for (int i = 0; i < clusters; i++)
      if (first[i + 1] < first[i] || first[i + 1] - first[i] > units_of(s, product)) return TRIRUN_BAD_SHAPE;
  }
  return TRIRUN_OK;
}

// Bytes of the slots of one product, of all that a CTA finishes.
int slot_bytes(const trirun_cuda_step& s, int product, int senders) {
  return local_of(s, product) * tiles_of_unit(product) * s.cluster * senders * static_cast<int>(s.m) * SLOT_BYTES;
}

// How many warps share an n tile, how many n tiles are multiplied at once, and what that costs in cycles: a k tile
// takes its instructions' time where four warps share a scheduler, and what they wait for each other where one has it;
// every n tile has a beginning and an end, and sums have to be added, or of two blocks of columns passed on
// (kernels/LOG.md). None where there is no room for the sums, or where a warp's next n tile could be a ring of `chunks`
// ahead.
struct ProductParts {
  Sharing sharing;
  int cost = 1 << 24;
};
ProductParts parts_of(const trirun_cuda_step& s, int product, int slots, int chunks) {
  constexpr int ISSUED = 233, ISSUED_OF_TWO = 330, WAITED = 600, ENDS = 700, ADDED = 20, PASSED = 100, SCHEDULERS = 4;
  const int tiles = units_of(s, product) * tiles_of_unit(product), depth = depth_of(s, product);
  const bool two = of_two_blocks(s);
  const int issued = two ? ISSUED_OF_TWO : ISSUED;
  ProductParts best;
  for (int parts = 1; parts <= WARPS; parts++)
    for (int at_once = 1; at_once <= std::min(tiles, WARPS / parts); at_once++) {
      const int senders = two ? 1 : parts;
      if (slot_bytes(s, product, senders) > slots || at_once * ceil_div(depth, CHUNK_K_TILES) > chunks ||
          (two && parts > 1 && at_once > MAX_PASSED))
        continue;
      int cost = s.cluster * senders * ADDED + (parts - senders) * PASSED;
      for (int left = tiles; left > 0; left -= at_once) {
        const int warps = std::min(left, at_once) * parts;
        cost += ceil_div(depth, parts) * std::max(WAITED, issued * ceil_div(warps, SCHEDULERS)) + ENDS;
      }
      if (cost < best.cost) best = {{parts, at_once, ceil_div(1 << 16, parts)}, cost};
    }
  return best;
}

// Bytes of an element of the cache.
int element_bytes(const trirun_cuda_step& s) { return s.int8_cache ? 1 : 2; }

// Bytes of one attending warp's part.
int part_bytes(const trirun_cuda_step& s) { return std::min(columns_of(s), HEADS) * part_floats(s.head_dim) * 4; }

// Where everything lies, with so many bytes for sums of q | k | v and gate | up, for those of o and down, and so many
// parts of attention.
Memory lay_out(const trirun_cuda_step& s, int slots, int other_slots, int attending) {
  const int rows = static_cast<int>(s.m), limbs = s.act_bits / 8, hidden = depth_of(s, QKV);
  const int second = std::max(depth_of(s, O), depth_of(s, DOWN));
  Memory at{};
  int end = 0;
  const auto take = [&](int64_t bytes) {
    const int start = end;
    end += rounded(bytes);
    return start;
  };
  at.slot_buffer = std::max(rounded(slots), rounded(attending * part_bytes(s)));
  at.slots = at.attention = take(at.slot_buffer + rounded(other_slots));
  at.limb_buffer = hidden * K_TILE * rows * limbs, at.limbs = take(at.limb_buffer);
  // Heads that a warp each takes at once: queries, new keys and values.
  const int columns = columns_of(s);
  at.heads = take(std::max(second * K_TILE * rows * limbs, std::min(columns + 2 * rows, WARPS) * s.head_dim * 4));
  at.scale_buffer = hidden * rows * 8, at.scales = take((hidden + second) * rows * 8);
  if (of_two_blocks(s)) take(PASSED_ROOM);
  at.factors = take(4 * MAX_ROWS * 4 + 12);
  at.residual = take(local_of(s, O) * rows * 256);
  at.parked = take(WARPS * sizeof(Parked));
  at.queries = take(columns * (4 * s.head_dim + 48));
  const int bytes = element_bytes(s), newest = newest_positions(positions_of_chunk(s.head_dim, bytes), rows);
  at.newest = take(newest * (2 * s.head_dim * bytes + (s.int8_cache ? 8 : 0)) + NEWEST_PADDING);
  const int head_words = s.head_dim / 4, words = columns * head_words;
  int together = 0;
  for (int log = 1; may_be_together(words, log) && 1 << log <= s.cluster && pairs_of(s) <= s.ctas >> log; log++)
    together = std::max(together, shared_stride(words >> log, head_words) << log);
  at.together = take(together * 16);
  at.plan = take(sizeof(AttentionPlan));
  at.layers = take(s.layer_count * static_cast<int64_t>(sizeof(trirun_cuda_step_layer)));
  at.shares = take(PRODUCTS * WARPS * sizeof(Share));
  constexpr int BARRIERS = 512;
  at.barriers = take(BARRIERS);
  at.stages = std::min(std::max(MAX_SHARED - end, 0) / STAGE_BYTES, (BARRIERS / 8 - 4 - 2 * MAX_LOCAL) / 2);
  const int ring = at.stages * STAGE_BYTES;
  for (int* offset : {&at.slots, &at.attention, &at.limbs, &at.scales, &at.factors, &at.residual, &at.heads, &at.parked,
                      &at.queries, &at.newest, &at.together, &at.plan, &at.layers, &at.shares, &at.barriers})
    *offset += ring;
  at.total = end + ring;
  return at;
}

// Bytes for sums that are tried.
constexpr int FEWEST_SLOTS = 2048, MOST_SLOTS = 98304;
int more_slots(int slots) { return slots < 16384 ? slots + 2048 : slots < 32768 ? slots + 4096 : slots + 8192; }

// Chunks of a layer's weights that a CTA streams, at most.
int chunks_of_layer(const trirun_cuda_step& s) {
  int chunks = 0;
  for (int product = QKV; product < PRODUCTS; product++)
    chunks += units_of(s, product) * tiles_of_unit(product) * ceil_div(depth_of(s, product), CHUNK_K_TILES);
  return chunks;
}

// Room for sums, for parts of attention and for the ring, weighed against each other, in cycles of a layer.
Layout weighed(const trirun_cuda_step& s) {
  const int positions = positions_of_chunk(s.head_dim, element_bytes(s));
  const int sides_log = sides_log_of(columns_of(s), s.head_dim);
  // What a layer has beyond two rings is waited for: a chunk more makes a step of Qwen3-8B a hundredth shorter.
  constexpr int OF_CHUNK = 150;
  const int of_layer = chunks_of_layer(s);
  Layout best{};
  int least = 1 << 24;
  // One query head a key: more parts to add than it is worth, but of 8 bits, whose tiles take longer.
  const int most = s.heads == s.kv_heads && !s.int8_cache ? 3 + sides_log : 4;
  for (int attending = most; attending >= 1 + sides_log; attending--)
    for (int slots = FEWEST_SLOTS; slots <= MOST_SLOTS; slots = more_slots(slots))
      for (int other = FEWEST_SLOTS; other <= MOST_SLOTS; other = more_slots(other)) {
        Layout found{lay_out(s, slots, other, 1 << (attending - owners_log_of(s.head_dim))), {}, attending};
        const int chunks = found.at.stages - s.in_flight;
        // No warp's next keys may be a ring ahead, and neither warp of the stream a round ahead of the other.
        if (chunks < std::max(ceil_div(16 << (attending - sides_log), positions), s.in_flight + 2)) break;
        // Of 128 positions a warp's tiles, which overlap.
        int cost = 4096 >> (attending - sides_log);
        cost += std::max(of_layer - 2 * found.at.stages, 0) * OF_CHUNK;
        for (int product = QKV; product < PRODUCTS; product++) {
          const ProductParts of_product = parts_of(s, product, product % 2 ? other : slots, chunks);
          cost += of_product.cost, found.sharing[product] = of_product.sharing;
        }
        if (cost < least) best = found, least = cost;
      }
  return best;
}

// The same, of each number of rows for the sizes that were asked for last: to weigh takes a millisecond.
const Layout& layout_of(const trirun_cuda_step& s) {
  struct Known {
    std::array<int64_t, 12> sizes;
    Layout layout;
  };
  thread_local Known known[MAX_ROWS + 1]{};
  const std::array<int64_t, 12> sizes = {s.layer_count, s.hidden,     s.ffn,  s.heads,   s.kv_heads,  s.head_dim,
                                         s.act_bits,    s.int8_cache, s.ctas, s.cluster, s.in_flight, rows_of_item(s)};
  Known& of_rows = known[s.m];
  if (of_rows.sizes != sizes) of_rows = {sizes, weighed(s)};
  return of_rows.layout;
}

// Where the messages of each kind begin, in words of 16 bytes behind the counters; the last entry is the end.
struct Messages {
  int64_t x_attention, x_attention_headers, x_mlp, x_mlp_headers, qkv, partial, attended, attended_headers, gated,
      gated_headers, end;

  explicit Messages(const trirun_cuda_step& s) {
    int64_t at = 16;
    const auto take = [&](int64_t words_of_row, int64_t headers = 0) {
      const int64_t start = at;
      at += s.m * words_of_row + HEADER_WORDS * headers;
      return start;
    };
    const int64_t group = s.heads / s.kv_heads, q_words = s.heads * s.head_dim / 4;
    x_attention = take(s.hidden / 4), x_attention_headers = take(0, s.hidden / N_TILE);
    x_mlp = take(s.hidden / 4), x_mlp_headers = take(0, s.hidden / N_TILE);
    qkv = take((s.heads + 2 * s.kv_heads) * s.head_dim / 4);
    partial = take(s.kv_heads * MAX_SPLITS * group * (s.head_dim / 4 + 1));
    attended = take(q_words), attended_headers = take(0, s.kv_heads * MAX_SPLITS * JOINERS);
    gated = take(s.ffn / 4), gated_headers = take(0, s.ffn / N_TILE);
    end = at;
  }
};

}  // namespace
}  // namespace trirun::step

extern "C" size_t trirun_cuda_step_messages(const trirun_cuda_step* s) {
  using namespace trirun::step;
  if (s == nullptr || check_sizes(*s)) return 0;
  return layout_of(*s).at.stages == 0 ? 0 : static_cast<size_t>(Messages(*s).end) * 16;
}

extern "C" int trirun_cuda_step_ctas(const trirun_cuda_step* s) {
  using namespace trirun;
  using namespace trirun::step;
  if (s == nullptr || check_sizes(*s)) return 0;
  Launch how{dim3(static_cast<unsigned>(s->cluster)), THREADS, MAX_SHARED, nullptr, false, s->cluster};
  int clusters = 0;
  return resident_clusters(kernel_of(*s), how, clusters) == TRIRUN_OK ? clusters * s->cluster : 0;
}

extern "C" int trirun_cuda_decoder_step(const trirun_cuda_step* s, void* stream) {
  using namespace trirun;
  using namespace trirun::step;
  if (s == nullptr) return TRIRUN_BAD_POINTER;
  if (const int code = check_sizes(*s)) return code;
  if (const int code = check_pointers(*s)) return code;
  if (const int code = check_plan(*s)) return code;
  const Messages messages(*s);
  if (s->messages == nullptr || !decoder::aligned_to(s->messages, 256)) return TRIRUN_BAD_POINTER;
  if (s->message_bytes < static_cast<size_t>(messages.end) * 16) return TRIRUN_NO_WORKSPACE;
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  if (facts.arch != 90) return TRIRUN_UNSUPPORTED;
  if (s->ctas > facts.sms) return TRIRUN_BAD_SHAPE;
  StepArgs args{};
  static_cast<Layout&>(args) = layout_of(*s), args.s = *s;
  if (args.at.stages == 0) return TRIRUN_BAD_SHAPE;
  if (s->embedding == nullptr) args.packed = *s->packed;
  args.counter = static_cast<uint32_t*>(s->messages), args.status = args.counter + 1;
  auto* words = static_cast<float4*>(s->messages);
  args.x_attention = words + messages.x_attention, args.x_attention_headers = words + messages.x_attention_headers;
  args.x_mlp = words + messages.x_mlp, args.x_mlp_headers = words + messages.x_mlp_headers;
  args.qkv = words + messages.qkv, args.partial = words + messages.partial;
  args.attended = words + messages.attended, args.attended_headers = words + messages.attended_headers;
  args.gated = words + messages.gated, args.gated_headers = words + messages.gated_headers;
  for (int product = QKV; product < PRODUCTS; product++) {
    args.n_tiles[product] = n_tiles_of(*s, product);
    for (int rank = 0; rank <= s->cluster; rank++)
      args.first_k_tiles[product][rank] = k_tiles_of(*s, product) * rank / s->cluster;
    const int clusters = s->ctas / s->cluster;
    std::copy_n(s->plan + product * (clusters + 1), clusters + 1, args.first_units[product]);
  }
  args.tokens_log = log2_of(static_cast<int>(s->m)), args.cluster_log = log2_of(s->cluster);
  args.group = static_cast<int>(s->heads / s->kv_heads), args.key_heads_of_head = 1.f / static_cast<float>(args.group);
  args.head_words_log = log2_of(s->head_dim / 4);
  const bool several = rows_of_item(*s) > 1;
  args.item_rows_log = log2_of(rows_of_item(*s)), args.columns = columns_of(*s);
  args.row_columns_log = several ? log2_of(args.group) : 30;
  args.row_words_log = several ? args.row_columns_log + args.head_words_log : 30;
  Launch how{dim3(static_cast<unsigned>(s->ctas)), THREADS, args.at.total,
             static_cast<cudaStream_t>(stream),    true,    s->cluster};
  how.cooperative = true;
  return launch_kernel(kernel_of(*s), how, args);
}
