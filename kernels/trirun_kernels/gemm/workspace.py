"""Working memory of the CUDA products: one policy for the operators, the decoder and products with fp16 sums.

Kernels of one stream run in order and can share a buffer. Outside of a graph capture there is one for every device and
stream, which only grows; its first bytes are counters, zeros that every kernel leaves zero. In a capture there is one
for every capture and stream, from the graph's own pool: a graph depends on no memory that something else may free or
count in. The graph itself zeroes its counters, once, ahead of the first product that needs them; what was zero at
capture need not be at replay.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch
from torch import Tensor

from ..native import cuda, limits

LEAST = 4 << 20  # bytes of a buffer: few products need more

# Held from asking for a buffer to the end of the launch: a call makes up to two launches, the first of which leaves
# limbs or sums in the buffer for the second; another thread's on the same stream must not come between.
launching = threading.Lock()


@dataclass(slots=True)
class _Captured:
    capture: int
    buffer: Tensor
    zeroed: bool = False


# By device and stream.
_buffers: dict[tuple[int | None, int], Tensor] = {}
_captured: dict[tuple[int | None, int], _Captured] = {}


def workspace(device: torch.device, stream: int, size: int, *, counts: bool) -> tuple[int | None, int]:
    """Address and bytes of memory for the next launch on the current device's ``stream``; hold :data:`launching`.

    Args:
        size: bytes needed, counters included; 0 gives (None, 0).
        counts: whether the kernel needs zeros in the counters.
    """
    if size == 0:
        return None, 0
    key = device.index, stream
    capture = cuda().trirun_cuda_capture_id(stream)
    held = _captured.get(key)
    if held is not None and held.capture != capture:
        held = None
        del _captured[key]  # that capture has ended: its pool may reuse the memory
    if capture == 0:
        buffer = _buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = _buffers[key] = torch.zeros(max(size, LEAST), dtype=torch.uint8, device=device)
        return buffer.data_ptr(), buffer.numel()
    if held is None or held.buffer.numel() < size:
        held = _Captured(capture, torch.empty(max(size, LEAST), dtype=torch.uint8, device=device))
        _captured[key] = held
    if counts and not held.zeroed:
        held.buffer[: limits().counter_bytes].zero_()
        held.zeroed = True
    return held.buffer.data_ptr(), held.buffer.numel()


def scratch(device: torch.device, stream: int, size: int) -> tuple[int | None, int]:
    """As :func:`workspace` for kernels without counters: any bytes, behind them."""
    if size == 0:
        return None, 0
    counters = limits().counter_bytes
    address, held = workspace(device, stream, counters + size, counts=False)
    assert address is not None
    return address + counters, held - counters
