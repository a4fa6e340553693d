// From sums to outputs: scales, bias, transposition through shared memory, and the way to global memory.
#pragma once

#include <type_traits>

#include "trirun.h"
#include "arguments.cuh"
#include "dequantize.cuh"
#include "cuda/common/wgmma.cuh"

namespace trirun::gemm_prefill {

#ifdef TRIRUN_HOPPER

// The four sums of a row block that belong to one block of 8 tokens.
template <typename A, int Count>
__device__ __forceinline__ A (&four(A (&sum)[Count], int block))[4] {
  return *reinterpret_cast<A(*)[4]>(&sum[4 * block]);
}

// What a consumer warp does with its sums: kOwn row blocks of one n tile, 16 rows of w each, by Tokens rows of x. In
// tiles of four n tiles two row blocks: warp i of a warpgroup has n tile i. In tiles of three n tiles one: warp i has
// row block i, and every warpgroup an n tile.
template <typename T, int Tokens, int NTiles = 4>
struct Consumer {
  static constexpr bool kInt8 = sizeof(T) == 1;
  static constexpr int kOwn = NTiles == 4 ? 2 : 1, kRowTile = NTiles * 64;
  using Accumulator = typename std::conditional<kInt8, int, float>::type;
  static constexpr int kBlocks = Tokens / 8;
  // A quad is a lane's four sums of a row block and a block of eight tokens; `put` takes a pair of them, of two row
  // blocks or of two blocks of tokens.
  static constexpr int kQuads = kOwn * kBlocks, kQuadPairs = kQuads / 2, kQuadPairBlocks = kBlocks / kQuadPairs;
  static __device__ __forceinline__ constexpr int quad(int quad_pair, int i) {
    return kOwn == 2 ? i * kBlocks + quad_pair : 2 * quad_pair + i;
  }
  // With scales per channel the fragments of the 64-row tile and of three n tiles are (q - zero) / kShrink.
  static constexpr float kUnshrink = !kInt8 && (Tokens == 64 || kOwn == 1) ? kShrink : 1.f;

  const PrefillArguments& args;
  const uint32_t output, rows;  // shared memory: this warp's staged outputs, this warpgroup's row factors
  int lane;
  const int group, n_tile, block0;  // warpgroup; n tile of the tile; first row block of the n tile
  int row0, token0;       // first row of w and first token of the tile
  // Of this lane's rows, [row block][row half]. What `begin` asks for is converted only when it is used, so that no
  // multiplication waits for it.
  uint32_t raw_scale[kOwn], raw_bias[kOwn][2];
  float scale[kOwn][2], bias[kOwn][2], zero[kOwn][2];

  __device__ Consumer(const PrefillArguments& a, uint32_t out, uint32_t factors, int l, int warp, int g)
      : args(a), output(out), rows(factors), lane(l), group(g), n_tile(kOwn == 2 ? warp : g),
        block0(kOwn == 2 ? 2 * g : warp) {}

  __device__ __forceinline__ int first_row() const { return row0 + 64 * n_tile + 16 * block0; }
  __device__ __forceinline__ int row(int j, int h) const { return first_row() + 16 * j + 8 * h + lane / 4; }

  // Where the stored order keeps this lane's row.
  __device__ __forceinline__ int stored(int j, int h) const {
    return row0 + 64 * n_tile + 8 * (lane / 4) + 2 * (block0 + j) + h;
  }

  // Zero point of a row, given by its row block in the n tile.
  __device__ __forceinline__ float channel_zero(int block, int h) const {
    const int at = row0 + 64 * n_tile + 8 * (lane / 4) + 2 * block + h;
    if (!args.channel_zeros) return args.zero;
    return at < args.padded_n ? __half2float(args.channel_zeros[at]) : 0.f;
  }

  __device__ __forceinline__ float bias_value(uint32_t raw) const {
    if (args.y_dtype == TRIRUN_F32) return __uint_as_float(raw);
    if (args.y_dtype == TRIRUN_BF16) return __uint_as_float(raw << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(raw)));
  }

  __device__ __forceinline__ void warpgroup_sync() const { named_barrier<128>(2 + group); }

