"""Names in a run directory, the folder that holds `run.toml`; safe writes, there and elsewhere.

Invariants
* One writer: a `FolderLock` holds `lock` (pid and host of the process) for as long as a training runs.
* A file that is written whole appears whole: temporary name in the same folder, fsync, `os.replace`, fsync folder.
* What a training writes is its owner's alone, whatever the umask: samples and weights tell what they were made from.
* A file that is appended to (`metrics.jsonl`, `events.jsonl`) is one JSON object per line. A full disk takes whole
  lines or none (`append_lines`); one that a power cut tore is skipped by `read_jsonl`, and the next has its own line.
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import filelock
from safetensors import SafetensorError

from cuadrilla.errors import ConfigError, ResourceError

SCHEMA = 1
LOCK_SECONDS = 0.5  # a monitor that looks whether somebody has it takes it for an instant
MAX_KEPT = 4 * 2**20


class RunDir:
    """Where everything in a run directory is; creates nothing. `version`: of the checkpoint that is meant."""

    def __init__(self, path: Path, version: int | None = None) -> None:
        self.path = path
        self.version = version
        self.run_file = path / "run.toml"
        self.config = path / "config.json"
        self.env = path / "env.json"
        self.metrics = path / "metrics.jsonl"
        self.events = path / "events.jsonl"
        self.status = path / "status.json"
        self.lock = path / "lock"
        self.checkpoints = path / "checkpoints"
        self.journal = path / "journal"
        self.notes = path / "notes.txt"  # a person's, written on the dashboard
        self.tensorboard = path / "tb"
        self.logs = path / "logs"
        self.nodes = path / "nodes"  # how each machine was: `NAME.jsonl`, bounded (`node_file`)
        self.tokenizer = path / "tokenizer.json"  # with it a language model is complete for everything but training
        self.teachers = path / "teachers"  # copies of the models that teach this one, each in a folder of its number
        self.initial = path / ".initial"  # the weights that this run begins with, where another machine has sent them


def node_file(worker: str) -> str:
    """The name of a worker's file in `nodes`; a worker on a device is called NODE/cuda:0."""
    return f"{quote(worker, safe='')}.jsonl"


def worker_of_node_file(name: str) -> str:
    return unquote(name.removesuffix(".jsonl"))


def typed(path: Path) -> str:
    """A path as one types it here in a shell: from this folder if it lies in it, and quoted where it must be."""
    return shlex.quote(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_private(folder: Path) -> None:
    """Make a folder that its owner alone can look into; one that is there stays as it is. Raises ResourceError."""
    with storage_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_private(path: str, flags: int) -> int:
    """For `open`: a file that it makes can be read by its owner alone, from the first byte on."""
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
    """A full, read-only or broken disk becomes a ResourceError that names the path, a name too long a ConfigError."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # the latter is how that library reports a full or failing disk
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            raise ConfigError("{path}: the name is too long", path=path, hint="choose a shorter one") from error
        hint = "free some space, or choose a folder where you may write; then run the same command again"
        reason = getattr(error, "strerror", None) or error
        raise ResourceError("cannot write {path}: {reason}", path=path, reason=reason, hint=hint) from error


def write_atomic(path: Path, data: bytes | str, *, private: bool = False) -> None:
    """Write a whole file: it holds the old content or the new, never a part. Raises ResourceError.

    `private`: nobody else may read it, from the first byte on: a `chmod` afterwards would come too late.
    """
    raw = data.encode() if isinstance(data, str) else data
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with storage_errors(path):
        try:
            temporary.unlink(missing_ok=True)  # of a killed process: in a container all have the same number
            with open(temporary, "xb", opener=open_private if private else None) as file:
                file.write(raw)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
            fsync_folder(path.parent)
        finally:
            with suppress(OSError):  # what went wrong before is what matters
                temporary.unlink()


def write_json(path: Path, value: dict[str, Any], *, private: bool = False) -> None:
    """Write `value` with its schema number, atomically. Raises ResourceError."""
    raw = json.dumps({"schema": SCHEMA, **value}, indent=1, ensure_ascii=False) + "\n"
    write_atomic(path, raw, private=private)


def append_event(path: Path, kind: str, **fields: Any) -> None:
    """One line in `events.jsonl`. Raises ResourceError."""
    append_lines(path, event_line(kind, fields))


def event_line(kind: str, fields: Mapping[str, Any]) -> str:
    return json.dumps({"time": time.time(), "event": kind, **finite(fields)}, ensure_ascii=False) + "\n"


def append_lines(path: Path, text: str) -> int:
    """Append whole lines, all of them or nothing, on a line of their own; the file's bytes. Raises ResourceError."""
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
    """A file of lines; those that its disk does not take are kept, and written with the next one. For any thread."""

    def __init__(self, path: Path) -> None:
        self._path, self._kept = path, ""
        self._lock = threading.Lock()

    def append(self, line: str) -> None:
        """Raises ResourceError; the line is kept then, unless `MAX_KEPT` characters are already."""
        with self._lock:
            if len(self._kept) + len(line) <= MAX_KEPT:
                self._kept += line
            append_lines(self._path, self._kept)
            self._kept = ""


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with None for NaN and infinities, of which JSON has none."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def read_object(path: Path) -> dict[str, Any]:
    """A small JSON file of ours; a missing or damaged one is empty."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of an append-only file; a missing file has none, a torn line is skipped. Raises ConfigError."""
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
    """Rows of an append-only file, the last of each version at the place of its first: a resumed run repeats some."""
    return list({row.get("version"): row for row in read_jsonl(path)}.values())


class FolderLock:
    """Exclusive use of a folder by one process: a lock of the system's on a file that names its owner. The system
    takes it back from a process that ends, however that ends. Raises ConfigError (exit 2) while another has it.
    """

    def __init__(self, path: Path, *, purpose: str) -> None:
        self._path = path
        self._purpose = purpose
        self._lock = filelock.FileLock(path, timeout=LOCK_SECONDS, thread_local=False)

    def __enter__(self) -> "FolderLock":
        with storage_errors(self._path):
            try:
                self._lock.acquire()
            except filelock.Timeout:
                owner = read_object(self._path)
                raise ConfigError(
                    "{folder} is in use by process {pid} on {host} ({purpose})",
                    folder=self._path.parent,
                    pid=str(owner.get("pid", "?")),
                    host=str(owner.get("host", "?")),
                    purpose=self._purpose,
                    hint="wait for it or stop it",
                ) from None
            self._path.write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
        return self

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)  # who waits for it meanwhile sees that, and makes another
        self._lock.release()


def is_held(lock: Path) -> bool:
    try:
        if lock.exists():
            with filelock.FileLock(lock, timeout=0):
                pass
    except filelock.Timeout:
        return True
    except OSError:  # it belongs to somebody else
        pass
    return False
