"""`cuadrilla doctor` on real faults: programs that hang or print what sick ones print, full and tiny file systems, dead
sockets; and each finding is gone once the command that was printed has been typed.

A file system is made in a mount namespace of the process's own; nothing of the machine changes. What torch says of
itself is not waited for, but where it is looked at.
"""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.doctor import here
from cuadrilla.host import facts as host_facts
from cuadrilla.host.reachability import read_reachability
from cuadrilla.version import __version__
from tests.commands import COMMAND
from tests.inside import cuadrilla

QUICK = ("doctor", "--json", "--timeout", "0.1")
FULL = ("doctor", "--json", "--timeout", "200")
Findings = list[dict[str, Any]]
CARD = 'echo "NVIDIA GeForce RTX 3050, 580.82, 8.6"'
WINDOWS = {"powershell_exe": "echo 34160648192", "netsh_exe": "exit 0", "powercfg_exe": "exit 1"}


def programs(folder: Path, **texts: str) -> dict[str, str]:
    """An environment in which these programs come first: name with `_` for a dot → the lines of a shell script."""
    folder.mkdir(exist_ok=True)
    for name, script in texts.items():
        file = folder / name.replace("_exe", ".exe").replace("_", "-")
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def found(done: "subprocess.CompletedProcess[str]") -> Findings:
    """The warnings and failures."""
    assert done.stdout, done.stderr
    answer = json.loads(done.stdout)
    levels = [row["level"] for row in answer["findings"]]
    assert (answer["failures"], answer["warnings"]) == (levels.count("failure"), levels.count("warning"))
    assert done.returncode == (3 if answer["failures"] else 0), done.stderr
    return [row for row in answer["findings"] if row["level"] != "ok"]


def of(rows: Findings, check: str) -> dict[str, Any]:
    (row,) = [row for row in rows if row["check"] == check]
    return row


def names(rows: Findings) -> set[str]:
    """Without torch's, which had no time to answer."""
    return {row["check"] for row in rows} - {"nvidia.torch"}


def examine(*arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Findings:
    return found(cuadrilla(*QUICK, *arguments, env=env, cwd=cwd))


@pytest.fixture(scope="module")
def examined() -> "subprocess.CompletedProcess[str]":
    """This machine, by a process that ends with 99 if it has loaded torch itself."""
    script = (
        "import sys; from cuadrilla.cli import app; "
        f"sys.argv = {['cuadrilla', *FULL]}; code = app.run(); sys.exit(99 if 'torch' in sys.modules else code)"
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=250)


def test_it_starts_without_torch_and_looks_at_it_in_a_child(examined: "subprocess.CompletedProcess[str]") -> None:
    assert examined.returncode in (0, 3), examined.stderr
    rows = json.loads(examined.stdout)["findings"]
    assert any(row["check"] == "nvidia.torch" and row["level"] == "ok" for row in rows), rows


@pytest.mark.parametrize(
    "kind", ["here", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("container", "account"))]
)
def test_no_false_alarm(kind: str, tmp_path: Path, examined: "subprocess.CompletedProcess[str]") -> None:
    """Docker that is installed and does not run is no false one; neither are a full disk or memory."""
    true = {"docker.service", "machine.disk", "machine.memory", "machine.power"}
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    if kind == "account":
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("needs root and the command setpriv (util-linux) to become another user")
        os.chown(tmp_path, 65534, 65534)
        # It may read where this Python is, which may be root's folder, and do nothing else that others may not.
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=-all,+dac_read_search",
                "--ambient-caps=-all,+dac_read_search"]  # fmt: skip
        done = subprocess.run(
            [*user, *COMMAND, *FULL], capture_output=True, text=True, check=False, env=bare, cwd=tmp_path
        )
    elif kind == "container":
        done = cuadrilla(*FULL, env={**bare, "container": "podman"}, cwd=tmp_path)
    else:
        done = examined
    assert {row["check"] for row in found(done)} <= true, done.stdout


def test_the_report_is_short_plain_text_without_what_variables_hold() -> None:
    environment = {**os.environ, "WANDB_API_KEY": "not-for-anybody", "OMP_NUM_THREADS": "many", "LANGUAGE": "es"}
    done = cuadrilla("doctor", "--report", "--timeout", "0.1", env=environment)
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"cuadrilla {__version__}, Python ")
    assert "numpy " in lines[1]
    assert any(line.startswith("cpu: ") for line in lines)
    assert (
        "warning  machine.variables    OMP_NUM_THREADS=many: it is no number of threads -> unset OMP_NUM_THREADS"
        in lines
    )
    assert "not-for-anybody" not in done.stdout
    assert len(lines) < 60


