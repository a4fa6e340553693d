"""The two compiled libraries: finding and loading them, their structures, signatures and error codes.

The one place that knows how csrc/trirun.h looks from Python (the decoder's structures are beside the decoder). Nothing
is loaded, compiled or queried on import.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .weights.packing import PackedWeight

ABI_VERSION = 26  # TRIRUN_ABI_VERSION of csrc/trirun.h
LIBRARY_DIR = Path(__file__).resolve().parent / "_lib"
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # TRIRUN_F32, _F16, _BF16

_POINTER, _INT, _LONG, _SIZE = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t


class NativeError(RuntimeError):
    """A compiled library is missing, of another version, or returned an error code."""


class Int2Struct(ctypes.Structure):
    """``trirun_int2`` of csrc/trirun.h. It points into the tensors it was made from: keep them alive."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("group_size", ctypes.c_int32),
        ("zero", ctypes.c_float),
    )

    @classmethod
    def of(cls, w: PackedWeight) -> Int2Struct:
        return cls(
            w.words.data_ptr(),
            w.scales.data_ptr(),
            None if w.zeros is None else w.zeros.data_ptr(),
            w.words.shape[0] * 64,
            w.words.shape[1] * 32,
            w.spec.group_size,
            1.0 if w.spec.zero is None else w.spec.zero,
        )


class PlanStruct(ctypes.Structure):
    """``trirun_cuda_plan`` of csrc/trirun.h; the fields of :class:`.plan.problem.Plan`."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            "kernel", "tile_m", "tile_n", "warps", "warp_split", "cta_split", "stages", "ctas", "fused", "early",
            "x_first",
        )
    )  # fmt: skip


class F16AccPlanStruct(ctypes.Structure):
    """``trirun_f16acc_plan`` of csrc/trirun.h."""

    _fields_ = tuple((name, ctypes.c_int32) for name in ("kernel", "tile_n", "chunk", "parts", "along_rows"))


class Limits(ctypes.Structure):
    """``trirun_cuda_limits`` of csrc/trirun.h: sizes that both sides need."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in (
            "n_tile", "k_tile", "k_pad", "decode_rows", "exact_sum_k", "counter_bytes", "span_k_tiles", "tile_rows",
            "low_tile_rows", "w2a8_max_k", "head_int8_rows", "head_16bit_rows", "head_16bit_columns",
            "head_12bit_columns",
        )
    )  # fmt: skip


