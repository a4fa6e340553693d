"""The streaming reader of csrc/cuda/probe.cu: what reading these bytes costs when nothing is computed."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ..errors import MissingError


def read_stream(data: Tensor, sink: Tensor) -> None:
    """Read every byte of a contiguous CUDA tensor (aligned to 16 bytes, a multiple of them).

    Args:
        sink: int32 [1] on the same device; a checksum of the data is added to it.

    Raises:
        MissingError: the CUDA library refused the call.
    """
    from trirun_kernels.native import load

    with torch.cuda.device(data.device):
        code = load("cuda").trirun_cuda_read_probe(
            ctypes.c_void_p(data.data_ptr()),
            ctypes.c_size_t(data.numel() * data.element_size()),
            ctypes.c_void_p(sink.data_ptr()),
            ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
        )
    if code:
        raise MissingError(f"the read probe failed with code {code} on {list(data.shape)} {data.dtype}")
