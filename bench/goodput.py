"""How much of its speed a crew keeps when there is a fault every minute.

    python -m bench.goodput [--minutes 3] [--seconds 60]

A coordinator and three workers train `micro` in strict mode on a network of their own. Each worker is limited to 0.4 of
a core, so that none gets more while another is away. The steps are so large that computing takes most of their time.
The measurement is `--minutes` cycles. A cycle has a stretch of `--seconds` without a fault, and one for each fault,
which comes at its beginning. Goodput is the steps of a stretch over the median of the undisturbed ones. All steps
count, since no committed step is lost. A worker that is away for a sixth of a stretch takes 1/18 of the crew's power
with it, so no crew could reach more than 0.944 then.

    worker killed        the same `cuadrilla join` is started again at once, as a service would do
    worker frozen        for a sixth of the stretch
    worker cut off       its network cable is pulled for a sixth of the stretch
    coordinator killed   its parent process starts it again

Needs root, for network namespaces and control groups.
"""

import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bench.common import options, report
from bench.lan import CARD, ip
from bench.nodes import PORT, Place, places
from bench.recovery import micro_run
from cuadrilla.rundir import RunDir
from tests.commands import coordinator, goes_on, joined, newest_version, wait_for
from tests.machines import invite, up

TARGETS = {"worker killed": 0.92, "worker frozen": 0.92, "worker cut off": 0.92, "coordinator killed": 0.85}
NAMES = ("ana", "eva", "luis")
CORES = 0.4
AWAY = 1 / 6


def stretch(kind: str, worker: Place, crew: "subprocess.Popen[str]", run: RunDir, *, seconds: float) -> int:
    """Steps that are committed in a stretch of `seconds`, which begins with a fault of this kind."""
    before, until = newest_version(run), time.monotonic() + seconds
    match kind:
        case "worker killed":
            worker.stop()
            worker.start("join", "--threads", "1")
        case "coordinator killed":
            coordinator(crew).kill()
        case "worker frozen":
            worker.started[-1].send_signal(signal.SIGSTOP)
            time.sleep(seconds * AWAY)
            worker.started[-1].send_signal(signal.SIGCONT)
        case "worker cut off":
            ip("-n", worker.member.namespace, "link", "set", CARD, "down")
            time.sleep(seconds * AWAY)
            ip("-n", worker.member.namespace, "link", "set", CARD, "up")
    time.sleep(max(0.0, until - time.monotonic()))
    return newest_version(run) - before


def main() -> None:
    given = options(__doc__, minutes=3, seconds=60.0)
    minutes = given.minutes * (1 + len(TARGETS)) * given.seconds / 60
    print(f"about {1 + minutes:.0f} minutes", file=sys.stderr)
    steps: defaultdict[str, list[int]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, places(Path(name), 1 + len(NAMES), rate="1gbit") as (lead, *workers):
        run = micro_run(Path(name) / "run")
        for place in (lead, *workers):
            assert place.share is not None
            place.share.limit(2 * CORES if place is lead else CORES)
        crew = up(lead, run, PORT, "--set", "train.batch_sequences=96")
        says = invite(lead, "--uses", str(len(workers)))
        for name, worker in zip(NAMES, workers, strict=True):
            worker.start("join", "--name", name, "--threads", "1", says=says)
        wait_for(joined(run, len(workers)), crew)
        wait_for(goes_on(run), crew)
        for index in range(given.minutes):
            for kind in ("nothing", *TARGETS):
                worker = workers[index % len(workers)]
                steps[kind].append(stretch(kind, worker, crew, run, seconds=given.seconds))
                print(f"{steps[kind][-1]} steps: {kind}", file=sys.stderr)
    undisturbed = statistics.median(steps["nothing"])
    report(
        "goodput",
        seconds=given.seconds,
        undisturbed=steps["nothing"],
        goodput={
            kind: {
                "median": statistics.median(steps[kind]) / undisturbed if undisturbed else None,
                "steps": steps[kind],
                "target": target,
            }
            for kind, target in TARGETS.items()
        },
    )


if __name__ == "__main__":
    main()
