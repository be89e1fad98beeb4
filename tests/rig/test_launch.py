"""`cuadrilla launch` typed on two machines of one network, and where it cannot work."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.lan import CARD, Member, lan
from tests.networks import need_namespaces

RATE = "400mbit"
SCRIPT = Path(__file__).parents[2] / "examples" / "launch" / "torch_ddp.py"
SHOW = "import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'GLOO_SOCKET_IFNAME')))"


@pytest.fixture(scope="module")
def network() -> Iterator[list[Member]]:
    need_namespaces()
    with lan(2, rate=RATE) as members:
        yield members


def launch(members: list[Member], *arguments: list[str]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of the command on each machine."""
    environ = {**os.environ, "LANGUAGE": "en", "CUDA_VISIBLE_DEVICES": "-1"}
    started = [
        subprocess.Popen(
            [*member.prefix, sys.executable, "-m", "cuadrilla", "launch", *words],
            env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for member, words in zip(members, arguments, strict=True)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=200) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, *words) for process, words in zip(started, said, strict=True)]


def hosts(network: list[Member]) -> str:
    return ",".join(member.address for member in network)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_the_same_command_on_two_machines_trains_one_model(network: list[Member]) -> None:
    words = ["--hosts", hosts(network), "--processes", "1", "--", sys.executable, str(SCRIPT)]
    first, second = launch(network, words, words)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "[0] 2 processes, weights differ by 0" in first[1]
    assert "[1] step 200/200" in second[1]


def test_machines_may_have_different_numbers_of_processes(network: list[Member]) -> None:
    words = ["--hosts", hosts(network), "--processes", "2,1", "--", sys.executable, "-c", SHOW]
    first, second = launch(network, words, words)
    assert sorted(first[1].splitlines()) == [f"[0] 0 0 0 {CARD}", f"[1] 1 1 0 {CARD}"], first
    assert second[1] == f"[2] 2 0 1 {CARD}\n", second


def test_machines_that_were_told_different_things_start_nothing(network: list[Member]) -> None:
    words = ["--hosts", hosts(network), "--", "touch", "/nowhere/at/all"]
    for code, out, err in launch(network, ["--processes", "1", *words], ["--processes", "2", *words]):
        assert code == 5
        assert out == ""
        assert "machine 1 was started with other machines, processes or ports" in err
