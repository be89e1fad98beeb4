"""The tensor path of the crew link on a network of limited cards: bytes per second, and what they cost.

    python -m bench.link [--workers 2] [--rate 1gbit] [--rounds 3] [--turns 1] [--peer gloo]

One process per machine, each in a network namespace (`bench/lan.py`); `--rate 0`, or a user that is not root, means
plain loopback. A round: the coordinator announces a version, all workers download it at once, all upload a
contribution of the same size at once. Then `both_ways`: one worker uploads while another downloads. Each process's
CPU seconds, children included, are those of that phase. `MB_per_second` is payload through the coordinator's card
per direction, `cpu` is CPU seconds per second; `ceiling` is what TCP could carry at that rate. Peers move the same
bytes between the same places, without encryption or checksums: `gloo` are messages of torch.distributed.
The contenders take turns, each time with new processes. The cost of the kernel's
network code falls on whichever process it interrupts.
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.common import report, summary
from bench.lan import Member, can_shape, ceiling_bytes_per_second, lan
from cuadrilla.link.identity import open_coordinator
from cuadrilla.link.nodes import AllowList
from tests.crews import join

PORT = 47470
STOP_SECONDS = 20.0
Phase = dict[str, Any]


class Node:
    """A process of the benchmark on one machine."""

    def __init__(self, member: Member, *, program: Sequence[str], specification: dict[str, Any]) -> None:
        command = [*member.prefix, *program, json.dumps(specification)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._usage = psutil.Process(self._process.pid)

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with code {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def ask(self, command: str) -> dict[str, float]:
        self.tell(command)
        return self.answer()

    def cpu_seconds(self) -> float:
        everyone = [self._usage, *self._usage.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in everyone)

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Crew:
    """The coordinator, the workers, and what they do together."""

    def __init__(self, nodes: list[Node], *, num_bytes: int) -> None:
        self.coordinator, *self.workers = nodes
        self.num_bytes = num_bytes

    def phase(self, *tasks: tuple[Node, str], num_sets: int) -> Phase:
        """Do several things at once. `num_sets`: how many whole models pass the coordinator's card one way."""
        nodes = (self.coordinator, *self.workers)
        before = [node.cpu_seconds() for node in nodes]
        for node, command in tasks:
            node.tell(command)
        times = [node.answer() for node, _ in tasks]
        used = [node.cpu_seconds() - then for node, then in zip(nodes, before, strict=True)]
        seconds = max(time["ended"] for time in times) - min(time["began"] for time in times)
        return {
            "seconds": seconds,
            "MB_per_second": num_sets * self.num_bytes / seconds / 1e6,
            "cpu_seconds": used,
            "cpu": [value / seconds for value in used],
        }


def crew_round(crew: Crew, *, both_ways: bool) -> dict[str, Phase]:
    """One round of the product, and one exchange in both directions at once."""
    coordinator, workers = crew.coordinator, crew.workers
    phases = {"announce": crew.phase((coordinator, "announce"), num_sets=0)}
    phases["download"] = crew.phase(*((worker, "download") for worker in workers), num_sets=len(workers))
    uploads = [task for worker in workers for task in ((worker, "upload"), (coordinator, "collect"))]
    phases["upload"] = crew.phase(*uploads, num_sets=len(workers))
    if both_ways:
        coordinator.ask("announce")
        exchange = ((workers[0], "upload"), (workers[1], "download"), (coordinator, "collect"))
        phases["both_ways"] = crew.phase(*exchange, num_sets=1)
    return phases


def peer_round(crew: Crew, *, names: Sequence[str]) -> dict[str, Phase]:
    """The same bytes as messages of the peer."""
    everyone = (crew.coordinator, *crew.workers)
    num_sets = {"download": len(crew.workers), "upload": len(crew.workers), "both_ways": 1, "all_reduce": 1}
    return {name: crew.phase(*((node, name) for node in everyone), num_sets=num_sets[name]) for name in names}


