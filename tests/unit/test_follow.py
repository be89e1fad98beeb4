"""Files that grow, read piece by piece; and curves that stay small."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.monitor.follow import FileFollower
from cuadrilla.monitor.series import Series
from tests.watched import add_rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def numbers(follower: FileFollower) -> list[object]:
    return [row["n"] for row in follower.rows()]


def test_each_row_once(path: Path) -> None:
    follower = FileFollower(path)
    assert numbers(follower) == []
    add_rows(path, [{"n": 1}, {"n": 2}])
    assert numbers(follower) == [1, 2]
    assert numbers(follower) == []
    with path.open("a") as file:
        file.write('{"n": 3}\n\n[4]\n{"n": \n{"n": 5}\n{"n": 6')
    assert numbers(follower) == [3, 5]
    with path.open("a") as file:
        file.write("}\n")
    assert numbers(follower) == [6]


def test_a_file_that_was_cut_is_read_from_its_beginning(path: Path) -> None:
    add_rows(path, [{"n": n} for n in range(9)])
    follower = FileFollower(path)
    numbers(follower)
    path.write_text('{"n": 7}\n')
    assert numbers(follower) == [7]


def test_only_the_tail_of_a_long_file(path: Path) -> None:
    add_rows(path, [{"n": n} for n in range(1000)])
    follower = FileFollower(path, tail_bytes=50)
    assert numbers(follower) == [996, 997, 998, 999]
    add_rows(path, [{"n": 1000}])
    assert numbers(follower) == [1000]


def filled(series: Series, rounds: int) -> Series:
    for version in range(1, rounds + 1):
        series.add(version, {"loss": float(version)})
    return series


def test_a_short_run_has_a_point_for_each_version() -> None:
    series = filled(Series(8), 3)
    series.add(2, {"loss": 9.0, "val": 1.0})  # the later row of a version counts
    assert series.data() == {"x": [1, 2, 3], "columns": {"loss": [1, 9, 3], "val": [None, 1, None]}}


def test_a_long_run_has_means() -> None:
    data = filled(Series(4), 15).data()
    assert (data["x"], data["columns"]["loss"]) == ([4, 8, 12, 15], [2.5, 6.5, 10.5, 14])


@pytest.mark.parametrize("rounds", [20, 200])
def test_shares_are_one_together(rounds: int) -> None:
    """The shares of a step add up to one, also where other workers repeated it after a crash."""
    series = Series(64, fills=True)
    for number, version in enumerate([*range(1, rounds + 1), *range(rounds // 2, rounds + 1)]):
        shares = {"a": 1.0} if version % 3 else {"a": 0.75, "b": 0.25}
        series.add(version, shares if number < rounds else {"c": 1.0})
    data = series.data()
    sums = [sum(parts) for parts in zip(*data["columns"].values(), strict=True)]
    assert sums == pytest.approx([1.0] * len(data["x"]), abs=1e-4)


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(-9, 9)), max_size=80))
def test_any_versions_in_any_order_stay_within_bounds(given_rows: list[tuple[int, float]]) -> None:
    series = Series(6)
    for version, value in given_rows:
        series.add(version, {"loss": value})
        series.data()
    data = series.data()
    assert data["x"] == sorted(set(data["x"]))
    assert len(data["x"]) <= 6
    assert all(value is None or -9 <= value <= 9 for value in data["columns"].get("loss", []))
    json.dumps(data, allow_nan=False)
