"""Right calls of every function of libtrirun_cpu.so, for scripts/fuzz_abi.py to spoil: small sizes, every dtype, every
part of a decoder there or not, each array as long as trirun.h says and no longer."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from abi_memory import GuardedMemory
from trirun_kernels.decoder.structs import DecoderStruct, DrawStruct, LinearStruct, SegmentStruct
from trirun_kernels.gemm.activations_cpu import ActStruct
from trirun_kernels.native import Int2Struct, cpu


@dataclass
class Call:
    """A call.

    Attributes:
        name: of the function, after ``trirun_cpu_``. arguments: as it takes them; structures are given as themselves.
        places: what can be spoilt: (list or structure, index or field, kind). Kinds are those of fuzz_abi.SPOILT.
    """

    name: str
    arguments: list[Any]
    places: list[tuple[Any, Any, str]] = field(default_factory=list)


class Maker:
    """Makes calls of random sizes.

    Args:
        rng: of sizes and choices. memory: where arrays go.
    """

    def __init__(self, rng: random.Random, memory: GuardedMemory) -> None:
        self.rng, self.memory, self.library = rng, memory, cpu()

    def call(self, name: str) -> Call:
        """A right call of a function."""
        self.memory.reset()
        return MAKERS[name](self)

    def _act(self, places: list[Any], m: int, k: int, bits: int) -> ActStruct:
        """An act whose arrays are apart."""
        memory = self.memory
        scales = m if bits == 8 else m * (k // 128)
        act = ActStruct(memory.words(m * bits // 8 * k), memory.floats(scales), memory.words(4 * m * (k // 32), 4))
        act.m, act.k, act.act_bits = m, k, bits
        for name in ("scales", "sums"):
            places.append((act, name, "pointer"))
        places += [(act, "limbs", "bytes"), (act, "m", "most"), (act, "k", "padded"), (act, "act_bits", "enum")]
        return act

    def _weight(self, places: list[Any], n: int, k: int, group: int | None = None) -> Int2Struct:
        rng, memory = self.rng, self.memory
        padded_n, padded_k = -(-n // 64) * 64, -(-k // 128) * 128
        group = rng.choice([-1, 32, 64, 128]) if group is None else group
        groups = 1 if group == -1 else padded_k // group
        zeros = memory.halves(groups * padded_n, 1) if rng.random() < 0.3 else None
        words, scales = memory.words(padded_n * padded_k // 4), memory.halves(groups * padded_n, 1)
        weight = Int2Struct(words, scales, zeros, padded_n, padded_k, group, 1.0)
        places += [(weight, "words", "aligned"), (weight, "scales", "pointer"), (weight, "n", "padded")]
        places += [(weight, "k", "padded"), (weight, "group_size", "group"), (weight, "zero", "float")]
        places += [(weight, "zeros", "optional")] if zeros else []
        return weight

    def linear(self, places: list[Any], n: int, k: int, group: int | None = None, bias: bool = True) -> LinearStruct:
        mine: list[Any] = []
        weight = self._weight(mine, n, k, group)
        has_bias = bias and self.rng.random() < 0.5
        linear = LinearStruct(weight, self.memory.floats(n) if has_bias else None, n, k)
        # The structure holds a copy of the weight.
        mine = [(linear.weight, key, kind) for _, key, kind in mine]
        places += [*mine, (linear, "n", "size"), (linear, "k", "size")]
        if has_bias:
            places.append((linear, "bias", "optional"))
        return linear

    def hold(self, places: list[Any], holder: ctypes.Structure, name: str, n: int, k: int) -> None:
        """Makes a linear a field of a structure, which holds a copy of it."""
        setattr(holder, name, self.linear(mine := [], n, k))
        held = getattr(holder, name)
        # Of these no outputs mean that there is none.
        optional = name in ("gate", "q_gate", "k", "input_gate")
        kept = [each for each in mine if not optional or each[1:] != ("n", "size")]
        places += [(held.weight if isinstance(of, Int2Struct) else held, key, kind) for of, key, kind in kept]

    def act_bytes(self) -> Call:
        arguments = [self.rng.choice([0, 1, 5, 2**31]), self.rng.choice([128, 4096, 2**31]), self.rng.choice([8, 16])]
        kinds = zip(range(3), ("most", "padded", "enum"), strict=True)
        return Call("act_bytes", arguments, [(arguments, at, kind) for at, kind in kinds])

    def act_init(self) -> Call:
        m, k, bits = self.rng.randint(1, 5), self.rng.choice([128, 384]), self.rng.choice([8, 16])
        size = self.library.trirun_cpu_act_bytes(m, k, bits)
        arguments = [ActStruct(), self.memory.array(size, 64), size, m, k, bits]
        kinds = ("struct", "aligned", "bytes_of", "most", "padded", "enum")
        return Call("act_init", arguments, [(arguments, at, kind) for at, kind in enumerate(kinds)])

    def quantize(self) -> Call:
        rng, places = self.rng, []
        m, k, dtype = rng.randint(1, 9), rng.randint(1, 300), rng.randrange(3)
        ldx = k + rng.choice([0, 0, 3])
        act = self._act(places, m, -(-k // 128) * 128, rng.choice([8, 16]))
        x = self.memory.halves((m - 1) * ldx + k, dtype)
        arguments = [act, x, dtype, k, ldx, rng.choice([1, 2, 3])]
        kinds = ("struct", "pointer", "enum", "size", "size", "threads")
        return Call("quantize", arguments, places + [(arguments, at, kind) for at, kind in enumerate(kinds)])

    def int2_gemm_act(self) -> Call:
        rng, places = self.rng, []
        m, n, k, dtype = rng.randint(1, 9), rng.randint(1, 200), rng.choice([128, 256]), rng.randrange(3)
        ldy, width = n + rng.choice([0, 5]), 2 if dtype else 4
        weight, act = self._weight(places, n, k), self._act(places, m, k, rng.choice([8, 16]))
        # Sums are those of the limbs: small ones.
        ctypes.memset(act.limbs, 1, m * k)
        ctypes.memset(act.sums, 0, 4 * m * (k // 32))
        y = self.memory.array(((m - 1) * ldy + n) * width, width)
        bias = self.memory.halves(n, dtype) if rng.random() < 0.5 else None
        arguments = [weight, n, act, dtype, bias, y, ldy, rng.choice([1, 2, 3])]
        kinds = ("struct", "size", "struct", "enum", "optional", "pointer", "size", "threads")
        places += [(arguments, at, kind) for at, kind in enumerate(kinds) if bias or at != 4]
        return Call("int2_gemm_act", arguments, places)

    def int2_gemm(self) -> Call:
        rng, places = self.rng, []
        m, n, k, dtype = rng.randint(1, 40), rng.randint(1, 200), rng.randint(1, 300), rng.randrange(3)
        ldx, ldy, width = k + rng.choice([0, 7]), n + rng.choice([0, 5]), 2 if dtype else 4
        weight, x = self._weight(places, n, k), self.memory.halves((m - 1) * ldx + k, dtype)
        bias = self.memory.halves(n, dtype) if rng.random() < 0.5 else None
        y = self.memory.array(((m - 1) * ldy + n) * width, width)
        arguments = [weight, n, k, x, dtype, m, ldx, bias, y, ldy, rng.choice([8, 16]), rng.choice([1, 2, 3])]
        kinds = ("struct", "size", "size", "pointer", "enum", "most", "size", "optional", "pointer", "size", "enum")
        places += [(arguments, at, kind) for at, kind in enumerate((*kinds, "threads")) if bias or at != 7]
        return Call("int2_gemm", arguments, places)

    def read(self) -> Call:
        size = self.rng.choice([0, 8, 64, 100, 1000, 100_000])
        arguments = [self.memory.words(size, 64), size, self.rng.choice([1, 2, 3]), ctypes.c_uint64()]
        kinds = ("aligned", "bytes_read", "threads", "struct")
        return Call("read", arguments, [(arguments, at, kind) for at, kind in enumerate(kinds)])

    def head_int8(self) -> Call:
        rng, n, k, dtype = self.rng, self.rng.randint(1, 30), self.rng.choice([16, 48, 128]), self.rng.randrange(3)
        rows = self.memory.array(n * self.library.trirun_cpu_head_stride(k), 1)
        arguments = [self.memory.halves(n * k, dtype), dtype, n, k, rows, self.memory.floats(n), rng.choice([1, 2, 3])]
        kinds = ("pointer", "enum", "size", "size", "bytes", "pointer", "threads")
        return Call("head_int8", arguments, [(arguments, at, kind) for at, kind in enumerate(kinds)])

    def head_stride(self) -> Call:
        arguments = [self.rng.choice([1, 64, 65, 2**31])]
        return Call("head_stride", arguments, [(arguments, 0, "size")])

    def decoder_context(self) -> Call:
        arguments = [self.rng.choice([1, 64, 65, 2**31])]
        return Call("decoder_context", arguments, [(arguments, 0, "size")])

    def draw(self) -> Call:
        rng, vocab = self.rng, self.rng.choice([1, 7, 100, 3000])
        draw = DrawStruct(rng.choice([0.01, 1, 1e30]), rng.choice([1, 0.9, 1e-9]), rng.choice([0, 0.1, 1]))
        draw.top_k, draw.stream, draw.index = rng.choice([0, 1, 5, 2**40]), rng.getrandbits(64), rng.getrandbits(64)
        arguments = [self.memory.floats(vocab, wild=rng.random() < 0.5), vocab, draw, ctypes.c_int64(-2)]
        places = [(draw, name, "float") for name in ("temperature", "top_p", "min_p")]
        places += [(arguments, at, kind) for at, kind in enumerate(("pointer", "size", "struct", "struct"))]
        return Call("draw", arguments, places)

    def set_isa(self) -> Call:
        return Call("set_isa", [self.rng.choice([b"", b"none", b"\xff" * 5000, b"amx", b"avx2", b"portable", None])])

    def decoder_cache_bytes(self) -> Call:
        decoder, places = self.decoder()
        arguments = [decoder, self.rng.randrange(decoder.layers)]
        return Call(
            "decoder_cache_bytes", arguments, [*_sizes(places), (arguments, 0, "struct"), (arguments, 1, "most")]
        )

    def decoder_workspace(self) -> Call:
        decoder, places = self.decoder()
        arguments = [decoder, self.rng.choice([1, 7, 2**20, 2**31])]
        return Call("decoder_workspace", arguments, [*_sizes(places), (arguments, 0, "struct"), (arguments, 1, "size")])

    def decoder_products(self) -> Call:
        decoder, places = self.decoder()
        arguments = [decoder, self.rng.choice([1, 2]), self.rng.randrange(2), self.rng.choice([1, 2, 3])]
        places += [(arguments, at, kind) for at, kind in ((0, "struct"), (1, "most_steps"), (3, "threads"))]
        return Call("decoder_products", arguments, places)

    def decoder_step(self) -> Call:
        return self._rows_of_a_batch("decoder_step", "vocab")

    def decoder_states(self) -> Call:
        return self._rows_of_a_batch("decoder_states", "hidden")

    def _rows_of_a_batch(self, name: str, width: str) -> Call:
        """Functions that give float [rows][a size of the decoder] of a batch."""
        rng, memory = self.rng, self.memory
        decoder, places = self.decoder()
        segments, rows = self._segments(decoder, rng.choice([1, 3]))
        tokens = (ctypes.c_int64 * rows)(*[rng.randrange(decoder.vocab) for _ in range(rows)])
        count = rng.randint(0, rows)
        wanted = (ctypes.c_int64 * max(count, 1))(*sorted(rng.sample(range(rows), count)))
        size = self.library.trirun_cpu_decoder_workspace(ctypes.byref(decoder), rows)
        some = rng.random() < 0.5
        logits = memory.array(4 * getattr(decoder, width) * (count if some else rows))
        arguments = [decoder, segments, len(segments), tokens, rows, wanted if some else None, count if some else rows]
        arguments += [logits, memory.array(size, 64), size, rng.choice([1, 2, 3])]
        kinds = (
            "struct",
            "array",
            "size",
            "array",
            "size",
            "skip",
            "most",
            "pointer",
            "aligned",
            "bytes_of",
            "threads",
        )
        places += [(arguments, at, kind) for at, kind in enumerate(kinds) if count or kind != "pointer"]
        for array, kind in ((tokens, "token"), (wanted, "token"))[: 1 + (some and count > 0)]:
            places += [(array, at, kind) for at in range(len(array))]
        places += [(segment, name, "most") for segment in segments for name in ("slot", "position")]
        return Call(name, arguments, [*places, *((segment, "count", "size") for segment in segments)])

    def decoder_generate(self) -> Call:
        rng, memory = self.rng, self.memory
        decoder, places = self.decoder()
        segments, rows = self._segments(decoder, 1)
        steps = min(rng.randint(1, 3), min(decoder.context - segment.position for segment in segments))
        tokens = (ctypes.c_int64 * rows)(*[rng.randrange(decoder.vocab) for _ in range(rows)])
        draws = (DrawStruct * rows)(*[DrawStruct(rng.choice([0, 1]), 0.9, 0.0, 3, 7, 0) for _ in range(rows)])
        stop = (ctypes.c_int64 * 1)(rng.randrange(-1, decoder.vocab))
        size = self.library.trirun_cpu_decoder_workspace(ctypes.byref(decoder), rows)
        arguments = [decoder, segments, rows, tokens, steps, draws if rng.random() < 0.5 else None, stop, 1]
        arguments += [memory.array(8 * steps * rows, 8), ctypes.c_int64(), memory.array(4 * rows * decoder.vocab)]
        arguments += [memory.array(size, 64), size, rng.choice([1, 2, 3])]
        kinds = (
            "struct",
            "array",
            "size",
            "array",
            "size",
            "skip",
            "array",
            "negative",
            "pointer",
            "struct",
            "pointer",
        )
        places += [(arguments, at, kind) for at, kind in enumerate((*kinds, "aligned", "bytes_of", "threads"))]
        places += [(tokens, at, "token") for at in range(rows)]
        places += [(draw, name, "float") for draw in draws for name in ("temperature", "top_p", "min_p")]
        places += [(segment, name, "most") for segment in segments for name in ("slot", "position")]
        return Call("decoder_generate", arguments, [*places, *((segment, "count", "size") for segment in segments)])

    def _segments(self, decoder: DecoderStruct, most: int) -> tuple[Any, int]:
        slots = sorted(self.rng.sample(range(decoder.slots), self.rng.randint(1, decoder.slots)))
        segments = (SegmentStruct * len(slots))()
        for segment, slot in zip(segments, slots, strict=True):
            segment.slot, segment.count = slot, self.rng.randint(1, most)
            segment.position = self.rng.choice([0, 5, decoder.context - segment.count])
        return segments, sum(segment.count for segment in segments)

    def decoder(self) -> tuple[DecoderStruct, list[Any]]:
        """A decoder, and what of it can be spoilt."""
        from abi_decoders import decoder

        return decoder(self)


def _sizes(places: list[Any]) -> list[Any]:
    """Of the places of a decoder those that a function looks at that only wants sizes."""
    kept = []
    for holder, key, kind in places:
        if isinstance(holder, LinearStruct) and key == "n":
            kept.append((holder, key, "loose"))
        elif not isinstance(holder, LinearStruct | Int2Struct) and kind not in ("pointer", "optional", "aligned"):
            kept.append((holder, key, kind))
    return kept


FUNCTIONS = (
    "act_bytes", "act_init", "quantize", "int2_gemm_act", "int2_gemm", "read", "head_int8", "head_stride",
    "decoder_context", "draw", "set_isa", "decoder_cache_bytes", "decoder_workspace", "decoder_products",
    "decoder_step", "decoder_states", "decoder_generate",
)  # fmt: skip
MAKERS: dict[str, Callable[[Maker], Call]] = {name: getattr(Maker, name) for name in FUNCTIONS}
