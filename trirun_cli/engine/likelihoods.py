"""Log-likelihoods of continuations, with as few tokens through the model as the requests allow."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..errors import InputError
from .scoring import ScoringModel

Tokens = tuple[int, ...]
# A context and a continuation of it.
Request = tuple[Tokens, Tokens]
# The log-likelihood of the continuation in nats, and whether each of its tokens is the most likely one.
Likelihood = tuple[float, bool]

# The fixed cost of a call of the model, in tokens.
CALL_COST = {"cpu": 12, "cuda": 1024}
# Tokens of a batch. A CPU gains nothing from more; a GPU starts here and halves it until a batch fits in its memory.
BATCH_TOKENS = {"cpu": 2048, "cuda": 32768}
# The logits of a batch stay below this many numbers: 1 GiB of float32.
MOST_LOGITS = 2**28


class ResultCache(Protocol):
    """Where finished requests are kept and looked up, such as :class:`trirun_cli.eval.request_cache.RequestCache`."""

    def get(self, kind: str, *tokens: Sequence[int]) -> Any:
        """The result of a request of this kind about these tokens, or None."""

    def put(self, kind: str, *tokens: Sequence[int], value: Any) -> None:
        """Keep a result, a JSON value."""


class Scorer:
    """Computes log-likelihoods of requests on one model.

    Requests that share a context share its forward pass: a multiple-choice question with one-token answers is run
    once. There are two plans, and the cheaper one is taken. *Prefixes* walks the contexts in lexical order and keeps
    the longest common prefix (few-shot examples, for instance) in the model's cache. *Batches* runs whole sequences
    together, longest first.

    Args:
        model: loses the sequence in its cache. device: where it runs, "cpu" or "cuda...".
        batch_size: sequences of a batch; None chooses it.
        cache: of finished requests.

    Attributes:
        model_s: seconds in the model. tokens: that the model was given. truncated: requests whose context was cut.
        plan: the last plan, for people.
    """

    def __init__(
        self, model: ScoringModel, device: str, *, batch_size: int | None = None, cache: ResultCache | None = None
    ) -> None:
        self.model, self.batch_size, self._cache = model, batch_size, cache
        self.model_s, self.tokens, self.truncated, self.plan = 0.0, 0, 0, ""
        self._kind = "cpu" if device == "cpu" else "cuda"
        self._budget = BATCH_TOKENS[self._kind]

    def score(
        self, requests: Sequence[tuple[Sequence[int], Sequence[int]]], on_progress: Callable[[float], None]
    ) -> list[Likelihood]:
        """Log-likelihood of each continuation after its context, in the requests' order.

        Args:
            requests: (context, continuation) token ids, neither empty. A context that does not fit loses its first
                tokens, as in lm-eval.
            on_progress: called after each step with its share of the work; the shares add up to 1.

        Raises:
            InputError: a continuation alone is longer than the model's context. ValueError: one is empty.
        """
        cut = [self._truncate(tuple(context), tuple(continuation)) for context, continuation in requests]
        known: dict[Request, Likelihood] = {}
        groups: dict[Tokens, list[Tokens]] = defaultdict(list)
        for context, continuation in dict.fromkeys(cut):
            found = self._cache.get("loglikelihood", context, continuation) if self._cache else None
            if found is None:
                groups[context].append(continuation)
            else:
                known[context, continuation] = (float(found[0]), bool(found[1]))
        for request, likelihood in self._run(groups, on_progress):
            known[request] = likelihood
            if self._cache:
                self._cache.put("loglikelihood", *request, value=likelihood)
        return [known[request] for request in cut]

    def _truncate(self, context: Tokens, continuation: Tokens) -> Request:
        limit = self.model.max_positions
        if not context or not continuation:
            raise ValueError("a request needs at least one token of context and one of continuation")
        if len(continuation) > limit:
            raise InputError(f"an answer of {len(continuation)} tokens does not fit the context of {limit} (--ctx)")
        # The last token is predicted, never read.
        surplus = len(context) + len(continuation) - 1 - limit
        if surplus > 0:
            self.truncated += 1
            context = context[surplus:]
        return context, continuation

    def _run(
        self, groups: dict[Tokens, list[Tokens]], on_progress: Callable[[float], None]
    ) -> Iterator[tuple[Request, Likelihood]]:
        if not groups:
            return
        order, sequences = sorted(groups), _sequences(groups)
        walk, flat = _walk_tokens(order, groups), sum(map(len, sequences))
        calls = sum(1 + sum(len(continuation) > 1 for continuation in found) for found in groups.values())
        together = self.batch_size or max(1, self._budget * len(sequences) // flat)
        cost = CALL_COST[self._kind]
        if self.model.can_rewind and walk + cost * calls < flat + cost * len(sequences) / together:
            self.plan = f"shared prefixes, {walk:,} tokens instead of {flat:,}"
            yield from self._prefixes(order, groups, lambda tokens: on_progress(tokens / walk))
        else:
            self.plan = f"{together} sequences at a time, {flat:,} tokens"
            yield from self._batches(sequences, lambda tokens: on_progress(tokens / flat))

    def _prefixes(
        self, order: list[Tokens], groups: dict[Tokens, list[Tokens]], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[Request, Likelihood]]:
        self.model.reset()
        held: Tokens = ()
        for context in order:
            # At least one token has to run for there to be logits.
            shared = min(common_prefix(held, context), len(context) - 1)
            self.model.rewind(shared)
            first = self._forward(context[shared:], last_only=True).log_softmax(-1)
            on_tokens(len(context) - shared)
            for continuation in groups[context]:
                found = first
                if len(continuation) > 1:
                    self.model.rewind(len(context))
                    found = torch.cat([first, self._forward(continuation[:-1], last_only=False).log_softmax(-1)])
                    on_tokens(len(continuation) - 1)
                yield (context, continuation), _likelihood(found, continuation)
            held = context

    def _batches(
        self, sequences: dict[Tokens, list[Request]], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[Request, Likelihood]]:
        waiting = sorted(sequences, key=len, reverse=True)
        keep = {sequence: max(len(answer) for _, answer in found) for sequence, found in sequences.items()}
        start = 0
        while start < len(waiting):
            batch = waiting[start : start + self._fitting(waiting, start, keep)]
            try:
                outputs = self._forward_batch(batch, [keep[sequence] for sequence in batch])
            except torch.OutOfMemoryError:
                if len(batch) == 1:
                    raise
                torch.cuda.empty_cache()
                self._budget = max(1, sum(map(len, batch)) // 2)
                self.batch_size = self.batch_size and len(batch) // 2
                continue
            for sequence, logits in zip(batch, outputs, strict=True):
                found = logits.log_softmax(-1)
                for request in sequences[sequence]:
                    yield request, _likelihood(found[-len(request[1]) :], request[1])
            on_tokens(sum(map(len, batch)))
            start += len(batch)

    def _fitting(self, waiting: list[Tokens], start: int, keep: dict[Tokens, int]) -> int:
        """How many sequences from ``start`` on, longest first, make the next batch."""
        longest, first = len(waiting[start]), len(waiting[start])
        most = self.batch_size or max(1, self._budget // longest)
        count = 0
        for sequence in waiting[start : start + most]:
            first = min(first, len(sequence) - keep[sequence])
            if count and (count + 1) * (longest - first) * self.model.vocab_size > MOST_LOGITS:
                break
            count += 1
        return count

    def _forward(self, tokens: Tokens, *, last_only: bool) -> Tensor:
        started = time.perf_counter()
        logits = self.model.forward(torch.tensor(tokens), last_only=last_only)
        return self._finished(started, len(tokens), logits)

    def _forward_batch(self, batch: list[Tokens], keep: list[int]) -> list[Tensor]:
        started = time.perf_counter()
        logits = self.model.forward_batch([torch.tensor(sequence) for sequence in batch], keep)
        self._finished(started, sum(map(len, batch)), logits[-1])
        return logits

    def _finished(self, started: float, tokens: int, logits: Tensor) -> Tensor:
        # Reading a number waits for the device; otherwise its time would be missing from model_s.
        logits[-1, -1].item()
        self.model_s += time.perf_counter() - started
        self.tokens += tokens
        return logits


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens two sequences begin with in common."""
    for index, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return index
    return min(len(a), len(b))


def _sequences(groups: dict[Tokens, list[Tokens]]) -> dict[Tokens, list[Request]]:
    """The distinct sequences to run, each with the requests that it answers."""
    sequences: dict[Tokens, list[Request]] = defaultdict(list)
    for context, continuations in groups.items():
        for continuation in continuations:
            sequences[context + continuation[:-1]].append((context, continuation))
    return sequences


def _walk_tokens(order: list[Tokens], groups: dict[Tokens, list[Tokens]]) -> int:
    """Tokens that the plan *prefixes* runs."""
    total = 0
    held: Tokens = ()
    for context in order:
        total += len(context) - min(common_prefix(held, context), len(context) - 1)
        total += sum(len(continuation) - 1 for continuation in groups[context])
        held = context
    return total


def _likelihood(log_probabilities: Tensor, continuation: Tokens) -> Likelihood:
    """Of the continuation, from the log-probabilities [len(continuation), vocab] of what follows before each token."""
    targets = torch.tensor(continuation, device=log_probabilities.device)
    chosen = log_probabilities.gather(1, targets.unsqueeze(1))
    return float(chosen.sum()), bool((log_probabilities.argmax(-1) == targets).all())