# Result (None: an int, 0 or an error code) and arguments of what libtrirun_cuda.so exports.
_CUDA: dict[str, tuple[Any, list[Any]]] = {
    "error": (ctypes.c_char_p, [_INT]),
    "get_limits": (None, [_POINTER]),
    "plan_shared_bytes": (
        _LONG,
        [_LONG, _LONG, _LONG, *[ctypes.c_int32] * 6, _POINTER],
    ),
    "plan_needs_zeros": (ctypes.c_int32, [_POINTER, ctypes.c_int32]),
    "capture_id": (ctypes.c_uint64, [_POINTER]),
    "int2_workspace": (_SIZE, [_POINTER, _LONG, _INT, _INT, _POINTER]),
    "activation_bytes": (_SIZE, [_LONG, _LONG, _INT]),
    "quantize": (_INT, [_POINTER, _INT, *[_LONG] * 4, _INT, _POINTER, _SIZE, _POINTER]),
    "int2_gemm": (
        _INT,
        [
            _POINTER, _LONG, _LONG, _POINTER, _INT, _LONG, _LONG, _POINTER, _POINTER, _LONG, _INT, _POINTER, _POINTER,
            _SIZE, _POINTER,
        ],
    ),
    "int2_gemm_quantized": (
        _INT,
        [
            _POINTER, _LONG, _POINTER, _LONG, _POINTER, _POINTER, _INT, _LONG, _INT, _POINTER, _POINTER, _SIZE,
            _POINTER,
        ],
    ),
    "read_probe": (_INT, [_POINTER, _SIZE, _POINTER, _POINTER]),
    "f16acc_workspace": (_SIZE, [_LONG, _LONG, _POINTER]),
    "f16acc_gemm": (
        _INT,
        [*[_POINTER, _LONG] * 2, _POINTER, _POINTER, *[_LONG] * 4, _POINTER, _POINTER, _SIZE, _POINTER],
    ),
    "rows": (_INT, [_POINTER, _POINTER]),
    "head_int8": (_INT, [_POINTER, _INT, *[_LONG] * 3, *[_POINTER] * 2, *[_LONG] * 2, _POINTER, _LONG, _POINTER]),
    "head_16bit": (_INT, [_POINTER, _INT, *[_LONG] * 3, _POINTER, _LONG, _POINTER, _LONG, _POINTER]),
    "head_12bit": (_INT, [_POINTER, _INT, *[_LONG] * 3, *[_POINTER] * 3, _LONG, _POINTER, _LONG, _POINTER]),
    "attention_workspace": (_SIZE, [_POINTER]),
    "attention_decode": (_INT, [_POINTER, _POINTER, _SIZE, _POINTER]),
    "attention_append": (_INT, [_POINTER, _POINTER, _POINTER]),
    "attention_gather": (_INT, [_POINTER, _POINTER]),
    "delta_decode": (_INT, [_POINTER, _POINTER]),
    "delta_prompt": (_INT, [_POINTER, _POINTER]),
    "step_messages": (_SIZE, [_POINTER]),
    "step_ctas": (_INT, [_POINTER]),
    "decoder_step": (_INT, [_POINTER, _POINTER]),
    "sample": (_INT, [_POINTER, _POINTER]),
    "expert_tiles": (_LONG, [_LONG] * 4),
    "route": (_INT, [_POINTER, _POINTER]),
    "experts": (_INT, [_POINTER, _POINTER]),
    "combine": (_INT, [_POINTER, _POINTER]),
    "dequantize_experts": (_INT, [_POINTER, *[_LONG] * 3, _INT, _POINTER, _POINTER]),
}  # fmt: skip


def library_path(name: str) -> Path:
    """Where the compiled library of a device ("cpu" or "cuda") lies, built or not."""
    return LIBRARY_DIR / f"libtrirun_{name}.so"


@cache
def load(name: str) -> ctypes.CDLL:
    """The compiled library of a device, loaded once. The environment variable TRIRUN_CPU_ISA names the instruction set
    that the CPU's library shall use instead of the best.

    Raises:
        NativeError: it was not built, cannot be loaded, or was built from another version of trirun.h; or
            TRIRUN_CPU_ISA names what this machine does not have.
    """
    path = library_path(name)
    if not path.exists():
        raise NativeError(f"{path.name} is not built; reinstall trirun with a C++ compiler{_needs(name)}")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeError(f"{path.name} cannot be loaded: {error}") from error
    version = getattr(library, f"trirun_{name}_abi_version")()
    if version != ABI_VERSION:
        raise NativeError(f"{path.name} has ABI version {version}, this trirun needs {ABI_VERSION}: reinstall trirun")
    wanted = os.environ.get("TRIRUN_CPU_ISA", "") if name == "cpu" else ""
    if wanted and library.trirun_cpu_set_isa(wanted.encode()):
        raise NativeError(f"TRIRUN_CPU_ISA={wanted}: not an instruction set that this machine and this library have")
    return library


@cache
def cuda() -> ctypes.CDLL:
    """libtrirun_cuda.so with all signatures. It loads without a GPU.

    Raises:
        NativeError: as :func:`load`.
    """
    return with_signatures(load("cuda"))


