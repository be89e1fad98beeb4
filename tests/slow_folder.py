"""A folder whose files are read slowly, at /mnt/c: a file system of a few lines, and a command that runs in it.

    unshare --mount python -m tests.slow_folder [OPERATION=]MILLISECONDS COMMAND ...

Each read of at most 128 KiB takes so long; or each `statfs` (how much room is there), or each `lookup` of a name. The
others wait behind it. It speaks the kernel's FUSE protocol (include/uapi/linux/fuse.h, 7.31) on /dev/fuse and knows one
folder of files in memory. Needs root and a mount namespace of its own, in which it ends.
"""

import ctypes
import errno
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable

PLACE = "/mnt/c"
ROOT_NODE, BUFFER_BYTES, FOREVER = 1, 1 << 20, 3600
HEADER = struct.Struct("<IIQQIIIHH")
LOOKUP, FORGET, GETATTR, SETATTR, UNLINK, OPEN, READ, WRITE, STATFS = 1, 2, 3, 4, 10, 14, 15, 16, 17
RELEASE, FSYNC, FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR = 18, 20, 25, 26, 27, 28, 29
CREATE, INTERRUPT, BATCH_FORGET = 35, 36, 42
SILENT = (FORGET, BATCH_FORGET, INTERRUPT)
DIRECT_IO = 1  # nothing is kept in the kernel's memory
BLOCKS, BLOCK_BYTES = 10**7, 4096
SLOW = {"read": READ, "statfs": STATFS, "lookup": LOOKUP}


class Slow:
    """The files, by node."""

    def __init__(self, seconds: float, *, operation: int = READ) -> None:
        self._seconds, self._slow = seconds, operation
        self._files: dict[int, bytearray] = {}
        self._names: dict[bytes, int] = {}
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            INIT: lambda node, body: struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 12, 9, 131072, 1, 32, 0, 0),
            LOOKUP: self._lookup,
            GETATTR: lambda node, body: struct.pack("<QII", FOREVER, 0, 0) + self._attributes(node),
            SETATTR: lambda node, body: struct.pack("<QII", FOREVER, 0, 0) + self._attributes(node),
            CREATE: self._create,
            OPEN: lambda node, body: struct.pack("<QII", node, DIRECT_IO, 0),
            OPENDIR: lambda node, body: struct.pack("<QII", node, 0, 0),
            WRITE: self._write,
            READ: self._read,
            STATFS: lambda node, body: struct.pack("<QQQQQIII28x", BLOCKS, BLOCKS, BLOCKS, 9, 9, BLOCK_BYTES, 255,
                                                   BLOCK_BYTES),
            UNLINK: self._unlink,
            **dict.fromkeys((READDIR, RELEASE, RELEASEDIR, FSYNC, FLUSH), lambda node, body: b""),
        }  # fmt: skip

    def serve(self, device: int) -> None:
        while True:
            try:
                request = os.read(device, BUFFER_BYTES)
            except OSError as error:
                if error.errno == errno.ENODEV:  # it is no longer mounted
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                raise
            _, operation, unique, node, *_ = HEADER.unpack_from(request)
            if operation in SILENT:
                continue
            code, body = self._answer(operation, node, request[HEADER.size :])
            os.write(device, struct.pack("<IiQ", 16 + len(body), -code, unique) + body)

    def _answer(self, operation: int, node: int, body: bytes) -> tuple[int, bytes]:
        if operation not in self._answers:
            return errno.ENOSYS, b""
        if operation == self._slow:
            time.sleep(self._seconds)
        try:
            return 0, self._answers[operation](node, body)
        except FileNotFoundError:
            return errno.ENOENT, b""

    def _attributes(self, node: int) -> bytes:
        size = len(self._files.get(node, b""))
        mode = 0o40755 if node == ROOT_NODE else 0o100600
        return struct.pack(
            "<QQQQQQIIIIIIIIII", node, size, size // 512 + 1, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )

    def _entry(self, node: int) -> bytes:
        return struct.pack("<QQQQII", node, 0, FOREVER, FOREVER, 0, 0) + self._attributes(node)

    def _lookup(self, node: int, body: bytes) -> bytes:
        name = body.rstrip(b"\0")
        if name not in self._names:
            raise FileNotFoundError
        return self._entry(self._names[name])

    def _create(self, node: int, body: bytes) -> bytes:
        new = ROOT_NODE + 1 + len(self._files)
        self._names[body[16:].rstrip(b"\0")], self._files[new] = new, bytearray()
        return self._entry(new) + struct.pack("<QII", new, DIRECT_IO, 0)

    def _unlink(self, node: int, body: bytes) -> bytes:
        self._names.pop(body.rstrip(b"\0"), None)
        return b""

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        self._files[node][offset : offset + size] = body[40 : 40 + size]
        return struct.pack("<II", size, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        return bytes(self._files[node][offset : offset + size])


def mount(source: str, place: str, kind: str, settings: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.mount(source.encode(), place.encode(), kind.encode(), 0, settings.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), place)


def main() -> int:
    mount("none", "/mnt", "tmpfs", "")
    os.mkdir(PLACE)
    device = os.open("/dev/fuse", os.O_RDWR)
    mount("C:", PLACE, "fuse", f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other")
    operation, _, milliseconds = sys.argv[1].rpartition("=")
    slow = Slow(float(milliseconds) / 1000, operation=SLOW[operation or "read"])
    threading.Thread(target=slow.serve, args=(device,), daemon=True).start()
    return subprocess.run(["/bin/sh", "-c", f'cd {PLACE} && exec "$@"', "sh", *sys.argv[2:]], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
