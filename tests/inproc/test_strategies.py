"""What holds for every strategy at its exact setting, through every transport, and in the simulator.

`average` is none of the product's: it is written in tests/average.py over the seam, and over nothing else.
"""

import logging
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from cuadrilla.link.base import (
    Computed,
    Contribution,
    Lease,
    Link,
    Progress,
    TensorRef,
    Tensors,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.sim.run import RULES, simulate
from cuadrilla.sync.exact import Exact
from cuadrilla.sync.server import Server
from cuadrilla.sync.strategy import Recipe, Strategy, Sums
from cuadrilla.train.checkpoint import tensors_sha256
from tests.average import Average
from tests.faults import PHASES, Phase, Script, play
from tests.runs import UNEQUAL, Execute, final, final_sha256, metrics, relative_difference, workers
from tests.streaming import StreamingAverage
from tests.tasks import RaggedRegression

GRADIENT_STEPS = ('optim.kind="nesterov"', "optim.momentum=0.0", "train.clip_norm=0.0")
"""With these a mean of weights after one step is the step of the mean gradient."""
STRATEGIES: dict[str, Strategy] = {"exact": Exact(), "strict": Exact(strict=True), "average": Average()}
ROUNDING = 1e-6


@pytest.fixture(params=STRATEGIES)
def strategy(request: pytest.FixtureRequest) -> Strategy:
    return STRATEGIES[request.param]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One exact worker and plain gradient steps: what every strategy gives at its exact setting."""
    from tests import runs

    folder = tmp_path_factory.mktemp("alone")
    runs.execute(folder, RaggedRegression(), *GRADIENT_STEPS)
    return folder


@pytest.mark.ray_smoke
@pytest.mark.parametrize("crew", UNEQUAL)
def test_unequal_workers_equal_one_worker(
    execute: Execute, tmp_path: Path, alone: Path, strategy: Strategy, crew: str
) -> None:
    execute(tmp_path, RaggedRegression(), *GRADIENT_STEPS, workers(UNEQUAL[crew]), strategy=strategy)
    assert relative_difference(final(tmp_path), final(alone)) <= ROUNDING
    losses = [[row["loss"] for row in metrics(folder)] for folder in (tmp_path, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=10 * ROUNDING)


@pytest.mark.parametrize("phase", PHASES)
def test_a_worker_lost_at_any_phase_changes_nothing(
    execute: Execute, tmp_path: Path, alone: Path, strategy: Strategy, phase: Phase
) -> None:
    wrap, played = play(Script(worker="worker-2", at=None, phase=phase))  # a slow one may never see a certain version
    crew = workers([1.0, 1.0, 1.0])
    execute(tmp_path, RaggedRegression(), *GRADIENT_STEPS, crew, strategy=strategy, wrap_link=wrap)
    assert played
    assert relative_difference(final(tmp_path), final(alone)) <= ROUNDING
    left = [row for row in read_jsonl(RunDir(tmp_path).events) if row["event"] == "left"]
    assert [row["worker"] for row in left] == ["worker-2"]


@pytest.mark.parametrize("name", [*STRATEGIES, "server", "average of many steps"])
def test_run_8_equals_run_3_and_resume_5(execute: Execute, tmp_path: Path, name: str) -> None:
    """The weights and every loss; with several steps in a lease as well."""
    more: dict[str, Strategy] = {"server": Server(max_staleness=4), "average of many steps": Average(units_per_step=4)}
    strategy = {**STRATEGIES, **more}[name]
    execute(tmp_path / "whole", RaggedRegression(), *GRADIENT_STEPS, strategy=strategy)
    execute(tmp_path / "parts", RaggedRegression(), *GRADIENT_STEPS, strategy=strategy, stop_at=3)
    execute(tmp_path / "parts", RaggedRegression(), *GRADIENT_STEPS, strategy=strategy)
    assert final_sha256(tmp_path / "parts") == final_sha256(tmp_path / "whole")
    whole, parts = ([row["loss"] for row in metrics(tmp_path / name)] for name in ("whole", "parts"))
    assert parts == whole


class Listening:
    """A `wrap_link` that notes which weights each worker is given of each version."""

    def __init__(self) -> None:
        self.given: dict[int, set[str]] = defaultdict(set)
        self.lock = threading.Lock()

    def __call__(self, worker: str, link: Link) -> Link:
        del worker
        return _Ear(link, self)


class _Ear:
    def __init__(self, link: Link, heard: Listening) -> None:
        self._link, self._heard, self._version = link, heard, -1

    def call(self, message: ToCoordinator) -> None:
        self._link.call(message)

    def upload(self, piece: Tensors, *, lease_id: int) -> None:
        self._link.upload(piece, lease_id=lease_id)

    def next_event(self) -> ToWorker:
        event = self._link.next_event()
        self._version = event.version if isinstance(event, Version) else self._version
        return event

    def interrupted(self) -> bool:
        return self._link.interrupted()

    def download(self, ref: TensorRef) -> Tensors:
        found = self._link.download(ref)
        with self._heard.lock:
            self._heard.given[self._version].add(tensors_sha256(found))
        return found

    def close(self) -> None:
        self._link.close()


def test_all_members_hold_the_same_bits(execute_in_threads: Execute, tmp_path: Path, strategy: Strategy) -> None:
    heard = Listening()
    crew = workers([1.0, 0.5, 0.25])
    execute_in_threads(tmp_path, RaggedRegression(), *GRADIENT_STEPS, crew, strategy=strategy, wrap_link=heard)
    assert len(heard.given) > 5
    assert all(len(hashes) == 1 for hashes in heard.given.values())


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_many_local_steps_learn_with_any_optimizer_and_number_type(
    execute: Execute, tmp_path: Path, wire: torch.dtype
) -> None:
    """More steps in as many versions go further; a bf16 difference travels, and the journal keeps it."""
    sets = ('optim.kind="adamw"', "train.steps=20", "schedule.cooldown=0.0", workers([1.0, 0.5]))
    execute(tmp_path / "one step", RaggedRegression(), *sets)
    execute(tmp_path / "many", RaggedRegression(), *sets, strategy=Average(units_per_step=4, wire=wire))
    one, many = (metrics(tmp_path / name)[-1]["loss"] for name in ("one step", "many"))
    assert many < one


# -- a strategy that computes the next lease while its answer travels, in pieces --------------------------------------

MANY_STEPS = (*GRADIENT_STEPS, "train.steps=20", "schedule.cooldown=0.0")
STALENESS = 0.02
"""Of weights whose steps came from ones that are a version old, to those without. One that is lost or counted twice:
0.05 and more."""


@pytest.mark.ray_smoke
@pytest.mark.parametrize("crew", UNEQUAL)
def test_streaming_answers_lose_nothing(execute: Execute, tmp_path: Path, crew: str) -> None:
    """Every unit is counted once, and the model learns as it does where each answer is waited for."""
    execute(tmp_path / "waits", RaggedRegression(), *MANY_STEPS, workers(UNEQUAL[crew]), strategy=Average())
    execute(tmp_path / "streams", RaggedRegression(), *MANY_STEPS, workers(UNEQUAL[crew]), strategy=StreamingAverage())
    waits, streams = metrics(tmp_path / "waits"), metrics(tmp_path / "streams")
    assert [row["tokens"] for row in streams] == [row["tokens"] for row in waits]
    assert relative_difference(final(tmp_path / "streams"), final(tmp_path / "waits")) <= STALENESS


def test_one_streaming_worker_is_one_that_waits(execute: Execute, tmp_path: Path, alone: Path) -> None:
    execute(tmp_path, RaggedRegression(), *GRADIENT_STEPS, strategy=StreamingAverage())
    assert relative_difference(final(tmp_path), final(alone)) <= ROUNDING


@pytest.mark.parametrize("phase", PHASES)
def test_a_streaming_worker_lost_at_any_phase_costs_no_unit(execute: Execute, tmp_path: Path, phase: Phase) -> None:
    wrap, played = play(Script(worker="worker-2", at=None, phase=phase))
    execute(tmp_path / "all", RaggedRegression(), *MANY_STEPS, strategy=Average())
    crew = workers([1.0, 1.0, 1.0])
    execute(tmp_path / "lost", RaggedRegression(), *MANY_STEPS, crew, strategy=StreamingAverage(), wrap_link=wrap)
    assert played
    rows, expected = metrics(tmp_path / "lost"), metrics(tmp_path / "all")
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in expected]
    assert relative_difference(final(tmp_path / "lost"), final(tmp_path / "all")) <= STALENESS


class Slow:
    """A `wrap_link` whose first answer arrives only when its worker is at work on another lease."""

    def __init__(self) -> None:
        self.at_work, self.waited = threading.Event(), threading.Event()

    def __call__(self, worker: str, link: Link) -> Link:
        del worker
        return _SlowLink(link, self)


class _SlowLink(_Ear):
    def __init__(self, link: Link, slow: Slow) -> None:
        super().__init__(link, Listening())
        self._slow, self._computed = slow, False

    def call(self, message: ToCoordinator) -> None:
        match message:
            case Computed():
                self._computed = True
            case Progress() if self._computed:
                self._slow.at_work.set()
            case Contribution() if not self._slow.waited.is_set():
                assert self._slow.at_work.wait(timeout=60)
                self._slow.waited.set()
        super().call(message)


def test_the_next_lease_is_computed_while_an_answer_travels(execute_in_threads: Execute, tmp_path: Path) -> None:
    slow = Slow()
    execute_in_threads(
        tmp_path, RaggedRegression(), *GRADIENT_STEPS, strategy=StreamingAverage(units_per_step=1), wrap_link=slow
    )
    assert slow.waited.is_set()
    assert len(metrics(tmp_path)) == 8


def test_a_history_computed_by_hand() -> None:
    """θ₀ = 0, rate 0.5. One worker: 3 tokens, gradient 2: −1. Another: 1 token, 10: −5. Mean by tokens: −2."""
    model, strategy = nn.ParameterDict({"w": torch.zeros(5)}), Average()
    recipe = Recipe(
        make_optimizer=_Plain, lr_factor=lambda tokens: 0.5, clip_norm=0.0, units_per_round=4, unit_tokens=1
    )
    merge = strategy.merge(model, recipe)
    contributions = []
    for gradient, tokens in ((2.0, 3), (10.0, 1)):
        own = nn.ParameterDict({"w": torch.ones(5)})
        worker, sums = strategy.worker(own, recipe), Sums()
        worker.apply(merge.params)
        worker.begin(Lease(lease_id=1, version=0, units=(0,), planned_tokens=4))
        for _ in range(tokens):
            (own["w"].sum() * gradient / 4).backward()
            sums.tokens += 1
            worker.after_micro_step(sums)
        worker.local_step(sums)
        contributions.append(Contribution(lease_id=1, tokens=tokens, loss_sum=0.0, tensors=worker.contribute()))
    merge.reduce(contributions, planned_tokens=4)
    assert merge.step(norm=0.0, tokens=4, version=1) == 0.5
    assert torch.allclose(model["w"].detach(), torch.full((5,), -2.0))


class _Plain:
    def __init__(self, params: dict[str, nn.Parameter]) -> None:
        self.params = params

    @torch.no_grad()
    def step(self, factor: float) -> None:
        for parameter in self.params.values():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad, alpha=factor)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        assert not tensors


@pytest.fixture
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
def test_the_simulator_takes_any_strategy() -> None:
    for seed in range(20):
        assert simulate(seed, strategy=Average()).committed[-1] == RULES.num_versions


@pytest.mark.usefixtures("quiet")
def test_the_simulator_has_workers_that_go_on_while_an_answer_travels() -> None:
    """Every unit is counted once, from weights that are one version old at most, whatever befalls them."""
    for seed in range(60):
        assert simulate(seed, strategy=StreamingAverage(), streams=True).committed[-1] == RULES.num_versions
