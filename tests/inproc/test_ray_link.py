"""What a worker's link through Ray keeps, beside the shared batteries, which go through it as through the others."""

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

from cuadrilla.link import wire
from cuadrilla.link.base import PAUSED, Goodbye, Hello, Version
from cuadrilla.link.offer import Offer, RunDescription
from cuadrilla.link.wire import Layout
from tests.commands import wait_for
from tests.hostile import CEILING_SECONDS, Heard
from tests.transports import Run

if TYPE_CHECKING:
    from cuadrilla.engines.ray.server import RayServer


@pytest.mark.parametrize("transport", ["ray"], indirect=True)
def test_a_version_that_is_announced_before_the_one_before_is_fetched(transport: Run) -> None:
    """A worker without a lease hears of versions faster than it reads them."""
    import ray

    from cuadrilla.engines.ray.worker import RayLink, RayPlace, RayWorker, arrays_of

    actor, layout = (
        RayWorker(RayPlace(name="ana"), RunDescription(config="", files=())),
        Layout.of({"w": torch.zeros(2)}),
    )
    for version in (1, 2, 3):
        message = wire.to_worker(Version(version=version, parameters=None), parameters=wire.version_name(version))
        refs = (ray.put(arrays_of({"w": torch.full((2,), float(version))})),)
        actor.deliver(message.SerializeToString(), refs)
    link = RayLink(actor._mail, parameters=layout)
    assert [link.download(f"version-{version}")["w"].tolist() for version in (2, 3)] == [[2.0, 2.0], [3.0, 3.0]]
    assert list(actor._mail.versions) == ["version-3"]  # memory of the object store is given back


@pytest.mark.parametrize("transport", ["ray"], indirect=True)
def test_a_worker_whose_node_has_gone_is_an_error_and_no_traceback(transport: Run) -> None:
    """Its machine was switched off between the offer and the start. A thread that raises fails a test."""
    from cuadrilla.engines.ray.server import RayServer
    from cuadrilla.engines.ray.worker import RayPlace

    layout = Layout.of({"w": torch.zeros(2)})
    offer = Offer(config="", files={})
    server = RayServer(receiver=Heard(), offer=offer, parameters=layout, contribution=layout)
    server.place(RayPlace(name="ana", node="a" * 56))
    wait_for(lambda: not server.may_have_workers())
    assert "\n" not in server.failure().message
    assert "not schedulable" in server.failure().message
    assert not server.holds("ana")  # it may come back over the crew link
    server.close()


