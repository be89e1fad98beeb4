"""Jobs in processes of this machine: at each place one `cuadrilla train` after the other.

If such a process is killed, its job is lost. If a training fails, the process writes why and ends.
"""

import signal
import time
from collections.abc import Mapping
from pathlib import Path

from cuadrilla.crew.children import Children, cuadrilla_command
from cuadrilla.errors import INTERRUPTED_EXIT_CODE
from cuadrilla.jobs.executor import Ended
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import RunDir, make_private, storage_errors
from cuadrilla.runfile import literal

SAVE_SECONDS = 100.0
"""A job that is to be given back and has not saved after this time is killed: before STOP_SECONDS are over."""
SILENT = Message("its process ended without a result")
GIVEN_BACK = (INTERRUPTED_EXIT_CODE, -signal.SIGTERM)
"""Exit codes of a process that has saved its run because it was asked to, or had nothing to save yet."""


class LocalExecutor:
    """`uses`: devices of this machine, by the places' names. If a use names no device, a run trains on that of its run
    file. `logs`: folder of the processes' output, with a file for each."""

    def __init__(self, uses: Mapping[str, Use], *, logs: Path) -> None:
        self._uses, self._logs = uses, logs
        self._children = Children()
        self._jobs: dict[str, str] = {}
        self._preempted: dict[str, float] = {}
        """By place: its job, and when that was asked to save."""

    @property
    def places(self) -> dict[str, str]:
        return {name: self._jobs.get(name, "") for name in self._uses}

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        """Raises ResourceError."""
        make_private(self._logs)
        use = self._uses[place]
        sets = [f"train.threads={use.threads}"] if use.threads else []
        sets += [f"train.device={literal(use.device)}"] if use.device else []
        flags = [word for each in sets for word in ("--set", each)]
        command = cuadrilla_command("--supervised", "--json", "train", str(run.path), "--allow-changes", *flags)
        with storage_errors(self._logs), open(self._logs / f"{place}.txt", "ab") as output:
            run.status.unlink(missing_ok=True)  # a complete run that goes on is not complete any more
            self._children.start(place, command, environment=use.environment, stderr=output, apart=True)
        self._jobs[place] = job

    def poll(self) -> list[Ended]:
        found = []
        for place, since in self._preempted.items():
            if time.monotonic() - since > SAVE_SECONDS:
                self._children.alive[place].kill()
        for place, ending in self._children.poll().items():
            preempted = self._preempted.pop(place, None) is not None
            complete = ending.code == 0 and bool(ending.said)  # a training that ends in order answers
            in_order = complete or ending.code in GIVEN_BACK or (preempted and ending.code < 0)
            found.append(
                Ended(
                    job=self._jobs.pop(place),
                    place=place,
                    complete=complete,
                    lost=not in_order and ending.code <= 0,
                    reason="" if in_order else ending.reason if ending.code else SILENT,
                )
            )
        return found

    def preempt(self, job: str) -> None:
        for place, its_job in self._jobs.items():
            if its_job == job and place not in self._preempted:
                self._preempted[place] = time.monotonic()
                self._children.alive[place].terminate()

    def close(self) -> None:
        self._children.end(finish_seconds=0.0)
        self._jobs.clear()
        self._preempted.clear()
