"""`cuadrilla dashboard`: runs and their machines in a browser of this machine, or a run as one page in a file."""

import secrets
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from cuadrilla.cli.config import folder_of
from cuadrilla.cli.output import emit, say
from cuadrilla.cli.serve import Host, PortNumber, listening
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message
from cuadrilla.monitor.web.page import save_page


def dashboard(
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN", help="Run folders, or folders that hold some (here).")
    ] = None,
    host: Host = "127.0.0.1",
    port: PortNumber = 8047,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token, for Prometheus (default: a new one).")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the page of one run as it is now; it needs no network."),
    ] = None,
) -> None:
    """Watch runs and their machines in a browser. Only people with the link can look, stop a run and write notes."""
    if save is not None:
        _save(places or [Path()], save)
        return
    hint = Message(
        "listen on 127.0.0.1, and look from another machine through `ssh -L 8047:127.0.0.1:8047 THIS_MACHINE`;"
        " in a container: --token-file FILE"
    )
    with listening(host, port, token_file, hint=hint) as (listener, key):
        from cuadrilla.monitor.web.app import WITHOUT_TOKEN, make_dashboard
        from cuadrilla.monitor.web.runs import Runs
        from cuadrilla.serve.edge import Edge
        from cuadrilla.serve.listen import listen, url_of

        token, runs, ends = secrets.token_urlsafe(32), Runs(places or [Path()]), threading.Event()
        listen(
            Edge(make_dashboard(runs, ends=ends), key=key or token, open_to_all=WITHOUT_TOKEN),
            listener=listener,
            around=nullcontext(),
            ending=ends.set,
            ready=lambda: _tell(url_of(listener), [*runs.paths()], token="" if key else token),
        )


def _save(places: list[Path], page: Path) -> None:
    """Raises ConfigError."""
    if len(places) != 1:
        raise ConfigError("--save writes the page of one run", hint="cuadrilla dashboard RUN --save report.html")
    save_page(folder_of(places[0]), page)
    say("open it in a browser: {address}", address=page.resolve().as_uri())
    emit("{page}", page=page)


def _tell(url: str, names: list[str], *, token: str) -> None:
    """Print the address. The token stands behind `#`: a browser sends that part of an address to no server."""
    if not names:
        say("no run yet; those that begin here will be shown")
    say("open this in a browser of this machine; Ctrl-C ends it")
    emit("{url}/#token={token}" if token else "{url}/#token=… (from the token's file)", url=url, token=token)
