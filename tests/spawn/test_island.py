"""An island over Gloo on this machine: ranks with unequal parts train like one process, whichever rank dies."""

import os
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir, last_rows
from tests.commands import ENDLESS, events, reached, wait_for
from tests.inside import cuadrilla
from tests.ports import free_port
from tests.ranks import by_hand, finished, start_rank, torchrun
from tests.runs import final, final_sha256, relative_difference

TASK = """
import os, signal, torch
from tests.tasks import RaggedRegression

class Ragged(RaggedRegression):
    def loss(self, model, batch):
        first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if self.num_losses == 4 and torch.is_grad_enabled() and first:
            match planned():
                case "dies": os.kill(os.getpid(), signal.SIGKILL)
                case "fails": raise ValueError("on purpose")
                case "lacks memory" if len(batch["x"]) > 5: raise MemoryError
                case "lies": return super().loss(model, batch)[0] * float("nan"), int(batch["count"].sum())
        return super().loss(model, batch)

def planned():
    # What is to happen at this rank, by the file of its name.
    path = os.path.join(os.path.dirname(__file__), "rank-" + os.environ.get("RANK", ""))
    return open(path).read() if os.path.exists(path) else ""

def task(): return Ragged()
"""
RUN = """
schema = 1
[task]
kind = "file"
path = "task.py:task"
[train]
steps = 8
batch_sequences = 35
unit_sequences = 5
precision = "fp32"
threads = 1
device = "cpu"
[optim]
kind = "adamw"
[checkpoint]
every_seconds = 0
every_steps = 2
"""
TRAIN = ("-m", "cuadrilla", "train")


def make_run(folder: Path) -> RunDir:
    folder.mkdir()
    (folder / "task.py").write_text(TASK)
    (folder / "run.toml").write_text(RUN)
    return RunDir(folder)


def counted(run: RunDir) -> list[tuple[int, int, float]]:
    """The version, tokens and loss of each step."""
    return [(row["version"], row["tokens"], row["loss"]) for row in last_rows(run.metrics)]


def train(run: RunDir, num_ranks: int, *arguments: str, restarts: int = 0) -> str:
    """Run a training, which must succeed, and return its stderr."""
    command = (*TRAIN, str(run.path), *arguments)
    done = torchrun(num_ranks, *command, restarts=restarts) if restarts else by_hand(num_ranks, *command)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that one process has trained."""
    run = make_run(tmp_path_factory.mktemp("island") / "alone")
    assert cuadrilla("train", run.path).returncode == 0
    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Train with two ranks, of 3 and 4 units. The settings of rank 0 count, since the run is in its folder."""
    run, other = (make_run(tmp_path_factory.mktemp("island") / name) for name in ("pair", "other"))
    port, longer = free_port(), ("--set", "train.steps=9")
    ranks = [start_rank(0, 2, port, *TRAIN, str(run.path)), start_rank(1, 2, port, *TRAIN, str(other.path), *longer)]
    said = finished(ranks)
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "island     2 ranks, gloo (not every rank has a CUDA device of its own)" in said[0][1]
    assert list(other.path.glob("*.json*")) == []  # only rank 0 writes into a run directory
    return run


def test_two_ranks_with_unequal_parts_give_what_one_process_gives(alone: RunDir, pair: RunDir) -> None:
    assert relative_difference(final(pair.path), final(alone.path)) < 1e-6
    assert counted(pair)[0][2] == pytest.approx(counted(alone)[0][2], rel=1e-6)
    assert [row[:2] for row in counted(pair)] == [row[:2] for row in counted(alone)]


def test_three_ranks_of_which_one_has_nothing_to_do(alone: RunDir, tmp_path: Path) -> None:
    """A step has only two units. Later one process continues the run alone."""
    sets = ("--set", "train.batch_sequences=10")
    run, single = make_run(tmp_path / "three"), make_run(tmp_path / "single")
    assert cuadrilla("train", single.path, *sets).returncode == 0
    train(run, 3, "--stop-at", "5", *sets)
    assert cuadrilla("train", run.path, *sets).returncode == 0
    assert relative_difference(final(run.path), final(single.path)) < 1e-6
    assert [row[:2] for row in counted(run)] == [row[:2] for row in counted(single)]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.thorough), 1])
def test_a_killed_rank_is_started_again_and_every_unit_counts_once(victim: int, pair: RunDir, tmp_path: Path) -> None:
    """A rank dies in step 5, when there is a checkpoint of step 4."""
    run = make_run(tmp_path / "run")
    (run.path / f"rank-{victim}").write_text("dies")
    said = train(run, 2, restarts=1)
    assert "resumed    at step 4" in said
    assert counted(run) == counted(pair)
    assert final_sha256(run.path) == final_sha256(pair.path)


@pytest.mark.thorough
def test_a_rank_that_fails_ends_the_others(port: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "rank-1").write_text("fails")
    ranks = [start_rank(rank, 2, port, *TRAIN, str(run.path)) for rank in range(2)]
    said = [err for _, err in finished(ranks)]
    assert ranks[0].returncode == 5, said
    assert "the connection between the ranks broke" in said[0]
    assert "on purpose" in said[1]


@pytest.mark.parametrize("what", [pytest.param("lacks memory", marks=pytest.mark.thorough), "lies"])
def test_a_rank_takes_smaller_passes_and_its_nan_spoils_a_lease_only(what: str, pair: RunDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "rank-1").write_text(what)
    train(run, 2)
    assert not events(run, "units skipped")
    assert relative_difference(final(run.path), final(pair.path)) < 1e-6
    assert [row[:2] for row in counted(run)] == [row[:2] for row in counted(pair)]


@pytest.mark.thorough
def test_strict_ranks_have_the_bits_of_one_process(tmp_path: Path) -> None:
    pair, single = make_run(tmp_path / "pair"), make_run(tmp_path / "single")
    assert cuadrilla("train", single.path, "--set", "sync.strict=true").returncode == 0
    train(pair, 2, "--set", "sync.strict=true")
    assert final_sha256(pair.path) == final_sha256(single.path)


def test_whoever_is_told_to_stop_all_stop_and_go_on(port: int, pair: RunDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    longer = ("--set", f"train.steps={ENDLESS}", "--set", "schedule.warmup=0.0", "--set", "schedule.cooldown=0.0")
    ranks = [start_rank(rank, 2, port, *TRAIN, str(run.path), *longer) for rank in range(2)]
    try:
        wait_for(reached(run, 3), ranks[0])
        ranks[1].terminate()
    finally:
        said = [err for _, err in finished(ranks)]
    assert [rank.returncode for rank in ranks] == [130, 0], said
    assert "another rank was asked to stop" in said[0]
    assert "Traceback" not in "".join(said)
    versions = [row["version"] for row in last_rows(run.metrics)]
    assert f"v{versions[-1]:08d}" in os.listdir(run.checkpoints)


def test_a_rank_that_cannot_take_part_ends_the_others(port: int, tmp_path: Path) -> None:
    folders = [make_run(tmp_path / name).path for name in ("first", "second")]
    (folders[1] / "task.py").unlink()
    ranks = [start_rank(rank, 2, port, *TRAIN, str(folder)) for rank, folder in enumerate(folders)]
    said = [err for _, err in finished(ranks)]
    assert all(rank.returncode > 1 for rank in ranks), said
    assert "Traceback" not in "".join(said)
    assert "the connection between the ranks broke" in said[0]
    assert "task.py" in said[1]
