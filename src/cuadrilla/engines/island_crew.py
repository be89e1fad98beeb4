"""An island in a crew: the ranks that torchrun has started on one machine join as one worker.

Rank 0 has the machine's key and the connection, and fetches what the run needs; the others begin with what it has
fetched. A break of the connection ends a session at all ranks, and the next one begins with what they have loaded.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cuadrilla.config import Config
from cuadrilla.engines.equipment import Equipment, equip
from cuadrilla.engines.island import Island
from cuadrilla.engines.worker import WorkerOptions, run_worker
from cuadrilla.errors import ConfigError
from cuadrilla.link.base import Link, Stop
from cuadrilla.link.wire import Layout
from cuadrilla.log import TALK
from cuadrilla.messages import Message

log = logging.getLogger(__name__)


class _Ranks:
    """All of them, at rank 0. `threads` 0: this rank's part of the machine's cores."""

    def __init__(self, island: Island, *, threads: int) -> None:
        self._island, self._threads = island, threads
        self._parameters: Layout | None = None

    def equip(self, config: Config, folder: Path, *, speed: float) -> Equipment:
        self._island.tell_work(config, folder)
        made = _equipped(self._island, config, folder, threads=self._threads, speed=speed)
        self._parameters = made.parameters
        log.info("one worker of %s", self._island, extra=TALK)
        return made

    def around(self, link: Link, *, farewell: Callable[[], Stop | None]) -> Link:
        assert self._parameters is not None, "there is a session before there is something to train"
        return self._island.link(self._parameters, inner=link, farewell=farewell)


def lead_for_crew(island: Island, options: WorkerOptions) -> str:
    """Rank 0: work with all ranks until the run ends; why it ended. Raises what `run_worker` raises, IslandBroken."""
    return run_worker(replace(options, together=_Ranks(island, threads=options.threads)))


def follow_for_crew(island: Island, *, threads: int) -> str:
    """Any other rank: work until rank 0 says that the run has ended; why. Raises IslandBroken."""
    config, folder = island.hear_work()
    equipment = _equipped(island, config, folder, threads=threads)
    while (stop := equipment.work(island.link(equipment.parameters))).again:
        pass
    return Message(stop.reason)


def _equipped(island: Island, config: Config, folder: Path, *, threads: int, speed: float = 1.0) -> Equipment:
    """At every rank the same, on its own device. Raises ConfigError unless it is."""
    island.form(device=config.train.device)
    made = equip(config, folder, device=str(island.device), cores=threads or island.cores, speed=speed)
    if made.strategy.moves_weights:
        raise ConfigError(
            "several ranks cannot be one worker of this run: its workers answer with weights",
            hint="join without torchrun: each device is a worker then",
        )
    island.compare(config, made.task, made.model)
    return made
