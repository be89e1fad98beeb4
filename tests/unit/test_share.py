"""Shares of unequal workers: their sum, the earliest possible end, and no share for a worker that would delay it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.plan.share import Pace, share_units


def paces(**members: float | tuple[float, float]) -> dict[str, Pace]:
    """Paces by name, each from a speed, or from a speed and fixed seconds."""
    pairs = {name: value if isinstance(value, tuple) else (value, 0.0) for name, value in members.items()}
    return {name: Pace(units_per_second=speed, fixed_seconds=fixed) for name, (speed, fixed) in pairs.items()}


@pytest.mark.parametrize(
    ("units", "members", "expected"),
    [
        (16, {"a": 1.0, "b": 0.5, "c": 0.25}, {"a": 10, "b": 4, "c": 2}),  # after 10 s, as 9, 5, 2: a tie
        (8, {"a": 1.0}, {"a": 8}),
        (1, {"a": 1.0, "b": 1.0}, {"a": 1, "b": 0}),
        (10, {"fast": 100.0, "slow": 0.1}, {"fast": 10, "slow": 0}),
        (8, {"near": (1.0, 0.0), "far": (1.0, 4.0)}, {"near": 6, "far": 2}),  # both end after 6 s
        (8, {"near": (1.0, 0.0), "far": (1.0, 9.0)}, {"near": 8, "far": 0}),  # its transfer alone takes longer
        (5, {}, {}),
    ],
)
def test_shares(units: int, members: dict[str, float | tuple[float, float]], expected: dict[str, int]) -> None:
    assert share_units(units, paces=paces(**members)) == expected


members = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.floats(0.01, 100), st.floats(0, 20)), min_size=1, max_size=4
)


@given(st.integers(1, 9), members)
def test_no_other_split_ends_sooner(units: int, members: dict[str, tuple[float, float]]) -> None:
    known = paces(**members)

    def end(shares: dict[str, int]) -> float:
        return max(known[worker].seconds(count) for worker, count in shares.items() if count)

    splits = (split for split in itertools.product(range(units + 1), repeat=len(known)) if sum(split) == units)
    best = min(end(dict(zip(known, split, strict=True))) for split in splits)
    assert end(share_units(units, paces=known)) <= best * (1 + 1e-6)
