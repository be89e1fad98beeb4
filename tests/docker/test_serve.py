"""The profile `serve` with real containers: two replicas behind a gateway, one of which is killed under load."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import wait_for
from tests.docker.conftest import Project
from tests.docker.test_compose import exit_code, make_run, owned_by_somebody
from tests.images import docker
from tests.inside import cuadrilla
from tests.ports import free_port

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

SERVE = ("--profile", "serve")
REPLICAS = ("replica-1", "replica-2")
ASKED = {"prompt": "Había una vez", "max_tokens": 24, "temperature": 0}


@dataclass(frozen=True, kw_only=True)
class Caller:
    port: str
    key: str

    def call(self, path: str, *, key: str | None = None, **body: object) -> tuple[int, str]:
        """Status, and 0 where nobody answers."""
        headers = {"Authorization": f"Bearer {self.key if key is None else key}", "Content-Type": "application/json"}
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def ready(self) -> list[str]:
        """Which replicas take requests."""
        said = self.call("/readyz")[1]
        found = json.loads(said)["replicas"] if said else []
        return [replica["url"].split("/")[2].partition(":")[0] for replica in found if replica["status"] == "ready"]


def test_two_replicas_behind_a_gateway_lose_one(project: Project, stories: Path) -> None:
    run = make_run(project.folder / "run", stories)
    assert cuadrilla("train", run.path, "--stop-at", "3").returncode == 0
    owned_by_somebody(project)
    port = str(free_port())
    project.compose(*SERVE, "up", "--detach", GATEWAY_PORT=port)
    (gateway,) = project.containers("gateway")
    replicas = {name: project.containers(name)[0] for name in REPLICAS}
    wait_for(lambda: docker("inspect", "--format", "{{.State.Health.Status}}", gateway) == "healthy")
    key = docker("exec", gateway, "cat", "/var/lib/cuadrilla/key")
    caller = Caller(port=port, key=key)
    wait_for(lambda: len(caller.ready()) == 2)

    bindings = [docker("inspect", "--format", "{{json .HostConfig.PortBindings}}", each) for each in replicas.values()]
    assert all(json.loads(found) == {} for found in bindings)
    published = json.loads(docker("inspect", "--format", "{{json .HostConfig.PortBindings}}", gateway))
    assert published == {"8001/tcp": [{"HostIp": "127.0.0.1", "HostPort": port}]}
    assert caller.call("/v1/models", key="")[0] == 401
    inner = docker("exec", gateway, "cat", "/serve/key")
    assert (caller.call("/v1/models", key=inner)[0], caller.call("/v1/models")[0]) == (401, 200)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(caller.call, "/v1/completions", **ASKED, stream=number % 2 == 0) for number in range(60)]
        wait_for(lambda: sum(each.done() for each in asked) >= 10)
        docker("kill", replicas["replica-1"])
        answers = [each.result() for each in asked]
    assert {status for status, _ in answers} == {200}
    broken = [body for _, body in answers[::2] if "[DONE]" not in body]
    assert all('"text"' in body and '"replica_lost"' in body for body in broken)  # after their first token
    assert len({json.loads(body)["choices"][0]["text"] for _, body in answers[1::2]}) == 1
    assert caller.ready() == ["replica-2"]
    docker("start", replicas["replica-1"])
    wait_for(lambda: len(caller.ready()) == 2)

    seen = project.compose(*SERVE, "logs") + docker("inspect", gateway, *replicas.values())
    assert not any(secret in seen for secret in (key, inner))
    project.compose(*SERVE, "stop")
    assert [exit_code(each) for each in (gateway, *replicas.values())] == [0, 0, 0]
