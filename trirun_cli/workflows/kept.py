"""What a packed checkpoint holds as floats: embeddings, heads, and whatever was not packed, with the reasons."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from trirun_gptq.patterns import matches
from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO

from ..checkpoint.model_dir import ModelDir, ModelSource


@dataclass(frozen=True, slots=True)
class KeptMatrix:
    """A matrix of a checkpoint that is stored as floats.

    Attributes:
        name: of its module, or of the tensor where that is not the module's weight.
        shape, dtype, nbytes: as it is stored. why: it is not packed.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    why: str


def kept_matrices(
    out: Path,
    source: ModelSource,
    linears: Collection[str],
    vocabulary: Collection[str],
    keep: str | None,
    *,
    foreign: bool,
) -> list[KeptMatrix]:
    """Those of a checkpoint just written, in the order of their names.

    Args:
        out: the checkpoint. source: what it was made of. linears, vocabulary: the model's linear modules, and which
            modules are its embedding and head. keep: pattern of those that were to be left as they are.
        foreign: another program has packed it.
    """
    written, found = ModelDir(out), []
    for name in written.names:
        stored, module = written[name], name.removesuffix(WEIGHT)
        if len(stored.shape) < 2 or not stored.dtype.startswith(("F", "BF")) or name.endswith((SCALE, ZERO)):
            continue
        # A tensor of another name, as those of fused experts, belongs to the module before its last point.
        if keep is not None and matches(keep, name.rpartition(".")[0]):
            why = "--keep"
        elif module not in linears and module not in vocabulary:
            why = "no linear layer"
        elif name not in source:
            why = "its grid, or a scale, is none that trirun holds exactly"
        elif foreign:
            why = f"{source[name].dtype} in the source"
        else:
            why = "not ternary"
        found.append(KeptMatrix(module, tuple(stored.shape), stored.dtype, stored.nbytes, why))
    return found
