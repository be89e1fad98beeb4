"""`cuadrilla work`: a worker process of this machine, started by the crew engine."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.config import Config
from cuadrilla.errors import LinkError
from cuadrilla.log import set_up_logging, tear_down_logging
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import load_dumped

if TYPE_CHECKING:
    from cuadrilla.link.grpc_client import Connection, RunDescription


def work(
    address: Annotated[str, typer.Option()],
    identity: Annotated[Path, typer.Option()],
    folder: Annotated[Path, typer.Option()],
    name: Annotated[str, typer.Option()],
    speed: Annotated[float, typer.Option()] = 1.0,
    link: Annotated[str, typer.Option()] = "",
    threads: Annotated[int, typer.Option()] = 0,
) -> None:
    """Work for the coordinator that started this process; ends with it."""
    from cuadrilla.engines.worker import WorkerOptions, run_worker
    from cuadrilla.link.shaped import parse_shape
    from cuadrilla.link.tls import load_node

    def prepare(_connection: "Connection", description: "RunDescription") -> tuple[Config, Path]:
        return load_dumped(description.config), folder  # the same machine: everything is there

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the coordinator decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    handler = set_up_logging(RunDir(folder).logs, worker=name)
    try:
        run_worker(
            WorkerOptions(
                address=address,
                identity=load_node(identity),
                prepare=prepare,
                shape=parse_shape(link, speed=speed),
                threads=threads,
            )
        )
    finally:
        tear_down_logging(handler)


def _end_with_parent() -> None:
    """Standard input is a pipe that nobody writes to: it ends when the coordinator's process does."""
    sys.stdin.read()
    os._exit(LinkError.exit_code)
