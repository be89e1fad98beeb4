"""A user's Ray cluster, started with `ray start`."""

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import psutil

from tests.lan import Member
from tests.machines import Machine
from tests.ports import free_port, listens

EXAMPLES = Path(__file__).parents[1] / "examples"

LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Without it Ray takes the address of this machine's network card."""


class RayNode:
    """`ray start --block` on `member`, with a token and two CPUs: a head, or with `head` a node of that cluster.

    `cards`: how many GPUs Ray is told that there are. `more`: variables of its processes.
    """

    def __init__(
        self, folder: Path, *, member: Member | None = None, head: "RayNode | None" = None, cards: int = 0, **more: str
    ) -> None:
        member = member or Member("127.0.0.1")
        self.token, self.home, self.talk, self.member = folder / "token", folder / "home", folder / "talk", member
        self._programs: list[Machine] = []
        self._more = more
        self.token.write_text("0123456789abcdef" * 4)
        self.address = head.address if head else f"{member.address}:{free_port()}"
        # A short path, because Ray makes Unix sockets below it, and the length of their paths is limited.
        self._scratch = tempfile.TemporaryDirectory(prefix="cua-", dir="/tmp", ignore_cleanup_errors=True)
        options = {
            "--node-ip-address": member.address, "--temp-dir": self._scratch.name,
            "--num-cpus": "2", "--num-gpus": str(cards), "--object-store-memory": "100000000",
            "--dashboard-agent-listen-port": str(free_port()),  # else two clusters on one machine want the same
        }  # fmt: skip
        port = self.address.rpartition(":")[2]
        first = ["--address", self.address] if head else ["--head", "--port", port, "--include-dashboard", "false"]
        command = [Path(sys.executable).with_name("ray"), "start", "--block", *first]
        self.process = subprocess.Popen(
            [*member.prefix, *command, *(f"{name}={value}" for name, value in options.items())],
            env=os.environ | self.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def environment(self) -> dict[str, str]:
        ray = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token), "RAY_USAGE_STATS_ENABLED": "0"}
        return {**ray, **({} if self.member.prefix else LOOPBACK), "CUADRILLA_HOME": str(self.home), **self._more}

    @property
    def prefix(self) -> tuple[str, ...]:
        """Before the command of a program that uses this cluster."""
        variables = {**self.environment(), "RAY_ADDRESS": self.address}
        return (*self.member.prefix, "env", *(f"{name}={value}" for name, value in variables.items()))

    def start(self, example: str, *arguments: str, says: str) -> "subprocess.Popen[str]":
        """Start an example on this node. Its output goes to a file."""
        started = Machine(self.home, prefix=self.prefix, talk=self.talk)
        self._programs.append(started)
        return started.start_program(sys.executable, str(EXAMPLES / example), *arguments, says=says)

    def actors(self) -> list[psutil.Process]:
        """The processes of actors, recognised by the names that Ray gives them."""
        return [process for process in self._family() if named(process).startswith("ray::Worker")]

    def workers(self) -> list[psutil.Process]:
        """The processes that actors have started here, also those whose actor is dead."""
        return [process for process in psutil.process_iter() if home_of(process).is_relative_to(self.home / "ray")]

    def listens(self) -> bool:
        """Whether the head accepts connections, which it does seconds after its start, later on a busy machine."""
        return listens(self.address, prefix=self.member.prefix)

    def runs(self) -> bool:
        return self.process.poll() is None

    def stop(self, *, patience_seconds: float = 60) -> None:
        for program in self._programs:
            program.stop()
        family = self._family()
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=patience_seconds)
        self.process.kill()  # a node whose head has ended would wait for it
        self.process.wait()
        for process in psutil.wait_procs(family, timeout=2)[1]:  # some wait for half a minute
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._scratch.cleanup()

    def _family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True) if self.runs() else []


def home_of(process: psutil.Process) -> Path:
    """Its CUADRILLA_HOME."""
    with suppress(psutil.Error):  # it has just ended
        return Path(process.environ().get("CUADRILLA_HOME", ""))
    return Path()


def named(process: psutil.Process) -> str:
    with suppress(psutil.Error):  # it has just ended
        return " ".join(process.cmdline())
    return ""
