"""The metadata of a GGUF file, by kinds: what a reader takes for a number is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ....errors import InputError


class Metadata(dict[str, Any]):
    """Key to number, bool, string, list of strings, or numpy array.

    Every method raises :class:`~trirun_cli.errors.InputError` where an entry is of another kind, and where there is
    none and no default. A key that begins with a dot is the architecture's own: ``.block_count`` is
    ``llama.block_count``.

    Attributes:
        path: of the file, for messages.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @property
    def architecture(self) -> str:
        """``general.architecture``."""
        return self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._entry(key, default)
        return value if isinstance(value, str) else self._refuse(key, "a string")

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._entry(key, default)
        return value if isinstance(value, bool) else self._refuse(key, "true or false")

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """An integer of at least ``least``."""
        value = self._entry(key, default)
        if type(value) is not int or not least <= value < 2**31:
            self._refuse(key, f"an integer of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number, with the digits that fp32 holds."""
        value = self._entry(key, default)
        if type(value) not in (int, float) or not 0 < value < 2**40:
            self._refuse(key, "a positive number")
        return float(str(np.float32(value)))

    def token(self, key: str, tokens: int) -> int | None:
        """The number of one of so many tokens, or None where there is none."""
        if self._key(key) not in self:
            return None
        value = self.count(key, least=0)
        return value if value < tokens else self._refuse(key, f"one of {tokens} tokens")

    def strings(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._entry(key, None)
        if isinstance(value, np.ndarray) and not len(value):
            return []
        return value if isinstance(value, list) else self._refuse(key, "a list of strings")

    def numbers(self, key: str, count: int, kinds: str) -> np.ndarray:
        """So many numbers, of one of numpy's ``kinds``."""
        value = self._entry(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or len(value) != count:
            self._refuse(key, f"a list of {count} numbers")
        return value

    def has(self, key: str) -> bool:
        """Whether there is such an entry."""
        return self._key(key) in self

    def _key(self, key: str) -> str:
        return self.architecture + key if key.startswith(".") else key

    def _entry(self, key: str, default: Any) -> Any:
        return self.get(self._key(key), default)

    def _refuse(self, key: str, what: str) -> NoReturn:
        key = self._key(key)
        if key not in self:
            raise InputError(f"{self.path}: the metadata have no {key}")
        value = self[key]
        shown = f"a list of {len(value)}" if isinstance(value, list | np.ndarray) else repr(value)[:80]
        raise InputError(f"{self.path}: {key} is {shown}, not {what}")
