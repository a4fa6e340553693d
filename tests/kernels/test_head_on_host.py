"""Output heads of few rows of GPUs without one (host_sources.py), in 16 and in 12 bits, against float64."""

from __future__ import annotations

import ctypes

import pytest
import torch
from trirun_kernels.gemm.cpu import DTYPES
from trirun_kernels.weights.twelve_bits import TwelveBits

from tests.kernels.decoder.cuda_support import ROUNDING, assert_nan_stays_in_its_row, error
from tests.kernels.host_sources import host_library, needs_tools

BAD_SHAPE = -1
_P, _I, _L = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


def product_of(folder, name, tensors_of):
    """``y = x @ w.T`` of tensors; the code that it returns. tensors_of: what the kernel reads of w."""
    function = getattr(host_library(folder, f"head/{name}.cu", 227 << 10), f"trirun_cuda_{name}")

    def run(x, w, y):
        (m, k), tensors = x.shape, tensors_of(w)
        function.argtypes = [_P, _I, *[_L] * 3, *[_P] * len(tensors), _L, _P, _L, _P]
        code = function(
            x.data_ptr(), DTYPES[x.dtype], m, k, x.stride(0), *(t.data_ptr() for t in tensors), w.shape[0],
            y.data_ptr(), y.stride(0), None,
        )  # fmt: skip
        assert not any(counter.any() for counter in tensors[2:])
        return code

    return run


@pytest.fixture(scope="module")
def sixteen(tmp_path_factory):
    return product_of(tmp_path_factory.mktemp("head"), "head_16bit", lambda w: (w,))


def compact(w):
    packed = TwelveBits.of(w)
    assert packed is not None
    return packed.blocks, packed.records, packed.counter


@pytest.fixture(scope="module")
def twelve(tmp_path_factory):
    return product_of(tmp_path_factory.mktemp("head"), "head_12bit", compact)


def assert_multiplies(multiply, w, x):
    (n, k), m = w.shape, x.shape[0]
    y = torch.full((m, n + 2), float("nan"), dtype=x.dtype)
    assert multiply(x, w, y) == 0
    assert error(y[:, :n], x.double() @ w.double().T) < 2 * ROUNDING[x.dtype], (n, k, m)
    assert y[:, n:].isnan().all()

    def product(x):
        out = torch.empty(x.shape[0], n, dtype=x.dtype)
        assert multiply(x, w, out) == 0
        return out

    assert torch.equal(product(x[m - 1 :])[0], y[m - 1, :n])
    assert_nan_stays_in_its_row(product, x, y[:, :n])


# Of CTAs with one group of rows and more; of one piece of columns, of several that go round the ring, and of unequal
# ones.
SIZES = [(8, 32, 1), (72, 1056, 3), (200, 1024, 8), (16, 2560, 2), (136, 5888, 1), (24, 8192, 8)]
# Of warps with nothing, with eight rows, and with several times as many; of equal pieces of these and unequal ones.
COMPACT_SIZES = [(8, 512, 1), (8, 1088, 2), (3000, 512, 3), (200, 1024, 8), (16, 2560, 2), (24, 4096, 8)]


@needs_tools
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_heads(sixteen, dtype):
    generator = torch.Generator().manual_seed(0)
    for n, k, m in SIZES:
        w = torch.randn(n, k, generator=generator).to(dtype)
        assert_multiplies(sixteen, w, torch.randn(m, k + 8, generator=generator).to(dtype)[:, :k])


@needs_tools
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_twelve_bit_heads(twelve, dtype):
    generator = torch.Generator().manual_seed(0)
    for n, k, m in COMPACT_SIZES:
        w = torch.randn(n, k, generator=generator).bfloat16()
        x = torch.randn(m, k + 8, generator=generator).to(dtype)[:, :k]
        assert_multiplies(twelve, w, x)
        # Rows of zeros, and of others in size; and one of which only what is kept apart counts.
        w *= torch.logspace(-6, 6, n, 2).unsqueeze(1)
        w[2], w[3, 8:], w[3, 5], x[:, 5] = 0, 0, 2.0**30, 0
        y = torch.empty(m, n, dtype=dtype)
        assert twelve(x, w, y) == 0
        exact = x.double() @ w.double().T
        for row in (0, 3, n - 1):
            assert error(y[:, row], exact[:, row]) < 2 * ROUNDING[dtype], (n, k, m, row)
        assert not y[:, 2].any()


@needs_tools
@pytest.mark.parametrize("n, k, m", [(12, 32, 1), (8, 48, 1), (8, 32, 9), (8, 8224, 1)])
def test_sizes_that_it_does_not_take(sixteen, n, k, m):
    x, w, y = (torch.zeros(size, dtype=torch.float16) for size in ((m, k), (n, k), (m, n)))
    assert sixteen(x, w, y) == BAD_SHAPE


@needs_tools
@pytest.mark.parametrize("n, k, m", [(8, 512, 9), (8, 448, 1), (8, 4160, 1)])
def test_sizes_that_a_compact_one_does_not_take(twelve, n, k, m):
    x, w, y = (torch.zeros(size, dtype=torch.float16) for size in ((m, k), (n, k), (m, n)))
    assert twelve(x, w, y) == BAD_SHAPE
