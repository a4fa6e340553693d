"""The tensors of a packed checkpoint as those of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from trirun_gptq.layer.quantized import Quantized
from trirun_kernels.weights.names import (
    EMBEDDING,
    HEAD,
    SCALE,
    WEIGHT,
    ZERO,
    embedding_names,
)

from ...checkpoint.formats.gguf.mixtures import EXPERT_LAYERS
from ...checkpoint.formats.gguf.targets import Target
from ...checkpoint.formats.gguf.types import GgufType
from ...checkpoint.formats.gguf.writer import DENSE, F32, PACKED, GgufTensor, encode
from ...checkpoint.formats.words import exactly, unpacked
from ...checkpoint.reader import Checkpoint
from ...errors import InputError
from ...models.description import Description
from ...models.rotary import llama3_frequencies
from .model import attentions_of, gguf_model, rotary_of
from .places import Place, places

# An expert's matrix or bias: layer, expert, which of its three, and ".weight" or ".bias".
_EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:\w+\.)?experts\.(\d+)\.(gate|up|down)(\.weight|\.bias)")

_STILL = 1e30  # what llama.cpp's files divide the frequency of a pair by that does not turn


def gguf_tensors(
    checkpoint: Checkpoint, kind: GgufType, starting: Callable[[str], None], done: Callable[[str, GgufType], None]
) -> Iterator[GgufTensor]:
    """The tensors of the file. A matrix whose rows are no whole blocks, and whatever the checkpoint holds unpacked, is
    stored as floats that hold every value.

    Args:
        checkpoint: the model. kind: of the packed layers; F16 unpacks them.
        starting: called with the name of each packed module before its data is made. done: with name and type after.

    Raises:
        InputError: llama.cpp's model is another, or a tensor has no name in llama.cpp.
    """
    target, found = gguf_model(checkpoint)
    known, modules = places(found, target), set(checkpoint.modules)
    yield from _vocabulary(checkpoint, target, kind, starting, done)
    experts: dict[tuple[int, str, str], dict[int, str]] = {}
    for name in checkpoint.names:
        module = name.removesuffix(WEIGHT)
        if name in (EMBEDDING, HEAD) or name.endswith((SCALE, ZERO, ".rotary_emb.inv_freq")):
            continue
        if matched := _EXPERT.fullmatch(name):
            experts.setdefault((int(matched[1]), matched[3], matched[4]), {})[int(matched[2])] = name
            continue
        if name not in known:
            raise InputError(f"{checkpoint.path}: {name} has no name in llama.cpp")
        packed = module in modules and name.endswith(WEIGHT)
        _check_rows(checkpoint, name, checkpoint.shape(module) if packed else checkpoint[name].shape, known[name])
        for place in known[name]:
            if packed:
                yield _packed(checkpoint, module, place, kind, starting, done)
            else:
                yield _plain(checkpoint, name, place)
    for (layer, part, end), members in experts.items():
        stored = [members.get(number, "") for number in range(len(members))]
        missing = next((number for number, name in enumerate(stored) if name.removesuffix(end) not in modules), None)
        if missing is not None:
            raise InputError(f"{checkpoint.path}: expert {missing} of layer {layer} has no packed {part}")
        parts = [
            _packed(checkpoint, name.removesuffix(WEIGHT), Place(""), kind, starting, done)
            if end == WEIGHT
            else _plain(checkpoint, name, Place(""))
            for name in stored
        ]
        yield _stacked(f"blk.{layer}.{EXPERT_LAYERS[part]}{end}", parts)
    for name, factors in _rotary_factors(found).items():
        yield GgufTensor(name, (len(factors),), F32, partial(torch.from_numpy, factors))


def _check_rows(checkpoint: Checkpoint, name: str, shape: Sequence[int], parts: Sequence[Place]) -> None:
    """That a tensor has rows, and those that the file has in another order."""
    if not shape:
        raise InputError(f"{checkpoint.path}: {name} is a number without a dimension, which llama.cpp has none of")
    taken = [len(place.rows) for place in parts if place.rows is not None]
    if taken and sum(taken) != shape[0]:
        raise InputError(f"{checkpoint.path}: {name} has {shape[0]} rows, config.json says {sum(taken)}")


def _vocabulary(
    checkpoint: Checkpoint,
    target: Target,
    kind: GgufType,
    starting: Callable[[str], None],
    done: Callable[[str, GgufType], None],
) -> Iterator[GgufTensor]:
    """The output head and the embedding. Without a head, llama.cpp takes the embedding, but for some architectures."""
    embedding, head = embedding_names(checkpoint.config, checkpoint)
    if target.head == "tied" and head != embedding:
        raise InputError(f"{checkpoint.path}: llama.cpp's {target.architecture} has no output head of its own")
    heads = [] if head == embedding and target.head != "own" else [(head, "output.weight")]
    for name, known in (*heads, (embedding, "token_embd.weight")):
        if (module := name.removesuffix(WEIGHT)) in checkpoint.modules:
            yield _packed(checkpoint, module, Place(known), kind, starting, done)
        else:
            _check_rows(checkpoint, name, checkpoint[name].shape, ())
            yield _plain(checkpoint, name, Place(known))


def _packed(
    checkpoint: Checkpoint,
    module: str,
    place: Place,
    kind: GgufType,
    starting: Callable[[str], None],
    done: Callable[[str, GgufType], None],
) -> GgufTensor:
    n, k = checkpoint.shape(module)
    n = n if place.rows is None else len(place.rows)
    stored = kind if kind.name in PACKED and k % kind.block == 0 else DENSE[torch.float16]
    if place.value is not None:
        return GgufTensor(place.name, (k,), F32, partial(_unpacked_vector, checkpoint, module, place, starting, done))

    def data() -> Tensor:
        starting(module)
        weight = unpacked(checkpoint.packed(module))
        if place.columns is not None:
            weight = _reordered(weight, place.columns, module)
        if stored.name in PACKED:
            rows = encode(weight, stored, module)
        else:
            rows = exactly(weight.dequantize(), (torch.float16,), module)
        done(module, stored)
        return rows if place.rows is None else rows[place.rows]

    return GgufTensor(place.name, (n, k), stored, data)


def _unpacked_vector(
    checkpoint: Checkpoint,
    module: str,
    place: Place,
    starting: Callable[[str], None],
    done: Callable[[str, GgufType], None],
) -> Tensor:
    """A packed matrix of one row, as floats."""
    starting(module)
    values = unpacked(checkpoint.packed(module)).dequantize()
    done(module, F32)
    return values.flatten() if place.value is None else place.value(values)


def _reordered(weight: Quantized, columns: Tensor, name: str) -> Quantized:
    """A weight's columns in another order, whole groups of them.

    Raises:
        InputError: a group's columns do not stay together.
    """
    codes, scales, zeros, size = weight.codes[:, columns], weight.scales, weight.zeros, weight.spec.group_size
    if size != -1:
        groups = columns.view(-1, size) // size if len(columns) % size == 0 else columns.view(1, -1)
        if bool((groups != groups[:, :1]).any()):
            raise InputError(f"{name}: llama.cpp has its columns in an order in which groups of {size} are torn apart")
        scales, zeros = scales[:, groups[:, 0]], None if zeros is None else zeros[:, groups[:, 0]]
    return Quantized(codes, scales, zeros, weight.spec)


def _stacked(known: str, experts: list[GgufTensor]) -> GgufTensor:
    """The same matrix [n, k] or bias [n] of all experts of a layer as one tensor of one dimension more."""
    first = experts[0]
    return GgufTensor(
        known, (len(experts), *first.shape), first.kind, lambda: torch.stack([expert.data() for expert in experts])
    )


def _plain(checkpoint: Checkpoint, name: str, place: Place) -> GgufTensor:
    def data() -> Tensor:
        rows = checkpoint.tensor(name)
        rows = rows if place.value is None else place.value(rows)
        rows = rows if place.rows is None else rows[place.rows]
        # llama.cpp adds and multiplies vectors in float32 alone.
        return rows.float() if rows.dim() == 1 else rows

    made = data()
    if made.dtype not in DENSE:
        raise InputError(f"{checkpoint.path}: {name} is {made.dtype}")
    return GgufTensor(place.name, tuple(made.shape), DENSE[made.dtype], data)


def _rotary_factors(found: Description) -> dict[str, np.ndarray]:
    """What the frequencies of a head are divided by (Llama 3.1, longrope, Gemma 4), float32 [rotary_half]."""
    rotary, _ = rotary_of(found)
    half = attentions_of(found)[0].rotary_half
    if rotary["rope_type"] == "longrope":
        named = {name: rotary.get(f"{name}_factor") or rotary["short_factor"] for name in ("long", "short")}
        return {f"rope_factors_{name}.weight": np.asarray(values, np.float32) for name, values in named.items()}
    if rotary["rope_type"] == "proportional":
        turning = np.arange(half) < int(rotary["partial_rotary_factor"] * half)
        factors = np.where(turning, rotary.get("factor") or 1.0, _STILL)
        return {"rope_freqs.weight": factors.astype(np.float32)}
    if rotary["rope_type"] != "llama3":
        return {}
    frequencies = rotary["rope_theta"] ** -(np.arange(half) / half)
    return {"rope_freqs.weight": (frequencies / llama3_frequencies(frequencies, rotary)).astype(np.float32)}
