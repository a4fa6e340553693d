"""Heads of an int8 cache without a GPU (host_sources.py): the bits of their codes and scales."""

from __future__ import annotations

import ctypes

import torch
from trirun_kernels.decoder import cuda_reference

from tests.kernels.host_sources import HERE, compile_for_host, lay_out, needs_tools

HEAD_DIM = 128  # of on_host/int8_heads.cpp


def quantized(folder, x):
    lay_out(folder)
    made = folder / "library.so"
    compile_for_host(HERE / "int8_heads.cpp", made, "-shared", "-Xcompiler", "-fPIC")
    function = ctypes.CDLL(str(made)).quantize_heads
    function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    codes, scales = torch.empty(x.shape, dtype=torch.int8), torch.empty(len(x), dtype=torch.float16)
    function(x.data_ptr(), len(x), codes.data_ptr(), scales.data_ptr())
    return codes, scales


@needs_tools
def test_codes_and_scales_have_the_bits_of_the_reference(tmp_path):
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-9, 7, 300).unsqueeze(1)  # from scales below float16's smallest to some beyond its largest
    x = torch.randn(300, HEAD_DIM, generator=generator) * spread
    ties = torch.arange(HEAD_DIM).float().sub(63.5) * 2**-5
    ties[0] = 127 * 2**-5
    # Largest elements whose scale is float16 without rounding, and those a little larger.
    whole = 127 * (1 + torch.arange(1024) / 1024)
    largest = torch.cat((whole, whole.nextafter(torch.tensor(torch.inf))))
    edges = torch.nn.functional.pad(largest.unsqueeze(1), (9, HEAD_DIM - 10))
    x = torch.cat((x, ties.unsqueeze(0), edges, torch.zeros(4, HEAD_DIM)))
    x[-3, 5], x[-2, 6], x[-1, 7] = 3e38, float("inf"), float("nan")
    codes, scales = quantized(tmp_path, x)
    expected, expected_scales = cuda_reference.quantize_heads(x)
    assert torch.equal(codes, expected)
    finite = expected_scales.isfinite()
    assert torch.equal(scales[finite], expected_scales[finite]) and not scales[~finite].isfinite().any()
    assert finite[:200].all() and not finite[-3:].any()
