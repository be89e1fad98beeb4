import math
from typing import Any

import pytest

from cuadrilla.train.heldout import HeldOut

# (training loss, held-out loss if it was measured) of each step; the lowest is at step 4
CURVE = [(4.0, None), (3.8, 3.9), (3.6, None), (3.4, 3.5), (3.2, None), (3.0, 3.6), (2.8, None), (2.6, 3.7)]


def rows(curve: list[tuple[float, float | None]]) -> list[dict[str, Any]]:
    return [
        {"version": version, "loss": loss, **({} if val is None else {"val_loss": val})}
        for version, (loss, val) in enumerate(curve, start=1)
    ]


def fed(curve: list[tuple[float, float | None]]) -> HeldOut:
    held_out = HeldOut()
    for row in rows(curve):
        held_out.add(row, version=row["version"])
    return held_out


def test_the_lowest_is_found_and_what_follows_is_counted() -> None:
    held_out = fed(CURVE)
    assert (held_out.best, held_out.since_best) == ((3.5, 4), 2)
    assert held_out.train_at_best == pytest.approx(3.5)
    assert held_out.train_last == pytest.approx(2.7)
    assert held_out.memorises


@pytest.mark.parametrize(
    "curve",
    [
        CURVE[:6],  # one evaluation above the lowest: it may be chance
        [*CURVE[:4], (3.9, None), (3.9, 3.6), (3.9, 3.7)],  # training loss has risen, too
        [*CURVE, (2.5, 3.4)],  # a new lowest
        [*CURVE[:4], (3.1, 3.5), (3.0, 3.51)],  # it stays where it is
        [(4.0, None), (3.0, None)],
        [],
    ],
)
def test_it_does_not_memorise(curve: list[tuple[float, float | None]]) -> None:
    assert not fed(curve).memorises


@pytest.mark.parametrize("version", range(len(CURVE) + 1))
def test_a_resumed_run_knows_what_the_first_one_did(version: int) -> None:
    """Rows behind `version`, of steps that are made again, do not count."""
    whole, resumed = fed(CURVE[:version]), HeldOut.of(rows(CURVE), upto=version)
    for row in rows(CURVE)[version:]:
        assert whole.add(row, version=row["version"]) == resumed.add(row, version=row["version"])
    assert (resumed.best, resumed.since_best, resumed.memorises) == (whole.best, whole.since_best, whole.memorises)


def test_losses_that_are_no_numbers_are_no_best() -> None:
    held_out = HeldOut()
    assert not held_out.add({"loss": math.nan, "val_loss": math.nan}, version=1)
    assert held_out.add({"loss": 3.0, "val_loss": 3.0}, version=2)
    assert not held_out.add({"loss": 2.0, "val_loss": math.inf}, version=3)
    assert held_out.best == (3.0, 2)
    found = HeldOut.of([{"version": 1, "loss": None, "val_loss": None}, {"version": "x"}, {}], upto=9)
    assert (found.best, found.since_best) == (None, 0)
