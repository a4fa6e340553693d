// The arithmetic of the stream kernel: one warp, one n tile (64 rows) by one k tile (128 k), NT tiles of eight columns.
//
// word & (0x03030303 << 2j) is the A register of row block j, with every code times 4^j: four masks feed sixteen codes
// to the tensor core. 4^-j, the activation scale and the zero point are applied to int32 sums, once per 128 k.
#pragma once

#include <type_traits>

#include "gemm_decode.cuh"

namespace trirun::gemm_decode {

__device__ __forceinline__ constexpr float quarter_power(int j) { return 1.f / static_cast<float>(1 << (2 * j)); }

// The k tile's activations in shared memory, as one lane addresses them.
struct KTileActivations {
  uint32_t limbs;  // this lane's column and bytes in block 0, half 0, tile 0
  uint32_t half;  // bytes from half 0 to half 1 of a block: columns * 16; a block is twice that
  uint32_t scales;  // float2 of token 0
  uint32_t sums;  // float4 of token 0 (PER_BLOCK only)
};

template <int LIMBS, int NT, int SCALE>
struct Partial {
  static constexpr int TOKENS = LIMBS == 2 ? 1 : 2;  // of one thread in one column tile
  // One limb and one scale per row: int32 sums over all of k are exact and nothing is converted on the way.
  static constexpr bool EXACT = LIMBS == 1 && SCALE == PER_CHANNEL;
  static constexpr bool OF_K_TILES = SCALE == PER_K_TILE || SCALE == PER_K_TILE_PLAIN;
  using Sum = std::conditional_t<EXACT, int, float>;

