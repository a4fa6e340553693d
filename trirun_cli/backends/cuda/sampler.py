"""Sampling on the GPU for a runner's slots, and what of it travels back to the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from trirun_kernels.decoder import cuda_ops as ops
from trirun_kernels.decoder.cuda_structs import SamplerStruct

from ...engine.constraint import Constraint, mask_filler, mask_words
from ...engine.request import Request
from ...engine.sampling import Token, plain_tokens, stream_of
from .mask_thread import MaskThread

# Places in the host's memory for what comes and goes, by turn: more than the steps that can be on their way at once.
RING = 4
# Masks that are worth another thread.
FEWEST_THREADED = 16

# By slot, the place of its token, and what takes it.
_Takers = dict[int, tuple[int, Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Reading:
    """Results on their way to the host's memory; complete once ``done`` is reached.

    Attributes:
        alternatives: of every row, how many likeliest tokens it wants beside its own log-probability, None where not
            even that; None where no row does.
        results: int32 [2, any], the sampled tokens and the bits of their log-probabilities; ``count`` of each.
        top_ids, top_logprobs: [m, n], the likeliest tokens, or None where no slot wants them.
        scores: float32 [t], log-probabilities of the targets; with score_ids and score_logprobs [t, n] likewise.
    """

    done: torch.cuda.Event
    alternatives: Sequence[int | None] | None
    results: Tensor
    count: int
    top: tuple[Tensor, Tensor] | None
    targets: Sequence[int]
    target_alternatives: Sequence[int]
    scores: tuple[Tensor, Tensor, Tensor] | None

    def wait(self) -> tuple[list[Token], list[Token]]:
        """The sampled tokens, and the targets with their log-probabilities."""
        self.done.synchronize()
        sampled = self.results[0, : self.count].tolist()
        if self.alternatives is None:
            tokens = plain_tokens(sampled)
        else:
            logprobs = self.results[1, : self.count].view(torch.float32).tolist()
            tokens = [
                Token(id) if count is None else Token(id, logprob, _first(self.top, row, count))
                for row, (id, logprob, count) in enumerate(zip(sampled, logprobs, self.alternatives, strict=True))
            ]
        if self.scores is None:
            return tokens, []
        values, *top = self.scores
        scores = [
            Token(target, value, _first(tuple(top), row, count))
            for row, (target, value, count) in enumerate(
                zip(self.targets, values.tolist(), self.target_alternatives, strict=True)
            )
        ]
        return tokens, scores


class CudaSampler:
    """Sampling state of the slots on the device of ``latest``, in tensors that never move.

    Args:
        slots: their number. vocab: size of the vocabulary. latest: int32 [slots], the decoder's.
    """

    def __init__(self, slots: int, vocab: int, latest: Tensor) -> None:
        def make(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=latest.device)

        rows = max(slots, 64)
        self._vocab = vocab
        # Masks and results are in the host's memory, where the kernel reads and writes its rows: no copies to launch.
        self._masks = torch.zeros(slots, mask_words(vocab), dtype=torch.int32).pin_memory()
        self._counts = make(slots, vocab, dtype=torch.int32)
        self._state = ops.SamplingState(
            make(slots, ops.SAMPLER_BYTES, dtype=torch.uint8), latest, self._counts,
            make(slots, vocab, dtype=torch.int32), make(slots, vocab, dtype=torch.float32),
            make(rows, vocab, dtype=torch.float32), self._masks,
        )  # fmt: skip
        # Until one is bound, a slot's likeliest token is chosen.
        self._state.samplers[:] = _bytes_of(SamplerStruct(top_p=1, repetition=1)).to(latest.device)
        self._device = latest.device
        # By turn: tokens, and the bits of their log-probabilities.
        self._results = [torch.zeros(2, rows, dtype=torch.int32).pin_memory() for _ in range(RING)]
        self._done: dict[int, torch.cuda.Event] = {}  # by turn, made when first used
        self._alternatives: dict[int, int] = {}  # of slots that want log-probabilities
        self._prompt_alternatives = [0] * slots
        self._constraints: dict[int, Constraint] = {}
        # Tokens on their way for slots with a constraint: when they are there, which they are, and who takes them.
        self._unread: list[tuple[torch.cuda.Event, Tensor, _Takers]] = []
        self._mask_thread = MaskThread()
        # Of the slots of a step, for as long as they have the same constraints, since most steps are of the same ones:
        # what fills their masks, if some have any, and who takes the tokens.
        self._filler: tuple[Sequence[int], int, Callable[[], None]] | None = None
        self._takers: tuple[Sequence[int], _Takers] | None = None

    def bind(self, slot: int, request: Request, generated: Sequence[int] = ()) -> None:
        """Begin a slot's request, after the tokens that it has generated already."""
        device, params, prompt = self._device, request.params, request.prompt
        for *_, takers in self._unread:
            takers.pop(slot, None)
        self._filler = self._takers = None
        self._constraints.pop(slot, None)
        if (constraint := request.constrained(generated)) is not None:
            self._constraints[slot] = constraint
        self._alternatives.pop(slot, None)
        if params.logprobs is not None:
            self._alternatives[slot] = params.logprobs
        self._prompt_alternatives[slot] = params.prompt_logprobs or 0
        struct = SamplerStruct(
            params.temperature, params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty,
            params.repetition_penalty, min(params.top_k, 2**31 - 1), len(params.logit_bias), stream_of(params.seed),
            len(generated), params.logprobs is not None, constraint is not None,
        )  # fmt: skip
        self._state.samplers[slot].copy_(_bytes_of(struct))
        if params.penalizes:
            counts = np.bincount(np.asarray(generated, np.int64), minlength=self._vocab).astype(np.int32)
            counts[np.asarray(prompt, np.int64)] |= np.int32(ops.PROMPT_TOKEN)
            self._counts[slot].copy_(torch.from_numpy(counts))
        if params.logit_bias:
            count = len(params.logit_bias)
            tokens, values = torch.tensor(list(params.logit_bias)), torch.tensor(list(params.logit_bias.values()))
            self._state.bias_tokens[slot, :count].copy_(tokens.to(device, torch.int32))
            self._state.bias_values[slot, :count].copy_(values.to(device, torch.float32))

    def ask(self, slots: Sequence[int]) -> bool:
        """Have masks made for :meth:`sample`, for those of these slots whose texts follow a grammar. To be called after
        the step's other kernels are launched: they run while this waits for the tokens of the step before.

        Returns:
            whether they are still being made, on a thread: then something else can be done before :meth:`constrain`.
        """
        if not self._constraints:
            self._take()
            return False
        if self._filler is None or self._filler[0] != slots:
            asked = [slot for slot in slots if slot in self._constraints]
            texts, masks = [self._constraints[slot] for slot in asked], self._masks.numpy().view(np.uint32)
            self._filler = slots, len(asked), mask_filler(texts, masks, asked)
        _, count, fill = self._filler
        if threaded := count >= FEWEST_THREADED:
            self._mask_thread.begin(self._take, fill)
        else:
            self._take()
            fill()
        return threaded

    def _take(self) -> None:
        """Wait for the tokens of the step before and take them in. Nobody reads that step's masks any more then."""
        for done, tokens, takers in self._unread:
            # A thread that has no device yet would begin to use the first.
            with torch.cuda.device(self._device):
                done.synchronize()
            ids = tokens.tolist()
            for place, advance in takers.values():
                # A text without a next token has ended with an error.
                if (id := ids[place]) >= 0:
                    advance(id)
        self._unread.clear()

    def constrain(self) -> None:
        """Wait for the masks that were asked for last: to be called before :meth:`sample`."""
        self._mask_thread.end()

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor | None = None,
        tokens: Tensor | None = None,
        turn: int = 0,
    ) -> None:
        """The next token of every row: logits [m, vocab], slots int32 [m]; positions and tokens go on, see
        :func:`trirun_kernels.decoder.cuda_ops.sample`. ``turn`` as of :meth:`read`."""
        sampled, logprobs = self._results[turn][:, : slots.shape[0]]
        ops.sample(
            logits, slots, self._state, sampled, logprobs=logprobs.view(torch.float32), positions=positions,
            tokens=tokens,
        )  # fmt: skip

    def read(self, logits: Tensor, slots: Sequence[int], turn: int, targets: Sequence[tuple[int, int]] = ()) -> Reading:
        """Start bringing back what was sampled for these slots.

        Args:
            logits: [m + t, vocab], of the m slots' rows, then of the targets'.
            turn: which results, below RING; a turn comes again when its reading is over.
            targets: (slot, token id) whose log-probabilities are wanted.
        """
        count, results = len(slots), self._results[turn]
        alternatives = top = scores = None
        if self._alternatives and not self._alternatives.keys().isdisjoint(slots):
            alternatives = [self._alternatives.get(slot) for slot in slots]
            if most := max(n or 0 for n in alternatives):
                top = _likeliest(logits[:count], most)
        ids = [token for _, token in targets]
        counts = [self._prompt_alternatives[slot] for slot, _ in targets]
        if targets:
            logprobs = logits[count : count + len(targets)].float().log_softmax(-1)
            chosen = torch.tensor(ids).to(logits.device).unsqueeze(1)
            values = logprobs.gather(1, chosen).squeeze(1).to("cpu", non_blocking=True)
            scores = values, *_likeliest(logprobs, max(max(counts), 1))
        if (done := self._done.get(turn)) is None:
            done = self._done[turn] = torch.cuda.Event()
        done.record()
        if self._constraints:
            if self._takers is None or self._takers[0] != slots:
                texts = [(slot, i, self._constraints.get(slot)) for i, slot in enumerate(slots)]
                self._takers = slots, {slot: (i, text.advance) for slot, i, text in texts if text is not None}
            if takers := self._takers[1]:
                self._unread.append((done, results[0], takers))
        return Reading(done, alternatives, results, count, top, ids, counts, scores)


def _bytes_of(struct: SamplerStruct) -> Tensor:
    return torch.frombuffer(bytearray(bytes(struct)), dtype=torch.uint8)


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities [m, count] of the likeliest tokens, on their way to the host."""
    values, ids = logits.float().log_softmax(-1).topk(min(count, logits.shape[-1]))
    return ids.to("cpu", non_blocking=True), values.to("cpu", non_blocking=True)


def _first(top: tuple[Tensor, ...] | None, row: int, count: int) -> tuple[tuple[int, float], ...]:
    if top is None or not count:
        return ()
    return tuple(zip(top[0][row, :count].tolist(), top[1][row, :count].tolist(), strict=True))
