"""The processes of `bench.link`: a coordinator with the product's server, and workers with the product's client.

A command answers when its transfer began and ended, in seconds of the monotonic clock that all namespaces share.
"""

import queue
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.nodes import obey
from cuadrilla.link.base import Contribution, Hello, ToCoordinator, Version
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import load_node
from cuadrilla.link.server import CrewServer
from cuadrilla.link.wire import Layout

TENSOR_ELEMENTS = 2**22
WAIT_SECONDS = 60.0
Times = dict[str, float]


def model(num_parameters: int) -> dict[str, Tensor]:
    """Tensors with this number of fp32 elements in all; every process makes the same values."""
    sizes = [TENSOR_ELEMENTS] * (num_parameters // TENSOR_ELEMENTS) + [num_parameters % TENSOR_ELEMENTS]
    return {f"layer.{i:03d}": torch.arange(size, dtype=torch.float32) + i for i, size in enumerate(sizes) if size}


def check(received: Any, expected: Mapping[str, Tensor]) -> None:
    assert received.keys() == expected.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())


class Coordinator:
    def __init__(self, *, folder: str, address: str, parameters: int, names: list[str]) -> None:
        self._params = model(parameters)
        self._inbox: queue.SimpleQueue[tuple[float, ToCoordinator]] = queue.SimpleQueue()
        self._version, self._names = 0, names
        layout = Layout.of(self._params)
        self._server = CrewServer(Path(folder) / "crew", receive=self._hear, contributions=[layout])
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
        """Wait for the next contribution, which must be valid; in the first round its tensors must be the sent bits."""
        arrived, message = self._inbox.get(timeout=WAIT_SECONDS)
        assert isinstance(message, Contribution)
        assert message.valid
        if self._version == 1:
            check(message.tensors, self._params)
        return {"began": arrived, "ended": arrived}

    def close(self) -> None:
        self._server.close()


class Worker:
    def __init__(self, *, folder: str, address: str, parameters: int, name: str) -> None:
        self._params = model(parameters)
        self._connection = Connection(address, identity=load_node(Path(folder) / name))
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


if __name__ == "__main__":
    obey(lambda **given: Coordinator(**given) if "names" in given else Worker(**given))
