// Attention of the step, on tensor cores: keys and values come through the stream, a chunk of neighbouring positions of
// one key head at a time. A warp takes 16 positions and up to eight query heads: keys times queries, their weights,
// transposed values times weights. Queries and weights are two numbers of 16 bits each, so that what is rounded is what
// the cache holds; of up to four heads (PACKED) both are in the eight columns of one product. For a cache of 8 bits
// queries are two bytes each, and keys are multiplied as they are. join.cuh puts together what warps have of it.
#pragma once

#include "division.cuh"
#include "join.cuh"
#include "cuda/decoder/int8.cuh"

namespace trirun::step {

template <int HD, int ELEMENT, bool PACKED, typename Cta>
struct Attention {
  static constexpr bool CODES = ELEMENT == INT8;
  using Half = std::conditional_t<ELEMENT == BF16, __nv_bfloat16, __half>;
  static constexpr int BYTES = ELEMENT_BYTES<ELEMENT>, ROW = HD * BYTES;
  static constexpr int POSITIONS = CHUNK_POSITIONS<HD, ELEMENT>, TILE = TILE_POSITIONS;
  static constexpr int SPAN = SPAN_POSITIONS<HD, ELEMENT>, TILES = SPAN / TILE, CHUNKS = SPAN / POSITIONS;  // of a span
  // Dimensions of values that a warp has: of more, two warps side by side.
  static constexpr int OWN = std::min(HD, OWN_DIMENSIONS);
  static_assert(HD <= 256 && TILES * TILE == SPAN && CHUNKS <= 2);

  // Of a tile of a chunk, a lane q takes positions 4 tile to 4 tile + 3 of each quarter q of the chunk: k = 2q, 2q + 1,
  // 2q + 8 and 2q + 9 of the products. Of two chunks, the first two of these are of the first one.
  __device__ __forceinline__ static int position_of(int tile, int k) {
    if constexpr (CHUNKS == 2) return k;
    return k % 8 / 2 * (POSITIONS / 4) + tile * (TILE / 4) + k / 8 * 2 + k % 2;
  }
  // A position of a span within its chunk.
  __device__ __forceinline__ static int within_chunk(int position) {
    return CHUNKS == 2 ? position % POSITIONS : position;
  }
  // Values are in blocks with some bytes between them, so that lanes find quarters of a chunk in other banks.
  __device__ __forceinline__ static uint32_t value_offset(uint32_t position) {
    return position * ROW + position / (POSITIONS / VALUE_BLOCKS) * BLOCK_PADDING;
  }

  // Of heads 2q and 2q + 1 of the warp's (q: lane % 4): maximum, and this lane's sum of weights; values of dimensions
  // 64 (t / 4) + 8 (lane / 4) + 2 (t % 4) and + 1. PACKED: q is lane % 2, and lanes 2 and 3 of four have values by
  // weights' low parts.
  float highest[2], weight[2], value[OWN / 16][4];

  __device__ __forceinline__ void clear() {
    highest[0] = highest[1] = NOTHING, weight[0] = weight[1] = 0.f;
#pragma unroll
    for (int t = 0; t < OWN / 16; t++)
#pragma unroll
      for (int i = 0; i < 4; i++) value[t][i] = 0.f;
  }

