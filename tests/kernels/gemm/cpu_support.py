"""What tests of the CPU products share."""

from __future__ import annotations

from ctypes import byref

import torch
import torch.nn.functional as F
from trirun_kernels import native
from trirun_kernels.gemm import cpu
from trirun_kernels.weights.packing import dequantize


def run_guarded(x, w, bias, act_bits, threads=2, ldx=None, ldy=None):
    """Through the C interface, into memory that is NaN where y is to be and 0x5A around and between its rows."""
    m, k = x.shape
    ldx, ldy = ldx or k, ldy or w.n
    guard, itemsize = 256, x.element_size()
    rows = torch.full((m, ldx), float("nan"), dtype=x.dtype)
    rows[:, :k] = x
    # The last row of x ends where its memory ends: a read beyond it is for the address sanitizer to see.
    source = rows.flatten()[: (m - 1) * ldx + k].clone()
    out = torch.full((guard + ((m - 1) * ldy + w.n) * itemsize + guard,), 0x5A, dtype=torch.uint8)
    y = out[guard:-guard].view(x.dtype).as_strided((m, w.n), (ldy, 1))
    y.fill_(float("nan"))
    before = out.clone()
    code = native.cpu().trirun_cpu_int2_gemm(
        byref(native.Int2Struct.of(w)), w.n, k, source.data_ptr(), cpu.DTYPES[x.dtype], m, ldx,
        None if bias is None else bias.data_ptr(), y.data_ptr(), ldy, act_bits, threads,
    )  # fmt: skip
    assert code == 0
    result = y.clone()
    y.fill_(float("nan"))
    assert torch.equal(out, before), "bytes outside y were written"
    return result


def rounding_of_limbs(x, w):
    """What rounding x to two int8 limbs costs the whole product, as the root of the sum of its variances: a step of
    amax / 32639 for every row and 128 columns, whatever the weights of the column that has the maximum."""
    steps = F.pad(x.double(), (0, -x.shape[1] % 128)).unflatten(1, (-1, 128)).abs().amax(-1) / 32639
    dense = F.pad(dequantize(w, torch.float64), (0, -w.k % 128)).unflatten(1, (-1, 128))
    return (steps.square() / 12 @ dense.square().sum(-1).T).sum().sqrt()
