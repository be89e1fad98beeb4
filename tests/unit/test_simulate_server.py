"""Whole runs of the asynchronous strategy under a virtual clock: random faults, I1-I7 after every event."""

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from cuadrilla.sim.run import COORDINATOR_FAULTS, RULES, WORKER_FAULTS, SimFault, SimReport, Violation, simulate
from cuadrilla.sync.ledger import Ledger
from cuadrilla.sync.server import LeaseRounds, Server
from tests.unit.test_simulate import HAPPENS

pytestmark = pytest.mark.unit

CHUNK = 50
BOUNDS = (0, 1, 4, 9)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def run(seed: int, faults: list[SimFault] | None = None) -> SimReport:
    return simulate(seed, faults, strategy=Server(max_staleness=BOUNDS[seed % len(BOUNDS)]))


@pytest.mark.parametrize("first", range(0, 200, CHUNK))
def test_no_fault_breaks_a_promise(first: int) -> None:
    for seed in range(first, first + CHUNK):
        assert run(seed).committed[-1] == RULES.num_versions


@pytest.mark.soak
@pytest.mark.parametrize("first", range(200, 5200, 500))
def test_no_fault_breaks_a_promise_long(first: int) -> None:
    for seed in range(first, first + 500):
        assert run(seed).committed[-1] == RULES.num_versions


@pytest.mark.parametrize("kind", [*WORKER_FAULTS, *COORDINATOR_FAULTS])
def test_each_fault_alone(kind: str) -> None:
    for seed in range(8):
        fault = SimFault(
            at=4.0 + seed, kind=kind, worker="w1" if kind in WORKER_FAULTS else "", seconds=12.0, steps=seed
        )
        assert run(seed, [fault]).committed == list(range(1, RULES.num_versions + 1))


def test_the_coordinator_may_die_between_any_two_actions() -> None:
    for steps in range(120):
        report = simulate(
            0, [SimFault(at=8.0, kind="coordinator", seconds=2.0, steps=steps)], strategy=Server(max_staleness=4)
        )
        assert report.committed == list(range(1, RULES.num_versions + 1))


def test_everything_happens() -> None:
    counts: Counter[str] = sum((run(seed).counts for seed in range(100)), Counter())
    assert [what for what in HAPPENS if not counts[what]] == []


def noticed(what: str) -> None:
    with pytest.raises(Violation, match=what):
        _ = [simulate(seed, strategy=Server(max_staleness=2)) for seed in range(40)]


def test_it_notices_a_bound_that_is_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseRounds, "may_grant", lambda _rounds, _work: True)
    noticed("I3: .* batches are out")


def test_it_notices_a_bound_that_is_too_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LeaseRounds, "may_grant", lambda _rounds, work: not work.ledger.leases)
    noticed("I5: .* somebody waits who need not")


def test_it_notices_batches_that_a_restart_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal that tells only how far units were opened, not which of them are missing behind its records."""
    monkeypatch.setattr(
        Ledger,
        "redone",
        lambda state, units: {"opened": max(state["opened"], max(units) + 1), "next_lease_id": 1, "free": []},
    )
    noticed("I1: of the units")
