"""`[alarm]` with real programs and real servers: told in time, never held up, nothing of the secret anywhere."""

import json
import os
import re
import signal
import ssl
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import trustme

from cuadrilla.config import AlarmSection
from cuadrilla.engines.bundle import offer
from cuadrilla.errors import ConfigError, DataError
from cuadrilla.rundir import RunDir
from cuadrilla.runfile import read_run_file, resolve
from cuadrilla.train.alarms import Alarms, body_of, filled, read_address
from cuadrilla.train.checkpoint import load_newest
from tests.inside import cuadrilla
from tests.models import language_run
from tests.web import Server, fixed, moved, serving

CEILING_SECONDS = 30.0
SECRET = "T0PSECRETWORD"
WRITES = "import sys; open(sys.argv[1], 'a', encoding='utf-8').write('\\x1f'.join(sys.argv[2:]) + '\\n')"
HANGS_AT_FIRST = """
import pathlib, sys, time
if sys.argv[3] == "left":
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
pathlib.Path(sys.argv[2]).write_text(sys.argv[3])
"""
HANGS = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no modes of files")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + CEILING_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.01)


def writer(file: Path, *fields: str) -> list[str]:
    return [sys.executable, "-c", WRITES, str(file), *fields]


def lines(file: Path) -> list[list[str]]:
    return [line.split("\x1f") for line in file.read_text().splitlines()] if file.exists() else []


def address_file(folder: Path, address: str) -> str:
    path = folder / "webhook"
    path.write_text(address + "\n")
    path.chmod(0o600)
    return path.name


def bodies(server: Server) -> list[dict[str, Any]]:
    return [json.loads(body) for body in server.bodies]


def run_in(folder: Path) -> RunDir:
    (folder / "casa").mkdir()
    return RunDir(folder / "casa")


