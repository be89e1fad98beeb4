"""How much room a file system has, asked without waiting for one that does not answer.

A folder of a server that has gone away (NFS, SMB, FUSE, a folder of Windows under WSL) holds whoever asks for its size.
No time limit reaches the system's call, and some file systems do not even let a killed process go: a thread of ours
that asks would keep us from ending. So where that can be, a child asks, and is left alone if it is late; until it has
gone nobody asks again: there is at most one for each folder, however many look and however often.
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from cuadrilla.host.container import read_text

SECONDS = 1.0
RETRY_SECONDS = 30.0
"""One that was late must not hold up every sample."""
SLOW_FILESYSTEMS = (
    "9p", "drvfs", "v9fs", "virtiofs", "fuse", "fuseblk", "cifs", "smb3", "nfs", "nfs4", "ceph", "glusterfs", "afs",
    "lustre", "smbfs", "afpfs", "webdav", "macfuse", "osxfuse",
)  # fmt: skip
SPACE = "\\040"
"""In a table of mounts."""
ERRORS = (psutil.Error, OSError, RuntimeError, ValueError)
CHILD = """
import os, sys
found = os.statvfs(sys.argv[1])
print(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)
"""
Room = tuple[int | None, int | None]
"""Bytes that we may still write, and all; None: not known."""
UNKNOWN: Room = (None, None)
_late: dict[str, tuple["subprocess.Popen[bytes]", float]] = {}
"""The children of this process that were late, by folder, and when to try again."""
_lock = threading.Lock()


def room_of(folder: Path) -> Room:
    """Of the file system that holds a folder. Never raises; takes `SECONDS` at most, and seldom."""
    try:
        path = os.path.abspath(folder)
        if is_slow(mount_of(path)[1]):
            return _told_by_child(path)
        usage = psutil.disk_usage(path)
    except ERRORS:
        return UNKNOWN
    return usage.free, usage.total


def is_slow(filesystem: str) -> bool:
    """Whether it may be slow, or hang: another program, or another machine, answers for it."""
    return filesystem.partition(".")[0] in SLOW_FILESYSTEMS


def mount_of(path: str) -> tuple[str, str]:
    """(mount point, type) of the file system with this path. Raises psutil's errors."""
    table = read_text(Path("/proc/mounts"))
    if not table and os.name == "posix":  # macOS
        parts = psutil.disk_partitions(all=True)
        table = "\n".join(f"- {part.mountpoint.replace(' ', SPACE)} {part.fstype}" for part in parts)
    return parse_mounts(table, path)


def parse_mounts(text: str, path: str) -> tuple[str, str]:
    """(mount point, type) of the file system with this path, from /proc/mounts: the longest and the last one."""
    best = ("/", "")
    for line in text.splitlines():
        fields = line.split()
        if len(fields) < 3:
            continue
        mount = fields[1].replace(SPACE, " ")
        inside = path == mount or path.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best[0]):
            best = (mount, fields[2])
    return best


def _told_by_child(path: str) -> Room:
    with _lock:
        if path in _late:
            child, until = _late[path]
            if child.poll() is None or time.monotonic() < until:
                return UNKNOWN
            del _late[path]
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", CHILD, path],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=os.path.sep,
            start_new_session=True,  # Ctrl-C is for us
        )
        try:
            said, _ = child.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()  # which it may not obey before its file system answers
            _late[path] = (child, time.monotonic() + RETRY_SECONDS)
            return UNKNOWN
        return _parsed(said)


def _parsed(said: bytes) -> Room:
    words = said.split()
    if len(words) != 2 or not all(word.isdigit() for word in words):
        return UNKNOWN
    return int(words[0]), int(words[1])
