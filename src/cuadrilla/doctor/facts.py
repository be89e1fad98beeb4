"""Everything that the checks look at, gathered at one moment: `Symptoms`.

Invariants
* A reader asks with a time limit and never raises; what could not be found out is None or empty. The readers run side
  by side, so that the slowest decides how long it takes (at most DEVICES_SECONDS and PATIENCE_SECONDS).
* Nothing here judges: whether a value is good is up to the checks, which are pure.
* Nothing here imports torch: it is looked at in a child process (`host/probe.py`).
"""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from cuadrilla.doctor.child import SPEED_BYTES, child_argv, own_port
from cuadrilla.doctor.programs import ProgramAnswer, answer_of
from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.host.card import NetworkCard, read_cards, way_out
from cuadrilla.host.devices import Device, probe_devices
from cuadrilla.host.facts import Facts, read_facts, read_text
from cuadrilla.host.reachability import Reachability, read_reachability
from cuadrilla.host.room import is_slow, mount_of
from cuadrilla.host.usage import PSUTIL_ERRORS, read_battery
from cuadrilla.link.address import local_address
from cuadrilla.messages import CATALOGUE

DEVICES_SECONDS = 30.0
PATIENCE_SECONDS = 10.0  # beyond that, for a file system that no time limit reaches
HOME_SECONDS = 5.0
PROGRAM_SECONDS = 10.0
WINDOWS_SECONDS = 15.0  # the first program of Windows that WSL starts takes seconds
SPEED_SECONDS = 10.0
WSL_NVIDIA_SMI = "/usr/lib/wsl/lib/nvidia-smi"
WINDOWS_SYSTEM = Path("/mnt/c/Windows/System32")
SMI_QUERY = ("--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader")
FIREWALL_OF_MAC = "/usr/libexec/ApplicationFirewall/socketfilterfw"
POWERSHELL = (
    "powershell.exe", "-NoProfile", "-NonInteractive", "-Command",
    "(Get-CimInstance Win32_ComputerSystem).TotalPhysicalMemory; "
    "(Get-NetFirewallHyperVRule -ErrorAction SilentlyContinue | Get-NetFirewallPortFilter).LocalPort",
)  # fmt: skip


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
class NvidiaPrograms:
    """`smi` None: there is none. `windows_smi`: what Windows' own says, seen from WSL."""

    smi: ProgramAnswer | None = None
    smi_off_path: bool = False
    windows_smi: ProgramAnswer | None = None
    driver_packages: tuple[str, ...] = ()
    """Of a Linux driver, which under WSL must not be there."""
    has_dxg: bool = True


@dataclass(frozen=True, kw_only=True)
class WslSide:
    """What Windows says of this WSL."""

    settings: str = ""
    """The text of .wslconfig."""
    windows_memory_bytes: int | None = None
    firewall_ports: tuple[str, ...] | None = None
    """Those that the Hyper-V firewall lets in, as numbers or ranges; None is unknown."""
    portproxy: str = ""


@dataclass(frozen=True, kw_only=True)
class DockerSide:
    """`info` None: there is no Docker here."""

    info: ProgramAnswer | None = None
    containers: ProgramAnswer | None = None
    """Of those that run: name, tab, published ports; as `docker ps` writes them."""
    program: str = ""
    context: str = ""
    has_toolkit: bool = False


@dataclass(frozen=True, kw_only=True)
class Firewalls:
    """Each as far as this user may see it. `iptables`: the rules as `iptables -S` lists them, "" if hidden."""

    iptables: str = ""
    ufw_enabled: bool = False
    ufw: ProgramAnswer | None = None
    firewalld: ProgramAnswer | None = None
    nft: ProgramAnswer | None = None
    """All rules of nftables, as JSON."""
    defender_rule: ProgramAnswer | None = None
    mac: ProgramAnswer | None = None
    mac_program: ProgramAnswer | None = None


