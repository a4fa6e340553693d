"""Models of any shape made of random weights, for measuring what a real one of that shape would do."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from trirun_kernels.decoder.cuda_delta import DeltaHeads
from trirun_kernels.decoder.cuda_experts import CudaMixture
from trirun_kernels.decoder.cuda_head import HalfProjection, Int8Projection
from trirun_kernels.decoder.cuda_weights import (
    CudaInputs,
    CudaLayer,
    CudaModel,
    Projection,
    delta_heads,
    head_projection,
)
from trirun_kernels.decoder.shape import Attention, DecoderShape, GatedDelta, LayerShape, Mixture
from trirun_kernels.decoder.weights import vector_lengths
from trirun_kernels.weights.packing import PackedWeight, dequantize
from trirun_kernels.weights.shapes import stored_shapes
from trirun_kernels.weights.spec import QuantSpec
from trirun_kernels.weights.stacked_experts import StackedExperts

from ..errors import InputError

# Major numbers of the GPUs on which PyTorch's grouped product of bfloat16 is a kernel of its own.
GROUPED_GPUS = (9, 10)


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
    """A ternary model on a GPU, embedding and head too: random codes, scales that keep activations near one, rotary
    angles of base 10,000."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def projection(n: int, k: int) -> Projection:
        return Projection(random_ternary(n, k, spec, generator), None, act_bits)

    def layer(each: LayerShape) -> CudaLayer:
        lengths, feed_forward = vector_lengths(each, shape.hidden), each.feed_forward
        norms = {name: torch.ones(lengths[name], device=device) for name in each.vectors}
        sizes, ffn = each.mixer.linear_sizes(shape.hidden), feed_forward.size
        o = sizes.pop("o")
        gate_up = (projection(ffn * (1 + feed_forward.gated), shape.hidden),) if ffn else ()
        own = each.own_input
        if isinstance(each.mixer, Attention) and "q_norm" in norms:
            # Scores are near one.
            norms["q_norm"] *= each.mixer.head_dim**-0.5 / each.mixer.scale
        return CudaLayer(
            (projection(sum(n for n, _ in sizes.values()), shape.hidden),), projection(*o), gate_up,
            projection(shape.hidden, ffn) if ffn else None, norms,
            random_delta(each.mixer, shape, generator, dtype) if isinstance(each.mixer, GatedDelta) else None,
            None if each.mixture is None else mixture(each.mixture),
            *((projection(own, shape.hidden), projection(shape.hidden, own)) if own else ()),
        )  # fmt: skip

    def mixture(each: Mixture) -> CudaMixture:
        def stacked(n: int, k: int, parts: int) -> StackedExperts:
            # Every part fills n tiles of 64 rows.
            whole = random_ternary(each.routing.experts * parts * -(-n // 64) * 64, k, spec, generator)
            words = whole.words.view(each.routing.experts, -1, *whole.words.shape[1:])
            scales = whole.scales.view(whole.scales.shape[0], each.routing.experts, -1).transpose(0, 1).contiguous()
            return StackedExperts(words, scales, None, n, k, parts, spec)

        router = torch.randn(each.outputs, shape.hidden, device=device, dtype=dtype, generator=generator)
        return CudaMixture(
            each, stacked(each.size, shape.hidden, 2), stacked(shape.hidden, each.size, 1),
            router * shape.hidden**-0.5, None, None, torch.zeros(1, dtype=torch.int32, device=device), act_bits,
        )  # fmt: skip

    layers = [layer(each) for each in shape.layers]
    embedding, head = (random_ternary(shape.vocab, shape.hidden, spec, generator) for _ in range(2))
    # A row of the head makes logits near one; a row of the embedding is near one itself.
    embedding.scales.mul_((0.75 * shape.hidden) ** 0.5)
    rotary = [(cosines.to(device), sines.to(device)) for cosines, sines in angles(shape, positions)]
    inputs = None
    if shape.inputs is not None:
        width = len(shape.layers) * shape.inputs.size
        table = random_ternary(shape.inputs.vocab, width, spec, generator)
        norm = torch.ones(shape.inputs.size, device=device)
        inputs = CudaInputs(table, projection(width, shape.hidden), norm)
    return CudaModel(
        shape, layers, embedding, head_projection(head), torch.ones(shape.hidden, device=device), rotary, dtype,
        act_bits, inputs=inputs,
    )  # fmt: skip


def random_delta(mixer: GatedDelta, shape: DecoderShape, generator: torch.Generator, dtype: torch.dtype) -> DeltaHeads:
    """A mixer of :func:`random_gates` on a GPU."""
    gates, vectors = random_gates(mixer, shape.hidden, generator)
    return delta_heads(mixer, gates, vectors, shape.norm_eps, generator.device, dtype)


def random_gates(mixer: GatedDelta, hidden: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
    """Gates [2 · value_heads, hidden] and vectors, by the fields of
    :class:`~trirun_kernels.decoder.weights.DeltaWeights`, all float32, of a mixer whose states forget within a few to
    some hundred tokens, as those of trained models do."""

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, device=generator.device, generator=generator)

    heads, taps = mixer.value_heads, mixer.taps
    vectors = {
        "conv": draw(taps, mixer.channels) * taps**-0.5, "decay_rate": -(draw(heads) - 3).exp(),
        "decay_bias": draw(heads), "norm": torch.ones(mixer.value_dim, device=generator.device),
    }  # fmt: skip
    return draw(2 * heads, hidden) * hidden**-0.5, vectors


def with_head(model: CudaModel, kind: str, *, drawn: bool = False) -> CudaModel:
    """The same model with its head "packed" as it is, in "16bit", or in "int8"; the embedding is in 16 bits then.

    ``drawn``: a packed one becomes one of normal bfloat16 numbers, as those of trained models are, not of its levels.

    Raises:
        InputError: "packed", and the head is not.
    """
    weight, embedding = None if isinstance(model.head, Int8Projection) else model.head.weight, model.embedding
    if kind == "packed":
        if not isinstance(weight, PackedWeight):
            raise InputError("--head packed: the model's head is not packed")
        return model
    if weight is None:
        return model
    if isinstance(embedding, PackedWeight):
        embedding = dequantize(embedding, model.dtype)
    if kind == "16bit" and isinstance(model.head, HalfProjection):
        return dataclasses.replace(model, embedding=embedding)
    if not isinstance(weight, PackedWeight):
        head = weight[: model.shape.vocab]
    elif drawn:
        head = random_head(weight.n, weight.k, model.device).to(model.dtype)
    else:
        head = dequantize(weight, model.dtype)
    return dataclasses.replace(model, embedding=embedding, head=head_projection(head, int8=kind == "int8"))


def random_head(n: int, k: int, device: torch.device) -> Tensor:
    """bfloat16 [n, k], whose products of unit rows have about unit variance."""
    generator = torch.Generator(device=device).manual_seed(n)
    return torch.randn(n, k, device=device, dtype=torch.bfloat16, generator=generator) * k**-0.5


def angles(shape: DecoderShape, positions: int) -> list[tuple[Tensor, Tensor]]:
    """Cosines and sines float32 [positions, rotary_half] of base 10,000 for every table."""
    tables = []
    for half in shape.rotary_halves:
        frequencies = 10000.0 ** -(torch.arange(half) / max(half, 1))
        turned = torch.outer(torch.arange(positions).float(), frequencies)
        tables.append((turned.cos(), turned.sin()))
    return tables


def random_ternary(n: int, k: int, spec: QuantSpec, generator: torch.Generator) -> PackedWeight:
    """A packed ternary weight whose products of unit rows have about unit variance.

    Levels are 0 in one case of four. Their mean is 0: another one would be multiplied by the root of n in every layer,
    until all rows of a batch are the same, and all go to the same experts.
    """
    device = generator.device
    words, groups = stored_shapes(n, k, spec)
    drawn = torch.randint(-(2**31), 2**31, (2, *words), dtype=torch.int64, device=device, generator=generator)
    zero, sign = drawn.to(torch.int32).unbind(0)
    # Codes 0, 1, 2 are levels -1, 0, 1, with probabilities 3/8, 1/4, 3/8: the mean square is 3/4.
    zero = zero & (zero >> 1) & 0x55555555
    bits = (sign & (zero ^ 0x55555555)) << 1 | zero
    scales = (torch.rand(groups, device=device, generator=generator) * 0.5 + 0.75) * (0.75 * k) ** -0.5
    return PackedWeight(bits, scales.half(), None, n, k, spec)


def dense_model(model: CudaModel) -> CudaModel:
    """The same model with its projections as dense matrices of its dtype.

    Raises:
        ValueError: :func:`dense_refusal` says why.
    """

    def dense(p: Projection) -> Projection:
        weight = dequantize(p.weight, model.dtype) if isinstance(p.weight, PackedWeight) else p.weight
        return Projection(weight, p.bias)

    if refusal := dense_refusal(model):
        raise ValueError(f"dense model: {refusal}")
    whole = model.with_projections(dense)
    layers = [
        layer if layer.mixture is None else dataclasses.replace(layer, mixture=layer.mixture.dense(model.dtype))
        for layer in whole.layers
    ]
    return dataclasses.replace(whole, layers=layers)


def dense_refusal(model: CudaModel) -> str | None:
    """Why the model cannot run dense, or None. PyTorch multiplies dense experts in one grouped product, which has no
    biases; but for bfloat16, and on other GPUs, it first waits for the host to read where each expert's rows end, and
    no graph can be captured of that."""
    mixtures = [layer.mixture for layer in model.layers if layer.mixture is not None]
    if not mixtures:
        return None
    if model.dtype != torch.bfloat16:
        return f"dense experts run in bfloat16, not in {str(model.dtype).removeprefix('torch.')}"
    parts = [part for mixture in mixtures for part in (mixture.gate_up, mixture.down)]
    if any(isinstance(part, StackedExperts) and part.bias is not None for part in parts):
        return "dense experts run without biases"
    if model.device.type == "cuda" and torch.cuda.get_device_capability(model.device)[0] not in GROUPED_GPUS:
        return f"dense experts run on GPUs of compute capability {' and '.join(f'{n}.x' for n in GROUPED_GPUS)}"
    return None
