"""The life of a server process: listen, load, serve, drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from ..errors import UsageError
from .event_bridge import Outbox
from .service import Model, Service

# Answers that are cut off at the end of draining get this long to say so.
_FAREWELL_S = 5
# The same after a second Ctrl-C, for clients that read.
_HURRIED_FAREWELL_S = 0.5
# Longer than clients keep an idle connection, so that none sends a request into one that is just being closed.
_KEEP_ALIVE_S = 75


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        UsageError: the address is not one of this machine's, or taken.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # A name such as localhost may stand for both kinds of address; clients are surest to try the older one.
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
    """Where a client on this machine reaches a listening socket."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "127.0.0.1" if address.version == 4 else "::1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def serve(
    app: ASGIApp,
    service: Service,
    listener: socket.socket,
    load: Callable[[], Model],
    *,
    ready: Callable[[Model], None],
    drain_s: float,
    stream_interval_s: float = 0.0,
    log_requests: bool = False,
) -> None:
    """Serve until SIGTERM or Ctrl-C, which stops taking requests, gives those at work ``drain_s`` seconds, and returns.

    Args:
        load: makes the model, on another thread: meanwhile /health answers that it is loading.
        ready: is told when requests are taken. stream_interval_s: of :class:`.outbox.Outbox`.

    Raises:
        Exception: whatever ``load`` raised. KeyboardInterrupt: a second Ctrl-C cut the draining short.
    """
    _set_up_logging(log_requests)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=log_requests,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(drain_s) + _FAREWELL_S,
    )
    server = _Server(config, service, drain_s)
    asyncio.run(_serve(server, service, listener, load, ready, stream_interval_s))
    if server.hurried:
        raise KeyboardInterrupt


async def _serve(
    server: _Server,
    service: Service,
    listener: socket.socket,
    load: Callable[[], Model],
    ready: Callable[[Model], None],
    stream_interval_s: float,
) -> None:
    loading = asyncio.ensure_future(_on_thread(load))
    serving = asyncio.ensure_future(server.serve([listener]))
    await asyncio.wait((loading, serving), return_when=asyncio.FIRST_COMPLETED)
    try:
        if loading.done() and loading.exception() is None:
            model = loading.result()
            _calm_collector()
            service.ready(model, Outbox(asyncio.get_running_loop(), stream_interval_s))
            if not server.should_exit:
                ready(model)
        elif loading.done():
            server.should_exit = True
        await serving
        if loading.done():
            loading.result().engine.close()
    finally:
        loading.cancel()


def _calm_collector() -> None:
    """Python's cyclic collector looks at every container again and again, whoever made it, and stops all threads for
    it. What loading has left will live as long as the process; what requests bring is freed by reference counts."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def _on_thread(work: Callable[[], Any]) -> Any:
    """Run on a thread that nobody waits for when the process is told to end."""
    loop = asyncio.get_running_loop()
    result = loop.create_future()

    def settle(set_outcome: Callable[[Any], None], outcome: Any) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):
            set_outcome(outcome)

    def run() -> None:
        try:
            outcome = result.set_result, work()
        except BaseException as error:
            outcome = result.set_exception, error
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="trirun-load", daemon=True).start()
    return await result


class _Server(uvicorn.Server):
    """uvicorn with two differences: being told to stop is no failure, and answers that outlast the draining are ended
    in the language of their protocol.

    Attributes:
        hurried: a second Ctrl-C has cut the draining short.
    """

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float) -> None:
        super().__init__(config)
        self._service, self._drain_s = service, drain_s
        self.hurried = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        self._loop = asyncio.get_running_loop()
        # Ignored, as for a job in the background, a signal stays ignored.
        heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self.handle_exit) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The second Ctrl-C waits until clients are told, the third for nothing; a second SIGTERM changes nothing.
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit, self.hurried = self.hurried, True
            self._loop.call_soon_threadsafe(self._hurry)
        self.should_exit = True

    def _hurry(self) -> None:
        self._service.draining = True
        self._service.abort_all()
        self._loop.call_later(_HURRIED_FAREWELL_S, self._force)

    def _force(self) -> None:
        self.force_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.draining = True
        alarm = asyncio.get_running_loop().call_later(self._drain_s, self._service.abort_all)
        try:
            await super().shutdown(sockets)
        finally:
            alarm.cancel()


def _set_up_logging(log_requests: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    # A request is only cancelled where the server ends, and what is left of it says so to its client.
    handler.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    for name in ("trirun", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING)
    if log_requests:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
