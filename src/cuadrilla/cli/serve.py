"""`cuadrilla serve`: a trained model over HTTP."""

import asyncio
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from getpass import getpass
from logging.handlers import RotatingFileHandler
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.model import about
from cuadrilla.cli.output import say
from cuadrilla.errors import ConfigError, EnvironmentProblem, LinkError
from cuadrilla.link.address import Address
from cuadrilla.messages import Message, language, shown

if TYPE_CHECKING:
    from cuadrilla.serve.listen import Port
    from cuadrilla.serve.served import ServedModel

HIDDEN = Path("-")
PRECISIONS = ("auto", "fp32", "bf16", "fp16")
SERVING = ("fastapi", "uvicorn", "prometheus_client")
LOG_BYTES, LOG_FILES = 10 * 2**20, 3
Host = Annotated[
    str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on, one of this machine's.")
]
PortNumber = Annotated[int, typer.Option("--port", min=0, max=65535, help="The port to listen on; 0: any free one.")]


def serve(
    models: Annotated[
        list[str], typer.Argument(help="Run folders or folders in Hugging Face's layout; NAME=FOLDER names one.")
    ],
    host: Host = "127.0.0.1",
    port_number: PortNumber = 8000,
    key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", help="A file with the key that callers must send; `-` asks for it, hidden."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    newest: Annotated[
        bool, typer.Option("--newest", help="The last step, not the one with the lowest held-out loss.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="auto (what the run asks for, or what is best here), fp32, bf16, on a GPU fp16.")
    ] = "auto",
    slots: Annotated[
        int, typer.Option(min=0, max=1024, help="Texts that are continued together (0: as memory allows).")
    ] = 0,
    queue: Annotated[
        int, typer.Option(min=-1, max=100_000, help="Texts that may wait for a slot (-1: one for 16 slots).")
    ] = -1,
    most_seconds: Annotated[
        float, typer.Option("--most-seconds", min=1, max=86_400, help="Time limit of a call.")
    ] = 300,
    certificate: Annotated[Path | None, typer.Option("--certificate", help="A PEM file, for https.")] = None,
    private_key: Annotated[
        Path | None, typer.Option("--private-key", help="The certificate's key, a PEM file.")
    ] = None,
    log_file: Annotated[
        Path | None, typer.Option("--log", help="Write a line for each call to this file, without its text.")
    ] = None,
) -> None:
    """Serve models over HTTP: OpenAI's API, and a page to try them. SIGTERM or Ctrl-C lets calls end (8 s)."""
    require_serving()
    if precision not in PRECISIONS:
        raise ConfigError(
            "unknown precision {precision!r}",
            precision=precision,
            hint="use one of {names}",
            names=", ".join(PRECISIONS),
        )
    from cuadrilla.serve.app import Service, make_app
    from cuadrilla.serve.edge import Edge
    from cuadrilla.serve.listen import CALLS_SECONDS, LIBRARIES, open_port
    from cuadrilla.serve.listen import listen as answer
    from cuadrilla.serve.served import Models, Room, open_served

    port = port_of(address_of(host, port_number), certificate=certificate, private_key=private_key)
    key = ask_key(key_file)
    port.check(key=key, command="cuadrilla serve")
    log_calls(log_file, LIBRARIES)
    with closing(open_port(port)) as listener:  # before the models are loaded, which takes longer
        port = port.bound(listener)
        room = Room(slots=slots, waiting=queue)
        opened = partial(open_served, models, device=device, newest=newest, precision=precision, room=room)
        with ThreadPool(1) as pool:  # which ends with its helpers of OpenMP: with more threads than cores they sleep
            served, predictors = pool.apply(opened)
        by_name = {model.name: model for model in served}
        service = Service(models=Models(by_name), predictors=predictors, most_seconds=most_seconds)
        answer(
            service.meters.counting(Edge(make_app(service), key=key)),
            port=port,
            listener=listener,
            around=service.running(),
            ready=lambda: _tell(served, list(predictors.by_name), port=port, key=key),
            ending=lambda: asyncio.get_running_loop().call_later(CALLS_SECONDS, service.end_calls),
        )
        leave()


def _tell(models: "Sequence[ServedModel]", tasks: Sequence[str], *, port: "Port", key: str) -> None:
    for model in models:
        say(
            "{name}: {slots} texts together, {rate:.0f} tokens/s for one alone; {about}",
            name=model.name,
            slots=model.batcher.load.slots,
            rate=model.tokens_per_second,
            about=about(model.opened),
        )
    for name in tasks:
        say("{name}: /v1/predict", name=name)
    say("serving    {url}{key}", url=port.url, key="" if key else Message(" (this machine only, without a key)"))


def leave() -> None:
    """End the process with 0, without the interpreter's farewell, which takes seconds on a crowded machine."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(0)


def require_serving() -> None:
    """Raises EnvironmentProblem where the extra is missing."""
    missing = [name for name in SERVING if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentProblem(
            "{missing} is not installed", missing=missing[0], hint='pip install "cuadrilla[serve]"'
        )


def address_of(host: str, port: int) -> Address:
    """The address to listen on. Raises LinkError for a host that is not one address."""
    try:
        return Address(host, port)
    except LinkError as error:
        raise LinkError(error.message, hint="--host 127.0.0.1, or an address of this machine's") from None


def port_of(address: Address, *, certificate: Path | None, private_key: Path | None) -> "Port":
    """The port with its certificate. Raises ConfigError for half of a certificate."""
    from cuadrilla.serve.listen import Port

    if (certificate is None) != (private_key is None):
        raise ConfigError("https needs both files", hint="--certificate FILE --private-key FILE")
    return Port(address=address, certificate=certificate, private_key=private_key)


def ask_key(path: Path | None) -> str:
    """From a file, or typed; "" without one. Raises ConfigError."""
    from cuadrilla.serve.listen import check_key

    if path is None:
        return ""
    if path != HIDDEN:
        return key_in(path)
    prompt = shown(Message("key (not shown): "), language())
    typed = getpass(prompt, stream=sys.stderr) if sys.stdin.isatty() else sys.stdin.readline()
    return check_key(typed.strip(), where=Message("the key"))


def key_in(path: Path) -> str:
    """Of a file. Raises ConfigError."""
    from cuadrilla.serve.listen import read_key

    key = read_key(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        say("warning: others on this machine can read {path}: chmod 600 {path}", path=path)
    return key


def log_calls(path: Path | None, names: Sequence[str]) -> None:
    """Lines of the service's own log and of the loggers `names`, without a caller's text. Raises ConfigError."""
    if path is None:
        return
    try:
        handler = RotatingFileHandler(path, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
    except OSError as error:
        hint = "name a file in a folder that exists"
        raise ConfigError("{path}: {reason}", path=path, reason=error.strerror, hint=hint) from None
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger("cuadrilla.serve").setLevel(logging.INFO)
    for name in ("cuadrilla.serve", *names):
        logging.getLogger(name).addHandler(handler)
