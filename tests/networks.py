"""Networks, CPU shares and memory limits for tests. Where this machine lacks what they need, the test is skipped."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import limits, nat
from tests.lan import Member, lan, limit_rate
from tests.limits import CGROUP, shared

RATE = "400mbit"


def need_namespaces() -> None:
    """Skip the test, and say what is missing, where network namespaces cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("needs root to make network namespaces")
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        pytest.skip(f"needs the command {missing[0]} (iproute2)")
    tried = subprocess.run(
        ["ip", "netns", "add", f"cua-{os.getpid()}-try"], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"needs network namespaces: {tried.stderr.strip()}")
    subprocess.run(["ip", "netns", "del", f"cua-{os.getpid()}-try"], check=True)


@contextmanager
def behind_router(num_members: int, num_hidden: int) -> Iterator[tuple[list[Member], list[Member]]]:
    """Machines on a switch, of which the last one is a router; and the machines behind that router."""
    need_namespaces()
    pytest.importorskip("pyroute2", reason="needs the package pyroute2 (extra: dev)")
    with lan(num_members + 1, rate=RATE) as members:
        try:
            nat.masquerade(members[-1])
        except RuntimeError as error:
            pytest.skip(f"needs iptables that translate addresses: {error}")
        with nat.hidden(members[-1], num_hidden, rate=RATE) as hidden:
            yield members, hidden


def do(member: Member, command: str) -> None:
    """Run a command on a member. Skips the test if it fails."""
    done = subprocess.run([*member.prefix, *shlex.split(command)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot be done here: {command}: {done.stderr.strip()}")


def switch_port(index: int) -> tuple[str, str]:
    """Namespace and device of the switch's end of a member's cable. What this device sends, the member receives."""
    return f"cua-{os.getpid()}-switch", f"port{index}"


@contextmanager
def silent(place: str, device: str, *, rate: str) -> Iterator[None]:
    """Drop all that a card sends, while it still receives. At the end the card has its `rate` again."""
    subprocess.run(["tc", "-n", place, "qdisc", "replace", "dev", device, "root", "blackhole"], check=True)
    yield
    limit_rate(place, device, rate)


def lose(member: Member, *, share: float, source: str = "") -> None:
    """From now on, drop a random share of the packets that reach a member (if given, only those from `source`)."""
    if shutil.which("iptables") is None:
        pytest.skip("needs the command iptables")
    chosen = ["-s", source] if source else []
    rule = ["iptables", "-A", "INPUT", *chosen, "-m", "statistic", "--mode", "random", "--probability", str(share)]
    done = subprocess.run([*member.prefix, *rule, "-j", "DROP"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs iptables with the match statistic: {done.stderr.strip()}")


@contextmanager
def shares(number: int) -> Iterator[list[limits.Share]]:
    """Make control groups without a limit yet. Skips the test where they cannot be made."""
    with ExitStack() as stack:
        try:
            made = stack.enter_context(limits.shares(number))
        except OSError as error:
            pytest.skip(f"needs control groups: {error}")
        yield made


@contextmanager
def memory_limit(num_bytes: int, *, name: str) -> Iterator[Path]:
    """`cgroup.procs` of a control group with a memory limit: a process whose number is written there gets no more than
    that, and no swap. It is killed when the block ends. Skips the test where there are no such groups."""
    name = f"cua-{os.getpid()}-{name}"
    if (CGROUP / "memory" / "memory.limit_in_bytes").exists():
        folder = CGROUP / "memory" / name
        files = {"memory.limit_in_bytes": num_bytes, "memory.memsw.limit_in_bytes": num_bytes}
    elif shared("memory"):
        folder, files = CGROUP / name, {"memory.max": num_bytes, "memory.swap.max": 0}
    else:
        pytest.skip("needs the memory controller of control groups (version 1, or in cgroup.subtree_control)")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs to make control groups: {error.strerror}")
    try:
        for file, limit in files.items():
            if (folder / file).exists():  # not all kernels count swap
                (folder / file).write_text(str(limit))
        yield folder / "cgroup.procs"
    finally:
        limits.Share(folder).close()
