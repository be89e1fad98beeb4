"""When work waits: a battery, an owner at the machine, a pause."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from cuadrilla.crew import idle_policy as module
from cuadrilla.crew.idle_policy import IdlePolicy, OwnerRules
from cuadrilla.crew.reporting import reporting
from cuadrilla.home import Home
from cuadrilla.host.gpus import Gpus, GpuUsage

ALL = OwnerRules(while_idle=True, on_power=True)


def use(*busy: float | None) -> tuple[GpuUsage, ...]:
    """How busy each card is, in percent."""
    return tuple(GpuUsage(index=index, name="GPU", busy_percent=percent) for index, percent in enumerate(busy))


class Cards:
    """Reports that a driver gives one after the other; the last one is repeated."""

    def __init__(self, *uses: tuple[GpuUsage, ...]) -> None:
        self.answers = list(uses)

    def sample(self) -> tuple[GpuUsage, ...]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def policy_with(cards: Cards | Gpus, home: Home, **options: Any) -> IdlePolicy:
    made = IdlePolicy(OwnerRules(while_idle=True), home=home, gpus=cards, **options)  # type: ignore[arg-type]
    made._others = lambda: 0.0  # type: ignore[method-assign]  # else the CPU load of the machine that runs the tests
    return made


@pytest.mark.parametrize(
    ("rules", "battery", "used", "working", "reason"),
    [
        (ALL, False, 0.0, True, None),
        (ALL, None, None, False, None),
        (ALL, True, 0.0, True, "on battery"),
        (ALL, False, 0.5, True, "the machine is being used"),
        (ALL, False, 0.2, True, None),
        (ALL, False, 0.2, False, "the machine is being used"),
        (OwnerRules(), True, 1.0, True, None),
    ],
)
def test_work_goes_on_unless_something_is_in_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: OwnerRules, battery: bool | None, used: float | None,
    working: bool, reason: str | None,
) -> None:  # fmt: skip
    monkeypatch.setattr(module, "read_battery", lambda: {"on_battery": battery})
    policy = policy_with(Cards(use()), Home(tmp_path / "home"))
    policy.rules, policy._others = rules, lambda: used  # type: ignore[method-assign]
    assert policy.why_wait(working=working) == reason


def test_work_waits_for_a_game_and_begins_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuadrilla.crew.idle_policy.POLL_SECONDS", 0.01)
    monkeypatch.setattr("cuadrilla.crew.idle_policy.QUIET_SECONDS", 0.05)
    cards = Cards(*[use(None, 60)] * 3, use(0, None))
    assert policy_with(cards, Home(tmp_path / "home")).wait_until_idle(unless=threading.Event()) >= 0.05
    assert cards.answers == [use(0, None)]


def test_the_use_of_a_gpu(tmp_path: Path) -> None:
    """The load may be the worker's own, so it must not stop one that works. Before it works, others cause the load."""
    cards, home = Cards(use(100)), Home(tmp_path / "home")
    assert policy_with(cards, home).why_wait(working=True) is None
    assert policy_with(cards, home).why_wait(working=False) == "the machine is being used"
    assert policy_with(cards, home, root=os.getppid()).why_wait(working=False) is None  # another worker's, perhaps


def test_a_session_that_has_ended_does_not_hide_a_game_that_has_begun(tmp_path: Path) -> None:
    cards = Gpus([sys.executable, "-c", """print('{"gpus": [{"index": 0, "name": "GPU", "busy_percent": 60}]}')"""])
    policy = policy_with(cards, Home(tmp_path / "home"))
    with reporting(lambda _report: None, facts={}, policy=policy):
        pass
    assert policy.why_wait(working=False) == "the machine is being used"


def test_work_of_low_priority_is_counted_once(tmp_path: Path) -> None:
    """The system counts it separately, as nice. Subtracted a second time, the work of others would seem to be zero."""
    script = """
from cuadrilla.crew.idle_policy import OwnerRules, set_priority
set_priority(OwnerRules(low_priority=True))
while True:
    print(sum(range(10**5)), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as nice:
        process = psutil.Process(nice.pid)
        policy = IdlePolicy(OwnerRules(), home=Home(tmp_path), root=nice.pid)
        try:
            while process.cpu_times().user < 0.3:
                assert nice.stdout is not None
                assert nice.stdout.readline()
            assert process.nice() != psutil.Process().nice()
            assert policy._own_seconds() <= process.cpu_times().system + 0.05
        finally:
            nice.kill()
