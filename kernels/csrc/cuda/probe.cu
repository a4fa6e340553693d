// A kernel that only reads: the floor under every kernel that must read the same bytes.
#include "cuda/common/launch.cuh"
#include "cuda/common/ptx.cuh"

namespace trirun {
namespace {

constexpr int kThreads = 256, kLoads = 8;

// Every thread keeps eight 16-byte loads in flight; CTAs take turns at pieces of 32 KiB. The result cannot be known
// without reading everything, which keeps the compiler from leaving a load out.
__global__ void __launch_bounds__(kThreads) read_probe(const uint4* __restrict__ data, size_t count, uint32_t* sink) {
  uint32_t sum = 0;
  for (size_t first = size_t(blockIdx.x) * kThreads * kLoads; first < count;
       first += size_t(gridDim.x) * kThreads * kLoads) {
    uint4 v[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const size_t at = first + i * kThreads + threadIdx.x;
      v[i] = make_uint4(0, 0, 0, 0);
      if (at < count) v[i] = load_global4_once(data + at);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) sum += v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  sum = __reduce_add_sync(~0u, sum);
  if (threadIdx.x % 32 == 0 && sum != 0) atomicAdd(sink, sum);
}

}  // namespace
}  // namespace trirun

extern "C" int trirun_cuda_read_probe(const void* data, size_t bytes, void* sink, void* stream) {
  if (data == nullptr || sink == nullptr || reinterpret_cast<uintptr_t>(data) % 16 || bytes % 16)
    return TRIRUN_BAD_POINTER;
  trirun::DeviceFacts device;
  if (const int code = trirun::device_facts(device)) return code;
  const size_t count = bytes / 16,
               spans = (count + trirun::kThreads * trirun::kLoads - 1) / (trirun::kThreads * trirun::kLoads);
  const unsigned grid = unsigned(spans < size_t(device.sms) * 8 ? spans : size_t(device.sms) * 8);
  if (grid == 0) return TRIRUN_OK;
  const trirun::Launch how{dim3(grid), trirun::kThreads, 0, static_cast<cudaStream_t>(stream), false};
  return trirun::launch_kernel(trirun::read_probe, how, static_cast<const uint4*>(data), count,
                               static_cast<uint32_t*>(sink));
}
