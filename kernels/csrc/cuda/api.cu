// The C interface of packed products: checks what would corrupt memory, fills a Problem, and hands it to the kernel
// family that the plan names. Here too what concerns the library as a whole: its version, its errors, captures.
#include "cuda/common/activations.cuh"
#include "cuda/gemm_prefill/prefill.cuh"
#include "kernels.cuh"

using trirun::KernelFamily;
using trirun::Problem;

namespace {

constexpr int QUANTIZED_ROWS = 128;  // of one quantized buffer: more than any decode kernel takes
constexpr size_t COUNTER_BYTES = trirun::COUNTERS * sizeof(unsigned);

bool aligned(const void* p, size_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

bool known_dtype(int dtype) { return dtype == TRIRUN_F32 || dtype == TRIRUN_F16 || dtype == TRIRUN_BF16; }

bool known_bits(int act_bits) { return act_bits == TRIRUN_ACT8 || act_bits == TRIRUN_ACT16; }

int describe_device(Problem& p) {
  trirun::DeviceFacts facts;
  if (const int code = trirun::device_facts(facts)) return code;
  p.device = facts.device, p.arch = facts.arch, p.sms = facts.sms;
  return TRIRUN_OK;
}

int check_weight(const trirun_int2& w, int64_t n, int64_t k) {
  if (w.n <= 0 || w.k <= 0 || w.n % 64 || w.k % 128 || w.n > INT32_MAX || w.k > (1 << 20)) return TRIRUN_BAD_SHAPE;
  if (n <= 0 || n > w.n || k <= 0 || k > w.k) return TRIRUN_BAD_SHAPE;
  if (w.group_size != -1 && w.group_size != 32 && w.group_size != 64 && w.group_size != 128) return TRIRUN_UNSUPPORTED;
  if (w.words == nullptr || w.scales == nullptr) return TRIRUN_BAD_POINTER;
  if (!aligned(w.words, 16) || !aligned(w.scales, 16) || !aligned(w.zeros, 16)) return TRIRUN_BAD_POINTER;
  return TRIRUN_OK;
}

// Null for a number that names no kernel.
const KernelFamily* family_of(int kernel) {
  switch (kernel) {
    case TRIRUN_KERNEL_STREAM:
    case TRIRUN_KERNEL_STREAM_SM80: return &trirun::gemm_decode::stream;
    case TRIRUN_KERNEL_GROUPS: return &trirun::gemm_decode::groups;
    case TRIRUN_KERNEL_SPANS: return &trirun::gemm_decode::spans;
    case TRIRUN_KERNEL_PREFILL_WGMMA:
    case TRIRUN_KERNEL_PREFILL_SM80:
    case TRIRUN_KERNEL_PREFILL_W2A8:
    case TRIRUN_KERNEL_DEQUANTIZE: return &trirun::gemm_prefill::prefill;
    default: return nullptr;
  }
}

// Whether the kernel multiplies quantized activations.
bool is_decode(int kernel) {
  const KernelFamily* family = family_of(kernel);
  return family != nullptr && family != &trirun::gemm_prefill::prefill;
}

bool too_many_rows(const Problem& p) { return is_decode(p.plan.kernel) && p.m > QUANTIZED_ROWS; }

int dispatch(Problem& p) {
  const KernelFamily* family = family_of(p.plan.kernel);
  if (family == nullptr || too_many_rows(p)) return TRIRUN_UNSUPPORTED;
  const size_t needed = family->workspace_bytes(p);
  if (needed > 0 && (p.workspace == nullptr || needed + COUNTER_BYTES > p.workspace_bytes)) return TRIRUN_NO_WORKSPACE;
  if (!aligned(p.workspace, 256)) return TRIRUN_BAD_POINTER;
  if (needed > 0) {
    p.counters = static_cast<unsigned*>(p.workspace);
    p.workspace = static_cast<uint8_t*>(p.workspace) + COUNTER_BYTES;
    p.workspace_bytes -= COUNTER_BYTES;
  }
  return family->launch(p);
}

}  // namespace

extern "C" int trirun_cuda_abi_version(void) { return TRIRUN_ABI_VERSION; }

extern "C" const char* trirun_cuda_error(int code) {
  switch (code) {
    case TRIRUN_OK: return "success";
    case TRIRUN_BAD_SHAPE: return "a size is negative, unpadded, or does not fit";
    case TRIRUN_BAD_POINTER: return "a pointer is null or misaligned";
    case TRIRUN_UNSUPPORTED: return "no kernel for this plan, type or device";
    case TRIRUN_NO_WORKSPACE: return "the workspace is too small";
    case TRIRUN_OLD_BUILD: return "libtrirun_cuda.so was built for older GPUs than this one; rebuild it for this one";
    default: return code > 0 ? cudaGetErrorString(static_cast<cudaError_t>(code)) : "unknown code";
  }
}

extern "C" void trirun_cuda_get_limits(trirun_cuda_limits* limits) {
  *limits = {};
  limits->n_tile = trirun::N_TILE, limits->k_tile = trirun::K_TILE, limits->k_pad = 128;
  limits->decode_rows = trirun::DECODE_ROWS, limits->exact_sum_k = trirun::EXACT_SUM_K;
  limits->counter_bytes = COUNTER_BYTES, limits->span_k_tiles = trirun::SPAN_K_TILES;
  limits->tile_rows = 256, limits->low_tile_rows = 192, limits->w2a8_max_k = trirun::gemm_prefill::W2A8_MAX_K;
  limits->head_int8_rows = trirun::HEAD_INT8_ROWS;
  limits->head_16bit_rows = trirun::HEAD_16BIT_ROWS, limits->head_16bit_columns = trirun::HEAD_16BIT_COLUMNS;
  limits->head_12bit_columns = trirun::HEAD_12BIT_COLUMNS;
}

extern "C" int64_t trirun_cuda_plan_shared_bytes(int64_t n, int64_t k, int64_t m, int32_t group_size, int32_t has_zeros,
                                                 int32_t act_bits, int32_t dtype, int32_t quantized, int32_t arch,
                                                 const trirun_cuda_plan* plan) {
  // The sizes are asked for of a product whose arrays are nowhere: pointers are null, or this one.
  static const uint16_t somewhere[8] alignas(256) = {};
  Problem p{};
  p.w = {
      reinterpret_cast<const uint32_t*>(somewhere), somewhere, has_zeros ? somewhere : nullptr, n, k, group_size, 1.f};
  if (plan == nullptr || m <= 0 || check_weight(p.w, n, k) || !known_dtype(dtype)) return -1;
  if (!known_bits(act_bits)) return -1;
  p.n = n, p.k = k, p.m = m, p.ldx = k, p.dtype = dtype, p.act_bits = act_bits, p.plan = *plan, p.arch = arch;
  if (quantized) p.plan.fused = 0, p.activations = somewhere;
  const KernelFamily* family = family_of(plan->kernel);
  return family == nullptr || too_many_rows(p) ? -1 : family->shared_bytes(p);
}

extern "C" int32_t trirun_cuda_plan_needs_zeros(const trirun_cuda_plan* plan, int32_t quantized) {
  switch (plan->kernel) {
    case TRIRUN_KERNEL_STREAM_SM80: return plan->cta_split > 1;
    case TRIRUN_KERNEL_GROUPS:
    case TRIRUN_KERNEL_SPANS: return quantized != 0;
    default: return 0;
  }
}

extern "C" uint64_t trirun_cuda_capture_id(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  // Refused where another stream's capture forbids the question: this one is not in a capture then. The error must not
  // be found by whoever asks for the last one.
  if (cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream), &status, &id) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return status == cudaStreamCaptureStatusActive ? id : 0;
}

