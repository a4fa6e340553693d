"""Linear layers in place of what transformers has for them: every expert's own for one fused tensor of all experts,
and for GPT-2's transposed layers, which hold [k, n], those that hold [n, k]."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn

# Fused modules with a product of gate and up of their own, which is Expert's but for the precision it is computed in.
PLAIN_GATES = ("BeamExperts",)


class Expert(nn.Module):
    """One gated feed-forward network: ``down(act(gate(x)) · up(x))``."""

    def __init__(self, hidden: int, inner: int, act_fn: Callable[[Tensor], Tensor], **factory: object) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False, **factory)
        self.up = nn.Linear(hidden, inner, bias=False, **factory)
        self.down = nn.Linear(inner, hidden, bias=False, **factory)
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] to [tokens, hidden]."""
        return self.down(self.act_fn(self.gate(x)) * self.up(x))


class SeparateExperts(nn.Module):
    """The experts of a layer as children ``0``, ``1``, ...; called like the fused module it replaces.

    Their layers are named unlike those of any checkpoint (``gate`` for ``gate_proj`` or ``w1``), so that no loader
    takes them for parts of a fused tensor.
    """

    def __init__(self, experts: int, hidden: int, inner: int, act_fn: Callable, **factory: object) -> None:
        super().__init__()
        for index in range(experts):
            self.add_module(str(index), Expert(hidden, inner, act_fn, **factory))

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


def is_fused(module: nn.Module) -> bool:
    """Whether a module holds gated experts fused as transformers 5 does: ``gate_up_proj`` [experts, 2·inner, hidden],
    ``down_proj`` [experts, hidden, inner], no biases, called with (hidden states, indices, weights), and computes
    nothing else than :class:`Expert` does: no product of gate and up of its own, no norm within."""
    if any(list(child.parameters()) for name, child in module.named_children() if name != "act_fn"):
        return False
    # Classes without such a method get a function from transformers, which is none of a class.
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and "." in gate.__qualname__ and type(module).__name__ not in PLAIN_GATES:
        return False
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if parameters.keys() != {"gate_up_proj", "down_proj"} or not hasattr(module, "act_fn"):
        return False
    gate_up, down = parameters["gate_up_proj"], parameters["down_proj"]
    if gate_up.dim() != 3 or down.dim() != 3 or len(inspect.signature(module.forward).parameters) != 3:
        return False
    return gate_up.shape == (down.shape[0], 2 * down.shape[2], down.shape[1])


@torch.no_grad()
def separate_experts(model: nn.Module) -> nn.Module:
    """Replace every fused module by a :class:`SeparateExperts` with the same weights, copied."""
    for name, module in list(model.named_modules()):
        if is_fused(module):
            experts, hidden, inner = module.down_proj.shape
            factory = {"device": "meta", "dtype": module.down_proj.dtype}
            separate = SeparateExperts(experts, hidden, inner, module.act_fn, **factory)
            if not module.down_proj.is_meta:
                separate.to_empty(device=module.down_proj.device)
                for index, expert in enumerate(separate.children()):
                    gate, up = module.gate_up_proj[index].chunk(2)
                    weights = {"gate.weight": gate, "up.weight": up, "down.weight": module.down_proj[index]}
                    expert.load_state_dict(weights)
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
