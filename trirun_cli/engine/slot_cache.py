"""The cache of a runner that holds one contiguous region per slot."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np

from .runner import Admission

# Tokens that a copy has to save.
COPY_LEAST = 32


class SlotCache:
    """One region of ``context`` positions per slot; freed ones keep their tokens until someone else needs them.

    A new request takes the free slot that shares the longest prefix with its prompt, unless more than half of that
    slot's tokens would be lost by it; then, the slot that is missed least. A longer prefix of another slot is copied.

    Args:
        slots, context: of the cache.
        copy: copy(source, target, length): the first ``length`` positions of a slot to another; None: it cannot.
        rewind: whether a slot can forget its last tokens; otherwise it is reused only by what continues all of it.
    """

    def __init__(
        self,
        slots: int,
        context: int,
        *,
        copy: Callable[[int, int, int], None] | None = None,
        rewind: bool = True,
    ) -> None:
        self._context, self._copy, self._rewind = context, copy, rewind
        # What each slot holds: all tokens of a free one, the computed part of the prompt of a running one.
        self._held: list[array[int] | np.ndarray] = [array("i") for _ in range(slots)]
        self._prompts: dict[int, np.ndarray] = {}
        self._lengths: dict[int, int] = {}
        # Free slots; those free for longest come first, so that the rest is found when its owner comes back.
        self._free = list(range(slots))

    def admit(self, prompt: Sequence[int], *, reuse: bool = True) -> Admission | None:
        """See :class:`~.runner.KvCache`."""
        if not self._free:
            return None
        tokens = np.asarray(prompt, np.int32)
        slot, reused = self._place(tokens) if reuse else (self._victim(self._free), 0)
        self._free.remove(slot)
        self._prompts[slot], self._lengths[slot] = tokens, len(tokens)
        self._held[slot] = tokens[:reused]
        return Admission(slot, reused)

    def grow(self, slot: int, length: int) -> bool:
        """See :class:`~.runner.KvCache`."""
        self._lengths[slot] = max(self._lengths[slot], length)
        return length <= self._context

    def computed(self, slot: int, length: int) -> None:
        """See :class:`~.runner.KvCache`."""
        self._held[slot] = self._prompts[slot][:length]

    def release(self, slot: int, tokens: Sequence[int]) -> None:
        """See :class:`~.runner.KvCache`."""
        del self._prompts[slot], self._lengths[slot]
        # Not numpy's: its code has left the caches during a burst, and takes longer to come back than all else here.
        self._held[slot] = array("i", tokens)
        self._free.append(slot)

    @property
    def usage(self) -> float:
        """See :class:`~.runner.KvCache`."""
        return sum(self._lengths.copy().values()) / (len(self._held) * self._context)

    def _place(self, tokens: np.ndarray) -> tuple[int, int]:
        """The slot for a prompt and the tokens it will hold of it. One token at least is left to compute."""
        shared = [self._shared(held, tokens[:-1]) for held in self._held]
        slot = max(self._free, key=shared.__getitem__)
        if len(self._held[slot]) > 2 * shared[slot]:
            slot = self._victim(self._free)
        source = max(range(len(shared)), key=shared.__getitem__)
        if self._copy is None or source == slot or shared[source] - shared[slot] < COPY_LEAST:
            return slot, shared[slot]
        self._copy(source, slot, shared[source])
        return slot, shared[source]

    def _shared(self, held: array[int] | np.ndarray, tokens: np.ndarray) -> int:
        length = min(len(held), len(tokens))
        # Most slots begin differently; that is seen for less than a comparison of arrays.
        if not length or held[0] != tokens[0]:
            return 0
        differing = np.flatnonzero(np.asarray(held[:length]) != tokens[:length])
        shared = int(differing[0]) if differing.size else length
        return shared if self._rewind or shared == len(held) else 0

    def _victim(self, free: list[int]) -> int:
        """The slot whose tokens are missed least: an empty one, or else the one free for longest."""
        return min(free, key=lambda slot: len(self._held[slot]) > 0)
