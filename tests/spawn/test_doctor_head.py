"""`cuadrilla doctor --head`: the whole way to a real coordinator, by a member, a stranger and a clock that lies."""

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import COMMAND
from tests.machines import Machine
from tests.spawn.test_check_link import STEPS, Crew
from tests.spawn.test_doctor import moved_clock

pytestmark = pytest.mark.thorough

WITHOUT_TORCH = (
    "import sys; from cuadrilla.cli.app import run; from cuadrilla.doctor import link; link.MEASURE_SECONDS = {}; "
    "code = run(); sys.exit(99 if 'torch' in sys.modules else code)"
)


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    made = Crew(tmp_path_factory.mktemp("crew"))
    yield made
    made.process.terminate()
    made.process.communicate(timeout=150)
    for machine in made.machines:
        machine.stop()


def way(machine: Machine, place: str, *, seconds: float = 0.5) -> dict[str, Any]:
    """By step; in a process, which loads no torch. `seconds`: how long each measurement takes."""
    script = WITHOUT_TORCH.format(seconds)
    process = machine.start_program(
        sys.executable, "-c", script, "doctor", "--json", "--timeout", "0.1", "--head", place
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode in (0, 3), err
    rows = json.loads(out)["findings"]
    return {row["check"].removeprefix("link."): row for row in rows if row["check"].startswith("link.")}


def test_a_member_walks_the_whole_way(crew: Crew) -> None:
    steps = way(crew.ana, f"127.0.0.1:{crew.port}")
    assert list(steps) == STEPS
    assert {row["level"] for row in steps.values()} == {"ok"}, steps


def test_a_stranger_walks_as_far_as_it_can_without_keys(crew: Crew) -> None:
    steps = way(crew.stranger, f"127.0.0.1:{crew.port}")
    assert list(steps) == [*STEPS[:4], "member"]
    assert {row["level"] for row in steps.values()} == {"ok"}
    assert steps["tls"]["cause"] == "tls: TLSv1.3, a coordinator of cuadrilla"


def test_a_stranger_is_told_that_another_program_has_the_port(crew: Crew) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        steps = way(crew.stranger, f"127.0.0.1:{other.getsockname()[1]}")
    assert list(steps) == STEPS[:4]
    assert "said nothing for 5 s" in steps["tls"]["cause"]
    assert (steps["tls"]["level"], steps["tls"]["command"]) == ("failure", "cuadrilla invite")
    assert steps["tls"]["shell"] == "coordinator"


def test_a_clock_that_is_a_day_ahead(crew: Crew, tmp_path: Path) -> None:
    """With the right one it is well: the test above."""
    moved = moved_clock(tmp_path, seconds=26 * 3600)
    prefix = ("env", *(f"{name}={moved[name]}" for name in ("LD_PRELOAD", "CLOCK_OFFSET_FILE")))
    ana = Machine(crew.ana.home, prefix=prefix)
    row = way(ana, f"127.0.0.1:{crew.port}", seconds=0.1)["clock"]
    assert row["level"] == "warning"
    assert "26.0 hours behind" in row["cause"]
    assert row["command"] == "sudo timedatectl set-ntp true"


def test_nobody_there(crew: Crew) -> None:
    steps = way(crew.stranger, "127.0.0.1:9")
    assert steps["tcp"]["level"] == "failure"
    assert (steps["tcp"]["command"], steps["tcp"]["shell"]) == ("cuadrilla doctor --port 9", "coordinator")
    unknown = way(crew.stranger, "no-such-machine.invalid:47470")
    assert list(unknown) == ["name"]
    assert unknown["name"]["command"] == "cuadrilla doctor --head ADDRESS:47470"


def test_the_coordinator_is_seen_on_its_own_machine(crew: Crew) -> None:
    process = crew.coordinator.start_program(*COMMAND, "doctor", "--json", "--timeout", "0.1")
    rows = json.loads(process.communicate(timeout=60)[0])["findings"]
    (row,) = [row for row in rows if row["check"] == "network.port"]
    assert row["cause"] == f"the coordinator of this machine listens on port {crew.port}"
