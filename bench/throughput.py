"""Unequal machines on a fast network: our shares against the equal batches of torch's DDP.

    python -m bench.throughput [--repeats 3] [--unit-ms 120 240 480 480]

Machines are network namespaces (`bench/lan.py`; plain loopback for a user that is not root) with one worker each. Two
cores cannot be four machines, so a machine's slowness is made: it needs at least `--unit-ms` for a unit, and sleeps
for what the arithmetic leaves of that. All contenders run on the same machines with the same model, data, precision
(fp32), one thread and one unit per pass. The coordinator shares the first machine. The optimizer is not slowed down,
which favours DDP: there every machine has one.

With speeds s (units per second, measured in both) and M machines, equal batches run at M·min s at best and fair
shares at Σs. `ratio` is our units per second over DDP's in the same turn; `ideal` is Σs / (M·min s); `fraction` is
ratio / ideal (target: 0.95). Our first rounds measure the speeds and are not counted; nor is DDP's first step.
`late_units`: of ours and DDP's, those whose arithmetic alone took longer; many of them mean a loaded computer.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.common import random_data, report, summary
from bench.lan import Member, can_shape, lan
from bench.link import Node
from cuadrilla.home import Home
from cuadrilla.link.identity import open_coordinator
from cuadrilla.link.nodes import AllowList
from tests.crews import join

PORT = 47470
VOCABULARY, CONTEXT, UNIT_SEQUENCES = 512, 64, 1  # little arithmetic: all machines' together is a part of one core
WARM_UP = 5
"""Rounds: the first worker alone, all equally, then three with measured shares."""
RUN = """
[data]
folder = "{data}"
[model]
preset = "micro"
context = {context}
[train]
steps = {steps}
batch_sequences = {batch}
unit_sequences = {unit}
pass_sequences = {unit}
precision = "fp32"
device = "cpu"
threads = 1
[optim]
kind = "adamw"
[engine]
kind = "crew"
listen = "{address}:{port}"
workers = []
[sample]
tokens = 0
[evaluate]
every_tokens = 1_000_000_000_000
sequences = 1
"""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one contender did once. `machines`: counted units and their seconds, one entry each."""

    units_per_second: float
    machines: list[dict[str, Any]]
    busy_percent: float
    """Of all cores of this computer, whoever used them."""


@dataclass(frozen=True, kw_only=True)
class Rig:
    """Where, and what, to train."""

    members: Sequence[Member]
    unit_seconds: Sequence[float]
    folder: Path
    port: int
    num_units: int
    rounds: int
    steps: int

    def specification(self, kind: str, rank: int) -> dict[str, Any]:
        config = RUN.format(
            data=self.folder.parent / "data",
            context=CONTEXT,
            steps=WARM_UP + self.rounds + 1,  # the last one evaluates, and is not counted
            batch=self.num_units * UNIT_SEQUENCES,
            unit=UNIT_SEQUENCES,
            address=self.members[0].address,
            port=self.port,
        )
        return {
            "kind": kind, "rank": rank, "name": f"worker-{rank}", "workers": len(self.members), "config": config,
            "folder": str(self.folder), "address": self.members[0].address, "port": self.port,
            "unit_seconds": self.unit_seconds[rank], "paces": list(self.unit_seconds),
            "own_address": self.members[rank].address, "warm_up": WARM_UP, "rounds": self.rounds, "steps": self.steps,
        }  # fmt: skip

    def start(self, stack: ExitStack, kind: str, rank: int) -> Node:
        program = [sys.executable, "-m", "bench.throughput_nodes"]
        node = Node(self.members[rank], program=program, specification=self.specification(kind, rank))
        stack.callback(node.close)
        return node


def crew_turn(rig: Rig) -> Turn:
    """The product: `crew` engine, exact strategy, gRPC with TLS, journal, measured shares."""
    home, ranks = Home(rig.folder / "home"), range(len(rig.members))
    (rig.folder / "run").mkdir(parents=True)
    keys, listed = open_coordinator(home.crew), AllowList(home.nodes)
    for rank in ranks:
        name = f"worker-{rank}"
        join(rig.folder / name, name=name, crew=keys, nodes=listed)
    with ExitStack() as stack:
        coordinator = rig.start(stack, "crew-coordinator", 0)
        workers = [rig.start(stack, "crew-worker", rank) for rank in ranks]
        for node in (coordinator, *workers):
            node.answer()
        psutil.cpu_percent()
        coordinator.ask("train")  # answers when it is open
        for worker in workers:
            worker.tell("train")
        machines = [worker.answer() for worker in workers]
        seconds = coordinator.answer()["seconds"]
        busy = psutil.cpu_percent()
    return Turn(units_per_second=rig.rounds * rig.num_units / seconds, machines=machines, busy_percent=busy)


