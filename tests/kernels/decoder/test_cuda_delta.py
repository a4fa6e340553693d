"""Gated DeltaNet's CUDA kernels against their reference."""

from __future__ import annotations

import ctypes

import pytest
import torch
from trirun_kernels.decoder.cuda_delta import DeltaCache, DeltaHeads, DeltaStruct, delta_decode, delta_prompt
from trirun_kernels.decoder.shape import GatedDelta
from trirun_kernels.gemm.activations import int2_gemm_quantized
from trirun_kernels.gemm.cuda import activation_bytes
from trirun_kernels.weights.packing import dequantize

from tests.kernels.decoder.cuda_support import BOTH, ROUNDING, error, gpu, random_packed
from tests.kernels.decoder.delta_support import TAPS, RandomLayer

# Key heads, value heads, key_dim, value_dim: Qwen3.5's, one of a kind with heads that share no keys, and small ones.
SIZES = pytest.mark.parametrize("sizes", [(4, 12, 128, 128), (3, 6, 64, 96), (2, 2, 16, 32)])
SLOTS = 5


class OnDevice:
    """A layer with the caches of some slots, full of NaN where nothing was written."""

    def __init__(self, layer, dtype, by_head=False):
        self.layer, self.dtype, self.by_head = layer, dtype, by_head
        layer.gate_weight = layer.gate_weight.to(dtype).float()
        there = {name: getattr(layer, name).cuda() for name in ("conv", "decay_rate", "decay_bias", "norm")}
        shape = GatedDelta(layer.key_heads, layer.value_heads, layer.key_dim, layer.value_dim, TAPS, by_head)
        self.heads = DeltaHeads(shape, layer.gate_weight.to("cuda", dtype), eps=layer.eps, **there)
        state = torch.full((SLOTS, layer.value_heads, layer.key_dim, layer.value_dim), torch.nan, device="cuda")
        ring = torch.full((SLOTS, TAPS, layer.channels), torch.nan, dtype=dtype, device="cuda")
        self.cache = DeltaCache(state, ring)

    def draw(self, m):
        """Rows that this dtype has, on the CPU."""
        return tuple(part.to(self.dtype) for part in self.layer.rows(m))

    def inputs(self, rows):
        """x, z and hidden on the device: slices of one projection."""
        qkv, z, hidden = (part.cuda() for part in rows)
        if self.by_head:
            whole = self.layer.by_head(qkv, z)
            return whole, whole[:, self.heads.z_column :], hidden
        whole = torch.cat((qkv, z), 1)
        return whole, whole[:, self.layer.channels :], hidden

    def decode(self, rows, slots, positions):
        x, z, hidden = self.inputs(rows)
        y = torch.full((x.shape[0], self.layer.values), torch.nan, dtype=self.dtype, device="cuda")
        delta_decode(x, z, hidden, y, self.heads, self.cache, _int(slots), _int(positions))
        return y.cpu()

    def prompt(self, rows, segments):
        """Segments: (slot, position, count)."""
        x, z, hidden = self.inputs(rows)
        y = torch.full((x.shape[0], self.layer.values), torch.nan, dtype=self.dtype, device="cuda")
        slots = [slot for slot, _, count in segments for _ in range(count)]
        positions = [position + i for _, position, count in segments for i in range(count)]
        starts = torch.tensor([0] + [count for *_, count in segments]).cumsum(0)
        gates = (hidden.float() @ self.heads.gate_weight.float().T).to(self.dtype)
        delta_prompt(x, z, gates, y, self.heads, self.cache, _int(slots), _int(positions), _int(starts))
        return y.cpu()


def _int(values):
    return torch.as_tensor(values).to("cuda", torch.int32)


def test_the_structure_has_the_size_of_trirun_h():
    assert ctypes.sizeof(DeltaStruct) == 13 * 8 + 8 + 4 * 8 + 8 * 8 + 11 * 4 + 4


