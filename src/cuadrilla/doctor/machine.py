"""Checks of the machine itself: disk, memory, power, clock, Python, variables."""

import math
import os
import re
import shlex
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cuadrilla.doctor.diagnosis import Diagnosis, fail, ok, set_clock, warn
from cuadrilla.doctor.here import Folder, Here
from cuadrilla.host.usage import read_battery
from cuadrilla.messages import CATALOGUE, Message

GIB, MIB = 2**30, 2**20
NO_DISK_BYTES, LITTLE_DISK_BYTES = GIB, 5 * GIB
FEW_FILES = 1000
"""A run makes some dozens, and so does each checkpoint's neighbour."""
NO_MEMORY_BYTES, LITTLE_FREE_BYTES = 2 * GIB, GIB // 2
SMALLEST_SHM_BYTES = 64 * MIB
"""What Docker gives a container; data is read without it, PyTorch's DataLoader workers and Ray need some."""
SLOW_BYTES_PER_SECOND = 50e6
DAY_SECONDS = 86_400
PYTHONS = ((3, 11), (3, 14))


def system(here: Here) -> Iterator[Diagnosis]:
    """What it is."""
    host = here.host
    name = host.system_version or host.system
    if host.container:
        name = Message("{system}, in a container ({kind})", system=name, kind=host.container)
    elif host.wsl:
        name = Message("{system}, in WSL{version}", system=name, version=host.wsl)
    cores = Message("{cores:g} cores", cores=host.usable_cores or 0)
    yield ok(Message("{system}; {cpu}, {cores}", system=name, cpu=host.processor or host.machine, cores=cores))


def disk(here: Here) -> Iterator[Diagnosis]:
    """Room for data and checkpoints, here, in the home folder and where a crew's keys and files are kept."""
    for folder in _by_mount(here):
        if folder.free_bytes is None:
            continue
        gib = folder.free_bytes / GIB
        if folder.free_bytes >= LITTLE_DISK_BYTES:
            yield ok(Message("{path} has {gib:,.1f} GiB left", path=folder.path, gib=gib))
            continue
        gigabytes = math.ceil((folder.total_bytes or 0) / GIB) + LITTLE_DISK_BYTES // GIB
        remedy, command = _room(here, folder, "du -xhd1 {} | sort -h | tail", f"size={gigabytes}G")
        if folder.free_bytes < NO_DISK_BYTES:
            full = Message("{path} has {gib:.1f} GiB left: no room for a checkpoint", path=folder.path, gib=gib)
            yield fail(full, remedy=remedy, command=command)
        else:
            little = Message("{path} has {gib:.1f} GiB left", path=folder.path, gib=gib)
            yield warn(little, remedy=remedy, command=command)


def files(here: Here) -> Iterator[Diagnosis]:
    """Files can be made, in the same places."""
    for folder in _by_mount(here):
        if folder.free_files is not None and folder.free_files < FEW_FILES:
            cause = Message("{path} takes {count:,} more files (inodes), however much room it has", path=folder.path,
                            count=folder.free_files)  # fmt: skip
            remedy, command = _room(here, folder, "du --inodes -xd1 {} | sort -n | tail", "nr_inodes=1000000")
            yield fail(cause, remedy=remedy, command=command)
    folder, home, kept = here.folders()
    if not here.home_answers:
        yield fail(Message("{path} does not answer, and a crew's keys are kept there", path=kept.path), command="df")
    elif kept.writable is False:
        given = "CUADRILLA_HOME" in here.environ and home.writable is not False
        yield fail(
            Message("{path} cannot be written to, and a crew's keys are kept there", path=kept.path),
            remedy=Message("without this they are kept in your home folder")
            if given
            else Message("this keeps them in the folder where you are"),
            command="unset CUADRILLA_HOME" if given else "export CUADRILLA_HOME=$PWD/.cuadrilla",
        )
    elif folder.writable is False:
        yield warn(Message("{path} cannot be written to: no run can begin there", path=folder.path), command="cd ~")


def _by_mount(here: Here) -> list[Folder]:
    """One folder of each file system."""
    return list({folder.mount: folder for folder in reversed(here.folders())}.values())[::-1]


def _room(here: Here, folder: Folder, look: str, option: str) -> tuple[Message, str]:
    """Remedy and command: more of it where it is memory; else where it went."""
    mount = shlex.quote(folder.mount)
    if folder.filesystem == "tmpfs":
        remedy = Message("it lies in memory, and is gone when the machine stops")
        return remedy, here.as_root(f"mount -o remount,{option} {mount}")
    return Message("this lists what takes the room; delete what you do not need"), look.format(mount)


def slow_folder(here: Here) -> Iterator[Diagnosis]:
    """A file server between the program and its data; under WSL, a folder of Windows."""
    folder, home, _ = here.folders()
    rate = folder.read_bytes_per_second
    if here.host.wsl and folder.path.startswith("/mnt/") and folder.filesystem in ("9p", "v9fs", "drvfs", "virtiofs"):
        cause = Message("{path} is a folder of Windows, ten times slower than WSL's own", path=folder.path)
        if rate is not None and home.read_bytes_per_second is not None:
            cause = Message(
                "{path} is a folder of Windows: it reads {rate:.0f} MB/s, and {home} {other:.0f} MB/s",
                path=folder.path, rate=rate / 1e6, home=home.path, other=home.read_bytes_per_second / 1e6,
            )  # fmt: skip
        yield warn(cause, remedy=Message("keep data and runs in WSL's own folders"), command="cd ~")
    elif rate is not None and rate < SLOW_BYTES_PER_SECOND:
        cause = Message("{path} ({filesystem}) reads {rate:.0f} MB/s", path=folder.path, filesystem=folder.filesystem,
                        rate=rate / 1e6)  # fmt: skip
        yield warn(cause, remedy=Message("keep data and runs on a disk of this machine"), command="cd ~")


