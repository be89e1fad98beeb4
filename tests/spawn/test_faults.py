"""Scripted faults at a step and a phase, inside real processes and from outside: the weights stay the same.

`draw` makes a script from a seed. Most faults occur inside workers and the coordinator, in their task's code
(`tests/faulty_task.py`). Phases that this code cannot see are left to the `Watcher` of this file: a checkpoint that is
being written, a record of the journal, a row of the metrics. The watcher also resumes frozen processes. Until it has
acted, one unit of the next step holds the crew back.
"""

import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

import psutil
import pytest

from cuadrilla.data.order import sequence_indices
from cuadrilla.rundir import RunDir, last_rows, read_jsonl
from tests import faulty_task
from tests.commands import RUN, coordinator, events, reached, start, train, wait_for
from tests.faulty_task import SPACING
from tests.networks import memory_limit
from tests.runs import final_sha256

STEPS, BATCH, UNIT = 120, 64, 8
STRICT = ("--set", "sync.strict=true", "--set", f"checkpoint.every_steps={SPACING}",
          "--set", f"evaluate.every_tokens={SPACING * BATCH}")  # fmt: skip
WINDOW = 2
WINDOWS = ("--set", "sync.kind=windows", "--set", f"sync.steps={WINDOW}", "--set", "sync.lanes=[1.0, 0.5, 0.25]")
MISSED_SOON = ("--set", "engine.lost_after_seconds=2.5")
INSIDE, OBSERVED = ("evaluate", "val data"), ("metrics", "checkpoint", "journal")
"""Phases of the coordinator that reach the user's code, and phases that are observed from outside."""
WORKERS_PHASES = ("data", "forward", "backward")
CEILING_SECONDS = 500
LITTLE_BYTES = 300 * 2**20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`at`: index of an example, or a step. `until`: the fault that ends a hold. `seconds`: of a frozen coordinator."""

    name: str
    phase: str
    at: int
    action: str
    until: str = ""
    seconds: float = 0.0


PRACTICE, DEATHS = ("--practice", "1.0,0.8,0.6", *MISSED_SOON), 2
"""Dead workers are not started again, so of three only two may die while the same coordinator process lives."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How many faults there are, and how many of these kinds. The others are deaths of workers, NaN and slow units."""

    faults: int
    coordinator_kills: int
    coordinator_freezes: int
    worker_freezes: int


def draw(seed: int, counts: Counts) -> list[Fault]:
    """Draw a script. At most one fault per step; per coordinator process DEATHS dead workers and one NaN at most."""
    chance = random.Random(seed)
    num_kills, num_freezes = counts.coordinator_kills, counts.coordinator_freezes
    steps = chance.sample(range(SPACING, STEPS, SPACING), num_kills + num_freezes)
    phases = chance.sample(INSIDE + OBSERVED, num_kills)
    script = [fault for step, phase in zip(steps, phases, strict=False) for fault in kill_coordinator(step, phase)]
    script += [
        Fault(name=f"{step:03d} freeze coordinator", phase=chance.choice(INSIDE), at=step, action="freeze",
              seconds=chance.uniform(0.5, 7.0))
        for step in steps[num_kills:]
    ]  # fmt: skip
    kills = sorted(steps[:num_kills])
    pools = [["kill"] * DEATHS + ["nan", "slow"] for _ in range(num_kills + 1)]
    freezes = ["freeze"] * counts.worker_freezes
    taken = {step + behind for step in steps for behind in (0, 1)}
    free = [step for step in range(2, STEPS + 1) if step not in taken]
    for step in chance.sample(free, counts.faults - len(steps)):
        pool = pools[sum(step > kill for kill in kills)]
        action = chance.choice([*pool, *freezes] or ["slow"])
        for supply in (pool, freezes):
            if action in supply:
                supply.remove(action)
        script.append(suffer(step, chance, action=action))
    return sorted(script, key=lambda fault: fault.name)


def kill_coordinator(step: int, phase: str) -> list[Fault]:
    kill = Fault(name=f"{step:03d} kill coordinator", phase=phase, at=step, action="kill")
    if phase in INSIDE:
        return [kill]
    return [kill, Fault(name=f"{step:03d} hold", phase="data", at=example(step + 1, 0), action="hold", until=kill.name)]


