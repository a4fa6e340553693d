"""The life of a server process: listen, load the model, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from ...errors import UsageError
from ..event_bridge import EventBridge
from ..operations.logs import LogFormat, set_up_logging
from ..pool.pool import Pool
from .patience import Patient

# After the drain time, cancelled requests get this long to send their last event.
_CANCEL_S = 5
# The same after a second Ctrl-C.
_FORCED_CANCEL_S = 0.5
# Between two looks whether requests still run.
_DRAIN_LOOK_S = 0.05
# Longer than clients keep an idle connection, so that no request arrives while the server closes one.
_KEEP_ALIVE_S = 75


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free port.

    Raises:
        UsageError: the address is not one of this machine, or the port is taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name such as localhost may have IPv6 and IPv4 addresses; every client tries IPv4.
        family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot listen on {host} port {port}: {reason}", "choose another --port or --host") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL by which a client on this machine reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: ASGIApp,
    pool: Pool,
    listener: socket.socket,
    *,
    preload: int,
    ready: Callable[[], None],
    drain_s: float,
    stream_interval_s: float = 0.0,
    log_requests: bool = False,
    log_format: LogFormat = "text",
) -> None:
    """Serve until SIGTERM or Ctrl-C; then take no more requests, give running ones ``drain_s`` seconds, and return.

    Args:
        app: of :func:`.app.create_app`, over ``pool``. listener: of :func:`listen`.
        preload: models to load at the start, the first ones; meanwhile /health returns 503 ``loading``.
        ready: called when the server takes requests.
        drain_s: seconds that running requests get at the end.
        stream_interval_s: of :class:`.event_bridge.EventBridge`.
        log_requests, log_format: of :func:`..operations.logs.set_up_logging`.

    Raises:
        Exception: any that loading them raised. KeyboardInterrupt: a second Ctrl-C ended the draining.
    """
    set_up_logging(log_requests, log_format)
    config = uvicorn.Config(
        app,
        http=Patient,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_s) + _CANCEL_S,
    )
    server = _Server(config, pool, drain_s)
    asyncio.run(_serve(server, pool, listener, preload, ready, stream_interval_s))
    if server.forced:
        raise KeyboardInterrupt


async def _serve(
    server: _Server,
    pool: Pool,
    listener: socket.socket,
    preload: int,
    ready: Callable[[], None],
    stream_interval_s: float,
) -> None:
    bridge = EventBridge(asyncio.get_running_loop(), stream_interval_s)
    loading = asyncio.ensure_future(pool.preload(bridge, preload))
    serving = asyncio.ensure_future(server.serve([listener]))
    watching: asyncio.Task[None] | None = None
    await asyncio.wait((loading, serving), return_when=asyncio.FIRST_COMPLETED)
    try:
        if loading.done() and loading.exception() is None:
            _freeze_garbage_collector()
            pool.open()
            watching = asyncio.ensure_future(pool.metrics.watch_loop())
            if not server.should_exit:
                ready()
        elif loading.done():
            server.should_exit = True
        await serving
        if loading.done():
            loading.result()
            pool.close()
    finally:
        loading.cancel()
        if watching is not None:
            watching.cancel()


def _freeze_garbage_collector() -> None:
    """Keep pauses short: Python's cyclic collector scans every container and stops all threads meanwhile. Objects made
    by loading live as long as the process; those of requests are freed by reference counts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


class _Server(uvicorn.Server):
    """uvicorn with two differences: SIGTERM and Ctrl-C are no failure, and responses that outlast the draining end with
    an error document, not with a closed connection.

    Attributes:
        forced: a second Ctrl-C has ended the draining.
    """

    def __init__(self, config: uvicorn.Config, pool: Pool, drain_s: float) -> None:
        super().__init__(config)
        self._pool, self._drain_s = pool, drain_s
        self.forced = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        self._loop = asyncio.get_running_loop()
        # A signal that is ignored, as in a background process of a shell, stays ignored.
        heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # A second Ctrl-C cancels requests and waits for their last events, a third does not wait; a second SIGTERM
        # changes nothing.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit, self.forced = self.forced, True
            self._loop.call_soon_threadsafe(self._cancel_requests)
        self.should_exit = True

    def _cancel_requests(self) -> None:
        self._pool.abort_all()
        self._loop.call_later(_FORCED_CANCEL_S, self._stop_waiting)

    def _stop_waiting(self) -> None:
        self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._pool.shut()
        alarm = asyncio.get_running_loop().call_later(self._drain_s, self._pool.abort_all)
        try:
            # The socket stays open meanwhile: a router that asks /health is told "draining", and sends to another.
            while any(entry.busy for entry in self._pool.entries) and not self.force_exit:
                await asyncio.sleep(_DRAIN_LOOK_S)
            await super().shutdown(sockets)
        finally:
            alarm.cancel()
