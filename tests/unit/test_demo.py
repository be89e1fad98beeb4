"""How much of a demonstration a machine does."""

import pytest

from cuadrilla.cli.demo import BATCHES, LEAST_STEPS, STEPS, TRAIN_SECONDS, Size

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("sequences_per_second", "steps", "batch"),
    [
        (1000.0, STEPS, BATCHES[1]),
        (10 * STEPS / TRAIN_SECONDS, STEPS, 10),
        (0.95 * BATCHES[0] * STEPS / TRAIN_SECONDS, int(0.95 * STEPS), BATCHES[0]),
        (0.1, LEAST_STEPS, BATCHES[0]),
    ],
)
def test_a_slower_machine_makes_smaller_steps_and_then_fewer(
    sequences_per_second: float, steps: int, batch: int
) -> None:
    size = Size.fit(sequences_per_second)
    assert (size.steps, size.batch) == (pytest.approx(steps, abs=1), batch)
    if size.steps > LEAST_STEPS:
        assert size.steps * size.batch / sequences_per_second <= TRAIN_SECONDS
    assert size.minutes >= 1
