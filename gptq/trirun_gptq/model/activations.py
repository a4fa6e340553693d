"""What flows between the blocks: captured once before the first, then carried from block to block."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import QuantizationError
from .loader import Skeleton

BATCH_TOKENS = 4096


class EnoughSeen(Exception):
    """Everything needed has been seen; the rest of a forward pass would be wasted."""


class _WrongStyle(Exception):
    """A model took a block's stand-in output apart differently than expected."""


# What blocks return, by the number of entries in the tuple; 0 is the hidden states themselves.
STYLES = (0, 1, 2)


def answer(states: Tensor, style: int) -> Any:
    """Hidden states as a block of one of the :data:`STYLES` returns them; nothing stands for attention weights."""
    return (states, *[None] * (style - 1)) if style else states


@dataclass(frozen=True, slots=True)
class Placement:
    """Where activations are computed, and where and how precisely they wait between blocks.

    Attributes:
        device: of the computation. store: of the waiting; the same device, or the CPU.
        dtype: of the waiting, float32 or bfloat16.
    """

    device: torch.device
    store: torch.device
    dtype: torch.dtype = torch.float32

    def keep(self, states: Tensor) -> Tensor:
        """Hidden states as they wait."""
        if self.store.type == "cpu" and self.device.type == "cuda":
            # Pinned memory comes back at the full speed of the bus.
            waiting = torch.empty(states.shape, dtype=self.dtype, pin_memory=True)
            return waiting.copy_(states)
        return states.to(self.store, self.dtype)

    def fetch(self, states: Tensor) -> Tensor:
        """Hidden states for the computation, float32."""
        return states.to(self.device, torch.float32, non_blocking=True)


@dataclass(slots=True)
class Batch:
    """Sequences of one length that travel together.

    Attributes:
        place: where its hidden states wait.
        first: index of the first sequence in the calibration list, for messages.
        tokens: int64 [b, t].
        calls: for every block, the positional (after hidden_states) and keyword arguments the model passes it.
        original, quantized: [b, t, h], hidden states before the current block in the original model and in the
            quantized one, as ``place`` keeps them. The same tensor until the first quantized block.
        shared: mappings that blocks are called with and write to for later ones (Gemma 4: keys and values), by their
            keyword and by whether they are of the original model.
    """

    place: Placement
    first: int
    tokens: Tensor
    calls: list[tuple[tuple, dict[str, Any]]]
    original: Tensor
    quantized: Tensor
    shared: dict[tuple[str, bool], MutableMapping] = field(default_factory=dict)


