"""The order of the data is a permutation per epoch, stateless, and does not depend on how it is asked for."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cuadrilla.data.order import sequence_indices


@given(seed=st.integers(0, 2**63 - 1), length=st.integers(1, 500), epoch=st.integers(0, 10**6))
def test_each_epoch_is_a_permutation(seed: int, length: int, epoch: int) -> None:
    found = sequence_indices(seed, start=epoch * length, count=length, length=length)
    assert sorted(found) == list(range(length))


def test_epochs_and_seeds_differ() -> None:
    first = sequence_indices(1, start=0, count=1000, length=1000)
    assert not np.array_equal(first, sequence_indices(1, start=1000, count=1000, length=1000))
    assert not np.array_equal(first, sequence_indices(2, start=0, count=1000, length=1000))


def test_golden_values() -> None:
    """These numbers decide the data order of every run ever made: they must never change."""
    assert sequence_indices(42, start=5, count=6, length=1000).tolist() == [670, 69, 832, 960, 359, 213]
