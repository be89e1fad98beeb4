"""`cuadrilla doctor HOST:PORT` over a line of 1 Mbit/s: it says how large steps should therefore be."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from bench.lan import CARD, Member, lan, limit_rate
from cuadrilla.rundir import RunDir
from tests.commands import wait_for
from tests.machines import Machine, down, invite, present, up
from tests.networks import need_namespaces, switch_port

pytestmark = pytest.mark.thorough

PORT = 47470
FAST, SLOW = "400mbit", "1mbit"


@pytest.fixture
def network() -> Iterator[list[Member]]:
    need_namespaces()
    with lan(2, rate=FAST) as members:
        yield members


def set_rate(members: list[Member], rate: str) -> None:
    for place, device in ((members[1].namespace, CARD), switch_port(2)):
        limit_rate(place, device, rate)


def walked(machine: Machine, head: Machine) -> dict[str, Any]:
    done = machine.run("doctor", "--json", "--timeout", "0.1", f"{head.address}:{PORT}")
    assert done.stdout, done.stderr
    return {row["check"]: row for row in json.loads(done.stdout)["findings"] if row["check"].startswith("link.")}


def test_what_a_slow_line_means_for_steps(network: list[Member], machines: list[Machine], run: RunDir) -> None:
    head, ana = machines
    crew = up(head, run, PORT)
    joined = ana.start("join", "--name", "ana", says=invite(head))
    wait_for(lambda: present(run) == {"ana"}, crew)
    joined.terminate()
    joined.communicate(timeout=150)
    set_rate(network, SLOW)
    rows = walked(ana, head)
    assert [rows[f"link.{step}"]["level"] for step in ("tcp", "speed")] == ["ok", "warning"]
    assert "Exchange less often" in rows["link.speed"]["remedy"]
    assert (
        rows["link.speed"]["fields"]["seconds"] >= 400
    )  # 640 at exactly that rate; the first 128 KiB of a measurement may go at once
    down(head, crew)
