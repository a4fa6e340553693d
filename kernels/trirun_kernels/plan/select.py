"""Which CUDA kernel computes a product, with which tile: a pure function of the problem and the device.

Every number in here was measured on an H200 (kernels/README.md has the tables); other devices get the same shape of
decision scaled by their multiprocessors.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from .prefill import CLUSTERS, EARLY, prefill_choices, prefill_tile
from .spans import RUN, TILE, UNIT, cluster_of, equal_shares, fused_tile, runs_tile, whole_parts
from .stream import SMALLER, STRIP, stream_plans

# TRIRUN_KERNEL_* of csrc/trirun.h
STREAM, STREAM_SM80, COLUMNS, PREFILL_WGMMA, PREFILL_SM80, PREFILL_W2A8, DEQUANTIZE, RUNS = range(1, 9)
PREFILL = (PREFILL_WGMMA, PREFILL_SM80, PREFILL_W2A8)
DECODE_ROWS = 64  # rows of x a decode kernel takes at most
LARGE = 1 << 28  # weights, 64 MiB of words
LONG = 1 << 14  # columns of x
LARGE_RUNS, LONG_RUNS = 5 << 24, 3 << 12  # weights, columns of x: for the kernel of runs
DENSE_ROWS = 2048  # rows of x from which a library's product on the dense weight beats groups of 32, or zero points
# k over which int32 sums of codes times one digit cannot overflow (csrc/cuda/gemm_decode/stream_tile.cuh)
EXACT_SUM = 87296
SHARED_MEMORY = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}  # KiB one CTA may have; 99 elsewhere


@dataclass(frozen=True, slots=True)
class Device:
    """What the choice depends on: ``arch``, 10 · major + minor of the compute capability, and its multiprocessors."""

    arch: int
    sms: int


@dataclass(frozen=True, slots=True)
class Plan:
    """``trirun_cuda_plan`` of csrc/trirun.h, field by field; 0 where a kernel does not use one."""

    kernel: int
    tile_m: int = 0
    tile_n: int = 0
    warps: int = 0
    warp_split: int = 0
    cta_split: int = 0
    stages: int = 0
    ctas: int = 0
    fused: int = 0
    early: int = 0
    x_first: int = 0


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
    """The kernel for y[m, n] = x[m, k] · wᵀ.

    Args:
        n, k: padded sizes of the stored weight (multiples of 64 and 128).
        m: rows of x, at least 1.
        group_size: -1, 32, 64 or 128. act_bits: 8 or 16.
        quantized: x comes from ``trirun::quantize_activations``; such a product stays on the decode kernels.
        plain: the zero point is one number in quarters, which is exact beside the codes (prefill).
        dense: the caller can multiply by a dense weight itself; only then is the answer ever DEQUANTIZE.
        wide: x is float32, which only the decode kernels keep exact (more rows than they take run in pieces).
        apart: x cannot be read by vectors (:func:`.cuda.reads_vectors`): a kernel of its own must quantize it.

    Raises:
        ValueError: the device is older than any kernel, or x must stay on the decode kernels and is too large for them.
    """
    if device.arch < 80:
        raise ValueError(f"the CUDA kernels need compute capability 8.0 or newer, this device has {device.arch / 10}")
    if quantized and m > DECODE_ROWS:
        raise ValueError(f"quantized activations of {m} rows: the decode kernels take at most {DECODE_ROWS}")
    # Without wgmma, and for small groups, up to two tensor-core tiles of columns; with it, as far as digits are faster
    # than a prefill tile of 64 rows, which odd zero points do not have.
    limit = 16 if act_bits == 8 else 8
    if device.arch == 90:
        if not plain or quantized or wide:
            limit = DECODE_ROWS
        elif group_size in (-1, UNIT):
            limit = 32
    if m <= limit or quantized or wide:
        fits = m <= limit
        plan = _decode(n, k, m, group_size, act_bits, device, quantized, wide, apart or wide, plain) if fits else None
        if plan is not None:
            return plan
        if quantized or wide:
            most = "" if fits else f": it takes at most {limit} rows"
            capability = f"compute capability {device.arch / 10}"
            raise ValueError(f"{m} rows of k={k} do not fit a decode kernel of {capability}{most}")
    scaled = group_size != -1 and (group_size == 32 or not plain)  # by more than one factor a fragment
    if dense and scaled and act_bits == 16 and m >= DENSE_ROWS and n * k <= LARGE and device.arch == 90:
        return Plan(DEQUANTIZE)
    return _prefill(n, k, m, group_size, act_bits, device, plain)


def _decode(
    n: int, k: int, m: int, group_size: int, act_bits: int, device: Device, quantized: bool, wide: bool, apart: bool,
    plain: bool,
) -> Plan | None:  # fmt: skip
    """None where no decode kernel takes the product, or prefill's smallest tile is faster."""
    columns = m * (2 if act_bits == 16 else 1)
    # Large weights take wgmma a tile earlier: one copy of x for four strips is less traffic from L2, and long rows of x
    # need not fit the shared memory at once.
    runs_take = act_bits == 16 and group_size in (-1, UNIT) and not (quantized or wide)
    fuses = runs_take and not apart
    if m == 8 and fuses and device.arch == 90:
        plan = _fused_runs(n, k, m, device, grouped=group_size == UNIT)
        if plan is not None:
            return plan
    runs = group_size == -1 and (act_bits == 8 or not (quantized or wide))
    grouped = group_size == UNIT and act_bits == 16 and not quantized
    wgmma = device.arch == 90 and columns > 8
    if not wgmma or (columns <= 16 and not _heavy(n, k, group_size, act_bits, device, runs, grouped, quantized)):
        plan = _stream(n, k, m, group_size, act_bits, device, quantized, apart)
        if plan is not None or not wgmma:
            return plan
    # Units of 128 k that share a scale of x: where this call quantizes it, and float32 is not to show it.
    if runs or grouped:
        plan = _runs(n, k, m, act_bits, device, grouped=grouped, fuses=fuses)
        int8 = m > 16 and _has_int8_tiles(k, group_size, act_bits) and not (quantized or wide)
        compared = (runs_take or int8) and plain and not plan.fused
        return plan if not compared or _digits_win(n, k, m, device, grouped=grouped, int8=int8) else None
    return _columns(n, k, m, group_size, act_bits, device)


