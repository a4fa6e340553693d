// Stands for cuda/common/ptx.cuh on the host: what attention takes of it.
#pragma once

#include <type_traits>

#include "fibers.h"

namespace trirun {

// One of the two elements of a register, as mma.m16n8k16 has them.
template <typename T>
float element(uint32_t word, int half) {
  const auto bits = static_cast<uint16_t>(word >> 16 * half);
  return std::is_same_v<T, __half> ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t(bits) << 16);
}

template <typename T>
void mma_16bit(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& words = on_host::warp().words;
  const int lane = on_host::lane(), quad = lane / 4, sub = lane % 4;
  for (int i = 0; i < 4; i++) words[lane][i] = a[i];
  words[lane][4] = b0, words[lane][5] = b1;
  on_host::meet_warp();
  for (int i = 0; i < 4; i++) {
    const int row = i / 2, column = 2 * sub + i % 2;
    double sum = d[i];
    for (int k = 0; k < 16; k++) {
      const int upper = k / 8, of_lane = k % 8 / 2;
      sum += static_cast<double>(element<T>(words[quad * 4 + of_lane][row + 2 * upper], k % 2)) *
             element<T>(words[column * 4 + of_lane][4 + upper], k % 2);
    }
    d[i] = static_cast<float>(sum);
  }
  on_host::meet_warp();
}

inline uint32_t transposed(uint32_t v) {
  auto& words = on_host::warp().words;
  const int lane = on_host::lane(), column = lane / 4;
  words[lane][0] = v;
  on_host::meet_warp();
  uint32_t r = 0;
  for (int e = 0; e < 2; e++) {
    const int row = lane % 4 * 2 + e;
    r |= (words[row * 4 + column / 2][0] >> 16 * (column % 2) & 0xffff) << 16 * e;
  }
  on_host::meet_warp();
  return r;
}

inline void dependency_wait() {}
inline void dependency_launch() {}

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - on_host::memory());
}
inline uint4 load_shared4(uint32_t address) {
  uint4 v;
  memcpy(&v, on_host::memory() + address, 16);
  return v;
}
inline void store_shared4(uint32_t address, uint4 v) { memcpy(on_host::memory() + address, &v, 16); }

inline void copy_async16_or_zero(uint32_t shared, const void* global, bool wanted) {
  const on_host::Copy copy{shared, global, wanted};
  if (on_host::order.copies_late)
    on_host::self->open.push_back(copy);
  else
    on_host::perform(copy);
}
inline void copy_async_commit() {
  on_host::self->groups.push_back(on_host::self->open);
  on_host::self->open.clear();
}
template <int PENDING>
void copy_async_wait() {
  auto& groups = on_host::self->groups;
  for (; groups.size() > PENDING; groups.pop_front())
    for (const on_host::Copy& copy : groups.front()) on_host::perform(copy);
}

}  // namespace trirun
