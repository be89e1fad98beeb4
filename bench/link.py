"""Throughput of tensors over the crew link on a network of limited cards, and the CPU time that it costs.

    python -m bench.link [--workers 2] [--rate 1gbit] [--rounds 3]

Each machine is a process in a network namespace (`bench/lan.py`). With `--rate 0`, or without root, all use plain
loopback. In a round the coordinator announces a version, then all workers download it at once, then all upload a
contribution of the same size at once. In a last phase, `both_ways`, one worker uploads while another downloads. The
first round is a warm-up and does not count. `MB_per_second`: payload through the coordinator's card in one direction.
`cpu_…`: CPU seconds per second of the phase, with child processes. `ceiling_…`: what TCP could carry at this rate. The
kernel charges the CPU time of its network code to whichever process it interrupts.
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.common import options, report, summary
from bench.lan import can_shape, ceiling_bytes_per_second, lan
from bench.nodes import PORT, Node
from cuadrilla.link.identity import open_coordinator
from cuadrilla.link.nodes import AllowList
from tests.crews import join

Phase = dict[str, Any]


class Crew:
    """The coordinator and the workers, and the phases that they run together."""

    def __init__(self, nodes: list[Node], *, num_bytes: int) -> None:
        self.coordinator, *self.workers = nodes
        self.num_bytes = num_bytes

    def phase(self, *tasks: tuple[Node, str], num_sets: int) -> Phase:
        """Run several commands at once. `num_sets`: how many whole models pass the coordinator's card one way."""
        nodes = (self.coordinator, *self.workers)
        before = [node.cpu_seconds() for node in nodes]
        for node, command in tasks:
            node.tell(command)
        times = [node.answer() for node, _ in tasks]
        used = [node.cpu_seconds() - then for node, then in zip(nodes, before, strict=True)]
        seconds = max(time["ended"] for time in times) - min(time["began"] for time in times)
        return {
            "MB_per_second": num_sets * self.num_bytes / seconds / 1e6,
            "seconds": seconds,
            "cpu_coordinator": used[0] / seconds,
            "cpu_workers": sum(used[1:]) / len(used[1:]) / seconds,
        }

    def round(self) -> dict[str, Phase]:
        """Run one round as in training, then one exchange in both directions at once."""
        coordinator, workers = self.coordinator, self.workers
        phases = {"announce": self.phase((coordinator, "announce"), num_sets=0)}
        phases["download"] = self.phase(*((worker, "download") for worker in workers), num_sets=len(workers))
        uploads = [task for worker in workers for task in ((worker, "upload"), (coordinator, "collect"))]
        phases["upload"] = self.phase(*uploads, num_sets=len(workers))
        if len(workers) > 1:
            coordinator.ask("announce")
            exchange = ((workers[0], "upload"), (workers[1], "download"), (coordinator, "collect"))
            phases["both_ways"] = self.phase(*exchange, num_sets=1)
        return phases


def measure(*, parameters: int, workers: int, rate: str, rounds: int) -> list[dict[str, Phase]]:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        names = [f"worker-{rank}" for rank in range(1, workers + 1)]
        keys, listed = open_coordinator(Path(folder) / "crew"), AllowList(Path(folder) / "crew" / "nodes.json")
        for name in names:
            join(Path(folder) / name, name=name, crew=keys, nodes=listed)
        first, *others = stack.enter_context(lan(workers + 1, rate=rate))
        common = {"folder": folder, "address": f"{first.address}:{PORT}", "parameters": parameters}

        def started(prefix: Sequence[str], **own: Any) -> Node:
            node = Node(prefix, program="bench.link_nodes", **common, **own)
            stack.callback(node.close)
            return node

        nodes = [started(first.prefix, names=names)]
        nodes[0].answer()
        nodes += [started(member.prefix, name=name) for name, member in zip(names, others, strict=True)]
        for node in nodes[1:]:
            node.answer()
            node.ask("hello")
            nodes[0].ask("hello")
        crew = Crew(nodes, num_bytes=4 * parameters)
        return [crew.round() for _ in range(rounds + 1)][1:]


def main() -> None:
    given = options(__doc__, parameters=100_000_000, workers=2, rate="1gbit", rounds=3)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the network is removed
    rounds = measure(**vars(given))
    ceiling = ceiling_bytes_per_second(given.rate) if can_shape(given.rate) else None
    report(
        "link",
        **vars(given),
        network="namespaces" if can_shape(given.rate) else "plain loopback, no limit",
        ceiling_MB_per_second=ceiling / 1e6 if ceiling else None,
        results={
            name: {key: summary([phases[name][key] for phases in rounds]) for key in rounds[0][name]}
            for name in rounds[0]
        },
    )


if __name__ == "__main__":
    main()
