// CUDA kernels on the host: the threads of a cluster's CTAs are fibers of one thread, which run until they meet at a
// shuffle, a product of tensor cores or a barrier. What a barrier would have ordered is in the wrong order without it:
// fibers run one after another, in ascending or descending order, and cp.async copies when it is called or when it is
// waited for. Host arithmetic is not the GPU's to the last bit.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <vector>

namespace on_host {

constexpr int MOST_THREADS = 640, MOST_CTAS = 8, SHARED = 256 << 10, STACK = 192 << 10;

struct Barrier {
  int size = 0, count = 0;
  unsigned phase = 0;
};

struct Warp {
  Barrier barrier{32};
  uint32_t words[32][6];  // what each lane hands to the others
};

// An mbarrier: a phase ends when so many arrivals, and the bytes that they announced, have come.
struct MemoryBarrier {
  int arrivals = 0, left = 0;
  int64_t bytes = 0;
  unsigned phase = 0;

  void count(int arrived, int64_t announced) {
    left -= arrived, bytes += announced;
    if (left < 0) puts("too many arrivals"), exit(2);
    if (left == 0 && bytes == 0) left = arrivals, phase++;
  }
  bool ended(unsigned parity) const { return (phase & 1) != parity; }
};

struct Cta {
  Barrier barrier, named[5];
  std::map<uint32_t, MemoryBarrier> barriers;  // by their addresses
  Warp warps[MOST_THREADS / 32];
  uint3 index;
  alignas(256) uint8_t memory[SHARED];
};

struct Copy {
  uint32_t to;
  const void* from;
  bool wanted;
};

// What is looked at in every round comes first, of one cache line.
struct alignas(64) Fiber {
  Barrier* at;  // waits here for the end of `phase`
  const MemoryBarrier* waits_for;  // for the phase of `parity`
  uint64_t polled;  // stores when this fiber last looked for one in vain, or NOT_POLLING
  unsigned phase, parity, arrivals, cluster_waits;
  int cta, thread;
  bool begun, done;
  int looks;
  uint64_t looked_at;  // stores when it looked last, and how often there had been as many
  jmp_buf place;  // where it goes on
  ucontext_t context;  // where it begins: to switch with contexts takes two system calls
  std::vector<char> stack;
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> groups;
};

struct Order {
  bool descending;   // of fibers
  bool copies_late;  // cp.async copies when it is waited for
  int slow = -1;     // warp of every CTA that runs only while no other can
};

inline std::vector<Cta> ctas(MOST_CTAS);
inline std::vector<Fiber> fibers(MOST_CTAS* MOST_THREADS);
inline jmp_buf scheduler;
inline Fiber* self;
inline Order order;
inline int running;  // fibers of all CTAs
inline int cluster = 1;  // CTAs of one
constexpr uint64_t NOT_POLLING = ~uint64_t{};
inline uint64_t stores;  // to global memory, that others poll
inline dim3 grid;
inline void (*body)();

inline Cta& cta() { return ctas[self->cta]; }
inline Warp& warp() { return cta().warps[self->thread / 32]; }
inline int lane() { return self->thread % 32; }
inline uint8_t* memory() { return cta().memory; }

// A __shared__ variable: one for each CTA.
template <typename T, int KEY>
T& shared() {
  static T all[MOST_CTAS];
  return all[self->cta];
}

// Whether that was the last one.
inline bool arrive(Barrier& barrier) {
  if (++barrier.count < barrier.size) return false;
  barrier.count = 0, barrier.phase++;
  return true;
}

inline void yield() {
  if (_setjmp(self->place) == 0) _longjmp(scheduler, 1);
}

inline void resume(Fiber& f) {
  self = &f;
  if (_setjmp(scheduler) != 0) return;
  if (f.begun) _longjmp(f.place, 1);
  f.begun = true;
  setcontext(&f.context);
}

inline void meet(Barrier& barrier) {
  const unsigned phase = barrier.phase;
  if (arrive(barrier)) return;
  self->at = &barrier, self->phase = phase;
  yield();
}

inline void meet_warp() { meet(warp().barrier); }

// Threads that have ended count as arrived.
inline bool cluster_has_arrived(unsigned times) {
  static int late = 0;  // one that had not when it was looked for last
  const auto arrived = [&](int i) { return fibers[i].done || fibers[i].arrivals >= times; };
  if (late < running && !arrived(late)) return false;
  for (late = 0; late < running; late++)
    if (!arrived(late)) return false;
  return true;
}

inline void perform(const Copy& copy) {
  if (copy.wanted)
    memcpy(memory() + copy.to, copy.from, 16);
  else
    memset(memory() + copy.to, 0, 16);
}

inline void enter() {
  body();
  self->done = true;
  yield();
}

inline void wait_for(uint32_t barrier, unsigned parity) {
  self->waits_for = &cta().barriers.at(barrier), self->parity = parity;
  if (!self->waits_for->ended(parity)) yield();
  self->waits_for = nullptr;
}

// Whoever looks again and again at memory that others store to waits until they do.
inline void look() {
  self->looks = self->looked_at == stores ? self->looks + 1 : 0, self->looked_at = stores;
  if (self->looks < 32) return;
  self->polled = stores;
  yield();
  self->polled = NOT_POLLING;
}

inline bool can_run(const Fiber& f) {
  if (f.waits_for != nullptr) return f.waits_for->ended(f.parity);
  return f.polled != stores;
}

// Runs CTAs along x at the same time, of so many threads, in clusters of so many; 0: all are one.
inline void run_cluster(uint3 first, int size, int threads, Order wanted, void (*kernel)(), int cluster_size = 0) {
  order = wanted, body = kernel, running = size * threads, cluster = cluster_size ? cluster_size : size;
  const time_t begun = time(nullptr);
  for (int i = 0; i < size; i++) {
    ctas[i].barrier = Barrier{threads}, ctas[i].barriers.clear();
    for (Barrier& each : ctas[i].named) each = Barrier{};
    for (Warp& each : ctas[i].warps) each.barrier = Barrier{32};
    ctas[i].index = make_uint3(first.x + i, first.y, first.z);
    memset(ctas[i].memory, 0xff, SHARED);  // NaN in every type
  }
  for (int i = 0; i < running; i++) {
    Fiber& f = fibers[i];
    f.cta = i / threads, f.thread = i % threads, f.begun = f.done = false, f.at = nullptr;
    f.arrivals = f.cluster_waits = 0;
    f.waits_for = nullptr, f.polled = f.looked_at = NOT_POLLING, f.looks = 0;
    f.open.clear(), f.groups.clear(), f.stack.resize(STACK);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = STACK, f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  bool left = true, moved = false;
  const auto run_all = [&](bool slow) {
    for (int i = 0; i < running; i++) {
      Fiber& f = fibers[order.descending ? running - 1 - i : i];
      if (f.done || slow != (f.thread / 32 == order.slow)) continue;
      left = true;
      if (f.at != nullptr && f.at->phase == f.phase) continue;
      if (!can_run(f)) continue;
      if (f.cluster_waits > 0 && f.at == nullptr && !cluster_has_arrived(f.cluster_waits)) continue;
      f.at = nullptr, moved = true;
      resume(f);
    }
  };
  while (left) {
    left = moved = false;
    run_all(false);
    if (!moved) run_all(true);
    if (left && (!moved || time(nullptr) > begun + 300)) {
      puts("deadlock");
      exit(2);
    }
  }
}

// Every lane's word, combined.
template <typename Combine>
uint32_t reduced(uint32_t v, Combine combine) {
  warp().words[lane()][0] = v;
  meet_warp();
  uint32_t all = warp().words[0][0];
  for (int i = 1; i < 32; i++) all = combine(all, warp().words[i][0]);
  meet_warp();
  return all;
}

template <typename T>
T exchanged(T v, int from) {
  static_assert(sizeof(T) == 4);
  memcpy(&warp().words[lane()][0], &v, 4);
  meet_warp();
  T other;
  memcpy(&other, &warp().words[from & 31][0], 4);
  meet_warp();
  return other;
}

}  // namespace on_host

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __syncthreads
#undef __noinline__
#define __noinline__
#undef __forceinline__  // forced to, the compiler takes four times as long, and what it makes is as fast
#define __forceinline__ inline
#define threadIdx (uint3{unsigned(on_host::self->thread), 0, 0})
#define blockIdx (on_host::cta().index)
#define gridDim (on_host::grid)

using std::max;
using std::min;

inline void __syncwarp() { on_host::meet_warp(); }
inline void __syncthreads() { on_host::meet(on_host::cta().barrier); }
inline void __threadfence() {}
template <typename T>
T __shfl_sync(unsigned, T v, int from) {
  return on_host::exchanged(v, from);
}
template <typename T>
T __shfl_xor_sync(unsigned, T v, int mask) {
  return on_host::exchanged(v, on_host::lane() ^ mask);
}
inline uint32_t __reduce_max_sync(unsigned, uint32_t v) {
  return on_host::reduced(v, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}
inline uint32_t __reduce_min_sync(unsigned, uint32_t v) {
  return on_host::reduced(v, [](uint32_t a, uint32_t b) { return a < b ? a : b; });
}
inline int __reduce_add_sync(unsigned, int v) {
  return static_cast<int>(on_host::reduced(v, [](uint32_t a, uint32_t b) { return a + b; }));
}
inline bool __any_sync(unsigned, bool v) {
  return on_host::reduced(v, [](uint32_t a, uint32_t b) { return a | b; });
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}
template <typename T>
T __ldcg(const T* p) {
  return *p;
}
template <typename T>
void __stcg(T* p, T v) {
  *p = v;
}
inline unsigned atomicAdd(unsigned* p, unsigned v) {
  const unsigned before = *p;
  *p += v;
  return before;
}
inline uint32_t __float_as_uint(float v) {
  uint32_t bits;
  memcpy(&bits, &v, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float v;
  memcpy(&v, &bits, 4);
  return v;
}
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.f / a; }
inline int __float2int_rn(float a) { return static_cast<int>(std::nearbyint(a)); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(v); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __expf(float v) { return std::exp(v); }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(y) << 32 | x;
  uint32_t r = 0;
  for (int i = 0; i < 4; i++) r |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
  return r;
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += static_cast<int8_t>(a >> 8 * i) * static_cast<int8_t>(b >> 8 * i);
  return c;
}
// Of what is compiled and never called.
inline uint32_t __vmaxu2(uint32_t, uint32_t) { abort(); }