@dataclass(frozen=True, kw_only=True)
class Power:
    on_battery: bool | None = None
    percent: float | None = None
    sleeps_after_seconds: int | None = None
    """On mains; 0 is never."""
    told_by: str = ""


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The Python and the packages that run here."""

    python: str = "python"
    version: tuple[int, int] = (3, 12)
    in_environment: bool = True
    externally_managed: bool = False
    torch_copies: tuple[tuple[str, str], ...] = ()
    """(version, folder) of each installed torch, the one that Python imports first."""
    installed_at: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Symptoms:
    """One machine. `port`: the one that others are to reach here, if it is to coordinate."""

    host: Facts
    port: int | None = None
    port_state: Literal["free", "taken", "ours"] = "free"
    """`ours`: this machine's coordinator listens there."""
    is_root: bool = False
    systemd: bool = True
    now: float = 0.0
    time_service: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)
    hostname: str = "pc"
    hostname_leads_to: tuple[str, ...] | None = None
    address: str = ""
    """Where the machines beside this one find it; "" if there is none, or several and nothing to choose by."""
    way_out: str = ""
    """The address that it dials other networks from: with a VPN, another one."""
    reachability: Reachability = field(default_factory=lambda: Reachability("plain"))
    cards: tuple[NetworkCard, ...] = ()
    devices: tuple[Device, ...] = ()
    folder: Folder = Folder(path=".")
    home: Folder = Folder(path="~")
    kept: Folder = Folder(path="~/.local/share/cuadrilla")
    """What this machine keeps for all runs, the keys of its crew among them."""
    shm: Folder | None = None
    swap_bytes: int | None = None
    nvidia: NvidiaPrograms = NvidiaPrograms()
    wsl: WslSide = WslSide()
    docker: DockerSide = DockerSide()
    firewalls: Firewalls = Firewalls()
    power: Power = Power()
    installation: Installation = Installation()
    temporary: bool = True
    """Whether the folder that TMPDIR names, if it does, is there."""
    unanswered: tuple[str, ...] = ()
    """Of these fields, those that nothing is known of because their reader hangs."""

    @property
    def torch_version(self) -> str | None:
        return next((device.torch_version for device in self.devices if device.torch_version), None)


def read_symptoms(*, port: int | None = None, devices_seconds: float = DEVICES_SECONDS) -> Symptoms:
    """This machine, now. Never raises."""
    host = read_facts()
    ours, at_home = _open_port()
    port = ours if port is None else port
    out, cards = way_out(), read_cards()
    address = _address(out, cards)
    work: dict[str, Callable[[], Any]] = {
        "devices": lambda: tuple(probe_devices(timeout_seconds=devices_seconds)),
        "nvidia": lambda: read_nvidia(host),
        "wsl": lambda: read_wsl(host),
        "docker": read_docker,
        "firewalls": lambda: read_firewalls(host, port),
        "power": lambda: read_power(host),
        "folder": lambda: read_folder(_here()),
        "home": lambda: read_folder(_home(), measured=host.wsl is not None),
        "kept": read_kept,
        "temporary": lambda: "TMPDIR" not in os.environ or os.path.isdir(os.environ["TMPDIR"]),
        "hostname_leads_to": read_name,
        "reachability": lambda: read_reachability(address, system=host.system),
        "time_service": lambda: read_time_service(host),
    }
    found = side_by_side(work, seconds=PATIENCE_SECONDS + devices_seconds)
    return Symptoms(
        host=host,
        port=port,
        port_state="free"
        if port is None
        else "ours"
        if port == ours
        else "taken"
        if is_taken(address, port)
        else "free",
        is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
        systemd=Path("/run/systemd/system").is_dir(),
        now=time.time(),
        environ=dict(os.environ),
        hostname=socket.gethostname(),
        address=address,
        way_out=out,
        cards=cards,
        shm=read_folder(Path("/dev/shm")) if host.system == "Linux" and Path("/dev/shm").is_dir() else None,
        swap_bytes=_swap(),
        installation=read_installation(),
        unanswered=tuple(name for name in work if name not in found or (name == "home" and not at_home)),
        **found,
    )


def side_by_side(work: Mapping[str, Callable[[], Any]], *, seconds: float) -> dict[str, Any]:
    """What the readers say by then. One that a dead file system holds is left behind, and does not keep the process."""
    found: dict[str, Any] = {}

    def read(name: str) -> None:
        found[name] = work[name]()

    threads = [threading.Thread(target=read, args=(name,), name=f"doctor-{name}", daemon=True) for name in work]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0.0))
    return dict(found)


def read_nvidia(host: Facts) -> NvidiaPrograms:
    """What nvidia-smi says, here and, under WSL, in Windows."""
    on_path = shutil.which("nvidia-smi")
    program = on_path or (WSL_NVIDIA_SMI if Path(WSL_NVIDIA_SMI).exists() else "")
    smi = answer_of([program, *SMI_QUERY], seconds=PROGRAM_SECONDS) if program else None
    if not host.wsl:
        return NvidiaPrograms(smi=smi)
    packages = answer_of(
        ["dpkg-query", "-W", "-f=${db:Status-Abbrev}${Package}\n", "nvidia-driver-*", "libnvidia-compute-*",
         "cuda-drivers*"], seconds=PROGRAM_SECONDS,
    )  # fmt: skip
    return NvidiaPrograms(
        smi=smi,
        smi_off_path=bool(program and not on_path),
        windows_smi=of_windows("nvidia-smi.exe", *SMI_QUERY),
        driver_packages=parse_packages(packages.text if packages else ""),
        has_dxg=Path("/dev/dxg").exists(),
    )


