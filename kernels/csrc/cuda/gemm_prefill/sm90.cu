// The Hopper prefill kernels on the host: the list of compiled instances, tensor maps, grid. The kernels are in
// sm90.cuh (tall tiles) and sm90_tiles.cuh (low ones).
// no-spill(90a): prefill_kernel<*>
// no-spill(90a): prefill_low_kernel<*>
#include "cuda/kernels.cuh"
#include "prefill.cuh"
#include "sm90.cuh"
#include "sm90_tiles.cuh"
#include "cuda/common/tensor_map.cuh"

namespace trirun::gemm_prefill {
namespace {

// 1 or 2: codes less that are 0 or a power of two, whose product with a scale is exact.
float zero_near(float zero) { return zero < 1.5f ? 1.f : 2.f; }

// The most CTAs of a cluster with which `rest` tiles still run at once. Clusters do not cross the borders of a GPC: see
// trirun_kernels/plan.
int tail_splits(int rest, int sms) {
  constexpr int kClusters[][2] = {{8, 15}, {6, 17}, {5, 22}, {4, 30}, {3, 39}, {2, 66}};  // CTAs, clusters on 132 SMs
  for (const auto& [splits, clusters] : kClusters)
    if (rest > 0 && rest <= sms * clusters / 132) return splits;
  return 1;
}

template <typename Shape>
int64_t tiles_of(const Problem& p) {
  return (p.n + Shape::kRowTile - 1) / Shape::kRowTile * ((p.m + Shape::kTokens - 1) / Shape::kTokens);
}

// Whether so many CTAs of a cluster can split a tile: each has stages of it, and their sums fit where the stages were.
template <typename Shape>
bool splits_fit(const Problem& p, int splits) {
  const bool received = splits == 1 || Shape::received(splits) <= Shape::kStages * Shape::kStage;
  return splits <= 8 && splits * Shape::kKTile <= p.w.k / Shape::kColumns && received;
}

// Whether the plan's CTAs can divide the tiles as it says.
template <typename Shape>
bool divides(const Problem& p) {
  const trirun_cuda_plan& plan = p.plan;
  if (plan.ctas <= 0) return splits_fit<Shape>(p, plan.cta_split > 1 ? plan.cta_split : 1);
  const int64_t stages = p.w.k / Shape::kColumns, k_tiles = stages / Shape::kKTile,
                total = tiles_of<Shape>(p) * k_tiles;
  if (plan.cta_split > 2 || stages % Shape::kKTile || total > INT32_MAX ||
      plan.ctas > COUNTERS / 4 / (Shape::kConsumers / 32))
    return false;
  if (plan.cta_split < 2) return true;
  // Pairs: only where every CTA has one tile, and every tile an even number of CTAs.
  const int64_t ctas = std::min<int64_t>(plan.ctas, total), each = total / ctas;
  return total % ctas == 0 && k_tiles % each == 0 && k_tiles / each % 2 == 0;
}

template <typename T, typename Shape>
int launch_shape(void (*kernel)(PrefillArguments), const Problem& p, const PreparedRows& rows) {
  constexpr int kRowTile = Shape::kRowTile, kTokens = Shape::kTokens;
  const cuuint64_t n = p.w.n, k = p.w.k, m = p.m, columns = rows.columns;
  const auto type = sizeof(T) == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  PrefillArguments a = {};
  Box box_of_x = {type,
                  CU_TENSOR_MAP_SWIZZLE_128B,
                  2,
                  {columns, m, 1},
                  {rows.ldx * sizeof(T), 0},
                  {Shape::kPanelColumns, kTokens, 1}};
  int status = encode(&a.x, rows.x, box_of_x);
  a.last_rows = int((m - 1) % kTokens / 8 + 1) * 8;
  box_of_x.box[1] = cuuint32_t(a.last_rows);
  if (status == TRIRUN_OK) status = encode(&a.last_x, rows.x, box_of_x);
  if (status == TRIRUN_OK) status = encode_words(&a.words, p.w, Shape::kBlocks, Shape::kNTiles);
  const bool grouped = Shape::kGrouped && p.w.group_size > 0;
  if (grouped) {
    const cuuint64_t groups = k / p.w.group_size;
    const Box box = {CU_TENSOR_MAP_DATA_TYPE_UINT16,
                     CU_TENSOR_MAP_SWIZZLE_NONE,
                     2,
                     {n, groups, 1},
                     {n * 2, 0},
                     {kRowTile, cuuint32_t(std::max(1, Shape::kColumns / p.w.group_size)), 1}};
    if (status == TRIRUN_OK) status = encode(&a.scales, p.w.scales, box);
    if (status == TRIRUN_OK && p.w.zeros) status = encode(&a.zeros, p.w.zeros, box);
    a.group_scales = reinterpret_cast<const __half*>(p.w.scales);
  } else {
    a.channel_scales = reinterpret_cast<const __half*>(p.w.scales);
    a.channel_zeros = reinterpret_cast<const __half*>(p.w.zeros);
  }
  if (status != TRIRUN_OK) return status;
  a.row_scale = rows.scale;
  a.row_sum = rows.sum;
  a.bias = p.bias;
  a.y = p.y;
  a.ldy = p.ldy;
  a.m = int(p.m);
  a.n = int(p.n);
  a.padded_n = int(p.w.n);
  a.k_stages = int(k / Shape::kColumns);
  a.row_tiles = int((n + kRowTile - 1) / kRowTile);
  a.token_tiles = int((p.m + kTokens - 1) / kTokens);
  a.raster = a.token_tiles < 8 ? a.token_tiles : 8;
  a.early = p.plan.early > 0 && p.plan.early < Shape::kStages ? p.plan.early : Shape::kStages;
  a.group_size = p.w.group_size;
  a.has_zeros = grouped && p.w.zeros;
  a.zero = p.w.zero;
  a.zero_near = zero_near(p.w.zero), a.zero_rest = p.w.zero - a.zero_near;
  a.split_zero = p.w.zeros || !quarters(p.w.zero);
  a.y_dtype = p.dtype;
  // The copy engine writes the last 16 bytes of a row whole, whatever the tensor's width; what lies beside is not ours.
  a.tensor_stores =
      p.dtype != TRIRUN_F32 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0 && p.ldy % 8 == 0 && p.n % 8 == 0;

  const auto run = [&](int first, int last, int splits, bool remainder) {
    a.first_tile = first;
    a.last_tile = last;
    a.splits = splits;
    a.remainder = remainder;
    const unsigned cluster = a.pairs ? 2 : splits;
    const auto swizzle = Shape::kStoreColumns == 32 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_32B;
    if (a.tensor_stores) {
      const int encoded = encode(&a.outputs, p.y,
                                 {CU_TENSOR_MAP_DATA_TYPE_UINT16,
                                  swizzle,
                                  2,
                                  {cuuint64_t(p.n), m, 1},
                                  {cuuint64_t(p.ldy) * 2, 0},
                                  {Shape::kStoreColumns, cluster > 1 ? 8u : kTokens, 1}});
      if (encoded != TRIRUN_OK) return encoded;
    }
    const int ctas = a.each > 0 || splits > 1 || last - first < p.sms ? (last - first) * splits : p.sms;
    return launch_kernel(kernel, {dim3(unsigned(ctas)), Shape::kThreads, Shape::kBytes, p.stream, true, int(cluster)},
                         a);
  };
  const int64_t tiles = tiles_of<Shape>(p);
  if (tiles > INT32_MAX / 8) return TRIRUN_BAD_SHAPE;
  if (!divides<Shape>(p)) return TRIRUN_UNSUPPORTED;
  if (p.plan.ctas > 0) {
    const int64_t k_tiles = a.k_stages / Shape::kKTile, total = tiles * k_tiles;
    const int ctas = int(p.plan.ctas < total ? p.plan.ctas : total);
    a.k_tiles = int(k_tiles), a.each = int(total / ctas), a.rest = int(total % ctas);
    a.ahead = Shape::kAhead && a.each >= a.k_tiles;
    a.pairs = p.plan.cta_split == 2;
    a.counters = reinterpret_cast<uint64_t*>(p.counters);
    a.parts = static_cast<uint4*>(rows.rest);
    return run(0, ctas, 1, false);
  }
  const int splits = p.plan.cta_split > 1 ? p.plan.cta_split : 1;
  // Tiles that would leave most CTAs idle in a last round are shared by clusters of several CTAs each, in a second
  // launch that starts as the first one's CTAs finish.
  const int rest = int(tiles % p.sms), tail = splits == 1 && tiles > p.sms ? tail_splits(rest, p.sms) : 1;
  if (tail == 1 || !splits_fit<Shape>(p, tail) || p.w.k < 1024) return run(0, int(tiles), splits, false);
  status = run(0, int(tiles) - rest, 1, false);
  return status != TRIRUN_OK ? status : run(int(tiles) - rest, int(tiles), tail, true);
}

// The kernel of a plan, found by its tile and by where the weight's scales enter: `visit` is called with it, its type
// of x and its shape, and what it returns is returned. TRIRUN_UNSUPPORTED where there is none.
template <typename T, typename S>
struct Of {
  using Type = T;
  using Shape = S;
};

template <typename T, int Tokens, int NTiles, LowScales Scales, typename Visit>
int visit_low_shape(const Visit& visit) {
  return visit(prefill_low_kernel<T, Tokens, NTiles, Scales>, Of<T, LowShape<T, Tokens, NTiles, Scales>>());
}

template <typename T, int Tokens, Scaling Mode, typename Visit>
int visit_tall(const Visit& visit) {
  return visit(prefill_kernel<T, Tokens, Mode>, Of<T, PrefillShape<T, Tokens, Mode>>());
}

// Tiles of three n tiles by 64 or 128 rows of x, of two by 64.
template <typename T, LowScales Scales, typename Visit>
int visit_low(const Problem& p, const Visit& visit) {
  if (p.plan.tile_n == 192 && p.plan.tile_m == 64) return visit_low_shape<T, 64, 3, Scales>(visit);
  if (p.plan.tile_n == 192 && p.plan.tile_m == 128) return visit_low_shape<T, 128, 3, Scales>(visit);
  if (p.plan.tile_n == 128 && p.plan.tile_m == 64) return visit_low_shape<T, 64, 2, Scales>(visit);
  return TRIRUN_UNSUPPORTED;
}

template <typename T, Scaling Mode, typename Visit>
int visit_tokens(const Problem& p, const Visit& visit) {
  if (p.plan.tile_n == 192 || p.plan.tile_n == 128) {
    if constexpr (Mode == kChannelScales) return visit_low<T, kNoGroups>(p, visit);
    if constexpr (Mode == kGroupScales)
      if (p.w.group_size == 128)
        return p.w.zero == zero_near(p.w.zero) ? visit_low<T, kGroupsOf128>(p, visit)
                                               : visit_low<T, kGroupsWithRest>(p, visit);
    if constexpr (Mode != kChannelScales)
      if (p.w.group_size > 0 && !p.w.zeros) return visit_low<T, kSmallGroups>(p, visit);
    return TRIRUN_UNSUPPORTED;
  }
  // 64 tokens keep twice the row blocks in registers, which leaves no room for zero points of groups.
  if constexpr (Mode != kAnyScales)
    if (p.plan.tile_m == 64) return visit_tall<T, 64, Mode>(visit);
  return p.plan.tile_m == 128 ? visit_tall<T, 128, Mode>(visit) : TRIRUN_UNSUPPORTED;
}

template <typename T, typename Visit>
int visit_scaling(const Problem& p, const Visit& visit) {
  if (p.w.zeros || !quarters(p.w.zero)) return visit_tokens<T, kAnyScales>(p, visit);
  if (p.w.group_size < 0) return visit_tokens<T, kChannelScales>(p, visit);
  return p.w.group_size >= 64 ? visit_tokens<T, kGroupScales>(p, visit) : visit_tokens<T, kAnyScales>(p, visit);
}

template <typename Visit>
int visit_kernel(const Problem& p, int dtype, const Visit& visit) {
  if (p.plan.kernel == TRIRUN_KERNEL_PREFILL_W2A8) return visit_tokens<int8_t, kChannelScales>(p, visit);
  return dtype == TRIRUN_BF16 ? visit_scaling<__nv_bfloat16>(p, visit) : visit_scaling<__half>(p, visit);
}

}  // namespace

size_t stream_k_bytes(const trirun_cuda_plan& plan) {
  const bool hopper = plan.kernel == TRIRUN_KERNEL_PREFILL_WGMMA || plan.kernel == TRIRUN_KERNEL_PREFILL_W2A8;
  const int rows = plan.tile_n == 128 || plan.tile_n == 192 ? plan.tile_n : 256;
  return hopper && plan.ctas > 0 && plan.tile_m > 0 ? size_t(plan.ctas) * 2 * plan.tile_m * rows * 4 : 0;
}

int64_t shared_bytes_sm90(const Problem& p, int dtype) {
  const int bytes = visit_kernel(p, dtype, [&](auto, auto of) {
    using Shape = typename decltype(of)::Shape;
    return tiles_of<Shape>(p) <= INT32_MAX / 8 && divides<Shape>(p) ? Shape::kBytes : TRIRUN_UNSUPPORTED;
  });
  return bytes < 0 ? -1 : bytes;
}

int launch_sm90(const Problem& p, const PreparedRows& rows) {
  return visit_kernel(p, rows.dtype, [&](auto kernel, auto of) {
    using Found = decltype(of);
    return launch_shape<typename Found::Type, typename Found::Shape>(kernel, p, rows);
  });
}

}  // namespace trirun::gemm_prefill
