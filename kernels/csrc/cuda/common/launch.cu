// What launch.cuh declares: facts of devices and of kernels, asked for once and kept.
#include "launch.cuh"

#include <map>
#include <mutex>

namespace trirun {
namespace {

// Compiled as every kernel is that runs on any architecture: what holds for its code holds for theirs.
__global__ void marker() {}

struct KernelFacts {
  int room;         // bytes of dynamic shared memory that a CTA can have
  int allowed = 0;  // that it may have
};

// Held while the facts of kernels are looked up; they are never freed, since threads may launch while a process ends.
std::mutex& facts_lock() {
  static auto* lock = new std::mutex;
  return *lock;
}

int kernel_facts(const void* kernel, KernelFacts*& facts) {
  static auto* known = new std::map<std::pair<int, const void*>, KernelFacts>;
  int device = 0, most = 0, major = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  const auto found = known->find({device, kernel});
  if (found != known->end()) {
    facts = &found->second;
    return TRIRUN_OK;
  }
  cudaFuncAttributes attributes;
  if (const cudaError_t e = cudaFuncGetAttributes(&attributes, kernel)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  // A multiprocessor divides its memory between L1 and shared memory anew only when it is empty. Kernels that ask for
  // different parts wait for each other's last CTA, though the next one may begin sooner: all ask for the most.
  if (major >= 9)
    if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                                   cudaSharedmemCarveoutMaxShared))
      return e;
  facts = &(*known)[{device, kernel}];
  facts->room = most - static_cast<int>(attributes.sharedSizeBytes);
  return TRIRUN_OK;
}

}  // namespace

int device_facts(DeviceFacts& facts) {
  constexpr int DEVICES = 64;
  static DeviceFacts known[DEVICES];  // written whole and with the same values by every thread that gets there
  int device = 0, major = 0, minor = 0, sms = 0;
  if (const cudaError_t e = cudaGetDevice(&device)) return e;
  if (device < DEVICES && known[device].sms != 0) {
    facts = known[device];
    return TRIRUN_OK;
  }
  if (const cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device)) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device)) return e;
  cudaFuncAttributes attributes;
  if (const cudaError_t e = cudaFuncGetAttributes(&attributes, marker)) return e;
  facts = {device, 10 * major + minor, attributes.ptxVersion, sms};
  // Clusters and dependent launches begin with 9.0, for the host and in the code.
  if (facts.arch >= 90 && facts.ptx < 90) return TRIRUN_OLD_BUILD;
  if (device < DEVICES) known[device] = facts;
  return TRIRUN_OK;
}

int allow_shared(const void* kernel, int bytes) {
  const std::lock_guard<std::mutex> held(facts_lock());
  KernelFacts* facts = nullptr;
  if (const int code = kernel_facts(kernel, facts)) return code;
  if (bytes <= facts->allowed) return TRIRUN_OK;
  if (const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)) return e;
  facts->allowed = bytes;
  return TRIRUN_OK;
}

int shared_room(const void* kernel, int& bytes) {
  const std::lock_guard<std::mutex> held(facts_lock());
  KernelFacts* facts = nullptr;
  if (const int code = kernel_facts(kernel, facts)) return code;
  bytes = facts->room;
  return TRIRUN_OK;
}

}  // namespace trirun
