"""The native decoder of the CPU: a packed checkpoint and the cache of its sequences, a whole step in one native call.

Importing and running it takes numpy but not torch, whose import costs seconds and 200 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from trirun_kernels.arrays import Array
from trirun_kernels.decoder.cpu import CpuDecoder, Segment
from trirun_kernels.decoder.shape import DecoderShape
from trirun_kernels.weights.safetensors_file import UnsupportedDtypeError

from ...checkpoint.model_dir import ModelDir
from ...checkpoint.reader import Format
from ...errors import InputError
from ...models.description import UnsupportedModel, chosen_context, description
from ...processors import default_threads
from .weights import decoder_weights, head_kind

_FIRST_ROW = np.zeros(1, np.int64)


class NativeDecoder:
    """A packed checkpoint with a static cache of sequences.

    Args:
        path: the checkpoint directory.
        slots: sequences the cache holds. context: positions of each; None takes the model's, at most 8192.
        act_bits: 8 or 16; None takes the checkpoint's.
        kv_dtype: of the cache, "float16" or "float32".
        max_rows: tokens of one native step; longer prompts are run in pieces of this size. Kernels take rows in blocks
            that are multiples of 48.
        threads: None takes :func:`~trirun_cli.processors.default_threads`.
        int8_head: hold the output head in 8 bits, a scale per row: half the bytes, and on the reference model 0.02 %
            of perplexity; otherwise, and where it is packed, it stays as the checkpoint has it.

    Raises:
        UnsupportedModel: the model is of another family, or uses something that the native decoder does not have.
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
        self._logit_scale = description(config).logit_scale
        self.threads = threads or default_threads()
        self.act_bits = act_bits or form.activation_bits
        try:
            weights = decoder_weights(source, form, self.context, int8_head=int8_head, threads=self.threads)
            count = f"{self.threads} thread{'s' * (self.threads != 1)}"
            cache = {"float16": "16-bit cache", "float32": "cache unquantized"}[kv_dtype]
            self.name = f"native decoder on cpu, {count}, {head_kind(weights)}, {cache}"
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
            raise UnsupportedModel(str(error)) from None
        except UnsupportedModel:
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
        logits = np.empty((len(logit_rows), self.shape.vocab), np.float32)
        tokens, logit_rows = (Array.of(np.ascontiguousarray(values, np.int64)) for values in (tokens, logit_rows))
        self._native.run(segments, tokens, logit_rows, Array.of(logits))
        return logits

    def states(self, segments: Sequence[Segment], tokens: Any) -> np.ndarray:
        """:meth:`step`, but for what it returns: float32 [m, hidden], all rows after the last norm."""
        states = np.empty((len(tokens), self.shape.hidden), np.float32)
        ids = Array.of(np.ascontiguousarray(tokens, np.int64))
        self._native.run(segments, ids, Array.of(np.arange(len(tokens))), Array.of(states), states=True)
        # The last norm's weights hold the logits' factor, which is no part of the states.
        return states if self._logit_scale == 1 else states / np.float32(self._logit_scale)

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
