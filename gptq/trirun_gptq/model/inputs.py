"""What the layers of a block read: their inputs, and which of them share one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from trirun_kernels.weights.experts import SeparateExperts

from .activations import Batch, EnoughSeen, run_block


def inputs_of(
    block: nn.Module, index: int, batch: Batch, layers: list[nn.Module], *, original: bool = False
) -> dict[nn.Module, Tensor]:
    """The inputs of some layers of a block, as of :func:`~.activations.run_block`, whose forward pass ends as soon as
    all were seen.

    Layers that are not called, as experts that no token chose, are not in the answer.
    """
    seen: dict[nn.Module, Tensor] = {}

    def hook(module: nn.Module, args: tuple) -> None:
        seen[module] = args[0]
        if len(seen) == len(layers):
            raise EnoughSeen

    handles = [layer.register_forward_pre_hook(hook) for layer in layers]
    try:
        run_block(block, index, batch, original=original)
    except EnoughSeen:
        pass
    finally:
        for handle in handles:
            handle.remove()
    return seen


@contextmanager
def _weights_watched(layers: dict[str, nn.Linear]) -> Iterator[set[str]]:
    """Collects the names of layers whose weight is asked for by others than the layer itself."""
    looked_at: set[str] = set()
    names = {id(layer): name for name, layer in layers.items()}
    running: list[nn.Module] = []

    class Watched(nn.Linear):
        def __getattr__(self, key: str) -> Any:
            if key == "weight" and self not in running:
                looked_at.add(names[id(self)])
            return super().__getattr__(key)

        def forward(self, input: Tensor) -> Tensor:
            running.append(self)
            try:
                return super().forward(input)
            finally:
                running.remove(self)

    kinds = {name: type(layer) for name, layer in layers.items()}
    try:
        for layer in layers.values():
            layer.__class__ = Watched
        yield looked_at
    finally:
        for name, layer in layers.items():
            layer.__class__ = kinds[name]


def input_groups(block: nn.Module, index: int, batch: Batch, layers: dict[str, nn.Linear]) -> list[list[list[str]]]:
    """Layers that read the very same tensor, in the order of execution: [[[q, k, v]], [[o]], [[gate, up]], [[down]]].

    What can be solved at once is one entry: the experts of a layer, each with a tensor of its own or none at all, are
    two, [[gate 0, up 0], [gate 1, up 1], ...] and [[down 0], [down 1], ...].

    Layers that are never called or more than once are in none, and neither are those whose weight the block looks at
    itself: it would find packed words. Experts are called as often as tokens choose them.
    """
    order: list[tuple[Tensor | None, list[list[str]]]] = []
    calls = dict.fromkeys(layers, 0)
    experts = {name: module for name, module in block.named_modules() if isinstance(module, SeparateExperts)}
    owner = {layer: name for name in experts for layer in layers if layer.startswith(f"{name}.")}

    def note(name: str) -> Callable[[nn.Module, tuple], None]:
        def hook(module: nn.Module, args: tuple) -> None:
            calls[name] += 1
            # The tensors are kept alive here, so that identity means identity.
            for tensor, groups in order:
                if tensor is args[0]:
                    groups[0].append(name)
                    return
            order.append((args[0], [[name]]))

        return hook

    def note_experts(name: str) -> Callable[[nn.Module, tuple], None]:
        def hook(module: nn.Module, args: tuple) -> None:
            for roles in (("gate", "up"), ("down",)):
                groups = [[f"{name}.{expert}.{role}" for role in roles] for expert, _ in module.named_children()]
                present = [[layer for layer in group if layer in layers] for group in groups]
                order.append((None, [group for group in present if group]))

        return hook

    handles = [layer.register_forward_pre_hook(note(name)) for name, layer in layers.items() if name not in owner]
    handles += [module.register_forward_pre_hook(note_experts(name)) for name, module in experts.items()]
    try:
        with _weights_watched(layers) as looked_at:
            run_block(block, index, batch)
    finally:
        for handle in handles:
            handle.remove()
    once = {name for name, count in calls.items() if name in owner or (count == 1 and name not in looked_at)}
    found = ([[name for name in group if name in once] for group in groups] for _, groups in order)
    return [left for groups in found if (left := [group for group in groups if group])]
