"""What the quantizer's tests share. Their matrices are tiny, so they run on one thread."""

import socket

import pytest


@pytest.fixture(autouse=True, scope="module")
def _on_one_thread(one_thread):
    pass


@pytest.fixture
def unused_port():
    """A TCP port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
