"""Where this machine sits on the network: whether others can dial the address it has, and what helps if they cannot.

A coordinator needs one port that other machines reach. WSL2 in its default mode and most containers have an address
that only their host knows. What to type there comes from Microsoft's networking page (learn.microsoft.com/windows/wsl)
and Docker's page on publishing ports; it was not run on Windows.

`read_reachability` is the only I/O; nothing here raises, and what cannot be found out counts as a plain machine.
"""

import configparser
import ipaddress
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cuadrilla.host.facts import parse_container, parse_wsl, read_text
from cuadrilla.messages import Message

Kind = Literal["plain", "wsl-nat", "wsl-mirrored", "container"]
BEHIND_A_HOST = ("docker", "podman", "containerd", "oci")  # system containers (lxc) are mostly on the LAN themselves
WSL_NAT = ipaddress.ip_network("172.16.0.0/12")
WSL_CREATOR = "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"  # how the Hyper-V firewall names all WSL machines
WSLINFO_SECONDS = 5.0
WINDOWS, HOST = "WINDOWS_ADDRESS", "HOST_ADDRESS"  # to be replaced by who types it


@dataclass(frozen=True)
class Reachability:
    """`noticed` says what it was recognised by; empty for a plain machine."""

    kind: Kind
    noticed: str = ""

    @property
    def hidden(self) -> bool:
        """Whether other machines cannot dial this machine's own address."""
        return self.kind in ("wsl-nat", "container")


def read_reachability(
    address: str,
    *,
    system: str,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    mode: str | None = None,
) -> Reachability:
    """How a machine is placed that others would dial at `address`.

    `mode` is the answer of `wslinfo --networking-mode`; None asks it.
    """
    if system != "Linux":
        return Reachability("plain")
    container = parse_container(
        environ=environ,
        cgroup=read_text(root / "proc/1/cgroup"),
        files=[f"/{file}" for file in (".dockerenv", "run/.containerenv") if (root / file).exists()],
        init_environ=read_text(root / "proc/1/environ"),
    )
    if container in BEHIND_A_HOST and _has_own_network(root):
        return Reachability("container", Message("in a container ({kind}) with a network of its own", kind=container))
    kernel = read_text(root / "proc/sys/kernel/osrelease") or read_text(root / "proc/version")
    if (parse_wsl(kernel) or (2 if (root / "run/WSL").is_dir() else None)) != 2:
        return Reachability("plain")  # WSL1 has the network of Windows
    mode, source = _wsl_mode(address, root=root, mode=wslinfo() if mode is None else mode)
    if mode == "mirrored":
        noticed = Message("in WSL2 with the network of Windows (mirrored, according to {source})", source=source)
        return Reachability("wsl-mirrored", noticed)
    if mode == "bridged":
        return Reachability("plain")
    noticed = Message("in WSL2 behind the address of Windows ({mode}, according to {source})", mode=mode, source=source)
    return Reachability("wsl-nat", noticed)


def _has_own_network(root: Path) -> bool:
    """Whether the card with the default route leads to a host: one end of a pair (veth), or a program's (tap).

    With the host's network the card is a real one, or a bridge, bond or VLAN, which say what they are. (macvlan does
    not: a container with such a card of its own is taken for one behind its host.)
    """
    card = root / "sys/class/net" / default_card(read_text(root / "proc/net/route"))
    return not (card / "device").exists() and "DEVTYPE=" not in read_text(card / "uevent")


def default_card(routes: str) -> str:
    """The card of the default route in /proc/net/route, or an empty name."""
    rows = [line.split() for line in routes.splitlines()[1:]]
    return next((row[0] for row in rows if len(row) > 7 and row[1] == row[7] == "00000000"), "")


def _wsl_mode(address: str, *, root: Path, mode: str) -> tuple[str, str]:
    """WSL2's networking mode and who says so: WSL itself, the settings of Windows' user, the address."""
    if mode:
        return mode.lower(), "wslinfo"
    for file in sorted(root.glob("mnt/*/Users/*/.wslconfig")):
        settings = configparser.ConfigParser(strict=False, interpolation=None)
        try:
            settings.read_string(read_text(file).removeprefix("\ufeff"))
        except configparser.Error:
            continue
        if written := settings.get("wsl2", "networkingMode", fallback=""):
            return written.lower(), f"/{file.relative_to(root)}"
    try:
        inside = ipaddress.ip_address(address) in WSL_NAT
    except ValueError:
        inside = True  # a name: WSL2's default it is
    return ("nat" if inside else "mirrored"), Message("its address")


