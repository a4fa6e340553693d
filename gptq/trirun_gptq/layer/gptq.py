"""GPTQ on static groups, followed by coordinate descent over the codes and least-squares scales.

All of them lower one number, the damped proxy loss ``tr((W − Ŵ)(H + λI)(W − Ŵ)ᵀ)`` with Ŵ computed from the stored fp16
scales. Rows are independent, so matrices that share their inputs can be stacked along n.

GPTQ (Frantar et al. 2023) rounds a column and moves the later ones so that they compensate for its error:
``δ = −(w_j − ŵ_j) / [H⁻¹]_jj · [H⁻¹]_j:`` (eq. 2), with H⁻¹ of the columns that are left (eq. 3). Both are read from
the rows of one upper Cholesky factor, ``UᵀU = H⁻¹``: ``δ = −(w_j − ŵ_j) / U_jj · U_j:`` (§3.3, step 3). Columns are
taken some at a time, and the others receive their errors as one matrix product (lazy batches, §3.3, step 2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from trirun_kernels import QuantSpec

from ..errors import QuantizationError
from .column_grid import ColumnGrid
from .coordinate_descent import Problem, Target, descend, refit_scales
from .hessian import Factor, Hessian
from .loops_torch import loops
from .quantized import Quantized
from .scale_search import search_grid


@dataclass(frozen=True, slots=True)
class Solution:
    """A quantized weight, and how well it did.

    Attributes:
        loss: the relative proxy loss ``tr(EHEᵀ) / tr(WHWᵀ)``, E = Ŵ − W, against the weight that was asked for.
        damp: the fraction of mean(diag H) that the factorization needed. dead: how many inputs are always zero.
    """

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
) -> Solution:
    """Quantize one weight (or several stacked along n) against the statistics of its inputs.

    GPTQ with groups that are fixed in natural column order before the first column is rounded, so that columns can be
    taken in the order of descending diag(H) and no permutation is stored; scales searched under 1/U² weights
    (:mod:`trirun_gptq.layer.scale_search`); coordinate descent and scale refits on the result.

    Args:
        weight: [n, k], floating point.
        hessian: of the layer's inputs.
        spec: the grid. ternary: leave code 3 unused (needs ``spec.zero == 1``).
        damp: fraction of mean(diag H) added to the diagonal.
        clip, act_order, sweeps, refit, correction: see :class:`~trirun_gptq.recipe.Recipe`.

    Raises:
        QuantizationError: weight or Hessian are unusable; the module is named.
    """
    check(weight, hessian, spec, ternary)
    system = System(hessian, damp, act_order)
    source = weight.float()
    target = system.target(corrected_target(source, hessian, damp, correction) if correction else source)
    quantized = system.solve(target, spec, ternary=ternary, clip=clip, sweeps=sweeps, refit=refit)
    return system.solution(quantized, source)


class System:
    """What the solver needs of a Hessian: the factor, in the order of the columns, and H itself, damped.

    Computed once for all targets and grids that share the inputs.

    Attributes:
        matrix, damped: H and H + λI, float32 [k, k]; 1 on the diagonal where an input is always zero.
        factor: U in the order of the columns. order: int64 [k]; descending diag(H) with ``act_order``, the heuristic
            of GPTQ's own code.
        importance: float32 [k] in natural order, ``1/U_jj²``: what a column's squared rounding error costs.
        dead: bool [k] in natural order, inputs that are always zero.
    """

    def __init__(self, hessian: Hessian, damp: float, act_order: bool) -> None:
        self.matrix, dead = hessian.filled()
        order = self.matrix.diagonal().argsort(descending=True, stable=True) if act_order else None
        self.factor: Factor = hessian.inverse_cholesky(damp, order)
        self.dead, self.order = dead, torch.arange(hessian.k, device=dead.device) if order is None else order
        self.importance = torch.empty_like(self.factor.upper.diagonal())
        self.importance[self.order] = self.factor.upper.diagonal().pow(-2)
        self.damped = self.matrix.clone()
        self.damped.diagonal().add_(self.factor.damp * self.matrix.diagonal().mean())

    def target(self, weight: Tensor) -> Target:
        """What to solve for: float32 [n, k], zero where inputs are dead, under the damped H."""
        return Target(weight.masked_fill(self.dead, 0.0), self.damped)

    def solve(
        self, target: Target, spec: QuantSpec, *, ternary: bool, clip: bool, sweeps: int, refit: bool
    ) -> Quantized:
        """Quantize one target on one grid: scale search, GPTQ, then ``sweeps`` of coordinate descent and refits."""
        levels = 3 if ternary else 4
        scales, zeros = search_grid(target.weight, self.importance, spec, levels=levels, clip=clip)
        codes = _solve_columns(target.weight, scales, zeros, spec, self.factor, self.order, levels)
        problem = Problem(target, spec, levels)
        for _ in range(sweeps):
            codes = descend(problem, codes, scales, zeros)
            if refit:
                codes, scales, zeros = refit_scales(problem, codes, scales, zeros)
        return Quantized(codes.to(torch.uint8), scales, zeros, spec)

    def solution(self, quantized: Quantized, source: Tensor) -> Solution:
        """A result with its figures, beside the weight [n, k] that it stands for."""
        loss = proxy_loss(quantized.dequantize(), source, self.matrix)
        return Solution(quantized, loss, self.factor.damp, int(self.dead.sum()))


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
        weight: float32 [n, k]. hessian: with the cross statistics G. damp: λ as a fraction of mean(diag H).

    Returns:
        float32 [n, k].

    Raises:
        QuantizationError: the Hessian was collected without original inputs.
    """
    cross = hessian.cross
    if cross is None:
        raise QuantizationError(f"{hessian.name}: a corrected target needs the original inputs")
    matrix = hessian.matrix
    damped = matrix.clone()
    damped.diagonal().add_(damp * matrix.diagonal().mean())
    pull = (cross - matrix).t() @ weight.t()
    lower, failed = torch.linalg.cholesky_ex(damped)
    # A matrix that is not positive definite in float32 can still be solved by elimination.
    move = torch.linalg.solve(damped, pull) if int(failed) else torch.cholesky_solve(pull, lower)
    return weight + strength * move.t()


def _solve_columns(
    target: Tensor, scales: Tensor, zeros: Tensor | None, spec: QuantSpec, factor: Factor, order: Tensor, levels: int
) -> Tensor:
    """Round column by column in ``order``, pushing each error onto the columns not yet rounded. Codes float [n, k]."""
    k = target.shape[1]
    grid = ColumnGrid.of(scales, zeros, spec, levels, order)
    # Columns as rows: every step then reads and writes contiguous memory.
    work = target.t()[order].contiguous()
    codes, upper, backend = torch.empty_like(work), factor.upper, loops(target.device)
    for start in range(0, k, backend.COLUMNS):
        end = min(start + backend.COLUMNS, k)
        part = slice(start, end)
        errors = torch.empty_like(work[part])
        backend.round_block(work[part], codes[part], errors, upper[part, part], grid.part(part))
        work[end:].addmm_(upper[part, end:].t(), errors, alpha=-1)
    natural = torch.empty_like(codes)
    natural[order] = codes
    return natural.t().contiguous()


def check(weight: Tensor, hessian: Hessian, spec: QuantSpec, ternary: bool) -> None:
    """Refuse what cannot be solved.

    Raises:
        QuantizationError: shapes or the group size do not fit, a ternary grid has another zero than 1, or a weight is
            not finite; the module is named.
    """
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
