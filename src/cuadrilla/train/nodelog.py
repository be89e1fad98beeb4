"""`nodes/NAME.jsonl` of a run: how each machine was, what it has logged, who it said it was.

Invariants
* Bounded: a file that has grown to `MOST_BYTES` becomes `NAME.jsonl.1`, in the place of the one before it, and there
  are `MOST_NODES` names at most. A full disk loses rows, and never a run.
* Each file begins with what the machine is. What a report may hold was checked when it came (`link/base.py`).
"""

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cuadrilla.errors import ResourceError
from cuadrilla.host.usage import usage_data
from cuadrilla.link.base import NodeReport
from cuadrilla.rundir import append_lines, make_private, node_file, storage_errors

MOST_BYTES = 2**20
MOST_NODES = 1000
PLACES = 3

log = logging.getLogger(__name__)


class NodeLogs:
    """Of one run. Used by any thread; raises nothing."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._facts: dict[str, Mapping[str, str]] = {}
        self._is_failing = False

    def report(self, worker: str, report: NodeReport) -> None:
        beside: dict[str, Any] = {
            name: round(value, PLACES)
            for name in ("waiting_part", "sent_bytes_per_second", "received_bytes_per_second", "round_trip_seconds")
            if (value := getattr(report, name)) is not None
        }
        phase = {"phase": report.phase} if report.phase else {}
        rows: list[dict[str, Any]] = [{"kind": "usage", **usage_data(report.usage), **phase, **beside}]
        rows += [{"kind": "log", "level": line.level, "text": line.text} for line in report.lines]
        if report.dropped:
            rows.append({"kind": "cut", "lines": report.dropped})
        self._write(worker, rows, facts=report.facts)

    def _write(self, worker: str, rows: list[dict[str, Any]], *, facts: Mapping[str, str]) -> None:
        now, path = round(self._clock(), PLACES), self._folder / node_file(worker)
        with self._lock:
            if len(self._facts) >= MOST_NODES and worker not in self._facts:
                return
            known = self._facts[worker] = dict(facts) or self._facts.get(worker, {})
            hello = [{"kind": "hello", "facts": known}] if facts or not path.exists() else []
            text = "".join(json.dumps({"time": now, **row}, ensure_ascii=False) + "\n" for row in [*hello, *rows])
            try:
                self._append(path, text)
                self._is_failing = False
            except ResourceError as error:
                if not self._is_failing:
                    log.warning("%s: how machines are is not kept", error.message)
                self._is_failing = True

    def _append(self, path: Path, text: str) -> None:
        make_private(path.parent)
        if append_lines(path, text) > MOST_BYTES:
            with storage_errors(path):
                os.replace(path, path.with_name(f"{path.name}.1"))
