"""int2_gemm on CUDA tensors: choose a plan, hand pointers to libtrirun_cuda.so, turn its codes into exceptions."""

from __future__ import annotations

import ctypes
import threading
from functools import cache

import torch
from torch import Tensor

from ..native import Int2Struct, NativeError, load
from ..plan.select import COLUMNS, DECODE_ROWS, DEQUANTIZE, PREFILL, RUNS, STREAM_SM80, Device, Plan, select
from ..weights.packing import PackedWeight
from .cpu import DTYPES, rows_of


class PlanStruct(ctypes.Structure):
    """``trirun_cuda_plan`` of csrc/trirun.h."""

    _fields_ = tuple((name, ctypes.c_int32) for name in Plan.__slots__)

    @classmethod
    def of(cls, plan: Plan) -> PlanStruct:
        return cls(*(getattr(plan, name) for name in Plan.__slots__))


def int2_gemm(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    group_size: int,
    zero: float,
    act_bits: int,
) -> Tensor:
    """The CUDA implementation of ``trirun::int2_gemm``; arguments as in :mod:`trirun_kernels.gemm.ops`.

    Raises:
        NativeError: the library is missing, or refused the call; the message has the shapes.
    """
    w = PackedWeight.of_operands(words, scales, zeros, n, k, group_size, zero)
    rows, m, stride = rows_of(x, k)
    if rows.stride(0) < k:  # of one row torch leaves it open
        rows = rows.as_strided((m, k), (stride, 1))
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    if m:
        with torch.cuda.device(x.device):
            _gemm(rows, w, bias, y, act_bits)
    return y.view(*x.shape[:-1], n)