def test_a_program_is_told(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "told"
    section = AlarmSection(command=writer(file, "{event}", "{title}", "{text}", "{run}", "{nothing}"))
    with Alarms(section, run=run) as alarms:
        alarms.hear("joined", {"worker": "ana"})
        alarms.hear("left", {"worker": "ana", "reason": "it was\nswitched off {title}"})
        until(lambda: lines(file))
        alarms.hear("finished", {"version": 12, "complete": True, "reason": ""})
        alarms.hear("left", {"worker": "berta", "reason": "the run is over"})
    left, finished = lines(file)
    title, reason = "cuadrilla: casa: a worker has left", "casa: ana has left: it was\\nswitched off {title}"
    assert left == ["left", title, reason, "casa", "{nothing}"]
    assert finished == ["finished", "cuadrilla: casa has finished", "casa: all 12 steps are done", "casa", "{nothing}"]


def test_an_address_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of this machine: no proxy hears of it."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    run = run_in(tmp_path)
    with serving() as server:
        server.on("/hook", fixed(204))
        section = AlarmSection(webhook_file=address_file(run.path, server.url(f"/hook?token={SECRET}")))
        with pytest.raises(DataError), Alarms(section, run=run) as alarms:  # noqa: PT012
            alarms.hear("evicted", {"worker": "ana", "reason": "<!channel> <https://bad.example|here> @everyone"})
            until(lambda: server.bodies)
            raise DataError("{path} is gone", path="x.bin")
        left, failed = bodies(server)
    assert left["text"] == "casa: ana has left: ‹!channel› ‹https://bad.example|here› @everyone"
    assert left["allowed_mentions"] == {"parse": []}
    assert left["content"] == left["text"]
    assert {key: failed[key] for key in ("event", "run", "title", "text")} == {
        "event": "failed",
        "run": "casa",
        "title": "cuadrilla: casa has failed",
        "text": "casa: x.bin is gone",
    }
    assert failed["time"].endswith("+00:00")


def test_both_are_told_in_the_language_of_who_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGUAGE", "es")
    run, file = run_in(tmp_path), tmp_path / "told"
    with serving() as server:
        server.on("/hook", fixed(200, b"ok"))
        webhook = address_file(run.path, server.url("/hook"))
        with Alarms(AlarmSection(command=writer(file, "{text}"), webhook_file=webhook), run=run) as alarms:
            alarms.hear("finished", {"version": 7, "complete": False, "reason": "interrupted"})
        assert bodies(server)[0]["text"] == lines(file)[0][0] == "casa: parado en el paso 7: interrupted"
        assert bodies(server)[0]["event"] == "stopped"


@pytest.mark.parametrize("hangs_when", ["left", "finished"])
def test_what_hangs_is_killed_and_holds_nobody_up(
    tmp_path: Path, hangs_when: str, caplog: pytest.LogCaptureFixture
) -> None:
    run, file = run_in(tmp_path), tmp_path / "started"
    with serving() as server:
        server.on("/hook", lambda handler: until(handler.server.closing.is_set))
        webhook = address_file(run.path, server.url("/hook"))
        section = AlarmSection(command=[sys.executable, "-c", HANGS, str(file)], webhook_file=webhook, on=[hangs_when])
        with Alarms(section, run=run, limit_seconds=3.0) as alarms:
            alarms.hear("left", {"worker": "ana", "reason": "gone"})
            if hangs_when == "left":
                until(file.exists)
            alarms.hear("finished", {"version": 1, "complete": True, "reason": ""})
        assert file.exists()
    assert not psutil.Process().children(recursive=True)
    assert caplog.text.count("did not answer within 3 s") == caplog.text.count("took more than 3 s") == 1


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
    until(lambda: not psutil.Process().children(recursive=True))


def test_a_flood_is_counted(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "told"
    now = [100.0]
    section = AlarmSection(command=writer(file, "{event}", "{text}"), least_seconds=60.0)
    with Alarms(section, run=run, clock=lambda: now[0]) as alarms:
        for number in range(1000):
            alarms.hear("left", {"worker": f"w{number}", "reason": ""})
        until(lambda: len(lines(file)) == 1)
        now[0] += 61
        alarms.hear("left", {"worker": "again", "reason": ""})
        until(lambda: len(lines(file)) == 2)
        alarms.hear("late", {"worker": "w5", "lease": 3})
        until(lambda: len(lines(file)) == 3)
    texts = [text for _, text in lines(file)]
    assert texts[0].startswith("casa: w0 has left")
    assert sum(int(number) for number in re.findall(r"\((\d+) more", " ".join(texts))) == 999


def test_a_queue_that_is_full_takes_the_last_word(tmp_path: Path) -> None:
    """Nothing is sent while the first one hangs; the last word still is."""
    run, file, told = run_in(tmp_path), tmp_path / "started", tmp_path / "told"
    command = [sys.executable, "-c", HANGS_AT_FIRST, str(file), str(told), "{event}"]
    with Alarms(AlarmSection(command=command, least_seconds=0.0), run=run) as alarms:
        alarms.hear("left", {"worker": "w", "reason": ""})
        until(file.exists)
        for number in range(100):
            alarms.hear("left", {"worker": f"w{number}", "reason": ""})
        alarms.hear("finished", {"version": 1, "complete": True, "reason": ""})
    assert told.read_text() == "finished"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (fixed(500), "its address answered 500"),
        (moved("http://127.0.0.1:1/elsewhere"), "its address answered 302, which leads elsewhere"),
        (moved("/hook2", 307), "its address answered 307, which leads elsewhere"),
    ],
    ids=["refuses", "elsewhere", "on the same host"],
)
def test_what_fails_is_one_warning(tmp_path: Path, answer: Any, problem: str, caplog: pytest.LogCaptureFixture) -> None:
    run = run_in(tmp_path)
    with serving() as server:
        server.on("/hook", answer)
        webhook = address_file(run.path, server.url(f"/hook?token={SECRET}"))
        with Alarms(AlarmSection(webhook_file=webhook, least_seconds=0.0), run=run) as alarms:
            alarms.hear("late", {"worker": "ana"})
            until(lambda: problem in caplog.text)
            alarms.hear("late", {"worker": "ana"})
        assert "/hook2" not in [path for path, _ in server.seen]
    assert [record.levelname for record in caplog.records].count("WARNING") == 1
    assert SECRET not in caplog.text


