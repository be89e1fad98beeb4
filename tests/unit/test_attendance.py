"""Who works in a run now, from its events and its newest steps."""

import pytest

from cuadrilla.monitor.attendance import AtWork, at_work, present

EVENTS = [
    {"event": "joined", "worker": "old"},
    {"event": "finished"},
    {"event": "joined", "worker": "ana"},
    {"event": "joined", "worker": "luis"},
    {"event": "joined", "worker": "eva"},
    {"event": "left", "worker": "luis"},
    {"event": "late", "worker": "ana"},
]


def test_who_left_and_who_was_there_before_are_not() -> None:
    assert present(EVENTS) == {"ana", "eva"}
    assert present([*EVENTS, {"event": "joined", "worker": "luis"}]) == {"ana", "eva", "luis"}
    assert present([*EVENTS, {"event": "finished"}]) == set()


def test_shares_and_speeds_are_those_of_the_newest_steps() -> None:
    rows = [
        {"version": 7, "tokens_per_second": 1000.0},  # of one worker
        {"version": 8, "tokens_per_second": 1000.0, "shares": {"ana": 0.5, "luis": 0.5}},
        {"version": 9, "tokens_per_second": 4000.0, "shares": {"ana": 1.0, "eva": 0.0}},
    ]
    assert at_work(EVENTS, rows) == {
        "ana": AtWork(share=0.75, tokens_per_second=pytest.approx(1500)),
        "eva": AtWork(share=0.0, tokens_per_second=0.0),
    }


def test_one_alone_does_everything() -> None:
    rows = [{"version": 1, "tokens_per_second": 200.0}, {"version": 2, "tokens_per_second": None}]
    assert at_work([{"event": "joined", "worker": "ana"}], rows) == {"ana": AtWork(share=1.0, tokens_per_second=100.0)}


def test_before_the_first_step_nobody_has_a_share() -> None:
    assert at_work(EVENTS, []) == {name: AtWork(share=0.0, tokens_per_second=0.0) for name in ("ana", "eva")}