  Sum sum[4][NT][2][TOKENS];  // row block j (4^j times too large), tile, rows r and r + 8, token
  float x_sum[NT][TOKENS];  // sum of x over k: what the zero point multiplies (PER_CHANNEL)

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < TOKENS; e++) {
        x_sum[n][e] = 0.f;
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j][n][0][e] = sum[j][n][1][e] = 0;
      }
  }

  // The token of (tile n, e) for this lane; beyond the padded tokens it wraps to one that exists and is not stored.
  __device__ __forceinline__ static int token(int n, int e, int tokens) {
    const int t = threadIdx.x % 4, index = LIMBS == 2 ? n * 4 + t : n * 8 + 2 * t + e;
    return NT == 1 ? index & (tokens - 1) : index;
  }

  // The integer value of one output of a tile's four registers.
  __device__ __forceinline__ static int combine(const int (&c)[4], int h, int e) {
    return LIMBS == 2 ? c[2 * h] * 256 + c[2 * h + 1] : c[2 * h + e];
  }

  __device__ __forceinline__ static void masked(uint32_t (&a)[4], uint4 w, int j) {
    const uint32_t mask = 0x03030303u << (2 * j);
    a[0] = w.x & mask, a[1] = w.y & mask, a[2] = w.z & mask, a[3] = w.w & mask;
  }

  __device__ __forceinline__ static void load_columns(uint32_t (&b)[NT][2], const KTileActivations& x, int block) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
      b[n][0] = load_shared(x.limbs + block * 2 * x.half + n * 128);
      b[n][1] = load_shared(x.limbs + (block * 2 + 1) * x.half + n * 128);
    }
  }

  // Of this lane's eight rows; half 2j + h is row block j's, row half h's.
  struct RowScales {
    uint4 scales, zeros;
  };

  // scales: shared address of the k tile's scales of this n tile, 64 halves, real zeros behind them.
  __device__ __forceinline__ static RowScales row_scales(uint32_t scales) {
    RowScales rows{};
    const uint32_t at = scales + threadIdx.x % 32 / 4 * 16;
    if constexpr (OF_K_TILES) rows.scales = load_shared4(at);
    if constexpr (SCALE == PER_K_TILE) rows.zeros = load_shared4(at + 128);
    return rows;
  }

  // Adds one k tile. w: the four 32-k blocks of this lane. scales (groups of 32 and 64): as of row_scales, 64 halves
  // per group, zeros when `real_zeros`.
  __device__ __forceinline__ void add(const uint4 (&w)[4], const KTileActivations& x, int tokens, const RowScales& rows,
                                      uint32_t scales, bool real_zeros, float zero, int groups) {
    float scale[NT][TOKENS], zero_sum[NT][TOKENS];
#pragma unroll
    for (int n = 0; n < NT; n++)
#pragma unroll
      for (int e = 0; e < TOKENS; e++) {
        const float2 s = load_shared_float2(x.scales + token(n, e, tokens) * 8);
        scale[n][e] = s.x, zero_sum[n][e] = SCALE == PER_K_TILE_PLAIN ? zero * s.y : s.y;
        if (SCALE == PER_CHANNEL) x_sum[n][e] += s.y;
      }
    if constexpr (SCALE == PER_BLOCK) {
      add_blocks(w, x, tokens, scales, real_zeros, zero, groups, scale);
    } else {
      uint32_t b[4][NT][2];
#pragma unroll
      for (int block = 0; block < 4; block++) load_columns(b[block], x, block);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int c[NT][4];
#pragma unroll
        for (int block = 0; block < 4; block++) {
          uint32_t a[4];
          masked(a, w[block], j);
#pragma unroll
          for (int n = 0; n < NT; n++) {
            if constexpr (EXACT) {
              int (&d)[4] = reinterpret_cast<int (&)[4]>(sum[j][n]);
              mma_u8s8(d, a, b[block][n][0], b[block][n][1], d);
            } else if (block == 0) {
              mma_u8s8(c[n], a, b[block][n][0], b[block][n][1], {0, 0, 0, 0});
            } else {
              mma_u8s8(c[n], a, b[block][n][0], b[block][n][1], c[n]);
            }
          }
        }
        if constexpr (!EXACT) {
#pragma unroll
          for (int h = 0; h < 2; h++) {
            const float row_scale = OF_K_TILES ? half_of(rows.scales, j, h) : 0.f;
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
              for (int e = 0; e < TOKENS; e++) {
                const float v = static_cast<float>(combine(c[n], h, e));
                if constexpr (SCALE == PER_K_TILE)
                  sum[j][n][h][e] += row_scale * (scale[n][e] * v - half_of(rows.zeros, j, h) * zero_sum[n][e]);
                else if constexpr (OF_K_TILES)
                  sum[j][n][h][e] += row_scale * (scale[n][e] * v - zero_sum[n][e]);
                else
                  sum[j][n][h][e] += scale[n][e] * v;
              }
          }
          if constexpr (OF_K_TILES) quadruple(zero_sum);
        }
      }
    }
  }

  // From one row block to the next: what is compared with sums of codes that are four times as large there.
  __device__ __forceinline__ static void quadruple(float (&v)[NT][TOKENS]) {
#pragma unroll
    for (int i = 0; i < NT * TOKENS; i++) (&v[0][0])[i] *= 4.f;
  }

  // sum += s_w * (s_x * v - z * (sum of x)) for one row; the row's scale and zero are halves 2j + h of 16 bytes.
  __device__ __forceinline__ void scaled(int j, int n, int h, int e, float v, float scale, float zero_sum,
                                         const uint4& row_scales, const uint4& row_zeros, bool real_zeros, float zero) {
    const float z = real_zeros ? half_of(row_zeros, j, h) : zero;
    sum[j][n][h][e] += half_of(row_scales, j, h) * (scale * v - z * zero_sum);
  }

  __device__ __forceinline__ static float half_of(const uint4& v, int j, int h) {
    const uint32_t word = j == 0 ? v.x : j == 1 ? v.y : j == 2 ? v.z : v.w;
    const __half2 pair = *reinterpret_cast<const __half2*>(&word);
    return h ? __high2float(pair) : __low2float(pair);
  }

  // Groups of 32 or 64: every 32-k block is converted for itself; `groups` (4 or 2) scale rows cover the k tile.
  __device__ __forceinline__ void add_blocks(const uint4 (&w)[4], const KTileActivations& x, int tokens,
                                             uint32_t scales, bool real_zeros, float zero, int groups,
                                             const float (&scale)[NT][TOKENS]) {
    const uint32_t lane_offset = threadIdx.x % 32 / 4 * 16;
#pragma unroll
    for (int block = 0; block < 4; block++) {
      const uint32_t group = scales + (block * groups >> 2) * 128 + lane_offset;
      const uint4 row_scales = load_shared4(group);
      const uint4 row_zeros = real_zeros ? load_shared4(group + groups * 128) : uint4{};
      uint32_t b[NT][2];
      load_columns(b, x, block);
      float zero_sum[NT][TOKENS];
#pragma unroll
      for (int n = 0; n < NT; n++)
#pragma unroll
        for (int e = 0; e < TOKENS; e++)
          zero_sum[n][e] = load_shared_float(x.sums + token(n, e, tokens) * 16 + block * 4);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        uint32_t a[4];
        masked(a, w[block], j);
#pragma unroll
        for (int n = 0; n < NT; n++) {
          int c[4];
          mma_u8s8(c, a, b[n][0], b[n][1], {0, 0, 0, 0});
#pragma unroll
          for (int h = 0; h < 2; h++)
#pragma unroll
            for (int e = 0; e < TOKENS; e++)
              scaled(j, n, h, e, static_cast<float>(combine(c, h, e)), scale[n][e], zero_sum[n][e], row_scales,
                     row_zeros, real_zeros, zero);
        }
        quadruple(zero_sum);
      }
    }
  }

  // The finished partial sum of one output, before the row's scale (PER_CHANNEL) and bias. row_zeros: this lane's
  // eight zero points when `real_zeros`. x_scale: the row's activation scale (EXACT only).
  __device__ __forceinline__ float value(int j, int n, int h, int e, float x_scale, const uint4& row_zeros,
                                         bool real_zeros, float zero) const {
    const float v = static_cast<float>(sum[j][n][h][e]) * quarter_power(j);
    if constexpr (SCALE != PER_CHANNEL) return v;
    const float z = real_zeros ? half_of(row_zeros, j, h) : zero;
    return (EXACT ? v * x_scale : v) - z * x_sum[n][e];
  }
};

}  // namespace trirun::gemm_decode
