"""Each check of `doctor`, on the texts that real programs print: what it says when they are there, and silence else.

The texts are those of `docker`, `nvidia-smi`, `netsh`, `ufw`, ... as their documentation and their users' reports show
them; a healthy machine of each kind gets no finding at all.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cuadrilla.doctor import machine, nvidia, wsl
from cuadrilla.doctor.examine import CHECKS, examine
from cuadrilla.doctor.here import Folder, Here, Once, parse_speed, read_kept
from cuadrilla.host.card import NetworkCard
from cuadrilla.host.programs import decoded
from cuadrilla.host.room import parse_mounts
from cuadrilla.messages import Message, shown
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
    MAC,
    NO_DAEMON,
    NO_DEVICES,
    PORT,
    SMI,
    WINDOWS,
    WSL,
    changed,
    only,
    said,
    sick,
)  # fmt: skip

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_machine_gets_no_finding(kind: str) -> None:
    assert sick(KINDS[kind]) == []
    assert {name for name, _ in examine(KINDS[kind])} >= {"machine.system", "nvidia.torch", "machine.disk"}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_known_is_no_finding(kind: str) -> None:
    """Where nothing could be found out nothing is said to be wrong, but for the network, of which there is none."""
    empty = Folder(path="/x")
    unknown = changed(
        KINDS[kind], programs={**GONE, "nvidia-smi.exe": None}, devices=(), folders=(empty, empty, empty), cards=(),
        way_out="", reachability="plain",
    )  # fmt: skip
    assert {name for name, _ in sick(unknown)} <= {"network.address"}


HINT = 'pip install "torch==2.13.0+cu126" --index-url https://download.pytorch.org/whl/cu126'
NO_KERNELS = Message("PyTorch {version} has no kernels for compute capability {capability} ({kernels})",
                     version="2.13.0+cu130", capability="6.1", kernels="sm_75, sm_80")  # fmt: skip
OLD_CARD = replace(CARD, name="GTX 1080 Ti", capability=(6, 1), error=NO_KERNELS, hint=HINT)
UNLOADED = replace(CPU, error=Message("PyTorch cannot be loaded: {reason}", reason="libcudart.so.13"), hint="x")
LISTED = (
    "ii libnvidia-compute-535\nrc nvidia-driver-470\nun nvidia-driver-390\nii nvidia-driver-535\n"
    "dpkg-query: no packages found matching cuda-drivers*\n"
)
MISMATCH = said("Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.82", 18)
UNLOADED_DRIVER = said("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure", 9)
FALLEN = said("Unable to determine the device handle for GPU0: 0000:01:00.0: Unknown Error", 255)
HANGS = said("", None)
NO_DOCKER = {"docker info": None}
DENIED = said("permission denied while trying to connect to the Docker daemon socket", 1)
PLAIN = json.dumps({**INFO, "Runtimes": {"runc": {}}})
FULL = replace(FOLDER, free_bytes=GIB // 2, mount="/home")
LOCKED = replace(FOLDER, writable=False)
TMPFS = Folder(path="/mnt/x/a", mount="/mnt/x", filesystem="tmpfs", total_bytes=2**23, free_bytes=0)
NAS = Folder(path="/nas/run", mount="/nas", filesystem="nfs4", read_bytes_per_second=11e6)
MNT_C = Folder(path="/mnt/c/Users/ana/run", mount="/mnt/c", filesystem="9p", read_bytes_per_second=61e6)
WSL_HOME = replace(FOLDER, path="/home/ana", read_bytes_per_second=1.9e9)
TABLE = (
    "\nEscuchar en ipv4:             Conectar a ipv4:\n\nDirección       Puerto      Dirección       Puerto\n"
    "--------------- ----------  --------------- ----------\n192.168.1.50    47470       {}    47470\n"
)
MIRRORED = "wsl-mirrored"
VPN = NetworkCard(name="tun0", addresses=("10.8.0.2",), has_router=True, is_tunnel=True)
SIX = NetworkCard(name="enp3s0", addresses=("2001:db8::5", "fd77::5", "fe80::1"))
ACTIVE = "Status: active\n\nTo                         Action      From\n--                         ------      ----\n"
MAC_FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


def with_memory(here: Here, have: float, free: float = 1.0) -> Here:
    return changed(here, host={"memory_bytes": int(have * GIB), "available_bytes": int(free * GIB)})


def open_at(here: Here, programs: dict[str, Any], **fields: Any) -> Here:
    return changed(here, programs=programs, port=PORT, **fields)


SICK = [
    (changed(LINUX, devices=(OLD_CARD, CPU)), "nvidia.cards",
     [f"failure cuda:0 GTX 1080 Ti: {NO_KERNELS}", f"{sys.executable} -m {HINT}"]),
    (changed(LINUX, devices=(CARD, UNLOADED)), "nvidia.torch", ["failure", "-m pip install --force-reinstall torch"]),
    *((changed(LINUX, devices=(replace(CPU, torch_version=version),)), "nvidia.torch", ["failure", end])
      for version, end in (("2.9.1+cu118", '"torch>=2.10"'), ("2.5.0+cpu", "/whl/cpu"), ("1.13.1", "torch>=2.10"))),
    (changed(LINUX, devices=(replace(CARD, torch_version="2.9.1"), replace(CPU, torch_version="2.9.1"))),
     "nvidia.torch", ["/whl/cu130"]),
    (changed(WSL, programs={"nvidia-smi": NO_DEVICES}), "nvidia.driver",
     ["NVIDIA GeForce RTX 4070 Ti", "wsl --shutdown powershell"]),
    (changed(WSL, programs={"nvidia-smi": NO_DEVICES, "nvidia-smi.exe": NO_DEVICES}), "nvidia.driver",
     ["nvidia-smi.exe"]),
    (changed(WSL, programs={"nvidia-smi": None}), "nvidia.wsl_driver", ["wsl --update"]),
    (changed(WSL, programs={"dpkg-query": LISTED}), "nvidia.wsl_driver",
     ["sudo apt-get purge -y libnvidia-compute-535 nvidia-driver-535"]),
    (changed(WSL, programs={"nvidia-smi": None, "nvidia-smi.exe": SMI, nvidia.WSL_NVIDIA_SMI: SMI}),
     "nvidia.wsl_driver", ["export PATH=$PATH:/usr/lib/wsl/lib"]),
    (changed(LINUX, programs={**NO_DOCKER, "nvidia-smi": MISMATCH}), "nvidia.driver", ["failure", "sudo reboot"]),
    (changed(LINUX, programs={**NO_DOCKER, "nvidia-smi": UNLOADED_DRIVER}), "nvidia.driver",
     ["sudo ubuntu-drivers install"]),
    (changed(LINUX, host={"system_version": "Debian 13"}, programs={"nvidia-smi": UNLOADED_DRIVER}), "nvidia.driver",
     ["sudo dkms autoinstall"]),
    (changed(LINUX, programs={"nvidia-smi": FALLEN}), "nvidia.driver", ["sudo reboot"]),
    (changed(LINUX, programs={"nvidia-smi": HANGS}), "nvidia.driver", ["the driver hangs", "sudo reboot"]),
    (changed(WSL, programs={"nvidia-smi": HANGS}), "nvidia.driver", ["wsl --shutdown powershell"]),
    (changed(CONTAINER, programs={"nvidia-smi": FALLEN}), "nvidia.driver", ["docker restart NAME host"]),
    *((changed(LINUX, environ={"CUDA_VISIBLE_DEVICES": value}), "nvidia.hidden", ["unset CUDA_VISIBLE_DEVICES"])
      for value in ("", "-1")),
    (changed(LINUX, folders=(FULL, replace(FULL, path="/home/ana"), FOLDER)), "machine.disk",
     ["failure", "du -xhd1 /home | sort -h | tail"]),
    (changed(LINUX, folders=(replace(FULL, free_bytes=3 * GIB), FOLDER, FOLDER)), "machine.disk", ["warning"]),
    (changed(LINUX, folders=(TMPFS, FOLDER, FOLDER)), "machine.disk", ["sudo mount -o remount,size=6G /mnt/x"]),
    (changed(LINUX, folders=(replace(FOLDER, free_files=12), FOLDER, FOLDER)), "machine.files",
     ["failure /home/ana/run takes 12 more files (inodes)", "du --inodes -xd1 / | sort -n | tail"]),
    (changed(LINUX, folders=(FOLDER, LOCKED, LOCKED)), "machine.files", ["export CUADRILLA_HOME="]),
    (changed(LINUX, folders=(FOLDER, FOLDER, LOCKED), environ={"CUADRILLA_HOME": "/a"}), "machine.files",
     ["unset CUADRILLA_HOME"]),
    (changed(LINUX, folders=(LOCKED, FOLDER, FOLDER)), "machine.files", ["warning", "cd ~"]),
    (changed(LINUX, home_answers=False), "machine.files", ["does not answer", "df"]),
    (changed(LINUX, folders=(NAS, FOLDER, FOLDER)), "machine.slow_folder", ["(nfs4) reads 11 MB/s"]),
    (changed(WSL, folders=(MNT_C, WSL_HOME, FOLDER)), "machine.slow_folder",
     ["/mnt/c/Users/ana/run is a folder of Windows: it reads 61 MB/s, and /home/ana 1900 MB/s", "cd ~"]),
    (changed(WSL, folders=(replace(MNT_C, read_bytes_per_second=None), WSL_HOME, FOLDER)), "machine.slow_folder",
     ["ten times slower"]),
    (with_memory(LINUX, 1.9), "machine.memory", ["failure"]),
    (with_memory(LINUX, 16, 0.3), "machine.memory", ["warning", "ps -eo"]),
    (changed(CONTAINER, host={"memory_limit_bytes": GIB}), "machine.memory", ["docker run --memory"]),
    *((changed(LINUX, environ={name: value}), "machine.variables", [f"{name}={value}", f"unset {name}"])
      for name, value in (("GLOO_SOCKET_IFNAME", "eth99"), ("TMPDIR", "/gone"), ("NCCL_SOCKET_IFNAME", "wlan"),
                          ("OMP_NUM_THREADS", "0"))),
    (changed(MAC, host={"rosetta": True, "machine": "x86_64"}), "mac.python", ["arch -arm64"]),
    (changed(MAC, host={"machine": "x86_64"}), "mac.python", ["failure"]),
    (changed(MAC, host={"system_version": "13.6"}), "mac.system", ["softwareupdate --install --all"]),
    (changed(WSL, host={"wsl": 1}, environ={"WSL_DISTRO_NAME": "Debian"}), "wsl.version",
     ["wsl --set-version Debian 2"]),
    (changed(WSL, host={"memory_bytes": int(7.7 * GIB)}, programs={"powershell.exe": str(16 * GIB)}), "wsl.memory",
     ["memory=12GB", "notepad $env:USERPROFILE\\.wslconfig powershell"]),
    (open_at(WSL, {}), "wsl.network", [
        "netsh interface portproxy add v4tov4 listenaddress=WINDOWS_ADDRESS listenport=47470 "
        "connectaddress=172.30.98.229 connectport=47470; New-NetFirewallRule -DisplayName cuadrilla "
        "-Direction Inbound -Action Allow -Protocol TCP -LocalPort 47470 -Profile Private administrator"]),
    (open_at(WSL, {"netsh.exe": TABLE.format("172.19.4.7")}), "wsl.stale",
     ["netsh interface portproxy set v4tov4 listenaddress=192.168.1.50 listenport=47470 "
      "connectaddress=172.30.98.229 connectport=47470"]),
    *((open_at(WSL, {"powershell.exe": ports}, reachability=MIRRORED), "wsl.network", ["-LocalPorts 47470"])
      for ports in ("80\n443", "", said("denied", 1), None)),
    (changed(LINUX, programs={"docker info": said(NO_DAEMON, 1)}), "docker.service", ["warning", "docker"]),
    (changed(LINUX, programs={"docker info": said(NO_DAEMON, 1)}, environ={"DOCKER_HOST": "tcp://10.0.0.9:2375"}),
     "docker.service", ["unset DOCKER_HOST"]),
    (changed(LINUX, programs={"docker info": DENIED}), "docker.service", ["sudo usermod -aG docker $USER"]),
    (changed(LINUX, programs={"docker info": HANGS}), "docker.service", ["does not answer", "restart"]),
    (changed(MAC, programs={"docker info": said(NO_DAEMON, 1)}), "docker.service", ["open -a Docker"]),
    (changed(LINUX, programs={"docker info": PLAIN}), "docker.cards", ["nvidia-c"]),
    (changed(CONTAINER, host={"machine": "aarch64", "kernel": "6.10.14-linuxkit"}), "docker.mac_host", ["no GPU"]),
    (changed(LINUX, way_out="", cards=()), "network.address", ["warning", "is not known"]),
    (changed(LINUX, way_out="169.254.3.4", cards=(NetworkCard(name="eth0", addresses=("169.254.3.4",)),)),
     "network.address", ["sudo dhclient -v"]),
    (changed(LINUX, way_out="", cards=(SIX,)), "network.address",
     ["is not known", "cuadrilla up --listen '[fd77::5]'"]),
    (changed(CONTAINER, way_out="", cards=(SIX,)), "network.address", ["cuadrilla up --listen '[fd77::5]'"]),
    (changed(LINUX, way_out="", cards=tuple(NetworkCard(name=f"eth{n}", addresses=(f"10.0.{n}.1",)) for n in (0, 1))),
     "network.address", ["is not known", "10.0.0.1, 10.0.1.1", "cuadrilla up --listen 10.0.0.1"]),
    (changed(LINUX, way_out="10.8.0.2", cards=(VPN,)), "network.address",
     ["only a VPN", "cuadrilla up --listen 10.8.0.2"]),
    (changed(LINUX, way_out="10.8.0.2", cards=(*LINUX.cards, VPN)), "network.vpn",
     ["others on the local network reach it at 192.168.1.20", "VPN too: cuadrilla up --listen 10.8.0.2"]),
    (changed(LINUX, cards=(replace(LINUX.cards[0], mtu=576),)), "network.mtu",
     ["sudo ip link set dev enp3s0 mtu 1500"]),
    (open_at(LINUX, {}, port_state="taken"), "network.port", ["sudo ss -ltnp sport = :47470"]),
    *((open_at(LINUX, {"ufw": ACTIVE + row}), "network.ufw", ["failure", "sudo ufw allow 47470/tcp"])
      for row in ("22/tcp    ALLOW       Anywhere\n", "47470    DENY   Anywhere\n", "47470/udp  ALLOW  Any\n", "")),
    (open_at(LINUX, {"firewall-cmd": "22/tcp 8000-8100/tcp"}), "network.firewalld",
     ["sudo firewall-cmd --add-port=47470/tcp"]),
    (open_at(WINDOWS, {"netsh": said("No rules match the specified criteria.", 1)}), "network.windows_firewall",
     ["-LocalPort 47470", "administrator"]),
    (open_at(MAC, {f"{MAC_FIREWALL} --getglobalstate": "Firewall is enabled. (State = 1)",
                   f"{MAC_FIREWALL} --getapp": "not part of the firewall"}), "network.mac_firewall",
     [f"--unblockapp {sys.executable}"]),
]  # fmt: skip


@pytest.mark.parametrize(("here", "check", "says"), SICK, ids=[f"{n}-{row[1]}" for n, row in enumerate(SICK)])
def test_a_fault_has_one_finding_with_its_command(here: Here, check: str, says: list[str]) -> None:
    found = only(here, check)
    text = f"{found.level} {found.cause} {found.remedy} {found.command} {found.shell}"
    assert [part for part in says if part not in text] == [], text


HEALTHY = [
    changed(LINUX, programs={"dpkg-query": LISTED}),  # there a Linux driver belongs
    changed(LINUX, devices=(replace(OLD_CARD, error=None, hint=""), CPU)),
    changed(LINUX, devices=(replace(CPU, torch_version="2.10.0+cpu"),)),
    changed(LINUX, environ={"CUDA_VISIBLE_DEVICES": "0"}),
    changed(LINUX, environ={"CUDA_VISIBLE_DEVICES": "-1"}, programs={"nvidia-smi": None}),
    changed(CONTAINER, programs={"nvidia-smi": said((Path(__file__).parents[2] / "docker/nvidia-smi").read_text(), 1)}),
    changed(LINUX, folders=(replace(NAS, read_bytes_per_second=110e6), FOLDER, FOLDER)),
    changed(WSL, folders=(WSL_HOME, WSL_HOME, FOLDER)),
    changed(WSL, host={"memory_bytes": int(7.7 * GIB)}),  # what Windows has is not known
    changed(WSL, host={"memory_bytes": int(7.7 * GIB)}, programs={"powershell.exe": str(int(7.9 * GIB))}),
    open_at(WSL, {"netsh.exe": TABLE.format("172.30.98.229")}),
    changed(WSL, programs={"netsh.exe": TABLE.format("192.168.1.77")}),  # a forward to another machine is the owner's
    *(open_at(WSL, {"powershell.exe": ports}, reachability=MIRRORED) for ports in ("47470", "47000-48000", "Any")),
    changed(WSL, reachability=MIRRORED),
    changed(LINUX, programs={"docker info": "WARNING: No swap limit support\n" + json.dumps(INFO)}),
    changed(LINUX, programs={"docker info": PLAIN, "nvidia-smi": None}),  # there is no card
    changed(WSL, programs={"docker info": json.dumps({**INFO, "OperatingSystem": "Docker Desktop", "Runtimes": {}})}),
    changed(LINUX, programs={"docker info": PLAIN[:-1] + ', "DiscoveredDevices": [{"ID": "nvidia.com/gpu=all"}]}'}),
    open_at(CONTAINER, {}),
    changed(CONTAINER, host={"machine": "aarch64", "kernel": "6.8.0-1010-raspi"}),
    open_at(LINUX, {}, way_out="10.8.0.2", cards=(VPN,), port_state="ours"),  # its owner has chosen
    changed(LINUX, cards=(*LINUX.cards, VPN)),  # only some addresses are reached over it
    changed(LINUX, cards=(*LINUX.cards, NetworkCard(name="lo", addresses=("127.0.0.1",), mtu=500))),
    *(open_at(LINUX, {"ufw": ACTIVE + row}) for row in (
        "47470/tcp   ALLOW  Anywhere\n", "47000:48000/tcp   ALLOW  192.168.1.0/24\n", "Anywhere  ALLOW  10.0.0.0/8\n")),
    open_at(LINUX, {"ufw": said("ERROR: You need to be root to run this script", 1)}),
    open_at(LINUX, {"ufw": "Status: inactive"}),
    changed(LINUX, programs={"ufw": ACTIVE}),
    open_at(LINUX, {"firewall-cmd": "47470/tcp"}),
    open_at(LINUX, {"firewall-cmd": said("FirewallD is not running", 252)}),
    open_at(WINDOWS, {"netsh": "Nombre de regla:  cuadrilla\nPuerto local:     47470\n"}),
    open_at(MAC, {f"{MAC_FIREWALL} --getglobalstate": "Firewall is disabled. (State = 0)"}),
    open_at(MAC, {f"{MAC_FIREWALL} --getglobalstate": "Firewall is enabled. (State = 1)",
                  f"{MAC_FIREWALL} --getapp": "Incoming connections to the application are permitted"}),
    *(changed(LINUX, environ={name: value}) for name, value in (
        ("GLOO_SOCKET_IFNAME", "enp3s0"), ("NCCL_SOCKET_IFNAME", "enp"), ("OMP_NUM_THREADS", "4,2"))),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(HEALTHY)))
def test_what_only_looks_like_a_fault_is_none(number: int) -> None:
    assert sick(HEALTHY[number]) == []


def test_two_torches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(folder: str, **environ: str) -> str:
        copies = [("2.9.0", folder), ("2.13.0+cpu", "/x")]
        (only_one,) = nvidia.torch(changed(LINUX, environ=environ), copies=lambda: copies)
        return only_one.command

    assert found("/home/ana/.local/lib").endswith("-m pip uninstall -y torch")
    assert found("/opt/old/", PYTHONPATH="/opt/old:/y") == "unset PYTHONPATH"
    info = tmp_path / "torch-2.9.0.dist-info"  # of the second one only what an installation writes down
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    before = nvidia.torch_copies()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert nvidia.torch_copies() == [("2.9.0", str(tmp_path)), *before]


def test_what_is_read_of_this_machine(tmp_path: Path) -> None:
    (battery,) = machine.power(LINUX, battery=lambda: (61.0, True))
    assert battery.cause == "on battery (61 %): slower, and not for long"
    assert [*machine.power(LINUX, battery=lambda: (61.0, False))] == []
    (clock,) = machine.clock(LINUX, now=lambda: 0.0)
    assert clock.level == "failure"
    assert "days before cuadrilla was installed" in clock.cause
    assert [*machine.clock(LINUX)] == []
    (new,) = machine.python(LINUX, installed=lambda: ((3, 15), False))
    (systems,) = machine.python(LINUX, installed=lambda: ((3, 12), True))
    assert ("3.15" in new.cause, systems.command) == (True, "make setup")
    settings = tmp_path / "mnt/c/Users/ana/.wslconfig"
    settings.parent.mkdir(parents=True)
    settings.write_text("[wsl2]\nmemory=8GB\n[experimental]\n")
    small = changed(WSL, host={"memory_bytes": 7 * GIB}, programs={"powershell.exe": str(16 * GIB)})
    assert next(wsl.memory(small, root=tmp_path)).level == "ok"  # its owner has decided


def test_what_this_machine_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not there yet, it can be made; a file of that name is in the way."""
    monkeypatch.setenv("CUADRILLA_HOME", str(tmp_path / "a" / "b"))
    found = read_kept()
    assert (found.path, found.writable) == (str(tmp_path / "a" / "b"), True)
    assert found.free_bytes
    (tmp_path / "a").write_text("")
    assert read_kept().writable is False


