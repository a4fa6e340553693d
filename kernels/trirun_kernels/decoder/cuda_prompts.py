"""Attention of pieces of prompts over a paged cache: all of a step in one call of flash attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from . import cuda_ops as ops


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows ``first`` to ``first + count`` of a batch: consecutive tokens of one slot, the first at ``position``."""

    first: int
    count: int
    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class Prompts:
    """Segments as attention over sequences of different lengths takes them.

    Attributes:
        slots: int32 [n] on the device. queries, keys: int32 [n + 1], where each segment's rows, and its slot's
            positions, begin. most_queries, most_keys: of one segment. total: of all keys.
        whole: every segment begins its sequence, so that its rows are all that it attends to.
    """

    slots: Tensor
    queries: Tensor
    keys: Tensor
    most_queries: int
    most_keys: int
    total: int
    whole: bool

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device) -> Prompts:
        """Copies what is needed to the device."""
        counts = [s.count for s in segments]
        lengths = [s.position + s.count for s in segments]
        starts = [list(accumulate(each, initial=0)) for each in (counts, lengths)]
        values = torch.tensor([s.slot for s in segments] + starts[0] + starts[1], dtype=torch.int32).to(device)
        n = len(segments)
        slots, queries, keys = values.split((n, n + 1, n + 1))
        return cls(slots, queries, keys, max(counts), max(lengths), starts[1][-1], counts == lengths)


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, heads: ops.Heads, prompts: Prompts) -> Tensor:
    """Causal attention of rotated q [rows, heads·head_dim] to k and v [prompts.total, kv_heads·head_dim]: all segments
    in one call of flash attention, since a call for each leaves the GPU waiting for the host."""
    # It aligns the causal mask to the last key, and takes grouped heads.
    q, k, v = (part.unflatten(1, (-1, heads.head_dim)) for part in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, prompts.queries, prompts.keys, prompts.most_queries, prompts.most_keys, 0.0, True, False,
        scale=heads.scale,
    )[0]  # fmt: skip
    return out.flatten(1)
