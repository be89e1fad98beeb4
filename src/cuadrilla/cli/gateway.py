"""`cuadrilla gateway`: one address for several services of one model."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.output import say
from cuadrilla.cli.serve import (
    Certificate,
    HostNames,
    KeyFile,
    Listen,
    LogFile,
    MostBody,
    MostSeconds,
    PrivateKey,
    ask_key,
    gone_in_time,
    leave,
    log_calls,
    port_of,
    require_serving,
)
from cuadrilla.errors import ConfigError
from cuadrilla.home import Home
from cuadrilla.log import libraries_apart, set_up_logging
from cuadrilla.messages import Message
from cuadrilla.rundir import make_private, read_regular
from cuadrilla.serve.replicas import parse_replicas

if TYPE_CHECKING:
    from cuadrilla.serve.gateway import Find
    from cuadrilla.serve.listen import Port

MOST_LIST_BYTES = 2**20


def gateway(
    urls: Annotated[
        list[str] | None, typer.Argument(metavar="URL", help="Services of one model: http://192.168.1.50:8000 ...")
    ] = None,
    replicas_file: Annotated[
        Path | None, typer.Option("--replicas-file", help="A file with more of them, a URL on each line.")
    ] = None,
    listen: Listen = "127.0.0.1:8001",
    key_file: KeyFile = None,
    replica_key_file: Annotated[
        Path | None, typer.Option("--replica-key-file", help="A file with the key that the services ask for.")
    ] = None,
    host: HostNames = None,
    most_seconds: MostSeconds = 600,
    most_body: MostBody = 2**20,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    log_file: LogFile = None,
    ray: Annotated[
        str, typer.Option("--ray", metavar="HOST:PORT", help="A Ray cluster that is to serve, instead of URLs.")
    ] = "",
    model: Annotated[
        Path | None, typer.Option("--serve", metavar="RUN", help="With --ray: the language model.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=256, help="With --ray: how many services.")] = 2,
    gpus: Annotated[int, typer.Option(min=0, max=8, help="With --ray: NVIDIA cards reserved for each service.")] = 0,
) -> None:
    """One address for several services of one model: the least loaded one, relative to its speed, gets a request.

    A service that dies is left out; its requests go to another one, unless they have received something already.
    SIGTERM or Ctrl-C lets requests end, for 8 seconds.
    """
    require_serving()
    from cuadrilla.serve.gateway import refuse_itself

    port = port_of(listen, certificate=certificate, private_key=private_key)
    key = ask_key(key_file)
    port.check(key=key, command="cuadrilla gateway")
    door = _Door(port=port, key=key, names=tuple(host or ()), most_seconds=most_seconds, most_body=most_body)
    set_up_logging(None)
    log_calls(log_file)
    if ray:
        chosen = _only_model(model, urls, replicas_file, replica_key_file)
        _serve_on_ray(ray, chosen, number=replicas, num_gpus=gpus, door=door)
        return
    found = parse_replicas(urls or (), _listed(replicas_file))
    refuse_itself(found, address=port.address)
    _answer(door, found, replica_key=ask_key(replica_key_file))


@dataclass(frozen=True, kw_only=True)
class _Door:
    """Where callers come in, what they show, and how much they may ask for."""

    port: "Port"
    key: str = field(repr=False)
    names: tuple[str, ...]
    most_seconds: float
    most_body: int


def _answer(door: _Door, urls: Sequence[str], *, replica_key: str, find: "Find | None" = None) -> None:
    """Until a signal comes."""
    from cuadrilla.serve.edge import Edge, Limits
    from cuadrilla.serve.gateway import Gateway
    from cuadrilla.serve.listen import listen, open_port

    served = Gateway(urls, replica_key=replica_key, find=find, most_seconds=door.most_seconds)

    with closing(open_port(door.port)) as listener:
        port = door.port.bound(listener)
        limits = Limits(body_bytes=door.most_body)
        edge = Edge(served.app(), key=door.key, hosts=port.hosts(*door.names), limits=limits)

        def ready() -> None:
            open_to = "" if door.key else Message(" (this machine only, without a key)")
            say("gateway    {url}{key}", url=port.url, key=open_to)

        draining = served.drain if find else gone_in_time(served.drain)
        listen(served.counting(edge), port=port, listener=listener, draining=draining, ready=ready)
        if not find:  # services on Ray are put away first
            leave()


def _serve_on_ray(address: str, model: Path, *, number: int, num_gpus: int, door: _Door) -> None:
    """Raises EnvironmentProblem, LinkError, ConfigError, DataError, CheckpointError."""
    from cuadrilla.engines.ray.cluster import joined

    home = Home.of_user().path
    make_private(home)
    with libraries_apart(home / "ray.txt"), joined(address):
        from cuadrilla.engines.ray.serving import services

        with services(model, number=number, device="cuda" if num_gpus else "auto", num_gpus=num_gpus) as (found, key):
            _answer(door, found.wait(), replica_key=key, find=found.find)


def _only_model(model: Path | None, *others: object) -> Path:
    """Raises ConfigError."""
    if model is None:
        raise ConfigError("--ray needs a model", hint="--ray HOST:6379 --serve RUN")
    if any(others):
        raise ConfigError("with --ray there are no services to name", hint="leave out the URLs and their files")
    return model


def _listed(path: Path | None) -> str:
    """Raises ConfigError."""
    if path is None:
        return ""
    try:
        return read_regular(path, most_bytes=MOST_LIST_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError("{path}: {reason}", path=path, reason=reason, hint="name a file with URLs") from None
