"""The Triton loops do what the PyTorch ones do: on a GPU, or without one in Triton's interpreter
(TRITON_INTERPRET=1)."""

import importlib.util
import os

import pytest
import torch
from trirun_gptq.layer import loops_torch, scale_search
from trirun_gptq.layer.column_grid import ColumnGrid
from trirun_gptq.layer.gptq import gptq_quantize
from trirun_gptq.layer.hessian import Hessian
from trirun_gptq.layer.scale_search import store_scales
from trirun_kernels import QuantSpec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRIDS = [(1.0, 4), (1.0, 3), (1.5, 4), (None, 4)]


def block(count, n, groups=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    work = torch.randn(count, n, generator=generator)
    upper = torch.randn(100, 100, generator=generator).mul(0.1).triu()
    upper.diagonal().copy_(torch.rand(100, generator=generator) + 0.5)
    steps = torch.rand(groups, n, generator=generator) + 0.5
    zeros = torch.rand(groups, n, generator=generator) * 3
    which = torch.randint(0, groups, (count,), generator=generator).int()
    # Factors lie in memory column by column on a GPU.
    upper = upper.t().contiguous().t()
    return [x.to(DEVICE) for x in (work, upper[:count, :count], steps, zeros, which)]


@pytest.mark.parametrize(("zero", "levels"), GRIDS)
@pytest.mark.parametrize(("count", "n"), [(64, 33), (32, 70), (7, 5)])
def test_a_block_of_gptq(zero, levels, count, n):
    from trirun_gptq.layer import loops_triton

    work, triangle, steps, zeros, groups = block(count, n)
    results = []
    for loops in (loops_torch, loops_triton):
        codes, errors = torch.full_like(work, torch.nan), torch.full_like(work, torch.nan)
        grid = ColumnGrid(groups, steps, zeros if zero is None else None, zero, levels)
        loops.round_block(work.clone(), codes, errors, triangle, grid)
        results.append((codes, errors))
    (codes, errors), (mine, my_errors) = results
    # A tie may fall either way when a product is fused with a sum, and moves what follows in its row.
    same = (codes == mine).all(0)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(my_errors[:, same], errors[:, same], rtol=1e-4, atol=1e-4)
    assert set(mine.unique().tolist()) <= set(range(levels))


@pytest.mark.parametrize(("zero", "levels"), GRIDS)
@pytest.mark.parametrize(("count", "n"), [(64, 33), (7, 5)])
def test_a_block_of_coordinate_descent(zero, levels, count, n):
    from trirun_gptq.layer import loops_triton

    work, root, steps, zeros, groups = block(count, n)
    local = (root.t() @ root).t().contiguous().t()
    results = []
    for loops in (loops_torch, loops_triton):
        codes, dense, error = torch.ones_like(work), work.clone() * 0.5, work.clone() * 0.1
        grid = ColumnGrid(groups, steps, zeros if zero is None else None, zero, levels)
        loops.descend_block(local @ work, codes, dense, error, local, grid)
        results.append((codes, dense, error))
    same = (results[0][0] == results[1][0]).all(0)
    assert same.float().mean() > 0.9
    for theirs, mine in zip(*results, strict=True):
        torch.testing.assert_close(mine[:, same], theirs[:, same], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("zero", "levels"), GRIDS)
@pytest.mark.parametrize("group_size", [-1, 32, 128])
def test_a_layer_is_solved_as_well_as_on_the_cpu(zero, levels, group_size):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2048, 256, generator=generator) * torch.arange(1, 257).pow(-0.5)
    x = (x @ torch.linalg.qr(torch.randn(256, 256, generator=generator))[0].t()).bfloat16()
    weight = torch.randn(96, 256, generator=generator)
    losses = []
    for device in ("cpu", "cuda"):
        hessian = Hessian(256, device=device)
        hessian.update(x.to(device), (x * 1.1).to(device))
        settings = {"damp": 0.05, "clip": True, "act_order": True, "sweeps": 2, "refit": True, "correction": 0.5}
        spec = QuantSpec(group_size, zero)
        losses.append(gptq_quantize(weight.to(device), hessian, spec, ternary=levels == 3, **settings).loss)
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize(("zero", "levels"), GRIDS)
@pytest.mark.parametrize("size", [32, 128])
def test_the_scale_search(zero, levels, size):
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(5, 3, size, generator=generator).to(DEVICE)
    w[2, 1] = 0  # a group without a scale of its own
    h = (torch.rand(1, 3, size, generator=generator) + 0.1).to(DEVICE)
    spec = QuantSpec(size, zero)
    losses = []
    for search in (scale_search._search, scale_search._search_compiled):
        scales, zeros = search(w, h, spec, levels)
        assert store_scales(scales).isfinite().all()
        losses.append(scale_search._loss(w, h, scales, zeros, levels))
    torch.testing.assert_close(losses[1], losses[0], rtol=2e-3, atol=1e-6)
