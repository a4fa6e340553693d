// Decode of more rows of x than mma.sync has columns for (about 9 to 64): wgmma u8 . s8 on Hopper.
//
// The words of four strips, masked, are the A registers of a warpgroup: warp w holds rows of strip w, row block j of
// each. The digits of x are the B operand, in shared memory exactly as quantize.cu wrote them. A producer warp keeps a
// ring of stages full with bulk copies, weights before the previous kernel has ended and x after. Four warpgroups
// an SM multiply, each on row blocks of its own. k is split over a cluster, whose CTAs exchange row slices through
// distributed shared memory.
#include "activations.cuh"
#include "decode_unit.cuh"
#include "kernels.cuh"
#include "wgmma.cuh"

namespace trirun {
namespace {

constexpr int UNIT_BYTES = 2048;  // one strip x 128 k
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
  int slot_rows;                                                     // rows of a slot, padded against bank conflicts
  int totals_at, barriers_at;                                        // offsets in shared memory; stages at 0
};

}  // namespace

// Not in the unnamed namespace, where an architecture without this kernel would warn of every unused member.
template <int DIGITS, int N, int SCALE>
struct Shape {
  // Few columns leave room for two CTAs on an SM, which do not fall into step with each other as warpgroups of one do.
  static constexpr int CTAS = N <= 32 ? 2 : 1;
  static constexpr int WARPGROUPS = 4 / CTAS, CONSUMERS = WARPGROUPS * 128;
  static constexpr int THREADS = CONSUMERS + 128;             // and a warpgroup that copies
  static constexpr int STRIPS = 4;                            // of one CTA
  static constexpr int J = 4 / WARPGROUPS;                    // row blocks of one warpgroup
  static constexpr int TOKENS = DIGITS == 2 ? N / 8 : N / 4;  // of one thread: per 8 columns one or two
  // One digit and one scale per row: int32 sums over all of k are exact and nothing is converted on the way.
  static constexpr bool EXACT = DIGITS == 1 && SCALE == PER_CHANNEL;
  // Registers of a thread at launch, of a copying and of a multiplying one: what the first give up must cover what the
  // others add, or the kernel waits forever.
  static constexpr int LAUNCH_REGISTERS = 65536 / (THREADS * CTAS) / 8 * 8, PRODUCER_REGISTERS = 32;
  static constexpr int CONSUMER_REGISTERS = CTAS == 2 ? 104 : 112;
  static_assert(PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= LAUNCH_REGISTERS * (WARPGROUPS + 1));
};

namespace {

template <int THREADS>
__device__ __forceinline__ void consumers_sync() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}

