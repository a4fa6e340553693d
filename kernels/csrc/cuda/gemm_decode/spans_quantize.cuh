// Fused activation quantization: x quantized by the CTA that multiplies it (spans_sm90.cu). Rows of 16-bit values
// become the two limbs of activations.cuh, the same bit for bit, in the shared memory from which wgmma reads them.
#pragma once

#include <type_traits>

#include "split_k.cuh"

namespace trirun::gemm_decode {

// Bytes from 16 columns of k to the next, in shared memory. A lane stores 16 columns of one row; 16 bytes more than the
// limbs take, and eight lanes store to different banks.
__host__ __device__ constexpr int half_step(int columns) { return columns * 16 + 16; }

// A CTA's k tiles in pieces that have one scale of x: a span, or the part of it that the CTA has.
struct Piece {
  int at, k_tile;  // the first k tile: of the line of all tiles, of its tile
  int before, k_tiles;  // of its span: k tiles that are not the CTA's, k tiles that are

  __device__ __forceinline__ Piece(int first, int tile_k_tiles, int last) : at(first), k_tile(first % tile_k_tiles) {
    measure(tile_k_tiles, last);
  }
  __device__ __forceinline__ void measure(int tile_k_tiles, int last) {
    before = k_tile % SPAN_K_TILES;
    k_tiles = min(min(SPAN_K_TILES - before, tile_k_tiles - k_tile), last - at);
  }
  __device__ __forceinline__ void advance(int tile_k_tiles, int last) {
    at += k_tiles, k_tile += k_tiles;
    if (k_tile == tile_k_tiles) k_tile = 0;
    measure(tile_k_tiles, last);
  }
};

// 16 columns of one row as a lane holds them: [half of 8][pairs]. wide(): the two of a pair as floats.
template <bool BF16>
struct SixteenValues {
  uint32_t v[2][4];

  // The first and the second eight from memory, or zeros.
  __device__ __forceinline__ void load(const uint16_t* from, bool first, bool second) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int t = 0; t < 4; t++) v[h][t] = 0;
      if (h == 0 ? first : second) {
        const uint4 eight = load_global4(from + h * 8);
        v[h][0] = eight.x, v[h][1] = eight.y, v[h][2] = eight.z, v[h][3] = eight.w;
      }
    }
  }
  __device__ __forceinline__ float2 wide(int h, int t) const {
    if constexpr (BF16)
      return make_float2(__uint_as_float(v[h][t] << 16), __uint_as_float(v[h][t] & 0xffff0000u));
    else
      return __half22float2(reinterpret_cast<const __half2&>(v[h][t]));
  }
  // The bits of the largest magnitude as a float's, as magnitude_bits has them: NaN is the largest.
  __device__ __forceinline__ uint32_t magnitude_bits() const {
    using Pair = std::conditional_t<BF16, __nv_bfloat162, __half2>;
    const auto pair = [&](int i) { return __habs2(reinterpret_cast<const Pair&>(v[i / 4][i % 4])); };
    Pair most = pair(0);
#pragma unroll
    for (int i = 1; i < 8; i++) most = __hmax2_nan(most, pair(i));
    const uint32_t bits = reinterpret_cast<const uint32_t&>(most);
    if constexpr (BF16) {
      return max(bits << 16, bits & 0xffff0000u);
    } else {
      const float2 both = __half22float2(most);
      return max(__float_as_uint(both.x), __float_as_uint(both.y));
    }
  }
};

// What quantize_k_tile16 makes of a lane's 4 values, for 16 of them: limbs in the order of activations.cuh.
struct SixteenLimbs {
  uint32_t hi[4], lo[4];
  int sum;
};

template <bool BF16>
__device__ __forceinline__ SixteenLimbs quantize_sixteen(const SixteenValues<BF16>& x, float inverse) {
  // Rounds as there, to q + 128: byte 1 is the high limb, and byte 0 the low one with its sign turned over.
  constexpr float MAGIC = ROUNDER + 128.f;
  SixteenLimbs d;
  uint32_t sum = 0;
#pragma unroll
  for (int t = 0; t < 4; t++) {
    const float2 a = x.wide(0, t), b = x.wide(1, t);
    const uint32_t q0 = __float_as_uint(fmaf(a.x, inverse, MAGIC)), q1 = __float_as_uint(fmaf(a.y, inverse, MAGIC));
    const uint32_t q2 = __float_as_uint(fmaf(b.x, inverse, MAGIC)), q3 = __float_as_uint(fmaf(b.y, inverse, MAGIC));
    const uint32_t q01 = __byte_perm(q0, q1, 0x5410), q23 = __byte_perm(q2, q3, 0x5410);
    d.hi[t] = __byte_perm(q01, q23, 0x7531);
    d.lo[t] = __byte_perm(q01, q23, 0x6420) ^ 0x80808080u;
    sum += q0 + q1 + q2 + q3;
  }
  d.sum = static_cast<int>(sum - 16 * 0x4b400080u);
  return d;
}

