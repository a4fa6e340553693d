"""Which device a --device option means. torch is asked only where there is a driver that it could use."""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec

from ..errors import MissingError, UsageError


def on_cpu(device: str) -> bool:
    """Whether a --device option means the CPU; without torch where no GPU can be meant, or where torch, by which GPUs
    are used, is not installed.

    Raises:
        MissingError, UsageError: see :func:`pick_device`.
    """
    if device == "cpu" or (device == "auto" and (not _has_driver() or find_spec("torch") is None)):
        return True
    return pick_device(device) == "cpu"


def pick_device(device: str) -> str:
    """The torch device that a --device option means: "cpu", "cuda" or "cuda:N".

    Args:
        device: "auto" (the first GPU, or the CPU), "cpu", "cuda" or "cuda:N".

    Raises:
        MissingError: it is a GPU that is not there. UsageError: it is no device at all.
    """
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if named := re.fullmatch(r"cuda(?::(\d+))?", device):
        if int(named[1] or 0) >= torch.cuda.device_count():
            raise MissingError(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices here")
    elif device != "cpu":
        raise UsageError(f"--device {device}: not one of auto, cpu, cuda, cuda:N")
    return device


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
