"""The lean decoder: packed checkpoints of the Llama family on the CPU, a whole step in one native call."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoint import SCALE, WEIGHT, ZERO, Checkpoint
from ..errors import InputError
from .llama_config import NotLean, decoder_shape, longest_context, rotary_angles
from .weight_memory import StoredTensors, WeightMemory

if TYPE_CHECKING:
    from trirun_kernels.decoder_ops import Segment
    from trirun_kernels.decoder_weights import DecoderShape, DecoderWeights, Int8Head, LayerWeights

# The module of each linear and the tensor of each norm within model.layers.<i>.
LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
NORMS = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "attention_sub_norm": "self_attn.attn_sub_norm.weight",
    "mlp_sub_norm": "mlp.ffn_sub_norm.weight",
}
EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
# Longer contexts are for the asking; a cache of this length is at hand without a thought.
DEFAULT_CONTEXT = 8192
# Rows of the head that are converted at a time.
HEAD_ROWS = 1024


class LeanDecoder:
    """A packed checkpoint of a Llama-like model with a static cache of sequences.

    Args:
        source: the checkpoint, opened or its path.
        slots: sequences the cache holds. context: positions of each; None takes the model's, at most 8192.
        act_bits: 8 or 16; None takes the checkpoint's.
        kv_dtype: of the cache, float16 or float32.
        max_rows: tokens of one native step; longer prompts are run in pieces of this size.
        threads: None takes one per processor this process may use.
        int8_head: hold the output head in 8 bits, a scale per row: half the bytes, and on the reference model 0.02 %
            of perplexity; otherwise it stays as the checkpoint has it.

    Raises:
        NotLean: the model is of another family, or uses something that the lean decoder does not have.
        InputError: the checkpoint is damaged. NativeError: the CPU library is not built.
    """

    def __init__(
        self,
        source: Checkpoint | str | Path,
        *,
        slots: int = 1,
        context: int | None = None,
        act_bits: int | None = None,
        kv_dtype: torch.dtype = torch.float16,
        max_rows: int = 256,
        threads: int | None = None,
        int8_head: bool = True,
    ) -> None:
        from trirun_kernels.decoder_ops import CpuDecoder, Segment

        checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
        longest = longest_context(checkpoint.config)
        if context is not None and context > longest:
            raise NotLean(f"a context of {context} positions; the model attends to {longest} at once")
        self.context = min(longest, DEFAULT_CONTEXT) if context is None else context
        self.threads = threads or len(os.sched_getaffinity(0))
        self.act_bits = act_bits or checkpoint.format.activation_bits
        self._segment = Segment
        self._native = CpuDecoder(
            decoder_weights(checkpoint, self.context, int8_head=int8_head, threads=self.threads),
            slots=slots,
            context=self.context,
            act_bits=self.act_bits,
            kv_dtype=kv_dtype,
            max_rows=max_rows,
            threads=self.threads,
        )

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

    def step(self, segments: Sequence[Segment], tokens: Tensor, logit_rows: Tensor) -> Tensor:
        """One native step over a batch; see :meth:`trirun_kernels.decoder_ops.CpuDecoder.step`."""
        return self._native.step(segments, tokens, logit_rows)

    def forward(self, tokens: Tensor, *, slot: int = 0, position: int = 0, keep: int = 1) -> Tensor:
        """Append tokens int64 [m] to a slot that holds ``position`` tokens, and forget what was there beyond them.

        Returns:
            float32 logits [keep, vocab] after the last ``keep`` of them.

        Raises:
            ValueError: there is no token, a token is not in the vocabulary, or the slot is too short.
        """
        count = tokens.numel()
        if not 0 < count <= self.context - position or not 0 < keep <= count:
            raise ValueError(f"{count} tokens at position {position} of a context of {self.context}, {keep} to keep")
        outputs = []
        for start in range(0, count, self.max_rows):
            piece = tokens[start : start + self.max_rows]
            rows = piece.numel()
            wanted = torch.arange(min(max(count - keep - start, 0), rows), rows)
            outputs.append(self.step([self._segment(slot, position + start, rows)], piece, wanted))
        return outputs[-1] if len(outputs) == 1 else torch.cat(outputs)


class LeanLM:
    """A :class:`LeanDecoder` as ``generate`` and ``eval`` use models: one sequence in slot 0, and slot 1 for others."""

    can_rewind = True

    def __init__(self, source: Checkpoint | str | Path, *, act_bits: int | None = None) -> None:
        self._decoder = LeanDecoder(source, slots=2, act_bits=act_bits)
        self._length = 0
        self.vocab_size, self.max_positions = self._decoder.shape.vocab, self._decoder.context
        self.engine = f"lean decoder on cpu, {self._decoder.threads} threads"

    def reset(self) -> None:
        """Forget the sequence."""
        self._length = 0

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the sequence."""
        self._length = length

    def forward(self, tokens: Tensor, *, last_only: bool = True) -> Tensor:
        """Append tokens int64 [m]; float32 logits [1, vocab] after the last, or [m, vocab] when not ``last_only``."""
        keep = 1 if last_only else tokens.numel()
        logits = self._decoder.forward(tokens, position=self._length, keep=keep)
        self._length += tokens.numel()
        return logits

    def forward_batch(self, sequences: list[Tensor], keep: list[int]) -> list[Tensor]:
        """Run sequences int64 [m_i] from their start; for each, logits [keep_i, vocab] after its last ``keep_i``."""
        return [
            self._decoder.forward(tokens, slot=1, keep=count) for tokens, count in zip(sequences, keep, strict=True)
        ]


