"""``GET /``: the page that shows the pools live. One file, without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re

from starlette.responses import Response

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def build_page() -> Response:
    """The page's answer, with a policy that lets run exactly the script and the style that the file holds."""
    html = importlib.resources.files("pdserve.router").joinpath("page", "index.html").read_text(encoding="utf-8")
    return Response(
        html,
        media_type="text/html",
        headers={
            "content-security-policy": build_policy(html),
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        },
    )


def build_policy(html: str) -> str:
    """The Content-Security-Policy of a page with inline script and style: their hashes, and this server's data.

    Source: W3C Content Security Policy Level 3, hash-source.
    """
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(html):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    directives = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in directives.items())
