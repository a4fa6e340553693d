"""Models by name: those of the Hugging Face hub, downloaded once into the hub's own cache, and ``demo``."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, TrirunError
from ..resources import configs_dir

if TYPE_CHECKING:
    from ..console import Console

# The name of the model that ships with trirun, wherever it is installed.
DEMO = "demo"
_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?")
# What a model directory is made of: config, weights, tokenizers of every kind, chat templates. Other formats of the
# weights, which may be several times as large, stay where they are.
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken", "trirun_recipe.yaml"]
_UNWANTED = ["*/*", "consolidated*"]


def hub_name(given: Path) -> tuple[str, str | None] | None:
    """ORG/NAME and revision of ORG/NAME[@REVISION], where ``given`` is that rather than a place on this machine: a file
    or directory of that name, or a directory of the organisation's, is what is meant where it exists."""
    matched = _NAME.fullmatch(str(given))
    if matched is None or given.exists() or given.parent.exists():
        return None
    return matched["name"], matched["revision"]


def model_name(given: Path) -> str:
    """What a model is called, for the names of what is made of it: its directory's name, or the hub's without ORG."""
    named = hub_name(given)
    return given.resolve().name.removesuffix(".gguf") if named is None else named[0].partition("/")[2]


def local_model(given: Path, console: Console | None = None) -> Path:
    """The directory of a model: ``given``; the model that ships with trirun, for ``demo`` where nothing here has that
    name; or the hub's ORG/NAME[@REVISION] in the hub's cache, downloaded as far as it is not there (HF_HUB_OFFLINE=1:
    only looked for).

    Args:
        console: what tells the user so, with a progress bar; None is silent.

    Raises:
        InputError: the hub has no such model, or not for this user. TrirunError: the hub cannot be reached.
    """
    if str(given) == DEMO and not given.exists():
        return configs_dir() / "demo-model"
    named = hub_name(given)
    if named is None:
        return given
    name, revision = named
    import huggingface_hub
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    if console is None or console.quiet or console.as_json or not sys.stderr.isatty():
        disable_progress_bars()
    if console is not None:
        console.note(f"{given} is no directory here: taking it from the Hugging Face hub")
    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except errors.GatedRepoError:
        fix = f"accept its terms on https://huggingface.co/{name}, then: hf auth login"
        raise InputError(f"{given}: a gated model of the hub", fix) from None
    except errors.RevisionNotFoundError:
        raise InputError(f"{given}: the hub has no such revision of it") from None
    except errors.RepositoryNotFoundError:
        fix = "hf auth login, if it is private"
        raise InputError(f"{given}: no such directory, and no such model on the hub", fix) from None
    except errors.LocalEntryNotFoundError:
        fix = "connect, or give a directory"
        raise InputError(
            f"{given}: no such directory, nor in the hub's cache, and the hub is not reached", fix
        ) from None
    except (errors.HfHubHTTPError, ConnectionError) as error:
        raise TrirunError(f"{given}: the hub answers: {' '.join(str(error).split())[:300]}") from error
    return Path(found)
