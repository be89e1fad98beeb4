"""How soon an unequal crew has the loss that its best machine alone has at its end: real processes on slow links.

    python -m bench.time_to_loss DATA_FOLDER [--link 1gbe,wifi] [--steps 64] [--seeds 3] [--only "exact;windows of 8"]

Machines are network namespaces (`bench/lan.py`), each with a quota of the processor (`--cores`) and one thread; the
best one coordinates, too, within its quota. Every card sends and receives at no more than `--link`.
This processor is about 175 times slower than the example of a LAN (46.5 TFLOP/s in all), so links are made that much
slower, too: `1gbe` is 6 Mbit/s, `wifi` a third of it. `real_gbit` of a link: what it would be beside that LAN by the
arithmetic measured here, which is less, since the model is small. There is no delay, no loss and no shared air.

* `alone`: the best machine with its part of the global batch, while the others do the same, so that memory is as busy
  as in a crew. Runs of 1, 1.5 and 2 times as many steps, each with a schedule of its own, are the scale of losses; the
  longer ones have no quota, which does not change what they learn.
* `alone, whole batch`: the best machine with the global batch, which is what a run does that others do not join.
* `exact, no limit`, `exact`, `windows of N`, `auto`: `cuadrilla up` and `cuadrilla join`, with and without slow links.
* `ddp`, `torchft`: see `bench/peers.py`; torchft where it is installed.

`exact` and `ddp` learn what `exact, no limit` does (`off`: the greatest difference of their training losses), so they
train until their pace is known, `--pace` steps; torchft learns without limits and is timed over one of its windows.
`--pace 0`: all train to the end. Not timed are steps before all have come, the `SETTLE` rounds in which the coordinator
measures its crew, evaluations and checkpoints; `seconds` are those of an average other step, times all steps.
`times`: how long the best machine alone trains for the loss that a crew has at its end, in times of the crew's seconds;
the ideal is the sum of quotas over the largest. `busy`: processor time over quota, first that of torchft's lighthouse.
`mbit`: of each card, received and sent, in its busiest second. `planned`: seconds that `plan/predict.py` expects, by
what each machine does alone, over `seconds`. Needs root.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from bench.common import configure, report
from bench.goodput import Machine, wait_for
from bench.lan import CARD, Member, bits_per_second, ceiling_bytes_per_second, lan
from bench.lanes import LONGER, times_longer
from bench.limits import shares
from bench.link import Node
from cuadrilla.home import Home
from cuadrilla.plan.predict import Crew, MachineSpec, predict_crew
from cuadrilla.rundir import RunDir, last_rows, read_jsonl
from cuadrilla.train.measure import measure
from cuadrilla.train.setup import make_model, make_task

RUN = """
[run]
seed = {seed}
[data]
folder = "{data}"
[model]
layers = {layers}
heads = {heads}
width = {width}
context = {length}
[train]
steps = {steps}
batch_sequences = {batch}
unit_sequences = 1
precision = "fp32"
threads = 1
[sync]
kind = "exact"
[evaluate]
sequences = 256
every_tokens = {every}
[sample]
tokens = 0
"""
LINKS = {"1gbe": "6mbit", "wifi": "2mbit"}
NO_LIMIT = "10gbit"
LAN_FLOPS = 46.5e12
SETTLE = 3
EVALUATIONS = 4
EXACT, WHOLE = "exact, no limit", "alone, whole batch"
ARMS = (WHOLE, EXACT, "exact", "windows of 4", "windows of 8", "windows of 16", "ddp", "torchft")
PORT = 47470
LOOK_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Race:
    """What all train, and on which machines. `batch`: of the crew."""

    data: Path
    cores: Sequence[float]
    batch: int
    steps: int
    length: int
    layers: int
    width: int
    pace: int
    every: int
    seed: int = 0

    @property
    def best(self) -> int:
        """The number of the fastest machine."""
        return max(range(len(self.cores)), key=self.cores.__getitem__)

    @property
    def share(self) -> int:
        """Of the best machine, in sequences."""
        return round(self.batch * max(self.cores) / sum(self.cores))

    def text(self, *, batch: int, steps: int) -> str:
        every = math.ceil(batch * self.length * steps / EVALUATIONS)
        return RUN.format(
            seed=self.seed, data=self.data, layers=self.layers, heads=max(1, self.width // 32), width=self.width,
            length=self.length, steps=steps, batch=batch, every=every,
        )  # fmt: skip

    def num_weights(self) -> int:
        config = configure(self.text(batch=self.batch, steps=self.steps))
        return sum(parameter.numel() for parameter in make_model(make_task(config, Path("/")), seed=0).parameters())


@dataclass(kw_only=True)
class Trained:
    """`seconds`: of all steps at the settled pace. `workers`: in the last round. `timed`: rounds that were; with 0 it
    is too short a run, and the last one stands for all. `held_out`: steps and their loss. `losses`: of training.
    """

    loss: float
    seconds: float
    workers: int
    timed: int
    held_out: list[list[float]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    mbit: list[list[float]] = field(default_factory=list)


class Meter:
    """What machines use while it is entered: processor time over quota, and bytes through their cards."""

    def __init__(self, machines: Sequence[Machine], cores: Sequence[float]) -> None:
        self._machines, self._cores, self._ended = machines, cores, threading.Event()
        self.mbit = [[0.0, 0.0] for _ in machines]
        self._first = self._last = self._read()

    def __enter__(self) -> "Meter":
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _go_on(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            now = self._read()
            if any(cpu < before for (cpu, _), (before, _) in zip(now[1], self._last[1], strict=True)):
                return  # some process has ended
            for most, (_, after), (_, before) in zip(self.mbit, now[1], self._last[1], strict=True):
                for way in (0, 1):
                    most[way] = max(most[way], (after[way] - before[way]) * 8e-6 / (now[0] - self._last[0]))
            self._last = now

    @property
    def busy(self) -> list[float]:
        seconds = max(self._last[0] - self._first[0], 1e-9)
        pairs = zip(self._last[1], self._first[1], self._cores, strict=True)
        return [(after[0] - before[0]) / seconds / cores for after, before, cores in pairs]

    def _read(self) -> tuple[float, list[tuple[float, list[int]]]]:
        """When; of each machine CPU seconds, and bytes received and sent."""
        return time.monotonic(), [_usage(processes(machine)) for machine in self._machines]


def _usage(found: Sequence[psutil.Process]) -> tuple[float, list[int]]:
    seconds, carried = 0.0, [0, 0]
    for process in found:
        with suppress(psutil.Error, OSError):
            seconds += sum(process.cpu_times()[:2])
            cards = Path(f"/proc/{process.pid}/net/dev").read_text().replace(":", " ").splitlines()
            carried = next(([int(c[1]), int(c[9])] for c in map(str.split, cards) if c[0] == CARD), carried)
    return seconds, carried


def processes(machine: Machine) -> list[psutil.Process]:
    """All that run there."""
    if machine.share is None:
        first = [psutil.Process(machine.process.pid)] if machine.process and machine.process.poll() is None else []
        return [*first, *(child for one in first for child in one.children(recursive=True))]
    numbers = (machine.share.folder / "cgroup.procs").read_text().split()
    return [psutil.Process(int(number)) for number in numbers if psutil.pid_exists(int(number))]


@dataclass(frozen=True, kw_only=True)
class Place:
    """The machines of one training, and a folder."""

    folder: Path
    lighthouse: Machine
    coordinator: Machine
    machines: Sequence[Machine]
    cores: Sequence[float]

    def limit(self, number: int | None = None) -> None:
        """To their quotas the first `number` machines, or all."""
        for machine, cores in [*zip(self.machines, self.cores, strict=True)][:number]:
            assert machine.share is not None
            machine.share.limit(cores)

    def meter(self) -> Meter:
        return Meter([self.lighthouse, *self.machines], [1.0, *self.cores])

    def end(self) -> None:
        self.lighthouse.end()
        self.coordinator.end()
        found = [process for machine in self.machines for process in processes(machine)]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for machine in self.machines:
            machine.end()
        psutil.wait_procs(found, timeout=30)


@contextmanager
def place(race: Race, *, rate: str) -> Iterator[Place]:
    """Without quotas yet."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cua-loss-")))
        members = stack.enter_context(lan(1 + len(race.cores), rate=rate))
        groups = [None, *stack.enter_context(shares(len(race.cores)))]
        lighthouse, *machines = [
            Machine(member, group, folder / f"home-{number}", talk=folder / f"said-{number}")
            for number, (member, group) in enumerate(zip(members, groups, strict=True))
        ]
        best = machines[race.best]
        coordinator = Machine(best.member, best.share, folder / "home", talk=folder / "said")
        made = Place(folder=folder, lighthouse=lighthouse, coordinator=coordinator, machines=machines, cores=race.cores)
        stack.callback(made.end)
        yield made


