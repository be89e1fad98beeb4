"""Curves that stay small however long a run is: when there are too many versions, neighbours share a point.

A point is the mean of its versions. There are at most `most` points. When one more comes, neighbours are joined, so
that a point holds twice as many versions from then on. As long as each version has its own point, a later row of a
version replaces an earlier one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DIGITS = 5
"""Significant digits of a value: more than a curve can show."""


@dataclass
class _Point:
    """`last`: the newest version in it. `sums`: sum and count by column."""

    last: int = -1
    rows: int = 0
    sums: dict[str, tuple[float, int]] = field(default_factory=dict)


@dataclass
class Series:
    """Curves by column. `fills`: a column missing in a row is 0 there (shares), not unknown (held-out losses)."""

    most: int
    fills: bool = False
    stride: int = 1
    points: dict[int, _Point] = field(default_factory=dict)

    def add(self, version: int, values: Mapping[str, float]) -> None:
        point = self.points.setdefault((version - 1) // self.stride, _Point())
        replaces = self.stride == 1 and point.rows == 1
        if replaces and self.fills:
            point.sums.clear()  # shares of this version before it was redone
        point.rows += not replaces
        point.last = max(point.last, version)
        for name, value in values.items():
            total, count = (0.0, 0) if replaces else point.sums.get(name, (0.0, 0))
            point.sums[name] = (total + value, count + 1)
        while len(self.points) > self.most:
            self._join()

    def data(self) -> dict[str, Any]:
        """All points: the newest version of each as `x`, and the means of each column."""
        points = [self.points[key] for key in sorted(self.points)]
        names = dict.fromkeys(name for point in points for name in point.sums)
        columns = {name: [self._mean(point, name) for point in points] for name in names}
        return {"x": [point.last for point in points], "columns": columns}

    def _mean(self, point: _Point, name: str) -> float | None:
        total, count = point.sums.get(name, (0.0, 0))
        number = point.rows if self.fills else count
        return float(f"{total / number:.{DIGITS}g}") if number else None

    def _join(self) -> None:
        """Join neighbouring points, so that each holds twice as many versions."""
        before, self.points, self.stride = self.points, {}, 2 * self.stride
        for key, point in sorted(before.items()):
            joined = self.points.setdefault(key // 2, _Point())
            joined.last, joined.rows = point.last, joined.rows + point.rows
            for name, (total, count) in point.sums.items():
                summed, counted = joined.sums.get(name, (0.0, 0))
                joined.sums[name] = (summed + total, counted + count)
