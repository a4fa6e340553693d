"""One interface to every runnable model, packed or not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ...checkpoint.model_dir import ModelDir
from ...checkpoint.reader import QUANT_METHOD
from ...errors import InputError, MissingError, UsageError
from ...integrations.transformers import load
from .dense import matmul_precision, pad_dense


class CausalLM(Protocol):
    """A model with one sequence in its cache."""

    vocab_size: int
    max_positions: int
    # What runs it, for people: "transformers on cpu", ...
    engine: str
    # Whether rewind works: not where a sliding window or a recurrent state has forgotten what it would go back to.
    can_rewind: bool

    def reset(self) -> None:
        """Forget the sequence."""

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the sequence, which has at least that many."""

    def forward(self, tokens: Tensor, *, last_only: bool = True) -> Tensor:
        """Append tokens (int64 [m]) to the sequence.

        Returns:
            float32 logits [1, vocab] after the last of them, or [m, vocab] after each when not ``last_only``.
        """


@runtime_checkable
class BatchLM(Protocol):
    """A model that also runs several whole sequences at once, apart from the one in its cache."""

    def forward_batch(self, sequences: list[Tensor], keep: list[int]) -> list[Tensor]:
        """Run sequences (int64 [m_i], of any lengths).

        Returns:
            for each, float32 logits [keep_i, vocab] after its last ``keep_i`` tokens.
        """


class TransformersLM:
    """Any decoder that transformers can model, with its own cache.

    ``tf32`` allows that precision for float32 products on a GPU. There, odd sizes are padded first (``pad_dense``).
    """

    def __init__(self, model: Any, *, tf32: bool = False) -> None:
        self._model, self._tf32 = model, tf32
        if model.device.type == "cuda":
            pad_dense(model)
        self._cache: Any = None
        text = model.config.get_text_config()
        self.can_rewind = keeps_every_token(model)
        self.vocab_size = int(text.vocab_size)
        self.max_positions = longest_sequence(text)
        self.engine = f"transformers on {model.device}"

    def reset(self) -> None:
        self._cache = None

    @torch.inference_mode()
    def forward(self, tokens: Tensor, *, last_only: bool = True) -> Tensor:
        with matmul_precision(self._tf32):
            output = self._model(
                input_ids=tokens.to(self._model.device).unsqueeze(0),
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
            )
        self._cache = output.past_key_values
        return output.logits[0, :, : self.vocab_size].float()

    def rewind(self, length: int) -> None:
        self._cache = first_positions(self._cache, length)

    @torch.inference_mode()
    def forward_batch(self, sequences: list[Tensor], keep: list[int]) -> list[Tensor]:
        longest = max(map(len, sequences))
        # Padded on the right, where causal attention never looks.
        tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = sequence
        first = min(len(sequence) - count for sequence, count in zip(sequences, keep, strict=True))
        wanted = torch.arange(first, longest, device=self._model.device)
        inputs = tokens.to(self._model.device)
        with matmul_precision(self._tf32):
            logits = self._model(input_ids=inputs, use_cache=False, logits_to_keep=wanted).logits
        logits = logits[..., : self.vocab_size]
        ends = [len(sequence) - first for sequence in sequences]
        return [row[end - count : end].float() for row, end, count in zip(logits, ends, keep, strict=True)]


