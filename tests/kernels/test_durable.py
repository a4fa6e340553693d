"""Publishing a directory where the file system cannot exchange two names, and after a killed run."""

import errno
import os
from pathlib import Path

import pytest
from trirun_kernels.weights import durable
from trirun_kernels.weights.durable import locked, publish_directory, publish_file, recover


def directory(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


@pytest.fixture
def places(tmp_path):
    return directory(tmp_path / "T.partial", "new"), directory(tmp_path / "T", "old")


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_directory_replaces_another(places, monkeypatch, exchanges):
    partial, out = places
    if not exchanges:
        monkeypatch.setattr(durable, "_exchanged", lambda *_: False)
    publish_directory(partial, out)
    assert (out / "file").read_text() == "new" and [path.name for path in out.parent.iterdir()] == ["T"]


def test_names_are_exchanged_where_the_system_can(places):
    partial, out = places
    if not durable._exchanged(partial, out):
        pytest.skip("this file system cannot exchange two names")
    assert (out / "file").read_text() == "new" and (partial / "file").read_text() == "old"


@pytest.mark.parametrize("number", [errno.EXDEV, errno.ENOTEMPTY, errno.EIO])
def test_a_rename_that_fails_gives_the_old_directory_its_name_back(places, monkeypatch, number):
    partial, out = places
    rename = os.rename

    def fails(source, target):
        if source == partial:
            raise OSError(number, os.strerror(number), str(source))
        rename(source, target)

    monkeypatch.setattr(durable, "_exchanged", lambda *_: False)
    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(OSError, match=os.strerror(number)):
        publish_directory(partial, out)
    assert (out / "file").read_text() == "old"


def test_what_a_killed_run_had_put_aside_gets_its_name_back(tmp_path):
    directory(tmp_path / "T.replaced", "old")
    recover(tmp_path / "T")
    assert (tmp_path / "T" / "file").read_text() == "old"
    directory(tmp_path / "T.replaced", "older")
    recover(tmp_path / "T")
    assert (tmp_path / "T" / "file").read_text() == "old" and not (tmp_path / "T.replaced").exists()


def test_files_and_directories_are_flushed_in_order(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append(os.readlink(f"/proc/self/fd/{file}")), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    partial = tmp_path / "a.partial"
    partial.write_text("x")
    publish_file(partial, tmp_path / "a")
    assert calls == [str(partial), "replace", str(tmp_path)]


def test_a_lock_is_on_what_has_the_name(tmp_path):
    first = locked(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    assert first is not None and locked(tmp_path / "a", os.O_RDWR | os.O_CREAT) is None
    (tmp_path / "a").rename(tmp_path / "b")
    second = locked(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    assert second is not None
    os.close(first)
    os.close(second)
