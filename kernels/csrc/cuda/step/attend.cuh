// Attention of the step: keys and values come through the stream, a chunk of neighbouring positions of one key head at
// a time; the parts of a row's keys ("splits") are put together by messages.
#pragma once

#include "cta.cuh"
#include "cuda/decoder/int8.cuh"

namespace trirun::step {

constexpr float NOTHING = -1e30f;  // a score below all others, of which differences are numbers

// What the cache has of an element.
enum Element { FP16 = 0, BF16 = 1, INT8 = 2 };
template <int ELEMENT>
constexpr int ELEMENT_BYTES = ELEMENT == INT8 ? 1 : 2;

// Positions of a chunk: as many as fill it with keys and values.
template <int HD, int ELEMENT>
constexpr int CHUNK_POSITIONS = CHUNK_BYTES / (2 * HD * ELEMENT_BYTES<ELEMENT>);

// Eight numbers of 8 bits, exactly: a byte of v + 128 becomes the lowest one of the fp32 number 2^23.
__device__ __forceinline__ void widen_codes(float (&to)[8], uint2 words) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t shifted = (i < 4 ? words.x : words.y) ^ 0x80808080u;
    to[i] = __uint_as_float(__byte_perm(shifted, 0x4b000000u, 0x7440 + i % 4)) - 8388736.f;
  }
}

// What a CTA attends to, one row and key head after another, and with which part of their keys: made once.
template <int HD, int ELEMENT>
__device__ __forceinline__ void plan_items(const Cta& c) {
  const trirun_cuda_step& s = c.a.s;
  const int cta = blockIdx.x, splits = s.splits, stride = static_cast<int>(gridDim.x) / splits;
  const int kv_heads = static_cast<int>(s.kv_heads), all = static_cast<int>(s.m) * kv_heads, split = cta % splits;
  Item* to = const_cast<Item*>(c.items());
  int count = 0;
  // CTAs beyond the last whole group have nothing to do.
  for (int at = cta / splits; cta / splits < stride && at < all; at += stride) {
    Item item;
    item.row = at / kv_heads, item.kv_head = at % kv_heads, item.slot = s.slots[item.row];
    item.position = max(s.positions[item.row], 0), item.length = item.slot < 0 ? 0 : item.position;
    constexpr int POSITIONS = CHUNK_POSITIONS<HD, ELEMENT>;
    const int chunks = (item.length + POSITIONS - 1) / POSITIONS;
    item.split = split;
    item.first = chunks * split / splits, item.last = chunks * (split + 1) / splits;
    item.page = item.slot < 0 ? 0 : s.block_tables[item.slot * s.ld_blocks + item.position / decoder::PAGE];
    to[count++] = item;
  }
  *reinterpret_cast<int*>(to + MAX_ITEMS) = count;
}

template <int HD, int GP, int ELEMENT>
struct Attention {
  static constexpr bool CODES = ELEMENT == INT8;
  static constexpr int LANES = HD / 8;  // that hold a key
  static constexpr int KEYS = 32 / LANES;  // of one load of a warp
  static constexpr int BYTES = ELEMENT_BYTES<ELEMENT>;
  static constexpr int LOAD = KEYS * HD * BYTES;  // bytes of the keys of one load
  static constexpr int POSITIONS = CHUNK_POSITIONS<HD, ELEMENT>;
  static constexpr int PART = HD + 4;  // floats of a part: values, maximum (log2), sum of weights

  // Of CODES, the scales (of key, of value) of a chunk's positions, one to a lane.
  struct Scales {
    uint32_t words[POSITIONS > 32 ? 2 : 1];

    __device__ __forceinline__ float2 of(int position) const {
      uint32_t word = __shfl_sync(~0u, words[0], position % 32);
      if constexpr (POSITIONS > 32) {
        const uint32_t second = __shfl_sync(~0u, words[1], position % 32);
        if (position >= 32) word = second;
      }
      return __half22float2(*reinterpret_cast<const __half2*>(&word));
    }
  };

