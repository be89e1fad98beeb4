"""Whole runs under a virtual clock: random faults from a seed, I1-I7 after every event (`tests/simulate/run.py`)."""

import itertools
import logging
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cuadrilla.sync.kinds import Strategy, windows
from cuadrilla.sync.membership import Rules
from cuadrilla.sync.work import Rounds
from tests.simulate.crew import SLOWNESS
from tests.simulate.disk import UNIT_TOKENS
from tests.simulate.run import (
    COORDINATOR_FAULTS,
    EXACT,
    FOREVER,
    RULES,
    WORKER_FAULTS,
    SimFault,
    Violation,
    World,
    simulate,
    undisturbed,
)

LONG_ROUNDS = replace(RULES, units_per_step=64)
TWO_STEPS = replace(RULES, units_per_step=4, step_tokens=4 * UNIT_TOKENS, num_steps=39)
"""Rounds with as many units as a step of RULES has; the last one has one step."""
STRATEGIES = pytest.mark.parametrize(
    ("strategy", "rules"),
    [
        pytest.param(EXACT, RULES, id="exact"),
        pytest.param(windows(steps=2), TWO_STEPS, id="windows"),
        pytest.param(windows(steps=2, lanes=(2, 1, 1)), TWO_STEPS, id="strict windows"),
    ],
)
HAPPENS = (  # each must happen in some of a hundred seeds, else the simulation has become too easy
    *WORKER_FAULTS,
    "answers sent again",
    "damaged checkpoints",
    "discarded",
    "hung",
    "excluded",
    "late messages of an old connection",
    "lost",
    "non-finite",
    "not a member of this run any more",
    "units skipped",
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Faults cause many warnings, and formatting them would take a third of the time."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


def check(first: int, count: int, *, strategy: Strategy, rules: Rules) -> Counter[str]:
    """The counts of all reports together."""
    happened: Counter[str] = Counter()
    for seed in range(first, first + count):
        report = simulate(seed, strategy=strategy, rules=rules)
        assert report.committed[-1] == rules.num_steps
        happened += report.counts
    return happened


@STRATEGIES
def test_no_fault_breaks_a_promise_and_everything_happens(strategy: Strategy, rules: Rules) -> None:
    happened = check(0, 100, strategy=strategy, rules=rules)
    assert [what for what in HAPPENS if not happened[what]] == []


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100, 10_100, 500))
def test_no_fault_breaks_a_promise_long(first: int) -> None:
    check(first, 500, strategy=EXACT, rules=RULES)


@pytest.mark.soak
@STRATEGIES
def test_no_fault_breaks_a_promise_of_any_strategy(strategy: Strategy, rules: Rules) -> None:
    check(100, 500, strategy=strategy, rules=rules)


@pytest.mark.parametrize("kind", ["", *WORKER_FAULTS, *COORDINATOR_FAULTS])
def test_each_fault_alone_and_none(kind: str) -> None:
    for seed in range(5):
        worker = "w1" if kind in WORKER_FAULTS else ""
        faults = [SimFault(at=4.0 + seed, kind=kind, worker=worker, seconds=12.0, steps=seed)] if kind else []
        report = simulate(seed, faults=faults)
        assert report.committed == list(range(1, RULES.num_steps + 1))
        assert report.skipped or report.theta == undisturbed()


def test_the_coordinator_may_die_between_any_two_actions() -> None:
    for steps in range(120):
        report = simulate(0, faults=[SimFault(at=5.0, kind="coordinator", seconds=2.0, steps=steps)])
        assert report.committed == list(range(1, RULES.num_steps + 1))
        assert report.theta == undisturbed()


def becomes_slow(seed: int, *, at: float) -> World:
    """A run in which `w0` becomes ten times slower in the middle of its lease, for good. There is no other fault."""
    world = World(seed, [SimFault(at=at, kind="slow", worker="w0", seconds=FOREVER - 1)], rules=LONG_ROUNDS)
    world.crew.bad_unit, world.crew.bad_rate = -1, 0.0
    for worker in world.crew.workers.values():
        worker.bad = False
    return world


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_that_becomes_ten_times_slower_costs_its_own_share(seed: int) -> None:
    """From the fifth round on, the crew has at least 85 % of the sum of its workers' speeds."""
    world = becomes_slow(seed, at=30.0)
    report = world.run()
    rates = {name: worker.rate for name, worker in world.crew.workers.items()}
    slow = rates.pop("w0")
    from_round = sum(at < 30.0 for at in report.committed_at) + 1 + 5
    times = report.committed_at[from_round - 1 :]
    units = (len(times) - 1) * LONG_ROUNDS.units_per_step
    assert len(times) > 5
    assert units / (times[-1] - times[0]) >= 0.85 * (sum(rates.values()) + slow / SLOWNESS)
    assert not report.counts["lost"] + report.counts["hung"]


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 7])
def test_the_round_in_which_it_happens_takes_two_and_a_half_times_as_long_at_most(seed: int) -> None:
    """In crews of three or more, workers that have finished their lease share the slow one's."""
    world = becomes_slow(seed, at=100.0)
    assert len(world.crew.workers) >= 3  # of two, the other one may have all of a fast one's lease to do
    times = world.run().committed_at
    last = sum(at < 100.0 for at in times)
    undisturbed_rounds = [later - earlier for earlier, later in itertools.pairwise(times[:last])]
    assert len(undisturbed_rounds) > 3
    assert times[last] - times[last - 1] <= 2.5 * statistics.median(undisturbed_rounds)


def test_it_notices_a_crew_that_nobody_gives_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rounds, "deal", lambda _rounds, _work: [])
    with pytest.raises(Violation, match="I5: units are free"):
        simulate(0)
