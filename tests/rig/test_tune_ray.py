"""A search on the machines of a Ray cluster, one of which is gone in the middle of a trial and comes back."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from bench.lan import Member, lan
from cuadrilla.engines.ray.cluster import kill
from cuadrilla.home import Home
from tests.commands import COMMAND, wait_for
from tests.inside import cuadrilla
from tests.networks import need_namespaces
from tests.rig.test_tune import amid, make_search, rows
from tests.spawn.test_tune import results

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"'),
]

PORT = 6379
TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def network() -> Iterator[list[Member]]:
    need_namespaces()
    with lan(3, rate="400mbit") as members:
        yield members


class RayMachine:
    """A machine on which its owner has typed `ray start`, with a home of its own."""

    def __init__(self, member: Member, home: Path, *options: str, stack: ExitStack) -> None:
        self.home = home
        self.environment = {
            **os.environ, "CUADRILLA_HOME": str(home), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN,
            "RAY_USAGE_STATS_ENABLED": "0",
        }  # fmt: skip
        # Short: Ray makes Unix sockets below it, whose paths have an end.
        folder = tempfile.TemporaryDirectory(prefix="cua-", dir="/tmp", ignore_cleanup_errors=True)
        places = ("--node-ip-address", member.address, "--temp-dir", stack.enter_context(folder))
        self.process = subprocess.Popen(
            [
                *member.prefix, Path(sys.executable).with_name("ray"), "start", "--block", *places,
                "--object-store-memory", "100000000", *options,
            ],
            env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        stack.callback(self.kill)

    def kill(self) -> None:
        """As a power cut does."""
        if self.process.poll() is None:
            kill([*psutil.Process(self.process.pid).children(recursive=True), psutil.Process(self.process.pid)])
        self.process.wait()


def workers(address: str, member: Member, head: RayMachine) -> set[str]:
    """Who offers to work in the cluster."""
    command = [*member.prefix, *COMMAND, "--json", "nodes", "--ray-address", address]
    done = subprocess.run(command, env=head.environment, capture_output=True, text=True, check=False)
    return {node["node"] for node in json.loads(done.stdout).get("nodes", []) if node["workers"]}


def test_a_search_over_ray_s_machines_is_the_same_when_one_is_gone(
    network: list[Member], stories: Path, tmp_path: Path
) -> None:
    undisturbed = make_search(tmp_path / "undisturbed", stories)
    done = cuadrilla("tune", undisturbed)
    assert done.returncode == 0, done.stderr
    folder = make_search(tmp_path / "search", stories)
    here, *others = network
    address = f"{here.address}:{PORT}"
    with ExitStack() as stack:

        def joined(member: Member, name: str) -> RayMachine:
            options = ("--address", address, "--resources", '{"cuadrilla": 1}', "--labels", f"cuadrilla-node={name}")
            return RayMachine(member, tmp_path / name, *options, stack=stack)

        headless = ("--head", "--port", str(PORT), "--include-dashboard", "false")  # and offers nothing
        head = RayMachine(here, tmp_path / "here", *headless, stack=stack)
        ana, luis = joined(others[0], "ana"), joined(others[1], "luis")
        wait_for(lambda: workers(address, here, head) == {"ana", "luis"}, every_seconds=1)
        talk = stack.enter_context(open(tmp_path / "talk.txt", "w"))
        command = [*here.prefix, *COMMAND, "tune", str(folder), "--ray", address]
        search = subprocess.Popen(command, env=head.environment, stdout=talk, stderr=talk, text=True)
        stack.callback(search.wait)
        stack.callback(search.kill)
        wait_for(amid(folder, "ana"), search, every_seconds=0.1)
        ana.kill()
        num_before = len(rows(folder, "begun", "ana"))
        joined(others[0], "ana")
        wait_for(lambda: len(rows(folder, "begun", "ana")) > num_before, search, every_seconds=0.1)
        assert search.wait(timeout=200) == 0, (tmp_path / "talk.txt").read_text()
        assert results(folder) == results(undisturbed)
        places = [row["place"].split(", ") for row in rows(folder, "ended")]
        assert {name for names in places for name in names} == {"ana", "luis"}
        assert list(Home(luis.home).cache.glob("*/data/train-00000.bin")), "its data were fetched"
        assert list((folder / "tune").glob("t*-r1/checkpoints/v*")), "the weights of the best have come back"