def test_it_is_read_without_colour_in_two_languages() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "many", "LANGUAGE": "es"}
    done = cuadrilla("doctor", "--timeout", "0.1", env=environment)
    assert " ! machine.variables    OMP_NUM_THREADS=many: no es un número de hilos\n" in done.stdout
    assert "     escribe aquí:  unset OMP_NUM_THREADS\n" in done.stdout
    assert "\x1b" not in done.stdout
    english = cuadrilla("doctor", "--timeout", "0.1", env={**environment, "LANGUAGE": "en"})
    assert " ✔ machine.memory" in english.stdout
    assert "     type here:  unset OMP_NUM_THREADS\n" in english.stdout
    del environment["OMP_NUM_THREADS"]
    assert "OMP_NUM_THREADS" not in cuadrilla("doctor", "--timeout", "0.1", env=environment).stdout


class TestPrograms:
    """Stand-ins on the PATH that print what sick programs print."""

    @pytest.fixture
    def wsl(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """The kernel's name, by which WSL is known, from the system and in its files."""
        kernel = tmp_path / "root/proc/sys/kernel/osrelease"
        kernel.parent.mkdir(parents=True)
        kernel.write_text("5.15.153.1-microsoft-standard-WSL2\n")
        monkeypatch.setattr(host_facts.platform, "release", lambda: kernel.read_text().strip())
        monkeypatch.setattr(here, "read_reachability", partial(read_reachability, root=tmp_path / "root"))

    def test_a_card_that_wsl_does_not_see_until_it_is_restarted(self, wsl: None, tmp_path: Path) -> None:
        flag = tmp_path / "restarted"
        says = f'[ -e {flag} ] && {CARD} && exit 0; echo "No devices were found"; exit 6'
        env = programs(tmp_path / "bin", nvidia_smi=says, nvidia_smi_exe=CARD, wslinfo="echo nat", **WINDOWS)
        row = of(examine(env=env), "nvidia.driver")
        assert (row["level"], row["command"], row["shell"]) == ("failure", "wsl --shutdown", "powershell")
        assert row["fields"] == {"name": "NVIDIA GeForce RTX 3050"}
        flag.touch()  # what the command does: the next WSL sees it
        assert "nvidia.driver" not in names(examine(env=env))

    def test_a_driver_that_hangs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(here, "PROGRAM_SECONDS", 0.5)
        env = programs(tmp_path / "bin", nvidia_smi="sleep 1000 & sleep 1000")
        row = of(examine(env=env), "nvidia.driver")
        assert row["level"] == "failure"
        assert "the driver hangs" in row["cause"]
        assert row["command"].endswith("reboot")
        assert "nvidia.driver" not in names(examine(env=programs(tmp_path / "bin", nvidia_smi=CARD)))

    def test_a_driver_that_talks_for_ever(self, tmp_path: Path) -> None:
        """It is stopped after a megabyte, and what it says is no order to a terminal."""
        env = programs(tmp_path / "bin", nvidia_smi="yes \"$(printf '\\033[2J\\033]0;x\\007')\"")
        done = cuadrilla("doctor", "--timeout", "0.1", env=env)
        assert " ✘ nvidia.driver" in done.stdout
        assert len(done.stdout) < 5000

    @pytest.mark.thorough
    def test_every_program_hangs(self, wsl: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(here, "PROGRAM_SECONDS", 0.5)
        hanging = ("nvidia_smi", "nvidia_smi_exe", "netsh_exe", "powershell_exe", "powercfg_exe", "docker", "ufw",
                   "dpkg_query", "firewall_cmd")  # fmt: skip
        env = programs(tmp_path / "bin", wslinfo="echo nat", **dict.fromkeys(hanging, "exec sleep 1000"))
        assert names(examine("--port", "47470", env=env)) >= {"nvidia.driver", "wsl.network"}

    def test_ufw(self, tmp_path: Path) -> None:
        rules = tmp_path / "rules"
        rules.write_text("22/tcp ALLOW Anywhere\n")
        status = f'status) echo "Status: active"; cat {rules};;'
        script = f'case "$1" in {status} allow) echo "$2 ALLOW Anywhere" >> {rules};; esac'
        env = programs(tmp_path / "bin", ufw=script, sudo='"$@"')
        row = of(examine("--port", "47470", env=env), "network.ufw")
        subprocess.run(shlex.split(row["command"]), env=env, check=True)
        assert "network.ufw" not in names(examine("--port", "47470", env=env))


class TestDocker:
    @pytest.fixture(autouse=True)
    def docker(self) -> None:
        if shutil.which("docker") is None:
            pytest.skip("needs the command docker")

    def test_a_dead_one(self, tmp_path: Path) -> None:
        """Its socket is there, and nobody behind it."""
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "docker.sock"))
        place = f"unix://{tmp_path}/docker.sock"
        row = of(examine(env={**os.environ, "DOCKER_HOST": place}), "docker.service")
        assert row["fields"] == {"context": place}
        assert row["command"] == "unset DOCKER_HOST"
        left = [row for row in examine() if row["check"] == "docker.service"]
        assert all(row["command"] != "unset DOCKER_HOST" for row in left)


