// y[m][n] = x[m][k] . w[n][k]^T for many rows of x on every GPU since Ampere: mma.sync m16n8k16 on fp16 or bf16.
//
// - Fragments are made of tile64's words by two instructions for two weights (dequantize.cuh), in registers.
// - One CTA computes 128 rows of w (two n tiles) by 128 rows of x with 8 warps, each one n tile by 32 tokens. A stage
//   of
// cp.async holds 64 columns of x, its 16-byte parts permuted within a row so that ldmatrix meets no bank conflict, and
//   2 x 2 blocks of tile64. Four stages are in flight.
// - Of a mixture of experts a CTA has a tile of one expert's rows (experts.cuh): 128, or 64 by four n tiles.
// no-spill: prefill_sm80_kernel<*, 128, *>
#include "prefill.cuh"
#include "cuda/decoder/launch.cuh"
#include "cuda/experts/experts.cuh"
#include "dequantize.cuh"

namespace trirun::gemm_prefill {
namespace {

constexpr int kColumns = 64, kStages = 4, kThreads = 256;

// A tile of kTokens rows of x by kNTiles n tiles, and a stage of it in shared memory.
template <int Tokens>
struct Tile80 {
  static constexpr int kTokens = Tokens, kNTiles = 256 / Tokens;
  static constexpr int kX = kTokens * kColumns * 2, kWords = kNTiles * (kColumns / 32) * 512, kStage = kX + kWords;
  static constexpr int kBytes = kStages * kStage;
};

struct Arguments {
  const void* x;
  const uint32_t* words;
  const __half *scales, *zeros;
  const float* row_scale;
  const void* bias;
  void* y;
  int64_t ldx, ldy, k, padded_k, padded_n;
  int m, n, group_size, y_dtype;
  float zero;
  bool split_zero;
  // Of a mixture of experts: what lies between the weights of two experts, and the tiles of sorted rows.
  int64_t expert_words, expert_groups;
  const int32_t *tiles, *order;
  int top_k;
};

__device__ __forceinline__ float read_value(const void* p, int i, int dtype) {
  if (dtype == TRIRUN_F32) return static_cast<const float*>(p)[i];
  if (dtype == TRIRUN_F16) return __half2float(static_cast<const __half*>(p)[i]);
  return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
}

__device__ __forceinline__ uint32_t packed(float lo, float hi, int dtype) {
  if (dtype == TRIRUN_BF16) {
    __nv_bfloat162 h = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(h);
  }
  __half2 h = __floats2half2_rn(lo, hi);
  return reinterpret_cast<uint32_t&>(h);
}

template <typename T, int Tokens, bool Experts>
__global__ void __launch_bounds__(kThreads) prefill_sm80_kernel(const __grid_constant__ Arguments a) {
  using D = Dequantize<T>;
  using Shape = Tile80<Tokens>;
  constexpr int kTokens = Tokens, kNTiles = Shape::kNTiles, kX = Shape::kX, kWords = Shape::kWords,
                kStage = Shape::kStage;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t base = shared_address(shared);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32, n_tile = warp % kNTiles,
            tokens = warp / kNTiles * 32;
  // Token tiles are the fast index: CTAs that run together share rows of w.
  int64_t token0 = int64_t(blockIdx.x) * kTokens, tokens_end = a.m;
  const uint32_t* all_words = a.words;
  const __half *all_scales = a.scales, *all_zeros = a.zeros;
  const void* bias = a.bias;
  constexpr int kRowsOfThread = kTokens * 8 / kThreads;
  int64_t row_of_x[kRowsOfThread];  // of a mixture of experts
  if constexpr (Experts) {
    dependency_launch();
    dependency_wait();
    const experts::Tile tile = experts::load_tile(a.tiles, blockIdx.x);
    if (tile.expert < 0) return;
    token0 = tile.first, tokens_end = tile.first + tile.count;
    all_words += tile.expert * a.expert_words, all_scales += tile.expert * a.expert_groups;
    if (all_zeros != nullptr) all_zeros += tile.expert * a.expert_groups;
    if (bias != nullptr) bias = static_cast<const float*>(bias) + tile.expert * a.padded_n;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int64_t at = min(token0 + i * (kThreads / 8) + thread / 8, tokens_end - 1);
      row_of_x[i] = a.order != nullptr ? __ldcg(a.order + at) / a.top_k : at;
    }
  }
  const int n_tile0 = blockIdx.y * kNTiles, last_n_tile = int(a.padded_n / 64) - 1;
  const int stages = int(a.padded_k / kColumns);

