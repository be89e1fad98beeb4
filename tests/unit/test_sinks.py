"""What is appended to on a disk that is full for a while: no row is lost, no line torn."""

from pathlib import Path

from cuadrilla.rundir import append_lines, read_jsonl
from cuadrilla.train.sinks import TensorBoardSink


def test_tensorboard_has_numbers_by_worker_and_samples(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoardSink(tmp_path / "tb")
    sink.log(3, {"loss": 1.5, "shares": {"ana": 0.25}, "sample": "Había una vez", "note": "no number"})
    sink.close()
    (path,) = (tmp_path / "tb").iterdir()
    rows = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    assert {value.tag for row in rows for value in row.summary.value} == {"loss", "shares/ana", "sample/text_summary"}
    assert {row.step for row in rows} == {3}


def test_what_follows_a_torn_line_has_a_line_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"a": 1}\n{"b":')
    assert append_lines(tmp_path / "x", '{"c": 1}\n') == (tmp_path / "x").stat().st_size
    assert list(read_jsonl(tmp_path / "x")) == [{"a": 1}, {"c": 1}]
