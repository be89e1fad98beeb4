"""The Ray transport with real processes: killed, frozen, interrupted; its token, its ports, and what stays behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from cuadrilla.engines.bundle import bundle_hash
from cuadrilla.home import Home
from cuadrilla.link.base import PAUSED
from cuadrilla.link.offer import OfferedFile
from cuadrilla.rundir import RunDir, last_rows, read_jsonl
from tests.commands import (
    COMMAND,
    events,
    goes_on,
    is_what_one_worker_gives,
    joined,
    make_run,
    reached,
    start,
    stop,
    train,
    wait_for,
)
from tests.commands import coordinator as coordinating
from tests.inside import cuadrilla
from tests.machines import Machine, down, invite, language_run, present, up
from tests.ports import free_port

pytestmark = [
    pytest.mark.spawn,
    pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"'),
]

STRICT = ("--set", "sync.strict=true")
RAY = ("--set", 'engine.kind="ray"')
PRACTICE = (*STRICT, *RAY, "--practice", "0.5,0.25")
MISSED_SOON = ("--set", "engine.lost_after_seconds=2")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run")


@pytest.fixture
def crew(run: RunDir, request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str]"]:
    """Two unequal actors that train `run` in strict mode; a parameter is further arguments."""
    process = start(run, *PRACTICE, *getattr(request, "param", ()))
    yield process
    if process.poll() is None:
        process.terminate()
        process.communicate()


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def actors(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    """The workers' processes: Ray names them."""
    found = []
    for child in descendants(process):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "RayWorker" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.ray_smoke
def test_a_killed_actor_is_started_again_and_changes_nothing(crew: "subprocess.Popen[str]", run: RunDir) -> None:
    wait_for(joined(run, 2), crew)
    wait_for(goes_on(run), crew)
    actors(crew)[0].kill()
    wait_for(joined(run, 3), crew)
    wait_for(goes_on(run), crew)
    said = stop(crew)
    assert "its dashboard at http://127.0.0.1:" in said
    assert not [words for words in ("raylet", "core_worker", "SIGTERM handler", ".cc:") if words in said]
    assert (run.logs / "ray.txt").exists()
    assert is_what_one_worker_gives(run, *STRICT)
    left = events(run, "left")[0]
    assert [row["worker"] for row in events(run, "joined")].count(left["worker"]) == 2


