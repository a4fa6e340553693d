"""From a model directory to the native decoder on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch
from trirun_kernels.decoder.cuda import CudaDecoder
from trirun_kernels.decoder.cuda_cache import position_bytes, state_bytes, window_pages
from trirun_kernels.decoder.cuda_ops import PAGE
from trirun_kernels.decoder.cuda_weights import CudaModel
from trirun_kernels.decoder.shape import MOST_INT8_HEAD_DIM
from trirun_kernels.native import NativeError, load

from ...checkpoint.model_dir import read_config
from ...errors import InputError, OutOfMemoryError
from ...models.description import UnsupportedModel, chosen_context, description, longest_context
from ..accumulation import use_fp16_sums
from ..capacity import CACHE_SHARE, SAMPLER_BYTES, GpuDevice, ModelNeeds, default_slots
from .runner import MAX_ROWS, CudaRunner
from .weights import load_model

# Of a runner that scores: tokens of a step, and sequences beside the one that grows; logits are what takes memory.
SCORED_ROWS, SCORED_SEQUENCES = 4096, 64
LEAST = 512


def open_cuda(
    path: str | Path,
    *,
    device: str,
    dtype: str,
    act_bits: int | None,
    slots: int | None,
    context: int | None,
    accumulate: str = "fp32",
    kv_cache_dtype: str = "auto",
    int8_head: bool = False,
    scoring: bool = False,
) -> CudaRunner:
    """A Llama-like model, packed or plain, on the native decoder of a GPU.

    Args:
        device: of torch; see :func:`gpu_obstacle`.
        slots: None is as many as :func:`..capacity.default_slots` says, which is not looked at where ``scoring``.
        context: None is the model's own, at most 8192.
        scoring: for whole texts: ``slots`` is not looked at, ``context`` None is all of the model's positions, and the
            cache is no larger than it must be, so that two models fit a GPU; see :func:`scoring_cache`.

    Raises:
        UnsupportedModel: the decoder does not run this model. InputError: the checkpoint is damaged.
        OutOfMemoryError: the GPU holds the weights but not one context beside them.
    """
    target = torch.device("cuda", torch.device(device).index or 0)
    config = read_config(Path(path))
    wanted = longest_context(config) if scoring and context is None else chosen_context(config, context)
    try:
        model = load_model(path, device=target, dtype=dtype, act_bits=act_bits, context=wanted, int8_head=int8_head)
        if accumulate != "fp32":
            model = use_fp16_sums(model)
        kind = torch.int8 if kv_cache_dtype == "int8" else model.dtype
        widest = max((mixer.head_dim for mixer in model.shape.attentions), default=0)
        if kind == torch.int8 and widest > MOST_INT8_HEAD_DIM:
            raise UnsupportedModel(f"an int8 cache of heads of {widest}; at most {MOST_INT8_HEAD_DIM}")
        if not scoring:
            why = ""
            if slots is None:
                free, _ = torch.cuda.mem_get_info(target)
                needs = ModelNeeds(
                    position_bytes(model.shape, kind), wanted, model.shape.vocab, state_bytes=state_bytes(model.shape)
                )
                slots, why = default_slots(GpuDevice(free), needs)
            pages, windowed = cache_pages(model, slots, wanted, kind)
            decoder = CudaDecoder(
                model, slots=slots, context=wanted, pages=pages, kv_dtype=kind, windowed_pages=windowed
            )
            runner = CudaRunner(decoder, logit_scale=description(config).logit_scale)
            runner.why_slots = why
            return runner
        slots = 1 + SCORED_SEQUENCES
        wanted, pages = scoring_cache(fitting_pages(model, slots, kind), wanted)
        decoder = CudaDecoder(model, slots=slots, context=wanted, pages=pages, kv_dtype=kind)
        return CudaRunner(decoder, max_rows=SCORED_ROWS)
    except UnsupportedModel:
        raise
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None


def gpu_obstacle(device: str) -> str | None:
    """Why the kernels do not run on a GPU, or None where they do; ``device`` is torch's name of it."""
    if torch.cuda.get_device_capability(torch.device(device)) < (8, 0):
        return "the CUDA kernels need compute capability 8.0 or newer"
    try:
        load("cuda")
    except NativeError as error:
        return str(error)
    return None


def scoring_cache(fit: int, longest: int) -> tuple[int, int]:
    """Positions of a sequence, and pages, of a runner that scores: for a sequence of that length that grows, beside it
    as long a one or a step of short ones, one page that the cache leaves every slot to grow, and page 0.

    Args:
        fit: pages that the GPU holds. longest: positions that are wanted; fewer where two such sequences do not fit.

    Raises:
        OutOfMemoryError: less than 512 positions (or ``longest``, where that is less) fit.
    """
    spare, short = SCORED_SEQUENCES + 2, SCORED_ROWS // PAGE + SCORED_SEQUENCES
    blocks = min(-(-longest // PAGE), fit - spare - short, (fit - spare) // 2)
    context = min(longest, blocks * PAGE)
    if context < min(LEAST, longest):
        needed = min(LEAST, longest)
        raise OutOfMemoryError(f"the GPU has no room to score texts of {needed} tokens beside the weights")
    return context, blocks + max(blocks, short) + spare


def cache_pages(model: CudaModel, slots: int, context: int, kind: torch.dtype) -> tuple[int, int | None]:
    """Pages of elements of that kind: for every slot at full length, or as many as the GPU holds; and page 0. Those of
    layers that see a window apart, for every slot what it keeps, where that is less; else None.

    Raises:
        OutOfMemoryError: not one slot at full length fits.
    """
    shape, blocks, kept = model.shape, -(-context // PAGE), window_pages(model.shape)
    budget = _cache_bytes(model, slots)
    page, windowed_page = (PAGE * position_bytes(shape, kind, windowed) for windowed in (False, True))
    # Of a step, whose rows are all stored before any is passed, and those of the step before.
    step = 2 * MAX_ROWS // PAGE
    apart = 0 < kept + step < blocks
    slot, beside = blocks * page + kept * windowed_page, page + (step + 1) * windowed_page
    if not apart:
        slot, beside = blocks * (page + windowed_page), page + windowed_page
    if budget < slot + beside:
        free, _ = torch.cuda.mem_get_info(model.device)
        raise OutOfMemoryError(
            f"{free / 2**30:.1f} GiB are free on the GPU; a context of {context} takes "
            f"{(slot + beside) / 2**30:.1f} GiB",
            "choose a shorter --ctx" + ("" if kind == torch.int8 else ", or --kv-cache-dtype int8"),
        )
    if not apart:
        return min(budget // beside, slots * blocks + 1), None
    full = min((budget - beside) / slot, slots)
    return int(full * blocks) + 1, int(full * kept) + step + 1


def fitting_pages(model: CudaModel, slots: int, kind: torch.dtype) -> int:
    """Pages of elements of that kind, for all layers, that the GPU holds beside the weights and so many slots."""
    return _cache_bytes(model, slots) // (PAGE * position_bytes(model.shape, kind))


def _cache_bytes(model: CudaModel, slots: int) -> int:
    """Bytes that the GPU has for a cache beside the weights and the state of so many slots."""
    free, _ = torch.cuda.mem_get_info(model.device)
    # The sampler's tables are as long as the vocabulary.
    slot = model.shape.vocab * SAMPLER_BYTES + state_bytes(model.shape)
    return max(int((free - slots * slot) * CACHE_SHARE), 0)
