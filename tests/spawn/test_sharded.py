"""A model divided among ranks (FSDP2 over Gloo): the run of one process, on any number of them, whoever dies."""

import os
from pathlib import Path

import pytest

from cuadrilla.rundir import RunDir, last_rows
from tests.commands import ENDLESS, reached, wait_for
from tests.inside import cuadrilla
from tests.ranks import by_hand, start_rank, torchrun
from tests.runs import final, final_sha256, relative_difference
from tests.spawn.test_island import RUN, TASK, TRAIN, counted

SHARDED = ("--set", "train.shard=true")
BLOCKS = '    defaults = TaskDefaults(length=1, blocks=("0", "2"))\n    def loss('
SPOILS = """        if self.num_losses == 9 and planned() == "spoils" and torch.is_grad_enabled():
            return super().loss(model, batch)[0] * float("nan"), 1
        return super().loss"""


def make_run(folder: Path) -> RunDir:
    """Of 48 rows, which three ranks divide evenly, and of 1 and 12, which they do not."""
    folder.mkdir()
    task = TASK.replace("from tests.tasks", "from cuadrilla.model.task import TaskDefaults\nfrom tests.tasks")
    task = task.replace("        return super().loss", SPOILS, 1)
    (folder / "task.py").write_text(task.replace("    def loss(", BLOCKS, 1))
    (folder / "run.toml").write_text(RUN)
    return RunDir(folder)


def train(run: RunDir, num_ranks: int, *arguments: str, restarts: int = 0) -> str:
    command = (*TRAIN, str(run.path), *SHARDED, *arguments)
    done = torchrun(num_ranks, *command, restarts=restarts) if restarts else by_hand(num_ranks, *command)
    assert done.returncode == 0, done.stderr
    return done.stderr


def losses(run: RunDir) -> list[float]:
    return [row["loss"] for row in last_rows(run.metrics)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Trained by one process."""
    run = make_run(tmp_path_factory.mktemp("sharded") / "alone")
    assert cuadrilla("train", run.path).returncode == 0
    return run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """Two ranks, of 3 and 4 units."""
    run = make_run(tmp_path_factory.mktemp("sharded") / "pair")
    train(run, 2)
    return run


def test_two_ranks_give_what_one_process_gives(alone: RunDir, pair: RunDir) -> None:
    assert relative_difference(final(pair.path), final(alone.path)) < 1e-6
    assert losses(pair) == pytest.approx(losses(alone), rel=1e-5)
    assert [row[:2] for row in counted(pair)] == [row[:2] for row in counted(alone)]
    assert [row.get("val_loss") for row in last_rows(pair.metrics)] == pytest.approx(
        [row.get("val_loss") for row in last_rows(alone.metrics)], rel=1e-5
    )


@pytest.mark.thorough
def test_three_ranks_of_which_one_has_nothing_to_do_and_one_process_goes_on(alone: RunDir, tmp_path: Path) -> None:
    """Two units in a step; then all on one rank, and then on two."""
    sets = ("--set", "train.batch_sequences=10")
    run, single = make_run(tmp_path / "three"), make_run(tmp_path / "single")
    assert cuadrilla("train", single.path, *sets).returncode == 0
    train(run, 3, "--stop-at", "3", *sets)
    assert cuadrilla("train", run.path, "--stop-at", "5", "--set", "train.shard=false").returncode == 0
    train(run, 2)
    assert relative_difference(final(run.path), final(single.path)) < 1e-6
    assert [row[:2] for row in counted(run)] == [row[:2] for row in counted(single)]


@pytest.mark.thorough
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_started_again_and_every_unit_counts_once(victim: int, pair: RunDir, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.path / f"rank-{victim}").write_text("dies")
    said = train(run, 2, restarts=1)
    assert "resumed    at step 1" in said  # its fifth pass is in the second step
    assert counted(run) == counted(pair)
    assert final_sha256(run.path) == final_sha256(pair.path)


def test_what_is_written_is_used_by_one_process(pair: RunDir) -> None:
    done = cuadrilla("--json", "eval", pair.path)
    assert done.returncode == 0, done.stderr


@pytest.mark.thorough
def test_whoever_is_told_to_stop_all_stop_and_go_on(port: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    longer = ("--set", f"train.steps={ENDLESS}", "--set", "schedule.warmup=0.0", "--set", "schedule.cooldown=0.0")
    ranks = [start_rank(rank, 2, port, *TRAIN, str(run.path), *SHARDED, *longer) for rank in range(2)]
    try:
        wait_for(reached(run, 3), ranks[0])
        ranks[0].terminate()
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [130, 0], said
    assert "Traceback" not in "".join(said)
    versions = [row["version"] for row in last_rows(run.metrics)]
    assert f"v{versions[-1]:08d}" in os.listdir(run.checkpoints)


@pytest.mark.thorough
def test_a_rank_that_fails_is_named_by_the_others(port: int, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "rank-1").write_text("fails")
    ranks = [start_rank(rank, 2, port, *TRAIN, str(run.path), *SHARDED) for rank in range(2)]
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 5, said
    assert "the island broke: rank 1: ValueError: on purpose" in said[0]


@pytest.mark.thorough
def test_a_loss_that_is_no_number_at_one_rank_changes_nothing(tmp_path: Path) -> None:
    """The ranks stay in step, and the guard skips that update."""
    run = make_run(tmp_path / "run")
    (run.path / "rank-1").write_text("spoils")
    train(run, 2)
    rows = last_rows(run.metrics)
    assert [row["version"] for row in rows] == list(range(1, 9))
    assert ["lr_factor" in row for row in rows].count(False) == 1
    assert all(bool(tensor.isfinite().all()) for tensor in final(run.path).values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ('optim.kind="muon"', 'set optim.kind = "adamw"'),
        ("sync.strict=true", "strict"),
        ('checkpoint.journal="on"', "journal"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_remedy(wrong: str, said: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    done = by_hand(2, *TRAIN, str(run.path), *SHARDED, "--set", wrong)
    assert done.returncode != 0
    assert "train.shard: " in done.stderr
    assert said in done.stderr


def test_one_process_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    done = cuadrilla("train", run.path, *SHARDED)
    assert done.returncode == 2
    assert "--set train.shard=false" in done.stderr
