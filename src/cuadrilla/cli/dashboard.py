"""`cuadrilla dashboard`: runs and their machines in a browser of this machine."""

import importlib.util
import secrets
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.output import emit, say
from cuadrilla.cli.serve import key_in
from cuadrilla.errors import EnvironmentProblem, LinkError
from cuadrilla.home import Home
from cuadrilla.link.address import Address

if TYPE_CHECKING:
    from cuadrilla.serve.listen import Port

NEEDED = ("fastapi", "uvicorn", "prometheus_client")
LISTEN = "127.0.0.1:8047"


def dashboard(
    places: Annotated[
        list[Path] | None, typer.Argument(metavar="RUN...", help="Run folders, or folders that hold some (here).")
    ] = None,
    listen: Annotated[
        str, typer.Option("--listen", metavar="ADDRESS:PORT", help="Where to listen: an address of this machine only.")
    ] = LISTEN,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the token, for Prometheus (default: a new one).")
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME:PORT", help="Another name that browsers may use; may be repeated."),
    ] = None,
) -> None:
    """Watch runs and their machines in a browser. Only who has the link can look, and nobody can change anything."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        hint = 'pip install "cuadrilla[serve]"'
        raise EnvironmentProblem("{missing} is not installed", missing=missing[0], hint=hint)
    from cuadrilla.monitor.web.app import WITHOUT_TOKEN, Dashboard
    from cuadrilla.monitor.web.runs import Runs
    from cuadrilla.serve.edge import Edge
    from cuadrilla.serve.listen import listen as answer
    from cuadrilla.serve.listen import open_port

    port = _port(listen, has_token=token_file is not None)
    token = secrets.token_urlsafe(32) if token_file is None else key_in(token_file)
    shown = Dashboard(Runs(places or [Path()], queue=Home.of_user().queue))
    with closing(open_port(port)) as listener:
        for name in shown.runs.names()[:1]:
            shown.runs.watched(name)  # so that the first page need not wait
        port = port.bound(listener)
        edge = Edge(shown.app, key=token, hosts=port.hosts(*(host or ())), open_to_all=WITHOUT_TOKEN)
        answer(
            edge,
            port=port,
            listener=listener,
            draining=shown.drain,
            ready=lambda: _tell(port, shown.runs.names(), token="" if token_file else token),
        )


def _port(listen: str, *, has_token: bool) -> "Port":
    """Raises LinkError for an address that others reach, but where their own network and a kept token guard it."""
    from cuadrilla.serve.listen import Port

    try:
        address = Address.parse(listen)
    except LinkError as error:
        raise LinkError(error.message, hint="--listen 127.0.0.1:8047") from None
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
