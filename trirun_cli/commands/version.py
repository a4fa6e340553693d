"""``trirun version``."""

from __future__ import annotations

from ..console import Console
from ..version import __version__
from .shared.options import Json

PACKAGES = ("torch", "transformers", "safetensors", "datasets", "accelerate", "typer", "rich")


def command(json: Json = False) -> None:
    """Print the versions of trirun and of what it stands on. Imports none of them.

    Example: trirun version --json
    """
    # Here, because every command imports this module.
    import platform
    from importlib import metadata

    console = Console(as_json=json)
    versions = {"trirun": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    console.json("version/1", versions)
    for name, version in versions.items():
        console.text(f"{name} {version}")
