"""Speed of a crew of unequal machines, beside the sum of the speeds that the machines have alone.

    python -m bench.throughput [--unit-ms 120 240 480 480] [--repeats 3]

Machines are network namespaces (`tests/lan.py`; plain loopback without root). Two cores cannot compute for four
machines, so a machine does not compute: it waits `--unit-ms` milliseconds for each unit. The coordinator runs on the
first machine. First each machine trains by itself with `cuadrilla train`, all at the same time; then they train as a
crew, with `up` and `join`. In the first SETTLE rounds the coordinator measures the crew; they do not count. `fraction`:
units per second of the crew over the sum of the machines'. A step of `--units` moves 8 MB for each machine, all through
the coordinator's card.
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import options, report, run_text, summary
from bench.nodes import PORT, Place
from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, last_rows
from tests.commands import task_hash
from tests.lan import can_shape, lan
from tests.machines import ended, invite, up

SETTLE = 5
WEIGHTS = 2**20
UNIT_MS = "BENCH_UNIT_MS"
TASK = f"""
import os, time
import torch
from cuadrilla.model.task import TaskDefaults

class Data(torch.utils.data.Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, i): return {{"x": torch.tensor([1.0])}}

class Waiting:
    defaults = TaskDefaults(length=1)
    def model(self): return torch.nn.Linear({WEIGHTS // 2**10}, {2**10}, bias=False)
    def loss(self, model, batch):
        time.sleep(float(os.environ["{UNIT_MS}"]) / 1000)
        return model.weight[0].square().sum() * len(batch["x"]), len(batch["x"])
    def data(self, split): return Data()
    def data_hash(self): return "waiting"
    def evaluate(self, model, batches): return {{"loss": 0.0}}

def task(): return Waiting()
"""
RUN = {
    "task.kind": "file",
    "task.path": "task.py:task",
    "train.pass_sequences": 1,
    "train.device": "cpu",
    "sync.kind": "exact",
    "evaluate.sequences": 1,
}


def make_run(folder: Path, *, units: int, steps: int) -> RunDir:
    folder.mkdir()
    run = RunDir(folder)
    (folder / "task.py").write_text(TASK)
    run.run_file.write_text(run_text(RUN | {"train.batch_sequences": units, "train.steps": steps}))
    return run


def units_per_second(run: RunDir, *, settle: int, steps: int) -> float:
    rows = last_rows(run.metrics)[settle : settle + steps]
    units = sum(row["tokens_per_second"] * row["seconds"] for row in rows)
    return float(units / sum(row["seconds"] for row in rows))


def alone(folder: Path, machines: Sequence[Place], *, steps: int) -> list[float]:
    """Units per second of each machine by itself. The last step is not timed, since it evaluates."""
    runs = [make_run(folder / f"alone-{number}", units=16, steps=steps + 2) for number in range(len(machines))]
    for process in [machine.start("train", str(run.path)) for machine, run in zip(machines, runs, strict=True)]:
        ended(process)
    return [units_per_second(run, settle=1, steps=steps) for run in runs]


def crew(folder: Path, lead: Place, machines: Sequence[Place], *, units: int, steps: int) -> float:
    """Units per second of all machines together."""
    run = make_run(folder / "crew", units=units, steps=SETTLE + steps + 1)
    processes = [up(lead, run, PORT)]
    says = invite(lead, "--uses", str(len(machines)))
    for number, machine in enumerate(machines, start=1):
        Home(machine.home).trust(task_hash(run.path))
        processes.append(machine.start("join", "--name", f"m{number}", "--threads", "1", says=says))
    for process in processes:
        ended(process)
    return units_per_second(run, settle=SETTLE, steps=steps)


def turn(folder: Path, unit_ms: Sequence[float], *, units: int, steps: int, rate: str) -> dict[str, Any]:
    """Measure the machines once alone and once together."""
    with lan(len(unit_ms), rate=rate) as members:
        lead = Place(members[0], folder, name="lead")
        machines = [
            Place(member, folder, name=str(number), **{UNIT_MS: milliseconds})
            for number, (member, milliseconds) in enumerate(zip(members, unit_ms, strict=True))
        ]
        try:
            by_themselves = alone(folder, machines, steps=steps)
            together = crew(folder, lead, machines, units=units, steps=steps)
        finally:
            for machine in (lead, *machines):
                machine.stop()
    fraction = together / sum(by_themselves)
    print(f"{fraction:.3f} of the sum", file=sys.stderr)
    return {"alone": by_themselves, "crew": together, "fraction": fraction}


def main() -> None:
    given = options(__doc__, unit_ms=[120.0, 240.0, 480.0, 480.0], units=64, rate="1gbit", steps=6, repeats=3)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the network is removed
    turns = []
    for _ in range(given.repeats):
        with tempfile.TemporaryDirectory() as name:
            turns.append(turn(Path(name), given.unit_ms, units=given.units, steps=given.steps, rate=given.rate))
    report(
        "throughput",
        **vars(given),
        network="namespaces" if can_shape(given.rate) else "plain loopback, no limit",
        fraction=summary([each["fraction"] for each in turns]),
        turns=turns,
    )


if __name__ == "__main__":
    main()
