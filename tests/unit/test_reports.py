"""Workers' reports on their machines: they arrive unchanged, hostile ones are refused, and the files stay small."""

import json
import logging
import math
import threading
from pathlib import Path

import pytest

from cuadrilla.crew.reporting import NewestLines, reporting
from cuadrilla.errors import LinkError
from cuadrilla.host.gpus import GpuUsage
from cuadrilla.host.usage import Usage
from cuadrilla.link import wire
from cuadrilla.link.base import MAX_LINES, MAX_TEXT, NodeReport, SaidLine
from cuadrilla.train import nodelog
from cuadrilla.train.nodelog import NodeLogs

GPUS = (GpuUsage(index=0, name="RTX 3050", busy_percent=50.0), GpuUsage(index=1, name="RTX 4070 Ti"))
FULL = NodeReport(
    usage=Usage(cpu_percent=12.5, gpus=GPUS),
    phase="waiting",
    waiting_part=0.25,
    lines=(SaidLine(level="warning", text="¿qué pasa?"),),
    dropped=3,
    facts={"processor": "Xeon"},
)


def test_nonsense_is_not_known_and_texts_act_on_no_terminal() -> None:
    sample = {"cpu_percent": math.nan, "memory_bytes": 2**64 - 1, "battery_percent": -3, "on_battery": "yes"}
    line = {"level": "info", "text": "\x1b]0;a\x07\n" + "x" * 10_000}
    report = {"usage": sample, "lines": [line] * MAX_LINES, "facts": {"a\n": "y" * 10_000}}
    found = wire.decode(b"NodeReport " + json.dumps(report).encode(), NodeReport)
    assert found.usage == Usage()
    assert all("\x1b" not in line.text and len(line.text) <= MAX_TEXT for line in found.lines)
    assert max(map(len, found.facts.values())) <= MAX_TEXT


@pytest.mark.parametrize(
    "fields",
    [
        {"phase": "\x1b[2J"},
        {"waiting_part": 7},
        {"sent_bytes_per_second": math.inf},
        {"lines": [{"level": "\x1b", "text": "x"}]},
        {"usage": {"gpus": [{"index": 0, "name": "x"}] * 17}},
        {"facts": {f"{number}": "y" for number in range(1000)}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_no_worker_reports_is_refused(fields) -> None:
    with pytest.raises(LinkError, match="a message of an unknown kind"):
        wire.decode(b"NodeReport " + json.dumps(fields).encode(), NodeReport)


def test_rows_of_a_node(tmp_path: Path) -> None:
    NodeLogs(tmp_path / "nodes", clock=lambda: 7.0).report("pc/cuda:0", FULL)
    hello, usage, line, cut = map(json.loads, (tmp_path / "nodes" / "pc%2Fcuda%3A0.jsonl").read_text().splitlines())
    assert hello == {"time": 7.0, "kind": "hello", "facts": {"processor": "Xeon"}}
    told = [usage[key] for key in ("kind", "phase", "cpu_percent", "waiting_part")]
    assert told == ["usage", "waiting", 12.5, 0.25]
    assert [gpu["name"] for gpu in usage["gpus"]] == ["RTX 3050", "RTX 4070 Ti"]
    assert line == {"time": 7.0, "kind": "log", "level": "warning", "text": "¿qué pasa?"}
    assert cut == {"time": 7.0, "kind": "cut", "lines": 3}
    assert (tmp_path / "nodes" / "pc%2Fcuda%3A0.jsonl").stat().st_mode & 0o077 == 0


def test_files_of_nodes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodelog, "MAX_BYTES", 1000)
    logs = NodeLogs(tmp_path)
    for _ in range(20):
        for worker in ("a", "b"):
            logs.report(worker, FULL)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert {"a.jsonl.1", "b.jsonl.1"} <= set(sizes) <= {f"{name}.jsonl{old}" for name in "ab" for old in ("", ".1")}
    assert max(sizes.values()) < 2000


def test_a_full_disk_loses_rows_and_no_run(tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("a file where the folder should be")
    NodeLogs(tmp_path / "nodes").report("a", FULL)


def test_lines_are_kept_a_few_at_a_time() -> None:
    kept = NewestLines()
    log = logging.getLogger("test-lines-kept")
    log.propagate = False
    log.addHandler(kept)
    for number in range(MAX_LINES + 5):
        log.warning("line %d", number)
    log.info("not for people")
    lines, dropped = kept.take()
    assert (len(lines), dropped, lines[-1].text, lines[-1].level) == (MAX_LINES, 5, "line 24", "warning")
    assert kept.take() == ((), 0)


def test_reports_end_with_their_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuadrilla.crew.reporting.FIRST_SECONDS", 0.01)
    monkeypatch.setattr("cuadrilla.crew.reporting.REPORT_SECONDS", 0.01)
    heard: list[NodeReport] = []
    broken = threading.Event()

    def send(report: NodeReport) -> None:
        heard.append(report)
        if len(heard) == 2:
            broken.set()
            raise LinkError("the session has broken", hint="")

    with reporting(send, facts={"system": "Linux"}):
        assert broken.wait(10)
    assert [dict(report.facts) for report in heard] == [{"system": "Linux"}, {}]
    assert heard[0].usage.memory_bytes
    assert not [thread for thread in threading.enumerate() if thread.name == "reports"]
