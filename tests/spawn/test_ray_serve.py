"""Services on a Ray cluster, behind a gateway: an actor that is killed comes back elsewhere, and nothing is left."""

import json
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.commands import COMMAND, wait_for
from tests.inside import cuadrilla
from tests.machines import LANGUAGE_RUN
from tests.ports import free_port
from tests.spawn.test_ray import Head

pytestmark = [
    pytest.mark.spawn,
    pytest.mark.skipif(find_spec("ray") is None, reason='Ray is not installed: pip install "cuadrilla[ray]"'),
]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    """Of its own: that of other tests has no room while they train."""
    head = Head(tmp_path / "cluster", token="0123456789abcdef" * 4)
    wait_for(head.listens)
    yield head
    head.stop()


@pytest.fixture
def model(tmp_path: Path, stories: Path) -> Path:
    folder = tmp_path / "modelo"
    folder.mkdir()
    (folder / "data").symlink_to(stories)
    (folder / "run.toml").write_text(LANGUAGE_RUN.format(steps=2))
    assert cuadrilla("train", folder).returncode == 0
    return folder


def call(url: str, **body: object) -> Any:
    """The JSON of the answer; None where there is none yet."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)
    except (urllib.error.HTTPError, OSError):
        return None


def family(head: Head) -> list[psutil.Process]:
    """Actors and their services."""
    found = []
    for process in psutil.Process(head.process.pid).children(recursive=True):
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "RayService" in command or " serve " in command:
            found.append(process)
    return found


def listens_on(process: psutil.Process) -> set[str]:
    return {found.laddr.ip for found in process.net_connections() if found.status == psutil.CONN_LISTEN}


def place(url: str) -> str:
    """Where the service behind a gateway is, once it takes requests."""
    said = call(f"{url}/readyz")
    found: str = said["replicas"][0]["url"] if said else ""
    return found


def test_a_service_that_ray_starts_again_is_found_at_its_new_address(head: Head, model: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    where = ["--ray", head.address, "--serve", str(model), "--replicas", "1", "--listen", f"127.0.0.1:{port}"]
    environment = os.environ | head.environment()
    gateway = subprocess.Popen([*COMMAND, "gateway", *where], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: place(url) != "", gateway)
        before = place(url)
        assert call(f"{url}/v1/completions", prompt="Había", max_tokens=4)["usage"]["completion_tokens"] == 4
        assert set().union(*map(listens_on, family(head))) <= {"127.0.0.1", "::ffff:127.0.0.1"}
        next(each for each in family(head) if "RayService" in " ".join(each.cmdline())).kill()
        wait_for(lambda: place(url) not in ("", before), gateway)
        assert call(f"{url}/v1/completions", prompt="Había", max_tokens=4)["model"] == "modelo"
        gateway.send_signal(signal.SIGTERM)
        said = gateway.communicate(timeout=60)[1]
        assert (gateway.returncode, "Traceback" in said) == (0, False), said
        wait_for(lambda: family(head) == [])
    finally:
        gateway.kill()
        gateway.communicate()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ray", "127.0.0.1:6379"], "--ray needs a model"),
        (["--ray", "127.0.0.1:6379", "--serve", "run", "http://127.0.0.1:8000"], "no services to name"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = cuadrilla("gateway", *arguments, cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
