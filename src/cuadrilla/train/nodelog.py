"""`nodes/NAME.jsonl` of a run: each machine's use, its log lines, and the facts that it reported about itself.

A file that has grown to `MAX_BYTES` is renamed to `NAME.jsonl.1`, replacing the one before. Each begins with the
machine's facts. On a full disk rows are lost, but the run goes on: the run itself reports the disk.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from cuadrilla.errors import ResourceError
from cuadrilla.host.usage import usage_data
from cuadrilla.link.base import NodeReport
from cuadrilla.rundir import append_lines, make_private, node_file, storage_errors

MAX_BYTES = 2**20
DIGITS = 3
LINK = ("waiting_part", "sent_bytes_per_second", "received_bytes_per_second", "round_trip_seconds")


class NodeLogs:
    """The machines of one run. Each is reported by one thread at a time. Raises nothing."""

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._folder = folder
        self._clock = clock
        self._facts: dict[str, Mapping[str, str]] = {}

    def report(self, worker: str, report: NodeReport) -> None:
        link = {name: round(value, DIGITS) for name in LINK if (value := getattr(report, name)) is not None}
        phase = {"phase": report.phase} if report.phase else {}
        rows = [{"kind": "usage", **usage_data(report.usage), **phase, **link}]
        rows += [{"kind": "log", "level": line.level, "text": line.text} for line in report.lines]
        if report.dropped:
            rows.append({"kind": "cut", "lines": report.dropped})
        now, path = round(self._clock(), DIGITS), self._folder / node_file(worker)
        with suppress(ResourceError):
            known = self._facts[worker] = dict(report.facts) or self._facts.get(worker, {})
            hello = [{"kind": "hello", "facts": known}] if report.facts or not path.exists() else []
            text = "".join(json.dumps({"time": now, **row}, ensure_ascii=False) + "\n" for row in [*hello, *rows])
            make_private(self._folder)
            if append_lines(path, text) > MAX_BYTES:
                with storage_errors(path):
                    os.replace(path, path.with_name(f"{path.name}.1"))
