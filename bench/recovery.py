"""How long a practice crew stands still after a fault: a worker killed, a worker frozen, the coordinator killed.

    python -m bench.recovery [--faults 10]

Trains `micro` in strict mode with three worker processes and plays the three faults in turn, each one `--faults` times,
when everybody has joined and some steps are done. Measured: the longest time without a commit from the fault to the
third commit behind it (the first may be of a round whose answers were all there). `p95` is the nearest rank: of ten
values the largest. `round_seconds` is an undisturbed round of the same run, which the targets allow on top.
"""

import argparse
import itertools
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from bench.common import report, summary
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.rundir import RunDir, last_rows, read_jsonl

TARGETS = {"worker killed": 2.0, "worker frozen": 8.0, "coordinator killed": 15.0}
NUM_WORKERS = 3
SPEEDS = "1.0,0.5,0.5"
STEPS_BEFORE, STEPS_WATCHED = 5, 3
PATIENCE_SECONDS, POLL_SECONDS = 120.0, 0.002
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


class Crew:
    """A crew that trains until it is told to stop, as one sees it from outside."""

    def __init__(self, run: RunDir, *, speeds: str = SPEEDS) -> None:
        self._run = run
        command = [sys.executable, "-m", "cuadrilla", "train", str(run.path), "--practice", speeds]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def coordinator(self) -> psutil.Process:
        (found,) = psutil.Process(self._process.pid).children()
        return found

    def worker(self, index: int) -> psutil.Process:
        """One of the worker processes that are there, the oldest first."""
        mark = " work worker-"
        found = [child for child in self.coordinator().children(recursive=True) if mark in " ".join(child.cmdline())]
        return sorted(found, key=lambda process: process.create_time())[index]

    def wait_for_joined(self, number: int) -> None:
        """Until so many have joined since the run began."""
        self._wait(lambda: self.num_joined() >= number)

    def num_joined(self) -> int:
        return sum(row["event"] == "joined" for row in read_jsonl(self._run.events))

    def commits(self, number: int) -> list[float]:
        """When each of the next commits was seen, on the monotonic clock."""
        return [self._next_commit(self._size()) for _ in range(number)]

    def _next_commit(self, seen: int) -> float:
        self._wait(lambda: self._size() > seen)
        return time.monotonic()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _size(self) -> int:
        return self._run.metrics.stat().st_size if self._run.metrics.exists() else 0

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise SystemExit(f"the crew does not come back: see {self._run.path}")
            time.sleep(POLL_SECONDS)


def longest_gap(began: float, commits: Sequence[float]) -> float:
    return max(later - earlier for earlier, later in itertools.pairwise([began, *commits]))


def measure(crew: Crew, *, num_faults: int) -> dict[str, list[float]]:
    """Seconds without a commit, by fault; and of undisturbed rounds."""
    found: dict[str, list[float]] = {kind: [] for kind in ("round", *TARGETS)}
    crew.wait_for_joined(NUM_WORKERS)
    for _ in range(num_faults):
        quiet = crew.commits(STEPS_BEFORE)
        found["round"] += [later - earlier for earlier, later in itertools.pairwise(quiet)]

        killed, began = crew.worker(0), time.monotonic()
        killed.kill()
        found["worker killed"].append(longest_gap(began, crew.commits(STEPS_WATCHED)))

        frozen, began = crew.worker(0), time.monotonic()
        frozen.suspend()
        found["worker frozen"].append(longest_gap(began, crew.commits(STEPS_WATCHED)))
        frozen.resume()  # its lease was shared: mostly it is back before anybody has missed it
        crew.commits(STEPS_BEFORE)

        joined = crew.num_joined()
        killed, began = crew.coordinator(), time.monotonic()
        killed.kill()
        found["coordinator killed"].append(longest_gap(began, crew.commits(STEPS_WATCHED)))
        crew.wait_for_joined(joined + NUM_WORKERS)
        print(*(f"{values[-1]:.2f} s {kind}" for kind, values in found.items()), sep=", ", file=sys.stderr)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest rank."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name))
        prepare(["cuentos:2000"], out=run.path / "data", options=PrepareOptions(vocab=512))
        run.run_file.write_text(RUN)
        crew = Crew(run)
        try:
            found = measure(crew, num_faults=arguments.faults)
        finally:
            crew.stop()
        versions = [row["version"] for row in last_rows(run.metrics)]
    rounds = summary(found.pop("round"))
    report(
        "recovery",
        steps=len(versions),
        load_average=os.getloadavg()[2],  # of the last quarter of an hour
        steps_lost=len(set(range(1, max(versions) + 1)) - set(versions)),
        round_seconds=rounds,
        faults={
            kind: {
                "p50": percentile(seconds, 0.5),
                "p95": percentile(seconds, 0.95),
                "target": TARGETS[kind],
                "met": percentile(seconds, 0.95) <= TARGETS[kind] + rounds["median"],
                "seconds": seconds,
            }
            for kind, seconds in found.items()
        },
    )


if __name__ == "__main__":
    main()
