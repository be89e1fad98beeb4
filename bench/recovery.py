"""How long a practice crew makes no step after a fault: a worker killed, a worker frozen, the coordinator killed.

    python -m bench.recovery [--faults 10]

Trains `micro` in strict mode with three worker processes. When all have joined and some steps are done, it causes the
three faults in turn, each `--faults` times. Measured is the longest time without a commit, from the fault to the third
commit after it; the first may complete a round whose answers had all arrived. `p95` is the nearest rank: of ten values
the largest. `round_seconds` are undisturbed rounds of the same run; the targets allow their median on top.
"""

import itertools
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.common import options, report, stories, summary
from cuadrilla.rundir import RunDir, last_rows
from tests.commands import coordinator, events, joined, start, wait_for

TARGETS = {"worker killed": 2.0, "worker frozen": 8.0, "coordinator killed": 15.0}
NUM_WORKERS = 3
STEPS_BEFORE, STEPS_WATCHED = 5, 3
RUN = """
[data]
folder = "data"
[model]
preset = "micro"
context = 64
[train]
steps = 1_000_000
batch_sequences = 8
unit_sequences = 1
precision = "fp32"
threads = 1
[sync]
strict = true
[optim]
kind = "adamw"
[sample]
tokens = 0
[evaluate]
every_tokens = 1_000_000_000
"""


def micro_run(folder: Path) -> RunDir:
    """A run that trains until it is stopped."""
    run = RunDir(folder)
    stories(folder / "data", number=2000)
    run.run_file.write_text(RUN)
    return run


class Crew:
    """A practice crew, observed from outside."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.process = start(run, "--practice", "1.0,0.5,0.5", stderr=subprocess.DEVNULL)

    def worker(self) -> psutil.Process:
        """The oldest of the worker processes that run."""
        everyone = coordinator(self.process).children(recursive=True)
        found = [child for child in everyone if " work worker-" in " ".join(child.cmdline())]
        return min(found, key=lambda process: process.create_time())

    def commits(self, number: int) -> list[float]:
        """The times at which this number of further commits is seen, on the monotonic clock."""
        return [self._next_commit(self._size()) for _ in range(number)]

    def longest_gap(self, began: float) -> float:
        return max(later - earlier for earlier, later in itertools.pairwise([began, *self.commits(STEPS_WATCHED)]))

    def _next_commit(self, seen: int) -> float:
        wait_for(lambda: self._size() > seen, self.process, every_seconds=0.002)
        return time.monotonic()

    def _size(self) -> int:
        return self.run.metrics.stat().st_size if self.run.metrics.exists() else 0


def measure(crew: Crew, *, num_faults: int) -> dict[str, list[float]]:
    """Seconds without a commit for each kind of fault, and the seconds of undisturbed rounds."""
    found: dict[str, list[float]] = {kind: [] for kind in ("round", *TARGETS)}
    wait_for(joined(crew.run, NUM_WORKERS), crew.process)
    for _ in range(num_faults):
        quiet = crew.commits(STEPS_BEFORE)
        found["round"] += [later - earlier for earlier, later in itertools.pairwise(quiet)]

        killed, began = crew.worker(), time.monotonic()
        killed.kill()
        found["worker killed"].append(crew.longest_gap(began))

        frozen, began = crew.worker(), time.monotonic()
        frozen.suspend()
        found["worker frozen"].append(crew.longest_gap(began))
        frozen.resume()  # others have its lease; it is mostly back before it counts as lost
        crew.commits(STEPS_BEFORE)

        before, killed, began = len(events(crew.run, "joined")), coordinator(crew.process), time.monotonic()
        killed.kill()
        found["coordinator killed"].append(crew.longest_gap(began))
        wait_for(joined(crew.run, before + NUM_WORKERS), crew.process)
        print(*(f"{values[-1]:.2f} s {kind}" for kind, values in found.items()), sep=", ", file=sys.stderr)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[math.ceil(share * len(values)) - 1]


def main() -> None:
    given = options(__doc__, faults=10)
    with tempfile.TemporaryDirectory() as name:
        crew = Crew(micro_run(Path(name)))
        try:
            found = measure(crew, num_faults=given.faults)
        finally:
            crew.process.terminate()
            crew.process.wait()
        versions = [row["version"] for row in last_rows(crew.run.metrics)]
    rounds = found.pop("round")
    report(
        "recovery",
        steps=len(versions),
        steps_lost=len(set(range(1, max(versions) + 1)) - set(versions)),
        round_seconds=summary(rounds),
        faults={
            kind: {
                "p50": percentile(seconds, 0.5),
                "p95": percentile(seconds, 0.95),
                "target": TARGETS[kind],
                "met": percentile(seconds, 0.95) <= TARGETS[kind] + statistics.median(rounds),
                "seconds": seconds,
            }
            for kind, seconds in found.items()
        },
    )


if __name__ == "__main__":
    main()
