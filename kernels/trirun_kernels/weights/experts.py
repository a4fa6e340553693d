"""Linear layers in place of what transformers has for them: every expert's own for one fused tensor of all experts,
and for GPT-2's transposed layers, which hold [k, n], those that hold [n, k]."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Fused modules with a product of gate and up of their own, which is Gated but for the precision it is computed in.
PLAIN_GATES = ("BeamExperts",)
CLIPPED = "GptOssExperts"


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """How a fused module of all experts holds the matrices of each.

    Attributes:
        transposed: as [k, n], else [n, k]. alternating: gate and up are every other row, else the gate comes first.
        biased: all have biases, in tensors of their own.
    """

    transposed: bool = False
    alternating: bool = False
    biased: bool = False

    def cut(self, fused: Tensor, expert: int, half: int | None) -> Tensor:
        """One expert's matrix [n, k] of a fused tensor, or its bias [n] of that of biases, in the same memory;
        ``half``: the gate's rows (0) or the up's (1)."""
        part = fused[expert]
        if self.transposed and part.dim() == 2:
            part = part.T
        if half is None:
            return part
        return part[half::2] if self.alternating else part.chunk(2)[half]


PLAIN = FusedLayout()


@dataclass(frozen=True, slots=True)
class Gated:
    """``act_fn(gate) · up``."""

    act_fn: Callable[[Tensor], Tensor]

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.act_fn(gate) * up


@dataclass(frozen=True, slots=True)
class ClippedSwiglu:
    """``gate · sigmoid(alpha · gate) · (up + 1)``, gate at most ``limit`` and up within ±``limit`` (gpt-oss)."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


Product = Callable[[Tensor, Tensor], Tensor]


class Expert(nn.Module):
    """One gated feed-forward network: ``down(product(gate(x), up(x)))``."""

    def __init__(self, hidden: int, inner: int, product: Product, bias: bool, **factory: object) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=bias, **factory)
        self.up = nn.Linear(hidden, inner, bias=bias, **factory)
        self.down = nn.Linear(inner, hidden, bias=bias, **factory)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]."""
        return self.down(self.product(self.gate(x), self.up(x)))


class SeparateExperts(nn.Module):
    """The experts of a layer as children ``0``, ``1``, ...; called like the fused module it replaces.

    Their layers are named unlike those of any checkpoint (``gate`` for ``gate_proj`` or ``w1``), so that no loader
    takes them for parts of a fused tensor.

    Attributes:
        layout: of the fused module.
    """

    def __init__(
        self, experts: int, hidden: int, inner: int, product: Product, layout: FusedLayout, **factory: object
    ) -> None:
        super().__init__()
        self.layout = layout
        for index in range(experts):
            self.add_module(str(index), Expert(hidden, inner, product, layout.biased, **factory))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts' outputs.

        Args:
            hidden_states: [tokens, hidden]. top_k_index: int64 [tokens, k], the experts of each token.
            top_k_weights: [tokens, k].
        """
        out = torch.zeros_like(hidden_states)
        # Only the experts that some token chose: one transfer, then no more waiting for the device.
        experts = list(self.children())
        for index in top_k_index.unique().tolist():
            if index >= len(experts):
                continue  # the mark of a token without an expert
            token, rank = torch.where(top_k_index == index)
            part = experts[index](hidden_states[token]) * top_k_weights[token, rank, None]
            out.index_add_(0, token, part.to(out.dtype))
        return out