def test_nobody_there_and_no_such_program(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_in(tmp_path)
    webhook = address_file(run.path, "http://127.0.0.1:1/x")
    with Alarms(AlarmSection(command=["no-such-program"], webhook_file=webhook), run=run) as alarms:
        alarms.hear("finished", {"version": 1, "complete": True, "reason": ""})
    assert "its address cannot be reached (Connection refused)" in caplog.text
    assert "no-such-program cannot be started: No such file or directory" in caplog.text


def test_a_certificate_must_be_valid_and_a_proxy_sees_the_host_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_in(tmp_path)
    authority, certificate = trustme.CA(), tmp_path / "authority.pem"
    authority.cert_pem.write_to_path(certificate)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("hooks.example").configure_cert(tls)
    with serving(tls) as server:
        server.on("/services/x", fixed(200, b"ok"))
        monkeypatch.setenv("https_proxy", server.url(""))
        webhook = address_file(run.path, f"https://hooks.example/services/x?{SECRET}")
        for trusted in (False, True):
            if trusted:
                monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
            with Alarms(AlarmSection(webhook_file=webhook), run=run) as alarms:
                alarms.hear("finished", {"version": 1, "complete": True, "reason": ""})
            assert len(server.bodies) == trusted
        asked = [path for path, _ in server.seen if path.startswith("CONNECT")]
    assert "the certificate of its address is not valid" in caplog.text
    assert asked == ["CONNECT hooks.example:443"] * 2


@pytest.mark.parametrize(
    "address",
    [
        "http://hooks.example/x",
        "ftp://127.0.0.1/x",
        "file:///etc/passwd",
        "https://user:word@hooks.example/x",
        "https:///x",
        "https://[::1/x",
        "https://hooks.example:99999999/x",
        "https://hooks.example/x y",
        "https://hooks.example/x\nhttps://hooks.example/y",
        "https://hóoks.example/x",
        "",
        "x" * 10_000,
    ],
)
def test_addresses_that_are_refused(tmp_path: Path, address: str) -> None:
    run = run_in(tmp_path)
    webhook = address_file(run.path, address)
    with pytest.raises(ConfigError) as refused:
        Alarms(AlarmSection(webhook_file=webhook), run=run)
    assert "hooks" not in f"{refused.value.message}{refused.value.hint}"


@pytest.mark.parametrize("address", ["https://hooks.example/x", "http://localhost:8000/x", "http://[::1]:80/x"])
def test_addresses_that_are_taken(tmp_path: Path, address: str) -> None:
    assert read_address(tmp_path / address_file(tmp_path, f" {address} ")) == address


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    webhook = address_file(run.path, "https://hooks.example/x")
    (run.path / webhook).chmod(0o640)
    with pytest.raises(ConfigError, match="others may read"):
        Alarms(AlarmSection(webhook_file=webhook), run=run)
    with pytest.raises(ConfigError, match="No such file"):
        Alarms(AlarmSection(webhook_file="missing"), run=run)
    os.mkfifo(run.path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a regular file"):
        Alarms(AlarmSection(webhook_file="pipe"), run=run)


def test_what_was_typed_wrong_is_no_alarm(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "told"
    for error in (ConfigError("no"), KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), Alarms(AlarmSection(command=writer(file, "{text}")), run=run):
            raise error
    assert not file.exists()


def test_fields_make_no_option_and_no_program() -> None:
    fields = {"title": "-rf", "text": "{run}", "run": "casa", "event": "left", "time": "now"}
    assert filled(["{title}", "{title}", "-{run}", "--x={text}", '{"a": 1}'], fields) == [
        "{title}",
        " -rf",
        "-casa",
        "--x={run}",
        '{"a": 1}',
    ]
    assert body_of(fields)["content"] == "{run}"


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
        address_file(trained.path, server.url(f"/hook?{SECRET}"))
        command = json.dumps(writer(file, "{event}", "{text}"))
        words = ("--set", "train.steps=5", "--allow-changes", "--set", f"alarm.command={command}")
        done = cuadrilla("train", trained.path, *words, "--set", "alarm.webhook_file=webhook")
        assert done.returncode == 0, done.stderr
        assert lines(file) == [["finished", "run: all 5 steps are done"]]
        assert [body["event"] for body in bodies(server)] == ["finished"]
    for path in trained.path.rglob("*"):
        if path.is_file() and path.name != "webhook":
            assert SECRET.encode() not in path.read_bytes(), path
    config = read_run_file(trained.run_file).config
    assert config.alarm.webhook_file == "webhook"  # kept from the last start
    found = load_newest(trained.checkpoints)
    assert found is not None
    assert found.state["identity"]["config"]["alarm"]["command"] == []
    offered = json.loads(offer(config, trained.path).config)
    assert offered["alarm"]["command"] == []
    assert offered["alarm"]["webhook_file"] == ""
    done = cuadrilla("train", trained.path, "--set", "alarm.webhook_file=gone")
    assert done.returncode == 0
    assert "gone" in done.stderr


def test_hear_is_cheap_from_many_threads(tmp_path: Path) -> None:
    run, file = run_in(tmp_path), tmp_path / "told"
    with Alarms(AlarmSection(command=writer(file, "{event}"), least_seconds=3600.0), run=run) as alarms:
        threads = [
            threading.Thread(target=lambda: [alarms.hear("late", {"worker": "w"}) for _ in range(500)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        until(lambda: lines(file))
    assert lines(file) == [["late"]]
