// Products of many rows of x: which of the prefill kernels a plan means, what it needs, and the way from the caller's
// rows of x to the kernel.
#include "prefill.cuh"

namespace trirun::gemm_prefill {
namespace {

RowFormat row_format(const Problem& p) {
  if (p.plan.kernel == TRIRUN_KERNEL_PREFILL_W2A8) return kRowsInt8;
  if (p.act_bits == TRIRUN_ACT8) return kRowsInt8InHalf;
  return p.dtype == TRIRUN_F32 ? kRowsHalf : kRowsAsGiven;
}

// Scales inside the sum would need a second set of int32 sums, and these have to hold all of k.
bool takes(const Problem& p) {
  const int oldest = p.plan.kernel == TRIRUN_KERNEL_PREFILL_SM80 ? 80 : 90;
  if (p.arch < oldest || (oldest == 90 && p.arch != 90) || p.activations != nullptr) return false;
  return p.plan.kernel != TRIRUN_KERNEL_PREFILL_W2A8 ||
         (p.act_bits == TRIRUN_ACT8 && p.w.group_size < 0 && p.w.k <= W2A8_MAX_K);
}

int64_t shared_bytes(const Problem& p) {
  if (p.plan.kernel == TRIRUN_KERNEL_DEQUANTIZE) return 0;
  if (!takes(p)) return -1;
  if (p.plan.kernel == TRIRUN_KERNEL_PREFILL_SM80) return shared_bytes_sm80(p);
  return shared_bytes_sm90(p, row_format(p) == kRowsAsGiven ? p.dtype : TRIRUN_F16);
}

size_t workspace_bytes(const Problem& p) {
  if (p.plan.kernel == TRIRUN_KERNEL_DEQUANTIZE) return 0;
  return prepared_bytes(p.m, p.w.k, row_format(p)) + stream_k_bytes(p.plan);
}

int launch(const Problem& p) {
  if (p.plan.kernel == TRIRUN_KERNEL_DEQUANTIZE) return launch_dequantize(p);
  if (!takes(p)) return TRIRUN_UNSUPPORTED;
  const RowFormat format = row_format(p);
  void* rest = static_cast<uint8_t*>(p.workspace) + prepared_bytes(p.m, p.w.k, format);
  PreparedRows rows = {p.x, p.ldx, p.k, p.dtype, nullptr, nullptr, rest};
  if (p.workspace_bytes < workspace_bytes(p)) return TRIRUN_NO_WORKSPACE;
  if (format == kRowsAsGiven) {
    if (reinterpret_cast<uintptr_t>(p.x) % 16 || p.ldx % 8) return TRIRUN_BAD_POINTER;
  } else {
    const int status = launch_prepare(p, format, p.workspace, &rows);
    if (status != TRIRUN_OK) return status;
  }
  return p.plan.kernel == TRIRUN_KERNEL_PREFILL_SM80 ? launch_sm80(p, rows) : launch_sm90(p, rows);
}

}  // namespace

const KernelFamily prefill = {shared_bytes, workspace_bytes, launch};

}  // namespace trirun::gemm_prefill
