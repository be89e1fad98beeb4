"""Checks of the machine itself: disk, memory, power, clock, name, Python, variables."""

import math
import re
import shlex
from collections.abc import Iterator

from cuadrilla.doctor.diagnosis import Diagnosis, as_root, fail, warn, well
from cuadrilla.doctor.facts import Folder, Symptoms
from cuadrilla.messages import Message

GIB = 2**30
NO_DISK_BYTES, LITTLE_DISK_BYTES = GIB, 5 * GIB
FEW_FILES = 1000
"""A run makes some dozens, and so does each checkpoint's neighbour."""
NO_MEMORY_BYTES, LITTLE_MEMORY_BYTES, LITTLE_FREE_BYTES = 2 * GIB, 4 * GIB, GIB // 2
SLOW_BYTES_PER_SECOND = 50e6
DAY_SECONDS = 86_400
PYTHONS = ((3, 11), (3, 14))


def system(seen: Symptoms) -> Iterator[Diagnosis]:
    """What it is."""
    host = seen.host
    name = host.system_version or host.system
    if host.container:
        name = Message("{system}, in a container ({kind})", system=name, kind=host.container)
    elif host.wsl:
        name = Message("{system}, in WSL{version}", system=name, version=host.wsl)
    cores = Message("{cores:g} cores", cores=host.usable_cores or 0)
    yield well(Message("{system}; {cpu}, {cores}", system=name, cpu=host.cpu.name or host.machine, cores=cores))


def disk(seen: Symptoms) -> Iterator[Diagnosis]:
    """Room for data and checkpoints, here, in the home folder and where a crew's keys and files are kept."""
    judged: set[str] = set()
    for folder in (seen.folder, seen.home, seen.kept):
        if folder.free_bytes is None or folder.mount in judged:
            continue
        judged.add(folder.mount)
        gib = folder.free_bytes / GIB
        if folder.free_bytes < NO_DISK_BYTES:
            yield fail(
                Message("{path} has {gib:.1f} GiB left: no room for a checkpoint", path=folder.path, gib=gib),
                remedy=_remedy(folder),
                command=_room(folder, is_root=seen.is_root),
                fixable=folder.filesystem == "tmpfs",
            )
        elif folder.free_bytes < LITTLE_DISK_BYTES:
            yield warn(
                Message("{path} has {gib:.1f} GiB left", path=folder.path, gib=gib),
                remedy=_remedy(folder),
                command=_room(folder, is_root=seen.is_root),
                fixable=folder.filesystem == "tmpfs",
            )
        else:
            yield well(Message("{path} has {gib:,.1f} GiB left", path=folder.path, gib=gib))


def _remedy(folder: Folder) -> str:
    if folder.filesystem == "tmpfs":
        return Message("it lies in memory, and is gone when the machine stops")
    return Message("this lists what takes the room; delete what you do not need")


def _room(folder: Folder, *, is_root: bool) -> str:
    """More of it where it is memory; else where it went."""
    if folder.filesystem == "tmpfs":
        gigabytes = math.ceil((folder.total_bytes or 0) / GIB) + LITTLE_DISK_BYTES // GIB
        return as_root(f"mount -o remount,size={gigabytes}G {shlex.quote(folder.mount)}", is_root=is_root)
    return f"du -xhd1 {shlex.quote(folder.mount)} | sort -h | tail"


def files(seen: Symptoms) -> Iterator[Diagnosis]:
    """Files can be made, in the same places."""
    judged: set[str] = set()
    for folder in (seen.folder, seen.home, seen.kept):
        if folder.free_files is None or folder.free_files >= FEW_FILES or folder.mount in judged:
            continue
        judged.add(folder.mount)
        yield fail(
            Message("{path} takes {count:,} more files (inodes), however much room it has", path=folder.path,
                    count=folder.free_files),
            remedy=_remedy(folder),
            command=_room_for_files(folder, is_root=seen.is_root),
            fixable=folder.filesystem == "tmpfs",
        )  # fmt: skip
    if seen.kept.writable is False:
        given = "CUADRILLA_HOME" in seen.environ and seen.home.writable is not False
        yield fail(
            Message("{path} cannot be written to, and a crew's keys are kept there", path=seen.kept.path),
            remedy=Message("without this they are kept in your home folder")
            if given
            else Message("this keeps them in the folder where you are"),
            command="unset CUADRILLA_HOME" if given else "export CUADRILLA_HOME=$PWD/.cuadrilla",
        )
    elif seen.folder.writable is False:
        yield warn(
            Message("{path} cannot be written to: no run can begin there", path=seen.folder.path), command="cd ~"
        )


