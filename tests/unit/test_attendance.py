"""Who works in a run now, from its events and its newest steps."""

from collections.abc import Mapping
from typing import Any

import pytest

from cuadrilla.monitor.attendance import Attendance, Attendant, AtWork, at_work

EVENTS = [
    {"event": "joined", "worker": "old"},
    {"event": "finished"},
    {"event": "joined", "worker": "ana"},
    {"event": "joined", "worker": "luis"},
    {"event": "joined", "worker": "eva"},
    {"event": "left", "worker": "luis"},
    {"event": "late", "worker": "ana"},
]


def present(events: list[Mapping[str, Any]]) -> set[str]:
    attendance = Attendance()
    for event in events:
        attendance.take(event)
    return attendance.here


def test_who_left_and_who_was_there_before_are_not() -> None:
    assert present(EVENTS) == {"ana", "eva"}
    assert present([*EVENTS, {"event": "joined", "worker": "luis"}]) == {"ana", "eva", "luis"}
    for kind in ("finished", "failed"):
        assert present([*EVENTS, {"event": kind}]) == set()


def test_what_is_told_of_each() -> None:
    attendance = Attendance(most=2)
    for event in (
        {"event": "joined", "worker": "ana", "time": 5},
        {"event": "evicted", "worker": "ana", "time": 6, "reason": "three\nwrong answers"},
        {"event": "joined", "worker": "luis", "time": 7},
        {"event": "joined", "worker": "one too many", "time": 8},
        {"event": "joined", "worker": ["luis"]},
        {"event": ["joined"], "worker": "luis"},
        {"event": "left", "worker": "luis", "time": 1e999, "reason": {"a": 1}},
        {"event": "joined", "worker": "luis", "time": 9},
        {"event": "failed", "time": 10},
    ):
        attendance.take(event)
    assert attendance.by_name == {
        "ana": Attendant(is_here=False, joined=1, lost=1, reason="three\\nwrong answers", time=6.0),
        "luis": Attendant(is_here=False, joined=2, lost=1, reason="", time=10.0),
    }


def test_shares_and_speeds_are_those_of_the_newest_steps() -> None:
    rows = [
        {"version": 7, "tokens_per_second": 1000.0},  # of one worker
        {"version": 8, "tokens_per_second": 1000.0, "shares": {"ana": 0.5, "luis": 0.5}},
        {"version": 9, "tokens_per_second": 4000.0, "shares": {"ana": 1.0, "eva": 0.0}},
    ]
    assert at_work(present(EVENTS), rows) == {
        "ana": AtWork(share=0.75, tokens_per_second=pytest.approx(1500)),
        "eva": AtWork(share=0.0, tokens_per_second=0.0),
    }


def test_one_alone_does_everything() -> None:
    rows = [{"version": 1, "tokens_per_second": 200.0}, {"version": 2, "tokens_per_second": None}]
    assert at_work({"ana"}, rows) == {"ana": AtWork(share=1.0, tokens_per_second=100.0)}


def test_before_the_first_step_nobody_has_a_share() -> None:
    assert at_work(present(EVENTS), []) == {name: AtWork(share=0.0, tokens_per_second=0.0) for name in ("ana", "eva")}
