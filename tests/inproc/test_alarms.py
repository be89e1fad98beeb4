"""`[alarm]` with real programs and real servers: told in time, never held up, nothing of the secret anywhere."""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.config import AlarmSection
from cuadrilla.crew.bundle import offer
from cuadrilla.errors import ConfigError, DataError
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_file, resolve
from cuadrilla.train.alarms import Alarms
from cuadrilla.train.checkpoint import load_newest
from tests.conftest import children
from tests.inside import cuadrilla
from tests.models import language_run
from tests.web import Server, fixed, serving

CEILING_SECONDS = 30.0
SECRET = "T0PSECRETWORD"
WRITES = "import sys; open(sys.argv[1], 'a', encoding='utf-8').write(sys.stdin.read() + '\\n')"
HANGS_AT_FIRST = """
import json, pathlib, sys, time
event = json.load(sys.stdin)["event"]
if event == "left":
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
pathlib.Path(sys.argv[2]).write_text(event)
"""
HANGS = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes of files")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + CEILING_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def writer(file: Path) -> list[str]:
    return [sys.executable, "-c", WRITES, str(file)]


def told(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def address_file(folder: Path, address: str) -> str:
    path = folder / "addresses"
    path.write_text(address + "\n")
    path.chmod(0o600)
    return path.name


def to(server: Server, path: str) -> str:
    """The address of a page of the server, as apprise writes it."""
    return server.url(path).replace("http://", "json://")


def bodies(server: Server) -> list[dict[str, Any]]:
    return [json.loads(body) for body in server.bodies]


def run_in(folder: Path) -> RunDir:
    (folder / "casa").mkdir()
    return RunDir(folder / "casa")


def test_a_program_is_told(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "told"
    with Alarms(AlarmSection(command=writer(file)), run=run) as alarms:
        alarms.hear("joined", {"worker": "ana"})
        alarms.hear("left", {"worker": "ana", "reason": "it was\nswitched off {title}"})
        until(lambda: told(file))
        alarms.hear("finished", {"version": 12, "complete": True, "reason": ""})
        alarms.hear("left", {"worker": "berta", "reason": "the run is over"})
    left, finished = told(file)
    assert (left["event"], left["title"], left["run"]) == ("left", "cuadrilla: casa: a worker has left", "casa")
    assert left["text"] == "casa: ana has left: it was\\nswitched off {title}"
    assert (finished["event"], finished["text"]) == ("finished", "casa: all 12 steps are done")
    assert finished["time"].endswith("+00:00")


def test_addresses_are_told_through_apprise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_in(tmp_path)
    with serving() as server:
        server.on("/hook", fixed(204))
        section = AlarmSection(address_file=address_file(run.path, to(server, f"/hook?token={SECRET}")))
        with pytest.raises(DataError), Alarms(section, run=run) as alarms:  # noqa: PT012
            alarms.hear("evicted", {"worker": "ana", "reason": "<!channel> <https://bad.example|here> @everyone"})
            until(lambda: server.bodies)
            raise DataError("{path} is gone", path="x.bin")
        left, failed = bodies(server)
    assert left["message"] == "casa: ana has left: ‹!channel› ‹https://bad.example|here› ＠everyone"
    assert (failed["title"], failed["message"]) == ("cuadrilla: casa has failed", "casa: x.bin is gone")
    assert SECRET not in caplog.text


def test_both_are_told_in_the_language_of_who_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "es")
    run, file = run_in(tmp_path), tmp_path / "told"
    with serving() as server:
        server.on("/hook", fixed(200, b"ok"))
        addresses = address_file(run.path, to(server, "/hook"))
        with Alarms(AlarmSection(command=writer(file), address_file=addresses), run=run) as alarms:
            alarms.hear("finished", {"version": 7, "complete": False, "reason": "interrupted"})
        said = "casa: parado en el paso 7: interrupted"
        assert bodies(server)[0]["message"] == told(file)[0]["text"] == said
        assert told(file)[0]["event"] == "stopped"


@pytest.mark.parametrize("hangs_when", ["left", "finished"])
def test_what_hangs_is_killed_and_holds_nobody_up(
    tmp_path: Path, hangs_when: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, file = run_in(tmp_path), tmp_path / "started"
    with serving() as server:
        server.on("/hook", lambda handler: until(handler.server.closing.is_set))
        addresses = address_file(run.path, to(server, "/hook"))
        hangs = [sys.executable, "-c", HANGS, str(file)]
        section = AlarmSection(command=hangs, address_file=addresses, on=[hangs_when])
        with Alarms(section, run=run, limit_seconds=3.0) as alarms:
            alarms.hear("left", {"worker": "ana", "reason": "gone"})
            if hangs_when == "left":
                until(file.exists)
            alarms.hear("finished", {"version": 1, "complete": True, "reason": ""})
        assert file.exists()
    assert not children()
    assert caplog.text.count("alarm.command took more than 3 s") == 1
    assert caplog.text.count("alarm.address_file took more than 3 s") == 1


def test_a_second_ctrl_c_leaves_nobody_behind(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "started"

    def interrupt() -> None:
        until(file.exists)
        os.kill(os.getpid(), signal.SIGINT)

    impatient = threading.Thread(target=interrupt)
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        impatient.start()
        with Alarms(AlarmSection(command=[sys.executable, "-c", HANGS, str(file)]), run=run) as alarms:
            alarms.hear("finished", {"version": 1, "complete": False, "reason": "interrupted"})
    impatient.join()
    until(lambda: not children())


def test_a_flood_is_one_message(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "told"
    with Alarms(AlarmSection(command=writer(file), least_seconds=3600.0), run=run) as alarms:
        for number in range(1000):
            alarms.hear("left", {"worker": f"w{number}", "reason": ""})
        alarms.hear("late", {"worker": "w5", "lease": 3})
        until(lambda: len(told(file)) == 2)
    assert told(file)[0]["text"] == "casa: w0 has left"
    assert [each["event"] for each in told(file)] == ["left", "late"]


def test_a_queue_that_is_full_takes_the_last_word(tmp_path: Path) -> None:
    """Nothing is sent while the first one hangs; the last word still is."""
    run, file, last = run_in(tmp_path), tmp_path / "started", tmp_path / "told"
    command = [sys.executable, "-c", HANGS_AT_FIRST, str(file), str(last)]
    with Alarms(AlarmSection(command=command, least_seconds=0.0), run=run) as alarms:
        alarms.hear("left", {"worker": "w", "reason": ""})
        until(file.exists)
        for number in range(100):
            alarms.hear("left", {"worker": f"w{number}", "reason": ""})
        alarms.hear("finished", {"version": 1, "complete": True, "reason": ""})
    assert last.read_text() == "finished"


def test_what_fails_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, failed = run_in(tmp_path), "alarm.address_file ended with exit code 1"
    with serving() as server:
        server.on("/hook", fixed(500))
        section = AlarmSection(address_file=address_file(run.path, to(server, f"/hook?{SECRET}")), least_seconds=0.0)
        with Alarms(section, run=run) as alarms:
            alarms.hear("late", {"worker": "ana"})
            until(lambda: failed in caplog.text)
            alarms.hear("finished", {"version": 1, "complete": True, "reason": ""})
        assert len(server.bodies) == 2
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert SECRET not in caplog.text


def test_no_such_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Alarms(AlarmSection(command=["no-such-program"]), run=run_in(tmp_path)) as alarms:
        alarms.hear("finished", {"version": 1, "complete": True, "reason": ""})
    assert "alarm.command cannot be started" in caplog.text


def test_without_apprise_a_new_run_does_not_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs apprise"):
        Alarms(AlarmSection(address_file=address_file(run.path, "json://localhost/x")), run=run)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    addresses = address_file(run.path, "https://hooks.example/x")
    (run.path / addresses).chmod(0o640)
    with pytest.raises(ConfigError, match="others may read"):
        Alarms(AlarmSection(address_file=addresses), run=run)
    with pytest.raises(ConfigError, match="No such file"):
        Alarms(AlarmSection(address_file="missing"), run=run)
    os.mkfifo(run.path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        Alarms(AlarmSection(address_file="pipe"), run=run)


def test_what_was_typed_wrong_is_no_alarm(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "told"
    for error in (ConfigError("no"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), Alarms(AlarmSection(command=writer(file)), run=run):
            raise error
    assert not file.exists()


@pytest.mark.parametrize(
    "line",
    [
        'command = [""]',
        'command = ["x.BAT"]',
        'command = ["a\\u0000b"]',
        'on = ["never"]',
        "least_seconds = -1",
        "url = 'x'",
    ],
)
def test_sections_that_are_refused(line: str) -> None:
    with pytest.raises(ConfigError):
        resolve(f'[data]\nfolder = "data"\n[train]\nsteps = 1\n[alarm]\n{line}\n')


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return language_run(tmp_path_factory.mktemp("made"))


def test_a_run_tells_and_nobody_else_holds_the_section(trained: RunDir, tmp_path: Path) -> None:
    """Not the checkpoint, which a standby copies, nor what workers are offered; a run goes on with other alarms."""
    file = tmp_path / "told"
    with serving() as server:
        server.on("/hook", fixed(200, b"ok"))
        address_file(trained.path, to(server, f"/hook?{SECRET}"))
        command = json.dumps(writer(file))
        words = ("--set", "train.steps=5", "--allow-changes", "--set", f"alarm.command={command}")
        done = cuadrilla("train", trained.path, *words, "--set", "alarm.address_file=addresses")
        assert done.returncode == 0, done.stderr
        assert [each["text"] for each in told(file)] == ["run: all 5 steps are done"]
        assert [body["message"] for body in bodies(server)] == ["run: all 5 steps are done"]
    for path in trained.path.rglob("*"):
        if path.is_file() and path.name != "addresses":
            assert SECRET.encode() not in path.read_bytes(), path
    config = read_run_file(trained.run_file).config
    assert config.alarm.address_file == "addresses"  # kept from the last start
    found = load_newest(trained.checkpoints)
    assert found is not None
    assert found.state["identity"]["config"]["alarm"]["command"] == []
    offered = json.loads(offer(config, trained.path).config)
    assert offered["alarm"]["command"] == []
    assert offered["alarm"]["address_file"] == ""
    done = cuadrilla("train", trained.path, "--set", "alarm.address_file=gone")
    assert done.returncode == 0
    assert "gone" in done.stderr
