"""The Ray worker of `bench.link`: the product's actor and link; it downloads and uploads when told so."""

import queue
import time
from typing import Any

import ray

from bench.link_tensors import Times, check, model
from bench.ray_cluster import start_actor
from cuadrilla.engines.ray.worker import RayLink, RayPlace, RayWorker
from cuadrilla.link.base import Contribution, Hello, Version
from cuadrilla.link.offer import RunDescription
from cuadrilla.link.wire import Layout


class LinkWorker(RayWorker):
    """`ask` hands a command to the thread that works, as the product's messages do."""

    def __init__(self, name: str, num_parameters: int) -> None:
        super().__init__(RayPlace(name=name), RunDescription(config="", files=()))
        self._params = model(num_parameters)
        self._link = RayLink(self._mail, parameters=Layout.of(self._params))
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Times] = queue.SimpleQueue()
        self._checked = False

    @ray.method(concurrency_group="ask")
    def ask(self, command: str) -> Times:
        self._commands.put(command)
        return self._answers.get()

    def _work(self) -> str:
        while True:
            command = self._commands.get()
            began = time.monotonic()
            match command:
                case "hello":
                    self._link.call(Hello(speed_hint=1.0))
                case "download":
                    began = self._download()
                case "upload":
                    self._link.call(Contribution(lease_id=1, tokens=1, loss_sum=0.0, tensors=self._params))
            ended = time.monotonic()
            self._answers.put({"began": began, "ended": ended})
            if command == "end":
                return "told so"

    def _download(self) -> float:
        """When it began."""
        event = self._link.next_event()
        assert isinstance(event, Version)
        began = time.monotonic()
        tensors = self._link.download(event.parameters)
        if not self._checked:
            check(tensors, self._params)
            self._checked = True
        return began


def start_worker(name: str, *, node: str, num_parameters: int) -> Any:
    return start_actor(LinkWorker, name, num_parameters, node=node)
