"""The streaming reader of csrc/cuda/probe.cu: what reading these bytes costs when nothing is computed."""

from __future__ import annotations

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
    from trirun_kernels.native import cuda

    with torch.cuda.device(data.device):
        stream = torch.cuda.current_stream().cuda_stream
        code = cuda().trirun_cuda_read_probe(data.data_ptr(), data.nbytes, sink.data_ptr(), stream)
    if code:
        raise MissingError(f"the read probe failed with code {code} on {list(data.shape)} {data.dtype}")