def make_batches(sequences: list[Tensor], first: int = 0) -> list[tuple[int, Tensor]]:
    """Neighbouring sequences of equal length stacked to about 4096 tokens: (index of the first, [b, t]).

    Sequences of natural length mostly travel alone: padding them would put padding into the statistics.
    """
    batches: list[tuple[int, Tensor]] = []
    for length, run in itertools.groupby(sequences, len):
        alike = torch.stack(list(run))
        # Nearly of one size: a small one at the end would share a training step, which could not be recorded then.
        for part in alike.tensor_split(math.ceil(len(alike) / max(BATCH_TOKENS // length, 1))):
            batches.append((first, part))
            first += len(part)
    return batches


def capture(
    skeleton: Skeleton, batches: list[tuple[int, Tensor]], place: Placement, step: Callable[[], None]
) -> list[Batch]:
    """Run the model up to its blocks and record what each block would be called with.

    The blocks are replaced by stand-ins that return their input, so embeddings, rotary tables and per-layer masks come
    from the model's own forward. Whether a block returns a tensor or a tuple differs between models; all are tried.
    """
    captured: list[Batch] = []
    for first, tokens in batches:
        hidden, calls = _record(skeleton, tokens.to(place.device))
        if not bool(torch.isfinite(hidden).all()):
            raise QuantizationError(f"the embeddings of calibration sample {first} and following are not finite")
        # Rotary tables and masks are equal for batches of one shape; one copy of them is enough.
        for earlier in captured:
            if earlier.tokens.shape == tokens.shape and _same(earlier.calls, calls):
                calls = earlier.calls
                break
        hidden = place.keep(hidden)
        captured.append(Batch(place, first, tokens, calls, hidden, hidden))
        step()
    return captured


def halve(skeleton: Skeleton, batches: list[Batch]) -> list[Batch]:
    """The same sequences in batches half as large; what they are called with is recorded anew."""
    halves: list[Batch] = []
    for batch in batches:
        size = -(-len(batch.tokens) // 2)
        for start in range(0, len(batch.tokens), size):
            part = slice(start, start + size)
            calls = _record(skeleton, batch.tokens[part].to(batch.place.device))[1]
            if halves and halves[-1].tokens.shape == batch.tokens[part].shape and _same(halves[-1].calls, calls):
                calls = halves[-1].calls
            states = batch.original[part], batch.quantized[part]
            shared = {key: _part(value, part) for key, value in batch.shared.items()}
            halves.append(Batch(batch.place, batch.first + start, batch.tokens[part], calls, *states, shared))
    return halves


def _part(value: Any, part: slice) -> Any:
    """Some sequences of what blocks share."""
    if isinstance(value, MutableMapping):
        some = copy(value)
        some.update({key: _part(each, part) for key, each in value.items()})
        return some
    if isinstance(value, tuple):
        return tuple(_part(each, part) for each in value)
    return value[part] if isinstance(value, Tensor) else value


def _record(skeleton: Skeleton, tokens: Tensor) -> tuple[Tensor, list[tuple[tuple, dict[str, Any]]]]:
    blocks = skeleton.blocks
    failure: Exception | None = None
    for style in STYLES:
        calls: list[tuple[tuple, dict[str, Any]]] = []
        hidden: list[Tensor] = []

        def stand_in(
            *args: Any,
            style: int = style,
            calls: list[Any] = calls,
            hidden: list[Tensor] = hidden,
            **kwargs: Any,
        ) -> Any:
            states = args[0] if args else kwargs.pop("hidden_states", None)
            if not isinstance(states, Tensor) or states.shape[:2] != tokens.shape:
                raise _WrongStyle
            if not hidden:
                hidden.append(states)
            # By its name before transformers 5.24, and since.
            kwargs.pop("past_key_values", None)
            kwargs.pop("cache", None)
            calls.append((args[1:], kwargs))
            if len(calls) == len(blocks):
                raise EnoughSeen
            return answer(states, style)

        saved = [block.__dict__.get("forward") for block in blocks]
        try:
            for block in blocks:
                block.forward = stand_in
            with torch.no_grad():
                skeleton.model(input_ids=tokens, use_cache=False)
        except EnoughSeen:
            return hidden[0], calls
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            # A model that takes a tuple apart fails on another answer in a way of its own.
            failure = error if failure is None or isinstance(failure, _WrongStyle) else failure
            continue
        finally:
            for block, forward in zip(blocks, saved, strict=True):
                del block.forward
                if forward is not None:
                    block.forward = forward
        break
    reason = f": {type(failure).__name__}: {failure}" if failure and not isinstance(failure, _WrongStyle) else ""
    raise QuantizationError(
        f"{type(skeleton.model).__name__} does not call each of its {len(blocks)} decoder layers once with hidden "
        f"states [batch, length, features]{reason}"
    ) from failure


def shares(kwargs: dict[str, Any]) -> dict[str, MutableMapping]:
    """The arguments of a block in which blocks leave something for each other."""
    return {name: value for name, value in kwargs.items() if isinstance(value, MutableMapping)}


def run_block(block: nn.Module, index: int, batch: Batch, *, original: bool = False) -> Tensor:
    """The block's output [b, t, h] on the batch's hidden states of the quantized model, or of the original one, called
    as the model calls it."""
    args, kwargs = batch.calls[index]
    shared = {name: batch.shared.setdefault((name, original), copy(value)) for name, value in shares(kwargs).items()}
    out = block(batch.place.fetch(batch.original if original else batch.quantized), *args, **kwargs | shared)
    return out[0] if isinstance(out, tuple | list) else out


@contextmanager
def compute(device: torch.device, exact: bool = False) -> Iterator[None]:
    """Matrix products in bfloat16 (sums in float32) where the device has instructions for it; ``exact`` forbids it."""
    with nullcontext() if exact else torch.autocast(device.type, torch.bfloat16, enabled=has_bfloat16(device)):
        yield


def has_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32 ones on this device."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type == "cpu" and torch.cpu._is_avx512_bf16_supported()


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool(torch.equal(a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same, a, b))
    return a == b
