"""Jobs in processes of this machine: each place has a process, which trains one run after the other.

A process gets a job as a line on its standard input, the run's folder. It writes the outcome into that folder. If it is
killed, its job is lost. If a training fails, the process writes why and ends.
"""

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.crew.children import Children, cuadrilla_command
from cuadrilla.jobs.executor import Ended
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import RunDir, make_private, read_object, storage_errors

SILENT = Message("its process ended without a result")
OUTCOME = "outcome.json"
"""In a job's folder, written by its process: whether its run is complete."""


@dataclass(kw_only=True)
class _Begun:
    job: str
    run: RunDir
    began: float
    preempted: bool = False


class LocalExecutor:
    """Used by one thread."""

    def __init__(self, uses: Mapping[str, Use], *, logs: Path) -> None:
        """`uses`: devices of this machine, by the places' names. If a use names no device, a run trains on that of its
        run file. `logs`: folder of the processes' output, with a file for each."""
        self._uses = uses
        self._logs = logs
        self._reasons: dict[str, Message] = {}
        self._children = Children(died=self._reasons.__setitem__)
        self._begun: dict[str, _Begun] = {}

    @property
    def places(self) -> dict[str, str]:
        return {name: (use.device or "cpu").partition(":")[0] for name, use in self._uses.items()}

    @property
    def free(self) -> list[str]:
        return [name for name in self._uses if name not in self._begun]

    @property
    def busy(self) -> dict[str, str]:
        return {name: begun.job for name, begun in self._begun.items()}

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        """Raises ResourceError."""
        (run.path / OUTCOME).unlink(missing_ok=True)
        if place not in self._children.alive:
            make_private(self._logs)
            use = self._uses[place]
            device = ["--device", use.device] if use.device else []
            command = cuadrilla_command("--json", "work-on", "--threads", str(use.threads), *device)
            with storage_errors(self._logs), open(self._logs / f"{place}.txt", "ab") as output:
                self._children.start(place, command, environment=use.environment, stderr=output)
        self._begun[place] = _Begun(job=job, run=run, began=time.monotonic())
        with suppress(BrokenPipeError):  # it has just died, which `poll` will find
            stdin = self._children.alive[place].stdin
            assert stdin is not None
            stdin.write(f"{run.path}\n")
            stdin.flush()

    def poll(self) -> list[Ended]:
        codes, found = self._children.poll(), []
        for place, begun in list(self._begun.items()):
            outcome = read_object(begun.run.path / OUTCOME)
            if not outcome and place not in codes:
                continue
            del self._begun[place]
            code = 0 if outcome else codes[place]
            in_order = bool(outcome) or (begun.preempted and code == 0)
            found.append(
                Ended(
                    job=begun.job,
                    place=place,
                    complete=outcome.get("complete") is True,
                    lost=not in_order and code <= 0,
                    seconds=time.monotonic() - begun.began,
                    reason="" if in_order else self._reasons.get(place, SILENT),
                )
            )
        self._reasons.clear()
        return found

    def preempt(self, job: str) -> None:
        pids = self._children.pids()
        for place, begun in self._begun.items():
            if begun.job == job and place in pids and not begun.preempted:
                begun.preempted = True
                with suppress(ProcessLookupError):
                    os.kill(pids[place], signal.SIGTERM)

    def close(self) -> None:
        """End all processes. `start` makes a new one where it needs one."""
        self._children.end(finish_seconds=0.0)
        self._begun.clear()
