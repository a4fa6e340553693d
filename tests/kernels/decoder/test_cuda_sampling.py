"""Sampling on the GPU against its reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from trirun_kernels.decoder import cuda_ops as ops
from trirun_kernels.decoder import cuda_reference as cuda_decoder_reference

from tests.kernels.decoder.cuda_support import bind, error, gpu, sampling_state


def test_drawn_tokens_have_the_distribution():
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 3.0])
    allowed = cuda_decoder_reference.allowed_tokens(logits, 0.7, top_k=4, top_p=0.95)
    assert allowed.tolist() == [False, True, False, False, True]
    draws = [cuda_decoder_reference.drawn_token(logits, allowed, 0.7, 5, i)[0] for i in range(2000)]
    expected = (logits / 0.7).exp()[[1, 4]]
    assert abs(draws.count(4) / 2000 - (expected[1] / expected.sum()).item()) < 0.02


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [203, 32000])
def test_greedy_tokens_and_what_they_advance(vocab, dtype):
    logits = torch.randn(5, vocab, device="cuda").to(dtype)
    logits[4, 7] = logits[4, 150] = 50
    state = sampling_state(6, vocab, 5)
    slots = torch.tensor([3, 0, -1, 5, 1], device="cuda", dtype=torch.int32)
    for slot in range(6):
        bind(state, slot, wants_logprobs=1)
    sampled = torch.full((5,), -7, device="cuda", dtype=torch.int32)
    positions, tokens = torch.arange(10, 15, device="cuda").int(), torch.full((5,), 99, device="cuda").int()
    wanted = torch.tensor([1, 1, 1, 0, 1], device="cuda", dtype=torch.int32)
    logprobs = torch.zeros(5, device="cuda")
    ops.sample(logits, slots, state, sampled, logprobs=logprobs, wanted=wanted, positions=positions, tokens=tokens)
    best = logits.float().argmax(1).tolist()
    assert sampled.tolist() == [best[0], best[1], -7, -1, 7]
    assert positions.tolist() == [11, 12, 12, 13, 15] and tokens.tolist() == [-1, -1, 99, 99, -1]
    assert state.latest.tolist() == [best[1], 7, 0, best[0], 0, 0]
    expected = logits.float().log_softmax(1)
    for row in (0, 1, 4):
        assert abs(logprobs[row].item() - expected[row, sampled[row].long()].item()) < 1e-3
    assert state.counts.sum().item() == 3 and state.counts[3, best[0]].item() == 1


@gpu
@pytest.mark.parametrize("vocab", [203, 32000])
def test_penalties_and_bias(vocab):
    generator = torch.Generator(device="cuda").manual_seed(1)
    logits = torch.randn(1, vocab, device="cuda", generator=generator) * 3
    slots = torch.zeros(1, device="cuda", dtype=torch.int32)
    sampled = torch.zeros(1, device="cuda", dtype=torch.int32)
    for trial in range(20):
        state = sampling_state(1, vocab, 1)
        state.counts[0, torch.randint(vocab, (vocab // 2,), device="cuda")] = trial % 3
        state.counts[0, torch.randint(vocab, (vocab // 4,), device="cuda")] |= ops.PROMPT_TOKEN
        penalties = {"presence": 0.7 * (trial % 2), "frequency": 0.3, "repetition": 1.0 + trial * 0.1}
        bias = {5: 2.0, 17: -100.0, int(logits.argmax()): -float(trial)}
        state.bias_tokens[0, :3] = torch.tensor(list(bias), device="cuda")
        state.bias_values[0, :3] = torch.tensor(list(bias.values()), device="cuda")
        bind(state, 0, bias_count=3, **penalties)
        expected = cuda_decoder_reference.adjusted_logits(logits[0], state.counts[0], bias=bias, **penalties)
        ops.sample(logits, slots, state, sampled)
        assert error(state.work[0], expected) < 1e-6
        assert expected[sampled.item()] >= expected.max() - 1e-5


@gpu
@pytest.mark.parametrize("vocab", [203, 32000, 151936])
def test_draws_are_those_of_the_reference(vocab):
    generator = torch.Generator().manual_seed(vocab)
    slots = torch.tensor([1], device="cuda", dtype=torch.int32)
    sampled, checked = torch.zeros(1, device="cuda", dtype=torch.int32), 0
    settings = [(1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (0.9, 40, 0.8, 0.02), (2.0, 0, 1.0, 0.1),
                (0.5, 1, 1.0, 0.0), (1.0, 0, 0.001, 0.0)]  # fmt: skip
    for temperature, top_k, top_p, min_p in settings:
        logits = torch.randn(vocab, generator=generator) * 4
        state = sampling_state(2, vocab, 1)
        bind(state, 1, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=12345 + top_k)
        allowed = cuda_decoder_reference.allowed_tokens(logits, temperature, top_k, top_p, min_p)
        for drawn in range(12):
            token, margin = cuda_decoder_reference.drawn_token(logits, allowed, temperature, 12345 + top_k, drawn)
            ops.sample(logits.cuda().unsqueeze(0), slots, state, sampled)
            if margin > 1e-5:
                assert sampled.item() == token, (temperature, top_k, top_p, min_p, drawn)
                checked += 1
    assert checked > 60


@gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocab", [50257, 151936])
def test_a_row_gives_the_same_whoever_is_beside_it(vocab, dtype):
    """Few rows are shared by several CTAs each, many are not."""
    fields = [
        {}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, {"temperature": 3.0, "top_p": 0.95},
        {"temperature": 1.0, "min_p": 0.1, "repetition": 1.3}, {"wants_logprobs": 1, "frequency": 0.5},
    ]  # fmt: skip
    rows = 140
    logits = (torch.randn(len(fields), vocab, device="cuda") * 3).to(dtype).repeat(rows // len(fields) + 1, 1)[:rows]
    found = []
    for count in (1, 2, len(fields), 20, rows):
        state = sampling_state(rows, vocab, rows)
        state.counts.copy_(torch.arange(vocab, device="cuda").remainder(3).int().expand(rows, vocab))
        for slot in range(rows):
            bind(state, slot, seed=slot, **fields[slot % len(fields)])
        sampled = torch.zeros(rows, device="cuda", dtype=torch.int32)
        logprobs = torch.zeros(rows, device="cuda")
        for first in range(0, rows, count):
            part = slice(first, first + count)
            slots = torch.arange(rows, device="cuda", dtype=torch.int32)[part]
            ops.sample(logits[part], slots, state, sampled[part], logprobs=logprobs[part])
        found.append((sampled.tolist(), logprobs.tolist()))
    assert all(each == found[0] for each in found)
    assert len(set(found[0][0])) > 30


@gpu
@pytest.mark.parametrize(("vocab", "rows"), [(203, 4), (32000, 4), (32000, 64), (151936, 4), (151936, 68)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("reports", [False, True])
def test_a_mask_leaves_what_it_allows(vocab, rows, temperature, reports):
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 2
    shares = torch.tensor([0.5, 0.001, 0.0, 0.5]).repeat(rows // 4)
    allowed = torch.rand(rows, vocab, generator=generator) < shares.unsqueeze(1)
    allowed[1::4, vocab - 1] = True
    bits = torch.nn.functional.pad(allowed, (0, -vocab % 32)).view(rows, -1, 32).long()
    words = (bits << torch.arange(32)).sum(-1)
    state = replace(
        sampling_state(rows, vocab, rows), masks=words.where(words < 2**31, words - 2**32).int().pin_memory()
    )
    for slot in range(rows):
        # The last of four slots has a mask that it does not ask for.
        bind(state, slot, temperature=temperature, masked=int(slot % 4 < 3), wants_logprobs=int(reports), seed=5)
    allowed[3::4] = True
    slots = torch.arange(rows, device="cuda", dtype=torch.int32)
    sampled, logprobs = torch.zeros(rows, device="cuda", dtype=torch.int32), torch.zeros(rows, device="cuda")
    some = torch.arange(rows)[torch.arange(rows) % 4 != 2]
    best = logits.where(allowed, torch.tensor(-torch.inf)).argmax(1)
    probabilities = logits.log_softmax(1)
    for _ in range(8):
        ops.sample(logits.cuda(), slots, state, sampled, logprobs=logprobs)
        tokens = sampled.cpu().long()
        assert (tokens[2::4] == -1).all() and allowed[some, tokens[some]].all()
        if temperature == 0:
            assert (tokens[some] == best[some]).all()
        # Of the model, whatever the mask leaves.
        expected = probabilities[some, tokens[some]] * reports
        assert (logprobs.cpu()[some] - expected).abs().max() < 1e-3
    assert (state.latest[2::4] == 0).all()


@gpu
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_give_no_token(temperature):
    logits = torch.full((2, 300), torch.nan, device="cuda")
    logits[1] = torch.randn(300)
    state = sampling_state(2, 300, 2)
    for slot in range(2):
        bind(state, slot, temperature=temperature)
    sampled = torch.zeros(2, device="cuda", dtype=torch.int32)
    ops.sample(logits, torch.arange(2, device="cuda", dtype=torch.int32), state, sampled)
    assert sampled[0] == -1 and sampled[1] >= 0
