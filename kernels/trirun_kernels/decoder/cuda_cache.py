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
        windowed_pages: of layers that see a window, where these have tables of their own; None: they have not.

    Attributes:
        block_tables: int32 [slots, blocks], the pages of each slot, followed by those of layers that see a window
            where these have tables of their own: [slots, 2 · blocks]; who uses them keeps them.
        keys_and_values: of every layer of attention that has its own, [2, pages, kv_heads, 64, row_width].
        scales: of int8, of each of these float16 [pages, kv_heads, 64, 2]; else None.
        attention, states: of every layer that is one, by its index; one that attends to another's has that one's.
    """

    def __init__(
        self, shape: DecoderShape, slots: int, pages: int, blocks: int, dtype: torch.dtype, kind: torch.dtype,
        device: torch.device, windowed_pages: int | None = None,
    ) -> None:  # fmt: skip
        self.block_tables = torch.zeros(
            slots, blocks * (1 if windowed_pages is None else 2), dtype=torch.int32, device=device
        )
        self.keys_and_values: list[Tensor] = []
        self.scales: list[Tensor] | None = [] if kind == torch.int8 else None
        self.attention: dict[int, Cache] = {}
        self.states: dict[int, DeltaCache] = {}
        for index, mixer in enumerate(layer.mixer for layer in shape.layers):
            if isinstance(mixer, GatedDelta):
                self.states[index] = DeltaCache.of(mixer, slots, dtype, device)
                continue
            if mixer.shared_with is not None:
                self.attention[index] = self.attention[mixer.shared_with]
                continue
            count, tables = pages, self.block_tables[:, :blocks]
            if windowed_pages is not None and mixer.window is not None:
                count, tables = windowed_pages, self.block_tables[:, blocks:]
            size, scales = (count, mixer.kv_heads, PAGE), None
            cache = torch.empty(2, *size, row_width(mixer, kind), dtype=kind, device=device)
            # Pages that a slot has passed are read as this one, and what is read weighs nothing.
            cache[:, 0] = 0
            self.keys_and_values.append(cache)
            if self.scales is not None:
                scales = torch.empty(*size, 2, dtype=torch.float16, device=device)
                self.scales.append(scales)
            self.attention[index] = Cache(cache[0], cache[1], tables, scales)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        states = (part for kept in self.states.values() for part in (kept.state, kept.ring))
        return sum(part.nbytes for part in (*self.keys_and_values, *(self.scales or ()), *states))


def position_bytes(shape: DecoderShape, kind: torch.dtype, windowed: bool | None = None) -> int:
    """Bytes of the cache for one token: keys and values in that type, and the scales of int8, of all layers; of those
    that see a window (True), or of the others (False)."""
    scales = 2 if kind == torch.int8 else 0
    chosen = (mixer for mixer in shape.cached.values() if windowed in (None, mixer.window is not None))
    return sum(2 * mixer.kv_heads * (row_width(mixer, kind) * kind.itemsize + scales) for mixer in chosen)


def widest_window(shape: DecoderShape) -> int:
    """Positions that a layer with a window sees at most; 0 where none has one."""
    return max(window or 0 for window in shape.windows)


def window_pages(shape: DecoderShape) -> int:
    """Pages that a sequence keeps of layers that see a window, beside those of the step that runs; 0 where none does.

    One is begun, one is left, and one more is kept behind what is seen.
    """
    window = widest_window(shape)
    return -(-window // PAGE) + 3 if window else 0


def state_bytes(shape: DecoderShape) -> int:
    """Bytes that a sequence takes however long it is: float32 states and 16-bit inputs of convolutions."""
    return sum(4 * mixer.state_size + 2 * mixer.taps * mixer.channels for mixer in shape.deltas)


def row_width(mixer: Attention, kind: torch.dtype) -> int:
    """Elements that a head of one token takes: of int8 whole 16-byte loads."""
    return -(-mixer.head_dim // 16) * 16 if kind == torch.int8 else mixer.head_dim