  // Brings what `begin` will ask for to L2, where there are no registers to ask for it early.
  __device__ __forceinline__ void expect(int row_tile) {
    row0 = row_tile * kRowTile;
    if (args.channel_scales && stored(0, 0) < args.padded_n) prefetch_l2(args.channel_scales + stored(0, 0));
    if (args.bias && row(0, 0) < args.n)
      prefetch_l2(static_cast<const char*>(args.bias) + row(0, 0) * (args.y_dtype == TRIRUN_F32 ? 4 : 2));
  }

  // Everything the outputs need beside the sums, asked for before the sums are computed.
  __device__ __forceinline__ void begin(int row_tile, int token_tile) {
    row0 = row_tile * kRowTile, token0 = token_tile * Tokens;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) raw_scale[j] = 0;
    if (args.channel_scales && stored(0, 0) < args.padded_n) {
      if constexpr (kOwn == 2) {
        const uint2 pairs = *reinterpret_cast<const uint2*>(args.channel_scales + stored(0, 0));
        raw_scale[0] = pairs.x, raw_scale[1] = pairs.y;
      } else {
        raw_scale[0] = *reinterpret_cast<const uint32_t*>(args.channel_scales + stored(0, 0));
      }
    }
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) {
      const int r = row(i / 2, i % 2);
      raw_bias[i / 2][i % 2] = 0;
      if (args.bias && r < args.n)
        raw_bias[i / 2][i % 2] = args.y_dtype == TRIRUN_F32 ? static_cast<const uint32_t*>(args.bias)[r]
                                                            : static_cast<const uint16_t*>(args.bias)[r];
    }
    if (args.row_scale) {
      warpgroup_sync();
      const int local = threadIdx.x % 128, token = token0 + local;
      if (local < Tokens) {
        const float s = token < args.m ? args.row_scale[token] : 0.f;
        const float sum = token < args.m ? float(args.row_sum[token]) : 0.f;
        store_shared2(rows + 8 * local, __float_as_uint(s), __float_as_uint(sum));
      }
    }
  }

  // Before the first staged output: the stores of the tile before have read their staging memory.
  __device__ __forceinline__ void begin_outputs() {
#pragma unroll
    for (int i = 0; i < 2 * kOwn; ++i) {
      const int j = i / 2, h = i % 2;
      scale[j][h] = args.channel_scales ? half_bits(raw_scale[j], h) * kUnshrink : 1.f;
      bias[j][h] = bias_value(raw_bias[j][h]);
      if (kInt8) zero[j][h] = channel_zero(block0 + j, h);
    }
    if (args.row_scale) warpgroup_sync();
    if (lane == 0) store_wait_read();
    __syncwarp();
  }

  __device__ __forceinline__ uint32_t packed(float lo, float hi) const {
    if (args.y_dtype == TRIRUN_BF16) {
      __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
      return reinterpret_cast<uint32_t&>(h);
    }
    __half2 h = __floats2half2_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(h);
  }

  // Whether the outputs take the short way: 16 bits, and factors per row of x exactly where the type of x implies them.
  // A kernel runs through its outputs once or twice, so that every instruction on the way is fetched for the first time
  // and costs more than it computes.
  __device__ __forceinline__ bool is_plain() const {
    if (kInt8) return args.y_dtype != TRIRUN_F32;
    return !args.row_scale && args.y_dtype == (std::is_same<T, __half>::value ? TRIRUN_F16 : TRIRUN_BF16);
  }

  // f(std::true_type) where they do, f(std::false_type) elsewhere.
  template <typename F>
  __device__ __forceinline__ void by_plainness(const F& f) const {
    if (is_plain())
      f(std::true_type{});
    else
      f(std::false_type{});
  }

  // A staged row of 32 kOwn bytes, its 16-byte parts permuted as the copy engine's swizzle of so many bytes has it.
  __device__ __forceinline__ uint32_t staged(int token, int part) const {
    return output + token * 32 * kOwn + ((part ^ (kOwn == 2 ? token >> 1 & 3 : token >> 2 & 1)) << 4);
  }

  // The pair of quads whose tokens begin with block `block`: staged transposed for 16-bit outputs, written at
  // once for float32.
  template <bool Plain>
  __device__ __forceinline__ void put(const Accumulator (&s0)[4], const Accumulator (&s1)[4], int block) const {
    const auto local = [&](int quad) { return 8 * (kOwn == 2 ? block : block + quad) + 2 * (lane % 4); };
    float v[2][4];
    // Factor and sum of the codes of tokens 2t and 2t + 1.
    uint4 factors = make_uint4(0x3f800000, 0, 0x3f800000, 0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int quad = i / 4, j = kOwn == 2 ? quad : 0, e = i % 4, h = e / 2;
      if ((kInt8 || (!Plain && args.row_scale)) && i % (kOwn == 2 ? 8 : 4) == 0)
        factors = load_shared4(rows + 8 * local(quad));
      const Accumulator sum = quad ? s1[e] : s0[e];
      const float factor = __uint_as_float(e % 2 ? factors.z : factors.x);
      if constexpr (kInt8) {
        // The codes were shifted up by their place in the byte: the sums shift down exactly.
        const float codes = __uint_as_float(e % 2 ? factors.w : factors.y);
        v[quad][e] = fmaf(fmaf(-zero[j][h], codes, float(sum >> 2 * (block0 + j))), scale[j][h] * factor, bias[j][h]);
      } else {
        v[quad][e] = fmaf(sum, Plain ? scale[j][h] : scale[j][h] * factor, bias[j][h]);
      }
    }
    if (Plain || args.y_dtype != TRIRUN_F32) {
      uint32_t r[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float lo = v[i / 2][i % 2 * 2], hi = v[i / 2][i % 2 * 2 + 1];
        if constexpr (kInt8 || !Plain) {
          r[i] = packed(lo, hi);
        } else if constexpr (std::is_same<T, __half>::value) {
          const __half2 p = __floats2half2_rn(lo, hi);
          r[i] = reinterpret_cast<const uint32_t&>(p);
        } else {
          const __nv_bfloat162 p = __floats2bfloat162_rn(lo, hi);
          r[i] = reinterpret_cast<const uint32_t&>(p);
        }
      }
      const int tile = lane / 8;  // of 8 tokens by 8 rows of w
      const uint32_t to = kOwn == 2 ? staged(lane % 8, tile) : staged(tile / 2 * 8 + lane % 8, tile % 2);
      store_transposed(to + 256 * kOwn * block, r[0], r[1], r[2], r[3]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int r = row(kOwn == 2 ? e / 4 : 0, e / 2 % 2), token = token0 + local(e / 4) + e % 2;
        if (r < args.n && token < args.m) static_cast<float*>(args.y)[token * args.ldy + r] = v[e / 4][e % 4];
      }
    }
  }

  // Staged tokens [8 first, 8 last) to y. `whole` stands for the box of a full tile.
  __device__ __forceinline__ void end_outputs(int first, int last, bool whole) const {
    if (args.y_dtype == TRIRUN_F32) return;
    const int n = first_row();
    if (args.tensor_stores) {
      fence_async_shared();
      __syncwarp();
      if (lane == 0 && n < args.n) {
        for (int block = first; block < last; block += whole ? kBlocks : 1)
          tensor_store(&args.outputs, output + block * 256 * kOwn, n, token0 + 8 * block);
        store_commit();
      }
      return;
    }
    __syncwarp();
    constexpr int kParts = 2 * kOwn;  // of a token, 16 bytes each
    for (int local = 8 * first + lane / kParts; local < 8 * last; local += 32 / kParts) {
      const int token = token0 + local, column = n + lane % kParts * 8;
      if (token >= args.m || column >= args.n) continue;
      const uint4 v = load_shared4(staged(local, lane % kParts));
      const uint32_t part[4] = {v.x, v.y, v.z, v.w};
      uint16_t* to = static_cast<uint16_t*>(args.y) + token * args.ldy + column;
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < args.n) to[e] = static_cast<uint16_t>(part[e / 2] >> 16 * (e % 2));
    }
    __syncwarp();
  }
};

#endif  // TRIRUN_HOPPER

}  // namespace trirun::gemm_prefill
