"""Plain readers: what reading bytes costs when nothing is computed, on a GPU (csrc/cuda/probe.cu) and on a CPU
(csrc/cpu/common/bandwidth.cpp)."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_uint64

import torch
from torch import Tensor

from ..errors import MissingError


def reader(data: Tensor) -> Callable[[], None]:
    """A call that reads every byte of a contiguous tensor once, as fast as its device can, with as many threads as
    torch's on a CPU; on a GPU it can be captured in a graph.

    Args:
        data: on a GPU aligned to 16 bytes and a multiple of them, on a CPU aligned to 64.

    The call raises:
        MissingError: the library refused it.
    """
    return _gpu_reader(data) if data.device.type == "cuda" else _cpu_reader(data)


def _gpu_reader(data: Tensor) -> Callable[[], None]:
    from trirun_kernels.native import cuda

    sink = torch.zeros(1, dtype=torch.int32, device=data.device)  # a checksum of the data is added to it

    def read() -> None:
        with torch.cuda.device(data.device):
            stream = torch.cuda.current_stream().cuda_stream
            _check(cuda().trirun_cuda_read_probe(data.data_ptr(), data.nbytes, sink.data_ptr(), stream), data)

    return read


def _cpu_reader(data: Tensor) -> Callable[[], None]:
    from trirun_kernels.native import cpu

    checksum = c_uint64()

    def read() -> None:
        threads = torch.get_num_threads()
        _check(cpu().trirun_cpu_read(data.data_ptr(), data.nbytes, threads, byref(checksum)), data)

    return read


def _check(code: int, data: Tensor) -> None:
    if code:
        raise MissingError(f"the read probe failed with code {code} on {list(data.shape)} {data.dtype}")