  // Of lanes with the same heads.
  __device__ __forceinline__ static float highest_of_lanes(float score) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) score = fmaxf(score, __shfl_xor_sync(~0u, score, offset));
    return score;
  }

  // Two numbers as halves, and what that leaves of them.
  __device__ __forceinline__ static void split_pair(uint32_t& high, uint32_t& low, float a, float b) {
    constexpr bool WIDE = ELEMENT == BF16;
    high = decoder::narrow_pair<WIDE>(a, b);
    const float2 kept = decoder::widen_pair<WIDE>(high);
    low = decoder::narrow_pair<WIDE>(a - kept.x, b - kept.y);
  }

  // Eight elements as pairs of halves; of 8 bits exactly: a byte of v + 128 is the lowest of the half 1024.
  __device__ __forceinline__ static void load_eight(uint32_t (&to)[4], uint32_t from) {
    if constexpr (CODES) {
      const uint2 words = load_shared2(from);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const uint32_t raised = (i < 2 ? words.x : words.y) ^ 0x80808080u;
        const uint32_t pair = __byte_perm(raised, 0x64646464u, i % 2 ? 0x4342 : 0x4140), offset = 0x64806480u;
        const __half2 codes =
            __hsub2(*reinterpret_cast<const __half2*>(&pair), *reinterpret_cast<const __half2*>(&offset));
        to[i] = *reinterpret_cast<const uint32_t*>(&codes);
      }
    } else {
      const uint4 words = load_shared4(from);
      to[0] = words.x, to[1] = words.y, to[2] = words.z, to[3] = words.w;
    }
  }

  // Of a query in shared memory: bytes from its high parts to its low ones, and to the next query. Of CODES a part is a
  // byte, not a half, and behind both is their scale; neighbouring queries are in other banks.
  static constexpr int QUERY_LOW = CODES ? HD : (HD + 8) * 2, QUERY_BYTES = CODES ? 2 * HD + 64 : 2 * QUERY_LOW + 16;

  // Keys of two positions times a column of queries. Addresses of this lane's part of their dimensions.
  __device__ __forceinline__ static void score(float (&c)[4], uint32_t key0, uint32_t key1, uint32_t query) {
    const int q = lane_anew() % 4;
    float other[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int i = 0; i < 4; i++) c[i] = 0.f;
#pragma unroll
    for (int i = 0; i < HD / 32; i++) {
      const int unit = HD == 256 ? i ^ (2 * q) : HD == 128 ? i ^ (q & 2) : i;  // other banks for other lanes
      const uint4 a = load_shared4(key0 + unit * 16), b = load_shared4(key1 + unit * 16);
#pragma unroll
      for (int low = 0; low < (PACKED ? 1 : 2); low++) {
        const uint4 of_query = load_shared4(query + low * QUERY_LOW + unit * 16);
        mma_16bit<Half>(c, {a.x, b.x, a.y, b.y}, of_query.x, of_query.y);
        mma_16bit<Half>(other, {a.z, b.z, a.w, b.w}, of_query.z, of_query.w);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
      c[i] += other[i];
      if constexpr (PACKED) c[i] += __shfl_xor_sync(~0u, c[i], 2);
    }
  }

  // The same of codes, as they are: 16 bytes of every 64 are a lane's. queries: of the warp's first head.
  __device__ __forceinline__ static void score_codes(float (&c)[4], uint32_t key0, uint32_t key1, uint32_t query,
                                                     uint32_t queries, int heads) {
    const int lane = lane_anew();
    int sum[PACKED ? 1 : 2][4] = {};
#pragma unroll
    for (int i = 0; i < HD / 64; i++) {
      const uint4 a = load_shared4(key0 + i * 64), b = load_shared4(key1 + i * 64);
#pragma unroll
      for (int low = 0; low < (PACKED ? 1 : 2); low++) {
        const uint4 of_query = load_shared4(query + low * QUERY_LOW + i * 64);
        mma_s8(sum[low], a.x, b.x, a.y, b.y, of_query.x, of_query.y);
        mma_s8(sum[low], a.z, b.z, a.w, b.w, of_query.z, of_query.w);
      }
    }
    float scale[2];
#pragma unroll
    for (int h = 0; h < 2; h++)
      scale[h] = load_shared_float(queries + min(head_of(lane) + h, heads - 1) * QUERY_BYTES + 2 * HD);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int all;
      if constexpr (PACKED) {
        const int other = __shfl_xor_sync(~0u, sum[0][i], 2);
        all = lane & 2 ? 256 * other + sum[0][i] : 256 * sum[0][i] + other;
      } else {
        all = 256 * sum[0][i] + sum[1][i];
      }
      c[i] = static_cast<float>(all) * scale[i % 2];
    }
  }

  // 16 positions. keys, values: shared addresses of a span's first chunk, of values the warp's own dimensions; next:
  // bytes to its second chunk; queries: of the warp's first head; heads: of the warp; count: positions that the span
  // has. first, second: of CODES the scales (of key, of value) of this lane's two keys. fresh: there were none before.
  __device__ __forceinline__ void add(uint32_t keys, uint32_t values, uint32_t next, int tile, uint32_t queries,
                                      int heads, int count, const Item& span, bool stored, float2 first, float2 second,
                                      bool fresh) {
    const int lane = lane_anew(), g = lane / 4, q = lane % 4;
    float c[4];
    // Positions that are not there are read as the last one that is, since memory may hold anything.
    const int position0 = position_of(tile, g), position1 = position_of(tile, g + 8);
    const auto chunk_of = [&](int position) { return CHUNKS == 2 && position >= POSITIONS ? next : 0; };
    const auto key_of = [&](int position) {
      const int there = min(position, count - 1);
      return keys + chunk_of(there) + within_chunk(there) * ROW;
    };
    const uint32_t key0 = key_of(position0), key1 = key_of(position1);
    const uint32_t query =
        queries + min(PACKED ? g % 4 : g, heads - 1) * QUERY_BYTES + (PACKED ? g / 4 * QUERY_LOW : 0);
    if constexpr (CODES)
      score_codes(c, key0 + q * 16, key1 + q * 16, query + q * 16, queries, heads);
    else
      score(c, key0 + q * (ROW / 4), key1 + q * (ROW / 4), query + q * (HD / 2));
    float kept[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      int seen = count;
      if (!Cta::ONE_ROW && !stored) {
        const int row = min(head_of(lane) + h, heads - 1) >> span.row_columns_log;
        seen = newest_positions(POSITIONS, span.fresh - (span.last_row - row));
      }
      const bool there0 = position0 < seen, there1 = position1 < seen;
      if constexpr (CODES) c[h] *= first.x, c[2 + h] *= second.x;
      float most = fmaxf(highest[h], fmaxf(there0 ? c[h] : NOTHING, there1 ? c[2 + h] : NOTHING));
      most = highest_of_lanes(most);
      kept[h] = exp2_approximate(highest[h] - most), highest[h] = most;
      c[h] = there0 ? exp2_approximate(c[h] - most) : 0.f, c[2 + h] = there1 ? exp2_approximate(c[2 + h] - most) : 0.f;
      weight[h] = weight[h] * kept[h] + c[h] + c[2 + h];
      if constexpr (CODES) c[h] *= first.y, c[2 + h] *= second.y;
    }
    // From [position][head] to [head][position].
    uint32_t weights[2], rest[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      split_pair(weights[i], rest[i], c[2 * i], c[2 * i + 1]);
      if (PACKED && q >= 2) weights[i] = rest[i];
      weights[i] = transposed(weights[i]);
      if constexpr (!PACKED) rest[i] = transposed(rest[i]);
    }
    if (!fresh) {
#pragma unroll
      for (int t = 0; t < OWN / 16; t++)
#pragma unroll
        for (int i = 0; i < 4; i++) value[t][i] *= kept[i % 2];
    }
    uint32_t at[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int position = min(position_of(tile, 2 * q + i % 2 + i / 2 * 8), count - 1);
      at[i] = values + chunk_of(position) + value_offset(within_chunk(position)) + g * 8 * BYTES;
    }
#pragma unroll
    for (int block = 0; block < OWN / 64; block++) {
      uint32_t v[4][4];
#pragma unroll
      for (int i = 0; i < 4; i++) load_eight(v[i], at[i] + block * 64 * BYTES);
#pragma unroll
      for (int t = 0; t < 4; t++) {
        const uint32_t a[4] = {__byte_perm(v[0][t], v[1][t], 0x5410), __byte_perm(v[0][t], v[1][t], 0x7632),
                               __byte_perm(v[2][t], v[3][t], 0x5410), __byte_perm(v[2][t], v[3][t], 0x7632)};
        mma_16bit<Half>(value[block * 4 + t], a, weights[0], weights[1]);
        if constexpr (!PACKED) mma_16bit<Half>(value[block * 4 + t], a, rest[0], rest[1]);
      }
    }
  }

  // The first of a lane's heads.
  __device__ __forceinline__ static int head_of(int lane) { return lane % (PACKED ? 2 : 4) * 2; }

  // Of lanes with the same heads, the sums of their weights.
  __device__ __forceinline__ void add_weights() {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2)
