// A CUDA runtime for a GPU that is only described: no kernel runs, but every launch is held against what the device
// and the kernel allow, as the real runtime would. Linked with the objects of libtrirun_cuda.so in the runtime's place.
#include <cuda.h>
#include <cuda_runtime.h>

#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int DEFAULT_SHARED = 48 * 1024, REGISTERS = 64 * 1024;

struct Device {
  int arch, ptx, sms, shared;  // shared: bytes of a CTA at most
};

struct Kernel {
  int registers = 0, shared = 0;  // static
};

struct Launched {
  std::string kernel;
  size_t shared;  // dynamic
};

struct State {
  std::mutex lock;
  std::map<const void*, std::string> names;  // registered by the objects, before main
  std::map<std::string, Kernel> kernels;  // of the current device's code
  std::map<const void*, int> allowed;  // dynamic shared memory
  std::vector<Launched> launched;
  Device device{90, 90, 132, 227 * 1024};
  int ordinal = 0, pause = 0;  // microseconds that a launch takes
  unsigned long long capture = 0;  // of every stream; 0: none is under way
  std::string complaint;
};

State& state() {
  static auto* s = new State;
  return *s;
}

template <typename Code>
Code refuse(Code code, const char* format, ...) {
  char text[512];
  va_list values;
  va_start(values, format);
  vsnprintf(text, sizeof text, format, values);
  va_end(values);
  if (state().complaint.empty()) state().complaint = text;
  return code;
}

const Kernel& kernel_of(const void* function) {
  static const Kernel unknown{255, 0};
  const auto found = state().kernels.find(state().names[function]);
  return found == state().kernels.end() ? unknown : found->second;
}

cudaError_t check(const cudaLaunchConfig_t& launch, const void* function) {
  State& s = state();
  const std::lock_guard<std::mutex> held(s.lock);
  const char* name = s.names[function].c_str();
  const Kernel& kernel = kernel_of(function);
  s.launched.push_back({name, launch.dynamicSmemBytes});
  const dim3 grid = launch.gridDim, block = launch.blockDim;
  const int64_t threads = int64_t(block.x) * block.y * block.z, warps = (threads + 31) / 32;
  unsigned cluster = 1;
  for (unsigned i = 0; i < launch.numAttrs; i++) {
    const cudaLaunchAttribute& attribute = launch.attrs[i];
    if (s.device.arch < 90) return refuse(cudaErrorNotSupported, "%s: an attribute of sm_90", name);
    if (attribute.id == cudaLaunchAttributeClusterDimension) cluster = attribute.val.clusterDim.x;
  }
  if (grid.x < 1 || grid.y < 1 || grid.z < 1 || grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535)
    return refuse(cudaErrorInvalidConfiguration, "%s: a grid of %u x %u x %u", name, grid.x, grid.y, grid.z);
  if (threads < 1 || threads > 1024)
    return refuse(cudaErrorInvalidConfiguration, "%s: %lld threads", name, (long long)threads);
  // Registers are dealt out to warps, 256 at a time, a multiple of 8 to every lane.
  if (warps * ((kernel.registers + 7) / 8 * 256) > REGISTERS)
    return refuse(cudaErrorLaunchOutOfResources, "%s: %lld threads of %d registers", name, (long long)threads,
                  kernel.registers);
  if (cluster < 1 || cluster > 8 || grid.x % cluster)
    return refuse(cudaErrorInvalidClusterSize, "%s: clusters of %u in %u CTAs", name, cluster, grid.x);
  const auto allowed = s.allowed.find(function);
  const int most = allowed == s.allowed.end() ? DEFAULT_SHARED - kernel.shared : allowed->second;
  if (int64_t(launch.dynamicSmemBytes) > most)
    return refuse(cudaErrorInvalidValue, "%s: %zu bytes of shared memory, allowed %d", name, launch.dynamicSmemBytes,
                  most);
  return cudaSuccess;
}

