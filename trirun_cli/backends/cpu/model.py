"""The lean decoder: packed checkpoints of the Llama family on the CPU, a whole step in one native call.

Importing and running it takes numpy but not torch, whose import costs seconds and 200 MB; only :class:`LeanLM`, which
speaks torch tensors, needs that.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from trirun_kernels.arrays import Array
from trirun_kernels.decoder.cpu import CpuDecoder, Segment, padded_context, quantize_head
from trirun_kernels.decoder.weights import (
    DecoderShape,
    DecoderWeights,
    Int8Head,
    LayerWeights,
    Linear,
    PackedArrays,
)
from trirun_kernels.weights.names import (
    BIAS,
    FINAL_NORM,
    LAYER_LINEARS,
    LAYER_NORMS,
    SCALE,
    WEIGHT,
    ZERO,
    embedding_names,
    layer_prefix,
    missing_in_a_layer,
)
from trirun_kernels.weights.safetensors_dir import SafetensorsDir
from trirun_kernels.weights.safetensors_file import UnsupportedDtypeError

from ...checkpoint.model_dir import ModelDir
from ...checkpoint.reader import Format
from ...errors import InputError
from ...models.llama_config import NotLean, chosen_context, decoder_shape, rotary_angles
from ..weight_memory import WeightMemory

if TYPE_CHECKING:
    from torch import Tensor

# Rows of the head that are converted at a time.
HEAD_ROWS = 256
_FIRST_ROW = np.zeros(1, np.int64)


class LeanDecoder:
    """A packed checkpoint of a Llama-like model with a static cache of sequences.

    Args:
        path: the checkpoint directory.
        slots: sequences the cache holds. context: positions of each; None takes the model's, at most 8192.
        act_bits: 8 or 16; None takes the checkpoint's.
        kv_dtype: of the cache, "float16" or "float32".
        max_rows: tokens of one native step; longer prompts are run in pieces of this size. Kernels take rows in blocks
            that are multiples of 48.
        threads: None takes one per processor this process may use.
        int8_head: hold the output head in 8 bits, a scale per row: half the bytes, and on the reference model 0.02 %
            of perplexity; otherwise it stays as the checkpoint has it.

    Raises:
        NotLean: the model is of another family, or uses something that the lean decoder does not have.
        InputError: the checkpoint is damaged. NativeError: the CPU library is not built.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        slots: int = 1,
        context: int | None = None,
        act_bits: int | None = None,
        kv_dtype: str = "float16",
        max_rows: int = 192,
        threads: int | None = None,
        int8_head: bool = True,
    ) -> None:
        source = ModelDir(path)
        config = source.config
        form = Format.from_dict(config.get("quantization_config") or {}, path)
        self.context = chosen_context(config, context)
        self.threads = threads or len(os.sched_getaffinity(0))
        precision = "8-bit head" if int8_head else "head unquantized"
        cache = {"float16": "16-bit cache", "float32": "cache unquantized"}[kv_dtype]
        self.name = f"lean decoder on cpu, {self.threads} threads, {precision}, {cache}"
        self.act_bits = act_bits or form.activation_bits
        try:
            weights = decoder_weights(source, form, self.context, int8_head=int8_head, threads=self.threads)
            self._native = CpuDecoder(
                weights,
                slots=slots,
                context=self.context,
                act_bits=self.act_bits,
                kv_dtype=kv_dtype,
                max_rows=max_rows,
                threads=self.threads,
            )
        except UnsupportedDtypeError as error:
            raise NotLean(str(error)) from None
        except NotLean:
            raise
        except ValueError as error:
            raise InputError(f"{path}: {error}") from None

    @property
    def shape(self) -> DecoderShape:
        """The model's sizes."""
        return self._native.shape

    @property
    def slots(self) -> int:
        """Sequences the cache holds."""
        return self._native.slots

    @property
    def max_rows(self) -> int:
        """Most tokens of one :meth:`step`."""
        return self._native.max_rows

    def step(self, segments: Sequence[Segment], tokens: Any, logit_rows: Any) -> np.ndarray:
        """One native step over a batch.

        Args:
            segments: whose tokens they are, in order of ascending slots, each slot at most once.
            tokens: integers [m], the segments' one after another; m at most ``max_rows``.
            logit_rows: integers [l], which of the m rows to return logits of.

        Returns:
            float32 logits [l, vocab]. A row's logits are the same bit for bit whatever else is in the batch.

        Raises:
            ValueError: tokens, slots or positions are out of range.
        """
        return self.step_into(np.empty((len(logit_rows), self.shape.vocab), np.float32), segments, tokens, logit_rows)

    def step_into(self, logits: np.ndarray, segments: Sequence[Segment], tokens: Any, logit_rows: Any) -> np.ndarray:
        """:meth:`step` into float32 logits [l, vocab] of the caller's; fresh memory costs as much as a small step."""
        tokens, logit_rows = (Array.of(np.ascontiguousarray(values, np.int64)) for values in (tokens, logit_rows))
        self._native.run(segments, tokens, logit_rows, Array.of(logits))
        return logits

    @property
    def native(self) -> CpuDecoder:
        """The decoder of the kernel library, for what it alone has."""
        return self._native

    def forward(self, tokens: Any, *, slot: int = 0, position: int = 0, keep: int = 1) -> np.ndarray:
        """Append tokens, integers [m], to a slot that holds ``position`` tokens, and forget what was beyond them.

        Returns:
            float32 logits [keep, vocab] after the last ``keep`` of them.

        Raises:
            ValueError: there is no token, a token is not in the vocabulary, or the slot is too short.
        """
        count = len(tokens)
        if count == 1 and keep == 1 and 0 <= position < self.context:
            return self.step((Segment(slot, position, 1),), tokens, _FIRST_ROW)
        if not 0 < count <= self.context - position or not 0 < keep <= count:
            raise ValueError(f"{count} tokens at position {position} of a context of {self.context}, {keep} to keep")
        outputs = []
        for start in range(0, count, self.max_rows):
            piece = tokens[start : start + self.max_rows]
            rows = len(piece)
            wanted = np.arange(min(max(count - keep - start, 0), rows), rows)
            outputs.append(self.step([Segment(slot, position + start, rows)], piece, wanted))
        return outputs[-1] if len(outputs) == 1 else np.concatenate(outputs)


