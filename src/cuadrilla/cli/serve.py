"""`cuadrilla serve`: a trained model over HTTP."""

import asyncio
import importlib.util
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cuadrilla.cli.model import Device, Run, about
from cuadrilla.cli.output import say
from cuadrilla.errors import EnvironmentProblem, LinkError
from cuadrilla.link.address import Address
from cuadrilla.messages import Message

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
            ready=lambda: _tell(served, url=url_of(listener), has_key=bool(key)),
            ending=lambda: asyncio.get_running_loop().call_later(CALLS_SECONDS, end_calls, served),
        )


def _tell(model: "ServedModel | Predictor", *, url: str, has_key: bool) -> None:
    from cuadrilla.serve.served import ServedModel

    if isinstance(model, ServedModel):
        slots = model.batcher.slots
        say("{name}: {slots} texts together; {about}", name=model.name, slots=slots, about=about(model.opened))
    else:
        say("{name}: /v1/predict", name=model.name)
    say("serving    {url}{key}", url=url, key="" if has_key else Message(" (this machine only, without a key)"))


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
