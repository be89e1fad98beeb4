"""The dashboard's answers: who gets them, for which runs, and for runs that grow, are hostile or have ended."""

import itertools
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.monitor.web.runs import Runs
from cuadrilla.rundir import append_event, write_json
from tests.dashboards import TOKEN, ShownDashboard, shown
from tests.watched import WrittenCrew, add_rows, rows_of

HOLDS = """
import sys, time
from pathlib import Path
from cuadrilla.rundir import FolderLock

with FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def crew(tmp_path: Path) -> WrittenCrew:
    return WrittenCrew(folder=tmp_path / "runs" / "casa", speeds={"ana": 3.0, "luis": 1.0}, rounds=60)


@pytest.fixture
def dashboard(crew: WrittenCrew) -> Iterator[ShownDashboard]:
    crew.write()
    with shown(crew.folder.parent) as found:
        yield found


@pytest.fixture(scope="module")
def still(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShownDashboard]:
    """Of a run that has ended."""
    folder = tmp_path_factory.mktemp("still")
    WrittenCrew(folder=folder / "casa", speeds={"ana": 3.0, "luis": 1.0}, rounds=60).write()
    with shown(folder) as found:
        yield found


PATHS = [f"/api/{name}?of=casa" for name in ("follow", "run", "stop", "notes")]
PATHS += ["/api/runs", "/metrics", f"/api/runs?token={TOKEN}"]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "", "Cookie": f"token={TOKEN}"}, 401),
        ({"Origin": "http://evil.example"}, 403),
    ],
)
def test_who_is_refused(still: ShownDashboard, headers: dict[str, str], status: int) -> None:
    for path, method in itertools.product(PATHS, ("GET", "POST")):
        found, body, _ = still.ask(path, method=method, **headers)
        assert (path, method, found) == (path, method, status)
        assert b"casa" not in body


def test_the_page_comes_without_a_token_and_tells_nothing(still: ShownDashboard) -> None:
    status, body, headers = still.ask("/", Authorization="")
    assert (status, b"casa" in body, TOKEN.encode() in body) == (200, False, False)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    (nonce,) = set(re.findall(r"nonce-([\w-]+)", policy))
    elements = re.findall(rb"<(?:script|style)[^>]*>", body)
    assert all(f'nonce="{nonce}"'.encode() in element for element in elements)
    assert not re.findall(rb"""(?:src|href)=["'](?!#|data:)""", body)
    assert still.ask("/", Authorization="")[1] != body  # each answer has its own nonce


def test_nothing_is_changed_but_notes(dashboard: ShownDashboard, crew: WrittenCrew) -> None:
    before = {path: path.stat().st_mtime_ns for path in crew.folder.rglob("*")}
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        for path in ("/", "/api/runs", "/api/follow?of=casa", "/api/run?of=casa", "/metrics"):
            assert dashboard.ask(path, method=method)[0] == 405
    for path in ("/api/runs", "/api/run?of=casa", "/metrics"):
        assert dashboard.ask(path)[0] == 200
    for path in ("/api/notes?of=casa", "/api/stop?of=casa"):
        assert dashboard.ask(path)[0] == 405
    assert dashboard.ask("/api/stop?of=casa", method="POST")[0] == 409  # it has ended
    assert dashboard.ask("/api/notes?of=../casa", method="POST")[0] == 404
    assert {path: path.stat().st_mtime_ns for path in crew.folder.rglob("*")} == before
    with dashboard.following("casa") as told:
        assert next(told)["about"]["notes"] == ""
        assert dashboard.ask("/api/notes?of=casa", method="POST")[0] == 200
        assert next(told)["about"]["notes"] == crew.run.notes.read_text() == "{}"
    assert {path for path in crew.folder.rglob("*")} == {*before, crew.run.notes}


def test_who_may_be_stopped(tmp_path: Path) -> None:
    """A run can be stopped that a process of this machine trains."""
    run = WrittenCrew(folder=tmp_path / "casa", speeds={"ana": 1.0}, rounds=2, state="running").write()
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(run.lock)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            runs = Runs([tmp_path / "casa"])
            assert not runs.summaries()[0]["stops"]  # the process that holds the lock does not coordinate
            write_json(run.status, {"state": "running", "pid": process.pid})
            assert runs.summaries()[0]["stops"]
            assert runs.stop("casa")
            assert process.wait(timeout=60) == -signal.SIGTERM
        finally:
            process.kill()
    assert not runs.stop("casa")
    assert not runs.stop("../casa")