def write_run(folder: Path, text: str) -> RunDir:
    folder.mkdir()
    run = RunDir(folder)
    run.run_file.write_text(text)
    return run


def ended_well(machine: Machine) -> None:
    assert machine.process is not None
    if machine.process.wait():
        raise SystemExit(machine.talk.read_text())


def trained(run: RunDir, race: Race, *, begun: int, batch: int, meter: Meter, loss: float | None = None) -> Trained:
    """By its metrics. `begun`: how many rounds there had been when all had come. `loss`: where another run has it."""
    rows = last_rows(run.metrics)
    settled = rows[begun + SETTLE :]
    timed = settled or rows[-1:]
    rate = sum(row["tokens_per_second"] * row["seconds"] for row in timed) / sum(row["seconds"] for row in timed)
    return Trained(
        loss=rows[-1]["val_loss"] if loss is None else loss,
        seconds=race.steps * batch * race.length / rate,
        workers=rows[-1]["workers"],
        timed=len(settled),
        held_out=[[row["tokens"] / (batch * race.length), row["val_loss"]] for row in rows if "val_loss" in row],
        losses=[row["loss"] for row in rows],
        busy=meter.busy,
        mbit=meter.mbit,
    )


def alone(race: Race) -> tuple[Trained, dict[float, float]]:
    """Of the best machine; and the losses of its longer runs."""
    found, _ = by_itself(race, batch=race.share)
    losses = {LONGER[0]: found.loss}
    with place(race, rate=NO_LIMIT) as there:
        longer = list(zip(LONGER[1:], there.machines, strict=False))
        for times, machine in longer:
            text = race.text(batch=race.share, steps=round(times * race.steps))
            machine.start("train", str(write_run(there.folder / f"run-{times}", text).path))
        for times, machine in longer:
            ended_well(machine)
            losses[times] = last_rows(RunDir(there.folder / f"run-{times}").metrics)[-1]["val_loss"]
    return found, losses


