"""Files that the formats' own libraries wrote, with the values that these read from them."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.formats.packed_modules import packed_module
from trirun_cli.checkpoint.model_dir import ModelDir


@pytest.fixture
def foreign_file():
    """:func:`packed_module`, each test's own."""
    return packed_module


@pytest.fixture
def model_dir(tmp_path):
    """``model_dir(tensors, **config)``: a directory of one module ``a``, whose tensors are called ``a.<name>``."""

    def make(tensors, **config):
        named = {f"a.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        save_file(named, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text(json.dumps(config))
        return ModelDir(tmp_path)

    return make


@pytest.fixture
def ternary():
    """A random ternary weight: ``ternary(n, k, group_size)``; ``top`` is its highest code."""
    from trirun_gptq.layer.quantized import Quantized
    from trirun_kernels import QuantSpec

    def make(n=32, k=256, group_size=128, *, zero=1.0, low=0, top=2):
        generator = torch.Generator().manual_seed(n + k)
        spec = QuantSpec(group_size, zero)
        codes = torch.randint(low, top + 1, (n, k), generator=generator, dtype=torch.uint8)
        scales = (torch.rand(n, spec.groups(k), generator=generator) * 0.1 + 0.01).half()
        return Quantized(codes, scales, None, spec)

    return make


@pytest.fixture
def library():
    """Import a library of the format's own, or skip: ``library("compressed_tensors")``."""

    def load(name):
        return sys.modules.get(name) or pytest.importorskip(name)

    return load