template <int DIGITS, int N, int SCALE>
__global__ void __launch_bounds__(Shape<DIGITS, N, SCALE>::THREADS, Shape<DIGITS, N, SCALE>::CTAS)
    columns(const __grid_constant__ ColumnsArgs a) {
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
      barrier_init(empty + i * 8, S::CONSUMERS / 32);
    }
    barrier_init(totals_ready, 1);
    barrier_init_fence();
  }
  __syncthreads();
  dependency_launch();

  if (warp >= S::CONSUMERS / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(S::PRODUCER_REGISTERS));
    // Issuing a bulk copy takes its thread about 200 cycles, so four threads share them: a strip each, and the
    // pieces of x. The bytes are announced by the first; the order does not matter.
    const int helper = warp - S::CONSUMERS / 32, x_bytes = UNIT * a.columns;
    const int scale_rows = a.group_rows * (real_zeros ? 2 : 1);
    const uint32_t stage_tx =
        strips * (UNIT_BYTES + scale_rows * 128) + x_bytes + a.tokens * (SCALE == PER_BLOCK ? 24 : 8);
    const uint64_t policy = evict_first_policy();
    const int64_t strip_stride = static_cast<int64_t>(a.units) * UNIT_BYTES;
    const uint8_t* words = a.words + (strip0 + helper) * strip_stride;
    const auto load_weights = [&](int u, int stage) {
      const uint32_t base = shared + stage * a.stage_bytes, barrier = full + stage * 8;
      if (helper == 0) barrier_expect(barrier, stage_tx);
      if (helper < strips)
        bulk_load_once(base + helper * UNIT_BYTES, words + static_cast<int64_t>(unit0 + u) * UNIT_BYTES, UNIT_BYTES,
                       barrier, policy);
      if constexpr (SCALE != PER_CHANNEL) {
        // The tile's scales of one group row are contiguous.
        for (int g = helper; g < scale_rows; g += 4) {
          const bool is_zero = g >= a.group_rows;
          const int64_t row = static_cast<int64_t>(unit0 + u) * a.group_rows + (is_zero ? g - a.group_rows : g);
          bulk_load_once(base + a.scales_at + g * S::STRIPS * 128,
                         (is_zero ? a.zeros : a.scales) + row * a.n_pad + strip0 * 64, strips * 128, barrier, policy);
        }
      }
    };
    const auto load_x = [&](int u, int stage) {
      const uint32_t base = shared + stage * a.stage_bytes, barrier = full + stage * 8;
      const int64_t unit = unit0 + u;
      if (helper == 1) bulk_load(base + a.x_at, a.digits + unit * x_bytes, x_bytes, barrier);
      if (helper == 2) bulk_load(base + a.x_scales_at, a.x_scales + unit * a.tokens, a.tokens * 8, barrier);
      if (SCALE == PER_BLOCK && helper == 3)
        bulk_load(base + a.x_sums_at, a.x_sums + unit * a.tokens, a.tokens * 16, barrier);
    };
    const int first = min(a.stages, units);
    if (lane == 0)
      for (int u = 0; u < first; u++) load_weights(u, u);
    __syncwarp();
    dependency_wait();
    if (lane == 0)
      for (int u = 0; u < first; u++) load_x(u, u);
    __syncwarp();
    if (SCALE == PER_CHANNEL && helper == 3) {
      // What the zero point multiplies: every token's sum over this CTA's k.
      for (int token = lane; token < a.tokens; token += 32) {
        float total = 0.f;
#pragma unroll 8
        for (int u = 0; u < units; u++)
          total += __ldcg(&a.x_scales[static_cast<int64_t>(unit0 + u) * a.tokens + token].y);
        totals[token] = total;
        if (S::EXACT) totals[a.tokens + token] = __ldcg(&a.x_scales[static_cast<int64_t>(unit0) * a.tokens + token].x);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(totals_ready);
    }
    // A thread with nothing to copy must not follow the stages either: not being waited for, it could fall behind by
    // two rounds, and a parity does not tell those apart.
    const bool needed = helper < 3 || strips > 3 || SCALE == PER_BLOCK || scale_rows > 3;
    if (lane == 0 && needed) {
      int stage = 0;
      uint32_t phase = 0;
      for (int u = first; u < units; u++) {
        barrier_wait(empty + stage * 8, phase);
        load_weights(u, stage);
        load_x(u, stage);
        if (++stage == a.stages) stage = 0, phase ^= 1;
      }
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(S::CONSUMER_REGISTERS));
    const int strip_in_tile = warp % 4, j0 = warp / 4 * S::J;
    float sum[S::J][S::TOKENS][2];
    int c[S::J][N / 2];
#pragma unroll
    for (int j = 0; j < S::J; j++)
#pragma unroll
      for (int t = 0; t < S::TOKENS; t++) sum[j][t][0] = sum[j][t][1] = 0.f;
    int stage = 0;
    uint32_t phase = 0;
#pragma unroll 1
    for (int u = 0; u < units; u++) {
      barrier_wait(full + stage * 8, phase);
      const uint32_t base = shared + stage * a.stage_bytes;
      const uint64_t digits = wgmma_descriptor(base + a.x_at, a.columns * 16, 128);
      const uint32_t x_scales = base + a.x_scales_at + (lane & 3) * (DIGITS == 2 ? 8 : 16);
      const uint32_t row_scales_at = base + a.scales_at + strip_in_tile * 128 + lane / 4 * 16;

      // One group's (128 k, or one block of 32) sums of row block j to floats. half_sums: sum of x over those k.
      const auto convert = [&](const int (&c)[N / 2], int j, int block, const uint4& row_scales,
                               const uint4& row_zeros) {
#pragma unroll
        for (int n = 0; n < N / 8; n++)
#pragma unroll
          for (int e = 0; e < 2 / DIGITS; e++) {
            const int t = DIGITS == 2 ? n : n * 2 + e;
            const float2 s = load_shared_float2(x_scales + n * (DIGITS == 2 ? 32 : 64) + e * 8);
            float zero_sum = s.y;
            if constexpr (SCALE == PER_BLOCK)
              zero_sum = load_shared_float(base + a.x_sums_at +
                                           ((lane & 3) * (2 / DIGITS) + e + n * (8 / DIGITS)) * 16 + block * 4);
#pragma unroll
            for (int h = 0; h < 2; h++) {
              const float v = static_cast<float>(DIGITS == 2 ? c[n * 4 + 2 * h] * 256 + c[n * 4 + 2 * h + 1]
                                                             : c[n * 4 + 2 * h + e]);
              if constexpr (SCALE == PER_CHANNEL) {
                sum[j][t][h] += s.x * v;
              } else {
                const int jj = j0 + j;
                const uint32_t sw = jj == 0   ? row_scales.x
                                    : jj == 1 ? row_scales.y
                                    : jj == 2 ? row_scales.z
                                              : row_scales.w;
                const uint32_t zw = jj == 0 ? row_zeros.x : jj == 1 ? row_zeros.y : jj == 2 ? row_zeros.z : row_zeros.w;
                const __half2 sp = *reinterpret_cast<const __half2*>(&sw), zp = *reinterpret_cast<const __half2*>(&zw);
                const float quarter = __uint_as_float((127 - 2 * jj) << 23);
                const float z = real_zeros ? (h ? __high2float(zp) : __low2float(zp)) : a.zero;
                sum[j][t][h] += (h ? __high2float(sp) : __low2float(sp)) * (s.x * (v * quarter) - z * zero_sum);
              }
            }
          }
      };
      // The words of this lane, block by block, masked for every row block of this warpgroup.
      const auto load_words = [&](uint32_t (&r)[S::J][4], int block) {
        const uint4 w = load_shared4(base + strip_in_tile * UNIT_BYTES + block * 512 + lane * 16);
#pragma unroll
        for (int j = 0; j < S::J; j++) {
          const uint32_t m = 0x03030303u << (2 * (j0 + j));
          r[j][0] = w.x & m, r[j][1] = w.y & m, r[j][2] = w.z & m, r[j][3] = w.w & m;
        }
      };
      const uint64_t block_step = a.columns * 32 >> 4;

      if constexpr (SCALE == PER_BLOCK) {
#pragma unroll 1
        for (int block = 0; block < 4; block++) {
          const uint32_t at = row_scales_at + (block * a.group_rows >> 2) * S::STRIPS * 128;
          const uint4 row_scales = load_shared4(at),
                      row_zeros = load_shared4(at + (real_zeros ? a.group_rows * S::STRIPS * 128 : 0));
          uint32_t r[S::J][4];
          load_words(r, block);
          wgmma_fence();
#pragma unroll
          for (int j = 0; j < S::J; j++) wgmma_u8s8(c[j], r[j], digits + block * block_step, 0);
          wgmma_commit();
          wgmma_wait<0>();
#pragma unroll
          for (int j = 0; j < S::J; j++) convert(c[j], j, block, row_scales, row_zeros);
        }
      } else {
        uint4 row_scales{}, row_zeros{};
        if constexpr (SCALE == PER_UNIT) {
          // No branch here: between wgmma groups it would serialize them. Without zeros the scales stand in, unused.
          row_scales = load_shared4(row_scales_at);
          row_zeros = load_shared4(row_scales_at + (real_zeros ? S::STRIPS * 128 : 0));
        }
        uint32_t r[4][S::J][4];
#pragma unroll
        for (int block = 0; block < 4; block++) load_words(r[block], block);
        wgmma_fence();
#pragma unroll
        for (int block = 0; block < 4; block++)
#pragma unroll
          for (int j = 0; j < S::J; j++)
            wgmma_u8s8(c[j], r[block][j], digits + block * block_step, S::EXACT ? u > 0 || block > 0 : block > 0);
        wgmma_commit();
        wgmma_wait<0>();
        if constexpr (!S::EXACT) {
#pragma unroll
          for (int j = 0; j < S::J; j++) convert(c[j], j, 0, row_scales, row_zeros);
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
      consumers_sync<S::CONSUMERS>();
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
            if constexpr (S::EXACT) v = static_cast<float>(c[j][t / 2 * 4 + 2 * h + t % 2]) * totals[a.tokens + token];
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
      consumers_sync<S::CONSUMERS>();
    }
    const float* slots = reinterpret_cast<const float*>(memory);
#pragma unroll 1
    for (int i = threadIdx.x; i < a.m << rows_log; i += S::CONSUMERS) {
      const int local = i & (rows - 1), token = i >> rows_log, row = rank * rows + local, n = strip0 * 64 + row;
      if (n >= a.n) continue;
      float v = 0.f;
      for (int source = 0; source < a.cta_split; source++)
        v += slots[source * slot_floats + token * a.slot_rows + local];
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
  int digits, columns, scale, tile_strips, threads, registers;
  Kernel kernel;
};

#define TRIRUN_COLUMNS(D, N, S) \
  {D, N, S, Shape<D, N, S>::STRIPS, Shape<D, N, S>::THREADS, Shape<D, N, S>::LAUNCH_REGISTERS, columns<D, N, S>}
// digits of x, columns (digits * rows of x, at most), where weight scales enter
// no-spill(90a): columns<2, 32, 0>
// no-spill(90a): columns<1, 32, 0>
constexpr Instance INSTANCES[] = {
    TRIRUN_COLUMNS(2, 32, PER_CHANNEL),  TRIRUN_COLUMNS(2, 32, PER_UNIT),  TRIRUN_COLUMNS(2, 32, PER_BLOCK),
    TRIRUN_COLUMNS(2, 64, PER_CHANNEL),  TRIRUN_COLUMNS(2, 64, PER_UNIT),  TRIRUN_COLUMNS(2, 64, PER_BLOCK),
    TRIRUN_COLUMNS(2, 96, PER_CHANNEL),  TRIRUN_COLUMNS(2, 96, PER_UNIT),  TRIRUN_COLUMNS(2, 96, PER_BLOCK),
    TRIRUN_COLUMNS(2, 128, PER_CHANNEL), TRIRUN_COLUMNS(2, 128, PER_UNIT), TRIRUN_COLUMNS(2, 128, PER_BLOCK),
    TRIRUN_COLUMNS(1, 32, PER_CHANNEL),  TRIRUN_COLUMNS(1, 32, PER_UNIT),  TRIRUN_COLUMNS(1, 32, PER_BLOCK),
    TRIRUN_COLUMNS(1, 64, PER_CHANNEL),  TRIRUN_COLUMNS(1, 64, PER_UNIT),  TRIRUN_COLUMNS(1, 64, PER_BLOCK),
};

int align(int v) { return (v + 127) / 128 * 128; }

// Whether this binary's kernel starts with the registers that its warpgroups redistribute: a compiler that had given
// it fewer would have made a kernel that never ends.
bool starts_whole(const Instance& instance) {
  static bool known[sizeof(INSTANCES) / sizeof(INSTANCES[0])];
  bool& whole = known[&instance - INSTANCES];
  cudaFuncAttributes attributes;
  if (!whole && cudaFuncGetAttributes(&attributes, instance.kernel) == cudaSuccess)
    whole = attributes.numRegs >= instance.registers;
  return whole;
}

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
      plan.stages > MAX_STAGES || !starts_whole(*instance))
    return TRIRUN_UNSUPPORTED;
  const int64_t part = (p.w.k / UNIT + plan.cta_split - 1) / plan.cta_split;
  if (layout.digits == 1 && scale == PER_CHANNEL && part * UNIT > EXACT_SUM) return TRIRUN_UNSUPPORTED;

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
  a.barriers_at = a.totals_at + align(layout.tokens * 8);
  const int bytes = a.barriers_at + 2 * MAX_STAGES * 8 + 16;
  if (bytes > 227 * 1024) return TRIRUN_UNSUPPORTED;
  if (p.activations == nullptr)
    if (const int code = launch_quantize(p, p.workspace)) return code;
  if (const cudaError_t e = cudaFuncSetAttribute(instance->kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes))
    return e;

  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = plan.cta_split;
  attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<unsigned>((a.strips + instance->tile_strips - 1) / instance->tile_strips * plan.cta_split));
  config.blockDim = dim3(instance->threads);
  config.dynamicSmemBytes = bytes;
  config.stream = p.stream;
  config.attrs = attributes;
  config.numAttrs = plan.cta_split > 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, instance->kernel, a);
}

}  // namespace trirun
