"""``trirun serve --backend vllm`` up to the start of vLLM, whose place a small server takes."""

from __future__ import annotations

import sys
import threading
from importlib import metadata

import pytest

from trirun_cli.errors import MissingError, TrirunError, UsageError
from trirun_cli.integrations import vllm_server
from trirun_cli.workflows.diagnose import diagnose

HEALTHY = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        print(os.environ.get("VLLM_API_KEY"), file=sys.stderr, flush=True)
        if %r: os._exit(3)
http.server.HTTPServer(("127.0.0.1", %d), Handler).serve_forever()
"""


@pytest.fixture
def vllm(monkeypatch):
    """``vllm("0.30.0", plugin=True)``: what is installed."""

    def install(version: str | None, *, plugin: bool = True) -> None:
        monkeypatch.setattr(vllm_server, "installed_version", lambda: version)
        monkeypatch.setattr("trirun_cli.workflows.diagnose.installed_version", lambda: version)
        points = [metadata.EntryPoint("trirun", "trirun_cli.integrations.vllm:register", vllm_server.GROUP)]
        monkeypatch.setattr(metadata, "entry_points", lambda group: points if plugin else [])

    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return install


def doctor() -> tuple[str, str]:
    finding = next(finding for finding in diagnose() if finding.name == "vllm")
    return finding.status, finding.detail


def test_versions_and_the_plugin_are_checked(vllm, monkeypatch) -> None:
    vllm("0.21.1")
    assert vllm_server.check_installation() == "0.21.1"
    assert doctor()[0] == "ok"
    for version, plugin, message in (
        (None, True, "not installed"),
        ("0.9.2", True, r"0\.9\.2 is older than 0\.21"),
        ("0.32.0", False, "does not find trirun's plugin"),
    ):
        vllm(version, plugin=plugin)
        with pytest.raises(MissingError, match=message):
            vllm_server.check_installation()
        assert doctor()[0] == "note"
    vllm("0.32.0")
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    with pytest.raises(UsageError, match="leaves out"):
        vllm_server.check_installation()


def test_options_reach_vllm(trirun, packed, vllm, monkeypatch) -> None:
    vllm("0.32.0")
    started = []
    monkeypatch.setattr(vllm_server, "run_server", lambda command, url, key, ready: started.append((command, key)))
    options = ["--max-batch", 8, "--ctx", 64, "--port", 0, "--drain", 9, "--api-key", "secret", "--cors-origin", "*"]
    own = ["--tensor-parallel-size", "2", "--enforce-eager"]
    for named in ([packed], ["--checkpoint", packed]):
        code, _, err = trirun("serve", *named, "--backend", "vllm", *options, "--", *own)
        assert code == 0, err
    (first, key), (second, _) = started
    for command in (first, second):
        command[command.index("--port") + 1] = "0"
    assert first == second and key == "secret" and "secret" not in first
    assert first[1:5] == ["-m", "trirun_cli.integrations.vllm_launch", "serve", str(packed)]
    assert first[-3:] == own
    text = " ".join(first)
    assert '--max-num-seqs 8 --max-model-len 64 --shutdown-timeout 9 --allowed-origins ["*"]' in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "sglang"], "--backend sglang: trirun or vllm"),
        (["--backend", "vllm", "--act-bits", "8"], "--act-bits is not an option of --backend vllm"),
        (["--", "--tensor-parallel-size", "2"], "without --backend vllm"),
    ],
)
def test_options_of_one_backend_are_refused_by_the_other(trirun, packed, vllm, options, message) -> None:
    vllm("0.32.0")
    code, _, err = trirun("serve", packed, *options)
    assert code == 2 and message in " ".join(err.split())


def test_a_server_is_waited_for_and_its_end_is_told(capfd) -> None:
    url, port = vllm_server.url_of_server("127.0.0.1", 0)
    ready = threading.Event()
    command = [sys.executable, "-c", HEALTHY % (True, port)]
    with pytest.raises(TrirunError, match="ended"):
        vllm_server.run_server(command, url, "secret", ready.set)
    assert "secret" in capfd.readouterr().err

    def stop() -> None:
        raise KeyboardInterrupt

    vllm_server.run_server([sys.executable, "-c", HEALTHY % (False, port)], url, None, stop)
    with pytest.raises(UsageError, match=r"cannot listen on 203.0.113.7"):
        vllm_server.url_of_server("203.0.113.7", 8000)
