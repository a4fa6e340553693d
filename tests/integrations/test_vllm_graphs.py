"""The plugin's linear method under CUDA graphs, as vLLM captures them, at the sizes of Llama 2 7B: GPU and vLLM."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from trirun_kernels.weights.packing import dequantize
from trirun_kernels.weights.spec import QuantSpec

pytest.importorskip("vllm", reason="vLLM is not installed")

from trirun_cli.integrations.vllm_linear import TrirunLinearMethod, set_packed
from trirun_cli.models.synthetic import random_ternary

pytestmark = pytest.mark.gpu
LAYERS = {"qkv": (3 * 4096, 4096), "gate_up": (2 * 11008, 4096), "down": (4096, 11008)}


@pytest.mark.parametrize("group_size", [-1, 128])
@pytest.mark.parametrize("act_bits", [16, 8])
@pytest.mark.parametrize("name", LAYERS)
def test_apply_replays_on_changed_inputs(name: str, act_bits: int, group_size: int) -> None:
    (n, k), spec = LAYERS[name], QuantSpec(group_size, 1.0)
    generator = torch.Generator("cuda").manual_seed(0)
    layer, method = nn.Module(), TrirunLinearMethod(spec, act_bits, name)
    packed = random_ternary(n, k, spec, generator)
    set_packed(layer, packed)
    weight = dequantize(packed, torch.float32)
    graphs, pool = {}, torch.cuda.graph_pool_handle()
    # vLLM captures the most rows first, all of them in one pool.
    for rows in (256, 64, 8, 1):
        x = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda")
        method.apply(layer, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            y = method.apply(layer, x)
        graphs[rows] = graph, x, y
    for rows in (1, 256, 8, 64, 1):
        graph, x, y = graphs[rows]
        x.normal_(generator=generator)
        graph.replay()
        assert torch.equal(y, method.apply(layer, x))
        exact = x.float() @ weight.T
        # bfloat16 keeps 8 bits of a product; a row in 8 bits keeps 7 of its largest number.
        error = (y.float() - exact).norm() / exact.norm()
        assert error < (4e-3 if act_bits == 16 else 2e-2), (rows, error.item())