def parse_packages(text: str) -> tuple[str, ...]:
    """The installed ones of `dpkg-query -W -f='${db:Status-Abbrev}${Package}\\n'`."""
    return tuple(sorted(re.findall(r"^ii\s+([a-z0-9][a-z0-9+.-]+)$", text, re.MULTILINE)))


def of_windows(program: str, *arguments: str) -> ProgramAnswer | None:
    """A program of Windows, on the PATH that WSL takes over from it or in its usual place."""
    place = shutil.which(program) or str(WINDOWS_SYSTEM / program)
    return answer_of([place, *arguments], seconds=WINDOWS_SECONDS)


def read_wsl(host: Facts) -> WslSide:
    if not host.wsl:
        return WslSide()
    told = of_windows(*POWERSHELL)
    proxies = of_windows("netsh.exe", "interface", "portproxy", "show", "all")
    memory, ports = parse_powershell(told.text if told and told.ok else "")
    return WslSide(
        settings="\n".join(
            read_text(file).removeprefix("\ufeff") for file in sorted(Path("/").glob("mnt/*/Users/*/.wslconfig"))
        ),
        windows_memory_bytes=memory,
        firewall_ports=ports,
        portproxy=proxies.text if proxies else "",
    )


def parse_powershell(text: str) -> tuple[int | None, tuple[str, ...] | None]:
    """Windows' memory, and the ports that the Hyper-V firewall lets in; both unknown without an answer."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or not lines[0].isdigit():
        return None, None
    return int(lines[0]), tuple(lines[1:])


def read_docker() -> DockerSide:
    program = shutil.which("docker") or ""
    info = answer_of(["docker", "info", "--format", "{{json .}}"], seconds=PROGRAM_SECONDS) if program else None
    listed = ["docker", "ps", "--format", "{{.Names}}\t{{.Ports}}"]
    context = os.environ.get("DOCKER_HOST", "")
    return DockerSide(
        info=info,
        containers=answer_of(listed, seconds=PROGRAM_SECONDS) if info and info.ok else None,
        program=os.path.realpath(program) if program else "",
        context=context,
        has_toolkit=shutil.which("nvidia-ctk") is not None,
    )


def read_firewalls(host: Facts, port: int | None) -> Firewalls:
    """Only if a port is to be reached here; but whether there is ufw, whose rules containers pass by."""
    ufw_enabled = host.system == "Linux" and "ENABLED=yes" in read_text(Path("/etc/ufw/ufw.conf")).splitlines()
    if port is None:
        return Firewalls(ufw_enabled=ufw_enabled)
    if host.system == "Windows":
        rule = ("netsh", "advfirewall", "firewall", "show", "rule", "name=cuadrilla")
        return Firewalls(defender_rule=answer_of(rule, seconds=PROGRAM_SECONDS))
    if host.system == "Darwin":
        return Firewalls(
            mac=answer_of([FIREWALL_OF_MAC, "--getglobalstate"], seconds=PROGRAM_SECONDS),
            mac_program=answer_of([FIREWALL_OF_MAC, "--getappblocked", sys.executable], seconds=PROGRAM_SECONDS),
        )
    rules = answer_of(["iptables", "-S"], seconds=PROGRAM_SECONDS)
    return Firewalls(
        iptables=rules.text if rules and rules.ok else "",
        ufw_enabled=ufw_enabled,
        ufw=answer_of(["ufw", "status"], seconds=PROGRAM_SECONDS),
        firewalld=answer_of(["firewall-cmd", "--list-ports"], seconds=PROGRAM_SECONDS),
        nft=answer_of(["nft", "-j", "list", "ruleset"], seconds=PROGRAM_SECONDS),
    )


def read_power(host: Facts) -> Power:
    percent, on_battery = read_battery()
    seconds, told_by = read_sleep(host)
    return Power(on_battery=on_battery, percent=percent, sleeps_after_seconds=seconds, told_by=told_by)


def read_sleep(host: Facts) -> tuple[int | None, str]:
    """After how many idle seconds the machine sleeps on mains, and which program says so."""
    if host.system == "Darwin":
        said = answer_of(["pmset", "-g", "custom"], seconds=PROGRAM_SECONDS)
        return (parse_pmset(said.text), "pmset") if said and said.ok else (None, "")
    if host.wsl or host.system == "Windows":
        said = of_windows("powercfg.exe", "/query", "SCHEME_CURRENT", "SUB_SLEEP", "STANDBYIDLE")
        return (parse_powercfg(said.text), "powercfg") if said and said.ok else (None, "")
    if "DBUS_SESSION_BUS_ADDRESS" not in os.environ or host.container:
        return None, ""
    schema = "org.gnome.settings-daemon.plugins.power"
    kind = answer_of(["gsettings", "get", schema, "sleep-inactive-ac-type"], seconds=PROGRAM_SECONDS)
    after = answer_of(["gsettings", "get", schema, "sleep-inactive-ac-timeout"], seconds=PROGRAM_SECONDS)
    if not kind or not after or not kind.ok or not after.ok:
        return None, ""
    return (int(after.text) if "nothing" not in kind.text and after.text.isdigit() else 0), "gsettings"


def parse_pmset(text: str) -> int | None:
    """Seconds until sleep on mains, from `pmset -g custom`: its minutes under `AC Power:`."""
    part = text.partition("AC Power:")[2].partition("Battery Power:")[0] or text
    rows = (line.split() for line in part.splitlines())
    return next((int(row[1]) * 60 for row in rows if len(row) > 1 and row[0] == "sleep" and row[1].isdigit()), None)


def parse_powercfg(text: str) -> int | None:
    """Seconds until sleep on mains: the last but one hexadecimal number, whatever the language around it."""
    numbers = [line.split()[-1] for line in text.splitlines() if line.strip() and line.split()[-1].startswith("0x")]
    try:
        return int(numbers[-2], 16)
    except (IndexError, ValueError):
        return None


def read_folder(path: Path, *, measured: bool = False) -> Folder:
    """What holds a folder. A file system that may be slow, or hang, is looked at in a child process and measured."""
    mount, filesystem = mount_of(str(path))
    total, free, speed = None, None, None
    files, writable = None, None
    if measured or is_slow(filesystem):
        total, free, speed = parse_speed(answer_of(child_argv("speed", str(path)), seconds=SPEED_SECONDS))
    else:
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(path)
            total, free = usage.total, usage.free
            files = free_files(path)
            writable = os.access(path, os.W_OK, effective_ids=os.access in os.supports_effective_ids)
    return Folder(
        path=str(path),
        mount=mount,
        filesystem=filesystem,
        total_bytes=total,
        free_bytes=free,
        free_files=files,
        writable=writable,
        read_bytes_per_second=speed,
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


def free_files(path: Path) -> int | None:
    """None where files are not counted, as by btrfs and Windows. Raises OSError."""
    if not hasattr(os, "statvfs"):
        return None
    found = os.statvfs(path)
    return found.f_favail if found.f_files else None


def parse_speed(said: ProgramAnswer | None) -> tuple[int | None, int | None, float | None]:
    """All and free bytes, bytes read per second (None where nothing may be written)."""
    words = said.text.split() if said else []
    numbers = [int(word) for word in words if word.isdigit()]
    if said is not None and said.code is None:  # what would just have been enough
        numbers = [*numbers, int(SPEED_BYTES / SPEED_SECONDS)] if len(numbers) == 2 else [0, 0, 0]
    total, free, speed = (*numbers, None, None, None)[:3]
    return total or None, free if total else None, speed


def read_name() -> tuple[str, ...] | None:
    """Where this machine's own name leads to; None if nowhere. In a child: a resolver may take half a minute."""
    said = answer_of(child_argv("name"), seconds=PROGRAM_SECONDS)
    return tuple(said.text.split()) if said and said.ok and said.text else None


