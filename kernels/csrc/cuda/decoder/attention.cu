// Decode attention: the C interface, and the choice of a kernel. attention_16bit.cuh and
// attention_grouped.cuh attend over a cache of 16-bit elements, attention_int8.cu over one of 8-bit elements.
#include "attention.cuh"

#include <numeric>

namespace trirun::decoder {
namespace {

int chunks_of(const trirun_attention& t) {
  const int64_t group = t.heads / t.kv_heads;
  return static_cast<int>((group + MAX_GROUP - 1) / MAX_GROUP);
}

size_t counter_bytes(const trirun_attention& t) {
  return (t.m * t.kv_heads * chunks_of(t) * MAX_GROUP * sizeof(unsigned) + 255) / 256 * 256;
}

}  // namespace
}  // namespace trirun::decoder

extern "C" size_t trirun_cuda_attention_workspace(const trirun_attention* t) {
  using namespace trirun::decoder;
  if (check_attention(t)) return 0;
  return counter_bytes(*t) + t->m * t->heads * t->splits * (t->head_dim + 2) * sizeof(float);
}

extern "C" int trirun_cuda_attention_decode(const trirun_attention* t, void* workspace, size_t workspace_bytes,
                                            void* stream) {
  using namespace trirun;
  using namespace trirun::decoder;
  if (const int code = check_attention(t)) return code;
  if (t->m == 0) return TRIRUN_OK;
  if (workspace == nullptr || workspace_bytes < trirun_cuda_attention_workspace(t)) return TRIRUN_NO_WORKSPACE;
  if (!aligned_to(workspace, 256)) return TRIRUN_BAD_POINTER;
  AttentionArgs a{};
  a.t = *t;
  a.counters = static_cast<unsigned*>(workspace);
  a.partials = reinterpret_cast<float*>(static_cast<uint8_t*>(workspace) + counter_bytes(*t));
  a.group = static_cast<int>(t->heads / t->kv_heads);
  a.chunks = chunks_of(*t);
  int64_t rows = t->m;
  if (t->activations != nullptr) {
    // A CTA quantizes whole k tiles: its heads must fill them.
    const int64_t part = (a.chunks > 1 ? MAX_GROUP : a.group) * t->head_dim, width = t->heads * t->head_dim;
    if (part % K_TILE || a.group * t->head_dim % K_TILE || t->m > 128) return TRIRUN_UNSUPPORTED;
    if (t->activation_bytes < ActivationLayout(t->m, width, TRIRUN_ACT16).bytes) return TRIRUN_NO_WORKSPACE;
    a.quantized = LimbRows(t->activations, t->m, width, TRIRUN_ACT16);
    rows = a.quantized.tokens;
  }
  DeviceFacts facts;
  if (const int code = device_facts(facts)) return code;
  a.teams = 1, a.room = min(a.group, MAX_GROUP), a.warps = ATTEND_WARPS;
  a.cluster = facts.arch >= 90 ? min(t->splits, MAX_CLUSTER) : 1;
  const bool bf16 = t->dtype == TRIRUN_BF16;
  AttentionKernel kernel;
  int shared = 0;
  if (t->scales != nullptr) {
    // Two CTAs of every multiprocessor hold all that can be on its way, so more of them only begin and end more often.
    const int64_t ctas = rows * t->kv_heads * t->splits;
    const bool few = ctas * a.chunks <= facts.sms;
    for (int teams = 4; teams > 1 && a.teams == 1; teams /= 2)
      if (a.chunks == 1 && t->kv_heads % teams == 0 && a.group * teams <= MAX_GROUP &&
          5 * ctas >= 9 * teams * facts.sms)
        a.teams = teams;
    kernel = int8_attention(facts, bf16, t->head_dim, few, shared);
  } else {
    const bool few = a.cluster > 1 && t->m * t->kv_heads * a.chunks * t->splits <= facts.sms;
    const auto choose = bf16 ? bf16_attention : fp16_attention;
    kernel = choose(t->head_dim, a.room, few, a.warps, shared);
  }
  a.t.splits = (t->splits + a.cluster - 1) / a.cluster * a.cluster;
  const int heads = min(MAX_GROUP, a.teams * a.group);
  a.unit_log = t->activations == nullptr ? 0 : log2_of(K_TILE / std::gcd(t->head_dim, K_TILE));
  shared += received_floats(heads, a.unit_log, a.cluster, t->head_dim) * static_cast<int>(sizeof(float));
  const dim3 grid(static_cast<unsigned>(a.t.splits), static_cast<unsigned>(t->kv_heads / a.teams * a.chunks),
                  static_cast<unsigned>(rows));
  return launch_dependent(kernel, a, grid, a.warps * 32, shared, stream, a.cluster);
}
