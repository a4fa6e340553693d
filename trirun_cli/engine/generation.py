"""Writing with a model that has one sequence in its cache, one token at a time; and what models say of generation."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..backends.cpu.sampler import HostSampler
from ..checkpoint.model_dir import read_config, read_json
from ..errors import InputError
from .sampling import NOT_FINITE, SamplingParams

if TYPE_CHECKING:
    from ..backends.transformers.model import CausalLM


@dataclass(slots=True)
class GenerationStats:
    """Times of one generation: seconds to the first token (prefill included), seconds of all later ones."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    finish_reason: str = "length"

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens per second after the first; 0 when there was only one."""
        return (self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


def generate_tokens(
    model: CausalLM, prompt: list[int], params: SamplingParams, stop_ids: Collection[int], stats: GenerationStats
) -> Iterator[int]:
    """Generate token ids after a prompt until a stop id, the token limit, or the end of the context.

    Args:
        model: is reset first. prompt: token ids, at least one.
        stop_ids: end-of-text ids; the one met is not yielded.
        stats: filled in as the generation goes.

    Raises:
        InputError: the prompt is longer than the context, or holds an id the model does not have; or the logits are not
            finite.
    """
    import torch

    if len(prompt) > model.max_positions:
        raise InputError(f"the prompt has {len(prompt)} tokens, the model's context is {model.max_positions}")
    if max(prompt) >= model.vocab_size:
        raise InputError(f"token id {max(prompt)} is outside the model's vocabulary of {model.vocab_size}")
    stats.prompt_tokens = len(prompt)
    limit = min(params.max_tokens, model.max_positions - len(prompt))
    if limit == 0:
        return
    model.reset()
    sampler = HostSampler(1, model.vocab_size)
    sampler.bind(0, params, prompt)
    started = time.perf_counter()
    logits = model.forward(torch.tensor(prompt))
    for step in range(limit):
        (chosen,) = sampler.sample(logits[-1:].float().cpu().numpy(), (0,))
        token = chosen.id
        if token < 0:
            raise InputError(NOT_FINITE)
        now = time.perf_counter()
        if step == 0:
            stats.first_token_s = now - started
        else:
            stats.decode_s = now - started - stats.first_token_s
        if token in stop_ids:
            stats.finish_reason = "stop"
            return
        stats.generated_tokens += 1
        yield token
        if step + 1 < limit:
            logits = model.forward(torch.tensor([token]))


def stop_ids(path: str | os.PathLike[str]) -> set[int]:
    """End-of-text ids of a model directory, from generation_config.json or else config.json.

    Raises:
        InputError: see :func:`generation_defaults`; or they are no ids.
    """
    ids = generation_defaults(path).get("eos_token_id", read_config(Path(path)).get("eos_token_id"))
    found = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(isinstance(id, int) for id in found):
        raise InputError(f"{os.fspath(path)}: eos_token_id is {ids!r}, not token ids")
    return set(found)


def generation_defaults(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The generation_config.json of a model directory, or nothing.

    Raises:
        InputError: there is no model directory, or the file is damaged.
    """
    read_config(Path(path))
    file = Path(path) / "generation_config.json"
    found = read_json(file) if file.is_file() else {}
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty"):
        if not isinstance(found.get(name), int | float | None):
            raise InputError(f"{file}: {name} is {found[name]!r}, not a number")
    if isinstance(found.get("top_k"), float):
        raise InputError(f"{file}: top_k is {found['top_k']!r}, not a count")
    return found