def read_time_service(host: Facts) -> str:
    """What systemd says of the service that sets the clock; "" where there is none."""
    if host.system != "Linux" or host.container or host.wsl:
        return ""  # there the clock is its host's
    said = answer_of(["timedatectl", "show"], seconds=PROGRAM_SECONDS)
    return said.text if said and said.ok else ""


def read_installation() -> Installation:
    copies = tuple(
        dict.fromkeys(
            (found.version, str(found.locate_file(""))) for found in importlib.metadata.distributions(name="torch")
        )
    )
    installed_at = 0.0
    with contextlib.suppress(OSError):  # of a folder: the files in a wheel have the date that its maker gave them
        installed_at = CATALOGUE.stat().st_mtime
    return Installation(
        python=sys.executable,
        version=sys.version_info[:2],
        in_environment=sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ,
        externally_managed=Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists(),
        torch_copies=copies,
        installed_at=installed_at,
    )


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


def _address(out: str, cards: Sequence[NetworkCard]) -> str:
    try:
        return local_address(out, cards)
    except LinkError:
        return ""


def _open_port() -> tuple[int | None, bool]:
    """Of the coordinator that runs on this machine; and whether the home folder has answered."""
    home = os.path.abspath(Home.of_user().path)
    if is_slow(mount_of(home)[1]):  # it may hang, and a thread that looks there would keep this process
        said = answer_of(child_argv("port"), seconds=HOME_SECONDS)
        told = said.text if said and said.ok else ""
        return int(told) if told.isdigit() else None, said is None or said.code is not None
    return own_port(), True


def _here() -> Path:
    try:
        return Path.cwd()
    except OSError:  # it has been deleted
        return _home()


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user without one
        return Path("/")


def _swap() -> int | None:
    try:
        return int(psutil.swap_memory().total)
    except PSUTIL_ERRORS:
        return None