def wslinfo() -> str:
    """What WSL says of its own networking mode (nat, mirrored, virtioproxy, bridged, none); empty if it does not."""
    try:
        done = subprocess.run(
            ["wslinfo", "--networking-mode"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WSLINFO_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    said = done.stdout.strip()
    return said if done.returncode == 0 and re.fullmatch(r"[A-Za-z]+", said) else ""


def advice(found: Reachability, *, listens: str, dialled: str, others: Sequence[str] = ()) -> list[str]:
    """Lines to print where a coordinator opens its port: what was noticed, and what to type so that others reach it.

    `listens` is HOST:PORT; `dialled` is what `--address` said others dial, or empty. `others` are machines of the crew,
    or known coordinators, that might serve better.
    """
    if found.kind == "plain":
        return []
    inner, _, port = listens.rpartition(":")
    outer, _, outer_port = dialled.rpartition(":")
    if found.kind == "wsl-mirrored":
        return [
            Message(
                "this machine is {noticed}; once, in PowerShell as administrator, let others in:",
                noticed=found.noticed,
            ),
            f"  New-NetFirewallHyperVRule -Name cuadrilla -DisplayName cuadrilla -Direction Inbound "
            f"-VMCreatorId '{WSL_CREATOR}' -Protocol TCP -LocalPorts {port} -Action Allow",
        ]
    lines: list[str] = [
        Message(
            "this machine is {noticed}: only its host reaches {address}; to let others reach it:"
            if dialled
            else "this machine is {noticed}: only its host reaches {address}",
            noticed=found.noticed,
            address=inner,
        )
    ]
    if not dialled:
        lines += _elsewhere(others)
    if found.kind == "wsl-nat":
        lines += _through_windows(inner, port, outer=outer or WINDOWS, outer_port=outer_port or port)
    else:
        publish = f"{outer or HOST}:{outer_port or port}:{port}"
        start = (
            "  start the container with -p {ports} (its host's address on your network; "
            "the files of `cuadrilla compose` do that)"
        )
        lines.append(Message(start, ports=publish))
    if not dialled:
        host = WINDOWS if found.kind == "wsl-nat" else HOST
        lines.append(Message("  and here: cuadrilla up ... --address {host}:{port}", host=host, port=port))
    return lines


def _elsewhere(others: Sequence[str]) -> list[Message]:
    """That another machine should coordinate."""
    simplest = Message(
        "simplest: run `cuadrilla up` on a machine with an address of its own ({machines}) and join from here;"
        if others
        else "simplest: run `cuadrilla up` on a machine with an address of its own and join from here;",
        machines=", ".join(others),
    )
    return [simplest, Message("joining needs no open port. To coordinate from here:")]


def _through_windows(inner: str, port: str, *, outer: str, outer_port: str) -> list[str]:
    """The commands for Windows; `inner` changes whenever WSL starts."""
    begin = Message(
        "  in PowerShell as administrator, and again after every restart of WSL (its address changes); "
        "{address} is what `ipconfig` shows for the network card:"
        if outer == WINDOWS
        else "  in PowerShell as administrator, and again after every restart of WSL (its address changes):",
        address=outer,
    )
    return [
        begin,
        f"    netsh interface portproxy add v4tov4 listenaddress={outer} listenport={outer_port} "
        f"connectaddress={inner} connectport={port}",
        f"    New-NetFirewallRule -DisplayName cuadrilla -Direction Inbound -Action Allow -Protocol TCP "
        f"-LocalPort {outer_port} -Profile Private",
        Message(
            "  or, for good (Windows 11): networkingMode=mirrored under [wsl2] in %UserProfile%\\.wslconfig, "
            "then wsl --shutdown"
        ),
    ]
