"""Logits of given texts from a runner: one sequence that grows and goes back, and whole sequences beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .runner import Runner

if TYPE_CHECKING:
    from torch import Tensor


class ScoringModel:
    """A runner as evaluations use it. Its sequence takes a slot of the runner's cache, which it shares with an engine.

    Args:
        runner: of at least one slot; two, where it also runs batches or an engine's requests meanwhile.

    Attributes:
        runner: the same. name: what runs it, for people.
        vocab_size: token ids are below it. max_positions: most tokens of a sequence.
        can_rewind: whether :meth:`rewind` works beyond forgetting everything.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner, self.name = runner, runner.name
        self.vocab_size, self.max_positions = runner.vocab_size, runner.context
        self.can_rewind = runner.can_rewind
        self._slot: int | None = None
        self._length = 0

    def reset(self) -> None:
        """Forget the sequence."""
        if self._slot is not None:
            self.runner.cache.release(self._slot, ())
        self._slot, self._length = None, 0

    def rewind(self, length: int) -> None:
        """Forget all but the first ``length`` tokens of the sequence, which has at least that many."""
        self._length = length

    def forward(self, tokens: Tensor, *, last_only: bool = True) -> Tensor:
        """Append tokens (int64 [m]) to the sequence.

        Returns:
            float32 logits [1, vocab] after the last of them, or [m, vocab] after each when not ``last_only``.

        Raises:
            ValueError: they do not fit the context.
        """
        cache, ids, end = self.runner.cache, tokens.tolist(), self._length + len(tokens)
        if end > self.max_positions:
            raise ValueError(f"{end} tokens; the context is {self.max_positions}")
        if self._slot is None:
            admission = cache.admit(ids, reuse=False)
            self._slot = None if admission is None else admission.slot
        if self._slot is None or not cache.grow(self._slot, end):
            raise RuntimeError(f"{self.name}: the cache has no room for a sequence of {end} tokens")
        logits = self.runner.logits(self._slot, self._length, ids, 1 if last_only else len(ids))
        self._length = end
        return logits

    def forward_batch(self, sequences: Sequence[Tensor], keep: Sequence[int]) -> list[Tensor]:
        """Run sequences (int64 [m_i], of any lengths) apart from the one that :meth:`forward` appends to.

        Returns:
            for each, float32 logits [keep_i, vocab] after its last ``keep_i`` tokens.
        """
        return self.runner.batch_logits([tokens.tolist() for tokens in sequences], keep)
