"""The native decoder on a GPU: INT2 (or dense) products with fused kernels between them, over a paged cache.

Its reference is :mod:`trirun_kernels.decoder.reference`. The residual stream is float32: a layer's output is added
without being rounded to 16 bits 2·layers times, a stream with the huge single activations that language models have
cannot overflow, and 16 KB more per row are nothing beside the weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..gemm.cuda import activation_bytes, device_of
from ..weights.packing import PackedWeight
from . import cuda_ops as ops
from .cuda_cache import MixerCaches
from .cuda_delta import delta_decode, delta_mix
from .cuda_experts import Mixed
from .cuda_prompts import Inputs, OfWindows, Prompts, Segment, prompt_attention, prompts_of
from .cuda_weights import Activations, CudaInputs, CudaModel, rows_in_limbs
from .shape import MOST_INT8_HEAD_DIM, Attention, mixer_runs
from .step.cuda import ROWS, CudaStep, reads_keys_together, rows_taken

# Fewest and most rows that may go from kernel to kernel as limbs, which the kernels in between make for nothing.
LIMB_ROWS = (1, 32)
# From so many rows on, and for wider ones, experts' outputs are summed apart from the residual stream.
MIXED_ROWS, MIXED_COLUMNS = 64, 4096


class CudaDecoder:
    """A model with its paged cache.

    Args:
        model: the weights. slots: sequences at once. context: most positions of each, rounded up to 64.
        pages: of the cache, 64 positions each; None takes as many as all slots can need.
        limb_rows: fewest and most rows whose activations are quantized apart from the products.
        kv_dtype: of the cache: the model's, or torch.int8 with a float16 scale per token and head; None is the model's.
        one_kernel: whether steps of few rows are one kernel where :mod:`.step.cuda` takes the model.
        caches: of a decoder of the same sizes, to share; None: new ones. windowed_pages: see :class:`.MixerCaches`.

    Attributes:
        caches: what the layers keep. cache, scales: their keys and values, see :class:`.MixerCaches`.
        block_tables: int32 on the device, the pages of each slot, see :class:`.MixerCaches`; the caller keeps them.
        latest: int32 [slots], the token each slot sampled last.
        step_rows: of how many rows a step is one kernel. step_refusal: why of none, or None.
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
        one_kernel: bool = True,
        caches: MixerCaches | None = None,
        windowed_pages: int | None = None,
    ) -> None:
        s, device = model.shape, model.device
        blocks = -(-context // ops.PAGE)
        if slots < 1 or context < 1:
            raise ValueError(f"decoder: slots={slots}, context={context}")
        for shape in s.layers:
            uneven = s.hidden % 16 or shape.feed_forward.size % 16 or shape.own_input % 16
            if uneven or not mixer_runs(shape.mixer) or (shape.parallel and shape.mixture):
                raise ValueError(f"decoder: the CUDA kernels cannot run {shape} of hidden size {s.hidden}")
        for cosines, _ in model.rotary:
            if cosines.shape[0] < blocks * ops.PAGE:
                raise ValueError(f"decoder: rotary angles of {cosines.shape[0]} positions, {context} are needed")
        self.model, self.slots, self.context = model, slots, blocks * ops.PAGE
        self.pages, self.windowed_pages = slots * blocks if pages is None else pages, windowed_pages
        self._device = device_of(device.index or 0)
        self._limb_rows = rows_in_limbs(model, *(limb_rows or LIMB_ROWS))
        kind = kv_dtype or model.dtype
        if kind not in (model.dtype, torch.int8):
            raise ValueError(f"decoder: a cache of {kind}; {model.dtype} or int8")
        widest = max((mixer.head_dim for mixer in s.attentions), default=0)
        if kind == torch.int8 and widest > MOST_INT8_HEAD_DIM:
            raise ValueError(f"decoder: an int8 cache of heads of {widest}; at most {MOST_INT8_HEAD_DIM}")
        self.latest = torch.zeros(slots, dtype=torch.int32, device=device)
        self.caches = caches or MixerCaches(s, slots, self.pages, blocks, model.dtype, kind, device, windowed_pages)
        self.cache, self.scales = self.caches.keys_and_values, self.caches.scales
        self.block_tables = self.caches.block_tables
        self._workspaces: dict[tuple[int, int, int, int], Tensor] = {}
        self._heads = {index: self._heads_of(index) for index in self.caches.attention}
        scales = (layer.norms.get("output_scale") for layer in model.layers)
        self._output_scales = [1.0 if scale is None else scale.item() for scale in scales]
        self._windows = {heads.window for heads in self._heads.values()}
        asked = (ROWS if one_kernel else (), model, self._device, [*self._heads.values()])
        int8 = kind == torch.int8
        self.step_rows, self.step_refusal = rows_taken(*asked, context=self.context, int8_cache=int8)
        # Pieces of prompts are not captured: a chain of kernels costs more there than it gains behind long texts.
        self._piece_rows, _ = rows_taken(*asked, context=0, int8_cache=int8)
        self._text_rows, _ = rows_taken(*asked, context=0, int8_cache=int8, one_text=True)
        self._steps: dict[tuple[int, bool], CudaStep] = {}

    def _heads_of(self, index: int) -> ops.Heads:
        shape, norms = self.model.shape, self.model.layers[index].norms
        mixer = shape.layers[index].mixer
        assert isinstance(mixer, Attention)
        cosines, sines = (None, None) if mixer.rotary is None else self.model.rotary[mixer.rotary]
        q_norm, k_norm = (None if mixer.row_norms else norms.get(name) for name in ("q_norm", "k_norm"))
        return ops.Heads(
            mixer.heads, mixer.kv_heads, mixer.head_dim, mixer.scale, shape.norm_eps, cosines, sines, q_norm, k_norm,
            norms.get("v_norm"), norms.get("sinks"), mixer.interleaved, mixer.window, mixer.softcap,
        )  # fmt: skip

    @property
    def gave_up(self) -> bool:
        """Whether a step in one kernel ended without a result; see :attr:`.CudaStep.gave_up`."""
        return any(step.gave_up for step in self._steps.values())

    @property
    def cache_bytes(self) -> int:
        """Bytes of all keys and values, of their scales, and of states."""
        return self.caches.nbytes

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
        return self._logits(self._run(inputs, segments, wanted, splits))

    def states(self, inputs: Inputs, segments: Sequence[Segment] = ()) -> Tensor:
        """What :meth:`forward` gives the head, [m, hidden]: behind the last norm, which holds the logits' factor."""
        return self._run(inputs, segments, None, 0)

    def _run(self, inputs: Inputs, segments: Sequence[Segment], wanted: Tensor | None, splits: int) -> Tensor:
        model, shape = self.model, self.model.shape
        delta: Tensor | Mixed
        m = inputs.tokens.shape[0]
        decode = segments[0].first if segments else m
        # Steps of one token each come padded, as they were captured; pieces of prompts do not.
        alone = decode == 0 and len(segments) == 1
        one_text = alone and reads_keys_together(model, self._heads.values(), m, segments[0].position)
        taken = self._text_rows if one_text else self._piece_rows if segments else self.step_rows
        rows = min((rows for rows in taken if rows >= m), default=m) if segments else m
        if rows in taken and not splits:
            y = self._one_kernel(inputs.padded(rows), one_text)
            return y[:m] if wanted is None else y[wanted]
        prompts = prompts_of(segments, model.device, self._windows)
        residual = torch.empty(m, shape.hidden, device=model.device)
        x = self._rows(
            ops.EMBED, model.embedding, m, residual=residual, tokens=inputs.tokens, slots=inputs.slots,
            latest=self.latest, scale=shape.embedding_scale, **self._norm(0, "attention"),
        )  # fmt: skip
        own = None if model.inputs is None else self._inputs(model.inputs, inputs, residual)
        for index, layer in enumerate(model.layers):
            if index in self.caches.states:
                mixed = self._delta(index, x, inputs, decode, prompts)
            else:
                mixed = self._attention(index, x, inputs, decode, prompts, splits)
            delta = layer.o.of(mixed, m, self.model.dtype)
            post = layer.norms.get("attention_post_norm")
            if shape.layers[index].parallel:
                ops.rows(**self._added(delta, post), residual=residual, eps=shape.norm_eps)
            else:
                norm, mixture = self._norm(index, "mlp"), layer.mixture
                if mixture is not None:
                    # A single row is made by the kernel that routes it, if nothing else reads it.
                    later = m == 1 and not layer.gate_up
                    norm |= {"keep": True, "limbs": mixture.packed or bool(layer.gate_up), "later": later}
                x = self._rows(**self._added(delta, post), m=m, residual=residual, **norm)
            delta = self._feed_forward(index, x, m, inputs.slots, residual)
            post = layer.norms.get("mlp_post_norm")
            if own is not None and layer.input_gate is not None:
                delta = self._own_input(index, self._added(delta, post), own[index], residual)
                post = layer.norms.get("input_norm")
            if index + 1 < len(model.layers):
                following = self._norm(index + 1, "attention")
                x = self._rows(
                    **self._added(delta, post, self._output_scales[index]), m=m, residual=residual, **following
                )
        if isinstance(delta, Mixed):
            delta = delta.sum()
        if wanted is not None:
            residual, delta = residual[wanted], delta[wanted]
        y = torch.empty_like(delta)
        bias, centered = model.final_norm_bias, shape.norm == "layer"
        final: dict[str, Any] = {"norm": model.final_norm, "norm_bias": bias, "centered": centered}
        added = self._added(delta, post, self._output_scales[-1])
        ops.rows(**added, residual=residual, y=y, eps=shape.norm_eps, **final)
        return y

    def _inputs(self, own: CudaInputs, inputs: Inputs, residual: Tensor) -> Tensor:
        """Every layer's own input, [layers, m, size] of the model's dtype. residual: the embedded rows."""
        model, m, sizes = self.model, residual.shape[0], self.model.shape.inputs
        assert sizes is not None
        x = self._rows(ops.RESIDUAL, None, m, residual=residual, limbs=own.projection.product is not None)
        projected = own.projection.of(x, m, model.dtype).view(-1, sizes.size)
        total = torch.empty(m, own.projection.n, device=model.device)
        ops.rows(
            ops.EMBED, own.table, residual=total, tokens=inputs.tokens, slots=inputs.slots, latest=self.latest,
            scale=sizes.table_scale,
        )  # fmt: skip
        y = torch.empty_like(projected)
        # A factor before the norm is another eps.
        ops.rows(
            ops.POST, projected, residual=total.view(-1, sizes.size), post_norm=own.norm, y=y,
            eps=model.shape.norm_eps / sizes.projection_scale**2, output_scale=sizes.scale,
        )  # fmt: skip
        return y.view(m, -1, sizes.size).transpose(0, 1).contiguous()

    def _own_input(self, index: int, added: dict[str, Any], own: Tensor, residual: Tensor) -> Tensor:
        """What a layer's own input [m, size] adds to the residual stream, to which ``added`` is to be added before."""
        layer, m, dtype = self.model.layers[index], residual.shape[0], self.model.dtype
        assert layer.input_gate is not None and layer.input_out is not None
        gate = layer.input_gate.of(self._rows(**added, m=m, residual=residual), m, dtype)
        activation = self.model.shape.layers[index].feed_forward.activation
        return layer.input_out.of(self._rows(ops.GATE, gate, m, up=own, activation=activation), m, dtype)

    def _logits(self, y: Tensor) -> Tensor:
        shape = self.model.shape
        logits, cap = self.model.head(y)[:, : shape.vocab], shape.logit_softcap
        return logits.float().div_(cap).tanh_().mul_(cap) if cap else logits

    def _one_kernel(self, inputs: Inputs, one_text: bool) -> Tensor:
        of = inputs.tokens.shape[0], one_text
        if of not in self._steps:
            heads = list(self._heads.values())
            caches = [self.caches.attention[index] for index in self._heads]
            self._steps[of] = CudaStep(self.model, heads, caches, self.latest, of[0], self._device.sms, one_text)
        return self._steps[of](inputs.tokens, inputs.slots, inputs.positions)

    def _norm(self, index: int, part: str) -> dict[str, Any]:
        """The norm before a part of a layer."""
        norms, shape = self.model.layers[index].norms, self.model.shape
        vectors = {"norm": norms.get(f"{part}_norm"), "norm_bias": norms.get(f"{part}_norm_bias")}
        # What b and a are computed from.
        keep = part == "attention" and index in self.caches.states
        return vectors | {"centered": shape.norm == "layer", "keep": keep}

    def _added(self, delta: Tensor | Mixed, post_norm: Tensor | None, output_scale: float = 1.0) -> dict[str, Any]:
        """What a part adds to the residual stream, and by what that is multiplied then."""
        source, scale, mixed = ops.RESIDUAL if post_norm is None else ops.POST, self.model.shape.residual_scale, None
        if isinstance(delta, Mixed):
            apart = delta.routes.ids.shape[0] >= MIXED_ROWS or delta.rows.shape[1] > MIXED_COLUMNS
            if post_norm is None and not apart:
                mixed, delta = delta.struct(), delta.rows
            else:
                delta = delta.sum()
        added = {"source": source, "x": delta, "post_norm": post_norm, "scale": scale, "mixed": mixed}
        return added | {"output_scale": output_scale}

    def default_splits(self, rows: int, layer: int = 0) -> int:
        """CTAs that share a row's keys: nearly one for each multiprocessor where key heads of the rows are few, then
        half as many again, and two where they are more than half of that by themselves (measured, kernels/LOG.md)."""
        heads, sms = self._heads[layer], self._device.sms
        groups = rows * heads.kv_heads * -(-(heads.heads // heads.kv_heads) // 8)
        of_each = 0.9 if groups <= sms / 8 else 1.45 if groups <= sms / 2 else 1.9
        return max(1, min(32, math.ceil(of_each * sms / groups)))

    def _attention(
        self, index: int, hidden: Activations, inputs: Inputs, decode: int, prompts: OfWindows, splits: int
    ) -> Activations:
        """The input of the layer's output projection."""
        layer, heads, m = self.model.layers[index], self._heads[index], inputs.tokens.shape[0]
        q_size = heads.heads * heads.head_dim
        parts = [p.of(hidden, m, self.model.dtype) for p in layer.qkv]
        mixer = self.model.shape.layers[index].mixer
        assert isinstance(mixer, Attention)
        if len(parts) == 1:
            parts = list(parts[0].split([n for n, _ in list(mixer.linear_sizes(0).values())[:-1]], 1))
        q, k, v = parts[:3] if mixer.shared_with is None else (parts[0], None, None)
        if mixer.row_norms:
            for x, name in ((q, "q_norm"), (k, "k_norm")):
                if x is not None:
                    ops.rows(ops.PLAIN, x, norm=layer.norms[name], eps=heads.eps, y=x)
        cache, splits = self.caches.attention[index], splits or self.default_splits(max(decode, 1), index)
        norm = layer.norms.get("attention_sub_norm")
        makes_limbs = self.model.act_bits == 16 and ops.attention_makes_limbs(heads)
        if decode == m in self._limb_rows and norm is None and makes_limbs and not mixer.gated:
            limbs = self._limbs(m, q_size)
            ops.attention_decode(
                q, k, v, None, heads, cache, inputs.slots, inputs.positions, splits,
                self._workspace(m, splits, heads), limbs=limbs,
            )  # fmt: skip
            return Activations(limbs, True)
        # The gate's rows and those that it multiplies lie equally far apart.
        stride = parts[-1].stride(0) if mixer.gated else q_size
        y = torch.empty(m if decode or mixer.gated else 0, stride, dtype=self.model.dtype, device=q.device)[:, :q_size]
        if decode:
            part = slice(0, decode)
            ops.attention_decode(
                *_cut(part, q, k, v), y[part], heads, cache, inputs.slots[part], inputs.positions[part], splits,
                self._workspace(decode, splits, heads),
            )  # fmt: skip
        if prompts:
            part, seen = slice(decode, m), prompts[heads.window]
            attended = self._attend_prompts(*_cut(part, q, k, v), heads, cache, inputs, part, seen)
            if decode or mixer.gated:
                y[part] = attended
            else:
                y = attended
        if mixer.gated:
            return self._rows(ops.GATE, parts[-1], m, up=y, activation="sigmoid")
        if norm is None and m not in self._limb_rows:
            return Activations(y, False)
        return self._rows(ops.PLAIN, y, m, norm=norm)

    def _delta(self, index: int, hidden: Activations, inputs: Inputs, decode: int, prompts: OfWindows) -> Activations:
        """The input of the output projection of a Gated DeltaNet layer."""
        layer, state, m = self.model.layers[index], self.caches.states[index], inputs.tokens.shape[0]
        heads = layer.delta
        assert heads is not None
        x, *apart = [p.of(hidden, m, self.model.dtype) for p in layer.qkv]
        z = apart[0] if apart else x[:, heads.z_column :]
        if decode == m in self._limb_rows and heads.makes_limbs and self.model.act_bits == 16:
            limbs = self._limbs(m, heads.shape.values)
            delta_decode(x, z, hidden.values, None, heads, state, inputs.slots, inputs.positions, limbs=limbs)
            return Activations(limbs, True)
        queries = prompts[None].queries if prompts else None
        y = delta_mix(x, z, hidden.values, heads, state, inputs.slots, inputs.positions, decode, queries)
        return self._rows(ops.PLAIN, y, m) if m in self._limb_rows else Activations(y, False)

    def _attend_prompts(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, heads: ops.Heads, cache: ops.Cache, inputs: Inputs,
        part: slice, prompts: Prompts,
    ) -> Tensor:  # fmt: skip
        """Appends these rows to the cache, unless k and v are in it, and attends to all that it has of their slots by
        then."""
        # What the cache would give back is at hand, but for int8, values with a norm, and what another layer has made.
        whole = prompts.whole and cache.scales is None and heads.v_norm is None and k is not None
        rotated = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        ops.attention_append(
            q, k, v, rotated, heads, cache, inputs.slots[part], inputs.positions[part], rotate_keys=whole
        )
        if not whole or k is None or v is None:
            kept = ops.gather(
                cache, prompts.slots, prompts.keys, prompts.pages, prompts.total, prompts.most_keys, heads.head_dim,
                q.dtype,
            )  # fmt: skip
            k, v = (each.flatten(1) for each in kept)
        return prompt_attention(rotated, k, v, heads, prompts)

    def _feed_forward(self, index: int, x: Activations, m: int, slots: Tensor, residual: Tensor) -> Tensor | Mixed:
        layer, shared = self.model.layers[index], None
        if layer.mixture is None:
            return self._mlp(index, x, m)
        if layer.gate_up:
            own = self._norm(index, "shared")
            read = x if own["norm"] is None else self._rows(ops.RESIDUAL, None, m, residual=residual, **own)
            shared = self._mlp(index, read, m)
        limbs = x.data if x.limbs and layer.mixture.packed else None
        mixed = layer.mixture(x.values, slots, shared, limbs=limbs, rows=x.pending)
        norm, shared_norm = (layer.norms.get(f"{part}_post_norm") for part in ("experts", "shared"))
        if norm is None and shared_norm is None:
            return mixed
        return replace(mixed, norm=norm, shared_norm=shared_norm, eps=self.model.shape.norm_eps).sum()

    def _mlp(self, index: int, x: Activations, m: int) -> Tensor:
        layer, feed_forward = self.model.layers[index], self.model.shape.layers[index].feed_forward
        assert layer.down is not None
        parts = [p.of(x, m, self.model.dtype) for p in layer.gate_up]
        gate, up = parts[0], None if len(parts) == 1 else parts[1]
        if feed_forward.gated and len(parts) == 1:
            gate, up = parts[0].chunk(2, 1)
        x = self._rows(
            ops.GATE, gate, m, up=up, norm=layer.norms.get("mlp_sub_norm"),
            activation=feed_forward.activation,
        )  # fmt: skip
        return layer.down.of(x, m, self.model.dtype)

    def _limbs(self, m: int, k: int) -> Tensor:
        size = activation_bytes(m, -(-k // 128) * 128, self.model.act_bits)
        return torch.empty(size, dtype=torch.uint8, device=self.model.device)

    def _rows(
        self, source: int, x: Tensor | PackedWeight | None, m: int, *, keep: bool = False, limbs: bool = True,
        later: bool = False, **options: Any,
    ) -> Activations:  # fmt: skip
        """``keep``: the 16-bit values too, where the result is limbs. ``limbs``: whether it may be. ``later``: not yet,
        see :class:`.Activations`."""
        n, eps = x.shape[1] if isinstance(x, Tensor) else self.model.shape.hidden, self.model.shape.norm_eps
        made = self._limbs(m, n) if limbs and m in self._limb_rows else None
        y = None
        if made is None or keep:
            y = torch.empty(m, n, dtype=self.model.dtype, device=self.model.device)
        options |= {"y": y, "limbs": made, "act_bits": self.model.act_bits, "eps": eps}
        pending = ops.rows_struct(source, x, **options) if later else None
        if pending is None:
            ops.rows(source, x, **options)
        if made is not None:
            return Activations(made, True, y, pending)
        assert y is not None
        return Activations(y, False, pending=pending)

    def _workspace(self, rows: int, splits: int, heads: ops.Heads) -> Tensor:
        # Left fit for the next call by every kernel, so that captured graphs and plain calls share it.
        key = (rows, splits, heads.heads * heads.head_dim, heads.kv_heads)
        if key not in self._workspaces:
            self._workspaces[key] = ops.attention_workspace(rows, heads, splits, self.model.device)
        return self._workspaces[key]


def _cut(rows: slice, q: Tensor, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """These rows of what a layer projects; k and v None where it attends to another one's."""
    return q[rows], None if k is None else k[rows], None if v is None else v[rows]
