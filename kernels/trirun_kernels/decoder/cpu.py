"""The native decoder on the CPU: a whole forward step, or a whole generation, in one call of the library.

:mod:`trirun_kernels.decoder.reference` is its reference.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..arrays import Array
from ..native import BAD_SHAPE, DTYPES, NO_WORKSPACE, UNSUPPORTED, check_cpu, cpu_error
from ..native import cpu as library
from .shape import GatedDelta
from .structs import DeltaLayerStruct, DrawStruct, LayerStruct, SegmentStruct, decoder_struct, layer_struct
from .weights import DecoderWeights, Int8Head

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """``count`` consecutive tokens of one slot, the first of them at ``position``."""

    slot: int
    position: int
    count: int


def padded_context(positions: int) -> int:
    """Positions that a cache of at least ``positions`` holds: the library keeps keys in blocks.

    Raises:
        NativeError: the CPU library is not built.
    """
    return library().trirun_cpu_decoder_context(positions)


class CpuDecoder:
    """A model with its key-value cache and working memory, ready to run step by step.

    Args:
        weights: the model; its tensors are used in place and kept alive.
        slots: sequences the cache holds. context: positions of each, see :func:`padded_context`.
        act_bits: 16 or 8, the width at which linears read activations (the head always reads float32).
        kv_dtype: of the cache, "float16" or "float32".
        max_rows: most tokens of one step; working memory grows with it.
        threads: of the library's pool.

    Raises:
        ValueError: a tensor's shape, dtype, device or layout does not fit. NativeError: the library is missing.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        slots: int = 1,
        context: int,
        act_bits: int = 16,
        kv_dtype: str = "float16",
        max_rows: int = 192,
        threads: int,
    ) -> None:
        if min(slots, context, max_rows, threads) < 1:
            raise ValueError(f"decoder: slots={slots}, context={context}, max_rows={max_rows}, threads={threads}")
        context = padded_context(context)
        weights.check(context)
        if act_bits not in (8, 16) or kv_dtype not in ("float16", "float32"):
            raise ValueError(f"decoder: act_bits={act_bits}, kv_dtype={kv_dtype}")
        self._library = library()
        self._weights, self.shape, self.threads = weights, weights.shape, threads
        self.slots, self.context, self.max_rows = slots, context, max_rows
        # A layer that sees a window keeps that much, and room for the rows of a step, which are all stored first.
        held = ((window or context) + max_rows for window in weights.shape.windows)
        self._contexts = [min(context, padded_context(positions)) for positions in held]
        each = zip(weights.layers, self.shape.layers, self._contexts, strict=True)
        layers = (LayerStruct * len(weights.layers))(*(layer_struct(*parts, weights) for parts in each))
        self._struct = decoder_struct(weights, layers, slots, context, act_bits, kv_dtype)
        pointer = ctypes.byref(self._struct)
        cached = self.shape.cached
        sizes = [self._library.trirun_cpu_decoder_cache_bytes(pointer, index) for index in cached]
        work = self._library.trirun_cpu_decoder_workspace(pointer, max_rows)
        if not all(sizes) or not work:
            raise ValueError(f"decoder: the CPU library cannot run {weights.shape}")
        # Small pages: a cache for many long sequences costs what the sequences that are there need.
        self._cache = tuple(Array.anonymous(sum(sizes), "MADV_NOHUGEPAGE") for _ in range(2)) if sizes else ()
        self._offsets = [0, *accumulate(sizes)]
        for index, offset in zip(cached, self._offsets, strict=False):
            layers[index].keys, layers[index].values = (cache.address + offset for cache in self._cache)
        for layer, source in zip(layers, (each.mixer.shared_with for each in self.shape.layers), strict=True):
            if source is not None:
                layer.keys, layer.values = layers[source].keys, layers[source].values
        self._states = [
            _place_states(layer.delta.contents, shape.mixer, slots)
            for layer, shape in zip(layers, self.shape.layers, strict=True)
            if isinstance(shape.mixer, GatedDelta)
        ]
        self._workspace = Array.anonymous(work, "MADV_HUGEPAGE")
        self._segments = (SegmentStruct * slots)()

    @property
    def can_rewind(self) -> bool:
        """Whether a slot can forget its last tokens: no layer's cache is shorter than the context, and none keeps a
        state in its place."""
        return min(self._contexts) == self.context and not self._states

    @property
    def cache_bytes(self) -> int:
        """Bytes reserved for keys, values and states of all slots."""
        return sum(part.nbytes for part in (*self._cache, *(part for parts in self._states for part in parts)))

    def step(self, segments: Sequence[Segment], tokens: Tensor, logit_rows: Tensor) -> Tensor:
        """:meth:`run` on torch tensors: tokens int64 [m], logit_rows int64 [l] → float32 [l, vocab]."""
        import torch

        logits = torch.empty(logit_rows.numel(), self.shape.vocab)
        self.run(segments, Array.of(tokens), Array.of(logit_rows), Array.of(logits))
        return logits

    def run(self, segments: Sequence[Segment], tokens: Array, rows: Array, out: Array, *, states: bool = False) -> None:
        """Run tokens and append them to the cache.

        Args:
            segments: whose tokens they are, in order of ascending slots, each slot at most once.
            tokens: int64 [m], the segments' one after another; m at most ``max_rows``.
            rows: int64 [l], which of the m rows to return logits of.
            out: float32 [l, vocab], written: logits. A row's are the same bit for bit whatever else is in the batch,
                however its sequence is split into steps, and for any number of threads.
            states: ``out`` [l, hidden] is rather what the head would read: the rows after the last norm.

        Raises:
            ValueError: tokens, slots or positions are out of range. NativeError: memory has run out.
        """
        (count,), (wanted,) = tokens.shape, rows.shape
        if count > self.max_rows or len(segments) > self.slots:
            made = f"made for {self.max_rows} and {self.slots}"
            raise ValueError(f"decoder step: {count} rows in {len(segments)} segments, {made}")
        if tokens.dtype != "int64" or rows.dtype != "int64":
            raise ValueError(f"decoder step: tokens are {tokens.dtype}, rows {rows.dtype}, not int64")
        width = self.shape.hidden if states else self.shape.vocab
        if out.dtype != "float32" or out.shape != (wanted, width):
            raise ValueError(f"decoder step: outputs are {out.dtype} {list(out.shape)}, not float32 {[wanted, width]}")
        for struct, segment in zip(self._segments, segments, strict=False):
            struct.slot, struct.position, struct.count = segment.slot, segment.position, segment.count
        call = self._library.trirun_cpu_decoder_states if states else self._library.trirun_cpu_decoder_step
        code = call(
            ctypes.byref(self._struct),
            self._segments,
            len(segments),
            tokens.address,
            count,
            rows.address,
            wanted,
            out.address,
            self._workspace.address,
            self._workspace.nbytes,
            self.threads,
        )
        if code:
            self._fail(code, f"step of {count} rows, {list(segments)}")

    def generate(
        self,
        slots: Sequence[int],
        positions: Sequence[int],
        tokens: Sequence[int],
        steps: int,
        stop: Sequence[int],
        out: Array,
        logits: Array,
        draws: Sequence[DrawStruct] = (),
    ) -> int:
        """Decode in one native call: every step's tokens are chosen from the logits of the one before.

        Args:
            slots, positions, tokens: of each sequence the slot, ascending, the next position and the token there.
            steps: most steps to make; a step that brings a token of ``stop`` is the last.
            out: int64 [steps, sequences], written; -1 says that a row of logits held no number, and ends the call too.
            logits: float32 [sequences, vocab], those of the last step, written.
            draws: how each sequence's tokens are drawn; where there are none, the largest logits win, the first of
                equals.

        Returns:
            how many steps were made.

        Raises:
            ValueError: tokens, slots, positions or a draw's parameters are out of range. NativeError: memory has run
                out.
        """
        count = len(slots)
        if not 0 < count <= min(self.slots, self.max_rows) or steps < 1 or len(draws) not in (0, count):
            raise ValueError(f"decoder generate: {count} sequences, {steps} steps, made for {self.slots} slots")
        if out.dtype != "int64" or out.shape != (steps, count) or logits.shape != (count, self.shape.vocab):
            raise ValueError(f"decoder generate: out is {out.dtype} {list(out.shape)}, logits {list(logits.shape)}")
        for struct, slot, position in zip(self._segments, slots, positions, strict=False):
            struct.slot, struct.position, struct.count = slot, position, 1
        done = ctypes.c_int64(0)
        code = self._library.trirun_cpu_decoder_generate(
            ctypes.byref(self._struct),
            self._segments,
            count,
            (ctypes.c_int64 * count)(*tokens),
            steps,
            (DrawStruct * count)(*draws) if draws else None,
            (ctypes.c_int64 * len(stop))(*stop),
            len(stop),
            out.address,
            ctypes.byref(done),
            logits.address,
            self._workspace.address,
            self._workspace.nbytes,
            self.threads,
        )
        if code:
            self._fail(code, f"generate: {count} sequences at {list(positions)}, {steps} steps")
        return done.value

    def products(self, steps: int, *, apart: bool) -> None:
        """The products and the head of ``steps`` decoding steps on inputs made beforehand, and nothing else: the
        bound of decoding. ``apart``: one call after another; otherwise in one parallel region without barriers.

        Raises:
            ValueError: steps is not positive. NativeError: memory has run out.
        """
        code = self._library.trirun_cpu_decoder_products(ctypes.byref(self._struct), steps, apart, self.threads)
        if code:
            self._fail(code, f"products of {steps} steps")

    def _fail(self, code: int, what: str) -> NoReturn:
        if code == UNSUPPORTED:
            raise ValueError(f"decoder {what}: a draw's parameters are out of range")
        if code == BAD_SHAPE:
            raise ValueError(
                f"decoder {what}: out of range for a vocabulary of {self.shape.vocab}, {self.slots} slots of "
                f"{self.context} positions"
            )
        raise cpu_error(code, f"decoder {what}")

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the keys and values of a slot's first ``length`` positions to another slot.

        Raises:
            ValueError: a slot or the length is out of range, or :attr:`can_rewind` is false.
        """
        there = 0 <= source < self.slots and 0 <= target < self.slots and 0 <= length <= self.context
        if not there or not self.can_rewind:
            raise ValueError(f"decoder: {length} positions of slot {source} to {target}, of {self.slots} slots")
        whole = padded_context(length)
        for cache in self._cache:
            memory = np.frombuffer(cache.owner, np.uint8)
            for mixer, (first, last) in zip(self.shape.cached.values(), pairwise(self._offsets), strict=True):
                # [slots, kv_heads, context, bytes]: a block's positions lie together whatever their order.
                part = memory[first:last].reshape(self.slots, mixer.kv_heads, self.context, -1)
                part[target, :, :whole] = part[source, :, :whole]


def quantize_head(head: Any, out: Int8Head, threads: int) -> Int8Head:
    """A head [vocab, hidden] in 8 bits: the nearest of 255 levels between a row's ±max.

    Args:
        head: float16, bfloat16 or float32, contiguous, hidden a multiple of 16. out: where to put it.
        threads: of the library's pool.

    Returns:
        ``out``.

    Raises:
        ValueError: a shape or dtype does not fit. NativeError: memory has run out.
    """
    source = Array.of(head)
    n, k = source.shape
    if source.dtype not in DTYPES or k % 16:
        raise ValueError(f"quantize_head: {source.dtype} {[n, k]}")
    out.check(n, k)
    code = library().trirun_cpu_head_int8(
        source.address, DTYPES[source.dtype], n, k, out.rows.data_ptr(), out.scales.data_ptr(), threads
    )
    check_cpu(code, f"quantize_head of {[n, k]}")
    return out


def draw(logits: Array, how: DrawStruct) -> int:
    """A token drawn from logits, float32 [vocab]; -1 where none is a number. The temperature must not be 0.

    Raises:
        ValueError: the parameters are out of range, or the logits of another type. NativeError: memory has run out.
    """
    token = ctypes.c_int64()
    (vocab,) = logits.shape
    code = UNSUPPORTED
    if logits.dtype == "float32":
        code = library().trirun_cpu_draw(logits.address, vocab, ctypes.byref(how), ctypes.byref(token))
    if code == NO_WORKSPACE:
        raise cpu_error(code, f"draw from {vocab} logits")
    if code:
        parameters = {field[0]: getattr(how, field[0]) for field in how._fields_}
        raise ValueError(f"draw from {vocab} logits of {logits.dtype}: {parameters}")
    return token.value


def _place_states(struct: DeltaLayerStruct, shape: GatedDelta, slots: int) -> tuple[Array, Array]:
    """Memory for the states and the rings of a layer, of whose addresses the structure is told."""
    state = Array.anonymous(4 * slots * shape.state_size, "MADV_HUGEPAGE")
    ring = Array.anonymous(4 * slots * shape.taps * shape.channels, "MADV_NOHUGEPAGE")
    struct.state, struct.ring = state.address, ring.address
    return state, ring
