"""Keys and values of sequences whose final length is known."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer


class RoomyLayer(DynamicLayer):
    """A layer's keys and values [b, heads, tokens, size], written in place into room for ``length`` tokens.

    transformers' own grow by concatenation, which copies all of them at every step; its static ones are attended to
    over their whole length, under a mask that keeps grouped queries off the fast kernels.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length = length
        self._rooms: tuple[Tensor, ...] = ()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        new = key_states, value_states
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._rooms = tuple(t.new_empty(*t.shape[:2], self._length, t.shape[3]) for t in new)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for room, states in zip(self._rooms, new, strict=True):
            room[:, :, start:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self._rooms)
        return self.keys, self.values


def roomy_cache(config: Any, length: int) -> DynamicCache:
    """A cache for sequences of at most ``length`` tokens; layers that keep less than everything stay as they are."""
    cache = DynamicCache(config=config)
    cache.layers = [RoomyLayer(length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