def start(kind: str, members: Sequence[Member], folder: Path, arguments: argparse.Namespace) -> list[Node]:
    """The processes of one contender, ready. `kind`: crew or gloo."""
    common = {
        "address": members[0].address,
        "port": PORT,
        "parameters": arguments.parameters,
        "workers": arguments.workers,
        "folder": str(folder),
    }
    nodes = []
    for rank, member in enumerate(members):
        role = kind if kind == "gloo" else f"{kind}-{'worker' if rank else 'coordinator'}"
        program = [sys.executable, "-m", "bench.link_nodes"]
        own = {"kind": role, "rank": rank, "name": f"worker-{rank}", "own_address": member.address}
        nodes.append(Node(member, program=program, specification={**common, **own}))
        if not rank and kind == "crew":
            nodes[-1].answer()
    for node in {"crew": nodes[1:], "gloo": nodes}[kind]:  # a gloo group begins when all are there
        node.answer()
    return nodes


def enrol(folder: Path, *, num_workers: int) -> None:
    """A crew's keys, and those of its nodes."""
    keys, listed = open_coordinator(folder / "crew"), AllowList(folder / "crew" / "nodes.json")
    for rank in range(1, num_workers + 1):
        name = f"worker-{rank}"
        join(folder / name, name=name, crew=keys, nodes=listed)


def summarize(rounds: Sequence[dict[str, Phase]]) -> dict[str, Any]:
    """Medians over the rounds."""
    return {
        name: {
            "MB_per_second": summary([phases[name]["MB_per_second"] for phases in rounds]),
            "seconds": summary([phases[name]["seconds"] for phases in rounds]),
            "cpu_coordinator": summary([phases[name]["cpu"][0] for phases in rounds]),
            "cpu_seconds_coordinator": summary([phases[name]["cpu_seconds"][0] for phases in rounds]),
            "cpu_workers": summary([cpu for phases in rounds for cpu in phases[name]["cpu"][1:]]),
        }
        for name in rounds[0]
    }


def measure(kind: str, arguments: argparse.Namespace) -> list[dict[str, Phase]]:
    """The rounds of one turn but for the first, which warms up."""
    both_ways = arguments.workers > 1
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        enrol(folder, num_workers=arguments.workers)
        members = stack.enter_context(lan(arguments.workers + 1, rate=arguments.rate))
        nodes = start(kind, members, folder, arguments)
        for node in nodes:
            stack.callback(node.close)
        crew = Crew(nodes, num_bytes=4 * arguments.parameters)
        match kind:
            case "crew":
                for worker in crew.workers:
                    worker.ask("hello")
                    crew.coordinator.ask("hello")
                one = partial(crew_round, crew, both_ways=both_ways)
            case _:
                names = ["download", "upload", *(["both_ways"] if both_ways else []), "all_reduce"]
                one = partial(peer_round, crew, names=names)
        return [one() for _ in range(arguments.rounds + 1)][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="of every card, as tc writes it; 0: loopback")
    parser.add_argument("--rounds", type=int, default=3, help="of a turn, after one that warms up")
    parser.add_argument("--turns", type=int, default=1, help="of each contender")
    parser.add_argument("--peer", action="append", default=[], choices=["gloo"])
    parser.add_argument("--only-peer", action="store_true", help="leave the crew out")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the network is taken down
    kinds = ([] if arguments.only_peer else ["crew"]) + arguments.peer
    load = psutil.getloadavg()
    rounds: dict[str, list[dict[str, Phase]]] = {kind: [] for kind in kinds}
    for kind in kinds * arguments.turns:
        rounds[kind] += measure(kind, arguments)
        print(f"{kind}: {len(rounds[kind])} rounds", file=sys.stderr)
    shaped = can_shape(arguments.rate)
    ceiling = ceiling_bytes_per_second(arguments.rate) if shaped else None
    report(
        "link",
        network=f"namespaces, {arguments.rate} per card" if shaped else "plain loopback, no limit",
        parameters=arguments.parameters,
        workers=arguments.workers,
        rounds=arguments.rounds,
        turns=arguments.turns,
        ceiling_MB_per_second=ceiling / 1e6 if ceiling else None,
        load_before=load,
        results={kind: summarize(rounds[kind]) for kind in kinds},
    )


if __name__ == "__main__":
    main()
