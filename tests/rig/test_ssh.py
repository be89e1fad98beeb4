"""A machine that accepts logins but cannot dial out joins through `ssh -R`, as in docs/crew.md."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir
from tests.commands import goes_on, is_what_one_worker_gives, wait_for
from tests.lan import CARD, Member
from tests.machines import UNHURRIED, Machine, down, invite, present, up
from tests.ports import listens

pytestmark = pytest.mark.thorough

PORT = 47470
OPTIONS = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "ExitOnForwardFailure=yes", "LogLevel=ERROR")
SERVER = ("StrictModes=no", "PermitRootLogin=yes", "UsePAM=no", "PidFile=none")


@pytest.fixture(autouse=True)
def one_way(network: list[Member]) -> None:
    """The second machine is a rented one. It can answer the first one, and cannot open connections itself."""
    for tool, package in (("sshd", "openssh-server"), ("ssh", "openssh-client"), ("iptables", "iptables")):
        if shutil.which(tool) is None:
            pytest.skip(f"needs the command {tool} ({package})")
    block = ["iptables", "-A", "OUTPUT", "-o", CARD, "-m", "conntrack", "--ctstate", "NEW", "-j", "DROP"]
    done = subprocess.run([*network[1].prefix, *block], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs iptables with the match conntrack: {done.stderr.strip()}")


def with_options(*options: str) -> list[str]:
    return [part for option in options for part in ("-o", option)]


@pytest.fixture
def login(network: list[Member], tmp_path: Path) -> Iterator[list[str]]:
    """The command with which the coordinator's machine logs into the rented one."""
    home, rented = network
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)
    keys = (f"HostKey={tmp_path}/host", f"AuthorizedKeysFile={tmp_path}/user.pub", f"ListenAddress={rented.address}")
    sshd = shutil.which("sshd")
    assert sshd is not None
    command = [*rented.prefix, sshd, "-D", "-f", "/dev/null", *with_options(*SERVER, *keys)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as server:
        login = [*home.prefix, "ssh", "-i", str(tmp_path / "user"), *with_options(*OPTIONS)]
        wait_for(
            lambda: not subprocess.run([*login, rented.address, "true"], capture_output=True, check=False).returncode
        )
        yield login
        server.terminate()


def test_a_rented_machine_joins_through_ssh(
    machines: list[Machine], network: list[Member], login: list[str], run: RunDir
) -> None:
    """The connection breaks, and the same command makes it again. The bits are those of one worker."""
    (home, rented), place = machines, network[1].address
    forward = [*login, "-N", "-R", f"127.0.0.1:{PORT}:{home.address}:{PORT}", place]
    crew = up(home, run, PORT, workers=UNHURRIED)
    text = invite(home)
    with subprocess.Popen(forward) as tunnel:
        wait_for(lambda: listens(f"127.0.0.1:{PORT}", prefix=rented.prefix))
        worker = rented.start("join", f"127.0.0.1:{PORT}", "--name", "rented", says=text)
        wait_for(lambda: present(run) == {"here-1", "rented"}, worker)
        wait_for(goes_on(run), worker)
        tunnel.terminate()
    wait_for(lambda: present(run) == {"here-1"}, worker)
    wait_for(goes_on(run), crew)
    with subprocess.Popen(forward) as tunnel:
        wait_for(lambda: present(run) == {"here-1", "rented"}, worker)
        wait_for(goes_on(run), worker)
        down(home, crew)
        said = worker.communicate(timeout=150)[1]
        tunnel.terminate()
    assert worker.returncode == 0, said
    assert "back at work" in said
    assert is_what_one_worker_gives(run)