#pragma unroll
      for (int h = 0; h < 2; h++) weight[h] += __shfl_xor_sync(~0u, weight[h], offset);
  }

  // This warp's part of each of its heads to shared memory: words from the own-th on, as messages have them, the
  // largest score, and the sum of weights.
  __device__ __forceinline__ void leave(uint32_t to, int own, int heads) {
    const int lane = lane_anew(), g = lane / 4, first = head_of(lane);
    // PACKED: lanes 2 apart have parts of the same values, and add up half of them each.
    constexpr int COUNT = OWN / 16 / (PACKED ? 2 : 1);
    const bool upper = PACKED && lane % 4 >= 2;
    if (upper) own += COUNT / 4 * 16 + COUNT % 4;
#pragma unroll
    for (int h = 0; h < 2; h++) {
      if (h == 1 && heads == 1) break;
      const uint32_t part = to + (first + h) * part_floats(HD) * 4;
      const bool real = first + h < heads;  // or a copy
#pragma unroll
      for (int t = 0; t < COUNT; t++) {
        float pair[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          pair[i] = value[t][2 * i + h];
          if constexpr (PACKED) {
            const float later = value[COUNT + t][2 * i + h];
            pair[i] = (upper ? later : pair[i]) + __shfl_xor_sync(~0u, upper ? pair[i] : later, 2);
          }
        }
        const int word = own + t / 4 * 16 + g / 2 * 4 + t % 4;
        if (real) store_shared2(part + word * 16 + g % 2 * 8, pair[0], pair[1]);
      }
      if (real && g == 0 && !upper) store_shared2(part + HD * 4, highest[h], weight[h]);
    }
  }

  __device__ __forceinline__ static int fresh_of(const Item& span) { return Cta::ONE_ROW ? 1 : span.fresh; }

  // Where the new keys, the new values and, of CODES, their scales are, as the cache would have them.
  __device__ __forceinline__ static uint32_t newest(const Cta& c) { return c.shared + c.a.at.newest; }
  __device__ __forceinline__ static uint32_t newest_values(const Cta& c) {
    return newest(c) + newest_positions(POSITIONS, c.rows()) * ROW;
  }
  __device__ __forceinline__ static uint32_t newest_scales(const Cta& c) {
    return newest_values(c) + newest_positions(POSITIONS, c.rows()) * ROW + NEWEST_PADDING;
  }

  static constexpr int WORDS = HD > 128 ? HD / 128 : 1;  // of four dimensions of a head, of a lane: every 32nd
  // What Hadamard's sums are multiplied by: 1 / sqrt(HD).
  static constexpr float MIXED = !CODES ? 1.f : HD == 64 ? 0.125f : HD == 128 ? 0.0883883476f : 0.0625f;

  // Queries, and for the last split the new key and value, from messages to shared memory, as attention reads them.
  __device__ __forceinline__ static void take_heads(const Cta& c, const trirun_cuda_step_layer& layer, const Item& span,
                                                    bool last, uint32_t tag) {
    const trirun_cuda_step& s = c.a.s;
    const int lane = c.lane(), kv_head = span.kv_head, columns = c.a.columns, fresh = fresh_of(span);
    const int words = static_cast<int>(s.heads + 2 * s.kv_heads) * (HD / 4);
#pragma unroll 1
    for (int i = c.warp(); i < columns + (last ? 2 * fresh : 0); i += WARPS) {
      // Queries, then keys, then values.
      const int part = i < columns ? 0 : i < columns + fresh ? 1 : 2;
      const bool query = part == 0, turned = part < 2;
      // Looked up in the item: from arguments they would be kept for all layers, in local memory.
      const int of_query = Cta::ONE_ROW ? 0 : i >> span.row_columns_log;
      const int to_last = Cta::ONE_ROW ? 0 : span.last_row - of_query;
      const int back = query ? to_last : fresh - 1 - (i - columns - (turned ? 0 : fresh)), row = span.row - back;
      const int position = span.position - (Cta::ONE_ROW ? back : max(back, span.padding));
      const int64_t angles = static_cast<int64_t>(position) * s.rotary_half;
      float* to = c.floats(c.a.at.heads) + c.warp() * HD;
      const float* norm = query ? layer.q_norm : layer.k_norm;
      decoder::HeadConstants<HD / 32> constants;
      constants.load(s.cosines + angles, s.sines + angles, norm, s.rotary_half, HD, s.interleaved != 0, lane);
      const int head = query ? (kv_head - of_query) * c.a.group + i
                             : static_cast<int>(s.heads) + (turned ? 0 : static_cast<int>(s.kv_heads)) + kv_head;
      // Where a key or a value goes: known before it comes.
      const int last_page = (span.position - span.padding) / decoder::PAGE;
      const int page = Cta::ONE_ROW || position / decoder::PAGE == last_page ? span.page : span.first_page;
      const int64_t token = cache_offset(page, static_cast<int>(s.kv_heads), kv_head, position, 1);
      void* in_cache = static_cast<uint8_t*>(turned ? layer.keys : layer.values) + token * ROW;
      forget(in_cache);
      // Lanes beyond a head have what others have.
#pragma unroll
      for (int w = lane % (HD / 4); w < HD / 4; w += 32) {
        const float4 v = reordered(received(c.a.qkv + row * words + head * (HD / 4) + w, tag, c.patience()));
        float* at = to + w / 4 * 16 + w % 4 * 2;
        reinterpret_cast<float2*>(at)[0] = make_float2(v.x, v.y);
        reinterpret_cast<float2*>(at)[4] = make_float2(v.z, v.w);
      }
      __syncwarp();
      if (turned) {
        float part[HD / 32];
#pragma unroll
        for (int j = 0; j < HD / 32; j++) part[j] = to[lane + j * 32];
        __syncwarp();
        decoder::turn(part, to, constants, HD, norm != nullptr, s.eps, s.rotary_half, s.interleaved != 0, lane);
        // Hadamard's sums over the dimensions that a lane has; below, where it has others, over the rest.
        if constexpr (CODES) decoder::mix_own(part, HD / 32);
        const float scale = (query ? s.scale * decoder::LOG2E : 1.f) * MIXED;
#pragma unroll
        for (int j = 0; j < HD / 32; j++) to[lane + j * 32] = part[j] * scale;
        __syncwarp();
      }
      float4 v[WORDS];
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        const auto* words = reinterpret_cast<const float4*>(to);
        const int at = lane % (HD / 4) + w * 32;
        v[w] = CODES && turned ? mixed(words, at) : words[at];
      }
      uint32_t largest = 0;
      if constexpr (CODES) largest = decoder::largest_of_head(v);
      if (query)
        store_query(c.shared + c.a.at.queries + i * QUERY_BYTES, v, largest);
      else
        keep(c, v, largest, layer, span, part - 1, back, in_cache, token);
    }
    meet_after_reading();
  }

  // Hadamard's sums over the dimensions of a lane's word and of the seven words beside it: of four words from shared
  // memory, of which each lane reads all, and of the other four from the lane that has added them up.
  __device__ __forceinline__ static float4 mixed(const float4* words, int at) {
    const auto added = [](float4 a, float4 b, bool minus) {
      const float sign = minus ? -1.f : 1.f;
      return make_float4(fmaf(a.x, sign, b.x), fmaf(a.y, sign, b.y), fmaf(a.z, sign, b.z), fmaf(a.w, sign, b.w));
    };
    const float4 low = added(words[at], words[at ^ 1], at & 1), high = added(words[at ^ 2], words[at ^ 3], at & 1);
    const float4 sum = added(low, high, at & 2);
    float own[] = {sum.x, sum.y, sum.z, sum.w}, other[4];
    decoder::mix_own(own, 4);
#pragma unroll
    for (int i = 0; i < 4; i++) other[i] = __shfl_xor_sync(~0u, own[i], 4);
    return added(make_float4(own[0], own[1], own[2], own[3]), make_float4(other[0], other[1], other[2], other[3]),
                 at & 4);
  }

  // A query to shared memory, as attention reads it: a warp.
  __device__ __forceinline__ static void store_query(uint32_t to, const float4 (&v)[WORDS], uint32_t largest) {
    const int lane = lane_anew();
    const bool there = lane < HD / 4;
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
      const int w = lane + i * 32;
      if constexpr (CODES) {
        const QuantizedKTile q = quantize_k_tile16(v[i], largest);
        if (there) store_shared(to + w * 4, q.limb[0]), store_shared(to + QUERY_LOW + w * 4, q.limb[1]);
        if (w == 0) store_shared(to + 2 * QUERY_LOW, q.scale);
      } else {
        uint2 high, low;
        split_pair(high.x, low.x, v[i].x, v[i].y), split_pair(high.y, low.y, v[i].z, v[i].w);
        if (there) store_shared2(to + w * 8, high.x, high.y), store_shared2(to + QUERY_LOW + w * 8, low.x, low.y);
      }
    }
  }

  // A new key (part 0) or value (part 1), of the row so far back, to shared memory and, of the row itself, to the
  // cache: a warp.
  __device__ __forceinline__ static void keep(const Cta& c, const float4 (&v)[WORDS], uint32_t largest,
                                              const trirun_cuda_step_layer& layer, const Item& span, int part, int back,
                                              void* in_cache, int64_t token) {
    const int lane = c.lane();
    const bool there = lane < HD / 4;
    const int at_newest = newest_positions(POSITIONS, fresh_of(span) - back) - 1;
    const uint32_t own = part == 0 ? newest(c) + at_newest * ROW : newest_values(c) + value_offset(at_newest);
    const bool stored = span.slot >= 0 && (Cta::ONE_ROW || (back >= span.padding && back <= span.last_row));
    if constexpr (CODES) {
      uint32_t code[WORDS];
      const __half scale = decoder::quantize_head(code, v, largest);
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        const int w = lane + i * 32;
        if (there) store_shared(own + w * 4, code[i]);
        if (there && stored) static_cast<uint32_t*>(in_cache)[w] = code[i];
      }
      if (lane == 0) store_shared(newest_scales(c) + at_newest * 8 + part * 4, __half2float(scale));
      if (lane == 0 && stored) static_cast<__half*>(layer.scales)[2 * token + part] = scale;
    } else {
#pragma unroll
      for (int i = 0; i < WORDS; i++) {
        const int w = lane + i * 32;
        const uint2 pair = make_uint2(decoder::narrow_pair<ELEMENT == BF16>(v[i].x, v[i].y),
                                      decoder::narrow_pair<ELEMENT == BF16>(v[i].z, v[i].w));
        if (there) store_shared2(own + w * 8, pair.x, pair.y);
        if (there && stored) static_cast<uint2*>(in_cache)[w] = pair;
      }
    }
  }

  // One item.
  __device__ __forceinline__ static void run(Cta& c) {
    c.begin_phase();
    const trirun_cuda_step& s = c.a.s;
    const int index = c.in_hand().phase / PRODUCTS;
    const trirun_cuda_step_layer& layer = c.layer(index);
    const uint32_t tag = c.tag(index);
    // Neighbouring warps take other dimensions of values, or other query heads. These are computed where they are
    // wanted: there are few registers.
    constexpr int OWN_LOG = owners_log_of(HD);
    const int columns = c.a.columns, sides_log = PACKED ? OWN_LOG : sides_log_of(columns, HD);
    const uint32_t workers = workers_of(c.a, sides_log);
    const auto worker = [&] { return static_cast<uint32_t>(c.warp()) >> sides_log; };
    const auto first_head = [&] {
      return PACKED ? 0 : (c.warp() >> OWN_LOG & ((1 << groups_log_of(columns)) - 1)) * HEADS;
    };
    const auto heads = [&] { return min(columns - first_head(), HEADS); };
    const auto own_values = [&] { return (c.warp() & OWN_LOG) * OWN; };
    const Item& span = c.item();
    const bool last = span.newest;
    const uint32_t tiles = static_cast<uint32_t>(span.last - span.first) * TILES;
    // Of CODES: of keys and values at a lane's two positions of a tile, on their way while they are.
    uint32_t first = 0, second = 0;
    const auto load_scales = [&](uint32_t tile) {
      if (!CODES || tile >= tiles) return;
      const int chunk = tile / TILES, position = (span.first + chunk) * SPAN, last = span.positions - chunk * SPAN - 1;
      const int page = __ldg(s.block_tables + span.slot * s.ld_blocks + position / decoder::PAGE);
      const auto* from = static_cast<const uint32_t*>(layer.scales) +
                         cache_offset(page, static_cast<int>(s.kv_heads), span.kv_head, position, 1);
      const int k = c.lane() / 4, of_chunk = tile % TILES;
      first = __ldg(from + min(position_of(of_chunk, k), last));
      second = __ldg(from + min(position_of(of_chunk, k + 8), last));
    };
    load_scales(worker());
    if (c.in_hand().item > 0) meet();  // the last item's queries have been read
    Ring at = c.in_hand().ring;
    c.move(at, worker() / TILES * CHUNKS);
    at = {kept_anew(at.stage), kept_anew(at.phase)};
    // Whether this warp has a part, as a number: a predicate would be spilled.
    const int parts_left = kept_anew(span.parts - worker());
    take_heads(c, layer, span, last, tag);
    if (parts_left > 0) {
      Attention attention;
      attention.clear();
      uint32_t tile = worker();
      const auto set_free = [&](uint32_t nought) {
        if (c.lane() != 0) return;
        barrier_arrive_counted(c.empty(at.stage) + nought, EMPTY_ARRIVALS / TILES >> sides_log);
        if constexpr (CHUNKS == 2) {
          Ring next = at;
          next.advance(c.a.at.stages);
          barrier_arrive_counted(c.empty(next.stage) + nought, EMPTY_ARRIVALS >> sides_log);
        }
      };
#pragma unroll 1
      for (;;) {
        c.begin_phase();
        // Read for every tile: there is no register to keep it in.
        const int positions = span.positions;
        uint32_t keys = newest(c), values = newest_values(c);
        Ring next_chunk = at;
        int count = newest_positions(POSITIONS, fresh_of(span));
        const bool fresh = tile == worker(), stored = tile < tiles;
        float2 own = decoder::widen_pair<false>(first), other = decoder::widen_pair<false>(second);
        if (CODES && !stored) {
          const auto newest_of = [&](int k) {
            return load_shared_float2(newest_scales(c) + min(position_of(0, k), count - 1) * 8);
          };
          own = newest_of(c.lane() / 4), other = Cta::ONE_ROW ? own : newest_of(c.lane() / 4 + 8);
        }
        if (stored) {
          load_scales(tile + workers);
          keys = c.shared + at.stage * STAGE_BYTES, values = keys + POSITIONS * ROW;
          count = min(positions - static_cast<int>(tile / TILES) * SPAN, SPAN);
          barrier_wait_warp(c.full(at.stage), at.phase);
          if constexpr (CHUNKS == 2)
            next_chunk.advance(c.a.at.stages), barrier_wait_warp(c.full(next_chunk.stage), next_chunk.phase);
        }
        values += own_values() * BYTES;
        const uint32_t next = CHUNKS == 2 ? (next_chunk.stage - at.stage) * STAGE_BYTES : 0;
        attention.add(keys, values, next, stored ? static_cast<int>(tile % TILES) : 0,
                      c.shared + c.a.at.queries + first_head() * QUERY_BYTES, heads(), count, span, stored, own, other,
                      fresh);
        if (tile + workers >= static_cast<uint32_t>(span.tiles)) break;
        // The arrival must not overtake the loads: it depends on what was made of the last ones.
        uint32_t loaded = 0;
#pragma unroll
        for (int i = 0; i < 4; i++) loaded |= __float_as_uint(attention.value[OWN / 16 - 1][i]);
        __syncwarp();
        set_free(loaded & c.a.nought);
        c.move(at, (workers + tile % TILES) / TILES * CHUNKS);
        tile += workers;
      }
      c.begin_phase();
      const int of_warp = min(columns, HEADS) * part_floats(HD) * 4;
      attention.add_weights();
      attention.leave(c.shared + c.a.at.attention + (c.warp() >> OWN_LOG) * of_warp, own_values() / 4, heads());
      if (!c.joins()) have_left();
      // Not before: others wait for the part. What was made of the last loads has been stored by now.
      if (tile < static_cast<uint32_t>(span.tiles - span.newest)) set_free(0);
    } else if (!c.joins()) {
      have_left();
    }
    c.pass((span.last - span.first) * CHUNKS);
  }
};

}  // namespace trirun::step
