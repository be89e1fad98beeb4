"""How much of its speed a crew keeps when something breaks every minute.

    python -m bench.goodput [--minutes 3] [--seconds 60]

A coordinator and three workers (`micro`, strict) on a network of their own, each worker with 0.4 of a core, so that
nobody has more while another is away; the steps are so large that computing is most of their time. Stretches of
`--seconds` follow each other: one undisturbed, then one for each fault, which comes at its beginning; then again,
`--minutes` times each. Goodput is the steps of a stretch beside the median of the undisturbed ones; committed steps are
never lost, so these are all steps there are. A worker that is away for a sixth of the time takes 1/18 of the crew's
power with it: no crew could do better than 0.944 then.

    worker killed        its `cuadrilla join` is typed again at once, as a service would do
    worker frozen        for a sixth of the stretch
    worker cut off       its cable is pulled for a sixth of the stretch
    coordinator killed   its parent starts it again

Needs root: namespaces and control groups.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from bench.common import report
from bench.lan import CARD, Member, ip, lan
from bench.limits import Share, shares
from bench.recovery import RUN
from cuadrilla.data.prepare import PrepareOptions, prepare
from cuadrilla.rundir import RunDir, last_rows, read_jsonl

TARGETS = {"worker killed": 0.92, "worker frozen": 0.92, "worker cut off": 0.92, "coordinator killed": 0.85}
NAMES = ("ana", "eva", "luis")
CORES = 0.4
AWAY = 1 / 6
LARGE_STEPS = "train.batch_sequences=96"
PORT = 47470
PATIENCE_SECONDS = 180.0


class Machine:
    """A member of the network with its share of the processor and a home folder. `talk`: what its processes say."""

    def __init__(self, member: Member, share: Share | None, home: Path, *, talk: Path | None = None) -> None:
        self.member, self.share, self.home = member, share, home
        self.prefix = (*(share.prefix if share else ()), *member.prefix)
        self.environment = {**os.environ, "CUADRILLA_HOME": str(home), "OMP_NUM_THREADS": "1"}
        self.talk = talk or Path(os.devnull)
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str, says: str = "") -> None:
        command = [*self.prefix, sys.executable, "-m", "cuadrilla", *arguments]
        with self.talk.open("a") as talk:
            self.process = subprocess.Popen(
                command, env=self.environment, text=True, stdin=subprocess.PIPE, stdout=talk, stderr=talk
            )
        assert self.process.stdin is not None
        self.process.stdin.write(says)
        self.process.stdin.close()

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def ask(self, *arguments: str) -> str:
        command = [*self.member.prefix, sys.executable, "-m", "cuadrilla", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True).stdout

    def coordinator(self) -> psutil.Process:
        assert self.process is not None
        (found,) = psutil.Process(self.process.pid).children()
        return found

    def end(self) -> None:
        if self.process is None:
            return
        with_children = [psutil.Process(self.process.pid)] if psutil.pid_exists(self.process.pid) else []
        with_children = [*(child for one in with_children for child in one.children(recursive=True)), *with_children]
        for process in with_children:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()
        psutil.wait_procs(with_children, timeout=PATIENCE_SECONDS)  # or their control group could not be removed


class Crew:
    def __init__(self, run: RunDir, coordinator: Machine, workers: Sequence[Machine]) -> None:
        self.run, self.coordinator, self.workers = run, coordinator, workers

    def open(self) -> None:
        address = f"{self.coordinator.member.address}:{PORT}"
        self.coordinator.start(
            "up", str(self.run.path), "--listen", address, "--set", "engine.workers=[]", "--set", LARGE_STEPS
        )
        wait_for(lambda: (self.coordinator.home / "crew" / "open.json").exists())
        invite = self.coordinator.ask("invite", "--uses", str(len(self.workers)))
        wait_for(lambda: not list((self.coordinator.home / "crew" / "invites").glob("*.json")))  # it has taken it
        for name, worker in zip(NAMES, self.workers, strict=False):
            worker.start("join", "--name", name, "--threads", "1", says=invite)
        wait_for(lambda: self.joined() >= len(self.workers))
        begun = self.steps()
        wait_for(lambda: self.steps() >= begun + 5)

    def joined(self) -> int:
        return sum(row["event"] == "joined" for row in read_jsonl(self.run.events))

    def steps(self) -> int:
        rows = last_rows(self.run.metrics)
        return int(rows[-1]["version"]) if rows else 0

    @contextmanager
    def fault(self, kind: str, worker: Machine, *, seconds: float) -> Iterator[None]:
        """What happens at the beginning of a stretch, and its end after a part of it."""
        assert worker.process is not None
        match kind:
            case "worker killed":
                worker.end()
                worker.start("join", "--threads", "1")
            case "coordinator killed":
                self.coordinator.coordinator().kill()
            case "worker frozen":
                worker.process.send_signal(signal.SIGSTOP)
            case "worker cut off":
                ip("-n", worker.member.namespace, "link", "set", CARD, "down")
        time.sleep(seconds * AWAY)
        if kind == "worker frozen":
            worker.process.send_signal(signal.SIGCONT)
        elif kind == "worker cut off":
            ip("-n", worker.member.namespace, "link", "set", CARD, "up")
        yield

    def stretch(self, kind: str, worker: Machine, *, seconds: float) -> int:
        """Steps in so many seconds."""
        before, until = self.steps(), time.monotonic() + seconds
        with self.fault(kind, worker, seconds=seconds):
            time.sleep(max(0.0, until - time.monotonic()))
        return self.steps() - before


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the crew does not come together")
        time.sleep(0.1)


def measure(crew: Crew, *, times: int, seconds: float) -> dict[str, list[int]]:
    """Steps of each stretch, by what happened in it."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for index in range(times):
        for kind in ("nothing", *TARGETS):
            worker = crew.workers[index % len(crew.workers)]
            found[kind].append(crew.stretch(kind, worker, seconds=seconds))
            print(f"{found[kind][-1]} steps: {kind}", file=sys.stderr)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=int, default=3, help="stretches of each kind")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of a stretch")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        raise SystemExit("needs root, to make network namespaces and control groups")
    minutes = arguments.minutes * (1 + len(TARGETS)) * arguments.seconds / 60
    print(f"about {1 + minutes:.0f} minutes", file=sys.stderr)
    with (
        tempfile.TemporaryDirectory() as name,
        lan(1 + len(NAMES), rate="1gbit") as members,
        shares(1 + len(NAMES)) as groups,
    ):
        run = RunDir(Path(name) / "run")
        prepare(["cuentos:2000"], out=run.path / "data", options=PrepareOptions(vocab=512))
        run.run_file.write_text(RUN)
        machines = [
            Machine(member, share, Path(name) / f"home-{index}")
            for index, (member, share) in enumerate(zip(members, groups, strict=True))
        ]
        for share in groups[1:]:
            share.limit(CORES)
        groups[0].limit(2 * CORES)
        crew = Crew(run, machines[0], machines[1:])
        try:
            crew.open()
            steps = measure(crew, times=arguments.minutes, seconds=arguments.seconds)
        finally:
            for machine in machines:
                machine.end()
    undisturbed = statistics.median(steps["nothing"])
    report(
        "goodput",
        seconds=arguments.seconds,
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