extern "C" size_t trirun_cuda_int2_workspace(const trirun_int2* w, int64_t m, int dtype, int act_bits,
                                             const trirun_cuda_plan* plan) {
  Problem p{};
  p.w = *w, p.n = w->n, p.k = w->k, p.m = m, p.dtype = dtype, p.act_bits = act_bits, p.plan = *plan;
  const KernelFamily* family = family_of(plan->kernel);
  if (family == nullptr || describe_device(p)) return 0;
  const size_t bytes = family->workspace_bytes(p);
  return bytes > 0 ? bytes + COUNTER_BYTES : 0;
}

extern "C" int trirun_cuda_int2_gemm(const trirun_int2* w, int64_t n, int64_t k, const void* x, int dtype, int64_t m,
                                     int64_t ldx, const void* bias, void* y, int64_t ldy, int act_bits,
                                     const trirun_cuda_plan* plan, void* workspace, size_t workspace_bytes,
                                     void* stream) {
  if (w == nullptr || plan == nullptr) return TRIRUN_BAD_POINTER;
  if (const int code = check_weight(*w, n, k)) return code;
  if (m == 0) return TRIRUN_OK;
  const bool reads_x = plan->kernel != TRIRUN_KERNEL_DEQUANTIZE;
  if (m < 0 || (reads_x && ldx < k) || ldy < (reads_x ? n : k)) return TRIRUN_BAD_SHAPE;
  if (!known_dtype(dtype) || !known_bits(act_bits)) return TRIRUN_UNSUPPORTED;
  const size_t element = dtype == TRIRUN_F32 ? 4 : 2;
  if ((reads_x && x == nullptr) || y == nullptr) return TRIRUN_BAD_POINTER;
  if (!aligned(x, element) || !aligned(y, element) || !aligned(bias, element)) return TRIRUN_BAD_POINTER;
  Problem p{};
  p.w = *w, p.n = n, p.k = k, p.m = m, p.x = x, p.ldx = ldx, p.bias = bias, p.y = y, p.ldy = ldy;
  p.dtype = dtype, p.act_bits = act_bits, p.plan = *plan;
  p.workspace = workspace, p.workspace_bytes = workspace_bytes, p.stream = static_cast<cudaStream_t>(stream);
  if (const int code = describe_device(p)) return code;
  return dispatch(p);
}

