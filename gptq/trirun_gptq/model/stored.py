"""Where a model's tensors lie in its files: the names and the shapes by which transformers itself would load them.

A model's modules and its files need not agree. transformers renames tensors while it loads, merges the experts of a
mixture, cuts fused projections, and undoes all of it when it saves. Its own rules (``conversion_mapping``) decide here
too, so that whatever it loads can be read tensor by tensor. What :mod:`trirun_kernels.weights.experts` changes in the
model comes after them: one expert's matrix of a fused tensor, the transpose of a GPT-2 layer.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn
from trirun_kernels.weights.experts import SeparateExperts, TransposedLinear
from trirun_kernels.weights.names import WEIGHT

from .experts import Cut, TensorFiles, expert_of
from .mxfp4 import BLOCKS, SCALES, PackedExperts

DOWN, GATE_UP = "down_proj", "gate_up_proj"  # tensors of a fused mixture: see weights.experts.fused_layout
BIAS = "_bias"


@dataclass(slots=True)
class Group:
    """Tensors of a model that come from the same stored ones.

    Attributes:
        sources: the stored names. targets: the model's, experts taken apart.
        copied: the stored tensors are what a loader of the packed checkpoint expects, by their own names.
    """

    sources: list[str]
    targets: list[str]
    copied: bool = True

    def within(self, path: str) -> bool:
        """Whether it belongs to a module of the model."""
        return any(name.startswith(f"{path}.") for name in self.targets or self.sources)


@dataclass(eq=False)
class _Conversion:
    """A rule of transformers that makes tensors of others, and the stored tensors it takes, by pattern."""

    name: str
    rule: Any
    stored: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def sources(self) -> list[str]:
        return [name for names in self.stored.values() for name in names]

    @cached_property
    def matrices(self) -> dict[Cut, str] | None:
        return _matrices(self.rule, self.stored)


class StoredNames:
    """The tensors of a model in the files of its directory.

    Args:
        model: the empty model of :func:`~trirun_gptq.model.meta.meta_model`. files: the directory.

    Attributes:
        files: the directory.
        groups: every stored tensor once, with what it becomes in the model, in the order of the files. Stored tensors
            that the model does not have are groups without targets.
    """

    def __init__(self, model: Any, files: TensorFiles) -> None:
        self._model, self.files = model, files
        self._experts = {name: m for name, m in model.named_modules() if isinstance(m, SeparateExperts)}
        self._transposed = {f"{n}{WEIGHT}" for n, m in model.named_modules() if isinstance(m, TransposedLinear)}
        self._whole: dict[str, str] = {}
        self._converted: dict[str, _Conversion] = {}
        self._shapes: dict[str, list[int]] = {}
        self._packed: dict[str, PackedExperts] = {}
        self._unknown: dict[str, str] = {}
        self._last: tuple[_Conversion | None, dict[str, Tensor]] = (None, {})
        self._match()
        self.groups = list(self._grouped())

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def unknown(self, path: str) -> str | None:
        """A stored tensor of a module that the model has nothing for."""
        return next((stored for stored, name in self._unknown.items() if name.startswith(f"{path}.")), None)

    def read(self, name: str) -> Tensor:
        """A tensor of the model on the CPU, in its stored dtype; in the mapped file where it lies there as it is.

        Raises:
            KeyError: it is not stored. TensorFileError: the file has been cut since it was opened.
        """
        source, part = self._require(name)
        if isinstance(source, PackedExperts):
            return source.read(self.files, self._cut(name))
        if isinstance(source, str):
            value = self.files.tensor(source)
        else:
            value = self._convert(source, self.files.tensor)[self._target(name)]
        return value if part is None else part(value)

    def shape(self, name: str) -> list[int]:
        """The shape of what :meth:`read` returns, by the headers of the files alone.

        Raises:
            KeyError: it is not stored.
        """
        source, part = self._require(name)
        if isinstance(source, PackedExperts):
            return source.shape(self.files, self._cut(name))
        shape = list(self.files[source].shape) if isinstance(source, str) else self._shapes[self._target(name)]
        return shape if part is None else part.shape(shape)

    def release(self) -> None:
        """Forget what was converted last."""
        self._last = (None, {})

    def _require(self, name: str) -> _Found:
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return found

    def _find(self, name: str) -> _Found | None:
        """The stored name of a tensor, or what makes it of others, and what is to be taken of that."""
        fused = self._target(name)
        if fused != name and fused in self._packed:
            return self._packed[fused], None
        conversion = self._converted.get(fused)
        part: Cut | _Transpose | None = None
        if fused != name:
            part = cut = self._cut(name)
            if conversion is not None and (matrices := conversion.matrices) is not None:
                return (matrices[cut], None) if cut in matrices else None
        elif name in self._transposed:
            part = _Transpose()
        source = self._whole.get(fused) or conversion
        return None if source is None else (source, part)

    def _target(self, name: str) -> str:
        """What the model's own class calls the tensor that holds this one."""
        expert = expert_of(name)
        if expert is None or expert.path not in self._experts:
            return name
        return f"{expert.path}.{DOWN if expert.layer == 'down' else GATE_UP}{BIAS if expert.part == 'bias' else ''}"

    def _cut(self, name: str) -> Cut:
        expert = expert_of(name)
        assert expert is not None
        return Cut(expert.index, {"gate": 0, "up": 1}.get(expert.layer), self._experts[expert.path].layout)

    def _wanted(self) -> dict[str, list[int]]:
        """The tensors that the model's own class has, with their shapes."""
        wanted = {n: list(t.shape) for n, t in self._model.state_dict().items() if self._target(n) == n}
        for path, experts in self._experts.items():
            layers = dict(experts.named_modules())
            count, (n, k) = sum(1 for _ in experts.children()), cast(nn.Linear, layers["0.down"]).weight.shape
            turn = -1 if experts.layout.transposed else 1
            wanted |= {f"{path}.{DOWN}": [count, *(n, k)[::turn]], f"{path}.{GATE_UP}": [count, *(2 * k, n)[::turn]]}
            if experts.layout.biased:
                wanted |= {f"{path}.{DOWN}{BIAS}": [count, n], f"{path}.{GATE_UP}{BIAS}": [count, 2 * k]}
        return wanted

    def _match(self) -> None:
        """Follow transformers' loader from each stored name to a tensor of the model."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        wanted, base = self._wanted(), getattr(self._model, "base_model_prefix", None)
        found: dict[str, _Conversion] = {}
        packed: dict[str, str] = {}
        for stored in sorted(self.files.names, key=dot_natural_key):
            name, pattern = rename_source_key(stored, renamings, converters, base, wanted)
            if name not in wanted and stored in wanted:
                name, pattern = stored, None
            if name not in wanted and name.endswith((BLOCKS, SCALES)) and name.rpartition("_")[0] in wanted:
                packed[name] = stored
            elif name not in wanted:
                self._unknown[stored] = name
            elif pattern is None:
                self._whole.setdefault(name, stored)
            else:
                conversion = found.setdefault(name, _Conversion(name, by_pattern[pattern]))
                conversion.stored[pattern].append(stored)
        for fused in dict.fromkeys(name.rpartition("_")[0] for name in packed):
            if fused + BLOCKS in packed and fused + SCALES in packed:
                self._packed[fused] = PackedExperts(packed[fused + BLOCKS], packed[fused + SCALES])
        for conversion in found.values():
            for name, shape in self._converted_shapes(conversion).items():
                self._converted[name], self._shapes[name] = conversion, shape

    def _converted_shapes(self, conversion: _Conversion) -> dict[str, list[int]]:
        """What a conversion makes, tried without the tensors; of one that fails its first name alone."""
        try:
            made = self._convert(conversion, lambda name: torch.empty(self.files[name].shape, device="meta"))
        except Exception:
            # An incomplete mixture, or a shape that cannot be cut: the shape it should have is compared later.
            return {conversion.name: []}
        finally:
            self.release()
        return {name: list(tensor.shape) for name, tensor in made.items()}

    def _convert(self, conversion: _Conversion, tensor: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The tensors that a rule makes of stored ones; the last answer is kept for its next part."""
        if self._last[0] is not conversion:
            rule = copy.deepcopy(conversion.rule)
            for pattern, names in conversion.stored.items():
                for name in names:
                    rule.add_tensor(conversion.name, name, pattern, tensor(name))
            made = rule.convert(conversion.name, model=self._model, config=self._model.config)
            self._last = conversion, {name: v[0] if isinstance(v, list) else v for name, v in made.items()}
        return self._last[1]

    def _grouped(self) -> Iterator[Group]:
        apart = defaultdict(list)
        for path, experts in self._experts.items():
            for name, _ in experts.named_parameters(prefix=path):
                apart[self._target(name)].append(name)
        for name, stored in self._whole.items():
            yield Group([stored], apart.get(name, [name]), name not in apart and name not in self._transposed)
        for conversion in dict.fromkeys(self._converted.values()):
            made = [name for name, other in self._converted.items() if other is conversion]
            targets = [part for name in made for part in apart.get(name, [name])]
            yield Group(conversion.sources, targets, not any(name in apart for name in made))
        for name, packed in self._packed.items():
            yield Group([packed.blocks, packed.scales], apart[name], copied=False)
        for stored in self._unknown:
            yield Group([stored], [])


class _Transpose:
    """The matrix [n, k] of a GPT-2 layer, which is stored as [k, n]."""

    def __call__(self, stored: Tensor) -> Tensor:
        return stored.T

    def shape(self, stored: list[int]) -> list[int]:
        return stored[::-1]


_Found = tuple[str | _Conversion | PackedExperts, Cut | _Transpose | None]


def _matrices(rule: Any, stored: dict[str, list[str]]) -> dict[Cut, str] | None:
    """The stored name of every expert's matrices, where a rule does no more than to stack them, so that one can be
    read without the others; None where it does."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    patterns = rule.source_patterns
    kinds = [type(operation) for operation in rule.operations]
    if (kinds, len(patterns)) not in (([MergeModulelist], 1), ([MergeModulelist, Concatenate], 2)):
        return None
    found = {}
    for half, pattern in enumerate(patterns):
        # The number that stands where the pattern has its star, whatever was renamed before it.
        ending = re.escape(pattern.partition("*.")[2].rstrip("$").replace("\\.", "."))
        for name in stored[pattern]:
            matched = re.search(rf"\.(\d+)\.{ending}$", name)
            if matched is None:
                return None
            found[Cut(int(matched[1]), half if len(patterns) == 2 else None)] = name
    return found
