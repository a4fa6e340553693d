"""How many sequences run at once where nobody says: what the device's memory holds, as far as more of them gain.

A step reads every weight once, however many sequences it continues, so more of them are nearly free until arithmetic
takes longer than reading. What limits them is the cache of keys and values. The functions here only compute; who calls
them measures the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Of transformers' modelling, which runs one sequence after another: more at once share the time and gain nothing.
TRANSFORMERS_SLOTS = 16
# Of a GPU. Beyond, a step gets slower about as fast as it gets wider, and every sequence waits longer for its tokens.
MOST_GPU_SLOTS = 256
# Tokens of a usual request, prompt and answer. The cache of a GPU is paged, so a sequence takes what it has, and where
# longer ones fill it, the engine preempts the latest.
USUAL_TOKENS = 512
# Of the GPU's free memory once the weights are there, and of the machine's: what everything else takes stays free.
CACHE_SHARE, CPU_CACHE_SHARE = 0.85, 0.5
# Of the sampler's tables on a GPU: bytes of a sequence for each token of the vocabulary.
SAMPLER_BYTES = 20
# Of a CPU, whose products are limited by arithmetic sooner. Threads bound the slots only where more of them would leave
# each with less than the model's context: 64 clients are answered sooner by 64 slots than by 16 (kernels/LOG.md).
SLOTS_PER_THREAD, LEAST_CPU_SLOTS, MOST_CPU_SLOTS = 4, 16, 64
# A sequence's part of a CPU's cache is set aside whole; it should not become shorter than this for the sake of others.
ROOMY_TOKENS = 2048


class Slots(NamedTuple):
    """Sequences that run at once, and why so many, for people."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """A GPU: bytes that are free once the weights are there."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class CpuDevice:
    """A CPU: bytes that are free before the model is loaded, and threads that compute."""

    free_bytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What a sequence of a model takes.

    Attributes:
        token_bytes: of the cache, for one token in all layers. context: most tokens of a sequence, as served.
        vocab: tokens of the vocabulary.
        fixed_context: the user chose ``context``, so that it must not become shorter.
        state_bytes: that a sequence takes however long it is, of recurrent layers.
    """

    token_bytes: int
    context: int
    vocab: int
    fixed_context: bool = False
    state_bytes: int = 0


def default_slots(device: GpuDevice | CpuDevice, model: ModelNeeds) -> Slots:
    """Sequences that run at once on a device where nobody says; at least 1.

    Example:
        >>> llama_2_7b = ModelNeeds(token_bytes=2 * 2 * 32 * 32 * 128, context=4096, vocab=32000)
        >>> default_slots(GpuDevice(free_bytes=20 * 2**30), llama_2_7b)
        Slots(number=67, reason='the cache has room for 67 sequences of 512 tokens, 0.50 MiB a token')
    """
    return _gpu_slots(device, model) if isinstance(device, GpuDevice) else _cpu_slots(device, model)


def _gpu_slots(device: GpuDevice, model: ModelNeeds) -> Slots:
    tokens = min(USUAL_TOKENS, model.context)
    fit = int(device.free_bytes * CACHE_SHARE) // (
        tokens * model.token_bytes + SAMPLER_BYTES * model.vocab + model.state_bytes
    )
    room = _room(fit, tokens, model)
    if fit >= MOST_GPU_SLOTS:
        return Slots(MOST_GPU_SLOTS, f"the most by default; {room}")
    return Slots(max(fit, 1), room)


def _cpu_slots(device: CpuDevice, model: ModelNeeds) -> Slots:
    tokens = model.context if model.fixed_context else min(ROOMY_TOKENS, model.context)
    budget = int(device.free_bytes * CPU_CACHE_SHARE)
    fit = budget // (tokens * model.token_bytes + model.state_bytes)
    whole = budget // (model.context * model.token_bytes + model.state_bytes)
    most = min(max(SLOTS_PER_THREAD * device.threads, LEAST_CPU_SLOTS), MOST_CPU_SLOTS)
    if fit < most:
        return Slots(max(fit, 1), f"half of the free memory: {_room(fit, tokens, model)}")
    if whole > most:
        room = _room(whole, model.context, model)
        return Slots(min(whole, MOST_CPU_SLOTS), f"the most by default; {room}" if whole >= MOST_CPU_SLOTS else room)
    rule = f"{SLOTS_PER_THREAD} a thread, {LEAST_CPU_SLOTS} to {MOST_CPU_SLOTS}"
    return Slots(most, f"{device.threads} thread{'s' * (device.threads != 1)}, {rule}")


def _room(fit: int, tokens: int, model: ModelNeeds) -> str:
    size, state = model.token_bytes / 2**20, model.state_bytes / 2**20
    beside = f" and {state:.0f} MiB of state" if state else ""
    return f"the cache has room for {fit} sequences of {tokens} tokens, {size:.2f} MiB a token{beside}"
