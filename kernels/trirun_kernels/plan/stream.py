"""How the stream kernel divides a product among warps and CTAs: a pure function of the problem, from times on an H200.

No model of cycles ranks these plans well enough: who is resident beside whom, and when the next kernel's CTAs come,
counts as much as work does. So there are classes of weights, by strips for every multiprocessor and by k, with the plan
of each that was fastest, or nearly so, in the class's measured shapes (19 in all, scales per channel and of groups of
128, up to 380 plans each: kernels/README.md).
"""

from __future__ import annotations

from typing import NamedTuple

STRIP = 64  # out_features that stream together


class Stream(NamedTuple):
    """``warps`` of a CTA, of which ``split`` share a strip along k; CTAs of a cluster that share it too; stages of a
    warp's ring; CTAs for every multiprocessor; whether x is quantized in the prologue."""

    warps: int
    split: int
    ctas: int
    stages: int
    per_sm: int
    fused: bool = False


# For x too large for the shared memory of the others.
SMALLER = [Stream(8, 8, 1, 2, 1), Stream(8, 4, 2, 2, 1), Stream(8, 2, 4, 2, 1), Stream(8, 1, 8, 2, 1)]
SMALLER += [Stream(4, 4, 1, 2, 1), Stream(4, 2, 4, 2, 1), Stream(4, 1, 8, 2, 1)]


def stream_plans(
    n: int, k: int, m: int, act_bits: int, sms: int, *, grouped: bool, ready: bool, clusters: bool = True
) -> list[Stream]:
    """Plans, best first: the first that fits is to be taken.

    Args:
        n, k: padded sizes of the stored weight. m: rows of x. act_bits: 8 or 16. sms: multiprocessors.
        grouped: scales per group of columns. ready: x comes quantized.
        clusters: CTAs of a cluster add their sums in shared memory; without, in the workspace, for twice the time.
    """
    strips = n // STRIP
    if act_bits == 8:
        here = [] if ready else _one_digit_here(strips, k, m, sms)
        best = [*here, *_one_digit(strips, k, m, sms, ready)]
    elif 2 * strips <= sms:
        best = _few(strips, k, m, sms, grouped, ready)
    elif strips <= sms:
        best = _one_each(strips, k, m, sms, grouped, ready)
    elif strips <= 2 * sms:
        best = _two_each(strips, k, m, sms, grouped, ready)
    else:
        best = _many(strips, k, m, sms, grouped, ready)
    return [*best, *SMALLER] if clusters else [*map(_alone, best), SMALLER[0], *best, *SMALLER]


def _alone(plan: Stream) -> Stream:
    """The plan with the warps of a CTA where it has CTAs of a cluster."""
    if plan.ctas == 1:
        return plan
    warps = max(8, plan.warps)
    per_sm = (plan.per_sm * plan.warps + 4) // 8 if plan.warps < 8 else plan.per_sm
    return Stream(warps, min(plan.split * plan.ctas, warps), 1, plan.stages, per_sm, plan.fused)


def _few(strips: int, k: int, m: int, sms: int, grouped: bool, ready: bool) -> list[Stream]:
    """Two multiprocessors and more for every strip."""
    pairs = Stream(8, 8, 2, 2, 1)
    if m > 4:
        if k >= 8192:
            return [Stream(8, 4, 4, 4, 1), pairs] if k >= 16384 else [pairs]
        return [Stream(4, 4, 2, 6, 2) if ready and k < 6144 else Stream(8, 8, 2, 6, 1)]
    very_few = 4 * strips <= sms
    if k < 6144:
        if ready:
            return [Stream(8, 8, 1, 6, 1) if grouped and not very_few else Stream(4, 4, 2, 4, 1)]
        if m <= 2 and k < 4096:
            return [Stream(4, 2, 4, 4, 2, True)]
        if m <= 2 and (very_few or (m == 1 and not grouped)):
            return [Stream(8, 8, 2, 4, 2, True)]
        return [Stream(8, 8, 1, 6, 1)]
    if ready:
        if k < 8192:
            return [Stream(8, 8, 2, 6, 1)]
        if m > 2:
            return [Stream(4, 4, 4, 4, 2), pairs] if k < 16384 else [pairs]
        return [Stream(4, 4, 4, 6, 2), pairs] if grouped or k >= 16384 else [pairs]
    if m == 1:
        return [Stream(8, 8, 2, 6, 1) if grouped and k >= 12288 else Stream(8, 4, 4, 4, 2, True)]
    if m == 2:
        return [Stream(16, 16, 1, 2, 1) if 17 * strips >= 8 * sms else Stream(8, 8, 2, 6, 1)]
    if k < 8192:
        return [Stream(8, 8, 2, 6, 1)]
    return [Stream(4, 4, 4, 3, 3) if 12288 <= k < 16384 and not grouped else Stream(8, 8, 2, 4, 1)]


