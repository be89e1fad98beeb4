"""The dashboard's page: one file, with style, scripts and the charts' library in it; it loads nothing else.

It holds nothing of a run, so that it needs no token. Its words are in its own table, in both languages.
"""

import re
import secrets
from importlib import resources

from fastapi import Response

from cuadrilla.serve.page import preferred

STYLES = ("vendor/uPlot.min.css", "web/page.css")
SCRIPTS = (
    "web/page.texts.js",
    "web/page.charts.js",
    "web/page.machines.js",
    "web/page.views.js",
    "web/page.queue.js",
    "web/page.js",
)
CHARTS = "vendor/uPlot.iife.min.js"


def dashboard_page(*, languages: str) -> Response:
    """For a browser that wants one of these `languages`, as its header Accept-Language has them."""
    nonce = secrets.token_urlsafe(16)
    parts = {
        "nonce": nonce,
        "language": preferred(languages),
        "style": "".join(map(_read, STYLES)),
        "charts": _read(CHARTS),
        "script": "".join(map(_read, SCRIPTS)),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("web/page.html"))
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    headers |= {"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin"}
    return Response(text, media_type="text/html; charset=utf-8", headers={**headers, "Cache-Control": "no-store"})


def _read(name: str) -> str:
    return (resources.files("cuadrilla.monitor") / name).read_text(encoding="utf-8")
