"""A standby copies a coordinator's files over the real link, also if they grow, are damaged or begin anew."""

import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cuadrilla.crew.node import Node
from cuadrilla.crew.standby import Copy, newest_version, promote
from cuadrilla.errors import CheckpointError, LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.link.base import Download, Follow, Missing, Refused, Version
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import save_node
from cuadrilla.rundir import RunDir, read_object
from cuadrilla.train.checkpoint import list_checkpoints, save_checkpoint, version_of
from cuadrilla.train.journal import append
from tests.hostile import CEILING_SECONDS, MIB, PARAMETERS, Crew

TENSORS = {"weight": torch.arange(300_000.0)}  # more than one chunk
LARGE = {"weight": torch.zeros(16 * 2**20)}  # more than what can be in transit at one time
ELSEWHERE = "127.0.0.2:47470"


class Noted(Connection):
    """A connection that notes in `sent` the files that it has downloaded."""

    sent: set[str]

    def ask(
        self, message: object, data: Iterable[bytes] = (), *, seconds: float | None = None, secret: bytes = b""
    ) -> Iterator[bytes]:
        if isinstance(message, Download):
            self.sent.add(message.path)
        return super().ask(message, data, seconds=seconds, secret=secret)


class Coordinator(Crew):
    """A coordinator with a run that has just begun. `eva`: the node that its owner named as the standby."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "coordinator", standbys=frozenset({"eva"}))
        self.eva = Noted(self.address, identity=self.node("eva"))
        self.eva.sent = set()
        self.run, self.standby = RunDir(self.folder / "run"), folder / "standby"
        self.after = 0
        self.save(0)

    def save(self, version: int, tensors: dict[str, torch.Tensor] = TENSORS) -> Path:
        state = {"version": version, "journal": self.after}
        return save_checkpoint(self.run.checkpoints, model=tensors, optimizer={}, state=state)

    def commit(self, version: int, *, factor: float = 1.0) -> None:
        """Commit a version as the coordinator does: first the journal, then the announcement."""
        update = {name: factor * tensor for name, tensor in TENSORS.items()}
        self.after = append(self.run.journal, {"version": version, "steps": 1}, update, after=self.after)
        self.server.send("ana", Version(version=version, parameters=PARAMETERS))


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Coordinator]:
    made = Coordinator(tmp_path)
    with closing(made), closing(made.eva):
        yield made


class Following:
    """A standby that has just begun to follow. `sent`: the files that it received."""

    def __init__(self, crew: Coordinator) -> None:
        self.copy, self.folder = Copy(crew.standby, listen=ELSEWHERE, report=print), crew.standby
        self.connection = crew.eva
        self.sent = crew.eva.sent = set[str]()

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self.copy.pull(self.connection)

    def until_announced(self, version: int) -> None:
        self.until(lambda: self.known.get("announced") == version)

    def until_checkpoint(self, version: int) -> None:
        self.until(lambda: (self.copy.run.checkpoints / f"v{version:08d}").exists())

    @property
    def known(self) -> dict[str, Any]:
        return read_object(self.folder / "standby.json")

    @property
    def state(self) -> tuple[list[int], int]:
        """Versions of the copied checkpoints, and the newest version to which they and the journal lead."""
        found = list_checkpoints(self.copy.run.checkpoints)
        return [version_of(path) for path in found], newest_version(self.copy.run)


def test_checkpoint_and_journal_are_copied_as_they_grow(crew: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy has every announced version as soon as the standby hears of it, also while a checkpoint is copied."""
    following = Following(crew)
    following.until_checkpoint(0)
    for version in (1, 2, 3):
        crew.commit(version)
        following.until_announced(version)
        assert following.state[1] == version
    crew.save(3, LARGE)
    asked = 0

    def reply(self: Noted, *words: Any, **options: Any) -> Any:
        """While the checkpoint is copied, the coordinator commits a version, and the standby asks again."""
        nonlocal asked
        if "checkpoints/v00000003/model.safetensors" in following.sent:
            asked += 1
            if asked == 2:
                crew.commit(4)
            if asked == 4:
                assert (following.known["announced"], following.state) == (4, ([0], 4))
        return Connection.reply(self, *words, **options)

    monkeypatch.setattr(Noted, "reply", reply)
    following.until_checkpoint(3)
    assert asked >= LARGE["weight"].nbytes / MIB
    assert following.state == ([0, 3], 4)
    crew.save(4)
    following.until_checkpoint(4)
    assert following.state == ([3, 4], 4)
    assert {path.name for path in following.copy.run.journal.iterdir()} == {"v00000004.step"}
    assert following.known["coordinator.json"].encode() == (crew.folder / "crew" / "coordinator.json").read_bytes()
    assert {stat.S_IMODE(path.stat().st_mode) for path in crew.standby.rglob("*.*") if path.is_file()} == {0o600}


