"""transformers' own modelling as a runner: any decoder, packed or not, on any device, one slot after another."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import torch

from ...engine.request import Request
from ...engine.runner import Done, Outcome, Work
from ...engine.slot_cache import SlotCache
from ...errors import InputError
from ..cpu.sampler import HostSampler, token_logprobs
from .dense import matmul_precision, pad_dense
from .model import first_positions, keeps_every_token, longest_sequence

# Tokens of one step: what a prompt may hold up the others for; a GPU runs more of them in less time.
MAX_ROWS = {"cpu": 512, "cuda": 2048}


class TransformersRunner:
    """Runs a model that transformers has loaded; a cache per slot.

    Args:
        tf32: allow it for float32 products on a GPU. compiled: run through torch.compile, with sizes left open.

    Raises:
        InputError: the model does not keep its past in a cache of keys and values, or has fewer positions than
            ``context``.
    """

    lookahead = 0

    def __init__(
        self, model: Any, *, slots: int, context: int | None = None, tf32: bool = False, compiled: bool = False
    ) -> None:
        if "past_key_values" not in signature(model.forward).parameters:
            raise InputError(f"{type(model).__name__} has no key-value cache, by which trirun runs models")
        text = model.config.get_text_config()
        longest = longest_sequence(text)
        if context is not None and context > longest:
            reason = f"the model runs on up to {longest} (with LongRoPE, original_max_position_embeddings)"
            raise InputError(f"a context of {context} tokens; {reason}")
        if model.device.type == "cuda":
            pad_dense(model)
        self._model, self._caches = model, [None] * slots
        self._forward, self._tf32 = torch.compile(model, dynamic=True) if compiled else model, tf32
        self.name = f"transformers on {model.device}"
        self.slots, self.context = slots, context or longest
        self.max_rows, self.vocab_size = max(MAX_ROWS[model.device.type], slots), int(text.vocab_size)
        self.cache = SlotCache(slots, self.context, rewind=keeps_every_token(model))
        self._lengths = [0] * slots
        self._sampler = HostSampler(slots, self.vocab_size)
        self._last = [0] * slots
        self._alternatives = [0] * slots

    def bind(self, slot: int, request: Request, generated: Sequence[int]) -> None:
        """See :class:`~.runner.Runner`."""
        self._sampler.bind(slot, request.params, request.prompt, generated)
        self._alternatives[slot] = request.params.prompt_logprobs or 0

    @torch.inference_mode()
    def launch(self, work: Sequence[Work]) -> Done:
        """See :class:`~.runner.Runner`; it is over when this returns."""
        with matmul_precision(self._tf32):
            return Done([self._run(item) for item in work])

    def close(self) -> None:
        """See :class:`~.runner.Runner`."""
        self._caches = [None] * self.slots

    def _run(self, work: Work) -> Outcome:
        slot, position, tokens, sample, targets = work
        if self._lengths[slot] != position:
            self._caches[slot] = first_positions(self._caches[slot], position)
        piece = torch.tensor([self._last[slot]] if tokens is None else list(tokens), device=self._model.device)
        output = self._forward(
            input_ids=piece.unsqueeze(0),
            past_key_values=self._caches[slot],
            use_cache=True,
            logits_to_keep=0 if targets else 1,
        )
        self._caches[slot], self._lengths[slot] = output.past_key_values, position + len(piece)
        if not sample and not targets:
            return Outcome(None)
        logits = output.logits[0, :, : self.vocab_size].float().cpu().numpy()
        scores = token_logprobs(logits[: len(targets)], targets, self._alternatives[slot])
        if not sample:
            return Outcome(None, scores)
        (token,) = self._sampler.sample(logits[-1:], (slot,))
        self._last[slot] = token.id
        return Outcome(token, scores)
