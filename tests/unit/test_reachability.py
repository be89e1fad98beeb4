"""Whether others can reach a coordinator: in WSL2, Docker and Podman, and on plain machines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from cuadrilla.host import card as module
from cuadrilla.host.card import read_reachability
from cuadrilla.host.programs import NOT_FOUND, ProgramAnswer
from tests.patients import FACTS

INNER, OUTER = "172.30.98.229", "192.168.1.7"
OWN = psutil.net_if_addrs()["lo"][0].address


@pytest.mark.parametrize(
    ("facts", "address", "mode", "placed"),
    [
        ({"wsl": 2}, INNER, "nat", "wsl-nat"),
        ({"wsl": 2}, OUTER, "mirrored", "wsl-mirrored"),
        ({"wsl": 2}, OUTER, "bridged", "plain"),
        ({"wsl": 2}, INNER, None, "wsl-nat"),
        ({"container": "docker"}, "172.17.0.2", None, "container"),
        ({"container": "podman", "wsl": 2}, "172.17.0.2", None, "container"),  # Docker Desktop's, for one
        ({"container": "docker"}, OWN, None, "plain"),  # docker run --network host
        ({"container": "lxc"}, OUTER, None, "plain"),  # mostly on the LAN itself
        ({"wsl": 1}, OUTER, None, "plain"),
        ({}, OUTER, None, "plain"),
    ],
)
def test_where_a_machine_is_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any], address: str, mode: str | None, placed: str
) -> None:
    answer = ProgramAnswer(text=mode) if mode else ProgramAnswer(code=NOT_FOUND)
    monkeypatch.setattr(module, "run", lambda *_, **__: answer)
    (tmp_path / "lo/device").mkdir(parents=True)  # a real card has a device
    assert read_reachability(address, facts=replace(FACTS, **facts), cards=tmp_path) == placed
