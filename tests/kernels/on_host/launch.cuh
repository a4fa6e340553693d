// Stands for cuda/common/launch.cuh on the host: a launch runs all CTAs of a grid.
#pragma once

#include "fibers.h"
#include "trirun.h"

namespace trirun {

inline int log2_of(int v) { return 31 - __builtin_clz(v); }

struct DeviceFacts {
  int device, arch, ptx, sms;
};

inline int device_facts(DeviceFacts& facts) {
  facts = {0, 90, 90, on_host::MOST_CTAS};
  return TRIRUN_OK;
}

inline int shared_room(const void*, int& bytes) {
  bytes = 227 << 10;
  return TRIRUN_OK;
}

struct Launch {
  dim3 grid;
  int threads, shared;
  cudaStream_t stream;
  bool dependent;
  int cluster = 1;
  bool cooperative = false;
};

template <typename Args>
int resident_clusters(void (*)(Args), const Launch& how, int& clusters) {
  clusters = on_host::MOST_CTAS / how.cluster;
  return TRIRUN_OK;
}

template <typename Args>
int launch_kernel(void (*kernel)(Args), const Launch& how, const Args& args) {
  static Args given;
  static void (*called)(Args);
  static bool descending;
  const char* slow = getenv("ON_HOST_SLOW_WARP");
  given = args, called = kernel, descending = !descending;
  on_host::grid = how.grid;
  const on_host::Order order{descending, false, slow == nullptr ? -1 : atoi(slow)};
  on_host::run_cluster({0, 0, 0}, static_cast<int>(how.grid.x), how.threads, order, [] { called(given); }, how.cluster);
  return TRIRUN_OK;
}

}  // namespace trirun
