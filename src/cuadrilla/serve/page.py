"""The page on which a person tries a service: one file of the package, which loads nothing but the answers."""

import json
import secrets
from collections.abc import Sequence
from pathlib import Path

from fastapi import Response

from cuadrilla.messages import ENGLISH, LANGUAGES

PAGE = Path(__file__).parent / "playground.html"
NONCE, MODELS, LANGUAGE = "{{nonce}}", "{{models}}", "{{language}}"


def page(models: Sequence[str], *, languages: str) -> Response:
    """For a browser that wants one of these `languages`, as its header Accept-Language has them."""
    nonce = secrets.token_urlsafe(16)
    text = PAGE.read_text(encoding="utf-8").replace(NONCE, nonce).replace(LANGUAGE, preferred(languages))
    text = text.replace(MODELS, json.dumps(list(models)).replace("<", "\\u003c"))
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return Response(text, media_type="text/html; charset=utf-8", headers={**headers, "Cache-Control": "no-store"})


def preferred(languages: str) -> str:
    """The first of a browser's languages that there is; English if none is."""
    codes = (part.partition(";")[0].strip().lower()[:2] for part in languages.split(","))
    return next((code for code in codes if code in LANGUAGES), ENGLISH)