def test_a_mount_is_found_by_its_longest_name() -> None:
    mounts = (
        "overlay / overlay rw 0 0\nC:\\134 /mnt/c 9p rw,aname=drvfs 0 0\ntmpfs /mnt/with\\040space tmpfs rw 0 0\n"
        "/dev/sdb /home ext4 rw 0 0\nbroken\n"
    )
    assert parse_mounts(mounts, "/mnt/c/Users") == ("/mnt/c", "9p")
    assert parse_mounts(mounts, "/mnt/cc") == ("/", "overlay")
    assert parse_mounts(mounts, "/mnt/with space/x") == ("/mnt/with space", "tmpfs")
    assert parse_mounts("", "/x") == ("/", "")


def test_a_speed_that_was_not_reached() -> None:
    assert parse_speed(said("100 50\n8000")) == (100, 50, 8000)
    assert parse_speed(said("100 50\nRead-only file system", 1)) == (100, 50, None)
    total, _, speed = parse_speed(said("100 50", None))
    assert (total, 0 < (speed or 0) < 2e6) == (100, True)
    assert parse_speed(said("", None)) == (None, None, 0)
    assert parse_speed(None) == (None, None, None)


def test_what_windows_programs_write() -> None:
    assert decoded("nat\r\n".encode("utf-16-le")) == "nat"
    assert decoded("\ufeffmirrored\r\n".encode()) == "mirrored"


def test_a_question_is_asked_once() -> None:
    once, asked = Once(), []
    assert [once("a", lambda: asked.append(1) or len(asked)) for _ in range(3)] == [1, 1, 1]


def test_every_check_is_tested() -> None:
    """A check that is added without a test of its own is noticed."""
    direct = {"machine.system", "machine.python", "machine.shm", "machine.power", "machine.clock"}
    assert set(CHECKS) - {check for _, check, _ in SICK} == direct


def test_what_is_told_is_told_in_both_languages() -> None:
    found = dict(examine(changed(LINUX, folders=(replace(FOLDER, free_bytes=3 * GIB), FOLDER, FOLDER))))
    disk, system = found["machine.disk"], found["machine.system"]
    assert (disk.cause, system.cause[-8:]) == ("/home/ana/run has 3.0 GiB left", "16 cores")
    assert "3,0 GiB" in shown(disk.cause, "es")
    assert shown(disk.remedy, "es") == "esto muestra qué ocupa el sitio; borra lo que no necesites"
    assert shown(system.cause, "es").endswith("16 núcleos")  # a message in a message
