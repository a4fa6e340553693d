"""Scoring on the CUDA decoder: rows, slots and pages of its steps, on a stand-in for the decoder and without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from trirun_kernels.decoder import reference as decoder_reference

from tests.kernels.decoder.models import VOCAB, random_model
from trirun_cli.backends.cuda import runner as cuda_runner
from trirun_cli.backends.cuda.opening import scoring_cache
from trirun_cli.engine.scoring import ScoringModel
from trirun_cli.errors import OutOfMemoryError


class PagedReference:
    """Keeps tokens where the decoder would keep keys, and computes logits with its reference."""

    def __init__(self, weights, *, slots, context, pages):
        self.model = SimpleNamespace(device=torch.device("cpu"), shape=weights.shape)
        self.slots, self.context, self.pages = slots, context, pages
        self.block_tables = torch.zeros(slots, -(-context // 64), dtype=torch.int32)
        self.windowed_pages = None
        self.latest = torch.zeros(slots, dtype=torch.int32)
        self.held = torch.full((pages, 64), -1)
        self.steps = []
        self.weights = weights

    def forward(self, inputs, segments, wanted):
        rows = list(zip(*(part.tolist() for part in (inputs.tokens, inputs.slots, inputs.positions)), strict=True))
        self.steps.append(len(rows))
        # Single tokens of different slots first, then the segments, one after another.
        ends = [segment.first + segment.count for segment in segments]
        starts = [segment.first for segment in segments] + [len(rows)]
        single = [slot for _, slot, _ in rows[: starts[0]]]
        assert len(set(single)) == len(single) and ends == starts[1:]
        for segment in segments:
            part = rows[segment.first : segment.first + segment.count]
            assert [(slot, position) for _, slot, position in part] == [
                (segment.slot, segment.position + i) for i in range(segment.count)
            ]
        for token, slot, position in rows:
            self.held[self.block_tables[slot, position // 64], position % 64] = token
        logits = []
        for row in wanted.tolist():
            _, slot, position = rows[row]
            text = self.held[self.block_tables[slot].long()].flatten()[: position + 1]
            assert (text >= 0).all()
            logits.append(decoder_reference.forward(self.weights, text)[-1])
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)


def scoring_model(monkeypatch, pages):
    monkeypatch.setattr(cuda_runner, "runner_name", lambda decoder: "a reference")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    decoder = PagedReference(random_model(layers=1), slots=65, context=192, pages=pages)
    return ScoringModel(cuda_runner.CudaRunner(decoder, max_rows=80))


@pytest.fixture
def lm(monkeypatch):
    return scoring_model(monkeypatch, scoring_cache(1000, 192)[1])


def texts(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def decoder_of(lm):
    return lm.runner._decoder


def expected(lm, text):
    return decoder_reference.forward(decoder_of(lm).weights, text)


def test_sequences_of_a_batch(lm):
    """Many in a step, a single token among them, and one that takes three steps."""
    sequences, keep = texts(30, 1, 40, 1, 70, 185, 3), [2, 1, 40, 1, 1, 110, 3]
    found = lm.forward_batch(sequences, keep)
    assert decoder_of(lm).steps == [72, 70, 80, 80, 25, 3]
    for text, count, logits in zip(sequences, keep, found, strict=True):
        assert torch.allclose(logits, expected(lm, text)[-count:], atol=1e-5)


def test_the_sequence_of_forward_is_apart_from_those_of_a_batch(lm):
    (text,) = texts(150)
    first = lm.forward(text[:70], last_only=False)
    lm.forward_batch(texts(64, 64, 9), [1, 1, 1])
    rest = lm.forward(text[70:], last_only=False)
    assert torch.allclose(torch.cat((first, rest)), expected(lm, text), atol=1e-5)
    lm.rewind(149)
    assert torch.allclose(lm.forward(text[149:]), rest[-1:], atol=1e-5)
    lm.reset()
    assert torch.allclose(lm.forward(text[:5]), expected(lm, text[:5])[-1:], atol=1e-5)


def test_few_pages_make_smaller_batches(monkeypatch):
    lm = scoring_model(monkeypatch, pages=6)
    sequences = texts(40, 20, 20, 150, 5)
    lm.forward(sequences[0])
    found = lm.forward_batch(sequences, [1] * 5)
    assert decoder_of(lm).steps == [40, 60, 20, 80, 70, 5]
    for text, logits in zip(sequences, found, strict=True):
        assert torch.allclose(logits, expected(lm, text)[-1:], atol=1e-5)


@pytest.mark.parametrize("longest", [1024, 2048, 8192, 131072])
def test_the_cache_of_a_runner_that_scores(longest):
    context, pages = scoring_cache(10**6, longest)
    assert context == longest and pages > 2 * -(-longest // 64)
    # With a page less, it is shorter sequences; with too few of them, nothing.
    context, fewer = scoring_cache(pages - 1, longest)
    assert context < longest and fewer < pages
    with pytest.raises(OutOfMemoryError, match="no room to score"):
        scoring_cache(150, longest)
