"""Writing a packed checkpoint so that it appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from trirun_kernels.weights.durable import locked, publish_directory, recover
from trirun_kernels.weights.names import SCALE, WEIGHT, ZERO
from trirun_kernels.weights.safetensors_dir import INDEX, SINGLE

from ..errors import InputError, writing
from .model_dir import MLX_SECTION, ModelSource
from .reader import Format

if TYPE_CHECKING:
    from torch import Tensor
    from trirun_kernels import PackedWeight, QuantSpec

RECIPE_FILE = "trirun_recipe.yaml"
CHECKSUMS = "SHA256SUMS"  # of all other files, as `sha256sum -c` reads it
# Everything beside the weights that a model directory needs travels along: tokenizer, templates, generation config.
COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*", "NOTICE*", "README*")
SKIPPED = ("config.json", INDEX, RECIPE_FILE)


class PackedModule(Protocol):
    """What the format section needs to know of a packed module: its name, true shape and grid."""

    @property
    def name(self) -> str: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def spec(self) -> QuantSpec: ...


class CheckpointWriter:
    """Builds ``OUT.partial`` tensor by tensor and renames it to ``OUT`` at the end.

    Used as a context manager: leaving it by an exception removes the partial directory; a checkpoint that was at
    ``OUT`` before is replaced only once the new one is complete and on disk.

    Args:
        out: the directory to make. source: the model the config and companion files come from.
        overwrite: replace ``out`` if it exists and is not empty.
        max_shard_bytes: a weight file is closed before it grows past this.

    Raises:
        InputError: ``out`` is not empty and ``overwrite`` is False, or it may not be replaced: it is a file, a mount
            point, no model directory, or holds the source. On entering: another run is writing it.
    """

    def __init__(
        self, out: str | Path, source: ModelSource, *, overwrite: bool = False, max_shard_bytes: int = 1024**3
    ) -> None:
        # Resolved, so that "." has a name, and so that where a link points is replaced and not the link.
        self.out, self.source = Path(out).resolve(), source
        self._given, self._overwrite = out, overwrite
        self._check()
        self.partial = self.out.with_name(self.out.name + ".partial")
        self._max_shard_bytes = max_shard_bytes
        self._shard: dict[str, Tensor] = {}
        self._shards: list[list[str]] = []
        self._total_bytes = 0
        self._published = False

    def __enter__(self) -> CheckpointWriter:
        # What a killed run has left is not locked any more; what is locked is not to be touched.
        lock = locked(self.partial, os.O_RDONLY)
        if lock is None:
            raise InputError(f"another run is writing {self.out}", "wait for it, or give another --out")
        self._lock = lock
        try:
            recover(self.out)
            # Again: what a killed run had put aside, or another run has published since.
            self._check()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        for left in self.partial.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Once published, a directory of that name is another run's.
        if not self._published and self.partial.exists():
            # On a disk that is read-only by now it stays; the error that says so is what the user needs.
            shutil.rmtree(self.partial, ignore_errors=True)
        os.close(self._lock)

    def _check(self) -> None:
        out = self._given
        if not self.out.exists():
            return
        if any(place.resolve().is_relative_to(self.out) for place in (self.source.path, *self.source.files)):
            raise InputError(f"{out} is or holds the model itself; write the checkpoint to another directory")
        if not self.out.is_dir():
            raise InputError(f"{out} is a file; a checkpoint is a directory")
        if os.path.ismount(self.out):
            raise InputError(f"{out} is a mount point, which cannot be replaced", "name a folder inside it")
        if not any(self.out.iterdir()):
            return
        if not self._overwrite:
            raise InputError(f"{out} exists and is not empty", "--overwrite replaces it")
        # Whoever mistypes a path must not lose what has nothing to do with models.
        if not (self.out / "config.json").is_file():
            raise InputError(f"{out} is no model directory; --overwrite replaces nothing else")

    def add(self, name: str, tensor: Tensor) -> None:
        """Store a tensor as it is."""
        tensor = tensor.detach().cpu().contiguous()
        if self._shard and sum(t.nbytes for t in self._shard.values()) + tensor.nbytes > self._max_shard_bytes:
            self._close_shard()
        self._shard[name] = tensor
        self._total_bytes += tensor.nbytes

    def add_packed(self, module: str, w: PackedWeight) -> None:
        """Store a packed weight under its module's name."""
        self.add(module + WEIGHT, w.words)
        self.add(module + SCALE, w.scales)
        if w.zeros is not None:
            self.add(module + ZERO, w.zeros)

    def finish(
        self, packed: Iterable[PackedModule], linears: Iterable[str], recipe: dict[str, Any], activation_bits: int = 16
    ) -> Format:
        """Write the last shard, config and companion files, flush everything to disk, and rename.

        Args:
            packed: the packed modules, linear or embeddings. linears: names of all linear modules, packed or not.
            recipe: what made this checkpoint, fully resolved; written as YAML, beside the SHA-256 of each file.
            activation_bits: see :class:`~trirun_cli.checkpoint.reader.Format`.

        Returns:
            the format section written to config.json.
        """
        made = _format(list(packed), linears, activation_bits)
        self._finish(plain_config(self.source.config) | {"quantization_config": made.to_dict()}, recipe)
        return made

    def finish_as(self, config: dict[str, Any]) -> None:
        """:meth:`finish` for a directory that is no trirun checkpoint: config.json is ``config``, with no recipe."""
        self._finish(config, None)

    def _finish(self, config: dict[str, Any], recipe: dict[str, Any] | None) -> None:
        self._close_shard()
        with writing(self.partial):
            self._complete(config, recipe)
        self._publish()

    def _complete(self, config: dict[str, Any], recipe: dict[str, Any] | None) -> None:
        """All but the renaming."""
        import yaml

        self._name_shards()
        _write(self.partial / "config.json", json.dumps(config, indent=2))
        for file in self.partial.glob("*.safetensors"):
            # Their library gives nobody else leave to read them; config.json has what the umask leaves.
            file.chmod((self.partial / "config.json").stat().st_mode)
        if recipe is not None:
            _write(self.partial / RECIPE_FILE, yaml.safe_dump(recipe, sort_keys=False).rstrip("\n"))
        for pattern in COMPANIONS:
            for file in self.source.path.glob(pattern):
                if file.is_file() and file.name not in SKIPPED:
                    shutil.copyfile(file, self.partial / file.name)
        if recipe is not None:
            sums = [f"{file_hash(file)}  {file.name}" for file in sorted(self.partial.iterdir())]
            _write(self.partial / CHECKSUMS, "\n".join(sums))

    def _close_shard(self) -> None:
        from safetensors.torch import save_file

        if self._shard:
            with writing(self.partial):
                save_file(self._shard, self.partial / f"shard-{len(self._shards)}", metadata={"format": "pt"})
            self._shards.append(list(self._shard))
            self._shard = {}

    def _name_shards(self) -> None:
        count = len(self._shards)
        if count == 1:
            os.rename(self.partial / "shard-0", self.partial / SINGLE)
            return
        where: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            os.rename(self.partial / f"shard-{number}", self.partial / file)
            where |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": where}
        _write(self.partial / INDEX, json.dumps(index, indent=2))

    def _publish(self) -> None:
        publish_directory(self.partial, self.out)
        self._published = True


def _format(packed: list[PackedModule], linears: Iterable[str], activation_bits: int) -> Format:
    from trirun_kernels.weights.shapes import padded

    common = Counter(module.spec for module in packed).most_common(1)[0][0]
    overrides = {
        module.name: {"group_size": module.spec.group_size, "zero": module.spec.zero}
        for module in packed
        if module.spec != common
    }
    shapes = {module.name: (module.n, module.k) for module in packed}
    padding = {name: [n, k] for name, (n, k) in shapes.items() if padded(n, k) != (n, k)}
    kept, embeddings = sorted(set(linears) - shapes.keys()), sorted(shapes.keys() - set(linears))
    return Format(common.group_size, common.zero, overrides, padding, kept, activation_bits, embeddings)


def plain_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json without what it says of quantization."""
    return {key: value for key, value in config.items() if key not in ("quantization_config", MLX_SECTION)}


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
