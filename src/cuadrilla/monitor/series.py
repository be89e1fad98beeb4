"""Curves that stay small however long a run is: neighbouring versions share a point when there are too many.

A point is the mean of what it holds. At most `most` points are kept; when one more comes, two neighbours become one,
everywhere, and from then on a point takes twice as many versions. So a row costs O(its columns), and a curve of a
million versions costs as much memory as one of a thousand. While each version has a point of its own, a later row of a
version replaces what an earlier one has said.

A reader asks for what has changed `since` its last answer, and gets a tail: points from `first` on replace its own.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DIGITS = 5
"""Significant ones: more than a curve can show."""


@dataclass(frozen=True)
class SeriesPlace:
    """How far a reader has read."""

    epoch: int = -1
    change: int = 0


@dataclass
class _Column:
    sums: "array[float]"
    counts: "array[float]"


@dataclass
class Series:
    """`fills`: a column that is not in a row is 0 there (shares); otherwise it is unknown (held-out losses)."""

    most: int
    most_columns: int
    fills: bool = False
    stride: int = 1
    _starts: list[int] = field(default_factory=list)
    _ends: list[int] = field(default_factory=list)
    _rows: "array[float]" = field(default_factory=lambda: array("d"))
    _changed: list[int] = field(default_factory=list)
    _columns: dict[str, _Column] = field(default_factory=dict)
    _epoch: int = 0
    _change: int = 0

    def __len__(self) -> int:
        return len(self._starts)

    def add(self, version: int, values: Mapping[str, float]) -> None:
        """A row. Columns beyond `most_columns` are left out."""
        point = self._point(version)
        replaces = self.stride == 1 and self._starts[point] == version
        self._change += 1
        self._changed[point] = self._change
        for name in values:
            if name not in self._columns and len(self._columns) < self.most_columns:
                self._columns[name] = self._new_column()
        self._rows[point] = 1 if replaces else self._rows[point] + 1
        before = 0 if replaces else 1
        for name in self._columns if self.fills else values:
            if (column := self._columns.get(name)) is not None:
                column.sums[point] = before * column.sums[point] + values.get(name, 0.0)
                column.counts[point] = before * column.counts[point] + 1

    def skip(self, version: int) -> None:
        """A row that says nothing: a gap, unless others of its point do."""
        point = self._point(version)
        self._change += 1
        self._changed[point] = self._change
        self._rows[point] += 1

    def clear(self) -> None:
        self.stride = 1
        self._starts, self._ends, self._changed, self._columns = [], [], [], {}
        self._rows = array("d")
        self._epoch += 1

    def since(self, place: SeriesPlace) -> tuple[dict[str, Any] | None, SeriesPlace]:
        """What a reader at this place lacks, None if nothing, and where it is then."""
        here = SeriesPlace(self._epoch, self._change)
        if place == here:
            return None, here
        first = 0
        if place.epoch == self._epoch:
            first = next((at for at, change in enumerate(self._changed) if change > place.change), len(self))
        columns = {name: self._means(column, first) for name, column in self._columns.items()}
        return {"first": first, "stride": self.stride, "x": self._ends[first:], "columns": columns}, here

    def _point(self, version: int) -> int:
        """Where a version belongs; makes room for a new one."""
        if not self._ends or version > self._ends[-1]:
            if self._ends and self._rows[-1] < self.stride:
                self._ends[-1] = version
            else:
                if len(self) >= self.most:
                    self._halve()
                    return self._point(version)
                self._append(version)
            return len(self) - 1
        return max(bisect_right(self._starts, version) - 1, 0)

    def _append(self, version: int) -> None:
        self._starts.append(version)
        self._ends.append(version)
        self._rows.append(0)
        self._changed.append(0)
        for column in self._columns.values():
            column.sums.append(0)
            column.counts.append(0)

    def _halve(self) -> None:
        self._starts = self._starts[::2]
        self._ends = [*self._ends[1::2], *self._ends[len(self._ends) - len(self._ends) % 2 :]]
        self._rows = _paired(self._rows)
        self._changed = [self._change] * len(self._starts)
        for column in self._columns.values():
            column.sums, column.counts = _paired(column.sums), _paired(column.counts)
        self.stride *= 2
        self._epoch += 1

    def _new_column(self) -> _Column:
        """Where it fills, those who come later had nothing before."""
        nothing = array("d", bytes(8 * len(self)))
        others = next(iter(self._columns.values())).counts if self._columns and self.fills else nothing
        return _Column(nothing, array("d", others))

    @staticmethod
    def _means(column: _Column, first: int) -> list[float | None]:
        pairs = zip(column.sums[first:], column.counts[first:], strict=True)
        return [rounded(total / count) if count else None for total, count in pairs]


def _paired(values: "array[float]") -> "array[float]":
    evens, odds = values[::2], values[1::2]
    if len(odds) < len(evens):
        odds.append(0)
    return array("d", (even + odd for even, odd in zip(evens, odds, strict=True)))


def rounded(value: float) -> float:
    """Short as JSON. A whole number stays one."""
    return float(f"{value:.{DIGITS}g}")
