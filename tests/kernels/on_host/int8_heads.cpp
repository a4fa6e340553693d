// Heads of an int8 cache as csrc/cuda quantizes them, on the host: one warp for each.
#include "fibers.h"

#include "cuda/decoder/int8.cuh"

namespace {

constexpr int HEAD_DIM = 128;

struct Heads {
  const float* values;  // [count][HEAD_DIM]
  uint32_t* codes;      // four of a word
  __half* scales;
} heads;

void quantize() {
  const int lane = on_host::lane(), head = blockIdx.x;
  const float4 v[1] = {reinterpret_cast<const float4*>(heads.values + head * HEAD_DIM)[lane]};
  uint32_t words[1];
  const __half scale = trirun::decoder::quantize_head(words, v, trirun::decoder::largest_of_head(v));
  heads.codes[head * HEAD_DIM / 4 + lane] = words[0];
  if (lane == 0) heads.scales[head] = scale;
}

}  // namespace

extern "C" void quantize_heads(const float* values, int count, void* codes, void* scales) {
  heads = {values, static_cast<uint32_t*>(codes), static_cast<__half*>(scales)};
  for (unsigned i = 0; i < static_cast<unsigned>(count); i++)
    on_host::run_cluster({i, 0, 0}, 1, 32, {false, false, -1}, quantize);
}
