"""Regular expressions that come with a recipe or a command: bounded in time."""

from __future__ import annotations

from .errors import QuantizationError

SECONDS = 1.0  # of one search: the name of a module is some dozen characters


def matches(pattern: str, name: str, seconds: float = SECONDS) -> bool:
    """Whether a pattern is found in a module's name (``re.search``).

    Raises:
        QuantizationError: the search takes longer than so many seconds, as patterns with nested repetitions can; or
            ``regex`` reads the pattern otherwise than ``re``, as an error.
    """
    # It takes part of its syntax from the standard library's, which has no limit of time.
    import regex

    try:
        return regex.search(pattern, name, timeout=seconds) is not None
    except TimeoutError:
        raise QuantizationError(f"{pattern!r} takes more than {seconds:g} s to be looked for in {name}") from None
    except regex.error as error:
        raise QuantizationError(f"{pattern!r} is not a regular expression: {error}") from None
