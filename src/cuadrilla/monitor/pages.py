"""One HTML file that is complete in itself: data, scripts, style, and the library of the charts.

The page loads nothing (its policy forbids it), so it can be mailed, archived and opened without a network. What comes
from elsewhere enters it as JSON, and the scripts show it as text, never as HTML: it may hold any characters.
"""

import json
from collections.abc import Iterable, Mapping
from importlib import resources
from typing import Any

from cuadrilla.messages import Message, language

SHARED = "report"
"""Whose style all pages have."""


def one_page(name: str, data: Mapping[str, Any], *, words: Iterable[Message]) -> str:
    """The page `name`.html with its script and `data`. `words`: what it says by itself; `%%...%%` in its HTML, `say` in
    its script, `%s` for a value."""
    here = resources.files("cuadrilla.monitor")

    def text(file: str) -> str:
        return (here / file).read_text(encoding="utf-8")

    said = {str(word): word.in_language(language()) for word in words}
    # "<" never appears inside the script element that holds the data: nothing there can end it.
    raw = json.dumps({**data, "words": said}, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    styles = ["vendor/uPlot.min.css", f"{SHARED}.css", *([] if name == SHARED else [f"{name}.css"])]
    parts = {
        **said,
        "LANGUAGE": language(),
        "STYLE": "".join(map(text, styles)),
        "CHARTS": text("vendor/uPlot.iife.min.js"),
        "SCRIPT": text("report_shared.js") + text(f"{name}.js"),
        "DATA": raw.encode(errors="replace").decode(),  # halves of a character, which JSON can spell
    }
    before, *pieces = text(f"{name}.html").split("%%")
    return before + "".join(parts.get(piece, piece) for piece in pieces)
