"""How soon an unequal crew has the loss that its best machine alone has at its end: real processes on slow links.

    python -m bench.time_to_loss DATA_FOLDER [--link 6mbit 30mbit] [--steps 64] [--seeds 3] [--only auto "windows of 8"]

Machines are network namespaces (`bench/lan.py`), each with a quota of the processor (`--cores`) and one thread; the
best one coordinates, too, within its quota. Every card sends and receives at no more than `--link`.
This processor is about 175 times slower than the example of a LAN (46.5 TFLOP/s in all), so links are made that much
slower, too: 6mbit for 1 Gbit/s. `real_gbit` of a link: what it would be beside that LAN by the arithmetic measured
here, which is less, since the model is small. There is no delay, no loss and no shared air.

* `alone`: the best machine with its part of the global batch, while the others do the same, so that memory is as busy
  as in a crew. Runs of 1, 1.5 and 2 times as many steps, each with a schedule of its own, are the scale of losses; the
  longer ones have no quota, which does not change what they learn.
* `alone, whole batch`: the best machine with the global batch, which is what a run does that others do not join.
* `exact, no limit`, `exact`, `windows of N`, `auto`: `cuadrilla up` and `cuadrilla join`, with and without slow links.
* `ddp`, `torchft`: see `bench/peers.py`; torchft where it is installed.

`exact` and `ddp` learn what `exact, no limit` does, so they train until their pace is known, `--pace` steps; torchft
learns without limits and is timed over one of its windows of `--every` steps. Not timed are steps before all have come,
the `SETTLE` rounds in which the coordinator measures its crew, evaluations and checkpoints; `seconds` are those of an
average other step, times all steps. `times`: how long the best machine alone trains for the loss that a crew has at its
end, in times of the crew's seconds; the ideal is the sum of quotas over the largest. `busy`: processor time over quota,
first that of torchft's lighthouse. `planned`: seconds that `plan/predict.py` expects, by what each machine does alone,
over `seconds`. `--batch` (sequences of the crew's step) divides into equal parts, `--steps` into windows, `--width`
into heads of 32. Needs root.
"""

