"""GPTQ on static groups, and the two polishing steps that follow it: coordinate descent and least-squares scales.

All of them lower one number, the damped proxy loss ``tr((W − Ŵ)(H + λI)(W − Ŵ)ᵀ)`` with Ŵ computed from the stored fp16
scales. Rows are independent, so matrices that share their inputs can be stacked along n.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from trirun_kernels import QuantSpec

from .errors import QuantizationError
from .grid import assign, search_grid
from .hessian import Factor, Hessian
from .polish import Problem, descend, refit_scales
from .quantized import Quantized

# Columns solved before the update of the rest is one matrix product. Small, so that a step's rank-one update stays in
# the first cache and below the size at which torch starts threads for it.
BLOCK = 32


@dataclass(frozen=True, slots=True)
class Solution:
    """A quantized weight with how well it did: ``loss`` is the relative proxy loss ``tr(EHEᵀ)/tr(WHWᵀ)`` against the
    weight that was asked for, ``damp`` and ``dead`` come from the factorization."""

    quantized: Quantized
    loss: float
    damp: float
    dead: int


def gptq_quantize(
    weight: Tensor,
    hessian: Hessian,
    spec: QuantSpec,
    *,
    ternary: bool = False,
    damp: float = 0.05,
    clip: bool = True,
    act_order: bool = True,
    sweeps: int = 2,
    refit: bool = True,
    correction: float = 0.0,
) -> Quantized:
    """Quantize one weight (or several stacked along n) against the statistics of its inputs.

    GPTQ (Frantar et al. 2022) with: groups fixed in natural column order before the first column is rounded, so
    that columns can be taken in the order of descending diag(H) and no permutation is stored; scales searched under
    1/U² weights (:mod:`trirun_gptq.grid`); coordinate descent and scale refits on the result.

    Args:
        weight: [n, k], floating point.
        hessian: of the layer's inputs.
        spec: the grid. ternary: leave code 3 unused (needs ``spec.zero == 1``).
        damp: fraction of mean(diag H) added to the diagonal.
        clip, act_order, sweeps, refit, correction: see :class:`~trirun_gptq.recipe.Recipe`.

    Raises:
        QuantizationError: weight or Hessian are unusable; the module is named.
    """
    return solve(
        weight,
        hessian,
        spec,
        ternary=ternary,
        damp=damp,
        clip=clip,
        act_order=act_order,
        sweeps=sweeps,
        refit=refit,
        correction=correction,
    ).quantized


def solve(
    weight: Tensor,
    hessian: Hessian,
    spec: QuantSpec,
    *,
    ternary: bool,
    damp: float,
    clip: bool,
    act_order: bool,
    sweeps: int,
    refit: bool,
    correction: float,
) -> Solution:
    """:func:`gptq_quantize`, with the figures of a report beside the result."""
    _check(weight, hessian, spec, ternary)
    levels = 3 if ternary else 4
    matrix, dead = hessian.filled()
    order = matrix.diagonal().argsort(descending=True, stable=True) if act_order else None
    factor = hessian.inverse_cholesky(damp, order)
    source = weight.float()
    target = corrected_target(source, hessian, damp, correction) if correction else source
    target = target.masked_fill(dead, 0.0)

    natural = torch.arange(hessian.k, device=weight.device) if order is None else order
    importance = torch.empty_like(factor.upper.diagonal())
    importance[natural] = factor.upper.diagonal().pow(-2)
    scales, zeros = search_grid(target, importance, spec, levels=levels, clip=clip)
    codes = _solve_columns(target, scales, zeros, spec, factor, natural, levels)

    damped = matrix.clone()
    damped.diagonal().add_(factor.damp * matrix.diagonal().mean())
    problem = Problem(target, damped, spec, levels)
    for _ in range(sweeps):
        codes = descend(problem, codes, scales, zeros)
        if refit:
            codes, scales, zeros = refit_scales(problem, codes, scales, zeros)
    quantized = Quantized(codes.to(torch.uint8), scales, zeros, spec)
    return Solution(quantized, proxy_loss(quantized.dequantize(), source, matrix), factor.damp, int(dead.sum()))


def proxy_loss(candidate: Tensor, weight: Tensor, matrix: Tensor) -> float:
    """``tr((W−Ŵ)H(W−Ŵ)ᵀ) / tr(WHWᵀ)``: the relative squared output error that H predicts. 0 for a zero weight."""
    error = candidate - weight
    scale = float(((weight @ matrix) * weight).sum())
    return float(((error @ matrix) * error).sum()) / scale if scale > 0 else 0.0


def corrected_target(weight: Tensor, hessian: Hessian, damp: float, strength: float) -> Tensor:
    """The weight that best reproduces, on the inputs the quantized model has, the outputs of the original on its own.

    ``W* = W + α·W(G − H)(H + λI)⁻¹``, the ridge solution around W of ``min ‖x₀Wᵀ − xW*ᵀ‖²`` (the first step of Qronos,
    Zhang et al. 2025; compare GPTAQ, Li et al. 2025), with α the strength.

    Args:
        weight: float32 [n, k].
    """
    cross = hessian.cross
    if cross is None:
        raise QuantizationError(f"{hessian.name}: a corrected target needs the original inputs")
    matrix = hessian.matrix
    damped = matrix.clone()
    damped.diagonal().add_(damp * matrix.diagonal().mean())
    return weight + strength * torch.linalg.solve(damped, (cross - matrix).t() @ weight.t()).t()


def _solve_columns(
    target: Tensor, scales: Tensor, zeros: Tensor | None, spec: QuantSpec, factor: Factor, order: Tensor, levels: int
) -> Tensor:
    """Round column by column in ``order``, pushing each error onto the columns not yet rounded. Codes float [n, k]."""
    k = target.shape[1]
    group_of = torch.arange(k, device=target.device) // (k if spec.group_size == -1 else spec.group_size)
    column_group = group_of[order]
    # Columns as rows: every step then reads and writes contiguous memory.
    work = target.t()[order].contiguous()
    step = scales.float().t().contiguous()
    zero = None if zeros is None else zeros.float().t().contiguous()
    codes = torch.empty_like(work)
    upper = factor.upper
    groups = column_group.tolist()
    for start in range(0, k, BLOCK):
        end = min(start + BLOCK, k)
        block, triangle = work[start:end], upper[start:end, start:end]
        errors = torch.empty_like(block)
        # One transfer per block instead of one per column.
        pivots = triangle.diagonal().tolist()
        for j in range(end - start):
            s, z = step[groups[start + j]], spec.zero if zero is None else zero[groups[start + j]]
            q = assign(block[j], s, z, levels)
            codes[start + j] = q
            errors[j] = (block[j] - s * (q - z)) / pivots[j]
            block[j + 1 :].addr_(triangle[j, j + 1 :], errors[j], alpha=-1)
        work[end:].addmm_(upper[start:end, end:].t(), errors, alpha=-1)
    natural = torch.empty_like(codes)
    natural[order] = codes
    return natural.t().contiguous()


def _check(weight: Tensor, hessian: Hessian, spec: QuantSpec, ternary: bool) -> None:
    name = hessian.name
    if weight.dim() != 2 or weight.shape[1] != hessian.k:
        raise QuantizationError(f"{name}: weight {list(weight.shape)} does not fit a Hessian of k={hessian.k}")
    try:
        spec.groups(hessian.k)
    except ValueError as error:
        raise QuantizationError(f"{name}: {error}") from None
    if ternary and spec.zero != 1.0:
        raise QuantizationError(f"{name}: a ternary grid has zero=1, not {spec.zero}")
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise QuantizationError(f"{name}: {bad} of {weight.numel()} weights are NaN or infinite")
