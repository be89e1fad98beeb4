"""The shared battery for the asynchronous strategy, at its exact setting (one worker) and with several."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cuadrilla.engines.local import run_local
from cuadrilla.errors import ConfigError, TaskError
from cuadrilla.link.base import Contribution, Hello, Lease, Link, TensorRef, Tensors, Version
from cuadrilla.link.inproc import InProcServer
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.runfile import resolve
from cuadrilla.train.journal import read_segment
from cuadrilla.train.setup import assemble, make_model
from tests import runs
from tests.commands import wait_for
from tests.faults import PHASES, Died, FaultyLink, Phase, Script, play
from tests.runs import RUN_FILE, Execute, final, final_sha256, metrics, prepare, workers
from tests.tasks import RaggedRegression

SERVER = 'sync.kind="server"'
NESTEROV = ('optim.kind="nesterov"', "optim.lr=0.02")
KEEP = ("evaluate.every_tokens=1_000_000", "checkpoint.keep=100")  # the journal stays whole
THREE = workers([1.0, 0.5, 0.25])
BATCH = 24  # units
PATIENCE_SECONDS = 60


def batches(folder: Path) -> list[int]:
    """Which batch made each version, by the journal; each must be whole."""
    found = []
    for segment in sorted(RunDir(folder).journal.glob("v*.log")):
        for record, _ in read_segment(RunDir(folder).journal, int(segment.stem[1:])):
            units = record.header["units"]
            assert units == list(range(units[0], units[0] + BATCH))
            found.append(units[0] // BATCH)
    return found


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    return [row for row in read_jsonl(RunDir(folder).events) if row["event"] == kind]


@dataclass(frozen=True)
class Signal:
    """What workers wait for, in whatever process: given as often as the file has bytes."""

    path: Path

    def give(self) -> None:
        with open(self.path, "ab") as file:
            file.write(b".")

    def wait(self, *, times: int = 1) -> None:
        wait_for(lambda: self.path.exists() and self.path.stat().st_size >= times, seconds=PATIENCE_SECONDS)


class Meeting:
    """The other workers join when `worker-2` has its first lease, or has died before."""

    def __init__(self, folder: Path, *others: str) -> None:
        self.there = Signal(folder / "there")
        self.scripts = [Script(worker=name, at=0, phase="hello", action=self.there.wait) for name in others]

    def die(self) -> None:
        self.there.give()
        raise Died("scripted")

    def with_(self, phase: Phase, action: object) -> list[Script]:
        begun = Script(worker="worker-2", at=None, phase="version", action=self.there.give)
        return [*self.scripts, Script(worker="worker-2", at=None, phase=phase, action=action), begun]  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["muon", "adamw", "nesterov"])
def test_one_worker_is_the_exact_strategy_bit_for_bit(execute: Execute, tmp_path: Path, optimizer: str) -> None:
    sets = (f'optim.kind="{optimizer}"', "optim.lr=0.003", "outer.every=3", "evaluate.every_tokens=144")
    execute(tmp_path / "exact", RaggedRegression(), *sets)
    execute(tmp_path / "server", RaggedRegression(), *sets, SERVER)
    assert final_sha256(tmp_path / "server") == final_sha256(tmp_path / "exact")
    for exact, server in zip(metrics(tmp_path / "exact"), metrics(tmp_path / "server"), strict=True):
        assert server.pop("staleness") == 0
        for row in (exact, server):
            del row["seconds"], row["tokens_per_second"]
        assert server == exact


@pytest.mark.ray_smoke
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_three_unequal_workers_learn_within_the_bound(execute: Execute, tmp_path: Path, staleness: int) -> None:
    adamw = ('optim.kind="adamw"', "optim.lr=0.01", "train.steps=80")
    sets = (SERVER, f"sync.staleness={staleness}", *adamw, *KEEP, THREE, "evaluate.every_tokens=720")
    assert execute(tmp_path, RaggedRegression(), *sets).complete
    rows = metrics(tmp_path)
    assert [row["version"] for row in rows] == list(range(1, 81))
    assert max(row["staleness"] for row in rows) <= staleness
    assert sorted(batches(tmp_path)) == list(range(80))
    held_out = [row["val_loss"] for row in rows if "val_loss" in row]
    assert held_out[-1] < 0.8 * held_out[0]


def test_schedule_and_global_batch_are_those_of_the_exact_strategy(execute: Execute, tmp_path: Path) -> None:
    execute(tmp_path / "exact", RaggedRegression(), "evaluate.every_tokens=144")
    execute(tmp_path / "server", RaggedRegression(), "evaluate.every_tokens=144", SERVER, THREE)
    exact, server = (metrics(tmp_path / name) for name in ("exact", "server"))
    assert [row["lr_factor"] for row in server] == [row["lr_factor"] for row in exact]
    assert ["val_loss" in row for row in server] == ["val_loss" in row for row in exact]
    assert server[-1]["tokens"] == exact[-1]["tokens"]


class Quadratic(RaggedRegression):
    """Half the square of one weight, which begins at 1: its gradient per token is the weight itself."""

    def model(self) -> nn.Module:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        return model


class Puppet:
    """A worker moved by hand. It keeps what it was given, without a copy, until it answers."""

    def __init__(self, link: Link) -> None:
        self.link = link
        link.call(Hello(speed_hint=1.0))
        self.take()

    def take(self) -> None:
        version, lease = self.link.next_event(), self.link.next_event()
        assert isinstance(version, Version)
        assert isinstance(lease, Lease)
        assert version.version == lease.version
        self.lease, self.theta = lease, self.link.download(version.parameters)["weight"]

    def answer(self) -> float:
        """The gradient at what it holds, of as many tokens as were planned; the weight it is given then."""
        tokens = self.lease.planned_tokens
        tensors = {"weight": self.theta.clone()}
        self.link.call(Contribution(lease_id=self.lease.lease_id, tokens=tokens, loss_sum=1.0, tensors=tensors))
        self.take()
        return self.theta.item()


def test_a_history_computed_by_hand(tmp_path: Path) -> None:
    """lr 0.5, no momentum. θ: 1, a: 1 − 0.5 · 1 = 0.5, b (at 1): 0, a (at 0.5): −0.25, b (at 0): −0.25, b: −0.125;
    a (at −0.25, two steps old by then): 0.
    """
    plain = ('optim.kind="nesterov"', "optim.lr=0.5", "optim.momentum=0.0", "train.clip_norm=0.0")
    steady = ("schedule.warmup=0.0", "schedule.cooldown=0.0")
    context = prepare(tmp_path, Quadratic(), SERVER, *plain, *steady, *KEEP[:1], workers([1.0, 1.0]))
    server = InProcServer(context.coordination.receive, copies=True)
    context.coordination.open(server.send)
    a, b = Puppet(server.connect("a")), Puppet(server.connect("b"))
    assert [who.answer() for who in (a, b, a, b, b, a)] == [0.5, 0.0, -0.25, -0.25, -0.125, 0.0]
    context.coordination.request_stop("enough")
    context.coordination.receive("a", Hello(speed_hint=1.0))
    assert context.coordination.outcome is not None
    assert context.coordination.outcome.version == 6
    assert context.coordination.outcome.last_row["staleness"] == 2
    context.store.close()


class SlowReader(FaultyLink):
    """Waits, as its scripts say, before it reads a version; keeps the first one in a file."""

    def __init__(self, worker: str, link: Link, scripts: list[Script], *, first: Path) -> None:
        super().__init__(worker, link, scripts, [])
        self._first = first

    def download(self, ref: TensorRef) -> Tensors:
        self._reach("pass")
        tensors = super().download(ref)
        if not self._first.exists():
            save_file({name: tensor.detach().clone() for name, tensor in tensors.items()}, self._first)
        return tensors


def test_a_version_stays_as_it_is_while_the_next_ones_are_made(execute: Execute, tmp_path: Path) -> None:
    """worker-2 reads the initial weights when worker-1 has been sent three later versions."""
    meeting, sent, first = Meeting(tmp_path, "worker-1"), Signal(tmp_path / "sent"), tmp_path / "first"
    scripts = meeting.with_("pass", partial(sent.wait, times=4))
    counting = Script(worker="worker-1", at=None, phase="version", action=sent.give, repeat=True)

    def wrap(worker: str, link: Link) -> Link:
        if worker != "worker-2":
            return FaultyLink(worker, link, [*scripts, counting], [])
        return SlowReader(worker, link, scripts, first=first)

    assert execute(tmp_path, RaggedRegression(), SERVER, workers([1.0, 1.0]), wrap_link=wrap).complete
    initial, read = dict(make_model(RaggedRegression(), seed=0).named_parameters()), load_file(first)
    assert all(torch.equal(read[name], parameter) for name, parameter in initial.items())
    assert max(row["staleness"] for row in metrics(tmp_path)) >= 3
    assert not events(tmp_path, "left")


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_lost_at_any_phase_loses_nothing(execute: Execute, tmp_path: Path, phase: Phase) -> None:
    meeting = Meeting(tmp_path, "worker-1", "worker-3")
    wrap, played = play(*meeting.with_(phase, meeting.die))
    outcome = execute(tmp_path, RaggedRegression(), SERVER, *KEEP, workers([1.0, 1.0, 1.0]), wrap_link=wrap)
    assert outcome.complete
    assert any((script.worker, script.phase) == ("worker-2", phase) for script in played)
    assert [row["worker"] for row in events(tmp_path, "left")] == ["worker-2"]
    assert sorted(batches(tmp_path)) == list(range(8))


@pytest.mark.parametrize("crew", ["one", "three"])
def test_run_10_equals_run_5_and_resume_5(execute: Execute, tmp_path: Path, crew: str) -> None:
    """With several workers: no step is made twice, and no batch is counted twice or lost."""
    sets = [SERVER, "train.steps=10", "outer.every=3", *NESTEROV, "optim.delay=3", *KEEP, "checkpoint.journal=on"]
    sets += [THREE] if crew == "three" else []
    first = execute(tmp_path / "parts", RaggedRegression(), *sets, stop_at=5)
    assert (first.version, first.complete) == (5, False)
    execute(tmp_path / "parts", RaggedRegression(), *sets)
    assert sorted(batches(tmp_path / "parts")) == list(range(10))
    assert [row["version"] for row in metrics(tmp_path / "parts")] == list(range(1, 11))
    if crew == "one":
        execute(tmp_path / "whole", RaggedRegression(), *sets)
        assert final_sha256(tmp_path / "parts") == final_sha256(tmp_path / "whole")


def test_the_journal_knows_which_batches_are_missing(execute: Execute, tmp_path: Path) -> None:
    """worker-2 has the first batch and no answer yet when worker-1, five steps later, dies, and then it dies too."""
    gone, meeting = Signal(tmp_path / "gone"), Meeting(tmp_path, "worker-1")

    def die() -> None:
        gone.give()
        raise Died("scripted")

    def follow() -> None:
        gone.wait()
        raise Died("scripted")

    wrap, _ = play(*meeting.with_("contribute", follow), Script(worker="worker-1", at=5, phase="pass", action=die))
    sets = (SERVER, *KEEP, "sync.staleness=9", workers([1.0, 1.0]))
    with pytest.raises(Exception, match="scripted"):
        execute(tmp_path, RaggedRegression(), *sets, wrap_link=wrap)
    assert batches(tmp_path) == [1, 2, 3, 4, 5]
    assert execute(tmp_path, RaggedRegression(), *sets).complete
    assert sorted(batches(tmp_path)) == list(range(8))


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_broken_contribution_is_computed_by_another(
    execute: Execute, tmp_path: Path, value: Literal["nan", "inf"]
) -> None:
    meeting = Meeting(tmp_path, "worker-1")
    wrap, _ = play(*meeting.with_("upload", value))
    assert execute(tmp_path, RaggedRegression(), SERVER, *KEEP, workers([1.0, 1.0]), wrap_link=wrap).complete
    assert [row["worker"] for row in events(tmp_path, "non-finite")] == ["worker-2"]
    assert not events(tmp_path, "units skipped")
    assert sorted(batches(tmp_path)) == list(range(8))
    assert all(tensor.isfinite().all() for tensor in final(tmp_path).values())


class OneBadExample(RaggedRegression):
    """Example 7 gives a NaN, on every machine."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        loss, count = super().loss(model, batch)
        bad = (batch["x"][:, 0] == self.data("train").x[7, 0]).any()
        return (loss * math.nan if bad else loss), count


