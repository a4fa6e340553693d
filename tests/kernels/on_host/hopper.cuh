// Stands for cuda/common/hopper.cuh on the host: clusters.
#pragma once

#include "fibers.h"

namespace trirun {

inline uint32_t peer_address(uint32_t shared, uint32_t rank) { return shared | rank << 24; }
template <typename T>
void store_in_peer(uint32_t address, T v) {
  memcpy(on_host::ctas[address >> 24].memory + (address & 0xffffff), &v, sizeof v);
}
inline void store_peer2(uint32_t address, float2 v) { store_in_peer(address, v); }
inline void store_peer4(uint32_t address, float4 v) { store_in_peer(address, v); }

inline void cluster_arrive() { on_host::self->arrivals++; }
inline void cluster_wait() {
  using namespace on_host;
  self->cluster_waits++;
  if (!cluster_has_arrived(self->cluster_waits)) swapcontext(&self->context, &scheduler);
}

}  // namespace trirun
