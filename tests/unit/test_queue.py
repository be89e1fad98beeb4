"""The queue of runs in a text file, and the loop that hands them out."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.crew.children import Deaths
from cuadrilla.errors import ConfigError
from cuadrilla.jobs.executor import Ended, hand_out
from cuadrilla.jobs.queue import COMPLETE, FAILED, RUNNING, STOPPED, WAITING, QueuedRun, RunQueue
from cuadrilla.rundir import RunDir, write_json
from cuadrilla.runfile import dump, read_run_file
from tests.commands import ENDLESS, RUN, make_run
from tests.watched import add_rows


class Hands:
    """An executor whose machines do what a test wants. Runs in `refuses` cannot be started."""

    def __init__(self, *places: str, refuses: Sequence[str] = ()) -> None:
        self.places = dict.fromkeys(places, "")
        self.refuses = refuses
        self.preempted: list[str] = []
        self._ended: list[Ended] = []

    def start(self, job: str, run: RunDir, *, place: str) -> None:
        if run.path.name in self.refuses:
            raise ConfigError("it cannot be read", hint="write it anew")
        self.places[place] = job

    def end(self, place: str, **how: Any) -> None:
        self._ended.append(Ended(job=self.places[place], place=place, **how))
        self.places[place] = ""

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
            self.hands.places.clear()
            return True
        self._deeds.pop(0)()
        return False


class Queue:
    """A queue, and the file that a test edits."""

    def __init__(self, file: Path, *lines: str) -> None:
        self.file, self.said = file, list[tuple[str, str]]()
        self.write(*lines)
        self.work = RunQueue(file, tell=self._tell)

    def write(self, *lines: str) -> None:
        self.file.write_text("\n".join(lines))

    def edit(self, *lines: str) -> None:
        self.write(*lines)
        self.work.unwanted()  # the next round of the loop reads the same

    def _tell(self, run: QueuedRun) -> None:
        self.said.append((run.line, run.place if run.state == RUNNING else run.state))

    def hand_out(self, hands: Hands, *deeds: Callable[[], object]) -> list[tuple[str, str]]:
        """Run the loop. Returns what it tells: a run with its machine when it begins, with its state when it ends."""
        hand_out(self.work, [hands], stop=Rounds(hands, *deeds))
        return self.said

    def rows(self) -> dict[str, tuple[str, str]]:
        """State and reason of each run."""
        return {row["run"]: (row["state"], row["reason"]) for row in self.work.table()}


@pytest.fixture
def queue(tmp_path: Path) -> Queue:
    for name in ("uno", "dos", "tres"):
        make_run(tmp_path / name)
    return Queue(tmp_path / "queue.txt", "uno", "dos", "# cuatro", "", "  tres # ya está")


def test_they_are_handed_out_in_their_order_and_a_lost_one_waits_again(queue: Queue) -> None:
    """It continues before another run begins. The loop ends when all have ended."""
    hands = Hands("ana", "luis")

    def both_end() -> None:
        hands.end("ana", complete=True)
        hands.end("luis", reason="no space left")

    lost, last = partial(hands.end, "ana", lost=True, reason="the cable"), partial(hands.end, "ana", complete=True)
    goes_on = partial(pytest.fail, "all has been done")
    assert queue.hand_out(hands, lost, both_end, last, goes_on) == [
        ("uno", "ana"),
        ("dos", "luis"),
        ("uno", "ana"),
        ("uno", COMPLETE),
        ("dos", FAILED),
        ("tres", "ana"),
        ("tres", COMPLETE),
    ]
    assert queue.rows() == {"uno": (COMPLETE, ""), "dos": (FAILED, "no space left"), "tres": (COMPLETE, "")}


def test_what_is_lost_again_and_again_without_a_step_forward_has_failed(queue: Queue) -> None:
    hands = Hands("ana")
    lost = partial(hands.end, "ana", lost=True, reason="signal 9")
    queue.hand_out(hands, lost, lost, lost)
    assert queue.rows() == {"uno": (FAILED, "signal 9"), "dos": (RUNNING, ""), "tres": (WAITING, "")}


def test_a_line_is_moved_up_and_another_is_added(queue: Queue, tmp_path: Path) -> None:
    """Two runs may have the same folder name; their folders tell them apart."""
    (tmp_path / "otra").mkdir()
    make_run(tmp_path / "otra" / "uno")
    hands = Hands("ana")
    ends = partial(hands.end, "ana", complete=True)
    edit = partial(queue.edit, "uno", "otra/uno", "tres", "dos")
    assert queue.hand_out(hands, edit, ends, ends) == [
        ("uno", "ana"),
        ("uno", COMPLETE),
        ("otra/uno", "ana"),
        ("otra/uno", COMPLETE),
        ("tres", "ana"),
    ]


def test_a_run_whose_line_is_gone_is_saved_and_given_back(queue: Queue) -> None:
    """A waiting run is not begun. Both begin when their lines are there again."""
    hands = Hands("ana")
    back = partial(queue.edit, "tres", "uno")
    deeds = (partial(queue.edit, "tres"), partial(hands.end, "ana"), back, partial(hands.end, "ana", complete=True))
    assert queue.hand_out(hands, *deeds) == [
        ("uno", "ana"),
        ("uno", STOPPED),
        ("tres", "ana"),
        ("tres", COMPLETE),
        ("uno", "ana"),
    ]
    assert hands.preempted[0].startswith("uno-")
    assert list(queue.rows()) == ["tres", "uno"]


def test_a_file_that_is_being_written_stops_nothing(queue: Queue) -> None:
    """An editor empties it, or moves it away, and then writes it."""
    hands = Hands("ana")

    def seen_empty() -> None:
        queue.edit("")
        queue.write("uno", "dos", "tres")

    queue.hand_out(hands, seen_empty, queue.file.unlink)
    assert queue.said == [("uno", "ana")]


def test_what_cannot_begin_holds_nobody_up(queue: Queue) -> None:
    assert queue.hand_out(Hands("ana", refuses=["uno"])) == [("uno", "ana"), ("uno", FAILED), ("dos", "ana")]
    assert queue.rows()["uno"] == (FAILED, "it cannot be read")


def test_what_is_no_run_or_is_complete_is_not_begun(tmp_path: Path) -> None:
    """A run that is complete goes on if its run file says more steps."""
    for name in ("dos", "tres"):
        run = make_run(tmp_path / name)
        write_json(run.config, {"values": dump(read_run_file(run.path).config)})
        run.checkpoints.mkdir()
        (run.checkpoints / "v00000001").mkdir()
        write_json(run.status, {"state": "complete"})
    run.run_file.write_text(RUN.format(steps=2 * ENDLESS))
    queue = Queue(tmp_path / "queue.txt", "nada", "dos", "tres")
    assert queue.hand_out(Hands("ana")) == [("nada", FAILED), ("dos", COMPLETE), ("tres", "ana")]
    assert queue.rows()["nada"][1].startswith("cannot read")
    with pytest.raises(ConfigError) as refused:
        RunQueue(tmp_path / "no.txt")
    assert refused.value.hint == "write the folders of runs into it, one a line"


# -- how often what was killed is started again ------------------------------------------------------------------------


def test_three_deaths_without_progress_between_them_are_the_last(tmp_path: Path) -> None:
    """A process that goes on from a checkpoint repeats steps. That takes another time, and is no progress."""
    run = RunDir(tmp_path)
    deaths, allowed = Deaths(run), []
    for seconds, step in enumerate([0, 5, 5, 6, 6, 6]):
        add_rows(run.metrics, [{"version": step, "seconds": float(seconds)}])
        allowed.append(deaths.allow())
    assert allowed == [True] * 5 + [False]
