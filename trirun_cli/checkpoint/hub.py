"""Models by name: those of the Hugging Face hub, downloaded once into the hub's own cache, and ``demo``."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, TrirunError, writing
from ..resources import configs_dir
from .hub_files import UNWANTED, WANTED, choose_gguf
from .turns import in_turn

if TYPE_CHECKING:
    from ..console import Console

# The name of the model that ships with trirun, wherever it is installed.
DEMO = "demo"
_NAME = re.compile(r"(?P<name>[\w-][\w.-]*/[\w.-]+)(@(?P<revision>[\w./-]+))?(:(?P<file>[\w./+-]+))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub, ORG/NAME[@REVISION][:FILE].

    Attributes:
        name: ORG/NAME. revision: a branch, tag or commit; None is ``main``. file: of a GGUF repository, a file's name,
            its type, or a part of the name; None leaves the choice to trirun.
    """

    name: str
    revision: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True)
class _Listing:
    """The files of one commit of a repository, to their SHA-256 where the hub knows it: of all large files."""

    commit: str
    files: dict[str, str | None]


def hub_name(given: Path) -> HubName | None:
    """What ``given`` names on the hub, where it is such a name rather than a place on this machine: a file or directory
    of that name, or a directory of the organisation's, is what is meant where it exists."""
    matched = _NAME.fullmatch(str(given))
    if matched is None or given.exists() or given.parent.exists():
        return None
    return HubName(matched["name"], matched["revision"], matched["file"])


def model_name(given: Path) -> str:
    """What a model is called, for the names of what is made of it: its directory's name, or the hub's without ORG."""
    named = hub_name(given)
    return given.resolve().name.removesuffix(".gguf") if named is None else named.name.partition("/")[2]


def local_model(given: Path, console: Console | None = None) -> Path:
    """Where a model lies: ``given``; the model that ships with trirun, for ``demo`` where nothing here has that name;
    or ORG/NAME[@REVISION][:FILE] in the hub's cache, downloaded as far as it is not there (HF_HUB_OFFLINE=1: only
    looked for). Of a repository of GGUF files that is one file (:func:`~.hub_files.choose_gguf`), else a directory.

    Every downloaded file is held against the hub's SHA-256. A cut connection is resumed; after an interrupted run,
    files that were complete are kept. A token is taken from where ``hf auth login`` puts it, or from HF_TOKEN.

    Args:
        console: what tells the user so, with a progress bar; None is silent.

    Raises:
        InputError: the hub has no such model, or not for this user, or several files may be meant. TrirunError: the hub
            cannot be reached, or a file arrived damaged.
    """
    if str(given) == DEMO and not given.exists():
        return configs_dir() / "demo-model"
    named = hub_name(given)
    if named is None:
        return given
    if console is not None:
        console.note(f"{given} is no directory here: taking it from the Hugging Face hub")
    with _explained(named):
        return _fetched(named, console)


def _fetched(named: HubName, console: Console | None) -> Path:
    """The model in the hub's cache."""
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars, filter_repo_objects

    if console is None or console.quiet or console.as_json or not sys.stderr.isatty():
        disable_progress_bars()
    cache = Path(huggingface_hub.constants.HF_HUB_CACHE) / f"models--{named.name.replace('/', '--')}"
    online = _listing(named)
    known = online or _cached(cache, named)
    chosen = None if known is None else choose_gguf(known.files, named.file, named.name)
    if chosen is not None and console is not None:
        parts = f" in {len(chosen.files)} parts" if len(chosen.files) > 1 else ""
        console.note(f"{named.name}: {chosen.files[0]}{parts}, {chosen.why}")
    there = set() if known is None else _present(cache, known)
    if online is None and known is not None and chosen is not None and there.issuperset(chosen.files):
        return cache / "snapshots" / known.commit / chosen.files[0]
    allowed, ignored = (WANTED, UNWANTED) if chosen is None else (chosen.files, ())
    wanted: set[str] = set()
    if online is not None:
        wanted = set(filter_repo_objects(online.files, allow_patterns=[*allowed], ignore_patterns=[*ignored]))
    # A cache that has everything may be one that nobody can write to.
    work = f"downloading {named.name}"
    alone = nullcontext() if wanted <= there else in_turn(_lock_file(cache, wanted), work, console)
    with writing(cache), alone:
        # Another run may have downloaded them meanwhile, and checked them.
        there = set() if known is None else _present(cache, known)
        found = Path(
            huggingface_hub.snapshot_download(
                named.name, revision=named.revision, allow_patterns=[*allowed], ignore_patterns=[*ignored]
            )
        )
        if online is not None and found.name == online.commit:
            _check({found / name: sha for name, sha in online.files.items() if name not in there}, named)
    return found if chosen is None else found / chosen.files[0]


def _lock_file(cache: Path, wanted: set[str]) -> Path:
    """Beside the locks that the hub's own library holds for single files, of which it tells nobody."""
    digest = hashlib.sha256("\0".join(sorted(wanted)).encode()).hexdigest()[:16]
    return cache.parent / ".locks" / cache.name / f"trirun-{digest}.lock"


def _listing(named: HubName) -> _Listing | None:
    """What the hub has; None where it is not reached, or does not tell, in which case the download says why."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(named.name, revision=named.revision, files_metadata=True)
    except (HfHubHTTPError, ConnectionError):
        return None
    except Exception as error:
        # Which library the hub's own uses differs by its version.
        if not type(error).__module__.startswith("httpx"):
            raise
        return None
    files = {file.rfilename: file.lfs.sha256 if file.lfs is not None else None for file in info.siblings or ()}
    for name in files:
        if name.startswith("/") or ".." in name.split("/"):
            raise InputError(f"{named.name}: the hub lists {name!r}, which is no file of a model's directory")
    return _Listing(str(info.sha), files)


def _cached(cache: Path, named: HubName) -> _Listing | None:
    """What an earlier run has left of a model in its folder of the hub's cache."""
    revision = named.revision or "main"
    ref = cache / "refs" / revision
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else revision
    folder = cache / "snapshots" / commit
    if not folder.is_dir():
        return None
    files = (file for file in folder.rglob("*") if file.is_file())
    return _Listing(commit, {str(file.relative_to(folder)): None for file in files})


def _present(cache: Path, listing: _Listing) -> set[str]:
    """The files that need no download."""
    return {name for name in listing.files if (cache / "snapshots" / listing.commit / name).is_file()}


def _check(files: dict[Path, str | None], named: HubName) -> None:
    """Hold downloaded files against the hub's SHA-256, and remove those that differ."""
    for file, expected in files.items():
        if expected is None or not file.is_file():
            continue
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != expected:
            # What the link of that name points to, too.
            file.resolve().unlink()
            file.unlink(missing_ok=True)
            message = f"{named.name}: {file.name} arrived with SHA-256 {found}, the hub has {expected}"
            raise TrirunError(f"{message}; it is removed", "try again")


@contextmanager
def _explained(named: HubName) -> Iterator[None]:
    """Around calls of the hub: what it answers, for the user."""
    from huggingface_hub import errors

    given = named.name if named.revision is None else f"{named.name}@{named.revision}"
    try:
        yield
    except errors.GatedRepoError:
        fix = f"accept its terms on https://huggingface.co/{named.name}, then: hf auth login"
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
