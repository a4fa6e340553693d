"""Whole models on the CUDA decoder against the decoder's reference."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder import cuda_ops as ops
from trirun_kernels.decoder import cuda_reference as cuda_decoder_reference
from trirun_kernels.decoder import reference as decoder_reference
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs, Segment
from trirun_kernels.decoder.cuda_cache import position_bytes
from trirun_kernels.decoder.cuda_prompts import Prompts, prompt_attention, prompts_of
from trirun_kernels.decoder.cuda_weights import CudaModel, cuda_layer, fused, head_projection, rows_in_limbs
from trirun_kernels.decoder.reference import soften, unseen, with_sinks
from trirun_kernels.decoder.weights import LINEARS, VECTORS
from trirun_kernels.weights.packing import dequantize

from tests.kernels.decoder.cuda_support import BOTH, ROUNDING, bind, error, gpu, random_packed, sampling_state
from tests.kernels.decoder.models import PARTS, VOCAB, random_model

MODELS = {
    "gqa": {},
    "mha, per channel": {"kv_heads": 4, "spec": QuantSpec(-1, 1.0)},
    "mqa, real zeros": {"kv_heads": 1, "spec": QuantSpec(32, None)},
    "Qwen2: biases": {"bias": True},
    "Qwen3: head norms, head_dim 128": {"qk_norm": True, "head_dim": 128},
    "BitNet: sub-norms, relu2": {"sub_norm": True, "activation": "relu2", "spec": QuantSpec(-1, 1.0)},
    "partial rotation": {"half": 5},
    "packed vocabulary": {"vocabulary": QuantSpec(32, 1.0)},
    "packed vocabulary, tied, a scale per row": {"vocabulary": QuantSpec(-1, 1.0), "tied": True},
    "packed vocabulary, real zeros": {"vocabulary": QuantSpec(32, None), "hidden": 160},
    "fused": {"hidden": 128, "ffn": 256, "spec": QuantSpec(128, 1.0), "kv_heads": 2, "head_dim": 64},
} | PARTS


@pytest.mark.parametrize("spec", [QuantSpec(-1, 1.0), QuantSpec(32, None)])
def test_fused_weights_are_their_rows_one_after_another(spec):
    parts = [random_packed(n, 96, spec, seed) for seed, n in enumerate((128, 64, 70))]
    whole = fused(parts)
    assert torch.equal(dequantize(whole), torch.cat([dequantize(part) for part in parts]))
    assert fused(parts[::-1]) is None, "padding would lie between the outputs"
    assert fused([parts[0], random_packed(64, 96, QuantSpec(-1, 1.5))]) is None
    dense = [torch.randn(4, 8), torch.randn(2, 8)]
    assert torch.equal(fused(dense), torch.cat(dense))


def on_gpu(weights, dtype=torch.float16, slots=4, context=192, act_bits=16, **options):
    model = CudaModel.of(weights, "cuda", dtype, act_bits=act_bits)
    decoder = CudaDecoder(model, slots=slots, context=context, **options)
    blocks = decoder.block_tables.shape[1]
    order = torch.randperm(slots * blocks, generator=torch.Generator().manual_seed(0))
    decoder.block_tables.copy_(order.view(slots, blocks))
    return decoder


def run(decoder, parts):
    """One step of [(slot, position, tokens)]: single tokens first. Logits of every row, float32 on the CPU."""
    tokens, slots, positions, segments = [], [], [], []
    for slot, position, piece in parts:
        if len(piece) > 1:
            segments.append(Segment(len(tokens), len(piece), slot, position))
        tokens += piece
        slots += [slot] * len(piece)
        positions += range(position, position + len(piece))
    inputs = Inputs(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in (tokens, slots, positions)))
    return decoder.forward(inputs, segments).float().cpu()


def rounded_forward(weights, tokens, act_bits, monkeypatch):
    exact = decoder_reference._linear
    with monkeypatch.context() as patch:
        patch.setattr(
            decoder_reference, "_linear", lambda linear, x, bits: exact(linear, x.half().float(), bits).half().float()
        )
        return decoder_reference.forward(weights, tokens, act_bits=act_bits)


@gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("act_bits", [16, 8])
def test_whole_models_against_the_reference(name, act_bits, monkeypatch):
    weights = random_model(**MODELS[name])
    tokens = torch.randint(0, VOCAB, (100,), generator=torch.Generator().manual_seed(3))
    expected = decoder_reference.forward(weights, tokens, act_bits=act_bits)
    rounded = rounded_forward(weights, tokens, act_bits, monkeypatch)

    def close(found):
        """As far from the reference as the reference itself, its linears' inputs and outputs rounded to 16 bits;
        of most rows: a softmax between near-equal scores or a limb next to a tie magnifies the last bits of a few."""
        errors = [((x - expected).norm(dim=1) / expected.norm(dim=1)).median() for x in (found, rounded)]
        return torch.isfinite(found).all() and errors[0] < 3 * errors[1] + 3e-4

    for limb_rows in ((1, 32), (3, 16), (1, 0)):
        decoder = on_gpu(weights, act_bits=act_bits, limb_rows=limb_rows)
        ids = tokens.tolist()
        whole = run(decoder, [(1, 0, ids)])
        assert close(whole)
        # In chunks and single tokens, beside other slots.
        pieces = [run(decoder, [(2, 0, ids[:37])])]
        pieces.append(run(decoder, [(1, 50, ids[50:51]), (3, 0, ids[:9]), (2, 37, ids[37:90])])[10:])
        for position in range(90, 100):
            pieces.append(run(decoder, [(2, position, ids[position : position + 1])]))
        assert close(torch.cat(pieces))


@gpu
@pytest.mark.parametrize(("act_bits", "most"), [(16, 8), (8, 32)])
def test_limbs_go_between_kernels_where_products_of_them_are_fast(act_bits, most):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    model = CudaModel.of(random_model(**MODELS["mha, per channel"]), "cuda", torch.float16, act_bits=act_bits)
    assert rows_in_limbs(model, 1, 32) == range(1, most + 1)


@gpu
@BOTH
@pytest.mark.parametrize(
    "name",
    [
        "gqa", "mha, per channel", "Qwen3: head norms, head_dim 128", "fused", "shared caches, windows",
        "a shared cache, a head a thread", "inputs of layers",
    ],
)  # fmt: skip
def test_int8_cache(name, dtype):
    """Near the cache of 16 bits, and the same however a text is cut: a token attends to what is stored of itself."""
    weights = random_model(**MODELS[name])
    ids = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    wide, narrow = on_gpu(weights, dtype), on_gpu(weights, dtype, kv_dtype=torch.int8)
    assert narrow.cache_bytes < 0.6 * wide.cache_bytes
    assert narrow.cache_bytes == narrow.pages * ops.PAGE * position_bytes(weights.shape, torch.int8)
    # Random models attend sharply: small changes of keys change much. So against the reference with such a cache.
    tokens = torch.tensor(ids)
    plain = decoder_reference.forward(weights, tokens)
    expected = decoder_reference.forward(weights, tokens, stored=cuda_decoder_reference.int8_round_trip)
    whole = run(narrow, [(1, 0, ids)])

    def median(found, exact):
        return ((found - exact).norm(dim=1) / exact.norm(dim=1)).median()

    allowed = median(run(wide, [(1, 0, ids)]), plain)
    assert torch.isfinite(whole).all() and median(whole, expected) < 3 * allowed + 1e-3
    pieces = [run(narrow, [(2, 0, ids[:37])])]
    pieces.append(run(narrow, [(1, 50, ids[50:51]), (3, 0, ids[:9]), (2, 37, ids[37:140])])[10:])
    for position in range(140, 150):
        pieces.append(run(narrow, [(2, position, ids[position : position + 1])]))
    assert median(torch.cat(pieces), expected) < 3 * allowed + 1e-3


def test_a_cache_is_of_the_models_type_or_int8():
    shape = random_model(head_dim=24).shape
    # 2 layers, 2 key heads: keys and values of 24 elements; of int8 in 32 bytes, with 2 bytes of scale.
    assert position_bytes(shape, torch.float16) == 2 * 2 * 2 * 24 * 2
    assert position_bytes(shape, torch.int8) == 2 * 2 * 2 * (32 + 2)


@gpu
@BOTH
@pytest.mark.parametrize("inputs", [None, {"size": 48}])
def test_dense_and_packed_weights_are_the_same_model(dtype, inputs):
    weights = random_model(hidden=128, ffn=256, inputs=inputs)
    model = CudaModel.of(weights, "cuda", dtype)
    assert model.packed and len(model.layers[0].gate_up) == 1
    layers = [
        cuda_layer(
            {name: dequantize(each.weight) for name in LINEARS if (each := getattr(layer, name)) is not None}, {},
            {name: getattr(layer, name) for name in VECTORS}, "cuda", dtype, 16,
        )
        for layer in weights.layers
    ]  # fmt: skip
    dense = dataclasses.replace(model, layers=layers)
    assert not dense.packed and dense.nbytes > model.nbytes
    ids = torch.arange(50).tolist()
    results = []
    for each in (model, dense):
        decoder = CudaDecoder(each, slots=1, context=64)
        results.append(run(decoder, [(0, 0, ids)]))
    assert error(*results) < 10 * ROUNDING[dtype]


@gpu
@BOTH
@pytest.mark.parametrize("spec", [QuantSpec(-1, 1.0), QuantSpec(-1, None)])
def test_a_table_of_inputs_may_be_packed(dtype, spec):
    weights = random_model(**MODELS["packed inputs of layers"])
    model = CudaModel.of(weights, "cuda", dtype)
    packed = random_packed(*weights.inputs.table.shape, spec).to("cuda")
    found = []
    for table in (packed, dequantize(packed).to(dtype)):
        whole = dataclasses.replace(model, inputs=dataclasses.replace(model.inputs, table=table))
        decoder = CudaDecoder(whole, slots=2, context=128)
        decoder.block_tables.copy_(torch.arange(4).view(2, 2))
        rows = [run(decoder, [(0, 0, list(range(50)))])]
        rows.append(run(decoder, [(0, 50, [7])]))
        # The token that a slot sampled last is looked up there too.
        decoder.latest.copy_(torch.tensor([7, 9]))
        assert torch.equal(run(decoder, [(0, 50, [-1])]), rows[1])
        found.append(torch.cat(rows))
    assert error(*found) < 10 * ROUNDING[dtype]


@gpu
@pytest.mark.parametrize("name", ["gqa", "shared caches, windows", "inputs of layers"])
def test_captured_steps_repeat_and_go_on_by_themselves(name):
    weights = random_model(**MODELS[name])
    decoder = on_gpu(weights)
    ids = torch.randint(0, VOCAB, (3, 20), generator=torch.Generator().manual_seed(4)).tolist()
    for slot, prompt in enumerate(ids):
        run(decoder, [(slot, 0, prompt)])
    start = [layer.clone() for layer in decoder.cache]
    state = sampling_state(4, VOCAB, 4)
    for slot in range(4):
        bind(state, slot)
    static = Inputs(*(torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(3)))
    sampled = torch.zeros(4, dtype=torch.int32, device="cuda")

    def step():
        logits = decoder.forward(static)
        ops.sample(logits, static.slots, state, sampled, positions=static.positions, tokens=static.tokens)

    def begin():
        for layer, kept in zip(decoder.cache, start, strict=True):
            layer.copy_(kept)
        static.tokens.copy_(torch.tensor([5, 6, 7, 0]))
        static.slots.copy_(torch.tensor([0, 1, 2, -1]))
        static.positions.copy_(torch.tensor([20, 20, 20, 0]))

    def roll(advance):
        begin()
        out = []
        for _ in range(40):
            advance()
            out.append(sampled[:3].tolist())
        return out

    decoder.latest = state.latest
    plain = roll(step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    assert roll(graph.replay) == plain
    assert roll(graph.replay) == plain
    # Against the reference, teacher-forced on what the graph chose.
    for slot in range(3):
        text = ids[slot] + [5 + slot] + [step[slot] for step in plain]
        logits = decoder_reference.forward(weights, torch.tensor(text[:-1]))[20:]
        chosen = logits.gather(1, torch.tensor(text[21:]).unsqueeze(1)).squeeze(1)
        assert (logits.max(1).values - chosen).max() < 0.05 * logits.std()


@gpu
def test_whole_models_with_an_eight_bit_head():
    weights = random_model()
    model = CudaModel.of(weights, "cuda", torch.float16)
    model = dataclasses.replace(model, head=head_projection(weights.head.to("cuda"), int8=True))
    decoder = CudaDecoder(model, slots=2, context=128)
    decoder.block_tables.copy_(torch.arange(decoder.block_tables.numel()).view(decoder.block_tables.shape))
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(3))
    expected = decoder_reference.forward(weights, tokens)
    found = run(decoder, [(0, 0, tokens.tolist())])
    assert error(found, expected) < 1e-2


@pytest.mark.parametrize("window", [None, 1, 24])
@pytest.mark.parametrize("sinks", [False, True])
def test_softened_attention(window, sinks):
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, head_dim = 6, 2, 16
    sink = torch.randn(heads, generator=generator) if sinks else None
    how = ops.Heads(heads, kv_heads, head_dim, 0.3, 1e-5, None, None, sinks=sink, window=window, softcap=2.0)
    segments = [Segment(0, 300, 0, 0), Segment(300, 7, 1, 40)]
    prompts = Prompts.of(segments, torch.device("cpu"))
    q = torch.randn(307, heads * head_dim, generator=generator)
    k, v = (torch.randn(347, kv_heads * head_dim, generator=generator) for _ in range(2))
    found = prompt_attention(q, k, v, how, prompts)
    first_key = 0
    for segment in segments:
        length = segment.position + segment.count
        rows = q[segment.first : segment.first + segment.count].unflatten(1, (heads, head_dim))
        keys, values = (
            part[first_key : first_key + length].unflatten(1, (kv_heads, head_dim)).repeat_interleave(3, 1)
            for part in (k, v)
        )
        scores = soften(torch.einsum("qhd,khd->hqk", rows, keys) * how.scale, how.softcap)
        every = torch.arange(length)
        scores = scores.masked_fill(unseen(every[segment.position :], every, window), -math.inf)
        expected = torch.einsum("hqk,khd->qhd", with_sinks(scores, sink), values).flatten(1)
        part = found[segment.first : segment.first + segment.count]
        torch.testing.assert_close(part, expected, atol=1e-5, rtol=1e-4)
        first_key += length


@pytest.mark.parametrize("window", [1, 24, 64, 300])
def test_pieces_of_prompts_bring_the_keys_that_a_window_sees(window):
    generator, head_dim = torch.Generator().manual_seed(0), 16
    how = ops.Heads(2, 1, head_dim, 0.3, 1e-5, None, None, window=window, softcap=2.0)
    segments = [Segment(0, 9, 3, 0), Segment(9, 70, 1, 411)]
    of_windows = prompts_of(segments, torch.device("cpu"), {window, 500})
    every, seen = of_windows[None], of_windows[window]
    assert of_windows[500] is every
    assert seen.pages.tolist() == [0, (412 - window) // 64] and every.pages.tolist() == [0, 0]
    assert seen.most_keys == 481 - 64 * seen.pages[1] == seen.keys[2] - 9 and seen.total == seen.most_keys + 9
    q = torch.randn(79, 2 * head_dim, generator=generator)
    k, v = (torch.randn(490, head_dim, generator=generator) for _ in range(2))
    first = 64 * seen.pages[1]
    near = [torch.cat((each[:9], each[9 + first :])) for each in (k, v)]
    found, expected = prompt_attention(q, *near, how, seen), prompt_attention(q, k, v, how, every)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
