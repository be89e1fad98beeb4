"""The report: what it reads from a run directory, however long, torn or hostile, and that it is one page."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cuadrilla.cli.report import report
from cuadrilla.errors import ConfigError
from cuadrilla.monitor.report import WorkerRow, read_report, render, thinned
from cuadrilla.rundir import RunDir, append_event, write_json
from cuadrilla.train.sinks import JsonlSink
from tests.watched import WrittenCrew, add_rows, rows_of


def row(version: int, **more: Any) -> dict[str, Any]:
    return {"tokens": 10 * version, "loss": 1 / version, "tokens_per_second": 5.0, "lr_factor": 1.0, **more}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Six steps of two workers, one of which left and came back after the third."""
    run = RunDir(tmp_path)
    sink = JsonlSink(run.metrics)
    for name in ("ana", "luis"):
        append_event(run.events, "joined", worker=name)
    for version in range(1, 7):
        if version == 4:
            append_event(run.events, "checkpoint", version=3)
            append_event(run.events, "left", worker="luis", reason="the connection ended")
        shares = {"ana": 0.75, "luis": 0.25} if version <= 3 else {}
        sink.log(version, row(version, shares=shares) if shares else row(version))
    sink.close()
    append_event(run.events, "joined", worker="luis")
    write_json(run.config, {"values": {"optim": {"lr": 0.02}, "run": {"seed": 0}}, "origins": {"optim.lr": "file"}})
    return run


def shown(page: str) -> dict[str, Any]:
    """The data inside a page, as a browser would find it: up to the first end tag of a script."""
    found = re.search(r'<script id="report" type="application/json">(.*?)</script', page, re.DOTALL)
    assert found
    value = json.loads(found[1])
    assert isinstance(value, dict)
    return value


def test_the_step_of_the_lowest_held_out_loss(run: RunDir) -> None:
    assert read_report(run).best is None
    sink = JsonlSink(run.metrics)
    for version, loss in ((7, 2.0), (8, 1.5), (9, float("nan")), (10, 1.75)):
        sink.log(version, row(version, val_loss=loss))
    sink.close()
    assert read_report(run).best == {"version": 8, "loss": 1.5}


def test_machines_and_their_shares(run: RunDir) -> None:
    assert read_report(run).machines == [
        WorkerRow(name="ana", joined=1, lost=0, share=0.375),
        WorkerRow(name="luis", joined=2, lost=1, last_reason="the connection ended", share=0.125),
    ]


def test_events_carry_the_step_during_which_they_happened(run: RunDir) -> None:
    told = [(event["event"], event["version"]) for event in read_report(run).events]
    assert told == [("joined", 0), ("joined", 0), ("left", 3), ("joined", 3)]


def test_configuration_says_what_was_set(run: RunDir) -> None:
    report = read_report(run)
    assert report.values == {"optim.lr": 0.02, "run.seed": 0}
    assert report.changed == ["optim.lr"]