def by_itself(race: Race, *, batch: int) -> tuple[Trained, list[float]]:
    """The best machine, as the others train, too; and the tokens per second of all."""
    with place(race, rate=NO_LIMIT) as there:
        there.limit()
        for number, machine in enumerate(there.machines):
            run = write_run(there.folder / f"run-{number}", race.text(batch=batch, steps=race.steps))
            machine.start("train", str(run.path))
        with there.meter() as meter:
            ended_well(there.machines[race.best])
        runs = [RunDir(there.folder / f"run-{number}") for number in range(len(race.cores))]
        wait_for(lambda: all(rounds(run) for run in runs))
        rates = [statistics.median(row["tokens_per_second"] for row in last_rows(run.metrics)) for run in runs]
        return trained(runs[race.best], race, begun=0, batch=batch, meter=meter), rates


def planned_seconds(race: Race, rates: Sequence[float], *, rate: str, steps: int) -> float:
    """Of the whole run, by the plan. `rates`: of each machine with the whole batch. `steps`: of a round."""
    config = configure(race.text(batch=race.batch, steps=race.steps))
    work, most = measure(config, Path("/")).work, ceiling_bytes_per_second(rate) or math.inf
    tokens = race.batch * race.length
    machines = [
        MachineSpec(
            name=str(number),
            tokens_per_second=each * (tokens + work.step_tokens) / tokens,
            bytes_per_second=math.inf if number == race.best else most,
        )
        for number, each in enumerate(rates)
    ]
    crew = predict_crew(Crew(machines=machines, bytes_per_second=most), work, steps=steps, alone=max(rates))
    return race.steps * tokens / crew.tokens_per_second