def open_model(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    act_bits: int | None = None,
    engine: str = "auto",
    exact: bool = False,
    tf32: bool = False,
    kv_cache_dtype: str = "auto",
) -> CausalLM:
    """A model directory ready to run: a packed checkpoint on trirun's kernels, anything else as it is.

    Args:
        path: a packed checkpoint or an ordinary Hugging Face directory.
        device: "auto" (the first GPU, or the CPU), "cpu", "cuda" or "cuda:N".
        dtype: "float32", "float16", "bfloat16", or "auto": float32 on the CPU, the checkpoint's own on a GPU.
        act_bits: 8 or 16 overrides the checkpoint's activation width.
        engine: "lean" (packed Llama-like checkpoints), "transformers", or "auto": lean where it can.
        tf32: allow TF32 for float32 products on a GPU.
        exact: none of an engine's own shortcuts in precision, to measure the checkpoint and not the engine.
        kv_cache_dtype: "auto", or "int8" on the lean engine of a GPU, which then runs plain models too.

    Raises:
        InputError: the directory cannot be loaded, or not on that engine. MissingError: the device is not there.
        UsageError: an int8 cache on a CPU.
    """
    source = ModelDir(path)
    target = pick_device(device)
    kind = None if dtype == "auto" else getattr(torch, dtype)
    packed = source.quant_method == QUANT_METHOD
    from ...models.llama_config import NotLean

    if engine == "lean" and not packed:
        raise InputError(f"{path}: the lean engine runs packed checkpoints")
    if kv_cache_dtype != "auto" and target == "cpu":
        raise UsageError(f"--kv-cache-dtype {kv_cache_dtype}: the lean decoder of a GPU has it alone")
    narrow = kv_cache_dtype != "auto"
    if target != "cpu" and (narrow or (packed and dtype != "float32" and engine != "transformers")):
        from ..cuda.opening import cuda_lm

        try:
            return cuda_lm(path, device=target, dtype=dtype, act_bits=act_bits, kv_cache_dtype=kv_cache_dtype)
        except NotLean as error:
            if engine == "lean" or narrow:
                raise InputError(f"{path}: {error}") from None
    if packed and target == "cpu" and kind in (None, torch.float32) and engine != "transformers":
        from ..cpu.model import LeanLM

        try:
            return LeanLM(path, act_bits=act_bits, exact=exact)
        except NotLean as error:
            if engine == "lean":
                raise InputError(f"{path}: {error}") from None
    return TransformersLM(load_transformers(source, target, kind, act_bits), tf32=tf32)


def load_transformers(source: ModelDir, device: str, dtype: torch.dtype | None, act_bits: int | None) -> Any:
    """A model directory, packed or not, in transformers' own modelling.

    Raises:
        InputError: it cannot be loaded.
    """
    if source.quant_method not in (QUANT_METHOD, None):
        reason = f"is quantized by {source.quant_method!r}; trirun runs its own format and plain models"
        raise InputError(f"{source.path} {reason}")
    model = load(source.path, device=device, dtype=dtype)
    if act_bits is not None and source.quant_method is not None:
        _set_act_bits(model, act_bits)
    return model


def first_positions(cache: Any, length: int) -> Any:
    """A transformers cache that keeps every token, cut to its first ``length`` positions; None for none."""
    if length == 0:
        return None
    for layer in cache.layers:
        # Layers that share another layer's keys hold none of their own.
        if layer.is_initialized:
            layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]
    return cache


def longest_sequence(config: Any) -> int:
    """Positions that a model runs on, by transformers' configuration of its text: its own, of LongRoPE those of its
    first training. With a token beyond these, transformers turns every key of a forward pass by other angles than the
    keys that are in the cache by then."""
    rotary = getattr(config, "rope_parameters", None) or {}
    kinds = [rotary, *(kind for kind in rotary.values() if isinstance(kind, dict))]  # one for all layers, or by type
    trained = [kind.get("original_max_position_embeddings") for kind in kinds if kind.get("rope_type") == "longrope"]
    return int(min(filter(None, [getattr(config, "max_position_embeddings", None), *trained, 2**31])))


def keeps_every_token(model: Any) -> bool:
    """Whether the cache of a transformers model can go back to any of its tokens."""
    from transformers.cache_utils import DynamicCache, DynamicLayer

    if getattr(model, "_is_stateful", False):
        return False
    return all(type(layer) is DynamicLayer for layer in DynamicCache(config=model.config).layers)


def pick_device(device: str) -> str:
    """The torch device that a --device option means.

    Raises:
        MissingError: it is a GPU that is not there. UsageError: it is no device at all.
    """
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if named := re.fullmatch(r"cuda(?::(\d+))?", device):
        if int(named[1] or 0) >= torch.cuda.device_count():
            raise MissingError(f"--device {device}: torch sees {torch.cuda.device_count()} CUDA devices here")
    elif device != "cpu":
        raise UsageError(f"--device {device}: not one of auto, cpu, cuda, cuda:N")
    return device


def _set_act_bits(model: Any, act_bits: int) -> None:
    from trirun_kernels.gemm.linear import Int2Linear

    for module in model.modules():
        if isinstance(module, Int2Linear):
            module.act_bits = act_bits
