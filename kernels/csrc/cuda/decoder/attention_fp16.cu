// Decode attention over a paged cache of fp16: the instances of attention_16bit.cuh and attention_grouped.cuh.
#include "attention_16bit.cuh"
#include "attention_grouped.cuh"

namespace trirun::decoder {

AttentionKernel fp16_attention(int head_dim, int room, bool few, int& warps, int& shared_bytes) {
  if (is_grouped(head_dim, room)) return grouped_for_head<false>(head_dim, few, warps, shared_bytes);
  return for_head<false>(head_dim, room, shared_bytes);
}

}  // namespace trirun::decoder
