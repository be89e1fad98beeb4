"""Islands on this machine: the processes of several ranks, started with or without torchrun."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def torchrun(
    num_ranks: int, *arguments: str, restarts: int = 0, seconds: float = 150
) -> "subprocess.CompletedProcess[str]":
    """Run ranks under torchrun. `restarts`: how many times all are started again together after a failure."""
    command = [*TORCHRUN, "--nproc-per-node", str(num_ranks), "--max-restarts", str(restarts), *arguments]
    return subprocess.run(command, cwd=ROOT, env=_with_root({}), text=True, capture_output=True, timeout=seconds)


def by_hand(num_ranks: int, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run ranks without torchrun, whose own process costs two seconds. The exit code is the worst of all ranks."""
    port = free_port()
    ranks = [start_rank(rank, num_ranks, port, *arguments) for rank in range(num_ranks)]
    said = finished(ranks)
    code = max((rank.returncode for rank in ranks), key=abs)
    out, err = ("".join(texts) for texts in zip(*said, strict=True))
    return subprocess.CompletedProcess(list(arguments), code, out, err)


def finished(ranks: "Sequence[subprocess.Popen[str]]", *, seconds: float = 150) -> list[tuple[str, str]]:
    """Wait for all ranks, and return the stdout and stderr of each. None is left running."""
    try:
        return [rank.communicate(timeout=seconds) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def start_rank(rank: int, num_ranks: int, port: int, *arguments: str) -> "subprocess.Popen[str]":
    """Start one rank without torchrun, with the variables that torchrun would set."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
    place |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    environ = {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=_with_root(environ), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _with_root(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment with this repository on the import path, from which the tests' tasks import."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, **environ}
