"""Scales (and zeros) of static groups: a search weighted by how much each column's rounding error will cost.

Under GPTQ, rounding column j costs ``(w_j − ŵ_j)² / U_jj²`` after the later columns have compensated for it (U is the
upper Cholesky factor of H⁻¹; Hassibi & Stork 1993, "Optimal Brain Surgeon"; Frantar et al. 2023, eq. 2). So the scale
of a group minimises the squared error weighted by ``1/U_jj²``, by Lloyd's alternation (Lloyd 1982: codes, then the
scale in closed form) from a ladder of clipped ranges. The scale may be negative, which turns {-1, 0, 1, 2} into
{-2, -1, 0, 1}.
"""

from __future__ import annotations

import torch
from torch import Tensor
from trirun_kernels import QuantSpec
from trirun_kernels.weights.packing import zero_points

from ..errors import ScaleError
from .loops_torch import assign, has_triton
from .quantized import Quantized

SHRINKS = 16  # starting ranges per group
SHORT_LLOYD = 2  # alternations for every start
LONG_LLOYD = 6  # and for the best one
CACHED = 1 << 14  # weights searched at a time on a CPU: below the size at which torch starts threads
GPU_CHUNK = 1 << 26  # and on a GPU: 256 MiB for each of a handful of temporaries
COMPILED_SIZES = (32, 64, 128)  # group sizes that fit the registers of a program
LOWEST = 0.3  # the narrowest starting range, as a fraction of the extremes
MIN_SCALE = 2.0**-14  # the smallest normal fp16: below it a scale loses digits


