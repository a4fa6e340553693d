"""Scoring on the CUDA decoder: rows, slots and pages of its steps, on a stand-in for the decoder and without a GPU."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from trirun_kernels.decoder import reference as decoder_reference

from tests.kernels.decoder.models import VOCAB, random_model
from trirun_cli.backends.cuda import model as cuda_lm
from trirun_cli.backends.transformers.model import BatchLM


class PagedTwin:
    """Keeps tokens where the decoder would keep keys, and computes logits with its twin."""

    def __init__(self, model, *, slots, context, pages, kv_dtype):
        self.block_tables = torch.zeros(slots, -(-context // 64), dtype=torch.int32)
        self.pages = torch.full((pages, 64), -1)
        self.steps = []
        self._weights = model.weights

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
            self.pages[self.block_tables[slot, position // 64], position % 64] = token
        logits = []
        for row in wanted.tolist():
            _, slot, position = rows[row]
            text = self.pages[self.block_tables[slot].long()].flatten()[: position + 1]
            assert (text >= 0).all()
            logits.append(decoder_reference.forward(self._weights, text)[-1])
        return torch.stack(logits) if logits else torch.empty(0, VOCAB)


@pytest.fixture
def lm(monkeypatch):
    monkeypatch.setattr(cuda_lm, "CudaDecoder", PagedTwin)
    monkeypatch.setattr(cuda_lm, "engine_name", lambda decoder: "lean decoder on a twin")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_lm, "MAX_ROWS", 80)
    weights = random_model(layers=1)
    model = SimpleNamespace(device=torch.device("cpu"), shape=weights.shape, weights=weights)
    return cuda_lm.CudaLM(model, positions=192)


def texts(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]


def expected(lm, text):
    return decoder_reference.forward(lm._decoder._weights, text)


def test_sequences_of_a_batch(lm):
    """Many in a step, a single token among them, and one that takes three steps."""
    assert isinstance(lm, BatchLM)
    sequences, keep = texts(30, 1, 40, 1, 70, 185, 3), [2, 1, 40, 1, 1, 110, 3]
    found = lm.forward_batch(sequences, keep)
    assert lm._decoder.steps == [72, 70, 80, 80, 25, 3]
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
