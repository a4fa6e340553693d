"""The torch operators: one schema, one fake and one autograd rule each; one backend module per device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..f16acc.int2 import int2_gemm_f16acc
from ..weights.packing import PackedWeight, dequantize
from . import cpu, cuda

ACT_BITS = (8, 16)

_library = torch.library.Library("trirun", "DEF")
_library.define(
    "int2_gemm(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, int n, int k, int group_size, "
    "float zero, int act_bits) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("int2_gemm", cpu.int2_gemm, "CPU")
_library.impl("int2_gemm", cuda.int2_gemm, "CUDA")


def int2_gemm(
    x: Tensor, w: PackedWeight, bias: Tensor | None = None, *, act_bits: int = 16, acc: str = "fp32"
) -> Tensor:
    """``x @ dequantize(w).T + bias`` without ever forming the dense weight.

    Args:
        x: [..., k], float32, float16 or bfloat16, on the weight's device.
        w: the packed [n, k] weight.
        bias: [n] in x's dtype.
        act_bits: 16 computes on two int8 limbs per activation (within 1e-3 of float32); 8 on one limb per
            activation scaled per row, which is what models trained with int8 activations expect.
        acc: "fp32", or "fp16" for :func:`trirun_kernels.f16acc.ops.f16acc_gemm` on the weight made dense for this call:
            float16 x, 16-bit activations. It pays for many rows on GPUs whose fp16 sums are faster (`trirun doctor`).

    Returns:
        [..., n] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; the message has the numbers.
    """
    if act_bits not in ACT_BITS:
        raise ValueError(f"int2_gemm: act_bits={act_bits} is not one of {ACT_BITS}")
    if acc not in ("fp32", "fp16"):
        raise ValueError(f"int2_gemm: acc={acc!r} is neither 'fp32' nor 'fp16'")
    if acc == "fp16" and (act_bits != 16 or x.dtype != torch.float16):
        raise ValueError(f"int2_gemm: acc='fp16' needs float16 x and act_bits=16, got {x.dtype} and {act_bits}")
    if x.dim() == 0 or x.shape[-1] != w.k:
        raise ValueError(f"int2_gemm: x has shape {list(x.shape)}, the weight has k={w.k}")
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"int2_gemm: x is {x.dtype}; float32, float16 and bfloat16 are supported")
    if x.device != w.words.device:
        raise ValueError(f"int2_gemm: x is on {x.device}, the weight on {w.words.device}")
    if bias is not None and (tuple(bias.shape) != (w.n,) or bias.dtype != x.dtype or bias.device != x.device):
        raise ValueError(
            f"int2_gemm: bias must be {x.dtype} [{w.n}] on {x.device}, "
            f"got {bias.dtype} {list(bias.shape)} on {bias.device}"
        )
    if acc == "fp16":
        return int2_gemm_f16acc(x, w, bias)
    return torch.ops.trirun.int2_gemm(
        x, w.words, w.scales, w.zeros, bias, w.n, w.k, w.spec.group_size, w.spec.zero_operand, act_bits
    )


@torch.library.register_fake("trirun::int2_gemm", lib=_library)
def _int2_gemm_fake(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    group_size: int,
    zero: float,
    act_bits: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], n))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, words, scales, zeros, bias, n, k, group_size, zero, _ = inputs
    ctx.save_for_backward(words, scales, *(() if zeros is None else (zeros,)))
    ctx.weight_facts = n, k, group_size, zero
    ctx.has_bias = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    words, scales, *zeros = ctx.saved_tensors
    w = PackedWeight.of_operands(words, scales, zeros[0] if zeros else None, *ctx.weight_facts)
    grad_x = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_x = grad @ dequantize(w, grad.dtype)
    if ctx.has_bias and ctx.needs_input_grad[4]:
        grad_bias = grad.reshape(-1, w.n).sum(0)
    return grad_x, None, None, None, grad_bias, None, None, None, None, None


torch.library.register_autograd("trirun::int2_gemm", _backward, setup_context=_setup_context, lib=_library)
