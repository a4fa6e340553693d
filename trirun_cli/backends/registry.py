"""Which backend runs which model directory on which device, and the one opener of models.

There are three: the native decoder on a CPU ("cpu") and on a GPU ("cuda"), which run Llama-like models, and
transformers' own modelling ("transformers"), which runs every other, slower. :func:`choose_backend` is the whole rule;
generate, chat, serve, eval and the Python API open models by :func:`open_runner` and nothing else.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..checkpoint.model_dir import quant_method, read_config
from ..engine.runner import Runner
from ..errors import InputError, MissingError, OutOfMemoryError, UsageError
from ..models.description import (
    UnsupportedModel,
    chosen_context,
    decoder_shape,
    gpu_decoder_shape,
    gpu_dtype,
)
from ..models.settings import text_settings
from ..processors import default_threads, set_torch_threads
from .capacity import TRANSFORMERS_SLOTS, CpuDevice, ModelNeeds, default_slots
from .device import on_cpu, pick_device

# Sequences in the cache of a CPU that scores: the one that grows, and one beside it.
SCORED_SLOTS = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend, "cpu", "cuda" or "transformers", and why it is no faster one: None where it is the fastest, or the one
    that was asked for."""

    backend: str
    reason: str | None = None


def choose_backend(
    config: dict[str, Any],
    *,
    gpu: bool,
    dtype: str = "auto",
    engine: str = "auto",
    context: int | None = None,
    obstacle: str | None = None,
) -> Choice:
    """Which backend runs a model, by its config.json and what is asked for. Nothing else is looked at.

    Args:
        gpu: on a GPU, else on the CPU. obstacle: why the native decoder does not run on that GPU, or None.
        dtype, engine, context: as of :func:`open_runner`.

    Raises:
        InputError: config.json is damaged.
    """
    from ..checkpoint.reader import QUANT_METHOD

    if engine == "transformers":
        return Choice("transformers")
    method = quant_method(config)
    try:
        if gpu:
            if obstacle is not None:
                raise UnsupportedModel(obstacle)
            if method not in (QUANT_METHOD, None):
                raise UnsupportedModel(f"a model quantized by {method!r}")
            gpu_decoder_shape(config)
            gpu_dtype(config, dtype)
        else:
            if method != QUANT_METHOD:
                raise UnsupportedModel("on a CPU the native decoder runs packed checkpoints")
            if dtype not in ("auto", "float32"):
                raise UnsupportedModel(f"the native decoder computes in float32 on a CPU, not {dtype}")
            decoder_shape(config)
        chosen_context(config, context)
    except UnsupportedModel as error:
        return Choice("transformers", str(error))
    return Choice("cuda" if gpu else "cpu")


def open_runner(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    act_bits: int | None = None,
    accumulate: str = "fp32",
    kv_cache_dtype: str = "auto",
    head: str = "auto",
    engine: str = "auto",
    slots: int | None = 16,
    context: int | None = None,
    threads: int | None = None,
    tf32: bool = False,
    compiled: bool = False,
    scoring: bool = False,
    exact: bool = False,
) -> Runner:
    """A model directory ready to run, by the backend of :func:`choose_backend`; where only its tensors show that the
    native decoder does not run it, by transformers all the same. The runner's ``why_slower`` says so.

    Args:
        path: a packed checkpoint or an ordinary Hugging Face directory.
        device: "auto" (the first GPU, or the CPU), "cpu", "cuda" or "cuda:N".
        dtype: "float32", "float16", "bfloat16", or "auto": float32 on the CPU, the checkpoint's own on a GPU.
        act_bits: 8 or 16 overrides the checkpoint's activation width.
        accumulate: "fp32", or on a GPU "fp16" (see :mod:`.accumulation`) for prompts long enough to gain.
        kv_cache_dtype: "auto", the type it computes in, or "int8", with a scale per token and head: on the native
            decoder of a GPU.
        head: output head that is not packed, on the native decoder: "16bit" as the checkpoint has it, "int8" with a
            scale per row, or "auto": int8 on the CPU unless ``exact``, 16bit on a GPU.
        engine: "native", "transformers", or "auto": native where it can.
        slots: requests that run at once; None is as many as :func:`.capacity.default_slots` says, and the runner's
            ``why_slots`` says why. context: most tokens of one; None is the runner's own choice: the model's
            own, at most 8192 of the native decoder, less where half of a CPU's free memory does not hold that many.
        threads: on the CPU; None takes :func:`..processors.default_threads`.
        tf32, compiled: of transformers' modelling: TF32 for float32 products on a GPU; through torch.compile.
        scoring: for :class:`..engine.scoring.ScoringModel`: the cache is made for whole texts instead of ``slots``
            requests, on a GPU of all the positions that the model names, as far as its memory goes.
        exact: none of a backend's own shortcuts in precision, to measure the checkpoint and not the backend.

    Raises:
        InputError: the directory cannot be loaded, or not on that engine.
        UsageError: slots or context are below 1, the context is longer than the model's, or an option does not go with
            the device or the engine.
        MissingError: the device is not there, or transformers is needed and not installed.
        OutOfMemoryError: the cache does not fit.
    """
    path = Path(path)
    config = read_config(path)
    for value, what in ((slots, "requests at once"), (context, "tokens of context")):
        if value is not None and value < 1:
            raise UsageError(f"{value} {what}: at least 1")
    longest = text_settings(config).get("max_position_embeddings")
    if context is not None and isinstance(longest, int) and context > longest:
        raise UsageError(f"--ctx {context}: the context of {path} is {longest} tokens")
    for option, given in (("--tf32", tf32), ("--compile", compiled)):
        if given and engine == "native":
            raise UsageError(f"{option} is for transformers, not for --engine native")
    if accumulate != "fp32":
        from .accumulation import check_accumulation

        check_accumulation(accumulate, device)
    gpu = not on_cpu(device)
    if kv_cache_dtype != "auto" and (not gpu or engine == "transformers"):
        raise UsageError(f"--kv-cache-dtype {kv_cache_dtype}: the native decoder of a GPU has it alone")
    if head != "auto" and engine == "transformers":
        raise UsageError(f"--head {head}: the native decoder has it alone")
    place, obstacle = "cpu", None
    if gpu:
        place = pick_device(device)
        from .cuda.opening import gpu_obstacle

        obstacle = None if engine == "transformers" else gpu_obstacle(place)
    sizes: dict[str, Any] = {"slots": slots, "context": context}
    asked: dict[str, Any] = {"dtype": dtype, "engine": engine, "context": context}
    choice = choose_backend(config, gpu=gpu, obstacle=obstacle, **asked)
    try:
        if choice.backend == "cpu":
            int8_head = not exact if head == "auto" else head == "int8"
            return _open_cpu(path, config, act_bits, threads, int8_head, scoring=scoring, exact=exact, **sizes)
        if choice.backend == "cuda":
            from .cuda.opening import open_cuda

            options: dict[str, Any] = {"dtype": dtype, "act_bits": act_bits, "scoring": scoring}
            options |= {"accumulate": accumulate, "kv_cache_dtype": kv_cache_dtype, "int8_head": head == "int8"}
            return open_cuda(path, device=place, **options, **sizes)
    except UnsupportedModel as error:
        choice = Choice("transformers", str(error))
    if engine == "native" or kv_cache_dtype != "auto" or head != "auto":
        raise InputError(f"{path}: {choice.reason}")
    if choice.reason and find_spec("torch") is None:
        reason = f"{choice.reason}; transformers would run it, and torch is not installed"
        raise MissingError(f"{path}: {reason}", "pip install trirun")
    return _open_transformers(
        path,
        place,
        dtype,
        act_bits,
        accumulate,
        threads=threads,
        tf32=tf32,
        compiled=compiled,
        why_slower=choice.reason or "",
        **sizes,
    )


