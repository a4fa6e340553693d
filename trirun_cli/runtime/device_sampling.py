"""Sampling in torch for a whole batch at once: no value is read back, so it runs behind the model in the same stream,
or in the same CUDA graph.

The functions and the sampler do what :mod:`.host_sampling` does a row at a time, from the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sampling import SamplingParams, stream_of

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST, _SECOND = 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64


class DeviceSampler:
    """Sampling state of a runner's slots, in tensors that never move.

    Args:
        slots: their number. vocab: size of the vocabulary. device: where logits are.
    """

    def __init__(self, slots: int, vocab: int, device: torch.device | str) -> None:
        def per_slot(dtype: torch.dtype) -> Tensor:
            return torch.zeros(slots, dtype=dtype, device=device)

        self.vocab = vocab
        self.temperature, self.top_p, self.min_p = (per_slot(torch.float32) for _ in range(3))
        self.presence, self.frequency, self.repetition = (per_slot(torch.float32) for _ in range(3))
        self.top_k, self.stream, self.index = (per_slot(torch.int64) for _ in range(3))
        self.counts = torch.zeros(slots, vocab, dtype=torch.int32, device=device)
        self.prompted = torch.zeros(slots, vocab, dtype=torch.bool, device=device)
        self.bias = torch.zeros(slots, vocab, dtype=torch.float32, device=device)

    def bind(self, slot: int, params: SamplingParams, prompt: Sequence[int], generated: Sequence[int] = ()) -> None:
        """Begin a slot's request, after the tokens that it has generated already."""
        device = self.stream.device
        stream = stream_of(params.seed)
        for tensor, value in (
            (self.temperature, params.temperature),
            (self.top_p, params.top_p),
            (self.min_p, params.min_p),
            (self.presence, params.presence_penalty),
            (self.frequency, params.frequency_penalty),
            (self.repetition, params.repetition_penalty),
            (self.top_k, params.top_k or self.vocab),
            (self.stream, stream - 2**64 if stream >= 2**63 else stream),
            (self.index, len(generated)),
        ):
            tensor[slot].fill_(value)
        if params.penalizes:
            counted = torch.bincount(torch.tensor(list(generated), dtype=torch.int64), minlength=self.vocab)
            self.counts[slot].copy_(counted)
            self.prompted[slot].zero_().index_fill_(0, torch.tensor(list(prompt), device=device), True)
        self.bias[slot].zero_()
        if params.logit_bias:
            at = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
            self.bias[slot].index_copy_(0, at, torch.tensor(list(params.logit_bias.values()), device=device))

    def sample(self, logits: Tensor, slots: Tensor, *, changed: bool = True, drawn: bool = True) -> Tensor:
        """The next token of each slot; its index and counts go on.

        Args:
            logits: float [r, vocab], a row per slot; not written. slots: int64 [r].
            changed: whether any row may have penalties or a bias. drawn: whether any may have a temperature; False
                leaves the work out.

        Returns:
            ids int64 [r].
        """
        logits = logits.float()
        if changed:
            logits = penalized(
                logits,
                self.counts[slots],
                self.prompted[slots],
                self.presence[slots],
                self.frequency[slots],
                self.repetition[slots],
            )
            logits = logits + self.bias[slots]
        ids = logits.argmax(-1)
        if drawn:
            temperature = self.temperature[slots]
            weights = token_weights(logits, temperature, self.top_k[slots], self.top_p[slots], self.min_p[slots])
            ids = torch.where(temperature > 0, draw(weights, uniform(self.stream[slots], self.index[slots])), ids)
        self.index[slots] += 1
        if changed:
            self.counts.index_put_((slots, ids), torch.ones_like(ids, dtype=torch.int32), accumulate=True)
        return ids


def penalized(
    logits: Tensor, counts: Tensor, prompted: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Logits [r, vocab] after penalties.

    Args:
        counts: [r, vocab], how often each token was generated. prompted: bool [r, vocab], which are in the prompt.
        presence, frequency, repetition: float [r], see :class:`~.sampling.SamplingParams`.
    """
    repetition = repetition.unsqueeze(-1)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(prompted | (counts > 0), repeated, logits)
    return logits - frequency.unsqueeze(-1) * counts - presence.unsqueeze(-1) * (counts > 0)


def token_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """What is sampled from: probabilities [r, vocab] up to a factor per row, 0 for tokens that are left out.

    Args:
        temperature, top_p, min_p: float [r]. top_k: int64 [r]; the size of the vocabulary keeps all. Rows of
            temperature 0 mean nothing.
    """
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    # Ties with the last one stay.
    kept = ordered >= ordered.gather(-1, top_k.clamp(1, logits.shape[-1]).unsqueeze(-1) - 1)
    temperature = torch.where(temperature > 0, temperature, 1).unsqueeze(-1)
    weights = torch.where(kept, ((ordered - ordered[:, :1]) / temperature).exp(), 0)
    mass = weights.double().cumsum(-1)
    # A token stays while the mass before it is below p, so that the first one always stays.
    kept = (mass - weights < top_p.unsqueeze(-1) * mass[:, -1:]) & (weights >= min_p.unsqueeze(-1) * weights[:, :1])
    return torch.zeros_like(weights).scatter_(-1, order, torch.where(kept, weights, 0))


def draw(weights: Tensor, numbers: Tensor) -> Tensor:
    """Token ids int64 [r] where the cumulative weights [r, vocab] reach numbers in [0, 1), float64 [r]."""
    mass = weights.double().cumsum(-1)
    ids = torch.searchsorted(mass, numbers.unsqueeze(-1) * mass[:, -1:], right=True)
    return ids.squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def uniform(stream: Tensor, index: Tensor) -> Tensor:
    """:func:`.sampling.uniform` of streams and indices int64 [r]; float64 [r]."""
    return _shifted(_mix(stream + (index + 1) * _GOLDEN), 11).double() * 2.0**-53


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shifted(z, 30)) * _FIRST
    z = (z ^ _shifted(z, 27)) * _SECOND
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """z >> bits with zeros from the left: torch has no unsigned shift."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
