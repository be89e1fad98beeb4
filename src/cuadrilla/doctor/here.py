"""What several checks read: this machine's facts, network cards and folders, and a way to ask its programs.

Everything is asked once, whoever wants it first, and with a time limit. Nothing here raises. torch is looked at in a
child process (`host/probe.py`).
"""

import os
import platform
import shutil
import socket
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from cuadrilla.doctor.child import SPEED_BYTES, child_argv, own_port
from cuadrilla.doctor.diagnosis import as_root
from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.host import programs
from cuadrilla.host.card import NetworkCard, read_cards, way_out
from cuadrilla.host.devices import Device, probe_devices
from cuadrilla.host.facts import Facts, read_facts
from cuadrilla.host.programs import ProgramAnswer
from cuadrilla.host.reachability import Reachability, read_reachability
from cuadrilla.host.room import is_slow, mount_of
from cuadrilla.link.address import local_address

DEVICES_SECONDS = 30.0
PROGRAM_SECONDS = 15.0
"""The first program of Windows that WSL starts takes some."""
HOME_SECONDS = 5.0
Result = TypeVar("Result")


Run = Callable[..., ProgramAnswer | None]
"""Asks a program (`run("ufw", "status")`); None where there is no such program."""


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder and the file system that holds it. `read_bytes_per_second` is measured where that may be slow."""

    path: str
    mount: str = "/"
    filesystem: str = ""
    total_bytes: int | None = None
    free_bytes: int | None = None
    free_files: int | None = None
    """How many more it takes (inodes), where it counts them."""
    writable: bool | None = None
    read_bytes_per_second: float | None = None


@dataclass(frozen=True, kw_only=True)
class Here:
    """One machine. `port`: the one that others are to reach here, if it is to coordinate."""

    host: Facts
    run: Run
    devices: Callable[[], Sequence[Device]]
    folders: Callable[[], tuple[Folder, Folder, Folder]]
    """Where the user is, the home folder, and what this machine keeps for all runs (CUADRILLA_HOME)."""
    reachability: Callable[[], Reachability] = lambda: "plain"
    port: int | None = None
    port_state: Literal["free", "taken", "ours"] = "free"
    """`ours`: this machine's coordinator listens there."""
    is_root: bool = False
    environ: Mapping[str, str] = field(default_factory=dict)
    cards: tuple[NetworkCard, ...] = ()
    home_answers: bool = True
    """Whether the folder of what this machine keeps, on a file system that may hang, has answered."""
    way_out: str = ""
    """The address that it dials other networks from: with a VPN, another one than others find it at."""

    @property
    def address(self) -> str:
        """Where the machines beside this one find it; "" if there is none, or several and nothing to choose by."""
        try:
            return local_address(self.way_out, self.cards)
        except LinkError:
            return ""

    def as_root(self, command: str) -> str:
        """With `sudo` in front for whoever is not root."""
        return as_root(command, is_root=self.is_root)


def this_machine(*, port: int | None = None, devices_seconds: float = DEVICES_SECONDS) -> Here:
    once = Once()
    ours, home_answers = open_port()
    port = ours if port is None else port
    host, out, cards = read_facts(), way_out(), read_cards()
    here = Here(
        host=host,
        run=lambda *argv: once(argv, lambda: programs.run(argv, seconds=PROGRAM_SECONDS)),
        devices=lambda: once("devices", lambda: probe_devices(timeout_seconds=devices_seconds)),
        folders=lambda: once("folders", lambda: read_folders(host)),
        reachability=lambda: once("reachability", lambda: read_reachability(here.address, system=host.system)),
        port=port,
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
        environ=dict(os.environ),
        cards=cards,
        way_out=out,
        home_answers=home_answers,
    )
    if port is None:
        return here
    state: Literal["free", "taken", "ours"] = (
        "ours" if port == ours else "taken" if is_taken(here.address, port) else "free"
    )
    return replace(here, port_state=state)


class Once:
    """Asks each question once; who asks it again waits for the same answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._known: dict[Hashable, Any] = {}

    def __call__(self, name: Hashable, read: Callable[[], Result]) -> Result:
        with self._lock:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            if name not in self._known:
                self._known[name] = read()
            result: Result = self._known[name]
        return result


def read_folders(host: Facts) -> tuple[Folder, Folder, Folder]:
    """The folders of `Here`."""
    try:
        home = Path.home()
    except RuntimeError:  # a user without one
        home = Path("/")
    try:
        folder = Path.cwd()
    except OSError:  # it has been deleted
        folder = home
    return read_folder(folder), read_folder(home, measured=host.wsl is not None), read_kept()


def read_folder(path: Path, *, measured: bool = False) -> Folder:
    """What holds a folder. A file system that may be slow, or hang, is looked at in a child process and measured."""
    mount, filesystem = mount_of(str(path))
    folder = Folder(path=str(path), mount=mount, filesystem=filesystem)
    if measured or is_slow(filesystem):
        total, free, rate = parse_speed(programs.run(child_argv("speed", str(path)), seconds=PROGRAM_SECONDS))
        return replace(folder, total_bytes=total, free_bytes=free, read_bytes_per_second=rate)
    try:
        usage = shutil.disk_usage(path)
        found = os.statvfs(path) if hasattr(os, "statvfs") else None
    except OSError:
        return folder
    return replace(
        folder,
        total_bytes=usage.total,
        free_bytes=usage.free,
        free_files=found.f_favail if found and found.f_files else None,  # btrfs and Windows do not count them
        writable=os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids),
    )


def read_kept() -> Folder:
    """`CUADRILLA_HOME`, or where it would be. While it is not there: what it would be made in."""
    path = Path(os.path.abspath(Home.of_user().path))
    mount, filesystem = mount_of(str(path))
    if is_slow(filesystem):  # it may hang
        return Folder(path=str(path), mount=mount, filesystem=filesystem)
    there = next(each for each in (path, *path.parents) if os.path.lexists(each))
    folder = replace(read_folder(there), path=str(path))
    return folder if there.is_dir() else replace(folder, writable=False)


def parse_speed(said: ProgramAnswer | None) -> tuple[int | None, int | None, float | None]:
    """All and free bytes, bytes read per second (None where nothing may be written)."""
    words = said.text.split() if said else []
    numbers = [int(word) for word in words if word.isdigit()]
    if said is not None and said.code is None:  # what would just have been enough
        numbers = [*numbers, int(SPEED_BYTES / PROGRAM_SECONDS)] if len(numbers) == 2 else [0, 0, 0]
    total, free, speed = (*numbers, None, None, None)[:3]
    return total or None, free if total else None, speed


def is_taken(address: str, port: int) -> bool:
    """Whether another program listens on the port. Nothing is opened: a socket that is bound does not listen."""
    with socket.socket() as probe:
        if platform.system() != "Windows":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of yesterday's connections is free
        try:
            probe.bind((address or "127.0.0.1", port))
        except OSError:
            return True
    return False


def open_port() -> tuple[int | None, bool]:
    """The port of the coordinator that runs on this machine, and whether the home folder has answered."""
    if not is_slow(mount_of(os.path.abspath(Home.of_user().path))[1]):
        return own_port(), True
    said = programs.run(child_argv("port"), seconds=HOME_SECONDS)  # in a child: a thread of ours could be held for ever
    port = int(said.text) if said and said.ok and said.text.isdigit() else None
    return port, said is None or said.code is not None
