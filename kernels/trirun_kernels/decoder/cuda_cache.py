"""The cache of a decoder on a GPU, and how much memory it takes."""

from __future__ import annotations

import torch
from torch import Tensor

from .cuda_delta import DeltaCache
from .cuda_ops import PAGE, Cache
from .shape import Attention, DecoderShape, GatedDelta


class MixerCaches:
    """What every layer's mixer keeps: pages of keys and values, or states of slots.

    Args:
        slots, pages: how many. blocks: pages of a slot, at most. dtype: of the model. kind: of keys and values.

    Attributes:
        block_tables: int32 [slots, blocks], the pages of each slot; who uses them keeps them.
        keys_and_values: of every layer of attention [2, pages, kv_heads, 64, row_width].
        scales: of int8, of each of these float16 [pages, kv_heads, 64, 2]; else None.
        attention, states: of every layer that is one, by its index.
    """

    def __init__(
        self, shape: DecoderShape, slots: int, pages: int, blocks: int, dtype: torch.dtype, kind: torch.dtype,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.block_tables = torch.zeros(slots, blocks, dtype=torch.int32, device=device)
        self.keys_and_values: list[Tensor] = []
        self.scales: list[Tensor] | None = [] if kind == torch.int8 else None
        self.attention: dict[int, Cache] = {}
        self.states: dict[int, DeltaCache] = {}
        for index, mixer in enumerate(layer.mixer for layer in shape.layers):
            if isinstance(mixer, GatedDelta):
                self.states[index] = DeltaCache.of(mixer, slots, dtype, device)
                continue
            size, scales = (pages, mixer.kv_heads, PAGE), None
            cache = torch.empty(2, *size, row_width(mixer, kind), dtype=kind, device=device)
            self.keys_and_values.append(cache)
            if self.scales is not None:
                scales = torch.empty(*size, 2, dtype=torch.float16, device=device)
                self.scales.append(scales)
            self.attention[index] = Cache(cache[0], cache[1], self.block_tables, scales)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        states = (part for kept in self.states.values() for part in (kept.state, kept.ring))
        return sum(part.nbytes for part in (*self.keys_and_values, *(self.scales or ()), *states))


def position_bytes(shape: DecoderShape, kind: torch.dtype) -> int:
    """Bytes of the cache for one token: keys and values of all layers in that type, and the scales of int8."""
    scales = 2 if kind == torch.int8 else 0
    return sum(2 * mixer.kv_heads * (row_width(mixer, kind) * kind.itemsize + scales) for mixer in shape.attentions)


def state_bytes(shape: DecoderShape) -> int:
    """Bytes that a sequence takes however long it is: float32 states and 16-bit inputs of convolutions."""
    return sum(4 * mixer.state_size + 2 * mixer.taps * mixer.channels for mixer in shape.deltas)


def row_width(mixer: Attention, kind: torch.dtype) -> int:
    """Elements that a head of one token takes: of int8 whole 16-byte loads."""
    return -(-mixer.head_dim // 16) * 16 if kind == torch.int8 else mixer.head_dim
