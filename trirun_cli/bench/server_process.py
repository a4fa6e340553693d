"""A ``trirun serve`` in a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import TrirunError


class ServerProcess:
    """Starts a server on a free port and waits until it takes requests; stops it at the end of the ``with`` block.

    Args:
        checkpoint: to serve. options: more options of ``trirun serve``.

    Attributes:
        facts: the server's --json document. url: of the server.
        memory: its resident memory over time, (seconds since the start, bytes), once a second.

    Raises:
        SystemExit: it did not start and has said why on stderr; with its exit code. TrirunError: it was stopped.
    """

    def __init__(self, checkpoint: Path, options: Sequence[str] = ()) -> None:
        command = [sys.executable, "-m", "trirun_cli", "serve", "--checkpoint", str(checkpoint)]
        command += ["--host", "127.0.0.1", "--port", "0", "--json", "--quiet", *options]
        # In a session of its own, so that Ctrl-C reaches only this process, which stops the server.
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        try:
            self.facts: dict[str, Any] = self._wait_until_ready()
        except BaseException:
            self._end(5)
            raise
        self.url: str = self.facts["url"]
        self.memory: list[tuple[float, int]] = []
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._end(60 if kind is None else 5)

    def _wait_until_ready(self) -> dict[str, Any]:
        """The document that the server prints when it takes requests.

        Raises:
            SystemExit, TrirunError: it has ended before.
        """
        lines = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.append(line)
            if line == "}\n":
                return json.loads("".join(lines))
        code = self._process.wait()
        if code > 0:
            raise SystemExit(code)
        raise TrirunError(f"the server did not start: {f'signal {-code}' if code else 'it was told to stop'}")

    def _end(self, patience_s: float) -> None:
        self._process.terminate()
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        page, started = os.sysconf("SC_PAGE_SIZE"), time.perf_counter()
        with suppress(OSError):
            while not self._stop.wait(1.0):
                pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
                self.memory.append((round(time.perf_counter() - started, 1), pages * page))
