"""Models on a CPU as ``trirun bench model`` times them: the native decoder, and transformers for the dense model."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trirun_kernels.decoder.cpu import CpuDecoder, Segment
from trirun_kernels.decoder.shape import Attention, DecoderShape, GatedDelta, LayerShape, Mixture
from trirun_kernels.decoder.weights import (
    DecoderWeights,
    DeltaWeights,
    LayerWeights,
    Linear,
    MixtureWeights,
    vector_lengths,
)
from trirun_kernels.weights.names import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_LINEARS,
    LAYER_NORMS,
    WEIGHT,
    layer_prefix,
)
from trirun_kernels.weights.packing import dequantize
from trirun_kernels.weights.spec import QuantSpec

from ..backends.transformers.weights import cache_argument
from ..engine.cache_memory import available_bytes, position_bytes, state_bytes
from ..models.synthetic import angles, random_gates, random_ternary

MAX_ROWS = 192


class CpuContestant:
    """The native decoder; greedy sampling is an argmax over its logits."""

    settle_s = 0.0

    def __init__(self, name: str, weights: DecoderWeights, *, act_bits: int, threads: int) -> None:
        self.name, self._weights, self._act_bits, self._threads = name, weights, act_bits, threads
        self.weight_bytes = weight_bytes(weights)

    def logits(self, tokens: Sequence[int]) -> list[float]:
        """See :class:`~.models.Contestant`."""
        decoder = self._decoder(1, len(tokens))
        return _prompt(decoder, torch.tensor(tokens))()[0].tolist()

    def room(self, batch: int, context: int) -> tuple[int, int]:
        """See :class:`~.models.Contestant`."""
        return _room(self._weights.shape, batch, context)

    def open(self, batch: int, context: int) -> tuple[Callable[[], float], Callable[[], float]]:
        """See :class:`~.models.Contestant`."""
        decoder, vocab = self._decoder(batch, context + 1), self._weights.shape.vocab
        generator = torch.Generator().manual_seed(0)
        prompt = torch.randint(vocab, (context,), generator=generator)
        prefill = _prompt(decoder, prompt)
        # Other slots hold the same sequence.
        for slot in range(1, batch):
            _prompt(decoder, prompt, slot)()
        segments = [Segment(slot, context, 1) for slot in range(batch)]
        tokens, rows = torch.randint(vocab, (batch,), generator=generator), torch.arange(batch)
        return _timed(lambda: prefill().argmax(1)), _timed(lambda: decoder.step(segments, tokens, rows).argmax(1))

    def _decoder(self, slots: int, context: int) -> CpuDecoder:
        return CpuDecoder(
            self._weights, slots=slots, context=context, act_bits=self._act_bits, max_rows=MAX_ROWS,
            threads=self._threads,
        )  # fmt: skip


class DenseContestant:
    """A model in transformers, of that shape."""

    settle_s = 0.0

    def __init__(self, name: str, model: Any, shape: DecoderShape) -> None:
        self.name, self._model, self._shape, self._vocab = name, model, shape, model.config.vocab_size
        self.weight_bytes = sum(p.nbytes for p in self._model.parameters())

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> list[float]:
        """See :class:`~.models.Contestant`."""
        return self._model(torch.tensor([list(tokens)]), logits_to_keep=1).logits[0, -1].float().tolist()

    def room(self, batch: int, context: int) -> tuple[int, int]:
        """See :class:`~.models.Contestant`."""
        return _room(self._shape, batch, context)

    @torch.inference_mode()
    def open(self, batch: int, context: int) -> tuple[Callable[[], float], Callable[[], float]]:
        """See :class:`~.models.Contestant`."""
        prompts = torch.randint(self._vocab, (batch, context), generator=torch.Generator().manual_seed(0))
        name = cache_argument(self._model)
        cache = self._model(prompts, use_cache=True, logits_to_keep=1)[name]

        def prefill() -> Any:
            with torch.inference_mode():
                return self._model(prompts[:1], use_cache=True, logits_to_keep=1).logits.argmax(-1)

        def step() -> Any:
            with torch.inference_mode():
                out = self._model(prompts[:, -1:], use_cache=True, **{name: cache}).logits.argmax(-1)
                cache.crop(-1)
                return out

        return _timed(prefill), _timed(step)


def random_weights(shape: DecoderShape, spec: QuantSpec, *, positions: int, seed: int = 0) -> DecoderWeights:
    """A ternary model on the CPU as :func:`.synthetic.random_model` makes one on a GPU."""
    generator = torch.Generator().manual_seed(seed)
    hidden = shape.hidden

    def linear(n: int, k: int) -> Linear:
        return Linear(random_ternary(n, k, spec, generator))

    def mixture(shape: Mixture) -> MixtureWeights:
        experts, sizes = range(shape.routing.experts), shape.linear_sizes(hidden)
        router = torch.randn(shape.outputs, hidden, generator=generator) * hidden**-0.5
        return MixtureWeights(**{part: [linear(*size) for _ in experts] for part, size in sizes.items()}, router=router)

    def layer(shape: LayerShape) -> LayerWeights:
        lengths = vector_lengths(shape, hidden)
        parts: dict[str, Any] = dict.fromkeys(("q", "k", "v", "gate", "up", "down", "attention_norm", "mlp_norm"))
        parts |= {name: linear(*size) for name, size in shape.linear_sizes(hidden).items()}
        parts |= {name: torch.ones(lengths[name]) for name in shape.vectors}
        if isinstance(shape.mixer, GatedDelta):
            gates, vectors = random_gates(shape.mixer, hidden, generator)
            parts["delta"] = DeltaWeights(parts.pop("qkv"), parts.pop("z", None), gates, **vectors)
        if shape.mixture is not None:
            parts["mixture"] = mixture(shape.mixture)
        return LayerWeights(**parts)

    embedding, head = (torch.randn(shape.vocab, hidden, generator=generator) for _ in range(2))
    layers = [layer(each) for each in shape.layers]
    head = (head / hidden**0.5).half()
    return DecoderWeights(shape, layers, embedding.half(), head, torch.ones(hidden), angles(shape, positions))


def weight_bytes(weights: DecoderWeights) -> int:
    """Bytes of all weights as the decoder holds them, with experts, embedding, layers' inputs and head."""
    parts = [weights.layers, weights.embedding, weights.inputs]
    return _nbytes(parts if weights.head is weights.embedding else [*parts, weights.head])


