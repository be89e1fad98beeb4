"""How `auto` chooses the length of rounds from the time that they take: a coordinator over described machines."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from cuadrilla.config import MuonSection
from cuadrilla.link.base import Contribution, Hello, Lease, Tensors
from cuadrilla.sync.auto import AutoRounds
from cuadrilla.sync.coordinator import Coordinator
from cuadrilla.sync.events import Action, Answer, Commit, Grant, Merge, Merged, Received, Send
from cuadrilla.sync.kinds import Strategy, windows
from cuadrilla.sync.membership import Rules
from cuadrilla.sync.strategy import GRADIENT, Recipe
from cuadrilla.train.optim import make_optimizer

UNITS_PER_STEP = 60


@dataclass
class Machines:
    """`speeds`: units per second. `transfer`, `local_step`: seconds of a transfer in an exact round, and of a step of
    the local optimizer. `shared`: the transfers of a round share one link, except for the coordinator `here`."""

    speeds: dict[str, float]
    transfer: float
    shared: bool = False
    local_step: float = 0.0
    step_tokens: int = 600
    num_steps: int = 10_000
    here: str = ""

    def __post_init__(self) -> None:
        rules = Rules(
            units_per_step=UNITS_PER_STEP,
            step_tokens=self.step_tokens,
            num_steps=self.num_steps,
            quorum=len(self.speeds),
        )
        self.machine = Coordinator(rules=rules, rounds=AutoRounds(window_bytes=0.5))
        self.due: list[tuple[float, str, Lease, float]] = []
        self.now, self.lengths, self.workers, self.parts = 0.0, list[int](), list[set[str]](), list[set[int]]()

    def rounds(self, number: int) -> list[int]:
        """Play this number of rounds, and return their lengths."""
        if not self.lengths:
            actions = self.machine.start()
            for name in self.speeds:
                actions += self.machine.handle(Received(worker=name, message=Hello(speed_hint=1.0)), self.now)
        else:
            actions = self.actions
        for _ in range(number):
            actions = self._round(actions)
        self.actions = actions
        return self.lengths[-number:]

    def join(self, name: str, *, units_per_second: float) -> None:
        self.speeds[name] = units_per_second
        hello = Received(worker=name, message=Hello(speed_hint=1.0))
        self.actions = [*self.actions, *self.machine.handle(hello, self.now)]

    def _round(self, actions: Sequence[Action]) -> list[Action]:
        leases = self._lease(actions)
        self.workers.append(set(leases))
        self.parts.append({lease.parts for lease in leases.values()})
        while not (merges := [action for action in actions if isinstance(action, Merge)]):
            self.now, worker, lease, moved = self.due.pop(self.due.index(min(self.due, key=lambda each: each[:2])))
            said = Contribution(
                lease_id=lease.lease_id, tokens=10 * len(lease.units), loss_sum=1.0, transfer_seconds=moved
            )
            actions = self.machine.handle(Received(worker=worker, message=said), self.now)
            self._lease(actions)
        self.lengths.append(merges[0].steps)
        return [action for action in self.machine.handle(Merged(), self.now) if not isinstance(action, Commit)]

    def _lease(self, actions: Sequence[Action]) -> dict[str, Lease]:
        """Add to `due` the time at which each lease will be computed; leases of ended rounds stay there."""
        leases = {a.worker: a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Lease)}
        for worker, lease in leases.items():
            moved = self.transfer * (0.5 if lease.steps > 1 else 1.0) * (worker != self.here)
            moved *= len(leases.keys() - {self.here}) if self.shared else 1
            local = self.local_step * lease.steps if lease.steps > 1 else 0.0  # also of smaller steps
            self.due.append((self.now + moved + local + len(lease.units) / self.speeds[worker], worker, lease, moved))
        return leases


@pytest.mark.parametrize(
    ("transfer", "local_step", "wanted"),
    [
        pytest.param(0.0, 0.2, 1, id="no network, and an optimizer that is slow everywhere"),
        pytest.param(0.1, 0.0, 4, id="a fast network"),
        pytest.param(80.0, 0.0, 64, id="a slow network"),
    ],
)
def test_the_length_that_teaches_most_in_a_second(transfer: float, local_step: float, wanted: int) -> None:
    crew = Machines({"ana": 30.0, "luis": 20.0, "eva": 10.0}, transfer=transfer, local_step=local_step)
    lengths = crew.rounds(30)
    assert lengths[0] == 1  # until all have answered once
    assert set(lengths[-10:]) == {wanted}


def test_a_network_that_becomes_slow_is_noticed() -> None:
    crew = Machines({"ana": 30.0, "luis": 30.0}, transfer=0.0, local_step=0.5)
    assert set(crew.rounds(20)[-5:]) == {1}
    crew.transfer = 30.0
    assert crew.rounds(40)[-1] == 64


@pytest.mark.parametrize(("tokens", "parts"), [(30_000, 1), (60_000, 2), (250_000, 4)])
def test_alone_it_takes_smaller_steps_where_those_of_the_crew_are_large(tokens: int, parts: int) -> None:
    crew = Machines({"ana": 30.0, "luis": 10.0, "eva": 10.0}, transfer=120.0, shared=True, step_tokens=tokens)
    crew.rounds(20)
    assert crew.workers[-10:] == [{"ana"}] * 10
    assert crew.parts[-10:] == [{parts}] * 10
    assert all(made == {1} for made, workers in zip(crew.parts, crew.workers, strict=True) if len(workers) > 1)


@pytest.mark.parametrize(("tokens", "parts"), [(600, 1), (250_000, 4)])
def test_the_only_machine_trains_in_short_rounds_and_a_second_one_soon_has_work(tokens: int, parts: int) -> None:
    crew = Machines({"ana": 30.0}, transfer=5.0, here="ana", step_tokens=tokens)
    assert set(crew.rounds(100)[2:]) == {2 if parts > 1 else 1}
    assert crew.parts[-1] == {parts}
    crew.join("luis", units_per_second=30.0)
    crew.rounds(4)
    assert crew.workers[-3:] == [{"ana", "luis"}] * 3
    assert crew.lengths[-3] == 1  # until luis has answered once


def test_far_from_the_coordinator_the_only_machine_trains_in_long_rounds() -> None:
    crew = Machines({"ana": 30.0}, transfer=20.0, step_tokens=250_000)
    assert set(crew.rounds(10)[2:]) == {64}


def test_where_one_machine_makes_all_rounds_it_is_alone_in_smaller_steps_after_one_long_window() -> None:
    """A step of ana alone takes 2 s; one of a window of 32 takes 1.6 s and is worth 0.81 as much: no gain."""
    crew = Machines(
        {"ana": 30.0, "luis": 15.0, "eva": 7.5, "rosa": 3.75},
        transfer=12.0, shared=True, here="ana", step_tokens=15_360, num_steps=192,
    )  # fmt: skip
    crew.rounds(6)
    assert crew.workers[-3:] == [{"ana"}] * 3
    assert crew.parts[-3:] == [{4}] * 3
    together = [length for length, workers in zip(crew.lengths, crew.workers, strict=True) if len(workers) > 1]
    assert together == [1, 32]


def test_a_run_that_is_too_short_for_windows_has_no_smaller_steps_to_promise() -> None:
    crew = Machines({"ana": 30.0, "luis": 30.0}, transfer=0.3, step_tokens=250_000, num_steps=11)
    assert crew.rounds(10) == [1] * 10
    assert crew.workers == [{"ana", "luis"}] * 10
    assert crew.parts == [{1}] * 10


def test_a_window_after_exact_steps_moves_nothing_by_old_gradients() -> None:
    """In a window Muon's matrices move only by the changes of the lanes, and here there are none."""
    model = nn.ParameterDict({"matrix": torch.zeros(4, 4), "row": torch.zeros(4)})
    make = make_optimizer(MuonSection(), dtype=torch.float32)
    recipe = Recipe(make_optimizer=make, lr_factor=lambda _step: 1.0, clip_norm=0.0)
    merge = Strategy(kind="auto").merge(model, recipe)
    merge.version(steps=1)
    answers = [answer({GRADIENT + name: torch.ones_like(p) for name, p in model.items()})]
    merge.step(merge.reduce(answers, planned_tokens=10).update, norm=1.0, version=1, steps=1)
    before = model["matrix"].detach().clone()
    merge.version(steps=4)
    form, _ = windows(steps=4).forms(model, recipe)[0].contributions
    answers = [answer({name: torch.zeros(t.shape, dtype=t.dtype) for name, t in form.items()})]
    merge.step(merge.reduce(answers, planned_tokens=10).update, norm=1.0, version=5, steps=4)
    assert before.abs().min() > 0
    assert torch.equal(model["matrix"], before)


def answer(tensors: Tensors) -> Answer:
    said = Contribution(lease_id=1, tokens=10, loss_sum=1.0, tensors=tensors)
    return Answer(grant=Grant(lease_id=1, worker="ana", units=(0,)), contribution=said)