@gpu
@BOTH
@SIZES
@pytest.mark.parametrize("by_head", [False, True])
def test_decoding(sizes, dtype, by_head):
    layer = RandomLayer(sizes, hidden=5120 if sizes[0] == 4 else 64)
    device, kept = OnDevice(layer, dtype, by_head), [layer.fresh() for _ in range(SLOTS)]
    # Slots begin at different steps; the second row is padding.
    lengths = [0] * SLOTS
    for step in range(12):
        slots = [3, -1, 0] if step < 4 else [3, -1, 0, 4, 1]
        rows = device.draw(len(slots))
        found = device.decode(rows, slots, [0 if slot < 0 else lengths[slot] for slot in slots])
        for i, slot in enumerate(slots):
            if slot < 0:
                continue
            expected = layer.expected(tuple(part[i : i + 1] for part in rows), kept[slot])
            assert error(found[i : i + 1], expected) < ROUNDING[dtype]
            assert error(device.cache.state[slot].cpu(), kept[slot].state) < 1e-5
            lengths[slot] += 1


@gpu
@BOTH
@SIZES
@pytest.mark.parametrize("by_head", [False, True])
def test_prompts_in_pieces(sizes, dtype, by_head):
    layer = RandomLayer(sizes)
    device, kept = OnDevice(layer, dtype, by_head), [layer.fresh() for _ in range(SLOTS)]
    lengths = [0] * SLOTS
    # Pieces of one token, within a chunk, of whole chunks and beyond, of several slots at once.
    for pieces in ({2: 1, 0: 300}, {2: 2, 4: 31}, {2: 3, 0: 32, 4: 65}, {4: 1, 2: 7, 0: 130}):
        segments = [(slot, lengths[slot], count) for slot, count in pieces.items()]
        rows = device.draw(sum(pieces.values()))
        found, first = device.prompt(rows, segments), 0
        for slot, _, count in segments:
            expected = layer.expected(tuple(part[first : first + count] for part in rows), kept[slot])
            # b and a are rounded to 16 bits on the way.
            assert error(found[first : first + count], expected) < 4 * ROUNDING[dtype]
            assert error(device.cache.state[slot].cpu(), kept[slot].state) < 4 * ROUNDING[dtype]
            first += count
            lengths[slot] += count
    # Decoding goes on from what prompts have left, and prompts from there.
    rows = device.draw(2)
    found = device.decode(rows, [0, 2], [lengths[0], lengths[2]])
    for i, slot in enumerate((0, 2)):
        expected = layer.expected(tuple(part[i : i + 1] for part in rows), kept[slot])
        assert error(found[i : i + 1], expected) < 4 * ROUNDING[dtype]
    rows = device.draw(3)
    expected = layer.expected(rows, kept[2])
    assert error(device.prompt(rows, [(2, lengths[2] + 1, 3)]), expected) < 4 * ROUNDING[dtype]


@gpu
@BOTH
def test_limbs_are_those_of_the_values(dtype):
    layer = RandomLayer((2, 4, 128, 128))
    w = random_packed(64, layer.values).to("cuda")
    for m in (1, 3, 5):
        device = OnDevice(layer, dtype)
        rows, slots = device.draw(m), [-1 if i == 1 else i for i in range(m)]
        x, z, hidden = device.inputs(rows)
        limbs = torch.empty(activation_bytes(m, layer.values, 16), dtype=torch.uint8, device="cuda")
        delta_decode(x, z, hidden, None, device.heads, device.cache, _int(slots), _int([0] * m), limbs=limbs)
        found = int2_gemm_quantized(limbs, m, w, dtype=torch.float32)
        for i, slot in enumerate(slots):
            expected = layer.expected(tuple(part[i : i + 1] for part in rows), layer.fresh()) @ dequantize(w).cpu().T
            if slot < 0:
                assert not found[i].any()
            else:
                assert error(found[i : i + 1].cpu(), expected) < 1e-3