def _nbytes(part: Any) -> int:
    if hasattr(part, "nbytes"):
        return part.nbytes
    if is_dataclass(part):
        return sum(_nbytes(getattr(part, field.name)) for field in fields(part))
    return sum(map(_nbytes, part)) if isinstance(part, list | tuple) else 0


def dense_llama(weights: DecoderWeights, dtype: torch.dtype) -> Any:
    """A transformers Llama of these weights; they must be torch tensors of a plain Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    s, layer = weights.shape, weights.shape.layers[0]
    heads, ffn = layer.mixer, layer.feed_forward.size
    assert isinstance(heads, Attention)
    config = LlamaConfig(
        vocab_size=s.vocab, hidden_size=s.hidden, intermediate_size=ffn, num_hidden_layers=len(s.layers),
        num_attention_heads=heads.heads, num_key_value_heads=heads.kv_heads, head_dim=heads.head_dim,
        rms_norm_eps=s.norm_eps, max_position_embeddings=weights.rotary[0][0].shape[0], tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    model = model.to(dtype).to_empty(device="cpu").eval()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    state: dict[str, Tensor] = {
        EMBEDDING: weights.embedding,
        FINAL_NORM: weights.final_norm,
        HEAD: weights.head,
    }
    for index, own in enumerate(weights.layers):
        prefix = layer_prefix(index)
        for name, module in LAYER_LINEARS.items():
            state[prefix + module + WEIGHT] = dequantize(getattr(own, name).weight, dtype)
        for name in ("attention_norm", "mlp_norm"):
            state[prefix + LAYER_NORMS[name]] = getattr(own, name)
    model.load_state_dict(state)
    return model


def dense_checkpoint(path: str | Path, dtype: torch.dtype) -> Any:
    """A packed checkpoint in transformers with its packed layers as dense ones."""
    from trirun_kernels.gemm.linear import Int2Linear

    from ..integrations.transformers import load

    model = load(path, device="cpu", dtype=dtype)
    for name, module in list(model.named_modules()):
        if isinstance(module, Int2Linear):
            model.set_submodule(name, module.to_dense(dtype))
    return model


def _prompt(decoder: CpuDecoder, tokens: Tensor, slot: int = 0) -> Callable[[], Tensor]:
    def run() -> Tensor:
        for first in range(0, len(tokens), MAX_ROWS):
            piece = tokens[first : first + MAX_ROWS]
            last = first + len(piece) == len(tokens)
            rows = torch.tensor([len(piece) - 1] if last else [], dtype=torch.int64)
            logits = decoder.step([Segment(slot, first, len(piece))], piece, rows)
        return logits

    return run


def _room(shape: DecoderShape, batch: int, context: int) -> tuple[int, int]:
    """Of a cache in 16 bits."""
    return batch * ((context + 1) * position_bytes(shape, 2) + state_bytes(shape)), available_bytes()


def _timed(call: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return run
