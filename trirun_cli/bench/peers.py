"""What our kernels are timed beside: torch on the dense weight, and Humming's W2A16 and W2A8 where it is installed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from .timing import Call, copies


@dataclass(frozen=True, slots=True)
class Peer:
    """``calls(x)``: one call per weight copy that computes x @ w.T."""

    name: str
    calls: Callable[[Tensor], Sequence[Call]]


def peers_for(n: int, k: int, dtype: torch.dtype, device: torch.device, group_size: int, act_bits: int) -> list[Peer]:
    """Every peer for one shape, with its weights made and rotated past the caches."""
    if device.type == "cuda":
        peers = [_dense(n, k, torch.float16 if dtype == torch.float32 else dtype, device)]
        if find_spec("humming"):
            peers.append(_humming(n, k, dtype, device, group_size, 16))
            if group_size == -1:
                peers.append(_humming(n, k, dtype, device, group_size, 8))
        return peers
    return [_dense(n, k, torch.float32, device), _dense(n, k, torch.bfloat16, device)]


def _dense(n: int, k: int, dtype: torch.dtype, device: torch.device) -> Peer:
    first = torch.randn(n, k, device=device, dtype=dtype) * 0.02
    weights = [first, *(first.clone() for _ in range(copies(first.nbytes, device) - 1))]

    def calls(x: Tensor) -> list[Call]:
        inputs = x.to(dtype)
        return [partial(nn.functional.linear, inputs, w) for w in weights]

    short = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    return Peer(f"torch {short}", calls)


def _humming(n: int, k: int, dtype: torch.dtype, device: torch.device, group_size: int, act_bits: int) -> Peer:
    from humming.layer import HummingLayer

    kind = torch.float16 if dtype == torch.float32 else dtype
    options: dict = {"weight_config": {"dtype": "int2"}, "torch_dtype": kind}
    if group_size != -1:
        options["weight_config"]["group_size"] = group_size
    if act_bits == 8:
        options["input_config"] = {"dtype": "int8"}
    layers = []
    for _ in range(copies(max(1, n * k // 4), device, most=64)):
        layer = HummingLayer(shape_n=n, shape_k=k, **options).to(device)
        layer.load_from_unquantized(torch.randn(n, k, dtype=kind, device=device))
        layer.transform()
        layers.append(layer)

    def calls(x: Tensor) -> list[Call]:
        inputs = x.to(kind)
        return [partial(layer, inputs) for layer in layers]

    return Peer(f"humming W2A{act_bits}", calls)