class TestFileSystems:
    """In a mount namespace, where the printed command is typed as it stands."""

    @pytest.fixture(autouse=True)
    def namespace(self) -> None:
        tried = ["unshare", "--mount", "true"]
        if os.geteuid() != 0 or not shutil.which("unshare") or subprocess.run(tried, check=False).returncode:
            pytest.skip("needs root and mount namespaces")

    def in_namespace(self, folder: Path, made: str, check: str, *, root: str = "/") -> list[Findings]:
        """The findings before and after the printed command of a check was typed. `made`: what is mounted."""
        command = shlex.join([*COMMAND, *QUICK])
        rows = f"(row for row in json.load(sys.stdin)['findings'] if row['check'] == {check!r})"
        pick = f"import json, sys; print(next({rows})['command'])"
        (folder / "script").write_text(f"""
            set -e
            cd {folder / "full" if (folder / "full").exists() else folder}
            {command} > {folder}/before || true
            typed=$({sys.executable} -c {shlex.quote(pick)} < {folder}/before)
            eval $typed
            {command} > {folder}/after || true
            cat {folder}/before {folder}/after
        """)
        enter = f"set -e\n{made}\nexec chroot {root} sh {folder}/script"
        done = subprocess.run(["unshare", "--mount", "sh", "-c", enter], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        decoder, text, answers = json.JSONDecoder(), done.stdout.strip(), []
        while text:
            answer, end = decoder.raw_decode(text)
            answers.append([row for row in answer["findings"] if row["level"] != "ok"])
            text = text[end:].strip()
        return answers

    @pytest.mark.thorough
    def test_a_full_tmpfs(self, tmp_path: Path) -> None:
        full = tmp_path / "full"
        full.mkdir()
        made = f"mount -t tmpfs -o size=64m none {full}; head -c 63m /dev/zero > {full}/x"
        before, after = self.in_namespace(tmp_path, made, "machine.disk")
        row = of(before, "machine.disk")
        assert row["level"] == "failure"
        assert row["command"] == f"mount -o remount,size=6G {full}"
        assert "machine.disk" not in names(after)

    @pytest.mark.thorough
    @pytest.mark.parametrize(
        ("settings", "command"),
        [("size=8g,nr_inodes=20", "mount -o remount,nr_inodes=1000000 {}"), ("size=8g,ro", "cd ~")],
        ids=["no inodes", "read-only"],
    )
    def test_files_that_cannot_be_made(self, settings: str, command: str, tmp_path: Path) -> None:
        full = tmp_path / "full"
        full.mkdir()
        before, after = self.in_namespace(tmp_path, f"mount -t tmpfs -o {settings} none {full}", "machine.files")
        assert of(before, "machine.files")["command"] == command.format(full)
        assert "machine.files" not in names(after)

    @pytest.mark.thorough
    def test_a_small_shared_memory(self, tmp_path: Path) -> None:
        """On a copy of this machine's files that a container has left no mark on: there the command is another."""
        new = tmp_path / "new"
        new.mkdir()
        made = f"""
            mount -t tmpfs none {new}; mkdir {new}/upper {new}/work {new}/root
            mount -t overlay -o lowerdir=/,upperdir={new}/upper,workdir={new}/work overlay {new}/root
            rm -f {new}/root/.dockerenv
            for each in proc dev sys; do mount --rbind /$each {new}/root/$each; done
            mount -t tmpfs -o size=1m none {new}/root/dev/shm
        """
        before, after = self.in_namespace(tmp_path, made, "machine.shm", root=f"{new}/root")
        row = of(before, "machine.shm")
        assert "/dev/shm has 1 MiB" in row["cause"]
        assert row["command"] == "mount -o remount,size=2G /dev/shm"
        assert "machine.shm" not in names(after)


def test_without_a_home_and_with_a_folder_for_temporary_files_that_is_gone(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "CUADRILLA_HOME")}
    gone = {**environment, "TMPDIR": str(tmp_path / "gone")}
    assert of(examine(env=gone), "machine.variables")["command"] == "unset TMPDIR"
    assert "machine.variables" not in names(examine(env=environment))


@pytest.mark.thorough
def test_without_torch(tmp_path: Path) -> None:
    """As far as Python's import can tell."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = cuadrilla(*FULL, env={**os.environ, "PYTHONPATH": str(tmp_path)})
    row = of(found(done), "nvidia.torch")
    assert (row["level"], done.returncode) == ("failure", 3)
    assert "No module named 'torch'" in row["cause"]
    assert row["command"].endswith("-m pip install --force-reinstall torch")
