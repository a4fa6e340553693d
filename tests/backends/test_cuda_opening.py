"""What a GPU is given of a checkpoint, and how many pages of cache; no GPU needed."""

from __future__ import annotations

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from trirun_kernels.decoder.cuda_cache import MixerCaches, position_bytes
from trirun_kernels.decoder.cuda_ops import PAGE
from trirun_kernels.decoder.shape import DecoderShape
from trirun_kernels.weights.packing import dequantize

from tests.small_models import FAMILIES, SIZES, save_ternary
from trirun_cli.backends.cpu.weights import decoder_weights
from trirun_cli.backends.cuda import opening
from trirun_cli.backends.cuda.opening import CACHE_SHARE, cache_pages
from trirun_cli.backends.cuda.runner import runner_name
from trirun_cli.backends.cuda.weights import load_model
from trirun_cli.checkpoint.reader import Checkpoint
from trirun_cli.errors import InputError, OutOfMemoryError
from trirun_cli.models.description import UnsupportedModel, decoder_shape, gpu_decoder_shape

SHAPE = DecoderShape.uniform(layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
PAGE_16 = 2 * 32 * 32 * 64 * 128 * 2  # bytes of 64 positions of Llama-2-7B in 16 bits
PAGE_8 = 2 * 32 * 32 * 64 * 130  # a scale of two bytes per head


@pytest.mark.parametrize("kind, page_bytes", [(torch.float16, PAGE_16), (torch.int8, PAGE_8)])
def test_pages_fill_what_is_free(monkeypatch, kind, page_bytes):
    free = 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    model = SimpleNamespace(shape=SHAPE, device="cuda:0")
    free = 20 << 30
    assert cache_pages(model, 64, 4096, kind) == (int((free - 64 * 32000 * 20) * CACHE_SHARE) // page_bytes, None)
    # No more than all slots can use.
    assert cache_pages(model, 2, 1000, kind) == (2 * 16 + 1, None)
    free = 17 * page_bytes
    with pytest.raises(OutOfMemoryError, match="a context of 1024") as caught:
        cache_pages(model, 1, 1024, kind)
    assert ("int8" in str(caught.value.fix)) == (kind != torch.int8)


def test_layers_that_see_a_window_get_the_pages_that_they_keep(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    sliding = [replace(layer, mixer=replace(layer.mixer, window=1024)) for layer in SHAPE.layers[:24]]
    model = SimpleNamespace(shape=replace(SHAPE, layers=(*sliding, *SHAPE.layers[24:])), device="cuda:0")
    page, windowed_page, kept, step = PAGE_16 // 4, PAGE_16 * 3 // 4, 1024 // 64 + 3, 2 * 2048 // 64
    free = 1 << 40
    assert cache_pages(model, 4, 32768, torch.float16) == (4 * 512 + 1, 4 * kept + step + 1)
    # A context that is hardly longer than what is kept gains nothing from tables of their own.
    assert cache_pages(model, 4, 4096, torch.float16) == (4 * 64 + 1, None)
    free = 20 << 30
    pages, windowed = cache_pages(model, 64, 32768, torch.float16)
    taken, budget = pages * page + windowed * windowed_page, int((free - 64 * 32000 * 20) * CACHE_SHARE)
    assert budget - PAGE_16 <= taken <= budget and pages > 512 and windowed > kept + step
    free = 512 * page + (kept + step) * windowed_page
    with pytest.raises(OutOfMemoryError, match="a context of 32768"):
        cache_pages(model, 1, 32768, torch.float16)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"])
def test_what_is_missing_is_left_to_transformers_to_judge(plain_model, copy_of, name):
    model = copy_of(plain_model)
    tensors = load_file(model / "model.safetensors")
    del tensors[name]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=f"no tensor {name}"):
        load_model(model, device=torch.device("cpu"))


def test_of_experts_a_gpu_reads_what_a_cpu_reads(tmp_path):
    *_, packed = save_ternary("gemma4_text", FAMILIES["gemma4_text, experts"], tmp_path)
    source = Checkpoint(packed)
    of_cpu = decoder_weights(source, source.format, 64).layers
    layers = load_model(packed, device=torch.device("cpu"), dtype="float16").layers
    for layer, expected in zip(layers, of_cpu, strict=True):
        own, router = layer.mixture, torch.from_numpy(expected.mixture.router)
        assert torch.equal(own.router, router.half()) and own.bias is None and own.correction is None
        assert torch.equal(own.expert_scale, torch.from_numpy(expected.mixture.expert_scale))
        for name in ("mlp_norm", "shared_norm", "shared_post_norm", "experts_post_norm", "mlp_post_norm"):
            assert torch.equal(layer.norms[name], torch.from_numpy(getattr(expected, name))), name
    tensors = load_file(packed / "model.safetensors")
    scale = "model.layers.2.router.per_expert_scale"
    save_file(tensors | {scale: tensors[scale][1:].clone()}, packed / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"expert_scale \[7\] of 8 experts"):
        load_model(packed, device=torch.device("cpu"))


def test_inputs_of_layers_are_loaded_and_shared_caches_are_one(tmp_path):
    _, plain, packed = save_ternary("gemma4_text", FAMILIES["gemma4_text, E"], tmp_path)
    models = [load_model(path, device=torch.device("cpu"), dtype="float16") for path in (plain, packed)]
    for model, of_a_packed_one in zip(models, (False, True), strict=True):
        assert model.packed == (model.inputs.projection.product is not None) == of_a_packed_one
        assert model.inputs.table.shape == (110, 6 * 48) and model.inputs.projection.n == 6 * 48
        assert [sum(p.n for p in layer.qkv) for layer in model.layers] == [256, 512, 256, 128, 128, 256]
        assert "k_norm" not in model.layers[3].norms and all("input_norm" in layer.norms for layer in model.layers)
        caches = MixerCaches(model.shape, 2, 3, 4, model.dtype, model.dtype, model.device)
        assert len(caches.keys_and_values) == 3 and caches.attention[5] is caches.attention[1]
        assert caches.nbytes == 3 * PAGE * position_bytes(model.shape, model.dtype)
    assert torch.equal(models[0].inputs.table, models[1].inputs.table)
    assert torch.equal(models[0].inputs.projection.weight, dequantize(models[1].inputs.projection.weight).half())
    tensors = load_file(packed / "model.safetensors")
    for name, change, error in (
        ("model.per_layer_projection_norm.weight", lambda x: x[1:].contiguous(), InputError),
        ("model.embed_tokens_per_layer.weight", lambda x: x[1:].contiguous(), InputError),
        ("model.per_layer_projection_norm.weight", None, UnsupportedModel),
        ("model.embed_tokens_per_layer.weight", None, UnsupportedModel),
    ):
        shutil.copytree(packed, tmp_path / "changed", dirs_exist_ok=True)
        changed = {key: value for key, value in tensors.items() if key != name}
        changed |= {} if change is None else {name: change(tensors[name])}
        save_file(changed, tmp_path / "changed" / "model.safetensors", {"format": "pt"})
        with pytest.raises(error, match="per_layer"):
            load_model(tmp_path / "changed", device=torch.device("cpu"))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_cpu_runs_a_gpu_runs(name):
    config = {"model_type": name.split(",")[0]} | SIZES | FAMILIES[name]
    assert gpu_decoder_shape(config) == decoder_shape(config)


def test_sizes_that_the_kernels_do_not_have_are_refused():
    config = {"model_type": "qwen3_moe"} | SIZES | FAMILIES["qwen3_moe"]
    with pytest.raises(UnsupportedModel, match="experts of size 40"):
        gpu_decoder_shape(config | {"moe_intermediate_size": 40})


@pytest.mark.parametrize(
    ("free_gib", "kind", "asked", "slots"),
    [(137, "auto", None, 256), (20, "auto", None, 67), (20, "int8", None, 133), (137, "auto", 24, 24)],
)
def test_slots_that_nobody_asked_for_follow_the_memory(monkeypatch, plain_model, free_gib, kind, asked, slots):
    model = SimpleNamespace(shape=SHAPE, dtype=torch.float16, device="cuda:0")
    monkeypatch.setattr(opening, "load_model", lambda *args, **options: model)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_gib << 30, 141 << 30))
    monkeypatch.setattr(opening, "chosen_context", lambda config, asked: 4096)
    monkeypatch.setattr(opening, "CudaDecoder", lambda model, **sizes: sizes)
    monkeypatch.setattr(opening, "CudaRunner", lambda sizes, **options: SimpleNamespace(**sizes))
    options = {"dtype": "auto", "act_bits": None, "context": None, "kv_cache_dtype": kind}
    runner = opening.open_cuda(plain_model, device="cuda:0", slots=asked, **options)
    assert runner.slots == slots and bool(runner.why_slots) == (asked is None)


@pytest.mark.parametrize(
    ("rows", "steps"),
    [((), ""), ((1,), ", steps of 1 row in one kernel"), ((1, 2, 4), ", steps of 1, 2, 4 rows in one kernel")],
)
def test_what_runs_a_model_is_told(rows, steps, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    model = SimpleNamespace(dtype=torch.float16, act_bits=16, packed=True, device=None)
    decoder = SimpleNamespace(model=model, scales=None, step_rows=rows)
    assert runner_name(decoder) == f"native decoder on a GPU, 16-bit activations, float16{steps}"
