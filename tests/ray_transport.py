"""The Ray transport for the shared battery: a few actors, which load torch once and work for one run after another.

Ray reads its environment when it is imported: this module comes after `cluster.started`.
"""

from typing import Any

import ray
import torch

from cuadrilla.config import Config
from cuadrilla.engines.local import WrapLink
from cuadrilla.engines.ray.server import RayServer
from cuadrilla.engines.ray.worker import GROUPS, Mailbox, RayLink, RayPlace, RayWorker
from cuadrilla.link.base import Goodbye, Hello, Link, Stop
from cuadrilla.link.offer import Offer, RunDescription
from cuadrilla.link.shaped import Shape, ShapedLink
from cuadrilla.link.wire import Layout
from cuadrilla.model.task import Task
from cuadrilla.sync.strategy import Strategy
from cuadrilla.train.coordinate import Outcome
from cuadrilla.train.loop import WorkerSettings, train
from cuadrilla.train.precision import choose_precision
from cuadrilla.train.setup import RunContext, make_model, make_recipe, measure_length
from cuadrilla.train.thread import CoordinatorThread
from tests.faults import Play, Script
from tests.transports import TICK_SECONDS

CPU = torch.device("cpu")


class BatteryWorker(RayWorker):
    """The product's actor, with a task of the tests and scripted faults."""

    def __init__(self) -> None:
        super().__init__(RayPlace(name=""), RunDescription(config="", files=()))
        self.wrap: WrapLink | None = None

    @ray.method(concurrency_group="in")
    def prepare(
        self, name: str, speed: float, task: Task, config: Config, strategy: Strategy, wrap: WrapLink | None
    ) -> None:
        """The next run; what came of the one before is forgotten."""
        self._mail = Mailbox()
        self.name, self.speed, self.task, self.config, self.wrap = name, speed, task, config, wrap
        self.strategy = strategy

    def _work(self) -> str:
        torch.set_num_threads(1)
        model = make_model(self.task, seed=self.config.run.seed)
        parameters = Layout.of(self.strategy.version_like(model))
        link: Link = ShapedLink(RayLink(self._mail, parameters=parameters), shape=Shape(speed=self.speed))
        if self.wrap is not None:
            link = self.wrap(self.name, link)
        precision = choose_precision(self.config.train.precision, device=CPU)
        settings = WorkerSettings(
            run=self.config.run,
            train=self.config.train,
            device=CPU,
            precision=precision,
            speed_hint=self.speed,
        )
        length = measure_length(self.config.train, self.task)
        recipe = make_recipe(self.config, task=self.task, length=length, precision=precision)
        sync = self.strategy.worker(model, recipe)
        return train(link, task=self.task, model=model, sync=sync, worker=settings).reason

    @ray.method(concurrency_group="in")
    def played(self) -> list[Script]:
        return self.wrap.played if isinstance(self.wrap, Play) else []


class StubbornWorker(RayWorker):
    """Says Hello again and again, whatever it has been told."""

    def __init__(self) -> None:
        super().__init__(RayPlace(name=""), RunDescription(config="", files=()))

    def _work(self) -> str:
        link = RayLink(self._mail, parameters=Layout.of({}))
        while True:
            link.call(Hello(speed_hint=1.0))
            stop = link.next_event()
            assert isinstance(stop, Stop)
            link.call(Goodbye(reason=stop.reason))
            if not stop.again:
                return str(stop.reason)


class RayTransport:
    """`num_workers` actors, in the cluster that this process is connected to."""

    def __init__(self, *, num_workers: int) -> None:
        actor_class = ray.remote(concurrency_groups=GROUPS)(BatteryWorker)
        self.actors: list[Any] = [actor_class.options(num_cpus=0).remote() for _ in range(num_workers)]
        ray.get([actor.pid.remote() for actor in self.actors])

    def __call__(self, context: RunContext, *, wrap_link: WrapLink | None = None) -> Outcome:
        """Train with an actor for each of the run's workers."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        runtime = CoordinatorThread(context.coordination)
        server = RayServer(
            receiver=runtime,
            offer=Offer(config="{}", files={}),
            parameters=Layout.of(context.strategy.version_like(context.model)),
            contribution=Layout.of(context.strategy.contribution_like(context.model)),
        )
        speeds = context.config.engine.workers
        actors = self.actors[: len(speeds)]
        try:
            context.coordination.open(server.send)
            for index, (actor, speed) in enumerate(zip(actors, speeds, strict=True), start=1):
                name = f"worker-{index}"
                ray.get(actor.prepare.remote(name, speed, context.task, context.config, context.strategy, wrap_link))
                server.attend(RayPlace(name=name), actor)
            return _coordinate(context, runtime, server)
        finally:
            server.close()
            context.store.close()
            torch.set_num_threads(threads)
            if isinstance(wrap_link, Play):
                for played in ray.get([actor.played.remote() for actor in actors]):
                    wrap_link.played.extend(script for script in played if script not in wrap_link.played)


def _coordinate(context: RunContext, runtime: CoordinatorThread, server: RayServer) -> Outcome:
    coordination = context.coordination

    def look() -> None:
        if not server.may_have_workers() and coordination.outcome is None:
            coordination.fail(server.failure())

    return runtime.serve(look, every_seconds=TICK_SECONDS)
