"""What follows the last block of a model, and how the quantized model's predictions compare with the original's.

The original's predictions come from its hidden states after the last block, which the walk over the blocks carries
anyway: the original's blocks are not run again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import QuantizationError
from ..model.activations import STYLES, Batch, answer
from ..model.loader import Skeleton
from ..run import distributed as ranks
from ..run.report import Predictions


class Head:
    """What follows the last block, as the model's own class computes it, in float32.

    Args:
        skeleton: its head is filled in here; its embeddings must be.

    Raises:
        QuantizationError: the model has no output head.
    """

    def __init__(self, skeleton: Skeleton, device: torch.device) -> None:
        self._module = skeleton.model.get_output_embeddings()
        self._empty = {} if self._module is None else dict(self._module._parameters)
        skeleton.load_head(device)
        self.skeleton = skeleton
        self.style: int | None = None  # how its class takes a block's output; known once logits were computed

    def unload(self) -> None:
        """The head without weights again, as it was before."""
        self._module._parameters.update(self._empty)

    def logits(self, batch: Batch, states: Tensor) -> Tensor:
        """Logits [b, t, vocabulary], float32, from hidden states after the last block, [b, t, h].

        Raises:
            QuantizationError: the model's class does not take the blocks' output as a tensor or a tuple.
        """
        failure: Exception | None = None
        # A single sequence may be taken in more ways than several: what took one is only tried first.
        for style in sorted(STYLES, key=lambda style: style != self.style):
            try:
                with _answering(self.skeleton.blocks, batch.place.fetch(states), style):
                    logits = predict(self.skeleton, batch.tokens.to(batch.place.device))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                # A class that takes the first entry of a tuple takes the first sequence of a tensor, and fails later
                # on in a way of its own. Most classes take a tensor: what became of one says most.
                failure = failure or error
                continue
            if logits.shape[:2] == batch.tokens.shape:
                self.style = style
                return logits
        kind = type(self.skeleton.model).__name__
        reason = f" ({type(failure).__name__}: {failure})" if failure else ""
        raise QuantizationError(f"{kind}: its head does not take hidden states [batch, length, features]{reason}")


def predict(skeleton: Skeleton, tokens: Tensor) -> Tensor:
    """The model's logits [b, t, vocabulary] in float32 for tokens int64 [b, t]; the head's product is exact."""
    head = skeleton.model.get_output_embeddings()
    plain = head.forward

    def exact(states: Tensor) -> Tensor:
        with torch.autocast(states.device.type, enabled=False):
            return plain(states.float())

    head.forward = exact
    try:
        return skeleton.model(input_ids=tokens, use_cache=False).logits.float()
    finally:
        del head.forward


def compare(head: Head, batches: list[Batch], student: Callable[[Batch], Tensor] | None = None) -> Predictions:
    """Both models on batches whose hidden states are those after the last block.

    Args:
        batches: of this process; the sums go over all processes.
        student: logits [b, t, vocabulary] of a batch; None takes the quantized stream.

    Returns:
        Perplexity of both on the next tokens, and KL(original ‖ quantized) in nats per token.
    """
    loss = original_loss = divergence = 0.0
    tokens = positions = 0
    with torch.no_grad():
        for batch in batches:
            teacher = head.logits(batch, batch.original).log_softmax(-1)
            ours = (head.logits(batch, batch.quantized) if student is None else student(batch)).log_softmax(-1)
            wanted = batch.tokens[:, 1:].to(teacher.device).flatten()
            loss += float(F.nll_loss(ours[:, :-1].flatten(0, 1), wanted, reduction="sum"))
            original_loss += float(F.nll_loss(teacher[:, :-1].flatten(0, 1), wanted, reduction="sum"))
            divergence += float(F.kl_div(ours, teacher, reduction="sum", log_target=True))
            tokens, positions = tokens + wanted.numel(), positions + batch.tokens.numel()
    mine, original, apart, predicted, seen = ranks.total_of(loss, original_loss, divergence, tokens, positions)
    perplexity, original_perplexity = (torch.tensor(total / predicted).exp().item() for total in (mine, original))
    return Predictions(perplexity, original_perplexity, apart / seen, int(predicted))


@contextmanager
def _answering(blocks: nn.ModuleList, states: Tensor, style: int) -> Iterator[None]:
    """Every block answers with these hidden states."""
    given = answer(states, style)
    with replaced_forwards(blocks, [lambda *args, **kwargs: given] * len(blocks)):
        yield


@contextmanager
def replaced_forwards(blocks: Iterable[nn.Module], forwards: list[Callable[..., Any]]) -> Iterator[None]:
    """Every block computes what ``forwards`` says instead of its own."""
    blocks = list(blocks)
    before = [block.__dict__.get("forward") for block in blocks]
    try:
        for block, forward in zip(blocks, forwards, strict=True):
            block.forward = forward
        yield
    finally:
        for block, earlier in zip(blocks, before, strict=True):
            block.__dict__.pop("forward", None)
            if earlier is not None:
                block.forward = earlier
