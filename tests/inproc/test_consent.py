"""Who gets the token of a Ray cluster, with which programs run on all its machines: nobody but by two consents."""

import platform
import socket
from collections.abc import Iterator
from contextlib import closing
from importlib import metadata
from pathlib import Path

import pytest

from cuadrilla.cli.crew import check_transports
from cuadrilla.config import CrewEngine
from cuadrilla.engines.ray.cluster import cluster_of, why_no_cluster, why_not
from cuadrilla.engines.ray.node import Consent, find_head
from cuadrilla.errors import CuadrillaError, LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link.grpc_client import Connection
from cuadrilla.link.grpc_ray import RayHeadServer, RayOffer, token_hash
from cuadrilla.link.nodes import AllowList
from cuadrilla.rundir import RunDir
from tests.crews import join
from tests.hostile import Crew

NEEDS_RAY = pytest.mark.skipif(bool(why_not()), reason=why_not())
NOBODY, ANA = frozenset[str](), frozenset({"ana"})
NOWHERE = "127.0.0.1:1"
OFFER = RayOffer(address=NOWHERE, token="first", ray="2.60.0", python="3.11.7")
AGAIN = RayOffer(address=NOWHERE, token="second", ray="2.60.0", python="3.11.7")


@pytest.fixture
def server() -> RayHeadServer:
    """The owner has named ana and eva."""
    server = RayHeadServer(names=frozenset({"ana", "eva"}))
    server.offer(OFFER)
    return server


@pytest.fixture
def crew(tmp_path: Path, server: RayHeadServer) -> Iterator[Crew]:
    crew = Crew(tmp_path, ray=server)
    yield crew
    crew.close()


@pytest.fixture
def asks(crew: Crew) -> Iterator["Nodes"]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        nodes = Nodes(crew, port=listening.getsockname()[1])
        yield nodes
    for connection in nodes.connections.values():
        connection.close()


class Nodes:
    """Members of a crew, with all that Ray needs."""

    def __init__(self, crew: Crew, *, port: int) -> None:
        self._crew = crew
        self.port = port
        self.connections: dict[str, Connection] = {}

    def __call__(self, name: str, *, consents: bool = True, member: bytes = b"") -> pb.RayHead:
        node = pb.RayNode(ray=OFFER.ray, python=OFFER.python, port=self.port, consents=consents, member=member)
        return self.connection(name).ray_head(node)

    def connection(self, name: str) -> Connection:
        if name not in self.connections:
            identity = self._crew.node(name)
            self.connections[name] = Connection(self._crew.address, identity=identity)
        return self.connections[name]


def listed(crew: Crew) -> list[bytes]:
    return list(AllowList(crew.folder / "crew" / "nodes.json").nodes().values())


def test_a_node_that_was_not_named_gets_no_token_whatever_it_says(asks: Nodes) -> None:
    head = asks("luis")
    assert (head.address, head.token, head.ask, head.later) == ("", "", False, False)
    assert "has not named luis" in head.refusal
    assert asks("luis", member=token_hash(OFFER.token)).refusal == head.refusal  # nor hears whether its guess is right


def test_a_named_node_without_its_owner_s_consent_gets_no_token(asks: Nodes, crew: Crew, server: RayHeadServer) -> None:
    head = asks("eva", consents=False)
    assert (head.address, head.token, head.ask) == ("", "", True)
    crew.nodes.remove("eva")
    assert server.kicked(listed(crew)) == []


def test_with_both_consents_it_gets_the_token_and_hears_of_the_cluster_s_end(
    asks: Nodes, server: RayHeadServer
) -> None:
    assert asks("eva").token == OFFER.token
    assert asks("eva", member=token_hash(OFFER.token)) == pb.RayHead()
    server.withdraw()
    assert asks("eva").later
    assert asks("eva", member=token_hash(OFFER.token)).refusal
    server.offer(AGAIN)
    assert asks("eva", member=token_hash(OFFER.token)).refusal
    assert asks("eva").token == AGAIN.token


