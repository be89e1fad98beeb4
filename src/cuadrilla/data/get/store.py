"""Object stores, other file systems and the Hugging Face hub by fsspec: `s3://BUCKET/FILE`, `hf:OWNER/NAME/FOLDER`.

A folder stands for the files in it that `data prepare` reads; no script of a dataset is ever run. The libraries find
their own credentials (profiles, environment, instance roles, `hf auth login`) and repeat what fails on the way. Of the
hub a revision becomes the commit it stands for, so that all files are of one state and the record says which.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any, cast

import httpx2 as httpx

from cuadrilla.data.formats.files import form_of
from cuadrilla.data.get.record import UNKNOWN
from cuadrilla.data.get.web import Part, Progress
from cuadrilla.errors import ConfigError, EnvironmentProblem, LinkError
from cuadrilla.messages import Message
from cuadrilla.rundir import storage_errors

HUB = "hf:"
ENCRYPTED_OR_HERE = ("https://", "http://127.0.0.1:", "http://localhost:")
"""Beginnings of the addresses that the hub's token is sent to."""
BLOCK_BYTES = 2**24
_DATASET = re.compile(r"hf:([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w.-]+))?(/[^@]*)?")


def list_store(address: str) -> tuple[dict[str, str], str]:
    """The address of the file, or of each file below the folder, in order of names, with its SHA-256 if the hub knows
    it; and their licence.

    Raises EnvironmentProblem if the library for this store is not installed, ConfigError, LinkError.
    """
    licence = UNKNOWN
    with _translated(address):
        if address.startswith(HUB) and "://" not in address:
            address, licence = _of_commit(address)
        files, path = _opened(address)
        found = cast(dict[str, Any], files.find(path, detail=True))
        names = [name for name in sorted(found) if name == path or _is_read(PurePosixPath(name).name)]
        if not names:
            raise FileNotFoundError("there is no such file")
    return {files.unstrip_protocol(name): (found[name].get("lfs") or {}).get("sha256", "") for name in names}, licence


def copy_from_store(address: str, part: Part, *, progress: Progress) -> str:
    """The whole file into `part`; its name. Raises LinkError, ResourceError."""
    with _translated(address):
        files, path = _opened(address)
        version = files.ukey(path)
        source = files.open(path, "rb", block_size=BLOCK_BYTES)
    name = PurePosixPath(path).name
    with source, storage_errors(part.path):
        if part.validator != version:
            part.begin(version)
        with open(part.path, "ab") as file:
            for chunk in _chunks(source, address, start=part.num_bytes):
                file.write(chunk)
                progress(Message("fetching {name}", name=name), file.tell(), source.size or 0)
    return name


def _opened(address: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    if address.startswith(HUB):
        _require_encryption()
    files, path = url_to_fs(address, skip_instance_cache=True)
    return files, str(path)


def _is_read(name: str) -> bool:
    return form_of(name) is not None and not name.startswith(".")


def _chunks(source: IO[bytes], address: str, *, start: int) -> Iterator[bytes]:
    with _translated(address):
        source.seek(start)
        while chunk := source.read(BLOCK_BYTES):
            yield chunk


def _of_commit(address: str) -> tuple[str, str]:
    """fsspec's address of a dataset at the commit of its revision, and the licence that its card names."""
    import huggingface_hub as hub

    given = _DATASET.fullmatch(address)
    if not given:
        hint = "write hf:OWNER/NAME, hf:OWNER/NAME/FOLDER or hf:OWNER/NAME@REVISION/FOLDER"
        raise ConfigError("{text!r} is not a dataset of the hub", text=address, hint=hint)
    _require_encryption()
    info = hub.HfApi().dataset_info(given[1], revision=given[2] or "main")
    card: Any = info.card_data or {}
    return f"hf://datasets/{given[1]}@{info.sha}{given[3] or ''}", str(card.get("license") or UNKNOWN)


def _require_encryption() -> None:
    """Raises ConfigError if the hub's token would be sent in the clear."""
    from huggingface_hub import HfApi, get_token

    endpoint = HfApi().endpoint
    if get_token() and not endpoint.startswith(ENCRYPTED_OR_HERE):
        problem = "{endpoint} would receive the hub's token unencrypted"
        raise ConfigError(problem, endpoint=endpoint, hint="set HF_ENDPOINT to an https:// address")


@contextmanager
def _translated(address: str) -> Iterator[None]:
    """The libraries' errors in our tree."""
    try:
        yield
    except ImportError as error:
        raise EnvironmentProblem(
            "{address} needs a library that is not installed: {error}",
            address=address,
            error=error,
            hint='pip install "cuadrilla[hf]"' if address.startswith(HUB) else 'pip install "cuadrilla[remote]"',
        ) from error
    except (OSError, ValueError, httpx.HTTPError, _error_of_s3("BotoCoreError"), _error_of_s3("ClientError")) as error:
        raise LinkError(
            "{url}: {reason}",
            url=address,
            reason=(str(error).strip() or type(error).__name__).splitlines()[0],
            hint="check the spelling and the network, and log in to the store (for S3: `aws configure`; for the hub: "
            "`hf auth login`)",
        ) from error


def _error_of_s3(name: str) -> type[Exception]:
    """They are no OSErrors, and only there if its client was loaded."""
    return getattr(sys.modules.get("botocore.exceptions"), name, OSError)
