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

    def take(self, other: "_Point") -> None:
        self.last, self.rows = max(self.last, other.last), self.rows + other.rows
        for name, (total, count) in other.sums.items():
            before, counted = self.sums.get(name, (0.0, 0))
            self.sums[name] = (before + total, counted + count)


@dataclass
class Series:
    """Curves by column. `fills`: a column missing in a row is 0 there (shares), not unknown (held-out losses)."""

    most: int
    fills: bool = False
    stride: int = 1
    points: dict[int, _Point] = field(default_factory=dict)

    def add(self, version: int, values: Mapping[str, float]) -> None:
        key, sums = (version - 1) // self.stride, {name: (value, 1) for name, value in values.items()}
        if self.stride == 1 and (earlier := self.points.pop(key, None)) and not self.fills:
            sums = earlier.sums | sums
        self.points.setdefault(key, _Point()).take(_Point(version, 1, sums))
        while len(self.points) > self.most:  # neighbours are joined
            before, self.points, self.stride = self.points, {}, 2 * self.stride
            for at, point in before.items():
                self.points.setdefault(at // 2, _Point()).take(point)

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
