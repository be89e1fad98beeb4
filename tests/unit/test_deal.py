"""Which run begins next, and where."""

import pytest

from cuadrilla.jobs.deal import Wants, deal

DEVICES = {"ana": "cpu", "eva": "cpu", "luis/cuda:0": "cuda", "luis/cuda:1": "cuda"}
CARDS = ["luis/cuda:0", "luis/cuda:1"]


@pytest.mark.parametrize(
    ("waiting", "free", "dealt"),
    [
        ([], ["ana"], None),
        ([Wants()], [], None),
        ([Wants(), Wants()], [*CARDS, "ana"], (0, "luis/cuda:0")),
        ([Wants(on=("luis",))], ["ana", *CARDS], (0, "luis/cuda:0")),
        ([Wants(on=("luis/cuda:1",))], ["ana", *CARDS], (0, "luis/cuda:1")),
        ([Wants(on=("nadie",)), Wants()], ["ana"], (1, "ana")),
        ([Wants(device="mps"), Wants(device="cpu")], [*CARDS, "ana"], (1, "ana")),
    ],
)
def test_the_first_run_that_can_begin_gets_a_place(
    waiting: list[Wants], free: list[str], dealt: tuple[int, str] | None
) -> None:
    assert deal(waiting, free, devices=DEVICES) == dealt
