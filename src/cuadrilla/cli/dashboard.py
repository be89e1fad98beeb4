"""`cuadrilla dashboard`: runs and their machines in a browser of this machine, or a run as one page in a file."""

import importlib.util
import secrets
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.output import emit, say
from cuadrilla.cli.serve import Host, PortNumber, address_of, key_in
from cuadrilla.errors import ConfigError, EnvironmentProblem, LinkError
from cuadrilla.home import Home
from cuadrilla.monitor.web.page import save_page
from cuadrilla.rundir import RunDir

if TYPE_CHECKING:
    from cuadrilla.serve.listen import Port

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


def dashboard(
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some (here).")
    ] = None,
    host: Host = "127.0.0.1",
    port_number: PortNumber = 8047,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the token, for Prometheus (default: a new one).")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option("--save", metavar="FILE", help="Write the page of one run as it is now; it needs no network."),
    ] = None,
) -> None:
    """Watch runs and their machines in a browser. Only who has the link can look, and nobody can change anything."""
    if save is not None:
        _save(places or [Path()], save)
        return
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = 'pip install "cuadrilla[serve]"'
        raise EnvironmentProblem("{missing} is not installed", missing=missing[0], hint=hint)
    from cuadrilla.monitor.web.app import WITHOUT_TOKEN, Dashboard
    from cuadrilla.monitor.web.runs import Runs
    from cuadrilla.serve.edge import Edge
    from cuadrilla.serve.listen import listen as answer
    from cuadrilla.serve.listen import open_port

    port = _port(host, port_number, has_token=token_file is not None)
    token = secrets.token_urlsafe(32) if token_file is None else key_in(token_file)
    shown = Dashboard(Runs(places or [Path()], queue=Home.of_user().queue))
    with closing(open_port(port)) as listener:
        for name in shown.runs.names()[:1]:
            shown.runs.watched(name)  # so that the first page need not wait
        port = port.bound(listener)
        answer(
            Edge(shown.app, key=token, open_to_all=WITHOUT_TOKEN),
            port=port,
            listener=listener,
            ending=shown.drain,
            ready=lambda: _tell(port, shown.runs.names(), token="" if token_file else token),
        )


def _save(places: list[Path], page: Path) -> None:
    """Raises ConfigError."""
    if len(places) != 1:
        raise ConfigError("--save writes the page of one run", hint="cuadrilla dashboard RUN --save report.html")
    run = places[0]
    save_page(RunDir(run.parent if run.is_file() else run), page)
    say("open it in a browser: {address}", address=page.resolve().as_uri())
    emit("{page}", page=page)


def _port(host: str, number: int, *, has_token: bool) -> "Port":
    """Raises LinkError for an address that others reach, but where their own network and a kept token guard it."""
    from cuadrilla.serve.listen import Port

    address = address_of(host, number)
    if not address.is_loopback and not has_token:
        raise LinkError(
            "{address} can be reached by others",
            address=address,
            hint="listen on 127.0.0.1, and look from another machine through `ssh -L 8047:127.0.0.1:8047 THIS_MACHINE`;"
            " in a container: --token-file FILE",
        )
    return Port(address=address)


def _tell(port: "Port", names: list[str], *, token: str) -> None:
    """The token stands behind `#`: a browser sends that part of an address to nobody."""
    if not names:
        say("no run yet; those that begin here will be shown")
    say("open this in a browser of this machine; Ctrl-C ends it")
    if token:
        emit("{url}/#token={token}", url=port.url, token=token)
    else:
        emit("{url}/#token=… (from the token's file)", url=port.url)
