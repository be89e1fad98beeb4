"""Whole runs as jobs: the process that trains them, and the executors of this machine and of its crew."""

import gc
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.crew import coordinating, show_opened
from cuadrilla.cli.output import keep_answer_apart, options, say
from cuadrilla.crew.children import end_with_parent
from cuadrilla.crew.signals import handling
from cuadrilla.link.address import listening_address
from cuadrilla.log import set_up_logging
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, make_private, write_json
from cuadrilla.runfile import literal, read_run_file

if TYPE_CHECKING:
    from cuadrilla.config import Config
    from cuadrilla.jobs.crew import CrewExecutor
    from cuadrilla.jobs.local import LocalExecutor

LOOK_SECONDS = 0.2


def work_on(
    threads: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option()] = "",
) -> None:
    """Train the trials whose folders come by standard input; ends with the process that writes there."""
    keep_answer_apart()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # sent to the whole process group; the parent decides
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda _number, _frame: stopped.set())
    from cuadrilla.crew.run import Audience, train_run
    from cuadrilla.jobs.local import OUTCOME

    more = [f"train.threads={threads}"] if threads else []
    more += [f"train.device={literal(device)}"] if device else []
    audience = Audience(tell=say, stopping=partial(_until_terminated, stopped))
    folders: queue.SimpleQueue[str] = queue.SimpleQueue()
    end_with_parent(folders.put)
    while not stopped.is_set():
        with suppress(queue.Empty):
            folder = Path(folders.get(timeout=LOOK_SECONDS))
            gc.collect()  # frees the model of the run before
            outcome = train_run(read_run_file(folder, sets=more), RunDir(folder), allow_changes=True, audience=audience)
            ended = outcome.complete or not outcome.interrupted  # `evaluate.patience` ended it
            write_json(folder / OUTCOME, {"complete": ended}, private=True)


@contextmanager
def _until_terminated(stopped: threading.Event, request_stop: Callable[[str], None]) -> Iterator[None]:
    def handler(_number: int, _frame: FrameType | None) -> None:
        stopped.set()
        request_stop(Message("the coordinator wants this job back"))

    with handling({signal.SIGTERM: handler}):
        if stopped.is_set():  # the signal came before this block
            handler(signal.SIGTERM, None)
        yield


def local_executor(*, logs: Path, config: "Config | None" = None, together: int = 0) -> "LocalExecutor":
    """The executor of this machine, for runs of `config` (None: for any). It trains `together` runs at once; 0: one on
    each accelerator, or one if there is none. They divide the cores. Raises DeviceError.
    """
    from cuadrilla.crew.equipment import choose_uses, num_cores
    from cuadrilla.jobs.local import LocalExecutor
    from cuadrilla.plan.devices import Use

    on_cards = [use for use in choose_uses(config=config).uses if use.device not in ("", "cpu")]
    if config is not None and config.train.device != "auto":
        on_cards = []
    number = together or len(on_cards) or 1
    threads = (config.train.threads if config else 0) or (0 if on_cards else max(1, num_cores() // number))
    uses = on_cards or [Use(name="", device="", threads=threads)]
    return LocalExecutor({f"place-{at + 1}": uses[at % len(uses)] for at in range(number)}, logs=logs)


@contextmanager
def crew_executor(folder: Path, *, listen: str, address: str, uses: int) -> Iterator["CrewExecutor"]:
    """The executor of the machines that join. `folder`: the search or the queue. Raises ConfigError, LinkError."""
    from cuadrilla.jobs.crew import CrewExecutor

    set_up_logging(None, verbose=options.debug)
    make_private(folder)
    with (
        coordinating(Message("coordinating machines")) as home,
        closing(CrewExecutor(home, listen=listening_address(listen), folder=folder)) as executor,
    ):
        show_opened(executor.crew, folder=folder, address=address, uses=uses)
        yield executor
