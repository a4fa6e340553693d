"""The cache of a runner that keeps keys and values in pages, found through a block table per slot.

Pages hold a fixed number of positions and belong to as many slots as share their tokens (Kwon et al. 2023,
"PagedAttention"). A full page is known by its tokens and by the page before it, so that any later prompt that begins
the same finds it, while it is in use and after, until its memory is needed: the page unused for longest goes first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .runner import Admission

# A page by what it holds: the node of the page before it, and its own tokens. Nodes are never used again.
_Key = tuple[int, tuple[int, ...]]
_ROOT = 0


@dataclass(slots=True)
class _Owned:
    """What a slot has: its prompt, its pages in order, and how many of them are known by their tokens, up to node."""

    prompt: tuple[int, ...]
    pages: list[int] = field(default_factory=list)
    known: int = 0
    node: int = _ROOT


class PagedCache:
    """Pages, their owners and the block tables.

    Args:
        slots: sequences. pages: how many there are, the first of which belongs to no one: rows that only fill up a
            batch may write there. context: most positions of a slot; the pages must hold that many at least.
        page_size: positions of a page. reuse: whether a slot may begin with pages that another has computed: not where
            it also has a state, which nobody has kept.

    Attributes:
        tables: int32 [slots, pages of a context], which page holds which positions of a slot; 0 where none does. A
            runner copies what a step needs when that is launched: the next schedule changes it.
    """

    def __init__(self, slots: int, pages: int, context: int, *, page_size: int = 64, reuse: bool = True) -> None:
        longest = -(-context // page_size)
        if pages < longest + 1:
            raise ValueError(f"{pages} pages of {page_size} positions do not hold a context of {context} and page 0")
        self.page_size, self._reuse = page_size, reuse
        self.tables = np.zeros((slots, longest), np.int32)
        self._pages = pages - 1
        self._slots = list(range(slots - 1, -1, -1))
        self._owned: dict[int, _Owned] = {}
        self._references = [0] * pages
        self._empty = list(range(pages - 1, 0, -1))
        # Pages that no one uses but someone may ask for, longest unused first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._found: dict[_Key, tuple[int, int]] = {}  # page and its node
        self._keys: dict[int, _Key] = {}
        self._nodes = _ROOT

    def admit(self, prompt: Sequence[int], *, reuse: bool = True) -> Admission | None:
        """See :class:`~.runner.KvCache`. Whole pages are reused, and every running slot is left one page to grow."""
        if not self._slots:
            return None
        owned = _Owned(tuple(prompt))
        shared = self._shared(owned) if reuse and self._reuse else []
        needed = -(-len(prompt) // self.page_size) - len(shared)
        spare = len(self._empty) + len(self._idle) - sum(page in self._idle for page in shared) - len(self._owned)
        if needed > spare:
            return None
        for page in shared:
            self._references[page] += 1
            self._idle.pop(page, None)
        owned.pages = shared + [self._take() for _ in range(needed)]
        slot = self._slots.pop()
        self._owned[slot] = owned
        self.tables[slot, : len(owned.pages)] = owned.pages
        return Admission(slot, len(shared) * self.page_size)

    def grow(self, slot: int, length: int) -> bool:
        """See :class:`~.runner.KvCache`."""
        pages = self._owned[slot].pages
        while len(pages) * self.page_size < length:
            if len(pages) == self.tables.shape[1] or not (self._empty or self._idle):
                return False
            pages.append(self._take())
            self.tables[slot, len(pages) - 1] = pages[-1]
        return True

    def computed(self, slot: int, length: int) -> None:
        """See :class:`~.runner.KvCache`."""
        owned = self._owned[slot]
        self._remember(owned, owned.prompt, length)

    def release(self, slot: int, tokens: Sequence[int]) -> None:
        """See :class:`~.runner.KvCache`."""
        owned = self._owned.pop(slot)
        self._remember(owned, tokens, len(tokens))
        # The end of a sequence is forgotten before its beginning, without which it could not be found.
        for page in reversed(owned.pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._empty.append(page)
        self.tables[slot] = 0
        self._slots.append(slot)

    @property
    def usage(self) -> float:
        """See :class:`~.runner.KvCache`."""
        return 1 - (len(self._empty) + len(self._idle)) / self._pages

    def _shared(self, owned: _Owned) -> list[int]:
        """Pages that hold the beginning of a prompt, all but its last token at most."""
        pages: list[int] = []
        while (len(pages) + 1) * self.page_size < len(owned.prompt):
            found = self._found.get((owned.node, self._tokens(owned.prompt, len(pages))))
            if found is None:
                break
            page, owned.node = found
            pages.append(page)
        owned.known = len(pages)
        return pages

    def _remember(self, owned: _Owned, tokens: Sequence[int], length: int) -> None:
        """Make the full pages of a slot's first ``length`` tokens known."""
        if not self._reuse:
            return
        for index in range(owned.known, min(length, len(tokens)) // self.page_size):
            key = (owned.node, self._tokens(tokens, index))
            if key not in self._found:
                self._nodes += 1
                self._found[key] = owned.pages[index], self._nodes
                self._keys[owned.pages[index]] = key
            # Where another slot has computed the same, that page stays the known one and this one goes when it is free.
            owned.node = self._found[key][1]
            owned.known = index + 1

    def _take(self) -> int:
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._found[self._keys.pop(page)]
        self._references[page] = 1
        return page

    def _tokens(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
