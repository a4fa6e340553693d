"""What a step on a GPU reads; and attention of pieces of prompts over a paged cache, by one call of flash attention."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import cuda_ops as ops


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a step reads, int32 [m] each on the device: a negative token is the one its slot sampled last, a row with a
    negative slot is padding."""

    tokens: Tensor
    slots: Tensor
    positions: Tensor

    def rows(self, count: int) -> Inputs:
        """The first ``count`` rows, in the same memory."""
        return Inputs(self.tokens[:count], self.slots[:count], self.positions[:count])

    def padded(self, count: int) -> Inputs:
        """As many rows, at least as there are: itself, or a copy with padding behind it."""
        more = count - self.tokens.shape[0]
        if more == 0:
            return self
        return Inputs(pad(self.tokens, (0, more)), pad(self.slots, (0, more), value=-1), pad(self.positions, (0, more)))


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
        slots: int32 [n] on the device. queries, keys: int32 [n + 1], where each segment's rows, and the keys that they
            see, begin. pages: int32 [n], the page of its slot that a segment's keys begin with.
        most_queries, most_keys: of one segment. total: of all keys.
        whole: every segment begins its sequence, so that its rows are all that it attends to.
        lengths: rows of each segment, and its keys, on the host.
    """

    slots: Tensor
    queries: Tensor
    keys: Tensor
    pages: Tensor
    most_queries: int
    most_keys: int
    total: int
    whole: bool
    lengths: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, segments: Sequence[Segment], device: torch.device, window: int | None = None) -> Prompts:
        """Copies what is needed to the device.

        Args:
            window: positions that a row sees, its own among them; None is all.
        """
        counts, n = [s.count for s in segments], len(segments)
        whole = all(s.position == 0 for s in segments)
        pages = [0 if window is None else max(0, s.position + 1 - window) // ops.PAGE for s in segments]
        lengths = [s.position + s.count - page * ops.PAGE for s, page in zip(segments, pages, strict=True)]
        starts = [list(accumulate(each, initial=0)) for each in (counts, lengths)]
        numbers = [s.slot for s in segments] + starts[0] + starts[1] + pages
        slots, queries, keys, first = torch.tensor(numbers, dtype=torch.int32).to(device).split((n, n + 1, n + 1, n))
        each = tuple(zip(counts, lengths, strict=True))
        return cls(slots, queries, keys, first, max(counts), max(lengths), starts[1][-1], whole, each)


# Segments as layers of each window see them, and as those without one do; empty where there are none.
OfWindows = Mapping[int | None, Prompts]


def prompts_of(segments: Sequence[Segment], device: torch.device, windows: Collection[int | None]) -> OfWindows:
    """Segments for layers of these windows. Where no page is behind a window, they are what they are without one."""
    if not segments:
        return {}
    every, last = Prompts.of(segments, device), max(s.position for s in segments)
    near = {window for window in windows if window is None or last + 1 - window < ops.PAGE}
    return {None: every} | {w: every if w in near else Prompts.of(segments, device, w) for w in windows}


def prompt_attention(q: Tensor, k: Tensor, v: Tensor, heads: ops.Heads, prompts: Prompts) -> Tensor:
    """Causal attention of rotated q [rows, heads·head_dim] to k and v [prompts.total, kv_heads·head_dim]: all segments
    in one call of flash attention, since a call for each leaves the GPU waiting for the host."""
    q, k, v = (part.unflatten(1, (-1, heads.head_dim)) for part in (q, k, v))
    if heads.softcap or heads.head_dim > FLASH_HEAD_DIM:
        return _scored_attention(q, k, v, heads, prompts)
    # It aligns the causal mask to the last key, and takes grouped heads.
    window = {} if heads.window is None else {"window_size_left": heads.window - 1, "window_size_right": 0}
    out, weights, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, prompts.queries, prompts.keys, prompts.most_queries, prompts.most_keys, 0.0, True, False,
        scale=heads.scale, **window,
    )  # fmt: skip
    if heads.sinks is not None:
        # The keys' share of a softmax that the sink is part of; weights: log of their sum, [heads, rows].
        share = torch.sigmoid(weights[:, : out.shape[0]].t() - heads.sinks)
        out = (out.float() * share.unsqueeze(-1)).to(out.dtype)
    return out.flatten(1)


FLASH_HEAD_DIM = 256  # of flash attention in torch, at most
# Rows of a prompt whose scores are in memory at once, and how many scores, unless one row has more.
SCORED_ROWS, SCORES = 256, 2**27


def _scored_attention(q: Tensor, k: Tensor, v: Tensor, heads: ops.Heads, prompts: Prompts) -> Tensor:
    """The same with softened scores or of larger heads, which flash attention in torch has not: some rows at a time."""
    out, group = torch.empty_like(q), heads.heads // heads.kv_heads
    first, first_key = 0, 0
    for rows, length in prompts.lengths:
        keys, values = (part[first_key : first_key + length].transpose(0, 1) for part in (k, v))
        most = max(1, min(SCORED_ROWS, SCORES // (heads.heads * length)))
        for start in range(0, rows, most):
            piece = slice(first + start, first + min(start + most, rows))
            # [kv_heads, rows · group, keys]
            queries = q[piece].unflatten(1, (-1, group)).transpose(0, 1).flatten(1, 2)
            scores = _products(queries, keys)
            if heads.softcap:
                scores = scores.mul_(heads.scale / heads.softcap).tanh_().mul_(heads.softcap)
            else:
                scores = scores.mul_(heads.scale)
            scores = scores.unflatten(1, (-1, group))
            positions = torch.arange(length - rows + start, length - rows + start + scores.shape[1], device=q.device)
            distance = positions.unsqueeze(1) - torch.arange(length, device=q.device)
            hidden = (distance < 0) | (distance >= (heads.window or length))
            scores.masked_fill_(hidden.unsqueeze(1), -math.inf)
            if heads.sinks is not None:
                sinks = heads.sinks.view(-1, 1, group, 1).expand(*scores.shape[:3], 1)
                scores = torch.cat((scores, sinks), -1)
            weights = scores.softmax(-1)[..., :length].to(q.dtype).flatten(1, 2)
            attended = (weights @ values).unflatten(1, (-1, group)).transpose(0, 1)
            out[piece] = attended.flatten(1, 2)
        first, first_key = first + rows, first_key + length
    return out.flatten(1)


def _products(queries: Tensor, keys: Tensor) -> Tensor:
    """queries [heads, q, head_dim] · keys [heads, k, head_dim], float32 [heads, q, k]: in 16 bits large scores, which
    Gemma 4 does not scale down, would lose what tells them apart."""
    if queries.is_cuda:
        return torch.bmm(queries, keys.transpose(1, 2), out_dtype=torch.float32)
    return queries.float() @ keys.float().transpose(1, 2)