def test_only_what_is_missing_is_sent_and_workers_know_where_the_crew_would_go_on(crew: Coordinator) -> None:
    crew.commit(1)
    assert isinstance(crew.session.next_event(), Version)
    assert not crew.session.standbys
    crew.save(1)
    Following(crew).until_checkpoint(1)
    crew.commit(2)
    assert isinstance(crew.session.next_event(), Version)
    assert crew.session.standbys == (ELSEWHERE,)
    again = Following(crew)
    again.until_announced(2)
    assert (again.sent, again.state[1]) == ({"journal/v00000002.step"}, 2)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_journal_that_was_begun_anew_is_not_mixed_with_the_old_one(crew: Coordinator, restarts: bool) -> None:
    """Neither if the standby goes on, nor if it `restarts`, too."""
    crew.commit(1)
    following = Following(crew)
    following.until_checkpoint(0)
    crew.after = 0  # like a coordinator that restarts and finds no whole record
    crew.commit(1, factor=2.0)
    crew.commit(2, factor=2.0)
    following = Following(crew) if restarts else following
    following.until_announced(2)
    there, here = (sorted(run.journal.iterdir()) for run in (crew.run, following.copy.run))
    assert [file.read_bytes() for file in here] == [file.read_bytes() for file in there]
    assert following.state == ([0], 2)


def test_another_run_takes_the_place_of_the_one_before(crew: Coordinator) -> None:
    crew.save(100)
    Following(crew).until_checkpoint(100)
    shutil.rmtree(crew.run.checkpoints)
    crew.save(7)
    crew.commit(8)
    following = Following(crew)
    following.until_checkpoint(7)
    assert (following.state, len(list(following.copy.run.journal.iterdir()))) == (([7], 8), 1)


def test_what_is_promoted_has_the_keys(crew: Coordinator, tmp_path: Path) -> None:
    home = Home(tmp_path / "eva")
    joined = Joined(folder=home.joined_folder(b"key"), address=crew.address, name="eva")
    crew.standby = home.standby_folder(joined)
    crew.commit(1)
    following = Following(crew)
    following.until_checkpoint(0)
    following.until_announced(1)
    assert promote(home, joined) == 1
    assert home.term == 1
    for name in ("coordinator.json", "nodes.json"):
        assert (home.crew / name).read_bytes() == (crew.folder / "crew" / name).read_bytes()


def test_a_damaged_checkpoint_does_not_replace_a_good_one(crew: Coordinator) -> None:
    crew.commit(1)
    Following(crew).until_checkpoint(0)
    file = crew.save(1) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    following = Following(crew)
    with pytest.raises(CheckpointError, match="missing or damaged"):
        following.until_checkpoint(1)
    assert following.state == ([0], 1)


def test_a_run_that_ends_does_not_wait_for_a_standby(crew: Coordinator) -> None:
    following = Following(crew)
    following.until_checkpoint(0)
    with ThreadPoolExecutor() as pool:
        ends = pool.submit(crew.server.close)
        with pytest.raises(LinkError, match="cannot be reached"):
            following.until(lambda: False)
        ends.result(CEILING_SECONDS)


def test_others_get_nothing(crew: Coordinator) -> None:
    """Not a worker of the crew, and not the standby once it was kicked. Nothing but the copy is written."""
    crew.commit(1)
    for asked in (Follow(address=ELSEWHERE), Download(path="journal/v00000001.step")):
        with pytest.raises(Refused, match="ana has not been named as a standby"):
            list(crew.ana.ask(asked))
    for address in ("0.0.0.0:1", "127.0.0.2", "127.0.0.2:123456", "a b:1", "x" * 5000 + ":1"):
        with pytest.raises(LinkError):
            crew.eva.reply(Follow(address=address), Missing)
    assert crew.server._standby.addresses == {}
    following = Following(crew)
    for path in ("../crew/coordinator.json", "run.toml", "/etc/passwd", "journal/v00000001.step/../x", "journal/"):
        with pytest.raises(LinkError, match="does not offer this file"):
            list(crew.eva.ask(Download(path=path)))
    assert list(crew.eva.ask(Download(path="journal/v00000002.step"))) == []
    following.until_checkpoint(0)
    crew.nodes.remove("eva")
    crew.server.end_kicked()
    with pytest.raises(LinkError):
        following.until(lambda: False)
    for asked in (Follow(address=ELSEWHERE), Download(path="journal/v00000001.step")):
        with pytest.raises(Refused, match="is not in the crew"):
            list(crew.eva.ask(asked))


def test_a_coordinator_of_an_earlier_term_is_nobodys(crew: Coordinator, tmp_path: Path) -> None:
    """The address and a later term are learned and stored. Whoever knows them does not work for an earlier one."""
    home = Home(tmp_path / "luis")
    folder = home.joined_folder(b"key")
    save_node(folder, crew.node("luis"))
    node = Node(home=home, crew=Joined(folder=folder, address=ELSEWHERE, name="luis"))
    now, earlier = (replace(crew.server._description, term=term) for term in (2, 1))
    with closing(node.connect(crew.address)) as connection:
        crew.server._description = now
        assert node.describe(connection) == now
        crew.server._description = earlier
        with pytest.raises(LinkError, match=r"old coordinator.*term 1, not 2"):
            node.describe(connection)
    assert home.joined() == [Joined(folder=folder, address=crew.address, name="luis", term=2)]
    assert crew.works()
