"""Machines, each with its own home, join a coordinator: invites, fetched files, refusals, kicks and returns."""

import json
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.link.base import COME_AGAIN, KICKED, LEAVES, NOT_LISTED, node_of
from cuadrilla.link.invite import Invite
from cuadrilla.rundir import RunDir, last_rows, read_jsonl
from tests.commands import ended, goes_on, is_what_one_worker_gives, make_run, reached, task_hash, train, wait_for
from tests.machines import UNHURRIED, Machine, Machines, down, invite, language_run, present, up

PAUSED = "waiting: paused by this machine's owner; to resume: cuadrilla pause --off"


def working(machine: Machine) -> list[str]:
    """The machines of the crew that are present and have a speed, by `monitor` on this machine."""
    told = json.loads(machine.run("--json", "monitor", "--once").stdout)
    there = [each for each in told["crew"]["machines"] if each["here"] and node_of(each["name"]) in told["nodes"]]
    return [each["name"] for each in there if each["tokens_per_second"]]


def test_machines_join_fetch_the_data_wait_while_they_are_paused_and_one_is_kicked(
    machine: Machines, run: RunDir, port: int
) -> None:
    """The owners pause both machines, which the coordinator's files show."""
    coordinator, ana, luis = machine("coordinator"), machine("ana"), machine("luis")
    crew = up(coordinator, run, port, workers=UNHURRIED)
    text = invite(coordinator, "--uses", "2")
    first = ana.start("join", "--name", "ana", "--low-priority", says=text)
    second = luis.start("join", "--name", "luis", says=text)
    wait_for(lambda: {"ana", "luis"} < present(run), crew)
    assert ana.run("pause").returncode == 0
    assert luis.run("pause").returncode == 0
    wait_for(lambda: present(run) == {"here-1"}, crew)
    wait_for(goes_on(run), crew)
    assert present(run) == {"here-1"}
    told = [run.nodes / f"{name}.jsonl" for name in ("ana", "luis", "coordinator", "here-1")]
    for path in told[:2]:
        assert [row["phase"] for row in read_jsonl(path) if "phase" in row][-1] == "paused"
    assert ana.run("pause", "--off").returncode == 0
    assert luis.run("pause", "--off").returncode == 0
    wait_for(lambda: {"ana", "luis"} < present(run), crew)
    wait_for(lambda: all(path.exists() for path in told), crew)
    wait_for(lambda: working(coordinator) == ["ana", "here-1", "luis"], second)
    wait_for(lambda: "waiting: paused" in logged(run.nodes / "luis.jsonl"), crew)
    assert coordinator.run("kick", "luis").returncode == 0
    said = ended(second, code=5)
    assert KICKED in said or NOT_LISTED in said
    assert COME_AGAIN in said
    assert said.count(PAUSED) == 1
    assert "working again" in said
    wait_for(goes_on(run), crew)
    first.send_signal(signal.SIGINT)
    said = ended(first, code=130)
    wait_for(goes_on(run), crew)
    coordinator_said = down(coordinator, crew)
    assert "ana joined" in coordinator_said
    assert f"ana left: {LEAVES}" in coordinator_said
    assert "luis left: it was kicked" in coordinator_said
    assert "the run was stopped by cuadrilla stop or SIGTERM at step" in coordinator_said
    assert said.count("working    as ana") == 1
    assert said.index(PAUSED) < said.index("working again")
    assert re.search(r"^step \d+  share \d+ %  [\d,]+ tokens/s$", said, re.MULTILINE)
    assert is_what_one_worker_gives(run)
    fetched = {path.name for path in Home(ana.home).cache.rglob("*.*")}
    assert fetched == {path.name for path in (run.path / "data").glob("*.*")}
    for path in told:
        kinds = [row["kind"] for row in read_jsonl(path)]
        assert kinds[:2] == ["hello", "usage"], path


def test_each_device_of_a_machine_is_a_worker(machine: Machines, tmp_path: Path, port: int) -> None:
    """Two workers of the coordinator's machine and two of another. One is killed; the others end in order."""
    run, coordinator, ana = make_run(tmp_path / "run", unhurried=True), machine("coordinator"), machine("ana")
    ana.trust(run)
    coordinator.run("up", str(run.path), "--listen", f"127.0.0.1:{port}", "--devices", "cuda:7", code=3)
    crew = up(coordinator, run, port, "--devices", "cpu,cpu", workers="[1.0]")
    text = invite(coordinator)
    for devices, reason in (("cpu,cuda:7", "no device 'cuda:7'"), ("cuda:7", "cuda:7 is not available")):
        refused = ana.run("join", "--name", "ana", "--devices", devices, says=text, code=3)
        assert reason in refused.stderr  # and the invite is not used up
    joined = ana.start("join", "--name", "ana", "--devices", "cpu,cpu", says=text)
    everybody = {"here-1", "here-2", "ana/cpu", "ana/cpu.2"}
    wait_for(lambda: present(run) == everybody, crew)
    (victim,) = [child for child in children_of(joined) if "cpu.2" in child.cmdline()]
    victim.kill()
    wait_for(lambda: present(run) == everybody - {"ana/cpu.2"}, crew)
    wait_for(goes_on(run), crew)
    down(coordinator, crew)
    said = ended(joined)
    assert "a worker for each of cpu, cpu.2" in said
    assert "cpu.2 died: signal 9" in said
    assert re.search(r"^cpu  step \d+  share \d+ %", said, re.MULTILINE)
    assert said.count("done       the run was stopped by cuadrilla stop or SIGTERM") == 1
    assert is_what_one_worker_gives(run)


