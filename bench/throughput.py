"""What unequal machines do together, beside the sum of what each does alone.

    python -m bench.throughput [--unit-ms 120 240 480 480] [--repeats 3]

Machines are network namespaces (`bench/lan.py`; plain loopback for a user that is not root). Two cores cannot be four
machines, so a machine's slowness is made: `--unit-ms` in which it only waits for each unit. The coordinator shares the
first machine. First each trains by itself with `cuadrilla train`, all at the same time; then as a crew, with `up` and
`join`. The first SETTLE rounds measure the crew and do not count. `fraction`: units per second of the crew over the sum
of those alone. A step moves 8 MB for each machine, all through the coordinator's card.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.common import report, summary
from bench.goodput import Machine, wait_for
from bench.lan import can_shape, lan
from cuadrilla.crew.bundle import code_hash
from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, last_rows

PORT, SETTLE = 47470, 5
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
RUN = """
[task]
kind = "file"
path = "task.py:task"
[train]
steps = {steps}
batch_sequences = {units}
unit_sequences = 1
pass_sequences = 1
precision = "fp32"
device = "cpu"
threads = 1
[optim]
kind = "adamw"
[sync]
kind = "exact"
[evaluate]
every_tokens = 1_000_000_000_000
sequences = 1
"""


def make_run(folder: Path, *, units: int, steps: int) -> RunDir:
    folder.mkdir()
    run = RunDir(folder)
    (folder / "task.py").write_text(TASK)
    run.run_file.write_text(RUN.format(units=units, steps=steps))
    return run


def units_per_second(run: RunDir, *, settle: int, steps: int) -> float:
    rows = last_rows(run.metrics)[settle : settle + steps]
    units = sum(row["tokens_per_second"] * row["seconds"] for row in rows)
    return float(units / sum(row["seconds"] for row in rows))


def ended(machine: Machine) -> None:
    assert machine.process is not None
    if machine.process.wait():
        raise SystemExit(machine.talk.read_text())


def alone(folder: Path, machines: Sequence[Machine], *, steps: int) -> list[float]:
    """Units per second of each; the last step evaluates."""
    runs = [make_run(folder / f"alone-{number}", units=16, steps=steps + 2) for number in range(len(machines))]
    for machine, run in zip(machines, runs, strict=True):
        machine.start("train", str(run.path))
    for machine in machines:
        ended(machine)
    return [units_per_second(run, settle=1, steps=steps) for run in runs]


def crew(folder: Path, lead: Machine, machines: Sequence[Machine], *, units: int, steps: int) -> float:
    """Units per second of all together."""
    run = make_run(folder / "crew", units=units, steps=SETTLE + steps + 1)
    lead.start("up", str(run.path), "--listen", f"{lead.member.address}:{PORT}", "--set", "engine.workers=[]")
    wait_for(Home(lead.home).open_file.exists)
    invite = lead.ask("invite", "--uses", str(len(machines)))
    wait_for(lambda: not list(Home(lead.home).invites.glob("*.json")))  # the coordinator has taken it
    for number, machine in enumerate(machines, start=1):
        Home(machine.home).trust(code_hash([run.path / "task.py"]))
        machine.start("join", "--name", f"m{number}", "--threads", "1", says=invite)
    ended(lead)
    for machine in machines:
        ended(machine)
    return units_per_second(run, settle=SETTLE, steps=steps)


def turn(folder: Path, unit_ms: Sequence[float], *, units: int, steps: int, rate: str) -> dict[str, Any]:
    """Once alone, and once together."""
    with lan(len(unit_ms), rate=rate) as members:
        lead, *machines = [
            Machine(member, None, folder / f"home-{number}", talk=folder / f"said-{number}")
            for number, member in enumerate([members[0], *members])
        ]
        for machine, milliseconds in zip(machines, unit_ms, strict=True):
            machine.environment[UNIT_MS] = str(milliseconds)
        try:
            by_themselves = alone(folder, machines, steps=steps)
            together = crew(folder, lead, machines, units=units, steps=steps)
        finally:
            for machine in (lead, *machines):
                machine.end()
    fraction = together / sum(by_themselves)
    print(f"{fraction:.3f} of the sum", file=sys.stderr)
    return {"alone": by_themselves, "crew": together, "fraction": fraction}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--unit-ms", type=float, nargs="+", default=[120, 240, 480, 480], help="one for each machine")
    parser.add_argument("--units", type=int, default=64, help="in a step of the crew")
    parser.add_argument("--rate", default="1gbit", help="of every card, as tc writes it; 0: loopback")
    parser.add_argument("--steps", type=int, default=6, help="that are counted")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the network is taken down
    load = os.getloadavg()
    turns = []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as name:
            units, steps, rate = arguments.units, arguments.steps, arguments.rate
            turns.append(turn(Path(name), arguments.unit_ms, units=units, steps=steps, rate=rate))
    report(
        "throughput",
        network=f"namespaces, {arguments.rate} per card" if can_shape(arguments.rate) else "plain loopback, no limit",
        unit_ms=arguments.unit_ms,
        units=arguments.units,
        load_before=load,
        fraction=summary([each["fraction"] for each in turns]),
        turns=turns,
    )


if __name__ == "__main__":
    main()
