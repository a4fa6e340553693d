"""The 16-bit output head of GPUs without one (host_sources.py), against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from trirun_kernels.gemm.cpu import DTYPES

from tests.kernels.decoder.cuda_support import ROUNDING, assert_nan_stays_in_its_row, error
from tests.kernels.host_sources import host_library, needs_tools

BAD_SHAPE = -1
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


@pytest.fixture(scope="module")
def multiply(tmp_path_factory):
    """``y = x @ w.T`` of tensors; the code that it returns."""
    library = host_library(tmp_path_factory.mktemp("head"), "decoder/head_16bit.cu", 227 << 10)
    function = library.trirun_cuda_head_16bit
    function.argtypes = [_P, _I, *[_L] * 3, _P, _L, _P, _L, _P]

    def run(x, w, y):
        (m, k), n = x.shape, w.shape[0]
        return function(
            x.data_ptr(), DTYPES[x.dtype], m, k, x.stride(0), w.data_ptr(), n, y.data_ptr(), y.stride(0), None
        )

    return run


# Of CTAs with one group of rows and more; of one piece of columns, of several that go round the ring, and of unequal
# ones.
SIZES = [(8, 32, 1), (72, 1056, 3), (200, 1024, 8), (16, 2560, 2), (136, 5888, 1), (24, 8192, 8)]


@needs_tools
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_heads(multiply, dtype):
    generator = torch.Generator().manual_seed(0)
    for n, k, m in SIZES:
        w = torch.randn(n, k, generator=generator).to(dtype)
        x = torch.randn(m, k + 8, generator=generator).to(dtype)[:, :k]
        y = torch.full((m, n + 2), float("nan"), dtype=dtype)
        assert multiply(x, w, y) == 0
        assert error(y[:, :n], x.double() @ w.double().T) < 2 * ROUNDING[dtype], (n, k, m)
        assert y[:, n:].isnan().all()

        def product(x, w=w):
            out = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype)
            assert multiply(x, w, out) == 0
            return out

        assert torch.equal(product(x[m - 1 :])[0], y[m - 1, :n])
        assert_nan_stays_in_its_row(product, x, y[:, :n])


@needs_tools
@pytest.mark.parametrize("n, k, m", [(12, 32, 1), (8, 48, 1), (8, 32, 9), (8, 8224, 1)])
def test_sizes_that_it_does_not_take(multiply, n, k, m):
    x, w, y = (torch.zeros(size, dtype=torch.float16) for size in ((m, k), (n, k), (m, n)))
    assert multiply(x, w, y) == BAD_SHAPE
