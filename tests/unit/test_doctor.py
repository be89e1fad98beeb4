"""Each check of `doctor`, on texts that real programs print: it has a finding for a fault, and none otherwise.

The texts of `docker`, `netsh`, `ufw`, ... are from their documentation and from users' reports. A healthy machine of
each kind has no finding at all.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.doctor import here as here_module
from cuadrilla.doctor.examine import CHECKS, examine
from cuadrilla.doctor.here import Here
from cuadrilla.host.card import NetworkCard
from cuadrilla.host.devices import HINT_INSTALL, HINT_RESTART
from cuadrilla.messages import Message
from tests.patients import (
    CARD,
    CONTAINER,
    CPU,
    FOLDER,
    GIB,
    GONE,
    INFO,
    KINDS,
    LINUX,
    NO_DAEMON,
    PORT,
    WINDOWS,
    WSL,
    changed,
    only,
    said,
    sick,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_machine_gets_no_finding(kind: str) -> None:
    assert sick(KINDS[kind]) == []
    assert {name for name, _ in examine(KINDS[kind])} >= {"machine.system", "devices.torch", "machine.disk"}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_known_is_no_finding(kind: str) -> None:
    """A machine of which nothing is known has no finding, except that it has no network."""
    unknown = changed(KINDS[kind], programs={"docker info": GONE}, cards=(), way_out="", reachability="plain")
    assert {name for name, _ in sick(unknown)} <= {"network.address"}


PIP = 'pip install "torch==2.13.0+cu126" --index-url https://download.pytorch.org/whl/cu126'
NO_KERNELS = Message("PyTorch {version} has no kernels for compute capability {capability}",
                     version="2.13.0+cu130", capability="6.1")  # fmt: skip
OLD_CARD = replace(CARD, name="GTX 1080 Ti", capability=(6, 1), error=NO_KERNELS, hint=PIP)
UNLOADED = replace(
    CPU, error=Message("PyTorch cannot be loaded: {reason}", reason="libcudart.so.13"), hint=HINT_INSTALL
)
LISTED = (
    "ii libnvidia-compute-535\nrc nvidia-driver-470\nun nvidia-driver-390\nii nvidia-driver-535\n"
    "dpkg-query: no packages found matching cuda-drivers*\n"
)
DENIED = said("permission denied while trying to connect to the Docker daemon socket", 1)
PLAIN = json.dumps({**INFO, "Runtimes": {"runc": {}}})
FULL = replace(FOLDER, free_bytes=GIB // 2)
LOCKED = replace(FOLDER, writable=False)
MNT_C = replace(FOLDER, path="/mnt/c/Users/ana/run")
TABLE = (
    "\nEscuchar en ipv4:             Conectar a ipv4:\n\nDirección       Puerto      Dirección       Puerto\n"
    "--------------- ----------  --------------- ----------\n192.168.1.50    47470       {}    47470\n"
)
MIRRORED = "wsl-mirrored"
VPN = NetworkCard(name="tun0", addresses=("10.8.0.2",), is_tunnel=True)
SIX = NetworkCard(name="enp3s0", addresses=("2001:db8::5", "fd77::5", "fe80::1"))
ACTIVE = "Status: active\n\nTo                         Action      From\n--                         ------      ----\n"


def with_memory(here: Here, have: float, free: float = 1.0) -> Here:
    return changed(here, facts={"memory_bytes": int(have * GIB), "available_bytes": int(free * GIB)})


def open_at(here: Here, programs: dict[str, Any], **fields: Any) -> Here:
    return changed(here, programs=programs, port=PORT, **fields)


def with_card(here: Here, **fields: Any) -> Here:
    return changed(here, devices=(replace(CARD, **fields), CPU))


SICK = [
    (changed(LINUX, devices=(OLD_CARD, CPU)), "devices.gpu",
     [f"failure cuda:0 GTX 1080 Ti: {NO_KERNELS}", f"{sys.executable} -m {PIP}"]),
    (with_card(LINUX, error="Driver/library version mismatch", hint=HINT_RESTART), "devices.gpu",
     ["failure", "restart the machine"]),
    (with_card(WSL, error="GPU access blocked", hint=HINT_RESTART), "devices.gpu",
     ["run `wsl --shutdown` in Windows first"]),
    (changed(LINUX, devices=(CARD, UNLOADED)), "devices.torch", ["failure", "-m pip install --force-reinstall torch"]),
    (changed(WSL, devices=(CPU,), programs={"nvidia-smi.exe": "GPU 0: NVIDIA GeForce RTX 4070 Ti (UUID: GPU-1)"}),
     "wsl.driver", ["Windows has NVIDIA GeForce RTX 4070 Ti, and", "wsl --shutdown powershell"]),
    (changed(WSL, programs={"dpkg-query": LISTED}), "wsl.driver",
     ["sudo apt-get purge -y libnvidia-compute-535 nvidia-driver-535"]),
    (changed(LINUX, folders=(FULL, replace(FULL, path="/home/ana"))), "machine.disk",
     ["failure /home/ana/run has 0.5 GiB left", "du -xhd1 /home/ana/run | sort -h | tail"]),
    (changed(LINUX, folders=(FOLDER, LOCKED)), "machine.disk", ["failure", "export CUADRILLA_HOME="]),
    (changed(LINUX, folders=(LOCKED, FOLDER)), "machine.disk", ["warning", "cd ~"]),
    (changed(WSL, folders=(MNT_C, FOLDER)), "wsl.folder",
     ["/mnt/c/Users/ana/run is a folder of Windows, ten times slower", "cd ~"]),
    (with_memory(LINUX, 1.9), "machine.memory", ["failure"]),
    (with_memory(LINUX, 16, 0.3), "machine.memory", ["warning", "ps -eo"]),
    *((changed(LINUX, environ={"CUDA_VISIBLE_DEVICES": value}), "devices.gpu",
       [f"CUDA_VISIBLE_DEVICES={value} hides", "unset CUDA_VISIBLE_DEVICES"]) for value in ("", "-1")),
    (changed(WSL, facts={"wsl": 1}, environ={"WSL_DISTRO_NAME": "Debian"}), "wsl.version",
     ["wsl --set-version Debian 2"]),
    (changed(WSL, facts={"memory_bytes": int(7.7 * GIB)}, programs={"powershell.exe": str(16 * GIB)}), "wsl.memory",
     ["memory=12GB", "notepad $env:USERPROFILE\\.wslconfig powershell"]),
    *((open_at(WSL, programs), "wsl.network", [
        "netsh interface portproxy add v4tov4 listenaddress=WINDOWS_ADDRESS listenport=47470 "
        "connectaddress=172.30.98.229 connectport=47470; New-NetFirewallRule -DisplayName cuadrilla "
        "-Direction Inbound -Action Allow -Protocol TCP -LocalPort 47470 -Profile Private administrator"])
      for programs in ({}, {"netsh.exe": TABLE.format("172.19.4.7")})),  # the address that WSL had before
    *((open_at(WSL, {"powershell.exe": ports}, reachability=MIRRORED), "wsl.network", ["-LocalPorts 47470"])
      for ports in ("80\n443", "", said("denied", 1), GONE)),
    (changed(LINUX, programs={"docker info": said(NO_DAEMON, 1)}), "docker.service", ["warning", "start docker"]),
    (changed(LINUX, programs={"docker info": DENIED}), "docker.service", ["sudo usermod -aG docker $USER"]),
    (changed(LINUX, programs={"docker info": PLAIN}), "docker.service", ["sudo nvidia-ctk runtime configure"]),
    (changed(CONTAINER, facts={"machine": "aarch64", "kernel": "6.10.14-linuxkit"}), "docker.mac", ["no GPU"]),
    (changed(LINUX, way_out="169.254.3.4", cards=(NetworkCard(name="eth0", addresses=("169.254.3.4",)),)),
     "network.address", ["sudo dhclient -v"]),
    (changed(CONTAINER, way_out="", cards=(SIX,)), "network.address", ["cuadrilla up --listen '[fd77::5]'"]),
    (changed(LINUX, way_out="", cards=tuple(NetworkCard(name=f"eth{n}", addresses=(f"10.0.{n}.1",)) for n in (0, 1))),
     "network.address", ["is not known", "10.0.0.1, 10.0.1.1", "cuadrilla up --listen 10.0.0.1"]),
    (changed(LINUX, way_out="10.8.0.2", cards=(*LINUX.cards, VPN)), "network.address",
     ["others on the local network reach it at 192.168.1.20", "VPN too: cuadrilla up --listen 10.8.0.2"]),
    (open_at(LINUX, {}, port_state="taken"), "network.port", ["sudo ss -ltnp sport = :47470"]),
    *((open_at(LINUX, {"ufw": ACTIVE + row}), "network.ufw", ["failure", "sudo ufw allow 47470/tcp"])
      for row in ("22/tcp    ALLOW       Anywhere\n", "47470    DENY   Anywhere\n", "47470/udp  ALLOW  Any\n", "")),
    (open_at(LINUX, {"firewall-cmd": said("no", 1)}), "network.firewalld",
     ["sudo firewall-cmd --add-port=47470/tcp"]),
    (open_at(WINDOWS, {"netsh": said("No rules match the specified criteria.", 1)}), "network.windows_firewall",
     ["-LocalPort 47470", "administrator"]),
]  # fmt: skip


@pytest.mark.parametrize(("here", "check", "says"), SICK, ids=[f"{n}-{row[1]}" for n, row in enumerate(SICK)])
def test_a_fault_has_one_finding_with_its_command(here: Here, check: str, says: list[str]) -> None:
    found = only(here, check)
    text = f"{found.level} {found.cause} {found.remedy} {found.command} {found.shell}"
    assert [part for part in says if part not in text] == [], text


HEALTHY = [
    changed(LINUX, environ={"CUDA_VISIBLE_DEVICES": "-1"}, has_nvidia_driver=False),
    changed(WSL, facts={"memory_bytes": int(7.7 * GIB)}, programs={"powershell.exe": str(int(7.9 * GIB))}),
    open_at(WSL, {"netsh.exe": TABLE.format("172.30.98.229")}),
    open_at(WSL, {"powershell.exe": "47470"}, reachability=MIRRORED),
    changed(WSL, programs={"docker info": json.dumps({**INFO, "OperatingSystem": "Docker Desktop", "Runtimes": {}})}),
    changed(LINUX, programs={"docker info": PLAIN[:-1] + ', "DiscoveredDevices": [{"ID": "nvidia.com/gpu=all"}]}'}),
    open_at(LINUX, {}, way_out="10.8.0.2", cards=(VPN,), port_state="ours"),  # its owner has chosen
    changed(LINUX, cards=(*LINUX.cards, VPN)),  # only some addresses are reached over it
    *(open_at(LINUX, {"ufw": ACTIVE + row}) for row in (
        "47470/tcp   ALLOW  Anywhere\n", "47470    ALLOW IN   192.168.1.0/24\n", "Anywhere  ALLOW  10.0.0.0/8\n")),
    open_at(LINUX, {"ufw": said("ERROR: You need to be root to run this script", 1)}),
    open_at(LINUX, {"firewall-cmd": "yes"}),
    open_at(WINDOWS, {"netsh": "Nombre de regla:  cuadrilla\nPuerto local:     47470\n"}),
    changed(LINUX, environ={"CUDA_VISIBLE_DEVICES": "0"}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HEALTHY)))
def test_what_only_looks_like_a_fault_is_none(number: int) -> None:
    assert sick(HEALTHY[number]) == []


def test_what_this_machine_keeps(tmp_path: Path) -> None:
    """Where it is not there yet, it can be made; a file of that name is in the way."""
    found = here_module._read_folder(tmp_path / "a" / "b")
    assert (found.path, found.writable, found.free_bytes > 0) == (str(tmp_path / "a" / "b"), True, True)
    (tmp_path / "a").write_text("")
    assert here_module._read_folder(tmp_path / "a" / "b").writable is False


def test_every_check_is_tested() -> None:
    """A check that is added without a test of its own is noticed."""
    assert set(CHECKS) - {check for _, check, _ in SICK} == {"machine.system"}
