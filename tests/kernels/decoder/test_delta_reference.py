"""The reference of Gated DeltaNet layers against transformers' functions."""

from __future__ import annotations

import pytest
import torch
from trirun_kernels.decoder import delta_reference as reference

from tests.kernels.decoder.delta_support import RandomLayer


@pytest.mark.parametrize("length", [1, 5, 64, 150])
def test_the_delta_rule_is_that_of_transformers(length):
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    layer = RandomLayer((2, 4, 32, 16))
    q, k = layer.draw(length, 2, 32), layer.draw(length, 2, 32)
    v, start = layer.draw(length, 4, 16), layer.draw(4, 32, 16) * 0.1
    g, beta = -layer.draw(length, 4).abs(), layer.draw(length, 4).sigmoid()
    state = start.clone()
    found = reference.delta_rule(q, k, v, g, beta, state)
    batched = [part.unsqueeze(0) for part in (q, k, v)]
    options = {
        "g": g.unsqueeze(0), "beta": beta.unsqueeze(0), "initial_state": start.unsqueeze(0),
        "output_final_state": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    for theirs in (modeling.torch_recurrent_gated_delta_rule, modeling.torch_chunk_gated_delta_rule):
        out, last = theirs(*batched, **options)
        assert (found - out[0]).abs().max() < 2e-6
        assert (state - last[0]).abs().max() < 1e-5


def test_the_layer_is_that_of_transformers():
    configuration = pytest.importorskip("transformers.models.qwen3_5.configuration_qwen3_5")
    modeling = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    layer = RandomLayer((2, 6, 16, 32), hidden=64)
    config = configuration.Qwen3_5TextConfig(
        hidden_size=64, linear_num_key_heads=2, linear_num_value_heads=6, linear_key_head_dim=16,
        linear_value_head_dim=32, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    theirs = modeling.Qwen3_5GatedDeltaNet(config, 0).float().eval()
    with torch.no_grad():
        theirs.conv1d.weight.copy_(layer.conv.T.unsqueeze(1))
        theirs.A_log.copy_((-layer.decay_rate).log())
        theirs.dt_bias.copy_(layer.decay_bias)
        theirs.norm.weight.copy_(layer.norm)
        b, a = layer.gate_weight.split(6)
        theirs.in_proj_b.weight.copy_(b)
        theirs.in_proj_a.weight.copy_(a)
        x = layer.draw(1, 70, 64)
        rows = theirs.in_proj_qkv(x)[0], theirs.in_proj_z(x)[0], x[0]
        kept = layer.fresh()
        # In pieces, as prompts come.
        pieces = [slice(0, 1), slice(1, 3), slice(3, 40), slice(40, 70)]
        found = torch.cat([layer.expected(tuple(part[piece] for part in rows), kept) for piece in pieces])
        assert (theirs.out_proj(found) - theirs(x)[0]).abs().max() < 1e-5
