"""`cuadrilla doctor` on this machine, also with programs that hang; torch is asked only once."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.doctor import here
from cuadrilla.host import facts as host_facts
from cuadrilla.version import __version__
from tests.inside import cuadrilla

Findings = list[dict[str, Any]]


def found(done: "subprocess.CompletedProcess[str]") -> Findings:
    """The warnings and failures."""
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    levels = [row["level"] for row in answer["findings"]]
    assert (answer["failures"], answer["warnings"]) == (levels.count("failure"), levels.count("warning"))
    assert done.returncode == (3 if answer["failures"] else 0), done.stderr
    return [row for row in answer["findings"] if row["level"] != "ok"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, doctor does not wait for torch."""
    monkeypatch.setattr(here, "DEVICES_SECONDS", 0.1)


@pytest.fixture
def no_home(tmp_path: Path) -> str:
    """A CUADRILLA_HOME that cannot be made: a file is in its place."""
    (tmp_path / "file").touch()
    return str(tmp_path / "file")


@pytest.fixture(scope="module")
def examined() -> "subprocess.CompletedProcess[str]":
    """Findings on this machine, from a process that ends with code 99 if it has loaded torch itself."""
    script = (
        "import sys; from cuadrilla.cli import app; from cuadrilla.doctor import here; here.DEVICES_SECONDS = 200; "
        "code = app.run(); sys.exit(99 if 'torch' in sys.modules else code)"
    )
    command = [sys.executable, "-c", script, "doctor", "--json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)


def test_it_starts_without_torch_and_looks_at_it_in_a_child(examined: "subprocess.CompletedProcess[str]") -> None:
    assert examined.returncode in (0, 3), examined.stderr
    rows = json.loads(examined.stdout)["findings"]
    assert any(row["check"] == "devices.torch" and row["level"] == "ok" for row in rows), rows


def test_no_false_alarm(examined: "subprocess.CompletedProcess[str]") -> None:
    """Findings that may be true here are allowed: Docker that is not running, a full disk, full memory."""
    true = {"docker.service", "machine.disk", "machine.memory"}
    assert {row["check"] for row in found(examined)} <= true, examined.stdout


@pytest.mark.usefixtures("impatient")
def test_the_report_is_short_plain_text_without_what_variables_hold(no_home: str) -> None:
    environment = {**os.environ, "WANDB_API_KEY": "not-for-anybody", "CUADRILLA_HOME": no_home, "LANGUAGE": "es"}
    done = cuadrilla("doctor", "--report", env=environment)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"cuadrilla {__version__}, Python ")
    assert "numpy " in lines[1]
    assert any(line.startswith(" ok machine.system ") for line in lines)
    found = lines.index(f" X  machine.disk         {no_home} cannot be written to, and a crew's keys are kept there")
    assert lines[found + 1] == "     type here:  export CUADRILLA_HOME=$PWD/.cuadrilla"
    assert "not-for-anybody" not in done.stdout
    assert len(lines) < 60


@pytest.mark.usefixtures("impatient")
def test_it_is_read_without_colour_in_spanish(no_home: str) -> None:
    environment = {**os.environ, "CUADRILLA_HOME": no_home, "LANGUAGE": "es"}
    done = cuadrilla("doctor", env=environment)
    assert f" X  machine.disk         no se puede escribir en {no_home}, y ahí se guardan" in done.stdout
    assert "     escribe aquí:  export CUADRILLA_HOME=$PWD/.cuadrilla\n" in done.stdout
    assert "\x1b" not in done.stdout
    del environment["CUADRILLA_HOME"]
    assert "export CUADRILLA_HOME" not in cuadrilla("doctor", env=environment).stdout


@pytest.mark.usefixtures("impatient")
def test_programs_that_hang_or_talk_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The programs are stopped, and their output cannot control a terminal. The kernel's name makes it WSL."""
    monkeypatch.setattr(host_facts.platform, "release", lambda: "5.15.153.1-microsoft-standard-WSL2")
    monkeypatch.setattr(host_facts, "find_container", lambda _environ: None)
    monkeypatch.setattr(here, "PROGRAM_SECONDS", 0.5)
    hanging = ("nvidia-smi.exe", "netsh.exe", "powershell.exe", "docker", "firewall-cmd", "dpkg-query")
    scripts = {"wslinfo": "echo nat", "ufw": "yes \"$(printf '\\033[2J\\007')\""}
    for name, script in (scripts | dict.fromkeys(hanging, "sleep 1000 & sleep 1000")).items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = cuadrilla("doctor", "--port", "47470", env=env)
    assert " !  docker.service" in done.stdout
    assert " !  wsl.network" in done.stdout
    assert len(done.stdout) < 5000
