"""Wrong calls of the CPU library's C functions: an error code, never a crash; scripts/fuzz_abi.py makes many more."""

from __future__ import annotations

import ctypes
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from abi_calls import FUNCTIONS, Maker
from abi_memory import GuardedMemory
from fuzz_abi import run
from trirun_kernels import native
from trirun_kernels.decoder.structs import DecoderStruct


def test_every_function_of_the_library_is_called(repo_root: Path) -> None:
    header = (repo_root / "kernels" / "csrc" / "trirun.h").read_text()
    declared = set(re.findall(r"\btrirun_cpu_(\w+)\(", header))
    assert declared - {"abi_version", "isa"} == set(FUNCTIONS)


def test_wrong_calls_end_in_an_error_code(repo_root: Path) -> None:
    command = [sys.executable, "scripts/fuzz_abi.py", "--calls", "3000", "--seconds", "60"]
    done = subprocess.run(command, cwd=repo_root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["calls"] > 100 and report["errors"] > report["calls"] / 2


@pytest.fixture
def maker() -> Maker:
    return Maker(random.Random(1), GuardedMemory(random.Random(1)))


def attending(maker: Maker) -> DecoderStruct:
    """A decoder of one layer, with attention."""
    while True:
        decoder, _ = maker.decoder()
        if decoder.layers == 1 and not decoder.layer[0].delta:
            return decoder


@pytest.mark.parametrize(("name", "at"), [("int2_gemm", 6), ("int2_gemm", 9), ("quantize", 4), ("int2_gemm_act", 6)])
def test_a_stride_beyond_all_memory_is_refused(maker: Maker, name: str, at: int) -> None:
    call = maker.call(name)
    assert run(call) == 0
    call.arguments[at] = 2**62
    assert run(call) == native.BAD_SHAPE


def test_sizes_whose_product_leaves_64_bits_have_no_size(maker: Maker) -> None:
    assert native.cpu().trirun_cpu_act_bytes(2**31, 2**31, 16) == 0
    decoder = attending(maker)
    decoder.slots = decoder.context = decoder.layer[0].context = 2**31
    assert native.cpu().trirun_cpu_decoder_cache_bytes(ctypes.byref(decoder), 0) == 0
    assert native.cpu().trirun_cpu_decoder_workspace(ctypes.byref(decoder), 2**40) == 0


def test_a_rotation_wider_than_its_head_is_refused_however_wide(maker: Maker) -> None:
    decoder = attending(maker)
    assert native.cpu().trirun_cpu_decoder_workspace(ctypes.byref(decoder), 1) > 0
    decoder.layer[0].rotary_half = 2**62  # twice that is no more than a head
    assert native.cpu().trirun_cpu_decoder_workspace(ctypes.byref(decoder), 1) == 0


def test_products_of_unlike_layers_are_refused(maker: Maker) -> None:
    while True:
        call = maker.call("decoder_products")
        decoder = call.arguments[0]
        layers = decoder.layer[: decoder.layers]
        if len({layer.ffn for layer in layers}) == 2 and not any(layer.mixture for layer in layers):
            break
    assert run(call) == native.UNSUPPORTED
