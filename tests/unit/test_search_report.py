"""The report of a search: what it reads from the folder, under way, over, torn or hostile, and that it is one page."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.monitor.search_report import MAX_FILE_BYTES, MAX_TRIALS, is_search, read_search, render_search
from cuadrilla.rundir import FolderLock, RunDir
from cuadrilla.tune.folder import SearchFolder
from tests.inside import cuadrilla
from tests.searches import FAILS, SPACE, STEPS, TOKENS, WrittenSearch

HOSTILE = "</script><script>alert(1)</script> %%SCRIPT%% <!-- \u2028 &amp; \ud800 \u202e"
STRANGE = ("text", [1.0], {"x": "y"}, True, None, 10**400, -1, 1.5, "\ud800", HOSTILE)


@pytest.fixture
def search(tmp_path: Path) -> WrittenSearch:
    return WrittenSearch(run=tmp_path / "casa")


def shown(folder: SearchFolder) -> dict[str, Any]:
    """The data inside the page, as a browser would find it: up to the first end tag of a script."""
    page = render_search(read_search(folder))
    found = re.search(r'<script id="report" type="application/json">(.*?)</script', page, re.DOTALL)
    assert found
    value = json.loads(found[1], parse_constant=lambda name: pytest.fail(name))
    assert isinstance(value, dict)
    return value


# -- what it says ------------------------------------------------------------------------------------------------------


def test_the_best_and_what_to_type(search: WrittenSearch) -> None:
    found = read_search(search.write())
    scores = [row.by_rung[1] for row in found.trials if row.by_rung[1] is not None]
    assert found.best is not None
    assert found.best["score"] == min(scores)
    assert found.best["run"] == found.trials[0].run
    assert found.best["train"] == "cuadrilla train casa/tune/best"
    assert found.best["evaluate"] == f"cuadrilla eval casa/tune/{found.best['run']}"
    assert f"--set optim.lr={found.best['values']['optim.lr']}" in found.best["sets"]
    assert (found.state, found.num_begun, found.num_failed) == ("complete", 30, 4)


def test_trials_stand_by_how_far_they_came_and_then_by_score(search: WrittenSearch) -> None:
    rows = read_search(search.write()).trials
    scored = [row for row in rows if row.score is not None]
    assert rows[: len(scored)] == scored
    assert scored == sorted(scored, key=lambda row: (-row.rung, row.score))
    assert [row.rung for row in scored].count(1) == 10 - sum(row.trial % 7 == FAILS for row in rows if row.rung)
    assert {row.reason for row in rows[len(scored) :]} == {"the loss is not finite"}
    assert {row.state for row in rows} == {"finished", "failed"}


@pytest.mark.parametrize(("until", "finished"), [(0, 0), (1, 1), (12, 12)])
def test_a_search_that_goes_on_or_was_broken_off(search: WrittenSearch, until: int, finished: int) -> None:
    folder = search.write(until=until)
    broken_off = read_search(folder)
    assert (broken_off.state, broken_off.num_runs) == ("stopped", finished)
    assert [row.state for row in broken_off.trials].count("broken off") == 1
    with FolderLock(folder.lock, purpose="the search"):
        goes_on = read_search(folder)
    assert goes_on.state == "running"
    assert [row.state for row in goes_on.trials].count("running") == 1


def test_settings_that_do_not_count_are_left_out(search: WrittenSearch) -> None:
    found = read_search(search.write())
    assert [axis.key for axis in found.axes] == [*SPACE]
    assert {axis.key: axis.kind for axis in found.axes if axis.kind != "number"} == {
        "optim.kind": "choice", "optim.lr": "log", "optim.weight_decay": "log", "train.batch_sequences": "choice",
    }  # fmt: skip
    for row in found.trials:
        assert ("optim.momentum" in row.values) == (row.values["optim.kind"] == "muon")
        assert ("optim.weight_decay" in row.values) == (row.values["optim.kind"] == "adamw")
        assert row.values["train.batch_sequences"] in ("8", "16", "32")


def test_constraints_are_marked_and_the_best_meets_them(search: WrittenSearch) -> None:
    """Small models are the better ones nowhere: without the constraint another trial is the best."""
    search.section = {"constraints": {"parameters": {"at_most": 1e6}}}
    found = read_search(search.write())
    assert found.best is not None
    assert found.best["values"]["model.layers"] * 3e5 <= 1e6
    for row in found.trials:
        large = row.score is not None and float(row.values["model.layers"]) * 3e5 > 1e6
        limits = [(each["name"], each["limit"], each["at_most"]) for each in row.missed]
        assert limits == ([("parameters", 1e6, True)] if large else [])


def test_constraints_of_the_run_file_count_where_the_search_has_written_none(search: WrittenSearch) -> None:
    folder = search.write()
    assert read_search(folder).constraints == []
    (search.run / "run.toml").write_text(
        "[tune.constraints]\nparameters = {at_most = 1e6}\nx = 3\ny = {at_least = nan}\n"
    )
    assert [limit["name"] for limit in read_search(folder).constraints] == ["parameters"]
    assert any(row.missed for row in read_search(folder).trials)


def test_how_the_search_went_by_tokens(search: WrittenSearch) -> None:
    found = read_search(search.write())
    tokens = [point["tokens"] for point in found.progress]
    bests = [point["best"] for point in found.progress]
    assert tokens == sorted(tokens)
    assert (
        tokens[-1]
        == found.tokens
        == TOKENS * (26 * STEPS // 3 + sum(row.rung for row in found.trials) * STEPS * 2 // 3)
    )
    assert bests == sorted(bests, reverse=True)
    assert found.best is not None
    assert bests[-1] == found.best["score"]


def test_curves_of_the_best_trials(search: WrittenSearch) -> None:
    found = read_search(search.write())
    assert found.curve_metric == "val_loss"
    assert [curve["run"] for curve in found.curves] == [row.run for row in found.trials[:8]]
    last_tokens, last_loss = found.curves[0]["points"][-1]
    assert (last_tokens, last_loss) == (STEPS * TOKENS, found.trials[0].score)


def test_higher_is_better_where_the_search_says_so(search: WrittenSearch) -> None:
    search.section = {"maximize": True}
    found = read_search(search.write())
    assert found.best is not None
    assert found.best["score"] == max(row.by_rung[1] for row in found.trials if row.by_rung[1] is not None)
    assert found.progress[-1]["best"] == found.best["score"] or found.progress[-1]["best"] > found.best["score"]


def test_a_search_over_a_function(search: WrittenSearch) -> None:
    search.section = {"function": "trees.py:fit", "space": {"depth": {"low": 1, "high": 9}}}
    found = read_search(search.write())
    assert (found.function, found.metric) == ("trees.py:fit", "score")
    assert found.best is not None
    assert set(json.loads(found.best["arguments"])) == set(found.best["values"])
    assert "train" not in found.best


# -- what has decided --------------------------------------------------------------------------------------------------


def test_what_has_decided_is_the_setting_that_decides(search: WrittenSearch) -> None:
    pytest.importorskip("optuna", reason="Optuna is not installed: pip install 'cuadrilla[tune]'")
    found = read_search(search.write()).importance
    assert (found["problem"], found["trials"]) == ("", 26)
    assert found["parts"][0][0] == "optim.lr"
    assert {key for key, _ in found["parts"]} <= {*SPACE}
    assert sum(part for _, part in found["parts"]) == pytest.approx(1)


def test_a_few_trials_decide_nothing(search: WrittenSearch) -> None:
    assert read_search(search.write(until=7)).importance["problem"] == "few"


def test_without_optuna_it_is_said_what_brings_it(search: WrittenSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert read_search(search.write()).importance["problem"] == "optuna"


def test_trials_that_are_all_equal_decide_nothing(search: WrittenSearch) -> None:
    folder = search.write()
    rows = [json.loads(line) for line in folder.trials.read_text().splitlines()]
    for row in rows:
        row.update({"values": {"model.layers": 3}} if "values" in row else {"score": 1.0, "rung": 0})
    folder.trials.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert read_search(folder).importance["problem"] == ("none" if "optuna" in sys.modules else "optuna")


# -- what anybody may have written -------------------------------------------------------------------------------------


def test_no_text_ends_the_script_or_becomes_html(search: WrittenSearch) -> None:
    folder = search.write(until=3)
    said = {"trial": 90, "rung": 0, "place": HOSTILE}
    rows = [{"event": "begun", "values": {key: HOSTILE}, **said} for key in ("optim.kind", HOSTILE)]
    with open(folder.trials, "a") as file:
        for row in (*rows, {"event": "ended", "score": None, "reason": HOSTILE, **said}):
            file.write(json.dumps(row) + "\n")
    page = render_search(read_search(folder))
    assert "<script>alert" not in page
    assert page.count("</script>") == 3
    row = next(row for row in shown(folder)["trials"] if row["trial"] == 90)
    assert "<script>alert(1)</script>" in row["reason"]
    assert "\u202e" not in row["reason"]


@pytest.mark.parametrize("value", STRANGE, ids=ascii)
def test_what_should_be_a_number_and_is_none_is_left_out(search: WrittenSearch, value: object) -> None:
    folder = search.write(until=20)
    keys = ("time", "event", "trial", "rung", "values", "place", "score", "figures", "tokens", "seconds", "reason")
    with open(folder.trials, "a") as file:
        for key in keys:
            for event in ("begun", "ended"):
                row = {"time": 1.0, "event": event, "trial": 40, "rung": 0, "values": {"optim.lr": 0.1}, key: value}
                file.write(json.dumps(row) + "\n")
        for row in (
            {"values": {"optim.lr": value, "model.layers": value}},
            {"score": 1.0, "figures": {"parameters": value}},
        ):
            kind = "begun" if "values" in row else "ended"
            file.write(json.dumps({"event": kind, "trial": 41, "rung": 7, **row}) + "\n")
        file.write('{"event": "ended", "trial": 42, "rung": 0, "score": 1e999, "tokens": NaN}\n')
    for row in shown(folder)["trials"]:
        assert row["score"] is None or type(row["score"]) in (int, float)
        assert all(type(each) in (int, float, str) for each in row["values"].values())


@pytest.mark.parametrize(
    "value", [3, None, [], [3], {"x": 3}, "x", {"identity": [3]}, {"identity": {"tune.space.x.low": 3}}]
)
def test_a_search_file_of_another_shape_leaves_a_report(search: WrittenSearch, value: object) -> None:
    """Settings and rungs are then taken from what was tried."""
    folder = search.write()
    folder.search.write_text(json.dumps(value))
    found = shown(folder)
    assert len(found["trials"]) == 30
    assert len(found["rungs"]) == 2
    assert {axis["key"] for axis in found["axes"]} >= {*SPACE}
    folder.search.unlink()
    assert len(shown(folder)["axes"]) == len(SPACE)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"tune.space.optim.lr.low": -1e308, "tune.space.optim.lr.high": 1e308, "tune.space.optim.lr.log": False},
        {"tune.space.optim.lr.step": 1e-300, "tune.space.optim.lr.log": False},
        {"tune.space.optim.lr.step": 1e-9, "tune.space.optim.lr.log": False},
        {"tune.space.model.layers.high": 10**300},
        {"tune.space.model.layers.low": "<b>"},
        {"tune.space.optim.kind.choices": ["<b>", 3, 3.5, True, "muon", "adamw", "x" * 10_000]},
        {"tune.space.optim.kind.choices": {}},
        {"tune.sampler": "<b>", "tune.factor": 10**9, "tune.maximize": "x"},
        {"tune.factor": 0, "tune.metric": HOSTILE},
        {"tune.function": HOSTILE},
    ],
    ids=str,
)
def test_a_space_that_somebody_else_wrote_leaves_a_report(search: WrittenSearch, spoilt: dict[str, Any]) -> None:
    folder = search.write()
    told = json.loads(folder.search.read_text())
    folder.search.write_text(json.dumps({**told, "identity": {**told["identity"], **spoilt}, "num_trials": "many"}))
    assert len(shown(folder)["trials"]) == 30


def test_torn_lines_and_files_that_are_gone_leave_a_report(search: WrittenSearch) -> None:
    folder = search.write()
    lines = folder.trials.read_text().splitlines()
    folder.trials.write_text("\n".join(["{", *lines[2:], lines[-1][:40]]))  # the first trial's beginning is lost
    best = folder.path / read_search(folder).trials[0].run / "metrics.jsonl"
    best.write_text(
        '{"version": 1, "tokens": "many", "val_loss": 1}\n{"version": 2, "tokens": 5, "val_loss": 1e999}\nnull\n{"ver'
    )
    second = folder.path / read_search(folder).trials[1].run / "metrics.jsonl"
    second.unlink()
    os.mkfifo(second)
    found = read_search(folder)
    assert found.state == "stopped"
    assert len(found.trials) == 30
    assert [curve["run"] for curve in found.curves] == [row.run for row in found.trials[2:8]]


def test_a_file_of_trials_that_is_none_is_an_error(search: WrittenSearch) -> None:
    folder = search.write()
    with open(folder.trials, "ab") as file:
        file.truncate(MAX_FILE_BYTES + 1)  # a hole: it takes no room
    with pytest.raises(ConfigError, match="cannot read"):
        read_search(folder)
    folder.trials.unlink()
    with pytest.raises(ConfigError, match="no trial to report") as caught:
        read_search(folder)
    assert caught.value.hint
    os.mkfifo(folder.trials)
    with pytest.raises(ConfigError, match="cannot read"):
        read_search(folder)


def test_of_very_many_trials_the_best_are_shown(search: WrittenSearch) -> None:
    search.num_trials, search.rungs = MAX_TRIALS + 200, 1
    folder = search.write(until=0)
    with open(folder.trials, "a") as file:
        for trial in range(MAX_TRIALS + 200):
            common = {"trial": trial, "rung": 0, "time": 1.0}
            file.write(json.dumps({"event": "begun", "values": {"optim.lr": 0.01}, **common}) + "\n")
            file.write(json.dumps({"event": "ended", "score": float(5000 - trial), "tokens": 7, **common}) + "\n")
    found = shown(folder)
    assert len(found["trials"]) == MAX_TRIALS
    assert found["num_begun"] == MAX_TRIALS + 200
    assert found["trials"][0]["trial"] == MAX_TRIALS + 199
    assert found["progress"][-1]["tokens"] == 7 * (MAX_TRIALS + 200)


# -- the page and the command ------------------------------------------------------------------------------------------


def test_the_page_loads_nothing(search: WrittenSearch) -> None:
    page = render_search(read_search(search.write()))
    assert "default-src 'none'" in page
    assert not re.search(r"<(?:link|img|iframe)|\ssrc=|@import|url\(", page)
    assert "%%" not in page.partition('<script id="report"')[0]


def test_the_command_finds_the_search_that_is_meant(search: WrittenSearch) -> None:
    """A run's folder means its search only as long as the run itself has not been trained."""
    folder = search.write()
    assert is_search(folder.path)
    for meant in (
        folder.path,
        search.run,
        f"{search.run}/run.toml" if (search.run / "run.toml").exists() else search.run,
    ):
        folder.report.unlink(missing_ok=True)
        done = cuadrilla("report", meant)
        assert done.returncode == 0, done.stderr
        assert folder.report.read_text().startswith("<!doctype html>")
    assert json.loads(cuadrilla("report", "--json", search.run).stdout)["num_trials"] == 30
    RunDir(search.run).metrics.write_text('{"version": 1, "tokens": 5, "loss": 1.0}\n')
    assert "num_trials" not in json.loads(cuadrilla("report", "--json", search.run).stdout)
    assert json.loads(cuadrilla("report", "--json", folder.path).stdout)["num_trials"] == 30


def test_the_command_speaks_spanish(search: WrittenSearch, tmp_path: Path) -> None:
    folder = search.write()
    env = {**os.environ, "LANGUAGE": "es"}
    assert cuadrilla("report", folder.path, "--out", tmp_path / "p.html", env=env).returncode == 0
    page = (tmp_path / "p.html").read_text()
    assert '<html lang="es">' in page
    assert "<h2>Todos los ajustes de cada prueba</h2>" in page


def test_the_reader_needs_no_torch() -> None:
    code = "import sys, cuadrilla.cli.report; print('torch' in sys.modules, 'optuna' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