def decoder_weights(
    checkpoint: Checkpoint, context: int, *, int8_head: bool = True, threads: int = 1
) -> DecoderWeights:
    """The weights of a packed checkpoint as the native decoder takes them: packed tensors and an 8-bit head in large
    pages, the embedding in the mapped file, where only the rows of tokens that occur are ever read.

    Args:
        checkpoint: opened. context: positions that the rotary angles cover, rounded up to the decoder's key block.
        int8_head: quantize the output head, with ``threads`` threads.

    Raises:
        NotLean: see :class:`LeanDecoder`.
    """
    from trirun_kernels.decoder_weights import KEY_BLOCK, DecoderWeights, Int8Head

    shape = decoder_shape(checkpoint.config)
    bare = [f"model.layers.{i}.{name}" for i in range(shape.layers) for name in LINEARS.values()]
    if missing := [module for module in bare if module + SCALE not in checkpoint]:
        raise NotLean(f"{missing[0]} is not packed ({len(missing)} of {len(bare)} linear layers are not)")
    names = [module + part for module in bare for part in (WEIGHT, SCALE, ZERO) if module + part in checkpoint]
    head = EMBEDDING if checkpoint.config.get("tie_word_embeddings", False) or HEAD not in checkpoint else HEAD
    stored = StoredTensors(checkpoint.files)
    capacity = sum(WeightMemory.size(stored.nbytes(name)) for name in names)
    if int8_head:
        capacity += WeightMemory.size(shape.vocab * Int8Head.stride(shape.hidden))
    memory = WeightMemory(stored, capacity)
    cosines, sines = rotary_angles(checkpoint.config, -(-context // KEY_BLOCK) * KEY_BLOCK)
    return DecoderWeights(
        shape,
        [_layer(checkpoint, f"model.layers.{i}.", memory.tensor) for i in range(shape.layers)],
        checkpoint.tensor(EMBEDDING),
        _int8_head(stored, head, memory, shape, threads) if int8_head else checkpoint.tensor(head),
        checkpoint.tensor(FINAL_NORM).float(),
        cosines,
        sines,
    )


def _int8_head(stored: StoredTensors, name: str, memory: WeightMemory, shape: DecoderShape, threads: int) -> Int8Head:
    """The head in 8 bits, converted a few rows at a time so that it is never in memory as it is in the file."""
    from trirun_kernels.decoder_ops import quantize_head
    from trirun_kernels.decoder_weights import Int8Head

    if stored.shape(name) != [shape.vocab, shape.hidden]:
        raise InputError(f"{name} has shape {stored.shape(name)}, config.json says {[shape.vocab, shape.hidden]}")
    rows = memory.empty((shape.vocab, Int8Head.stride(shape.hidden)), torch.uint8)
    whole = Int8Head(rows, torch.empty(shape.vocab), shape.hidden)
    piece = torch.empty(min(HEAD_ROWS, shape.vocab), shape.hidden, dtype=stored.dtype(name))
    buffer = memoryview(piece.view(torch.uint8).numpy()).cast("B")
    for start in range(0, shape.vocab, HEAD_ROWS):
        count = min(HEAD_ROWS, shape.vocab - start)
        row_bytes = shape.hidden * piece.itemsize
        stored.read_into(name, buffer[: count * row_bytes], start * row_bytes)
        part = Int8Head(whole.rows[start : start + count], whole.scales[start : start + count], shape.hidden)
        quantize_head(piece[:count], threads, part)
    return whole


def _layer(checkpoint: Checkpoint, prefix: str, read: Callable[[str], Tensor]) -> LayerWeights:
    from trirun_kernels import PackedWeight
    from trirun_kernels.decoder_weights import LayerWeights, Linear

    def linear(name: str) -> Linear:
        module = prefix + name
        zeros = read(module + ZERO) if module + ZERO in checkpoint else None
        n, k = checkpoint.shape(module)
        weight = PackedWeight(read(module + WEIGHT), read(module + SCALE), zeros, n, k, checkpoint.format.spec(module))
        bias = f"{module}.bias"
        return Linear(weight, checkpoint.tensor(bias).float() if bias in checkpoint else None)

    norms = {
        name: checkpoint.tensor(prefix + tensor).float()
        for name, tensor in NORMS.items()
        if prefix + tensor in checkpoint
    }
    return LayerWeights(**{name: linear(module) for name, module in LINEARS.items()}, **norms)