def suffer(step: int, chance: random.Random, *, action: str) -> Fault:
    """A fault of whichever worker gets a certain unit of the step."""
    phases = ("forward", "backward") if action == "nan" else WORKERS_PHASES
    at = example(step, chance.randrange(BATCH // UNIT))
    return Fault(name=f"{step:03d} {action}", phase=chance.choice(phases), at=at, action=action)


def example(step: int, unit: int) -> int:
    """The first example of a unit of a step."""
    assert STEPS * BATCH <= faulty_task.NUM_EXAMPLES, "an example would come twice"
    start = (step - 1) * BATCH + unit * UNIT
    [index] = sequence_indices(0, start=start, count=1, length=faulty_task.NUM_EXAMPLES)
    return int(index)


@dataclass(kw_only=True)
class Watcher:
    """Kills the coordinator when a phase is observed, and resumes frozen processes."""

    run: RunDir
    crew: "subprocess.Popen[str]"
    script: list[Fault]
    woken: set[str] = field(default_factory=set)

    def ended(self) -> bool:
        """Kill and resume what is due now. Returns whether the crew has ended."""
        for fault in self.script:
            marker = self.run.path / "played" / fault.name
            if fault.phase in OBSERVED and not marker.exists() and self._sees(fault):
                coordinator(self.crew).kill()
                marker.touch()  # after the kill, since this lets the next step go on
            elif fault.action == "freeze" and fault.name not in self.woken:
                self._wake(fault, marker)
        return self.crew.poll() is not None

    def wake_all(self) -> None:
        """Resume all frozen processes after a failure, so that they can end."""
        for fault in self.script:
            marker = self.run.path / "played" / fault.name
            if fault.action == "freeze" and fault.name not in self.woken and marker.exists():
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(int(marker.read_text())).resume()

    def _sees(self, fault: Fault) -> bool:
        name = f"v{fault.at:08d}"
        match fault.phase:
            case "metrics":
                return any(row["version"] == fault.at for row in read_jsonl(self.run.metrics))
            case "journal":
                return (self.run.journal / f"{name}.step").exists()
            case _:  # its temporary folder may have been renamed by now
                return any(self.run.checkpoints.glob(f".{name}.*.tmp")) or (self.run.checkpoints / name).exists()

    def _wake(self, fault: Fault, marker: Path) -> None:
        if not marker.exists() or not marker.read_text():
            return
        try:
            frozen = psutil.Process(int(marker.read_text()))
            if frozen.status() == psutil.STATUS_STOPPED and self._may_wake(fault, marker):
                frozen.resume()
                self.woken.add(fault.name)
        except psutil.NoSuchProcess:  # it was killed meanwhile
            self.woken.add(fault.name)

    def _may_wake(self, fault: Fault, marker: Path) -> bool:
        """A worker may be resumed once it was evicted, the coordinator after `seconds`."""
        since = marker.stat().st_mtime
        if fault.phase in INSIDE:
            return time.time() - since >= fault.seconds
        return any(row["event"] == "evicted" and row["time"] >= since for row in read_jsonl(self.run.events))


def make_run(folder: Path, script: list[Fault]) -> RunDir:
    folder.mkdir()
    shutil.copy(faulty_task.__file__, folder / "task.py")
    (folder / "run.toml").write_text(RUN.format(steps=STEPS))
    if script:
        (folder / "script.json").write_text(json.dumps([asdict(fault) for fault in script]))
        (folder / "played").mkdir()
    return RunDir(folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The weights of one strict worker in one process."""

    @cache
    def trained(*options: str) -> str:
        run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", [])
        assert train(run, *STRICT, *options).returncode == 0
        return final_sha256(run.path)

    return trained


IN_SHORT = Counts(faults=6, coordinator_kills=1, coordinator_freezes=0, worker_freezes=1)
IN_CI = Counts(faults=20, coordinator_kills=3, coordinator_freezes=1, worker_freezes=2)
IN_SOAK = Counts(faults=25, coordinator_kills=5, coordinator_freezes=2, worker_freezes=4)
SEED_IN_SHORT, SEED_IN_CI, SEEDS_IN_SOAK = 4, 5, range(10, 18)


@pytest.mark.timeout(CEILING_SECONDS + 100)
@pytest.mark.parametrize(
    ("options", "seed", "counts"),
    [
        pytest.param((), SEED_IN_SHORT, IN_SHORT, id=f"exact {SEED_IN_SHORT}"),
        pytest.param(WINDOWS, SEED_IN_SHORT, IN_SHORT, id=f"windows {SEED_IN_SHORT}", marks=pytest.mark.thorough),
        pytest.param((), SEED_IN_CI, IN_CI, id=f"exact {SEED_IN_CI}", marks=pytest.mark.thorough),
        *(
            pytest.param(options, seed, IN_SOAK, id=f"{name} {seed}", marks=pytest.mark.soak)
            for name, options in (("exact", ()), ("windows", WINDOWS))
            for seed in SEEDS_IN_SOAK
        ),
    ],
)
def test_scripted_faults_change_nothing(
    options: tuple[str, ...], seed: int, counts: Counts, tmp_path: Path, undisturbed: Callable[..., str]
) -> None:
    """6 faults in `make test`; 26 more in `make test-all`, 200 of each strategy in `make soak`."""
    script = draw(seed, counts)
    print(f"seed {seed}:", *script, sep="\n")  # pytest shows it if the test fails
    run = make_run(tmp_path / "run", script)
    said = tmp_path / "said.txt"
    with open(said, "w") as talk:
        crew = start(run, *STRICT, *options, *PRACTICE, stderr=talk)
        watcher = Watcher(run=run, crew=crew, script=script)
        try:
            wait_for(watcher.ended, seconds=CEILING_SECONDS)
        finally:
            watcher.wake_all()
            crew.kill()
            crew.wait()
    assert crew.returncode == 0, said.read_text()
    assert "Traceback" not in said.read_text()
    played = sorted(path.name for path in (run.path / "played").iterdir())
    assert played == [fault.name for fault in script if fault.action != "hold"]
    assert len(played) == counts.faults
    restarts = [row for row in read_jsonl(run.events) if row["event"] == "coordinator restarted"]
    assert len(restarts) == counts.coordinator_kills
    steps = WINDOW if options else 1
    assert [row["version"] for row in last_rows(run.metrics)] == list(range(steps, STEPS + 1, steps))
    assert final_sha256(run.path) == undisturbed(*options)


@pytest.mark.thorough
def test_a_worker_without_memory_costs_nothing_else(tmp_path: Path, undisturbed: Callable[..., str]) -> None:
    """The kernel kills one worker. The allocator of another fails; it leaves, since a strict unit cannot be divided."""
    script = [
        Fault(name="limited", phase="data", at=example(10, 0), action="hold", until="limit"),
        Fault(name="hog", phase="forward", at=example(20, 0), action="hog"),
        Fault(name="leak", phase="backward", at=example(40, 0), action="leak"),
    ]
    run = make_run(tmp_path / "run", script)
    with ExitStack() as stack:
        # A group for each, since the kernel may kill a second worker of a group before the first one's pages are free.
        groups = [stack.enter_context(memory_limit(LITTLE_BYTES, name=f"memory{n}")) for n in range(3)]
        talk = stack.enter_context(open(tmp_path / "said.txt", "w"))
        crew = start(run, *STRICT, "--practice", "1.0,1.0,1.0", stderr=talk)
        try:
            wait_for(reached(run, 9), crew)
            for group, child in zip(groups, coordinator(crew).children(), strict=True):
                group.write_text(str(child.pid))
            (run.path / "played" / "limit").touch()
            wait_for(lambda: crew.poll() is not None, seconds=CEILING_SECONDS)
        finally:
            crew.kill()
            crew.wait()
    assert crew.returncode == 0, (tmp_path / "said.txt").read_text()
    # Deaths that are noticed at the same time are reported in the order of names.
    killed, left = sorted(events(run, "died"), key=lambda row: "signal 9" not in row["reason"])
    assert "signal 9" in killed["reason"]
    assert "was there enough memory?" in killed["reason"]
    assert "out of memory: a unit does not fit" in left["reason"]
    assert "(exit code 8)" in left["reason"]
    assert killed["worker"] != left["worker"]
    assert [row["version"] for row in last_rows(run.metrics)] == list(range(1, STEPS + 1))
    assert final_sha256(run.path) == undisturbed()