def with_signatures(library: ctypes.CDLL) -> ctypes.CDLL:
    """A library that exports what libtrirun_cuda.so does, told what its functions take and return."""
    for name, (result, arguments) in _CUDA.items():
        function = getattr(library, f"trirun_cuda_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def check_cuda(code: int, what: str) -> None:
    """Raises :class:`NativeError` with ``what`` and the reason for a return code of libtrirun_cuda.so other than 0."""
    if code:
        raise NativeError(f"{what}: {cuda().trirun_cuda_error(code).decode()} (code {code})")


@cache
def limits() -> Limits:
    """Sizes that plans and kernels agree on."""
    found = Limits()
    cuda().trirun_cuda_get_limits(ctypes.byref(found))
    return found


@lru_cache(maxsize=1 << 12)
def plan_shared_bytes(
    n: int, k: int, m: int, group_size: int, has_zeros: bool, act_bits: int, dtype: str, quantized: bool, arch: int,
    plan: tuple[int, ...],
) -> int:  # fmt: skip
    """Bytes of dynamic shared memory of one CTA under a plan (fields as in :class:`PlanStruct`), or -1 where no kernel
    runs it. It depends on no device but ``arch``."""
    return cuda().trirun_cuda_plan_shared_bytes(
        n, k, m, group_size, has_zeros, act_bits, DTYPES[dtype], quantized, arch, ctypes.byref(PlanStruct(*plan))
    )


def _needs(name: str) -> str:
    return " and nvcc" if name == "cuda" else ""


@cache
def cpu() -> ctypes.CDLL:
    """libtrirun_cpu.so with the signatures of csrc/trirun.h.

    Raises:
        NativeError: as :func:`load`.
    """
    pointer, whole, long, size, text = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t, ctypes.c_char_p
    signatures: dict[str, tuple[type, tuple[type, ...]]] = {
        "isa": (text, ()),
        "set_isa": (whole, (text,)),
        "act_bytes": (size, (long, long, whole)),
        "act_init": (whole, (pointer, pointer, size, long, long, whole)),
        "quantize": (whole, (pointer, pointer, whole, long, long, whole)),
        "int2_gemm_act": (whole, (pointer, long, pointer, whole, pointer, pointer, long, whole)),
        "int2_gemm": (
            whole,
            (pointer, long, long, pointer, whole, long, long, pointer, pointer, long, whole, whole),
        ),
        "read": (whole, (pointer, long, whole, pointer)),
        "head_stride": (long, (long,)),
        "head_int8": (whole, (pointer, whole, long, long, pointer, pointer, whole)),
        "decoder_context": (long, (long,)),
        "decoder_cache_bytes": (size, (pointer, long)),
        "decoder_workspace": (size, (pointer, long)),
        "decoder_step": (
            whole,
            (pointer, pointer, long, pointer, long, pointer, long, pointer, pointer, size, whole),
        ),
        "decoder_states": (
            whole,
            (pointer, pointer, long, pointer, long, pointer, long, pointer, pointer, size, whole),
        ),
        "decoder_generate": (
            whole,
            (*(pointer, pointer, long, pointer, long, pointer, pointer, long), *[pointer] * 4, size, whole),
        ),
        "draw": (whole, (pointer, long, pointer, pointer)),
        "decoder_products": (whole, (pointer, long, whole, whole)),
    }
    library = load("cpu")
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"trirun_cpu_{name}")
        function.restype, function.argtypes = result, list(arguments)
    return library


# Return codes of libtrirun_cpu.so other than 0.
BAD_SHAPE, BAD_POINTER, UNSUPPORTED, NO_WORKSPACE = -1, -2, -3, -4
_CPU_CODES = {
    BAD_SHAPE: "BAD_SHAPE",
    BAD_POINTER: "BAD_POINTER",
    UNSUPPORTED: "UNSUPPORTED",
    NO_WORKSPACE: "NO_WORKSPACE (out of memory)",
}


def cpu_error(code: int, what: str) -> NativeError:
    """The error with ``what`` and the reason for a return code of libtrirun_cpu.so."""
    return NativeError(f"{what}: {_CPU_CODES.get(code, code)}")


def check_cpu(code: int, what: str) -> None:
    """Raise :func:`cpu_error` for a return code other than 0."""
    if code:
        raise cpu_error(code, what)
