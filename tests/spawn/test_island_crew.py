"""Ranks of torchrun that join a crew as one worker: the run's weights are those of one worker, also after failures."""

import subprocess

import psutil
import pytest

from cuadrilla.rundir import RunDir, last_rows
from tests.commands import coordinator, ended, goes_on, is_what_one_worker_gives, wait_for
from tests.machines import UNHURRIED, Machines, down, invite, present, up
from tests.ranks import TORCHRUN

RANKS = (*TORCHRUN, "--nproc-per-node", "2", "-m", "cuadrilla", "join")


def ranks_of(torchrun: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The processes of the ranks, rank 0 first."""
    children = psutil.Process(torchrun.pid).children()
    return sorted(children, key=lambda child: int(child.environ()["RANK"]))


def test_two_ranks_and_a_machine_train_what_one_worker_trains(machine: Machines, run: RunDir, port: int) -> None:
    """The coordinator is killed meanwhile, and the same processes join it again."""
    here, island, other = machine("coordinator"), machine("island"), machine("other")
    crew = up(here, run, port)
    text = invite(here, "--uses", "2")
    together = island.start_program(*RANKS, "--name", "island", says=text)
    single = other.start("join", "--name", "other", says=text)
    wait_for(lambda: present(run) == {"island", "other"}, crew)
    wait_for(goes_on(run), together)
    before = {rank.pid for rank in ranks_of(together)}
    coordinator(crew).kill()
    wait_for(goes_on(run, steps=20), together)
    assert {rank.pid for rank in ranks_of(together)} == before
    down(here, crew)
    said = ended(together)
    assert single.wait(timeout=150) == 0
    assert "one worker of 2 ranks, gloo (not every rank has a CUDA device of its own)" in said
    assert "back at work" in said
    assert said.count("done       the run was stopped by cuadrilla stop or SIGTERM") == 1
    assert any({"island", "other"} <= {*row.get("shares", ())} for row in last_rows(run.metrics))
    assert is_what_one_worker_gives(run)


@pytest.mark.thorough
def test_a_killed_rank_costs_nothing_but_time(machine: Machines, run: RunDir, port: int) -> None:
    """torchrun starts all ranks again; they are already nodes of the crew."""
    here, island = machine("coordinator"), machine("island")
    crew = up(here, run, port, workers=UNHURRIED)
    command = [*RANKS[:-3], "--max-restarts", "1", *RANKS[-3:]]
    together = island.start_program(*command, "--name", "island", says=invite(here))
    wait_for(lambda: present(run) == {"here-1", "island"}, together)
    wait_for(goes_on(run), together)
    ranks_of(together)[1].kill()
    wait_for(lambda: present(run) == {"here-1"}, together)
    wait_for(lambda: present(run) == {"here-1", "island"}, together)
    wait_for(goes_on(run), together)
    down(here, crew)
    ended(together)
    assert is_what_one_worker_gives(run)