  const auto load_stage = [&](int k) {
    const uint32_t x_at = base + k % kStages * kStage, words_at = x_at + kX;
#pragma unroll
    for (int i = 0; i < kRowsOfThread; ++i) {
      const int row = i * (kThreads / 8) + thread / 8, part = thread % 8;
      const int64_t column = int64_t(k) * kColumns + part * 8, left = (a.k - column) * 2;
      const bool inside = token0 + row < tokens_end && left > 0;
      const int64_t from_row = Experts ? row_of_x[i] : token0 + row;
      const T* from = static_cast<const T*>(a.x) + (inside ? from_row * a.ldx + column : 0);
      copy_async16_partly(x_at + row * 128 + ((part ^ row & 7) << 4), from, inside ? int(left < 16 ? left : 16) : 0);
    }
#pragma unroll
    for (int i = thread; i < kWords / 16; i += kThreads) {
      const int s = i / 64, part = i % 64;
      const int64_t row = min(n_tile0 + s, last_n_tile);
      copy_async16_partly(words_at + i * 16, all_words + (row * (a.padded_k / 32) + k * 2) * 128 + part * 4, 16);
    }
  };

  const int stored = min(n_tile0 + n_tile, last_n_tile) * 64 + lane / 4 * 8;  // this lane's eight rows, in n tile order
  const bool grouped = a.group_size > 0, whole_zero = !a.split_zero;
  const uint32_t magic = constant_in_register<D::kMagic>();
  uint32_t factor[2], offset[2];
  factor[0] = D::pair(0.25f), factor[1] = D::pair(0.0625f);
  offset[0] = D::pair(-D::kBase * 0.25f - (whole_zero ? a.zero : 0.f));
  offset[1] = D::pair(-D::kBase * 0.0625f - (whole_zero ? a.zero : 0.f));
  // [row block][row half], as pairs: scale, and the zero point in two parts, the second multiplied by the scale.
  uint32_t scale[4][2], zero[4][2], rest[4][2];
  const auto set_groups = [&](int64_t group) {
    const uint4 s =
        grouped ? *reinterpret_cast<const uint4*>(all_scales + group * a.padded_n + stored) : make_uint4(0, 0, 0, 0);
    const uint4 z =
        a.zeros ? *reinterpret_cast<const uint4*>(all_zeros + group * a.padded_n + stored) : make_uint4(0, 0, 0, 0);
    const uint32_t sj[4] = {s.x, s.y, s.z, s.w}, zj[4] = {z.x, z.y, z.z, z.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = i / 2, h = i % 2;
      const float value = a.zeros ? half_bits(zj[j], h) : a.zero;
      scale[j][h] = D::pair(grouped ? half_bits(sj[j], h) : 1.f);
      zero[j][h] = D::pair(-value);
      rest[j][h] = D::pair(a.split_zero ? (-value - D::first(zero[j][h])) * D::first(scale[j][h]) : 0.f);
    }
  };
  const uint32_t one = D::pair(1.f);
  if (!grouped) set_groups(0);

