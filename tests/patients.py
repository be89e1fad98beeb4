"""Machines as `doctor` sees them, one healthy one of each kind; and what it finds when something of one is changed."""

import json
from dataclasses import replace

from cuadrilla.doctor.checks import examine
from cuadrilla.doctor.diagnosis import Diagnosis
from cuadrilla.doctor.facts import (
    DockerSide,
    Folder,
    Installation,
    NvidiaPrograms,
    Symptoms,
    WslSide,
)
from cuadrilla.doctor.programs import ProgramAnswer
from cuadrilla.host.card import NetworkCard
from cuadrilla.host.devices import Device
from cuadrilla.host.facts import Cpu, Facts
from cuadrilla.host.reachability import Reachability

GIB = 2**30
PORT = 47470
HOST = Facts(
    system="Linux", system_version="Ubuntu 24.04.1 LTS", kernel="6.8.0-45-generic", machine="x86_64", rosetta=False,
    wsl=None, container=None, cpu=Cpu(name="i9-13900K"), logical_cores=16, cpu_quota=None, memory_bytes=32 * GIB,
    available_bytes=24 * GIB, memory_limit_bytes=None, python_version="3.12.7",
)  # fmt: skip
CPU = Device(kind="cpu", index=0, name="i9-13900K", torch_version="2.13.0+cu130")
CARD = Device(
    kind="cuda", index=0, name="RTX 4070 Ti", memory_bytes=12 * GIB, capability=(8, 9), driver="580.82.07",
    torch_version="2.13.0+cu130",
)  # fmt: skip
SMI = ProgramAnswer(text="NVIDIA GeForce RTX 4070 Ti, 580.82.07, 8.9")
NO_DEVICES = ProgramAnswer(text="No devices were found", code=6)
INFO = {"ServerVersion": "28.2.2", "OperatingSystem": "Ubuntu 24.04.1 LTS", "Runtimes": {"nvidia": {}, "runc": {}}}
DOCKER = DockerSide(info=ProgramAnswer(text=json.dumps(INFO)), program="/usr/bin/docker")
NO_DAEMON = (
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?\n"
    '{"ID":"","Containers":0,"ServerErrors":["Cannot connect to the Docker daemon"]}'
)
LINUX = Symptoms(
    host=HOST, now=1.8e9, address="192.168.1.20", hostname="pc", hostname_leads_to=("127.0.1.1",),
    cards=(NetworkCard(name="enp3s0", addresses=("192.168.1.20",), is_default=True),),
    devices=(CARD, CPU), nvidia=NvidiaPrograms(smi=SMI), docker=DOCKER,
    folder=Folder(path="/home/ana/run", filesystem="ext4", total_bytes=900 * GIB, free_bytes=300 * GIB),
    home=Folder(path="/home/ana", filesystem="ext4", total_bytes=900 * GIB, free_bytes=300 * GIB),
    shm=Folder(path="/dev/shm", mount="/dev/shm", filesystem="tmpfs", total_bytes=16 * GIB, free_bytes=16 * GIB),
    swap_bytes=8 * GIB,
    installation=Installation(python="/home/ana/.venv/bin/python", torch_copies=(("2.13.0+cu130", "/x"),),
                              installed_at=1.79e9),
)  # fmt: skip
WSL = replace(
    LINUX, host=replace(HOST, wsl=2, kernel="5.15.153.1-microsoft-standard-WSL2", memory_bytes=16 * GIB),
    address="172.30.98.229", cards=(NetworkCard(name="eth0", addresses=("172.30.98.229",), is_default=True),),
    reachability=Reachability("wsl-nat", "in WSL2"), nvidia=NvidiaPrograms(smi=SMI, windows_smi=SMI),
    wsl=WslSide(windows_memory_bytes=32 * GIB),
)  # fmt: skip
CONTAINER = replace(
    LINUX, host=replace(HOST, container="docker"), reachability=Reachability("container", "in a container"),
    docker=DockerSide(), nvidia=NvidiaPrograms(), devices=(CPU,), hostname="3f2a9c1b", hostname_leads_to=None,
    shm=Folder(path="/dev/shm", mount="/dev/shm", filesystem="tmpfs", total_bytes=64 * 2**20),
)  # fmt: skip
MAC = replace(
    LINUX, host=replace(HOST, system="Darwin", system_version="15.1", machine="arm64"), docker=DockerSide(), shm=None,
    nvidia=NvidiaPrograms(), devices=(Device(kind="mps", index=0, name="Apple M2", memory_bytes=10 * GIB), CPU),
    hostname="Anas-MacBook-Air.local", hostname_leads_to=("192.168.1.31",),
)  # fmt: skip
WINDOWS = replace(
    LINUX, host=replace(HOST, system="Windows", system_version="10.0.26100", machine="AMD64"), docker=DockerSide(),
    shm=None, hostname_leads_to=("192.168.1.20",),
)  # fmt: skip
KINDS = {"linux": LINUX, "wsl": WSL, "container": CONTAINER, "mac": MAC, "windows": WINDOWS}


def sick(seen: Symptoms) -> list[tuple[str, Diagnosis]]:
    return [(name, found) for name, found in examine(seen) if found.level != "ok"]


def only(seen: Symptoms, check: str) -> Diagnosis:
    """What this check says; no other says anything."""
    found = sick(seen)
    assert [name for name, _ in found] == [check], found
    return found[0][1]


def said(text: str, code: int | None = 0) -> ProgramAnswer:
    return ProgramAnswer(text=text, code=code)