def test_bad_data_is_skipped_and_named_as_a_whole_batch(execute: Execute, tmp_path: Path) -> None:
    sets = (SERVER, *KEEP, "train.epochs=1.0", "train.steps=0", workers([1.0, 1.0]))
    assert execute(tmp_path, OneBadExample(), *sets).complete
    (skipped,) = events(tmp_path, "units skipped")
    assert len(skipped["units"]) == BATCH  # type: ignore[arg-type]
    assert sorted(batches(tmp_path)) == list(range(14))
    assert all(tensor.isfinite().all() for tensor in final(tmp_path).values())


class Normalised(RaggedRegression):
    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


def test_running_statistics_are_refused_with_several_workers(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="asynchronous workers do not share"):
        prepare(tmp_path / "crew", Normalised(), SERVER, workers([1.0, 1.0]))
    assert runs.execute(tmp_path / "one", Normalised(), SERVER).complete


@pytest.mark.parametrize("change", ['sync.kind="exact"', "optim.delay=2"])
def test_what_the_state_depends_on_never_changes(tmp_path: Path, change: str) -> None:
    runs.execute(tmp_path, RaggedRegression(), SERVER, *NESTEROV, stop_at=2)
    sets = [SERVER, *NESTEROV, change]
    with pytest.raises(ConfigError, match="cannot be resumed"):
        assemble(resolve(RUN_FILE, sets=sets).config, RunDir(tmp_path), task=RaggedRegression(), sinks=[])


def test_another_bound_is_a_change_that_must_be_meant(tmp_path: Path) -> None:
    runs.execute(tmp_path, RaggedRegression(), SERVER, stop_at=2)
    with pytest.raises(ConfigError, match=r"sync\.staleness \(was 4, now 2\)"):
        prepare(tmp_path, RaggedRegression(), SERVER, "sync.staleness=2")
    config = resolve(RUN_FILE, sets=[SERVER, "sync.staleness=2"]).config
    context = assemble(config, RunDir(tmp_path), task=RaggedRegression(), sinks=[], allow_changes=True)
    assert run_local(context).complete
