"""The processes of `bench.throughput`: they train when told so, and answer with a line of JSON.

`NODES` holds the kinds. All workers compute the same units of the same model, one unit per pass, on one thread in fp32.

* `crew-coordinator`, `crew-worker`: the product's crew engine; its loop on a `GrpcLink`. Nothing is known of the
  workers' speeds beforehand: shares are those the coordinator measures.
* `ddp`: torch's DistributedDataParallel over gloo, equal batches, gradients accumulated locally (`no_sync`) but for the
  last unit of a step.

Each plays a machine that needs `unit_seconds` for a unit: when the arithmetic is done earlier, it sleeps for the rest
(`Pace`). What a unit really took is measured, and counted after the warm-up.
"""

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.common import configure
from bench.lan import CARD, LAN
from bench.pace import Answer, Pace, PacedLink, work
from cuadrilla.crew.up import Opening, run_crew
from cuadrilla.data.loader import UnitLoader
from cuadrilla.home import Home
from cuadrilla.host.memory import keep_freed_memory
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import load_node
from cuadrilla.link.wire import Layout
from cuadrilla.model.task import loss_of
from cuadrilla.rundir import RunDir
from cuadrilla.train.setup import assemble, make_model, make_task
from cuadrilla.train.sinks import Scalars

LIMIT_SECONDS = 540.0  # a process that is still there then says where it hangs, and ends
CPU = torch.device("cpu")
Say = Callable[[Answer], None]


class CommitTimes:
    """A sink that notes when each version was committed."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def log(self, _step: int, _scalars: Scalars) -> None:
        self.times.append(time.monotonic())

    def close(self) -> None: ...


class CrewCoordinator:
    """Opens the run's crew link itself."""

    def __init__(self, *, folder: str, config: str, warm_up: int, rounds: int, say: Say, **_: Any) -> None:
        self._say = say
        self._folder = Path(folder)
        self._config = configure(config)
        self._warm_up, self._rounds = warm_up, rounds

    def train(self) -> Answer:
        """Says {"open": true} when workers may come; seconds of the rounds after the warm-up."""
        run, commits = RunDir(self._folder / "run"), CommitTimes()
        context = assemble(self._config, run, task=make_task(self._config, run.path), sinks=[commits])
        run_crew(context, run, opening=Opening(home=Home(self._folder / "home"), opened=self._say_open))
        return {"seconds": counted_seconds(commits, warm_up=self._warm_up, rounds=self._rounds)}

    def _say_open(self, _crew: object) -> None:
        self._say({"open": True})

    def close(self) -> None:
        """Nothing is open."""


def counted_seconds(commits: CommitTimes, *, warm_up: int, rounds: int) -> float:
    """Of the rounds after the warm-up."""
    return commits.times[warm_up + rounds - 1] - commits.times[warm_up - 1]


class CrewWorker:
    def __init__(
        self,
        *,
        folder: str,
        config: str,
        name: str,
        address: str,
        port: int,
        unit_seconds: float,
        warm_up: int,
        **_: Any,
    ) -> None:
        self._config = configure(config)
        self._task = make_task(self._config, Path(folder))
        self._model = make_model(self._task, seed=self._config.run.seed)
        self._connection = Connection(f"{address}:{port}", identity=load_node(Path(folder) / name))
        self._pace = Pace(unit_seconds)
        self._warm_up = warm_up

    def train(self) -> Answer:
        session = self._connection.session(parameters=[Layout.of(dict(self._model.named_parameters()))])
        link = PacedLink(session, pace=self._pace, first=self._warm_up)
        return work(link, self._config, task=self._task, model=self._model)

    def close(self) -> None:
        self._connection.close()


class DdpWorker:
    def __init__(
        self, *, folder: str, config: str, rank: int, workers: int, address: str, port: int, unit_seconds: float,
        steps: int, **_: Any,
    ) -> None:  # fmt: skip
        self._config = configure(config)
        train, seed = self._config.train, self._config.run.seed
        self._rank, self._steps = rank, steps
        self._num_units = train.batch_sequences // train.unit_sequences
        self._mine = self._num_units // workers
        self._task = make_task(self._config, Path(folder))
        self._loader = UnitLoader(self._task.data("train"), seed=seed, unit_sequences=train.unit_sequences, device=CPU)
        if address.startswith(LAN):
            os.environ["GLOO_SOCKET_IFNAME"] = CARD
        store = dist.TCPStore(address, port, world_size=workers, is_master=rank == 0)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=workers)
        self._model = DistributedDataParallel(_Loss(self._task, make_model(self._task, seed=seed)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
        self._pace = Pace(unit_seconds)
        self._backward_seconds = 0.0

    def train(self) -> Answer:
        """Seconds of the steps after the first one."""
        self._step(0)
        self._pace.counting = True
        began = time.monotonic()
        for step in range(1, self._steps + 1):
            self._step(step)
        return {**self._pace.answer(), "step_seconds": time.monotonic() - began}

    def _step(self, step: int) -> None:
        self._optimizer.zero_grad()
        first = step * self._num_units + self._rank * self._mine
        for unit in range(first, first + self._mine):
            last = unit == first + self._mine - 1
            self._pace.begin()
            batch = self._loader.batch(self._loader.indices([unit]))
            with nullcontext() if last else self._model.no_sync():
                loss = self._model(batch)
                if last:  # its backward pass waits for the others: the machine's slowness comes before it
                    self._pace.rest(ahead=self._backward_seconds)
                began = time.monotonic()
                loss.backward()
            if not last:
                self._backward_seconds = time.monotonic() - began
                self._pace.end()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()

    def close(self) -> None:
        dist.destroy_process_group()


class _Loss(torch.nn.Module):
    """The task's mean loss as a module: what DDP wraps."""

    def __init__(self, task: Any, model: torch.nn.Module) -> None:
        super().__init__()
        self._task = task
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss, tokens = loss_of(self._task, self.model, batch)
        return loss / tokens


NODES: dict[str, Callable[..., Any]] = {
    "crew-coordinator": CrewCoordinator,
    "crew-worker": CrewWorker,
    "ddp": DdpWorker,
}


def main() -> None:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    torch.set_num_threads(1)
    keep_freed_memory()
    specification = json.loads(sys.argv[1])
    answers = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115  open for as long as the process lives
    os.dup2(2, 1)

    def say(answer: Answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    node = NODES[specification.pop("kind")](say=say, **specification)
    say({"ready": True})
    try:
        for line in sys.stdin:  # until the benchmark closes it
            say(getattr(node, line.strip())())
    finally:
        node.close()


if __name__ == "__main__":
    main()
