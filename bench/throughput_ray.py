"""The Ray transport of `bench.throughput`: the product's server, and its actor with a paced link."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import torch

from bench.common import configure
from bench.pace import Answer, Pace, PacedLink, work
from bench.ray_cluster import start_actor
from cuadrilla.engines.ray.server import RayServer
from cuadrilla.engines.ray.worker import RayLink, RayPlace, RayWorker
from cuadrilla.host.memory import keep_freed_memory
from cuadrilla.link.offer import Offer, RunDescription
from cuadrilla.link.wire import Layout
from cuadrilla.sync.exact import version_like
from cuadrilla.train.setup import RunContext, make_model, make_task
from cuadrilla.train.thread import CoordinatorThread

TICK_SECONDS = 0.1


class PacedWorker(RayWorker):
    def __init__(self, name: str, specification: Mapping[str, Any], unit_seconds: float) -> None:
        super().__init__(RayPlace(name=name), RunDescription(config="", files=()))
        torch.set_num_threads(1)
        keep_freed_memory()
        self._config = configure(specification["config"])
        self._task = make_task(self._config, Path(specification["folder"]))
        self._model = make_model(self._task, seed=self._config.run.seed)
        session = RayLink(self._mail, parameters=Layout.of(version_like(self._model)))
        self._link = PacedLink(session, pace=Pace(unit_seconds), first=specification["warm_up"])

    def _work(self) -> str:
        work(self._link, self._config, task=self._task, model=self._model)
        return "the run has ended"

    @ray.method(concurrency_group="ask")
    def measured(self) -> Answer:
        return self._link.answer()


def coordinate(context: RunContext, placed: Mapping[str, str], *, specification: Mapping[str, Any]) -> list[Answer]:
    """Train with an actor on each of these nodes, by name and id; what they measured."""
    runtime = CoordinatorThread(context.coordination)
    server = RayServer(
        receiver=runtime,
        offer=Offer(config="{}", files={}),
        parameters=Layout.of(context.strategy.version_like(context.model)),
        contribution=Layout.of(context.strategy.contribution_like(context.model)),
    )
    paces = dict(zip(placed, specification["paces"], strict=True))
    actors = {name: start_actor(PacedWorker, name, specification, paces[name], node=placed[name]) for name in placed}
    ray.get([actor.pid.remote() for actor in actors.values()])  # all have loaded
    try:
        context.coordination.open(server.send)
        for name, actor in actors.items():
            server.attend(RayPlace(name=name, node=placed[name]), actor)
        runtime.serve(lambda: None, every_seconds=TICK_SECONDS)
        return ray.get([actor.measured.remote() for actor in actors.values()])
    finally:
        server.close()
        context.store.close()
