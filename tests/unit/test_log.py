"""Users see our warnings, the run's logs have everything, and neither contains control characters."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.cli.app import report_thread
from cuadrilla.log import NOTE, log_to, stop_logging_to

FOREIGN, SHOWN = "ana\x1b[2J\x07\rok", "ana\\u001b[2J\\u0007\\u000dok"


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    before = {name: list(logging.getLogger(name).handlers) for name in ("cuadrilla", "grpc")}
    handler = log_to(tmp_path, worker="coordinator")
    yield tmp_path / "log.coordinator.txt"
    stop_logging_to(handler)
    for name, handlers in before.items():
        logging.getLogger(name).handlers[:] = handlers


def test_a_record_reaches_terminal_and_file_harmless(log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = logging.getLogger("cuadrilla.link")
    ours.warning("%s left", FOREIGN)
    ours.log(NOTE, "%s joined", FOREIGN)
    assert capsys.readouterr().err == f"WARNING: {SHOWN} left\n{SHOWN} joined\n"
    said = [line.partition(": ")[2] for line in log_file.read_text().splitlines()]
    assert said == [f"{SHOWN} left", f"{SHOWN} joined"]


def test_a_library_speaks_to_the_file_only(log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = logging.getLogger("grpc")
    try:
        raise ValueError(FOREIGN)
    except ValueError:
        theirs.exception("a traceback")
    assert capsys.readouterr().err == ""
    said = log_file.read_text()
    assert "ERROR MainThread | grpc: a traceback\nTraceback" in said
    assert f"ValueError: {SHOWN}" in said


def test_a_thread_that_fails_is_a_line_and_its_traceback_is_in_the_file(
    log_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(threading, "excepthook", report_thread)
    thread = threading.Thread(target=lambda: int(FOREIGN), name="attends-ana")
    thread.start()
    thread.join()
    said = capsys.readouterr().err
    assert said.startswith("ERROR: attends-ana has failed: ValueError: invalid literal for int()")
    assert len(said.splitlines()) == 1
    assert "Traceback" in log_file.read_text()
