// Stands for cuda/common/ptx.cuh on the host: what attention and the step take of it.
#pragma once

#include <type_traits>

#include "fibers.h"

namespace trirun {

// The registers of all lanes, a's in words 0 to 3, b's behind them.
inline auto& shared_fragments(const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  auto& words = on_host::warp().words;
  std::copy(a, a + 4, words[on_host::lane()]);
  words[on_host::lane()][4] = b0, words[on_host::lane()][5] = b1;
  on_host::meet_warp();
  return words;
}

// One of the two elements of a register, as mma.m16n8k16 has them.
template <typename T>
float element(uint32_t word, int half) {
  const auto bits = static_cast<uint16_t>(word >> 16 * half);
  return std::is_same_v<T, __half> ? __half2float(__ushort_as_half(bits)) : __uint_as_float(uint32_t(bits) << 16);
}

template <typename T>
void mma_16bit(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto& words = shared_fragments(a, b0, b1);
  const int quad = on_host::lane() / 4, sub = on_host::lane() % 4;
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

// d = a . b + c: a 16 x 32 u8, b 32 x 8 s8.
inline void mma_u8s8(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, const int (&c)[4]) {
  const auto& words = shared_fragments(a, b0, b1);
  const int quad = on_host::lane() / 4, sub = on_host::lane() % 4;
  for (int i = 0; i < 4; i++) {
    const int row = i / 2, column = 2 * sub + i % 2;
    int sum = c[i];
    for (int k = 0; k < 32; k++) {
      const int upper = k / 16, of_lane = k % 16 / 4, shift = k % 4 * 8;
      sum += static_cast<int>(words[quad * 4 + of_lane][row + 2 * upper] >> shift & 255) *
             static_cast<int8_t>(words[column * 4 + of_lane][4 + upper] >> shift);
    }
    d[i] = sum;
  }
  on_host::meet_warp();
}

inline void mma_s8(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  // Signed bytes are unsigned ones less 256 where the highest bit is set: less 128 of all after that bit is turned.
  constexpr uint32_t TURNED = 0x80808080u, ONES = 0x01010101u;
  int ones[4] = {};
  mma_u8s8(d, {a0 ^ TURNED, a1 ^ TURNED, a2 ^ TURNED, a3 ^ TURNED}, b0, b1, d);
  mma_u8s8(ones, {ONES, ONES, ONES, ONES}, b0, b1, ones);
  for (int i = 0; i < 4; i++) d[i] -= 128 * ones[i];
}

inline void prefetch_l2(const void*) {}
inline float exp2_approximate(float v) { return exp2f(v); }
template <typename T>
void forget(T&) {}
inline float reciprocal_approximate(float v) { return 1.f / v; }
inline uint32_t kept_anew(uint32_t v) { return v; }
inline uint32_t kept(uint32_t v, int) { return v; }
inline int lane_anew() { return on_host::self->thread % 32; }

struct Relaxed16 {
  uint64_t low, high;
};
inline Relaxed16 load_relaxed16(const void* from) {
  on_host::look();
  Relaxed16 v;
  memcpy(&v, from, 16);
  return v;
}
inline void store_relaxed16(void* to, Relaxed16 v) { memcpy(to, &v, 16), on_host::stores++; }
inline void store_relaxed8(void* to, uint64_t v) { memcpy(to, &v, 8), on_host::stores++; }
inline uint32_t count_around(uint32_t* counter, uint32_t last) {
  const uint32_t before = *counter;
  *counter = before >= last ? 0 : before + 1;
  return before;
}
inline uint64_t global_nanoseconds() { return 0; }

template <int THREADS>
void named_barrier(int id) {
  on_host::Barrier& barrier = on_host::cta().named[id];
  barrier.size = THREADS;
  on_host::meet(barrier);
}
template <int THREADS>
void named_barrier_arrive(int id) {
  on_host::Barrier& barrier = on_host::cta().named[id];
  barrier.size = THREADS;
  on_host::arrive(barrier);
}
inline void barrier_init(uint32_t barrier, int arrivals) { on_host::cta().barriers[barrier] = {arrivals, arrivals}; }
inline void barrier_arrive_counted(uint32_t barrier, uint32_t arrivals) {
  on_host::cta().barriers.at(barrier).count(static_cast<int>(arrivals), 0);
}
inline void barrier_arrive(uint32_t barrier) { barrier_arrive_counted(barrier, 1); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) { on_host::wait_for(barrier, parity); }

inline void dependency_wait() {}
inline void dependency_launch() {}

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - on_host::memory());
}
inline uint4 load_global4(const void* from) {
  uint4 v;
  memcpy(&v, from, 16);
  return v;
}
inline uint4 load_shared4(uint32_t address) {
  uint4 v;
  memcpy(&v, on_host::memory() + address, 16);
  return v;
}
template <typename T>
T load_shared_as(uint32_t address) {
  T v;
  memcpy(&v, on_host::memory() + address, sizeof v);
  return v;
}
inline uint32_t load_shared(uint32_t address) { return load_shared_as<uint32_t>(address); }
inline uint2 load_shared2(uint32_t address) { return load_shared_as<uint2>(address); }
inline float load_shared_float(uint32_t address) { return load_shared_as<float>(address); }
inline float2 load_shared_float2(uint32_t address) { return load_shared_as<float2>(address); }
inline float4 load_shared_float4(uint32_t address) { return load_shared_as<float4>(address); }
template <typename T>
void store_shared(uint32_t address, T v) {
  memcpy(on_host::memory() + address, &v, 4);
}
template <typename T>
void store_shared2(uint32_t address, T x, T y) {
  store_shared(address, x), store_shared(address + 4, y);
}
inline void* generic_pointer(uint32_t shared) { return on_host::memory() + shared; }
inline uint32_t load_constant(const void* from) {
  uint32_t v;
  memcpy(&v, from, 4);
  return v;
}
inline float2 load_constant2(const float* from) { return make_float2(from[0], from[1]); }
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