def _stream(
    n: int, k: int, m: int, group_size: int, act_bits: int, device: Device, quantized: bool, apart: bool
) -> Plan | None:
    """mma.sync, each warp with weights of its own; None where x fits no CTA."""
    grouped, clusters, room = group_size != -1, device.arch >= 90, SHARED_MEMORY.get(device.arch, 99)
    for stream in stream_plans(n, k, m, act_bits, device.sms, grouped=grouped, ready=quantized, clusters=clusters):
        if stream.ctas > max(1, k // UNIT):
            continue
        plan = Plan(
            STREAM if clusters else STREAM_SM80,
            warps=stream.warps,
            warp_split=min(stream.split, _floor_power(k // UNIT // stream.ctas)),
            cta_split=stream.ctas,
            stages=stream.stages,
            ctas=device.sms * stream.per_sm,
            fused=int(stream.fused and not apart),
        )
        shared = shared_bytes(n, k, m, group_size, act_bits, plan)
        if shared * stream.per_sm > room * 1024:
            continue
        # Clusters that find no room beside the others would wait for these to end.
        tiles = -(-n // STRIP // (plan.warps // plan.warp_split))
        held = min(16 // plan.warps, (room + 1) * 1024 // (shared + 1024))
        at_once = int(device.sms * CLUSTERS[stream.ctas]) * held
        if not clusters or stream in SMALLER or min(tiles, plan.ctas // stream.ctas) <= at_once:
            return plan
    return None


def _digits_win(n: int, k: int, m: int, device: Device, *, grouped: bool, int8: bool) -> bool:
    """Whether the kernel of runs is faster than prefill's tiles, by what both take for the fewest cycles: 0.67 ns of
    the former and 0.56 of the latter, and 1.7 us until x is quantized. Of groups 0.67 and 1.7, or 0.53 and 2.8 us where
    rows of x make one slice, and 0.58. Of 8-bit activations, which both quantize apart, 0.73 and 2 us, and 0.69."""
    digits, most = (1, EXACT_SUM // UNIT) if int8 else (2, k // UNIT)
    runs, width, *_ = runs_tile(n, k, m, digits, device.sms, most, grouped=grouped)
    group_size = UNIT if grouped else -1
    prefill = min(prefill_choices(n, k, m, device.sms, plain=True, int8=int8, group_size=group_size))[0]
    if int8:
        return 2000 + 0.73 * runs < 0.69 * prefill
    if grouped:
        return (2800 + 0.53 * runs if width == 64 else 1700 + 0.67 * runs) < 0.58 * prefill
    return 2500 + runs <= prefill / 1.2


def _heavy(
    n: int, k: int, group_size: int, act_bits: int, device: Device, runs: bool, grouped: bool, quantized: bool
) -> bool:
    """Whether a weight takes wgmma for more than 8 columns of digits although mma.sync has 16: by the kernel of runs
    earlier than by columns, earlier still where few of its CTAs share a tile. Rows of x too long for the shared memory
    of few CTAs do, unless the weight has few strips, which more CTAs share anyway."""
    few = 2 * n <= STRIP * device.sms
    too_long = k >= LONG and not few
    if not (runs or grouped):
        return too_long if act_bits == 16 and group_size in (-1, UNIT) else n * k >= LARGE or k >= LONG
    if act_bits == 8:
        return not (few or (quantized and n <= STRIP * device.sms and k < LONG_RUNS))
    if too_long or n * k >= LARGE_RUNS or (k >= LONG_RUNS and not few):
        return True
    plan = _runs(n, k, 8, act_bits, device, grouped=grouped)
    shared = plan.tile_n > 0 or 0 < whole_parts(n, k, plan.ctas) <= 2
    return shared and n * k * (16 if grouped else 8) >= LARGE


def shared_bytes(n: int, k: int, m: int, group_size: int, act_bits: int, plan: Plan) -> int:
    """Shared memory of one CTA of the stream kernel: x's digits and scales, exchange slots, ring, barriers. At least
    what launch_stream in csrc/cuda/gemm_decode/stream.cu asks for (real zeros are assumed)."""
    tokens = 1 if m == 1 and plan.fused else max(2, 1 << (m - 1).bit_length())
    digits, groups = (2 if act_bits == 16 else 1), 0 if group_size == -1 else UNIT // group_size
    units = -(-(k // UNIT) // plan.cta_split)
    x = units * tokens * (UNIT * digits + (24 if groups > 1 else 8))
    # A CTA that has more than one tile of strips receives the next one's sums while it still reads the last one's.
    tiles = -(-n // (STRIP * (plan.warps // plan.warp_split)))
    sets = 1 if tiles <= plan.ctas // plan.cta_split else 2
    slots = plan.warps * sets * STRIP * tokens * 4
    ring = plan.warps * plan.stages * (2048 + 256 * groups)
    rows = plan.fused * (act_bits == 8) * m * k * 2  # of x as they are: whole ones, for their largest values
    return x + rows + slots + ring + (1536 if act_bits == 8 else 1024)


def _columns(n: int, k: int, m: int, group_size: int, act_bits: int, device: Device) -> Plan:
    """wgmma on columns of digits, four strips a tile; all tiles' k is divided equally among the CTAs."""
    tokens = max(2, 1 << (m - 1).bit_length()) if m <= 16 else -(-m // 16) * 16
    columns = tokens * (2 if act_bits == 16 else 1)
    width = next(c for c in (16, 32, 64, 96, 128) if c >= columns and (c != 96 or act_bits == 16))
    groups = 0 if group_size == -1 else UNIT // group_size
    # Words, scales with zeros, digits, their scales and sums; beside the ring what two teams exchange. Each team has
    # every other stage: an even number.
    stage = 4 * 2048 + groups * 1024 + UNIT * width + 128 * -(-tokens * 8 // 128) + (groups > 1) * tokens * 16
    room = 227 * 1024 - 2048 - 1024 * width * 16 // act_bits * (width <= 32 or (width == 64 and act_bits == 16))
    stages = min(16 if width <= 32 else 8, room // (-(-stage // 128) * 128)) // 2 * 2
    ctas, early = equal_shares(n, k, device.sms, least=8), min(4, stages)
    return Plan(COLUMNS, stages=stages, ctas=ctas, early=early, x_first=early)


def _runs(n: int, k: int, m: int, act_bits: int, device: Device, *, grouped: bool = False, fuses: bool = False) -> Plan:
    """As :func:`_columns` for one scale per output channel or (grouped) per 128 columns of one: rows of x in slices,
    and CTAs equally many to every tile or equal shares that cross the tiles' borders. Where that is faster, and x such
    that it can (fuses), each CTA quantizes its columns of x itself."""
    fused = _fused_runs(n, k, m, device, grouped=grouped) if fuses else None
    if fused is not None:
        return fused
    digits = 2 if act_bits == 16 else 1
    _, width, ctas, tile = runs_tile(
        n, k, m, digits, device.sms, k // UNIT if digits == 2 else EXACT_SUM // UNIT, grouped=grouped
    )
    rows = width // digits
    # Words, digits and their scales; beside the ring eight warps' outputs. What is left of 228 KiB is for two CTAs of
    # the kernel that quantizes x, which wait beside this one.
    stage = tile * 32 + UNIT * width + 128 * -(-rows * 8 // 128) + 1024 * grouped
    # Weights asked for before x, or all at once with it, are in its way: few are, the fewer the shorter k. Of short
    # shares all may be on their way.
    parts = whole_parts(n, k, ctas) if tile == TILE else 1
    short = digits == 2 and not grouped and parts > 0 and k // UNIT <= 12 * parts
    most = 16 if short else 6 if grouped and tile == TILE else 10 if width == 16 and tile == TILE else 8
    stages = min(most, (224 * 1024 - 1792 - 8 * 80 * rows) // stage)
    early = 2 if k < 8192 and digits == 2 else 4
    pair, low = (cluster_of(n, k, ctas), 0) if tile == TILE else (0, tile)
    return Plan(RUNS, tile_m=width, tile_n=low, cta_split=pair, stages=stages, ctas=ctas, early=early, x_first=early)


def _fused_runs(n: int, k: int, m: int, device: Device, *, grouped: bool = False) -> Plan | None:
    """The kernel of runs where each CTA quantizes its columns of x itself, with stages of words beside them; None where
    a kernel that quantizes apart is as fast."""
    tile = fused_tile(n, k, m, device.sms, grouped=grouped)
    if tile is None:
        return None
    width, ctas = tile
    rows, share = width // 2, -(-n // TILE) * (k // UNIT) // ctas
    x = share * (UNIT // 16 * (rows * 32 + 16)) + (share if grouped else share // RUN + 2) * rows * 8 + 128
    stages = (227 * 1024 - x - 8 * 80 * rows - 2048) // (4 * 2048 + 1024 * grouped)
    # All words of a short share at once would be in the way of x; eight rows are there soon enough.
    most = 6 if share <= 8 and (width > 16 or grouped) else 16
    return Plan(RUNS, tile_m=width, cta_split=cluster_of(n, k, ctas), stages=min(most, stages), ctas=ctas, fused=1)


def _has_int8_tiles(k: int, group_size: int, act_bits: int) -> bool:
    """Of 8-bit activations: one scale per channel, two turns of 128 columns at least, sums that int32 holds."""
    return act_bits == 8 and group_size == -1 and 256 <= k <= 87040


def _prefill(n: int, k: int, m: int, group_size: int, act_bits: int, device: Device, plain: bool) -> Plan:
    if device.arch != 90:
        return Plan(PREFILL_SM80, tile_m=128)
    int8 = _has_int8_tiles(k, group_size, act_bits)
    tile = prefill_tile(n, k, m, device.sms, plain=plain, int8=int8, group_size=group_size)
    return Plan(
        PREFILL_W2A8 if int8 else PREFILL_WGMMA,
        tile_m=tile.tokens,
        tile_n=tile.rows,
        cta_split=tile.split,
        ctas=tile.ctas,
        early=EARLY,
    )


def _floor_power(v: int) -> int:
    return 1 << max(v, 1).bit_length() - 1
