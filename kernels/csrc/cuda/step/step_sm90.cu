// The kernel of a whole decode step, and its launch. step.cuh says how it is divided among CTAs.
//
// A layer is five phases: q | k | v, attention, its output projection, gate | up, down. Each takes its input from
// messages, and the stream goes on through all of them: while CTAs wait for each other, the weights, keys and values of
// what follows arrive. Few bytes may be on their way at a time (`in_flight` chunks), or messages queue behind them.
#include "attend.cuh"
#include "product.cuh"

#include <algorithm>

namespace trirun::step {
namespace {

// One thread: everything that this CTA reads of weights and caches, in the order in which it is needed.
template <int HD, int ELEMENT>
__device__ __forceinline__ void stream(const Cta& c) {
  const trirun_cuda_step& s = c.a.s;
  const int stages = c.a.at.stages;
  const uint64_t once = evict_first_policy();
  Ring filled{}, landed{};
  int on_way = 0;
  const auto next_stage = [&](uint32_t bytes) {
    barrier_wait(c.empty(filled.stage), filled.phase ^ 1);
    if (on_way == s.in_flight)
      barrier_wait(c.full(landed.stage), landed.phase), landed.advance(stages);
    else
      on_way++;
    barrier_expect(c.full(filled.stage), bytes);
  };
  const auto product = [&](int which, const trirun_int2& weight) {
    const Geometry& g = c.geometry(which);
    const int tile_k = static_cast<int>(weight.k) / K_TILE, parts = which == GATE_UP ? 2 : 1;
#pragma unroll 1
    for (int tile = 0; tile < g.units * parts; tile++) {
      const int n_tile = g.first + (parts == 2 ? tile / 2 + (tile & 1) * (g.n_tiles / 2) : tile);
      const auto* from = reinterpret_cast<const uint8_t*>(weight.words) +
                         (static_cast<int64_t>(n_tile) * tile_k + g.half) * WORD_TILE_BYTES;
#pragma unroll 1
      for (int k_tile = 0; k_tile < g.k_tiles; k_tile += CHUNK_K_TILES) {
        const uint32_t bytes = min(CHUNK_K_TILES, g.k_tiles - k_tile) * WORD_TILE_BYTES;
        next_stage(bytes);
        bulk_load(c.shared + filled.stage * CHUNK_BYTES, from + k_tile * WORD_TILE_BYTES, bytes, c.full(filled.stage),
                  once);
        filled.advance(stages);
      }
    }
  };
  const auto cache = [&](const trirun_cuda_step_layer& layer) {
    constexpr int POSITIONS = CHUNK_POSITIONS<HD, ELEMENT>;
#pragma unroll 1
    for (int i = 0; i < c.item_count(); i++) {
      const Item& item = c.items()[i];
      const int32_t* table = s.block_tables + item.slot * s.ld_blocks;
#pragma unroll 1
      for (int chunk = item.first; chunk < item.last; chunk++) {
        const int position = chunk * POSITIONS;
        const int64_t at = decoder::cache_offset(__ldg(table + position / decoder::PAGE), static_cast<int>(s.kv_heads),
                                                 item.kv_head, position, HD * ELEMENT_BYTES<ELEMENT>);
        next_stage(CHUNK_BYTES);
        const uint32_t to = c.shared + filled.stage * CHUNK_BYTES, barrier = c.full(filled.stage);
        bulk_load(to, static_cast<const uint8_t*>(layer.keys) + at, CHUNK_BYTES / 2, barrier, once);
        bulk_load(to + CHUNK_BYTES / 2, static_cast<const uint8_t*>(layer.values) + at, CHUNK_BYTES / 2, barrier, once);
        filled.advance(stages);
      }
    }
  };
  for (int i = 0; i < s.layer_count; i++) {
    const trirun_cuda_step_layer& layer = c.layer(i);
    product(QKV, layer.qkv);
    cache(layer);
    product(O, layer.o);
    product(GATE_UP, layer.gate_up);
    product(DOWN, layer.down);
  }
}

__device__ __forceinline__ void plan_product(const Cta& c, int product, int cluster, int clusters) {
  const trirun_cuda_step& s = c.a.s;
  const int32_t* starts = s.plan + product * (clusters + 1) + cluster;
  const int q_size = static_cast<int>(s.heads) * s.head_dim, kv_size = static_cast<int>(s.kv_heads) * s.head_dim;
  const int hidden = static_cast<int>(s.hidden), ffn = static_cast<int>(s.ffn), rows = static_cast<int>(s.m);
  const int k = product == O ? q_size : product == DOWN ? ffn : hidden;
  const int n = product == QKV ? q_size + 2 * kv_size : product == GATE_UP ? 2 * ffn : hidden;
  const int k_tiles = k / K_TILE, low = (k_tiles + 1) / 2, pairs = product == GATE_UP ? 2 : 1;
  Geometry g;
  g.first = starts[0], g.units = starts[1] - starts[0], g.n_tiles = n / N_TILE;
  // A half of k: rank 0 has the larger one.
  g.half = c.rank() == 0 ? 0 : low, g.k_tiles = c.rank() == 0 ? low : k_tiles - low;
  // Of the larger half, so that both CTAs of a cluster have the same rounds.
  const int most_chunks = (low + CHUNK_K_TILES - 1) / CHUNK_K_TILES;
  g.tile_chunks = (g.k_tiles + CHUNK_K_TILES - 1) / CHUNK_K_TILES;
  // As many units at once as there are slots and tasks for.
  g.round = max(1, min(min(SLOTS / rows / (most_chunks * pairs), WARPS / 2 / rows), max(g.units, 1)));
  const int chunks = g.round * pairs * g.tile_chunks;
  int most = 0;
  while (most < 2 && (chunks << (most + 1)) * rows <= SLOTS) most++;
  g.sharing = sharing_log(chunks, most);
  reinterpret_cast<Geometry*>(c.memory + c.a.at.plan)[product] = g;
}

template <int LIMBS, int SCALE, int HD, int GP, int ELEMENT>
__global__ void __launch_bounds__(THREADS, 1) decode_step(const __grid_constant__ StepArgs a) {
  extern __shared__ __align__(1024) uint8_t memory[];
  using M = Multiplier<LIMBS, SCALE>;
  const trirun_cuda_step& s = a.s;
  Cta c(a, memory);
  const int lane = c.lane(), warp = c.warp(), rank = c.rank(), rows = 1 << a.tokens_log;
  const int clusters = gridDim.x / 2, cluster = blockIdx.x / 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < a.at.stages; i++) barrier_init(c.full(i), 1), barrier_init(c.empty(i), WARPS / 4);
    barrier_init(c.exchange_barrier(), 1);
    const uint64_t end = global_nanoseconds() + PATIENCE;
    store_shared2(c.patience().deadline, static_cast<uint32_t>(end), static_cast<uint32_t>(end >> 32));
    barrier_init_fence();
    fence_async_shared();
  }
  if (threadIdx.x < PRODUCTS) plan_product(c, threadIdx.x, cluster, clusters);
  if (threadIdx.x == 32) plan_items<HD, ELEMENT>(c);
  const int words = static_cast<int>(s.layer_count * sizeof(trirun_cuda_step_layer) / 8);
  for (int i = threadIdx.x; i < words; i += THREADS)
    reinterpret_cast<uint64_t*>(memory + a.at.layers)[i] = reinterpret_cast<const uint64_t*>(s.layers)[i];
  const uint32_t base = *reinterpret_cast<volatile uint32_t*>(a.counter);
  __syncthreads();
  cluster_arrive();
  cluster_wait();

