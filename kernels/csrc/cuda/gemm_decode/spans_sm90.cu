// y = x . w^T for about 5 to 64 rows of x by a weight with one scale per output channel, or per group of 128, on
// sm_90a: the per-span kernel (spans_kernel.cuh), whose int32 sums become floats once per span of 512 k. Here are its
// instances, and the way from a plan to a launch.
#include "spans_kernel.cuh"

namespace trirun::gemm_decode {
namespace {

template <int LIMBS, int N, bool FUSED, bool GROUPED = false, int HEIGHT = 4>
constexpr Instance instance() {
  using S = SpansShape<LIMBS, N, FUSED, HEIGHT>;
  constexpr int STAGED = S::STAGED * S::CONSUMERS / 32;
  return {S::N_TILES,
          LIMBS,
          N,
          FUSED,
          GROUPED,
          S::CONSUMERS,
          S::THREADS,
          S::LAUNCH_REGISTERS,
          S::QUARTERS,
          STAGED,
          gemm_spans<LIMBS, N, FUSED, GROUPED, HEIGHT>};
}

// limbs of x, columns (limbs * rows of x, at most), whether it quantizes x, whether scales are of groups of 128
// no-spill(90a): gemm_spans<*, *, *, *, *>
constexpr Instance INSTANCES[] = {
    instance<2, 16, false>(),
    instance<2, 32, false>(),
    instance<2, 64, false>(),
    instance<1, 16, false>(),
    instance<1, 32, false>(),
    instance<2, 16, true>(),
    instance<2, 32, true>(),
    instance<2, 64, true>(),
    instance<2, 16, false, true>(),
    instance<2, 32, false, true>(),
    instance<2, 64, false, true>(),
    instance<2, 16, true, true>(),
    instance<2, 32, true, true>(),
    instance<2, 16, false, false, 3>(),
    instance<2, 32, false, false, 3>(),
    instance<2, 64, false, false, 3>(),
    instance<1, 16, false, false, 3>(),
    instance<1, 32, false, false, 3>(),
    instance<2, 16, false, true, 3>(),
    instance<2, 32, false, true, 3>(),
    instance<2, 64, false, true, 3>(),
};

const Instance* instance_of(const Problem& p, const ActivationLayout& layout, bool fused) {
  const int rows = slice_rows(p, layout), columns = (layout.tokens < rows ? layout.tokens : rows) * layout.limbs;
  const Instance* best = nullptr;
  for (const Instance& i : INSTANCES)
    if ((p.plan.tile_n == 192 ? 3 : CTA_N_TILES) == i.n_tiles && p.w.group_size == (i.grouped ? K_TILE : -1) &&
        i.limbs == layout.limbs && i.fused == fused && i.columns >= columns &&
        (best == nullptr || i.columns < best->columns))
      best = &i;
  return best;
}

// A plan as the kernel is told it: sizes, and where it keeps what in shared memory. Of pointers only whether they are
// null is looked at.
Config configure(const Problem& p, SpansArgs& a, bool fused) {
  if (p.arch != 90) return {};
  const trirun_cuda_plan& plan = p.plan;
  const ActivationLayout layout(p.m, p.w.k, p.act_bits);
  const Instance* instance = instance_of(p, layout, fused);
  const int64_t n_tiles = p.w.n / 64, k_tiles = p.w.k / K_TILE;
  const int of_tile = instance != nullptr ? instance->n_tiles : CTA_N_TILES;
  const int64_t total = (n_tiles + of_tile - 1) / of_tile * k_tiles;
  const int slices = slices_of(p, layout);
  // Several slices are each as wide as their kernel.
  if (instance == nullptr || (slices > 1 && instance->columns != slice_rows(p, layout) * layout.limbs) ||
      (plan.tile_m != 0 && (plan.tile_m < 16 || plan.tile_m > 64)) || (plan.tile_n != 0 && plan.tile_n != 192) ||
      layout.columns % 8 || plan.stages < 3 || plan.stages > MAX_STAGES || plan.ctas < 1 ||
      plan.ctas * slices > COUNTERS / 16 || total > INT32_MAX)
    return {};
  const int ctas = static_cast<int>(plan.ctas < total ? plan.ctas : total);
  const int64_t longest = (total + ctas - 1) / ctas;
  const bool exact = layout.limbs == 1;
  if (exact && (longest < k_tiles ? longest : k_tiles) * K_TILE > EXACT_SUM_K) return {};
  // A CTA quantizes every column of x at most once, in no more pieces than there are barriers for: spans, of which
  // those at the ends of its k tiles and of a tile may be shorter.
  const int pieces = static_cast<int>((longest + 2 * (SPAN_K_TILES - 1)) / SPAN_K_TILES + 1);
  if (plan.fused && (exact || longest > k_tiles || pieces > PIECES)) return {};
  a.n_tiles = static_cast<int>(n_tiles), a.k_tiles = static_cast<int>(k_tiles);
  static_cast<StreamK&>(a) = stream_k(total, ctas);
  a.n = static_cast<int>(p.n), a.m = static_cast<int>(p.m), a.k = static_cast<int>(p.k);
  a.tokens = layout.tokens, a.slices = slices, a.pieces = pieces;
  // Only where every CTA has one tile, and every tile an even number of CTAs.
  a.pairs = plan.cta_split == 2;
  if (a.pairs && (of_tile != CTA_N_TILES || a.rest != 0 || k_tiles % a.each != 0 || k_tiles / a.each % 2 != 0))
    return {};
  // A fused plan that cannot be counts on smaller stages.
  const int bytes =
      lay_out(a, *instance, plan.stages, static_cast<int>(longest), p.w.zeros != nullptr, plan.fused && !fused);
  if (bytes > MAX_SHARED) return {};
  a.early = plan.early > 0 && plan.early < a.stages ? plan.early : a.stages;
  a.x_first = plan.x_first;
  if (a.x_first < 0 || a.x_first > a.early) return {};
  return {instance, ctas * slices, bytes};
}

int64_t shared_bytes(const Problem& p) {
  SpansArgs a{};
  return configure(p, a, fuses(p)).shared;
}

size_t workspace_bytes(const Problem& p) {
  const ActivationLayout layout(p.m, p.w.k, p.act_bits);
  const Instance* instance = instance_of(p, layout, false);
  if (instance == nullptr) return 0;
  // Room for quantized x also for a fused plan: whether x can be read that way is known only when x is.
  return parts_bytes(p, *instance, slices_of(p, layout)) + (p.activations != nullptr ? 0 : layout.bytes);
}

int launch(const Problem& p) {
  const bool fused = fuses(p);
  SpansArgs a{};
  const Config config = configure(p, a, fused);
  const Instance* instance = config.instance;
  if (instance == nullptr) return TRIRUN_UNSUPPORTED;
  static bool whole[sizeof(INSTANCES) / sizeof(INSTANCES[0])];
  if (!starts_whole(whole[instance - INSTANCES], reinterpret_cast<const void*>(instance->kernel), instance->registers))
    return TRIRUN_UNSUPPORTED;
  if (const int code = encode_words(&a.words, p.w, STEPS, instance->n_tiles)) return code;
  a.scales = reinterpret_cast<const __half*>(p.w.scales);
  a.zeros = reinterpret_cast<const __half*>(p.w.zeros);
  a.zero = p.w.zero;
  // float32 x keeps a scale for every k tile: its outputs show the difference, 16-bit ones hardly do.
  const ActivationLayout layout(p.m, p.w.k, p.act_bits);
  const bool exact = layout.limbs == 1;
  const bool spans = !exact && !instance->grouped && p.activations == nullptr && p.dtype != TRIRUN_F32;
  a.span_mask = exact ? (1 << 30) - 1 : spans ? SPAN_K_TILES - 1 : 0;
  a.x = p.x, a.ldx = p.ldx;
  a.bias = p.bias, a.y = p.y, a.ldy = p.ldy, a.dtype = p.dtype;
  a.vectors = p.ldy % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  auto* workspace = static_cast<uint8_t*>(p.workspace);
  a.counters = p.counters;
  a.parts = reinterpret_cast<float4*>(workspace);
  workspace += parts_bytes(p, *instance, a.slices);
  if (!fused) {
    auto* base = static_cast<const uint8_t*>(p.activations != nullptr ? p.activations : workspace);
    if (const int code = encode_limbs(&a.limbs, base, layout, instance->columns)) return code;
    a.x_scales = reinterpret_cast<const float2*>(base + layout.scales_offset);
    if (p.activations == nullptr)
      if (const int code = launch_quantize(p, workspace, spans ? SPAN_K_TILES : 1, p.counters,
                                           config.ctas * instance->consumers / 32))
        return code;
  }
  const dim3 grid(static_cast<unsigned>(config.ctas));
  return launch_kernel(instance->kernel, {grid, instance->threads, config.shared, p.stream, true, 1 + a.pairs}, a);
}

}  // namespace

const KernelFamily spans = {shared_bytes, workspace_bytes, launch};

}  // namespace trirun::gemm_decode
