"""What a worker tells of its machine, as bytes on a connection and back.

Invariants
* Nothing of it is believed: numbers out of range are not known, texts are one line of a bounded length, and there are
  `MAX_LINES` lines and sixteen GPUs at most.
"""

import math
from dataclasses import fields
from itertools import islice
from typing import Any

from cuadrilla.host.gpus import GpuUsage
from cuadrilla.host.usage import Usage, parse_usage
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link.base import PHASES, NodeReport, SaidLine
from cuadrilla.printable import one_line

MAX_LINES, MAX_LINE = 20, 500
MAX_GPUS = 16
MAX_FACTS, MAX_FACT = 20, 200
MAX_DROPPED = 10**6
LEVELS = ("info", "warning", "error")
MAX_RATE = 1e13
RATES = ("waiting_part", "sent_bytes_per_second", "received_bytes_per_second", "round_trip_seconds")


def report_to_wire(report: NodeReport) -> pb.Report:
    said = pb.Report(
        usage=pb.Usage(
            **{name: value for name, value in _known(report.usage).items() if name != "gpus"},
            gpus=[pb.Gpu(**_known(gpu)) for gpu in report.usage.gpus[:MAX_GPUS]],
        ),
        phase=report.phase,
        lines=[pb.LogLine(level=line.level, text=line.text[:MAX_LINE]) for line in report.lines[:MAX_LINES]],
        dropped=min(MAX_DROPPED, report.dropped + max(0, len(report.lines) - MAX_LINES)),
        facts=report.facts,
    )
    for name in RATES:
        if (value := getattr(report, name)) is not None:
            setattr(said, name, value)
    return said


def report_from_wire(said: pb.Report) -> NodeReport:
    """Never raises."""
    usage = _as_row(said.usage)
    usage["gpus"] = [_as_row(gpu) for gpu in said.usage.gpus[:MAX_GPUS]]
    return NodeReport(
        usage=parse_usage(usage),
        phase=said.phase if said.phase in PHASES else "",
        lines=tuple(
            SaidLine(
                level=line.level if line.level in LEVELS else "info",
                text=one_line(line.text, most=MAX_LINE),
            )
            for line in said.lines[:MAX_LINES]
        ),
        dropped=min(MAX_DROPPED, said.dropped + max(0, len(said.lines) - MAX_LINES)),
        facts={
            one_line(key, most=MAX_FACT): one_line(value, most=MAX_FACT)
            for key, value in islice(said.facts.items(), MAX_FACTS)
        },
        **{name: _rate(said, name) for name in RATES},
    )


def _known(part: Usage | GpuUsage) -> dict[str, Any]:
    found = {field.name: getattr(part, field.name) for field in fields(part)}
    return {name: value for name, value in found.items() if value is not None}


def _as_row(said: pb.Usage | pb.Gpu) -> dict[str, Any]:
    """What was set of it."""
    return {field.name: value for field, value in said.ListFields()}


def _rate(said: pb.Report, name: str) -> float | None:
    if not said.HasField(name):
        return None
    value: float = getattr(said, name)
    most = 1.0 if name == "waiting_part" else MAX_RATE
    return value if math.isfinite(value) and 0 <= value <= most else None
