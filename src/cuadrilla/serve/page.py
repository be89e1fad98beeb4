"""The page on which a person tries a service. It is one file, with its style and script in it, and loads nothing else.

It has its words in both languages: a person may change the language while looking at it.
"""

import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi import Response

from cuadrilla.messages import CATALOGUE, ENGLISH, LANGUAGES


def page(models: Sequence[str], tasks: Sequence[Mapping[str, Any]], *, languages: str) -> Response:
    """For a browser that wants one of these `languages`, as its header Accept-Language has them.

    `tasks`: the name of each and what it takes and gives, as JSON schemas.
    """
    nonce = secrets.token_urlsafe(16)
    parts = {
        "nonce": nonce,
        "language": preferred(languages),
        "models": _script(models),
        "tasks": _script(tasks),
        "style": _read("common.css") + _read("playground.css"),
        "spanish": (CATALOGUE / "serve.json").read_text(encoding="utf-8"),
        "script": _read("common.js") + _read("playground.js"),
    }
    text = re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("playground.html"))
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
    return Response(text, media_type="text/html; charset=utf-8", headers={**headers, "Cache-Control": "no-store"})


def _script(value: Sequence[Any]) -> str:
    """A value of a script; nothing in it can end the script."""
    return json.dumps(value).replace("<", "\\u003c")


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def preferred(languages: str) -> str:
    """The first that there is of `--lang` and a browser's languages; English if none is."""
    codes = (part.strip().lower()[:2] for part in (os.environ.get("LANGUAGE", ""), *languages.split(",")))
    return next((code for code in codes if code in LANGUAGES), ENGLISH)
