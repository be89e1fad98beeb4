"""`cuadrilla report`: a run, or a search for better settings, as one HTML page."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from cuadrilla.cli.output import emit, emit_json, options, say
from cuadrilla.errors import ConfigError
from cuadrilla.monitor.report import read_report, render
from cuadrilla.monitor.search_report import is_search, read_search, render_search
from cuadrilla.rundir import RunDir, write_atomic
from cuadrilla.tune.folder import SearchFolder


def report(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder: finished, stopped or still training. Or RUN/tune, a search; if RUN itself has not been "
            "trained, RUN is enough."
        ),
    ],
    out: Annotated[Path | None, typer.Option("--out", help="The page to write (RUN/report.html).")] = None,
    json: Annotated[bool, typer.Option("--json", help="What the page shows, as JSON; no page is written.")] = False,
) -> None:
    """Write one HTML page: curves, machines, what happened, samples, data, configuration. It needs no network.

    Of a search: the best settings, all trials, what each setting does.
    """
    options.json |= json
    folder = run.parent if run.is_file() else run
    search = search_in(folder)
    if options.json:
        emit_json(asdict(read_report(RunDir(folder)) if search is None else read_search(search)))
        return
    page = out or (page_of(RunDir(folder)) if search is None else search.report)
    path = page.resolve()  # a link stays one
    if path.exists() and not path.is_file():
        raise ConfigError("{path} is not a file", path=path, hint="name the page to write: --out report.html")
    write_atomic(path, render(read_report(RunDir(folder))) if search is None else render_search(read_search(search)))
    say("open it in a browser: {address}", address=path.as_uri())
    emit("{page}", page=page)


def search_in(folder: Path) -> SearchFolder | None:
    """The search that is meant by a folder: its own, or that of a run which has not been trained itself."""
    for path in (folder, folder / "tune"):
        if not RunDir(folder).metrics.exists() and is_search(path):
            return SearchFolder(path)
    return None


def page_of(run: RunDir) -> Path:
    return run.path / "report.html"
