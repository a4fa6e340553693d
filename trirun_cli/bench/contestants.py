"""The contestants of ``trirun bench model``: a checkpoint or a shape, packed, and the same model dense."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch
from trirun_kernels.decoder.shape import DecoderShape
from trirun_kernels.weights.spec import QuantSpec

from ..checkpoint.model_dir import ModelDir, quant_method, read_config
from ..errors import InputError, OutOfMemoryError, UsageError
from ..models.description import UnsupportedModel
from ..processors import default_threads
from .models import Contestant

if TYPE_CHECKING:
    from trirun_kernels.decoder.cuda_weights import CudaModel

DENSE = torch.bfloat16  # of the dense model on a CPU: half the bytes, and the same products as float32
Note = Callable[[str], None]  # takes what is left out, for people


def _quiet(text: str) -> None:
    pass


def shape_dtype(shape: DecoderShape, dtype: str) -> torch.dtype:
    """What a random model of a shape computes in on a GPU by --dtype; "auto" is float16, and bfloat16 of mixtures,
    whose dense selves run in nothing else."""
    if dtype == "auto":
        return torch.float16 if all(layer.mixture is None for layer in shape.layers) else torch.bfloat16
    return torch.bfloat16 if dtype == "bfloat16" else torch.float16


def of_shape(
    shape: DecoderShape,
    *,
    device: torch.device,
    dtype: str,
    group_size: int,
    act_bits: int,
    positions: int,
    dense: bool,
    caches: Sequence[str] = ("auto",),
    heads: Sequence[str] = (),
    threads: int | None = None,
    note: Note = _quiet,
) -> list[Contestant]:
    """A random ternary model of a shape and, with ``dense``, the same one dense, each with each of the caches.

    Args:
        dtype: of a GPU's activations, see :func:`shape_dtype`. group_size: weights per scale, or −1 for a row.
        positions: most tokens of a sequence. caches: types of keys and values, "auto" and "int8", on a GPU.
        heads: kinds of output heads, "packed", "int8" and "16bit", on a GPU; without any, 16 bits.
        threads: of the native decoder on a CPU; None takes :func:`..processors.default_threads`.
        note: called with what is left out, and why.

    Raises:
        OutOfMemoryError: the GPU has not enough memory.
    """
    spec = QuantSpec(group_size, 1.0)
    if device.type == "cuda":
        from ..models.synthetic import random_model

        kind = shape_dtype(shape, dtype)
        try:
            model = random_model(shape, spec, positions=positions + 64, device=device, dtype=kind, act_bits=act_bits)
            models = _with_heads(model, heads or ("16bit",), dense, note, drawn=True)
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(" ".join(str(error).split())[:300], "try --no-dense or a smaller --shape") from None
        return _with_caches(models, caches)
    from .cpu_contestant import CpuContestant, DenseContestant, dense_llama, random_weights

    weights = random_weights(shape, spec, positions=positions + 64)
    out: list[Contestant] = [CpuContestant("int2", weights, act_bits=act_bits, threads=threads or default_threads())]
    if dense:
        if not shape.is_llama:
            raise UsageError("on a CPU the dense model of a shape is a Llama", "measure the packed one: --no-dense")
        out.append(DenseContestant(str(DENSE).removeprefix("torch."), dense_llama(weights, DENSE), shape))
    return out


def of_checkpoint(
    path: Path,
    *,
    device: torch.device,
    dtype: str,
    act_bits: int | None,
    positions: int,
    dense: bool,
    caches: Sequence[str] = ("auto",),
    heads: Sequence[str] = (),
    threads: int | None = None,
    note: Note = _quiet,
) -> tuple[list[Contestant], int]:
    """A packed checkpoint (or a plain model, alone) and, with ``dense``, the same model dense.

    Args: as of :func:`of_shape`; ``dtype`` and ``act_bits`` as the commands have them.

    Returns:
        the contestants, and the size of their vocabulary.

    Raises:
        InputError: the device's native decoder does not run the model. UsageError: its context is shorter.
    """
    from ..models.description import decoder_shape, longest_context

    try:
        config = read_config(path)
        shape, longest = decoder_shape(config), longest_context(config)
        if positions > longest:
            reason = f"{path} attends to {longest} positions at once, and a step adds one"
            raise UsageError(f"--context {positions - 1}: {reason}")
        if device.type == "cuda":
            return _on_gpu(path, device, dtype, act_bits, positions, dense, caches, heads, note), shape.vocab
        return _on_cpu(path, config, act_bits, positions, dense, threads or default_threads()), shape.vocab
    except UnsupportedModel as error:
        raise InputError(f"{path}: {error}") from None


def _on_gpu(
    path: Path,
    device: torch.device,
    dtype: str,
    act_bits: int | None,
    positions: int,
    dense: bool,
    caches: Sequence[str],
    heads: Sequence[str],
    note: Note,
) -> list[Contestant]:
    from ..backends.cuda.weights import load_model

    model = load_model(path, device=device, dtype=dtype, act_bits=act_bits, context=positions)
    if not model.packed and not heads:
        return _with_caches({_name(model): model}, caches)
    return _with_caches(_with_heads(model, heads, dense, note), caches)


def _name(model: CudaModel) -> str:
    return str(model.dtype).removeprefix("torch.")


def _with_heads(
    model: CudaModel, heads: Sequence[str], dense: bool, note: Note, *, drawn: bool = False
) -> dict[str, CudaModel]:
    """A packed model by name, with each of these kinds of heads or its own; with ``dense`` the second is its dense one,
    of 16 bits throughout, under the name of its dtype, unless it cannot run. ``drawn``: as of ``with_head``."""
    from ..models.synthetic import dense_model, dense_refusal, with_head

    if dense and (refusal := dense_refusal(model)):
        note(f"the dense model is left out: {refusal}")
        dense = False
    # One 16-bit head for all that have one.
    kinds = dict.fromkeys([*heads, "16bit"] if dense else heads)
    whole = {kind: with_head(model, kind, drawn=drawn) for kind in kinds}
    models = {"int2": model} if not heads else {}
    models |= {f"int2, {kind} head" if len(heads) > 1 else "int2": whole[kind] for kind in heads}
    if not dense:
        return models
    (name, first), *others = models.items()
    return {name: first, _name(model): dense_model(whole["16bit"]), **dict(others)}


def _with_caches(models: dict[str, CudaModel], caches: Sequence[str]) -> list[Contestant]:
    from .cuda_contestant import CudaContestant, Shared

    shared: Shared = WeakValueDictionary()
    return [CudaContestant(name, each, shared, int8_cache=c == "int8") for c in caches for name, each in models.items()]


def _on_cpu(
    path: Path, config: dict, act_bits: int | None, positions: int, dense: bool, threads: int
) -> list[Contestant]:
    from ..backends.cpu.weights import decoder_weights
    from ..checkpoint.reader import QUANT_METHOD, Format
    from .cpu_contestant import CpuContestant, DenseContestant, dense_checkpoint

    if quant_method(config) != QUANT_METHOD:
        raise InputError(f"{path} is not a packed checkpoint; on a CPU the native decoder runs only those")
    form = Format.from_dict(config["quantization_config"], path)
    weights = decoder_weights(ModelDir(path), form, positions, threads=threads)
    bits = act_bits or form.activation_bits
    out: list[Contestant] = [CpuContestant("int2", weights, act_bits=bits, threads=threads)]
    if dense:
        model = dense_checkpoint(path, DENSE)
        out.append(DenseContestant(str(DENSE).removeprefix("torch."), model, weights.shape))
    return out