def _room_for_files(folder: Folder, *, is_root: bool) -> str:
    if folder.filesystem == "tmpfs":
        return as_root(f"mount -o remount,nr_inodes=1000000 {shlex.quote(folder.mount)}", is_root=is_root)
    return f"du --inodes -xd1 {shlex.quote(folder.mount)} | sort -n | tail"


def slow_disk(seen: Symptoms) -> Iterator[Diagnosis]:
    """A file server between the program and its data. WSL's own check speaks of Windows' folders."""
    folder = seen.folder
    rate = folder.read_bytes_per_second
    if rate is None or seen.host.wsl or rate >= SLOW_BYTES_PER_SECOND:
        return
    yield warn(
        Message(
            "{path} ({filesystem}) reads {rate:.0f} MB/s",
            path=folder.path,
            filesystem=folder.filesystem,
            rate=rate / 1e6,
        ),
        remedy=Message("keep data and runs on a disk of this machine"),
        command="cd ~",
    )


def unanswered(seen: Symptoms) -> Iterator[Diagnosis]:
    """A file system of a server that has gone away holds whoever looks at it."""
    if seen.unanswered:
        yield warn(
            Message("no answer about: {names}; a folder of another machine, or of Windows, may hang",
                    names=", ".join(seen.unanswered)),
            command="wsl --shutdown" if seen.host.wsl else "df",
            shell="powershell" if seen.host.wsl else "here",
        )  # fmt: skip


def memory(seen: Symptoms) -> Iterator[Diagnosis]:
    """Enough to train, and not taken by others."""
    have, free = seen.host.usable_memory_bytes, seen.host.available_bytes
    if have is None:
        return
    if have < NO_MEMORY_BYTES:
        yield fail(
            Message("{gib:.1f} GiB of memory: too little for PyTorch and a model", gib=have / GIB),
            remedy=Message("a container's limit is set where it is started: docker run --memory 4g"),
        )
    elif free is not None and free < LITTLE_FREE_BYTES:
        yield warn(
            Message("{free:.1f} of {gib:.1f} GiB of memory are free", free=free / GIB, gib=have / GIB),
            remedy=Message("close what you do not need; this lists what takes most"),
            command="ps -eo rss,pid,args --sort -rss | head" if seen.host.system == "Linux" else "top -o mem",
        )
    elif have < LITTLE_MEMORY_BYTES and seen.swap_bytes == 0 and not seen.host.container:
        yield warn(
            Message("{gib:.1f} GiB of memory and no swap: small models only", gib=have / GIB),
            command=_swap(seen),
        )
    else:
        yield well(Message("{gib:,.1f} GiB of memory", gib=have / GIB))


def _swap(seen: Symptoms) -> str:
    steps = ("fallocate -l 8G /swapfile", "chmod 600 /swapfile", "mkswap /swapfile", "swapon /swapfile")
    return " && ".join(as_root(step, is_root=seen.is_root) for step in steps)


def power(seen: Symptoms) -> Iterator[Diagnosis]:
    """A machine that sleeps in the night trains until it sleeps. A crew goes on without it."""
    found = seen.power
    if found.on_battery:
        yield warn(
            Message("on battery ({percent:.0f} %): slower, and not for long", percent=found.percent or 0.0),
            remedy=Message("plug it in"),
        )
    if not found.sleeps_after_seconds:
        return
    minutes = found.sleeps_after_seconds / 60
    cause = Message("sleeps after {minutes:.0f} minutes without a hand on it", minutes=minutes)
    if found.told_by == "pmset":
        yield warn(cause, command="sudo pmset -c sleep 0")
    elif found.told_by == "powercfg":
        yield warn(cause, command="powercfg /change standby-timeout-ac 0", shell="powershell")
    else:
        schema = "org.gnome.settings-daemon.plugins.power"
        yield warn(cause, command=f"gsettings set {schema} sleep-inactive-ac-type nothing", fixable=True)


