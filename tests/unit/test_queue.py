"""The list of runs that wait for a machine, and who hands them out."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.jobs.executor import Ended, hand_out
from cuadrilla.jobs.queue import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, QueuedRun, QueueWork, RunQueue
from cuadrilla.rundir import RunDir


class Hands:
    """An executor whose machines do what a test says. Runs in `refuses` cannot be begun."""

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
    """Wakes the loop that hands out, once for each thing that a test does; then it is to stop."""

    def __init__(self, hands: Hands, *deeds: Callable[[], object]) -> None:
        super().__init__()
        self.hands, self._deeds = hands, list(deeds)

    def wait(self, timeout: float | None = None) -> bool:
        if not self._deeds:
            self.hands.busy.clear()
            return True
        self._deeds.pop(0)()
        return False


def nothing() -> None: ...


def handed_out(work: QueueWork, hands: Hands, *deeds: Callable[[], object]) -> None:
    hand_out(work, [hands], stop=Rounds(hands, *deeds))


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def __call__(self, run: QueuedRun, state: str, place: str, reason: str) -> None:
        self.said.append((run.run.path.name, place if state == RUNNING else state))


@pytest.fixture
def queue(tmp_path: Path) -> RunQueue:
    queue = RunQueue(tmp_path / "queue")
    for name in ("uno", "dos", "tres"):
        queue.add(RunDir(tmp_path / name))
    return queue


def listed(queue: RunQueue) -> list[tuple[str, str]]:
    return [(run.run.path.name, run.state) for run in queue.runs()]


def names(queue: RunQueue) -> list[str]:
    return [name for name, _ in listed(queue)]


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
    """It goes on before anything new begins."""
    hands, heard = Hands("ana", "luis"), Heard()
    work = QueueWork(queue, tell=heard, until_empty=True)

    def both_end() -> None:
        hands.end("ana", complete=True)
        hands.end("luis", reason="no space left")

    lost = partial(hands.end, "ana", lost=True, reason="the cable")
    handed_out(work, hands, nothing, lost, both_end)
    assert heard.said == [
        ("uno", "ana"),
        ("dos", "luis"),
        ("uno", "ana"),
        ("uno", COMPLETE),
        ("dos", FAILED),
        ("tres", "ana"),
    ]
    assert queue.find("dos").reason == "no space left"
    assert not work.is_done
    hands.busy["ana"] = queue.find("tres").name
    handed_out(work, hands, partial(hands.end, "ana", complete=True))
    assert work.is_done


def test_what_is_lost_again_and_again_without_a_step_forward_has_failed(queue: RunQueue) -> None:
    hands = Hands("ana")
    lost = partial(hands.end, "ana", lost=True, reason="signal 9")
    handed_out(QueueWork(queue, tell=Heard()), hands, nothing, lost, lost, lost)
    assert (queue.find("uno").state, queue.find("uno").reason) == (FAILED, "signal 9")
    assert queue.find("dos").state == RUNNING


def test_only_the_named_machine(queue: RunQueue, tmp_path: Path) -> None:
    """One worker of it, too, where it has one for each device; and only the named kind of device."""
    queue.add(RunDir(tmp_path / "uno"), on=("luis",))
    queue.add(RunDir(tmp_path / "tres"), on=("cuda",))
    hands, heard = Hands("ana", "luis/cuda:0"), Heard()
    handed_out(QueueWork(queue, tell=heard), hands, nothing)
    assert heard.said == [("dos", "ana"), ("uno", "luis/cuda:0")]
    assert (queue.find("tres").state, queue.find("tres").machine) == (WAITING, "cuda")


def test_stop(queue: RunQueue) -> None:
    """What runs is preempted; what waits is not begun; added again, both begin again."""
    hands = Hands("ana")

    def stops() -> None:
        for name in ("uno", "dos"):
            queue.stop(queue.find(name))
        with pytest.raises(ConfigError, match="running"):
            queue.remove(queue.find("uno"))
        with pytest.raises(ConfigError, match="running"):
            queue.add(queue.find("uno").run)

    handed_out(QueueWork(queue, tell=Heard()), hands, nothing, stops, partial(hands.end, "ana"))
    assert hands.preempted[0] == queue.find("uno").name
    assert listed(queue) == [("uno", STOPPED), ("dos", STOPPED), ("tres", RUNNING)]
    queue.add(queue.find("uno").run)
    assert queue.find("uno").state == WAITING


def test_what_cannot_begin_holds_nobody_up(queue: RunQueue) -> None:
    hands, heard = Hands("ana", refuses=["uno"]), Heard()
    handed_out(QueueWork(queue, tell=heard), hands, nothing)
    assert heard.said == [("uno", FAILED), ("dos", "ana")]
    assert queue.find("uno").reason == "it cannot be read"
