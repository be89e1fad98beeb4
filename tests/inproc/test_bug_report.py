"""`cuadrilla bug-report`: what is needed is in it, nothing secret is, whatever lies in the run folder."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from cuadrilla.monitor.bug_report import MOST_BYTES, NAME_OF_FILE, write_report
from cuadrilla.rundir import RunDir, append_event, last_rows
from tests.inside import cuadrilla
from tests.models import language_run

TOKEN = "8f14e45fceea167a5a36dedd4bea2543a1b2c3d4e5f60718293a4b5c6d7e8f90"
INVITE = f"cuadrilla1.192.168.7.50:47470.{'q' * 52}.{'w' * 32}.{'e' * 7}"
OUTSIDE = "outsidesecretword"
SECRETS = (TOKEN, "q" * 52, "w" * 32, "192.168.7.50", "portatil-eva", "hunter2", "aa:bb:cc:dd:ee:01", OUTSIDE)
LOG = f"""2026-11-25 04:12:17,123 WARNING coordinator | cuadrilla.link: portatil-eva/cuda:0 left: the connection ended
2026-11-25 04:12:18,123 INFO coordinator | cuadrilla.link: Authorization: Bearer hunter2 from 192.168.7.50:1234
2026-11-25 04:12:19,123 INFO coordinator | ray: token {TOKEN} {INVITE} aa:bb:cc:dd:ee:01 {Path.home()}/casa
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return language_run(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run(trained: RunDir, tmp_path: Path) -> RunDir:
    """With traces of a crew, and secrets where they do not belong."""
    run = RunDir(Path(shutil.copytree(trained.path, tmp_path / "run")))
    append_event(run.events, "joined", worker="portatil-eva/cuda:0")
    append_event(run.events, "left", worker="portatil-eva/cuda:0", reason=f"its token={TOKEN}")
    (run.logs / "log.coordinator.txt").write_text(LOG)
    run.nodes.mkdir(exist_ok=True)
    rows = [
        {"time": 1764043937.0, "kind": "hello", "facts": {"device": "NVIDIA RTX 4070 Ti", "system": "Linux"}},
        {"time": 1764043938.0, "kind": "usage", "cpu_percent": 17.5, "phase": "waiting"},
        {"time": 1764043939.0, "kind": "log", "level": "warning", "text": "no memory left at 192.168.7.50"},
    ]
    (run.nodes / "portatil-eva@cuda+0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = json.loads(run.config.read_text())
    config["values"]["engine"]["listen"] = "192.168.7.50:47470"
    config["values"]["sample"]["prompt"] = "a prompt of mine"
    run.config.write_text(json.dumps(config))
    with open(run.metrics, "a") as file:
        file.write(json.dumps({**last_rows(run.metrics)[-1], "sample": "a story of mine"}) + "\n")
    return run


def test_what_is_needed_is_in_it_and_nothing_secret(run: RunDir, tmp_path: Path) -> None:
    done = cuadrilla("bug-report", run.path, "--out", "-", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = done.stdout
    for secret in (*SECRETS, "a prompt of mine", "a story of mine", str(Path.home()) + "/"):
        assert secret not in report, secret
    for title in ("Machine", "Devices", "cuadrilla doctor", "Versions", "Run: settings", "Run: status", "Run: files"):
        assert f"\n## {title}\n" in report
    assert "## Run: machine host-1/cuda:0" in report
    assert "warning no memory left at address-" in report
    assert "host-1/cuda:0 left: the connection ended" in report
    assert "NVIDIA RTX 4070 Ti" in report
    assert '"event": "left", "worker": "host-1/cuda:0"' in report
    assert re.search(r"^torch==\d", report, re.MULTILINE)
    assert '"level": "ok", "check": "machine.' in report
    assert not list(tmp_path.glob("*.md"))


def test_samples_are_in_it_if_they_are_asked_for(run: RunDir) -> None:
    report = write_report(run, devices=[], findings=None, with_samples=True)
    assert "a prompt of mine" in report
    assert "a story of mine" in report


def test_it_is_shown_and_written(tmp_path: Path) -> None:
    """Without a run; a file that its owner alone can read. One that is asked for at a terminal: tests/spawn."""
    done = cuadrilla("bug-report", "--yes", "--out", "report.zip", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "## Machine" in done.stdout
    assert "## Run" not in done.stdout
    with zipfile.ZipFile(tmp_path / "report.zip") as archive:
        assert archive.read(NAME_OF_FILE).decode() == done.stdout
    if os.name == "posix":
        assert stat.S_IMODE((tmp_path / "report.zip").stat().st_mode) == 0o600


def test_nothing_is_written_that_nobody_has_seen(tmp_path: Path) -> None:
    done = cuadrilla("bug-report", cwd=tmp_path)
    assert done.returncode == 2
    assert "--out - prints it" in done.stderr
    assert cuadrilla("bug-report", "--yes", "--out", "/dev/null", cwd=tmp_path).returncode == 2
    assert cuadrilla("bug-report", "missing", "--out", "-", cwd=tmp_path).returncode == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pipes and links of this kind")
def test_a_hostile_run_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "key.txt").write_text(f"{OUTSIDE}\n")
    (outside / "worker.jsonl").write_text(json.dumps({"time": 1.0, "kind": "log", "level": "info", "text": OUTSIDE}))
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    (run.logs / "log.one.txt").symlink_to(outside / "key.txt")
    os.mkfifo(run.logs / "log.pipe.txt")
    (run.logs / "log.round.txt").symlink_to("log.round.txt")
    fences = "``````\n## Not a section\n\x1b[31m" + "x" * 5000 + "\nlast line"
    (run.logs / "log.fence.txt").write_text("y" * 100_000 + "\n" + fences)
    for number in range(60):
        (run.logs / f"log.many{number}.txt").write_bytes(os.urandom(200) + b"\n" + "ñ ".encode() * 30_000)
    run.nodes.symlink_to(outside)
    run.config.write_text("[" * 100_000)
    run.status.symlink_to(outside / "key.txt")
    run.env.write_text('{"packages": [1, 2]}')
    deep = '{"event": ' + "[" * 900 + "]" * 900 + "}\n"
    run.events.write_text(deep + '{"event": 1e999, "worker": null}\n\xff\n{"torn": ')
    os.mkfifo(run.metrics)
    os.mkfifo(run.lock)
    run.checkpoints.symlink_to("/")
    report = write_report(run, devices=[], findings={"findings": []})
    assert OUTSIDE not in report
    assert len(report.encode()) <= MOST_BYTES
    assert "\x1b" not in report
    assert "\nlast line\n```````\n" in report
    assert "\n`````\n" not in report
    assert max(map(len, report.split("\n"))) < 1100


def test_it_starts_without_torch() -> None:
    asked = "import sys, cuadrilla.cli.bug_report; sys.exit('torch' in sys.modules or 'grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", asked], check=False).returncode == 0
