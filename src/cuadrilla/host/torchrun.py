"""This process's rank in its group, from the variables that torchrun, or a user in its place, has set."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cuadrilla.errors import ConfigError

MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Place:
    """One of `num_ranks` processes, `ranks_here` of them on this machine. `attempt`: torchrun's restarts so far."""

    rank: int
    num_ranks: int
    local_rank: int = 0
    ranks_here: int = 1
    attempt: int = 0

    @property
    def leads(self) -> bool:
        return self.rank == 0


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place; None if it is alone. Raises ConfigError if the variables make no sense."""
    if not environ.get("RANK") or not environ.get("WORLD_SIZE"):
        return None
    try:
        place = Place(
            rank=int(environ["RANK"]),
            num_ranks=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK") or 0),
            ranks_here=max(1, int(environ.get("LOCAL_WORLD_SIZE") or 1)),
            attempt=int(environ.get("TORCHELASTIC_RESTART_COUNT") or 0),
        )
    except ValueError:
        place = Place(rank=-1, num_ranks=0)
    if place.num_ranks == 1 and place.rank == 0:
        return None
    if not 0 <= place.rank < place.num_ranks or not all(environ.get(name) for name in MEETING):
        raise ConfigError(
            "RANK={rank}, WORLD_SIZE={ranks}, MASTER_ADDR={host}, MASTER_PORT={port} are not as torchrun sets them",
            rank=environ["RANK"],
            ranks=environ["WORLD_SIZE"],
            host=environ.get("MASTER_ADDR"),
            port=environ.get("MASTER_PORT"),
            hint="start it with torchrun, which sets all of them; to train alone, unset WORLD_SIZE",
        )
    return place
