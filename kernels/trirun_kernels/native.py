"""Finding and loading the two compiled libraries. Nothing is loaded, compiled or queried on import."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .weights.packing import PackedWeight

ABI_VERSION = 10  # TRIRUN_ABI_VERSION of csrc/trirun.h
LIBRARY_DIR = Path(__file__).resolve().parent / "_lib"
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # TRIRUN_F32, _F16, _BF16


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
        "decoder_cache_bytes": (size, (pointer,)),
        "decoder_workspace": (size, (pointer, long)),
        "decoder_step": (
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
