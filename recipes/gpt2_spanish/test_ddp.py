"""One all_reduce between all ranks: which backend they agreed on, and whether the sum is right.

Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun sets, or a hand.
"""

import argparse
import sys

import torch
import torch.distributed as dist

from cuadrilla.cli.output import emit, report_error
from cuadrilla.crew.island import joined
from cuadrilla.errors import ConfigError, CuadrillaError, LinkError
from cuadrilla.host.torchrun import find_place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=("auto", "nccl", "gloo"), default="auto")
    args = parser.parse_args()
    place = find_place()
    if place is None:
        raise ConfigError(
            "there is one rank only: nothing to add up",
            hint="WORLD_SIZE=2 RANK=0 MASTER_ADDR=... MASTER_PORT=12355 on one machine, RANK=1 on the other",
        )
    with joined(place) as island:
        island.take_device("auto")
        island.choose_backend(asked=args.backend)
        backend, reason = island.backend
        number = torch.tensor([place.rank + 1.0], device=island.device if backend == "nccl" else "cpu")
        dist.all_reduce(number)
        found, expected = float(number), place.num_ranks * (place.num_ranks + 1) / 2
        chosen = f"{backend} ({reason})"
        emit("rank {rank} of {ranks}: backend {backend}", rank=place.rank, ranks=place.num_ranks, backend=chosen)
        emit("rank {rank}: all_reduce gives {found:g}, right is {expected:g}",
             rank=place.rank, found=found, expected=expected)  # fmt: skip
        if found != expected:
            raise LinkError("all_reduce gives a wrong sum", hint="another backend, or a crew: cuadrilla up, join")


if __name__ == "__main__":
    try:
        main()
    except CuadrillaError as error:
        report_error(error)
        sys.exit(error.exit_code)
