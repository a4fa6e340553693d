"""Times of plans on this machine's GPU, each checked first: see tune_plans.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from trirun_kernels.plan.problem import Device, Plan, Problem


class Timer(Protocol):
    """Who measures: a GPU, or a stand-in for one."""

    device: Device
    name: str
    wrong: list[str]  # plans whose result was wrong, or that did not run

    def times(self, p: Problem, plans: Sequence[Plan], seconds: float) -> dict[Plan, float]:
        """Seconds of one product under each plan that gives the right result, measured for ``seconds`` each."""


class Gpu:
    """This machine's GPU; weights and inputs of one problem at a time."""

    def __init__(self) -> None:
        import torch
        from trirun_kernels.gemm.cuda import device_of

        self._cuda = torch.device("cuda", torch.cuda.current_device())
        self.device, self.name = device_of(self._cuda.index), torch.cuda.get_device_name()
        self.wrong: list[str] = []
        self._problem: Problem | None = None

    def times(self, p: Problem, plans: Sequence[Plan], seconds: float) -> dict[Plan, float]:
        """See :class:`Timer`."""
        from trirun_cli.bench.timing import interleaved

        self._prepare(p)
        right = [plan for plan in plans if self._checked(plan)]
        measured: dict[Plan, float] = {}
        for first in range(0, len(right), 64):  # graphs at a time: each has memory of its own
            part = right[first : first + 64]
            calls = {str(i): [partial(self._run, plan, w) for w in self._products] for i, plan in enumerate(part)}
            timings = interleaved(calls, self._cuda, seconds)
            measured |= {plan: timings[str(i)].median for i, plan in enumerate(part)}
        return measured

    def _checked(self, plan: Plan) -> bool:
        from trirun_kernels.native import NativeError

        try:
            error, allowed = self._expected.error(self._run(plan, self._products[0])), self._expected.allowed()
            why = "" if error <= allowed else f"relative error {error:.2e}, at most {allowed:.2e} allowed"
        except NativeError as refused:
            why = str(refused)
        if why:
            self.wrong.append(f"{self._problem} under {plan}: {why}")
        return not why

    def _prepare(self, p: Problem) -> None:
        import torch
        from trirun_kernels.gemm.activations import quantize_activations
        from trirun_kernels.gemm.cuda import Int2Product
        from trirun_kernels.weights.spec import QuantSpec

        from trirun_cli.bench.kernels import Expected, outlier_rows
        from trirun_cli.bench.timing import copies
        from trirun_cli.models.synthetic import random_ternary

        if p == self._problem:
            return
        self._products: list[Int2Product] = []  # the last problem's weights, before there are others
        generator, spec = torch.Generator(self._cuda).manual_seed(0), QuantSpec(p.group_size, 1.0)
        for _ in range(copies(p.n * p.k // 4, self._cuda, most=64)):
            self._products.append(Int2Product(random_ternary(p.n, p.k, spec, generator), None, p.act_bits))
        self._x = outlier_rows(p.m, p.k, torch.float16, self._cuda)
        self._limbs = quantize_activations(self._x, p.act_bits) if p.quantized else None
        self._expected, self._problem = Expected(self._x, self._products[0].weight, p.act_bits), p

    def _run(self, plan: Plan, product: Any) -> Any:
        import torch

        x = self._x
        if self._limbs is not None:
            return product.of_limbs(self._limbs, x.shape[0], x.dtype, plan)
        y = torch.empty(x.shape[0], product.weight.n, dtype=x.dtype, device=x.device)
        product.run(x, y, plan)
        return y
