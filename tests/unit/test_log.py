"""Who gets to read what: a person our warnings, the run's logs everything, and neither anything that acts."""

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.cli.app import report_thread
from cuadrilla.log import COORDINATES, TALK, set_up_logging, tear_down_logging, to_files_only

FOREIGN, SHOWN = "ana\x1b[2J\x07\rok", "ana\\u001b[2J\\u0007\\u000dok"

CHATTER = """
import os, subprocess, sys
from pathlib import Path
from cuadrilla.log import libraries_apart
with libraries_apart(Path(sys.argv[1])):
    os.write(2, b"from C\\n")
    subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('from a child\\\\n')"], check=True)
    print("ours, meanwhile", file=sys.stderr)
os.write(2, b"ours, behind\\n")
print("and this", file=sys.stderr)
"""


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    before = {name: list(logging.getLogger(name).handlers) for name in ("cuadrilla", "grpc", "ray")}
    handler = set_up_logging(tmp_path, worker="coordinator")
    yield tmp_path / "log.coordinator.txt"
    tear_down_logging(handler)
    for name, handlers in before.items():
        logging.getLogger(name).handlers[:] = handlers


def test_a_record_reaches_terminal_and_file_harmless(log_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = logging.getLogger("cuadrilla.link")
    ours.warning("%s left", FOREIGN)
    ours.info("%s joined", FOREIGN, extra=TALK)
    assert capsys.readouterr().err == f"WARNING: {SHOWN} left\n{SHOWN} joined\n"
    assert [line.partition(": ")[2] for line in log_file.read_text().splitlines()] == [
        f"{SHOWN} left",
        f"{SHOWN} joined",
    ]


@pytest.mark.parametrize("library", ["grpc", "ray"])
def test_what_libraries_say_is_in_the_file_only(
    log_file: Path, library: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ray makes a handler of its own for stderr when it is imported."""
    theirs = logging.getLogger(library)
    theirs.addHandler(logging.StreamHandler(sys.stderr))
    to_files_only(library)
    try:
        raise ValueError(FOREIGN)
    except ValueError:
        theirs.exception("a traceback")
    assert capsys.readouterr().err == ""
    said = log_file.read_text()
    assert f"ERROR coordinator | {library}: a traceback\nTraceback" in said
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


def test_runs_that_are_coordinated_at_once_have_lines_of_their_own(tmp_path: Path) -> None:
    """And all of them what other threads say."""
    ready = threading.Barrier(3)

    def coordinate(name: str) -> None:
        (tmp_path / name).mkdir()
        handler = set_up_logging(tmp_path / name, worker="coordinator")
        ready.wait(20)
        logging.getLogger("cuadrilla.a").info("round of %s", name)
        ready.wait(20)
        ready.wait(20)
        tear_down_logging(handler)

    threads = [threading.Thread(target=coordinate, args=(name,), name=COORDINATES + name) for name in ("uno", "dos")]
    for thread in threads:
        thread.start()
    ready.wait(20)
    ready.wait(20)
    logging.getLogger("cuadrilla.link").info("ana is here")
    ready.wait(20)
    for thread in threads:
        thread.join()
    for name in ("uno", "dos"):
        lines = (tmp_path / name / "log.coordinator.txt").read_text().splitlines()
        assert [line.partition("| ")[2] for line in lines] == [
            f"cuadrilla.a: round of {name}",
            "cuadrilla.link: ana is here",
        ]


def test_what_c_code_and_children_write_is_in_the_file_only(tmp_path: Path) -> None:
    path = tmp_path / "ray.txt"
    path.write_text("an earlier run\n")
    done = subprocess.run([sys.executable, "-c", CHATTER, path], capture_output=True, text=True, check=True)
    assert done.stderr == "ours, meanwhile\nours, behind\nand this\n"
    assert path.read_text() == "an earlier run\nfrom C\nfrom a child\n"
