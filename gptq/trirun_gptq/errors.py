"""The exceptions of this library."""

from __future__ import annotations


class QuantizationError(ValueError):
    """Weights, activations, data or a recipe that cannot be quantized as asked.

    The message names the module and the numbers; nothing falls back silently to a weaker method.
    """


class StateError(QuantizationError):
    """The directory of a stopped run belongs to another run, or is damaged."""


class ScaleError(QuantizationError):
    """A scale that fp16 cannot hold, found where the layer's name is not known: whoever knows it names it."""
