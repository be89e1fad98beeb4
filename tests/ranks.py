"""An island on this machine: ranks with a scripted coordinator, or real ones, with or without torchrun.

`python -m tests.ranks FILE` is one rank whose rank 0 has a `Script` behind it; alone, the script is its link.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from cuadrilla.config import RunSection, TrainSection
from cuadrilla.crew.island import joined
from cuadrilla.data.loader import UnitLoader
from cuadrilla.host.torchrun import find_place
from cuadrilla.link.base import Contribution, Lease, Stop, ToCoordinator, ToWorker, Version
from cuadrilla.link.wire import Layout
from cuadrilla.runfile import resolve
from cuadrilla.sync.exact import Exact, ExactWorker
from cuadrilla.train.loop import WorkerSettings, train
from cuadrilla.train.precision import choose_precision
from cuadrilla.train.setup import make_model
from tests.ports import free_port
from tests.runs import RUN_FILE
from tests.sessions import ConstantGradient, recipe_of
from tests.tasks import Examples, RaggedRegression

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
UNIT = 5
LEASES = {  # name → (number, units)
    "whole": (2, tuple(range(7))),
    "few": (3, (8,)),
    "poisoned": (4, tuple(range(14, 21))),
}
CPU = torch.device("cpu")


class Poisoned(RaggedRegression):
    """Unit 20, the last rank's, holds an example that is no number."""

    def data(self, split: str) -> Examples:
        examples = super().data(split)
        bad = UnitLoader(examples, seed=0, unit_sequences=UNIT, device=CPU).indices([20])[0]
        examples.x[bad] = float("nan")
        return examples


class Script:
    """Leases, one after the other."""

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        leases = [
            Lease(lease_id=number, version=1, units=units, planned_tokens=100) for number, units in LEASES.values()
        ]
        self._events: list[ToWorker] = [Version(version=1), *leases, Stop(reason="done")]
        self.heard: list[ToCoordinator] = []

    def call(self, message: ToCoordinator) -> None:
        self.heard.append(message)

    def next_event(self) -> ToWorker:
        return self._events.pop(0)

    def interrupted(self) -> bool:
        return False

    def download(self, ref: object) -> Mapping[str, torch.Tensor]:
        return self._parameters

    def close(self) -> None:
        pass


def main(file: Path) -> None:
    """Rank 0 writes what its coordinator heard."""
    torch.set_num_threads(1)
    place, task = find_place(), Poisoned()
    model = make_model(task, seed=place.rank if place else 0)  # the version makes them equal
    script = Script({name: value.detach().clone() for name, value in model.named_parameters()})
    worker = WorkerSettings(
        run=RunSection(),
        train=TrainSection(batch_sequences=7 * UNIT, unit_sequences=UNIT, pass_sequences=UNIT),
        device=CPU,
        precision=choose_precision("fp32", device=CPU),
    )
    sync = ExactWorker(model, strict=False)
    if place is None:
        train(script, task=task, model=model, sync=sync, worker=worker)
    else:
        with joined(place) as island:
            parameters = Layout.of(Exact().versions_like(model, recipe_of(ConstantGradient))[0])
            island.form(resolve(RUN_FILE, sets=["sync.kind=exact"]).config, task, model, parameters=parameters)
            link = island.link(inner=script if place.leads else None)
            assert train(link, task=task, model=model, sync=sync, worker=worker).reason == "done"
            island.end()
    if place is None or place.leads:
        answers = [message for message in script.heard if isinstance(message, Contribution)]
        file.write_text(json.dumps([_as_json(answer) for answer in answers]))


def _as_json(answer: Contribution) -> dict[str, object]:
    gradients = torch.cat([answer.tensors[name].flatten() for name in sorted(answer.tensors)])
    fields = {"lease": answer.lease_id, "tokens": answer.tokens, "loss": answer.loss_sum, "valid": answer.valid}
    return {**fields, "gradients": gradients.tolist() if answer.valid else []}


def torchrun(
    num_ranks: int, *arguments: str, restarts: int = 0, seconds: float = 150
) -> "subprocess.CompletedProcess[str]":
    """Ranks on this machine, which are started again together so many times."""
    command = [*TORCHRUN, "--nproc-per-node", str(num_ranks), "--max-restarts", str(restarts), *arguments]
    return subprocess.run(command, cwd=ROOT, env=_with_root({}), text=True, capture_output=True, timeout=seconds)


def by_hand(num_ranks: int, *arguments: str, seconds: float = 150) -> "subprocess.CompletedProcess[str]":
    """The same without restarts and without torchrun, whose own process costs two seconds. The worst of their codes."""
    port = free_port()
    ranks = [start_rank(rank, num_ranks, port, *arguments) for rank in range(num_ranks)]
    try:
        said = [rank.communicate(timeout=seconds) for rank in ranks]
    except subprocess.TimeoutExpired:
        for rank in ranks:
            rank.kill()
        raise AssertionError([rank.communicate()[1] for rank in ranks]) from None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    code = max((rank.returncode for rank in ranks), key=abs)
    out, err = ("".join(texts) for texts in zip(*said, strict=True))
    return subprocess.CompletedProcess(list(arguments), code, out, err)


def start_rank(rank: int, num_ranks: int, port: int, *arguments: str) -> "subprocess.Popen[str]":
    """As a person would by hand, without torchrun."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    place |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    environ = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=_with_root(environ), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _with_root(environ: Mapping[str, str]) -> dict[str, str]:
    """Tasks of these tests import from here."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **environ}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
