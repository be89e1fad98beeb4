"""The list of runs that wait for a machine, and who hands them out."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.jobs.executor import Ended
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

    def end(self, place: str, *, complete: bool = False, reason: str = "") -> None:
        job = self.busy.pop(place)
        self._ended.append(Ended(job=job, place=place, complete=complete, seconds=1.0, reason=reason))

    def poll(self) -> list[Ended]:
        ended, self._ended = self._ended, []
        return ended

    def preempt(self, job: str) -> None:
        self.preempted.append(job)

    def close(self) -> None: ...


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
    assert queue.find(str(tmp_path / "otra" / "uno")).order == 4


def test_they_are_handed_out_in_their_order_and_a_lost_one_waits_again(queue: RunQueue) -> None:
    hands, heard = Hands("ana", "luis"), Heard()
    work = QueueWork(queue, hands, tell=heard)
    work.step()
    assert heard.said == [("uno", "ana"), ("dos", "luis")]
    hands.end("ana")
    work.step()
    assert heard.said[2:] == [("uno", "ana")], "it goes on before anything new begins"
    hands.end("ana", complete=True)
    hands.end("luis", reason="no space left")
    work.step()
    assert listed(queue) == [("uno", COMPLETE), ("dos", FAILED), ("tres", RUNNING)]
    assert queue.find("dos").reason == "no space left"
    assert not work.is_idle
    hands.end("ana", complete=True)
    work.step()
    assert work.is_idle


def test_only_the_named_machine(queue: RunQueue, tmp_path: Path) -> None:
    """One worker of it, too, where it has one for each device."""
    queue.add(RunDir(tmp_path / "uno"), on=("luis",))
    hands, heard = Hands("ana", "luis/cuda:0"), Heard()
    work = QueueWork(queue, hands, tell=heard)
    work.step()
    assert heard.said == [("dos", "ana"), ("tres", "luis/cuda:0")]
    hands.end("luis/cuda:0", complete=True)
    work.step()
    assert hands.busy["luis/cuda:0"] == queue.find("uno").name


def test_what_a_run_waits_for_is_said_as_long_as_it_does(queue: RunQueue, tmp_path: Path) -> None:
    """Machines that are not there, not those that are busy."""
    queue.add(RunDir(tmp_path / "uno"), device="cuda")
    queue.add(RunDir(tmp_path / "dos"), on=("pedro",))
    hands = Hands("ana")
    work = QueueWork(queue, hands, tell=Heard())

    def reasons() -> list[str]:
        work.step()
        return [queue.find(name).reason for name in ("uno", "dos", "tres")]

    nobody = "no machine has joined that may train it"
    assert reasons() == [nobody, nobody, ""]
    hands.places["pedro"] = "cpu"
    assert reasons() == [nobody, "", ""]
    assert queue.find("dos").state == RUNNING
    assert queue.find("uno").state == WAITING
    unattended = RunQueue(tmp_path / "queue", is_handed_out=False)
    assert unattended.find("uno").reason == ""


def test_stop(queue: RunQueue) -> None:
    """What runs is preempted, once; what waits is not begun; added again, both begin again."""
    hands, heard = Hands("ana"), Heard()
    work = QueueWork(queue, hands, tell=heard)
    work.step()
    for name in ("uno", "dos"):
        queue.stop(queue.find(name))
    with pytest.raises(ConfigError, match="running"):
        queue.remove(queue.find("uno"))
    with pytest.raises(ConfigError, match="running"):
        queue.add(queue.find("uno").run)
    work.step()
    work.step()
    assert hands.preempted == [queue.find("uno").name]
    hands.end("ana")
    work.step()
    assert listed(queue)[:2] == [("uno", STOPPED), ("dos", STOPPED)]
    assert hands.busy["ana"] == queue.find("tres").name
    queue.add(queue.find("uno").run)
    assert queue.find("uno").state == WAITING


def test_what_cannot_begin_holds_nobody_up(queue: RunQueue) -> None:
    hands, heard = Hands("ana", refuses=["uno"]), Heard()
    QueueWork(queue, hands, tell=heard).step()
    assert heard.said == [("uno", FAILED), ("dos", "ana")]
    assert queue.find("uno").reason == "it cannot be read"


def test_a_process_that_hands_out_was_killed(queue: RunQueue) -> None:
    """Its runs wait again, where they stood."""
    QueueWork(queue, Hands("ana"), tell=Heard()).step()
    heard = Heard()
    QueueWork(queue, Hands("luis"), tell=heard).step()
    assert heard.said == [("uno", "luis")]
