"""Packed embeddings and output heads of vLLM, which splits the vocabulary over the ranks and pads each part."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from trirun_kernels.weights.packing import PackedWeight, dequantize_rows
from trirun_kernels.weights.spec import QuantSpec
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from .vllm_linear import finish, product, register_parameters
from .vllm_sharding import Shard


class TrirunVocabularyMethod(QuantizeMethodBase):
    """A packed embedding, a packed head, or both in one where they are tied.

    Args:
        spec: the grid. act_bits: 16 or 8. prefix: the layer's name, for messages.
    """

    def __init__(self, spec: QuantSpec, act_bits: int, prefix: str) -> None:
        self.spec, self.act_bits, self.prefix = spec, act_bits, prefix

    def create_weights(self, layer: Any, *weight_args: Any, **extra_weight_attrs: Any) -> None:
        """Register parameters as :class:`~.vllm_linear.TrirunLinearMethod` does. vLLM fills the padding of a part with
        zeros, which is done in codes: a part of the vocabulary need not end with an n tile."""
        columns, (rows,) = weight_args[0], weight_args[1]
        shard = Shard.of([rows], columns, columns, self.spec, tiled=False)
        register_parameters(
            layer, shard, layer.org_vocab_size, columns, extra_weight_attrs["weight_loader"], self.prefix
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack again what was read."""
        finish(layer)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits: x [..., k] → [..., rows of this rank]."""
        return product(layer, x, bias, self.act_bits)

    def embedding(self, layer: Any, input_: Tensor) -> Tensor:
        """Rows of the embedding: indices [tokens] → [tokens, k]."""
        packed = PackedWeight.of_operands(layer.weight, layer.weight_scale, layer.weight_zero, *layer.trirun_operands)
        return dequantize_rows(packed, input_, layer.params_dtype)

    def tie_weights(self, layer: Any, embed_tokens: nn.Module) -> nn.Module:
        """The embedding itself is the head."""
        return embed_tokens
