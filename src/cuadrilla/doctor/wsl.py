"""Checks of WSL2: how much of Windows' memory it has, how others reach it.

Sources: learn.microsoft.com/windows/wsl (wsl-config, networking, filesystems). Nothing was run on Windows.
"""

import ipaddress
import re
from collections.abc import Iterator
from pathlib import Path

from cuadrilla.doctor.diagnosis import Diagnosis, fail, ok, warn
from cuadrilla.doctor.here import Here
from cuadrilla.host.container import read_text
from cuadrilla.host.reachability import WINDOWS, WSL_CREATOR, WSL_NAT
from cuadrilla.messages import Message

GIB = 2**30
ENOUGH_BYTES = 8 * GIB
PROXY_ROW = re.compile(r"^\s*(\S+)\s+(\d+)\s+(\S+)\s+(\d+)\s*$", re.MULTILINE)
POWERSHELL = ("powershell.exe", "-NoProfile", "-NonInteractive", "-Command")
PORTS = "(Get-NetFirewallHyperVRule -ErrorAction SilentlyContinue | Get-NetFirewallPortFilter).LocalPort"


def version(here: Here) -> Iterator[Diagnosis]:
    """WSL1 has no cards."""
    if here.host.wsl == 1:
        distro = here.environ.get("WSL_DISTRO_NAME", "Ubuntu")
        cause = Message("this is WSL1, which has no access to cards")
        yield fail(cause, command=f"wsl --set-version {distro} 2", shell="powershell")


def memory(here: Here, *, root: Path = Path("/")) -> Iterator[Diagnosis]:
    """WSL takes half of Windows' memory, unless it is told otherwise."""
    have = here.host.memory_bytes
    if here.host.wsl != 2 or have is None:
        return
    said = here.run(*POWERSHELL, "(Get-CimInstance Win32_ComputerSystem).TotalPhysicalMemory")
    whole = int(said.text) if said and said.ok and said.text.isdigit() else 0
    settings = "\n".join(read_text(file) for file in root.glob("mnt/*/Users/*/.wslconfig"))
    if have >= ENOUGH_BYTES or have > 0.7 * (whole or have) or re.search(r"^\s*memory\s*=", settings, re.MULTILINE):
        yield ok(Message("{gib:.1f} GiB of Windows' memory", gib=have / GIB))
        return
    gigabytes = max(round(whole * 0.75 / GIB), 1)
    yield warn(
        Message("WSL has {have:.1f} GiB of Windows' {whole:.0f} GiB", have=have / GIB, whole=whole / GIB),
        remedy=Message(
            "write memory={gigabytes}GB under [wsl2] in the file that opens, save it, then: wsl --shutdown",
            gigabytes=gigabytes,
        ),
        command="notepad $env:USERPROFILE\\.wslconfig",
        shell="powershell",
    )


def network(here: Here) -> Iterator[Diagnosis]:
    """Whether others reach this machine. To join, it need not be reached."""
    kind = here.reachability()
    if kind not in ("wsl-nat", "wsl-mirrored"):
        return
    if here.port is None:
        yield ok(
            Message("joins crews; others do not reach it behind Windows' address (--port says what to type)")
            if kind == "wsl-nat"
            else Message("has the network of Windows (mirrored)")
        )
    elif kind == "wsl-nat":
        yield from _behind_windows(here, here.port)
    else:
        yield from _mirrored(here, here.port)


def _mirrored(here: Here, port: int) -> Iterator[Diagnosis]:
    said = here.run(*POWERSHELL, PORTS)
    if said and said.ok and lets_in(said.text, port):
        yield ok(Message("the Hyper-V firewall lets port {port} in", port=port))
        return
    yield warn(
        Message("the Hyper-V firewall may not let port {port} in", port=port),
        command=f"New-NetFirewallHyperVRule -Name cuadrilla -DisplayName cuadrilla -Direction Inbound "
        f"-VMCreatorId '{WSL_CREATOR}' -Protocol TCP -LocalPorts {port} -Action Allow",
        shell="administrator",
    )


def lets_in(ports: str, port: int) -> bool:
    """Whether a list of ports, ranges (47000-48000, 47000:48000) and `Any` has this one."""
    for part in re.split(r"[,\s]+", ports):
        found = re.fullmatch(r"(\d+)(?:[-:](\d+))?", part)
        if part.lower() == "any" or (found and int(found[1]) <= port <= int(found[2] or found[1])):
            return True
    return False


def _behind_windows(here: Here, port: int) -> Iterator[Diagnosis]:
    """One forwarded port: right if it leads here."""
    forwards = [row for row in portproxy(here) if row[1] == port]
    if any(inner == here.address for _, _, inner, _ in forwards):
        yield ok(Message("Windows forwards port {port} to this WSL", port=port))
    if forwards:
        return  # to an address that WSL had before: `stale` says so
    yield warn(
        Message("others do not reach {address}:{port}, behind Windows' address", address=here.address, port=port),
        remedy=Message(
            "let another machine coordinate, or write networkingMode=mirrored under [wsl2] in .wslconfig "
            "(Windows 11), or forward the port, and: cuadrilla up RUN --address {windows}:{port}; {windows} is what "
            "ipconfig shows for the network card",
            windows=WINDOWS,
            port=port,
        ),
        command=f"netsh interface portproxy add v4tov4 listenaddress={WINDOWS} listenport={port} "
        f"connectaddress={here.address} connectport={port}; "
        f"New-NetFirewallRule -DisplayName cuadrilla -Direction Inbound -Action Allow -Protocol TCP "
        f"-LocalPort {port} -Profile Private",
        shell="administrator",
    )


def stale(here: Here) -> Iterator[Diagnosis]:
    """A forwarded port of yesterday: WSL has another address after each start."""
    own = {address for card in here.cards for address in card.addresses}
    for outer, outer_port, inner, inner_port in portproxy(here) if here.host.wsl and here.address else ():
        if inner in own or not _is_of_wsl(inner):
            continue
        yield warn(
            Message(
                "Windows forwards port {port} to {old}, which WSL had before; it has {new} now",
                port=outer_port, old=inner, new=here.address,
            ),
            command=f"netsh interface portproxy set v4tov4 listenaddress={outer} listenport={outer_port} "
            f"connectaddress={here.address} connectport={inner_port}",
            shell="administrator",
        )  # fmt: skip


def _is_of_wsl(address: str) -> bool:
    try:
        return ipaddress.ip_address(address) in WSL_NAT
    except ValueError:
        return False


def portproxy(here: Here) -> list[tuple[str, int, str, int]]:
    """(address, port, address it leads to, port there) of each port that Windows forwards, in any language."""
    said = here.run("netsh.exe", "interface", "portproxy", "show", "all")
    rows = PROXY_ROW.finditer(said.text if said else "")
    return [(row[1], int(row[2]), row[3], int(row[4])) for row in rows]
