"""How soon an unequal crew has the loss that its best machine alone has at its end: real processes on slow links.

    python -m bench.time_to_loss DATA_FOLDER [--link 6mbit 30mbit] [--steps 64] [--seeds 3] [--only auto "windows of 8"]

Machines are network namespaces (`tests/lan.py`), each with one thread and a quota of CPU time (`--cores`). The best
machine also coordinates, within its quota. Every card sends and receives at most at the rate `--link`. The machine that
this was written on is about 175 times slower than an example LAN (46.5 TFLOP/s in all), so links are scaled down alike:
6mbit stands for 1 Gbit/s. `real_gbit`: the rate that a link stands for beside that LAN, by the FLOP/s measured here.
These are fewer than 1/175 of the LAN's, since the model is small. There is no delay, no packet loss and no Wi-Fi.

* `alone`: the best machine with its share of the global batch. The others train the same meanwhile, so that memory is
  as busy as in a crew. Runs of 1, 1.5 and 2 times the steps, each with its own schedule, are the scale of losses. The
  longer ones have no quota, which does not change their loss.
* `alone, whole batch`: the best machine with the global batch, like a run that no other machine joins.
* `exact, no limit`, `exact`, `windows of N`, `auto`: `cuadrilla up` and `cuadrilla join`, without and with slow links.
* `ddp`, `torchft`: see `bench/peers.py`; torchft only where it is installed.

`exact` and `ddp` have the loss of `exact, no limit`, so they train only `--pace` steps, until their speed is known.
torchft trains once without limits for its loss, and is timed over one of its windows of `--every` steps. Not timed are
steps before all machines have joined, the `SETTLE` rounds in which the coordinator measures its crew, evaluations and
checkpoints. `seconds`: the average of the timed steps, times all steps. `times`: the seconds that the best machine
alone trains for the crew's last loss, over the crew's `seconds`; ideal is the sum of the quotas over the largest.
`busy`: CPU time over quota, first of torchft's lighthouse, then of each machine. `planned`: the seconds that
`plan/predict.py` expects from the speed of each machine alone, over `seconds`. `--batch` (sequences of the crew's step)
must divide into equal parts, `--steps` into windows, `--width` into heads of 32. Needs root.
"""

import itertools
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

from bench.common import options, report, run_text
from bench.nodes import PORT, Node, Place, places
from cuadrilla.plan.predict import Crew, MachineSpec, predict_crew
from cuadrilla.rundir import RunDir, file_sha256, last_rows
from cuadrilla.runfile import resolve
from cuadrilla.train.measure import measure
from cuadrilla.train.setup import make_model, make_task
from tests.commands import joined, wait_for
from tests.lan import bits_per_second, ceiling_bytes_per_second
from tests.machines import ended, invite, up

