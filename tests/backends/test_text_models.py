"""Language models inside models that also see run natively, as text models."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.small_models import FAMILIES, SIZES, open_engine
from trirun_cli.backends.cpu.decoder import NativeDecoder
from trirun_cli.backends.registry import open_runner
from trirun_cli.engine.request import Request
from trirun_cli.engine.sampling import SamplingParams
from trirun_cli.workflows.pack import pack

VISION = {
    "hidden_size": 64,
    "embed_dim": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 4,
    "num_heads": 4,
    "head_dim": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
    "image_size": 32,
    "patch_size": 8,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
MODELS = {
    "gemma3": ("gemma3_text", {"sliding_window": 24}, {"model_type": "siglip_vision_model"}),
    "gemma4": ("gemma4_text", FAMILIES["gemma4_text"], {"model_type": "gemma4_vision", "pooling_kernel_size": 2}),
    "gemma4, E": ("gemma4_text", FAMILIES["gemma4_text, E"], {"model_type": "gemma4_vision", "pooling_kernel_size": 2}),
    "gemma4, experts": (
        "gemma4_text",
        FAMILIES["gemma4_text, experts"],
        {"model_type": "gemma4_vision", "pooling_kernel_size": 2},
    ),
    "mistral3": ("mistral", {"sliding_window": None}, {"model_type": "pixtral"}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {"rope_parameters": SECTIONS}, {}),
    "qwen3_5": ("qwen3_5_text", FAMILIES["qwen3_5_text"], {}),
    "qwen3_5_moe": ("qwen3_5_moe_text", FAMILIES["qwen3_5_moe_text"], {}),
    "qwen3_vl": ("qwen3_vl_text", {"rope_parameters": SECTIONS}, {}),
}


@pytest.mark.parametrize("family", MODELS)
def test_a_model_that_sees_is_a_text_model(family, tmp_path):
    kind, text, vision = MODELS[family]
    text = SIZES | {"model_type": kind, "head_dim": 16} | text
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.split(",")[0], text_config=text, vision_config=VISION | vision)
    model = AutoModelForImageTextToText.from_config(config).eval()
    head = model.get_output_embeddings()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + (0.5 if "norm" in name else -0.5))
        for module in model.modules():
            if isinstance(module, torch.nn.Linear) and module is not head:
                module.weight.copy_(torch.randint(-1, 2, module.weight.shape) * 2.0**-3)
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                parameter.copy_(torch.randint(-1, 2, parameter.shape) * 2.0**-3)
    model.save_pretrained(tmp_path / "model")
    assert pack(tmp_path / "model", tmp_path / "packed").exact
    tokens = torch.randint(3, 96, (120,), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(input_ids=tokens.unsqueeze(0)).logits[0]
    decoder = NativeDecoder(tmp_path / "packed", kv_dtype="float32", int8_head=False, threads=1)
    found = torch.from_numpy(decoder.forward(tokens, keep=120))
    assert (found - expected).norm() / expected.norm() < 1e-3
    engine = open_engine(tmp_path / "packed", device="cpu", slots=2, exact=True)
    assert engine.name.startswith("native decoder")
    params = SamplingParams(max_tokens=8, ignore_stop_ids=True)
    written = [t.id for event in engine.generate([Request("a", tuple(tokens.tolist()), params)]) for t in event.tokens]
    with torch.inference_mode():
        whole = model(input_ids=torch.tensor([[*tokens.tolist(), *written[:-1]]])).logits[0, 119:]
    assert whole.argmax(-1).tolist() == written
    for place in ("packed", "model"):
        runner = open_runner(tmp_path / place, device="cpu", slots=1, engine="transformers")
        found = runner.logits(0, 0, tokens.tolist(), 120)
        assert (found - expected).norm() / expected.norm() < 1e-3


def test_an_older_config_has_the_text_models_settings_among_its_own(tmp_path):
    from trirun_cli.models.description import description

    flat = SIZES | {"model_type": "qwen2_5_vl", "vision_config": {}, "rope_scaling": {"type": "mrope"}}
    nested = {"model_type": "qwen2_5_vl", "text_config": SIZES | {"model_type": "qwen2_5_vl_text"}}
    assert description(json.loads(json.dumps(flat))).shape == description(nested).shape
