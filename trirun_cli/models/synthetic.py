"""Models of any shape made of random weights, for measuring what a real one of that shape would do."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from trirun_kernels.decoder.cuda_weights import CudaLayer, CudaModel, Projection, padded_head
from trirun_kernels.decoder.weights import DecoderShape
from trirun_kernels.weights.packing import PackedWeight, dequantize
from trirun_kernels.weights.shapes import stored_shapes
from trirun_kernels.weights.spec import QuantSpec


def random_model(
    shape: DecoderShape,
    spec: QuantSpec,
    *,
    positions: int,
    device: torch.device,
    dtype: torch.dtype,
    act_bits: int = 16,
    seed: int = 0,
) -> CudaModel:
    """A ternary model on a GPU: random codes, scales that keep activations near one, rotary angles of base 10,000."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def projection(n: int, k: int) -> Projection:
        return Projection(random_ternary(n, k, spec, generator), None, act_bits)

    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def layer() -> CudaLayer:
        norms = {name: torch.ones(shape.hidden, device=device) for name in ("attention_norm", "mlp_norm")}
        return CudaLayer(
            (projection(q + 2 * kv, shape.hidden),), projection(shape.hidden, q),
            (projection(2 * shape.ffn, shape.hidden),), projection(shape.hidden, shape.ffn), norms,
        )  # fmt: skip

    layers = [layer() for _ in range(shape.layers)]
    embedding, head = (
        torch.randn(shape.vocab, shape.hidden, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    cosines, sines = (part.to(device) for part in angles(shape, positions))
    return CudaModel(
        shape, layers, embedding, padded_head(head / math.sqrt(shape.hidden)), torch.ones(shape.hidden, device=device),
        cosines, sines, act_bits,
    )  # fmt: skip


def angles(shape: DecoderShape, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines float32 [positions, rotary_half] of base 10,000."""
    frequencies = 10000.0 ** -(torch.arange(shape.rotary_half) / max(shape.rotary_half, 1))
    turned = torch.outer(torch.arange(positions).float(), frequencies)
    return turned.cos(), turned.sin()


def random_ternary(n: int, k: int, spec: QuantSpec, generator: torch.Generator) -> PackedWeight:
    """A packed ternary weight whose products of unit rows have about unit variance."""
    device = generator.device
    words, groups = stored_shapes(n, k, spec)
    bits = torch.randint(-(2**31), 2**31, words, dtype=torch.int64, device=device, generator=generator).to(torch.int32)
    # Code 3 becomes 2: three levels, as ternary models have them.
    bits ^= bits & (bits >> 1) & 0x55555555
    # Codes 0, 1, 2 come with probabilities 1/4, 1/4, 1/2, so a level's square is 3/4 on average.
    scales = (torch.rand(groups, device=device, generator=generator) * 0.5 + 0.75) * (0.75 * k) ** -0.5
    return PackedWeight(bits, scales.half(), None, n, k, spec)


def dense_model(model: CudaModel) -> CudaModel:
    """The same model with its projections as dense matrices of its dtype."""

    def dense(p: Projection) -> Projection:
        weight = dequantize(p.weight, model.dtype) if isinstance(p.weight, PackedWeight) else p.weight
        return Projection(weight, p.bias)

    layers = [
        CudaLayer(
            tuple(map(dense, layer.qkv)), dense(layer.o), tuple(map(dense, layer.gate_up)), dense(layer.down),
            layer.norms,
        )
        for layer in model.layers
    ]  # fmt: skip
    return dataclasses.replace(model, layers=layers)
