"""The queue of runs that wait for a machine, and the loop that hands them out."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuadrilla.crew import children
from cuadrilla.crew.children import Deaths
from cuadrilla.errors import ConfigError
from cuadrilla.jobs.executor import Ended, hand_out
from cuadrilla.jobs.queue import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, QueuedRun, QueueWork, RunQueue
from cuadrilla.rundir import RunDir
from tests.clock import Clock


class Hands:
    """An executor whose machines do what a test wants. Runs in `refuses` cannot be started."""

    def __init__(self, *places: str, refuses: Sequence[str] = ()) -> None:
        self.places = dict.fromkeys(places, "cpu")
        self.busy: dict[str, str] = {}
        self.refuses = refuses
        self.preempted: list[str] = []
        self._ended: list[Ended] = []

    @property
    def free(self) -> list[str]:
        return [place for place in self.places if place not in self.busy]

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        if run.path.name in self.refuses:
            raise ConfigError("it cannot be read", hint="write it anew")
        self.busy[place] = job

    def end(self, place: str, **how: Any) -> None:
        self._ended.append(Ended(job=self.busy.pop(place), place=place, **how))

    def poll(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def preempt(self, job: str) -> None:
        self.preempted.append(job)

    def close(self) -> None: ...


class Rounds(threading.Event):
    """The stop event of the loop. It wakes the loop once, and again after each action of the test; then it is set."""

    def __init__(self, hands: Hands, *deeds: Callable[[], object]) -> None:
        super().__init__()
        self.hands, self._deeds = hands, [lambda: None, *deeds]

    def wait(self, timeout: float | None = None) -> bool:
        if not self._deeds:
            self.hands.busy.clear()
            return True
        self._deeds.pop(0)()
        return False


def handed_out(
    queue: RunQueue, hands: Hands, *deeds: Callable[[], object], until_empty: bool = False
) -> list[tuple[str, str]]:
    """Run the loop, and return what it tells: a run with its machine when it begins, with its state when it ends."""
    told: list[tuple[str, str]] = []

    def tell(run: QueuedRun, state: str, place: str, _reason: str) -> None:
        told.append((run.run.path.name, place if state == RUNNING else state))

    hand_out(QueueWork(queue, tell=tell, until_empty=until_empty), [hands], stop=Rounds(hands, *deeds))
    return told


@pytest.fixture
def queue(tmp_path: Path) -> RunQueue:
    queue = RunQueue(tmp_path / "queue")
    for name in ("uno", "dos", "tres"):
        queue.add(RunDir(tmp_path / name))
    return queue


def names(queue: RunQueue) -> list[str]:
    return [run.run.path.name for run in queue.runs()]


def test_order(queue: RunQueue) -> None:
    assert names(queue) == ["uno", "dos", "tres"]
    queue.put_first(queue.find("tres"))
    assert names(queue) == ["tres", "uno", "dos"]
    queue.add(RunDir(queue.find("tres").run.path))
    assert names(queue) == ["uno", "dos", "tres"]
    queue.remove(queue.find("dos"))
    assert names(queue) == ["uno", "tres"]
    with pytest.raises(ConfigError, match="not in the queue"):
        queue.find("dos")


def test_two_runs_of_one_name_are_told_apart_by_their_folders(queue: RunQueue, tmp_path: Path) -> None:
    queue.add(RunDir(tmp_path / "otra" / "uno"))
    with pytest.raises(ConfigError, match="several"):
        queue.find("uno")
    assert queue.find(str(tmp_path / "otra" / "uno")).name == queue.runs()[-1].name


def test_they_are_handed_out_in_their_order_and_a_lost_one_waits_again(queue: RunQueue) -> None:
    """It continues before another run begins."""
    hands = Hands("ana", "luis")

    def both_end() -> None:
        hands.end("ana", complete=True)
        hands.end("luis", reason="no space left")

    lost, last = partial(hands.end, "ana", lost=True, reason="the cable"), partial(hands.end, "ana", complete=True)
    goes_on = partial(pytest.fail, "all has been done")
    assert handed_out(queue, hands, lost, both_end, last, goes_on, until_empty=True) == [
        ("uno", "ana"),
        ("dos", "luis"),
        ("uno", "ana"),
        ("uno", COMPLETE),
        ("dos", FAILED),
        ("tres", "ana"),
        ("tres", COMPLETE),
    ]
    assert queue.find("dos").reason == "no space left"


def test_what_is_lost_again_and_again_without_a_step_forward_has_failed(queue: RunQueue) -> None:
    hands = Hands("ana")
    lost = partial(hands.end, "ana", lost=True, reason="signal 9")
    handed_out(queue, hands, lost, lost, lost)
    assert (queue.find("uno").state, queue.find("uno").reason) == (FAILED, "signal 9")
    assert queue.find("dos").state == RUNNING


def test_only_the_named_machine(queue: RunQueue, tmp_path: Path) -> None:
    """A machine's name also stands for each of its devices' workers. A kind of device may be named instead."""
    queue.add(RunDir(tmp_path / "uno"), on=("luis",))
    queue.add(RunDir(tmp_path / "tres"), on=("cuda",))
    assert handed_out(queue, Hands("ana", "luis/cuda:0")) == [("dos", "ana"), ("uno", "luis/cuda:0")]
    assert (queue.find("tres").state, queue.find("tres").machine) == (WAITING, "cuda")


def test_stop(queue: RunQueue) -> None:
    """A running run is preempted, and a waiting one is not begun. Both begin when they are added again."""
    hands = Hands("ana")

    def stops() -> None:
        for name in ("uno", "dos"):
            queue.stop(queue.find(name))
        with pytest.raises(ConfigError, match="running"):
            queue.remove(queue.find("uno"))
        with pytest.raises(ConfigError, match="running"):
            queue.add(queue.find("uno").run)

    handed_out(queue, hands, stops, partial(hands.end, "ana"))
    assert hands.preempted[0] == queue.find("uno").name
    assert [queue.find(name).state for name in ("uno", "dos", "tres")] == [STOPPED, STOPPED, RUNNING]
    queue.add(queue.find("uno").run)
    assert queue.find("uno").state == WAITING


def test_what_cannot_begin_holds_nobody_up(queue: RunQueue) -> None:
    assert handed_out(queue, Hands("ana", refuses=["uno"])) == [("uno", FAILED), ("dos", "ana")]
    assert queue.find("uno").reason == "it cannot be read"


# -- how often what was killed is started again ------------------------------------------------------------------------


def test_three_deaths_without_progress_between_them_are_the_last() -> None:
    steps = iter([0, 5, 5, 6, 6, 6])
    deaths = Deaths(lambda: next(steps))
    assert [deaths.allow() for _ in range(6)] == [True] * 5 + [False]


def test_a_worker_that_dies_every_few_minutes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(children, "time", SimpleNamespace(monotonic=clock))
    often, seldom = Deaths(within_seconds=600), Deaths(within_seconds=600)
    answers = []
    for clock.now in (400.0, 650.0, 900.0):
        answers.append(often.allow())
    for clock.now in (400.0, 650.0, 1001.0):
        answers.append(seldom.allow())
    assert answers == [True, True, False, True, True, True]