extern "C" size_t trirun_cuda_activation_bytes(int64_t m, int64_t k_pad, int act_bits) {
  return trirun::activation_bytes(m, k_pad, act_bits);
}

extern "C" int trirun_cuda_quantize(const void* x, int dtype, int64_t m, int64_t k, int64_t ldx, int64_t k_pad,
                                    int act_bits, void* activations, size_t activation_bytes, void* stream) {
  if (m <= 0 || m > QUANTIZED_ROWS || k <= 0 || k > k_pad || k_pad % 128 || k_pad > (1 << 20) || ldx < k)
    return TRIRUN_BAD_SHAPE;
  if (!known_dtype(dtype) || !known_bits(act_bits)) return TRIRUN_UNSUPPORTED;
  if (x == nullptr || activations == nullptr || !aligned(x, dtype == TRIRUN_F32 ? 4 : 2) || !aligned(activations, 256))
    return TRIRUN_BAD_POINTER;
  if (activation_bytes < trirun::activation_bytes(m, k_pad, act_bits)) return TRIRUN_NO_WORKSPACE;
  Problem p{};
  p.w.k = k_pad, p.k = k, p.m = m, p.x = x, p.ldx = ldx, p.dtype = dtype, p.act_bits = act_bits;
  p.stream = static_cast<cudaStream_t>(stream);
  if (const int code = describe_device(p)) return code;
  return trirun::launch_quantize(p, activations);
}

extern "C" int trirun_cuda_int2_gemm_quantized(const trirun_int2* w, int64_t n, const void* activations, int64_t m,
                                               const void* bias, void* y, int dtype, int64_t ldy, int act_bits,
                                               const trirun_cuda_plan* plan, void* workspace, size_t workspace_bytes,
                                               void* stream) {
  if (w == nullptr || plan == nullptr) return TRIRUN_BAD_POINTER;
  if (const int code = check_weight(*w, n, w->k)) return code;
  if (m == 0) return TRIRUN_OK;
  if (m < 0 || ldy < n) return TRIRUN_BAD_SHAPE;
  if (!known_dtype(dtype) || !known_bits(act_bits) || !is_decode(plan->kernel)) return TRIRUN_UNSUPPORTED;
  const size_t element = dtype == TRIRUN_F32 ? 4 : 2;
  if (activations == nullptr || y == nullptr || !aligned(activations, 256) || !aligned(y, element) ||
      !aligned(bias, element))
    return TRIRUN_BAD_POINTER;
  Problem p{};
  p.w = *w, p.n = n, p.k = w->k, p.m = m, p.bias = bias, p.y = y, p.ldy = ldy, p.dtype = dtype, p.act_bits = act_bits;
  p.plan = *plan, p.plan.fused = 0, p.activations = activations;
  p.workspace = workspace, p.workspace_bytes = workspace_bytes, p.stream = static_cast<cudaStream_t>(stream);
  if (const int code = describe_device(p)) return code;
  return dispatch(p);
}