@pytest.mark.parametrize(
    ("labels", "resources", "expected"),
    [
        ({"cuadrilla-node": "ana"}, {"cuadrilla": 1.0}, [("ana", "", 0)]),
        ({"cuadrilla-node": "ana"}, {"cuadrilla": 1.0, "GPU": 2.0}, [("ana", "", 1)]),
        ({}, {}, []),
        (
            {"cuadrilla-node": "ana", "cuadrilla-devices": "cuda-0_cuda-3_cpu"},
            {"cuadrilla": 3.0, "GPU": 2.0, "CPU": 8.0},
            [("ana/cuda:0", "cuda", 1), ("ana/cuda:3", "cuda", 1), ("ana/cpu", "cpu", 0)],
        ),
        (
            {"cuadrilla-node": "ana", "cuadrilla-devices": "cpu_cpu"},
            {"cuadrilla": 2.0, "CPU": 8.0},
            [("ana/cpu", "cpu", 0), ("ana/cpu.2", "cpu", 0)],
        ),
        ({}, {"cuadrilla": 3.0, "GPU": 2.0}, [(f"ray-10-0-0-2/{name}", name[:4].rstrip(":"), int(name != "cpu"))
                                             for name in ("cuda:0", "cuda:1", "cpu")]),
        ({"cuadrilla-devices": "../x_cpu"}, {"cuadrilla": 2.0}, []),
        ({"cuadrilla-devices": "_".join(["cpu"] * 99)}, {"cuadrilla": 1000.0}, [
            (f"ray-10-0-0-2/cpu{suffix}", "cpu", 0) for suffix in ("", *(f".{number}" for number in range(2, 9)))
        ]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("transport", ["ray"], indirect=True)
@pytest.mark.usefixtures("transport")
def test_the_workers_that_a_node_of_ray_offers(
    labels: dict[str, str], resources: dict[str, float], expected: list[tuple[str, str, int]]
) -> None:
    from cuadrilla.engines.ray.server import places_of

    node = {"Labels": labels, "Resources": resources, "NodeManagerAddress": "10.0.0.2", "NodeID": "n"}
    assert [(place.name, place.device, place.num_gpus) for place in places_of(node)] == expected


@pytest.fixture
def server(transport: Run) -> Iterator[tuple["RayServer", Heard]]:
    from cuadrilla.engines.ray.server import RayServer

    heard, layout = Heard(), Layout.of({"w": torch.zeros(2)})
    made = RayServer(receiver=heard, offer=Offer(config="", files={}), parameters=layout, contribution=layout)
    yield made, heard
    made.close()


def attended(server: "RayServer", name: str) -> Any:
    import ray

    from cuadrilla.engines.ray.worker import GROUPS, RayPlace
    from tests.ray_transport import StubbornWorker

    actor = ray.remote(concurrency_groups=GROUPS)(StubbornWorker).options(num_cpus=0).remote()
    server.attend(RayPlace(name=name), actor)
    return actor


@pytest.mark.parametrize("transport", ["ray"], indirect=True)
def test_who_says_hello_while_its_node_is_paused_is_sent_away_again(server: tuple["RayServer", Heard]) -> None:
    """As one whose process was started again, or whose Hello was on its way."""
    crew, heard = server
    attended(crew, "ana/cpu")
    assert isinstance(heard.next("ana/cpu"), Hello)
    assert crew.holds("ana/cpu")
    crew.pause(frozenset({"ana", "luis"}))
    assert heard.goodbyes.get(timeout=CEILING_SECONDS) == ("ana/cpu", PAUSED)
    assert [report.phase for report in heard.reports["ana/cpu"]] == ["paused"]
    assert not crew.holds("ana/cpu")
    for _ in range(20):  # its Hellos come all the time: nobody hears them
        said = heard.next("ana/cpu")
        assert isinstance(said, Goodbye)
    crew.pause(frozenset({"luis"}))
    wait_for(lambda: crew.holds("ana/cpu"))
    said = heard.next("ana/cpu")
    while isinstance(said, Goodbye):
        said = heard.next("ana/cpu")
    assert isinstance(said, Hello)
    assert heard.goodbyes.empty()


@pytest.mark.parametrize("transport", ["ray"], indirect=True)
def test_a_node_that_comes_back_before_it_was_missed(server: tuple["RayServer", Heard]) -> None:
    """Ray finds out half a minute later that a machine without power is dead: by then it may work again."""
    import ray

    crew, heard = server
    older = attended(crew, "ana")
    assert isinstance(heard.next("ana"), Hello)
    attended(crew, "ana")
    assert heard.goodbyes.get(timeout=CEILING_SECONDS)[0] == "ana"
    assert isinstance(heard.next("ana"), Hello)
    wait_for(lambda: [thread.name for thread in threading.enumerate()].count("attends-ana") == 1)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(older.pid.remote())
    assert heard.goodbyes.empty()
    assert crew.holds("ana")


@pytest.mark.parametrize("transport", ["ray"], indirect=True)
def test_two_nodes_of_one_name_do_not_take_turns(
    server: tuple["RayServer", Heard], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody has typed `join` twice on one machine. When the first has gone, the second works."""
    import ray

    crew, _ = server
    first = {"NodeID": ray.get_runtime_context().get_node_id(), "Alive": True, "NodeManagerAddress": "10.0.0.2",
             "Labels": {"cuadrilla-node": "ana"}, "Resources": {"cuadrilla": 1.0}}  # fmt: skip
    second = {**first, "NodeID": "b" * 56}
    for nodes in ([first], [first, second], [second, first]):
        monkeypatch.setattr(ray, "nodes", lambda nodes=nodes: nodes)
        crew.place_on_new_nodes(own="")
        assert crew._workers["ana"].place.node == first["NodeID"]
    monkeypatch.setattr(ray, "nodes", lambda: [second])
    crew.place_on_new_nodes(own="")
    assert crew._workers["ana"].place.node == second["NodeID"]
