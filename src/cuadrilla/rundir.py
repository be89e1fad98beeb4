"""Paths in a run directory (the folder that holds `run.toml`), and safe writes, there and elsewhere.

Invariants
* One writer: a `FolderLock` holds `lock` (pid and host of the process) for as long as a training runs.
* A file is replaced as a whole: temporary name in the same folder, fsync, `os.replace`, fsync of the folder.
* Only the owner can read what a training writes, whatever the umask: samples and weights reveal their training text.
* A file that grows (`metrics.jsonl`, `events.jsonl`) has one JSON object per line. A full disk takes all of a write or
  nothing (`append_lines`). A line torn by a power cut is skipped by `read_jsonl`; the next write begins a new line.
"""

import errno
import hashlib
import json
import math
import os
import shlex
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import filelock
from safetensors import SafetensorError

from cuadrilla.errors import ConfigError, ResourceError
from cuadrilla.messages import Message

LOCK_SECONDS = 0.5  # a monitor holds the lock for an instant when it tests it (`is_held`)
MAX_KEPT = 4 * 2**20  # characters that wait in memory for a full disk


class RunDir:
    """The paths of a run, named by its folder or its run file; creates nothing. `version`: use this checkpoint."""

    def __init__(self, path: Path, version: int | None = None) -> None:
        path, name = (path.parent, path.name) if path.suffix == ".toml" and path.is_file() else (path, "run.toml")
        self.path, self.version, self.run_file = path, version, path / name
        self.config = path / "config.json"
        self.env = path / "env.json"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.status = path / "status.json"
        self.lock = path / "lock"
        self.checkpoints = path / "checkpoints"
        self.journal = path / "journal"
        self.notes = path / "notes.txt"  # written by a person on the dashboard
        self.tensorboard = path / "tb"
        self.logs = path / "logs"
        self.nodes = path / "nodes"  # usage and log of each machine: `NAME.jsonl` (`node_file`), bounded in size
        self.tokenizer = path / "tokenizer.json"  # with it, only training needs a language model's data folder
        self.teachers = path / "teachers"  # copies of the models that teach this one, in folders 0, 1, ...
        self.initial = path / ".initial"  # initial weights of this run, if another machine has sent them


def node_file(worker: str) -> str:
    """The name of a worker's file in `nodes`, quoted: a worker on a device is called NODE/cuda:0."""
    return f"{quote(worker, safe='')}.jsonl"


def worker_of_node_file(name: str) -> str:
    return unquote(name.removesuffix(".jsonl"))


def typed(path: Path) -> str:
    """A path to type in this shell: relative if it lies below the working directory, and quoted where necessary."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_private(folder: Path) -> None:
    """Make a folder that only its owner can read. An existing folder stays as it is. Raises ResourceError."""
    with storage_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """An `opener` for `open`: only the owner can read a file made by it, from its first byte on."""
    return os.open(path, flags, 0o600)


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` durable. A no-op where folders cannot be opened (Windows)."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Turn errors of a full, read-only or broken disk into a ResourceError with the path; for a too long name, into a
    ConfigError."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors' error for a full or failing disk
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            raise ConfigError("{path}: the name is too long", path=path, hint="choose a shorter one") from error
        hint = "free some space, or choose a folder where you may write; then run the same command again"
        if getattr(error, "errno", None) in (errno.EEXIST, errno.ENOTDIR):
            hint = "choose another name"
        reason = getattr(error, "strerror", None) or error
        raise ResourceError("cannot write {path}: {reason}", path=path, reason=reason, hint=hint) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`. In the end the file written there replaces `path`. Raises ResourceError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with storage_errors(path):
        try:
            temporary.unlink(missing_ok=True)  # left by a killed process: in containers pids repeat
            yield temporary
            os.replace(temporary, path)
            fsync_folder(path.parent)
        finally:
            with suppress(OSError):  # the error before this one is reported
                temporary.unlink()


def write_atomic(path: Path, data: str | bytes | Iterable[bytes | memoryview], *, private: bool = False) -> None:
    """Replace a whole file: it holds the old content or the new, never a part. Raises ResourceError.

    `data`: the content, whole or in parts. `private`: only the owner can read it, from its first byte on. A `chmod`
    afterwards would come too late.
    """
    raw = data.encode() if isinstance(data, str) else data
    with replacing(path) as temporary, open(temporary, "xb", opener=open_private if private else None) as file:
        file.writelines([raw] if isinstance(raw, bytes) else raw)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, value: dict[str, Any], *, private: bool = False) -> None:
    """Raises ResourceError."""
    write_atomic(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", private=private)


def append_event(path: Path, kind: str, **fields: Any) -> None:
    """Append an event to `events.jsonl`. Raises ResourceError."""
    append_lines(path, event_line(kind, fields))


def event_line(kind: str, fields: Mapping[str, Any]) -> str:
    return json.dumps({"time": time.time(), "event": kind, **finite(fields)}, ensure_ascii=False) + "\n"


def append_lines(path: Path, text: str) -> int:
    """Append lines, all or none, after ending a torn line. Returns the file's size in bytes. Raises ResourceError."""
    with storage_errors(path), open(path, "a+b", buffering=0, opener=open_private) as file:
        before = file.seek(0, os.SEEK_END)
        file.seek(max(before - 1, 0))
        is_torn = file.read(1) not in (b"", b"\n")
        left = memoryview((b"\n" if is_torn else b"") + text.encode())
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(before)
            raise
        return file.tell()


