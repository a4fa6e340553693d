"""Several processes, one GPU each, as one run: calibration text is shared out, what is learned from it is summed.

Every process walks all blocks. Forward passes, Hessians and training steps cover its own share of the sequences; sums
go through ``torch.distributed`` (NCCL between GPUs, gloo between CPUs), and the codes that the first process solves for
are sent to the others, so that all carry the same model. With one process every function here does nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch import distributed as dist

from ..layer.quantized import Quantized


@contextmanager
def joined(device: str) -> Iterator[str]:
    """Join the other processes that ``torchrun`` started, if any, for as long as the context lasts.

    Args:
        device: ``cuda`` or ``cpu``.

    Yields:
        The device of this process: with several GPUs, one each.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield device
        return
    gpu = device.startswith("cuda")
    if gpu:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def launched_first() -> bool:
    """Whether this is the only process, or the first of those that a launcher started, joined or not."""
    return os.environ.get("RANK", "0") == "0"


def world() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this is; the first one writes and reports."""
    return dist.get_rank() if world() > 1 else 0


def share(sequences: list[Tensor]) -> list[Tensor]:
    """This process's part of some sequences, every ``world``-th; equal in number for all, the rest is left out."""
    count = len(sequences) // world() * world()
    return sequences[rank() : count : world()]


def total(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over all processes."""
    if world() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def total_of(*numbers: float) -> list[float]:
    """Sums over all processes, in double precision."""
    if world() == 1:
        return list(numbers)
    values = torch.tensor(numbers, dtype=torch.float64, device=_device())
    dist.all_reduce(values)
    return values.tolist()


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Every gradient becomes the mean over all processes; one that a process lacks counts as zero."""
    if world() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
        parameter.grad /= world()


def from_first(weight: Quantized) -> Quantized:
    """The first process's codes and scales, in place of this one's own. Equal but for the last digit of some sum."""
    if world() > 1:
        for tensor in (weight.codes, weight.scales, weight.zeros):
            if tensor is not None:
                dist.broadcast(tensor, 0)
    return weight


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
