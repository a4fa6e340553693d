// Stands for cuda/common/hopper.cuh on the host: clusters.
#pragma once

#include "fibers.h"

namespace trirun {

inline uint32_t peer_address(uint32_t shared, uint32_t rank) {
  return shared | (on_host::self->cta / on_host::cluster * on_host::cluster + rank) << 24;
}
template <typename T>
void store_in_peer(uint32_t address, T v) {
  memcpy(on_host::ctas[address >> 24].memory + (address & 0xffffff), &v, sizeof v);
}
inline void store_peer2(uint32_t address, float2 v) { store_in_peer(address, v); }
inline void store_peer4(uint32_t address, float4 v) { store_in_peer(address, v); }

// 16 bytes, which the peer's barrier counts.
inline void store_peer_counted(uint32_t address, float4 v, uint32_t barrier) {
  store_in_peer(address, v);
  on_host::ctas[barrier >> 24].barriers.at(barrier & 0xffffff).count(0, -16);
}

inline void barrier_init_fence() {}
inline void fence_async_shared() {}
inline void fence_async() {}
inline void barrier_expect(uint32_t barrier, uint32_t bytes) { on_host::cta().barriers.at(barrier).count(1, bytes); }
inline uint64_t evict_first_policy() { return 0; }
inline void bulk_load(uint32_t shared, const void* global, uint32_t bytes, uint32_t barrier, uint64_t = 0) {
  memcpy(on_host::memory() + shared, global, bytes);
  on_host::cta().barriers.at(barrier).count(0, -static_cast<int64_t>(bytes));
}

inline void barrier_wait_warp(uint32_t barrier, uint32_t parity) {
  on_host::wait_for(barrier, parity);
  on_host::meet_warp();
}

inline void cluster_arrive() { on_host::self->arrivals++; }
inline void cluster_wait() {
  using namespace on_host;
  self->cluster_waits++;
  if (!cluster_has_arrived(self->cluster_waits)) yield();
}

}  // namespace trirun