def _one_each(strips: int, k: int, m: int, sms: int, grouped: bool, ready: bool) -> list[Stream]:
    """A multiprocessor, or nearly two, for every strip."""
    if k >= 16384:
        if m <= 2:
            return [Stream(8, 8, 1, 6, 1), Stream(8, 8, 1, 4, 1)]
        return [Stream(8, 4, 2, 6, 1), Stream(8, 4, 2, 4, 1)] if m <= 4 else [Stream(16, 2, 4, 2, 1)]
    if k >= 8192:
        if m <= 2:
            return [Stream(16, 16, 1, 2, 1, not ready and m == 1 and k < 12288)]
        alone = Stream(8, 8, 1, 3 if m <= 4 else 2, 1)
        if k >= 12288:
            return [Stream(4, 4, 4, 3, 3) if m <= 4 else Stream(8, 4, 4, 2, 2), alone]
        return [alone]
    if m > 4:
        if ready:
            return [Stream(8, 8, 1, 6 if k < 4096 else 2, 1)]
        return [Stream(8, 8, 1, 4 if k < 5120 else 2, 1)]
    if not ready and m == 1 and grouped:
        return [Stream(8, 8, 1, 6, 1, True) if k >= 5120 else Stream(8, 8, 1, 4, 2, True)]
    if not ready and (m == 1 or (m == 2 and k < 4096)):
        alone = Stream(16, 16, 1, 2, 1, True)
        return [Stream(8, 2, 4, 4, 1, True), alone] if 3 * strips > 2 * sms else [alone]
    if ready and not grouped:
        return [Stream(8, 8, 1, 4, 1)]
    return [Stream(8, 8, 1, 3 if m > 2 and not grouped and 4 * strips > 3 * sms else 6, 1)]


def _two_each(strips: int, k: int, m: int, sms: int, grouped: bool, ready: bool) -> list[Stream]:
    """One or two strips for every multiprocessor."""
    if m > 4:
        wide = [Stream(8, 4, 2, 2, 2), Stream(8, 2, 4, 2, 2)]
        if 2 * strips > 3 * sms:
            return wide
        return [Stream(4, 2, 4, 3, 3) if k >= 8192 else Stream(4, 4, 2, 3, 3), *wide]
    quad = [Stream(8, 2, 4, 2, 2, True)] if m == 1 and not ready and grouped and k >= 4096 else []
    return [*quad, Stream(8, 8, 1, 2, 2, not ready and ((m == 1 and k < 5120) or (m == 2 and k < 2048)))]


def _many(strips: int, k: int, m: int, sms: int, grouped: bool, ready: bool) -> list[Stream]:
    """More than two strips for every multiprocessor."""
    huge, wide = strips > 6 * sms and k >= 8192, strips > 3 * sms
    if m > 4:
        if k >= 8192:
            return [Stream(16, 1 if huge else 2, 2, 2, 1)]
        return [Stream(8, 2, 2, 2, 2) if wide else Stream(4, 2, 2, 3, 3)]
    if m > 2:
        if huge:
            return [Stream(16, 4, 1, 2, 1)]
        return [Stream(8, 4, 1, 3, 2) if wide else Stream(4, 4, 1, 3, 3), Stream(16, 4, 1, 4, 1)]
    if huge and ready:
        return [Stream(8, 2, 2, 4, 2)]
    if huge and (m == 2 or grouped):
        return [Stream(8, 2, 1, 2, 2)]
    if m == 1 and not ready and k >= 8192:
        return [Stream(8, 2, 2, 6, 2, True), Stream(8, 2, 2, 4, 2, True)]
    quad = [Stream(8, 1, 4, 3, 2, True)] if m == 2 and not ready and grouped else []
    return [*quad, Stream(8, 4, 1, 3, 2, not ready and m == 1)]