  float sum[4][4][4] = {};  // [row block][8 tokens]
  for (int k = 0; k < kStages - 1; ++k) {
    if (k < stages) load_stage(k);
    copy_async_commit();
  }
  for (int k = 0; k < stages; ++k) {
    copy_async_wait<kStages - 2>();
    __syncthreads();
    // Everyone is past the stage that this one replaces.
    if (k + kStages - 1 < stages) load_stage(k + kStages - 1);
    copy_async_commit();
    const uint32_t x_at = base + k % kStages * kStage, words_at = x_at + kX;
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int64_t column = int64_t(k) * kColumns + block * 32;
      if (grouped && column % a.group_size == 0) set_groups(column / a.group_size);
      const uint4 words = load_shared4(words_at + (n_tile * 2 + block) * 512 + lane * 16);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t fragment[4][4], b[2][4];
        load_fragments<T>(fragment[0], fragment[1], words, half, 30, magic, factor, offset);
        load_fragments<T>(fragment[2], fragment[3], words, half, 2, magic, factor, offset);
        if (grouped || a.split_zero)
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            uint32_t& v = fragment[i / 4][i % 4];
            if (a.split_zero) v = D::fma(v, one, zero[i / 4][i % 2]);
            v = D::fma(v, scale[i / 4][i % 2], rest[i / 4][i % 2]);
          }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = tokens + i * 16 + lane % 8 + lane / 16 * 8, part = block * 4 + half * 2 + lane / 8 % 2;
          load_matrices(b[i], x_at + row * 128 + ((part ^ row & 7) << 4));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int t = 0; t < 4; ++t)
            mma_16bit<T>(sum[j][t], fragment[j], b[t / 2][t % 2 * 2], b[t / 2][t % 2 * 2 + 1]);
      }
    }
  }
  copy_async_wait_all();
  __syncthreads();

  const int row0 = (n_tile0 + n_tile) * 64;
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (!grouped) raw = *reinterpret_cast<const uint4*>(all_scales + stored);
  const uint32_t channel[4] = {raw.x, raw.y, raw.z, raw.w};
  const uint32_t staged = base + warp * 32 * 144;  // 32 tokens of 128 bytes, padded by 16 against bank conflicts
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    const int64_t token = token0 + tokens + 8 * t + lane % 4 * 2;
    float factor[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) factor[e] = !Experts && a.row_scale && token + e < a.m ? a.row_scale[token + e] : 1.f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int j = i / 2, h = i % 2, r = row0 + 16 * j + 8 * h + lane / 4;
      const float s = grouped ? 1.f : half_bits(channel[j], h),
                  added = bias && r < a.n ? read_value(bias, r, Experts ? TRIRUN_F32 : a.y_dtype) : 0.f;
      const float lo = fmaf(sum[j][t][2 * h], s * factor[0], added),
                  hi = fmaf(sum[j][t][2 * h + 1], s * factor[1], added);
      if (!Experts && a.y_dtype == TRIRUN_F32) {
        if (r < a.n && token < a.m) static_cast<float*>(a.y)[token * a.ldy + r] = lo;
        if (r < a.n && token + 1 < a.m) static_cast<float*>(a.y)[(token + 1) * a.ldy + r] = hi;
      } else {
        const uint32_t v = transposed(packed(lo, hi, a.y_dtype));
        store_shared(staged + (8 * t + lane / 4) * 144 + 32 * j + 16 * h + lane % 4 * 4, v);
      }
    }
  }
  if (!Experts && a.y_dtype == TRIRUN_F32) return;
  __syncwarp();
  const bool whole = a.ldy % 8 == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int local = i * 4 + lane / 8, column = row0 + lane % 8 * 8;
    const int64_t token = token0 + tokens + local;
    if (token >= tokens_end || column >= a.n) continue;
    const uint4 v = load_shared4(staged + local * 144 + lane % 8 * 16);
    uint16_t* to = static_cast<uint16_t*>(a.y) + token * a.ldy + column;
    if (whole && column + 8 <= a.n) {
      *reinterpret_cast<uint4*>(to) = v;
    } else {
      const uint32_t part[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 8; ++e)
        if (column + e < a.n) to[e] = static_cast<uint16_t>(part[e / 2] >> 16 * (e % 2));
    }
  }
}

