"""A standby follows the coordinator. When that machine is lost the standby is promoted, and the crew goes on there."""

import stat
import subprocess
from pathlib import Path

import psutil
import pytest

from cuadrilla.crew.enrol import host_name
from cuadrilla.home import Home
from cuadrilla.rundir import RunDir, last_rows, read_object
from tests.commands import events, is_what_one_worker_gives, reached, wait_for
from tests.machines import Machine, Machines, down, invite, present, up


def replica(machine: Machine) -> Path:
    (folder,) = (machine.home / "standby").iterdir()
    return folder


def announced(machine: Machine) -> int:
    """The newest version that the standby has heard of."""
    return int(read_object(replica(machine) / "standby.json").get("announced", 0))


def end(process: "subprocess.Popen[str]") -> None:
    process.terminate()
    process.communicate(timeout=150)


@pytest.mark.thorough
def test_a_promoted_standby_goes_on_and_the_workers_find_it(machine: Machines, run: RunDir, port: int) -> None:
    coordinator, eva = machine("coordinator"), machine("eva")
    crew = up(coordinator, run, port, "--standby", host_name())
    text = invite(coordinator, "--uses", "3")
    follower = eva.start("standby", "--listen", f"127.0.0.2:{port}", says=text)
    wait_for(lambda: bool(list(eva.home.glob("standby/*/run/checkpoints/v*"))), follower)
    workers = [machine(name).start("join", "--name", name, says=text) for name in ("ana", "luis")]
    wait_for(lambda: present(run) == {"ana", "luis"}, crew)
    wait_for(lambda: announced(eva) >= 5, follower)
    connections = psutil.Process(follower.pid).net_connections(kind="inet")
    assert psutil.CONN_LISTEN not in {connection.status for connection in connections}
    assert "stop `cuadrilla standby` there first" in eva.run("promote", code=2).stderr
    end(follower)
    assert "if both continued, they would train two models" in eva.run("promote", code=5).stderr
    assert not Home(eva.home).crew.exists()

    before = announced(eva)
    follower = eva.start("standby", "--listen", f"127.0.0.2:{port}")
    wait_for(lambda: announced(eva) > before, follower)
    for process in [*psutil.Process(crew.pid).children(recursive=True), psutil.Process(crew.pid)]:
        process.kill()
    crew.communicate()
    end(follower)
    known = announced(eva)

    promoted, copy = eva.start("promote", "--wait", "3"), RunDir(replica(eva) / "run")
    wait_for(lambda: present(copy) == {"ana", "luis"}, promoted, seconds=200)
    at = last_rows(copy.metrics)[-1]["version"] if copy.metrics.exists() else known
    wait_for(reached(copy, at + 5), promoted)
    said = down(eva, promoted)
    assert f"the last step known from the old coordinator is {known}" in said
    assert int(said.split("promoted   continues from step ")[1].split(";")[0]) >= known
    assert "as far as is known, nothing is lost" in said
    assert [worker.wait(timeout=150) for worker in workers] == [0, 0]
    assert is_what_one_worker_gives(copy, begun_in=run)
    keys = [replica(eva) / "standby.json", Home(eva.home).crew / "coordinator.json"]
    assert [stat.S_IMODE(file.stat().st_mode) for file in keys] == [0o600] * 2
    private = (replica(eva), copy.path, copy.checkpoints, copy.journal, Home(eva.home).cache)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in private} == {0o700}
    ana = machine("ana")
    assert [(crew.address, crew.term) for crew in Home(ana.home).joined()] == [(f"127.0.0.2:{port}", 1)]

    before = len(events(run, "joined"))
    crew = up(coordinator, run, port)  # workers that know the newer term refuse it
    worker = ana.start("join", f"127.0.0.1:{port}")
    assert worker.stderr is not None
    assert any("this crew's old coordinator" in line for line in worker.stderr)
    assert len(events(run, "joined")) == before
    end(worker)
    down(coordinator, crew)
