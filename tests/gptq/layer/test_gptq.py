"""GPTQ and coordinate descent on weights whose inputs have realistic, skewed statistics."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer import coordinate_descent
from trirun_gptq.layer.coordinate_descent import Problem, Target, descend, refit_scales
from trirun_gptq.layer.gptq import corrected_target, gptq_quantize, proxy_loss
from trirun_gptq.layer.hessian import Hessian
from trirun_gptq.layer.scale_search import round_to_nearest, search_grid
from trirun_kernels import QuantSpec, dequantize

GRIDS = {"signed": (1.0, False), "midrise": (1.5, False), "zero": (None, False), "ternary": (1.0, True)}
PLAIN = {"damp": 0.05, "clip": False, "act_order": False, "sweeps": 0, "refit": False, "correction": 0.0}


def layer(n=64, k=256, rows=2048, seed=0):
    """A weight and the Hessian of inputs with a decaying spectrum and a few loud columns."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(k, k, generator=generator))
    x = torch.randn(rows, k, generator=generator) * torch.arange(1, k + 1).pow(-0.5) @ basis.t()
    x[:, torch.randperm(k, generator=generator)[:4]] *= 8
    hessian = Hessian(k, "layers.0.up_proj")
    hessian.update(x)
    return torch.randn(n, k, generator=generator) * 0.02, hessian, x


def row_losses(problem, codes, scales, zeros):
    error = problem.dense(codes, scales, zeros) - problem.target.weight
    return ((error @ problem.target.hessian) * error).sum(1)


@pytest.mark.parametrize("grid", GRIDS)
def test_rounding_to_nearest_is_coordinate_descent_without_correlations(grid):
    zero, ternary = GRIDS[grid]
    spec, levels, (weight, *_) = QuantSpec(64, zero), 3 if ternary else 4, layer()
    nearest = round_to_nearest(weight, spec, levels=levels)
    problem = Problem(Target(weight, torch.eye(weight.shape[1])), spec, levels)
    codes = descend(problem, torch.ones_like(weight), nearest.scales, nearest.zeros)
    assert torch.equal(codes, nearest.codes.float())
    extremes = round_to_nearest(weight, spec, levels=levels, clip=False)
    assert (nearest.dequantize() - weight).square().sum() < (extremes.dequantize() - weight).square().sum()


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("group_size", [-1, 32, 128])
def test_every_step_lowers_the_output_error(grid, group_size):
    zero, ternary = GRIDS[grid]
    spec = QuantSpec(group_size, zero)
    weight, hessian, x = layer()
    nearest = proxy_loss(
        round_to_nearest(weight, spec, levels=3 if ternary else 4, clip=False).dequantize(), weight, hessian.matrix
    )
    steps = [PLAIN, {**PLAIN, "clip": True}, {**PLAIN, "clip": True, "act_order": True, "sweeps": 2, "refit": True}]
    losses = [gptq_quantize(weight, hessian, spec, ternary=ternary, **step).loss for step in steps]
    assert nearest > losses[0] > losses[1] > losses[2]
    quantized = gptq_quantize(weight, hessian, spec, ternary=ternary).quantized
    assert int(quantized.codes.max()) <= (2 if ternary else 3)
    # The loss is the true relative output error, and packing changes nothing.
    dense = dequantize(quantized.pack())
    assert torch.equal(dense, quantized.dequantize())
    measured = ((x @ (dense - weight).t()).square().sum() / (x @ weight.t()).square().sum()).item()
    assert measured == pytest.approx(losses[2], rel=1e-3)


def test_the_signed_grid_uses_both_signs_and_beats_the_one_sided_one():
    weight, hessian, _ = layer()
    quantized = gptq_quantize(weight, hessian, QuantSpec(128, 1.0)).quantized
    assert (quantized.scales < 0).any() and (quantized.scales > 0).any()
    assert (quantized.codes == 3).any()


def test_a_weight_on_the_grid_is_found_exactly():
    generator = torch.Generator().manual_seed(3)
    _, hessian, _ = layer()
    codes = torch.randint(0, 4, (64, 256), generator=generator).float()
    scales = (torch.rand(64, 2, generator=generator) + 0.5).half().float()
    weight = (codes - 1).view(64, 2, 128) * scales.unsqueeze(-1)
    quantized = gptq_quantize(weight.view(64, 256), hessian, QuantSpec(128, 1.0)).quantized
    torch.testing.assert_close(quantized.dequantize(), weight.view(64, 256), rtol=2e-3, atol=1e-6)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), grid=st.sampled_from(list(GRIDS)), group_size=st.sampled_from([-1, 32, 64]))
