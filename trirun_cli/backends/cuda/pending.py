"""Steps on their way on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from trirun_kernels.decoder.cuda import CudaDecoder

from ...engine.runner import Outcome, Work, in_order, token_outcomes
from ...errors import TrirunError
from .sampler import Reading

HELD = (
    "another program held multiprocessors of the GPU for seconds, so that a step could not end; stop it, and run again"
)


@dataclass(slots=True)
class CudaPending:
    """A step on its way: the model runs, the sampler may still wait for masks.

    Attributes:
        sampler: launches it and begins to read; None where nothing is sampled or scored.
        places, prompts: in which order its works come, as indices of sampled tokens, and as the first of the scores
            and their number; None where the tokens are what its works want, in their order.
    """

    decoder: CudaDecoder
    sampler: Callable[[], Reading] | None
    places: Sequence[int | None] | None = None
    prompts: Sequence[tuple[int, int]] = ()
    reading: Reading | None = None

    def sample(self) -> None:
        """Launch the sampler, where it is not yet; with the model's device as the current one, in inference mode."""
        if self.sampler is not None:
            self.reading, self.sampler = self.sampler(), None

    def collect(self) -> list[Outcome]:
        """See :class:`~.engine.runner.Pending`.

        Raises:
            TrirunError: the kernel of a whole step gave up.
        """
        if self.sampler is not None:
            with torch.cuda.device(self.decoder.model.device), torch.inference_mode():
                self.sample()
        tokens, scores = ([], []) if self.reading is None else self.reading.wait()
        if any(token.id < 0 for token in tokens) and self.decoder.gave_up:
            raise TrirunError(HELD)
        if self.places is None:
            return token_outcomes(tokens)
        return [
            Outcome(None if place is None else tokens[place], tuple(scores[first : first + count]))
            for place, (first, count) in zip(self.places, self.prompts, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class CudaPooled:
    """A step of which some works want hidden states.

    Attributes:
        work: all of them. states: float32 [rows, hidden] of each that wants them, on the device. rest: of the others.
    """

    work: Sequence[Work]
    states: Sequence[Tensor]
    rest: CudaPending | None

    def collect(self) -> list[Outcome]:
        """See :class:`~.engine.runner.Pending`."""
        others = () if self.rest is None else self.rest.collect()
        return in_order(self.work, [states.cpu().numpy() for states in self.states], others)