def shared_memory(here: Here, *, path: str = "/dev/shm") -> Iterator[Diagnosis]:
    """/dev/shm, which Ray and PyTorch's DataLoader workers use."""
    if here.host.system != "Linux" or not os.path.isdir(path):
        return
    total = shutil.disk_usage(path).total
    if total >= SMALLEST_SHM_BYTES:
        yield ok(Message("/dev/shm has {mib:,.0f} MiB", mib=total / MIB))
        return
    cause = Message("/dev/shm has {mib:,.0f} MiB; Ray and DataLoader workers stop with a bus error", mib=total / MIB)
    if here.host.container in ("docker", "podman"):
        remedy = Message("or in a compose file: shm_size: 2gb")
        yield warn(cause, remedy=remedy, command="docker run --shm-size 2g ...", shell="host")
    else:
        yield warn(cause, command=here.as_root("mount -o remount,size=2G /dev/shm"))


def memory(here: Here) -> Iterator[Diagnosis]:
    """Enough to train, and not taken by others."""
    have, free = here.host.usable_memory_bytes, here.host.available_bytes
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
            command="ps -eo rss,pid,args --sort -rss | head" if here.host.system == "Linux" else "top -o mem",
        )
    else:
        yield ok(Message("{gib:,.1f} GiB of memory", gib=have / GIB))


def power(
    _here: Here, *, battery: Callable[[], tuple[float | None, bool | None]] = read_battery
) -> Iterator[Diagnosis]:
    """It trains slowly on its battery, and then not at all. A crew goes on without it."""
    percent, on_battery = battery()
    if on_battery:
        yield warn(
            Message("on battery ({percent:.0f} %): slower, and not for long", percent=percent or 0.0),
            remedy=Message("plug it in"),
        )


def clock(here: Here, *, now: Callable[[], float] = time.time) -> Iterator[Diagnosis]:
    """Not before this program was installed. (Nothing that is trained depends on it.)"""
    try:  # of a folder: the files in a wheel have the date that its maker gave them
        days = (CATALOGUE.stat().st_mtime - now()) / DAY_SECONDS
    except OSError:
        return
    if days > 1:
        yield fail(
            Message("the clock is wrong: it is {days:,.0f} days before cuadrilla was installed", days=days),
            remedy=Message("downloads and certificates fail with it"),
            command=set_clock(is_root=here.is_root),
        )


def installed_python() -> tuple[tuple[int, int], bool]:
    """The version of this Python, and whether the system's own packages live in it."""
    in_environment = sys.prefix != sys.base_prefix or "CONDA_PREFIX" in os.environ
    managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
    return sys.version_info[:2], managed and not in_environment


def python(
    here: Here, *, installed: Callable[[], tuple[tuple[int, int], bool]] = installed_python
) -> Iterator[Diagnosis]:
    """An environment of its own, of a Python for which there is a torch."""
    version, is_systems = installed()
    dotted = ".".join(map(str, version))
    if not PYTHONS[0] <= version <= PYTHONS[1]:
        cause = Message("Python {version}: cuadrilla is tested with 3.11 to 3.14", version=dotted)
        yield warn(cause, command="make setup PYTHON=python3.14")
    elif is_systems and not here.host.container:
        cause = Message(
            "Python {version} is the system's own: its updates break what is installed in it", version=dotted
        )
        yield warn(cause, command="make setup")
    else:
        yield ok(Message("Python {version}", version=dotted))


def variables(here: Here) -> Iterator[Diagnosis]:
    """Variables that are known to make training fail or crawl."""
    for variable, (is_bad, reason) in BAD.items():
        value = here.environ.get(variable, "")
        if variable in here.environ and is_bad(value, here):
            cause = Message("{variable}={value}: {reason}", variable=variable, value=value, reason=reason)
            yield warn(cause, command=f"unset {variable}")


def _no_card(value: str, here: Here) -> bool:
    """NCCL also takes the beginning of a name."""
    named = [part for part in value.split(",") if part]
    is_plain = bool(named and here.cards) and re.fullmatch(r"[\w.,-]+", value) is not None
    return is_plain and not any(card.name.startswith(part) for card in here.cards for part in named)


NO_CARD = (_no_card, Message("there is no such card here"))
BAD: dict[str, tuple[Callable[[str, Here], bool], Message]] = {
    "TMPDIR": (lambda value, _: not os.path.isdir(value), Message("there is no such folder")),
    "GLOO_SOCKET_IFNAME": NO_CARD,
    "NCCL_SOCKET_IFNAME": NO_CARD,
    "OMP_NUM_THREADS": (
        lambda value, _: re.match(r"0*[1-9]\d*(,|$)", value) is None,
        Message("it is no number of threads"),
    ),
}
"""By variable: whether its value is bad, and why."""
