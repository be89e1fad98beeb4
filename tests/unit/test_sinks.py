"""What is appended to on a disk that is full for a while: no row is lost, no line torn."""

import json
import logging
from contextlib import suppress
from pathlib import Path

import pytest

from cuadrilla.errors import ResourceError
from cuadrilla.log import set_up_logging, tear_down_logging
from cuadrilla.rundir import append_lines, read_jsonl
from cuadrilla.train.sinks import JsonlSink, TensorBoardSink

ROWS = 200


def filled(disk: Path) -> Path:
    filler = disk / "filler"
    with suppress(OSError), open(filler, "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return filler


def test_rows_of_a_full_disk_are_written_when_there_is_room(small_disk: Path) -> None:
    """Each has some hundred bytes, so that one of them is cut in its middle."""
    place = small_disk / "rows"
    sink = JsonlSink(place)
    sink.log(1, {"loss": 1.5})
    filler, failed = filled(small_disk), 0
    for step in range(2, ROWS):
        try:
            sink.log(step, {"loss": 1.5, "sample": "ñ" * 200})
        except ResourceError:
            failed += 1
    assert 0 < failed < ROWS - 2
    assert all(json.loads(line) for line in place.read_text().splitlines())
    filler.unlink()
    sink.log(ROWS, {"loss": 1.5})
    sink.close()
    assert [row["version"] for row in read_jsonl(place)] == [*range(1, ROWS + 1)]


def test_tensorboard_has_numbers_by_worker_and_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoardSink(tmp_path / "tb")
    sink.log(3, {"loss": 1.5, "shares": {"ana": 0.25}, "sample": "Había una vez", "note": "no number"})
    sink.close()
    (path,) = (tmp_path / "tb").iterdir()
    rows = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert {value.tag for row in rows for value in row.summary.value} == {"loss", "shares/ana", "sample/text_summary"}
    assert {row.step for row in rows} == {3}


def test_what_a_full_disk_never_takes_is_no_failure_at_the_end(small_disk: Path) -> None:
    sink = JsonlSink(small_disk / "rows")
    filled(small_disk)
    with pytest.raises(ResourceError):
        sink.log(1, {"sample": "x" * 10_000})
    sink.close()
    assert (small_disk / "rows").read_bytes() == b""


def test_what_follows_a_torn_line_has_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"a": 1}\n{"b":')
    assert append_lines(tmp_path / "x", '{"c": 1}\n') == (tmp_path / "x").stat().st_size
    assert list(read_jsonl(tmp_path / "x")) == [{"a": 1}, {"c": 1}]


def test_a_log_on_a_full_disk_says_nothing_and_ends_nothing(
    small_disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = set_up_logging(small_disk)
    filled(small_disk)
    for number in range(200):
        logging.getLogger("cuadrilla.test").info("%d %s", number, "x" * 200)
    tear_down_logging(handler)
    assert "Traceback" not in capsys.readouterr().err
