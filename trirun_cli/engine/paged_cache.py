"""The cache of a runner that keeps keys and values in pages, found through a block table per slot.

Pages hold a fixed number of positions and belong to as many slots as share their tokens (Kwon et al. 2023,
"PagedAttention"). A full page is known by its tokens and by the page before it, so that any later prompt that begins
the same finds it, while it is in use and after, until its memory is needed: the page unused for longest goes first.

Layers that see a window may have pages of their own, which a slot gives back once it has passed them. A prompt then
begins where both kinds of pages are there: all of the one, and the last window of the other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .runner import Admission

_ROOT = 0


class _Pool:
    """Pages of one kind: how many slots use each, and which are known by what they hold.

    Args:
        pages: how many, the first of which belongs to no one.
    """

    def __init__(self, pages: int) -> None:
        self.size = pages - 1
        self._references = [0] * pages
        self._empty = list(range(pages - 1, 0, -1))
        # Pages that no one uses but someone may ask for, longest unused first.
        self._idle: OrderedDict[int, None] = OrderedDict()
        # A page by what it holds, and its node, a number that is never used again.
        self._found: dict[Hashable, tuple[int, int]] = {}
        self._keys: dict[int, Hashable] = {}
        self._nodes = _ROOT

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> float:
        """The share of pages that cannot."""
        return 1 - self.free / self.size

    def left(self, shared: Sequence[int]) -> int:
        """Pages that can be taken once these are used."""
        return self.free - sum(page in self._idle for page in shared)

    def find(self, key: Hashable) -> tuple[int, int] | None:
        """The page that holds this, and its node."""
        return self._found.get(key)

    def know(self, page: int, key: Hashable) -> int:
        """A page holds this now. Where another one does already, that stays the known one; its node."""
        if key not in self._found:
            self._nodes += 1
            self._found[key] = page, self._nodes
            self._keys[page] = key
        return self._found[key][1]

    def take(self) -> int:
        """A page that holds nothing that is known."""
        if self._empty:
            page = self._empty.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._found[self._keys.pop(page)]
        self._references[page] = 1
        return page

    def use(self, page: int) -> None:
        """One slot more uses a page that was found."""
        self._references[page] += 1
        self._idle.pop(page, None)

    def drop(self, page: int) -> None:
        """One slot less uses a page."""
        self._references[page] -= 1
        if self._references[page] == 0:
            if page in self._keys:
                self._idle[page] = None
            else:
                self._empty.append(page)


@dataclass(slots=True)
class _Owned:
    """What a slot has: its prompt, its pages in order, and how many of them are known by their tokens, up to node; of
    layers with a window its pages too, the first ``passed`` of which it has no more; and positions that it may hold."""

    prompt: tuple[int, ...]
    pages: list[int] = field(default_factory=list)
    known: int = 0
    node: int = _ROOT
    windowed: list[int] = field(default_factory=list)
    passed: int = 0
    length: int = 0


class PagedCache:
    """Pages, their owners and the block tables.

    Args:
        slots: sequences. pages: how many there are, the first of which belongs to no one: rows that only fill up a
            batch may write there. context: most positions of a slot; the pages must hold that many at least.
        page_size: positions of a page. reuse: whether a slot may begin with pages that another has computed: not where
            it also has a state, which nobody has kept.
        window, windowed_pages: of layers with pages of their own: positions that they see at most, and how many pages
            there are, the first of which belongs to no one; None: these layers use the same pages as all.

    Attributes:
        tables: int32 [slots, pages of a context], which page holds which positions of a slot; 0 where none does. With
            ``windowed_pages`` twice as wide: those of layers with a window follow. A runner copies what a step needs
            when that is launched: the next schedule changes it.
    """

    def __init__(
        self,
        slots: int,
        pages: int,
        context: int,
        *,
        page_size: int = 64,
        reuse: bool = True,
        window: int = 0,
        windowed_pages: int | None = None,
    ) -> None:
        self._longest = longest = -(-context // page_size)
        if pages < longest + 1:
            raise ValueError(f"{pages} pages of {page_size} positions do not hold a context of {context} and page 0")
        self.page_size, self._reuse = page_size, reuse
        self._pool = _Pool(pages)
        self._windowed = None if windowed_pages is None else _Pool(windowed_pages)
        self._window = window
        self.tables = np.zeros((slots, longest * (1 if self._windowed is None else 2)), np.int32)
        self._slots = list(range(slots - 1, -1, -1))
        self._owned: dict[int, _Owned] = {}

    def admit(self, prompt: Sequence[int], *, reuse: bool = True) -> Admission | None:
        """See :class:`~.runner.KvCache`. Whole pages are reused, and every running slot is left one page to grow."""
        if not self._slots:
            return None
        owned = _Owned(tuple(prompt))
        if reuse and self._reuse:
            self._share(owned)
        shared, whole = len(owned.pages), -(-len(prompt) // self.page_size)
        if whole - shared > self._pool.left(owned.pages) - len(self._owned):
            return None
        seen = owned.windowed[owned.passed :]
        if self._windowed is not None:
            # It takes them as it goes, and never many more than it sees.
            needed = min(whole - shared, -(-self._window // self.page_size))
            if needed > self._windowed.left(seen) - len(self._owned):
                return None
            for page in seen:
                self._windowed.use(page)
        for page in owned.pages:
            self._pool.use(page)
        owned.pages += [self._pool.take() for _ in range(whole - shared)]
        slot = self._slots.pop()
        self._owned[slot] = owned
        self.tables[slot, :whole] = owned.pages
        self.tables[slot, self._longest : self._longest + len(owned.windowed)] = owned.windowed
        owned.length = shared * self.page_size
        return Admission(slot, owned.length)

    def grow(self, slot: int, length: int) -> bool:
        """See :class:`~.runner.KvCache`."""
        owned, wanted = self._owned[slot], -(-length // self.page_size)
        # Every step asks for every sequence, and mostly there is room: no look at the tables then.
        short = wanted > len(owned.pages)
        if short and not _extend(self._pool, owned.pages, self.tables[slot, : self._longest], wanted):
            return False
        if self._windowed is not None:
            table = self.tables[slot]
            self._pass(owned, table)
            if not _extend(self._windowed, owned.windowed, table[self._longest :], wanted):
                return False
        owned.length = max(owned.length, length)
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
            self._pool.drop(page)
        if self._windowed is not None:
            for page in reversed(owned.windowed[owned.passed :]):
                self._windowed.drop(page)
        self.tables[slot] = 0
        self._slots.append(slot)

    @property
    def usage(self) -> float:
        """See :class:`~.runner.KvCache`."""
        return max(pool.used for pool in (self._pool, self._windowed) if pool is not None)

    def _share(self, owned: _Owned) -> None:
        """Give a slot the pages that hold the beginning of its prompt, all but its last token at most."""
        found: list[tuple[int, int]] = []
        node = _ROOT
        while (len(found) + 1) * self.page_size < len(owned.prompt):
            page = self._pool.find((node, self._tokens(owned.prompt, len(found))))
            if page is None:
                break
            found.append(page)
            node = page[1]
        count = len(found)
        if self._windowed is not None:
            seen = [self._windowed.find(node) for _, node in found]
            # What it sees from there on must be there.
            while count and (missing := [i for i in range(self._first(count), count) if seen[i] is None]):
                count = missing[-1]
            owned.passed = self._first(count)
            owned.windowed = [0] * owned.passed + [page[0] for page in seen[owned.passed : count] if page is not None]
        owned.pages, owned.known = [page for page, _ in found[:count]], count
        owned.node = found[count - 1][1] if count else _ROOT

    def _first(self, pages: int) -> int:
        """The first page that a token after so many pages sees through a window."""
        return max(pages * self.page_size - self._window, 0) // self.page_size

    def _pass(self, owned: _Owned, table: np.ndarray) -> None:
        """Give back pages that a slot will not see again; one more stays, for who begins at the page's end before."""
        assert self._windowed is not None
        keep = (owned.length - self._window) // self.page_size - 1
        while owned.passed < min(keep, len(owned.windowed)):
            self._windowed.drop(owned.windowed[owned.passed])
            owned.windowed[owned.passed] = table[self._longest + owned.passed] = 0
            owned.passed += 1

    def _remember(self, owned: _Owned, tokens: Sequence[int], length: int) -> None:
        """Make the full pages of a slot's first ``length`` tokens known."""
        if not self._reuse:
            return
        for index in range(owned.known, min(length, len(tokens)) // self.page_size):
            # Where another slot has computed the same, this page goes when it is free.
            owned.node = self._pool.know(owned.pages[index], (owned.node, self._tokens(tokens, index)))
            if self._windowed is not None and owned.passed <= index < len(owned.windowed):
                self._windowed.know(owned.windowed[index], owned.node)
            owned.known = index + 1

    def _tokens(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(tokens[index * self.page_size : (index + 1) * self.page_size])


def _extend(pool: _Pool, pages: list[int], table: np.ndarray, wanted: int) -> bool:
    """Take pages until a slot has as many as wanted; False when there are no more."""
    while len(pages) < wanted:
        if len(pages) == len(table) or not pool.free:
            return False
        pages.append(pool.take())
        table[len(pages) - 1] = pages[-1]
    return True
