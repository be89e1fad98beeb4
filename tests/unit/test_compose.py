"""The compose files that `cuadrilla compose` writes, and what the images are made from."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cuadrilla.engines.compose import COMPOSE, ENV, GPU, ROLES, ContainerHost, compose_files
from cuadrilla.errors import ConfigError
from tests.inside import cuadrilla

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
MACHINE = ContainerHost(
    roles=["coordinator", "worker"],
    source="/home/ana/con espacio #1",
    address="192.168.1.50",
    uid=1234,
    gid=567,
    run="casa",
    gpu=False,
)
FILES = compose_files(MACHINE)
SERVICES: dict[str, Any] = yaml.safe_load(FILES[COMPOSE])["services"]


def lines(text: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in text.splitlines() if line and not line.startswith("#"))


def test_each_role_is_a_profile() -> None:
    assert {profile for service in SERVICES.values() for profile in service["profiles"]} == set(ROLES)
    assert set(SERVICES) == {
        "ingest", "coordinator", "worker", "trainer", "tensorboard", "ray-head", "ray-worker", "scheduler",
        "dask-worker", "replica-1", "replica-2", "gateway", "dashboard", "prometheus", "grafana",
    }  # fmt: skip


@pytest.mark.parametrize("name", SERVICES)
def test_a_role_has_no_rights_but_its_users(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"] == "${UID:-1000}:${GID:-1000}"
    assert service["read_only"] is True
    assert [place.partition(":")[0] for place in service["tmpfs"]] == ["/tmp", "/home/cuadrilla"]
    assert service["init"] is True
    assert service["stop_grace_period"] in ("30s", "2m")
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & set(service)


@pytest.mark.parametrize("name", SERVICES)
def test_one_port_is_open_on_the_network_and_pages_on_the_loopback(name: str) -> None:
    pages = {
        "tensorboard": "127.0.0.1:${TENSORBOARD_PORT:-6006}:6006",
        "ray-head": "127.0.0.1:${RAY_PORT:-8265}:8265",
        "scheduler": "127.0.0.1:${DASK_PORT:-8787}:8787",
        "gateway": "127.0.0.1:${GATEWAY_PORT:-8001}:8001",
        "dashboard": "127.0.0.1:${DASHBOARD_PORT:-8047}:8047",
        "grafana": "127.0.0.1:${GRAFANA_PORT:-3000}:3000",
    }
    expected = [pages[name]] if name in pages else []
    if name == "coordinator":
        expected = ["${LAN_ADDRESS:-127.0.0.1}:47470:47470"]
    assert SERVICES[name].get("ports", []) == expected
    assert "0.0.0.0" not in json.dumps(SERVICES[name])


def test_invite_and_token_go_through_files() -> None:
    """Arguments and variables can be seen by everybody on a machine, and the log is kept."""
    assert "> /crew/invite" in SERVICES["coordinator"]["command"][-1]
    assert "--invite-file /crew/invite" in SERVICES["worker"]["command"][-1]
    assert "crew:/crew:ro" in SERVICES["worker"]["volumes"]
    for name in ("ray-head", "ray-worker"):
        assert SERVICES[name]["environment"] == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/ray/token"}
    for name in ("replica-1", "replica-2"):
        assert "--key-file /serve/key" in SERVICES[name]["command"][-1]
        assert "serve:/serve:ro" in SERVICES[name]["volumes"]
    gateway = SERVICES["gateway"]["command"][-1]
    assert '--key-file "$$CUADRILLA_HOME/key" --replica-key-file /serve/key' in gateway
    assert "umask 077" in gateway
    dashboard = SERVICES["dashboard"]["command"][-1]
    assert "--token-file /monitor/token" in dashboard
    assert "umask 077" in dashboard
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/monitor/password"
    assert not any(re.search("secret|password", name.lower()) for name in lines(FILES[ENV]))


def test_who_is_to_write_in_the_folder_can() -> None:
    assert {name for name in SERVICES if ".:/workspace" in SERVICES[name].get("volumes", [])} == {
        "ingest", "coordinator", "trainer", "ray-head", "ray-worker", "dask-worker",
    }  # fmt: skip
    assert SERVICES["tensorboard"]["volumes"] == [".:/workspace:ro"]
    assert all(".:/workspace:ro" in SERVICES[name]["volumes"] for name in ("replica-1", "replica-2", "dashboard"))
    assert "/var/lib/cuadrilla" in SERVICES["worker"]["volumes"]  # of its own, however many there are


def test_cards_are_an_override_that_docker_compose_1_reads_too() -> None:
    gpu = yaml.safe_load(FILES[GPU])
    assert set(gpu["services"]) < set(SERVICES)
    for service in gpu["services"].values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert service["build"]["target"] == "cuda"
        assert "gpus" not in service
    assert not any("deploy" in service for service in SERVICES.values())
    for text in (FILES[COMPOSE], FILES[GPU]):
        assert {key for key in yaml.safe_load(text) if not key.startswith("x-")} <= {"services", "volumes"}


def test_the_variables_of_a_machine() -> None:
    assert lines(FILES[ENV]) == {
        "COMPOSE_PATH_SEPARATOR": ":",
        "COMPOSE_FILE": "compose.yaml",
        "COMPOSE_PROFILES": "coordinator,worker",
        "UID": "1234",
        "GID": "567",
        "LAN_ADDRESS": "192.168.1.50",
        "CUADRILLA_RUN": "'casa'",
        "CUADRILLA_SOURCE": "'/home/ana/con espacio #1'",
    }
    used = set(re.findall(r"\$\{(\w+)", FILES[COMPOSE] + FILES[GPU]))
    have_a_default = {
        "CUADRILLA_IMAGE",
        "BASE_IMAGE",
        "TORCH_BUILD",
        "TENSORBOARD_PORT",
        "RAY_PORT",
        "DASK_PORT",
        "GATEWAY_PORT",
        "DASHBOARD_PORT",
        "GRAFANA_PORT",
        "PROMETHEUS_IMAGE",
        "GRAFANA_IMAGE",
    }
    assert used - set(lines(FILES[ENV])) == have_a_default


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["coordnator"], 2, "no role 'coordnator'"),
        (["--lan", "0.0.0.0"], 2, "every network"),
        (["--lan", "casa"], 2, "not an address"),
        (["--run", "it's"], 2, "cannot be written"),
        (["--source", "."], 2, "no docker/Dockerfile"),
    ],
)
def test_what_is_refused(tmp_path: Path, arguments: list[str], code: int, said: str) -> None:
    done = cuadrilla("compose", *arguments, cwd=tmp_path)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert "hint:" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_once(tmp_path: Path) -> None:
    done = cuadrilla("compose", "worker", "--gpu", "--to", "casa", "--lan", "10.0.0.7", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(role in done.stdout for role in ROLES)
    assert "next: docker compose build" in done.stderr
    assert lines((tmp_path / "casa" / ENV).read_text())["COMPOSE_FILE"] == "compose.yaml:compose.gpu.yaml"
    source = lines((tmp_path / "casa" / ENV).read_text())["CUADRILLA_SOURCE"].strip("'")
    assert ((tmp_path / "casa" / source).resolve(), Path(source).is_absolute()) == (ROOT, False)
    (tmp_path / "casa" / COMPOSE).unlink()
    (tmp_path / "casa" / ENV).write_text("mine")
    refused = cuadrilla("compose", "--to", "casa", cwd=tmp_path)
    assert (refused.returncode, "exists" in refused.stderr) == (2, True)
    assert ((tmp_path / "casa" / ENV).read_text(), (tmp_path / "casa" / COMPOSE).exists()) == ("mine", False)
    assert cuadrilla("compose", "--force", "--to", "casa", cwd=tmp_path).returncode == 0
    assert lines((tmp_path / "casa" / ENV).read_text())["COMPOSE_PROFILES"] == "trainer"


def test_print_writes_nothing(tmp_path: Path) -> None:
    assert cuadrilla("compose", "--print", cwd=tmp_path).stdout == FILES[COMPOSE]
    assert set(json.loads(cuadrilla("--json", "compose", "--print", cwd=tmp_path).stdout)) == {COMPOSE, GPU, ENV}
    assert list(tmp_path.iterdir()) == []


def pinned(file: str) -> dict[str, set[str]]:
    """Name → versions of a file of requirements."""
    text = (ROOT / file).read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition("==")
            found.setdefault(name, set()).add(rest.split()[0])
    return found


@pytest.mark.parametrize("file", ["docker/requirements-cpu.txt", "docker/requirements-build.txt"])
def test_the_images_hold_the_versions_that_the_tests_run_with(file: str) -> None:
    libraries, tested = pinned(file), pinned("constraints.txt")
    assert not {name: found for name, found in libraries.items() if name in tested and found != tested[name]}
    text = (ROOT / file).read_text(encoding="utf-8")
    assert sum(map(len, libraries.values())) == len(re.findall(r"^[\w-]+==.*\\\n +--hash=sha256:", text, re.MULTILINE))
    assert "torch" not in libraries


def test_a_build_sees_neither_data_nor_keys() -> None:
    first, *others = [
        line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")
    ]
    assert first == "*"
    assert {line for line in others if line.startswith("!")} == {
        "!docker/install.sh", "!docker/healthy", "!docker/nvidia-smi", "!docker/requirements-*.txt",
        "!tools/pick_torch.py", "!constraints.txt", "!pyproject.toml", "!README.md", "!LICENSE", "!src",
    }  # fmt: skip


def test_both_images_have_the_same_steps() -> None:
    text = (ROOT / "docker/Dockerfile").read_text(encoding="utf-8")
    cpu, cuda = re.split(r"^FROM .*$", text, flags=re.MULTILINE)[1:]

    def steps(part: str) -> list[str]:
        return [
            line for line in part.splitlines() if re.match("COPY|RUN|USER|WORKDIR|STOPSIGNAL|HEALTHCHECK|CMD", line)
        ]

    assert [step.replace("torch ${TORCH_BUILD}", "torch cpu") for step in steps(cuda)] == steps(cpu)
    assert "USER 1000:1000" in steps(cpu)


def test_what_somebody_has_added_to_env_stays(tmp_path: Path) -> None:
    assert cuadrilla("compose", "worker", "--to", tmp_path).returncode == 0
    file = tmp_path / ENV
    first = lines(file.read_text(encoding="utf-8"))
    with file.open("a", encoding="utf-8") as env:
        env.write("TENSORBOARD_PORT=6007\n# a remark=1\nUID=5\n")
    for _ in range(2):
        assert cuadrilla("compose", "worker", "--to", tmp_path, "--force").returncode == 0
        text = file.read_text(encoding="utf-8")
        assert lines(text) == {**first, "TENSORBOARD_PORT": "6007"}
        assert text.count("TENSORBOARD_PORT") == text.count("Added by hand") == 1


def test_a_name_that_cannot_be_quoted_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        compose_files(ContainerHost(**{**vars(MACHINE), "run": "a\nCOMPOSE_FILE=b"}))
