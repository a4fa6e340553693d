"""Text that the original model writes itself, to be distilled on.

Its own samples are what a model's predictions should be matched on, and there is no end of them (LLM-QAT, Liu et al.
2023). Each begins with a few tokens of real text and is sampled at temperature 1 without any truncation: the
distribution itself is the target.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

CPU_ROOM = 1 << 30  # bytes of keys and values that exist at a time
GPU_ROOM = 0.5  # the same, as a fraction of what is free
# Not cuDNN's, which builds a plan for every new length of the keys: tens of milliseconds per token.
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.no_grad()
def sample(
    model: Any, prompts: Tensor, length: int, seed: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> Tensor:
    """Continue prompts int64 [s, p] to int64 [s, length].

    Args:
        model: a transformers causal language model. seed: of the sampling.
        progress: called with (sequences done, sequences).
    """
    device = model.device
    generator = torch.Generator(device).manual_seed(seed)
    # A step costs the same time for few sequences as for many, up to thousands.
    room = CPU_ROOM if device.type == "cpu" else int(GPU_ROOM * torch.cuda.mem_get_info(device)[0])
    batch = max(1, room // (_bytes_per_token(model) * length))
    done = []
    for part in prompts.split(batch):
        with sdpa_kernel(BACKENDS):
            done.append(_continue(model, part.to(device), length, generator).cpu())
        progress(sum(map(len, done)), len(prompts))
    return torch.cat(done)


def _continue(model: Any, tokens: Tensor, length: int, generator: torch.Generator) -> Tensor:
    from .cache import roomy_cache

    # By its name since transformers 5.24, or before.
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"
    past = {name: roomy_cache(model.config, length)}
    written, new = [tokens], tokens
    for _ in range(length - tokens.shape[1]):
        output = model(input_ids=new, **past, use_cache=True, logits_to_keep=1)
        chances = output.logits[:, -1].float().softmax(-1)
        # The largest of p / Exp(1) is a sample of p; torch.multinomial is slower and limited to 2²⁴ categories.
        noise = torch.empty_like(chances).exponential_(generator=generator)
        new = (chances / noise).argmax(-1, keepdim=True)
        written.append(new)
    return torch.cat(written, 1)


def _bytes_per_token(model: Any) -> int:
    """Of keys and values over all layers, from the shapes of the key and value projections where they are known."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * size * model.dtype.itemsize
