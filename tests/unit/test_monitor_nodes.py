"""What machines have said about themselves: the ends of their files, whatever is in them."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuadrilla.host.gpus import GpuUsage
from cuadrilla.host.usage import Usage
from cuadrilla.link.base import NodeReport, SaidLine
from cuadrilla.monitor import nodes
from cuadrilla.monitor.nodes import MAX_HISTORY, NodeLine, NodesReader
from cuadrilla.rundir import RunDir
from cuadrilla.train.nodelog import MOST_BYTES, NodeLogs
from tests.watched import node_from

pytestmark = pytest.mark.unit

START = 1_795_569_000.0
FACTS = {"device": "cuda", "processor": "Ryzen", "system": "Debian 12", "torch": "2.13.0", "cuadrilla": "0.1.0"}
GPU = GpuUsage(index=0, name="RTX 4070", busy_percent=97.0, memory_used_bytes=5, memory_bytes=10, power_watts=241.0)
USAGE = Usage(cpu_percent=52.0, memory_used_bytes=4, memory_bytes=16, temperature_celsius=50.0, gpus=(GPU,))
REPORT = NodeReport(
    usage=USAGE,
    phase="computing",
    waiting_part=0.07,
    sent_bytes_per_second=1e6,
    received_bytes_per_second=2e6,
    round_trip_seconds=0.004,
)


class Coordinator:
    """Writes what the coordinator writes, five seconds apart."""

    def __init__(self, run: RunDir) -> None:
        self.now = START
        self.logs = NodeLogs(run.nodes, clock=self._clock)

    def _clock(self) -> float:
        self.now += 5
        return self.now


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def test_a_machine_as_the_coordinator_wrote_it(run: RunDir) -> None:
    coordinator = Coordinator(run)
    for busy, facts in ((10.0, FACTS), (20.0, {})):
        coordinator.logs.report("pc/cuda:0", NodeReport(usage=Usage(cpu_percent=busy), phase="waiting", facts=facts))
    coordinator.logs.report("mac", NodeReport(phase="a new one"))
    coordinator.logs.report(
        "pc/cuda:0",
        NodeReport(**{**REPORT.__dict__, "lines": (SaidLine(level="warning", text="hot"),), "dropped": 3}),
    )
    mac, pc = NodesReader(run).read()
    assert (mac.name, mac.phase, mac.usage, mac.heard) == ("mac", None, Usage(), START + 15)
    assert (pc.name, pc.facts, pc.time, pc.heard) == ("pc/cuda:0", FACTS, START + 20, START + 20)
    assert (pc.usage, pc.phase, pc.waiting_part, pc.round_trip_seconds) == (USAGE, "computing", 0.07, 0.004)
    assert (pc.sent_bytes_per_second, pc.received_bytes_per_second) == (1e6, 2e6)
    assert (pc.log, pc.cut_lines) == ((NodeLine(time=START + 20, level="warning", text="hot"),), 3)
    assert pc.times == (START + 5, START + 10, START + 20)
    assert pc.history["cpu_percent"] == (10.0, 20.0, 52.0)
    assert pc.history["gpu_percent"] == (None, None, 97.0)
    assert pc.history["waiting_percent"][-1] == pytest.approx(7.0)


def test_only_the_end_is_read_also_across_a_rotation(run: RunDir) -> None:
    coordinator = Coordinator(run)
    coordinator.logs.report("pc", NodeReport(facts=FACTS))
    path = run.nodes / "pc.jsonl"
    while not path.with_name("pc.jsonl.1").exists():
        coordinator.logs.report("pc", REPORT)
    coordinator.logs.report("pc", REPORT)
    assert path.with_name("pc.jsonl.1").stat().st_size > MOST_BYTES
    (pc,) = NodesReader(run).read()
    assert pc.facts == FACTS  # of a session that began two thousand rows ago
    assert len(pc.times) == MAX_HISTORY
    assert pc.times[-1] - pc.times[0] == 5 * (MAX_HISTORY - 1)


def test_read_again(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "TAIL_BYTES", 2000)
    coordinator, reader = Coordinator(run), NodesReader(run)
    assert reader.read() == []
    coordinator.logs.report("pc", NodeReport(facts=FACTS))
    assert reader.read()[0].facts == FACTS
    for _ in range(20):
        coordinator.logs.report("pc", REPORT)
    assert (reader.read()[0].facts, reader.read()[0].time) == (FACTS, coordinator.now)
    assert len(reader.read()[0].times) == 21
    (newer,) = NodesReader(run).read()
    assert (newer.facts, newer.time) == (FACTS, coordinator.now)
    assert 1 < len(newer.times) < 10  # the end only
    coordinator.logs.report("pc", NodeReport(facts={"device": "cpu"}))
    assert reader.read()[0].facts == {"device": "cpu"}


def test_what_is_hostile_torn_or_no_file(run: RunDir) -> None:
    run.nodes.mkdir()
    os.mkfifo(run.nodes / "pipe.jsonl")
    (run.nodes / "folder.jsonl").mkdir()
    (run.nodes / "notes.txt").write_text("not ours")
    bad = [
        "[" * 100_000, "null", "{}", '{"time": 1e999, "kind": "usage"}', '{"time": true, "kind": "log", "text": "x"}',
        '{"time": 5, "kind": "usage", "cpu_percent": 1e30, "gpus": {"a": 1}, "phase": ["c"], "waiting_part": 2}',
        '{"time": 6, "kind": "log", "level": "\\u001b", "text": "\\u001b[2Jred\\nsecond\\u202e"}',
        '{"time": 7, "kind": "log", "level": "error", "text": ' + json.dumps("x" * 5000) + "}",
        '{"time": 8, "kind": "hello", "facts": {"\\u001b[1m": "\\u001b]0;owned\\u0007", "device": 5}}',
        '{"time": 9, "kind": "cut", "lines": -5}', '{"time": 10, "kind": "us',
    ]  # fmt: skip
    (run.nodes / "evil\x1b[31m.jsonl").write_bytes("\n".join(bad).encode() + b"\xff\x00")
    evil, folder, pipe = NodesReader(run).read()
    assert (folder.heard, pipe.heard) == (None, None)
    assert evil.name == "evil\\u001b[31m"
    assert (evil.heard, evil.time, evil.usage, evil.phase, evil.waiting_part) == (9.0, 5.0, Usage(), None, None)
    assert evil.log[0] == NodeLine(time=6.0, level="info", text="\\u001b[2Jred\\nsecond\\u202e")
    assert len(evil.log[1].text) == 500
    assert evil.facts == {"\\u001b[1m": "\\u001b]0;owned\\u0007"}
    assert evil.cut_lines == 0


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("time", "kind", "phase", "waiting_part", "text", "level", "lines", "facts", "gpus", "cpu_percent")
ROW = st.dictionaries(st.sampled_from(KEYS), ANY_JSON | st.sampled_from(["usage", "log", "cut", "hello"]))


@settings(max_examples=50)
@given(st.lists(ROW, max_size=4))
def test_any_rows_are_a_machine(rows: list[dict[str, Any]]) -> None:
    node = node_from("x", [{"time": 5, "kind": "usage", **row} for row in rows])
    assert all(len(values) == len(node.times) for values in node.history.values())
