"""Mixtures of experts on CUDA: routing and the products of all experts, without a word from the host.

Thin wrappers of csrc/cuda/experts. They launch on the current stream and can be captured in CUDA graphs;
:mod:`.reference` has their references.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..native import DTYPES, Int2Struct, check_cuda
from ..native import cuda as library
from ..weights.packing import PackedWeight
from ..weights.stacked_experts import StackedExperts
from .cuda_ops import GATE, rows
from .cuda_structs import CombineStruct, ExpertsStruct, RouteStruct, RowsStruct
from .reference import gated
from .shape import ACTIVATIONS, CLIPPED_SWIGLU, SCORES, Mixture, Routing

FEW_PAIRS, FEW_ROWS = 1024, 64  # that the router's own kernel sorts; of more rows cuBLAS multiplies faster
MANY_ROWS = 32  # rows of an expert from which on products of 16-bit values are faster than those of few rows
# Rows of an expert from which on its weights are made dense first, if those of all are no more numbers than that.
DENSE_ROWS, DENSE_WEIGHTS = 96, 2**28
SHARED_ROOM = 160 << 10  # bytes that a CTA of a tile may take, so that larger tiles do not cost what they gain


@dataclass(frozen=True, slots=True)
class Routes:
    """Which experts m rows go to. A pair is a row and one of its experts; sorted rows are pairs by expert.

    Attributes:
        weights: float32 [m, top_k]. ids: int32 [m, top_k], -1 where a row goes nowhere.
        places: int32 [m, top_k], the sorted row of a pair, or -1. order: int32 [m·top_k], the pair of a sorted row.
        tiles: int32 [bound, 4]: expert, first sorted row, rows; expert -1 beyond the last.
        ends: int32 [experts], where the sorted rows of an expert end.
        shared_weights: float32 [m], the sigmoid of the shared expert's gate, or None.
        tile_rows: sorted rows of a tile.
    """

    weights: Tensor
    ids: Tensor
    places: Tensor
    order: Tensor
    tiles: Tensor
    ends: Tensor
    shared_weights: Tensor | None
    tile_rows: int


def tile_bound(m: int, routing: Routing, tile_rows: int) -> int:
    """Tiles of m rows, at most."""
    return library().trirun_cuda_expert_tiles(m, routing.experts, routing.top_k, tile_rows)


def chosen_tile_rows(m: int, routing: Routing, k: int, act_bits: int) -> int:
    """Sorted rows of a tile: twice what an expert gets of m rows, at most eight columns of a matrix product.

    Args:
        k: the longest input of an expert's matrices, padded.
    """
    most, of_expert = 4 if act_bits == 16 else 8, m * routing.top_k // routing.experts
    if act_bits == 16 and of_expert >= MANY_ROWS:
        return 128 if of_expert >= 96 else 64
    wanted = min(m, max(4, 2 * of_expert), most)
    rows = 1 << (wanted - 1).bit_length()
    while rows > 1 and k * act_bits // 8 * rows > SHARED_ROOM:
        rows //= 2
    return rows


def route(
    routing: Routing, x: Tensor, router: Tensor, counter: Tensor, tile_rows: int, *, bias: Tensor | None = None,
    correction: Tensor | None = None, expert_scale: Tensor | None = None, slots: Tensor | None = None,
    shared: bool = False, rows: RowsStruct | None = None,
) -> Routes:  # fmt: skip
    """Route rows.

    Args:
        x: [m, hidden], float16 or bfloat16. router: [experts, hidden] of x's type; ``shared``: one row more, the shared
            expert's gate.
        counter: int32 [1], zero, and left zero. bias: of the router, correction: see :func:`.reference.choose`,
            expert_scale: factors of the weights in the end, float32 [experts] or None.
        slots: int32 [m] or None; a row with a negative slot goes to no expert.
        rows: what makes x first, of at most 64 rows, or None.
    """
    (m, k), device = x.shape, x.device
    pairs, outputs = m * routing.top_k, router.shape[0]
    few = pairs <= FEW_PAIRS and m <= FEW_ROWS
    # Beyond what one kernel sorts, the product is one of many rows; its sums stay float32.
    logits = x.new_empty(m, outputs, dtype=torch.float32) if few else F.linear(x.float(), router.float())
    bound = tile_bound(m, routing, tile_rows)
    weights = torch.empty(m, routing.top_k, device=device)
    whole = torch.empty(3 * pairs + 4 * bound + routing.experts + 4, dtype=torch.int32, device=device)
    tiles, ids, places, order, ends = whole.split((4 * bound, pairs, pairs, pairs, routing.experts + 4))
    shared_weights = torch.empty(m, device=device) if shared else None
    struct = RouteStruct(
        x.data_ptr() if few else None, router.data_ptr(), logits.data_ptr(), _pointer(bias), _pointer(correction),
        _pointer(expert_scale), _pointer(slots), weights.data_ptr(), _pointer(shared_weights), ids.data_ptr(),
        places.data_ptr(), order.data_ptr(), tiles.data_ptr(), ends.data_ptr(), counter.data_ptr(), m, k, x.stride(0),
        outputs, routing.experts, routing.top_k, tile_rows, SCORES[routing.score], routing.groups, routing.top_groups,
        routing.normalize, DTYPES[str(x.dtype)[6:]], routing.scale, None if rows is None else ctypes.pointer(rows),
    )  # fmt: skip
    check_cuda(library().trirun_cuda_route(ctypes.byref(struct), _stream()), f"route: {x.dtype} {[m, k]}, {routing}")
    shape = m, routing.top_k
    return Routes(
        weights, ids.view(shape), places.view(shape), order, tiles.view(-1, 4), ends[: routing.experts],
        shared_weights, tile_rows,
    )  # fmt: skip


def experts(
    stacked: StackedExperts, x: Tensor, routes: Routes, *, gathered: bool, act_bits: int = 16,
    activation: str | None = None, limit: float = 0.0, limbs: Tensor | None = None, older: bool = True,
) -> Tensor:  # fmt: skip
    """Products of the sorted rows with their experts.

    Args:
        x: float16 or bfloat16: where ``gathered`` [m, k], of which every sorted row takes its pair's; else the sorted
            rows themselves.
        activation: of ``act(gate) · up``, for matrices of two parts; None for those of one. limit: of "clipped_swiglu".
        limbs: where ``gathered``, x as :func:`.cuda_ops.rows` quantizes it; else the kernel does.
        older: whether x was there before the rows were routed.

    Returns:
        [m·top_k, n] of x's type; rows that no pair has are not written.

    Raises:
        NativeError: the library refused the call; the message has the shapes.
    """
    w, pairs, top_k = stacked, routes.order.numel(), routes.ids.shape[1]
    n_pad, many = w.words.shape[1] * 64, routes.tile_rows >= 64
    n = n_pad if many and activation is not None else w.n
    y = torch.empty(pairs, n, dtype=x.dtype, device=x.device)
    struct = ExpertsStruct(
        _first_expert(w), _pointer(w.bias), x.data_ptr(), _pointer(limbs),
        routes.order.data_ptr() if gathered else None,
        routes.tiles.data_ptr(), y.data_ptr(), n, w.k, x.stride(0), y.stride(0), routes.tiles.shape[0], top_k,
        routes.tile_rows, activation is not None and not many, ACTIVATIONS[activation or "silu"], act_bits,
        DTYPES[str(x.dtype)[6:]], limit, x.shape[0] if older or limbs is not None else 0,
    )  # fmt: skip
    code = library().trirun_cuda_experts(ctypes.byref(struct), _stream())
    check_cuda(code, f"experts: {x.dtype} {list(x.shape)}, {w.experts} of {w.parts}·{[w.n, w.k]}, {w.spec}")
    if not many or activation is None:
        return y
    gate, up = y[:, : w.n], y[:, n_pad // 2 : n_pad // 2 + w.n]
    if activation == CLIPPED_SWIGLU:
        return gated(gate.float(), up.float(), activation, limit).to(x.dtype)
    h = torch.empty(pairs, w.n, dtype=x.dtype, device=x.device)
    rows(GATE, gate, up=up, y=h, activation=activation)
    return h


@dataclass(frozen=True, slots=True)
class Mixed:
    """What m rows' experts have computed, not yet summed.

    Attributes:
        rows: sorted rows [m·top_k, n], float16 or bfloat16. routes: of the m rows.
        shared: the shared expert's output [m, n] of their type, or None.
        norm, shared_norm: float32 [n] of RMS norms of the experts' sum and of the shared output, or None. eps: theirs.
    """

    rows: Tensor
    routes: Routes
    shared: Tensor | None = None
    norm: Tensor | None = None
    shared_norm: Tensor | None = None
    eps: float = 0.0

    def struct(self, y: Tensor | None = None) -> CombineStruct:
        """The weighted sum as the library takes it: every row's, in order of rank."""
        x, routes, shared = self.rows, self.routes, self.shared
        m, top_k = routes.ids.shape
        return CombineStruct(
            x.data_ptr(), routes.places.data_ptr(), routes.weights.data_ptr(), _pointer(shared),
            _pointer(routes.shared_weights), _pointer(self.norm), _pointer(self.shared_norm), _pointer(y), m,
            x.shape[1], x.stride(0), 0 if shared is None else shared.stride(0), 0 if y is None else y.stride(0), top_k,
            DTYPES[str(x.dtype)[6:]], self.eps,
        )  # fmt: skip

    def sum(self) -> Tensor:
        """[m, n] of the rows' type."""
        x = self.rows
        y = torch.empty(self.routes.ids.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
        struct = self.struct(y)
        code = library().trirun_cuda_combine(ctypes.byref(struct), _stream())
        check_cuda(code, f"combine: {x.dtype} {list(x.shape)}")
        return y


@dataclass(frozen=True, slots=True)
class CudaMixture:
    """The experts of a layer on one device.

    Attributes:
        mixture: their description.
        gate_up, down: packed, or dense [experts, 2·size, hidden] and [experts, hidden, size] in bfloat16.
        router: [experts, hidden] of the activations' type; with a gate of the shared expert that is one row more.
        bias, correction, expert_scale: float32 [experts] or None, see :class:`~.weights.MixtureWeights`.
        counter: int32 [1], zero between steps. act_bits: of packed experts.
    """

    mixture: Mixture
    gate_up: StackedExperts | Tensor
    down: StackedExperts | Tensor
    router: Tensor
    bias: Tensor | None
    correction: Tensor | None
    counter: Tensor
    act_bits: int = 16
    expert_scale: Tensor | None = None

    @classmethod
    def of(
        cls, mixture: Mixture, weights: Mapping[str, Sequence[Any]], biases: Mapping[str, Sequence[Any]],
        own: Mapping[str, Any], device: torch.device | str, dtype: torch.dtype, act_bits: int = 16,
    ) -> CudaMixture:  # fmt: skip
        """Copies to the GPU.

        Args:
            weights: "gate", "up" and "down" of every expert, all packed or all dense [n, k]. biases: likewise, [n] or
                None. own: the other fields of :class:`~.weights.MixtureWeights`, of which all but "router" may be
                None or not there.

        Raises:
            ValueError: experts of several shapes or grids; dense ones in float16, or with biases; factors or the like
                of another number of experts.
        """

        def vector(x: Any) -> Tensor | None:
            return None if x is None else torch.as_tensor(x).to(device).float()

        def joined(*names: str) -> StackedExperts | Tensor:
            parts = list(zip(*(weights[name] for name in names), strict=True))
            added = list(zip(*(biases[name] for name in names), strict=True))
            if isinstance(parts[0][0], PackedWeight):
                return StackedExperts.of(parts, [[vector(b) for b in each] for each in added]).to(device)
            if dtype != torch.bfloat16 or added[0][0] is not None:
                raise ValueError(f"experts that are not packed run in bfloat16 and without biases, not in {dtype}")
            return torch.stack([torch.cat(each).to(device, dtype) for each in parts])

        counter, vectors = torch.zeros(1, dtype=torch.int32, device=device), {}
        for name in ("bias", "correction", "expert_scale"):
            found = vectors[name] = vector(own.get(name))
            if found is not None and found.shape != (mixture.routing.experts,):
                raise ValueError(f"{name} {list(found.shape)} of {mixture.routing.experts} experts")
        router = torch.as_tensor(own["router"]).to(device, dtype).contiguous()
        return cls(
            mixture, joined("gate", "up"), joined("down"), router, counter=counter, act_bits=act_bits, **vectors
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all experts and the router."""
        return sum(part.nbytes for part in (self.gate_up, self.down, self.router))

    @property
    def packed(self) -> bool:
        """Whether the experts are packed."""
        return isinstance(self.gate_up, StackedExperts)

    def dense(self, dtype: torch.dtype) -> CudaMixture:
        """The same with dense experts, which run in bfloat16."""

        def each(stacked: StackedExperts | Tensor) -> Tensor:
            return stacked if isinstance(stacked, Tensor) else stacked.dequantize(dtype)

        return dataclasses.replace(self, gate_up=each(self.gate_up), down=each(self.down))

    def __call__(
        self, x: Tensor, slots: Tensor, shared: Tensor | None = None, *, limbs: Tensor | None = None,
        rows: RowsStruct | None = None,
    ) -> Mixed:  # fmt: skip
        """The feed-forward part of rows.

        Args:
            x: [m, hidden], normalised. slots: int32 [m], negative for padding, whose rows go to no expert.
            shared: the shared expert's output [m, hidden], or None. limbs: x's, or None.
            rows: what is still to make x and its limbs, or None.

        Returns:
            Of [m, hidden]: what is to be added to the residual stream.
        """
        mixture, routing = self.mixture, self.mixture.routing
        tile_rows = 1
        if isinstance(self.gate_up, StackedExperts):
            tile_rows = chosen_tile_rows(x.shape[0], routing, max(x.shape[1], mixture.size), self.act_bits)
        routes = route(
            routing, x, self.router, self.counter, tile_rows, bias=self.bias, correction=self.correction,
            expert_scale=self.expert_scale, slots=slots, shared=mixture.shared_gate, rows=rows,
        )  # fmt: skip
        if isinstance(self.gate_up, Tensor) or isinstance(self.down, Tensor):
            y = self._dense(x, routes)
        elif self._gains_from_dense(x):
            y = self._made_dense(x, routes, self.gate_up, self.down)
        else:
            h = experts(
                self.gate_up, x, routes, gathered=True, act_bits=self.act_bits, activation=mixture.activation,
                limit=mixture.limit, limbs=limbs, older=rows is None,
            )  # fmt: skip
            y = experts(self.down, h, routes, gathered=False, act_bits=self.act_bits)
        return Mixed(y, routes, shared)

    def _dense(self, x: Tensor, routes: Routes) -> Tensor:
        """By PyTorch's grouped product, whose rows are gathered before it."""
        assert isinstance(self.gate_up, Tensor) and isinstance(self.down, Tensor)
        gate, up = F.grouped_mm(_gathered(x, routes), self.gate_up.transpose(1, 2), offs=routes.ends).chunk(2, 1)
        h = gated(gate, up, self.mixture.activation, self.mixture.limit)
        return F.grouped_mm(h, self.down.transpose(1, 2), offs=routes.ends)

    def _gains_from_dense(self, x: Tensor) -> bool:
        """Whether packed experts of so many rows take less time made dense, gate, up and down one after another."""
        w, routing = self.gate_up, self.mixture.routing
        assert isinstance(w, StackedExperts) and isinstance(self.down, StackedExperts)
        whole, plain = w.n % 64 == 0 and self.down.n % 64 == 0, self.act_bits == 16 and x.dtype == torch.bfloat16
        enough = x.shape[0] * routing.top_k >= DENSE_ROWS * routing.experts
        return whole and plain and enough and w.experts * w.n * w.k <= DENSE_WEIGHTS

    def _made_dense(self, x: Tensor, routes: Routes, gate_up: StackedExperts, down: StackedExperts) -> Tensor:
        """As :meth:`_dense`, of weights that no memory holds for longer."""

        chosen = routes.ids.flatten()[routes.order].clamp(min=0)

        def product(rows: Tensor, w: StackedExperts, part: int) -> Tensor:
            y = F.grouped_mm(rows, dense_part(w, part, x.dtype).transpose(1, 2), offs=routes.ends)
            if w.bias is None:
                return y
            return y + w.bias.view(w.experts, w.parts, -1)[:, part, : w.n].to(x.dtype)[chosen]

        rows = _gathered(x, routes)
        gate, up = product(rows, gate_up, 0), product(rows, gate_up, 1)
        return product(gated(gate, up, self.mixture.activation, self.mixture.limit), down, 0)


def dense_part(stacked: StackedExperts, part: int, dtype: torch.dtype) -> Tensor:
    """One part (of gate and up) of every expert, dense [experts, n, k] of float16 or bfloat16; its rows may be apart.

    Raises:
        NativeError: n is not a multiple of 64.
    """
    w = stacked
    y = torch.empty(w.experts, w.n, w.words.shape[2] * 32, dtype=dtype, device=w.words.device)
    first = part * (w.words.shape[1] * 64 // w.parts)
    code = library().trirun_cuda_dequantize_experts(
        ctypes.byref(_first_expert(w)), w.experts, first, w.n, DTYPES[str(dtype)[6:]], y.data_ptr(), _stream(),
    )  # fmt: skip
    check_cuda(code, f"dense experts: {w.experts} of {w.parts}·{[w.n, w.k]}, {w.spec}")
    return y[:, :, : w.k]


def _first_expert(w: StackedExperts) -> Int2Struct:
    return Int2Struct(
        w.words.data_ptr(), w.scales.data_ptr(), _pointer(w.zeros), w.words.shape[1] * 64, w.words.shape[2] * 32,
        w.spec.group_size, w.spec.zero_operand,
    )  # fmt: skip


def _gathered(x: Tensor, routes: Routes) -> Tensor:
    """The row of every sorted pair."""
    m, top_k = routes.ids.shape
    return x[(routes.order // top_k).clamp(0, m - 1)]


def _pointer(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream
