"""``f16acc_gemm``: a matrix product whose tensor cores add in fp16, over chunks of k short enough to stay accurate.

GeForce GPUs multiply twice as fast with fp16 accumulators as with fp32 ones. The idea of cutting k so that the rounding
of fp16 sums stays small is gpu_poor's; there the chunks are added up in fp16 too, here in fp32, and a sum that leaves
fp16's range is computed again in fp32.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from . import cuda as f16acc_cuda
from . import reference as f16acc_reference

STAGE = 64  # columns of k that the kernels take at a time; chunks are multiples of it
# With normal inputs the error of a sum grows with the square root of a chunk's length. With k = 14336, in multiples of
# the rounding of the result: fp32 sums 1.0, chunks of 128 2.3, 192 2.7, 256 3.0, 896 5.4, no chunks 21. Every chunk
# costs a conversion and an addition per sum.
CHUNK = 192

_library = torch.library.Library("trirun", "FRAGMENT")
_library.define(
    "f16acc_gemm(Tensor a, Tensor b, Tensor? bias, int chunk) -> Tensor",
    tags=(torch.Tag.needs_fixed_stride_order,),
)
_library.impl("f16acc_gemm", f16acc_reference.f16acc_gemm, "CPU")
_library.impl("f16acc_gemm", f16acc_cuda.f16acc_gemm, "CUDA")


def f16acc_gemm(a: Tensor, b: Tensor, bias: Tensor | None = None, *, splits: int | None = None) -> Tensor:
    """``a @ b.T + bias`` with fp16 sums inside a chunk of k and fp32 sums across chunks; deterministic.

    Args:
        a: [..., k] float16. b: [n, k] float16. bias: [n] float16. Any sizes, 0 included, on one device.
        splits: into how many chunks k is cut (rounded so that chunks are multiples of 64 columns); None leaves it to
            :func:`chunk_length`, which keeps the error near that of fp32 sums.

    Returns:
        [..., n] float16. A sum that leaves fp16's range inside a chunk does no harm: it is computed again in fp32, and
        only a result beyond 65504 is infinite. Differentiable in all three; the gradients' products run the same way.

    Raises:
        ValueError: shapes, dtypes or devices do not fit; the message has the numbers.
    """
    if a.dtype != torch.float16 or b.dtype != torch.float16:
        raise ValueError(f"f16acc_gemm: a is {a.dtype} and b {b.dtype}; both must be float16")
    if b.dim() != 2 or a.dim() == 0 or a.shape[-1] != b.shape[1]:
        raise ValueError(f"f16acc_gemm: a is {list(a.shape)} and b {list(b.shape)}; [..., k] and [n, k] are needed")
    if a.device != b.device:
        raise ValueError(f"f16acc_gemm: a is on {a.device}, b on {b.device}")
    if bias is not None and (bias.shape != b.shape[:1] or bias.dtype != a.dtype or bias.device != a.device):
        raise ValueError(
            f"f16acc_gemm: bias must be float16 [{b.shape[0]}] on {a.device}, "
            f"got {bias.dtype} {list(bias.shape)} on {bias.device}"
        )
    return torch.ops.trirun.f16acc_gemm(a, b, bias, chunk_length(b.shape[1], splits))


def chunk_length(k: int, splits: int | None = None) -> int:
    """Columns of k summed in fp16 before a sum moves to fp32: k in ``splits`` parts, or the default's 192.

    Raises:
        ValueError: splits is not positive.
    """
    if splits is None:
        return CHUNK
    if splits < 1:
        raise ValueError(f"f16acc_gemm: splits={splits}; at least 1 is needed")
    return max(1, -(-k // (splits * STAGE))) * STAGE


@torch.library.register_fake("trirun::f16acc_gemm", lib=_library)
def _f16acc_gemm_fake(a: Tensor, b: Tensor, bias: Tensor | None, chunk: int) -> Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[0]))


@register_flop_formula(torch.ops.trirun.f16acc_gemm)
def _f16acc_gemm_flops(
    a_shape: tuple[int, ...], b_shape: tuple[int, ...], *args: Any, out_shape: Any = None, **kwargs: Any
) -> int:
    n, k = b_shape
    return 2 * prod(a_shape[:-1]) * n * k


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, bias, _ = inputs
    # A gradient needs the other operand: what no gradient needs is not kept alive.
    ctx.save_for_backward(a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None)
    ctx.has_bias = bias is not None


def _matrix(x: Tensor) -> Tensor:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    a, b = ctx.saved_tensors
    rows = _matrix(grad)
    grad_a = grad_b = grad_bias = None
    if ctx.needs_input_grad[0]:
        grad_a = f16acc_gemm(grad, b.t())
    if ctx.needs_input_grad[1]:
        grad_b = f16acc_gemm(rows.t(), _matrix(a).t())
    if ctx.has_bias and ctx.needs_input_grad[2]:
        grad_bias = rows.sum(0)
    return grad_a, grad_b, grad_bias, None


torch.library.register_autograd("trirun::f16acc_gemm", _backward, setup_context=_setup_context, lib=_library)