def clock(seen: Symptoms) -> Iterator[Diagnosis]:
    """Not before this program was installed, and set by a service. (Nothing that is trained depends on it.)"""
    command = as_root("timedatectl set-ntp true", is_root=seen.is_root)
    if seen.host.system == "Windows":
        command = "w32tm /resync"
    elif seen.host.system == "Darwin":
        command = "sudo sntp -sS time.apple.com"
    if seen.installation.installed_at - seen.now > DAY_SECONDS:
        days = (seen.installation.installed_at - seen.now) / DAY_SECONDS
        yield fail(
            Message("the clock is wrong: it is {days:,.0f} days before cuadrilla was installed", days=days),
            remedy=Message("downloads and certificates fail with it"),
            command=command,
        )
        return
    service = dict(line.partition("=")[::2] for line in seen.time_service.splitlines())
    if service.get("CanNTP") == "yes" and service.get("NTP") == "no" and service.get("NTPSynchronized") != "yes":
        yield warn(Message("nothing sets the clock"), command=command, fixable=True)


def name(seen: Symptoms) -> Iterator[Diagnosis]:
    """A crew tells its machines apart by their names."""
    if seen.hostname.partition(".")[0].lower() in ("", "localhost") and not seen.host.container:
        yield warn(
            Message("this machine's name is {name}, as that of others", name=repr(seen.hostname)),
            remedy=Message("or give it one for the crew: cuadrilla join --name NAME"),
            command=as_root("hostnamectl set-hostname NAME", is_root=seen.is_root),
        )


def python(seen: Symptoms) -> Iterator[Diagnosis]:
    """An environment of its own, of a Python for which there is a torch."""
    found = seen.installation
    dotted = ".".join(map(str, found.version))
    if not PYTHONS[0] <= found.version <= PYTHONS[1]:
        yield warn(
            Message("Python {version}: cuadrilla is tested with 3.11 to 3.14", version=dotted),
            command="make setup PYTHON=python3.14",
        )
    elif not found.in_environment and found.externally_managed and not seen.host.container:
        yield warn(
            Message("Python {version} is the system's own: its updates break what is installed in it", version=dotted),
            command="make setup",
        )
    else:
        yield well(Message("Python {version}", version=dotted))


def variables(seen: Symptoms) -> Iterator[Diagnosis]:
    """Variables that are known to make training fail or crawl."""
    for variable, cause in _known_bad(seen):
        yield warn(cause, command=f"unset {variable}")


def _known_bad(seen: Symptoms) -> Iterator[tuple[str, str]]:
    given = seen.environ
    if not seen.temporary:
        yield "TMPDIR", Message("TMPDIR={value}: there is no such folder", value=given.get("TMPDIR", ""))
    cards = {card.name for card in seen.cards}
    if "GLOO_DEVICE_TRANSPORT" in given:
        value = given["GLOO_DEVICE_TRANSPORT"]
        yield (
            "GLOO_DEVICE_TRANSPORT",
            Message("GLOO_DEVICE_TRANSPORT={value}: PyTorch has its own transport only", value=value),
        )
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = given.get(variable, "")
        named = [part for part in value.split(",") if part]
        if named and cards and re.fullmatch(r"[\w.,-]+", value) and not any(_names(part, cards) for part in named):
            yield variable, Message("{variable}={value}: there is no such card here", variable=variable, value=value)
    threads = given.get("OMP_NUM_THREADS")
    if threads is not None and (not threads.split(",")[0].isdigit() or int(threads.split(",")[0]) < 1):
        yield "OMP_NUM_THREADS", Message("OMP_NUM_THREADS={value} is no number of threads", value=repr(threads))
    for variable in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        if given.get(variable, "0") not in ("", "0"):
            yield variable, Message("{variable} makes the card wait after each step", variable=variable)
    if given.get("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "1") in ("0", "0.0"):
        yield (
            "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
            Message("PYTORCH_MPS_HIGH_WATERMARK_RATIO=0: PyTorch takes memory until the Mac stands still"),
        )


def _names(part: str, cards: set[str]) -> bool:
    """NCCL also takes the beginning of a name."""
    return any(card.startswith(part) for card in cards)
