"""Memory of the process: what is free for another model, and what an unloaded one leaves behind."""

from __future__ import annotations

import ctypes
import gc
import sys

from ...engine.cache_memory import available_bytes


def free_bytes() -> int:
    """Bytes that another model can take: of the GPU where a model runs on one, else of the machine."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.mem_get_info()[0])
    return available_bytes()


def release_memory() -> None:
    """Give back what an unloaded model had: cycles of objects, torch's cached blocks of a GPU, pages of the C library's
    heap. What was frozen for short pauses may belong to it, so that is looked at too."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    # glibc keeps freed pages of its heap; other C libraries have no such function.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
