"""Sockets and their addresses; the model's loading."""

import socket

import pytest

from trirun_cli.errors import UsageError
from trirun_cli.server.run import listen, url_of


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
