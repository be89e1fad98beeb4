"""Checks of the machine itself: memory, disk."""

import platform
from collections.abc import Iterator
from shlex import quote

from cuadrilla.doctor.finding import Finding, fail, ok, warn
from cuadrilla.doctor.here import Here
from cuadrilla.messages import Message

GIB = 2**30
NO_DISK_BYTES, LITTLE_DISK_BYTES = GIB, 5 * GIB
NO_MEMORY_BYTES, LITTLE_FREE_BYTES = 2 * GIB, GIB // 2


def system(here: Here) -> Iterator[Finding]:
    """The system, the processor and Python. Always `ok`."""
    facts = here.facts
    name = facts.system_version or facts.system
    if facts.container:
        name = Message("{system}, in a container ({kind})", system=name, kind=facts.container)
    elif facts.wsl:
        name = Message("{system}, in WSL{version}", system=name, version=facts.wsl)
    yield ok(
        Message(
            "{system}; {cpu}, {cores:g} cores; Python {python}",
            system=name,
            cpu=facts.processor or facts.machine,
            cores=facts.cores,
            python=platform.python_version(),
        )
    )


def memory(here: Here) -> Iterator[Finding]:
    """There is enough memory to train, and enough of it is free."""
    have, free = here.facts.memory_bytes, here.facts.available_bytes
    if have < NO_MEMORY_BYTES:
        yield fail(
            Message("{gib:.1f} GiB of memory: too little for PyTorch and a model", gib=have / GIB),
            remedy=Message("a container's limit is set where it is started: docker run --memory 4g"),
        )
    elif free < LITTLE_FREE_BYTES:
        yield warn(
            Message("{free:.1f} of {gib:.1f} GiB of memory are free", free=free / GIB, gib=have / GIB),
            remedy=Message("close what you do not need; this lists what takes most"),
            command="ps -eo rss,pid,args --sort -rss | head" if here.facts.system == "Linux" else "top -o mem",
        )
    else:
        yield ok(Message("{gib:,.1f} GiB of memory", gib=have / GIB))


def disk(here: Here) -> Iterator[Finding]:
    """The working directory and CUADRILLA_HOME (keys and files of crews) have space, and can be written to."""
    for folder in {folder.device: folder for folder in reversed(here.folders)}.values():
        gib = folder.free_bytes / GIB
        left = Message("{path} has {gib:,.1f} GiB left", path=folder.path, gib=gib)
        remedy = Message("this lists what takes the room; delete what you do not need")
        if folder.free_bytes < LITTLE_DISK_BYTES:
            level = fail if folder.free_bytes < NO_DISK_BYTES else warn
            yield level(left, remedy=remedy, command=f"du -xhd1 {quote(folder.path)} | sort -h | tail")
        else:
            yield ok(left)
    here_folder, kept = here.folders
    if not kept.writable:
        yield fail(
            Message("{path} cannot be written to, and a crew's keys are kept there", path=kept.path),
            remedy=Message("this keeps them in the folder where you are"),
            command="export CUADRILLA_HOME=$PWD/.cuadrilla",
        )
    elif not here_folder.writable:
        cause = Message("{path} cannot be written to: no run can begin there", path=here_folder.path)
        yield warn(cause, command="cd ~")
