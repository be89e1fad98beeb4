"""Trials per hour of a search over unequal machines, beside those of each of them alone.

    python -m bench.trials [--cores 0.8,0.4,0.2] [--trials 8] [--steps 300] [--rate 1gbit]

Machines are places on a network of their own (`lan`) with a share of this machine's processor each. `alone`: trials
per hour of a machine that searches by itself, from the end of its first trial to that of its last one. `together`: the
first machine searches with --crew, the others have joined; from the moment at which each of them has finished a trial,
as long as there are trials to begin. `of_the_sum`: what they do together over what they do one by one, added up.
`whole`: the same for the search from its first trial to its last, with its end, at which slow machines have no work.
`took_part`: how many of the machines have finished trials.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import optuna

from bench.common import random_data, report
from bench.lan import Member, can_shape, lan
from bench.limits import Share, shares
from cuadrilla.home import Home

RUN = """
[data]
folder = "../data"
[model]
layers = 2
heads = 2
width = 64
context = 64
[train]
steps = {steps}
batch_sequences = 8
unit_sequences = 8
precision = "fp32"
threads = 1
[optim]
kind = "adamw"
[checkpoint]
every_seconds = 0
[evaluate]
sequences = 8
[sample]
tokens = 0
[tune]
sampler = "random"
trials = {trials}
[tune.space]
optim.lr = {{low = 0.0001, high = 0.01, log = true}}
"""
COMMAND = [sys.executable, "-m", "cuadrilla"]
PORT = 47479
LOOK_SECONDS = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", default="0.8,0.4,0.2")
    parser.add_argument("--trials", type=int, default=8, help="of each machine alone; together three times as many")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rate", default="1gbit", help="0: the loopback")
    given = parser.parse_args()
    cores = [float(part) for part in given.cores.split(",")]
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        members = stack.enter_context(lan(len(cores), rate=given.rate))
        groups: list[Share | None] = [None] * len(cores)
        if can_shape(given.rate):
            groups = list(stack.enter_context(shares(len(cores))))
        random_data(work / "data", vocab_size=256, num_tokens=20_000)
        machines = [
            _Machine(work / f"home-{number}", member, group, cores=part)
            for number, (member, group, part) in enumerate(zip(members, groups, cores, strict=True))
        ]
        alone = []
        for number, machine in enumerate(machines):
            folder = search(work / f"alone-{number}", trials=given.trials, steps=given.steps)
            machine.run("tune", str(folder))
            alone.append(rate([row["time"] for row in ended(folder)]))
        folder = search(work / "together", trials=3 * given.trials, steps=given.steps)
        together(machines, folder)
        rows = ended(folder)
        steady, whole = rates(rows)
    report(
        "trials",
        cores=cores,
        took_part=len({row["place"] for row in rows}),
        alone=alone,
        together=steady,
        whole=whole,
        ceiling=sum(alone) / max(alone),
        over_the_best=steady / max(alone),
        of_the_sum=steady / sum(alone),
        whole_of_the_sum=whole / sum(alone),
    )


class _Machine:
    def __init__(self, home: Path, member: Member, group: Share | None, *, cores: float) -> None:
        self.home, self.member = home, member
        self._prefix = member.prefix
        if group is not None:
            group.limit(cores)
            self._prefix = (*group.prefix, *member.prefix)

    def start(self, *arguments: str, stdout: Any = subprocess.DEVNULL) -> "subprocess.Popen[str]":
        environment = {**os.environ, "CUADRILLA_HOME": str(self.home), "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [*self._prefix, *COMMAND, *arguments], env=environment, stdout=stdout, stderr=subprocess.DEVNULL, text=True
        )

    def run(self, *arguments: str) -> None:
        if self.start(*arguments).wait():
            raise SystemExit(f"{' '.join(arguments)} has failed")


def search(folder: Path, *, trials: int, steps: int) -> Path:
    folder.mkdir()
    (folder / "run.toml").write_text(RUN.format(trials=trials, steps=steps), encoding="utf-8")
    return folder


def together(machines: list[_Machine], folder: Path) -> None:
    """To the end of the search."""
    first, *others = machines
    listen = f"{first.member.address}:{PORT}"
    invite = folder / "invite"
    with open(invite, "w") as file:
        leads = first.start(
            "tune", str(folder), "--crew", "--listen", listen, "--uses", str(len(machines)), stdout=file
        )
    working: list[subprocess.Popen[str]] = []
    try:
        while not (Home(first.home).open_file.exists() and "cuadrilla1" in invite.read_text()):
            if leads.poll() is not None:
                raise SystemExit("the search has ended early")
            time.sleep(LOOK_SECONDS)
        for number, machine in enumerate(others, start=2):
            working.append(machine.start("join", "--name", f"machine-{number}", "--invite-file", str(invite)))
        if leads.wait():
            raise SystemExit("the search has failed")
    finally:
        for process in (leads, *working):
            process.kill()
            process.wait()


def ended(folder: Path) -> list[dict[str, Any]]:
    """The runs of a search, from its storage, in the order in which they ended."""
    trials = optuna.load_study(study_name="search", storage=f"sqlite:///{folder / 'tune' / 'study.db'}").trials
    rows = []
    for trial in trials:
        began, time = (each.timestamp() for each in (trial.datetime_start, trial.datetime_complete) if each)
        rows.append({**trial.user_attrs, "began": began, "time": time})
    return sorted(rows, key=lambda row: row["time"])


def rate(times: list[float]) -> float:
    """Trials per hour, from the end of the first to that of the last."""
    return 3600 * (len(times) - 1) / (times[-1] - times[0])


def rates(rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Of all at work; and of the search as a whole, with the start of the others and its end."""
    begun = [row["began"] for row in rows]
    warm = max(min(row["time"] for row in rows if row["place"] == place) for place in {row["place"] for row in rows})
    steady = [row["time"] for row in rows if warm <= row["time"] <= max(begun)]
    if len(steady) < 2:
        raise SystemExit("too few trials: more --trials, or fewer --steps")
    return rate(steady), 3600 * len(rows) / (rows[-1]["time"] - min(begun))


if __name__ == "__main__":
    main()
