"""What `cuadrilla tune` needs where it searches over a function: who does the calls, and one call."""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.output import emit_json, keep_answer_apart
from cuadrilla.config import Config
from cuadrilla.engines.supervise import end_with
from cuadrilla.errors import ConfigError

if TYPE_CHECKING:
    from cuadrilla.jobs.calls import CallPlaces
    from cuadrilla.jobs.places import Doing
    from cuadrilla.tune.search import Job


def call_function(folder: Annotated[Path, typer.Argument()]) -> None:
    """Call the function of a search for a trial; ends with the process that started this one."""
    keep_answer_apart()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it reaches a whole group of processes; the search decides
    end_with(sys.stdin.fileno())  # a pipe that nobody writes to
    from cuadrilla.tune.call import call_trial

    emit_json(call_trial(folder.resolve()))


@dataclass(frozen=True)
class Elsewhere:
    """A Dask cluster, as it was named: `tls` is its authority, a certificate, and the key."""

    scheduler: str | None
    tls: tuple[Path | None, ...]
    insecure: bool

    def check(self, config: Config, *, ray: bool, crew: bool) -> None:
        """Raises ConfigError where Dask has no part in it."""
        named = self.scheduler is not None or any(self.tls) or self.insecure
        if named and not config.tune.function:
            raise ConfigError(
                "trainings do not go through Dask: only a search over a function does",
                hint="leave --scheduler and its options out, or set tune.function",
            )
        if named and (ray or crew):
            raise ConfigError(
                "--scheduler excludes {option}", option="--ray" if ray else "--crew", hint="leave one of them out"
            )
        if named and self.scheduler is None:
            raise ConfigError("certificates are for a Dask scheduler", hint="add --scheduler tls://HOST:PORT")


def call_places(config: Config, *, together: int) -> "CallPlaces[Job]":
    """Of this machine."""
    from cuadrilla.engines.local import num_cores
    from cuadrilla.jobs.calls import CallPlaces

    number = together or 1
    names = [f"place-{at + 1}" for at in range(number)]
    return CallPlaces(names, threads=config.train.threads or max(1, num_cores() // number))


@contextmanager
def dask_places(config: Config, *, folder: Path, together: int, elsewhere: Elsewhere) -> Iterator["Doing[Job]"]:
    """The workers of the Dask cluster that is named. `folder`: of the run file.

    Raises ConfigError, EnvironmentProblem, LinkError.
    """
    from cuadrilla.cli.pools import named_scheduler
    from cuadrilla.tune.function import packages_of, read_function

    assert elsewhere.scheduler is not None
    if together:
        raise ConfigError(
            "--together and --scheduler exclude each other",
            hint="a Dask worker makes one trial at a time; start more of them: dask worker --nworkers",
        )
    packages = packages_of(read_function(config.tune, folder=folder).code)
    address = named_scheduler(elsewhere.scheduler, elsewhere.tls, insecure=elsewhere.insecure)
    from cuadrilla.engines.dask import dask_calls
    from cuadrilla.tune.dask_places import DaskPlaces

    with dask_calls(address, packages=packages) as calls:
        yield DaskPlaces(calls)