def fused_layout(module: nn.Module) -> FusedLayout | None:
    """How a module holds gated experts fused as transformers 5 does: ``gate_up_proj`` [experts, 2·inner, hidden] and
    ``down_proj`` [experts, hidden, inner] without biases, or those of gpt-oss, transposed, with them; called with
    (hidden states, indices, weights). None where it is no such module, or computes something else than
    :class:`Expert` does: another product of gate and up, a norm within."""
    if any(list(child.parameters()) for name, child in module.named_children() if name != "act_fn"):
        return None
    shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    layout = PLAIN
    if type(module).__name__ == CLIPPED:
        layout = FusedLayout(transposed=True, alternating=True, biased=True)
    else:
        # Classes without such a method get a function from transformers, which is none of a class.
        gate = getattr(type(module), "_apply_gate", None)
        own = gate is not None and "." in gate.__qualname__ and type(module).__name__ not in PLAIN_GATES
        if own or not hasattr(module, "act_fn"):
            return None
    if len(shapes.get("down_proj", ())) != 3 or len(inspect.signature(module.forward).parameters) != 3:
        return None
    experts, hidden, inner = _sizes(shapes["down_proj"], layout)
    gate_up = (hidden, 2 * inner) if layout.transposed else (2 * inner, hidden)
    expected = {"gate_up_proj": (experts, *gate_up), "down_proj": shapes["down_proj"]}
    if layout.biased:
        expected |= {"gate_up_proj_bias": (experts, 2 * inner), "down_proj_bias": (experts, hidden)}
    return layout if shapes == expected else None


def _sizes(down: tuple[int, ...], layout: FusedLayout) -> tuple[int, int, int]:
    """Experts, hidden and inner features, by the shape of all downs."""
    experts, n, k = down
    return (experts, k, n) if layout.transposed else (experts, n, k)


def _weights(fused: nn.Module, layout: FusedLayout, index: int) -> dict[str, Tensor]:
    """What an :class:`Expert` has of a fused module."""
    places = {"gate": ("gate_up_proj", 0), "up": ("gate_up_proj", 1), "down": ("down_proj", None)}
    ends = {"weight": "", "bias": "_bias"} if layout.biased else {"weight": ""}
    return {
        f"{layer}.{part}": layout.cut(getattr(fused, source + end), index, half)
        for layer, (source, half) in places.items()
        for part, end in ends.items()
    }


@torch.no_grad()
def separate_experts(model: nn.Module) -> nn.Module:
    """Replace every fused module by a :class:`SeparateExperts` with the same weights, copied."""
    for name, module in list(model.named_modules()):
        if (layout := fused_layout(module)) is not None:
            own = type(module).__name__ == CLIPPED
            product = ClippedSwiglu(module.alpha, module.limit) if own else Gated(module.act_fn)
            factory = {"device": "meta", "dtype": module.down_proj.dtype}
            separate = SeparateExperts(*_sizes(module.down_proj.shape, layout), product, layout, **factory)
            if not module.down_proj.is_meta:
                separate.to_empty(device=module.down_proj.device)
                for index, expert in enumerate(separate.children()):
                    expert.load_state_dict(_weights(module, layout, index))
            model.set_submodule(name, separate)
    return model


class TransposedLinear(nn.Linear):
    """A linear layer whose weight other checkpoints of the model store as [k, n]."""


@torch.no_grad()
def transpose_conv1d(model: nn.Module) -> nn.Module:
    """Replace every ``Conv1D`` of GPT-2 and its kin, a linear layer with a weight [k, n], by a
    :class:`TransposedLinear` of the same name with the same weights, copied."""
    from transformers.pytorch_utils import Conv1D

    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            k, n = module.weight.shape
            layer = TransposedLinear(k, n, bias=True, device="meta", dtype=module.weight.dtype)
            if not module.weight.is_meta:
                layer.to_empty(device=module.weight.device)
                layer.weight.copy_(module.weight.T)
                layer.bias.copy_(module.bias)
            model.set_submodule(name, layer)
    return model


def with_linear_layers(model: nn.Module) -> nn.Module:
    """A transformers model whose matrices are all linear layers, as far as they compute what one does: see
    :func:`separate_experts` and :func:`transpose_conv1d`. What lies on the meta device stays there."""
    return transpose_conv1d(separate_experts(model))