  if (warp >= WARPS) {
    decrease_registers<STREAM_REGISTERS>();
    if (threadIdx.x == WARPS * 32) stream<HD, ELEMENT>(c);
    __syncwarp();
  } else {
    increase_registers<REGISTERS>();
    // The residual stream of this CTA's rows, and the first layer's input.
    const int tile0 = c.geometry(O).first, tiles = c.geometry(O).units;
    for (int i = warp; i < tiles * rows; i += WARPS) {
      const int tile = i / rows, row = i % rows, n = (tile0 + tile) * 64 + rank * 32 + lane;
      const float v = s.residual[row * s.hidden + n];
      c.floats(a.at.residual)[i * 32 + lane] = v;
      const float sent = v * __ldg(c.layer(0).attention_norm + n);
      send_lanes(a.x_attention + (row * s.hidden + n - lane) / 4, sent, tag_of(base));
      c.send_header(a.x_attention_headers + (row * s.hidden + n) / 32, v, sent, tag_of(base));
    }
    const int hidden = static_cast<int>(s.hidden), q_size = static_cast<int>(s.heads * HD);
    for (int i = 0; i < s.layer_count; i++) {
      const trirun_cuda_step_layer& layer = c.layer(i);
#pragma unroll 1
      for (int product = QKV; product < PRODUCTS; product++) {
        Input in{a.x_attention, a.x_attention_headers, hidden, hidden / 32, true};
        if (product == O)
          in = {a.attended, a.attended_headers, q_size, static_cast<int>(s.kv_heads) * s.splits,
                layer.attention_sub_norm != nullptr};
        if (product == GATE_UP) in.words = a.x_mlp, in.headers = a.x_mlp_headers;
        if (product == DOWN)
          in = {a.gated, a.gated_headers, static_cast<int>(s.ffn), static_cast<int>(s.ffn / 32),
                layer.mlp_sub_norm != nullptr};
        M::run(c, i, product, in, tag_of(base + i), tag_of(base + i + 1));
        if (product == QKV) Attention<HD, GP, ELEMENT>::run(c, i, tag_of(base + i));
      }
    }
    // The final norm, of this CTA's rows.
    meet();
    const uint32_t last = tag_of(base + static_cast<uint32_t>(s.layer_count));
    float* factors = c.floats(a.at.factors);
    if (warp < rows) {
      const Cta::Row r = c.headers(a.x_attention_headers + warp * (hidden / 32), hidden / 32, last);
      if (lane == 0) factors[warp] = rsqrtf(r.squares / hidden + s.eps);
    }
    meet();
    const bool failed = *reinterpret_cast<volatile uint32_t*>(a.status) != 0;
    for (int i = warp; i < tiles * rows; i += WARPS) {
      const int tile = i / rows, row = i % rows, n = (tile0 + tile) * 64 + rank * 32 + lane;
      const float y = c.floats(a.at.residual)[i * 32 + lane] * factors[row] * __ldg(s.final_norm + n);
      store_element(s.y, row * s.hidden + n, failed ? NAN : y, s.dtype);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.counter = base + static_cast<uint32_t>(s.layer_count) + 1;
  }
  // A CTA's shared memory is there until the other one has written to it.
  __syncthreads();
  cluster_arrive();
  cluster_wait();
}

using Kernel = void (*)(StepArgs);

template <int LIMBS, int SCALE, int ELEMENT>
Kernel of_heads(const trirun_cuda_step& s) {
  const bool alone = s.heads == s.kv_heads;
  switch (s.head_dim) {
    case 64: return alone ? decode_step<LIMBS, SCALE, 64, 1, ELEMENT> : decode_step<LIMBS, SCALE, 64, 4, ELEMENT>;
    case 128: return alone ? decode_step<LIMBS, SCALE, 128, 1, ELEMENT> : decode_step<LIMBS, SCALE, 128, 4, ELEMENT>;
    default: return nullptr;
  }
}

template <int LIMBS, int SCALE>
Kernel of_elements(const trirun_cuda_step& s) {
  if (s.int8_cache) return of_heads<LIMBS, SCALE, INT8>(s);
  return s.dtype == TRIRUN_BF16 ? of_heads<LIMBS, SCALE, BF16>(s) : of_heads<LIMBS, SCALE, FP16>(s);
}

Kernel kernel_of(const trirun_cuda_step& s) {
  if (s.real_zeros) return nullptr;
  const bool groups = s.group_size == 128;
  if (s.act_bits == TRIRUN_ACT8) return s.group_size == -1 ? of_elements<1, gemm_decode::PER_CHANNEL>(s) : nullptr;
  if (s.m > 4) return nullptr;
  if (groups) return of_elements<2, gemm_decode::PER_K_TILE_PLAIN>(s);
  return s.group_size == -1 ? of_elements<2, gemm_decode::PER_CHANNEL>(s) : nullptr;
}

int rounded(int64_t bytes) { return static_cast<int>((bytes + 127) / 128 * 128); }

// What the kernel has no check for.
int check_sizes(const trirun_cuda_step& s) {
  if (s.m < 1 || s.m > MAX_ROWS || (s.m & (s.m - 1)) || s.layer_count < 1 || s.layer_count > MAX_LAYERS ||
      s.hidden <= 0 || s.hidden % 128 || s.ffn <= 0 || s.ffn % 128 || s.heads <= 0 || s.kv_heads <= 0 ||
      s.heads % s.kv_heads || s.heads / s.kv_heads > MAX_GROUP || s.head_dim <= 0 || s.head_dim % 64 ||
      s.heads * s.head_dim % 128 || s.kv_heads * s.head_dim % 64 || s.ctas < 2 || s.ctas % 2 || s.splits < 1 ||
      s.splits > MAX_SPLITS || s.splits > s.ctas || s.m * s.kv_heads > s.ctas / s.splits * MAX_ITEMS ||
      s.in_flight < 1 || s.rotary_half < 0 || 2 * s.rotary_half > s.head_dim || s.max_tiles < 1 ||
      s.hidden > (1 << 20) || s.ffn > (1 << 20))
    return TRIRUN_BAD_SHAPE;
  if (!decoder::half_dtype(s.dtype) || (s.act_bits != TRIRUN_ACT8 && s.act_bits != TRIRUN_ACT16))
    return TRIRUN_UNSUPPORTED;
  return kernel_of(s) == nullptr ? TRIRUN_UNSUPPORTED : TRIRUN_OK;
}

int check_pointers(const trirun_cuda_step& s) {
  for (const void* p : {static_cast<const void*>(s.layers), static_cast<const void*>(s.residual),
                        static_cast<const void*>(s.y), static_cast<const void*>(s.final_norm),
                        static_cast<const void*>(s.slots), static_cast<const void*>(s.positions),
                        static_cast<const void*>(s.block_tables), static_cast<const void*>(s.plan)})
    if (p == nullptr) return TRIRUN_BAD_POINTER;
  return s.rotary_half > 0 && (s.cosines == nullptr || s.sines == nullptr) ? TRIRUN_BAD_POINTER : TRIRUN_OK;
}

Memory memory_of(const trirun_cuda_step& s) {
  const int rows = static_cast<int>(s.m), limbs = s.act_bits / 8, group = static_cast<int>(s.heads / s.kv_heads);
  const int64_t widest = std::max({s.hidden, s.ffn, s.heads * s.head_dim});
  const int k_tiles = static_cast<int>(widest / K_TILE + 1) / 2;
  const int heads = heads_of_warp(group, s.head_dim);
  Memory at{};
  int end = 0;
  const auto take = [&](int64_t bytes) {
    const int start = end;
    end += rounded(bytes);
    return start;
  };
  at.slots = take(std::max(SLOTS * 64 * 4, (WARPS * heads * (s.head_dim + 4) + MAX_GROUP * WARPS) * 4));
  at.limbs = take(static_cast<int64_t>(k_tiles) * K_TILE * rows * limbs);
  at.scales = take(static_cast<int64_t>(k_tiles) * rows * 8);
  at.exchange = take(2 * WARPS * 32 * 4);
  at.residual = take(s.max_tiles * rows * 32 * 4);
  at.factors = take((2 * MAX_ROWS + 2 * WARPS) * 4 + 8);
  at.heads = take((head_groups(group, s.head_dim) * heads + 2) * static_cast<int64_t>(s.head_dim) * 4);
  at.plan = take(PRODUCTS * sizeof(Geometry) + MAX_ITEMS * sizeof(Item) + 4);
  at.layers = take(s.layer_count * static_cast<int64_t>(sizeof(trirun_cuda_step_layer)));
  constexpr int BARRIERS = 1024;
  at.barriers = take(BARRIERS);
  at.stages = std::min((MAX_SHARED - end) / CHUNK_BYTES, (BARRIERS / 8 - 1) / 2);
  const int ring = at.stages * CHUNK_BYTES;
  for (int* offset : {&at.slots, &at.limbs, &at.scales, &at.exchange, &at.residual, &at.factors, &at.heads, &at.plan,
                      &at.layers, &at.barriers})
    *offset += ring;
  at.total = end + ring;
  return at;
}

// Where the messages of each kind begin, in words of 16 bytes behind the counters; the last entry is the end.
struct Messages {
  int64_t x_attention, x_attention_headers, x_mlp, x_mlp_headers, qkv, partial, attended, attended_headers, gated,
      gated_headers, end;

