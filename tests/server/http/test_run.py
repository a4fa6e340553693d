"""Sockets and their addresses; the model's loading; starts that are refused."""

import socket
import subprocess
import sys

import pytest

from trirun_cli.errors import UsageError
from trirun_cli.server.http.run import listen, url_of


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "http://127.0.0.1:"), ("localhost", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:")],
)
def test_any_free_port(host, shown):
    with listen(host, 0) as listener:
        url = url_of(listener)
        assert url.startswith(shown)
        port = int(url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            pass
        with pytest.raises(UsageError, match=f"port {port}: Address already in use"):
            listen(host, port)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_the_newer_addresses(host):
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        listener = listen(host, 0)
    except UsageError:
        pytest.skip("no IPv6 address here")
    with listener:
        assert url_of(listener).startswith("http://[::1]:")


def test_addresses_of_others_and_names_of_nobody():
    with pytest.raises(UsageError, match=r"203\.0\.113\.1 port 0"):
        listen("203.0.113.1", 0)
    with pytest.raises(UsageError, match=r"no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


@pytest.mark.slow
def test_a_taken_port_and_a_damaged_checkpoint_are_one_clear_line(server, checkpoint, tmp_path):
    import shutil

    def start(directory, port):
        command = [sys.executable, "-m", "trirun_cli", "serve", "-c", str(directory), "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stderr

    code, err = start(checkpoint, server.url.rsplit(":", 1)[1])
    assert code == 2 and "Address already in use" in err
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    (broken / "model.safetensors").write_bytes(b"short")
    code, err = start(broken, 0)
    assert code == 3 and "model.safetensors" in err
    code, err = start(tmp_path / "nothing", 0)
    assert code == 3 and "no such directory" in err


def test_without_the_extra_it_says_what_to_install(checkpoint):
    script = "import sys; sys.modules['fastapi'] = None; from trirun_cli.commands.app import main; main()"
    command = [sys.executable, "-c", script, "serve", "-c", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4 and "fastapi" in done.stderr and "trirun[serve]" in done.stderr


def test_a_package_that_another_needs_is_named_with_it(checkpoint, tmp_path):
    # fastapi is there, and a package that it imports is not.
    (tmp_path / "fastapi").mkdir()
    (tmp_path / "fastapi" / "__init__.py").write_text("from . import telemetry\n")
    (tmp_path / "fastapi" / "telemetry.py").write_text("import no_such_package.api\n")
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from trirun_cli.commands.app import main; main()"
    command = [sys.executable, "-c", script, "serve", "-c", str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 4 and "trirun[serve]" in done.stderr
    said = " ".join(done.stderr.split())
    assert "serving needs fastapi, fastapi needs no_such_package, and no_such_package is not installed" in said
