"""Weights of more than 2^31 elements and caches of more than 2^31 bytes, of pages that nothing has touched."""

from __future__ import annotations

import ctypes
import mmap
import random

import numpy as np
import pytest
from abi_calls import Maker
from abi_memory import GuardedMemory
from trirun_kernels import native
from trirun_kernels.decoder.structs import DecoderStruct, SegmentStruct
from trirun_kernels.native import Int2Struct


def untouched(size: int) -> tuple[mmap.mmap, int]:
    """Zeros that take no memory, and their address; the mapping has to be kept."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000))
    return memory, ctypes.addressof(ctypes.c_char.from_buffer(memory))


def product(words: int, scales: int, n: int, k: int, x: np.ndarray) -> np.ndarray:
    weight = Int2Struct(words, scales, None, n, k, -1, 1.0)
    y = np.empty((1, n), np.float32)
    code = native.cpu().trirun_cpu_int2_gemm(
        ctypes.byref(weight), n, k, x.ctypes.data, 0, 1, k, None, y.ctypes.data, n, 16, 2
    )
    assert code == 0
    return y


def test_a_weight_of_more_than_two_billion_elements() -> None:
    n, k = 2**16 + 64, 2**15 + 128  # 2^31 + 2^23 + ...
    assert n * k > 2**31
    rng = np.random.default_rng(0)
    memory, words = untouched(n * k // 4)
    tile = k * 64 // 4  # bytes of the last n tile
    last = rng.integers(0, 256, tile, np.uint8)
    ctypes.memmove(words + n * k // 4 - tile, last.ctypes.data, tile)
    scales, x = np.ones(n, np.float16), rng.standard_normal((1, k)).astype(np.float32)
    y = product(words, scales.ctypes.data, n, k, x)
    aligned = np.empty(tile + 64, np.uint8)
    at = -aligned.ctypes.data % 64
    aligned[at : at + tile] = last
    alone = product(aligned[at:].ctypes.data, scales.ctypes.data, 64, k, x)
    np.testing.assert_array_equal(y[:, -64:], alone)
    # Codes of 0 are minus one: all other outputs are one number.
    assert np.unique(y[:, :-64]).size == 1 and y[0, 0] == pytest.approx(-x.sum(), abs=0.1)
    del memory


def logits(decoder: DecoderStruct, slot: int) -> np.ndarray:
    """Of the third token of a sequence in a slot."""
    rows, library = 3, native.cpu()
    segment = (SegmentStruct * 1)(SegmentStruct(slot, 0, rows))
    tokens, wanted = (ctypes.c_int64 * rows)(0, 1, 2), (ctypes.c_int64 * 1)(2)
    size = library.trirun_cpu_decoder_workspace(ctypes.byref(decoder), rows)
    work = np.empty(size + 64, np.uint8)
    place = work.ctypes.data + -work.ctypes.data % 64
    out = np.empty(decoder.vocab, np.float32)
    code = library.trirun_cpu_decoder_step(
        ctypes.byref(decoder), segment, 1, tokens, rows, wanted, 1, out.ctypes.data, place, size, 2
    )
    assert code == 0
    return out


def test_a_cache_of_more_than_two_billion_bytes() -> None:
    maker = Maker(random.Random(5), GuardedMemory(random.Random(5)))
    while True:
        decoder, _ = maker.decoder()
        if decoder.layers == 1 and not decoder.layer[0].delta:
            break
    layer = decoder.layer[0]
    size = native.cpu().trirun_cpu_decoder_cache_bytes(ctypes.byref(decoder), 0) // decoder.slots
    expected = logits(decoder, 0)
    decoder.slots = 2**31 // size + 3
    whole = native.cpu().trirun_cpu_decoder_cache_bytes(ctypes.byref(decoder), 0)
    assert whole == size * decoder.slots > 2**31 + size
    (keys, layer.keys), (values, layer.values) = untouched(whole), untouched(whole)
    np.testing.assert_array_equal(logits(decoder, decoder.slots - 1), expected)
    assert np.isfinite(expected).any()
    # It lies where it should: the last slot was written.
    assert any(ctypes.string_at(layer.values + whole - size, size)) and not any(ctypes.string_at(layer.values, size))
    del keys, values
