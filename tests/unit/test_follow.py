"""Files that grow are followed: each row once, at the cost of what is new, whatever their writer does to them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.monitor import follow
from cuadrilla.monitor.follow import MARK_BYTES, MOST_LINE_BYTES, FileFollower
from cuadrilla.monitor.series import Series, SeriesPlace
from tests.watched import add_rows

pytestmark = pytest.mark.unit


def rows(first: int, last: int) -> list[dict[str, Any]]:
    return [{"version": version} for version in range(first, last)]


def versions(follower: FileFollower) -> list[int]:
    return [row["version"] for row in follower.read().rows]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_each_row_once(path: Path) -> None:
    follower = FileFollower(path)
    assert follower.read() == follow.News(rows=[])
    add_rows(path, rows(0, 3))
    assert versions(follower) == [0, 1, 2]
    assert versions(follower) == []
    add_rows(path, rows(3, 5))
    assert versions(follower) == [3, 4]


def test_following_costs_what_is_new(path: Path) -> None:
    add_rows(path, rows(0, 20_000))
    follower = FileFollower(path)
    follower.read()
    assert follower.bytes_read == path.stat().st_size
    for version in range(50):
        add_rows(path, rows(version, version + 1))
        before = follower.bytes_read
        assert versions(follower) == [version]
        assert follower.bytes_read - before == len(json.dumps({"version": version})) + 1
    before = follower.bytes_read
    follower.read()
    assert follower.bytes_read == before


def test_a_torn_line_waits_for_its_end(path: Path) -> None:
    follower = FileFollower(path)
    whole = '{"version": 1, "sample": "niño"}\n'.encode()
    for number, byte in enumerate(whole):
        with path.open("ab") as file:
            file.write(bytes([byte]))
        assert len(follower.read().rows) == (number == len(whole) - 1)
    assert follower.bytes_read == len(whole)


@given(st.lists(st.integers(1, 40), max_size=12))
def test_wherever_a_write_is_cut(tmp_path_factory: pytest.TempPathFactory, sizes: list[int]) -> None:
    path = tmp_path_factory.mktemp("cut") / "rows"
    text = b"".join(json.dumps(row).encode() + b"\n" for row in rows(0, 12))
    follower, found = FileFollower(path), []
    path.touch()
    for size in [*sizes, len(text)]:
        piece, text = text[:size], text[size:]
        with path.open("ab") as file:
            file.write(piece)
        found += versions(follower)
    assert found == list(range(12))


def test_a_rotated_file_is_read_to_its_end(path: Path) -> None:
    older = path.with_name("metrics.jsonl.1")
    follower = FileFollower(path, older=older)
    add_rows(path, rows(0, 3))
    assert versions(follower) == [0, 1, 2]
    add_rows(path, rows(3, 5))
    path.rename(older)
    add_rows(path, rows(5, 7))
    news = follower.read()
    assert ([row["version"] for row in news.rows], news.anew) == ([3, 4, 5, 6], False)
    path.rename(older)  # and between two renames there is none
    assert versions(follower) == []
    add_rows(path, rows(7, 8))
    assert versions(follower) == [7]


def test_rotated_twice_between_two_reads_it_begins_anew(path: Path) -> None:
    follower = FileFollower(path, older=path.with_name("metrics.jsonl.1"))
    add_rows(path, rows(0, 3))
    follower.read()
    for first in (3, 5):
        path.rename(path.with_name("metrics.jsonl.1"))
        add_rows(path, rows(first, first + 2))
    news = follower.read()
    assert ([row["version"] for row in news.rows], news.anew) == ([5, 6], True)


@pytest.mark.parametrize("again", [1, 40])
def test_a_truncated_file_begins_anew(path: Path, again: int) -> None:
    """Whether it is shorter than before or has become longer meanwhile: what was read last is no longer there."""
    add_rows(path, rows(100, 110))
    follower = FileFollower(path)
    follower.read()
    inode = path.stat().st_ino
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(200, 200 + again)))
    assert path.stat().st_ino == inode
    news = follower.read()
    assert ([row["version"] for row in news.rows], news.anew) == (list(range(200, 200 + again)), True)
    assert not follower.read().anew


def test_only_the_tail_of_a_long_file(path: Path) -> None:
    add_rows(path, rows(0, 10_000))
    follower = FileFollower(path, tail_bytes=1000)
    found = versions(follower)
    assert (found[-1], 30 < len(found) < 60, follower.bytes_read) == (9999, True, 1000)
    add_rows(path, rows(0, 1))
    assert versions(follower) == [0]


def test_what_is_no_row(path: Path) -> None:
    path.write_bytes(
        b'\xff\xfe\n[1]\n{"version": 1}\nnull\n{"version": NaN}\n\n{"a"\n'
        + b"[" * 100_000
        + b"\n"
        + b"9" * 5000
        + b"\n"
        b'{"x": ' + b"9" * 5000 + b'}\n{"version": 2, "text": "\xff"}\r\n'
    )
    assert FileFollower(path).read().rows == [{"version": 1}, {"version": None}, {"version": 2, "text": "�"}]


def test_a_line_without_end_is_not_kept(path: Path) -> None:
    follower = FileFollower(path)
    for _ in range(3):
        with path.open("ab") as file:
            file.write(b"x" * MOST_LINE_BYTES)
        assert follower.read().rows == []
    assert len(follower._rest) <= MOST_LINE_BYTES
    with path.open("ab") as file:
        file.write(b'x\n{"version": 1}\n')
    assert versions(follower) == [1]
    path.write_bytes(b'{"text": "' + b"x" * MOST_LINE_BYTES + b'"}\n{"version": 2}\n')
    assert versions(follower) == [2]


def test_more_than_one_read_takes_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "MOST_READ_BYTES", 100)
    add_rows(path, rows(0, 20))
    follower, found = FileFollower(path), []
    while (news := follower.read()).more:
        found += news.rows
    assert found + news.rows == rows(0, 20)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_what_is_no_file_is_not_opened(path: Path) -> None:
    os.mkfifo(path)
    assert FileFollower(path).read().rows == []
    path.unlink()
    path.mkdir()
    assert FileFollower(path).read().rows == []
    os.symlink("/dev/zero", path.with_name("zero"))
    assert FileFollower(path.with_name("zero")).read().rows == []


def test_the_mark_is_short(path: Path) -> None:
    add_rows(path, rows(0, 100))
    follower = FileFollower(path)
    follower.read()
    assert len(follower._mark) == MARK_BYTES


# Curves


def drawn(series: Series) -> tuple[list[int], dict[str, list[float | None]]]:
    news, _ = series.since(SeriesPlace())
    assert news is not None
    return news["x"], news["columns"]


def test_a_short_run_has_a_point_for_each_version() -> None:
    series = Series(10, 5)
    for version in range(1, 4):
        series.add(version, {"loss": version})
    series.add(2, {"loss": 7, "val_loss": 1})  # resumed: the later row holds
    assert drawn(series) == ([1, 2, 3], {"loss": [1, 7, 3], "val_loss": [None, 1, None]})


def test_a_long_run_has_means() -> None:
    series = Series(8, 5)
    for version in range(1, 33):
        series.add(version, {"loss": version, **({"val_loss": 9} if version == 5 else {})})
    assert series.stride == 4
    x, columns = drawn(series)
    assert x == [4, 8, 12, 16, 20, 24, 28, 32]
    assert columns["loss"] == [2.5, 6.5, 10.5, 14.5, 18.5, 22.5, 26.5, 30.5]
    assert columns["val_loss"] == [None, 9, None, None, None, None, None, None]


def test_who_is_not_in_a_row_had_no_share() -> None:
    series = Series(4, 3, fills=True)
    series.add(1, {"ana": 1.0})
    series.add(2, {"ana": 0.5, "luis": 0.5})
    series.add(3, {"luis": 1.0})
    assert drawn(series)[1] == {"ana": [1, 0.5, 0], "luis": [0, 0.5, 1]}
    for version in range(4, 9):
        series.add(version, {"luis": 1.0})
    assert drawn(series) == ([2, 4, 6, 8], {"ana": [0.75, 0, 0, 0], "luis": [0.25, 1, 1, 1]})


def test_a_step_that_names_nobody_is_a_gap() -> None:
    series = Series(4, 3, fills=True)
    series.add(1, {"ana": 1.0})
    series.skip(2)
    series.add(3, {"luis": 1.0})
    assert drawn(series)[1] == {"ana": [1, None, 0], "luis": [0, None, 1]}
    for version in (4, 5):
        series.add(version, {"luis": 1.0})
    assert drawn(series)[1] == {"ana": [1, 0, 0], "luis": [0, 1, 1]}


def test_a_reader_gets_what_has_changed() -> None:
    series = Series(100, 5)
    for version in range(1, 51):
        series.add(version, {"loss": version})
    news, place = series.since(SeriesPlace())
    assert news is not None
    assert series.since(place) == (None, place)
    series.add(51, {"loss": 51})
    news, place = series.since(place)
    assert news == {"first": 50, "stride": 1, "x": [51], "columns": {"loss": [51]}}
    series.add(48, {"val_loss": 2})  # an evaluation comes later
    news, place = series.since(place)
    assert news is not None
    assert (news["first"], news["x"][0], news["columns"]["val_loss"][0]) == (47, 48, 2)


@given(st.lists(st.tuples(st.integers(0, 2**53 - 1), st.floats(-1e9, 1e9)), max_size=120))
def test_any_versions_in_any_order_stay_within_bounds(given_rows: list[tuple[int, float]]) -> None:
    series, reader = Series(8, 3), {"x": [], "loss": []}
    place = SeriesPlace()
    for version, loss in given_rows:
        series.add(version, {"loss": loss})
        news, place = series.since(place)
        if news is not None:  # put together as the page does it
            reader["x"][news["first"] :] = news["x"]
            reader["loss"][news["first"] :] = news["columns"]["loss"]
    assert len(series) <= 8
    if given_rows:
        assert drawn(series) == (reader["x"], {"loss": reader["loss"]})
        assert reader["x"] == sorted(set(reader["x"]))


def test_no_more_columns_than_allowed() -> None:
    series = Series(8, 2)
    series.add(1, {str(number): 1.0 for number in range(5)})
    assert len(drawn(series)[1]) == 2