import json
import math
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.common import configure, options, report
from bench.lan import bits_per_second, ceiling_bytes_per_second
from bench.lanes import LONGER, times_longer
from bench.nodes import PORT, Node, Place, places
from cuadrilla.plan.predict import Crew, MachineSpec, predict_crew
from cuadrilla.rundir import RunDir, last_rows
from cuadrilla.train.measure import measure
from cuadrilla.train.setup import make_model, make_task
from tests.commands import joined, wait_for
from tests.machines import ended, invite, up

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
NO_LIMIT = "10gbit"
LAN_FLOPS = 46.5e12
SETTLE = 3
EVALUATIONS = 4
EXACT, WHOLE = "exact, no limit", "alone, whole batch"
ARMS = [WHOLE, EXACT, "exact", "windows of 4", "windows of 8", "windows of 16", "ddp", "torchft"]
LOOK_SECONDS = 0.25


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
        settings = asdict(self) | {"batch": batch, "steps": steps, "every": every}
        return RUN.format(**settings, heads=max(1, self.width // 32))

    def num_weights(self) -> int:
        config = configure(self.text(batch=self.batch, steps=self.steps))
        return sum(parameter.numel() for parameter in make_model(make_task(config, Path("/")), seed=0).parameters())


@dataclass(kw_only=True)
class Trained:
    """`seconds`: of all steps at the settled pace. `workers`: in the last round. `timed`: rounds that were; with 0 it
    is too short a run, and the last one stands for all.
    """

    loss: float
    seconds: float
    workers: int
    timed: int
    busy: list[float]


class Meter:
    """Processor time over quota of machines, until some process has ended."""

    def __init__(self, machines: Sequence[Place], cores: Sequence[float]) -> None:
        self._machines, self._cores = machines, cores
        self._first = self._last = self._read()

    def look(self) -> None:
        now = self._read()
        if all(after >= before for after, before in zip(now[1:], self._last[1:], strict=True)):
            self._last = now

    @property
    def busy(self) -> list[float]:
        seconds, *used = [max(after - before, 1e-9) for after, before in zip(self._last, self._first, strict=True)]
        return [each / seconds / cores for each, cores in zip(used, self._cores, strict=True)]

    def _read(self) -> list[float]:
        return [time.monotonic(), *(machine.processor_seconds() for machine in self._machines)]


@dataclass(frozen=True, kw_only=True)
class Ground:
    """The machines of one training, and a folder; without quotas yet."""

    folder: Path
    lighthouse: Place
    coordinator: Place
    machines: Sequence[Place]
    cores: Sequence[float]

    def limit(self, number: int | None = None) -> None:
        """To their quotas the first `number` machines, or all."""
        for machine, cores in [*zip(self.machines, self.cores, strict=True)][:number]:
            assert machine.share is not None
            machine.share.limit(cores)

    def meter(self) -> Meter:
        return Meter([self.lighthouse, *self.machines], [1.0, *self.cores])

    def run(self, name: str, text: str) -> RunDir:
        run = RunDir(self.folder / name)
        run.path.mkdir()
        run.run_file.write_text(text)
        return run


@contextmanager
def ground(race: Race, *, rate: str) -> Iterator[Ground]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cua-loss-")))
        lighthouse, *machines = stack.enter_context(places(folder, 1 + len(race.cores), rate=rate))
        best = machines[race.best]
        coordinator = Place(best.member, folder, name="lead", share=best.share)
        stack.callback(coordinator.stop)
        yield Ground(
            folder=folder, lighthouse=lighthouse, coordinator=coordinator, machines=machines, cores=race.cores
        )  # fmt: skip


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
        busy=meter.busy,
    )


def alone(race: Race) -> tuple[Trained, dict[float, float]]:
    """Of the best machine; and the losses of its longer runs."""
    found, _ = by_itself(race, batch=race.share)
    losses = {LONGER[0]: found.loss}
    with ground(race, rate=NO_LIMIT) as there:
        runs = {
            times: there.run(f"run-{times}", race.text(batch=race.share, steps=round(times * race.steps)))
            for times in LONGER[1:]
        }
        started = [
            machine.start("train", str(run.path)) for run, machine in zip(runs.values(), there.machines, strict=False)
        ]
        for process in started:
            process.wait()
            ended(process)
        return found, losses | {times: last_rows(run.metrics)[-1]["val_loss"] for times, run in runs.items()}


def by_itself(race: Race, *, batch: int) -> tuple[Trained, list[float]]:
    """The best machine, as the others train, too; and the tokens per second of all."""
    with ground(race, rate=NO_LIMIT) as there:
        there.limit()
        text = race.text(batch=batch, steps=race.steps)
        runs = [there.run(f"run-{number}", text) for number in range(len(race.cores))]
        started = [machine.start("train", str(run.path)) for machine, run in zip(there.machines, runs, strict=True)]
        meter = there.meter()
        while started[race.best].poll() is None:
            time.sleep(LOOK_SECONDS)
            meter.look()
        ended(started[race.best])
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
    with ground(race, rate=rate) as there:
        run = there.run("run", race.text(batch=race.batch, steps=race.steps))
        lead = up(there.coordinator, run, PORT, *(f"--set={each}" for each in settings))
        says = invite(there.coordinator, "--uses", str(len(there.machines)))
        for number, machine in enumerate(there.machines, start=1):
            machine.start("join", "--name", f"m{number}", "--threads", "1", "--data", str(race.data), says=says)
            wait_for(lambda number=number: joined(run, number)() or lead.poll() is not None)
            there.limit(number)
        begun, meter = rounds(run), there.meter()
        while lead.poll() is None and (loss is None or rounds(run) < begun + SETTLE + race.pace):
            time.sleep(LOOK_SECONDS)
            meter.look()
        if loss is None:
            ended(lead)
        return trained(run, race, begun=begun, batch=race.batch, meter=meter, loss=loss)


def rounds(run: RunDir) -> int:
    return len(last_rows(run.metrics))


def peers(race: Race, kind: str, *, rate: str, steps: int, limited: bool = True) -> Trained:
    """`steps`: how many to train; of the whole run's schedule."""
    with ground(race, rate=rate) as there, ExitStack() as stack:

        def started(machine: Place, **specification: Any) -> Node:
            node = Node(machine.prefix, program="bench.peers", **specification)
            stack.callback(node.close)
            return node

        lighthouse = f"{there.lighthouse.address}:{PORT}"
        if kind == "torchft":
            started(there.lighthouse, bind=lighthouse, replicas=len(there.machines)).answer()
        addresses, config = [each.address for each in there.machines], race.text(batch=race.batch, steps=race.steps)
        whole = {"config": config, "addresses": addresses, "lighthouse": f"http://{lighthouse}", "every": race.every}
        ranks = [
            started(machine, kind=kind, rank=rank, steps=steps, **whole) for rank, machine in enumerate(there.machines)
        ]
        for node in ranks:
            node.answer()
        if limited:
            there.limit()
        meter = there.meter()
        for node in ranks:
            node.tell("train")
        answers = [node.answer() for node in ranks]
        meter.look()
    timed = answers[0]["seconds"][1:] if kind == "ddp" else answers[0]["seconds"]
    return Trained(
        loss=answers[0]["val_loss"],
        seconds=race.steps * statistics.fmean(timed),
        workers=len(answers),
        timed=len(timed),
        busy=meter.busy,
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

    def run(self, chosen: Sequence[str], links: Sequence[str]) -> None:
        best, scale = alone(self.race)
        self._note("alone", {**asdict(best), "scale": scale})
        for name in chosen:
            everywhere = name in (EXACT, WHOLE)
            for rate in [NO_LIMIT] if everywhere else links:
                found = self.known[name] = self._arm(name, rate)
                more = {"times": times_longer(found.loss, scale) * best.seconds / found.seconds}
                if self.rates and (name == "exact" or name.startswith("windows")):
                    steps = int(name.rpartition(" ")[2]) if name != "exact" else 1
                    more["planned"] = planned_seconds(self.race, self.rates, rate=rate, steps=steps) / found.seconds
                self._note(name if everywhere else f"{name}, {rate}", {**asdict(found), **more})

    def _arm(self, name: str, rate: str) -> Trained:
        race, exact = self.race, self.known.get(EXACT)
        match name:
            case "alone, whole batch":
                found, self.rates = by_itself(race, batch=race.batch)
                return found
            case "exact" | "exact, no limit":
                return crew(race, [], rate=rate, loss=exact.loss if exact else None)
            case "ddp":
                found = peers(race, name, rate=rate, steps=1 + race.pace if exact else race.steps)
                return replace(found, loss=exact.loss) if exact else found
            case "torchft":
                learned = self.known.get(name) or peers(race, name, rate=NO_LIMIT, steps=race.steps, limited=False)
                return replace(peers(race, name, rate=rate, steps=race.every), loss=learned.loss)
        kind, _, steps = name.partition(" of ")
        return crew(race, [f"sync.kind={kind}", *([f"sync.steps={steps}"] if steps else [])], rate=rate)

    def _note(self, name: str, found: Mapping[str, Any]) -> None:
        self.results.setdefault(name, []).append(dict(found))
        print(time.strftime("%H:%M:%S"), f"seed {self.race.seed}", name, json.dumps(found), file=sys.stderr, flush=True)


def main() -> None:
    given = options(
        __doc__, data=Path, link=["6mbit"], cores=[0.8, 0.4, 0.2, 0.1], batch=120, length=256, layers=3, width=96,
        steps=64, seeds=3, first_seed=0, pace=3, every=16, only=ARMS,
    )  # fmt: skip
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what was made is removed
    chosen = [name for name in given.only if name != "torchft" or find_spec("torchft")]
    if chosen != given.only:
        print("torchft is left out: pip install torchft-nightly", file=sys.stderr)
    numbers = {name: getattr(given, name) for name in Race.__dataclass_fields__ if name not in ("data", "seed")}
    race = Race(data=given.data.resolve(), **numbers)
    results = dict[str, list[dict[str, Any]]]()
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        Seed(race=replace(race, seed=seed), results=results).run(chosen, given.link)
    ideal, seconds = sum(race.cores) / max(race.cores), statistics.median(each["seconds"] for each in results["alone"])
    flops = ideal * 6 * race.num_weights() * race.steps * race.share * race.length / seconds
    report(
        "time_to_loss",
        **numbers,
        ideal=ideal,
        num_weights=race.num_weights(),
        gflops=flops / 1e9,
        real_gbit={rate: bits_per_second(rate) * LAN_FLOPS / flops / 1e9 for rate in given.link},
        times={
            name: statistics.median(row["times"] for row in rows) for name, rows in results.items() if name != "alone"
        },
        results=results,
    )


if __name__ == "__main__":
    main()