def _one_digit_here(strips: int, k: int, m: int, sms: int) -> list[Stream]:
    """8-bit activations quantized in the prologue, where every CTA copies whole rows of x for their largest values: one
    row, two of small weights, four of very small ones. Empty where a kernel that quantizes apart is as fast."""
    if m > 4 or k >= 12288:
        return []
    if 8 * strips <= sms and k < 6144:
        return [Stream(4, 4, 4, 4, 2, True) if m == 1 else Stream(8, 4, 4, 4, 2, True)]
    if m > 2:
        return []
    if k < 4096 and strips <= sms:
        if m == 1 and 3 * strips > 2 * sms:
            return [Stream(8, 4, 1, 4, 2, True)]
        return [Stream(8, 8, 1, 6, 1, True)]
    if k >= 6144:
        return [Stream(8, 8, 2, 6, 1, True)] if 3 * strips <= sms and m == 1 else []
    if strips <= sms:
        if m == 2:
            return [Stream(8, 4, 2, 6, 1, True)]
        return [Stream(8, 8, 2, 6, 1, True) if 2 * strips <= sms else Stream(8, 8, 1, 6, 1, True)]
    if m == 2:
        return []
    return [Stream(8, 8, 1, 3, 2, True) if strips <= 2 * sms else Stream(8, 4, 1, 4, 2, True)]


def _one_digit(strips: int, k: int, m: int, sms: int, ready: bool) -> list[Stream]:
    """8-bit activations that come quantized, or from a kernel that quantizes them."""
    if m > 8 and strips <= sms:
        if 2 * strips <= sms and k >= 6144:
            return [Stream(8, 8, 2, 2, 1)]
        if ready:
            return [Stream(8, 8, 1, 2, 1) if k >= 8192 else Stream(4, 4, 2, 4, 2)]
        return [Stream(8, 8, 2, 4, 1) if k < 4096 else Stream(8, 8, 1, 2, 1)]
    if 2 * strips <= sms:
        few = 3 * strips <= sms
        if few and m > 2 and k >= 8192:
            return [Stream(8, 8, 2, 4, 1)]
        if not ready:
            if m <= 4:
                return [Stream(8, 8, 1, 6, 1)]
            if k >= 12288:
                return [Stream(8, 8, 2, 2, 1)]
            return [Stream(8, 8, 2, 6, 1) if few else Stream(8, 8, 1, 4, 1)]
        if k >= 16384 or (k >= 12288 and m > 4):
            return [Stream(8, 8, 2, 2, 1)]
        if m <= 2 and k >= 8192:
            return [Stream(8, 8, 2, 6, 1)]
        if m <= 2:
            return [Stream(8, 8, 1, 3, 1) if few and 4 * strips > sms else Stream(4, 4, 2, 4, 1)]
        return [Stream(4, 4, 2, 6, 2) if m <= 4 else Stream(8, 8, 1, 4, 1)]
    if strips <= sms:
        if m > 4:
            return [Stream(8, 4, 2, 4, 1) if k >= 16384 else Stream(8, 8, 1, 4, 1)]
        if not ready and 6144 <= k < 12288:
            return [Stream(4, 4, 2, 6, 2)]
        if not ready or (k >= 16384 and m <= 2):
            return [Stream(8, 8, 1, 6, 1)]
        if m > 2:
            return [Stream(8, 8, 1, 3, 1)]
        if k >= 12288:
            return [Stream(16, 16, 1, 2, 1)]
        return [Stream(8, 4, 2, 6, 1) if 4 * strips > 3 * sms else Stream(4, 4, 2, 6, 2)]
    if strips <= 2 * sms:
        if m <= 4:
            return [Stream(8, 8, 1, 2, 2)]
        return [Stream(8, 8, 1, 3, 2) if k < 8192 else Stream(4, 4, 2, 3, 3)]
    if m <= 4:
        return [Stream(8, 4, 1, 3, 2)]
    if strips > 6 * sms and k >= 8192:
        return [Stream(16, 1, 2, 2, 1)]
    return [Stream(8, 2, 2, 2, 2) if strips > 3 * sms else Stream(4, 4, 1, 3, 3), Stream(16, 4, 1, 2, 1)]