template <typename T>
int launch_type(const Problem& p, const Arguments& a) {
  using Shape = Tile80<128>;
  const int64_t token_tiles = (p.m + Shape::kTokens - 1) / Shape::kTokens,
                row_tiles = (p.w.n / 64 + Shape::kNTiles - 1) / Shape::kNTiles;
  if (row_tiles > 65535) return TRIRUN_BAD_SHAPE;  // of a grid, along y
  const dim3 grid(static_cast<unsigned>(token_tiles), static_cast<unsigned>(row_tiles));
  return launch_kernel(prefill_sm80_kernel<T, 128, false>, {grid, kThreads, Shape::kBytes, p.stream, false}, a);
}

template <typename T, int Tokens>
int launch_experts(const trirun_experts& e, const Arguments& a, void* stream) {
  using Shape = Tile80<Tokens>;
  const int64_t row_tiles = (e.w.n / 64 + Shape::kNTiles - 1) / Shape::kNTiles;
  const dim3 grid(static_cast<unsigned>(e.tile_bound), static_cast<unsigned>(row_tiles));
  return decoder::launch_dependent(prefill_sm80_kernel<T, Tokens, true>, a, grid, kThreads, Shape::kBytes, stream);
}

void set_weight(Arguments& a, const trirun_int2& w) {
  a.words = w.words;
  a.scales = reinterpret_cast<const __half*>(w.scales);
  a.zeros = reinterpret_cast<const __half*>(w.zeros);
  a.padded_k = w.k;
  a.padded_n = w.n;
  a.group_size = w.group_size;
  a.zero = w.zero;
  a.split_zero = w.zeros || !quarters(w.zero);
}

}  // namespace

int64_t shared_bytes_sm80(const Problem& p) {
  return p.plan.tile_m == Tile80<128>::kTokens && p.plan.cta_split <= 1 ? Tile80<128>::kBytes : -1;
}

int launch_sm80(const Problem& p, const PreparedRows& rows) {
  if (shared_bytes_sm80(p) < 0) return TRIRUN_UNSUPPORTED;
  Arguments a = {};
  a.x = rows.x;
  a.ldx = rows.ldx;
  a.k = rows.columns;
  set_weight(a, p.w);
  a.row_scale = rows.scale;
  a.bias = p.bias;
  a.y = p.y;
  a.ldy = p.ldy;
  a.m = int(p.m);
  a.n = int(p.n);
  a.y_dtype = p.dtype;
  return rows.dtype == TRIRUN_BF16 ? launch_type<__nv_bfloat16>(p, a) : launch_type<__half>(p, a);
}

int launch_experts_sm80(const trirun_experts& e, void* stream) {
  if (e.gated || e.act_bits != TRIRUN_ACT16) return TRIRUN_UNSUPPORTED;
  if (!decoder::aligned_to(e.x, 16) || e.ldx % 8) return TRIRUN_BAD_POINTER;
  Arguments a = {};
  set_weight(a, e.w);
  a.x = e.x, a.ldx = e.ldx, a.k = e.k;
  a.bias = e.bias, a.y = e.y, a.ldy = e.ldy, a.n = int(e.n), a.y_dtype = e.dtype;
  a.expert_words = e.w.n * e.w.k / 16, a.expert_groups = e.w.n * (e.w.group_size > 0 ? e.w.k / e.w.group_size : 1);
  a.tiles = e.tiles, a.order = e.order, a.top_k = e.top_k;
  const bool bf16 = e.dtype == TRIRUN_BF16;
  if (e.tile_rows == 128)
    return bf16 ? launch_experts<__nv_bfloat16, 128>(e, a, stream) : launch_experts<__half, 128>(e, a, stream);
  if (e.tile_rows == 64)
    return bf16 ? launch_experts<__nv_bfloat16, 64>(e, a, stream) : launch_experts<__half, 64>(e, a, stream);
  return TRIRUN_UNSUPPORTED;
}

}  // namespace trirun::gemm_prefill
