"""The processes of `bench.link`: they do what a line on stdin says and answer with a line of JSON on stdout.

`NODES` holds the kinds. A command is the name of a method; its answer holds the seconds (monotonic, the same clock in
every namespace) at which the transfer began and ended.

* `crew`: the product's `CrewServer` with a receiver that keeps contributions, and a `GrpcLink` per worker.
* `gloo`: torch.distributed, rank 0 in the coordinator's place; the same bytes as point-to-point messages, and an
  all-reduce among the workers. Neither encrypted nor checked.
"""

import faulthandler
import json
import os
import queue
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.lan import CARD, LAN
from bench.link_tensors import Times, check, model
from cuadrilla.link.base import Contribution, Hello, ToCoordinator, Version
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import load_node
from cuadrilla.link.server import CrewServer
from cuadrilla.link.wire import Layout

WAIT_SECONDS = 60.0
LIMIT_SECONDS = 300.0  # a process that is still there then says where it hangs, and ends


class CrewCoordinator:
    """Sends versions, takes contributions."""

    def __init__(self, *, folder: str, address: str, port: int, parameters: int, workers: int, **_: Any) -> None:
        self._params = model(parameters)
        self._inbox: queue.SimpleQueue[tuple[float, ToCoordinator]] = queue.SimpleQueue()
        self._version = 0
        self._names = [f"worker-{rank}" for rank in range(1, workers + 1)]
        layout = Layout.of(self._params)
        self._server = CrewServer(Path(folder) / "crew", receive=self._hear, contributions=[layout])
        self._server.serve(f"{address}:{port}")

    def _hear(self, _worker: str, message: object) -> None:
        if isinstance(message, Hello | Contribution):
            self._inbox.put((time.monotonic(), message))

    def hello(self) -> None:
        """Wait for a worker that begins."""
        assert isinstance(self._inbox.get(timeout=WAIT_SECONDS)[1], Hello)

    def announce(self) -> Times:
        began = time.monotonic()
        self._version += 1
        for worker in self._names:
            self._server.send(worker, Version(version=self._version, parameters=self._params))
        return {"began": began, "ended": time.monotonic()}

    def collect(self) -> Times:
        """The next worker's contribution: whole, and bit for bit what it should be."""
        arrived, message = self._inbox.get(timeout=WAIT_SECONDS)
        assert isinstance(message, Contribution)
        assert message.valid
        if self._version == 1:
            check(message.tensors, self._params)
        return {"began": arrived, "ended": arrived}

    def close(self) -> None:
        self._server.close()


class CrewWorker:
    """Downloads versions, uploads contributions."""

    def __init__(self, *, folder: str, name: str, address: str, port: int, parameters: int, **_: Any) -> None:
        self._params = model(parameters)
        self._connection = Connection(f"{address}:{port}", identity=load_node(Path(folder) / name))
        self._link = self._connection.session(parameters=[Layout.of(self._params)])
        self._checked = False

    def hello(self) -> None:
        self._link.call(Hello(speed_hint=1.0))

    def download(self) -> Times:
        event = self._link.next_event()
        assert isinstance(event, Version)
        began = time.monotonic()
        tensors = self._link.download(event.parameters)
        ended = time.monotonic()
        if not self._checked:
            check(tensors, self._params)
            self._checked = True
        return {"began": began, "ended": ended}

    def upload(self) -> Times:
        began = time.monotonic()
        self._link.call(Contribution(lease_id=1, tokens=1, loss_sum=0.0, tensors=self._params))
        return {"began": began, "ended": time.monotonic()}

    def close(self) -> None:
        self._link.close()
        self._connection.close()


class GlooNode:
    """A member of the process group; rank 0 is the coordinator."""

    def __init__(self, *, rank: int, address: str, port: int, parameters: int, workers: int, **_: Any) -> None:
        self._rank, self._workers = rank, range(1, workers + 1)
        self._mine = torch.cat(list(model(parameters).values()))
        self._theirs = [torch.empty_like(self._mine) for _ in self._workers]
        if address.startswith(LAN):
            os.environ["GLOO_SOCKET_IFNAME"] = CARD
        store = dist.TCPStore(address, port, world_size=workers + 1, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers + 1)
        self._among_workers = dist.new_group(list(self._workers))

    def download(self) -> Times:
        return self._exchange([(0, worker) for worker in self._workers])

    def upload(self) -> Times:
        return self._exchange([(worker, 0) for worker in self._workers])

    def both_ways(self) -> Times:
        return self._exchange([(1, 0), (0, 2)])

    def all_reduce(self) -> Times:
        began = time.monotonic()
        if self._rank:
            dist.all_reduce(self._theirs[0], group=self._among_workers)
        return {"began": began, "ended": time.monotonic()}

    def close(self) -> None:
        dist.destroy_process_group()

    def _exchange(self, transfers: list[tuple[int, int]]) -> Times:
        """`transfers`: from whom to whom."""
        began = time.monotonic()
        out = [dist.isend(self._mine, to) for source, to in transfers if source == self._rank]
        into = [
            dist.irecv(self._theirs[index], source) for index, (source, to) in enumerate(transfers) if to == self._rank
        ]
        for work in (*out, *into):
            assert work is not None
            work.wait()
        return {"began": began, "ended": time.monotonic()}


NODES: dict[str, Callable[..., Any]] = {
    "crew-coordinator": CrewCoordinator,
    "crew-worker": CrewWorker,
    "gloo": GlooNode,
}


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    torch.set_num_threads(1)
    specification = json.loads(sys.argv[1])
    answers = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115  open for as long as the process lives
    os.dup2(2, 1)
    node = NODES[specification.pop("kind")](**specification)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    try:
        for line in sys.stdin:  # until the benchmark closes it
            times = getattr(node, line.strip())()
            print(json.dumps(times or {}), file=answers, flush=True)
    finally:
        node.close()


if __name__ == "__main__":
    main()