// As the driver refuses a tensor map (CUDA driver API, cuTensorMapEncodeTiled).
CUresult check_map(CUtensorMap*, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* size,
                   const cuuint64_t* stride, const cuuint32_t* box, const cuuint32_t*, CUtensorMapInterleave,
                   CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  const std::lock_guard<std::mutex> held(state().lock);
  const int element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : type == CU_TENSOR_MAP_DATA_TYPE_UINT32 ? 4 : 2;
  const cuuint64_t inner = cuuint64_t(box[0]) * element;
  const cuuint64_t widest = swizzle == CU_TENSOR_MAP_SWIZZLE_32B    ? 32
                            : swizzle == CU_TENSOR_MAP_SWIZZLE_64B  ? 64
                            : swizzle == CU_TENSOR_MAP_SWIZZLE_128B ? 128
                                                                    : 256 * 4;
  bool right = reinterpret_cast<uintptr_t>(address) % 16 == 0 && inner % 16 == 0 && inner <= widest;
  for (cuuint32_t i = 0; i < rank; i++)
    right &= size[i] >= 1 && size[i] <= (cuuint64_t(1) << 32) && box[i] >= 1 && box[i] <= 256;
  for (cuuint32_t i = 0; i + 1 < rank; i++) right &= stride[i] % 16 == 0 && stride[i] < (cuuint64_t(1) << 40);
  if (right) return CUDA_SUCCESS;
  return refuse(CUDA_ERROR_INVALID_VALUE, "a tensor map of %llu x %llu elements of %d bytes in boxes of %u x %u",
                (unsigned long long)size[0], (unsigned long long)size[1], element, box[0], box[1]);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// ---- what the tests call ---------------------------------------------------------------------------------------

EXPORT void described_device(int arch, int ptx, int sms, int shared) {
  State& s = state();
  s.device = {arch, ptx, sms, shared};
  s.ordinal++;  // what the library keeps of a device is another's
  s.kernels.clear(), s.allowed.clear();
}
EXPORT void described_kernel(const char* name, int registers, int shared) {
  state().kernels[name] = {registers, shared};
}
EXPORT void described_pause(int microseconds) { state().pause = microseconds; }
EXPORT int described_allowance(const char* name) {
  for (const auto& [function, bytes] : state().allowed)
    if (state().names[function] == name) return bytes;
  return 0;
}
EXPORT void described_clear() { state().complaint.clear(), state().launched.clear(); }
EXPORT const char* described_complaint() { return state().complaint.c_str(); }
EXPORT int described_launches() { return static_cast<int>(state().launched.size()); }
EXPORT const char* described_launch(int i) { return state().launched.at(i).kernel.c_str(); }
EXPORT int64_t described_shared(int i) { return static_cast<int64_t>(state().launched.at(i).shared); }
EXPORT void described_capture(unsigned long long id) { state().capture = id; }

// ---- what the objects call -------------------------------------------------------------------------------------

EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                                   int*) {
  state().names[host] = name;
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}
// Of launches in angle brackets, which the library has none of.
EXPORT unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) {
  return refuse(1u, "a launch that launch_kernel does not make");
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaErrorNotSupported; }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaErrorNotSupported;
}

EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = state().ordinal;
  return cudaSuccess;
}
EXPORT cudaError_t cudaSetDevice(int) { return cudaSuccess; }
EXPORT const char* cudaGetErrorString(cudaError_t) { return "an error of the described device"; }
EXPORT cudaError_t cudaGetLastError() { return cudaSuccess; }
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                            cudaGraph_t*, const cudaGraphNode_t**,
#if CUDART_VERSION >= 13000
                                            const cudaGraphEdgeData**,
#endif
                                            size_t*) {
  *status = state().capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  *id = state().capture;
  return cudaSuccess;
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  const Device& device = state().device;
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = device.arch / 10; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = device.arch % 10; return cudaSuccess;
    case cudaDevAttrMultiProcessorCount: *value = device.sms; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device.shared; return cudaSuccess;
    default: return refuse(cudaErrorInvalidValue, "device attribute %d", int(attribute));
  }
}
EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
  const std::lock_guard<std::mutex> held(state().lock);
  *attributes = {};
  attributes->numRegs = kernel_of(function).registers;
  attributes->sharedSizeBytes = kernel_of(function).shared;
  attributes->ptxVersion = state().device.ptx;
  attributes->binaryVersion = state().device.arch;
  return cudaSuccess;
}
EXPORT cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  State& s = state();
  const std::lock_guard<std::mutex> held(s.lock);
  if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout)
    return s.device.arch < 90 ? refuse(cudaErrorInvalidValue, "a carveout where kernels do not overlap") : cudaSuccess;
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize)
    return refuse(cudaErrorInvalidValue, "function attribute %d", int(attribute));
  if (value + kernel_of(function).shared > s.device.shared)
    return refuse(cudaErrorInvalidValue, "%s: %d bytes of shared memory and %d static ones of %d",
                  s.names[function].c_str(), value, kernel_of(function).shared, s.device.shared);
  s.allowed[function] = value;
  return cudaSuccess;
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* launch, const void* function, void**) {
  if (state().pause > 0) std::this_thread::sleep_for(std::chrono::microseconds(state().pause));
  return check(*launch, function);
}
// Of kernels of one CTA to a multiprocessor, on a device whose multiprocessors are all of one part.
EXPORT cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t* launch) {
  int cluster = 1;
  for (unsigned i = 0; i < launch->numAttrs; i++)
    if (launch->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = launch->attrs[i].val.clusterDim.x;
  *clusters = state().device.sms / cluster;
  return cudaSuccess;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** entry, unsigned, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  *entry = reinterpret_cast<void*>(check_map);
  *found = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