def test_a_kick_of_a_node_with_the_token_is_noticed_and_its_name_counts_no_more(
    asks: Nodes, crew: Crew, server: RayHeadServer
) -> None:
    asks("eva")
    asks("luis")
    assert server.kicked(listed(crew)) == []
    crew.nodes.remove("luis")  # has no token
    assert server.kicked(listed(crew)) == []
    crew.nodes.remove("eva")
    assert server.kicked(listed(crew)) == ["eva"]
    server.offer(AGAIN)
    assert server.kicked(listed(crew)) == []  # nobody has the new one
    other = join(crew.folder / "other", name="eva", crew=crew.keys)  # somebody takes the name, which is free now
    crew.nodes.add("eva", certificate=other.certificate)
    with closing(Connection(crew.address, identity=other)) as somebody:
        node = pb.RayNode(ray=OFFER.ray, python=OFFER.python, port=asks.port, consents=True)
        assert not somebody.ray_head(node).token


@NEEDS_RAY
@pytest.mark.parametrize(("answer", "given"), [(False, []), (True, ["ana"])])
def test_the_owner_is_asked_once_and_the_coordinator_gives_the_token_only_after_a_yes(
    crew: Crew, server: RayHeadServer, answer: bool, given: list[str]
) -> None:
    """The head is nowhere: what happens after the yes is Ray's."""
    server.offer(offer_of_this_program())
    questions: list[str] = []

    def ask() -> bool:
        questions.append("may everybody run programs here?")
        return answer

    consent = Consent(None, ask=ask)
    for _ in range(2):
        with pytest.raises(LinkError, match="no Ray head answers" if answer else "does not want Ray"):
            find_head(crew.ana, coordinator=crew.address, consent=consent)
    assert len(questions) == 1
    assert server.kicked([]) == given


@NEEDS_RAY
@pytest.mark.parametrize("given", [None, False])
def test_without_a_terminal_or_with_no_ray_nothing_is_given(
    crew: Crew, server: RayHeadServer, given: bool | None
) -> None:
    server.offer(offer_of_this_program())
    with pytest.raises(LinkError, match="has not said --ray" if given is None else "does not want Ray"):
        find_head(crew.ana, coordinator=crew.address, consent=Consent(given))
    assert server.kicked([]) == []


def offer_of_this_program() -> RayOffer:
    return RayOffer(address=NOWHERE, token="t", ray=metadata.version("ray"), python=platform.python_version())


@NEEDS_RAY
def test_a_crew_in_which_nobody_was_named_has_no_ray(tmp_path: Path) -> None:
    """Nor a port of it, so no address has to be named either. Practice, on this machine alone, has."""
    engine = CrewEngine(kind="auto")
    check_transports(engine, listen="", ray_nodes=NOBODY)
    with cluster_of(engine, RunDir(tmp_path), practice=False, nodes=NOBODY) as begun:
        assert begun is None
    assert "--ray-node" in why_no_cluster(engine, practice=False, nodes=NOBODY)
    assert not why_no_cluster(engine, practice=False, nodes=ANA)
    assert not why_no_cluster(engine, practice=True, nodes=NOBODY)


@NEEDS_RAY
@pytest.mark.parametrize(
    ("engine", "listen", "nodes", "said"),
    [
        (CrewEngine(kind="auto"), "", ANA, "name it"),
        (CrewEngine(kind="auto"), "127.0.0.1", frozenset({"Ana!"}), "cannot be the name of a node"),
        (CrewEngine(kind="crew"), "127.0.0.1", ANA, "uses no Ray"),
        (CrewEngine(kind="auto", ray_address="127.0.0.1:6379"), "127.0.0.1", ANA, "cannot give away its token"),
    ],
    ids=["no-address", "no-name", "no-use", "of-others"],
)
def test_names_for_ray_that_cannot_be_meant(engine: CrewEngine, listen: str, nodes: frozenset[str], said: str) -> None:
    with pytest.raises(CuadrillaError, match=said) as caught:
        check_transports(engine, listen=listen, ray_nodes=nodes)
    assert caught.value.hint
