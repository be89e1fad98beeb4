"""Checks of WSL2: where files lie, how much of Windows' memory it has, how others reach it.

Sources: learn.microsoft.com/windows/wsl (wsl-config, networking, filesystems). Nothing was run on Windows.
"""

import configparser
import ipaddress
import re
from collections.abc import Iterator

from cuadrilla.doctor.diagnosis import Diagnosis, fail, warn, well
from cuadrilla.doctor.facts import Folder, Symptoms
from cuadrilla.host.reachability import WINDOWS, WSL_CREATOR, WSL_NAT
from cuadrilla.messages import Message

GIB = 2**30
ENOUGH_BYTES = 8 * GIB
PROXY_ROW = re.compile(r"^\s*(\S+)\s+(\d+)\s+(\S+)\s+(\d+)\s*$", re.MULTILINE)


def version(seen: Symptoms) -> Iterator[Diagnosis]:
    """WSL1 has no cards."""
    if seen.host.wsl == 1:
        distro = seen.environ.get("WSL_DISTRO_NAME", "Ubuntu")
        yield fail(
            Message("this is WSL1, which has no access to cards"),
            command=f"wsl --set-version {distro} 2",
            shell="powershell",
        )


def files(seen: Symptoms) -> Iterator[Diagnosis]:
    """A folder of Windows is read through a file server."""
    folder = seen.folder
    if not seen.host.wsl or not is_windows_folder(folder):
        return
    if folder.read_bytes_per_second is None:
        cause = Message("{path} is a folder of Windows, ten times slower than WSL's own", path=folder.path)
    elif seen.home.read_bytes_per_second is None:
        cause = Message(
            "{path} is a folder of Windows: it reads {rate:.0f} MB/s",
            path=folder.path,
            rate=folder.read_bytes_per_second / 1e6,
        )
    else:
        cause = Message(
            "{path} is a folder of Windows: it reads {rate:.0f} MB/s, and {home} {other:.0f} MB/s",
            path=folder.path,
            rate=folder.read_bytes_per_second / 1e6,
            home=seen.home.path,
            other=seen.home.read_bytes_per_second / 1e6,
        )
    yield warn(cause, remedy=Message("keep data and runs in WSL's own folders"), command="cd ~")


def is_windows_folder(folder: Folder) -> bool:
    in_windows = re.match(r"/mnt/[a-z](/|$)", folder.path) is not None
    return in_windows or folder.filesystem in ("9p", "v9fs", "drvfs", "virtiofs")


def memory(seen: Symptoms) -> Iterator[Diagnosis]:
    """WSL takes half of Windows' memory, unless it is told otherwise."""
    have, whole = seen.host.memory_bytes, seen.wsl.windows_memory_bytes
    if seen.host.wsl != 2 or have is None:
        return
    decided = setting(seen.wsl.settings, "memory")
    if have >= ENOUGH_BYTES or whole is None or have > 0.7 * whole or decided:
        yield well(Message("{gib:.1f} GiB of Windows' memory", gib=have / GIB))
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


def setting(text: str, name: str) -> str:
    """Of [wsl2] in .wslconfig; "" if it is not set, or the file cannot be read."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    try:
        parser.read_string(text)
    except configparser.Error:
        return ""
    return parser.get("wsl2", name, fallback="")


def network(seen: Symptoms) -> Iterator[Diagnosis]:
    """Whether others reach this machine. To join, it need not be reached."""
    kind = seen.reachability.kind
    if kind not in ("wsl-nat", "wsl-mirrored"):
        return
    if seen.port is None:
        yield well(
            Message("joins crews; others do not reach it behind Windows' address (--port says what to type)")
            if kind == "wsl-nat"
            else Message("has the network of Windows (mirrored)")
        )
    elif kind == "wsl-nat":
        yield from _behind_windows(seen, seen.port)
    elif seen.wsl.firewall_ports is not None and lets_in(seen.wsl.firewall_ports, seen.port):
        yield well(Message("the Hyper-V firewall lets port {port} in", port=seen.port))
    else:
        yield warn(
            Message("the Hyper-V firewall may not let port {port} in", port=seen.port),
            command=f"New-NetFirewallHyperVRule -Name cuadrilla -DisplayName cuadrilla -Direction Inbound "
            f"-VMCreatorId '{WSL_CREATOR}' -Protocol TCP -LocalPorts {seen.port} -Action Allow",
            shell="administrator",
        )


def lets_in(ports: tuple[str, ...], port: int) -> bool:
    """Whether a list of ports, ranges and `Any` has this one."""
    for part in ",".join(ports).split(","):
        first, _, last = part.strip().partition("-")
        if first.lower() == "any":
            return True
        if first.isdigit() and int(first) <= port <= int(last if last.isdigit() else first):
            return True
    return False


def _behind_windows(seen: Symptoms, port: int) -> Iterator[Diagnosis]:
    """One forwarded port: right if it leads here, stale if it leads to an address that WSL had before."""
    forwards = [row for row in portproxy(seen.wsl.portproxy) if row[1] == port]
    if any(inner == seen.address for _, _, inner, _ in forwards):
        yield well(Message("Windows forwards port {port} to this WSL", port=port))
        return
    rule = (
        f"netsh interface portproxy add v4tov4 listenaddress={WINDOWS} listenport={port} "
        f"connectaddress={seen.address} connectport={port}; "
        f"New-NetFirewallRule -DisplayName cuadrilla -Direction Inbound -Action Allow -Protocol TCP "
        f"-LocalPort {port} -Profile Private"
    )
    if not forwards:
        yield warn(
            Message("others do not reach {address}:{port}, behind Windows' address", address=seen.address, port=port),
            remedy=Message(
                "let another machine coordinate, or write networkingMode=mirrored under [wsl2] in .wslconfig "
                "(Windows 11), or forward the port; {windows} is what ipconfig shows for the network card",
                windows=WINDOWS,
            ),
            command=rule,
            shell="administrator",
        )


def stale(seen: Symptoms) -> Iterator[Diagnosis]:
    """A forwarded port of yesterday: WSL has another address after each start."""
    own = {address for card in seen.cards for address in card.addresses} | {seen.address}
    for outer, outer_port, inner, inner_port in portproxy(seen.wsl.portproxy):
        if inner in own or not _is_of_wsl(inner) or not seen.address:
            continue
        yield warn(
            Message(
                "Windows forwards port {port} to {old}, which WSL had before; it has {new} now",
                port=outer_port,
                old=inner,
                new=seen.address,
            ),
            command=f"netsh interface portproxy set v4tov4 listenaddress={outer} listenport={outer_port} "
            f"connectaddress={seen.address} connectport={inner_port}",
            shell="administrator",
        )


def _is_of_wsl(address: str) -> bool:
    try:
        return ipaddress.ip_address(address) in WSL_NAT
    except ValueError:
        return False


def portproxy(text: str) -> list[tuple[str, int, str, int]]:
    """(address, port, address it leads to, port there) from `netsh interface portproxy show all`, in any language."""
    return [(row[1], int(row[2]), row[3], int(row[4])) for row in PROXY_ROW.finditer(text)]
