"""What a finished block hands to the writer of the checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Protocol

from torch import Tensor
from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO

from ..layer.quantized import Quantized
from .loader import Skeleton, TensorSource
from .stored import Group, StoredNames


class Writer(Protocol):
    """Receives the finished tensors in model order. It must not keep them longer than it needs."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Store one tensor under its checkpoint name. It lies on the CPU."""


class Collected(dict[str, Tensor]):
    """A writer that keeps everything in memory, for models small enough."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep one tensor."""
        self[name] = tensor


def write_block(source: TensorSource, block: str, quantized: dict[str, Quantized], writer: Writer) -> None:
    """A block's packed weights, and its other tensors as they are.

    Packed layers go by the names of the model, and so does what the files hold together with them, as the experts of a
    mixture: what was fused is not fused again.
    """
    for name, weight in quantized.items():
        packed = weight.pack()
        writer.add(f"{block}.{name}{WEIGHT}", packed.words.cpu())
        writer.add(f"{block}.{name}{SCALE}", packed.scales.cpu())
        if packed.zeros is not None:
            writer.add(f"{block}.{name}{ZERO}", packed.zeros.cpu())
    replaced = {f"{block}.{name}{WEIGHT}" for name in quantized}
    for group in source.stored.groups:
        if group.within(block):
            for name, tensor in unquantized(source.stored, group, replaced):
                writer.add(name, tensor)
    source.release()


def copy_rest(source: TensorSource, skeleton: Skeleton, writer: Writer) -> None:
    """What lies outside the blocks, as it is."""
    for group in source.stored.groups:
        if not group.within(skeleton.blocks_name):
            for name, tensor in unquantized(source.stored, group, ()):
                writer.add(name, tensor)


def unquantized(stored: StoredNames, group: Group, replaced: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """What is to be stored of a group beside the model's tensors that were ``replaced``: names and tensors."""
    if group.copied and not any(name in replaced for name in group.targets):
        yield from ((name, stored.files.tensor(name)) for name in group.sources)
    else:
        yield from ((name, stored.read(name).contiguous()) for name in group.targets if name not in replaced)