def crew(race: Race, settings: Sequence[str], *, rate: str, loss: float | None = None) -> Trained:
    """With a `loss` that is known, only until the pace is."""
    with place(race, rate=rate) as there:
        run = write_run(there.folder / "run", race.text(batch=race.batch, steps=race.steps))
        lead, home = there.coordinator, Home(there.coordinator.home)
        address = f"{lead.member.address}:{PORT}"
        lead.start(
            "up", str(run.path), "--listen", address, *(f"--set={each}" for each in ("engine.workers=[]", *settings))
        )
        wait_for(home.open_file.exists)
        invite = lead.ask("invite", "--uses", str(len(there.machines)))
        wait_for(lambda: not list(home.invites.glob("*.json")))  # the coordinator has taken it
        for number, machine in enumerate(there.machines, start=1):
            machine.start("join", "--name", f"m{number}", "--threads", "1", "--data", str(race.data), says=invite)
            wait_for(lambda expected=number: joined(run) >= expected or not lead.running())
            there.limit(number)
        begun = rounds(run)
        with there.meter() as meter:
            while lead.running() and (loss is None or rounds(run) < begun + SETTLE + race.pace):
                time.sleep(LOOK_SECONDS / 4)
        if loss is None:
            ended_well(lead)
        return trained(run, race, begun=begun, batch=race.batch, meter=meter, loss=loss)


def joined(run: RunDir) -> int:
    return len({row["worker"] for row in read_jsonl(run.events) if row["event"] == "joined"})


def rounds(run: RunDir) -> int:
    return len(last_rows(run.metrics))


def peers(race: Race, kind: str, *, rate: str, steps: int, limited: bool = True) -> Trained:
    """`steps`: how many to train; of the whole run's schedule."""
    program = [sys.executable, "-m", "bench.peers"]
    with place(race, rate=rate) as there, ExitStack() as stack:
        lighthouse = f"{there.lighthouse.member.address}:{PORT}"
        whole = {
            "kind": kind, "config": race.text(batch=race.batch, steps=race.steps),
            "addresses": [machine.member.address for machine in there.machines], "port": PORT, "every": race.every,
            "lighthouse": f"http://{lighthouse}", "steps": steps,
        }  # fmt: skip
        nodes = []
        if kind == "torchft":
            specification = {"bind": lighthouse, "replicas": len(there.machines)}
            nodes.append(Node(there.lighthouse.member, program=program, specification=specification))
        for rank, machine in enumerate(there.machines):
            member = Member(machine.member.address, machine.prefix)
            nodes.append(Node(member, program=program, specification={**whole, "rank": rank}))
        for node in nodes:
            stack.callback(node.close)
        stack.callback(there.end)
        for node in nodes:
            node.answer()
        if limited:
            there.limit()
        ranks = nodes[-len(there.machines) :]
        with there.meter() as meter:
            for node in ranks:
                node.tell("train")
            answers: list[dict[str, Any]] = [node.answer() for node in ranks]
    timed = answers[0]["seconds"][1:] if kind == "ddp" else answers[0]["seconds"]
    return Trained(
        loss=answers[0]["val_loss"],
        seconds=race.steps * statistics.fmean(timed),
        workers=len(answers),
        timed=len(timed),
        losses=[statistics.fmean(each) for each in zip(*(answer["losses"] for answer in answers), strict=True)],
        busy=meter.busy,
        mbit=meter.mbit,
    )


