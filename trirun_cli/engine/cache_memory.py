"""How long the sequences of a cache in main memory can be."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OutOfMemoryError

if TYPE_CHECKING:
    from trirun_kernels.decoder.shape import DecoderShape

# Of what is available when the model is opened; the weights and everyone else need the rest.
SHARE = 0.5
LEAST = 512
_BLOCK = 64


def affordable_context(
    shape: DecoderShape, slots: int, longest: int, available: int | None = None, *, item_bytes: int = 2
) -> int:
    """Positions per slot of a cache that takes at most half of the memory that is available.

    Args:
        longest: positions that are wanted. available: bytes; None asks the system. item_bytes: of one element.

    Raises:
        OutOfMemoryError: less than 512 (or ``longest``, where that is less) fit.
    """
    if available is None:
        available = available_bytes()
    position = position_bytes(shape, item_bytes)
    budget, least = SHARE * available - slots * state_bytes(shape), min(LEAST, longest)
    fits = max(int(budget), 0) // (position * slots) // _BLOCK * _BLOCK
    if fits < least:
        need = f"{slots} sequences of {least} tokens need {slots * least * position / 2**30:.2f} GiB of cache"
        raise OutOfMemoryError(
            f"{need}, half of the free memory is {max(budget, 0) / 2**30:.2f} GiB", "run fewer at once"
        )
    return min(fits, longest)


def position_bytes(shape: DecoderShape, item_bytes: int) -> int:
    """Bytes of a CPU's cache for one token: keys and values of all layers, heads padded to 16 elements as the native
    cache pads them."""
    return 2 * item_bytes * sum(m.kv_heads * (-(-m.head_dim // 16) * 16) for m in shape.cached.values())


def state_bytes(shape: DecoderShape) -> int:
    """Bytes of what a CPU's cache keeps of a sequence however long it is: states, and inputs of convolutions."""
    return 4 * sum(mixer.state_size + mixer.taps * mixer.channels for mixer in shape.deltas)


def available_bytes() -> int:
    """Memory that can still be taken without swapping, within the limit of this process's control group."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            found = int(line.split()[1]) * 1024
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        found = min(found, max(int(limit) - int(used), 0))
    return found


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""