def search_grid(
    weight: Tensor, importance: Tensor, spec: QuantSpec, *, levels: int = 4, clip: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Scales (and zeros, for a real-zero grid) of every group of a weight.

    Args:
        weight: float32 [n, k].
        importance: float32 [k], the weight of each column's squared error.
        spec: the grid. levels: 4, or 3 for ternary.
        clip: False takes each group's extreme values instead of searching (the ``RTN`` and plain-GPTQ baselines).

    Returns:
        fp16 [n, groups] scales, never zero; fp16 zeros shaped alike, or None.

    Raises:
        ScaleError: a scale does not fit fp16.
    """
    k = weight.shape[1]
    groups = spec.groups(k)
    importance = importance.view(1, groups, -1)
    size = k // groups
    # On a CPU the hundreds of passes run on a few rows at a time, which stay in the cache.
    rows = max(1, (CACHED if weight.device.type == "cpu" else GPU_CHUNK) // k)
    compiled = clip and weight.device.type == "cuda" and has_triton() and size in COMPILED_SIZES
    parts = []
    for part in weight.split(rows):
        w = part.reshape(len(part), groups, -1)
        if compiled:
            parts.append(_search_compiled(w, importance, spec, levels))
        else:
            parts.append(_search(w, importance, spec, levels) if clip else _extremes(w, spec, levels))
    scales, zeros = (torch.cat([part[i] for part in parts]).squeeze(-1) for i in (0, 1))
    return store_scales(scales), store_zeros(zeros) if spec.zero is None else None


def round_to_nearest(weight: Tensor, spec: QuantSpec, *, levels: int = 4, clip: bool = True) -> Quantized:
    """Every weight as the code nearest to it, no inputs considered.

    Args:
        weight: float32 [n, k].
        spec, levels: the grid.
        clip: scales of least squared error; False, such that each group's extreme weights are levels of its grid.

    Raises:
        ScaleError: a scale does not fit fp16.
    """
    scales, zeros = search_grid(weight, torch.ones_like(weight[0]), spec, levels=levels, clip=clip)
    grouped = weight.view(*scales.shape, -1)
    codes = assign(grouped, scales.float().unsqueeze(-1), zero_points(spec, zeros), levels)
    return Quantized(codes.to(torch.uint8).view(weight.shape), scales, zeros, spec)


def _search(w: Tensor, h: Tensor, spec: QuantSpec, levels: int) -> tuple[Tensor, Tensor]:
    """The best scales and zeros [n, groups, 1] for w [n, groups, size] under importance h [1, groups, size]."""
    best_loss = torch.full((*w.shape[:2], 1), torch.inf, device=w.device)
    best_scale, best_zero = torch.ones_like(best_loss), torch.zeros_like(best_loss)
    start, zero = _extremes(w, spec, levels)
    signs = (1.0, -1.0) if spec.zero is not None and levels == 4 and spec.zero != 1.5 else (1.0,)
    for shrink in torch.linspace(1.0, LOWEST, SHRINKS).tolist():
        for sign in signs:
            scale, offset = start * (shrink * sign), zero
            if spec.zero is None:
                # Shrink around the middle of the range, which is code 1.5.
                offset = 1.5 + (zero - 1.5) / shrink
            for _ in range(SHORT_LLOYD):
                scale, offset = _fit(w, h, scale, offset, spec, levels)
            loss = _loss(w, h, scale, offset, levels)
            better = loss < best_loss
            best_loss = torch.where(better, loss, best_loss)
            best_scale = torch.where(better, scale, best_scale)
            best_zero = torch.where(better, offset, best_zero)
    for _ in range(LONG_LLOYD):
        best_scale, best_zero = _fit(w, h, best_scale, best_zero, spec, levels)
    return best_scale, best_zero


def _search_compiled(w: Tensor, h: Tensor, spec: QuantSpec, levels: int) -> tuple[Tensor, Tensor]:
    """:func:`_search` as one kernel."""
    from .loops_triton import search_groups

    scales, zeros = (part.contiguous() for part in _extremes(w, spec, levels))
    search_groups(
        w.contiguous(),
        h.contiguous(),
        scales,
        zeros,
        spec.zero,
        levels,
        shrinks=SHRINKS,
        lowest=LOWEST,
        short=SHORT_LLOYD,
        long=LONG_LLOYD,
        least=MIN_SCALE,
    )
    return scales, zeros


def _extremes(w: Tensor, spec: QuantSpec, levels: int) -> tuple[Tensor, Tensor]:
    """Scales and zeros [n, groups, 1] whose grid just reaches the extreme weights."""
    if spec.zero is None:
        low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
        scale = ((high - low) / (levels - 1)).clamp_min(MIN_SCALE)
        return scale, -low / scale
    reach = max(spec.zero, levels - 1 - spec.zero)
    magnitude = w.abs().amax(-1, keepdim=True)
    signed = torch.where(w.amax(-1, keepdim=True) >= magnitude, 1.0, -1.0) if levels == 4 and reach > 1.5 else 1.0
    return (magnitude / reach).clamp_min(MIN_SCALE) * signed, torch.full_like(magnitude, spec.zero)


def _fit(w: Tensor, h: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec, levels: int) -> tuple[Tensor, Tensor]:
    """One Lloyd alternation: nearest codes, then the weighted least-squares scale (and zero)."""
    q = assign(w, scale, zero, levels)
    hq = h * q
    if spec.zero is not None:
        centred = q - zero
        fitted = (h * w * centred).sum(-1, keepdim=True) / (h * centred * centred).sum(-1, keepdim=True)
        return _usable(fitted, scale), zero
    mass = h.sum(-1, keepdim=True)
    mean_q, mean_w = hq.sum(-1, keepdim=True) / mass, (h * w).sum(-1, keepdim=True) / mass
    variance = (hq * q).sum(-1, keepdim=True) - mass * mean_q * mean_q
    fitted = _usable(((hq * w).sum(-1, keepdim=True) - mass * mean_q * mean_w) / variance, scale)
    return fitted, mean_q - mean_w / fitted


def _usable(fitted: Tensor, previous: Tensor) -> Tensor:
    """The fitted scale, or the previous one where the group has a single code (no slope to fit)."""
    return torch.where(torch.isfinite(fitted) & (fitted.abs() >= MIN_SCALE), fitted, previous)


def _loss(w: Tensor, h: Tensor, scale: Tensor, zero: Tensor, levels: int) -> Tensor:
    error = w - scale * (assign(w, scale, zero, levels) - zero)
    return (h * error * error).sum(-1, keepdim=True)


def store_scales(scales: Tensor) -> Tensor:
    """Scales as they will be stored: the nearest fp16, at least its smallest normal number in magnitude.

    Raises:
        ScaleError: a scale is not finite in fp16.
    """
    away = torch.where(scales < 0, -1.0, 1.0) * scales.abs().clamp_min(MIN_SCALE)
    half = away.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise ScaleError(f"a scale of {float(scales.abs().max()):.4g} does not fit fp16")
    return half


def store_zeros(zeros: Tensor) -> Tensor:
    """Zeros as they will be stored. A group far from zero would need a zero point that fp16 holds only coarsely, so it
    is kept within ±1024, where fp16 still resolves a whole code."""
    return zeros.clamp(-1024, 1024).to(torch.float16)
