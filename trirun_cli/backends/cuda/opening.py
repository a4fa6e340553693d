"""From a model directory to the lean decoder on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from trirun_kernels.decoder.cuda import CudaDecoder, position_bytes
from trirun_kernels.decoder.cuda_ops import PAGE
from trirun_kernels.decoder.cuda_weights import CudaModel
from trirun_kernels.native import NativeError, load

from ...checkpoint.model_dir import read_config
from ...errors import InputError, OutOfMemoryError
from ...models.llama_config import NotLean, chosen_context, longest_context
from ..transformers.accumulation import use_fp16_sums
from ..transformers.model import pick_device
from .model import MAX_ROWS, CudaLM
from .runner import CudaRunner
from .weights import load_model

# Of the memory that is free once the weights are there: what activations, graphs and libraries take stays free.
CACHE_SHARE = 0.85


def cuda_runner(
    path: str | Path,
    *,
    device: str,
    dtype: str,
    act_bits: int | None,
    slots: int,
    context: int | None,
    accumulate: str = "fp32",
    kv_cache_dtype: str = "auto",
) -> CudaRunner:
    """A Llama-like model, packed or plain, on the lean decoder of a GPU.

    Raises:
        NotLean: the decoder does not run this model or this GPU. InputError: the checkpoint is damaged.
        OutOfMemoryError: the GPU holds the weights but not one context beside them.
    """
    target = usable_device(device)
    wanted = chosen_context(read_config(Path(path)), context)
    try:
        model = load_model(path, device=target, dtype=dtype, act_bits=act_bits, context=wanted)
        if accumulate != "fp32":
            model = use_fp16_sums(model)
        kind = torch.int8 if kv_cache_dtype == "int8" else model.dtype
        pages = cache_pages(model, slots, wanted, kind)
        return CudaRunner(CudaDecoder(model, slots=slots, context=wanted, pages=pages, kv_dtype=kind))
    except NotLean:
        raise
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def cuda_lm(path: str | Path, *, device: str, dtype: str, act_bits: int | None, kv_cache_dtype: str = "auto") -> CudaLM:
    """The same as a model that scores texts, of all the positions that transformers would give it.

    Raises:
        NotLean: the decoder does not run this model, or not with all its positions, or not on this GPU.
        InputError: the checkpoint is damaged.
    """
    target = usable_device(device)
    config = read_config(Path(path))
    longest = longest_context(config)
    if longest < (config.get("max_position_embeddings") or longest):
        raise NotLean(f"a sliding window of {longest} positions")
    try:
        model = load_model(path, device=target, dtype=dtype, act_bits=act_bits, context=longest)
        kind = torch.int8 if kv_cache_dtype == "int8" else model.dtype
        # One sequence in the cache, and as much again for batches beside it.
        cache = 2 * (longest + MAX_ROWS) * position_bytes(model.shape, kind)
        free, _ = torch.cuda.mem_get_info(target)
        if cache > free * CACHE_SHARE:
            raise NotLean(f"a cache of {longest} positions takes {cache / 2**30:.1f} of {free / 2**30:.1f} GiB free")
        return CudaLM(model, positions=longest, kv_dtype=kind)
    except NotLean:
        raise
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def usable_device(device: str) -> torch.device:
    """The GPU that a --device option means.

    Raises:
        NotLean: the kernels do not run on it, or are not there.
    """
    target = torch.device("cuda", torch.device(pick_device(device)).index or 0)
    if torch.cuda.get_device_capability(target) < (8, 0):
        raise NotLean("the CUDA kernels need compute capability 8.0 or newer")
    try:
        load("cuda")
    except NativeError as error:
        raise NotLean(str(error)) from None
    return target


def cache_pages(model: CudaModel, slots: int, context: int, kind: torch.dtype) -> int:
    """Pages of elements of that kind: for every slot at full length, or as many as the GPU holds; and page 0.

    Raises:
        OutOfMemoryError: not one slot at full length fits.
    """
    shape, blocks = model.shape, -(-context // PAGE)
    page_bytes = PAGE * position_bytes(shape, kind)
    free, _ = torch.cuda.mem_get_info(model.device)
    # The sampler's tables are as long as the vocabulary.
    fit = int((free - slots * shape.vocab * 20) * CACHE_SHARE) // page_bytes
    if fit < blocks + 1:
        raise OutOfMemoryError(
            f"{free / 2**30:.1f} GiB are free on the GPU; a context of {context} takes "
            f"{(blocks + 1) * page_bytes / 2**30:.1f} GiB",
            "choose a shorter --ctx" + ("" if kind == torch.int8 else ", or --kv-cache-dtype int8"),
        )
    return min(fit, slots * blocks + 1)
