"""Whole runs as jobs: who does them, and how long."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cuadrilla.cli.crew import coordinating, show_opened
from cuadrilla.cli.parent import stopping
from cuadrilla.link.address import listening_address
from cuadrilla.rundir import make_private

if TYPE_CHECKING:
    from cuadrilla.config import Config
    from cuadrilla.jobs.crew import CrewExecutor
    from cuadrilla.jobs.executor import Executor, JobSource
    from cuadrilla.jobs.local import LocalExecutor


def do_jobs(work: "JobSource", executors: "Sequence[AbstractContextManager[Executor]]") -> bool:
    """Have jobs done until all are, or until Ctrl-C; then running ones are saved. Returns whether it was Ctrl-C."""
    from cuadrilla.jobs.executor import hand_out

    stopped = threading.Event()
    with ExitStack() as stack:
        ready = [stack.enter_context(each) for each in executors]
        stack.enter_context(stopping(lambda _reason: stopped.set()))
        hand_out(work, ready, stop=stopped)
    return stopped.is_set()


def local_executor(*, logs: Path, config: "Config | None" = None) -> "AbstractContextManager[LocalExecutor]":
    """The executor of this machine, for runs of `config` (None: for any): one run on each accelerator, or one if there
    is none. Raises DeviceError.
    """
    from cuadrilla.crew.equipment import choose_uses
    from cuadrilla.jobs.local import LocalExecutor
    from cuadrilla.plan.devices import Use

    uses = [use for use in choose_uses(config=config).uses if use.device not in ("", "cpu")]
    if not uses or (config is not None and config.train.device != "auto"):
        uses = [Use(name="", device="", threads=0)]
    return closing(LocalExecutor({f"here-{number}": use for number, use in enumerate(uses, 1)}, logs=logs))


@contextmanager
def crew_executor(folder: Path, *, listen: str, address: str, uses: int) -> Iterator["CrewExecutor"]:
    """The executor of the machines that join. `folder`: the search or the queue. Raises ConfigError, LinkError."""
    from cuadrilla.jobs.crew import CrewExecutor

    make_private(folder)
    with (
        coordinating() as home,
        closing(CrewExecutor(home, listen=listening_address(listen), folder=folder)) as executor,
    ):
        show_opened(executor.crew, folder=folder, address=address, uses=uses)
        yield executor
