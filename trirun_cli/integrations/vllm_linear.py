"""Packed linear layers of vLLM: parameters of vLLM's own classes, which shard and merge them, and the product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import trirun_kernels.gemm.ops  # noqa: F401  defines torch.ops.trirun
from torch import Tensor, nn
from trirun_kernels.weights.packing import PackedWeight
from trirun_kernels.weights.shapes import K_BLOCK, N_TILE, padded
from trirun_kernels.weights.spec import QuantSpec
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.linear import LinearMethodBase, register_weight_loader_v2_supported_method
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
)

from .vllm_sharding import Shard, common_spec

Loader = Callable[..., Any]


@register_weight_loader_v2_supported_method
class TrirunLinearMethod(LinearMethodBase):
    """One packed layer, or several that vLLM merges along n.

    Args:
        specs: their grids. act_bits: 16 or 8. prefix: the layer's name, for messages.
    """

    def __init__(self, specs: Sequence[QuantSpec], act_bits: int, prefix: str) -> None:
        self.specs, self.act_bits, self.prefix = specs, act_bits, prefix
        self.splits_k = False

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register ``weight``, ``weight_scale`` and, on a grid of real zeros, ``weight_zero``, named as in the
        checkpoint.

        Raises:
            ValueError: a rank's columns end within a group of 32.
        """
        try:
            shard = Shard.of(output_partition_sizes, input_size_per_partition, input_size, common_spec(self.specs))
        except ValueError as error:
            raise ValueError(f"trirun: {self.prefix}: {error}") from None
        self.splits_k = shard.splits_k
        # A layer of its own is stored padded to whole n tiles. Of merged ones vLLM cuts each by its size.
        rows = output_size if len(output_partition_sizes) == 1 else None
        register_parameters(layer, shard, rows, input_size, extra_weight_attrs["weight_loader"], self.prefix)
        if len(self.specs) > 1 and layer.weight_zero is not None:
            # Of a layer with one zero point none is stored.
            parts = layer.weight_zero.data.split(output_partition_sizes, dim=int(shard.tiled))
            for part, spec in zip(parts, self.specs, strict=True):
                if spec.zero is not None:
                    part.fill_(spec.zero)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pad, or pack again, what was read."""
        finish(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., k] → [..., n]."""
        if self.act_bits == 8 and self.splits_k:
            return _product_of_split_rows(layer, x, bias)
        return product(layer, x, bias, self.act_bits)


def register_parameters(layer: Any, shard: Shard, rows: int | None, columns: int, load: Loader, prefix: str) -> None:
    """Give a layer the parameters that a rank reads its part into.

    Args:
        rows: true rows of the stored weight, where it is to be cut to them. columns: true columns of all ranks.
        load: vLLM's loader of the layer, which takes the rank's slice. prefix: the layer's name, for messages.
    """
    tiled = shard.tiled

    def load_weight(param: nn.Parameter, loaded: Tensor, *args: Any, **named: Any) -> Any:
        if loaded.dim() != 3 or loaded.shape[1:] != (padded(1, columns)[1] // K_BLOCK, 4 * K_BLOCK):
            raise ValueError(f"trirun: {prefix} is stored as {list(loaded.shape)}, the model has {columns} columns")
        weight = shard.weight(loaded)
        return load(param, weight if tiled else weight[:rows, :columns], *args, **named)

    def load_groups(param: nn.Parameter, loaded: Tensor, *args: Any, **named: Any) -> Any:
        groups = shard.groups(loaded)
        if not tiled:
            groups = groups[:rows, : 1 if shard.spec.group_size == -1 else columns // shard.spec.group_size]
        return load(param, groups, *args, **named)

    dims: dict[str, Any] = {"output_dim": 0, "input_dim": 1, "weight_loader": load_weight}
    if tiled:
        data = torch.empty(shard.weight_shape, dtype=torch.int32)
        weight = PackedvLLMParameter(data=data, packed_dim=0, packed_factor=N_TILE, **dims)
    else:
        weight = ModelWeightParameter(data=torch.empty(shard.weight_shape, dtype=torch.uint8), **dims)

    def groups() -> BasevLLMParameter:
        data = torch.empty(shard.groups_shape, dtype=torch.float16)
        if shard.spec.group_size == -1:
            return ChannelQuantScaleParameter(data=data, output_dim=int(tiled), weight_loader=load_groups)
        return GroupQuantScaleParameter(
            data=data, output_dim=int(tiled), input_dim=int(not tiled), weight_loader=load_groups
        )

    layer.trirun_shard = shard
    layer.register_parameter("weight", weight)
    layer.register_parameter("weight_scale", groups())
    layer.register_parameter("weight_zero", groups() if shard.spec.zero is None else None)


def finish(layer: Any) -> None:
    """The parameters of a layer, as read, in the form that kernels take."""
    zeros = None if layer.weight_zero is None else layer.weight_zero.data
    set_packed(layer, layer.trirun_shard.packed(layer.weight.data, layer.weight_scale.data, zeros))


def set_packed(layer: Any, packed: PackedWeight) -> None:
    """Give a layer the packed weight that :func:`product` multiplies by."""
    layer.weight = nn.Parameter(packed.words, requires_grad=False)
    layer.weight_scale = nn.Parameter(packed.scales, requires_grad=False)
    layer.weight_zero = None if packed.zeros is None else nn.Parameter(packed.zeros, requires_grad=False)
    layer.trirun_operands = packed.n, packed.k, packed.spec.group_size, packed.spec.zero_operand


def product(layer: Any, x: Tensor, bias: Tensor | None, act_bits: int) -> Tensor:
    """x [..., k] times the layer's weight, and its bias. One operator, which torch.compile and CUDA graphs take."""
    operands = layer.trirun_operands
    return torch.ops.trirun.int2_gemm(x, layer.weight, layer.weight_scale, layer.weight_zero, bias, *operands, act_bits)


def _product_of_split_rows(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """The product of int8 activations of which each rank has some columns. A row has one scale over all ranks, as in
    training. The integers, at most 127, times a power of two are exact in every dtype of x, and are multiplied as
    16-bit activations; that power is the scale's, so that no sum leaves the range of float16."""
    most = tensor_model_parallel_all_gather(x.abs().amax(dim=-1, keepdim=True), dim=-1).amax(dim=-1, keepdim=True)
    scale = most.float().clamp(min=1e-5) / 127
    power = scale.log2().floor().clamp(min=-14).exp2()
    integers = (x.float() / scale).round().clamp(-128, 127)
    y = product(layer, (integers * power).to(x.dtype), None, 16).float() * (scale / power)
    return (y if bias is None else y + bias.float()).to(x.dtype)