def test_a_resumed_run_shows_each_step_once_in_order(run: RunDir) -> None:
    sink = JsonlSink(run.metrics)
    sink.log(5, row(5, val_loss=0.5))
    sink.close()
    rows = read_report(run).rows
    assert [line["version"] for line in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[4]["val_loss"] == 0.5


def test_nothing_in_a_run_ends_the_script_or_becomes_html(run: RunDir) -> None:
    hostile = "</script><script>alert(1)</script> %%SCRIPT%% <!-- \u2028 &amp;"
    sink = JsonlSink(run.metrics)
    sink.log(7, row(7, sample=hostile))
    sink.close()
    page = render(read_report(run))
    assert shown(page)["samples"] == [{"version": 7, "text": hostile}]
    assert "<script>alert" not in page


def test_the_page_loads_nothing(run: RunDir) -> None:
    page = render(read_report(run))
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:link|img|iframe)|\ssrc=|@import|url\(", page)


def test_a_torn_line_and_missing_files_leave_a_report(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text(json.dumps({"version": 1, **row(1)}) + '\n{"version": 2, "lo')
    report = read_report(run)
    assert report.version == 1
    assert report.machines == []
    assert shown(render(report))["values"] == {}


def test_a_loss_that_was_not_finite_is_a_gap(run: RunDir) -> None:
    with open(run.metrics, "a") as file:
        file.write('{"version": 7, "tokens": 70, "loss": NaN, "val_loss": Infinity}\n')
    append_event(run.events, "update skipped", version=7, loss=float("nan"), workers=["ana"])
    append_event(run.events, "update skipped", version=8, loss=float("inf"))
    write_json(run.config, {"values": {"optim": {"clip": float("inf")}}, "origins": {}})
    page = shown(render(read_report(run)))
    assert page["rows"][-1]["loss"] is None
    assert [event["details"]["loss"] for event in page["events"][-2:]] == [None, None]
    assert page["values"] == {"optim.clip": None}


STRANGE = ("text", [1.0], {"x": "y"}, True, None, 10**400, "\ud800")


@pytest.mark.parametrize("value", STRANGE, ids=ascii)
def test_what_should_be_a_number_and_is_none_is_left_out(run: RunDir, value: object) -> None:
    """The file may have been written by anybody; 3000 rows, so that neighbours become one."""
    keys = ("tokens", "loss", "grad_norm", "tokens_per_second", "shares", "val_loss", "sample")
    with open(run.metrics, "a") as file:
        for version in range(7, 3000):
            file.write(json.dumps({"version": version, **dict.fromkeys(keys, value)}) + "\n")
        for wrong in ({"shares": {"ana": value}}, {"loss": "NUMBER"}):
            line = json.dumps({"version": 3000, **wrong})
            file.write(line.replace('"NUMBER"', "1e999") + "\n")
        file.write(json.dumps({"version": value, "loss": value}) + "\n")
    for key in ("time", "event", "worker", "version"):
        with open(run.events, "a") as file:
            file.write(json.dumps({"event": "joined", "worker": "ana", key: value}) + "\n")
    run.env.write_text(json.dumps({"packages": value, "cpu": value}))
    page = shown(render(read_report(run)))
    assert page["rows"][-1]["version"] == 3000
    drawn = [number for line in page["rows"] for key, number in line.items() if key != "shares"]
    assert all(number is None or type(number) in (int, float) for number in drawn)
    assert {type(event["time"]) for event in page["events"]} <= {int, float, type(None)}


@pytest.mark.parametrize("value", [3, None, [], [3], {"x": 3}])
def test_files_of_another_shape_leave_a_report(run: RunDir, value: object) -> None:
    (run.path / "manifest.json").write_text(json.dumps({"sources": value, "splits": value}))
    write_json(run.config, {"values": {"data": {"folder": "."}}, "origins": value})
    assert shown(render(read_report(run)))["data"]["splits"] == {}
    write_json(run.config, {"values": value})
    for path in (run.status, run.env):
        path.write_text(json.dumps(value))
    assert len(read_report(run).rows) == 6


def test_no_training_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no training to report") as caught:
        read_report(RunDir(tmp_path))
    assert caught.value.hint


def test_the_page_replaces_files_only_and_keeps_links(run: RunDir, tmp_path: Path) -> None:
    for path in (Path(), tmp_path):
        with pytest.raises(ConfigError, match="is not a file"):
            report(run.path, out=path)
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    report(run.path, out=link)
    assert link.is_symlink()
    assert page.stat().st_size > 1000


def test_long_runs_are_averaged_and_keep_their_evaluations() -> None:
    rows = [{"version": n, "loss": float(n), "shares": {"ana": 1.0}} for n in range(1, 10_001)]
    rows[4321]["val_loss"] = 7.0
    thin = thinned(rows, most=1000)
    assert len(thin) == 1000
    assert [line["version"] for line in thin] == list(range(10, 10_001, 10))
    assert [line["loss"] for line in thin[:2]] == [5.5, 15.5]
    assert [line["version"] for line in thin if "val_loss" in line] == [4330]
    assert thin[0]["shares"] == {"ana": 1.0}


def test_the_model_and_its_text_are_told_in_figures(run: RunDir) -> None:
    folder = run.checkpoints / "v00000006"
    folder.mkdir(parents=True)
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(7)}, folder / "model.safetensors")
    (run.checkpoints / "v00000007").mkdir()
    (run.checkpoints / "v00000007" / "model.safetensors").write_bytes(b"\xff" * 40)  # a newer one that is damaged
    (run.path / "data").mkdir()
    counts = {"val_windows_checked": 200, "val_windows_in_train": 30}
    write_json(run.path / "data" / "manifest.json", {"vocab_size": 300, "counts": counts})
    write_json(run.config, {"values": {"data": {"folder": "data"}}, "origins": {}})
    found = read_report(run)
    assert found.parameters == 22
    assert (found.data["vocabulary"], found.data["leak"]) == (300, 0.15)


@pytest.mark.parametrize(
    "header", [b"", b"{}", b"[1]", b'{"a": 5}', b'{"a": {"shape": ["x"]}}', b'{"a": {"shape": [1e999]}}']
)
def test_weights_of_another_shape_leave_a_report(run: RunDir, header: bytes) -> None:
    folder = run.checkpoints / "v00000006"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    write_json(run.config, {"values": {"data": {"folder": "."}}, "origins": {}})
    (run.path / "manifest.json").write_text('{"counts": {"val_windows_checked": "many"}, "vocab_size": []}')
    assert read_report(run).parameters in (None, 0)
    assert render(read_report(run))


def test_what_machines_have_said_of_themselves(tmp_path: Path) -> None:
    crew = WrittenCrew(folder=tmp_path, speeds={"ana": 3.0, "luis": 1.0}, rounds=10)
    run = crew.write()
    hello = {"time": crew.began, "kind": "hello", "facts": {"device": "<b>cuda"}}
    usage = [crew.usage("ana", crew.began + step, step=step) | {"waiting_part": 0.25} for step in range(3)]
    add_rows(rows_of(run, "ana"), [hello, *usage, {"time": crew.began, "kind": "log", "level": "info", "text": "hola"}])
    ana, luis = read_report(run).machines
    assert (ana.device, ana.waits, ana.word) == ("<b>cuda", 0.25, "hola")
    assert (luis.device, luis.waits, luis.word) == ("", None, "")
