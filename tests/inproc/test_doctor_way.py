"""The way to a coordinator, as `cuadrilla doctor HOST:PORT` checks it: whole, and each broken step with its remedy."""

import http.server
import json
import socket
import threading
from pathlib import Path

import pytest

from cuadrilla.doctor import here, way
from cuadrilla.doctor.finding import Finding
from cuadrilla.doctor.way import walk
from cuadrilla.home import Home, Joined
from cuadrilla.link.address import Address
from cuadrilla.link.identity import save_node
from tests.hostile import Crew
from tests.inside import cuadrilla
from tests.ports import free_port

STEPS = ["tcp", "tls", "member", "speed"]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "MEASURE_SECONDS", 0.05)


def address_of(crew: Crew) -> Address:
    return Address("127.0.0.1", crew.port)


def joined(crew: Crew, name: str, *, folder: Path | None = None) -> Joined:
    """A machine that has a token of this crew."""
    path = folder or crew.folder / name
    save_node(path, crew.node(name))
    return Joined(folder=path, address=crew.address, name=name)


def walked(address: Address, crew: Joined | None) -> dict[str, Finding]:
    return dict(walk(address, crew=crew))


def broken(found: dict[str, Finding], step: str) -> Finding:
    """The finding of the last step, which must be this one."""
    assert list(found) == STEPS[: STEPS.index(step) + 1]
    assert [each.level == "failure" for each in found.values()] == [False] * (len(found) - 1) + [True]
    return found[step]


def test_a_member_walks_the_whole_way(crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(here, "DEVICES_SECONDS", 0.1)
    home = Home(tmp_path / "home")
    home.remember(joined(crew, "eva", folder=home.path / "joined" / "it"))
    done = cuadrilla("doctor", "--json", crew.address, env={"CUADRILLA_HOME": str(home.path), "PATH": "/bin"})
    rows = {row["check"]: row for row in json.loads(done.stdout)["findings"] if row["check"].startswith("link.")}
    assert list(rows) == [f"link.{name}" for name in STEPS]
    assert {row["level"] for name, row in rows.items() if name != "link.speed"} == {"ok"}, rows
    assert all(rows["link.speed"]["fields"][name] > 0 for name in ("down", "up", "milliseconds"))


def test_a_stranger_walks_as_far_as_it_can_without_keys(crew: Crew) -> None:
    found = walked(address_of(crew), None)
    assert list(found) == STEPS[:2]
    assert {each.level for each in found.values()} == {"ok"}
    assert found["tls"].cause == "a coordinator of cuadrilla; the rest is tested once this machine has joined"


def test_another_crews_coordinator_and_a_node_that_was_kicked(crew: Crew, tmp_path: Path) -> None:
    other = Crew(tmp_path / "other")
    try:
        found = broken(walked(address_of(other), joined(crew, "eva")), "tls")
    finally:
        other.close()
    assert "is not the coordinator of the crew that this machine has joined" in found.cause
    assert found.command.endswith(" --forget")
    luis = joined(crew, "luis")
    crew.nodes.remove("luis")
    kicked = broken(walked(address_of(crew), luis), "member")
    assert "is not in the crew; it may have been removed" in kicked.cause
    assert (kicked.command, kicked.shell) == ("cuadrilla invite", "coordinator")


def test_nobody_there() -> None:
    port = free_port()
    found = broken(walked(Address("127.0.0.1", port), None), "tcp")
    assert "nothing listens at 127.0.0.1" in found.cause
    assert (found.command, found.shell) == (f"cuadrilla doctor --port {port}", "coordinator")
    unknown = broken(walked(Address("nadie.invalid", 47470), None), "tcp")
    assert unknown.cause.startswith("no machine named nadie.invalid is known here (")


def test_another_program_at_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        found = broken(walked(Address("127.0.0.1", mute.getsockname()[1]), None), "tls")
    assert "no coordinator answers" in found.cause
    assert (found.command, found.shell) == ("cuadrilla invite", "coordinator")
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        thread = threading.Thread(target=lambda: [server.handle_request() for _step in ("tcp", "tls")])
        thread.start()
        assert "no coordinator answers" in broken(walked(Address("127.0.0.1", server.server_port), None), "tls").cause
        thread.join()


@pytest.mark.parametrize(("rate", "level"), [(117e6, "ok"), (0.125e6, "warning")])
def test_a_slow_line_is_warned_of(crew: Crew, rate: float, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(way, "_rate", lambda _measure: rate)
    found = walked(address_of(crew), joined(crew, "eva"))["speed"]
    assert (found.level, f"{rate / 1e6:.1f} MB/s back" in found.cause) == (level, True)
