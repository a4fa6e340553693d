"""Second-order statistics of a layer's inputs, and the factorization GPTQ works from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import QuantizationError
from ..run import distributed as ranks

DAMP_STEP = 10.0
DAMP_LIMIT = 1.0


@dataclass(frozen=True, slots=True)
class Factor:
    """The outcome of :meth:`Hessian.inverse_cholesky`.

    Attributes:
        upper: float32 [k, k], upper triangular U with ``UᵀU = (H + λI)⁻¹`` in the requested column order.
        damp: λ as a fraction of mean(diag H); above the requested value when the factorization had to be helped.
        dead: bool [k] in natural order, inputs that were zero on every token.
    """

    upper: Tensor
    damp: float
    dead: Tensor


class Hessian:
    """``H = Σ xᵀx`` over the calibration inputs of one layer, and optionally ``G = Σ x₀ᵀx`` with the inputs x₀ that the
    unquantized model has at the same tokens.

    H is the Hessian of the layer's squared output error in its weights (Frantar et al. 2023, "GPTQ", §3; up to a
    factor). Sums are float32 on x's device.

    Args:
        k: in features.
        name: the module, for messages.
    """

    def __init__(self, k: int, name: str = "layer", device: torch.device | str = "cpu") -> None:
        self.name, self.k = name, k
        self.rows = 0
        self._sum = torch.zeros(k, k, dtype=torch.float32, device=device)
        self._cross: Tensor | None = None
        self._pool: Tensor | None = None

    def update(self, x: Tensor, original: Tensor | None = None, sample: int | None = None) -> None:
        """Add inputs.

        Args:
            x: [..., k], any floating-point dtype.
            original: shaped as x, the unquantized model's inputs at the same tokens; always given or never.
            sample: what to call these inputs in an error.

        Raises:
            QuantizationError: a value is NaN or infinite; the module and the sample are named.
        """
        x = self._rows(x)
        if self.rows and (original is None) != (self._cross is None):
            raise QuantizationError(f"{self.name}: original inputs must be given with every update or with none")
        product = _product(x, x)
        self._require_finite(product, x, sample)
        self._sum += product
        if original is not None:
            original = self._rows(original)
            cross = _product(original, x)
            self._require_finite(cross, original, sample)
            self._cross = cross if self._cross is None else self._cross.add_(cross)
        self.rows += x.shape[0]

    @classmethod
    def sum(cls, parts: list[Hessian]) -> Hessian:
        """The statistics of several layers' inputs together, as if they were one layer's; without G."""
        total = cls(parts[0].k, parts[0].name, parts[0]._sum.device)
        for part in parts:
            total._sum += part._sum
            total.rows += part.rows
        return total

    def total(self) -> None:
        """Add up the statistics of all processes (see :mod:`trirun_gptq.run.distributed`)."""
        ranks.total([self._sum] if self._cross is None else [self._sum, self._cross])
        self.rows = int(ranks.total_of(self.rows)[0])

    def mix(self, pool: Hessian) -> None:
        """Fewer tokens than features say little: fill up with the pool's statistics, as if of the missing tokens.

        H per token becomes ``(rows·H + (k − rows)·H_pool) / k``; ``rows`` keeps counting the layer's own tokens.
        """
        self._pool = pool.matrix

    @property
    def matrix(self) -> Tensor:
        """H per token, float32 [k, k], symmetric."""
        if self._pool is not None:
            return (self._sum + (self.k - self.rows) * self._pool) / self.k
        if self.rows == 0:
            raise QuantizationError(f"{self.name}: no calibration token reached this layer")
        return self._sum / self.rows

    @property
    def cross(self) -> Tensor | None:
        """G per token, float32 [k, k]: G[i, j] = mean of x₀ᵢ·xⱼ; None when no original inputs were given."""
        return None if self._cross is None else self._cross / self.rows

    def inverse_cholesky(self, damp: float, order: Tensor | None = None) -> Factor:
        """The upper Cholesky factor of the damped inverse.

        When the factorization fails, damping grows tenfold up to 1.0, first in float32, then the whole ladder again in
        float64. ``Factor.damp`` tells what it took.

        Args:
            damp: added to the diagonal, as a fraction of its mean.
            order: int64 [k], columns in the order the solver will take them; None is the natural order.

        Raises:
            QuantizationError: no damping up to 1.0 helped, or no token was seen.
        """
        matrix, dead = self.filled()
        mean = matrix.diagonal().mean()
        if order is not None:
            matrix = matrix[order][:, order]
        for dtype in (torch.float32, torch.float64):
            fraction = damp
            while True:
                damped = matrix.to(dtype)
                damped.diagonal().add_(fraction * mean)
                upper = _inverse_upper(damped)
                if upper is not None:
                    return Factor(upper.float(), fraction, dead)
                if fraction >= DAMP_LIMIT:
                    break
                fraction = min(fraction * DAMP_STEP, DAMP_LIMIT)
        raise QuantizationError(
            f"{self.name}: the Hessian [{self.k}, {self.k}] of {self.rows} tokens cannot be factored even with "
            f"damp={DAMP_LIMIT} in float64 (diagonal from {float(matrix.diagonal().min()):.3g} to "
            f"{float(matrix.diagonal().max()):.3g}); use more, and more varied, calibration text"
        )

    def filled(self) -> tuple[Tensor, Tensor]:
        """H with the diagonal of dead inputs set to 1, and which inputs those are (bool [k])."""
        matrix = self.matrix
        dead = matrix.diagonal() == 0
        if bool(dead.all()):
            raise QuantizationError(f"{self.name}: every one of the {self.k} inputs is zero on all {self.rows} tokens")
        matrix.diagonal()[dead] = 1.0
        return matrix, dead

    def _rows(self, x: Tensor) -> Tensor:
        """[tokens, k]; bfloat16 stays so on a GPU, whose products of it are exact and sums float32."""
        x = x.reshape(-1, self.k)
        return x if x.dtype == torch.bfloat16 and x.device.type == "cuda" else x.float()

    def _require_finite(self, product: Tensor, x: Tensor, sample: int | None) -> None:
        # A NaN or an infinity anywhere in a column of x shows on the diagonal of xᵀx.
        if bool(torch.isfinite(product.diagonal()).all()):
            return
        bad = int((~torch.isfinite(x)).sum())
        where = "" if sample is None else f" of calibration sample {sample}"
        what = f"{bad} of {x.numel()} input values are NaN or infinite" if bad else "squared inputs overflow float32"
        raise QuantizationError(f"{self.name}: {what}{where}")


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``aᵀb`` in float32."""
    return torch.mm(a.t(), b, out_dtype=torch.float32) if a.dtype == torch.bfloat16 else a.t() @ b


def _inverse_upper(matrix: Tensor) -> Tensor | None:
    """Upper triangular U with ``UᵀU = matrix⁻¹``; None where the matrix is not positive definite in its precision."""
    lower, failed = torch.linalg.cholesky_ex(matrix)
    if int(failed):
        return None
    upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if int(failed) or not bool(torch.isfinite(upper).all()):
        return None
    return upper
