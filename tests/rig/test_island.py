"""Ranks on several machines: on one network, and with a machine that can dial out but cannot be dialled."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir, last_rows
from tests.lan import CARD, Member
from tests.networks import behind_router
from tests.ranks import finished

PORT = 12355
SCRIPT = Path(__file__).parents[2] / "recipes" / "gpt2_spanish" / "ddp_launch.sh"
SMALL = ("--preset", "micro", "--epochs", "0.01", "--batch-size", "6", "--seq-len", "32")


@pytest.fixture
def network() -> Iterator[tuple[Member, Member, Member]]:
    """Two machines on one network, and a machine behind a router that hides it."""
    with behind_router(2, 1) as ((machine, neighbour, _), (behind,)):
        yield machine, neighbour, behind


def launch(members: list[Member], folders: list[Path], data: Path) -> list[tuple[int, str]]:
    """Run `ddp_launch.sh` on each machine; the exit code and output of each."""
    path = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ['PATH']}"
    group = {"MASTER_ADDR": members[0].address, "MASTER_PORT": str(PORT), "NNODES": str(len(members))}
    processes = []
    for number, (member, folder) in enumerate(zip(members, folders, strict=True)):
        folder.mkdir()
        (folder / "Data").symlink_to(data)
        environ = {**os.environ, **group, "NODE_RANK": str(number), "PATH": path, "LANGUAGE": "en"}
        command = [*member.prefix, str(SCRIPT), *SMALL]
        processes.append(
            subprocess.Popen(
                command, cwd=folder, env=environ, text=True, stderr=subprocess.PIPE, start_new_session=True
            )
        )
    said = finished(processes, seconds=200)
    return [(process.returncode, err) for process, (_, err) in zip(processes, said, strict=True)]


@pytest.mark.timeout(400)
def test_two_machines_train_and_the_first_one_keeps_the_run(
    network: tuple[Member, Member, Member], stories: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "second"]
    found = launch([*network[:2]], folders, stories)
    assert [code for code, _ in found] == [0, 0], found
    assert f"torchrun: 2 machines, this is number 1, over {CARD}" in found[1][1]
    assert "2 ranks, gloo" in found[0][1]
    assert len(last_rows(RunDir(folders[0] / "checkpoints").metrics)) > 1
    assert not (folders[1] / "checkpoints").exists()


def test_a_machine_that_is_not_reached_is_told_of_the_crew(
    network: tuple[Member, Member, Member], stories: Path, tmp_path: Path
) -> None:
    folders = [tmp_path / "first", tmp_path / "behind"]
    found = launch([network[0], network[2]], folders, stories)
    for code, said in found:
        assert code == 5, said
        assert "machine 1 reaches this one, but not the other way round" in said
        assert f"cuadrilla up RUN --listen {network[0].address}" in said
        assert "cuadrilla join" in said
        assert "torchrun:" not in said
    assert not (folders[0] / "checkpoints").exists()
