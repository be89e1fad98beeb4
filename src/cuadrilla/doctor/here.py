"""The facts that the checks read of this machine. Programs are asked with a time limit; nothing here raises."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import psutil

from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.host import programs
from cuadrilla.host.card import NetworkCard, Reachability, read_cards, read_reachability, way_out
from cuadrilla.host.devices import Device, probe_devices
from cuadrilla.host.facts import Facts, read_facts
from cuadrilla.host.gpus import has_driver
from cuadrilla.host.programs import ProgramAnswer
from cuadrilla.link.address import Address, check_free, local_address

DEVICES_SECONDS = 60.0
PROGRAM_SECONDS = 15.0
"""Time limit for a program. The first program of Windows that WSL starts takes some seconds."""
PortState = Literal["free", "taken", "ours"]
"""`ours`: this machine's coordinator listens there; `taken`: another program does."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """`device`: the number of the file system that holds the folder."""

    path: str
    device: int
    free_bytes: int
    writable: bool = True


@dataclass(frozen=True, kw_only=True)
class Here:
    """One machine. `port`: the port that others must reach here, if this machine is to coordinate."""

    facts: Facts
    run: Callable[..., ProgramAnswer]
    """Runs a program with a time limit: `run("ufw", "status")`."""
    devices: Sequence[Device]
    folders: Sequence[Folder]
    """The working directory, and CUADRILLA_HOME."""
    reachability: Reachability = "plain"
    has_nvidia_driver: bool = False
    port: int | None = None
    port_state: PortState = "free"
    is_root: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    cards: tuple[NetworkCard, ...] = ()
    way_out: str = ""
    """The address from which it dials other networks. With a VPN, others find it at a different one."""

    @property
    def address(self) -> str:
        """Its address on the local network; "" if it has none, or several and no reason to choose one."""
        try:
            return local_address(self.way_out, self.cards)
        except LinkError:
            return ""

    def as_root(self, command: str) -> str:
        """The command, with `sudo` in front for a user who is not root."""
        return command if self.is_root else f"sudo {command}"


def this_machine(*, port: int | None = None) -> Here:
    ours = _own_port()
    here = Here(
        facts=read_facts(),
        run=lambda *argv: programs.run(argv, seconds=PROGRAM_SECONDS),
        devices=probe_devices(timeout_seconds=DEVICES_SECONDS),
        folders=[_read_folder(path) for path in (Path(os.curdir).absolute(), Home.of_user().path.absolute())],
        has_nvidia_driver=has_driver(),
        port=port or ours,
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
        environ=dict(os.environ),
        cards=read_cards(),
        way_out=way_out(),
    )
    return replace(
        here,
        reachability=read_reachability(here.address, facts=here.facts),
        port_state="ours" if ours and here.port == ours else _port_state(here.address, here.port),
    )


def _own_port() -> int | None:
    """The port of the coordinator that runs on this machine."""
    try:
        return Address.parse(str(Home.of_user().open_crew().get("address"))).port
    except LinkError:
        return None


def _read_folder(path: Path) -> Folder:
    """The folder's state; if it does not exist, the state of the folder in which it would be made."""
    there = next(each for each in (path, *path.parents) if os.path.exists(each))
    writable = there.is_dir() and os.access(there, os.W_OK)
    free = psutil.disk_usage(str(there)).free
    return Folder(path=str(path), device=there.stat().st_dev, free_bytes=free, writable=writable)


def _port_state(address: str, port: int | None) -> PortState:
    try:
        if port is not None:
            check_free(str(Address(address or "127.0.0.1", port)))
    except LinkError:
        return "taken"
    return "free"
