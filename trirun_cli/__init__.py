"""trirun: quantize language models to 2 bits or ternary, and run them.

In a program: :class:`LLM` runs a model, with :class:`SamplingParams` to :class:`Completion`, which
follow a :class:`Grammar` where they should; :func:`quantize`,
:func:`pack` and :func:`finetune` do what the commands of these names do; :func:`load` gives a packed checkpoint as a
transformers model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from .engine.constraint import Grammar
    from .engine.sampling import SamplingParams
    from .integrations.transformers import load
    from .llm import LLM
    from .text.completion import Completion
    from .workflows.finetune import finetune
    from .workflows.pack import pack
    from .workflows.quantize import quantize


__all__ = ["LLM", "Completion", "Grammar", "SamplingParams", "__version__", "finetune", "load", "pack", "quantize"]

# Where each lives; imported on first use, since a command needs few of them and torch's import takes seconds.
_PLACES = {
    "LLM": ("llm", "LLM"),
    "Completion": ("text.completion", "Completion"),
    "Grammar": ("engine.constraint", "Grammar"),
    "SamplingParams": ("engine.sampling", "SamplingParams"),
    "finetune": ("workflows.finetune", "finetune"),
    "load": ("integrations.transformers", "load"),
    "pack": ("workflows.pack", "pack"),
    "quantize": ("workflows.quantize", "quantize"),
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(f".{module}", __name__), attribute)