  float highest[GP], weight[GP], value[GP][8];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int g = 0; g < GP; g++) {
      highest[g] = NOTHING, weight[g] = 0.f;
#pragma unroll
      for (int d = 0; d < 8; d++) value[g][d] = 0.f;
    }
  }

  __device__ __forceinline__ static float dot(const float* query, const float (&key)[8]) {
    const float4 low = reinterpret_cast<const float4*>(query)[0], high = reinterpret_cast<const float4*>(query)[1];
    float s = low.x * key[0];
    s = fmaf(low.y, key[1], s), s = fmaf(low.z, key[2], s), s = fmaf(low.w, key[3], s);
    s = fmaf(high.x, key[4], s), s = fmaf(high.y, key[5], s), s = fmaf(high.z, key[6], s);
    return fmaf(high.w, key[7], s);
  }

  // Over the lanes that hold a key.
  __device__ __forceinline__ static float key_sum(float v) {
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(~0u, v, offset);
    return v;
  }

  // Two keys of each group of lanes. keys, values: shared addresses of the first; query: this lane's dimensions of the
  // warp's first head, in units of log2(e); left: positions from the first key of lane 0 to the end; scales: of the
  // chunk, in which the first key of lane 0 is at `first`.
  __device__ __forceinline__ void add(uint32_t keys, uint32_t values, const float* query, int left,
                                      const Scales& scales, int first) {
    const int group = threadIdx.x % 32 / LANES;
    const bool there[2] = {group < left, KEYS + group < left};
    float score[GP][2];
    float2 scale[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float key[8];
      if constexpr (CODES) {
        scale[i] = scales.of(first + i * KEYS + group);
        widen_codes(key, load_shared2(keys + i * LOAD));
      } else {
        decoder::widen_eight<ELEMENT == BF16>(key, load_shared4(keys + i * LOAD));
      }
#pragma unroll
      for (int g = 0; g < GP; g++) score[g][i] = dot(query + g * HD, key);
    }
#pragma unroll
    for (int g = 0; g < GP; g++) {
#pragma unroll
      for (int i = 0; i < 2; i++) {
        score[g][i] = key_sum(score[g][i]);
        if constexpr (CODES) score[g][i] *= scale[i].x;
        if (!there[i]) score[g][i] = NOTHING;
      }
      const float most = fmaxf(highest[g], fmaxf(score[g][0], score[g][1])), kept = exp2f(highest[g] - most);
      highest[g] = most;
#pragma unroll
      for (int i = 0; i < 2; i++) score[g][i] = there[i] ? exp2f(score[g][i] - most) : 0.f;
      weight[g] = weight[g] * kept + score[g][0] + score[g][1];
      if constexpr (CODES) {
#pragma unroll
        for (int i = 0; i < 2; i++) score[g][i] = there[i] ? score[g][i] * scale[i].y : 0.f;
      }
#pragma unroll
      for (int d = 0; d < 8; d++) value[g][d] *= kept;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float v[8];
      if constexpr (CODES) {
        widen_codes(v, load_shared2(values + i * LOAD));
      } else {
        uint4 words = load_shared4(values + i * LOAD);
        // Memory behind a row's last position may hold what is no number.
        if (!there[i]) words = make_uint4(0, 0, 0, 0);
        decoder::widen_eight<ELEMENT == BF16>(v, words);
      }
#pragma unroll
      for (int g = 0; g < GP; g++)
#pragma unroll
        for (int d = 0; d < 8; d++) value[g][d] = fmaf(score[g][i], v[d], value[g][d]);
    }
  }

  // The new token, to which the first group of lanes of one warp attends.
  __device__ __forceinline__ void begin(const float* query, const float* key, const float* new_value) {
    float k[8];
#pragma unroll
    for (int d = 0; d < 8; d++) k[d] = key[d];
#pragma unroll
    for (int g = 0; g < GP; g++) {
      const float score = key_sum(dot(query + g * HD, k));
      if (threadIdx.x % 32 >= LANES) continue;
      highest[g] = score, weight[g] = 1.f;
#pragma unroll
      for (int d = 0; d < 8; d++) value[g][d] = new_value[d];
    }
  }

  // This warp's part of each of its heads to shared memory, [heads][PART].
  __device__ __forceinline__ void leave(float* to) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int g = 0; g < GP; g++) {
#pragma unroll
      for (int offset = 16; offset >= LANES; offset /= 2) {
        const float other = __shfl_xor_sync(~0u, highest[g], offset), most = fmaxf(highest[g], other);
        const float mine = exp2f(highest[g] - most), theirs = exp2f(other - most);
        weight[g] = weight[g] * mine + __shfl_xor_sync(~0u, weight[g], offset) * theirs;
#pragma unroll
        for (int d = 0; d < 8; d++)
          value[g][d] = value[g][d] * mine + __shfl_xor_sync(~0u, value[g][d], offset) * theirs;
        highest[g] = most;
      }
      if (lane < LANES) {
        float* part = to + g * PART + lane * 8;
        reinterpret_cast<float4*>(part)[0] = make_float4(value[g][0], value[g][1], value[g][2], value[g][3]);
        reinterpret_cast<float4*>(part)[1] = make_float4(value[g][4], value[g][5], value[g][6], value[g][7]);
      }
      if (lane == 0) to[g * PART + HD] = highest[g], to[g * PART + HD + 1] = weight[g];
    }
  }

  // Slots of query heads in shared memory: those of the key head, and zeros.
  __device__ __forceinline__ static int group_slots(int group) { return head_groups(group, HD) * GP; }

  // Queries, and for the last split the new key and value, from messages to shared memory. Of CODES these two become
  // what the cache keeps of them.
  __device__ __forceinline__ static void take_heads(const Cta& c, const trirun_cuda_step_layer& layer, const Item& span,
                                                    bool newest, int group, uint32_t tag) {
    const trirun_cuda_step& s = c.a.s;
    const int lane = c.lane(), slots = group_slots(group), row = span.row, kv_head = span.kv_head;
    const int64_t angles = static_cast<int64_t>(span.position) * s.rotary_half;
    const int words = static_cast<int>(s.heads + 2 * s.kv_heads) * (HD / 4);
#pragma unroll 1
    for (int i = c.warp(); i < slots + (newest ? 2 : 0); i += WARPS) {
      const bool query = i < slots, turned = i <= slots;
      float* to = c.floats(c.a.at.heads) + i * HD;
      const float* norm = query ? layer.q_norm : layer.k_norm;
      decoder::HeadConstants<HD / 32> constants;
      constants.load(s.cosines + angles, s.sines + angles, norm, s.rotary_half, HD, s.interleaved != 0);
      const int head = query ? kv_head * group + i
                             : static_cast<int>(s.heads) + (turned ? 0 : static_cast<int>(s.kv_heads)) + kv_head;
      const float4* from = c.a.qkv + row * words + head * (HD / 4);
      // Lanes beyond a head, and heads beyond the group, take what is there: nobody reads it.
      const int w = lane % (HD / 4);
      static_assert(HD <= 128);
      if (!query || i < group) {
        const float4 v = receive(from + w, tag, c.patience());
        float* at = to + w / 4 * 16 + w % 4 * 2;
        reinterpret_cast<float2*>(at)[0] = make_float2(v.x, v.y);
        reinterpret_cast<float2*>(at)[4] = make_float2(v.z, v.w);
      }
      __syncwarp();
      if (turned)
        decoder::turn_head(to, constants, HD, norm != nullptr, s.eps, s.rotary_half, s.interleaved != 0,
                           query ? s.scale * decoder::LOG2E : 1.f);
      if constexpr (CODES) {
        if (turned) decoder::mix_head<HD / 32>(to, HD);
        if (!query) keep_codes(to, layer, s, span, i - slots);
      }
    }
    meet();
  }

  // A new key (part 0) or value (part 1) to the cache, and to shared memory as attention will read it: a warp.
  __device__ __forceinline__ static void keep_codes(float* head, const trirun_cuda_step_layer& layer,
                                                    const trirun_cuda_step& s, const Item& span, int part) {
    const int lane = threadIdx.x % 32;
    auto* own = reinterpret_cast<float4*>(head) + lane;
    const bool there = lane < HD / 4;
    const float4 v[1] = {there ? *own : make_float4(0.f, 0.f, 0.f, 0.f)};
    uint32_t code[1];
    const __half kept = decoder::quantize_head(code, v);
    const float scale = __half2float(kept);
    const auto value = [&](int b) { return static_cast<float>(static_cast<int8_t>(code[0] >> 8 * b)) * scale; };
    if (there) *own = make_float4(value(0), value(1), value(2), value(3));
    __syncwarp();
    if (span.slot < 0) return;
    const int64_t at = decoder::cache_offset(span.page, static_cast<int>(s.kv_heads), span.kv_head, span.position, 1);
    if (there) static_cast<uint32_t*>(part == 0 ? layer.keys : layer.values)[at * (HD / 4) + lane] = code[0];
    if (lane == 0) static_cast<__half*>(layer.scales)[2 * at + part] = kept;
  }

  // The new key and value to a cache of 16 bits: two warps.
  __device__ __forceinline__ static void append(const Cta& c, const trirun_cuda_step_layer& layer, int kv_head,
                                                int page, int position, int group) {
    const int which = c.warp() - (WARPS - 2);
    if (which < 0) return;
    const trirun_cuda_step& s = c.a.s;
    const float* from = c.floats(c.a.at.heads) + (group_slots(group) + which) * HD;
    auto* cache = static_cast<uint16_t*>(which == 0 ? layer.keys : layer.values) +
                  decoder::cache_offset(page, static_cast<int>(s.kv_heads), kv_head, position, HD);
#pragma unroll
    for (int d = c.lane(); d < HD; d += 32) cache[d] = decoder::narrow<ELEMENT == BF16>(from[d]);
  }

  __device__ __forceinline__ static void run(Cta& c, int index, uint32_t tag) {
    const trirun_cuda_step& s = c.a.s;
    const trirun_cuda_step_layer& layer = c.layer(index);
    const int group = c.a.group;
    const int groups = group_slots(group) / GP, groups_log = groups >> 1;  // of 1, 2 and 4: 0, 1 and 2
    const int split = c.items()->split;
    const bool newest = split == s.splits - 1;
    const int lane = c.lane(), warp = c.warp(), items = c.item_count();
#pragma unroll 1
    for (int at_item = 0; at_item < items; at_item++) {
      const Item span = c.items()[at_item];
      const int row = span.row, kv_head = span.kv_head;
      // A chunk is shared by warps with other query heads, and, where chunks are few, with other positions.
      const int chunks = span.last - span.first;
      const int sharing = chunks <= 4 ? 2 : max(chunks <= 8 ? 1 : 0, groups_log), places_log = sharing - groups_log;
      const int mine = POSITIONS >> places_log, part = warp & ((1 << sharing) - 1);
      const int place = part >> groups_log, of = part & (groups - 1);
      const float* query = c.floats(c.a.at.heads) + of * GP * HD + lane % LANES * 8;
      // The scales of this warp's share of a chunk, on their way while its keys and values are.
      const auto scales_of = [&](int chunk) -> Scales {
        Scales scales{};
        if constexpr (CODES) {
#pragma unroll
          for (int i = 0; i * 32 < POSITIONS; i++) {
            const int within = i * 32 + lane, position = chunk * POSITIONS + place * mine + within;
            if (within >= mine || chunk >= span.last) continue;
            const int page = __ldg(s.block_tables + span.slot * s.ld_blocks + position / decoder::PAGE);
            const int64_t from = decoder::cache_offset(page, static_cast<int>(s.kv_heads), kv_head, position, 1);
            scales.words[i] = __ldg(static_cast<const uint32_t*>(layer.scales) + from);
          }
        }
        return scales;
      };
      const int first = span.first + (warp >> sharing);
      Scales scales = scales_of(first);
      take_heads(c, layer, span, newest, group, tag);
      Attention attention;
      attention.clear();
      if (newest && warp < groups) {
        const float* key = c.floats(c.a.at.heads) + group_slots(group) * HD + lane % LANES * 8;
        attention.begin(query, key, key + HD);
      }
      Ring at = c.ring;
      c.move(at, warp >> sharing);
#pragma unroll 1
      for (int chunk = first; chunk < span.last; chunk += WARPS >> sharing) {
        const Scales these = scales;
        scales = scales_of(chunk + (WARPS >> sharing));
        barrier_wait(c.full(at.stage), at.phase);
        uint32_t keys = c.shared + at.stage * CHUNK_BYTES + (place * mine * HD + lane * 8) * BYTES;
        int left = span.length - (chunk * POSITIONS + place * mine);
#pragma unroll 1
        for (int i = 0; i < mine; i += 2 * KEYS) {
          attention.add(keys, keys + CHUNK_BYTES / 2, query, left, these, i);
          keys += 2 * LOAD, left -= 2 * KEYS;
        }
        // The arrival must not overtake the loads: it depends on what was made of the last ones.
        uint32_t loaded = 0;
#pragma unroll
        for (int d = 0; d < 8; d++) loaded |= __float_as_uint(attention.value[0][d]);
        __syncwarp();
        if (lane == 0) barrier_arrive_counted(c.empty(at.stage) + (loaded & c.a.nought), 4 >> sharing);
        c.move(at, WARPS >> sharing);
      }
      c.move(c.ring, chunks);
      attention.leave(c.floats(c.a.at.slots) + warp * GP * PART);
      meet();
      put_together(c, index, layer, row, kv_head, split, group, groups_log, tag);
      if constexpr (!CODES)
        if (newest && span.slot >= 0) append(c, layer, kv_head, span.page, span.position, group);
      if (at_item + 1 < items) meet();
    }
  }

  // The parts of all warps, and then of all splits.
  __device__ __forceinline__ static void put_together(const Cta& c, int index, const trirun_cuda_step_layer& layer,
                                                      int row, int kv_head, int split, int group, int groups_log,
                                                      uint32_t tag) {
    const trirun_cuda_step& s = c.a.s;
    const int kv_heads = static_cast<int>(s.kv_heads), splits = s.splits, words = group * (HD / 4);
    const int lane = c.lane(), warp = c.warp();
    float* parts = c.floats(c.a.at.slots);
    float* shares = parts + WARPS * GP * PART;  // [heads][WARPS]: what a warp's part counts, of its heads
    const int part_words = words + group;
    float4* partial = c.a.partial + (row * kv_heads + kv_head) * splits * part_words;
    float4* own = partial + split * part_words;
    // A warp a head: how far each part's maximum lies below the highest.
    if (warp < group) {
      const float* part = parts + ((lane % WARPS) * GP + warp % GP) * PART + HD;
      const bool there = lane < WARPS && (lane & ((1 << groups_log) - 1)) == warp / GP;
      const float highest = there ? part[0] : NOTHING;
      const float most = decoder::warp_max(highest);
      const float factor = there ? exp2f(highest - most) : 0.f;
      const float sum = decoder::warp_sum(there ? part[1] * factor : 0.f);
      if (lane < WARPS) shares[warp * WARPS + lane] = splits == 1 ? factor / sum : factor;
      if (lane == 0 && splits > 1) send(own + words + warp, make_float4(most, sum, 0.f, 0.f), tag);
    }
    meet();
    float4* out = c.a.attended + (row * kv_heads + kv_head) * words;
    float squares = 0.f;
    uint32_t largest = 0;
    const auto give = [&](int word, float4 v) {
      float4 sent = v;
      if (layer.attention_sub_norm != nullptr) {
        const int w = word % (HD / 4);
        const float* norm =
            layer.attention_sub_norm + kv_head * group * HD + word / (HD / 4) * HD + w / 4 * 16 + w % 4 * 2;
        const float2 a = __ldg(reinterpret_cast<const float2*>(norm)),
                     b = __ldg(reinterpret_cast<const float2*>(norm + 8));
        sent = make_float4(v.x * a.x, v.y * a.y, v.z * b.x, v.w * b.y);
      }
      send(out + word, sent, tag);
      squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
      largest = max(largest, magnitude_bits(sent));
    };
#pragma unroll 1
    for (int word = threadIdx.x; word < words; word += WARPS * 32) {
      const int head = word / (HD / 4), w = word % (HD / 4);
      const float* from = parts + head % GP * PART + w / 4 * 16 + w % 4 * 2;
      const float* share = shares + head * WARPS;
      float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
      for (int i = head / GP; i < WARPS; i += 1 << groups_log) {
        const float f = share[i];
        const float2 a = *reinterpret_cast<const float2*>(from + i * GP * PART);
        const float2 b = *reinterpret_cast<const float2*>(from + i * GP * PART + 8);
        v = make_float4(v.x + a.x * f, v.y + a.y * f, v.z + b.x * f, v.w + b.y * f);
      }
      if (splits == 1)
        give(word, v);
      else
        send(own + word, v, tag);
    }
    if (splits > 1) {
      // This CTA finishes its share of the words: lanes side by side take the splits of one.
      const int part = lane & ((1 << c.a.lanes_log) - 1), first = c.a.share * split;
      const int last = min(first + c.a.share, words);
      const bool there = part < splits;
#pragma unroll 1
      for (int base = first; base < last; base += WARPS * 32 >> c.a.lanes_log) {
        const int word = base + (static_cast<int>(threadIdx.x) >> c.a.lanes_log);
        const bool mine = there && word < last;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f), header = make_float4(NOTHING, 0.f, 0.f, 0.f);
        if (mine) {
          const float4* from = partial + part * part_words;
          const Word a = load_word(from + word), b = load_word(from + words + word / (HD / 4));
          v = awaited(a, from + word, tag, c.patience());
          header = awaited(b, from + words + word / (HD / 4), tag, c.patience());
        }
        float most = header.x;
#pragma unroll 1
        for (int offset = 1; offset < 1 << c.a.lanes_log; offset *= 2)
          most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
        const float factor = exp2f(header.x - most);
        v = make_float4(v.x * factor, v.y * factor, v.z * factor, v.w * factor);
        float sum = header.y * factor;
#pragma unroll 1
        for (int offset = 1; offset < 1 << c.a.lanes_log; offset *= 2) {
          v.x += __shfl_xor_sync(~0u, v.x, offset), v.y += __shfl_xor_sync(~0u, v.y, offset);
          v.z += __shfl_xor_sync(~0u, v.z, offset), v.w += __shfl_xor_sync(~0u, v.w, offset);
          sum += __shfl_xor_sync(~0u, sum, offset);
        }
        const float inverse = __fdividef(1.f, sum);
        if (mine && part == 0) give(word, make_float4(v.x * inverse, v.y * inverse, v.z * inverse, v.w * inverse));
      }
    }
    if (s.act_bits != TRIRUN_ACT8 && layer.attention_sub_norm == nullptr) return;
    float* of_warps = c.floats(c.a.at.factors) + 2 * MAX_ROWS;
    squares = decoder::warp_sum(squares);
    largest = __reduce_max_sync(~0u, largest);
    if (lane == 0) of_warps[warp] = squares, of_warps[WARPS + warp] = __uint_as_float(largest);
    meet();
    if (warp != 0) return;
    squares = decoder::warp_sum(lane < WARPS ? of_warps[lane] : 0.f);
    largest = __reduce_max_sync(~0u, lane < WARPS ? __float_as_uint(of_warps[WARPS + lane]) : 0);
    if (lane == 0)
      send(c.a.attended_headers + (row * kv_heads + kv_head) * splits + split,
           make_float4(squares, __uint_as_float(largest), 0.f, 0.f), tag);
  }
};

}  // namespace trirun::step
