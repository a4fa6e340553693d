"""What a finished block hands to the writer of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor
from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO

from ..layer.quantized import Quantized
from .experts import is_expert, stored_as
from .loader import Skeleton, TensorSource


class Writer(Protocol):
    """Receives the finished tensors in model order. It must not keep them longer than it needs."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Store one tensor under its checkpoint name. It lies on the CPU."""


class Collected(dict[str, Tensor]):
    """A writer that keeps everything in memory, for models small enough."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep one tensor."""
        self[name] = tensor


def write_block(
    source: TensorSource, block: str, layers: Iterable[str], quantized: dict[str, Quantized], writer: Writer
) -> None:
    """A block's packed weights, and its other tensors as they are.

    Layers of experts go by their own names, packed or not: what a file fused is not fused again.
    """
    for name, weight in quantized.items():
        packed = weight.pack()
        writer.add(f"{block}.{name}{WEIGHT}", packed.words.cpu())
        writer.add(f"{block}.{name}{SCALE}", packed.scales.cpu())
        if packed.zeros is not None:
            writer.add(f"{block}.{name}{ZERO}", packed.zeros.cpu())
    replaced = {f"{block}.{name}{WEIGHT}" for name in quantized}
    experts = [f"{block}.{name}{WEIGHT}" for name in layers if is_expert(f"{block}.{name}{WEIGHT}")]
    for name in experts:
        if name not in replaced:
            writer.add(name, source.read(name).contiguous())
    taken = {stored_as(name, source)[0] for name in (*replaced, *experts)}
    for name in source.names:
        if name.startswith(f"{block}.") and name not in taken:
            writer.add(name, source.read(name))
    source.release()


def copy_rest(source: TensorSource, skeleton: Skeleton, writer: Writer) -> None:
    """What lies outside the blocks, as it is."""
    for name in source.names:
        if not name.startswith(f"{skeleton.blocks_name}."):
            writer.add(name, source.read(name))
