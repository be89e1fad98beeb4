"""The exact strategy, beyond the shared battery: unequal workers equal one, through deaths, resumes and overflows."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from cuadrilla.config import TrainSection
from cuadrilla.errors import CuadrillaError, GuardError, TaskError
from cuadrilla.model.weights import WEIGHTS, read_tensors
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.sync.events import Answer
from cuadrilla.sync.exact import ExactWorker
from cuadrilla.sync.merge import Merger
from cuadrilla.sync.strategy import Sums
from cuadrilla.train.checkpoint import list_checkpoints
from cuadrilla.train.precision import Precision
from tests.faults import Script, play
from tests.runs import UNEQUAL, execute, final, final_sha256, metrics, relative_difference, workers
from tests.sessions import FP32, SOME_LEASE, ConstantGradient, answer, answer_of, recipe_of, worker_half
from tests.tasks import Checkpointed, FrozenBeginning, HugeExamples, RaggedRegression, Rescaled

STRICT = "sync.strict=true"
ADAMW = 'optim.kind="adamw"'


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_unequal_workers_equal_one_worker(tmp_path: Path, optimizer: str) -> None:
    sets = (f'optim.kind="{optimizer}"', "optim.lr=0.003", "train.steps=20")
    execute(tmp_path / "one", RaggedRegression(), *sets)
    execute(tmp_path / "crew", RaggedRegression(), *sets, workers(UNEQUAL["three unequal"]))
    assert relative_difference(final(tmp_path / "crew"), final(tmp_path / "one")) <= 1e-6
    losses = [[row["loss"] for row in metrics(tmp_path / name)] for name in ("one", "crew")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    held_out = [row["val_loss"] for row in metrics(tmp_path / "one") if "val_loss" in row]
    assert held_out[-1] < held_out[0]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_frozen_parameters_stay_and_the_others_learn(tmp_path: Path, optimizer: str) -> None:
    sets = (STRICT, f'optim.kind="{optimizer}"', "optim.weight_decay=0.5", "train.steps=6", "checkpoint.keep=9")
    execute(tmp_path / "one", FrozenBeginning(), *sets)
    execute(tmp_path / "crew", FrozenBeginning(), *sets, workers(UNEQUAL["three unequal"]))
    assert final_sha256(tmp_path / "crew") == final_sha256(tmp_path / "one")
    paths = list_checkpoints(RunDir(tmp_path / "one").checkpoints)
    first, *_, last = (read_tensors(path / WEIGHTS) for path in paths)
    changed = {name for name, tensor in last.items() if not torch.equal(tensor, first[name])}
    assert changed == {name for name in last if not name.startswith("0.")}


def test_a_model_that_is_all_frozen_is_refused(tmp_path: Path) -> None:
    class AllFrozen(RaggedRegression):
        def model(self) -> nn.Module:
            return super().model().requires_grad_(False)

    with pytest.raises(TaskError, match="frozen"):
        execute(tmp_path, AllFrozen())


class Deep(RaggedRegression):
    """A task whose model has blocks with dropout inside."""

    def model(self) -> nn.Module:
        middle = [
            nn.Sequential(nn.Linear(self.width, self.width), nn.GELU(), nn.Dropout(self.dropout)) for _ in range(3)
        ]
        return nn.Sequential(nn.Linear(12, self.width), self.blocks(*middle), nn.Linear(self.width, 1))

    def blocks(self, *blocks: nn.Module) -> nn.Module:
        return nn.Sequential(*blocks)


class Thrifty(Deep):
    """The same task, with gradient checkpointing of its own."""

    def blocks(self, *blocks: nn.Module) -> nn.Module:
        return Checkpointed(*blocks)


def test_strict_has_the_same_bits_with_dropout_and_gradient_checkpointing(tmp_path: Path) -> None:
    """The random numbers of a pass do not depend on the worker, and are the same when activations are recomputed."""
    for crew, speeds in UNEQUAL.items():
        task = Deep if crew == "one" else Thrifty
        execute(tmp_path / crew, task(dropout=0.3), STRICT, workers(speeds))
    assert len({final_sha256(tmp_path / crew) for crew in UNEQUAL}) == 1


def test_a_run_resumes_with_another_number_of_workers(tmp_path: Path) -> None:
    execute(tmp_path / "undisturbed", RaggedRegression(), STRICT)
    for stop_at, crew in ((3, "one"), (5, "three unequal"), (0, "two equal")):
        execute(tmp_path, RaggedRegression(), STRICT, workers(UNEQUAL[crew]), stop_at=stop_at)
    assert final_sha256(tmp_path) == final_sha256(tmp_path / "undisturbed")


@pytest.mark.parametrize(("action", "mode"), [("nan", ADAMW), ("inf", ADAMW), ("flip", ADAMW), ("flip", STRICT)])
def test_a_wrong_number_is_found_and_its_units_are_computed_elsewhere(
    tmp_path: Path, action: Literal["nan", "inf", "flip"], mode: str
) -> None:
    """A number that is not finite, or a flipped bit, is found even in the first steps, when no spike is known yet."""
    wrap, played = play(Script(worker="worker-2", at=1, phase="upload", action=action))
    execute(tmp_path / "one", RaggedRegression(), mode)
    execute(tmp_path / "crew", RaggedRegression(), mode, workers([1.0, 1.0]), wrap_link=wrap)
    assert played
    events = read_jsonl(RunDir(tmp_path / "crew").events)
    found = [row for row in events if row["event"] in ("outlier", "non-finite")]
    assert [(row["worker"], row["version"]) for row in found] == [("worker-2", 2)]
    assert action == "flip" or found[0]["event"] == "non-finite"
    assert "units skipped" not in [row["event"] for row in events]
    if mode == STRICT:
        assert final_sha256(tmp_path / "crew") == final_sha256(tmp_path / "one")
    else:
        assert relative_difference(final(tmp_path / "crew"), final(tmp_path / "one")) <= 1e-6


class OneBadExample(RaggedRegression):
    """A task in which example 7 gives a NaN on every machine."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        loss, count = super().loss(model, batch)
        bad = (batch["x"][:, 0] == self.data("train").x[7, 0]).any()
        return (loss * math.nan if bad else loss), count