def ddp_turn(rig: Rig) -> Turn:
    """torch DistributedDataParallel over gloo: every machine has the same share."""
    with ExitStack() as stack:
        workers = [rig.start(stack, "ddp", rank) for rank in range(len(rig.members))]
        for worker in workers:
            worker.answer()
        psutil.cpu_percent()
        for worker in workers:
            worker.tell("train")
        machines = [worker.answer() for worker in workers]
        busy = psutil.cpu_percent()
    seconds = max(machine["step_seconds"] for machine in machines)
    return Turn(units_per_second=rig.steps * rig.num_units / seconds, machines=machines, busy_percent=busy)


def compare(ours: Turn, ddp: Turn) -> dict[str, Any]:
    """One turn of each. The speeds are those of both together."""
    speeds = [
        (a["units"] + b["units"]) / (a["seconds"] + b["seconds"])
        for a, b in zip(ours.machines, ddp.machines, strict=True)
    ]
    ratio = ours.units_per_second / ddp.units_per_second
    ideal = sum(speeds) / (len(speeds) * min(speeds))
    transfers = [sum(m["transfer_seconds"]) / max(len(m["transfer_seconds"]), 1) for m in ours.machines]
    round_units = sum(m["units"] for m in ours.machines) / max(len(m["transfer_seconds"]) for m in ours.machines)
    return {
        "ratio": ratio,
        "ideal": ideal,
        "fraction": ratio / ideal,
        "ours_of_sum": ours.units_per_second / sum(speeds),
        "ddp_of_equal_batches": ddp.units_per_second / (len(speeds) * min(speeds)),
        "speeds": speeds,
        "ours_units_per_second": ours.units_per_second,
        "ddp_units_per_second": ddp.units_per_second,
        "step_over_transfer": round_units / ours.units_per_second / max(transfers),
        "late_units": [sum(machine["late"] for machine in turn.machines) for turn in (ours, ddp)],
        "busy_percent": [ours.busy_percent, ddp.busy_percent],
    }


def summarize(ours: Sequence[Turn], ddp: Sequence[Turn]) -> dict[str, Any]:
    """Our turns beside those of DDP that followed them."""
    pairs = [compare(mine, theirs) for mine, theirs in zip(ours, ddp, strict=True)]
    keys = ("ratio", "ideal", "fraction", "step_over_transfer")
    return {**{key: summary([pair[key] for pair in pairs]) for key in keys}, "pairs": pairs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit-ms", type=float, nargs="+", default=[120, 240, 480, 480], help="one for each machine")
    parser.add_argument("--units", type=int, default=64, help="in a step; a multiple of the number of machines")
    parser.add_argument("--rate", default="1gbit", help="of every card, as tc writes it; 0: loopback")
    parser.add_argument("--rounds", type=int, default=5, help="of ours that are counted in a turn")
    parser.add_argument("--steps", type=int, default=3, help="of DDP that are counted in a turn")
    parser.add_argument("--repeats", type=int, default=3, help="turns of each")
    arguments = parser.parse_args()
    if arguments.units % len(arguments.unit_ms):
        parser.error("--units must be a multiple of the number of machines: DDP's batches are equal")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the network is taken down
    contenders = {"crew": crew_turn, "ddp": ddp_turn}
    load = psutil.getloadavg()
    turns: dict[str, list[Turn]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as name, lan(len(arguments.unit_ms), rate=arguments.rate) as members:
        random_data(
            Path(name) / "data", vocab_size=VOCABULARY, num_tokens=CONTEXT * UNIT_SEQUENCES * arguments.units * 8
        )
        for index, contender in enumerate(list(contenders) * arguments.repeats):
            folder = Path(name) / f"turn-{index}"
            folder.mkdir()
            rig = Rig(
                members=members,
                unit_seconds=[milliseconds / 1000 for milliseconds in arguments.unit_ms],
                folder=folder,
                port=PORT + index,
                num_units=arguments.units,
                rounds=arguments.rounds,
                steps=arguments.steps,
            )
            turns[contender].append(contenders[contender](rig))
            speed = turns[contender][-1].units_per_second
            print(f"turn {index + 1}, {contender}: {speed:.3g} units/s", file=sys.stderr)
    report(
        "throughput",
        network=f"namespaces, {arguments.rate} per card" if can_shape(arguments.rate) else "plain loopback, no limit",
        unit_ms=arguments.unit_ms,
        units=arguments.units,
        load_before=load,
        **summarize(turns["crew"], turns["ddp"]),
    )


if __name__ == "__main__":
    main()
