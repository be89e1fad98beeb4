"""What a standby copies of a coordinator, over the real link: growing, damaged, begun anew; and who may not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cuadrilla.engines.standby import Follower, Replica, newest_version
from cuadrilla.errors import CheckpointError, LinkError
from cuadrilla.link.base import Hello, KnownTerm, Refused, Version
from cuadrilla.link.grpc_client import Connection
from cuadrilla.rundir import RunDir
from cuadrilla.train.checkpoint import list_checkpoints, save_checkpoint
from cuadrilla.train.journal import Journal
from tests.hostile import LAYOUT, PARAMETERS, Crew

TENSORS = {"weight": torch.arange(300_000.0)}  # more than one chunk
ELSEWHERE = "127.0.0.2:47470"


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    made = Crew(tmp_path / "coordinator", standbys=frozenset({"eva"}))
    yield made
    made.close()


@pytest.fixture
def eva(crew: Crew) -> Iterator[Connection]:
    connection = Connection(crew.address, identity=crew.node("eva"))
    yield connection
    connection.close()


@pytest.fixture
def replica(tmp_path: Path) -> Replica:
    made = Replica(folder=tmp_path / "standby", listen=ELSEWHERE)
    for folder in (made.keys, made.run.checkpoints, made.run.journal):
        folder.mkdir(parents=True)
    return made


@pytest.fixture
def journal(crew: Crew) -> Iterator[Journal]:
    """Of a run that has just begun."""
    with Journal(run_of(crew).journal) as made:
        save(crew, 0)
        made.begin_segment(0)
        yield made


def run_of(crew: Crew) -> RunDir:
    return RunDir(crew.folder / "run")


def save(crew: Crew, version: int) -> Path:
    return save_checkpoint(run_of(crew).checkpoints, model=TENSORS, optimizer={}, state={"version": version})


def commit(crew: Crew, journal: Journal, version: int, *, factor: float = 1.0) -> None:
    """As the coordinator does: first the journal, then the announcement."""
    journal.append({"version": version}, {name: factor * tensor for name, tensor in TENSORS.items()})
    crew.server.send("ana", Version(version=version, parameters=PARAMETERS))


def same(crew: Crew, replica: Replica, path: str) -> bool:
    return (run_of(crew).path / path).read_bytes() == (replica.run.path / path).read_bytes()


def test_checkpoint_and_journal_are_copied_as_they_grow(
    crew: Crew, eva: Connection, replica: Replica, journal: Journal
) -> None:
    follower = Follower(eva, replica, report=print)
    for version in (1, 2, 3):
        commit(crew, journal, version)
        follower.copy()
        assert newest_version(replica.run) == follower.replica.announced == version
    save(crew, 3)
    journal.begin_segment(3)
    commit(crew, journal, 4)
    follower.copy()
    assert newest_version(replica.run) == follower.replica.announced == 4
    assert [path.name for path in list_checkpoints(replica.run.checkpoints)] == ["v00000000", "v00000003"]
    save(crew, 4)
    journal.begin_segment(4)
    follower.copy()
    assert [path.name for path in list_checkpoints(replica.run.checkpoints)] == ["v00000003", "v00000004"]
    assert [path.name for path in sorted(replica.run.journal.iterdir())] == ["v00000003.log", "v00000004.log"]
    assert Replica(folder=replica.folder).run == replica.run
    assert (replica.keys / "nodes.json").read_bytes() == (crew.folder / "crew" / "nodes.json").read_bytes()


def test_workers_are_told_where_the_crew_would_go_on(
    crew: Crew, eva: Connection, replica: Replica, journal: Journal
) -> None:
    commit(crew, journal, 1)
    assert isinstance(crew.session.next_event(), Version)
    assert crew.session.standbys == ()
    Follower(eva, replica, report=print).copy()
    commit(crew, journal, 2)
    assert isinstance(crew.session.next_event(), Version)
    assert crew.session.standbys == (ELSEWHERE,)


def test_a_journal_that_was_begun_anew_is_not_mixed_with_the_old_one(
    crew: Crew, eva: Connection, replica: Replica, journal: Journal
) -> None:
    follower = Follower(eva, replica, report=print)
    commit(crew, journal, 1)
    follower.copy()
    journal.begin_segment(0)  # what a coordinator does that is started again and finds no whole record
    commit(crew, journal, 1, factor=2.0)
    commit(crew, journal, 2, factor=2.0)
    crew.server._standby._incarnation += 1
    follower.copy()
    assert same(crew, replica, "journal/v00000000.log")
    assert newest_version(replica.run) == 2


def test_a_torn_record_is_completed_later(crew: Crew, eva: Connection, replica: Replica, journal: Journal) -> None:
    commit(crew, journal, 1)
    commit(crew, journal, 2)
    segment = run_of(crew).journal / "v00000000.log"
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-1000])  # as it is while the coordinator writes
    follower = Follower(eva, replica, report=print)
    follower.copy()
    assert newest_version(replica.run) == 1
    segment.write_bytes(whole)
    follower.copy()
    assert newest_version(replica.run) == 2


def test_a_damaged_checkpoint_does_not_replace_a_good_one(
    crew: Crew, eva: Connection, replica: Replica, journal: Journal
) -> None:
    follower = Follower(eva, replica, report=print)
    commit(crew, journal, 1)
    follower.copy()
    file = save(crew, 1) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="is damaged"):
        follower.copy()
    assert [path.name for path in list_checkpoints(replica.run.checkpoints)] == ["v00000000"]
    assert newest_version(replica.run) == 1


def test_others_get_nothing(crew: Crew, journal: Journal, eva: Connection) -> None:
    """A worker of the crew; the standby itself once it was kicked, or for anything but the run."""
    commit(crew, journal, 1)
    assert set(eva.crew_keys()) == {"ca.key", "ca.pem", "server.key", "server.pem"}
    with pytest.raises(Refused, match="ana has not been named as a standby"):
        crew.ana.crew_keys()
    with pytest.raises(Refused, match="ana has not been named as a standby"):
        crew.ana.growth(ELSEWHERE)
    with pytest.raises(Refused, match="ana has not been named as a standby"):
        list(crew.ana.copy("journal/v00000000.log", offset=0, end=10))
    for path in ("../crew/ca.key", "checkpoints/../../crew/ca.key", "run.toml", "/etc/passwd", "journal/v00000009.log"):
        with pytest.raises(LinkError, match="there is no"):
            list(eva.copy(path, offset=0, end=10))
    for address in ("0.0.0.0:1", "127.0.0.2", "127.0.0.2:0", "127.0.0.2:123456", "a b:1", "x" * 5000 + ":1"):
        with pytest.raises(LinkError):
            eva.growth(address)
    assert crew.server._standby.addresses() == []
    crew.nodes.remove("eva")
    with pytest.raises(Refused, match="is not in the crew"):
        eva.crew_keys()


def test_a_coordinator_of_an_earlier_term_is_nobodys(crew: Crew) -> None:
    """Neither at the first call nor in a session that had begun before; a later term is learned."""
    learned: list[int] = []
    term = KnownTerm(0, learned=learned.append)
    connection = Connection(crew.address, identity=crew.node("eva"), term=term)
    try:
        assert connection.describe().config == "{}"
        session = connection.session(parameters=LAYOUT)
        session.call(Hello(speed_hint=1.0))
        crew.heard.next("eva")
        term.meet(2, address="elsewhere")
        crew.server.send("eva", Version(version=1, parameters=PARAMETERS))
        with pytest.raises(LinkError, match="old coordinator"):
            session.next_event()
        session.close()
        with pytest.raises(LinkError, match=r"term 0, not 2"):
            connection.describe()
        assert learned == [2]
    finally:
        connection.close()
    assert crew.works()
