"""The list of runs that wait for a machine, and who hands them out."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cuadrilla.errors import ConfigError
from cuadrilla.jobs.deal import Candidate, Wants
from cuadrilla.jobs.places import Left
from cuadrilla.jobs.queue import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, QueuedRun, QueueWork, RunQueue
from cuadrilla.link.names import node_of
from cuadrilla.rundir import RunDir


class Hands:
    """Machines that do what a test says. Those in `refuses` cannot take a run."""

    def __init__(self, *places: str, refuses: Sequence[str] = ()) -> None:
        self.places = list(places)
        self.has: dict[str, QueuedRun] = {}
        self.refuses = refuses
        self.recalled: list[str] = []
        self._left: list[Left[QueuedRun]] = []

    @property
    def machines(self) -> list[Candidate]:
        names = dict.fromkeys(map(node_of, self.places))
        of = {name: [place for place in self.places if node_of(place) == name] for name in names}
        return [
            Candidate(name=name, devices=dict.fromkeys(places, "cpu"), free=set(places) - self.has.keys())
            for name, places in of.items()
        ]

    @property
    def busy(self) -> bool:
        return bool(self.has)

    def start(self, job: QueuedRun, run: RunDir, *, places: Sequence[str]) -> None:
        if run.path.name in self.refuses:
            raise ConfigError("it cannot be read", hint="write it anew")
        for name in places:
            self.has[name] = job

    def end(self, name: str, *, complete: bool = False, reason: str = "") -> None:
        left = Left(job=self.has.pop(name), place=name, complete=complete, seconds=1.0, reason=reason)
        self._left.append(left)

    def look(self) -> list[Left[QueuedRun]]:
        left, self._left = self._left, []
        return left

    def recall(self, job: QueuedRun) -> None:
        self.recalled.append(job.run.path.name)

    def stop(self) -> None: ...


class Heard:
    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def began(self, run: QueuedRun, place: str) -> None:
        self.said.append((run.run.path.name, place))

    def ended(self, run: QueuedRun, state: str, reason: str) -> None:
        self.said.append((run.run.path.name, state))


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


def test_files_of_somebody_else_are_no_runs(queue: RunQueue, tmp_path: Path) -> None:
    for name, text in (("a.json", "{"), ("b.json", "[]"), ("c.json", '{"run": 3, "order": 1}')):
        (tmp_path / "queue" / name).write_text(text)
    assert names(queue) == ["uno", "dos", "tres"]


def test_they_are_handed_out_in_their_order_and_a_lost_one_waits_again(queue: RunQueue) -> None:
    hands, heard = Hands("ana", "luis"), Heard()
    work = QueueWork(queue, hands, hears=heard)
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
    queue.add(RunDir(tmp_path / "uno"), wants=Wants(on=("luis",)))
    hands, heard = Hands("ana", "luis/cuda:0"), Heard()
    work = QueueWork(queue, hands, hears=heard)
    work.step()
    assert heard.said == [("dos", "ana"), ("tres", "luis/cuda:0")]
    hands.end("luis/cuda:0", complete=True)
    work.step()
    assert hands.has["luis/cuda:0"].run.path.name == "uno"


def test_what_a_run_waits_for_is_said_as_long_as_it_does(queue: RunQueue, tmp_path: Path) -> None:
    """Machines that are not there, not those that are busy."""
    queue.add(RunDir(tmp_path / "uno"), wants=Wants(machines=3))
    queue.add(RunDir(tmp_path / "dos"), wants=Wants(on=("pedro",)))
    hands = Hands("ana")
    work = QueueWork(queue, hands, hears=Heard())

    def reasons() -> list[str]:
        work.step()
        return [queue.find(name).reason for name in ("uno", "dos", "tres")]

    assert reasons() == ["machines that have still to join: 2", "machines that have still to join: 1", ""]
    hands.places += ["luis", "pedro"]
    assert reasons() == ["", "", ""]
    assert queue.find("uno").state == WAITING, "ana trains another one"
    hands.end("ana", complete=True)
    hands.places.remove("luis")
    assert reasons()[0] == "machines that have still to join: 1"
    unattended = RunQueue(tmp_path / "queue", is_handed_out=False)
    assert unattended.find("uno").reason == ""


def test_stop(queue: RunQueue) -> None:
    """What runs is recalled, once; what waits is not begun; added again, both begin again."""
    hands, heard = Hands("ana"), Heard()
    work = QueueWork(queue, hands, hears=heard)
    work.step()
    for name in ("uno", "dos"):
        queue.stop(queue.find(name))
    with pytest.raises(ConfigError, match="running"):
        queue.remove(queue.find("uno"))
    with pytest.raises(ConfigError, match="running"):
        queue.add(queue.find("uno").run)
    work.step()
    work.step()
    assert hands.recalled == ["uno"]
    hands.end("ana")
    work.step()
    assert listed(queue)[:2] == [("uno", STOPPED), ("dos", STOPPED)]
    assert hands.has["ana"].run.path.name == "tres"
    queue.add(queue.find("uno").run)
    assert queue.find("uno").state == WAITING


def test_what_cannot_begin_holds_nobody_up(queue: RunQueue) -> None:
    hands, heard = Hands("ana", refuses=["uno"]), Heard()
    QueueWork(queue, hands, hears=heard).step()
    assert heard.said == [("uno", FAILED), ("dos", "ana")]
    assert queue.find("uno").reason == "it cannot be read"


def test_a_process_that_hands_out_was_killed(queue: RunQueue) -> None:
    """Its runs wait again, where they stood."""
    QueueWork(queue, Hands("ana"), hears=Heard()).step()
    heard = Heard()
    QueueWork(queue, Hands("luis"), hears=heard).step()
    assert heard.said == [("uno", "luis")]