class KeptLines:
    """Appends lines to a file. Lines refused by a full disk are kept, and written with the next one."""

    def __init__(self, path: Path) -> None:
        self._path, self._kept = path, ""

    def append(self, line: str) -> None:
        """Raises ResourceError. The line is then kept for the next write, if `MAX_KEPT` allows it."""
        if len(self._kept) + len(line) <= MAX_KEPT:
            self._kept += line
        append_lines(self._path, self._kept)
        self._kept = ""


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with None for NaN and infinities, which JSON lacks."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def read_object(path: Path) -> dict[str, Any]:
    """The object in a small JSON file of ours; {} if the file is missing or damaged."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an append-only file: none of a missing file. A torn line is skipped. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return
    except OSError as error:
        hint = "move it away, or name another run"
        raise ConfigError("cannot read {path}: {reason}", path=path, reason=error.strerror, hint=hint) from error
    for line in text.split("\n"):
        with suppress(ValueError, RecursionError):
            if isinstance(row := json.loads(line), dict):
                yield row


def last_rows(path: Path) -> list[dict[str, Any]]:
    """The last row of each version, in the order of their first rows: a resumed run writes some versions again."""
    return list({row.get("version"): row for row in read_jsonl(path)}.values())


WAIT = Message("wait for it or stop it")


class FolderLock:
    """Exclusive use of a folder by one process: a lock of the operating system on a file that names its owner. The
    system frees it when the process ends, even by a kill. Raises ConfigError (exit 2) while another process holds it.
    """

    def __init__(self, path: Path, *, hint: Message = WAIT) -> None:
        self._path, self._hint = path, hint
        self._lock = filelock.FileLock(path, timeout=LOCK_SECONDS, thread_local=False)

    def __enter__(self) -> "FolderLock":
        with storage_errors(self._path):
            try:
                self._lock.acquire()
            except filelock.Timeout:
                owner = read_object(self._path)
                raise ConfigError(
                    "{folder} is in use by process {pid} on {host}",
                    folder=self._path.parent,
                    pid=str(owner.get("pid", "?")),
                    host=str(owner.get("host", "?")),
                    hint=self._hint,
                ) from None
            self._path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)  # a process that waits for the lock sees that, and makes a new file
        self._lock.release()


def is_held(lock: Path) -> bool:
    """Whether a process holds it. It is tried twice: another process may just be looking, too."""
    try:
        if lock.exists():
            with filelock.FileLock(lock, timeout=0.02, poll_interval=0.01):
                pass
    except filelock.Timeout:
        return True
    except OSError:  # the file belongs to another user
        pass
    return False
