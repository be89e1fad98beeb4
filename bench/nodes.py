"""Machines of a benchmark: members of a network, which may have a share of the CPU, and processes (`Node`) on them.
The benchmark writes commands to a process, one a line; the process answers each with a line of JSON."""

import faulthandler
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.lan import Member, lan
from tests.limits import Share, shares
from tests.machines import Machine

PORT = 47470
STOP_SECONDS = 20.0
LIMIT_SECONDS = 7200.0  # a process that lives longer prints where it hangs, and ends


class Place(Machine):
    """A member of the network with its own home folder. `cuadrilla` runs on it with one thread."""

    def __init__(self, member: Member, folder: Path, *, name: str, share: Share | None = None, **more: object) -> None:
        """`more`: further environment variables."""
        variables = ["env", "OMP_NUM_THREADS=1", *(f"{key}={value}" for key, value in more.items())]
        prefix = (*(share.prefix if share else ()), *member.prefix, *variables)
        home, talk = folder / f"home-{name}", folder / f"said-{name}"
        super().__init__(home, prefix=prefix, address=member.address, talk=talk)
        self.member, self.share = member, share

    def processor_seconds(self) -> float:
        """CPU seconds that the processes in its share have used so far."""
        assert self.share is not None
        total = 0.0
        for number in self.share.processes():
            with suppress(psutil.Error):
                total += sum(psutil.Process(number).cpu_times()[:2])
        return total


@contextmanager
def places(folder: Path, number: int, *, rate: str) -> Iterator[list[Place]]:
    """Make machines with shares of the CPU, which are not limited yet."""
    if os.geteuid() != 0:
        raise SystemExit("needs root, to make network namespaces and control groups")
    with ExitStack() as stack:
        members, groups = stack.enter_context(lan(number, rate=rate)), stack.enter_context(shares(number))
        made = [
            Place(member, folder, name=str(index), share=share)
            for index, (member, share) in enumerate(zip(members, groups, strict=True))
        ]
        for place in made:
            stack.callback(place.stop)
        yield made


class Node:
    """The benchmark's handle of a process that runs `obey`. `part`: module and class that it builds, MODULE:CLASS."""

    def __init__(self, prefix: Sequence[str], *, part: str, **specification: Any) -> None:
        command = [*prefix, sys.executable, "-m", "bench.nodes", part, json.dumps(specification)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._usage = psutil.Process(self._process.pid)

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, command: str) -> dict[str, Any]:
        self.tell(command)
        return self.answer()

    def cpu_seconds(self) -> float:
        everyone = [self._usage, *self._usage.children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in everyone)

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def obey(part: str, specification: str) -> None:
    """Build an object from JSON, say that it is ready, and obey the benchmark. Each line of stdin names a method to
    call, until the benchmark closes stdin."""
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    torch.set_num_threads(1)
    answers = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115  open for as long as the process lives
    os.dup2(2, 1)
    module, _, name = part.partition(":")
    built = getattr(importlib.import_module(module), name)(**json.loads(specification))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(getattr(built, line.strip())() or {}), file=answers, flush=True)
    built.close()


if __name__ == "__main__":
    obey(*sys.argv[1:])
