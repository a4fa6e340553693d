"""``--accumulate fp16``: whether a GPU gains from fp16 sums and adds them accurately; telling a model to use them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from trirun_kernels.f16acc.cuda import gain
from trirun_kernels.f16acc.ops import f16acc_gemm

from ..errors import CheckFailed, InputError, UsageError
from .device import pick_device

FORCED = "fp16-forced"


@dataclass(frozen=True, slots=True)
class Fp16Sums:
    """What fp16 sums are on one GPU: ``gain``, how many times the rate of fp32 sums; relative errors against float64 of
    one product of 2048 columns, there (``error``) and by the reference."""

    gpu: str
    gain: float
    error: float
    reference_error: float

    @property
    def accurate(self) -> bool:
        """The reference predicts the error of the chunks; other instructions stray from it by a few per cent."""
        return self.error <= 1.5 * self.reference_error


def measure(device: torch.device) -> Fp16Sums:
    """Multiply once on the GPU and once by the reference."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 2048, generator=generator).half() for rows in (64, 192))
    exact = a.double() @ b.double().t()

    def error(y: torch.Tensor) -> float:
        return ((y.double() - exact).norm() / exact.norm()).item()

    name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    there = f16acc_gemm(a.to(device), b.to(device)).cpu()
    return Fp16Sums(name, gain(name, 10 * major + minor), error(there), error(f16acc_gemm(a, b)))


def check_accumulation(value: str, device: str) -> None:
    """Refuse fp16 sums where they do not run, do not pay, or are not accurate.

    Args:
        value: of --accumulate: "fp16", or "fp16-forced" for GPUs that gain nothing too. device: of --device.

    Raises:
        UsageError: no GPU, or nothing to gain. CheckFailed: the errors are larger than they should be.
    """
    target = torch.device(pick_device(device))
    if target.type != "cuda":
        raise UsageError(f"--accumulate {value}: fp16 sums are for GPUs, this is a CPU")
    facts = measure(target)
    if facts.gain == 1 and value != FORCED:
        raise UsageError(
            f"--accumulate fp16: {facts.gpu} adds as fast in fp32", f"--accumulate {FORCED} does it all the same"
        )
    if not facts.accurate:
        raise CheckFailed(
            f"fp16 sums on {facts.gpu}: relative error {facts.error:.1e}, the reference has {facts.reference_error:.1e}"
        )


def use_fp16_sums(model: Any) -> Any:
    """The model, with fp16 sums in products of packed weights that have rows enough to gain: a
    :class:`~trirun_kernels.decoder.cuda_weights.CudaModel`, or a module of transformers, changed in place.

    Raises:
        InputError: it is not in float16.
    """
    if model.dtype != torch.float16:
        raise InputError(f"--accumulate fp16 needs a model in float16, not {str(model.dtype).removeprefix('torch.')}")
    if isinstance(model, torch.nn.Module):
        from trirun_kernels.gemm.linear import Int2Linear

        for module in model.modules():
            if isinstance(module, Int2Linear):
                module.acc = "fp16"
        return model
    return model.with_projections(lambda projection: replace(projection, acc="fp16"))
