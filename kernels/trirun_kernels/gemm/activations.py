"""Quantizing activations apart from the product: once per layer input, for every weight that reads it.

``quantize_activations`` turns x into the int8 limbs that the kernels of its device multiply, ``int2_gemm_quantized``
takes them. An engine quantizes once for q|k|v and once for gate|up, or writes the same layout from its own norm kernel
(csrc/cuda/common/activations.cuh and ``trirun_act`` of csrc/trirun.h define it).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import limits
from ..weights.packing import PackedWeight
from . import activations_cpu as cpu_activations
from . import cuda

_library = torch.library.Library("trirun", "FRAGMENT")
_library.define("quantize_activations(Tensor x, int act_bits) -> Tensor")
_library.define(
    "int2_gemm_quantized(Tensor activations, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, int n, int k, "
    "int m, int group_size, float zero, int act_bits, ScalarType dtype) -> Tensor"
)
_library.impl("quantize_activations", cpu_activations.quantize_activations, "CPU")
_library.impl("int2_gemm_quantized", cpu_activations.int2_gemm_quantized, "CPU")
_library.impl("quantize_activations", cuda.quantize_activations, "CUDA")
_library.impl("int2_gemm_quantized", cuda.int2_gemm_quantized, "CUDA")


def quantize_activations(x: Tensor, act_bits: int = 16) -> Tensor:
    """x [m, k] (float32, float16 or bfloat16; on CUDA at most 64 rows) to its int8 limbs, a uint8 buffer.

    Raises:
        ValueError: x is not such a matrix, or act_bits is not 8 or 16.
    """
    if act_bits not in (8, 16):
        raise ValueError(f"quantize_activations: act_bits={act_bits} is not 8 or 16")
    most = limits().decode_rows if x.is_cuda else x.shape[0]
    if x.dim() != 2 or not 0 < x.shape[0] <= most:
        raise ValueError(f"quantize_activations: x has shape {list(x.shape)}; a matrix of 1 to {most} rows is needed")
    return torch.ops.trirun.quantize_activations(x, act_bits)


def int2_gemm_quantized(
    activations: Tensor,
    m: int,
    w: PackedWeight,
    bias: Tensor | None = None,
    *,
    act_bits: int = 16,
    dtype: torch.dtype = torch.float16,
) -> Tensor:
    """``int2_gemm`` on what :func:`quantize_activations` made of m rows: [m, n] in ``dtype``, the bias's dtype.

    Raises:
        ValueError: the buffer is not one of m rows and k columns, the bias does not fit, or they are elsewhere than w.
    """
    if activations.device != w.words.device:
        raise ValueError(f"int2_gemm_quantized: activations on {activations.device}, weight on {w.words.device}")
    if bias is not None and (tuple(bias.shape) != (w.n,) or bias.dtype != dtype or bias.device != w.words.device):
        raise ValueError(
            f"int2_gemm_quantized: bias must be {dtype} [{w.n}] on {w.words.device}, "
            f"got {bias.dtype} {list(bias.shape)} on {bias.device}"
        )
    return torch.ops.trirun.int2_gemm_quantized(
        activations,
        w.words,
        w.scales,
        w.zeros,
        bias,
        w.n,
        w.k,
        m,
        w.spec.group_size,
        w.spec.zero_operand,
        act_bits,
        dtype,
    )


@torch.library.register_fake("trirun::quantize_activations", lib=_library)
def _quantize_activations_fake(x: Tensor, act_bits: int) -> Tensor:
    m, k = x.shape
    size = cuda.activation_bytes if x.is_cuda else cpu_activations.activation_bytes
    return x.new_empty(size(int(m), -(-int(k) // 128) * 128, act_bits), dtype=torch.uint8)


@torch.library.register_fake("trirun::int2_gemm_quantized", lib=_library)
def _int2_gemm_quantized_fake(
    activations: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    m: int,
    group_size: int,
    zero: float,
    act_bits: int,
    dtype: torch.dtype,
) -> Tensor:
    return activations.new_empty((m, n), dtype=dtype)
