"""Curves that stay small however long a run is: neighbouring versions share a point when there are too many.

A point is the mean of what it holds. At most `most` points are kept; when one more comes, two neighbours become one,
everywhere, and from then on a point takes twice as many versions. While each version has a point of its own, a later
row of a version replaces what an earlier one has said.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DIGITS = 5
"""Significant ones: more than a curve can show."""


@dataclass
class _Point:
    """`sums`: by column, the sum and the number of values. `changed`: the number of its last change."""

    first: int
    last: int
    rows: int = 0
    changed: int = 0
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)


@dataclass
class Series:
    """`fills`: a column that is not in a row is 0 there (shares); otherwise it is unknown (held-out losses)."""

    most: int
    fills: bool = False
    stride: int = 1
    points: list[_Point] = field(default_factory=list)
    columns: dict[str, None] = field(default_factory=dict)

    def add(self, version: int, values: Mapping[str, float], *, number: int) -> None:
        """A row; `number`: of this change."""
        point = self._point(version, number)
        replaces = self.stride == 1 and point.rows == 1
        point.rows += not replaces
        point.changed = number
        for name, value in values.items():
            total, count = (0.0, 0) if replaces else point.sums.get(name, (0.0, 0))
            point.sums[name] = (total + value, count + 1)
            self.columns[name] = None

    def clear(self) -> None:
        self.stride = 1
        self.points.clear()
        self.columns.clear()

    def since(self, number: int) -> dict[str, Any] | None:
        """The points from the first one that has changed after `number`: they replace what a reader has from there."""
        first = next((at for at, point in enumerate(self.points) if point.changed > number), None)
        if first is None:
            return None
        new = self.points[first:]
        columns = {name: [self._mean(point, name) for point in new] for name in self.columns}
        return {"first": first, "x": [point.last for point in new], "columns": columns}

    def _mean(self, point: _Point, name: str) -> float | None:
        total, count = point.sums.get(name, (0.0, 0))
        count = point.rows if self.fills and point.sums else count
        return float(f"{total / count:.{DIGITS}g}") if count else None

    def _point(self, version: int, number: int) -> _Point:
        """Where a version belongs; makes room for a new one."""
        if self.points and version <= self.points[-1].last:
            return self.points[max(bisect_right(self.points, version, key=lambda point: point.first) - 1, 0)]
        if self.points and self.points[-1].rows < self.stride:
            self.points[-1].last = version
            return self.points[-1]
        if len(self.points) >= self.most:
            self.points = [_merged(self.points[at : at + 2], number) for at in range(0, len(self.points), 2)]
            self.stride *= 2
            return self._point(version, number)
        self.points.append(_Point(version, version))
        return self.points[-1]


def _merged(points: list[_Point], number: int) -> _Point:
    found = _Point(points[0].first, points[-1].last, sum(point.rows for point in points), number)
    for point in points:
        for name, (total, count) in point.sums.items():
            before, counted = found.sums.get(name, (0.0, 0))
            found.sums[name] = (before + total, counted + count)
    return found
