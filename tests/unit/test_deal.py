"""Which run begins next, and with what."""

import pytest

from cuadrilla.jobs.deal import Candidate, Wants, deal

CARDS = ["luis/cuda:0", "luis/cuda:1"]
ANA = Candidate(name="ana", devices={"ana": "cpu"}, free=["ana"])
LUIS = Candidate(name="luis", devices=dict.fromkeys(CARDS, "cuda"), free=CARDS)
EVA = Candidate(name="eva", devices={"eva": "cpu"}, free=[])
ONE, TWO = Wants(), Wants(machines=2)


@pytest.mark.parametrize(
    ("waiting", "machines", "dealt"),
    [
        ([], [ANA], None),
        ([ONE], [], None),
        ([ONE], [EVA], None),
        ([ONE, ONE], [EVA, LUIS, ANA], (0, ("luis/cuda:0",))),
        ([Wants(on=("luis",))], [ANA, LUIS], (0, ("luis/cuda:0",))),
        ([Wants(on=("luis/cuda:1",))], [ANA, LUIS], (0, ("luis/cuda:1",))),
        ([Wants(on=("nadie",)), ONE], [ANA], (1, ("ana",))),
        ([Wants(device="mps"), Wants(device="cpu")], [LUIS, ANA], (1, ("ana",))),
    ],
)
def test_a_run_of_one_machine_gets_a_place(
    waiting: list[Wants], machines: list[Candidate], dealt: tuple[int, tuple[str, ...]] | None
) -> None:
    assert deal(waiting, machines) == dealt


@pytest.mark.parametrize(
    ("waiting", "machines", "dealt"),
    [
        ([TWO, ONE], [ANA, LUIS], (0, ("ana", "luis/cuda:0", "luis/cuda:1"))),
        ([Wants(machines=2, device="cuda"), ONE], [ANA, LUIS, EVA], (1, ("ana",))),
        ([Wants(machines=2, on=("ana", "eva")), ONE], [ANA, LUIS], (1, ("ana",))),
    ],
)
def test_a_run_of_several_gets_them_whole(
    waiting: list[Wants], machines: list[Candidate], dealt: tuple[int, tuple[str, ...]]
) -> None:
    assert deal(waiting, machines) == dealt


def test_free_machines_are_kept_for_a_run_that_waits_for_another_one() -> None:
    """Otherwise short runs behind it would take each of them as it becomes free, for ever."""
    assert deal([TWO, ONE], [ANA, EVA]) is None
    assert deal([ONE, TWO], [ANA, EVA]) == (0, ("ana",)), "what stands before it does not wait"
    assert deal([TWO, ONE], [ANA]) == (1, ("ana",)), "with one machine there it would wait for ever"
    assert deal([Wants(machines=2, on=("ana", "eva")), ONE], [ANA, EVA, LUIS]) == (1, ("luis/cuda:0",))


def test_a_machine_that_has_something_to_do_on_one_device_is_not_whole() -> None:
    half = Candidate(name="luis", devices=dict.fromkeys(CARDS, "cuda"), free=CARDS[1:])
    assert deal([TWO, ONE], [ANA, half]) is None
    assert deal([ONE], [half]) == (0, ("luis/cuda:1",))
