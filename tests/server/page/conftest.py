"""A Chromium, driven by the WebDriver protocol (https://www.w3.org/TR/webdriver2/), and a scripted server for it."""

import asyncio
import shutil
import socket
import subprocess
import threading
import time

import httpx
import pytest
import uvicorn

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window. ``errors`` of its console are failures of the page."""

    def __init__(self, driver, folder, width=1200, height=800):
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
        ]
        options += ["--disable-component-update", "--disable-sync", f"--user-data-dir={folder / 'profile'}"]
        chrome = {"args": [*options, f"--window-size={width},{height}"], "binary": shutil.which("chromium")}
        chrome["prefs"] = {"download.default_directory": str(folder)}
        wanted = {"browserName": "chrome", "goog:chromeOptions": chrome, "goog:loggingPrefs": {"browser": "ALL"}}
        wanted["unhandledPromptBehavior"] = "ignore"
        self._http = httpx.Client(base_url=driver, timeout=60)
        answer = self._http.post("/session", json={"capabilities": {"alwaysMatch": wanted}}).json()["value"]
        self._session = f"/session/{answer['sessionId']}"
        # A window is never narrower than 500 px: a phone is emulated.
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("goog/cdp/execute", cmd="Emulation.setDeviceMetricsOverride", params=metrics)

    def call(self, path, **body):
        answer = self._http.post(f"{self._session}/{path}", json=body).json()["value"]
        assert not (isinstance(answer, dict) and "stacktrace" in answer), answer
        return answer

    def get(self, path):
        return self._http.get(f"{self._session}/{path}").json()["value"]

    def js(self, code):
        """The value of an expression."""
        return self.call("execute/sync", script=f"return {code}", args=[])

    def until(self, code, seconds=20):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(code):
            assert time.monotonic() < end, f"never: {code}\n{self.js('document.body.innerText')}\n{self.errors()}"
            time.sleep(0.02)

    def press(self, *keys):
        """Press keys, one after another, where the focus is."""
        steps = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("actions", actions=[{"type": "key", "id": "keys", "actions": steps}])

    def type(self, text):
        """Type into what has the focus."""
        self.call(f"element/{self.get('element/active')[ELEMENT]}/value", text=text)

    def click(self, selector):
        found = self.call("element", **{"using": "css selector", "value": selector})
        self.call(f"element/{found[ELEMENT]}/click")

    def errors(self):
        return [line["message"] for line in self.call("se/log", type="browser") if line["level"] == "SEVERE"]

    def close(self):
        self._http.delete(self._session)


@pytest.fixture(scope="session")
def driver():
    """The address of a chromedriver."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        pytest.skip("needs chromium and chromedriver on PATH")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.PIPE, text=True)
    assert any("started successfully" in line for line in process.stdout)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait()


@pytest.fixture
def browser(driver, tmp_path):
    """Open a window: ``browser(url, width, height)``."""
    opened = []

    def open_window(url, width=1200, height=800):
        opened.append(Browser(driver, tmp_path, width, height))
        opened[-1].call("url", url=url)
        return opened[-1]

    yield open_window
    for window in opened:
        window.close()


@pytest.fixture
def serve(site):
    """Serve a :class:`tests.server.conftest.Site` on a socket: ``serve(script, ...)`` returns (URL, its runner)."""
    running = []

    def start(script, **options):
        ready, servers = threading.Event(), []

        async def run():
            async with site(script, **options) as demo:
                config = uvicorn.Config(demo.app, port=0, log_level="critical", lifespan="off")
                servers.extend((uvicorn.Server(config), demo.runner))
                task = asyncio.ensure_future(servers[0].serve())
                while not servers[0].started:
                    await asyncio.sleep(0.01)
                ready.set()
                await task

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        running.append((thread, servers))
        assert ready.wait(20)
        port = servers[0].servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}", servers[1]

    yield start
    for thread, servers in running:
        servers[0].should_exit = servers[0].force_exit = True
        thread.join(20)
