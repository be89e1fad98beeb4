"""Object stores and other file systems by fsspec: `s3://BUCKET/FILE` and the like; a folder stands for its files.

fsspec finds its own credentials (profiles, environment, instance roles) and repeats what fails on the way.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO

from cuadrilla.data.get.web import Progress
from cuadrilla.errors import ConfigError, EnvironmentProblem, LinkError
from cuadrilla.messages import Message
from cuadrilla.rundir import storage_errors

READ_BYTES = 2**20


def list_store(address: str) -> list[str]:
    """The address of the file, or of each file below the folder, in order of names.

    Raises EnvironmentProblem if the library for this store is not installed, ConfigError, LinkError.
    """
    try:
        from fsspec.core import url_to_fs

        with _translated(address):
            files, path = url_to_fs(address)
            found = files.find(path)
    except ImportError as error:
        raise EnvironmentProblem(
            "{address} needs a library that is not installed: {error}",
            address=address,
            error=error,
            hint='pip install "cuadrilla[remote]"',
        ) from error
    except ValueError as error:
        hint = "write it as SCHEME://BUCKET/PATH"
        raise ConfigError("{address!r} cannot be used: {error}", address=address, error=error, hint=hint) from error
    visible = [each for each in sorted(found) if not PurePosixPath(each).name.startswith(".")]
    if not visible:
        hint = "check the spelling, of the bucket too"
        raise LinkError("{what}: there is no such file", what=address, hint=hint)
    return [files.unstrip_protocol(each) for each in visible]


def copy_from_store(address: str, path: Path, *, progress: Progress) -> str:
    """The whole file into `path`; its name. Raises LinkError, ResourceError."""
    from fsspec.core import url_to_fs

    with _translated(address):
        files, name = url_to_fs(address)
        source = files.open(name, "rb")
    stage = Message("fetching {name}", name=PurePosixPath(name).name)
    with source, storage_errors(path), open(path, "wb") as file:
        for chunk in _chunks(source, address):
            file.write(chunk)
            progress(stage, file.tell(), source.size or 0)
    return PurePosixPath(name).name


def _chunks(source: IO[bytes], address: str) -> Iterator[bytes]:
    with _translated(address):
        while chunk := source.read(READ_BYTES):
            yield chunk


@contextmanager
def _translated(address: str) -> Iterator[None]:
    """The libraries' errors in our tree."""
    try:
        yield
    except (OSError, _error_of_s3("BotoCoreError"), _error_of_s3("ClientError")) as error:
        raise LinkError(
            "{url}: {reason}",
            url=address,
            reason=str(error) or type(error).__name__,
            hint="check the spelling, and set up the store's own credentials (for S3: `aws configure`)",
        ) from error


def _error_of_s3(name: str) -> type[Exception]:
    """They are no OSErrors, and only there if its client was loaded."""
    return getattr(sys.modules.get("botocore.exceptions"), name, OSError)
