"""Shared memory of a plan: asked of the library, which lays it out; here is only how many stages fit a device."""

from __future__ import annotations

from .. import native
from .problem import PREFILL, Plan, Problem
from .table import table


def shared_limit(arch: int) -> int:
    """Bytes of shared memory that one CTA may have on a device of compute capability ``arch`` / 10."""
    kib = table("device")["shared_kib"]
    return kib.get(arch, kib["others"]) * 1024


def shared_bytes(p: Problem, plan: Plan) -> int:
    """Bytes of dynamic shared memory of one CTA under a plan; -1 where no kernel runs it.

    Weights of a decode kernel are taken to have real zero points: a plan holds for both.
    """
    zeros = not p.plain if plan.kernel in PREFILL else True
    dtype = "float32" if p.wide else "float16"
    return native.plan_shared_bytes(
        p.n, p.k, p.m, p.group_size, zeros, p.act_bits, dtype, p.quantized, p.device.arch, plan
    )


def most_stages(p: Problem, plan: Plan, most: int, *, step: int = 1, beside: int = 0) -> Plan:
    """The plan with as many stages as fit, ``most`` at most, a multiple of ``step``.

    Args:
        beside: bytes of the multiprocessor's shared memory to leave for other kernels' CTAs.

    Raises:
        ValueError: no kernel runs the plan, or not even three stages fit.
    """
    room = shared_limit(p.device.arch) - beside
    for stages in range(most // step * step, 2, -step):
        tried = plan._replace(stages=stages)
        if 0 <= shared_bytes(p, tried) <= room:
            return tried
    raise ValueError(f"no kernel runs {plan} for {p}, or not three stages of it fit {room} bytes of shared memory")
