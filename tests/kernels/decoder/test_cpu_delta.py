"""Hybrids of attention and Gated DeltaNet on the native decoder of the CPU, against the reference."""

from __future__ import annotations

import pytest
import torch
from trirun_kernels import QuantSpec, native
from trirun_kernels.decoder import reference
from trirun_kernels.decoder.cpu import CpuDecoder, Segment
from trirun_kernels.decoder.shape import Attention, DecoderShape, FeedForward, GatedDelta, LayerShape
from trirun_kernels.decoder.weights import DecoderWeights, DeltaWeights, LayerWeights

from tests.kernels.decoder.delta_support import TAPS, RandomLayer
from tests.kernels.decoder.models import random_linear

HIDDEN, FFN, VOCAB, CONTEXT = 96, 160, 203, 192


def hybrid(*, by_head=False, sizes=(2, 6, 32, 16), gates=torch.float32, seed=0):
    """Two Gated DeltaNet layers before each of attention with an output gate."""
    generator, spec = torch.Generator().manual_seed(seed), QuantSpec(32, 1.0)
    attention = Attention(4, 2, 32, 32**-0.5, rotary_half=8, gated=True)
    delta, feed_forward = GatedDelta(*sizes, TAPS, by_head), FeedForward(FFN)
    layers = tuple(LayerShape(mixer, feed_forward) for mixer in (delta, delta, attention, delta))
    shape = DecoderShape(HIDDEN, VOCAB, layers, 1e-6)

    def norm(size):
        return torch.rand(size, generator=generator) + 0.5

    def layer(index, each):
        linears = {n: random_linear(generator, *size, spec, False) for n, size in each.linear_sizes(HIDDEN).items()}
        parts = {"q": None, "k": None, "v": None}
        if isinstance(each.mixer, GatedDelta):
            own = RandomLayer(sizes, hidden=HIDDEN, seed=index + 1)
            parts["delta"] = DeltaWeights(
                linears.pop("qkv"), linears.pop("z", None), own.gate_weight.to(gates), own.conv, own.decay_rate,
                own.decay_bias, own.norm,
            )  # fmt: skip
        else:
            parts |= {"q_norm": norm(32), "k_norm": norm(32)}
        return LayerWeights(**(parts | linears), attention_norm=norm(HIDDEN), mlp_norm=norm(HIDDEN))

    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator) for _ in range(2))
    angles = torch.arange(CONTEXT).unsqueeze(1) * 10000.0 ** -(torch.arange(8) / 8)
    made = [layer(index, each) for index, each in enumerate(layers)]
    return DecoderWeights(shape, made, embedding, head / HIDDEN**0.5, norm(HIDDEN), [(angles.cos(), angles.sin())])


def tokens_of(count, seed=3):
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def run(decoder, pieces, tokens, slot=0, position=0):
    """Logits of one sequence in pieces of these lengths."""
    out = []
    for count in pieces:
        piece = tokens[position : position + count]
        out.append(decoder.step([Segment(slot, position, count)], piece, torch.arange(count)).clone())
        position += count
    return torch.cat(out)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("sizes", [(2, 6, 32, 16), (4, 4, 16, 128)])
def test_logits_are_those_of_the_reference(by_head, sizes):
    weights, tokens = hybrid(by_head=by_head, sizes=sizes), tokens_of(150)
    expected = reference.forward(weights, tokens)
    decoder = CpuDecoder(weights, context=CONTEXT, kv_dtype="float32", threads=2)
    found = run(decoder, (150,), tokens)
    # Some states magnify what a rounding of the 16-bit activations changes.
    errors = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert errors.median() < 1e-5 and errors.max() < 1e-2


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_however_its_sequence_is_cut(threads):
    weights, tokens = hybrid(gates=torch.float16), tokens_of(120)
    whole = run(CpuDecoder(weights, context=CONTEXT, threads=1), (120,), tokens)
    decoder = CpuDecoder(weights, context=CONTEXT, slots=2, threads=threads)
    # The second time in a slot that another sequence has left.
    for pieces in ((1, 1, 1, 1, 1, 2, 33, 70, 10), (64, 1, 3, 52)):
        assert torch.equal(run(decoder, pieces, tokens, slot=1), whole)


def test_every_instruction_set_gives_the_same_bits():
    weights, tokens, library, found = hybrid(), tokens_of(90), native.cpu(), {}
    try:
        for name in ("portable", "avx2", "avx512vnni", "amx"):
            if library.trirun_cpu_set_isa(name.encode()) == 0:
                found[name] = run(CpuDecoder(weights, context=CONTEXT, threads=2), (1, 40, 49), tokens)
    finally:
        library.trirun_cpu_set_isa(None)
    assert "portable" in found and len(found) > 1
    assert all(torch.equal(logits, found["portable"]) for logits in found.values())


def test_sequences_do_not_disturb_each_other():
    weights = hybrid()
    decoder, texts = CpuDecoder(weights, context=CONTEXT, slots=3, threads=2), [tokens_of(60, i) for i in range(3)]
    alone = [run(CpuDecoder(weights, context=CONTEXT, threads=2), (60,), text) for text in texts]
    at, found = [0, 0, 0], [[], [], []]
    for counts in ((7, 0, 1), (1, 20, 1), (0, 1, 30), (1, 1, 1), (51, 38, 27)):
        present = [slot for slot in range(3) if counts[slot]]
        segments = [Segment(slot, at[slot], counts[slot]) for slot in present]
        rows = torch.cat([texts[slot][at[slot] : at[slot] + counts[slot]] for slot in present])
        logits = decoder.step(segments, rows, torch.arange(len(rows))).split([counts[slot] for slot in present])
        for slot, part in zip(present, logits, strict=True):
            found[slot].append(part.clone())
            at[slot] += counts[slot]
    for parts, expected in zip(found, alone, strict=True):
        assert torch.equal(torch.cat(parts), expected)


def test_a_state_cannot_go_back():
    decoder = CpuDecoder(hybrid(), context=CONTEXT, slots=2, threads=1)
    assert not decoder.can_rewind
    with pytest.raises(ValueError, match="64 positions of slot 0 to 1"):
        decoder.copy_prefix(0, 1, 64)


def test_a_weight_of_another_size_is_refused():
    weights = hybrid()
    first = weights.layers[0]
    object.__setattr__(first.delta, "conv", first.delta.conv[:2])
    with pytest.raises(ValueError, match=r"layer 0 conv must be float32 \[4, 224\], got float32 \[2, 224\]"):
        CpuDecoder(weights, context=CONTEXT, threads=1)