def test_bad_data_is_skipped_and_named(tmp_path: Path) -> None:
    outcome = execute(tmp_path, OneBadExample(), workers([1.0, 1.0]), "train.epochs=1.0", "train.steps=0")
    assert outcome.complete
    skipped = [row for row in read_jsonl(RunDir(tmp_path).events) if row["event"] == "units skipped"]
    assert [len(row["units"]) for row in skipped] == [1]
    assert all(tensor.isfinite().all() for tensor in final(tmp_path).values())


class LittleMemory(RaggedRegression):
    """A task for which memory lasts for two sequences in a pass."""

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        loss, count = super().loss(model, batch)
        if len(batch["x"]) > 2 and torch.is_grad_enabled():
            loss.backward(retain_graph=True)  # a part of the gradient is there when the memory runs out
            raise torch.OutOfMemoryError("CUDA out of memory (scripted)")
        return loss, count


def test_out_of_memory_halves_the_pass_and_keeps_the_global_batch(tmp_path: Path) -> None:
    execute(tmp_path / "large", RaggedRegression(), ADAMW)
    execute(tmp_path / "small", LittleMemory(), ADAMW)
    assert relative_difference(final(tmp_path / "small"), final(tmp_path / "large")) <= 1e-6
    tokens = [[row["tokens"] for row in metrics(tmp_path / name)] for name in ("large", "small")]
    assert tokens[0] == tokens[1]


def test_out_of_memory_in_strict_mode_leaves_with_exit_code_8(tmp_path: Path) -> None:
    with pytest.raises(CuadrillaError, match="a unit does not fit in one pass, and strict mode") as caught:
        execute(tmp_path, LittleMemory(), STRICT)
    assert caught.value.exit_code == 8


