"""A signal ends a command wherever it comes, also in the middle of an import that would swallow it."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest
import uvicorn
from trirun_gptq.train.loop import _deferred_interrupt

from tests.interrupts import sigint_handled_by
from trirun_cli.interrupts import Interrupts, importing
from trirun_cli.server.http.run import _Server
from trirun_cli.text.completion import interruptions

SWALLOWING = """
import sys, time
from pathlib import Path
try:
    Path(sys.argv[2]).touch()
    time.sleep(float(sys.argv[3]))
except BaseException:
    print("swallowed", flush=True)
imported = time.monotonic()
"""
PROGRAM = """
import sys, time
sys.path.insert(0, sys.argv[1])
from trirun_cli.interrupts import Interrupts
try:
    with Interrupts():
        import swallowing
        print("imported\\n", end="", flush=True)
        time.sleep(30)
except KeyboardInterrupt:
    print("stopped", flush=True)
"""


def start(tmp_path, seconds=0.6, sigint=signal.default_int_handler):
    """The program in the middle of its import, with Ctrl-C answered or ignored."""
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, tmp_path, tmp_path / "begun", str(seconds)]
    with sigint_handled_by(sigint):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    while not (tmp_path / "begun").exists():
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_import_ends_before_the_program_does(tmp_path, number):
    process = start(tmp_path)
    process.send_signal(number)
    out, _ = process.communicate(timeout=20)
    assert out in ("stopped\n", "imported\nstopped\n")


def test_a_second_signal_does_not_wait(tmp_path):
    process = start(tmp_path, seconds=60)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "swallowed\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert out.endswith("stopped\n")


def test_an_ignored_interrupt_stays_ignored(tmp_path):
    process = start(tmp_path, sigint=signal.SIG_IGN)
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "imported\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "stopped\n"


@pytest.fixture
def ignored_interrupt():
    with sigint_handled_by(signal.SIG_IGN):
        yield
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.usefixtures("ignored_interrupt")
def test_an_ignored_interrupt_does_not_end_an_answer():
    with interruptions() as interrupted:
        signal.raise_signal(signal.SIGINT)
        assert not interrupted()


@pytest.mark.usefixtures("ignored_interrupt")
def test_an_ignored_interrupt_does_not_end_training():
    with _deferred_interrupt() as stopped:
        signal.raise_signal(signal.SIGINT)
        assert not stopped.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stopped.is_set()


@pytest.mark.usefixtures("ignored_interrupt")
def test_an_ignored_interrupt_does_not_end_a_server():
    async def serve():
        server = _Server(uvicorn.Config(None), None, 0.0)
        with server.capture_signals():
            signal.raise_signal(signal.SIGINT)
            assert not server.should_exit
            signal.raise_signal(signal.SIGTERM)
            assert server.should_exit

    asyncio.run(serve())


ENDING = """
import atexit, signal, sys
from trirun_cli.__main__ import main
signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(lambda: signal.raise_signal(signal.SIGINT))
sys.argv = ["trirun", "--version"]
main()
"""


def test_a_signal_while_python_ends_prints_nothing():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, env=environment)
    assert done.returncode == -signal.SIGINT and done.stdout.startswith("trirun ") and done.stderr == ""


def test_outside_of_imports_the_signal_is_answered_at_once():
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    with pytest.raises(KeyboardInterrupt), Interrupts():
        assert not importing(sys._getframe())
        signal.raise_signal(signal.SIGTERM)
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert [signal.getsignal(number) for number in numbers] == before
