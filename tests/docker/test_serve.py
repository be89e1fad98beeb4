"""The profile `serve` with real containers: two replicas behind nginx, of which one is killed."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.commands import wait_for
from tests.docker.conftest import Project, owner_of
from tests.docker.test_compose import exit_code, make_run
from tests.images import base_image, docker, has_image
from tests.loopback import ask
from tests.ports import free_port

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(1800)]

SERVE = ("--profile", "serve")
REPLICAS = ("replica-1", "replica-2")
ASKED = {"prompt": "Había una vez", "max_tokens": 24, "temperature": 0}
NGINX = "cuadrilla-test-nginx"


@pytest.fixture
def nginx(tmp_path: Path, image: str) -> str:
    """The name of an image with nginx, built on the same base image."""
    if not has_image(NGINX):
        install = "apt-get update -qq && apt-get install -y -qq --no-install-recommends nginx-light"
        text = f"FROM {base_image()}\nRUN {install}\n"
        (tmp_path / "Dockerfile").write_text(text)
        docker("build", "--quiet", "--network", "host", "--tag", NGINX, str(tmp_path))
    return NGINX


@dataclass(frozen=True, kw_only=True)
class Caller:
    port: str
    key: str

    def call(self, path: str, *, key: str | None = None, **body: object) -> tuple[int, str]:
        """Status and body of the answer. The status is 0 if there is no answer."""
        headers = {"Authorization": f"Bearer {self.key if key is None else key}"}
        try:
            status, answer, _ = ask(f"http://127.0.0.1:{self.port}{path}", headers=headers, body=body or None)
        except OSError:
            return 0, ""
        return status, answer.decode()


def test_two_replicas_behind_one_address_lose_one(project: Project, stories: Path, nginx: str) -> None:
    make_run(project.folder / "run", stories)
    owner_of(project.folder)
    project.compose("run", "--rm", "ingest", "cuadrilla", "train", "run", "--stop-at", "3")
    port = str(free_port())
    project.compose(*SERVE, "up", "--detach", SERVE_PORT=port, NGINX_IMAGE=nginx, CUADRILLA_RUN="run")
    caller = Caller(port=port, key=project.inside("replica-1", "cat", "/serve/key"))
    wait_for(lambda: caller.call("/v1/models")[0] == 200)
    replicas = {name: project.containers(name)[0] for name in REPLICAS}
    assert [project.published(name) for name in REPLICAS] == [{}, {}]
    assert project.published("proxy") == {"8001/tcp": [{"HostIp": "127.0.0.1", "HostPort": caller.port}]}
    assert caller.call("/v1/models", key="")[0] == 401

    docker("kill", replicas["replica-1"])
    answers = [caller.call("/v1/completions", **ASKED) for _ in range(4)]
    assert {status for status, _ in answers} == {200}
    assert len({json.loads(body)["choices"][0]["text"] for _, body in answers}) == 1

    docker("start", replicas["replica-1"])
    wait_for(lambda: docker("inspect", "--format", "{{.State.Health.Status}}", replicas["replica-1"]) == "healthy")
    docker("stop", replicas["replica-2"])
    wait_for(lambda: caller.call("/v1/completions", **ASKED)[0] == 200)
    assert caller.key not in project.compose(*SERVE, "logs") + docker("inspect", *replicas.values())
    project.compose(*SERVE, "stop")
    assert [exit_code(each) for each in replicas.values()] == [0, 0]
