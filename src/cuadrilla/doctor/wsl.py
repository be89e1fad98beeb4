"""Checks of WSL2: its share of Windows' memory, the driver of the card, how other machines reach it.

Sources: learn.microsoft.com/windows/wsl (wsl-config, networking, filesystems); the CUDA on WSL User Guide
(docs.nvidia.com/cuda/wsl-user-guide). Nothing was run on Windows.
"""

import re
from collections.abc import Iterator

from cuadrilla.doctor.finding import Finding, fail, ok, warn
from cuadrilla.doctor.here import Here
from cuadrilla.messages import Message

GIB = 2**30
ENOUGH_BYTES = 8 * GIB
POWERSHELL = ("powershell.exe", "-NoProfile", "-NonInteractive", "-Command")
CREATOR = "{40E0AC32-46A5-438A-A0B2-2B479E8F2E90}"  # how the Hyper-V firewall names all WSL machines
WINDOWS = "WINDOWS_ADDRESS"  # a user replaces it by the real address


def version(here: Here) -> Iterator[Finding]:
    """This is not WSL1, which cannot use GPUs."""
    if here.facts.wsl == 1:
        distro = here.environ.get("WSL_DISTRO_NAME", "Ubuntu")
        cause = Message("this is WSL1, which has no access to cards")
        yield fail(cause, command=f"wsl --set-version {distro} 2", shell="powershell")


def driver(here: Here) -> Iterator[Finding]:
    """WSL sees the card by Windows' driver, and no Linux driver is installed that hides it."""
    if not here.facts.wsl or "CUDA_VISIBLE_DEVICES" in here.environ:
        return
    listed = here.run("dpkg-query", "-W", "-f=${db:Status-Abbrev}${Package}\n", "nvidia-driver-*",
                      "libnvidia-compute-*", "cuda-drivers*")  # fmt: skip
    if packages := sorted(re.findall(r"^ii\s+([a-z0-9][a-z0-9+.-]+)$", listed.text, re.MULTILINE)):
        names = " ".join(packages)
        yield fail(
            Message("a Linux driver is installed in WSL and hides Windows' own: {packages}", packages=names),
            remedy=Message("afterwards, in PowerShell: wsl --shutdown"),
            command=here.as_root(f"apt-get purge -y {names}"),
        )
    elif not any(device.kind == "cuda" for device in here.devices):
        windows = here.run("nvidia-smi.exe", "-L")
        if windows.ok and (card := re.match(r"GPU 0: ([^(]+)", windows.text)):
            yield fail(
                Message("Windows has {name}, and WSL does not see it", name=card[1].strip()),
                remedy=Message("this ends all that runs in WSL"),
                command="wsl --update; wsl --shutdown",
                shell="powershell",
            )


def memory(here: Here) -> Iterator[Finding]:
    """WSL has enough memory: it takes half of Windows' unless .wslconfig says otherwise."""
    have = here.facts.memory_bytes
    if here.facts.wsl != 2 or have >= ENOUGH_BYTES:
        return
    said = here.run(*POWERSHELL, "(Get-CimInstance Win32_ComputerSystem).TotalPhysicalMemory")
    whole = int(said.text) if said.ok and said.text.isdigit() else 0
    if have < 0.7 * whole:
        yield warn(
            Message("WSL has {have:.1f} GiB of Windows' {whole:.0f} GiB", have=have / GIB, whole=whole / GIB),
            remedy=Message(
                "write memory={gigabytes}GB under [wsl2] in the file that opens, save it, then: wsl --shutdown",
                gigabytes=max(round(whole * 0.75 / GIB), 1),
            ),
            command="notepad $env:USERPROFILE\\.wslconfig",
            shell="powershell",
        )


def folder(here: Here) -> Iterator[Finding]:
    """The working directory is not a folder of Windows, whose files go through a slow server."""
    path = here.folders[0].path
    if here.facts.wsl and re.match(r"/mnt/[a-z](/|$)", path):
        cause = Message("{path} is a folder of Windows, ten times slower than WSL's own", path=path)
        yield warn(cause, remedy=Message("keep data and runs in WSL's own folders"), command="cd ~")


def network(here: Here) -> Iterator[Finding]:
    """Other machines reach this one. That is needed only to coordinate, not to join."""
    kind = here.reachability
    if kind not in ("wsl-nat", "wsl-mirrored"):
        return
    if here.port is None:
        yield ok(
            Message("can join crews; to coordinate one, others must reach it through Windows: --port shows how")
            if kind == "wsl-nat"
            else Message("has the network of Windows (mirrored)")
        )
    elif kind == "wsl-nat":
        yield _behind_windows(here, here.port)
    else:
        yield _mirrored(here, here.port)


def _mirrored(here: Here, port: int) -> Finding:
    said = here.run(*POWERSHELL, "(Get-NetFirewallHyperVRule -Name cuadrilla | Get-NetFirewallPortFilter).LocalPort")
    if said.ok and str(port) in said.text.split():
        return ok(Message("the Hyper-V firewall lets port {port} in", port=port))
    return warn(
        Message("the Hyper-V firewall may not let port {port} in", port=port),
        command=f"New-NetFirewallHyperVRule -Name cuadrilla -DisplayName cuadrilla -Direction Inbound "
        f"-VMCreatorId '{CREATOR}' -Protocol TCP -LocalPorts {port} -Action Allow",
        shell="administrator",
    )


def _behind_windows(here: Here, port: int) -> Finding:
    """Windows must forward the port to this WSL, which has another address after each start."""
    said = here.run("netsh.exe", "interface", "portproxy", "show", "all")
    if re.search(rf"\s{port}\s+{re.escape(here.address)}\s+{port}\s*$", said.text, re.MULTILINE):
        return ok(Message("Windows forwards port {port} to this WSL", port=port))
    return warn(
        Message("others do not reach {address}:{port}, behind Windows' address", address=here.address, port=port),
        remedy=Message(
            "and: cuadrilla up RUN --address {windows}:{port} ({windows}: what ipconfig shows for the network card). "
            "After each start of WSL type it again; or let another machine coordinate, or write "
            "networkingMode=mirrored under [wsl2] in .wslconfig (Windows 11)",
            windows=WINDOWS,
            port=port,
        ),
        command=f"netsh interface portproxy add v4tov4 listenaddress={WINDOWS} listenport={port} "
        f"connectaddress={here.address} connectport={port}; "
        f"New-NetFirewallRule -DisplayName cuadrilla -Direction Inbound -Action Allow -Protocol TCP "
        f"-LocalPort {port} -Profile Private",
        shell="administrator",
    )
