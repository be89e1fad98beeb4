"""The page of a run: one file, with style, scripts and the charts' library in it; it loads nothing else.

Live it holds nothing of a run, so that it needs no token, and follows what the dashboard sends. Frozen it holds all
that would have been sent. What comes from a run enters it as JSON, and the script shows it as text, never as HTML.
It has its words in both languages.
"""

import json
import re
import secrets
import time
from importlib import resources
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.messages import CATALOGUE, language
from cuadrilla.monitor.run import RunReader, about
from cuadrilla.rundir import RunDir, write_atomic

STYLES = ("monitor/vendor/uPlot.min.css", "serve/common.css", "monitor/web/page.css")
PARTS = (
    "serve/common",
    "monitor/web/page.charts",
    "monitor/web/page.machines",
    "monitor/web/page.views",
    "monitor/web/page",
)
CHARTS = "monitor/vendor/uPlot.iife.min.js"


def page_text(*, language: str, asks: str, frozen: dict[str, Any] | None = None) -> tuple[str, str]:
    """The page and its policy. `asks`: whom it may ask, as a policy spells it. `frozen`: what it holds of a run."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src {asks}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "nonce": nonce,
        "policy": policy,
        "language": language,
        "style": "".join(map(_read, STYLES)),
        "charts": _read(CHARTS),
        "spanish": (CATALOGUE / "monitor.json").read_text(encoding="utf-8"),
        "script": "".join(_read(f"{part}.js") for part in PARTS),
        # "<" never appears inside the script element that holds the data: nothing there can end it.
        "frozen": json.dumps(frozen, allow_nan=False).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _read("monitor/web/page.html")), policy


def frozen_page(run: RunDir) -> str:
    """The page of a run as it is now. Raises ConfigError when the folder holds no training yet."""
    watched = RunReader(run)
    watched.refresh()
    news, _ = watched.news(0)
    if "figures" not in news:
        raise ConfigError("{path} has no training to report", path=run.path, hint="cuadrilla train it first")
    frozen = {"made": time.time(), "news": news, "about": about(run)}
    return page_text(language=language(), asks="'none'", frozen=frozen)[0]


def save_page(run: RunDir, page: Path) -> None:
    """Write the frozen page of a run. Raises ConfigError, ResourceError."""
    path = page.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        raise ConfigError("{path} is not a file", path=page, hint="name the page to write: --save report.html")
    write_atomic(path, frozen_page(run))


def _read(name: str) -> str:
    return (resources.files("cuadrilla") / name).read_text(encoding="utf-8")
