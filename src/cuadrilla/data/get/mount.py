"""Object stores and other mounts through fsspec: `s3://BUCKET/FILE`, and the like.

fsspec finds its own credentials (profiles, environment, instance roles); an address never holds any. A folder stands
for the files below it.
"""

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from cuadrilla.data.get.address import check_address
from cuadrilla.data.get.stream import PassingError, Stream
from cuadrilla.errors import ConfigError, EnvironmentProblem, LinkError

SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "sftp", "ssh", "smb", "hdfs", "memory", "file")
"""Not all that fsspec knows: chains of file systems and those that run code are not addresses of data."""
MAX_FILES = 10_000
READ_BYTES = 2**20


class Mount:
    """A file in an opened fsspec file system."""

    def __init__(self, file_system: Any, path: str) -> None:
        self._file_system = file_system
        self._path = path

    def open(self, offset: int, validator: str) -> Stream:
        """See `Origin.open`."""
        with _translated(self._path):
            self._file_system.invalidate_cache()
            size, found = self._file_system.info(self._path).get("size"), self._file_system.ukey(self._path)
            start = offset if offset and found == validator else 0
            file = self._file_system.open(self._path, "rb")
            file.seek(start)
        name = PurePosixPath(self._path).name
        chunks = _chunks(file, self._path)
        return Stream(start=start, total_bytes=size, validator=found, name=name, chunks=chunks, close=file.close)


def list_mount(address: str) -> list[tuple[str, int, Mount]]:
    """(address, bytes, origin) of the file, or of each file below the folder, in order of names.

    Raises EnvironmentProblem if the library for this store is not installed, ConfigError, LinkError.
    """
    scheme = urlsplit(check_address(address)).scheme
    if scheme not in SCHEMES or re.search(":{2}", address):
        raise ConfigError(
            "{address!r} is not a known kind of address",
            address=address,
            hint="known: {schemes}",
            schemes=", ".join(SCHEMES),
        )
    try:
        from fsspec.core import url_to_fs

        with _translated(address):
            file_system, path = url_to_fs(address)
            facts = file_system.info(path)
            found = file_system.find(path, detail=True) if facts["type"] == "directory" else {path: facts}
    except ImportError as error:
        raise EnvironmentProblem(
            "{scheme}:// needs a library that is not installed: {error}",
            scheme=scheme,
            error=error,
            hint='pip install "cuadrilla[remote]"',
        ) from error
    except ValueError as error:
        raise ConfigError(
            "{address!r} cannot be used: {error}", address=address, error=error, hint="write it as SCHEME://BUCKET/PATH"
        ) from error
    files = [(name, each) for name, each in sorted(found.items()) if not PurePosixPath(name).name.startswith(".")]
    if not files or len(files) > MAX_FILES:
        raise LinkError(
            "{address} holds {files:,} files",
            address=address,
            files=len(files),
            hint="name a file, or a folder of 1 to {most:,} files",
            most=MAX_FILES,
        )
    return [(f"{scheme}://{name}", int(each.get("size") or 0), Mount(file_system, name)) for name, each in files]


def _chunks(file: Any, path: str) -> Iterator[bytes]:
    with _translated(path):
        while chunk := file.read(READ_BYTES):
            yield chunk


@contextlib.contextmanager
def _translated(what: str) -> Iterator[None]:
    """The libraries' errors in our tree; those of the network as PassingError."""
    try:
        yield
    except FileNotFoundError as error:
        raise LinkError(
            "{what}: there is no such file", what=what, hint="check the spelling, of the bucket too"
        ) from error
    except PermissionError as error:
        raise LinkError(
            "{what}: permission denied", what=what, hint="set up the store's own credentials (for S3: `aws configure`)"
        ) from error
    except _network_errors() as error:
        raise PassingError("{what}: {error}", what=what, error=error) from error
    except _loaded("botocore.exceptions", "BotoCoreError", "ClientError") as error:
        raise LinkError(
            "{what}: {kind}: {error}",
            what=what,
            kind=type(error).__name__,
            error=error,
            hint="set up the store's own credentials (for S3: `aws configure`), and check the address",
        ) from error


def _network_errors() -> tuple[type[Exception], ...]:
    return OSError, *_loaded("aiohttp", "ClientError"), *_loaded("botocore.exceptions", "HTTPClientError")


def _loaded(module: str, *names: str) -> tuple[type[Exception], ...]:
    """Errors of a client below fsspec that are no OSErrors; none if it was not loaded."""
    found = sys.modules.get(module)
    return tuple(getattr(found, name) for name in names) if found else ()