@dataclass(kw_only=True)
class Seed:
    """The trainings with one seed. `known`: by their names. `rates`: of each machine with the whole
    batch, in tokens per second.
    """

    race: Race
    results: dict[str, list[dict[str, Any]]]
    known: dict[str, Trained] = field(default_factory=dict)
    rates: Sequence[float] = ()

    def run(self, chosen: Sequence[str], links: Mapping[str, str]) -> None:
        best, scale = alone(self.race)
        self._note("alone", {**asdict(best), "scale": scale})
        for name in chosen:
            for link, rate in {"": NO_LIMIT}.items() if name in (EXACT, WHOLE) else links.items():
                found = self._arm(name, rate)
                self.known[name] = found
                more = {"times": times_longer(found.loss, scale) * best.seconds / found.seconds}
                if name in ("exact", "ddp") and EXACT in self.known:
                    more["off"] = self._off(found)
                if self.rates and (name == "exact" or name.startswith("windows")):
                    steps = int(name.rpartition(" ")[2]) if name != "exact" else 1
                    more["planned"] = planned_seconds(self.race, self.rates, rate=rate, steps=steps) / found.seconds
                self._note(f"{name}, {link}" if link else name, {**asdict(found), **more})

    def _arm(self, name: str, rate: str) -> Trained:
        race, exact = self.race, self.known.get(EXACT) if self.race.pace else None
        if name == WHOLE:
            found, self.rates = by_itself(race, batch=race.batch)
            return found
        if name in ("exact", EXACT):
            return crew(race, [], rate=rate, loss=exact.loss if exact else None)
        if name == "ddp" and exact:
            return replace(peers(race, name, rate=rate, steps=1 + race.pace), loss=exact.loss)
        if name == "torchft" and race.pace:
            learned = self.known.get(name) or peers(race, name, rate=NO_LIMIT, steps=race.steps, limited=False)
            timed = peers(race, name, rate=rate, steps=race.every)
            return replace(timed, loss=learned.loss, losses=learned.losses)
        if name in ("ddp", "torchft"):
            return peers(race, name, rate=rate, steps=race.steps)
        kind, _, steps = name.partition(" of ")
        return crew(race, [f"sync.kind={kind}", *([f"sync.steps={steps}"] if steps else [])], rate=rate)

    def _off(self, found: Trained) -> float:
        return max(abs(a - b) for a, b in zip(found.losses, self.known[EXACT].losses, strict=False))

    def _note(self, name: str, found: Mapping[str, Any]) -> None:
        self.results.setdefault(name, []).append(dict(found))
        print(time.strftime("%H:%M:%S"), f"seed {self.race.seed}", name, json.dumps(found), file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="a prepared data folder")
    parser.add_argument("--link", default="1gbe", help="1gbe, wifi, or rates as tc writes them, divided by commas")
    parser.add_argument("--cores", default="0.8,0.4,0.2,0.1", help="quotas of the processor")
    parser.add_argument("--batch", type=int, default=120, help="sequences of the crew's step; divides into equal parts")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=96, help="in heads of 32")
    parser.add_argument("--steps", type=int, default=64, help="a multiple of the windows'")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--pace", type=int, default=3)
    parser.add_argument("--every", type=int, default=16, help="torchft: steps of a window")
    parser.add_argument("--only", default=";".join(ARMS), help="of these, and auto")
    given = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("needs root, to make network namespaces and control groups")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is removed
    chosen = [name for name in given.only.split(";") if name != "torchft" or find_spec("torchft")]
    if "torchft" in given.only and "torchft" not in chosen:
        print("torchft is left out: pip install torchft-nightly", file=sys.stderr)
    race = Race(
        data=given.data.resolve(), cores=[float(part) for part in given.cores.split(",")], batch=given.batch,
        steps=given.steps, length=given.length, layers=given.layers, width=given.width, pace=given.pace,
        every=given.every,
    )  # fmt: skip
    links = {name: LINKS.get(name, name) for name in given.link.split(",")}
    load, results = psutil.getloadavg(), dict[str, list[dict[str, Any]]]()
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        Seed(race=replace(race, seed=seed), results=results).run(chosen, links)
    ideal, seconds = sum(race.cores) / max(race.cores), statistics.median(each["seconds"] for each in results["alone"])
    flops = ideal * 6 * race.num_weights() * race.steps * race.share * race.length / seconds
    report(
        "time_to_loss",
        **{key: value for key, value in asdict(race).items() if key not in ("data", "seed")},
        load_before=load,
        ideal=ideal,
        num_weights=race.num_weights(),
        gflops=flops / 1e9,
        real_gbit={name: bits_per_second(rate) * LAN_FLOPS / flops / 1e9 for name, rate in links.items()},
        times={
            name: statistics.median(row["times"] for row in rows) for name, rows in results.items() if name != "alone"
        },
        results=results,
    )


if __name__ == "__main__":
    main()
