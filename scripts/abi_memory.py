"""Memory for scripts/fuzz_abi.py whose end is guarded: a byte read or written behind an array ends the process."""

from __future__ import annotations

import ctypes
import mmap
import random

PAGE, SLACK = mmap.PAGESIZE, 64


class GuardedMemory:
    """Arrays that end where no memory is. :meth:`reset` takes all of them back.

    Args:
        rng: of what arrays hold.
    """

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64]
        self._libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._free: dict[int, list[int]] = {}
        self._used: list[tuple[int, int]] = []
        plain = [rng.gauss(0, 1) for _ in range(1 << 14)]
        self._floats = (ctypes.c_float * len(plain))(*plain)

    def reset(self) -> None:
        """Forget every array."""
        for pages, place in self._used:
            self._free.setdefault(pages, []).append(place)
        self._used = []

    def array(self, size: int, align: int = 4) -> int:
        """The address of an array of that many bytes, which end at a page that nothing may touch (at most ``align`` - 1
        bytes before it). At least :data:`SLACK` bytes before the array may be touched. The contents are arbitrary."""
        pages = -(-(size + SLACK) // PAGE)
        if not self._free.get(pages):
            place = self._libc.mmap(None, (pages + 1) * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, 0x22, -1, 0)
            if place == ctypes.c_void_p(-1).value or self._libc.mprotect(place + pages * PAGE, PAGE, 0):
                raise MemoryError("no memory for a guarded array")
            self._free.setdefault(pages, []).append(place)
        place = self._free[pages].pop()
        self._used.append((pages, place))
        return place + pages * PAGE - -(-size // align) * align

    def of(self, values: ctypes.Array | ctypes.Structure) -> int:
        """The address of a copy of an array or a structure."""
        place = self.array(ctypes.sizeof(values), 8)
        ctypes.memmove(place, ctypes.byref(values), ctypes.sizeof(values))
        return place

    def floats(self, count: int, wild: bool = False) -> int:
        """float32 numbers; ``wild``: a NaN or an infinity among them."""
        place = self.array(4 * count)
        for at in range(0, count, len(self._floats)):
            ctypes.memmove(place + 4 * at, self._floats, 4 * min(len(self._floats), count - at))
        if wild and count:
            at, value = self.rng.randrange(count), self.rng.choice([float("nan"), float("inf"), -float("inf"), 1e38])
            ctypes.memmove(place + 4 * at, ctypes.byref(ctypes.c_float(value)), 4)
        return place

    def halves(self, count: int, dtype: int) -> int:
        """Numbers of a dtype (0 float32, 1 float16, 2 bfloat16): of two bytes each is 0.5 or so."""
        if dtype == 0:
            return self.floats(count)
        place = self.array(2 * count, 2)
        ctypes.memset(place, 0x38 if dtype == 1 else 0x3E, 2 * count)
        return place

    def words(self, size: int, align: int = 16) -> int:
        """Random bytes."""
        place = self.array(size, align)
        ctypes.memmove(place, self.rng.randbytes(min(size, 4096)), min(size, 4096))
        return place