// The rows of x from row0 on that a CTA multiplies, quantized into shared memory, piece after piece: by WARPS warps, of
// which each takes every WARPS-th row of a piece, with AHEAD rows on their way from memory. The barriers of `ready`
// count the warps that are done with a piece. Addresses are shared ones; scales: [piece][row] scale of x, and the same
// times the sum of the CTA's integers; GROUPED: [k tile][row], every k tile having its own. a.k is a multiple of 8;
// rows of x begin on 16 bytes. Rows beyond a.m are left as they are: nobody reads their products.
template <bool BF16, bool GROUPED, int COLUMNS, int WARPS, int AHEAD, typename Args>
__device__ __forceinline__ void quantize_pieces(const Args& a, int row0, uint32_t limbs, uint32_t scales,
                                                uint32_t ready, int warp, int first, int last) {
  constexpr int ROWS = COLUMNS / 2, STEP = half_step(COLUMNS);
  // A slice of padding has no rows; the warps are counted all the same.
  const int lane = threadIdx.x % 32, m = min(a.m - row0, ROWS), blocks = (max(m, 1) - 1) / (WARPS * AHEAD) + 1;
  const int64_t step = static_cast<int64_t>(WARPS) * a.ldx;
  const uint16_t* rows = static_cast<const uint16_t*>(a.x) + (row0 + warp) * a.ldx + lane * 16;
  SixteenValues<BF16> values[AHEAD];
  Piece piece(first, a.k_tiles, last);
  const int start = (piece.k_tile - piece.before) * K_TILE;
  int column = start + lane * 16, row = warp, loading = warp, left = blocks;
  const uint16_t* from = rows + start;
  const auto load = [&](SixteenValues<BF16>& to) {
    to.load(from, loading < m && column < a.k, loading < m && column + 8 < a.k);
    from += step, loading += WARPS;
  };
#pragma unroll
  for (int u = 0; u < AHEAD; u++) load(values[u]);
#pragma unroll 1
  for (;;) {
    Piece next = piece;
    const bool ends = --left == 0, mine = lane / 8 >= piece.before && lane / 8 < piece.before + piece.k_tiles;
    const uint32_t to = limbs + (piece.at - first - piece.before) * 8 * STEP + lane * STEP;
    if (ends) {
      next.advance(a.k_tiles, last);
      const int start = (next.k_tile - next.before) * K_TILE;
      column = start + lane * 16, from = rows + start, loading = warp;
    }
    const bool more = next.at < last;
#pragma unroll
    for (int u = 0; u < AHEAD; u++) {
      if (row < m) {
        uint32_t bits = values[u].magnitude_bits();
        if constexpr (GROUPED) {
#pragma unroll
          for (int i = 1; i < 8; i *= 2) bits = max(bits, __shfl_xor_sync(~0u, bits, i));
        } else {
          bits = __reduce_max_sync(~0u, bits);
        }
        const float amax = __uint_as_float(bits);
        const bool vanishes = amax < 1e-30f;
        const SixteenLimbs d = quantize_sixteen(values[u], vanishes ? 0.f : __fdividef(ACT16_MAX, amax));
        if (mine)
          store_shared4(to + row * 32, make_uint4(d.hi[0], d.hi[1], d.hi[2], d.hi[3])),
              store_shared4(to + row * 32 + 16, make_uint4(d.lo[0], d.lo[1], d.lo[2], d.lo[3]));
        int sum = d.sum;
        if constexpr (GROUPED) {
#pragma unroll
          for (int i = 1; i < 8; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
        } else {
          sum = __reduce_add_sync(~0u, mine ? sum : 0);
        }
        if (GROUPED ? mine && lane % 8 == 0 : lane == 0) {
          const float scale = vanishes ? 0.f : amax * (1.f / ACT16_MAX);
          const int k_tile = GROUPED ? lane / 8 - piece.before : 0;
          store_shared2(scales + (k_tile * ROWS + row) * 8, scale, scale * static_cast<float>(sum));
        }
      }
      row += WARPS;
      if (more) load(values[u]);
    }
    if (ends) {
      fence_async_shared();
      __syncwarp();
      if (lane == 0) barrier_arrive(ready);
      ready += 8, scales += (GROUPED ? piece.k_tiles : 1) * ROWS * 8, row = warp, left = blocks;
    }
    if (!more) break;
    piece = next;
  }
}

}  // namespace trirun::gemm_decode
