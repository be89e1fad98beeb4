"""`cuadrilla launch` typed on two machines of one network, and where it cannot work."""

import os
import signal
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


ENDLESS = "import os, time; print('begun', flush=True); time.sleep(600)"
FAILS = """
import os, sys, time
print("begun", flush=True)
failing = os.environ["RANK"] == "2"
time.sleep(3 if failing else 600)
sys.exit(7)
"""


def together(network: list[Member], code: str) -> list["subprocess.Popen[str]"]:
    """The command on both machines, of one and two processes, once all of them have begun."""
    words = ["--hosts", hosts(network), "--processes", "1,2", "--grace", "1", "--", sys.executable, "-c", code]
    environ = {**os.environ, "LANGUAGE": "en", "CUDA_VISIBLE_DEVICES": "-1"}
    started = [
        subprocess.Popen(
            [*member.prefix, sys.executable, "-m", "cuadrilla", "launch", *words],
            env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for member in network
    ]  # fmt: skip
    for process, num_ranks in zip(started, (1, 2), strict=True):
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(num_ranks)] != [""] * num_ranks
    return started


def ends(process: "subprocess.Popen[str]", *, seconds: float) -> tuple[int, str]:
    """Exit code and standard error."""
    try:
        return process.wait(seconds), process.communicate()[1]
    finally:
        process.kill()


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


@pytest.mark.thorough
def test_a_rank_that_fails_ends_those_of_the_other_machine_with_its_exit_code(network: list[Member]) -> None:
    first, second = together(network, FAILS)
    code, said = ends(first, seconds=30)
    assert code == 7, said
    assert f"rank 2 on machine 1 ({network[1].address}) was the first to fail, with exit code 7" in said
    code, said = ends(second, seconds=30)
    assert (code, "rank 2 was the first to fail" in said) == (7, True), said


@pytest.mark.thorough
@pytest.mark.parametrize("where", [0, 1])
def test_ctrl_c_on_one_machine_ends_both(where: int, network: list[Member]) -> None:
    launchers = together(network, ENDLESS)
    launchers[where].send_signal(signal.SIGTERM)
    code, said = ends(launchers[1 - where], seconds=30)
    assert code == 130, said
    assert f"interrupted on machine {where}" in said
    assert ends(launchers[where], seconds=30)[0] == 130


@pytest.mark.thorough
def test_a_launcher_that_is_killed_is_missed_at_once(network: list[Member]) -> None:
    first, second = together(network, ENDLESS)
    second.kill()
    code, said = ends(first, seconds=30)
    assert code == 5
    assert f"machine 1 ({network[1].address}) is gone" in said
    second.communicate()


@pytest.mark.thorough
def test_a_pulled_cable_is_missed_in_half_a_minute(network: list[Member]) -> None:
    launchers = together(network, ENDLESS)
    subprocess.run([*network[1].prefix, "ip", "link", "set", CARD, "down"], check=True)
    try:
        for other, launcher in zip((1, 0), launchers, strict=True):
            code, said = ends(launcher, seconds=60)
            assert code == 5, said
            assert f"machine {other} ({network[other].address}) is gone" in said
    finally:
        subprocess.run([*network[1].prefix, "ip", "link", "set", CARD, "up"], check=True)
