"""The walk over a model's blocks: what a block leaves for the next, and what is tried again when a GPU is too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ..block.cuda_graph import CannotRecord, recordable
from ..block.optim import step_batches
from ..block.walk import BlockResult, BlockRun
from ..model.activations import Batch, halve
from ..model.loader import Skeleton
from ..recipe import Recipe
from . import distributed as ranks
from .profile import Costs
from .progress import ProgressCallback, Warned
from .resume import RunState

T = TypeVar("T")


class Walk:
    """The blocks in turn; activations move on with each, and into smaller batches when memory runs out."""

    def __init__(
        self,
        skeleton: Skeleton,
        train: list[Batch],
        held_out: list[Batch],
        recipe: Recipe,
        progress: ProgressCallback,
        state: RunState | None,
        costs: Costs,
    ) -> None:
        self.skeleton, self.train, self.held_out = skeleton, train, held_out
        self.recipe, self.progress, self.state, self.costs = recipe, progress, state, costs
        self.record = True

    @property
    def records(self) -> bool:
        """Whether training steps are recorded as CUDA graphs, as far as it depends on the text."""
        order = step_batches(self.train, len(self.train), self.recipe.seed)
        return self.record and recordable(self.train, order, [])

    def block(self, index: int) -> BlockResult:
        """One block quantized, or taken from the state of a run that was stopped."""
        finished = self.state.load(index) if self.state is not None else None

        def attempt() -> BlockResult:
            batches = self.train, self.held_out
            run = BlockRun(self.skeleton, index, *batches, self.recipe, self.progress, self.costs, self.record)
            if finished is None:
                return run.run()
            run.restore(finished.quantized)
            return finished

        result = self.retrying(attempt)
        if finished is not None:
            for module in finished.modules:
                self.progress(module)
        elif self.state is not None and ranks.rank() == 0:
            with self.costs.stage("write"):
                self.state.save(index, result)
        return result

    def retrying(self, attempt: Callable[[], T]) -> T:
        """The attempt's result; when a GPU runs out of memory, once more with batches half as large; when a training
        step cannot be recorded as a CUDA graph, once more without.

        An attempt changes the batches' activations at its very end or not at all.
        """
        while True:
            # What one block leaves in the allocator's cache is cut to other sizes than the next one's first layers ask
            # for. So each begins with what the preflight began with, and a card that two programs share is shared.
            torch.cuda.empty_cache()
            try:
                return attempt()
            except CannotRecord as error:
                self.record = False
                self.progress(Warned(f"training steps are launched kernel by kernel, more slowly: {error}"))
                continue
            except torch.OutOfMemoryError:
                sequences = max(len(batch.tokens) for batch in [*self.train, *self.held_out])
                # Several processes could not agree on a retry that only one of them needs.
                if sequences == 1 or ranks.world() > 1:
                    raise
            # Outside the handler, whose traceback keeps the failed attempt's tensors alive.
            self.progress(Warned(f"out of GPU memory with {sequences} sequences at a time; again with half as many"))
            self.train[:] = halve(self.skeleton, self.train)
            self.held_out[:] = halve(self.skeleton, self.held_out)