def test_coordinate_descent_never_raises_the_loss(seed, grid, group_size):
    zero, ternary = GRIDS[grid]
    spec, levels = QuantSpec(group_size, zero), 3 if ternary else 4
    weight, hessian, _ = layer(n=16, k=64, rows=200, seed=seed)
    problem = Problem(Target(weight, hessian.matrix), spec, levels)
    scales, zeros = search_grid(weight, torch.ones(64), spec, levels=levels)
    codes = torch.randint(0, levels, weight.shape, generator=torch.Generator().manual_seed(seed)).float()
    before = row_losses(problem, codes, scales, zeros)
    codes = descend(problem, codes, scales, zeros)
    middle = row_losses(problem, codes, scales, zeros)
    codes, scales, zeros = refit_scales(problem, codes, scales, zeros)
    after = row_losses(problem, codes, scales, zeros)
    tolerance = before * 1e-4 + 1e-7
    assert (middle <= before + tolerance).all()
    assert (after <= middle + tolerance).all()


@pytest.mark.parametrize("zero", [None, 1.0])
def test_scales_are_refitted_in_bounded_memory(zero, monkeypatch):
    weight, hessian, _ = layer(n=200, k=128)
    problem = Problem(Target(weight, hessian.matrix), QuantSpec(32, zero), 4)
    scales, zeros = search_grid(weight, torch.ones(128), problem.spec)
    codes, solve, solved = torch.randint(0, 4, weight.shape).float(), torch.linalg.solve_ex, []
    whole = refit_scales(problem, codes, scales, zeros)
    monkeypatch.setattr(coordinate_descent, "SOLVE_COPIES", 100)
    monkeypatch.setattr(torch.linalg, "solve_ex", lambda a, b: solved.append(a.numel()) or solve(a, b))
    parted = refit_scales(problem, codes, scales, zeros)
    assert len(solved) > 1 and max(solved) * 100 <= coordinate_descent.EQUATION_MATRICES * (200 * 128 + 128 * 128)
    assert torch.equal(whole[1], parted[1]) and not torch.equal(whole[1], scales)
    assert whole[2] is parted[2] is None if zeros is None else torch.equal(whole[2], parted[2])


def test_stacked_rows_solve_as_they_would_alone():
    weight, hessian, _ = layer(n=48)
    spec = QuantSpec(64, 1.0)
    stacked = gptq_quantize(weight, hessian, spec).quantized
    alone = torch.cat([gptq_quantize(part, hessian, spec).quantized.codes for part in weight.split([16, 32])])
    # Matrix products of other widths may sum in another order; a handful of ties may fall the other way.
    assert (stacked.codes != alone).float().mean() < 0.01


def test_dead_columns_and_zero_rows():
    weight, _, x = layer()
    x[:, 10] = 0
    weight[5] = 0
    hessian = Hessian(256)
    hessian.update(x)
    quantized = gptq_quantize(weight, hessian, QuantSpec(128, 1.0)).quantized
    dense = quantized.dequantize()
    assert not dense[:, 10].any()
    assert not dense[5].any()


def test_corrected_target_is_the_regression_onto_the_original_outputs():
    weight, _, x = layer(n=16, k=64, rows=4000)
    x = x[:, :64]
    generator = torch.Generator().manual_seed(5)
    original = x @ (torch.eye(64) + 0.1 * torch.randn(64, 64, generator=generator))
    hessian = Hessian(64)
    hessian.update(x, original)
    target = corrected_target(weight, hessian, damp=1e-6, strength=1.0)
    expected = torch.linalg.lstsq(x.double(), (original @ weight.t()).double()).solution.t()
    torch.testing.assert_close(target.double(), expected, rtol=2e-2, atol=2e-4)
    half = corrected_target(weight, hessian, damp=1e-6, strength=0.5)
    torch.testing.assert_close(half, (weight + target) / 2)


def test_defects_are_named():
    weight, hessian, _ = layer()
    with pytest.raises(
        QuantizationError, match=r"layers\.0\.up_proj: weight \[64, 128\] does not fit a Hessian of k=256"
    ):
        gptq_quantize(weight[:, :128], hessian, QuantSpec(128, 1.0))
    weight[3, 3] = float("nan")
    with pytest.raises(QuantizationError, match=r"layers\.0\.up_proj: 1 of 16384 weights are NaN or infinite"):
        gptq_quantize(weight, hessian, QuantSpec(128, 1.0))
    with pytest.raises(QuantizationError, match="a ternary grid has zero=1"):
        gptq_quantize(layer()[0], hessian, QuantSpec(128, 2.0), ternary=True)
    odd = Hessian(200, "odd")
    odd.update(torch.randn(300, 200))
    with pytest.raises(QuantizationError, match="odd: k=200 is not a multiple of group_size=128"):
        gptq_quantize(torch.randn(8, 200), odd, QuantSpec(128, 1.0))
    with pytest.raises(QuantizationError, match="does not fit fp16"):
        gptq_quantize(layer()[0] * 1e8, hessian, QuantSpec(128, 1.0))
