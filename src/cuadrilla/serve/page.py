"""Pages in one file each: style, texts and script are inside, and nothing else is loaded. `page` is for trying a model.

A page has its texts in both languages, because a person may change the language while looking at it.
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

from cuadrilla.messages import SPANISH, language, translated


def one_file(
    html: str, *, styles: Sequence[str], scripts: Sequence[str], asks: str = "'self'", **parts: str
) -> tuple[str, str]:
    """A page and its content security policy. `html`, `styles`, `scripts`: names of our files. `asks`: where its script
    may connect to, as a policy spells it. `parts`: values for other placeholders in the HTML."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src {asks}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    text, script = read(html), "".join(map(read, scripts))
    found = {"nonce": nonce, "policy": policy, "style": "".join(map(read, styles)), "script": script, **parts}
    found["spanish"] = _spanish(text + script)
    return re.sub(r"\{\{(\w+)\}\}", lambda at: found[at[1]], text), policy


def headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def page(model: str, task: Mapping[str, Any] | None, *, languages: str) -> tuple[str, str]:
    """The page to try a model, and its policy. `languages`: the browser's header Accept-Language.

    `model`: its name. `task`: the JSON schemas of a task's inputs and outputs; None for a language model.
    """
    return one_file(
        "serve/playground.html",
        styles=("serve/common.css", "serve/playground.css"),
        scripts=("serve/common.js", "serve/playground.js"),
        language=language(otherwise=languages),
        model=script_value(model),
        task=script_value(task),
    )


def script_value(value: Any) -> str:
    """`value` as JSON for use inside a script. Nothing in it can end the script."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")


def read(name: str) -> str:
    return (resources.files("cuadrilla") / name).read_text(encoding="utf-8")


@cache
def _spanish(said: str) -> str:
    """Spanish translations of a page's texts, as JSON: of its script's strings and of its HTML's marked texts."""
    quoted, marked = re.findall(r'"((?:[^"\\\n]|\\.)*)"', said), re.findall(r"data-text>([^<]+)<", said)
    texts = sorted({*(re.sub(r"\\(.)", r"\1", text) for text in quoted if text), *marked})
    found = {text: spanish for text in texts if (spanish := translated(text, SPANISH)) != text}
    return json.dumps(found, ensure_ascii=False)
