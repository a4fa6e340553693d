// Decode attention over a paged cache of bf16: the instances of attention_16bit.cuh and attention_grouped.cuh.
#include "attention_16bit.cuh"
#include "attention_grouped.cuh"

namespace trirun::decoder {

AttentionKernel bf16_attention(int head_dim, int room, bool few, int& warps, int& shared_bytes) {
  if (is_grouped(head_dim, room)) return grouped_for_head<true>(head_dim, few, warps, shared_bytes);
  return for_head<true>(head_dim, room, shared_bytes);
}

}  // namespace trirun::decoder
