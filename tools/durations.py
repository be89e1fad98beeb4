"""Where the time of a test run went: the slowest tests and fixtures, and the sum of each folder beside its budget.

    python tools/durations.py build/durations-*.json [--slowest 30]

The files are those of pytest's option `--durations-file` (tests/durations.py). Wall seconds say where a run waits,
processor seconds what it costs whatever else the machine does. A fixture of a wider scope counts where it was made. A
folder over its budget is a warning and not an error: machines differ by a factor of four, and a slow one is no defect.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUDGETS_CPU_SECONDS: dict[str, float] = {
    "unit": 160, "inproc": 400, "spawn": 2200, "rig": 320, "docker": 60, "browser": 20,
}  # fmt: skip
"""Of a folder's tests, in both tiers together; about one and a half times what they took when this was written. What
containers cost is not in it: the engine starts them."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of something that happened `count` times."""

    name: str
    count: int
    wall_seconds: float
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One file: a run of pytest. `rows`: a phase of a test each."""

    wall_seconds: float
    cpu_seconds: float
    rows: Sequence[Mapping[str, Any]]


def read_run(path: Path) -> Run:
    """Raises SystemExit for a file that is none of ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return Run(wall_seconds=found["wall_seconds"], cpu_seconds=found["cpu_seconds"], rows=found["rows"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"error: {path} holds no durations of a test run: {error}") from None


def add_up(pairs: Iterable[tuple[str, Mapping[str, Any]]], *, counts: str = "") -> list[Cost]:
    """The costs of equal names together, most wall seconds first. `counts`: only rows of this phase are counted."""
    sums: dict[str, list[float]] = {}
    for name, row in pairs:
        total = sums.setdefault(name, [0, 0.0, 0.0])
        total[0] += not counts or row.get("phase") == counts
        total[1] += row["wall_seconds"]
        total[2] += row["cpu_seconds"]
    costs = [
        Cost(name=name, count=int(count), wall_seconds=wall, cpu_seconds=cpu)
        for name, (count, wall, cpu) in sums.items()
    ]
    return sorted(costs, key=lambda cost: -cost.wall_seconds)


def folder_of(test: str) -> str:
    """`tests/unit/test_x.py::test_y` is in `unit`."""
    parts = test.split("::")[0].split("/")
    return parts[1] if len(parts) > 2 else parts[0]


def tests(rows: Sequence[Mapping[str, Any]]) -> list[Cost]:
    return add_up(((row["test"], row) for row in rows), counts="call")


def folders(rows: Sequence[Mapping[str, Any]]) -> list[Cost]:
    return add_up(((folder_of(row["test"]), row) for row in rows), counts="call")


def fixtures(rows: Sequence[Mapping[str, Any]]) -> list[Cost]:
    """By name and scope: one that several modules define is one row."""
    return add_up(
        (f"{fixture['fixture']} ({fixture['scope']})", fixture) for row in rows for fixture in row.get("fixtures", ())
    )


def over_budget(costs: Sequence[Cost]) -> list[str]:
    """A sentence for each folder that costs more than it should, or has no budget."""
    found = []
    for cost in costs:
        budget = BUDGETS_CPU_SECONDS.get(cost.name)
        if budget is None:
            found.append(f"{cost.name} has no budget: add one to tools/durations.py")
        elif cost.cpu_seconds > budget:
            found.append(f"{cost.name} took {cost.cpu_seconds:.0f} processor seconds, its budget is {budget:.0f}")
    return found


def table(title: str, costs: Sequence[Cost]) -> Iterable[str]:
    yield f"{title:<90} {'times':>6} {'wall s':>8} {'cpu s':>8}"
    for cost in costs:
        yield f"{cost.name[:90]:<90} {cost.count:>6} {cost.wall_seconds:>8.1f} {cost.cpu_seconds:>8.1f}"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--slowest", type=int, default=30, help="how many tests and fixtures to show")
    arguments = parser.parse_args()
    runs = [read_run(path) for path in arguments.files]
    rows = [row for run in runs for row in run.rows]
    by_folder = folders(rows)
    lines = [
        *table(f"the slowest {arguments.slowest} tests", tests(rows)[: arguments.slowest]),
        *table(f"the slowest {arguments.slowest} fixtures", fixtures(rows)[: arguments.slowest]),
        *table("folders", by_folder),
        *(
            f"{path.name}: {run.wall_seconds:.0f} s, {run.cpu_seconds:.0f} processor seconds"
            for path, run in zip(arguments.files, runs, strict=True)
        ),
    ]
    print("\n".join(lines))
    for warning in over_budget(by_folder):
        print(f"warning: {warning}", file=sys.stderr)


if __name__ == "__main__":
    main()
