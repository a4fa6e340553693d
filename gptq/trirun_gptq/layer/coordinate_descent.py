"""After GPTQ: coordinate descent over the codes, and scales refitted in closed form."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from trirun_kernels import QuantSpec
from trirun_kernels.weights.packing import dequantize_codes, zero_points

from .column_grid import ColumnGrid
from .loops_torch import loops
from .scale_search import store_scales, store_zeros

# Of the size of W and H together: what the equations of refitted scales may take.
EQUATION_MATRICES = 4
# Of those equations, float32, at the peak: as they are, with a ridge, factored, and in float64.
SOLVE_COPIES = 6


@dataclass(frozen=True)
class Target:
    """A weight to come near to, float32 [n, k], and H [k, k], which says what nearness is worth."""

    weight: Tensor
    hessian: Tensor

    @cached_property
    def pull(self) -> Tensor:
        """``weight · H``, [n, k]; the same for all grids."""
        return self.weight @ self.hessian


@dataclass(frozen=True)
class Problem:
    """``min tr((Ŵ − W) H (Ŵ − W)ᵀ)`` over codes 0..levels−1 and scales, W and H those of the target."""

    target: Target
    spec: QuantSpec
    levels: int

    def dense(self, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Ŵ, float32 [n, k], from codes (any dtype) and stored scales."""
        return dequantize_codes(codes, scales, self.spec, zeros)


def descend(problem: Problem, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """One sweep of exact coordinate descent: each column in turn takes its best codes given all others.

    With all other columns fixed the loss is a parabola in column j, lowest at ``ŵ_j − g_j / H_jj`` with g half the
    gradient; the nearest level of the grid is its least value there, so the loss never rises (Behdin et al. 2023,
    "QuantEase"; Nair & Suggala 2024, "CDQuant", cyclic instead of greedy).

    Args:
        codes: float [n, k]. scales, zeros: fp16 [n, groups]; zeros is None unless the grid's are real.

    Returns:
        Codes, float [n, k].
    """
    k = codes.shape[1]
    order = torch.arange(k, device=codes.device)
    grid = ColumnGrid.of(scales, zeros, problem.spec, problem.levels, order)
    codes = codes.t().contiguous()
    dense = problem.dense(codes.t(), scales, zeros).t().contiguous()
    error = dense - problem.target.weight.t()
    hessian = problem.target.hessian
    backend = loops(codes.device)
    for start in range(0, k, backend.COLUMNS):
        part = slice(start, min(start + backend.COLUMNS, k))
        gradient = hessian[part] @ error  # [columns, n], half the gradient
        local = hessian[part, part]
        backend.descend_block(gradient, codes[part], dense[part], error[part], local, grid.part(part))
    return codes.t().contiguous()


def refit_scales(
    problem: Problem, codes: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Least-squares scales (and zeros) of every row for the codes at hand, kept in the rows whose loss drops.

    Solves, per row, the normal equations of ``Σ_g s_g·a_g`` (``+ b_g·1_g`` for real zeros, with b = −s·z) against the
    target under H, then rounds to fp16. Rows are solved some at a time, so that their equations take no more memory
    than a few matrices of the size of W and H.

    Args:
        codes: float [n, k]. scales, zeros: fp16 [n, groups]; zeros is None unless the grid's are real.

    Returns:
        Codes float [n, k] (unchanged), and the accepted scales and zeros.
    """
    n, k = codes.shape
    width = problem.spec.groups(k) * (1 if zeros is None else 2)
    rows = max(EQUATION_MATRICES * (n * k + k * k) // (SOLVE_COPIES * width * width), 1)
    parts = -(-n // rows)
    fitted = []
    for index in range(parts):
        part = slice(n * index // parts, n * (index + 1) // parts)
        pull, own_zeros = problem.target.pull[part], None if zeros is None else zeros[part]
        fitted.append(_refit_rows(problem, pull, codes[part], scales[part], own_zeros))
    kept_scales = torch.cat([scales for scales, _ in fitted])
    return codes, kept_scales, None if zeros is None else torch.cat([zeros for _, zeros in fitted if zeros is not None])


def _refit_rows(
    problem: Problem, pull: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The accepted scales and zeros of some rows, whose ``pull`` this is."""
    n, k = codes.shape
    hessian = problem.target.hessian
    groups = problem.spec.groups(k)
    basis = [codes - zero_points(problem.spec, None)] if zeros is None else [codes, torch.ones_like(codes)]
    width = len(basis) * groups
    normal = torch.empty(n, len(basis), groups, len(basis), groups, device=codes.device)
    right = torch.empty(n, width, device=codes.device)
    size = k // groups
    for b, left in enumerate(basis):
        right[:, b * groups : (b + 1) * groups] = (pull * left).view(n, groups, size).sum(-1)
        for g in range(groups):
            end = (g + 1) * size
            # The matrix is symmetric: groups up to this one are enough.
            row = left[:, g * size : end] @ hessian[g * size : end, :end]
            for c, other in enumerate(basis):
                products = (row * other[:, :end]).view(n, g + 1, size).sum(-1)
                normal[:, b, g, c, : g + 1] = products
                normal[:, c, : g + 1, b, g] = products
    normal = normal.view(n, width, width)
    # A group with one single code makes its two columns collinear; a trace of ridge keeps the solve regular.
    ridge = 1e-6 * normal.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-30
    fitted, failed = torch.linalg.solve_ex(normal + torch.diag_embed(ridge.expand(n, width)), right.unsqueeze(-1))
    fitted = fitted.squeeze(-1)
    usable = (failed == 0) & torch.isfinite(fitted).all(1) & (fitted[:, :groups].abs().amax(1) < 6e4)
    fitted = torch.where(usable.unsqueeze(1), fitted, 1.0)

    new_scales = store_scales(fitted[:, :groups])
    new_zeros = None if zeros is None else store_zeros(-fitted[:, groups:] / new_scales.float())

    def loss(scales: Tensor, zeros: Tensor | None) -> Tensor:
        """Of each row up to a constant, [n], from the normal equations: no product with H is needed."""
        parts = [scales.double()] if zeros is None else [scales.double(), -scales.double() * zeros.double()]
        x = torch.cat(parts, 1)
        return ((normal.double() @ x.unsqueeze(-1)).squeeze(-1) * x).sum(1) - 2 * (right.double() * x).sum(1)

    better = (usable & (loss(new_scales, new_zeros) < loss(scales, zeros))).unsqueeze(1)
    kept_zeros = None if zeros is None or new_zeros is None else torch.where(better, new_zeros, zeros)
    return torch.where(better, new_scales, scales), kept_zeros
