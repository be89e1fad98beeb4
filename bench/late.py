"""What a worker costs a round that becomes ten times slower in the middle of its lease.

    python -m bench.late [--times 10] [--batch 64]

Trains `micro` in strict mode with three equal worker processes, and once in a while lets one of them run only a tenth
of the time (SIGSTOP and SIGCONT), from the middle of a round to the end of that round. Measured: how long that round
takes, as a multiple of the median of the undisturbed rounds just before; `late` counts leases that were shared. With
fewer cores than workers the others are faster meanwhile.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path

import psutil

from bench.common import report, summary
from bench.recovery import RUN, Crew
from cuadrilla.data.options import PrepareOptions
from cuadrilla.data.prepare import prepare
from cuadrilla.rundir import RunDir, last_rows, read_jsonl

TARGET = 2.5
ROUNDS_BEFORE = 6
"""The first of them is left out: the worker's new speed may not be known yet."""
PERIOD_SECONDS, SHARE = 0.05, 0.1


def slow_down(process: psutil.Process, until: threading.Event) -> None:
    while not until.is_set():
        process.suspend()
        until.wait((1 - SHARE) * PERIOD_SECONDS)
        process.resume()
        time.sleep(SHARE * PERIOD_SECONDS)


def measure(crew: Crew, *, times: int) -> tuple[list[float], list[float]]:
    """Multiples of an undisturbed round, and seconds of those."""
    multiples, quiet = [], []
    crew.wait_for_joined(3)
    for _ in range(times):
        commits = crew.commits(ROUNDS_BEFORE)
        rounds = [later - earlier for earlier, later in pairwise(commits[1:])]
        usual = statistics.median(rounds)
        time.sleep(usual / 2)
        over = threading.Event()
        slowed = threading.Thread(target=slow_down, args=(crew.worker(0), over))
        slowed.start()
        (ended,) = crew.commits(1)
        over.set()
        slowed.join()
        multiples.append((ended - commits[-1]) / usual)
        quiet += rounds
        print(f"{multiples[-1]:.2f} of {usual:.2f} s", file=sys.stderr)
        crew.commits(2)  # it is measured again
    return multiples, quiet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64, help="units a round")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        run = RunDir(Path(name))
        prepare(["cuentos:2000"], out=run.path / "data", options=PrepareOptions(vocab=512))
        run.run_file.write_text(RUN.replace("batch_sequences = 8", f"batch_sequences = {arguments.batch}"))
        crew = Crew(run, speeds="1.0,1.0,1.0")
        try:
            multiples, quiet = measure(crew, times=arguments.times)
        finally:
            crew.stop()
        late = sum(row["event"] == "late" for row in read_jsonl(run.events))
        steps = len(last_rows(run.metrics))
    report(
        "late",
        steps=steps,
        late=late,
        round_seconds=summary(quiet),
        multiples={**summary(multiples), "target": TARGET, "met": statistics.median(multiples) <= TARGET},
    )


if __name__ == "__main__":
    main()
