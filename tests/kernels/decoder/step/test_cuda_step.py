"""A whole decode step in one kernel against the decoder's reference, and how it is divided among CTAs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from trirun_kernels import QuantSpec
from trirun_kernels.decoder import reference as decoder_reference
from trirun_kernels.decoder.cuda import CudaDecoder, Inputs, Segment
from trirun_kernels.decoder.cuda_ops import Heads
from trirun_kernels.decoder.cuda_reference import int8_round_trip
from trirun_kernels.decoder.cuda_weights import CudaModel
from trirun_kernels.decoder.step.cuda import reads_keys_together, refusal
from trirun_kernels.decoder.step.division import divide

from tests.kernels.decoder.cuda_support import BOTH, gpu
from tests.kernels.decoder.models import VOCAB, random_model

PLAIN = {"hidden": 256, "ffn": 384, "heads": 4, "kv_heads": 4, "head_dim": 64, "spec": QuantSpec(-1, 1.0)}
GROUPS = {"spec": QuantSpec(128, 1.0), "head_dim": 128}
MODELS = {
    "mha": {},
    "two queries a key": {"kv_heads": 2},
    "three": {"heads": 6, "kv_heads": 2},
    "four": {"heads": 8, "kv_heads": 2},
    "sixteen": {"heads": 16, "kv_heads": 1, "bias": True},
    "groups, head norms": {**GROUPS, "kv_heads": 1, "qk_norm": True},
    "groups, real zeros": {**GROUPS, "spec": QuantSpec(128, None), "kv_heads": 2},
    "heads of 256": {"head_dim": 256, "kv_heads": 2},
    "heads of 256, nine queries a key": {"head_dim": 256, "heads": 9, "kv_heads": 1},
    "partial rotation": {"half": 16},
    "another zero point": {"spec": QuantSpec(-1, 1.5)},
    "BitNet: sub-norms, relu2": {"sub_norm": True, "activation": "relu2"},
    "more layers, GELU": {"layers": 5, "ffn": 640, "activation": "gelu_tanh"},
}


@pytest.mark.parametrize(("qkv", "hidden", "pairs"), [(192, 64, 172), (60, 40, 108), (40, 32, 88), (3, 2, 1)])
def test_every_tile_is_somebodys_and_no_cluster_has_much_more_than_others(qkv, hidden, pairs):
    depth = {"qkv": 32, "gate_up": 32, "o": 32, "down": 86}
    of_qkv, of_hidden, of_pairs, again = divide(qkv, hidden, pairs, depth, 66)
    assert again == of_hidden
    for starts, count in ((of_qkv, qkv), (of_hidden, hidden), (of_pairs, pairs)):
        shares = [b - a for a, b in pairwise(starts)]
        assert (starts[0], starts[-1], len(shares)) == (0, count, 66)
        assert min(shares) >= 0 and max(shares) == -(-count // 66)


@pytest.mark.parametrize(
    ("options", "act_bits", "reason"),
    [
        ({}, 16, None),
        ({}, 8, None),
        (GROUPS, 16, None),
        (GROUPS, 8, "groups with 8-bit activations"),
        (GROUPS | {"spec": QuantSpec(128, None)}, 16, None),
        ({"spec": QuantSpec(-1, None)}, 16, "a zero point of every row"),
        ({"spec": QuantSpec(64, 1.0)}, 16, "groups of 64"),
        (GROUPS | {"head_dim": 256}, 16, "groups with heads of 256"),
        ({"head_dim": 32, "heads": 8}, 16, "heads that are not of 64, 128 or 256"),
        ({"layers": 97, "hidden": 128, "ffn": 128, "heads": 2, "kv_heads": 2}, 16, "more than 96 layers"),
        ({"hidden": 128, "heads": 4, "head_dim": 64}, 16, "a size below 256"),
        ({"inputs": {"size": 128}}, 16, "layers with inputs of their own"),
        ({"mixer": [{}, {"shared_with": 0}]}, 16, "layers differ"),
    ],
)
def test_what_no_kernel_takes_is_refused_before_the_run(options, act_bits, reason):
    model = CudaModel.of(random_model(**PLAIN | options), "cpu", torch.float16, act_bits=act_bits)
    assert refusal(model, 90, []) == reason
    assert refusal(model, 80, [])


def decoders(weights, slots, dtype=torch.float16, act_bits=16, kv_dtype=None):
    """The one kernel and the chain of kernels on the same model, with the same pages."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    model = CudaModel.of(weights, "cuda", dtype, act_bits=act_bits)
    made = [CudaDecoder(model, slots=slots, context=192, one_kernel=one, kv_dtype=kv_dtype) for one in (True, False)]
    for decoder in made:
        tables = decoder.block_tables
        tables.copy_(torch.randperm(tables.numel(), generator=torch.Generator().manual_seed(0)).view(tables.shape))
    assert made[0].step_refusal is None and made[1].step_refusal is not None
    return made