def test_an_overflow_in_half_precision_is_computed_again_and_never_sent() -> None:
    """Its gradients overflow fp16 at the first loss scales. Besides, no weight changes."""
    task = Rescaled(1000)
    weights = dict(task.model().named_parameters())
    half = Precision(dtype=torch.float16, reason="test")
    lease = replace(SOME_LEASE, units=(0, 1), planned_tokens=24)
    section = TrainSection(batch_sequences=8, unit_sequences=4)
    said, passes = [], []
    for precision in (FP32, half):
        model, task.num_losses = task.model(), 0
        sync = worker_half(model)
        said.append(
            answer(lease, task=task, model=model, sync=sync, weights=weights, section=section, precision=precision)
        )
        passes.append(task.num_losses)
        assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
    assert passes[1] > passes[0]  # it did overflow
    assert said[1].valid
    assert said[1].tokens == said[0].tokens
    assert relative_difference(dict(said[1].tensors), dict(said[0].tensors)) < 0.02


def test_a_loss_that_keeps_spiking_stops_the_run(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="keeps spiking") as caught:
        execute(tmp_path, Rescaled(1e9, after=41), "train.steps=80")
    assert caught.value.exit_code == 7
    assert all(tensor.isfinite().all() for tensor in final(tmp_path).values())
    events = [row["event"] for row in read_jsonl(RunDir(tmp_path).events)]
    assert events.count("rolled back to the last checkpoint") == 2


@pytest.mark.parametrize("strict", [False, True])
def test_a_history_computed_by_hand(strict: bool) -> None:
    """Two workers with 3 and 1 tokens, gradients 2 and 10 per token: the mean is (3·2 + 10) / 4 = 4."""
    theta = nn.ParameterDict({"w": torch.zeros(5)})
    merge = Merger(theta, recipe_of(ConstantGradient))  # type: ignore[arg-type]
    answers: list[Answer] = []
    for gradient, tokens in ((2.0, 3), (10.0, 1)):
        params = nn.ParameterDict({"w": torch.zeros(5)})
        worker = ExactWorker(params, strict=strict)
        worker.begin(SOME_LEASE)
        sums = Sums()
        for _ in range(tokens):
            (params["w"].sum() * gradient / 4).backward()
            sums.tokens += 1
            worker.after_micro_step(sums)
        answers.append(answer_of(worker, tokens=tokens))
    reduced = merge.reduce(answers, planned_tokens=4)
    assert reduced.norm == pytest.approx(4 * math.sqrt(5))
    assert merge.step(reduced.update, norm=reduced.norm, version=1, steps=1) == 0.5
    assert torch.equal(theta["w"].detach(), torch.full((5,), -2.0))


def test_strict_refuses_what_does_not_fit_into_fixed_point() -> None:
    params = nn.ParameterDict({"w": torch.ones(2)})
    worker = ExactWorker(params, strict=True)
    for value in (1e30, math.nan, math.inf):
        worker.begin(SOME_LEASE)
        params["w"].grad = torch.tensor([1.0, value])
        sums = Sums()
        worker.after_micro_step(sums)
        assert not sums.valid


def test_the_largest_seed(tmp_path: Path) -> None:
    assert execute(tmp_path, RaggedRegression(), f"run.seed={2**63 - 1}", "train.steps=2").complete


def test_what_is_large_by_nature_counts_and_nobody_is_blamed(tmp_path: Path) -> None:
    """The shares determine which leases look like outliers. The result does not depend on them."""
    execute(tmp_path / "one", HugeExamples(), STRICT)
    execute(tmp_path / "crew", HugeExamples(), STRICT, workers(UNEQUAL["three unequal"]))
    assert final_sha256(tmp_path / "crew") == final_sha256(tmp_path / "one")
    events = {row["event"] for row in read_jsonl(RunDir(tmp_path / "crew").events)}
    assert {"outlier", "confirmed"} <= events
    assert events.isdisjoint({"units skipped", "update skipped", "evicted"})
