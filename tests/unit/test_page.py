"""The saved page of a run: its content, also of torn and hostile run directories, and that it is a single file."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.cli.serve import dashboard
from cuadrilla.errors import ConfigError
from cuadrilla.monitor.run import MAX_NOTES_BYTES, RunReader, about
from cuadrilla.monitor.web.page import frozen_page
from cuadrilla.rundir import FolderLock, RunDir, append_event, write_json
from tests.watched import WrittenCrew, add_rows


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Fifty steps of two workers, one of which has left."""
    run = WrittenCrew(folder=tmp_path / "casa", speeds={"ana": 3.0, "luis": 1.0}, rounds=50).write()
    append_event(run.events, "left", worker="luis", reason="the connection ended")
    write_json(run.config, {"values": {"optim": {"lr": 0.02}, "alarm": {"x": 1}}, "origins": {"optim.lr": "file"}})
    return run


def held(run: RunDir) -> dict[str, Any]:
    """The data of a page, as a browser would find it: up to the first end tag of a script."""
    found = re.search(r'id="frozen" type="application/json">(.*?)</script', frozen_page(run), re.DOTALL)
    assert found
    value = json.loads(found[1])
    assert isinstance(value, dict)
    return value


def test_it_holds_all_that_the_dashboard_would_be_sent(run: RunDir) -> None:
    page = held(run)
    news = page["news"]
    assert (news["head"]["state"], news["head"]["version"], news["head"]["best_version"]) == ("complete", 50, 40)
    assert [row["name"] for row in news["crew"]] == ["ana", "luis"]
    assert (len(news["figures"]["x"]), [sample["version"] for sample in news["samples"]]) == (50, [40])
    assert news["events"][-1]["details"] == {"worker": "luis", "reason": "the connection ended"}
    assert (news["about"]["values"], news["about"]["changed"]) == ({"optim.lr": 0.02}, ["optim.lr"])


def test_the_step_of_the_lowest_held_out_loss(run: RunDir) -> None:
    losses = ((51, 2.0), (52, 0.5), (53, None), (54, 0.75))
    add_rows(run.metrics, [{"version": version, "val_loss": loss} for version, loss in losses])
    head = held(run)["news"]["head"]
    assert (head["best_version"], head["best_loss"], head["val_loss"]) == (52, 0.5, 0.75)


def test_nothing_in_a_run_ends_the_script_or_becomes_html(run: RunDir) -> None:
    hostile = "</script><script>alert(1)</script> {{script}} <!-- \u2028 &amp;"
    add_rows(run.metrics, [{"version": 51, "sample": hostile + "\ud800"}])
    run.notes.write_text(hostile, encoding="utf-8")
    news = held(run)["news"]
    assert (news["samples"][-1]["text"], news["about"]["notes"]) == (hostile + "\ud800", hostile)
    assert "<script>alert" not in frozen_page(run)


def test_it_loads_nothing(run: RunDir) -> None:
    page = frozen_page(run)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert {"default-src 'none'", "connect-src 'none'"} <= set(policy[1].split("; "))
    assert not re.search(r"<(?:img|iframe)|\ssrc=|@import|url\(", page)
    assert re.findall(r'<link[^>]*href="(.{5})', page) == ["data:"]


def test_no_training_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no training to report") as caught:
        frozen_page(RunDir(tmp_path))
    assert caught.value.hint


def test_it_replaces_files_only_and_keeps_links(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a file"):
        dashboard([run.path], save=tmp_path)
    with pytest.raises(ConfigError, match="of one run"):
        dashboard([run.path, run.path], save=tmp_path / "page.html")
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    dashboard([run.path], save=link)
    assert link.is_symlink()
    assert page.stat().st_size > 1000


# The texts beside the curves


def test_the_model_its_text_and_notes_of_it(run: RunDir) -> None:
    (run.path / "data").mkdir()
    write_json(run.path / "data" / "manifest.json", {"vocab_size": 300})
    write_json(run.config, {"values": {"data": {"folder": "data"}}, "origins": {}, "parameters": 22})
    run.notes.write_bytes(b"uno\r\n\xff" + b"x" * 2 * MAX_NOTES_BYTES)
    found = about(run)
    assert (found["parameters"], found["data"]["vocab_size"]) == (22, 300)
    assert found["notes"].startswith("uno\n\ufffdx")
    assert len(found["notes"]) == MAX_NOTES_BYTES


def test_what_is_said_in_spanish_comes_along(run: RunDir) -> None:
    """The page's own words; and of what the run's files say in English, what a terminal would say (`recognised`)."""
    found = re.search(r"const SPANISH = (\{.*\});", frozen_page(run))
    assert found
    assert {"{time} ago", "{path} is no run"} & set(json.loads(found[1])) == {"{time} ago"}
    assert held(run)["news"]["spanish"]["the connection ended"] == "la conexión terminó"


def test_how_far_it_is_and_what_is_left(run: RunDir) -> None:
    """The time left of a running run, by the speed of the newest steps. A row of windows has several steps."""
    write_json(run.config, {"values": {}, "num_steps": 100})
    add_rows(run.metrics, [{"version": 50 + 2 * n, "steps": 2, "seconds": 3.0} for n in range(1, 21)])
    reader = RunReader(run)
    assert "left_seconds" not in reader.data(now=0.0)
    with FolderLock(run.lock):
        now = reader.data(now=0.0)
    assert (now["num_steps"], now["left_seconds"]) == (100, pytest.approx(1.5 * 10))
    elapsed = reader.page()["figures"]["columns"]["elapsed"]
    assert (elapsed[49], elapsed[-1]) == (pytest.approx(50 * 0.4), pytest.approx(50 * 0.4 + 20 * 3))