LONGER = (1.0, 1.5, 2.0)
"""Lengths of the runs of the fastest machine alone, as multiples of the crew's time."""
NO_LIMIT = "10gbit"
LAN_FLOPS = 46.5e12
SETTLE = 3
EVALUATIONS = 4
EXACT, WHOLE = "exact, no limit", "alone, whole batch"
ARMS = [WHOLE, EXACT, "exact", "windows of 4", "windows of 8", "windows of 16", "ddp", "torchft"]
LOOK_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class Race:
    """What all train, and on which machines. `batch`: sequences in a step of the crew."""

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
        """Index of the fastest machine."""
        return max(range(len(self.cores)), key=self.cores.__getitem__)

    @property
    def share(self) -> int:
        """Share of the global batch that the fastest machine computes, in sequences."""
        return round(self.batch * max(self.cores) / sum(self.cores))

    def text(self, *, batch: int, steps: int) -> str:
        settings = {
            "run.seed": self.seed,
            "data.folder": self.data,
            "model.layers": self.layers,
            "model.heads": max(1, self.width // 32),
            "model.width": self.width,
            "model.context": self.length,
            "train.steps": steps,
            "train.batch_sequences": batch,
            "optim.kind": "muon",
            "sync.kind": "exact",
            "evaluate.sequences": 256,
            "evaluate.every_tokens": math.ceil(batch * self.length * steps / EVALUATIONS),
        }
        return run_text(settings)

    def num_weights(self) -> int:
        config = resolve(self.text(batch=self.batch, steps=self.steps)).config
        return sum(parameter.numel() for parameter in make_model(make_task(config, Path("/")), seed=0).parameters())


@dataclass(kw_only=True)
class Trained:
    """`seconds`: of all steps, at the speed of the timed ones. `workers`: in the last round. `timed`: the number of
    timed rounds; 0 means that the run was too short, and only its last round was timed."""

    loss: float
    seconds: float
    workers: int
    timed: int
    busy: list[float]


class Meter:
    """CPU time over quota of each machine, up to the last look before one of their processes ended."""

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
    """The machines of one training, which have no quotas yet, and a folder."""

    folder: Path
    lighthouse: Place
    coordinator: Place
    machines: Sequence[Place]
    cores: Sequence[float]

    def limit(self, number: int | None = None) -> None:
        """Limit the first `number` machines, or all of them, to their quotas."""
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
    """Result of a run, read from its metrics. `begun`: rounds before all had joined. `loss`: if another run has it."""
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
    """Result of the best machine alone; and its losses, by length of the run."""
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


def times_longer(loss: float, alone: Mapping[float, float]) -> float:
    """How many times longer the fastest machine alone trains for this loss. `alone`: its losses by length of the run.
    They are interpolated over the logarithm of time; beyond the first and the last run their line is extended."""
    points = sorted(alone.items())
    pairs = list(itertools.pairwise(points))
    outside = pairs[0 if loss > points[0][1] else -1]
    (t0, l0), (t1, l1) = next((pair for pair in pairs if pair[0][1] >= loss >= pair[1][1]), outside)
    return math.exp(math.log(t0) + (l0 - loss) / (l0 - l1) * (math.log(t1) - math.log(t0)))


def by_itself(race: Race, *, batch: int) -> tuple[Trained, list[float]]:
    """Train each machine by itself, all at once: result of the best one; and the tokens per second of each."""
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
    """Seconds of the run as planned. `rates`: each machine's tokens per second, whole batch. `steps`: of a round."""
    config = resolve(race.text(batch=race.batch, steps=race.steps)).config
    work, most = measure(config, Path("/")).work, ceiling_bytes_per_second(rate) or math.inf
    tokens = race.batch * race.length
    machines = [
        MachineSpec(
            name=str(number),
            tokens_per_second=each * (tokens + work.step_cost_tokens) / tokens,
            bytes_per_second=math.inf if number == race.best else most,
        )
        for number, each in enumerate(rates)
    ]
    crew = predict_crew(Crew(machines=machines, bytes_per_second=most), work, steps=steps, alone=max(rates))
    return race.steps * tokens / crew.tokens_per_second


def crew(race: Race, settings: Sequence[str], *, rate: str, loss: float | None = None) -> Trained:
    """Train a crew. Where the `loss` is known from another run, stop as soon as the speed is known."""
    with ground(race, rate=rate) as there:
        run = there.run("run", race.text(batch=race.batch, steps=race.steps))
        lead = up(there.coordinator, run, PORT, *(f"--set={each}" for each in settings))
        says = invite(there.coordinator, "--uses", str(len(there.machines)))
        for number, machine in enumerate(there.machines, start=1):
            contents = machine.home / "cache" / "contents"  # fetching the data is not measured
            contents.mkdir(parents=True)
            for path in filter(Path.is_file, race.data.iterdir()):
                (contents / file_sha256(path)).write_bytes(path.read_bytes())
            machine.start("join", "--name", f"m{number}", "--threads", "1", says=says)
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
    """Train DDP or torchft. `steps`: how many steps; the schedule is always that of the whole run."""
    with ground(race, rate=rate) as there, ExitStack() as stack:

        def started(part: str, machine: Place, **specification: Any) -> Node:
            node = Node(machine.prefix, part=f"bench.peers:{part}", **specification)
            stack.callback(node.close)
            return node

        lighthouse = f"{there.lighthouse.address}:{PORT}"
        if kind == "torchft":
            started("Lighthouse", there.lighthouse, bind=lighthouse, replicas=len(there.machines)).answer()
        addresses, config = [each.address for each in there.machines], race.text(batch=race.batch, steps=race.steps)
        whole = {"config": config, "addresses": addresses, "lighthouse": f"http://{lighthouse}", "every": race.every}
        ranks = [
            started("Rank", machine, kind=kind, rank=rank, steps=steps, **whole)
            for rank, machine in enumerate(there.machines)
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
    """The trainings with one seed. `known`: their results, by name. `rates`: tokens per second of each machine alone
    with the whole batch."""

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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that namespaces and groups are removed
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
