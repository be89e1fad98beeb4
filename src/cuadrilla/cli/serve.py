"""Commands that answer over HTTP: `cuadrilla serve` with a trained model, `cuadrilla dashboard` with runs and their
machines."""

import asyncio
import importlib.util
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cuadrilla.cli.model import Device, Run, about
from cuadrilla.cli.output import emit, say
from cuadrilla.errors import ConfigError, EnvironmentProblem, LinkError
from cuadrilla.link.address import Address
from cuadrilla.messages import Message
from cuadrilla.monitor.web.page import save_page
from cuadrilla.rundir import RunDir

if TYPE_CHECKING:
    from cuadrilla.serve.predictions import Predictor
    from cuadrilla.serve.served import ServedModel

SERVING = ("fastapi", "uvicorn", "prometheus_client")
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on, one of this machine's.")]
PortNumber = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0: any free one.")]


def serve(
    model: Run,
    name: Annotated[str, typer.Option(help="The model's name for callers (default: its folder's).")] = "",
    host: Host = "127.0.0.1",
    port: PortNumber = 8000,
    key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="A file with the key that callers must send.")
    ] = None,
    device: Device = "auto",
    precision: Annotated[
        Literal["auto", "fp32", "bf16", "fp16"],
        typer.Option(help="auto (what the run asks for, or what is best here), fp32, bf16, on a GPU fp16."),
    ] = "auto",
    slots: Annotated[
        int, typer.Option(min=0, max=1024, help="Texts that are continued together (0: as memory allows).")
    ] = 0,
    queue: Annotated[int, typer.Option(min=0, max=100_000, help="Texts that may wait for a slot.")] = 16,
) -> None:
    """Serve a model over HTTP: OpenAI's API, and a page to try it. SIGTERM or Ctrl-C lets calls end (8 s)."""
    hint = Message("write a key to a file, readable by you only, and name it: --api-key-file FILE")
    with listening(host, port, key_file, hint=hint) as (listener, key):  # fails before the model is loaded
        from starlette.middleware.cors import CORSMiddleware

        from cuadrilla.serve.app import end_calls, make_app
        from cuadrilla.serve.edge import Edge
        from cuadrilla.serve.listen import CALLS_SECONDS, listen, url_of
        from cuadrilla.serve.served import open_served

        load = partial(open_served, device=device, precision=precision, slots=slots, queue=queue)
        with ThreadPool(1) as pool:  # this thread ends with its OpenMP helpers: more helpers than cores would sleep
            served = pool.apply(load, (model,), {"name": name})
        app: Any = Edge(make_app(served), key=key, pages=True)
        if key:  # pages of other origins may send the key
            app = CORSMiddleware(app, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"])
        listen(
            app,
            listener=listener,
            around=served.running(),
            ready=lambda: _tell_served(served, url=url_of(listener), has_key=bool(key)),
            ending=lambda: asyncio.get_running_loop().call_later(CALLS_SECONDS, end_calls, served),
        )


def _tell_served(model: "ServedModel | Predictor", *, url: str, has_key: bool) -> None:
    from cuadrilla.serve.served import ServedModel

    if isinstance(model, ServedModel):
        slots = model.batcher.slots
        say("{name}: {slots} texts together; {about}", name=model.name, slots=slots, about=about(model.opened))
    else:
        say("{name}: /v1/predict", name=model.name)
    say("serving    {url}{key}", url=url, key="" if has_key else Message(" (this machine only, without a key)"))


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
        _save_page(places or [Path()], save)
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
            ready=lambda: _tell_dashboard(url_of(listener), [*runs.paths()], token="" if key else token),
        )


def _save_page(places: list[Path], page: Path) -> None:
    """Raises ConfigError."""
    if len(places) != 1:
        raise ConfigError("--save writes the page of one run", hint="cuadrilla dashboard RUN --save report.html")
    save_page(RunDir(places[0]), page)
    say("open it in a browser: {address}", address=page.resolve().as_uri())
    emit("{page}", page=page)


def _tell_dashboard(url: str, names: list[str], *, token: str) -> None:
    """Print the address. The token stands behind `#`: a browser sends that part of an address to no server."""
    if not names:
        say("no run yet; those that begin here will be shown")
    say("open this in a browser of this machine; Ctrl-C ends it")
    emit("{url}/#token={token}" if token else "{url}/#token=… (from the token's file)", url=url, token=token)


@contextmanager
def listening(host: str, port: int, key_file: Path | None, *, hint: Message) -> Iterator[tuple[socket.socket, str]]:
    """The open port, and the key in the file ("" without a file). Raises EnvironmentProblem if the extra `serve` is not
    installed, LinkError with `hint` if other machines could call without a key, ConfigError."""
    missing = [name for name in SERVING if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            "{missing} is not installed", missing=missing[0], hint='pip install "cuadrilla[serve]"'
        )
    from cuadrilla.serve.listen import open_port, read_key

    address = Address(host, port)
    if key_file is None and not address.is_loopback:
        raise LinkError("{address} can be reached by others, and there is no key", address=address, hint=hint)
    key = "" if key_file is None else read_key(key_file)
    with closing(open_port(address)) as listener:
        yield listener, key
