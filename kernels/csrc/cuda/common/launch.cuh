// The host's side of every launch: what is known of a device, and one way to start a kernel.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "trirun.h"

namespace trirun {

// Of a power of two.
inline int log2_of(int v) { return 31 - __builtin_clz(v); }

struct DeviceFacts {
  int device;
  int arch;   // compute capability, 10 * major + minor
  int ptx;    // the same of the PTX that this library's code for the device was made from
  int sms;    // multiprocessors
};

// The current device's, asked for once. TRIRUN_OLD_BUILD where the host would count on instructions that the code for
// this device was made without: it is PTX of an older architecture, in a library built for others alone.
int device_facts(DeviceFacts& facts);

// Lets a kernel have so many bytes of dynamic shared memory on the current device. What it may have never shrinks: two
// threads can be about to launch it, with more and with less.
int allow_shared(const void* kernel, int bytes);

// Dynamic shared memory, bytes, that a CTA of a kernel can have on the current device.
int shared_room(const void* kernel, int& bytes);

struct Launch {
  dim3 grid;
  int threads;
  int shared;          // bytes, dynamic
  cudaStream_t stream;
  bool dependent;      // starts before the stream's previous kernel has ended (programmatic dependent launch, sm_90)
  int cluster = 1;     // consecutive CTAs along x (sm_90)
  bool cooperative = false;  // all CTAs are resident at once, or the launch fails
};

// A launch as the runtime takes it.
struct LaunchConfig {
  cudaLaunchAttribute attributes[3]{};
  cudaLaunchConfig_t config{};

  explicit LaunchConfig(const Launch& how) {
    unsigned used = 0;
    if (how.dependent) {
      attributes[used].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[used++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (how.cluster > 1) {
      attributes[used].id = cudaLaunchAttributeClusterDimension;
      attributes[used++].val.clusterDim = {static_cast<unsigned>(how.cluster), 1, 1};
    }
    if (how.cooperative) {
      attributes[used].id = cudaLaunchAttributeCooperative;
      attributes[used++].val.cooperative = 1;
    }
    config.gridDim = how.grid;
    config.blockDim = dim3(how.threads);
    config.dynamicSmemBytes = how.shared;
    config.stream = how.stream;
    config.attrs = attributes;
    config.numAttrs = used;
  }
  LaunchConfig(const LaunchConfig&) = delete;
};

// Returns TRIRUN_OK or a cudaError_t.
template <typename... Parameters, typename... Arguments>
int launch_kernel(void (*kernel)(Parameters...), const Launch& how, Arguments&&... arguments) {
  if (how.shared > 0 || how.dependent)
    if (const int code = allow_shared(reinterpret_cast<const void*>(kernel), how.shared)) return code;
  const LaunchConfig launch(how);
  return cudaLaunchKernelEx(&launch.config, kernel, std::forward<Arguments>(arguments)...);
}

// How many clusters of such a launch the current device holds at once.
template <typename... Parameters>
int resident_clusters(void (*kernel)(Parameters...), const Launch& how, int& clusters) {
  if (const int code = allow_shared(reinterpret_cast<const void*>(kernel), how.shared)) return code;
  const LaunchConfig launch(how);
  return cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config);
}

}  // namespace trirun
