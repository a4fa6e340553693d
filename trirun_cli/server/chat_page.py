"""The page to chat with, at /: one document of the package, which loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib.resources import files

from fastapi.responses import HTMLResponse


@cache
def _document() -> tuple[str, str]:
    """The page, and its content security policy: its own script and style, and calls to this server alone."""
    text = (files("trirun_cli.server") / "page" / "chat.html").read_text(encoding="utf-8")
    found = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert found is not None
    digest = base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()
    sources = ("default-src 'none'", f"script-src 'sha256-{digest}'", "style-src 'unsafe-inline'", "connect-src 'self'")
    return text, "; ".join((*sources, "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"))


def response() -> HTMLResponse:
    """The page as an HTTP response."""
    text, policy = _document()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})
