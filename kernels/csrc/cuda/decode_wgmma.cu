// Decode of more rows of x than mma.sync has columns for (about 9 to 64): wgmma u8 . s8 on Hopper.
//
// The words of four strips, masked, are the A registers of a warpgroup: warp w holds rows of strip w, row block j of
// each. The digits of x are the B operand, in shared memory exactly as quantize.cu wrote them. A producer warp keeps a
// ring of stages full with bulk copies, weights before the previous kernel has ended and x after; two warpgroups
// multiply, on strips of their own or, where one row block's sums already fill the registers, on two row blocks each
// of the same four strips. k is split over a cluster, whose CTAs exchange row slices through distributed shared memory.
#include "activations.cuh"
#include "decode_unit.cuh"
#include "kernels.cuh"
#include "wgmma.cuh"

namespace trirun {
namespace {

constexpr int UNIT_BYTES = 2048;           // one strip x 128 k
constexpr int CONSUMERS = 256;             // two warpgroups
constexpr int THREADS = CONSUMERS + 128;   // a third warpgroup: one warp copies, one sums x
// Registers of a copying and of a multiplying thread: (40 + 2 * 232) * 128 is what an SM has.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;
constexpr int MAX_STAGES = 12;

struct ColumnsArgs {
  const uint8_t* words;
  const __half* scales;
  const __half* zeros;  // or null
  float zero;
  int strips, units, group_rows, cta_split;
  int64_t n_pad;
  int n, m;
  const uint8_t* digits;
  const float2* x_scales;
  const float4* x_sums;
  int tokens, columns;
  const void* bias;
  void* y;
  int64_t ldy;
  int dtype;
  int stages, stage_bytes, scales_at, x_at, x_scales_at, x_sums_at;  // offsets within a stage; words at 0
  int slot_rows;                                                      // rows of a slot, padded against bank conflicts
  int totals_at, barriers_at;                                         // offsets in shared memory; stages at 0
};

template <int DIGITS, int N, int SCALE>
struct Shape {
  static constexpr bool SHARED_STRIPS = N * (3 - DIGITS) > 64;  // both warpgroups on the same four strips
  static constexpr int J = SHARED_STRIPS ? 2 : 4;           // row blocks of one warpgroup
  static constexpr int STRIPS = SHARED_STRIPS ? 4 : 8;      // of one CTA
  static constexpr int TOKENS = DIGITS == 2 ? N / 8 : N / 4;  // of one thread: per 8 columns one or two
};

__device__ __forceinline__ void consumers_sync() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

template <int DIGITS, int N, int SCALE>
__global__ void __launch_bounds__(THREADS, 1) columns(const __grid_constant__ ColumnsArgs a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using S = Shape<DIGITS, N, SCALE>;
  extern __shared__ __align__(1024) uint8_t memory[];
  const uint32_t shared = shared_address(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int rank = blockIdx.x % a.cta_split, tile = blockIdx.x / a.cta_split;
  const int unit0 = rank * a.units / a.cta_split, units = (rank + 1) * a.units / a.cta_split - unit0;
  const int strip0 = tile * S::STRIPS, strips = min(S::STRIPS, a.strips - strip0);
  const bool real_zeros = a.zeros != nullptr;
  const uint32_t full = shared + a.barriers_at, empty = full + MAX_STAGES * 8, totals_ready = empty + MAX_STAGES * 8;
  float* totals = reinterpret_cast<float*>(memory + a.totals_at);

  if (threadIdx.x == 0) {
    for (int i = 0; i < a.stages; i++) {
      barrier_init(full + i * 8, 1);
      barrier_init(empty + i * 8, CONSUMERS / 32);
    }
    barrier_init(totals_ready, 1);
    barrier_init_fence();
  }
  __syncthreads();
  dependency_launch();

  if (warp >= CONSUMERS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    if (warp == CONSUMERS / 32 && lane == 0) {
      const uint64_t policy = evict_first_policy();
      const int scale_rows = a.group_rows * (real_zeros ? 2 : 1), x_bytes = UNIT * a.columns;
      const int weight_bytes = strips * (UNIT_BYTES + scale_rows * 128);
      const int stage_tx = weight_bytes + x_bytes + a.tokens * (SCALE == PER_BLOCK ? 24 : 8);
      const auto load_weights = [&](int unit, int stage) {
        const uint32_t base = shared + stage * a.stage_bytes, barrier = full + stage * 8;
        barrier_expect(barrier, stage_tx);
#pragma unroll 1
        for (int s = 0; s < strips; s++) {
          const int64_t strip = strip0 + s;
          bulk_load_once(base + s * UNIT_BYTES, a.words + (strip * a.units + unit) * UNIT_BYTES, UNIT_BYTES, barrier, policy);
          if constexpr (SCALE != PER_CHANNEL) {
            for (int g = 0; g < a.group_rows; g++) {
              const int64_t at = (static_cast<int64_t>(unit) * a.group_rows + g) * a.n_pad + strip * 64;
              const uint32_t to = base + a.scales_at + (s * scale_rows + g) * 128;
              bulk_load_once(to, a.scales + at, 128, barrier, policy);
              if (real_zeros) bulk_load_once(to + a.group_rows * 128, a.zeros + at, 128, barrier, policy);
            }
          }
        }
      };
      const auto load_x = [&](int unit, int stage) {
        const uint32_t base = shared + stage * a.stage_bytes, barrier = full + stage * 8;
        bulk_load(base + a.x_at, a.digits + static_cast<int64_t>(unit) * x_bytes, x_bytes, barrier);
        bulk_load(base + a.x_scales_at, a.x_scales + static_cast<int64_t>(unit) * a.tokens, a.tokens * 8, barrier);
        if constexpr (SCALE == PER_BLOCK)
          bulk_load(base + a.x_sums_at, a.x_sums + static_cast<int64_t>(unit) * a.tokens, a.tokens * 16, barrier);
      };
      const int first = min(a.stages, units);
      for (int u = 0; u < first; u++) load_weights(unit0 + u, u);
      dependency_wait();
      for (int u = 0; u < first; u++) load_x(unit0 + u, u);
      int stage = 0;
      uint32_t phase = 0;
      for (int u = first; u < units; u++) {
        barrier_wait(empty + stage * 8, phase);
        load_weights(unit0 + u, stage);
        load_x(unit0 + u, stage);
        if (++stage == a.stages) stage = 0, phase ^= 1;
      }
    }
    if (SCALE == PER_CHANNEL && warp == CONSUMERS / 32 + 1) {
      // What the zero point multiplies: every token's sum over this CTA's k.
      dependency_wait();
      for (int token = lane; token < a.tokens; token += 32) {
        float total = 0.f;
#pragma unroll 8
        for (int u = 0; u < units; u++) total += __ldcg(&a.x_scales[static_cast<int64_t>(unit0 + u) * a.tokens + token].y);
        totals[token] = total;
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(totals_ready);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    float sum[S::J][S::TOKENS][2];
#pragma unroll
    for (int j = 0; j < S::J; j++)
#pragma unroll
      for (int t = 0; t < S::TOKENS; t++) sum[j][t][0] = sum[j][t][1] = 0.f;
    const int group = warp / 4, strip_in_tile = S::SHARED_STRIPS ? warp % 4 : warp % 8, j0 = S::SHARED_STRIPS ? group * 2 : 0;
    int stage = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int u = 0; u < units; u++) {
      barrier_wait(full + stage * 8, phase);
      const uint32_t base = shared + stage * a.stage_bytes;
      uint4 w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = load_shared4(base + strip_in_tile * UNIT_BYTES + i * 512 + lane * 16);
      const uint64_t digits = wgmma_descriptor(base + a.x_at, a.columns * 16, 128);
      const uint32_t x_scales = base + a.x_scales_at + (lane & 3) * (DIGITS == 2 ? 8 : 16);
      const uint32_t row_scales_at =
          base + a.scales_at + strip_in_tile * a.group_rows * (real_zeros ? 256 : 128) + lane / 4 * 16;

      // One group's (128 k, or one block of 32) sums of row block j to floats. half_sums: sum of x over those k.
      const auto convert = [&](const int(&c)[N / 2], int j, int block, const uint4& row_scales, const uint4& row_zeros) {
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
          for (int e = 0; e < 2 / DIGITS; e++) {
            const int t = DIGITS == 2 ? n : n * 2 + e;
            const float2 s = load_shared_float2(x_scales + n * (DIGITS == 2 ? 32 : 64) + e * 8);
            float zero_sum = s.y;
            if constexpr (SCALE == PER_BLOCK)
              zero_sum = load_shared_float(base + a.x_sums_at + ((lane & 3) * (2 / DIGITS) + e + n * (8 / DIGITS)) * 16 + block * 4);
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const float v = static_cast<float>(DIGITS == 2 ? c[n * 4 + 2 * h] * 256 + c[n * 4 + 2 * h + 1] : c[n * 4 + 2 * h + e]);
              if constexpr (SCALE == PER_CHANNEL) {
                sum[j][t][h] += s.x * v;
              } else {
                const int jj = j0 + j;
                const uint32_t sw = jj == 0 ? row_scales.x : jj == 1 ? row_scales.y : jj == 2 ? row_scales.z : row_scales.w;
                const uint32_t zw = jj == 0 ? row_zeros.x : jj == 1 ? row_zeros.y : jj == 2 ? row_zeros.z : row_zeros.w;
                const __half2 sp = *reinterpret_cast<const __half2*>(&sw), zp = *reinterpret_cast<const __half2*>(&zw);
                const float quarter = __uint_as_float((127 - 2 * jj) << 23);
                const float z = real_zeros ? (h ? __high2float(zp) : __low2float(zp)) : a.zero;
                sum[j][t][h] += (h ? __high2float(sp) : __low2float(sp)) * (s.x * (v * quarter) - z * zero_sum);
              }
            }
          }
      };
      const auto mask = [&](uint32_t(&r)[4], const uint4& v, int j) {
        const uint32_t m = 0x03030303u << (2 * (j0 + j));
        r[0] = v.x & m, r[1] = v.y & m, r[2] = v.z & m, r[3] = v.w & m;
      };

      if constexpr (SCALE == PER_BLOCK) {
#pragma unroll 1
        for (int block = 0; block < 4; block++) {
          const uint4 wb = block == 0 ? w[0] : block == 1 ? w[1] : block == 2 ? w[2] : w[3];
          const uint32_t at = row_scales_at + (block * a.group_rows >> 2) * 128;
          const uint4 row_scales = load_shared4(at);
          const uint4 row_zeros = real_zeros ? load_shared4(at + a.group_rows * 128) : uint4{};
#pragma unroll
          for (int j = 0; j < S::J; j++) {
            int c[N / 2];
            uint32_t r[4];
            mask(r, wb, j);
            wgmma_fence();
            wgmma_u8s8(c, r, digits + block * (a.columns * 32 >> 4), 0);
            wgmma_commit();
            wgmma_wait<0>();
            convert(c, j, block, row_scales, row_zeros);
          }
        }
      } else {
        uint4 row_scales{}, row_zeros{};
        if constexpr (SCALE == PER_UNIT) {
          row_scales = load_shared4(row_scales_at);
          // No branch here: between wgmma groups it would serialize them. Without zeros the scales stand in, unused.
          row_zeros = load_shared4(row_scales_at + (real_zeros ? 128 : 0));
        }
        if constexpr (N <= 64) {
          // Two accumulators: one row block is converted while the tensor cores work on the next.
          int c[2][N / 2];
          uint32_t r[2][4][4];
#pragma unroll
          for (int j = 0; j <= S::J; j++) {
            if (j < S::J) {
#pragma unroll
              for (int block = 0; block < 4; block++) mask(r[j & 1][block], w[block], j);
              wgmma_fence();
#pragma unroll
              for (int block = 0; block < 4; block++)
                wgmma_u8s8(c[j & 1], r[j & 1][block], digits + block * (a.columns * 32 >> 4), block > 0);
              wgmma_commit();
            }
            if (j > 0) {
              if (j < S::J)
                wgmma_wait<1>();
              else
                wgmma_wait<0>();
              convert(c[(j - 1) & 1], j - 1, 0, row_scales, row_zeros);
            }
          }
        } else {
#pragma unroll
          for (int j = 0; j < S::J; j++) {
            int c[N / 2];
            uint32_t r[4][4];
#pragma unroll
            for (int block = 0; block < 4; block++) mask(r[block], w[block], j);
            wgmma_fence();
#pragma unroll
            for (int block = 0; block < 4; block++)
              wgmma_u8s8(c, r[block], digits + block * (a.columns * 32 >> 4), block > 0);
            wgmma_commit();
            wgmma_wait<0>();
            convert(c, j, 0, row_scales, row_zeros);
          }
        }
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(empty + stage * 8);
      if (++stage == a.stages) stage = 0, phase ^= 1;
    }

    // Exchange: rank r owns rows [r, r + 1) * 64 * STRIPS / cta_split of the tile and takes every CTA's part of them, in
    // the memory that held the stages, once all CTAs are done with it. (Threads that have exited count as arrived.)
    if (SCALE == PER_CHANNEL) barrier_wait(totals_ready, 0);
    if (a.cta_split > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      consumers_sync();
    }
    const int rows_log = __ffs(64 * S::STRIPS / a.cta_split) - 1, rows = 1 << rows_log;
    const int slot_floats = a.slot_rows * a.tokens;
    if (strip_in_tile < strips) {
      uint4 row_zeros{};
      if (SCALE == PER_CHANNEL && real_zeros)
        row_zeros = __ldg(reinterpret_cast<const uint4*>(a.zeros + (strip0 + strip_in_tile) * 64) + lane / 4);
#pragma unroll
      for (int j = 0; j < S::J; j++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int jj = j0 + j, row = strip_in_tile * 64 + jj * 16 + h * 8 + lane / 4, owner = row >> rows_log;
          uint32_t to = shared + (rank * slot_floats + (row & (rows - 1))) * 4;
          if (a.cta_split > 1) to = peer_address(to, owner);
          const uint32_t zw = jj == 0 ? row_zeros.x : jj == 1 ? row_zeros.y : jj == 2 ? row_zeros.z : row_zeros.w;
          const __half2 zp = *reinterpret_cast<const __half2*>(&zw);
          const float z = real_zeros ? (h ? __high2float(zp) : __low2float(zp)) : a.zero;
          const float quarter = __uint_as_float((127 - 2 * jj) << 23);
#pragma unroll
          for (int t = 0; t < S::TOKENS; t++) {
            const int token = DIGITS == 2 ? t * 4 + lane % 4 : t / 2 * 8 + lane % 4 * 2 + t % 2;
            if (token >= a.m) continue;
            float v = sum[j][t][h];
            if constexpr (SCALE == PER_CHANNEL) v = v * quarter - z * totals[token];
            if (a.cta_split > 1)
              store_peer(to + token * a.slot_rows * 4, v);
            else
              store_shared(to + token * a.slot_rows * 4, v);
          }
        }
    }
    if (a.cta_split > 1) {
      cluster_arrive();
      cluster_wait();
    } else {
      consumers_sync();
    }
    const float* slots = reinterpret_cast<const float*>(memory);
#pragma unroll 1
    for (int i = threadIdx.x; i < a.m << rows_log; i += CONSUMERS) {
      const int local = i & (rows - 1), token = i >> rows_log, row = rank * rows + local, n = strip0 * 64 + row;
      if (n >= a.n) continue;
      float v = 0.f;
      for (int source = 0; source < a.cta_split; source++) v += slots[source * slot_floats + token * a.slot_rows + local];
      if (SCALE == PER_CHANNEL) {
        const int in_strip = row % 64, stored = in_strip % 8 * 8 + in_strip / 16 * 2 + in_strip / 8 % 2;
        v *= __half2float(a.scales[n / 64 * 64 + stored]);
      }
      if (a.bias != nullptr) v += load_element(a.bias, n, a.dtype);
      store_element(a.y, token * a.ldy + n, v, a.dtype);
    }
  }
#endif
}

using Kernel = void (*)(ColumnsArgs);

struct Instance {
  int digits, columns, scale, tile_strips;
  Kernel kernel;
};

#define TRIRUN_COLUMNS(D, N, S) {D, N, S, Shape<D, N, S>::STRIPS, columns<D, N, S>}
// digits of x, columns (digits * rows of x, at most), where weight scales enter
constexpr Instance INSTANCES[] = {
    TRIRUN_COLUMNS(2, 32, PER_CHANNEL),  TRIRUN_COLUMNS(2, 32, PER_UNIT),  TRIRUN_COLUMNS(2, 32, PER_BLOCK),
    TRIRUN_COLUMNS(2, 64, PER_CHANNEL),  TRIRUN_COLUMNS(2, 64, PER_UNIT),  TRIRUN_COLUMNS(2, 64, PER_BLOCK),
    TRIRUN_COLUMNS(2, 96, PER_CHANNEL),  TRIRUN_COLUMNS(2, 96, PER_UNIT),  TRIRUN_COLUMNS(2, 96, PER_BLOCK),
    TRIRUN_COLUMNS(2, 128, PER_CHANNEL), TRIRUN_COLUMNS(2, 128, PER_UNIT), TRIRUN_COLUMNS(2, 128, PER_BLOCK),
    TRIRUN_COLUMNS(1, 32, PER_CHANNEL),  TRIRUN_COLUMNS(1, 32, PER_UNIT),  TRIRUN_COLUMNS(1, 32, PER_BLOCK),
    TRIRUN_COLUMNS(1, 64, PER_CHANNEL),  TRIRUN_COLUMNS(1, 64, PER_UNIT),  TRIRUN_COLUMNS(1, 64, PER_BLOCK),
};

int align(int v) { return (v + 127) / 128 * 128; }

}  // namespace

size_t workspace_columns(const Problem& p) {
  return p.activations != nullptr ? 0 : activation_bytes(p.m, p.w.k, p.act_bits);
}

int launch_columns(const Problem& p) {
  if (p.arch != 90) return TRIRUN_UNSUPPORTED;
  const trirun_cuda_plan& plan = p.plan;
  const ActivationLayout layout(p.m, p.w.k, p.act_bits);
  const int scale = p.w.group_size == -1 ? PER_CHANNEL : p.w.group_size == UNIT ? PER_UNIT : PER_BLOCK;
  const Instance* instance = nullptr;
  for (const Instance& i : INSTANCES)
    if (i.digits == layout.digits && i.scale == scale && i.columns >= layout.columns &&
        (instance == nullptr || i.columns < instance->columns))
      instance = &i;
  const bool split = plan.cta_split == 1 || plan.cta_split == 2 || plan.cta_split == 4 || plan.cta_split == 8;
  if (instance == nullptr || layout.columns % 8 || !split || plan.cta_split > p.w.k / UNIT || plan.stages < 2 ||
      plan.stages > MAX_STAGES)
    return TRIRUN_UNSUPPORTED;

  ColumnsArgs a{};
  a.words = reinterpret_cast<const uint8_t*>(p.w.words);
  a.scales = reinterpret_cast<const __half*>(p.w.scales);
  a.zeros = reinterpret_cast<const __half*>(p.w.zeros);
  a.zero = p.w.zero;
  a.strips = static_cast<int>(p.w.n / 64), a.units = static_cast<int>(p.w.k / UNIT);
  a.group_rows = scale == PER_CHANNEL ? 0 : UNIT / p.w.group_size;
  a.cta_split = plan.cta_split;
  a.n_pad = p.w.n, a.n = static_cast<int>(p.n), a.m = static_cast<int>(p.m);
  a.tokens = layout.tokens, a.columns = layout.columns;
  a.bias = p.bias, a.y = p.y, a.ldy = p.ldy, a.dtype = p.dtype;
  auto* base = static_cast<const uint8_t*>(p.activations != nullptr ? p.activations : p.workspace);
  a.digits = base;
  a.x_scales = reinterpret_cast<const float2*>(base + layout.scales_offset);
  a.x_sums = reinterpret_cast<const float4*>(base + layout.sums_offset);
  a.stages = plan.stages;
  a.scales_at = instance->tile_strips * UNIT_BYTES;
  a.x_at = a.scales_at + instance->tile_strips * a.group_rows * 128 * (a.zeros != nullptr ? 2 : 1);
  // A tile wider than the columns there are reads on into what follows; the stage must hold that much.
  a.x_scales_at = align(a.x_at + UNIT * instance->columns);
  a.x_sums_at = align(a.x_scales_at + layout.tokens * 8);
  a.stage_bytes = align(a.x_sums_at + (scale == PER_BLOCK ? layout.tokens * 16 : 0));
  a.slot_rows = 64 * instance->tile_strips / plan.cta_split + 8;
  const int slots = plan.cta_split * a.slot_rows * layout.tokens * 4, ring = plan.stages * a.stage_bytes;
  a.totals_at = align(slots > ring ? slots : ring);
  a.barriers_at = a.totals_at + align(layout.tokens * 4);
  const int bytes = a.barriers_at + 2 * MAX_STAGES * 8 + 16;
  if (bytes > 227 * 1024) return TRIRUN_UNSUPPORTED;
  if (p.activations == nullptr)
    if (const int code = launch_quantize(p, p.workspace)) return code;
  if (const cudaError_t e = cudaFuncSetAttribute(instance->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;

  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = plan.cta_split;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((a.strips + instance->tile_strips - 1) / instance->tile_strips * plan.cta_split));
  config.blockDim = dim3(THREADS);
  config.dynamicSmemBytes = bytes;
  config.stream = p.stream;
  config.attrs = attributes;
  config.numAttrs = plan.cta_split > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, instance->kernel, a);
}

}  // namespace trirun
