"""Decoding in one native call, against steps made one at a time."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from trirun_kernels import QuantSpec, native
from trirun_kernels.arrays import Array
from trirun_kernels.decoder.cpu import CpuDecoder, Segment, draw
from trirun_kernels.decoder.structs import DrawStruct

from tests.kernels.decoder.models import VOCAB, random_model

PROMPTS = ([3, 5, 8], [13] * 20, [21])


def decoder_of(weights, threads=2):
    """A decoder that holds the prompts in slots 0, 2 and 3, their last tokens left out."""
    decoder = CpuDecoder(weights, slots=4, context=64, max_rows=64, threads=threads)
    for slot, prompt in zip((0, 2, 3), PROMPTS, strict=True):
        if prompt[:-1]:
            segment = Segment(slot, 0, len(prompt) - 1)
            decoder.step([segment], torch.tensor(prompt[:-1]), torch.arange(0))
    return decoder


def generate(decoder, which, steps, stop=(), draws=()):
    """Tokens [steps made, sequences] and the last logits of a native call for these of the prompts."""
    out, logits = torch.full((steps, len(which)), -7), torch.full((len(which), VOCAB), math.nan)
    slots, positions = [(0, 2, 3)[i] for i in which], [len(PROMPTS[i]) - 1 for i in which]
    tokens = [PROMPTS[i][-1] for i in which]
    made = decoder.generate(slots, positions, tokens, steps, stop, Array.of(out), Array.of(logits), draws)
    assert (out[made:] == -7).all()
    return out[:made].tolist(), logits


def drawn(logits, how, step):
    """A token of one row of logits, drawn as a step of a native call draws it."""
    return draw(Array.of(logits), DrawStruct(how.temperature, how.top_p, how.min_p, how.top_k, how.stream, step))


def one_by_one(decoder, slot, prompt, steps, how=None):
    """The same by single steps: the tokens, and the logits of the last step."""
    tokens, position, logits = [prompt[-1]], len(prompt) - 1, torch.empty(0)
    for step in range(steps):
        logits = decoder.step([Segment(slot, position, 1)], torch.tensor(tokens[-1:]), torch.arange(1))[0]
        largest = next(i for i, value in enumerate(logits.tolist()) if value == logits.max())
        tokens.append(drawn(logits, how, step) if how and how.temperature else largest)
        position += 1
    return tokens[1:], logits


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("which", [(0,), (0, 1, 2)])
@pytest.mark.parametrize("vocabulary", [None, QuantSpec(32, 1.0)])
@pytest.mark.parametrize("inputs", [None, {"size": 48}, {"size": 144, "spec": QuantSpec(32, 1.0)}])
def test_greedy_equals_single_steps(threads, which, vocabulary, inputs):
    weights = random_model(vocabulary=vocabulary, tied=vocabulary is not None, inputs=inputs)
    found, logits = generate(decoder_of(weights, threads), which, 12)
    for column, i in enumerate(which):
        expected, last = one_by_one(decoder_of(weights), (0, 2, 3)[i], PROMPTS[i], 12)
        assert [row[column] for row in found] == expected
        assert torch.equal(logits[column], last)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("which", [(1,), (0, 1, 2)])
def test_draws_equal_single_steps(threads, which):
    weights = random_model()
    draws = [DrawStruct(0.7, 0.9, 0.01, 0, 5, 0), DrawStruct(1.5, 1.0, 0.0, 20, 2**64 - 3, 0), DrawStruct(top_p=1.0)]
    found, logits = generate(decoder_of(weights, threads), which, 12, draws=[draws[i] for i in which])
    for column, i in enumerate(which):
        expected, last = one_by_one(decoder_of(weights), (0, 2, 3)[i], PROMPTS[i], 12, draws[i])
        assert [row[column] for row in found] == expected
        assert torch.equal(logits[column], last)


@pytest.mark.parametrize("isa", ["avx512vnni", "avx2", "portable"])
@pytest.mark.parametrize("shape", [{"head_dim": 64}, {"head_dim": 64, "kv_heads": 4, "bias": True, "sub_norm": True}])
def test_one_row_is_a_row_of_many(isa, shape):
    """Whether heads of 64 divide among the threads or not, and on every instruction set."""
    weights = random_model(**shape, hidden=128, ffn=320)
    library = native.cpu()
    expected = generate(decoder_of(weights), (0, 1, 2), 6)[0]
    if library.trirun_cpu_set_isa(isa.encode()):
        pytest.skip(f"this machine has no {isa}")
    try:
        for threads in (1, 2, 3, 4):
            for column in range(3):
                alone, _ = generate(decoder_of(weights, threads), (column,), 6)
                assert [row[0] for row in alone] == [row[column] for row in expected]
    finally:
        library.trirun_cpu_set_isa(None)


@pytest.mark.parametrize("kv_dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    "shape", [{"heads": 2}, {"heads": 4, "head_dim": 64}, {"heads": 6, "kv_heads": 3, "head_dim": 80}]
)
def test_heads_side_by_side_change_no_bit(shape, kv_dtype):
    """A sequence alone takes two kv heads at a time, and two blocks of keys near their end; beside another, one."""
    weights = random_model(**shape)
    alone, beside = (CpuDecoder(weights, slots=2, context=192, kv_dtype=kv_dtype, threads=1) for _ in range(2))
    tokens = torch.randint(VOCAB, (192,), generator=torch.Generator().manual_seed(1))
    for position, token in enumerate(tokens):
        one = alone.step([Segment(0, position, 1)], token[None], torch.arange(1))
        two = beside.step([Segment(slot, position, 1) for slot in (0, 1)], token.repeat(2), torch.arange(2))
        assert torch.equal(one[0], two[0]) and torch.equal(one[0], two[1]), position


def test_a_stop_token_ends_the_call():
    weights = random_model()
    whole, _ = generate(decoder_of(weights), (0, 1), 12)
    stop = whole[4][1]
    first = next(i for i, row in enumerate(whole) if stop in row)
    assert generate(decoder_of(weights), (0, 1), 12, [VOCAB - 1000, stop])[0] == whole[: first + 1]


@pytest.mark.parametrize("isa", ["amx", "avx512vnni", "avx2", "portable"])
def test_of_equal_logits_the_first_wins_and_nan_never(isa):
    library = native.cpu()
    if library.trirun_cpu_set_isa(isa.encode()):
        pytest.skip(f"this machine has no {isa}")
    weights = random_model()
    try:
        head = weights.head.clone()
        best = generate(decoder_of(weights), (0,), 1)[0][0][0]
        head[[best, VOCAB - 1]] = head[[best]]
        rest = [i for i in range(VOCAB) if i not in (best, VOCAB - 1)]
        head[rest[7]] = math.nan
        assert generate(decoder_of(dataclasses.replace(weights, head=head)), (0,), 1)[0] == [[best]]
        head[:] = math.nan
        for draws in ((), [DrawStruct(1.0, 1.0, 0.0, 0, 0, 0)]):
            tokens, _ = generate(decoder_of(dataclasses.replace(weights, head=head)), (0,), 5, draws=draws)
            assert tokens == [[-1]]
    finally:
        library.trirun_cpu_set_isa(None)


def test_what_does_not_fit_is_refused():
    decoder, logits = decoder_of(random_model()), Array.of(torch.empty(1, VOCAB))

    def call(slot=0, position=2, token=1, steps=4, rows=4):
        return decoder.generate([slot], [position], [token], steps, [], Array.of(torch.empty(rows, 1).long()), logits)

    assert call() == 4
    for wrong in ({"slot": 4}, {"position": -1}, {"position": 61}, {"token": VOCAB}, {"token": -1}):
        with pytest.raises(ValueError, match="out of range"):
            call(**wrong)
    with pytest.raises(ValueError, match=r"out is int64 \[3, 1\]"):
        call(rows=3)


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": math.nan}, {"top_p": 0.0}, {"top_k": -1}])
def test_impossible_draws_are_refused(bad):
    how = DrawStruct(**({"temperature": 1.0, "top_p": 1.0} | bad))
    with pytest.raises(ValueError, match="draw"):
        generate(decoder_of(random_model()), (0,), 4, draws=[how])
    with pytest.raises(ValueError, match="draw from 5 logits"):
        draw(Array.of(torch.zeros(5)), how)


def test_products_of_steps_run():
    decoder = decoder_of(random_model())
    for apart in (False, True):
        decoder.products(2, apart=apart)
    with pytest.raises(ValueError, match="products of 0 steps"):
        decoder.products(0, apart=True)
