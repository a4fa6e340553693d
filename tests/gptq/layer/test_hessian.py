"""The Hessian: streaming sums, the factor's definition, the damping ladder, and errors that name their cause."""

import pytest
import torch
from trirun_gptq.errors import QuantizationError
from trirun_gptq.layer.hessian import Hessian


def inputs(rows=400, k=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, k, generator=generator) @ torch.randn(k, k, generator=generator)


def test_streaming_equals_one_product():
    x, original = inputs(), inputs(seed=1)
    hessian = Hessian(48)
    for part, before in zip(x.split(90), original.split(90), strict=True):
        hessian.update(part.view(1, -1, 48), before.view(1, -1, 48))
    assert hessian.rows == 400
    torch.testing.assert_close(hessian.matrix, x.t() @ x / 400, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(hessian.cross, original.t() @ x / 400, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("ordered", [False, True])
def test_factor_is_the_cholesky_of_the_damped_inverse(ordered):
    hessian = Hessian(48)
    hessian.update(inputs())
    order = hessian.matrix.diagonal().argsort(descending=True) if ordered else torch.arange(48)
    factor = hessian.inverse_cholesky(0.05, order if ordered else None)
    damped = hessian.matrix + 0.05 * hessian.matrix.diagonal().mean() * torch.eye(48)
    inverse = torch.linalg.inv(damped.double())[order][:, order]
    assert factor.damp == 0.05
    assert not factor.upper.tril(-1).any()
    torch.testing.assert_close((factor.upper.t() @ factor.upper).double(), inverse, rtol=1e-3, atol=1e-6)


def test_damping_rises_until_a_rank_deficient_hessian_can_be_factored():
    hessian = Hessian(256)
    direction = torch.randn(1, 256, generator=torch.Generator().manual_seed(0))
    # One direction a million times the others: far beyond float32 at the damping asked for.
    hessian.update(direction.repeat(64, 1) * 1e3)
    factor = hessian.inverse_cholesky(1e-9)
    assert factor.damp > 1e-9
    assert torch.isfinite(factor.upper).all()


def test_dead_columns_are_reported_and_survive():
    x = inputs()
    x[:, [3, 17]] = 0
    hessian = Hessian(48)
    hessian.update(x)
    factor = hessian.inverse_cholesky(0.01)
    assert factor.dead.nonzero().flatten().tolist() == [3, 17]
    dead = Hessian(48, "layers.0.down_proj")
    dead.update(torch.zeros(5, 48))
    with pytest.raises(QuantizationError, match=r"layers\.0\.down_proj: every one of the 48 inputs is zero"):
        dead.inverse_cholesky(0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_bad_activations_name_module_and_sample(value):
    hessian = Hessian(48, "layers.2.up_proj")
    x = inputs()
    x[7, 5] = value
    with pytest.raises(QuantizationError, match=r"layers\.2\.up_proj: 1 of 19200 input values .* sample 40"):
        hessian.update(x, sample=40)
    with pytest.raises(QuantizationError, match="squared inputs overflow float32"):
        hessian.update(torch.full((2, 48), 1e30))
    with pytest.raises(QuantizationError, match="no calibration token reached this layer"):
        Hessian(48).inverse_cholesky(0.01)


def test_original_inputs_come_always_or_never():
    hessian = Hessian(48)
    hessian.update(inputs())
    with pytest.raises(QuantizationError, match="with every update or with none"):
        hessian.update(inputs(), inputs())