@pytest.mark.parametrize("name", ["../casa", "/etc", "casa/../casa", "", "x" * 5000])
def test_only_runs_that_were_found_are_read(still: ShownDashboard, name: str) -> None:
    for path in ("/api/follow?of", "/api/run?of"):
        assert still.ask(f"{path}={quote(name, safe='')}")[0] == 404


def test_a_stream_tells_all_then_only_the_parts_that_change(dashboard: ShownDashboard, crew: WrittenCrew) -> None:
    run = crew.run
    add_rows(rows_of(run, "ana"), [crew.usage("ana", crew.began, step=1)])
    with dashboard.following("casa") as told:
        first = next(told)
        assert (first["head"]["version"], len(first["figures"]["x"]), first["head"]["state"]) == (60, 60, "complete")
        assert [(row["name"], row["share"]) for row in first["crew"]] == [("ana", 0.75), ("luis", 0.25)]
        assert first["shares"]["columns"]["luis"] == [0.25] * 60
        assert [sample["version"] for sample in first["samples"]] == [40]
        add_rows(run.metrics, [crew.row(61)])
        second = next(told)
        assert set(second) == {"head", "crew", "figures", "shares"}
        assert second["figures"]["x"] == list(range(1, 62))
        append_event(run.events, "evicted", worker="luis", reason="the connection ended")
        third = next(told)
        assert set(third) == {"crew", "events", "spanish"}
        assert third["events"][-1]["details"] == {"worker": "luis", "reason": "the connection ended"}
        rows = [{"time": crew.began, "kind": "log", "level": "error", "text": "one\ntwo"}]
        add_rows(rows_of(run, "ana"), [*rows, {"time": crew.began, "kind": "cut", "lines": 7}])
        fourth = next(told)
        assert [(line["node"], line["text"], line["dropped"]) for line in fourth["log"]] == [
            ("ana", "one\ntwo", 0),
            ("ana", "", 7),
        ]
        other = run.path / "new"
        add_rows(other, [crew.row(3)])
        other.replace(run.metrics)
        again = next(told)  # the file begins anew
        assert (again["figures"]["x"], again["samples"], again["head"]["version"]) == ([3], [], 3)


def test_a_search_and_its_trials_are_runs_beside_the_run(tmp_path: Path) -> None:
    for place in ("casa", "casa/tune/t0000", "casa/tune/best", "otra"):
        WrittenCrew(folder=tmp_path / place, speeds={"ana": 1.0}, rounds=2).write()
    write_json(tmp_path / "casa" / "tune" / "status.json", {"state": "complete"})
    found = {"casa", "casa/tune", "casa/tune/t0000", "casa/tune/best"}
    assert set(Runs([tmp_path / "casa"]).paths()) == found
    assert set(Runs([tmp_path]).paths()) == {*found, "otra"}
    assert {row["key"]: row["state"] for row in Runs([tmp_path / "casa" / "tune"]).summaries()}[
        "casa/tune"
    ] == "complete"


def test_runs_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuadrilla.monitor.web.runs.MAX_OPEN", 1)
    for place in ("uno", "dos", "otros/uno", "otros/más adentro/tres"):
        WrittenCrew(folder=tmp_path / place, speeds={"ana": 1.0}, rounds=2).write()
    (tmp_path / "exported").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):  # a model in Hugging Face's layout is no run
        (tmp_path / "exported" / name).write_text("{}")
    runs = Runs([tmp_path, tmp_path / "uno"])
    assert {"uno", "dos"} < set(runs.paths()) <= {"uno", "dos", "otros/uno", f"{tmp_path.name}/uno"}
    assert len(runs.paths()) == 3
    assert {row["version"] for row in runs.summaries()} == {2}
    one, other = list(runs.paths())[:2]
    reader = runs.watched(one)
    assert runs.watched(one) is reader
    runs.watched(other)
    assert runs.watched(one) is not reader  # only the newest one was kept
    (tmp_path / "uno" / "run.toml").touch()
    assert set(Runs([tmp_path / "uno" / "run.toml"]).paths()) == {"uno"}
    with pytest.raises(ConfigError, match="is not a folder"):
        Runs([tmp_path / "missing"])
