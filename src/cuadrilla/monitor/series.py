"""Curves that stay small however long a run is: neighbouring versions share a point when there are too many.

A point is the mean of what it holds. There are at most `most` points; when one more comes, a point holds twice as many
versions from then on. While each version has a point of its own, a later row of a version replaces what an earlier one
has said.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DIGITS = 5
"""Significant ones: more than a curve can show."""


@dataclass
class _Point:
    """`last`: its newest version. `changed`: the number of its newest change. `sums`: by column, with their counts."""

    last: int = -1
    rows: int = 0
    changed: int = 0
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)


@dataclass
class Series:
    """`fills`: a column that is not in a row is 0 there (shares); otherwise it is unknown (held-out losses)."""

    most: int
    fills: bool = False
    stride: int = 1
    points: dict[int, _Point] = field(default_factory=dict)
    columns: dict[str, None] = field(default_factory=dict)

    def add(self, version: int, values: Mapping[str, float], *, number: int) -> None:
        """A row; `number`: of this change."""
        point = self.points.setdefault((version - 1) // self.stride, _Point())
        replaces = self.stride == 1 and point.rows == 1
        if replaces and self.fills:
            point.sums.clear()  # of who computed it before it was redone
        point.rows += not replaces
        point.last, point.changed = max(point.last, version), number
        for name, value in values.items():
            total, count = (0.0, 0) if replaces else point.sums.get(name, (0.0, 0))
            point.sums[name] = (total + value, count + 1)
            self.columns[name] = None
        while len(self.points) > self.most:
            self._join(number)

    def clear(self) -> None:
        self.stride = 1
        self.points.clear()
        self.columns.clear()

    def since(self, number: int) -> dict[str, Any] | None:
        """The points from the first one that has changed after `number`: they replace what a reader has from there."""
        points = [self.points[key] for key in sorted(self.points)]
        first = next((at for at, point in enumerate(points) if point.changed > number), None)
        if first is None:
            return None
        columns = {name: [self._mean(point, name) for point in points[first:]] for name in self.columns}
        return {"first": first, "x": [point.last for point in points[first:]], "columns": columns}

    def _mean(self, point: _Point, name: str) -> float | None:
        total, count = point.sums.get(name, (0.0, 0))
        count = point.rows if self.fills and point.sums else count
        return float(f"{total / count:.{DIGITS}g}") if count else None

    def _join(self, number: int) -> None:
        """Neighbours, so that a point holds twice as many versions."""
        before, self.points, self.stride = self.points, {}, 2 * self.stride
        for key, point in sorted(before.items()):
            joined = self.points.setdefault(key // 2, _Point(changed=number))
            joined.last, joined.rows = point.last, joined.rows + point.rows
            for name, (total, count) in point.sums.items():
                summed, counted = joined.sums.get(name, (0.0, 0))
                joined.sums[name] = (summed + total, counted + count)