def quantize_activations(x: Tensor, act_bits: int) -> Tensor:
    """The CUDA implementation of ``trirun::quantize_activations``: x [m, k], m at most 64, to uint8 [bytes]."""
    k = x.shape[1]
    rows, m, stride = rows_of(x, k)
    if not 0 < m <= DECODE_ROWS:
        raise ValueError(f"quantize_activations: x has {m} rows; 1 to {DECODE_ROWS} are supported")
    k_pad = -(-k // 128) * 128
    with torch.cuda.device(x.device):
        size = library().trirun_cuda_activation_bytes(m, k_pad, act_bits)
        out = torch.empty(size, dtype=torch.uint8, device=x.device)
        code = library().trirun_cuda_quantize(
            rows.data_ptr(), DTYPES[x.dtype], m, k, stride, k_pad, act_bits, out.data_ptr(), size, _stream()
        )
    _check(code, f"quantize_activations: x {x.dtype} {list(x.shape)}, act_bits={act_bits}")
    return out


def int2_gemm_quantized(
    activations: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    m: int,
    group_size: int,
    zero: float,
    act_bits: int,
    dtype: torch.dtype,
) -> Tensor:
    """The CUDA implementation of ``trirun::int2_gemm_quantized``: activations of ``m`` rows to [m, n] of ``dtype``."""
    w = PackedWeight.of_operands(words, scales, zeros, n, k, group_size, zero)
    y = torch.empty((m, n), dtype=dtype, device=activations.device)
    bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    with torch.cuda.device(y.device):
        struct, device = Int2Struct.of(w), device_of(y.device.index)
        plan = PlanStruct.of(select(struct.n, struct.k, m, group_size, act_bits, device, quantized=True))
        size = library().trirun_cuda_activation_bytes(m, struct.k, act_bits)
        if activations.numel() != size or not activations.is_contiguous():
            raise ValueError(f"int2_gemm_quantized: {activations.numel()} bytes for m={m}, k={k}; expected {size}")
        with _launching:
            workspace = _workspace(struct, m, dtype, act_bits, plan, y.device, quantized=True)
            code = library().trirun_cuda_int2_gemm_quantized(
                ctypes.byref(struct), n, activations.data_ptr(), m, None if bias is None else bias.data_ptr(),
                y.data_ptr(), DTYPES[dtype], n, act_bits, ctypes.byref(plan), *_span(workspace), _stream(),
            )  # fmt: skip
    _check(code, f"int2_gemm_quantized: m={m}, n={n}, k={k}, group_size={group_size}, act_bits={act_bits}")
    return y


def run_plan(x: Tensor, w: PackedWeight, bias: Tensor | None, y: Tensor, act_bits: int, plan: Plan) -> None:
    """One launch under a given plan, on the current device and stream: x [m, k] with unit column stride, y [m, n].

    Tests and tuning sweeps call this; everything else leaves the plan to :func:`trirun_kernels.plan.select.select`.
    """
    struct, plan_struct = Int2Struct.of(w), PlanStruct.of(plan)
    m = x.shape[0]
    with _launching:
        workspace = _workspace(struct, m, x.dtype, act_bits, plan_struct, x.device)
        code = library().trirun_cuda_int2_gemm(
            ctypes.byref(struct), w.n, w.k, x.data_ptr(), DTYPES[x.dtype], m, x.stride(0),
            None if bias is None else bias.data_ptr(), y.data_ptr(), y.stride(0), act_bits, ctypes.byref(plan_struct),
            *_span(workspace), _stream(),
        )  # fmt: skip
    _check(code, f"int2_gemm: x {x.dtype} {list(x.shape)}, n={w.n}, {w.spec}, act_bits={act_bits}, {plan}")


@cache
def device_of(index: int) -> Device:
    """What :func:`select` needs to know of a device."""
    properties = torch.cuda.get_device_properties(index)
    return Device(10 * properties.major + properties.minor, properties.multi_processor_count)


def _gemm(x: Tensor, w: PackedWeight, bias: Tensor | None, y: Tensor, act_bits: int) -> None:
    device, wide = device_of(x.device.index), x.dtype == torch.float32
    n_pad, k_pad = w.words.shape[0] * 64, w.words.shape[1] * 32
    bias = bias if bias is None or bias.is_contiguous() else bias.contiguous()
    if wide:
        # float32 keeps its accuracy only on the digit kernels: more rows than they take go through in pieces.
        step = DECODE_ROWS if device.arch == 90 else 4
        for first in range(0, x.shape[0], step):
            part = x[first : first + step]
            plan = select(n_pad, k_pad, part.shape[0], w.spec.group_size, act_bits, device, wide=True)
            run_plan(part, w, bias, y[first : first + step], act_bits, plan)
        return
    plan = select(
        n_pad, k_pad, x.shape[0], w.spec.group_size, act_bits, device, apart=not reads_vectors(x, act_bits),
        plain=w.spec.has_plain_zero, dense=True,
    )  # fmt: skip
    if plan.kernel == DEQUANTIZE:
        dense = torch.empty((w.n, w.k), dtype=x.dtype, device=x.device)
        run_plan(dense, w, None, dense, act_bits, plan)
        torch.matmul(x, dense.T, out=y) if bias is None else torch.addmm(bias, x, dense.T, out=y)
        return
    if plan.kernel in PREFILL and (x.data_ptr() % 16 or x.stride(0) % 8):
        # The copy engine reads rows that start on 16 bytes.
        aligned = torch.empty((x.shape[0], -(-w.k // 8) * 8), dtype=x.dtype, device=x.device)
        aligned[:, : w.k] = x
        x = aligned[:, : w.k]
    run_plan(x, w, bias, y, act_bits, plan)


def reads_vectors(x: Tensor, act_bits: int) -> bool:
    """Whether a kernel can read 16-bit rows x [m, k] by what its prologue takes at once: two numbers, or eight of rows
    that it copies whole, for 8-bit activations."""
    at_once = 8 if act_bits == 8 else 2
    return not (x.shape[1] % at_once or x.stride(0) % at_once or x.data_ptr() % (2 * at_once))


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


COUNTER_BYTES = 64 << 10  # at the start of a workspace: the zeros that trirun.h asks for

# One workspace per device and stream: kernels of one stream run in order, so they can share it. It only grows.
_workspaces: dict[tuple[int, int], Tensor] = {}
# A call makes up to two launches, the first of which leaves digits in the workspace for the second: another thread's on
# the same stream must not come between.
_launching = threading.Lock()


def _workspace(
    struct: Int2Struct,
    m: int,
    dtype: torch.dtype,
    act_bits: int,
    plan: PlanStruct,
    device: torch.device,
    *,
    quantized: bool = False,
) -> Tensor | None:
    size = library().trirun_cuda_int2_workspace(ctypes.byref(struct), m, DTYPES[dtype], act_bits, ctypes.byref(plan))
    if size == 0:
        return None
    if torch.cuda.is_current_stream_capturing():
        # From the graph's own pool. Only counters need zeros, and then the graph itself must write them: what was zero
        # at capture need not be at replay. Otherwise a fill would be one more kernel in every replay.
        # Those of COLUMNS and RUNS are zeroed by the kernel that quantizes x, where there is one.
        counts = plan.cta_split > 1 if plan.kernel == STREAM_SM80 else plan.kernel in (COLUMNS, RUNS) and quantized
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        if counts:
            workspace[:COUNTER_BYTES].zero_()
        return workspace
    key = (device.index, _stream())
    held = _workspaces.get(key)
    if held is None or held.numel() < size:
        held = _workspaces[key] = torch.zeros(max(size, 4 << 20), dtype=torch.uint8, device=device)
    return held


def _span(workspace: Tensor | None) -> tuple[int | None, int]:
    return (None, 0) if workspace is None else (workspace.data_ptr(), workspace.numel())


@cache
def library() -> ctypes.CDLL:
    """libtrirun_cuda.so with the signatures of its INT2 products."""
    cuda = load("cuda")
    pointer, integer, long, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t
    cuda.trirun_cuda_error.restype = ctypes.c_char_p
    cuda.trirun_cuda_int2_workspace.restype = size
    cuda.trirun_cuda_int2_workspace.argtypes = [pointer, long, integer, integer, pointer]
    cuda.trirun_cuda_activation_bytes.restype = size
    cuda.trirun_cuda_activation_bytes.argtypes = [long, long, integer]
    cuda.trirun_cuda_quantize.argtypes = [
        pointer, integer, long, long, long, long, integer, pointer, size, pointer
    ]  # fmt: skip
    cuda.trirun_cuda_int2_gemm.argtypes = [
        pointer, long, long, pointer, integer, long, long, pointer, pointer, long, integer, pointer, pointer, size,
        pointer,
    ]  # fmt: skip
    cuda.trirun_cuda_int2_gemm_quantized.argtypes = [
        pointer, long, pointer, long, pointer, pointer, integer, long, integer, pointer, pointer, size, pointer
    ]  # fmt: skip
    return cuda


def _check(code: int, what: str) -> None:
    if code:
        raise NativeError(f"{what}: {library().trirun_cuda_error(code).decode()} (code {code})")
