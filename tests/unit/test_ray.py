"""Which workers a Ray cluster gets, from Ray's description of its machines."""

from typing import Any

import pytest

from cuadrilla.config import CrewEngine

pytest.importorskip("ray", reason='Ray is not installed: pip install "cuadrilla[ray]"')

from cuadrilla.crew.ray import slots_of


def node(host: str, *, name: str = "a", alive: bool = True, **resources: float) -> dict[str, Any]:
    return {"NodeID": name * 56, "NodeManagerAddress": host, "Alive": alive, "Resources": resources}


CARD = {"num_gpus": 1, "num_cpus": 0}
OFFER = {"num_cpus": 0, "resources": {"cuadrilla": 1}}


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([node("10.0.0.1", CPU=8)], [("ray-10-0-0-1", {"num_cpus": 8}, 8)]),
        ([node("10.0.0.1", CPU=8, GPU=2)], [("ray-10-0-0-1", CARD, 4), ("ray-10-0-0-1-2", CARD, 4)]),
        ([node("10.0.0.1", CPU=0), node("10.0.0.2", alive=False, CPU=4)], []),
        ([node("10.0.0.1", CPU=8), node("10.0.0.2", CPU=4, cuadrilla=1)], [("ray-10-0-0-2", OFFER, 4)]),
        ([node("10.0.0.1", CPU=8, cuadrilla=2)], [("ray-10-0-0-1", OFFER, 4), ("ray-10-0-0-1-2", OFFER, 4)]),
        (
            [node("10.0.0.1", CPU=2), node("10.0.0.1", name="b", CPU=1)],
            [("ray-10-0-0-1-aaaa", {"num_cpus": 2}, 2), ("ray-10-0-0-1-bbbb", {"num_cpus": 1}, 1)],
        ),
    ],
)
def test_the_workers_of_a_cluster(nodes: list[dict[str, Any]], expected: list[tuple[str, Any, int]]) -> None:
    assert [(slot.name, slot.reserves, slot.threads) for slot in slots_of(nodes)] == expected


def test_a_slot_is_the_same_while_its_machine_is() -> None:
    alone, beside = node("10.0.0.1", CPU=8), node("10.0.0.1", name="b", CPU=8)
    assert slots_of([alone])[0] == slots_of([alone, beside])[0] != slots_of([beside])[0]


@pytest.mark.parametrize(
    "settings",
    [{"kind": "ray", "workers": [1.0, 0.5]}, {"kind": "ray", "link": "100mbit"}, {"kind": "crew", "ranks": True}],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="engine"):
        CrewEngine(**settings)
