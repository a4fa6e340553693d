"""Which files of a hub repository are the model: safetensors with their config.json, or one GGUF file among several.

GGUF repositories hold one model many times, in types of different sizes. trirun takes a ternary or 2-bit one, which it
packs without loss; where names leave the choice open, the user makes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

from ..errors import InputError

# What a model directory is made of: config, weights, tokenizers of every kind, chat templates. Other formats of the
# weights, which may be several times as large, stay where they are.
WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "trirun_recipe.yaml", "SHA256SUMS")
UNWANTED = ("*/*", "consolidated*")
# Types in the order in which they are taken: trirun's own groups first, then larger blocks, then one scale a row or a
# tensor, then those without zeros. Names write "Q2_g64" too.
_TYPES = ("PQ2_0", "Q2_0_g64", "Q2_g64", "Q2_0", "PTQ1_0", "TQ2_0", "TQ1_0", "I2_S", "IQ2_BN", "IQ1_BN", "Q1_0")
_TYPE = re.compile(rf"(?:^|[-._])({'|'.join(_TYPES)})(?=[-._])", re.IGNORECASE)
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
# GGUF files beside a model that are none: vision towers, importance matrices.
_NO_MODEL = ("*mmproj*", "*imatrix*")


@dataclass(frozen=True, slots=True)
class GgufChoice:
    """One model among GGUF files.

    Attributes:
        files: its file, or its parts in order. why: it was taken.
    """

    files: list[str]
    why: str


def choose_gguf(names: Iterable[str], asked: str | None, where: str) -> GgufChoice | None:
    """The GGUF model that a repository means, or None where it is one of safetensors.

    Args:
        names: of all its files. asked: a file's name, its type (``TQ2_0``), or a part of the name; None leaves the
            choice to trirun. where: the repository, for messages.

    Raises:
        InputError: there is no model, nothing is or several are as asked, several may be meant, or parts are missing.
    """
    names = sorted(names)
    models = _grouped(name for name in names if not any(fnmatch(name, pattern) for pattern in _NO_MODEL))
    if asked is None and "config.json" in names and any(fnmatch(n, "*.safetensors") and "/" not in n for n in names):
        return None
    if not models:
        found = f"; it has {', '.join(names[:8])}" if names else ""
        raise InputError(f"{where} has no {'GGUF' if asked else 'safetensors and no GGUF'} files{found}")
    model, why = _asked(models, asked, where) if asked else _preferred(models, where)
    return GgufChoice(_complete(model, models[model], where), why)


def _grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF files, the parts of a split one under the name of the whole."""
    models: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(".gguf"):
            models.setdefault(_PART.sub("", name), []).append(name)
    return models


def _asked(models: Mapping[str, list[str]], asked: str, where: str) -> tuple[str, str]:
    rules = (
        lambda name: asked in (name, *models[name]),
        lambda name: (_type(name) or "").casefold() == asked.casefold(),
        lambda name: asked.casefold() in name.casefold(),
    )
    for rule in rules:
        found = [name for name in models if rule(name)]
        if len(found) == 1:
            return found[0], f"asked for by {asked}"
        if found:
            raise InputError(f"{where}: {asked} may be {_listed(found)}", f"name one: {where}:{found[0]}")
    raise InputError(f"{where} has no GGUF file {asked}; it has {_listed(models)}")


def _preferred(models: Mapping[str, list[str]], where: str) -> tuple[str, str]:
    if len(models) == 1:
        return next(iter(models)), "its only GGUF file"
    for kind in _TYPES:
        found = [name for name in models if _type(name) == kind]
        if len(found) == 1:
            return found[0], f"{kind} is the first of the 2-bit and ternary types there"
        if found:
            break
    else:
        found = list(models)
    raise InputError(f"{where} has several GGUF files that may be meant: {_listed(found)}", f"name one: {where}:FILE")


def _type(name: str) -> str | None:
    """The type that a file's name states, of those that trirun prefers."""
    matched = _TYPE.search(name.rpartition("/")[2])
    return None if matched is None else next(kind for kind in _TYPES if kind.casefold() == matched[1].casefold())


def _complete(model: str, files: list[str], where: str) -> list[str]:
    part = _PART.search(files[0])
    if part is not None and len(files) != int(part[2]):
        raise InputError(f"{where}: of the {int(part[2])} parts of {model} there are {len(files)}")
    return files


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
