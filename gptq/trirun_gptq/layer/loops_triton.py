"""The innermost loops as Triton kernels: what is one call per column, or one per Lloyd step, in PyTorch.

Rows are independent, so a program takes some rows through a whole block of columns in registers. ``loops_torch.py``
and, for the search, ``scale_search.py`` are the reference; tests hold these kernels to them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .column_grid import ColumnGrid

ROWS = 32  # rows of a program: 4096 of them still fill a large GPU
COLUMNS = 64  # columns between two matrix products
TILE = 4096  # weights of a program of the scale search


@triton.jit
def _assign(x, top: tl.constexpr):
    """Nearest integer in 0..top, ties to even. Adding 1.5·2²³ leaves no bits below one; x is first brought near."""
    near = tl.minimum(tl.maximum(x, -1.0), top + 1.0)
    return tl.minimum(tl.maximum((near + 12582912.0) - 12582912.0, 0.0), top + 0.0)


@triton.jit
def _round_block(
    work, codes, errors, triangle, ld, groups, steps, zeros, n, count, zero,
    real_zero: tl.constexpr, top: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < n
    column = tl.arange(0, columns)
    held = (column < count)[:, None] & inside[None, :]
    tile = tl.load(work + column[:, None] * n + row[None, :], mask=held, other=0.0)
    for j in range(columns):
        live = inside & (j < count)
        w = tl.sum(tl.where((column == j)[:, None], tile, 0.0), axis=0)
        pivot = tl.load(triangle + j * ld + j, mask=j < count, other=1.0)
        u = tl.load(triangle + j * ld + column, mask=(column > j) & (column < count) & (j < count), other=0.0)
        group = tl.load(groups + j, mask=j < count, other=0)
        s = tl.load(steps + group * n + row, mask=live, other=1.0)
        z = tl.load(zeros + group * n + row, mask=live, other=0.0) if real_zero else zero
        q = _assign(w / s + z, top)
        e = (w - s * (q - z)) / pivot
        tile -= u[:, None] * e[None, :]
        tl.store(codes + j * n + row, q, mask=live)
        tl.store(errors + j * n + row, e, mask=live)


@triton.jit
def _descend_block(
    gradient, codes, dense, error, local, ld, groups, steps, zeros, n, count, zero,
    real_zero: tl.constexpr, top: tl.constexpr, columns: tl.constexpr, rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    inside = row < n
    column = tl.arange(0, columns)
    held = (column < count)[:, None] & inside[None, :]
    tile = tl.load(gradient + column[:, None] * n + row[None, :], mask=held, other=0.0)
    for j in range(columns):
        live = inside & (j < count)
        g = tl.sum(tl.where((column == j)[:, None], tile, 0.0), axis=0)
        curvature = tl.load(local + j * ld + j, mask=j < count, other=1.0)
        h = tl.load(local + j * ld + column, mask=(column < count) & (j < count), other=0.0)
        group = tl.load(groups + j, mask=j < count, other=0)
        s = tl.load(steps + group * n + row, mask=live, other=1.0)
        z = tl.load(zeros + group * n + row, mask=live, other=0.0) if real_zero else zero
        before = tl.load(dense + j * n + row, mask=live, other=0.0)
        q = _assign((before - g / curvature) / s + z, top)
        value = s * (q - z)
        change = value - before
        tile += h[:, None] * change[None, :]
        wrong = tl.load(error + j * n + row, mask=live, other=0.0)
        tl.store(error + j * n + row, wrong + change, mask=live)
        tl.store(codes + j * n + row, q, mask=live)
        tl.store(dense + j * n + row, value, mask=live)


@triton.jit
def _fit(w, h, scale, zero, real_zero: tl.constexpr, top: tl.constexpr, least: tl.constexpr):
    """One Lloyd step of a tile [groups, size]; scale and zero are [groups]."""
    q = _assign(w / scale[:, None] + zero[:, None], top)
    if real_zero:
        mass = tl.sum(h, axis=1)
        mean_q, mean_w = tl.sum(h * q, axis=1) / mass, tl.sum(h * w, axis=1) / mass
        spread = tl.sum(h * q * q, axis=1) - mass * mean_q * mean_q
        fitted = (tl.sum(h * q * w, axis=1) - mass * mean_q * mean_w) / spread
    else:
        centred = q - zero[:, None]
        fitted = tl.sum(h * w * centred, axis=1) / tl.sum(h * centred * centred, axis=1)
    # Neither comparison holds for a NaN.
    usable = (tl.abs(fitted) >= least) & (tl.abs(fitted) < 3e38)
    scale = tl.where(usable, fitted, scale)
    if real_zero:
        zero = mean_q - mean_w / scale
    return scale, zero


@triton.jit
def _search_groups(
    weight, importance, scales, zeros, count, per_row, zero_point,
    real_zero: tl.constexpr, both_signs: tl.constexpr, top: tl.constexpr, size: tl.constexpr, tile: tl.constexpr,
    shrinks: tl.constexpr, lowest: tl.constexpr, short: tl.constexpr, long: tl.constexpr, least: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0) * tile + tl.arange(0, tile)
    inside = group < count
    within = tl.arange(0, size)
    w = tl.load(weight + group.to(tl.int64)[:, None] * size + within[None, :], mask=inside[:, None], other=0.0)
    h = tl.load(importance + (group % per_row)[:, None] * size + within[None, :])
    start = tl.load(scales + group, mask=inside, other=1.0)
    offset = tl.load(zeros + group, mask=inside, other=0.0) if real_zero else tl.zeros([tile], tl.float32) + zero_point
    best_loss = tl.full([tile], float("inf"), tl.float32)
    best_scale, best_zero = start, offset
    signs: tl.constexpr = 2 if both_signs else 1
    for i in range(shrinks * signs):
        shrink = 1.0 - (i // signs) * ((1.0 - lowest) / (shrinks - 1))
        scale = start * shrink * (1.0 - 2.0 * (i % signs))
        zero = offset
        if real_zero:
            zero = 1.5 + (offset - 1.5) / shrink
        for _ in range(short):
            scale, zero = _fit(w, h, scale, zero, real_zero, top, least)
        q = _assign(w / scale[:, None] + zero[:, None], top)
        error = w - scale[:, None] * (q - zero[:, None])
        loss = tl.sum(h * error * error, axis=1)
        better = loss < best_loss
        best_loss = tl.where(better, loss, best_loss)
        best_scale, best_zero = tl.where(better, scale, best_scale), tl.where(better, zero, best_zero)
    for _ in range(long):
        best_scale, best_zero = _fit(w, h, best_scale, best_zero, real_zero, top, least)
    tl.store(scales + group, best_scale, mask=inside)
    if real_zero:
        tl.store(zeros + group, best_zero, mask=inside)


def round_block(work: Tensor, codes: Tensor, errors: Tensor, triangle: Tensor, grid: ColumnGrid) -> None:
    """See :func:`trirun_gptq.layer.loops_torch.round_block`."""
    count, n = work.shape
    # Factors come from the GPU's solver column by column.
    triangle = triangle.contiguous()
    _require_contiguous(work, codes, errors, grid.groups, grid.scales)
    _round_block[(triton.cdiv(n, ROWS),)](
        work, codes, errors, triangle, triangle.stride(0), grid.groups, grid.scales, _zeros(grid), n, count,
        **_constants(grid),
    )  # fmt: skip


def descend_block(
    gradient: Tensor, codes: Tensor, dense: Tensor, error: Tensor, local: Tensor, grid: ColumnGrid
) -> None:
    """See :func:`trirun_gptq.layer.loops_torch.descend_block`."""
    count, n = gradient.shape
    local = local.contiguous()
    _require_contiguous(gradient, codes, dense, error, grid.groups, grid.scales)
    _descend_block[(triton.cdiv(n, ROWS),)](
        gradient, codes, dense, error, local, local.stride(0), grid.groups, grid.scales, _zeros(grid), n, count,
        **_constants(grid),
    )  # fmt: skip


def _zeros(grid: ColumnGrid) -> Tensor:
    """The real zeros; where there are none, some tensor that the kernel does not read."""
    return grid.scales if grid.zeros is None else grid.zeros


def _constants(grid: ColumnGrid) -> dict[str, float | int | bool]:
    """What both kernels are told of the grid, and how they are cut."""
    return {
        "zero": 0.0 if grid.zero is None else grid.zero,
        "real_zero": grid.zeros is not None,
        "top": grid.levels - 1,
        "columns": COLUMNS,
        "rows": ROWS,
    }


def search_groups(
    weight: Tensor, importance: Tensor, scales: Tensor, zeros: Tensor, zero: float | None, levels: int,
    shrinks: int, lowest: float, short: int, long: int, least: float,
) -> None:  # fmt: skip
    """The scale search of :mod:`trirun_gptq.layer.scale_search`, in place: scales and zeros [n, groups] come in
    as the extremes.

    Args:
        weight: float32 [n, groups, size], contiguous; size a power of two. importance: float32 [groups, size].
    """
    n, groups, size = weight.shape
    _require_contiguous(weight, importance, scales, zeros)
    tile = max(1, TILE // size)
    _search_groups[(triton.cdiv(n * groups, tile),)](
        weight, importance, scales, zeros, n * groups, groups, 0.0 if zero is None else zero, real_zero=zero is None,
        both_signs=zero is not None and levels == 4 and zero != 1.5, top=levels - 1, size=size, tile=tile,
        shrinks=shrinks, lowest=lowest, short=short, long=long, least=least,
    )  # fmt: skip


def _require_contiguous(*tensors: Tensor) -> None:
    """The kernels compute addresses from shapes; another layout would be read as other numbers."""
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor {list(tensor.shape)} with strides {tensor.stride()} is not contiguous")
