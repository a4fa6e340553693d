"""The page to chat with: what the server sends, and, where there is a Chromium, what a person sees."""

import asyncio
import base64
import hashlib
import re
import shutil
import subprocess

import pytest

from tests.server.conftest import TEMPLATE

CHROMIUM = shutil.which("chromium")


def get(site, path="/", **options):
    async def scenario():
        async with site(**options) as demo:
            return await demo.client.get(path)

    return asyncio.run(scenario())


def test_the_page_loads_nothing_from_elsewhere(site):
    answer = get(site)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert not re.search(r"(src|href)=|https?://|@import|url\(", answer.text)
    policy = answer.headers["content-security-policy"]
    (script,) = re.findall(r"<script>(.*?)</script>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    # Texts of a model are never parsed as HTML.
    assert "innerHTML" not in script and "insertAdjacentHTML" not in script


def test_it_needs_no_key_and_its_calls_do(site):
    assert get(site, api_key="secret").status_code == 200
    assert get(site, "/v1/models", api_key="secret").status_code == 401


def test_it_can_be_left_out(site):
    assert get(site, page=False).status_code == 404


@pytest.mark.parametrize(("width", "height"), [(1200, 800), (390, 800)])
def test_a_browser_shows_it(start_server, tmp_path, width, height):
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH")
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    server = start_server("--max-batch", "2", "--chat-template", template)
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    options += [f"--window-size={width},{height}", "--virtual-time-budget=3000"]
    page = subprocess.run(
        [CHROMIUM, *options, "--dump-dom", server.url], capture_output=True, text=True, timeout=90, check=True
    ).stdout
    # The script ran: it asked the server for the model's name.
    assert f"{server.facts['models'][0]}," in page
    subprocess.run([CHROMIUM, *options, f"--screenshot={picture}", server.url], timeout=90, check=True)
    assert picture.stat().st_size > 5000
    assert server.stop()[0] == 0