def children_of(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    return psutil.Process(process.pid).children()


def logged(path: Path) -> str:
    """The lines of its log that a node has sent."""
    return "\n".join(row["text"] for row in read_jsonl(path) if row["kind"] == "log")


@pytest.mark.thorough
def test_a_coordinator_that_comes_back_finds_its_workers_again(
    machine: Machines, run: RunDir, stories: Path, port: int, tmp_path: Path
) -> None:
    """The invite has the address that others dial, and is needed once. The worker waits while the coordinator is away,
    and also fetches the run's teacher. A second coordinator of the same crew is refused, since an invite would reach
    either of the two. Then the coordinator's address changes, as with another Wi-Fi. A machine that has joined needs
    only the new address, and no invite."""
    coordinator, ana = machine("coordinator"), machine("ana")
    teacher = language_run(tmp_path / "teacher", stories, steps=4)
    assert train(teacher).returncode == 0
    run.run_file.write_text(run.run_file.read_text().replace("[train]", f'[train]\nteacher = "{teacher.path}"'))
    dialled = f"localhost:{port}"
    crew = up(coordinator, run, port, "--address", "localhost")
    text = invite(coordinator)
    assert str(Invite.parse(text).address) == dialled
    worker = ana.start("join", "--name", "ana", says=text)
    wait_for(reached(run, 5), crew)
    assert Home(ana.home).joined()[0].address == dialled
    other = make_run(tmp_path / "other", steps=5)
    second = coordinator.run("up", str(other.path), "--listen", "127.0.0.1:0", code=2)
    [child] = psutil.Process(crew.pid).children()
    assert f"in use by process {child.pid}" in second.stderr
    crew.kill()
    crew.communicate()
    crew = up(coordinator, run, port, "--address", "localhost")
    wait_for(goes_on(run), crew)
    said = down(coordinator, crew)
    assert f"crew       {dialled}; on another machine" in said
    said = ended(worker)
    assert [said.count(words) for words in ("working    as ana", "back at work")] == [1, 1]
    assert f"MB (files: {len(list((run.path / 'data').iterdir())) + 2})" in said  # also configuration and weights
    announced = last_rows(run.metrics)[-1]["version"]
    coordinator.address = "127.0.0.2"
    crew = up(coordinator, run, port)
    worker = ana.start("join", f"127.0.0.2:{port}")
    wait_for(reached(run, announced + 5), crew)
    down(coordinator, crew)
    ended(worker)
    assert is_what_one_worker_gives(run)
    assert [crew.address for crew in Home(ana.home).joined()] == [f"127.0.0.2:{port}"]  # it keeps the address


def test_code_runs_only_where_its_owner_has_approved_it(machine: Machines, tmp_path: Path, port: int) -> None:
    run = make_run(tmp_path / "mine", steps=5)
    coordinator, ana = machine("coordinator"), machine("ana")
    crew = up(coordinator, run, port)
    refused = ana.run("join", "--name", "ana", says=invite(coordinator), code=5)
    assert "has not been approved on this machine" in refused.stderr
    sha256 = task_hash(run.path)
    assert refused.stderr.split("cuadrilla join --trust ")[1].split()[0] == sha256
    elsewhere = f"localhost:{port}"
    assert "has not been approved on this machine" in ana.run("join", elsewhere).stderr
    assert [crew.address for crew in Home(ana.home).joined()] == [elsewhere]  # the refusal has not made it forget
    for wrong in (sha256[:8], sha256[:63] + "g", sha256.upper() + "0"):
        assert ana.run("join", "--trust", wrong).returncode == 2
    assert not Home(ana.home).trusted()
    assert ana.run("join", "--trust", sha256).returncode == 0
    assert Home(ana.home).trusted() == {sha256}
    worker = ana.start("join")
    assert crew.wait(timeout=150) == 0
    assert worker.wait(timeout=150) == 0
    assert ana.run("join", "192.0.2.7:7777", "--forget").returncode == LinkError.exit_code
    assert Home(ana.home).joined()  # a wrong address leaves no crew
    assert "the coordinator was not informed" in ana.run("join", "--forget", code=0).stderr
    assert not Home(ana.home).joined()
    assert not list((Home(ana.home).path / "joined").iterdir())
