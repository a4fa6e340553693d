"""Connections that take too long, on real sockets: who sends no request, and who does not read."""

import asyncio
import contextlib

import pytest

pytest.importorskip("uvicorn", reason="needs trirun[serve]")

import uvicorn
from starlette.responses import PlainTextResponse, StreamingResponse

from trirun_cli.server.http.patience import Patient
from trirun_cli.server.http.run import listen

SHORT = 0.2


class Hurried(Patient):
    """With times for a test."""

    headers_s = reader_s = SHORT


class Streams:
    """An application: / is a short answer, /endless one without an end, which is counted."""

    def __init__(self):
        self.running = 0

    async def __call__(self, scope, receive, send):
        endless = scope["path"] == "/endless"
        await (StreamingResponse(self.blocks()) if endless else PlainTextResponse("done"))(scope, receive, send)

    async def blocks(self):
        self.running += 1
        try:
            while True:
                yield b"x" * 65536
                await asyncio.sleep(0)
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def served(app):
    """(port) of a server over the application."""
    server = uvicorn.Server(uvicorn.Config(app, http=Hurried, lifespan="off", log_config=None, timeout_keep_alive=60))
    server.capture_signals = contextlib.nullcontext
    with listen("127.0.0.1", 0) as listener:
        task = asyncio.ensure_future(server.serve([listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()[1]
        server.should_exit = True
        await task


async def is_closed(reader):
    """Whether the server ends the connection."""
    with contextlib.suppress(ConnectionError):
        return await asyncio.wait_for(reader.read(1), 20) == b""
    return True


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: "], ids=["nothing", "half a header"])
def test_who_sends_no_request_is_left(start):
    async def scenario():
        async with served(Streams()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(start)
            assert await is_closed(reader)
            writer.close()

    asyncio.run(scenario())


def test_who_asks_again_has_the_time_of_a_kept_connection_and_then_that_of_headers():
    async def scenario():
        async with served(Streams()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(2):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = await reader.readuntil(b"done")
                assert answer.startswith(b"HTTP/1.1 200")
                await asyncio.sleep(2 * SHORT)
            writer.write(b"GET / HTTP/1.1\r\nHo")
            assert await is_closed(reader)
            writer.close()

    asyncio.run(scenario())


def test_a_stream_that_nobody_reads_is_ended_and_its_producer_with_it():
    async def scenario():
        app = Streams()
        async with served(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
            writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            await reader.readexactly(10)
            assert app.running == 1
            for _ in range(1000):
                if not app.running:
                    break
                await asyncio.sleep(0.02)
            assert app.running == 0
            writer.close()

    asyncio.run(scenario())


def test_a_slow_reader_that_reads_goes_on():
    async def scenario():
        app = Streams()
        async with served(app) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /endless HTTP/1.1\r\nHost: x\r\n\r\n")
            for _ in range(8):
                # More than what the kernel holds for both ends is read in the time, in eight turns.
                await reader.readexactly(8 * 2**20)
                await asyncio.sleep(SHORT / 4)
            assert app.running == 1
            writer.close()

    asyncio.run(scenario())
