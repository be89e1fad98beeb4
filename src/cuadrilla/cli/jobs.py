"""The executors of whole runs: those of this machine and of its crew."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cuadrilla.cli.crew import coordinating, show_opened
from cuadrilla.link.address import listening_address
from cuadrilla.rundir import make_private

if TYPE_CHECKING:
    from cuadrilla.config import Config
    from cuadrilla.jobs.crew import CrewExecutor
    from cuadrilla.jobs.local import LocalExecutor


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
    return LocalExecutor({f"here-{at + 1}": uses[at % len(uses)] for at in range(number)}, logs=logs)


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
