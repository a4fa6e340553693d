"""Packed layers in vLLM's own layer and parameter classes, on fake ranks. Needs vLLM (its CPU build will do)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from trirun_kernels.weights.packing import PackedWeight, dequantize, pack
from trirun_kernels.weights.spec import QuantSpec

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear as linear_layers
from vllm.model_executor.layers import vocab_parallel_embedding as vocabulary_layers

from trirun_cli.integrations import vllm_linear as packed_linear
from trirun_cli.integrations.vllm_config import Experts, TrirunConfig
from trirun_cli.integrations.vllm_vocabulary import TrirunVocabularyMethod

SPECS = [QuantSpec(128, 1.0), QuantSpec(64, 1.5), QuantSpec(128, None), QuantSpec(-1, 1.0)]
SECTION = {"quant_method": "trirun", "format_version": 1, "layout": "tile64", "bits": 2}


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def as_rank(monkeypatch):
    """``as_rank(1, 4)``: what is made next is made by rank 1 of 4."""

    def become(rank: int, ranks: int) -> None:
        for module in (parameter, linear_layers, vocabulary_layers):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)

    return become


def config(spec: QuantSpec, packed: list[str], plain: list[str] = [], **section) -> TrirunConfig:  # noqa: B006
    made = TrirunConfig.from_config(SECTION | {"group_size": spec.group_size, "zero": spec.zero} | section)
    made.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    made.modules = dict.fromkeys(plain) | {name: name for name in packed}
    return made


def random_weight(n: int, k: int, spec: QuantSpec, seed: int = 0) -> PackedWeight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 4, (n, k), dtype=torch.uint8, generator=generator)
    scales, zeros = (torch.rand(n, spec.groups(k), generator=generator).half() + 0.1 for _ in range(2))
    return pack(codes, scales, spec, zeros if spec.zero is None else None)


def load(layer, w: PackedWeight, *shard) -> None:
    for name, tensor in (("weight", w.words), ("weight_scale", w.scales), ("weight_zero", w.zeros)):
        if tensor is not None:
            param = getattr(layer, name)
            param.weight_loader(param, tensor, *shard)


def dense(layer) -> torch.Tensor:
    """The weight that a loaded layer multiplies by."""
    layer.quant_method.process_weights_after_loading(layer)
    n, k, group, zero = layer.trirun_operands
    return dequantize(PackedWeight.of_operands(layer.weight, layer.weight_scale, layer.weight_zero, n, k, group, zero))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("head", [64, 32])
def test_qkv_with_replicated_heads(as_rank, spec: QuantSpec, ranks: int, head: int) -> None:
    q, k, v = (random_weight(heads * head, 384, spec, heads) for heads in (8, 4, 4))
    for rank in range(ranks):
        as_rank(rank, ranks)
        made = config(spec, [f"a.{part}_proj" for part in "qkv"])
        layer = linear_layers.QKVParallelLinear(384, head, 8, 4, bias=False, quant_config=made, prefix="a.qkv_proj")
        for name, w in (("q", q), ("k", k), ("v", v)):
            load(layer, w, name)
        kv_ranks = min(ranks, 4)
        kv, own = rank * kv_ranks // ranks, 4 * head // kv_ranks
        want = [dequantize(q)[rank * 8 * head // ranks : (rank + 1) * 8 * head // ranks]]
        want += [dequantize(w)[kv * own : (kv + 1) * own] for w in (k, v)]
        assert torch.equal(dense(layer), torch.cat(want))


UNLIKE = [
    [QuantSpec(128, 1.0), QuantSpec(64, 1.0), QuantSpec(-1, 1.0)],
    [QuantSpec(128, 1.0), QuantSpec(128, 1.5), QuantSpec(128, None)],
    [QuantSpec(-1, 2.0), QuantSpec(-1, 1.0), QuantSpec(32, None)],
]


@pytest.mark.parametrize("specs", UNLIKE, ids=str)
@pytest.mark.parametrize(("ranks", "head"), [(1, 64), (2, 64), (8, 64), (8, 32)])
def test_merged_layers_of_several_grids(as_rank, specs: list[QuantSpec], ranks: int, head: int) -> None:
    weights = [random_weight(heads * head, 384, spec, heads) for heads, spec in zip((8, 4, 4), specs, strict=True)]
    own = {f"a.{part}_proj": {"group_size": s.group_size, "zero": s.zero} for part, s in zip("qkv", specs, strict=True)}
    for rank in range(ranks):
        as_rank(rank, ranks)
        made = config(QuantSpec(128, 1.0), list(own), overrides=own)
        layer = linear_layers.QKVParallelLinear(384, head, 8, 4, bias=False, quant_config=made, prefix="a.qkv_proj")
        for name, w in zip("qkv", weights, strict=True):
            load(layer, w, name)
        kv_ranks = min(ranks, 4)
        kv, rows = rank * kv_ranks // ranks, 4 * head // kv_ranks
        want = [dequantize(weights[0])[rank * 8 * head // ranks : (rank + 1) * 8 * head // ranks]]
        want += [dequantize(w)[kv * rows : (kv + 1) * rows] for w in weights[1:]]
        assert torch.equal(dense(layer), torch.cat(want))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_qkv_and_gate_up_that_are_fused_on_disk(as_rank, spec: QuantSpec, ranks: int) -> None:
    whole, gate_up = random_weight(1024, 384, spec), random_weight(2 * 1408, 384, spec)
    for rank in range(ranks):
        as_rank(rank, ranks)
        made = config(spec, ["a.qkv_proj", "a.gate_up_proj"])
        layer = linear_layers.QKVParallelLinear(384, 64, 8, 4, bias=False, quant_config=made, prefix="a.qkv_proj")
        load(layer, whole)
        parts = dequantize(whole).split([512, 256, 256])
        assert torch.equal(dense(layer), torch.cat([part.chunk(ranks)[rank] for part in parts]))
        layer = linear_layers.MergedColumnParallelLinear(
            384, [1408, 1408], bias=False, quant_config=made, prefix="a.gate_up_proj"
        )
        load(layer, gate_up)
        parts = dequantize(gate_up).split(1408)
        assert torch.equal(dense(layer), torch.cat([part.chunk(ranks)[rank] for part in parts]))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_gate_up_and_down(as_rank, spec: QuantSpec, ranks: int) -> None:
    inner = 3072 if ranks == 8 else 1408 if spec.group_size != 64 or ranks < 4 else 1536
    gate, up, down = (
        random_weight(n, k, spec, seed) for seed, (n, k) in enumerate([(inner, 384)] * 2 + [(384, inner)])
    )
    for rank in range(ranks):
        as_rank(rank, ranks)
        made = config(spec, ["m.gate_proj", "m.up_proj", "m.down_proj"])
        layer = linear_layers.MergedColumnParallelLinear(
            384, [inner, inner], bias=False, quant_config=made, prefix="m.gate_up_proj"
        )
        load(layer, gate, 0)
        load(layer, up, 1)
        assert torch.equal(dense(layer), torch.cat([dequantize(w).chunk(ranks)[rank] for w in (gate, up)]))
        layer = linear_layers.RowParallelLinear(inner, 384, bias=False, quant_config=made, prefix="m.down_proj")
        load(layer, down)
        assert torch.equal(dense(layer), dequantize(down).chunk(ranks, dim=1)[rank])


@pytest.mark.parametrize("n", [100, 128])
def test_padded_layers_of_one_piece(as_rank, n: int) -> None:
    spec = QuantSpec(-1, 1.5)
    w = random_weight(n, 120, spec)
    as_rank(0, 1)
    made = config(spec, ["r", "c"], padded={"r": [n, 120], "c": [n, 120]})
    for kind, name in ((linear_layers.ReplicatedLinear, "r"), (linear_layers.ColumnParallelLinear, "c")):
        layer = kind(120, n, bias=True, quant_config=made, prefix=name)
        load(layer, w)
        assert torch.equal(dense(layer), dequantize(w))
        layer.bias.data = torch.randn(n)
        x = torch.randn(5, 120)
        got = layer(x)[0]
        want = torch.nn.functional.linear(x, dequantize(w), layer.bias)
        assert ((got - want).norm() / want.norm()).item() < 1e-3


def test_int8_activations_have_one_scale_over_all_ranks(as_rank, monkeypatch) -> None:
    spec, ranks = QuantSpec(-1, 1.0), 4
    w, x = random_weight(128, 1024, spec), torch.randn(7, 1024) * torch.logspace(-6, 2, 7).unsqueeze(1)
    most = x.abs().view(7, ranks, -1).amax(dim=-1)
    monkeypatch.setattr(packed_linear, "tensor_model_parallel_all_gather", lambda own, dim: most)
    scale = x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-5) / 127
    integers = (x / scale).round()
    for rank in range(ranks):
        as_rank(rank, ranks)
        made = config(spec, ["down_proj"], activation_bits=8)
        layer = linear_layers.RowParallelLinear(
            1024, 128, bias=False, quant_config=made, prefix="down_proj", reduce_results=False
        )
        load(layer, w)
        part = slice(rank * 256, (rank + 1) * 256)
        want = (integers * scale)[:, part] @ dense(layer).T
        got = layer(x[:, part])[0]
        assert ((got - want).norm(dim=1) / want.norm(dim=1)).max().item() < 1e-3
        half = layer(x[:, part].half())[0].float()
        assert half.isfinite().all()


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_embedding_and_head_of_a_vocabulary_of_any_size(as_rank, spec: QuantSpec, ranks: int) -> None:
    vocabulary = 1000
    w = random_weight(vocabulary, 384, spec)
    made = config(spec, ["model.embed_tokens"], tie=True)
    whole = torch.zeros(1024, 384)
    whole[:vocabulary] = dequantize(w)
    for rank in range(ranks):
        as_rank(rank, ranks)
        layer = vocabulary_layers.VocabParallelEmbedding(
            vocabulary, 384, quant_config=made, prefix="model.embed_tokens", params_dtype=torch.float32
        )
        load(layer, w)
        want = whole.chunk(ranks)[rank]
        assert torch.equal(dense(layer)[: len(want)], want)
        index = torch.randint(0, len(want), (3, 11))
        assert torch.equal(layer.quant_method.embedding(layer, index), want[index])
        x = torch.randn(5, 384)
        got = layer.quant_method.apply(layer, x)
        assert ((got - x @ want.T).norm() / (x @ want.T).norm()).item() < 1e-3
        head = vocabulary_layers.ParallelLMHead(vocabulary, 384, quant_config=made, prefix="lm_head")
        assert isinstance(head.quant_method, TrirunVocabularyMethod) and head.tie_weights(layer) is layer


def test_modules_are_packed_or_not_by_what_the_checkpoint_holds(as_rank) -> None:
    as_rank(0, 1)
    overrides = {"a.o_proj": {"group_size": 64, "zero": None}}
    qkv = [f"a.{part}_proj" for part in "qkv"]
    made = config(QuantSpec(128), [*qkv, "a.o_proj"], ["m.gate_proj", "m.up_proj", "router"], overrides=overrides)

    def method(kind, sizes, prefix, made=made):
        return kind(*sizes, bias=False, quant_config=made, prefix=prefix).quant_method

    merged, single = linear_layers.MergedColumnParallelLinear, linear_layers.ReplicatedLinear
    assert isinstance(method(merged, (384, [256, 256]), "m.gate_up_proj"), linear_layers.UnquantizedLinearMethod)
    assert isinstance(method(single, (384, 8), "router"), linear_layers.UnquantizedLinearMethod)
    assert method(single, (384, 256), "a.o_proj").specs == [QuantSpec(64, None)]
    mixed = config(QuantSpec(128), ["m.gate_proj"], ["m.up_proj"])
    with pytest.raises(ValueError, match=r"m.gate_up_proj merges m.gate_proj, m.up_proj, of which some are packed"):
        method(merged, (384, [256, 256]), "m.gate_up_proj", mixed)
    with pytest.raises(ValueError, match=r"a.o_proj is stored as"):
        layer = single(256, 128, bias=False, quant_config=made, prefix="a.o_proj")
        load(layer, random_weight(128, 384, QuantSpec(64, None)))
    as_rank(0, 16)
    with pytest.raises(ValueError, match=r"trirun: a.o_proj: 24 of 384 columns on a rank"):
        method(linear_layers.RowParallelLinear, (384, 256), "a.o_proj")


def test_packed_experts_are_refused_by_name() -> None:
    made = config(QuantSpec(128), ["model.layers.1.mlp.experts.0.up", "model.layers.0.self_attn.o_proj"])
    # An instance that nothing has set up: the method is chosen by the class and the name.
    experts = Experts.__new__(Experts)
    with pytest.raises(NotImplementedError, match=r"packed experts .* model.layers.1.mlp.experts.0.up"):
        made.get_quant_method(experts, "model.layers.1.mlp.experts.routed_experts")
    assert made.get_quant_method(experts, "model.layers.0.mlp.experts.routed_experts") is None


def test_a_two_bit_layer_of_compressed_tensors_runs_on_trirun(as_rank) -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsWNA16

    from trirun_cli.integrations.vllm import register

    register()
    as_rank(0, 1)
    scheme = CompressedTensorsWNA16("group", 2, group_size=128, layer_name="o")
    codes = torch.randint(0, 4, (192, 256), dtype=torch.int32)
    scales = torch.rand(192, 2).bfloat16() + 0.1
    layer = torch.nn.Module()
    scheme.create_weights(
        layer, 192, 256, [192], 256, torch.bfloat16, weight_loader=lambda param, loaded: param.data.copy_(loaded)
    )
    shifts = torch.arange(0, 32, 2)
    words = (codes.view(192, 16, 16).long() << shifts).sum(-1)
    layer.weight_packed.data.copy_((words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32))
    layer.weight_scale.data.copy_(scales)
    scheme.process_weights_after_loading(layer)
    assert type(scheme.kernel).__name__ == "TrirunInt2LinearKernel"
    want = (scales.float().repeat_interleave(128, dim=1) * (codes - 2)).T
    x = torch.randn(3, 256).bfloat16()
    got = scheme.apply_weights(layer, x, None).float()
    assert ((got - x.float() @ want).norm() / (x.float() @ want).norm()).item() < 5e-3