def inputs(tokens, slots, positions):
    return Inputs(*(torch.tensor(x, dtype=torch.int32, device="cuda") for x in (tokens, slots, positions)))


def text(decoder, ids, slot, prompt):
    """Logits of every token of a text, its first ones as a prompt, the others one by one."""
    rows = range(prompt)
    first = decoder.forward(inputs(ids[:prompt], [slot] * prompt, rows), [Segment(0, prompt, slot, 0)])
    single = [decoder.forward(inputs([ids[p]], [slot], [p])) for p in range(prompt, len(ids))]
    return torch.cat([first, *single]).float().cpu()


@gpu
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("act_bits", "kv_dtype"), [(16, None), (8, None), (16, torch.int8)])
def test_texts_against_the_reference(name, act_bits, kv_dtype):
    options = PLAIN | MODELS[name]
    if act_bits == 8 and options["spec"].group_size != -1:
        pytest.skip("no such kernel")
    weights = random_model(**options)
    one, chain = decoders(weights, 2, act_bits=act_bits, kv_dtype=kv_dtype)
    tokens = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(3))
    stored = None if kv_dtype is None else int8_round_trip
    expected = decoder_reference.forward(weights, tokens, act_bits=act_bits, stored=stored)[90:]
    found, other = (text(decoder, tokens.tolist(), 1, 90)[90:] for decoder in (one, chain))
    # Of most rows: a limb next to a tie, or a softmax between near-equal scores, magnifies the last bits of a few.
    errors = [((x - expected).norm(dim=1) / expected.norm(dim=1)).median() for x in (found, other)]
    assert torch.isfinite(found).all() and errors[0] < 1.5 * errors[1] + 1e-4


def test_padding_behind_pieces_of_prompts_is_of_no_slot():
    rows = Inputs(*torch.tensor([[5, 6, 7], [1, 1, 1], [9, 10, 11]], dtype=torch.int32))
    assert rows.padded(3) is rows
    padded = rows.padded(4)
    assert [x.tolist() for x in (padded.tokens, padded.slots, padded.positions)] == [
        [5, 6, 7, 0], [1, 1, 1, -1], [9, 10, 11, 0]
    ]  # fmt: skip
    assert padded.slots.dtype == torch.int32


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows", "position", "together"),
    [
        (32, 32, 2, 0, True),
        (8, 4, 8, 0, True),
        (32, 8, 4, 2047, False),
        (32, 8, 4, 2048, True),
        (32, 8, 5, 0, True),
        (12, 2, 8, 9000, False),
        (32, 32, 1, 9000, False),
    ],
)
def test_which_rows_of_one_text_read_its_keys_together(heads, kv_heads, rows, position, together):
    of, weights = [Heads(heads, kv_heads, 64, 0.125, 1e-6, None, None)], random_model(**PLAIN)
    model = CudaModel.of(weights, "cpu", torch.float16)
    assert reads_keys_together(model, of, rows, position) == together
    assert not reads_keys_together(model, [], rows, position)
    # Nor where a header of each row's output is wanted.
    assert not reads_keys_together(CudaModel.of(weights, "cpu", torch.float16, act_bits=8), of, rows, position)
    with_norm = CudaModel.of(random_model(**PLAIN | {"sub_norm": True}), "cpu", torch.float16)
    assert not reads_keys_together(with_norm, of, rows, position)


@gpu
@pytest.mark.parametrize("name", ["mha", "two queries a key", "four", "groups, real zeros", "heads of 256"])
@pytest.mark.parametrize("kv_dtype", [None, torch.int8])
def test_several_tokens_of_a_sequence(name, kv_dtype):
    weights = random_model(**PLAIN | MODELS[name])
    one, chain = decoders(weights, 2, kv_dtype=kv_dtype)
    ids = torch.randint(0, VOCAB, (150,), generator=torch.Generator().manual_seed(3)).tolist()
    expected, position, found = text(chain, ids, 1, 90)[:149], 0, []
    for count in (8, 4, 2, 3, 5, 7, *[8] * 7, *[4] * 8, 1, 1, *[2] * 15):
        rows = range(position, position + count)
        batch, segment = inputs(ids[rows.start : rows.stop], [1] * count, rows), Segment(0, count, 1, position)
        found.append(one.forward(batch, [segment]).float().cpu())
        position += count
    errors = (torch.cat(found) - expected).norm(dim=1) / expected.norm(dim=1)
    of_eight = set() if name == "groups, real zeros" else {8}
    assert {rows for rows, _ in one._steps} == {1, 2, 4} | of_eight and position == 149
    assert errors.median() < (2e-2 if kv_dtype else 2e-3)


