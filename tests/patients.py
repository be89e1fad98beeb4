"""Machines as `doctor` sees them: a healthy one of each kind, changes to them, and what `doctor` finds then."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cuadrilla.doctor.examine import examine
from cuadrilla.doctor.finding import Finding
from cuadrilla.doctor.here import Folder, Here
from cuadrilla.host.card import NetworkCard
from cuadrilla.host.devices import Device
from cuadrilla.host.facts import Facts
from cuadrilla.host.programs import NOT_FOUND, ProgramAnswer

GIB = 2**30
PORT = 47470
FACTS = Facts(
    system="Linux", system_version="Ubuntu 24.04.1 LTS", kernel="6.8.0-45-generic", machine="x86_64",
    wsl=None, container=None, processor="i9-13900K", cores=16, memory_bytes=32 * GIB,
    available_bytes=24 * GIB,
)  # fmt: skip
CPU = Device(kind="cpu", index=0, name="i9-13900K", torch_version="2.13.0+cu130")
CARD = Device(
    kind="cuda", index=0, name="RTX 4070 Ti", memory_bytes=12 * GIB, capability=(8, 9), driver="580.82.07",
    torch_version="2.13.0+cu130",
)  # fmt: skip
INFO: dict[str, Any] = {
    "ServerVersion": "28.2.2", "OperatingSystem": "Ubuntu 24.04.1 LTS", "Runtimes": {"nvidia": {}, "runc": {}}
}  # fmt: skip
NO_DAEMON = (
    "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?\n"
    '{"ID":"","Containers":0,"ServerErrors":["Cannot connect to the Docker daemon"]}'
)
FOLDER = Folder(path="/home/ana/run", device=1, free_bytes=300 * GIB)
Programs = Mapping[str, ProgramAnswer | str]
"""Answers of programs by the beginning of their command line: a text, or a failure. Other programs do not exist."""
WELL: Programs = {"docker info": json.dumps(INFO)}


def said(text: str, code: int | None = 0) -> ProgramAnswer:
    return ProgramAnswer(text=text, code=code)


GONE = said("", NOT_FOUND)


def runs(programs: Programs) -> Callable[..., ProgramAnswer]:
    def run(*argv: str) -> ProgramAnswer:
        typed = " ".join(argv)
        fits = [start for start in programs if typed.startswith(start)]
        answer = programs[max(fits, key=len)] if fits else GONE
        return ProgramAnswer(text=answer) if isinstance(answer, str) else answer

    return run


LINUX = Here(
    facts=FACTS, run=runs(WELL), devices=(CARD, CPU), folders=(FOLDER, FOLDER), way_out="192.168.1.20",
    has_nvidia_driver=True, cards=(NetworkCard(name="enp3s0", addresses=("192.168.1.20",)),),
)  # fmt: skip
WSL = replace(
    LINUX, facts=replace(FACTS, wsl=2, kernel="5.15.153.1-microsoft-standard-WSL2", memory_bytes=16 * GIB),
    way_out="172.30.98.229", cards=(NetworkCard(name="eth0", addresses=("172.30.98.229",)),), reachability="wsl-nat",
)  # fmt: skip
CONTAINER = replace(
    LINUX, facts=replace(FACTS, container="docker"), reachability="container", run=runs({}), devices=(CPU,)
)  # fmt: skip
MAC = replace(
    LINUX, facts=replace(FACTS, system="Darwin", system_version="15.1", machine="arm64"), run=runs({}),
    devices=(Device(kind="mps", index=0, name="Apple M2", memory_bytes=10 * GIB), CPU),
)  # fmt: skip
WINDOWS = replace(
    LINUX, facts=replace(FACTS, system="Windows", system_version="10.0.26100", machine="AMD64"), run=runs({})
)  # fmt: skip
KINDS = {"linux": LINUX, "wsl": WSL, "container": CONTAINER, "mac": MAC, "windows": WINDOWS}


def changed(
    here: Here, *, facts: Mapping[str, Any] | None = None, programs: Programs | None = None, **fields: Any
) -> Here:
    """A copy of the machine with changed `facts`, further `programs` and changed fields."""
    own = {} if here in (CONTAINER, MAC, WINDOWS) else WELL
    run = {"run": runs({**own, **programs})} if programs is not None else {}
    return replace(here, facts=replace(here.facts, **(facts or {})), **run, **fields)


def sick(here: Here) -> list[tuple[str, Finding]]:
    return [(name, found) for name, found in examine(here) if found.level != "ok"]


def only(here: Here, check: str) -> Finding:
    """The finding of this check, which must be the only one that is not ok."""
    found = sick(here)
    assert [name for name, _ in found] == [check], found
    return found[0][1]
