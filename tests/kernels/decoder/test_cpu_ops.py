"""The native decoder step against its reference, and the invariances that serving rests on."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from trirun_kernels import QuantSpec, native
from trirun_kernels.decoder import reference as decoder_reference
from trirun_kernels.decoder.cpu import CpuDecoder, Segment, quantize_head
from trirun_kernels.decoder.weights import Int8Head, Linear

from tests.kernels.decoder.mixtures import random_mixture
from tests.kernels.decoder.models import CONTEXT, PARTS, VOCAB, random_model, with_inputs


def zeroed(linear):
    weight = dataclasses.replace(linear.weight, scales=torch.zeros_like(linear.weight.scales))
    return Linear(weight, linear.bias)


def int8_head_of(weights):
    vocab, hidden = weights.head.shape
    out = Int8Head(torch.empty(vocab, Int8Head.stride(hidden), dtype=torch.uint8), torch.empty(vocab), hidden)
    return quantize_head(weights.head, out, threads=2)


def all_logits(decoder, tokens, chunks=None, slot=0):
    """Logits of every position of one sequence, run in chunks."""
    outputs, position = [], 0
    for count in chunks or [len(tokens)]:
        part = tokens[position : position + count]
        outputs.append(decoder.step([Segment(slot, position, count)], part, torch.arange(count)))
        position += count
    return torch.cat(outputs)


def relative_error(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


MODELS = {
    "gqa": {},
    "mha, group -1": {"kv_heads": 4, "spec": QuantSpec(-1, 1.0)},
    "mqa, real zeros": {"kv_heads": 1, "spec": QuantSpec(32, None)},
    "head_dim 24, biases": {"head_dim": 24, "bias": True, "hidden": 96, "heads": 4},
    "q and k norms, bfloat16": {"qk_norm": True, "head_dim": 64, "dtype": torch.bfloat16},
    "sub-norms, relu2": {"sub_norm": True, "activation": "relu2", "ffn": 224},
    "partial rotation, float32": {"half": 8, "dtype": torch.float32, "spec": QuantSpec(32, 1.5)},
    "64 heads of 8 over one": {"heads": 64, "kv_heads": 1, "head_dim": 8, "hidden": 64},
    "packed vocabulary, tied": {"vocabulary": QuantSpec(32, 1.0), "tied": True},
    "packed vocabulary, a scale per row": {
        "vocabulary": QuantSpec(-1, 1.0),
        "hidden": 144,
        "spec": QuantSpec(-1, 1.0),
    },
    "packed vocabulary, real zeros": {"vocabulary": QuantSpec(64, None), "hidden": 128},
    "head_dim 128": {"heads": 2, "kv_heads": 1, "head_dim": 128, "layers": 1},
} | PARTS


@pytest.mark.parametrize("name", MODELS)
def test_step_equals_the_reference(name):
    weights = random_model(**MODELS[name])
    tokens = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(1))
    decoder = CpuDecoder(weights, context=CONTEXT, kv_dtype="float32", threads=2)
    expected = decoder_reference.forward(weights, tokens)
    found = all_logits(decoder, tokens)
    assert relative_error(found, expected) < 1e-3
    # A softmax between near-equal scores magnifies the last bits of a few rows; of most it must not.
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).median() < 1e-4
    half = CpuDecoder(weights, context=CONTEXT, kv_dtype="float16", threads=2)
    assert relative_error(all_logits(half, tokens), expected) < 5e-3


@pytest.mark.parametrize("name", ["windows", "a window of one", "sinks and windows", "shared caches, windows"])
def test_a_cache_of_a_window_forgets_what_no_row_sees(name):
    weights = random_model(**MODELS[name])
    tokens = torch.randint(0, VOCAB, (190,), generator=torch.Generator().manual_seed(1))
    expected = all_logits(CpuDecoder(weights, context=CONTEXT, threads=2), tokens)
    for rows in (1, 7, 34):
        decoder = CpuDecoder(weights, context=CONTEXT, max_rows=rows, slots=2, threads=2)
        chunks = [rows] * (190 // rows) + ([190 % rows] if 190 % rows else [])
        # Another sequence, which has filled the cache, leaves nothing behind.
        all_logits(decoder, tokens.flip(0), chunks)
        assert torch.equal(all_logits(decoder, tokens, chunks), expected)
        assert torch.equal(all_logits(decoder, tokens, chunks, slot=1), expected)
        assert not decoder.can_rewind
        with pytest.raises(ValueError, match="5 positions of slot 0 to 1"):
            decoder.copy_prefix(0, 1, 5)
    assert decoder.cache_bytes < CpuDecoder(weights, context=CONTEXT, slots=2, threads=1).cache_bytes


def test_eight_bit_activations_equal_the_reference():
    weights = random_model()
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    decoder = CpuDecoder(weights, context=64, act_bits=8, kv_dtype="float32", threads=2)
    expected = decoder_reference.forward(weights, tokens, act_bits=8)
    # A value on the border between two integers may fall either way.
    assert relative_error(all_logits(decoder, tokens), expected) < 1e-2
    assert relative_error(expected, decoder_reference.forward(weights, tokens)) > 2e-3


@pytest.mark.parametrize("act_bits", [8, 16])
@pytest.mark.parametrize(
    "name",
    [
        "gqa",
        "mha, group -1",
        "head_dim 24, biases",
        "64 heads of 8 over one",
        "packed vocabulary, tied",
        *PARTS,
    ],
)
def test_chunks_threads_and_batches_change_no_bit(name, act_bits):
    weights = random_model(**MODELS[name])
    generator = torch.Generator().manual_seed(2)
    sequences = [torch.randint(0, VOCAB, (length,), generator=generator) for length in (150, 70, 1, 33)]

    def decoder(threads=2, slots=1):
        return CpuDecoder(weights, slots=slots, context=CONTEXT, act_bits=act_bits, max_rows=256, threads=threads)

    whole = [all_logits(decoder(), tokens) for tokens in sequences]
    for chunks in ([1] * 150, [100, 1, 48, 1], [64, 64, 22]):
        assert torch.equal(all_logits(decoder(), sequences[0], chunks), whole[0])
    for threads in (1, 3):
        assert torch.equal(all_logits(decoder(threads), sequences[0]), whole[0])
    # All four at once in slots of one cache: three prefills beside a single token, then decode steps of all.
    batched = decoder(slots=6)
    slots, done = (0, 2, 3, 5), [140, 60, 0, 23]
    segments = [Segment(slot, 0, count) for slot, count in zip(slots, done, strict=True) if count]
    tokens = torch.cat([sequence[:count] for sequence, count in zip(sequences, done, strict=True)])
    batched.step(segments, tokens, torch.arange(0))
    for offset in range(10):
        live = [i for i in range(4) if done[i] + offset < len(sequences[i])]
        segments = [Segment(slots[i], done[i] + offset, 1) for i in live]
        tokens = torch.stack([sequences[i][done[i] + offset] for i in live])
        logits = batched.step(segments, tokens, torch.arange(len(live)))
        for row, i in zip(logits, live, strict=True):
            assert torch.equal(row, whole[i][done[i] + offset])


def test_layers_that_attend_to_others_keys_have_no_cache():
    alone, shared = (
        CpuDecoder(random_model(layers=4, mixer=mixer), context=CONTEXT, slots=2, threads=1)
        for mixer in ([{}], [{}, {}, {"shared_with": 0}, {"shared_with": 1}])
    )
    assert 2 * shared.cache_bytes == alone.cache_bytes
    tokens = torch.randint(0, VOCAB, (100,), generator=torch.Generator().manual_seed(1))
    expected = all_logits(shared, tokens)
    # A prefix that another slot holds is enough for all layers.
    shared.copy_prefix(0, 1, 90)
    assert torch.equal(shared.step([Segment(1, 90, 10)], tokens[90:], torch.arange(10)), expected[90:])


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5_moe"])
@pytest.mark.parametrize("scaled", [False, True])
def test_experts_come_before_a_layers_own_input(name, scaled):
    weights = with_inputs(random_mixture(name), 48)
    if scaled:
        layers = [dataclasses.replace(each, output_scale=torch.tensor([1.7])) for each in weights.layers]
        weights = dataclasses.replace(weights, layers=layers)
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1))
    expected = decoder_reference.forward(weights, tokens)
    found = all_logits(CpuDecoder(weights, context=64, kv_dtype="float32", threads=2), tokens)
    # Where two experts are as good as equal, a row may choose the other one.
    assert ((found - expected).norm(dim=1) / expected.norm(dim=1)).median() < 1e-4
    assert torch.equal(
        all_logits(CpuDecoder(weights, context=64, kv_dtype="float32", threads=3), tokens, [1] * 40), found
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_eight_bit_head(dtype):
    weights = random_model(dtype=dtype)
    head = int8_head_of(weights)
    step = weights.head.float().abs().amax(1, keepdim=True) / 127
    assert ((head.dequantize() - weights.head.float()).abs() <= step * 0.5001).all()
    weights = dataclasses.replace(weights, head=head)
    tokens = torch.randint(0, VOCAB, (50,), generator=torch.Generator().manual_seed(1))
    found = all_logits(CpuDecoder(weights, context=64, kv_dtype="float32", threads=2), tokens)
    assert relative_error(found, decoder_reference.forward(weights, tokens)) < 5e-4


def test_eight_bit_head_is_exact_at_the_extremes():
    """Every byte 0 or 255 against limbs of ±full range: sums of k = 8,192 that 16-bit accumulators would lose."""
    hidden = 8192
    weights = random_model(hidden=hidden, heads=1, kv_heads=1, ffn=32, layers=1)
    rows = torch.full((VOCAB, hidden), 255, dtype=torch.uint8)
    rows[::2] = 0
    head = Int8Head(rows, torch.ones(VOCAB), hidden)
    weights = dataclasses.replace(weights, head=head, final_norm=torch.ones(hidden))
    # The residual stream is the embedding plus what one layer adds: make that nothing.
    silent = dataclasses.replace(weights.layers[0], o=zeroed(weights.layers[0].o), down=zeroed(weights.layers[0].down))
    weights = dataclasses.replace(weights, layers=[silent], embedding=torch.ones(VOCAB, hidden).half())
    found = all_logits(CpuDecoder(weights, context=64, threads=2), torch.arange(3))
    assert torch.allclose(found, decoder_reference.forward(weights, torch.arange(3)), rtol=1e-4)
    assert found.min() < -1e6 and found.max() > 1e6


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("int8_head", [False, True])
def test_a_number_that_is_none_spoils_its_own_sequence_only(value, int8_head):
    weights = random_model()
    if int8_head:
        weights = dataclasses.replace(weights, head=int8_head_of(weights))
    clean = CpuDecoder(weights, slots=2, context=64, threads=2)
    segments, tokens, rows = [Segment(0, 0, 20), Segment(1, 0, 20)], torch.arange(40), torch.arange(40)
    expected = clean.step(segments, tokens, rows)
    embedding = weights.embedding.clone()
    embedding[5, 7] = value
    spoilt = CpuDecoder(dataclasses.replace(weights, embedding=embedding), slots=2, context=64, threads=2)
    found = spoilt.step(segments, tokens, rows)
    assert torch.equal(found[:5], expected[:5]) and torch.equal(found[20:], expected[20:])
    assert found[5].isnan().all()


@pytest.mark.parametrize("head", ["as stored", "int8", "packed"])
def test_every_instruction_set_gives_the_same_bits(head):
    vocabulary = QuantSpec(32, 1.5) if head == "packed" else None
    weights = random_model(head_dim=24, bias=True, qk_norm=True, vocabulary=vocabulary)
    if head == "int8":
        weights = dataclasses.replace(weights, head=int8_head_of(weights))
    tokens = torch.randint(0, VOCAB, (90,), generator=torch.Generator().manual_seed(3))
    library, results = native.cpu(), {}
    try:
        for name in ("amx", "avx512vnni", "avx2", "portable"):
            if library.trirun_cpu_set_isa(name.encode()) == 0:
                results[name] = all_logits(CpuDecoder(weights, context=CONTEXT, threads=2), tokens)
    finally:
        library.trirun_cpu_set_isa(None)
    assert "portable" in results
    for found in results.values():
        assert torch.equal(found, results["portable"])


def test_a_freed_slot_leaves_nothing_behind():
    weights = random_model()
    decoder = CpuDecoder(weights, context=CONTEXT, threads=2)
    first, second = torch.arange(150) % VOCAB, torch.arange(60, 160) % VOCAB
    all_logits(decoder, first)
    again = all_logits(decoder, second)
    assert torch.equal(again, all_logits(CpuDecoder(weights, context=CONTEXT, threads=2), second))


def test_only_the_rows_asked_for():
    decoder = CpuDecoder(random_model(), context=64, threads=2)
    tokens = torch.arange(20)
    every = decoder.step([Segment(0, 0, 20)], tokens, torch.arange(20))
    some = decoder.step([Segment(0, 0, 20)], tokens, torch.tensor([19, 3]))
    assert torch.equal(some, every[[19, 3]])


@pytest.mark.parametrize(
    ("segments", "tokens", "rows", "message"),
    [
        ([Segment(0, 0, 2)], [1, VOCAB], [0], "out of range"),
        ([Segment(0, 0, 2)], [1, -1], [0], "out of range"),
        ([Segment(2, 0, 2)], [1, 2], [0], "out of range"),
        ([Segment(1, 0, 1), Segment(0, 0, 1)], [1, 2], [0], "out of range"),
        ([Segment(0, 63, 2)], [1, 2], [0], "out of range"),
        ([Segment(0, 0, 3)], [1, 2], [0], "out of range"),
        ([Segment(0, 0, 2)], [1, 2], [2], "out of range"),
        ([Segment(0, 0, 9)], list(range(9)), [0], "made for 8"),
    ],
)
def test_bad_batches_are_refused(segments, tokens, rows, message):
    decoder = CpuDecoder(random_model(), slots=2, context=64, max_rows=8, threads=2)
    with pytest.raises(ValueError, match=message):
        decoder.step(segments, torch.tensor(tokens), torch.tensor(rows))


def test_weights_that_do_not_fit_are_refused():
    weights = random_model()
    with pytest.raises(ValueError, match="256 are needed"):
        CpuDecoder(weights, context=CONTEXT + 1, threads=1)
    wrong = dataclasses.replace(weights, head=weights.head[:, :48])
    with pytest.raises(ValueError, match=r"head: float16 \[203, 48\] is not contiguous"):
        CpuDecoder(wrong, context=CONTEXT, threads=1)
    inputs = random_model(inputs={"size": 48})
    wrong = dataclasses.replace(inputs, inputs=dataclasses.replace(inputs.inputs, table=inputs.inputs.table[:VOCAB]))
    with pytest.raises(ValueError, match=r"table of inputs must be .* \[208, 96\], got float16 \[203, 96\]"):
        CpuDecoder(wrong, context=CONTEXT, threads=1)
    with pytest.raises(ValueError, match="no inputs of layers"):
        CpuDecoder(dataclasses.replace(inputs, inputs=None), context=CONTEXT, threads=1)


@pytest.mark.parametrize("mixer", [{"shared_with": 1}, {"shared_with": 2}, {"shared_with": 0, "window": 7}])
def test_keys_are_shared_with_an_earlier_layer_that_is_alike(mixer):
    with pytest.raises(ValueError, match="layer 1 cannot attend to the keys and values of layer"):
        random_model(layers=3, mixer=[{}, mixer, {}])
