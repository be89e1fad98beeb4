"""Which rank of which group this process is, where torchrun started it, or somebody who set the same variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from cuadrilla.errors import ConfigError

MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Place:
    """One of `num_ranks` processes, `ranks_here` on each machine. `attempt`: how often torchrun has begun again."""

    rank: int
    num_ranks: int
    local_rank: int = 0
    ranks_here: int = 1
    attempt: int = 0

    @property
    def leads(self) -> bool:
        return self.rank == 0


def find_place(environ: Mapping[str, str] = os.environ) -> Place | None:
    """None for a process that is alone. Raises ConfigError for variables that cannot be."""
    if not environ.get("RANK") or not environ.get("WORLD_SIZE"):
        return None
    place = Place(
        rank=_number(environ, "RANK"),
        num_ranks=_number(environ, "WORLD_SIZE"),
        local_rank=_number(environ, "LOCAL_RANK"),
        ranks_here=max(1, _number(environ, "LOCAL_WORLD_SIZE")),
        attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT"),
    )
    if place.rank >= place.num_ranks:
        raise ConfigError(
            "RANK={rank} with WORLD_SIZE={ranks}: ranks begin at 0",
            rank=place.rank,
            ranks=place.num_ranks,
            hint="start it with torchrun, which sets both",
        )
    if place.num_ranks == 1:
        return None
    if missing := [name for name in MEETING if not environ.get(name)]:
        raise ConfigError(
            "WORLD_SIZE={ranks}, and where the ranks meet is not said: {missing}",
            ranks=place.num_ranks,
            missing=", ".join(missing),
            hint="start it with torchrun, which sets all of them; to train alone, unset WORLD_SIZE",
        )
    return place


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name) or "0"
    if not text.isascii() or not text.isdecimal():
        raise ConfigError(
            "{name}={text!r} is not a number such as torchrun sets",
            name=name,
            text=text,
            hint="start it with torchrun, or unset it",
        )
    return int(text)
