"""Throughput of tensors over the crew link on a network of limited cards, and the CPU time that it costs.

    python -m bench.link [--workers 2] [--rate 1gbit] [--rounds 3]

Each machine is a process in a network namespace (`tests/lan.py`). With `--rate 0`, or without root, all use plain
loopback. In a round the coordinator announces a version, then all workers download it at once, then all upload a
contribution of the same size at once. The first round is a warm-up and does not count. `MB_per_second`: payload through
the coordinator's card in one direction. `cpu_…`: CPU seconds per second of the phase, with child processes.
`ceiling_…`: what TCP could carry at this rate. The kernel charges the CPU time of its network code to whichever process
it interrupts.
"""

import queue
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import options, report, summary
from bench.nodes import PORT, Node
from cuadrilla.home import Home
from cuadrilla.link.base import Contribution, Hello, ToCoordinator, Version
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import load_node, open_coordinator
from cuadrilla.link.nodes import AllowList
from cuadrilla.link.server import CrewServer
from cuadrilla.link.wire import Layout
from tests.crews import join
from tests.lan import can_shape, ceiling_bytes_per_second, lan

TENSOR_ELEMENTS = 2**22
WAIT_SECONDS = 60.0
Phase = dict[str, Any]
Times = dict[str, float]
"""When a transfer began and ended, in seconds of the monotonic clock that all namespaces share."""


def model(num_parameters: int) -> dict[str, Tensor]:
    """Tensors with this number of fp32 elements in all; every process makes the same values."""
    sizes = [TENSOR_ELEMENTS] * (num_parameters // TENSOR_ELEMENTS) + [num_parameters % TENSOR_ELEMENTS]
    return {f"layer.{i:03d}": torch.arange(size, dtype=torch.float32) + i for i, size in enumerate(sizes) if size}


class Coordinator:
    """The process with the product's server. Its methods are the commands that it is given."""

    def __init__(self, *, folder: str, address: str, parameters: int, names: list[str]) -> None:
        self._params = model(parameters)
        self._inbox: queue.SimpleQueue[tuple[float, ToCoordinator]] = queue.SimpleQueue()
        self._version, self._names = 0, names
        self._server = CrewServer(Home(Path(folder)), receive=self._hear, contributions=[Layout.of(self._params)])
        self._server.serve(address)

    def _hear(self, _worker: str, message: object) -> None:
        if isinstance(message, Hello | Contribution):
            self._inbox.put((time.monotonic(), message))

    def hello(self) -> None:
        """Wait until a worker says hello."""
        assert isinstance(self._inbox.get(timeout=WAIT_SECONDS)[1], Hello)

    def announce(self) -> Times:
        began = time.monotonic()
        self._version += 1
        for worker in self._names:
            self._server.send(worker, Version(version=self._version, parameters=self._params))
        return {"began": began, "ended": time.monotonic()}

    def collect(self) -> Times:
        """Wait for the next contribution, which must be valid."""
        arrived, message = self._inbox.get(timeout=WAIT_SECONDS)
        assert isinstance(message, Contribution)
        assert message.valid
        return {"began": arrived, "ended": arrived}

    def close(self) -> None:
        self._server.close()


class Worker:
    """A process with the product's client."""

    def __init__(self, *, folder: str, address: str, parameters: int, name: str) -> None:
        self._params = model(parameters)
        self._connection = Connection(address, identity=load_node(Path(folder) / name))
        self._link = self._connection.session(parameters=[Layout.of(self._params)])

    def hello(self) -> None:
        self._link.call(Hello(speed_hint=1.0))

    def download(self) -> Times:
        event = self._link.next_event()
        assert isinstance(event, Version)
        began = time.monotonic()
        self._link.download(event.parameters)
        return {"began": began, "ended": time.monotonic()}

    def upload(self) -> Times:
        began = time.monotonic()
        self._link.call(Contribution(lease_id=1, tokens=1, loss_sum=0.0, tensors=self._params))
        return {"began": began, "ended": time.monotonic()}

    def close(self) -> None:
        self._link.close()
        self._connection.close()


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
        """Run one round as in training."""
        coordinator, workers = self.coordinator, self.workers
        phases = {"announce": self.phase((coordinator, "announce"), num_sets=0)}
        phases["download"] = self.phase(*((worker, "download") for worker in workers), num_sets=len(workers))
        uploads = [task for worker in workers for task in ((worker, "upload"), (coordinator, "collect"))]
        phases["upload"] = self.phase(*uploads, num_sets=len(workers))
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

        def started(part: str, prefix: Sequence[str], **own: Any) -> Node:
            node = Node(prefix, part=f"bench.link:{part}", **common, **own)
            stack.callback(node.close)
            return node

        nodes = [started("Coordinator", first.prefix, names=names)]
        nodes[0].answer()
        nodes += [started("Worker", member.prefix, name=name) for name, member in zip(names, others, strict=True)]
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