  explicit Messages(const trirun_cuda_step& s) {
    int64_t at = 16;
    const auto take = [&](int64_t words) {
      const int64_t start = at;
      at += s.m * words;
      return start;
    };
    const int64_t group = s.heads / s.kv_heads, q_words = s.heads * s.head_dim / 4;
    x_attention = take(s.hidden / 4), x_attention_headers = take(s.hidden / 32);
    x_mlp = take(s.hidden / 4), x_mlp_headers = take(s.hidden / 32);
    qkv = take((s.heads + 2 * s.kv_heads) * s.head_dim / 4);
    partial = take(s.kv_heads * s.splits * group * (s.head_dim / 4 + 1));
    attended = take(q_words), attended_headers = take(s.kv_heads * s.splits);
    gated = take(s.ffn / 4), gated_headers = take(s.ffn / 32);
    end = at;
  }
};

}  // namespace
}  // namespace trirun::step

extern "C" size_t trirun_cuda_step_messages(const trirun_cuda_step* s) {
  using namespace trirun::step;
  return s == nullptr || check_sizes(*s) ? 0 : static_cast<size_t>(Messages(*s).end) * 16;
}

extern "C" int trirun_cuda_decoder_step(const trirun_cuda_step* s, void* stream) {
  using namespace trirun;
  using namespace trirun::step;
  if (s == nullptr) return TRIRUN_BAD_POINTER;
  if (const int code = check_sizes(*s)) return code;
  if (const int code = check_pointers(*s)) return code;
  const Messages messages(*s);
  if (s->messages == nullptr || !decoder::aligned_to(s->messages, 256)) return TRIRUN_BAD_POINTER;
  if (s->message_bytes < static_cast<size_t>(messages.end) * 16) return TRIRUN_NO_WORKSPACE;
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  if (facts.arch != 90) return TRIRUN_UNSUPPORTED;
  if (s->ctas > facts.sms) return TRIRUN_BAD_SHAPE;
  StepArgs args{};
  args.s = *s, args.at = memory_of(*s);
  if (args.at.stages < 8) return TRIRUN_BAD_SHAPE;
  args.s.in_flight = std::min(s->in_flight, args.at.stages);
  args.counter = static_cast<uint32_t*>(s->messages), args.status = args.counter + 1;
  auto* words = static_cast<float4*>(s->messages);
  args.x_attention = words + messages.x_attention, args.x_attention_headers = words + messages.x_attention_headers;
  args.x_mlp = words + messages.x_mlp, args.x_mlp_headers = words + messages.x_mlp_headers;
  args.qkv = words + messages.qkv, args.partial = words + messages.partial;
  args.attended = words + messages.attended, args.attended_headers = words + messages.attended_headers;
  args.gated = words + messages.gated, args.gated_headers = words + messages.gated_headers;
  while (1 << args.tokens_log < s->m) args.tokens_log++;
  args.group = static_cast<int>(s->heads / s->kv_heads);
  while (1 << args.lanes_log < s->splits) args.lanes_log++;
  args.share = static_cast<int>(s->heads / s->kv_heads * s->head_dim / 4 + s->splits - 1) / s->splits;
  Launch how{dim3(static_cast<unsigned>(s->ctas)), THREADS, args.at.total, static_cast<cudaStream_t>(stream), false, 2};
  how.cooperative = true;
  return launch_kernel(kernel_of(*s), how, args);
}