def _open_cpu(
    path: Path,
    config: dict[str, Any],
    act_bits: int | None,
    threads: int | None,
    int8_head: bool,
    *,
    slots: int | None,
    context: int | None,
    scoring: bool,
    exact: bool,
) -> Runner:
    """The native decoder of a CPU; nothing here imports torch."""
    from ..engine.cache_memory import affordable_context, available_bytes, position_bytes, state_bytes
    from .cpu.decoder import NativeDecoder
    from .cpu.runner import CpuRunner

    if scoring:
        slots = SCORED_SLOTS
    kv_dtype = "float32" if exact else "float16"
    shape, item_bytes, why = decoder_shape(config), 4 if exact else 2, ""
    if slots is None:
        device = CpuDevice(available_bytes(), threads or default_threads())
        longest = chosen_context(config, context)
        token_bytes = position_bytes(shape, item_bytes)
        slots, why = default_slots(
            device, ModelNeeds(token_bytes, longest, shape.vocab, context is not None, state_bytes(shape))
        )
    if context is None:
        context = affordable_context(shape, slots, chosen_context(config, None), item_bytes=item_bytes)
    rows = max(192, -(-slots // 48) * 48)
    sizes: dict[str, Any] = {"slots": slots, "context": context, "max_rows": rows}
    try:
        decoder = NativeDecoder(
            path, act_bits=act_bits, threads=threads, kv_dtype=kv_dtype, int8_head=int8_head, **sizes
        )
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        reason = f"{slots} sequences of {context} tokens do not fit the memory"
        raise OutOfMemoryError(reason, "run fewer at once, or shorter ones: --ctx") from error
    runner = CpuRunner(decoder)
    runner.why_slots = why
    return runner


def _open_transformers(
    path: Path,
    device: str,
    dtype: str,
    act_bits: int | None,
    accumulate: str,
    *,
    slots: int | None,
    context: int | None,
    threads: int | None,
    tf32: bool,
    compiled: bool,
    why_slower: str,
) -> Runner:
    import torch

    from ..checkpoint.model_dir import ModelDir
    from .transformers.runner import TransformersRunner
    from .transformers.weights import load_transformers

    set_torch_threads(threads)
    kind = None if dtype == "auto" else getattr(torch, dtype)
    model = load_transformers(ModelDir(path), device, kind, act_bits)
    if accumulate != "fp32":
        from .accumulation import use_fp16_sums

        model = use_fp16_sums(model)
    why_slots = "" if slots else "transformers runs one sequence after another"
    slots = slots or TRANSFORMERS_SLOTS
    runner = TransformersRunner(model, slots=slots, context=context, tf32=tf32, compiled=compiled)
    runner.why_slower, runner.why_slots = why_slower, why_slots
    return runner
