"""Finding and loading the two compiled libraries. Nothing is loaded, compiled or queried on import."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .weights.packing import PackedWeight

ABI_VERSION = 9  # TRIRUN_ABI_VERSION of csrc/trirun.h
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