@gpu
@BOTH
def test_codes_and_scales_are_those_of_the_chain(dtype):
    weights = random_model(**PLAIN | MODELS["two queries a key"] | {"layers": 1})
    one, chain = decoders(weights, 2, dtype, kv_dtype=torch.int8)
    for decoder in (one, chain):
        decoder.cache[0].zero_()
        decoder.scales[0].zero_()
    for position in range(70):
        batch = inputs([position % VOCAB, 3], [1, 0], [position, position])
        found, other = one.forward(batch).float(), chain.forward(batch).float()
    assert ((found - other).norm(dim=1) / other.norm(dim=1)).max() < 2e-2
    apart = (one.cache[0].int() - chain.cache[0].int()).abs()
    assert apart.max() <= 2 and (apart > 0).float().mean() < 0.05
    torch.testing.assert_close(one.scales[0].float(), chain.scales[0].float(), rtol=1e-2, atol=1e-6)


@gpu
@BOTH
@pytest.mark.parametrize(
    ("rows", "act_bits", "ffn"), [(2, 16, 384), (4, 16, 384), (4, 8, 384), (8, 8, 384), (8, 16, 1792)]
)
def test_rows_of_a_batch_come_and_go(rows, act_bits, ffn, dtype):
    weights = random_model(**PLAIN | MODELS["two queries a key"] | {"layers": 3, "ffn": ffn})
    one, chain = decoders(weights, rows, dtype, act_bits)
    for layers in zip(one.cache, chain.cache, strict=True):
        layers[0].normal_()
        layers[1].copy_(layers[0])
    positions, generator, apart = [0, 63, 64, 65, 100, 17, 1, 150][:rows], torch.Generator().manual_seed(1), []
    for step in range(12):
        slots = [-1 if (row + step) % 5 == 0 else row for row in range(rows)]
        batch = inputs(torch.randint(0, VOCAB, (rows,), generator=generator).tolist(), slots, positions)
        found, other = one.forward(batch).float(), chain.forward(batch).float()
        assert torch.equal(one.forward(batch).float()[[s >= 0 for s in slots]], found[[s >= 0 for s in slots]])
        live = [row for row in range(rows) if slots[row] >= 0]
        apart += ((found - other)[live].norm(dim=1) / other[live].norm(dim=1)).tolist()
        positions = [p + (row in live) for row, p in enumerate(positions)]
    assert torch.tensor(apart).median() < (2e-3 if dtype == torch.float16 else 2e-2)
    # What it appended is what the chain did, of most tokens.
    for mine, theirs in zip(one.cache, chain.cache, strict=True):
        changed = (mine - theirs).float().norm(dim=-1) / theirs.float().norm(dim=-1)
        assert (changed > 0).float().mean() < 0.1 and changed[changed > 0].median() < 2e-2


@gpu
def test_eight_rows_whose_warps_pass_sums_on_of_one_tile_after_another(monkeypatch):
    monkeypatch.setattr("trirun_kernels.decoder.step.cuda.MOST_WEIGHTS", 1 << 30)
    sizes = {"hidden": 4096, "ffn": 12288, "heads": 32, "kv_heads": 8, "head_dim": 128, "layers": 1}
    weights = random_model(**PLAIN | sizes)
    one, _ = decoders(weights, 8)
    assert 8 in one.step_rows
    batch = inputs(range(8), range(8), [0] * 8)
    found = one.forward(batch)
    expected = torch.cat([decoder_reference.forward(weights, torch.tensor([token]), act_bits=16) for token in range(8)])
    errors = (found.float().cpu() - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 1e-3 and errors.max() < 1e-2
    assert all(torch.equal(one.forward(batch), found) for _ in range(50))


@gpu
def test_a_kernel_that_gave_up_says_so_and_gives_no_numbers():
    one, _ = decoders(random_model(**PLAIN), 1)
    batch = inputs([3], [0], [0])
    assert torch.isfinite(one.forward(batch)).all() and not one.gave_up
    one._steps[1, False]._messages[4:8] = 1
    assert torch.isnan(one.forward(batch)).all() and one.gave_up


@gpu
def test_it_is_captured_in_a_graph():
    one, _ = decoders(random_model(**PLAIN), 2)
    batch = inputs([5, 9], [0, 1], [0, 0])
    expected = one.forward(batch)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.graph(graph, stream=stream):
        found = one.forward(batch)
    for _ in range(300):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