class LeanLM:
    """A :class:`LeanDecoder` as ``generate`` and ``eval`` use models: one sequence in slot 0, and slot 1 for others.

    ``exact`` leaves out what costs a little precision: the head stays as the checkpoint has it, the cache is float32.
    """

    can_rewind = True

    def __init__(self, path: str | Path, *, act_bits: int | None = None, exact: bool = False) -> None:
        kv_dtype = "float32" if exact else "float16"
        self._decoder = LeanDecoder(path, slots=2, act_bits=act_bits, kv_dtype=kv_dtype, int8_head=not exact)
        self._length = 0
        self.vocab_size, self.max_positions = self._decoder.shape.vocab, self._decoder.context
        self.engine = self._decoder.name

    def reset(self) -> None:
        """Forget the sequence."""
        self._length = 0

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the sequence."""
        self._length = length

    def forward(self, tokens: Tensor, *, last_only: bool = True) -> Tensor:
        """Append tokens int64 [m]; float32 logits [1, vocab] after the last, or [m, vocab] when not ``last_only``."""
        import torch

        keep = 1 if last_only else tokens.numel()
        logits = self._decoder.forward(tokens, position=self._length, keep=keep)
        self._length += tokens.numel()
        return torch.from_numpy(logits)

    def forward_batch(self, sequences: list[Tensor], keep: list[int]) -> list[Tensor]:
        """Run sequences int64 [m_i] from their start; for each, logits [keep_i, vocab] after its last ``keep_i``."""
        import torch

        return [
            torch.from_numpy(self._decoder.forward(tokens, slot=1, keep=count))
            for tokens, count in zip(sequences, keep, strict=True)
        ]


def decoder_weights(
    source: ModelDir, form: Format, context: int, *, int8_head: bool = True, threads: int = 1
) -> DecoderWeights:
    """The weights of a packed checkpoint as the native decoder takes them: packed tensors and an 8-bit head in large
    pages, the embedding in the mapped file, where only the rows of tokens that occur are ever read.

    Args:
        source: the checkpoint directory. form: the quantization section of its config.json.
        context: positions that the rotary angles cover, rounded up to the decoder's key block.
        int8_head: quantize the output head, with ``threads`` threads.

    Raises:
        NotLean, InputError: see :class:`LeanDecoder`.
    """
    config = source.config
    shape = decoder_shape(config)
    if lost_of_layer := missing_in_a_layer(source, shape.layers):
        raise NotLean(f"there is no tensor {lost_of_layer}, which other layers have")
    prefixes = [layer_prefix(i) for i in range(shape.layers)]
    bare = [prefix + name for prefix in prefixes for name in LAYER_LINEARS.values()]
    if missing := [module for module in bare if module + SCALE not in source]:
        raise NotLean(f"{missing[0]} is not packed ({len(missing)} of {len(bare)} linear layers are not)")
    embedding, head = embedding_names(config, source)
    norms = [prefix + LAYER_NORMS[name] for prefix in prefixes for name in ("attention_norm", "mlp_norm")]
    needed = [module + WEIGHT for module in bare] + [embedding, FINAL_NORM, *norms]
    if lost := [name for name in needed if name not in source]:
        raise InputError(f"{source.path} holds no {lost[0]}")
    names = [module + part for module in bare for part in (WEIGHT, SCALE, ZERO) if module + part in source]
    capacity = sum(WeightMemory.size(source[name].nbytes) for name in names)
    if int8_head:
        capacity += WeightMemory.size(shape.vocab * Int8Head.stride(shape.hidden))
    memory = WeightMemory(source, capacity)
    cosines, sines = rotary_angles(config, padded_context(context))
    return DecoderWeights(
        shape,
        [_layer(source, form, prefix, memory.tensor) for prefix in prefixes],
        source.mapped(embedding),
        _int8_head(source, head, memory, shape, threads) if int8_head else source.mapped(head),
        source.floats(FINAL_NORM),
        cosines,
        sines,
    )


def _int8_head(stored: SafetensorsDir, name: str, memory: WeightMemory, shape: DecoderShape, threads: int) -> Int8Head:
    """The head in 8 bits, converted a few rows at a time so that it is never in memory as it is in the file."""
    if stored[name].shape != (shape.vocab, shape.hidden):
        raise InputError(f"{name} has shape {stored[name].shape}, config.json says {(shape.vocab, shape.hidden)}")
    rows = memory.empty((shape.vocab, Int8Head.stride(shape.hidden)), "uint8")
    scales = Array.of(np.empty(shape.vocab, np.float32))
    row_bytes = stored[name].nbytes // shape.vocab
    buffer = bytearray(min(HEAD_ROWS, shape.vocab) * row_bytes)
    for start in range(0, shape.vocab, HEAD_ROWS):
        count = min(HEAD_ROWS, shape.vocab - start)
        stored.read_into(name, memoryview(buffer)[: count * row_bytes], start * row_bytes)
        piece = Array.within(buffer, stored.array_dtype(name), (count, shape.hidden))
        quantize_head(piece, Int8Head(rows.rows(start, count), scales.rows(start, count), shape.hidden), threads)
    return Int8Head(rows, scales, shape.hidden)


def _layer(stored: SafetensorsDir, form: Format, prefix: str, read: Callable[[str], Array]) -> LayerWeights:
    def linear(name: str) -> Linear:
        module = prefix + name
        words = read(module + WEIGHT)
        if len(words.shape) != 3:
            raise InputError(f"{module}{WEIGHT} has shape {list(words.shape)}, not [n/64, k/32, 128]")
        n, k = form.padded.get(module) or (words.shape[0] * 64, words.shape[1] * 32)
        zeros = read(module + ZERO) if module + ZERO in stored else None
        weight = PackedArrays(words, read(module + SCALE), zeros, n, k, form.spec(module))
        bias = module + BIAS
        return Linear(weight, stored.floats(bias) if bias in stored else None)

    parts: dict[str, Any] = {name: linear(module) for name, module in LAYER_LINEARS.items()}
    parts |= {name: stored.floats(prefix + tensor) for name, tensor in LAYER_NORMS.items() if prefix + tensor in stored}
    return LayerWeights(**parts)
