"""transformers' own modelling as a runner: any decoder, packed or not, on any device, one slot after another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...engine.request import Request
from ...engine.runner import Done, Outcome, Work
from ...engine.slot_cache import SlotCache
from ...errors import InputError
from ..cpu.sampler import HostSampler, token_logprobs
from .dense import matmul_precision, pad_dense
from .weights import cache_argument, continues, first_positions, keeps_every_token, longest_sequence, returned_cache

# Tokens of one step: what a prompt may hold up the others for; a GPU runs more of them in less time.
MAX_ROWS = {"cpu": 512, "cuda": 2048}


class TransformersRunner:
    """Runs a model that transformers has loaded; a cache per slot. On a GPU odd sizes are padded (``pad_dense``).

    Args:
        context: most tokens of a sequence; None takes the model's.
        tf32: allow it for float32 products on a GPU. compiled: run through torch.compile, with sizes left open.

    Raises:
        InputError: the model does not keep its past in a cache, or has fewer positions than ``context``.
    """

    lookahead, why_slower, why_slots, has_states = 0, "", "", True

    def __init__(
        self, model: Any, *, slots: int, context: int | None = None, tf32: bool = False, compiled: bool = False
    ) -> None:
        self._cache = cache_argument(model)
        self._continues = continues(model, self._cache)
        text = model.config.get_text_config()
        longest = longest_sequence(text)
        if context is not None and context > longest:
            reason = "with LongRoPE, original_max_position_embeddings"
            raise InputError(f"--ctx {context}: transformers runs the model on up to {longest} tokens ({reason})")
        if model.device.type == "cuda":
            pad_dense(model)
        self._model, self._caches = model, [None] * slots
        self._forward, self._tf32 = torch.compile(model, dynamic=True) if compiled else model, tf32
        self.name = f"transformers on {model.device}"
        self.slots, self.context = slots, context or longest
        self.max_rows, self.vocab_size = max(MAX_ROWS[model.device.type], slots), int(text.vocab_size)
        self.prompt_rows = self.max_rows
        self.can_rewind = keeps_every_token(model)
        self.cache = SlotCache(slots, self.context, rewind=self.can_rewind)
        self._lengths = [0] * slots
        self._sampler = HostSampler(slots, self.vocab_size)
        self._last = [0] * slots
        self._alternatives = [0] * slots

    def prepare(self) -> None:
        """See :class:`~.runner.Runner`."""

    def bind(self, slot: int, request: Request, generated: Sequence[int]) -> None:
        """See :class:`~.runner.Runner`."""
        self._sampler.bind(slot, request, generated)
        self._alternatives[slot] = request.params.prompt_logprobs or 0

    @torch.inference_mode()
    def launch(self, work: Sequence[Work]) -> Done:
        """See :class:`~.runner.Runner`; it is over when this returns."""
        with matmul_precision(self._tf32):
            return Done([self._run(item) for item in work])

    @torch.inference_mode()
    def logits(self, slot: int, position: int, tokens: Sequence[int], keep: int) -> Tensor:
        """See :class:`~.runner.Runner`."""
        with matmul_precision(self._tf32):
            return self._append(slot, position, tokens, keep)

    @torch.inference_mode()
    def batch_logits(self, sequences: Sequence[Sequence[int]], keep: Sequence[int]) -> list[Tensor]:
        """See :class:`~.runner.Runner`: all of them in one forward pass, without a cache."""
        longest = max(map(len, sequences))
        # Padded on the right, where causal attention never looks.
        tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
        for row, sequence in zip(tokens, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        first = min(len(sequence) - count for sequence, count in zip(sequences, keep, strict=True))
        wanted = torch.arange(first, longest, device=self._model.device)
        inputs = tokens.to(self._model.device)
        with matmul_precision(self._tf32):
            logits = self._forward(input_ids=inputs, use_cache=False, logits_to_keep=wanted).logits
        logits = logits[..., : self.vocab_size]
        ends = [len(sequence) - first for sequence in sequences]
        return [row[end - count : end].float() for row, end, count in zip(logits, ends, keep, strict=True)]

    def close(self) -> None:
        """See :class:`~.runner.Runner`."""
        self._caches = [None] * self.slots

    def _append(self, slot: int, position: int, tokens: Sequence[int], keep: int, *, states: bool = False) -> Tensor:
        """Run tokens at a position of a slot; float32 logits [keep, vocab] after the last of them, or ``states`` [keep,
        hidden] after the last norm."""
        if position and len(tokens) > 1 and not self._continues:
            rows = [self._append(slot, position + i, [token], 1, states=states) for i, token in enumerate(tokens)]
            return torch.cat(rows[-keep:])
        if self._lengths[slot] != position:
            self._caches[slot] = first_positions(self._caches[slot], position)
        piece = torch.tensor(tokens, device=self._model.device)
        output = self._forward(
            input_ids=piece.unsqueeze(0),
            use_cache=True,
            # 0 is all of them: one of two values, so that a compiled model has two graphs.
            logits_to_keep=1 if keep <= 1 or states else 0,
            **({"output_hidden_states": True} if states else {}),
            **{self._cache: self._caches[slot]},
        )
        self._caches[slot] = returned_cache(self._model, output, self._cache)
        self._lengths[slot] = position + len(piece)
        if states:
            return output.hidden_states[-1][0, -keep:].float()
        return output.logits[0, -keep:, : self.vocab_size].float()

    def _run(self, work: Work) -> Outcome:
        slot, position, tokens, sample, targets, states = work
        piece = [self._last[slot]] if tokens is None else tokens
        if states:
            return Outcome(None, states=self._append(slot, position, piece, len(piece), states=True).cpu().numpy())
        logits = self._append(slot, position, piece, len(piece) if targets else 1)
        if not sample and not targets:
            return Outcome(None)
        rows = logits.cpu().numpy()
        scores = token_logprobs(rows[: len(targets)], targets, self._alternatives[slot])
        if not sample:
            return Outcome(None, scores)
        (token,) = self._sampler.sample(rows[-1:], (slot,))
        self._last[slot] = token.id
        return Outcome(token, scores)