def test_a_dashboard_that_does_not_start_costs_nothing_else(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray waits for it for so many seconds."""
    monkeypatch.setenv("RAY_DASHBOARD_STARTUP_TIMEOUT_S", "0")
    crew = start(run, *PRACTICE)
    wait_for(reached(run, 3), crew)
    assert "without a dashboard" in stop(crew)


@pytest.mark.parametrize("crew", [MISSED_SOON], indirect=True, ids=[""])
def test_a_frozen_actor_is_evicted_and_joins_again(crew: "subprocess.Popen[str]", run: RunDir) -> None:
    wait_for(joined(run, 2), crew)
    wait_for(goes_on(run), crew)
    frozen = actors(crew)[0]
    frozen.suspend()
    wait_for(lambda: bool(events(run, "evicted")), crew)
    wait_for(goes_on(run), crew)
    frozen.resume()
    wait_for(joined(run, 3), crew)
    wait_for(goes_on(run), crew)
    stop(crew)
    assert is_what_one_worker_gives(run, *STRICT)


def test_a_killed_coordinator_loses_no_step_and_nothing_of_ray_stays(
    crew: "subprocess.Popen[str]", run: RunDir
) -> None:
    wait_for(reached(run, 20), crew)
    family = descendants(crew)
    assert len(family) > 3
    crew.kill()
    crew.communicate()
    announced = max(row["version"] for row in read_jsonl(run.metrics))
    other = ("--practice", "1.0,1.0", "--stop-at", str(announced + 20))  # through the other transport
    done = train(run, *STRICT, *other)
    assert done.returncode == 0, done.stderr
    assert int(done.stderr.split("resumed    at step ")[1].split()[0]) >= announced
    assert is_what_one_worker_gives(run, *STRICT)
    assert not psutil.wait_procs(family, timeout=150)[1]  # Ray's agents try for a minute to report to their dead head


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(crew: "subprocess.Popen[str]", run: RunDir, number: signal.Signals) -> None:
    wait_for(reached(run, 5), crew)
    family = descendants(crew)
    crew.send_signal(number)
    said = crew.communicate(timeout=150)[1]
    assert crew.returncode == 130, said
    assert "saved" in said
    assert not psutil.wait_procs(family, timeout=30)[1]
    steps = last_rows(run.metrics)[-1]["version"] + 5
    assert train(run, *STRICT, "--stop-at", str(steps)).returncode == 0  # the same run, alone
    assert is_what_one_worker_gives(run, *STRICT)


def test_every_port_of_practice_is_on_the_loopback(crew: "subprocess.Popen[str]", run: RunDir) -> None:
    wait_for(reached(run, 5), crew)
    family = [psutil.Process(crew.pid), *descendants(crew)]
    sockets = [socket for process in family for socket in process.net_connections("tcp") if socket.status == "LISTEN"]
    assert len(sockets) > 3
    assert {socket.laddr.ip for socket in sockets} <= {"127.0.0.1", "::ffff:127.0.0.1"}


class Head:
    """A Ray cluster of the user's own, on the loopback: `ray start --head`, with a token or without."""

    def __init__(self, folder: Path, *, token: str, dashboard: int = 0, offers: int = 1) -> None:
        folder.mkdir()
        self.home = folder / "home"
        self.token = folder / "token"
        self.token.write_text(token)
        self.port = free_port()
        # Short: Ray makes Unix sockets below it, whose paths have an end.
        self._scratch = tempfile.TemporaryDirectory(prefix="cua-", dir="/tmp", ignore_cleanup_errors=True)
        arguments = {
            "--node-ip-address": "127.0.0.1", "--port": str(self.port), "--num-cpus": "2",
            "--temp-dir": self._scratch.name,
            "--resources": json.dumps({"cuadrilla": offers}), "--object-store-memory": "100000000",
            "--include-dashboard": "true" if dashboard else "false",
            "--dashboard-host": "127.0.0.1", "--dashboard-port": str(dashboard or 8265),
            "--dashboard-agent-listen-port": str(free_port()),  # else two clusters of a machine want one
        }  # fmt: skip
        options = [f"{name}={value}" for name, value in arguments.items()]
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("ray"), "start", "--head", "--block", *options],
            env=os.environ | self.environment() | {"CUADRILLA_HOME": str(self.home)},
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(self.token)}
        loopback = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
        return loopback | (mode if self.token.read_text() else {"RAY_AUTH_MODE": "disabled"})

    def listens(self) -> bool:
        return answers(self.port)

    def approve(self, run: RunDir, name: str = "task.py") -> None:
        """As its owner does who has read the run's code."""
        code = run.path / name
        file = OfferedFile(path=code.name, sha256=sha256(code.read_bytes()).digest(), num_bytes=code.stat().st_size)
        Home(self.home).trust(bundle_hash((file,)))

    def actors(self) -> list[psutil.Process]:
        return actors(self.process)

    def stop(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.terminate()
        self.process.wait(timeout=150)
        for process in psutil.wait_procs(family, timeout=150)[1]:
            process.kill()
        self._scratch.cleanup()


def answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    head = Head(tmp_path_factory.mktemp("cluster") / "token", token="0123456789abcdef" * 4)
    wait_for(head.listens)
    yield head
    head.stop()


def in_cluster(run: RunDir, head: Head, *sets: str, address: str = "", **environment: str) -> "subprocess.Popen[str]":
    where = f'engine.ray_address="{address or head.address}"'
    return start(run, *STRICT, *RAY, "--set", where, *sets, env=os.environ | head.environment() | environment)


def listed(*arguments: str, **environment: str) -> dict[str, Any]:
    """What `cuadrilla --json nodes` says, in a process of its own: Ray reads its variables when it is imported."""
    command = [*COMMAND, "--json", "nodes", *arguments]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=150, check=False
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == found.get("exit_code", 0), done.stderr
    assert "Traceback" not in done.stderr
    return found


def test_a_job_of_a_running_cluster_loses_an_actor_and_is_interrupted(head: Head, run: RunDir) -> None:
    """The cluster is the one in RAY_ADDRESS, as in `ray job submit`."""
    head.approve(run)
    crew = in_cluster(run, head, address="auto", RAY_ADDRESS=head.address)
    wait_for(reached(run, 5), crew)
    [actor] = head.actors()
    actor.kill()
    wait_for(joined(run, 2), crew)
    wait_for(goes_on(run), crew)
    cluster = listed(str(run.path))
    assert (cluster["address"], cluster["resources"]["CPU"]) == (head.address, 2)
    assert [(node["node"], node["workers"]) for node in cluster["nodes"]] == [("ray-127-0-0-1", 1)]
    crew.send_signal(signal.SIGINT)
    said = crew.communicate(timeout=150)[1]
    assert crew.returncode == 130, said
    assert "saved" in said
    assert is_what_one_worker_gives(run, *STRICT)
    assert listed(str(run.path))["exit_code"] == 2  # it has ended


def test_the_resources_of_a_running_cluster(head: Head) -> None:
    found = listed("--ray-address", head.address, **head.environment())
    assert found["resources"]["CPU"] == 2
    assert [(node["address"], node["workers"]) for node in found["nodes"]] == [("127.0.0.1", 1)]
    wrong = {"RAY_AUTH_TOKEN_PATH": "", "RAY_AUTH_TOKEN": "f" * 64}
    assert listed("--ray-address", head.address, **head.environment() | wrong)["exit_code"] == 5


def test_a_job_submitted_to_a_cluster_trains(tmp_path: Path) -> None:
    run, dashboard = make_run(tmp_path / "run", steps=20), free_port()
    head = Head(tmp_path / "cluster", token="0123456789abcdef" * 4, dashboard=dashboard)
    submit = [Path(sys.executable).with_name("ray"), "job", "submit", "--no-wait"]
    where = ["--address", f"http://127.0.0.1:{dashboard}"]
    command = [*COMMAND, "train", str(run.path), *STRICT, *RAY, "--set", 'engine.ray_address="auto"']

    def submitted() -> bool:
        """Ray takes no job for some seconds after its dashboard answers."""
        done = subprocess.run(
            [*submit, *where, "--", *command], env=os.environ | head.environment(), capture_output=True, check=False
        )
        return done.returncode == 0

    try:
        wait_for(lambda: answers(dashboard))
        head.approve(run)
        wait_for(submitted)
        wait_for(lambda: run.status.exists() and json.loads(run.status.read_text())["state"] == "complete")
    finally:
        head.stop()
    assert last_rows(run.metrics)[-1]["version"] == 20
    assert is_what_one_worker_gives(run, *STRICT)


def test_a_node_of_a_running_cluster_works_once_its_owner_has_approved_the_code(head: Head, run: RunDir) -> None:
    """The node fetches what it needs through the object store: its home has none of this code."""
    with (run.path / "task.py").open("a") as code_file:
        code_file.write("\n# other code than that of the tests before\n")
    crew = in_cluster(run, head)
    log = run.logs / "log.coordinator.txt"
    wait_for(lambda: log.exists() and "has not been approved" in log.read_text(), crew)
    fetched = [code.read_text() for code in head.home.glob("cache/*/task.py")]
    assert fetched.count((run.path / "task.py").read_text()) == 1
    assert not events(run, "joined")
    crew.send_signal(signal.SIGINT)
    said = crew.communicate(timeout=150)[1]
    assert "has not been approved on this machine" in said
    [approve] = [line for line in said.splitlines() if "cuadrilla trust" in line]
    owner = os.environ | {"CUADRILLA_HOME": str(head.home)}
    assert cuadrilla("trust", approve.split()[-1], env=owner).returncode == 0
    crew = in_cluster(run, head)
    wait_for(reached(run, 5), crew)
    stop(crew)
    assert is_what_one_worker_gives(run, *STRICT)


def test_a_wrong_token_is_refused(head: Head, run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "wrong").write_text("fedcba9876543210" * 4)
    crew = in_cluster(run, head, RAY_AUTH_TOKEN_PATH=str(tmp_path / "wrong"))
    said = crew.communicate(timeout=150)[1]
    assert crew.returncode == 5, said
    assert "refuses this token" in said
    (failed,) = events(run, "failed")
    assert failed["reason"] in said
    assert "Traceback" not in said


def test_no_token_is_an_error_before_anything_is_sent(head: Head, run: RunDir, tmp_path: Path) -> None:
    crew = in_cluster(run, head, RAY_AUTH_TOKEN_PATH=str(tmp_path / "none"))
    said = crew.communicate(timeout=150)[1]
    assert crew.returncode == 3, said
    assert "no token for the Ray cluster" in said


def test_a_cluster_that_asks_for_no_token_is_refused(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    head = Head(tmp_path / "open", token="")
    try:
        wait_for(head.listens)
        mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
        crew = in_cluster(run, head, **mine)
        said = crew.communicate(timeout=150)[1]
        assert crew.returncode == 3, said
        assert "asks nobody for a token" in said
        head.approve(run)
        crew = in_cluster(run, head, "--set", "engine.ray_without_token=true", **mine)  # its owner wants it so
        wait_for(reached(run, 3), crew)
        stop(crew)
    finally:
        head.stop()
    assert is_what_one_worker_gives(run, *STRICT)


def test_no_cluster_is_an_error(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    where = f'engine.ray_address="127.0.0.1:{free_port()}"'
    mine = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    crew = start(run, *RAY, "--set", where, env=os.environ | mine)
    said = crew.communicate(timeout=150)[1]
    assert crew.returncode == 5, said
    assert "no Ray head answers at" in said
    assert "Traceback" not in said


def test_a_node_that_works_through_ray_waits_while_it_is_paused(
    head: Head, tmp_path: Path, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the coordinator's owner and by its own; its process dies meanwhile, and the crew ends while it waits."""
    for name, value in head.environment().items():
        monkeypatch.setenv(name, value)
    run, node = language_run(tmp_path / "run", stories), "ray-127-0-0-1"
    coordinator, ana, there = Machine(tmp_path / "coordinator"), Machine(tmp_path / "ana"), Machine(head.home)
    crew = up(coordinator, run, free_port(), "--set", 'engine.kind="auto"', "--set",
              f'engine.ray_address="{head.address}"')  # fmt: skip
    worker = ana.start("join", "--name", "ana", says=invite(coordinator))
    try:
        wait_for(lambda: present(run) == {node, "ana"}, crew)
        wait_for(lambda: phases(run, node)[-1:] not in ([], ["paused"]), crew)

        assert coordinator.run("pause", node).returncode == 0
        wait_for(lambda: present(run) == {"ana"}, crew)
        wait_for(lambda: phases(run, node)[-1:] == ["paused"], crew)
        wait_for(goes_on(run), crew)
        [actor] = head.actors()
        actor.kill()
        wait_for(lambda: bool(head.actors()) and actor not in head.actors(), crew)
        assert coordinator.run("pause", "ana").returncode == 0  # nobody is left
        wait_for(lambda: present(run) == set(), crew)
        for name in (node, "ana"):
            assert coordinator.run("unpause", name).returncode == 0
        wait_for(lambda: present(run) == {node, "ana"}, crew)
        wait_for(lambda: phases(run, node)[-1:] not in ([], ["paused"]), crew)
        assert left(run, node) == [PAUSED]

        assert there.run("pause").returncode == 0
        wait_for(lambda: present(run) == {"ana"}, crew)
        wait_for(lambda: phases(run, node)[-1:] == ["paused"], crew)
        wait_for(goes_on(run), crew)
        assert there.run("unpause").returncode == 0
        wait_for(lambda: present(run) == {node, "ana"}, crew)
        wait_for(goes_on(run), crew)
        assert left(run, node) == [PAUSED, "paused: cuadrilla unpause"]

        assert coordinator.run("pause", node).returncode == 0
        wait_for(lambda: present(run) == {"ana"}, crew)
        before = [row["worker"] for row in events(run, "joined")]
        coordinating(crew).kill()
        wait_for(lambda: len(events(run, "joined")) > len(before), crew)
        wait_for(goes_on(run), crew)
        assert [row["worker"] for row in events(run, "joined")] == [*before, "ana"]
        down(coordinator, crew)
        assert worker.wait(timeout=150) == 0
        wait_for(lambda: not head.actors())
    finally:
        there.run("unpause")
        for machine in (coordinator, ana):
            machine.stop()
    assert is_what_one_worker_gives(run, *STRICT)


def phases(run: RunDir, worker: str) -> list[str]:
    """What its rows say that it does."""
    path = run.nodes / f"{worker}.jsonl"
    rows = read_jsonl(path) if path.exists() else []
    return [str(row.get("phase", "")) for row in rows if row["kind"] == "usage"]


def left(run: RunDir, worker: str) -> list[str]:
    """Why it has left, each time."""
    return [row["reason"] for row in events(run, "left") if row["worker"] == worker]
