"""The page of a run: one file with style, scripts and the library for charts in it. It loads nothing else.

A live page holds no data of a run, so that it needs no token; the dashboard sends it the data. A frozen page holds all
data that would have been sent. Data of a run enter a page as JSON; its script shows them as text, never as HTML.
"""

import time
from pathlib import Path
from typing import Any

from cuadrilla.errors import ConfigError
from cuadrilla.messages import language
from cuadrilla.monitor.run import RunReader
from cuadrilla.rundir import RunDir, write_atomic
from cuadrilla.serve.page import one_file, read, script_value

STYLES = ("monitor/vendor/uPlot.min.css", "serve/common.css", "monitor/web/page.css")
PARTS = ("serve/common", *(f"monitor/web/page{part}" for part in (".charts", ".tables", ".events", ".views", "")))


def page_text(*, language: str, asks: str = "'self'", frozen: dict[str, Any] | None = None) -> tuple[str, str]:
    """The page and its Content-Security-Policy. `asks`: the policy's `connect-src`. `frozen`: the data of a run."""
    return one_file(
        "monitor/web/page.html",
        styles=STYLES,
        scripts=[f"{part}.js" for part in PARTS],
        asks=asks,
        language=language,
        charts=read("monitor/vendor/uPlot.iife.min.js"),
        frozen=script_value(frozen),
    )


def frozen_page(run: RunDir) -> str:
    """The page of a run as it is now. Raises ConfigError when the folder holds no training yet."""
    page = RunReader(run).page()
    if not page["figures"]["x"]:
        raise ConfigError("{path} has no training to report", path=run.path, hint="cuadrilla train it first")
    return page_text(language=language(), asks="'none'", frozen={"made": time.time(), "news": page})[0]


def save_page(run: RunDir, page: Path) -> None:
    """Write the frozen page of a run. Raises ConfigError, ResourceError."""
    path = page.resolve()  # a symbolic link stays one
    if path.exists() and not path.is_file():
        raise ConfigError("{path} is not a file", path=page, hint="name the page to write: --save report.html")
    write_atomic(path, frozen_page(run))
