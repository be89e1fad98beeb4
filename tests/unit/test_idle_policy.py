"""When work waits: a battery, an owner at the machine, a pause."""

import os
import queue
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from cuadrilla.crew.idle_policy import QUIET_SECONDS, IdlePolicy, OwnerRules, Surroundings, why_wait
from cuadrilla.home import Home
from cuadrilla.host.gpus import CardUse

pytestmark = pytest.mark.unit

ALL = OwnerRules(while_idle=True, on_power=True)
GAME = 2**22 + 7


def seen(
    *,
    paused: bool = False,
    battery: bool | None = False,
    used: float | None = 0.0,
    quiet: float = 1e9,
) -> Surroundings:
    return Surroundings(paused=paused, on_battery=battery, used=used, quiet_seconds=quiet)


def test_work_goes_on_unless_something_is_in_its_way() -> None:
    assert why_wait(ALL, seen(), waits=False) is None
    assert why_wait(ALL, seen(battery=None, used=None), waits=True) is None
    assert "paused" in str(why_wait(OwnerRules(), seen(paused=True), waits=False))
    assert why_wait(ALL, seen(battery=True), waits=False) == "on battery"
    assert why_wait(ALL, seen(used=0.5), waits=False) == "the machine is being used"
    assert why_wait(OwnerRules(), seen(battery=True, used=1.0), waits=False) is None


def test_a_machine_must_be_quiet_for_a_while_before_work_goes_on() -> None:
    little = seen(used=0.2, quiet=0)
    assert why_wait(ALL, little, waits=False) is None
    assert why_wait(ALL, little, waits=True) == "the machine is being used"
    assert why_wait(ALL, seen(quiet=QUIET_SECONDS - 1), waits=True)
    assert why_wait(ALL, seen(quiet=QUIET_SECONDS), waits=True) is None


def test_a_pause_of_this_machine_and_of_nodes_are_two_things(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    assert (home.is_paused, home.paused_nodes) == (False, frozenset())
    home.pause("ana")
    assert (home.is_paused, home.paused_nodes) == (False, {"ana"})
    home.pause()
    home.unpause("ana")
    assert (home.is_paused, home.paused_nodes) == (True, frozenset())


def test_a_watcher_says_once_that_work_must_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuadrilla.crew.idle_policy.LOOK_SECONDS", 0.01)
    home = Home(tmp_path / "home")
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    idle_policy = IdlePolicy(OwnerRules(), home=home)
    with idle_policy.watching(heard.put):
        home.pause()
        assert "paused" in heard.get(timeout=10)
    assert heard.empty()
    home.unpause()
    assert idle_policy.wait_until_idle() < 10


def test_priority_of_a_process() -> None:
    """In a process of its own: it cannot be taken back."""
    script = """
from cuadrilla.crew.idle_policy import OwnerRules, set_priority
import psutil
before = psutil.Process().nice()
set_priority(OwnerRules(low_priority=True))
print(psutil.Process().nice() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert int(done.stdout) != 0


class Cards:
    """What the driver is to say at each look; the last answer stays."""

    def __init__(self, *uses: CardUse) -> None:
        self.answers, self.closed = list(uses), 0

    def uses(self) -> tuple[CardUse, ...]:
        return (self.answers.pop(0) if len(self.answers) > 1 else self.answers[0],)

    def close(self) -> None:
        self.closed += 1


def policy_with(cards: Cards, home: Home, **options: Any) -> IdlePolicy:
    made = IdlePolicy(OwnerRules(while_idle=True), home=home, gpus=cards, **options)  # type: ignore[arg-type]
    made._told_apart = True
    made._others = lambda: 0.0  # type: ignore[method-assign]  # the processors of whoever runs the tests
    return made


def test_work_stops_for_a_game_and_goes_on_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuadrilla.crew.idle_policy.LOOK_SECONDS", 0.01)
    monkeypatch.setattr("cuadrilla.crew.idle_policy.QUIET_SECONDS", 0.05)
    ours = {os.getpid(): 0.9}
    cards = Cards(*[CardUse(busy=0.9, users=ours)] * 5, CardUse(busy=1.0, users=ours | {GAME: 0.6}))
    idle_policy = policy_with(cards, Home(tmp_path / "home"))
    heard: queue.SimpleQueue[str] = queue.SimpleQueue()
    with idle_policy.watching(heard.put):
        assert heard.get(timeout=10) == "the machine is being used"
    assert cards.closed
    cards.answers = [CardUse(busy=0.6, users={GAME: 0.6})] * 3 + [CardUse(busy=0.0, users={})]
    assert idle_policy.wait_until_idle() < 10
    assert cards.answers == [CardUse(busy=0.0, users={})]


def test_a_gpu_that_tells_no_programs_apart_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be all our own work: that must not keep us from it. Before work begins it is others'."""
    monkeypatch.setattr("cuadrilla.crew.idle_policy.LOOK_SECONDS", 0.01)
    cards = Cards(CardUse(busy=1.0))
    idle_policy = policy_with(cards, Home(tmp_path / "home"))
    with caplog.at_level("INFO"):
        for _ in range(3):
            assert why_wait(idle_policy.rules, idle_policy._look(works=True), waits=False) is None
    assert [record.getMessage() for record in caplog.records if "GPU" in record.getMessage()] == [
        "--while-idle: which programs use the GPU is not told here, so that it does not count while this one works"
    ]
    assert why_wait(idle_policy.rules, idle_policy._look(works=False), waits=True) == "the machine is being used"
    several = policy_with(cards, Home(tmp_path / "home"), root=os.getppid())
    assert why_wait(several.rules, several._look(works=False), waits=True) is None  # another worker's, perhaps


@pytest.mark.parametrize(("processor", "gpu", "used"), [(0.5, 0.1, 0.5), (0.1, 0.5, 0.5), (None, 0.5, 0.5)])
def test_a_gpu_that_others_use_counts_as_the_processor_does(
    tmp_path: Path, processor: float | None, gpu: float, used: float
) -> None:
    policy = policy_with(Cards(CardUse(busy=gpu, users={GAME: gpu})), Home(tmp_path / "home"))
    policy._others = lambda: processor  # type: ignore[method-assign]
    assert policy._look(works=True).used == used
    policy.rules = OwnerRules()
    assert policy._look(works=True).used is None


def test_what_cannot_be_measured_keeps_nobody_from_work(tmp_path: Path) -> None:
    nothing = policy_with(Cards(CardUse()), Home(tmp_path / "home"))
    nothing._others = lambda: None  # type: ignore[method-assign]
    assert why_wait(nothing.rules, nothing._look(works=False), waits=True) is None


def test_nice_work_of_ours_is_counted_once() -> None:
    """The system counts it as nice, beside the work of others: taken away twice, others would seem to do nothing."""
    script = "import os, sys\nos.nice(15)\nwhile True: sum(range(10**5)); print(flush=True)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as nice:
        process, idle_policy = (
            psutil.Process(nice.pid),
            IdlePolicy(OwnerRules(), home=Home(Path("unused")), root=nice.pid),
        )
        try:
            deadline = time.monotonic() + 30
            while process.cpu_times().user < 0.3 and time.monotonic() < deadline:
                assert nice.stdout is not None
                nice.stdout.readline()
            assert idle_policy._own_seconds() <= process.cpu_times().system + 0.05
        finally:
            nice.kill()


def test_what_an_owner_asks_reaches_other_processes() -> None:
    assert OwnerRules(while_idle=True, low_priority=True).options == ["--while-idle", "--low-priority"]
