"""Who gets which trial: fast machines the long ones; nobody who would only hold up the end."""

import random

from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.tune.assign import AtJob, assign

SPEEDS = {"fast": 100.0, "slow": 10.0}


def test_the_longest_goes_to_the_fastest() -> None:
    at = assign([10, 90], free=["slow", "fast"], busy=[], speeds=SPEEDS, more=5)
    assert at == {1: "fast", 0: "slow"}


def test_a_slow_one_waits_at_the_end() -> None:
    """The fast one is free in a second, and does it in one: the slow one would take ten."""
    busy = [AtJob(place="fast", seconds_left=1.0)]
    assert assign([100], free=["slow"], busy=busy, speeds=SPEEDS, more=0) == {}
    assert assign([100], free=["slow"], busy=busy, speeds=SPEEDS, more=1) == {0: "slow"}
    busy = [AtJob(place="fast", seconds_left=9.0)]
    assert assign([100], free=["slow"], busy=busy, speeds=SPEEDS, more=0) == {0: "slow"}


def test_a_stranger_counts_as_fast() -> None:
    assert assign([10, 90], free=["slow", "new"], busy=[], speeds={"slow": 10.0}, more=5) == {1: "new", 0: "slow"}


@given(seed=st.integers(0, 10_000))
def test_somebody_always_works(seed: int) -> None:
    """Nobody gets two jobs and no job two places; where nobody is busy, work that there is begins."""
    chance = random.Random(seed)
    free = [f"free-{number}" for number in range(chance.randint(1, 6))]
    busy = [
        AtJob(place=f"busy-{number}", seconds_left=chance.uniform(0, 100)) for number in range(chance.randint(0, 3))
    ]
    places = [*free, *(each.place for each in busy)]
    speeds = {place: 10 ** chance.uniform(0, 3) for place in places if chance.random() < 0.7}
    tokens = [chance.choice([100.0, 300.0, 900.0]) for _ in range(chance.randint(1, 6))]
    more = chance.choice([0, 0, 5])
    at = assign(tokens, free=free, busy=busy, speeds=speeds, more=more)
    assert len(set(at.values())) == len(at)
    assert set(at.values()) <= set(free)
    if not busy:
        assert at
    if more:
        assert len(at) == min(len(tokens), len(free))
