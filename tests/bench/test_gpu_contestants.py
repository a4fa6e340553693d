"""What trirun bench model puts on a GPU, as far as a machine without one can tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from trirun_kernels.decoder import cuda, cuda_weights
from trirun_kernels.plan.problem import Device
from trirun_kernels.weights.packing import dequantize
from trirun_kernels.weights.spec import QuantSpec

from tests.small_models import FAMILIES, SIZES
from trirun_cli.bench import contestants, cuda_contestant
from trirun_cli.models import synthetic
from trirun_cli.models.description import decoder_shape

GPU = torch.device("cuda", 0)
MIXTURES = ["qwen3_moe", "gpt_oss", "glm4_moe", "qwen3_next"]


class GpuGenerator(torch.Generator):
    """Says that it is on a GPU; numbers of fake tensors are never drawn."""

    device = GPU

    def __new__(cls, device: object) -> GpuGenerator:
        return super().__new__(cls)


def tensors(part: Any, path: str = "model") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(part, torch.Tensor):
        yield path, part
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            yield from tensors(getattr(part, field.name, None), f"{path}.{field.name}")
    elif isinstance(part, dict):
        for key, each in part.items():
            yield from tensors(each, f"{path}.{key}")
    elif isinstance(part, list | tuple):
        for index, each in enumerate(part):
            yield from tensors(each, f"{path}.{index}")


def shape_of(family: str):
    return decoder_shape({"model_type": family} | SIZES | FAMILIES[family])


def small(family: str, dtype: torch.dtype):
    cpu = torch.device("cpu")
    return synthetic.random_model(shape_of(family), QuantSpec(-1, 1.0), positions=64, device=cpu, dtype=dtype)


@pytest.mark.parametrize("family", [*MIXTURES, "qwen3", "gemma3_text"])
def test_every_tensor_of_a_random_model_is_on_the_gpu(family, monkeypatch):
    monkeypatch.setattr(torch, "Generator", GpuGenerator)
    monkeypatch.setattr(cuda_weights, "Int2Product", lambda *arguments: None)
    options = {"positions": 64, "device": GPU, "dtype": torch.bfloat16}
    with FakeTensorMode():
        model = synthetic.random_model(shape_of(family), QuantSpec(-1, 1.0), **options)
    places = {path: tensor.device for path, tensor in tensors(model)}
    assert len(places) > 20 and {path for path, place in places.items() if place != GPU} == set()


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_is_measured_in_what_its_dense_self_runs_in(family):
    shape = shape_of(family)
    assert contestants.shape_dtype(shape, "auto") == torch.bfloat16
    assert contestants.shape_dtype(shape, "float16") == torch.float16
    assert contestants.shape_dtype(shape_of("qwen3"), "auto") == torch.float16
    notes: list[str] = []
    models = contestants._with_heads(small(family, torch.bfloat16), ("16bit",), True, notes.append)
    assert list(models) == ["int2", "bfloat16"] and not notes
    assert models["int2"].head is models["bfloat16"].head
    dense = [layer.mixture for layer in models["bfloat16"].layers if layer.mixture is not None]
    assert dense and all(m.gate_up.dtype == m.down.dtype == torch.bfloat16 for m in dense)


def test_dense_experts_that_no_graph_can_hold_are_left_out():
    """PyTorch's grouped product asks the host where experts end, in all types but bfloat16."""
    model, notes = small("gpt_oss", torch.float16), []
    assert list(contestants._with_heads(model, ("16bit",), True, notes.append)) == ["int2"]
    assert notes == ["the dense model is left out: dense experts run in bfloat16, not in float16"]
    with pytest.raises(ValueError, match="bfloat16, not in float16"):
        synthetic.dense_model(model)
    model = small("qwen3", torch.float16)
    assert list(contestants._with_heads(model, ("16bit",), True, pytest.fail)) == ["int2", "float16"]


def test_dense_experts_with_biases_are_left_out():
    model = small("gpt_oss", torch.bfloat16)
    layer = model.layers[0]
    down = layer.mixture.down
    biased = dataclasses.replace(down, bias=torch.zeros(down.experts, down.words.shape[1] * 64))
    layer = dataclasses.replace(layer, mixture=dataclasses.replace(layer.mixture, down=biased))
    assert synthetic.dense_refusal(dataclasses.replace(model, layers=[layer])) == "dense experts run without biases"


def test_dense_experts_on_other_gpus_are_left_out(monkeypatch):
    model = small("qwen3_moe", torch.bfloat16)
    monkeypatch.setattr(type(model), "device", GPU)
    for capability, runs in (((8, 9), False), ((9, 0), True), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (synthetic.dense_refusal(model) is None) == runs


def test_models_of_one_shape_take_turns_with_one_cache(monkeypatch):
    monkeypatch.setattr(cuda, "device_of", lambda index: Device(90, 132))
    monkeypatch.setattr(cuda, "rows_in_limbs", lambda *arguments: range(0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 2000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    models = contestants._with_heads(small("qwen3_next", torch.bfloat16), ("16bit",), True, pytest.fail)
    packed, dense, narrow, _ = contestants._with_caches(models, ["auto", "int8"])
    needed, free = packed.room(2, 60)
    assert free == 1200 and dense.room(2, 60) == (needed, free) and narrow.room(2, 60)[0] < needed
    decoders = [each._decoder(2, 61) for each in (packed, dense, narrow)]
    assert decoders[0].cache_bytes == needed and decoders[0].caches is decoders[1].caches
    assert decoders[2].caches is not decoders[0].caches
    assert dense.room(2, 60) == (0, free) and dense.room(1, 60) == (needed // 2, free)
    del decoders
    assert dense.room(2, 60) == (needed, free)


def test_a_mixture_is_checked_by_its_first_layers():
    dense = small("qwen3", torch.float16)
    assert cuda_contestant._first_layers(dense) is dense
    whole = small("gpt_oss", torch.bfloat16)
    layers = whole.shape.layers
    whole = dataclasses.replace(
        whole, layers=whole.layers * 2, shape=dataclasses.replace(whole.shape, layers=layers + layers[::-1])
    )
    first = cuda_contestant._first_layers(whole)
    assert set(first.shape.layers) == set(layers) and len(first.layers) == len(first.shape.layers) < 2 * len(layers)
    assert cuda_contestant._first_layers(first) == first


def test_levels_of_random_weights_have_no_mean():
    """One would be what all rows have in common after some layers, and all would go to the same experts."""
    levels = dequantize(synthetic.random_ternary(512, 512, QuantSpec(-1, 1.0), torch.Generator().manual_seed(0)))
    signs = levels.sign()
    assert abs(float(signs.mean())) < 4 * 512**-1
    assert 0.24 < float((signs == 0).float().mean()) < 0.26
