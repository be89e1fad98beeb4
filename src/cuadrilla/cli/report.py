"""`cuadrilla report`: a run as one HTML page."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cuadrilla.cli.output import emit, emit_json, options, say
from cuadrilla.errors import ConfigError
from cuadrilla.monitor.report import read_report, render
from cuadrilla.rundir import RunDir, write_atomic


def report(
    run: Annotated[Path, typer.Argument(help="A run folder: finished, stopped or still training.")],
    out: Annotated[Path | None, typer.Option("--out", help="The page to write (RUN/report.html).")] = None,
    json: Annotated[bool, typer.Option("--json", help="What the page shows, as JSON; no page is written.")] = False,
) -> None:
    """Write one HTML page: curves, machines, what happened, samples, data, configuration. It needs no network."""
    options.json |= json
    folder = RunDir(run.parent if run.is_file() else run)
    found = read_report(folder)
    if options.json:
        emit_json(asdict(found))
        return
    path = (out or page_of(folder)).resolve()  # a link stays one
    if path.exists() and not path.is_file():
        raise ConfigError("{path} is not a file", path=path, hint="name the page to write: --out report.html")
    write_atomic(path, render(found))
    say("open it in a browser: {address}", address=path.as_uri())
    emit("{page}", page=out or page_of(folder))


def page_of(run: RunDir) -> Path:
    return run.path / "report.html"
