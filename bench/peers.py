"""The trainings that `bench.time_to_loss` compares with: plain PyTorch, each rank with an equal share of the batch.

* `ddp`: DistributedDataParallel over gloo. All passes of a step but the last add up gradients locally (`no_sync`).
* `torchft`: its DiLoCo, each rank a replica group. The outer optimizer is Nesterov with lr 0.7 and momentum 0.9, as in
  torchft's own tests, with one bucket.

Model, data, passes, clipping, schedule and (inner) optimizer are those of the run. A rank reports that it is ready,
trains on command, and answers with the seconds of each step and the held-out loss.
"""

import os
import socket
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bench.nodes import PORT
from cuadrilla.data.loader import UnitLoader
from cuadrilla.model.task import loss_of
from cuadrilla.runfile import resolve
from cuadrilla.sync.strategy import trainable
from cuadrilla.train.evaluate import evaluate
from cuadrilla.train.setup import equip, make_task
from tests.lan import CARD

PATIENCE = timedelta(minutes=30)


class Rank:
    def __init__(self, *, kind: str, config: str, rank: int, addresses: list[str], **more: Any) -> None:
        """`more`: `steps`; for torchft also `every`, the steps of a window, and the address of the `lighthouse`."""
        self._kind, self._config, self._rank, self._more = kind, resolve(config).config, rank, more
        self._address, self._workers = addresses[rank], len(addresses)
        task = make_task(self._config, Path("/"))
        self._made = equip(self._config, task)
        self._loader = UnitLoader(
            task.data("train"), seed=self._config.run.seed, unit_sequences=1, device=self._made.device
        )
        self._module: nn.Module = _Loss(task, self._made.model)
        os.environ["GLOO_SOCKET_IFNAME"] = CARD
        if kind == "ddp":
            store = dist.TCPStore(addresses[0], PORT, world_size=self._workers, is_master=rank == 0)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=self._workers)
            self._module = DistributedDataParallel(self._module)
        else:
            socket.gethostname = lambda: addresses[rank]  # ranks dial each other's name; namespaces have the same
            self._store = dist.TCPStore(self._address, PORT, is_master=True, wait_for_workers=False)

    def train(self) -> dict[str, Any]:
        made, seconds = self._made, list[float]()
        optimizer = _Stepping(made.model, made.recipe.make_optimizer(trainable(made.model)))
        with nullcontext() if self._kind == "ddp" else self._diloco(optimizer):
            for step in range(self._more["steps"]):
                began = time.monotonic()
                self._pass_all(step)
                nn.utils.clip_grad_norm_(made.model.parameters(), made.recipe.clip_norm)
                optimizer.factor = made.recipe.lr_factor(step + 1)
                optimizer.step()
                seconds.append(time.monotonic() - began)
        sequences = 0 if self._rank else self._config.evaluate.sequences
        places = {"device": made.device, "precision": made.precision}
        val_loss = sequences and evaluate(made.task, made.model, sequences=sequences, **places)["loss"]
        return {"seconds": seconds, "val_loss": val_loss}

    def _pass_all(self, step: int) -> None:
        """Compute the gradients of this rank's share of the batch, divided by its tokens."""
        batch = self._config.train.batch_sequences
        size = self._made.pass_tokens // self._made.task.defaults.length
        share, tokens = batch // self._workers, self._made.length.step_tokens / self._workers
        first = step * batch + self._rank * share
        self._module.zero_grad()
        for begin in range(first, first + share, size):
            end = min(begin + size, first + share)
            with self._module.no_sync() if self._kind == "ddp" and end < first + share else nullcontext():
                (self._module(self._loader.batch(self._loader.indices(range(begin, end)))) / tokens).backward()

    def close(self) -> None:
        os._exit(0)

    def _diloco(self, inner: torch.optim.Optimizer) -> Any:
        from torchft import Manager, ProcessGroupGloo
        from torchft.local_sgd import DiLoCo

        model = self._made.model
        manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE), min_replica_size=self._workers, use_async_quorum=False,
            load_state_dict=model.load_state_dict, state_dict=model.state_dict, replica_id=str(self._rank), rank=0,
            world_size=1, store_addr=self._address, store_port=self._store.port, hostname=self._address,
            init_sync=False, lighthouse_addr=self._more["lighthouse"], timeout=PATIENCE, quorum_timeout=PATIENCE,
        )  # fmt: skip
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        return DiLoCo(manager, [model], inner, outer, sync_every=self._more["every"], use_bucketization=True)


class _Loss(nn.Module):
    """The task's summed loss as a module, which DDP can wrap."""

    def __init__(self, task: Any, model: nn.Module) -> None:
        super().__init__()
        self._task, self.model = task, model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return loss_of(self._task, self.model, batch)[0]


class _Stepping(torch.optim.Optimizer):
    """The run's optimizer as a `torch.optim.Optimizer`, which torchft needs."""

    def __init__(self, model: nn.Module, stepper: Any) -> None:
        super().__init__(model.parameters(), {})
        self._stepper, self.factor = stepper, 1.0

    def step(self, _closure: Any = None) -> None:
        self._stepper.step(self.factor)


class Lighthouse:
    def __init__(self, *, bind: str, replicas: int) -> None:
        from torchft.coordination import LighthouseServer

        self._server = LighthouseServer(bind=bind, min_replicas=replicas)

    def close(self) -> None:
        os._exit(0)
