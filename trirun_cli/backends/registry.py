"""From a model directory to an engine: which runner takes which model."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import Any

from ..checkpoint.model_dir import quant_method, read_config
from ..engine.engine import Engine
from ..engine.runner import Runner
from ..errors import InputError, OutOfMemoryError, UsageError


def open_engine(
    path: str | Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    act_bits: int | None = None,
    accumulate: str = "fp32",
    kv_cache_dtype: str = "auto",
    engine: str = "auto",
    slots: int = 16,
    context: int | None = None,
    threads: int | None = None,
    tf32: bool = False,
    compiled: bool = False,
    max_waiting: int | None = None,
) -> Engine:
    """An engine on a model directory: packed Llama-like checkpoints on the lean decoder, the rest in transformers.

    Args:
        path: a packed checkpoint or an ordinary Hugging Face directory.
        device: "auto" (the first GPU, or the CPU), "cpu", "cuda" or "cuda:N".
        dtype: "float32", "float16", "bfloat16", or "auto": float32 on the CPU, the checkpoint's own on a GPU.
        act_bits: 8 or 16 overrides the checkpoint's activation width.
        accumulate: "fp32", or on a GPU "fp16" (see :mod:`..accumulation`) for prompts long enough to gain.
        kv_cache_dtype: "auto", the type it computes in, or "int8", with a scale per token and head: on the lean decoder
            of a GPU.
        engine: "lean", "transformers", or "auto": lean where it can.
        slots: requests that run at once. context: most tokens of one; None is the runner's own choice: the model's
            own, at most 8192 on a CPU, less where half of the free memory does not hold that many.
        threads: of the lean decoder on a CPU; None takes one per processor.
        tf32, compiled: of transformers' modelling: TF32 for float32 products on a GPU; through torch.compile.
        max_waiting: requests that wait beyond those; None is no limit.

    Raises:
        InputError: the directory cannot be loaded, or not on that engine.
        UsageError: slots or context are below 1, the context is longer than the model's, or an option does not go with
            the device or the engine.
        MissingError: the device is not there.
        OutOfMemoryError: the cache does not fit.
    """
    config = read_config(Path(path))
    for value, what in ((slots, "requests at once"), (context, "tokens of context")):
        if value is not None and value < 1:
            raise UsageError(f"{value} {what}: at least 1")
    longest = config.get("max_position_embeddings")
    if context is not None and isinstance(longest, int) and context > longest:
        raise UsageError(f"{path}: a context of {context} tokens; the model's own is {longest}")
    for option, given in (("--tf32", tf32), ("--compile", compiled)):
        if given and engine == "lean":
            raise UsageError(f"{option} is for transformers, not for --engine lean")
    if accumulate != "fp32":
        from .transformers.accumulation import check_accumulation

        check_accumulation(accumulate, device)
    if kv_cache_dtype != "auto" and (on_cpu(device) or engine == "transformers"):
        raise UsageError(f"--kv-cache-dtype {kv_cache_dtype}: the lean decoder of a GPU has it alone")
    options: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "act_bits": act_bits,
        "slots": slots,
        "context": context,
        "accumulate": accumulate,
    }
    required = engine == "lean" or kv_cache_dtype != "auto"
    runner = None
    if engine != "transformers":
        runner = _lean_runner(Path(path), config, required, threads, kv_cache_dtype, **options)
    runner = runner or _transformers_runner(Path(path), tf32=tf32, compiled=compiled, **options)
    return Engine(runner, max_waiting=max_waiting)


def _lean_runner(
    path: Path,
    config: dict[str, Any],
    required: bool,
    threads: int | None,
    kv_cache_dtype: str,
    *,
    device: str,
    dtype: str,
    act_bits: int | None,
    slots: int,
    context: int | None,
    accumulate: str,
) -> Runner | None:
    """The lean decoder of the device, or None where it does not run the model: a packed checkpoint on a CPU, where
    nothing here imports torch, a packed or a plain one on a GPU."""
    from ..checkpoint.reader import QUANT_METHOD
    from ..engine.cache_memory import affordable_context
    from ..models.llama_config import NotLean, chosen_context, decoder_shape

    try:
        if not on_cpu(device):
            from .cuda.opening import cuda_runner

            options: dict[str, Any] = {"device": device, "dtype": dtype, "act_bits": act_bits, "accumulate": accumulate}
            return cuda_runner(path, slots=slots, context=context, kv_cache_dtype=kv_cache_dtype, **options)
        if quant_method(config) != QUANT_METHOD:
            raise NotLean("the lean decoder runs packed checkpoints")
        if dtype not in ("auto", "float32"):
            raise NotLean(f"the lean decoder computes in float32, not {dtype}")
        from .cpu.model import LeanDecoder
        from .cpu.runner import LeanRunner

        if context is None:
            context = affordable_context(decoder_shape(config), slots, chosen_context(config, None))
        rows = max(192, -(-slots // 48) * 48)
        sizes: dict[str, Any] = {"slots": slots, "context": context, "max_rows": rows}
        return LeanRunner(LeanDecoder(path, act_bits=act_bits, threads=threads, **sizes))
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        reason = f"{slots} sequences of {context} tokens do not fit the memory"
        raise OutOfMemoryError(reason, "run fewer at once, or shorter ones: --ctx") from error
    except NotLean as error:
        if required:
            raise InputError(f"{path}: {error}") from None
        return None


def _transformers_runner(
    path: Path,
    *,
    device: str,
    dtype: str,
    act_bits: int | None,
    slots: int,
    context: int | None,
    accumulate: str,
    tf32: bool,
    compiled: bool,
) -> Runner:
    import torch

    from ..checkpoint.model_dir import ModelDir
    from .transformers.model import load_transformers, pick_device
    from .transformers.runner import TransformersRunner

    kind = None if dtype == "auto" else getattr(torch, dtype)
    model = load_transformers(ModelDir(path), pick_device(device), kind, act_bits)
    if accumulate != "fp32":
        from .transformers.accumulation import use_fp16_sums

        model = use_fp16_sums(model)
    return TransformersRunner(model, slots=slots, context=context, tf32=tf32, compiled=compiled)


def on_cpu(device: str) -> bool:
    """Whether a --device option means the CPU. torch is asked only where there is a driver that it could use.

    Raises:
        MissingError: it is a device that is not there.
    """
    if device == "cpu" or (device == "auto" and not _has_driver()):
        return True
    from .transformers.model import pick_device

    return pick_device(device) == "cpu"


def _has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
