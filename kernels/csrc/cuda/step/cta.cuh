// What a computing thread knows throughout a step, and how a phase takes its input.
#pragma once

#include "cuda/common/hopper.cuh"
#include "cuda/common/ring.cuh"
#include "cuda/decoder/launch.cuh"
#include "messages.cuh"
#include "step.cuh"

namespace trirun::step {

__device__ __forceinline__ void meet() { named_barrier<WARPS * 32>(1); }  // of all warps that compute

struct Cta {
  const StepArgs& a;
  uint8_t* memory;
  uint32_t shared;
  Ring ring{};  // where the stream's next chunk will be
  uint32_t exchanges = 0;

  __device__ __forceinline__ Cta(const StepArgs& a, uint8_t* memory)
      : a(a), memory(memory), shared(shared_address(memory)) {}

  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ static int warp() { return threadIdx.x / 32; }
  __device__ __forceinline__ static int rank() { return static_cast<int>(blockIdx.x & 1); }

  __device__ __forceinline__ uint32_t full(uint32_t stage) const { return shared + a.at.barriers + stage * 8; }
  __device__ __forceinline__ uint32_t empty(uint32_t stage) const {
    return shared + a.at.barriers + (a.at.stages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t exchange_barrier() const { return shared + a.at.barriers + 2 * a.at.stages * 8; }
  __device__ __forceinline__ Patience patience() const {
    return {a.status, shared + a.at.factors + (2 * MAX_ROWS + 2 * WARPS) * 4};
  }
  __device__ __forceinline__ float* floats(int offset) const { return reinterpret_cast<float*>(memory + offset); }
  __device__ __forceinline__ const trirun_cuda_step_layer& layer(int i) const {
    return reinterpret_cast<const trirun_cuda_step_layer*>(memory + a.at.layers)[i];
  }
  __device__ __forceinline__ const Geometry& geometry(int product) const {
    return reinterpret_cast<const Geometry*>(memory + a.at.plan)[product];
  }
  __device__ __forceinline__ const Item* items() const {
    return reinterpret_cast<const Item*>(memory + a.at.plan + PRODUCTS * sizeof(Geometry));
  }
  __device__ __forceinline__ int item_count() const { return *reinterpret_cast<const int*>(items() + MAX_ITEMS); }

  __device__ __forceinline__ void move(Ring& at, int chunks) const {
    at.stage += chunks;
    while (at.stage >= static_cast<uint32_t>(a.at.stages)) at.stage -= a.at.stages, at.phase ^= 1;
  }

  // What the headers of a row come to: by one warp, whose lanes all get it.
  struct Row {
    float squares, largest;
  };
  __device__ __forceinline__ Row headers(const float4* from, int count, uint32_t tag) const {
    Row row{0.f, 0.f};
    uint32_t largest = 0;
    Word next = load_word(from + min(lane(), count - 1));
#pragma unroll 1
    for (int i = lane(); i < count; i += 32) {
      const Word w = next;
      next = load_word(from + min(i + 32, count - 1));
      const float4 v = awaited(w, from + i, tag, patience());
      row.squares += v.x;
      largest = max(largest, __float_as_uint(v.y));  // as bits, so that a NaN is the largest
    }
    row.squares = decoder::warp_sum(row.squares);
    row.largest = __uint_as_float(__reduce_max_sync(~0u, largest));
    return row;
  }

  // The header of 32 values of a row, one to a lane: `raw` as the norm sees them, `sent` as they are sent.
  __device__ __forceinline__ void send_header(float4* to, float raw, float sent, uint32_t tag) const {
    const float squares = decoder::warp_sum(raw * raw);
    const uint32_t largest = __reduce_max_sync(~0u, __float_as_uint(sent) & 0x7fffffffu);
    if (lane() == 0) send(to, make_float4(squares, __uint_as_float(largest), 0.f, 0.f), tag);
  }
};

// An input of a product: k values of every row, those of a norm without its factor.
struct Input {
  const float4 *words, *headers;
  int k, header_count;
  bool normed;
};

// Quantizes this CTA's half of an input into shared memory, and leaves the rows' factors there: of two limbs what sums
// are multiplied by, of one what values were, and the scale.
template <int LIMBS>
__device__ __forceinline__ void take_input(const Cta& c, const Input& in, int k_tile0, int k_tiles, uint32_t tag) {
  const int lane = c.lane(), warp = c.warp(), rows = 1 << c.a.tokens_log;
  float* factors = c.floats(c.a.at.factors);
  const auto take_headers = [&] {
    const int row = warp - (WARPS - rows);
    if (row < 0) return;
    const Cta::Row r = c.headers(in.headers + row * in.header_count, in.header_count, tag);
    const float factor = in.normed ? rsqrtf(r.squares / in.k + c.a.s.eps) : 1.f;
    if (lane == 0) factors[row] = factor, factors[MAX_ROWS + row] = act8_scale(__float_as_uint(r.largest * factor));
  };
  if constexpr (LIMBS == 1) {
    take_headers();
    meet();
  }
  const int pairs = k_tiles << c.a.tokens_log, columns = rows * LIMBS;
  const auto place = [&](int pair) {
    return in.words + (pair & (rows - 1)) * (in.k / 4) + (k_tile0 + (pair >> c.a.tokens_log)) * 32 + lane;
  };
  if (warp < pairs) {
    Word next = load_word(place(warp));
#pragma unroll 1
    for (int pair = warp; pair < pairs; pair += WARPS) {
      const Word w = next;
      if (pair + WARPS < pairs) next = load_word(place(pair + WARPS));
      float4 v = awaited(w, place(pair), tag, c.patience());
      const int row = pair & (rows - 1), k_tile = pair >> c.a.tokens_log;
      QuantizedKTile q;
      if constexpr (LIMBS == 1) {
        const float f = factors[row];
        q = quantize_k_tile8(make_float4(v.x * f, v.y * f, v.z * f, v.w * f), factors[MAX_ROWS + row]);
      } else {
        q = quantize_k_tile16(v);
      }
      const uint32_t block =
          c.shared + c.a.at.limbs + ((k_tile * 8 + lane / 4) * columns + row * LIMBS) * 16 + lane % 4 * 4;
      store_shared(block, q.limb[0]);
      if constexpr (LIMBS == 2) store_shared(block + 16, q.limb[1]);
      const float sum = q.sum128();
      if (lane == 0) store_shared2(c.shared + c.a.at.scales + pair * 8, q.scale, sum);
    }
  }
  if constexpr (LIMBS == 2) {
    if (in.normed) take_headers();
  }
  meet();
}

}  // namespace trirun::step
