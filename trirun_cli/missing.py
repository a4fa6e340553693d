"""What to say where an optional dependency is missing."""

from __future__ import annotations

import traceback

from .errors import MissingError

_OWN = ("trirun_cli", "trirun_gptq", "trirun_kernels", "importlib", "_frozen_importlib", "__main__")


def missing_package(error: ModuleNotFoundError, what: str, extra: str) -> MissingError:
    """The message of a failed import: which package is missing and, where no module of trirun asked for it, who did.

    Args:
        error: caught. what: needs the package: "serving", "--tasks piqa". extra: of trirun, that has it.

    Example:
        "serving needs fastapi, fastapi needs opentelemetry, and opentelemetry is not installed"
    """
    missing = error.name or str(error)
    chain: list[str] = []
    # From trirun's import statement down to the one that failed: every package on the way.
    for frame, _ in traceback.walk_tb(error.__traceback__):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in (*_OWN, *chain[-1:]):
            chain.append(package)
    needs = [f"{asker} needs {asked}" for asker, asked in zip([what, *chain], [*chain, missing], strict=True)]
    message = f"{needs[0]}, which is not installed"
    if chain:
        message = ", ".join(needs) + f", and {missing} is not installed: the installation of {chain[0]} is incomplete"
    return MissingError(message, f"pip install 'trirun[{extra}]'")
