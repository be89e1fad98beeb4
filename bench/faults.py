"""How much of its speed a crew keeps when there is a fault every minute, and how long it makes no step after one.

    python -m bench.faults [--faults 3] [--minutes 1]

A coordinator and three workers train `micro` in strict mode on a network of their own. Each worker is limited to 0.4 of
a core, so that none gets more while another is away. The steps are so large that computing takes most of their time.
The measurement is `--faults` cycles. A cycle has a stretch of `--minutes` without a fault, and one for each fault,
which comes at its beginning.

    worker killed        the same `cuadrilla join` is started again at once, as a service would do
    worker frozen        for a sixth of the stretch
    worker cut off       its network cable is pulled for a sixth of the stretch
    coordinator killed   its parent process starts it again

`goodput`: the steps of a stretch over the median of the undisturbed ones. All steps count, since no committed step is
lost (`steps_lost`). A worker that is away for a sixth of a stretch takes 1/18 of the crew's power with it, so no crew
could reach more than 0.944 then. `gap`: the longest time without a commit in a stretch, in seconds. Its targets allow
`round_seconds` on top, the time of an undisturbed round. Needs root, for network namespaces and control groups.
"""

import itertools
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.common import options, percentile, report, run_text, stories
from bench.nodes import PORT, Place, places
from cuadrilla.rundir import RunDir, last_rows
from tests.commands import coordinator, goes_on, joined, newest_version, wait_for
from tests.lan import CARD, ip
from tests.machines import invite, up

GOODPUT = {"worker killed": 0.92, "worker frozen": 0.92, "worker cut off": 0.92, "coordinator killed": 0.85}
GAP_SECONDS = {"worker killed": 2.0, "worker frozen": 8.0, "worker cut off": 8.0, "coordinator killed": 15.0}
NAMES = ("ana", "eva", "luis")
CORES = 0.4
AWAY = 1 / 6
LOOK_SECONDS = 0.01
Stretch = tuple[int, float]
"""Steps, and the longest time without a commit."""
RUN = {
    "data.folder": "data",
    "model.preset": "micro",
    "model.context": 64,
    "train.steps": 1_000_000,
    "train.batch_sequences": 96,
    "sync.strict": True,
}


def cause(kind: str, worker: Place, crew: "subprocess.Popen[str]") -> Callable[[], object]:
    """Cause a fault. What is returned ends it."""
    match kind:
        case "worker killed":
            worker.stop()
            worker.start("join", "--threads", "1")
        case "coordinator killed":
            coordinator(crew).kill()
        case "worker frozen":
            worker.started[-1].send_signal(signal.SIGSTOP)
            return partial(worker.started[-1].send_signal, signal.SIGCONT)
        case "worker cut off":
            cable = ("-n", worker.member.namespace, "link", "set", CARD)
            ip(*cable, "down")
            return partial(ip, *cable, "up")
    return lambda: None


def commits(run: RunDir, *, until: float) -> list[float]:
    """The times at which commits are seen until then, on the monotonic clock."""
    times, size = [], run.metrics.stat().st_size
    while time.monotonic() < until:
        time.sleep(LOOK_SECONDS)
        if (now := run.metrics.stat().st_size) > size:
            times.append(time.monotonic())
            size = now
    return times


def stretch(kind: str, worker: Place, crew: "subprocess.Popen[str]", run: RunDir, *, seconds: float) -> Stretch:
    """A stretch of `seconds`, which begins with a fault of this kind."""
    before, began = newest_version(run), time.monotonic()
    end_fault = cause(kind, worker, crew)
    times = [began, *commits(run, until=began + seconds * AWAY)]
    end_fault()
    times += [*commits(run, until=began + seconds), time.monotonic()]
    steps = newest_version(run) - before
    gap = max(later - earlier for earlier, later in itertools.pairwise(times))
    print(f"{steps} steps, at most {gap:.2f} s between them: {kind}", file=sys.stderr)
    return steps, gap


def measure(folder: Path, *, faults: int, seconds: float) -> tuple[dict[str, list[Stretch]], int]:
    """The stretches of each kind, and the number of steps that are missing in the metrics."""
    run = RunDir(folder / "run")
    stories(run.path / "data", number=2000)
    run.run_file.write_text(run_text(RUN))
    found: dict[str, list[Stretch]] = {kind: [] for kind in ("nothing", *GOODPUT)}
    with places(folder, 1 + len(NAMES), rate="1gbit") as (lead, *workers):
        for place in (lead, *workers):
            assert place.share is not None
            place.share.limit(2 * CORES if place is lead else CORES)
        crew = up(lead, run, PORT)
        says = invite(lead, "--uses", str(len(workers)))
        for name, worker in zip(NAMES, workers, strict=True):
            worker.start("join", "--name", name, "--threads", "1", says=says)
        wait_for(joined(run, len(workers)), crew)
        wait_for(goes_on(run), crew)
        for index, kind in itertools.product(range(faults), found):
            found[kind].append(stretch(kind, workers[index % len(workers)], crew, run, seconds=seconds))
    versions = {row["version"] for row in last_rows(run.metrics)}
    return found, max(versions) - len(versions)


def main() -> None:
    given = options(__doc__, faults=3, minutes=1.0)
    print(f"about {1 + given.faults * given.minutes * (1 + len(GOODPUT)):.0f} minutes", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        stretches, steps_lost = measure(Path(name), faults=given.faults, seconds=60 * given.minutes)
    steps = {kind: [made for made, _ in each] for kind, each in stretches.items()}
    gaps = {kind: [gap for _, gap in each] for kind, each in stretches.items()}
    undisturbed = max(1, statistics.median(steps["nothing"]))
    round_seconds = 60 * given.minutes / undisturbed
    report(
        "faults",
        **vars(given),
        undisturbed={"steps": steps["nothing"], "gap": gaps["nothing"]},
        round_seconds=round_seconds,
        steps_lost=steps_lost,
        goodput={
            kind: {"median": statistics.median(steps[kind]) / undisturbed, "steps": steps[kind], "target": target}
            for kind, target in GOODPUT.items()
        },
        gap={
            kind: {
                "median": statistics.median(gaps[kind]),
                "p95": percentile(gaps[kind], 0.95),
                "target": target,
                "met": percentile(gaps[kind], 0.95) <= target + round_seconds,
                "seconds": gaps[kind],
            }
            for kind, target in GAP_SECONDS.items()
        },
    )


if __name__ == "__main__":
    main()
