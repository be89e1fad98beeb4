"""Who does the work of `cuadrilla data prepare`: processes of this machine, or the workers of a Dask cluster."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.pool import Pool
from cuadrilla.errors import ConfigError, EnvironmentProblem

if TYPE_CHECKING:
    from cuadrilla.engines.dask import Scheduler

LOCAL, DASK = ENGINES = ("local", "dask")
ONLY_HERE = "--host 127.0.0.1 --dashboard-address 127.0.0.1"
INSTALL = 'pip install "cuadrilla[dask]"'

EngineOption = Annotated[
    str, typer.Option("--engine", help="Who does the work: local (processes of this machine) or dask (a cluster).")
]
SchedulerOption = Annotated[
    str | None, typer.Option("--scheduler", metavar="URL", help="The Dask scheduler, such as tls://192.168.1.50:8786.")
]
CaOption = Annotated[Path | None, typer.Option("--tls-ca-file", help="The authority of the Dask cluster (PEM).")]
CertificateOption = Annotated[Path | None, typer.Option("--tls-cert", help="This machine's certificate (PEM).")]
KeyOption = Annotated[Path | None, typer.Option("--tls-key", help="The key of --tls-cert (PEM).")]
InsecureOption = Annotated[
    bool, typer.Option("--insecure-scheduler", help="Allow tcp:// on a private network of machines that are all yours.")
]


def chosen_pool(
    engine: str, scheduler: str | None, tls: tuple[Path | None, ...], *, insecure: bool, options: PrepareOptions
) -> AbstractContextManager[Pool | None]:
    """None: as the preparation chooses. `tls`: authority, certificate, key. Raises ConfigError, EnvironmentProblem."""
    if engine not in ENGINES:
        raise ConfigError(
            "--engine {engine!r} is unknown", engine=engine, hint="choose from {choices}", choices=", ".join(ENGINES)
        )
    if engine == LOCAL:
        if scheduler or any(tls) or insecure:
            raise ConfigError("a Dask scheduler is for --engine dask", hint="add --engine dask")
        return nullcontext()
    if options.processes is not None:
        raise ConfigError(
            "--processes and --engine dask exclude each other",
            hint="how many processes a machine gives is said where its worker starts: dask worker --nworkers",
        )
    if not scheduler:
        raise ConfigError(
            "--engine dask needs the address of a scheduler; none is started for you",
            hint="on this machine alone: `dask scheduler {local}:8787`, `dask worker tcp://127.0.0.1:8786"
            " --nworkers 2 --nthreads 1 {local}:0`, then --scheduler tcp://127.0.0.1:8786; docs/dask.md has the rest",
            local=ONLY_HERE,
        )
    return _dask_pool(scheduler, tls, insecure=insecure, encoder=options.encoder)


def _dask_pool(
    scheduler: str, tls: tuple[Path | None, ...], *, insecure: bool, encoder: str
) -> AbstractContextManager[Pool]:
    address = named_scheduler(scheduler, tls, insecure=insecure)
    from cuadrilla.engines.dask import dask_pool

    return dask_pool(address, encoder=encoder)


def named_scheduler(scheduler: str, tls: tuple[Path | None, ...], *, insecure: bool) -> "Scheduler":
    """Raises ConfigError, EnvironmentProblem, LinkError."""
    try:
        from cuadrilla.engines.dask import TlsFiles, parse_scheduler
    except ImportError as error:
        raise EnvironmentProblem("Dask is not installed: {error}", error=error, hint=INSTALL) from error
    ca, certificate, key = tls
    if any(tls) and not (ca and certificate and key):
        raise ConfigError(
            "a certificate needs its key and an authority", hint="give --tls-ca-file, --tls-cert, --tls-key"
        )
    files = TlsFiles(ca=ca, certificate=certificate, key=key) if ca and certificate and key else None
    return parse_scheduler(scheduler, tls=files, insecure=insecure)
