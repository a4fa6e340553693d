"""Which CUDA kernel computes a product, with which tile: a pure function of the problem and the device.

The numbers are in ``tables``, measured on an H200 (kernels/README.md); other devices get the same shape of decision
scaled by their multiprocessors.
"""

from __future__ import annotations

from functools import lru_cache

from ..native import limits
from .groups import choose_groups
from .prefill import choose_prefill, has_int8_tiles, prefill_choices
from .problem import DEQUANTIZE, Device, Plan, Problem
from .spans import choose_fused_spans, choose_spans, kind, span_choices, whole_parts
from .stream import choose_stream
from .table import table


@lru_cache(maxsize=1 << 14)  # prefill's choices take 0.1 ms to compare
def select(
    n: int,
    k: int,
    m: int,
    group_size: int,
    act_bits: int,
    device: Device,
    *,
    quantized: bool = False,
    wide: bool = False,
    apart: bool = False,
    plain: bool = True,
    dense: bool = False,
) -> Plan:
    """The kernel for y[m, n] = x[m, k] · wᵀ; arguments as in :class:`.problem.Problem`.

    Raises:
        ValueError: the device is older than any kernel, or x must stay on the decode kernels and is too large for them.
        NativeError: libtrirun_cuda.so, which knows what fits its kernels, is not built.
    """
    p = Problem(n, k, m, group_size, act_bits, device, quantized, wide, apart or wide, plain, dense)
    if device.arch < 80:
        raise ValueError(f"the CUDA kernels need compute capability 8.0 or newer, this device has {device.arch / 10}")
    if quantized and m > limits().decode_rows:
        raise ValueError(f"quantized activations of {m} rows: the decode kernels take at most {limits().decode_rows}")
    limit = _decode_limit(p)
    plan = _decode(p) if m <= limit else None
    if plan is not None:
        return plan
    if quantized or wide:
        most = "" if m <= limit else f": it takes at most {limit} rows"
        raise ValueError(f"{m} rows of k={k} do not fit a decode kernel of compute capability {device.arch / 10}{most}")
    return Plan(DEQUANTIZE) if dense and _gains_from_dense(p) else choose_prefill(p)


def _decode_limit(p: Problem) -> int:
    """Rows of x that a decode kernel takes: two tensor-core tiles of columns without wgmma, and for small groups; with
    it, as far as limbs are faster than a prefill tile of 64 rows, which odd zero points do not have."""
    if p.device.arch == 90 and (not p.plain or p.quantized or p.wide):
        return limits().decode_rows
    if p.device.arch == 90 and p.group_size in (-1, limits().k_tile):
        return table("choice")["span_rows"]
    return 16 // p.limbs


def _decode(p: Problem) -> Plan | None:
    """None where no decode kernel takes the product, or prefill's smallest tile is faster."""
    hopper, columns, given = p.device.arch == 90, p.m * p.limbs, p.quantized or p.wide
    # A span shares one scale of x: only where this call quantizes it, and float32 is not to show it.
    shares_scales = p.act_bits == 16 and p.group_size in (-1, limits().k_tile) and not given
    fuses = shares_scales and not p.apart
    if hopper and p.m == 8 and fuses:
        plan = choose_fused_spans(p)
        if plan is not None:
            return plan
    wgmma = hopper and columns > 8
    if not wgmma or (columns <= 16 and not _leaves_mma(p)):
        plan = choose_stream(p)
        if plan is not None or not wgmma:
            return plan
    if not _has_spans(p):
        return choose_groups(p)
    plan = choose_spans(p, fuses=fuses)
    int8 = p.m > 16 and has_int8_tiles(p) and not given
    compared = (shares_scales or int8) and p.plain and not plan.fused
    return plan if not compared or _spans_beat_prefill(p) else None


def _has_spans(p: Problem) -> bool:
    """Whether the per-span kernel takes the product: one limb has one scale per row anyway."""
    if p.grouped:
        return p.group_size == limits().k_tile and p.act_bits == 16 and not p.quantized
    return p.act_bits == 8 or not (p.quantized or p.wide)


def _leaves_mma(p: Problem) -> bool:
    """Whether a weight takes wgmma for more than 8 columns of limbs although mma.sync has 16: the per-span kernel
    earlier than the per-group one, earlier still where few of its CTAs share a tile. Rows of x too long for the shared
    memory of few CTAs do, unless the weight has few n tiles, which more CTAs share anyway."""
    bounds = table("choice")
    few = 2 * p.n_tiles <= p.device.sms
    too_long = p.k >= bounds["long_k"] and not few
    if not _has_spans(p):
        if p.act_bits == 16 and p.group_size in (-1, limits().k_tile):
            return too_long
        return p.weights >= bounds["large_weight"] or p.k >= bounds["long_k"]
    if p.act_bits == 8:
        return not (few or (p.quantized and p.n_tiles <= p.device.sms and p.k < bounds["long_k_spans"]))
    if too_long or p.weights >= bounds["large_weight_spans"] or (p.k >= bounds["long_k_spans"] and not few):
        return True
    eight = p.with_rows(8)
    _, tile = min(span_choices(eight))
    shared = tile.rows < limits().tile_rows or 0 < whole_parts(eight, tile.ctas) <= 2
    return shared and p.weights >= bounds["shared_weight_spans"][kind(p)]


def _spans_beat_prefill(p: Problem) -> bool:
    """Whether the per-span kernel is faster than prefill's tiles, by what both take for the fewest cycles."""
    spans, tile = min(span_choices(p))
    name = "int8" if p.limbs == 1 else kind(p)
    if p.grouped and tile.width == 64:
        name = "group_128_one_slice"
    ns = table("choice")["spans_or_prefill"][name]
    return ns["fixed"] + ns["span"] * spans <= ns["prefill"] * min(prefill_choices(p))[0]


def _gains_from_dense(p: Problem) -> bool:
    """Whether a library's product on the dense weight is faster: scales of more than one factor a fragment, and rows
    that pay for making it."""
    scaled = p.grouped and (p.group_size == 32 or not p.plain)
    least = table("choice")["dense"]
    large = p.m >= least["rows"] and p.weights <= least["weights"]
    return p.device.arch == 90 and p.act_bits == 16 and scaled and large
