"""compose.yaml and its addition for cards, and what the images are made from."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT, GPU = ((ROOT / name).read_text(encoding="utf-8") for name in ("compose.yaml", "compose.gpu.yaml"))
SERVICES: dict[str, Any] = yaml.safe_load(TEXT)["services"]
PROFILES = {
    "": {"trainer"},
    "ingest": {"ingest"},
    "crew": {"coordinator", "worker"},
    "tensorboard": {"tensorboard"},
    "ray": {"ray-head", "ray-worker"},
    "dask": {"scheduler", "dask-worker"},
    "serve": {"replica-1", "replica-2", "proxy"},
    "monitor": {"dashboard", "prometheus", "grafana"},
}
OURS = set(SERVICES) - {"proxy", "prometheus", "grafana"}
PAGES = {
    "tensorboard": ("TENSORBOARD_PORT", 6006),
    "ray-head": ("RAY_PORT", 8265),
    "scheduler": ("DASK_PORT", 8787),
    "proxy": ("SERVE_PORT", 8001),
    "dashboard": ("DASHBOARD_PORT", 8047),
    "grafana": ("GRAFANA_PORT", 3000),
}


def test_each_role_is_a_profile_and_the_trainer_has_none() -> None:
    """So `docker compose build` builds, and `up` starts no second training."""
    found: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        (profile,) = service.get("profiles", [""])
        found.setdefault(profile, set()).add(name)
    assert found == PROFILES
    assert SERVICES["trainer"]["scale"] == 0


@pytest.mark.parametrize("name", SERVICES)
def test_a_role_has_no_rights_but_those_to_become_the_owner_of_the_folder(name: str) -> None:
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["stop_grace_period"] in ("30s", "2m")
    assert not {"privileged", "pid", "ipc", "devices", "entrypoint"} & set(service)
    assert service.get("network_mode") == ("host" if name == "trainer" else None)  # torchrun's ranks
    if name in OURS:
        assert service["cap_add"] == ["SETUID", "SETGID", "SETPCAP"]
        assert [place.partition(":")[0] for place in service["tmpfs"]] == ["/tmp", "/home/cuadrilla"]
        assert any(volume.partition(":")[2].startswith("/workspace") for volume in service["volumes"])
        assert "user" not in service
    else:
        assert "cap_add" not in service
        assert service["user"] in ("101:101", "65534:65534", "472:0")


@pytest.mark.parametrize("name", SERVICES)
def test_one_port_is_open_on_the_network_and_pages_on_the_loopback(name: str) -> None:
    variable, port = PAGES.get(name, ("", 0))
    expected = [f"127.0.0.1:${{{variable}:-{port}}}:{port}"] if port else []
    if name == "coordinator":
        expected = ["${LAN_ADDRESS:-127.0.0.1}:47470:47470"]
    assert SERVICES[name].get("ports", []) == expected
    assert "0.0.0.0" not in json.dumps(SERVICES[name])


def test_invite_and_tokens_go_through_files() -> None:
    """Arguments and variables can be seen by everybody on a machine, and the log is kept."""
    assert "> /crew/invite" in SERVICES["coordinator"]["command"][-1]
    assert "--invite-file /crew/invite" in SERVICES["worker"]["command"][-1]
    assert "crew:/crew:ro" in SERVICES["worker"]["volumes"]
    for name in ("ray-head", "ray-worker"):
        assert SERVICES[name]["environment"] == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/ray/token"}
    for name in ("replica-1", "replica-2"):
        assert "--api-key-file /serve/key" in SERVICES[name]["command"][-1]
    assert "--token-file /monitor/token" in SERVICES["dashboard"]["command"][-1]
    assert SERVICES["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/monitor/password"
    for name in ("coordinator", "ray-head", "replica-1", "dashboard"):
        assert "umask 077" in SERVICES[name]["command"][-1]


def test_cards_are_an_addition_that_docker_compose_1_reads_too() -> None:
    """It knows no `gpus:`, no `include` and no name at the top; no variable has to be set."""
    gpu = yaml.safe_load(GPU)
    assert set(gpu["services"]) < OURS
    for service in gpu["services"].values():
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
        assert service["build"]["args"] == {"TORCH_BUILD": "${TORCH_BUILD:-cu130}"}
    assert not any("deploy" in service for service in SERVICES.values())
    for text in (TEXT, GPU):
        assert {key for key in yaml.safe_load(text) if not key.startswith("x-")} <= {"services", "volumes"}
        assert re.findall(r"(?<!\$)\$\{\w+\}", text) == []


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
        "!docker/as-owner", "!docker/healthy", "!docker/install.sh", "!docker/nvidia-smi", "!docker/requirements-*.txt",
        "!tools/pick_torch.py", "!constraints.txt", "!pyproject.toml", "!hatch_build.py", "!README.md", "!LICENSE",
        "!src",
    }  # fmt: skip
