"""The CUDA decode kernels that use wgmma: outliers under one scale for several k tiles, x quantized by the product,
stages that are filled anew."""

import pytest
import torch
from trirun_kernels.native import library_path
from trirun_kernels.plan.problem import GROUPS, SPANS, Plan

from tests.kernels.gemm.decode_support import TOLERANCE, error, exact, rows, weight
from tests.kernels.gemm.prefill_support import HOPPER, run

if not (HOPPER and library_path("cuda").exists()):
    pytest.skip("no Hopper GPU, or libtrirun_cuda.so is not built", allow_module_level=True)

pytestmark = pytest.mark.gpu(capability=(9, 0))


def spiked(m, k, channels, factor):
    """Normal rows, some columns of which are larger in every row, as in language models."""
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(2))
    x[:, channels] *= factor
    return x.to("cuda", torch.float16)


@pytest.mark.parametrize(
    "channels, factor",
    [([], 1), ([77], 200), ([5, 1500, 2600, 4000], 100), ([5, 1500, 2600, 4000], 1000), (slice(0, None, 512), 60)],
)
def test_outliers_of_every_kind(channels, factor):
    w = weight(512, 4096)
    for m in (16, 32, 64):
        x = spiked(m, 4096, channels, factor)
        reference = exact(x, w)
        rounding = error(reference.half(), reference)
        assert error(run(x, w, Plan(SPANS, ctas=5, stages=4)), reference) < 1.5 * rounding


@pytest.mark.parametrize("group, dtype", [(g, t) for g in (-1, 128) for t in (torch.float16, torch.bfloat16)])
@pytest.mark.parametrize("n, k, ctas, pair", [(300, 128, 2, 0), (700, 2560, 7, 0), (512, 4096, 5, 0),
                                              (512, 4096, 16, 0), (512, 4096, 16, 2), (1500, 1800, 43, 0)])  # fmt: skip
def test_x_quantized_by_the_product_has_the_same_limbs(n, k, ctas, pair, group, dtype):
    k -= k % 128 if group > 0 else 0  # without a zero point the same numbers are added in the same order
    w, plain = weight(n, k, group, zero=0.0), weight(n, k, group, zero=None)
    bias = torch.randn(n, device="cuda", dtype=dtype)
    for m, width in ((3, 0), (8, 0), (9, 16), (16, 0), (17, 32), (24, 16), (24, 0 if group < 0 else 32), (32, 32)):
        wide = rows(m, k + 8, dtype)
        for x in (wide[:, :k], wide[:, 8:], wide[:, 3 : k + 3]):  # the last is not on 16 bytes: quantized apart
            apart, fused = (Plan(SPANS, width, cta_split=pair, ctas=ctas, stages=4, fused=f) for f in (0, 1))
            assert torch.equal(run(x, w, fused, 16, bias), run(x, w, apart, 16, bias)), m
            assert error(run(x, plain, fused, 16, bias), exact(x, plain, bias)) < TOLERANCE[dtype], m


@pytest.mark.parametrize("m", [16, 32, 64])
def test_stages_are_filled_anew_only_when_their_scales_are_read(m):
    """Rows of y that end within 16 bytes are written two bytes at a time, and what a CTA's other warps want to read of
    shared memory waits behind that."""
    w, x = weight(2458, 1536), rows(m, 1536)
    reference = exact(x, w)
    for plan in (Plan(SPANS, 32, 192, ctas=3, stages=8), Plan(SPANS, ctas=1, stages=8), Plan(GROUPS, ctas=1, stages=8)):
        for _ in range(50):
            assert error(run(x, w, plan), reference) < TOLERANCE[x.dtype], plan
