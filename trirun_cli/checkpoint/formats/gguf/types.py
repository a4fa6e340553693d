"""The types of GGUF tensors: how many bytes they have, and which of them trirun reads; and how the data are aligned.

Type ids are those of llama.cpp; 134 and 135 are ik_llama.cpp's, 36 is bitnet.cpp's, 142 and 143 are PrismML's. A tensor
of shape [..., n, k] has rows of k weights; a row has ``k / block`` blocks of ``block_bytes`` each, after ``row_head``
bytes of its own; ``tail`` bytes follow the last row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgufType:
    """One type.

    Attributes:
        id: in the file. name: llama.cpp's. block: weights a block. block_bytes: of one block.
        row_head, tail: see the module.
        quantized: whether it has codes of at most 2 bits (:mod:`.blocks`); else it is read as floats (:mod:`.floats`).
    """

    id: int
    name: str
    block: int
    block_bytes: int
    quantized: bool = False
    row_head: int = 0
    tail: int = 0

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k weights."""
        return self.row_head + k // self.block * self.block_bytes

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a tensor of this shape, whose last dimension is a multiple of the block."""
        return math.prod(shape[:-1]) * self.row_bytes(shape[-1]) + self.tail


ALIGNMENT = 32  # of the data and of each tensor, unless a file says otherwise
Q2_0_ID = 42
# PrismML's first files have blocks of PQ2_0 under the id of Q2_0.
Q2_0_LEGACY = GgufType(Q2_0_ID, "Q2_0 (legacy, groups of 128)", 128, 34, True)

TYPES = {
    kind.id: kind
    for kind in (
        GgufType(0, "F32", 1, 4),
        GgufType(1, "F16", 1, 2),
        GgufType(30, "BF16", 1, 2),
        GgufType(2, "Q4_0", 32, 18),
        GgufType(8, "Q8_0", 32, 34),
        GgufType(12, "Q4_K", 256, 144),
        GgufType(14, "Q6_K", 256, 210),
        GgufType(34, "TQ1_0", 256, 54, True),
        GgufType(35, "TQ2_0", 256, 66, True),
        GgufType(36, "I2_S", 128, 32, True, tail=32),
        GgufType(41, "Q1_0", 128, 18, True),
        GgufType(Q2_0_ID, "Q2_0", 64, 18, True),
        GgufType(134, "IQ1_BN", 64, 13, True, row_head=2),
        GgufType(135, "IQ2_BN", 64, 16, True, row_head=4),
        GgufType(142, "PQ2_0", 128, 34, True),
        GgufType(143, "PTQ1_0", 128, 28, True),
    )
}

# Types by name that a message can name, and nothing more.
_UNREAD = {
    3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 38: "TL1", 39: "MXFP4 or TL2", 40: "NVFP4",
    335: "IQ2_BN_R4",
}  # fmt: skip
_REASONS = {
    10: "its values have a scale and a minimum per 16 weights, which no 2-bit grid of trirun holds",
    **dict.fromkeys((16, 17, 18, 19, 21, 22, 29), "its values come from a codebook of vectors, not from a 2-bit grid"),
    335: "its rows are interleaved for one runtime; IQ2_BN is read",
}


def unread_type(type_id: int) -> tuple[str, str]:
    """Why a type that is not in :data:`TYPES` is not read, and what to do instead."""
    reason = _REASONS.get(
        type_id, "it is neither ternary nor a 2-bit grid, nor one of the float types read beside them"
    )
    what = f"type {_UNREAD[type_id]}" if type_id in _UNREAD else f"the unknown type {type_id}"
    return f"{what}: {reason}", "dequantize the model to fp16 (or take its original), then: trirun quantize MODEL"
