"""The native decoder on a GPU: INT2 (or dense) products with fused kernels between them, over a paged cache.

Its reference is :mod:`trirun_kernels.decoder.reference`. The residual stream is float32: a layer's output is added
without being rounded to 16 bits 2·layers times, a stream with the huge single activations that language models have
cannot overflow, and 16 KB more per row are nothing beside the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..gemm.cuda import activation_bytes, device_of
from . import cuda_ops as ops
from .cuda_prompts import Prompts, Segment, prompt_attention
from .cuda_weights import CudaLayer, CudaModel, Projection
from .weights import DecoderShape

# Fewest and most rows that may go from kernel to kernel as limbs, which the kernels in between make for nothing.
LIMB_ROWS = (1, 32)


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


@dataclass(frozen=True, slots=True)
class _Activations:
    """The input of projections: 16-bit values [m, k], or the limbs of m rows in one buffer."""

    data: Tensor
    limbs: bool


def rows_in_limbs(model: CudaModel, low: int, high: int) -> range:
    """Numbers of rows, within low to high, for which every projection has a fast kernel that reads limbs."""
    if not model.packed:
        return range(0)
    every = (p.product for layer in model.layers for p in layer.projections)
    products = {product.shape_key: product for product in every if product is not None}
    for m in range(low, high + 1):
        if not all(product.reads_limbs(m) for product in products.values()):
            return range(low, m)
    return range(low, high + 1)


def position_bytes(shape: DecoderShape, kind: torch.dtype) -> int:
    """Bytes of the cache for one token: keys and values of all layers in that type, and the scales of int8."""
    head = 2 * (row_width(shape, kind) * kind.itemsize + (2 if kind == torch.int8 else 0))
    return shape.layers * shape.kv_heads * head


def row_width(shape: DecoderShape, kind: torch.dtype) -> int:
    """Elements that a head of one token takes: of int8 whole 16-byte loads."""
    return -(-shape.head_dim // 16) * 16 if kind == torch.int8 else shape.head_dim


class CudaDecoder:
    """A model with its paged cache.

    Args:
        model: the weights. slots: sequences at once. context: most positions of each, rounded up to 64.
        pages: of the cache, 64 positions each; None takes as many as all slots can need.
        limb_rows: fewest and most rows whose activations are quantized apart from the products.
        kv_dtype: of the cache: the model's, or torch.int8 with a float16 scale per token and head; None is the model's.

    Attributes:
        cache: [layers, 2, pages, kv_heads, 64, head_dim], keys and values; of int8, head_dim is rounded up to 16.
        scales: of int8, float16 [layers, pages, kv_heads, 64, 2].
        block_tables: int32 [slots, context/64] on the device, the pages of each slot; the caller keeps them.
        latest: int32 [slots], the token each slot sampled last.
    """

    def __init__(
        self,
        model: CudaModel,
        *,
        slots: int,
        context: int,
        pages: int | None = None,
        limb_rows: tuple[int, int] | None = None,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        s, device = model.shape, model.device
        blocks = -(-context // ops.PAGE)
        if slots < 1 or context < 1:
            raise ValueError(f"decoder: slots={slots}, context={context}")
        if s.hidden % 16 or s.ffn % 16 or s.head_dim % 8 or s.head_dim > 256:
            raise ValueError(f"decoder: the CUDA kernels cannot run {s}")
        if model.cosines.shape[0] < blocks * ops.PAGE:
            raise ValueError(f"decoder: rotary angles of {model.cosines.shape[0]} positions, {context} are needed")
        self.model, self.slots, self.context = model, slots, blocks * ops.PAGE
        self.pages = slots * blocks if pages is None else pages
        self._device = device_of(device.index or 0)
        self._limb_rows = rows_in_limbs(model, *(limb_rows or LIMB_ROWS))
        kind = kv_dtype or model.dtype
        if kind not in (model.dtype, torch.int8):
            raise ValueError(f"decoder: a cache of {kind}; {model.dtype} or int8")
        shape = (s.layers, 2, self.pages, s.kv_heads, ops.PAGE, row_width(s, kind))
        self.cache = torch.empty(shape, dtype=kind, device=device)
        self.scales: Tensor | None = None
        if kind == torch.int8:
            self.scales = torch.empty(s.layers, *shape[2:5], 2, dtype=torch.float16, device=device)
        self.block_tables = torch.zeros(slots, blocks, dtype=torch.int32, device=device)
        self.latest = torch.zeros(slots, dtype=torch.int32, device=device)
        self._workspaces: dict[tuple[int, int], Tensor] = {}
        scales = self.scales
        self._caches = [
            ops.Cache(keys, values, self.block_tables, None if scales is None else scales[index])
            for index, (keys, values) in enumerate(self.cache)
        ]
        self._heads = [
            ops.Heads(
                s.heads, s.kv_heads, s.head_dim, s.attention_scale, s.norm_eps, model.cosines, model.sines,
                layer.norms.get("q_norm"), layer.norms.get("k_norm"),
            )
            for layer in model.layers
        ]  # fmt: skip
        self._attention_limbs = model.act_bits == 16 and ops.attention_makes_limbs(self._heads[0])

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values, and of their scales."""
        return self.cache.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def forward(
        self, inputs: Inputs, segments: Sequence[Segment] = (), wanted: Tensor | None = None, *, splits: int = 0
    ) -> Tensor:
        """Run a batch and append it to the cache.

        Args:
            inputs: rows; the first ones, up to the first segment, are one new token of a slot each.
            segments: the rows after those, one after another.
            wanted: int64 [l], the rows to return logits of; None is all.
            splits: CTAs that share a row's keys in attention; 0 chooses.

        Returns:
            logits [l, vocab] of the model's dtype.
        """
        model, eps = self.model, self.model.shape.norm_eps
        m, first = inputs.tokens.shape[0], model.layers[0]
        decode = segments[0].first if segments else m
        prompts = Prompts.of(segments, model.device) if segments else None
        residual = torch.empty(m, model.shape.hidden, device=model.device)
        x = self._rows(
            ops.EMBED, model.embedding, m, residual=residual, norm=first.norms["attention_norm"], eps=eps,
            tokens=inputs.tokens, slots=inputs.slots, latest=self.latest,
        )  # fmt: skip
        for index, layer in enumerate(model.layers):
            x = self._attention(index, x, inputs, decode, prompts, splits)
            delta = self._project(layer.o, x, m)
            x = self._rows(ops.RESIDUAL, delta, m, residual=residual, norm=layer.norms["mlp_norm"], eps=eps)
            delta = self._mlp(layer, x, m)
            if index + 1 < len(model.layers):
                norm = model.layers[index + 1].norms["attention_norm"]
                x = self._rows(ops.RESIDUAL, delta, m, residual=residual, norm=norm, eps=eps)
        if wanted is not None:
            residual, delta = residual[wanted], delta[wanted]
        y = torch.empty_like(delta)
        ops.rows(ops.RESIDUAL, delta, residual=residual, norm=model.final_norm, eps=eps, y=y)
        return F.linear(y, model.head)[:, : model.shape.vocab]

    def default_splits(self, rows: int) -> int:
        """CTAs that share a row's keys: one per multiprocessor, or two where the rows' heads are more than half of
        that by themselves; more only add parts to put together (measured, kernels/README.md)."""
        shape, sms = self.model.shape, self._device.sms
        groups = rows * shape.kv_heads * -(-(shape.heads // shape.kv_heads) // 8)
        wanted = 0.9 * sms if groups <= sms / 2 else 1.9 * sms
        return max(1, min(32, math.ceil(wanted / groups)))

    def _attention(
        self, index: int, x: _Activations, inputs: Inputs, decode: int, prompts: Prompts | None, splits: int
    ) -> _Activations:
        """The input of the layer's output projection."""
        layer, heads, m = self.model.layers[index], self._heads[index], inputs.tokens.shape[0]
        q_size, kv_size = heads.heads * heads.head_dim, heads.kv_heads * heads.head_dim
        parts = [self._project(p, x, m) for p in layer.qkv]
        if len(parts) == 1:
            parts = list(parts[0].split((q_size, kv_size, kv_size), 1))
        q, k, v = parts
        cache, splits = self._caches[index], splits or self.default_splits(max(decode, 1))
        norm = layer.norms.get("attention_sub_norm")
        if decode == m in self._limb_rows and norm is None and self._attention_limbs:
            limbs = self._limbs(m, q_size)
            ops.attention_decode(
                q, k, v, None, heads, cache, inputs.slots, inputs.positions, splits, self._workspace(m, splits),
                limbs=limbs,
            )  # fmt: skip
            return _Activations(limbs, True)
        y = torch.empty(m if decode else 0, q_size, dtype=self.model.dtype, device=q.device)
        if decode:
            part = slice(0, decode)
            ops.attention_decode(
                q[part], k[part], v[part], y[part], heads, cache, inputs.slots[part], inputs.positions[part], splits,
                self._workspace(decode, splits),
            )  # fmt: skip
        if prompts is not None:
            part = slice(decode, m)
            attended = self._attend_prompts(q[part], k[part], v[part], heads, cache, inputs, part, prompts)
            if decode:
                y[part] = attended
            else:
                y = attended
        if norm is None and m not in self._limb_rows:
            return _Activations(y, False)
        return self._rows(ops.PLAIN, y, m, norm=norm, eps=self.model.shape.norm_eps)

    def _attend_prompts(
        self, q: Tensor, k: Tensor, v: Tensor, heads: ops.Heads, cache: ops.Cache, inputs: Inputs, part: slice,
        prompts: Prompts,
    ) -> Tensor:  # fmt: skip
        """Appends these rows to the cache and attends to all that it has of their slots by then."""
        # What the cache would give back is at hand; int8 would give back something else.
        whole = prompts.whole and cache.scales is None
        rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        ops.attention_append(
            q, k, v, rotated, heads, cache, inputs.slots[part], inputs.positions[part], rotate_keys=whole
        )
        if not whole:
            kept = ops.gather(
                cache, prompts.slots, prompts.keys, prompts.total, prompts.most_keys, heads.head_dim, q.dtype
            )
            k, v = (each.flatten(1) for each in kept)
        return prompt_attention(rotated, k, v, heads, prompts)

    def _mlp(self, layer: CudaLayer, x: _Activations, m: int) -> Tensor:
        parts = [self._project(p, x, m) for p in layer.gate_up]
        gate, up = parts[0].chunk(2, 1) if len(parts) == 1 else parts
        x = self._rows(
            ops.GATE, gate, m, up=up, norm=layer.norms.get("mlp_sub_norm"), eps=self.model.shape.norm_eps,
            activation=self.model.shape.activation,
        )  # fmt: skip
        return self._project(layer.down, x, m)

    def _limbs(self, m: int, k: int) -> Tensor:
        size = activation_bytes(m, -(-k // 128) * 128, self.model.act_bits)
        return torch.empty(size, dtype=torch.uint8, device=self.model.device)

    def _rows(self, source: int, x: Tensor, m: int, **options: Any) -> _Activations:
        n = x.shape[1]
        if m in self._limb_rows:
            limbs = self._limbs(m, n)
            ops.rows(source, x, limbs=limbs, act_bits=self.model.act_bits, **options)
            return _Activations(limbs, True)
        y = torch.empty(m, n, dtype=self.model.dtype, device=self.model.device)
        ops.rows(source, x, y=y, **options)
        return _Activations(y, False)

    def _project(self, projection: Projection, x: _Activations, m: int) -> Tensor:
        if not x.limbs:
            return projection(x.data)
        assert projection.product is not None
        return projection.product.of_limbs(x.data, m, self.model.dtype)

    def _workspace(self, rows: int, splits: int) -> Tensor:
        # Left fit for the next call by every kernel, so that captured graphs and plain calls share it.
        key = (rows, splits)
        if key not in self._workspaces:
            self._workspaces[key] = ops.attention_workspace(rows, self._heads[0], splits, self.model.device)
        return self._workspaces[key]
