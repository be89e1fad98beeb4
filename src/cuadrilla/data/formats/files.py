"""What a file's name says about it, and its bytes: unpacked on the way, or those of an archive's members in turn.

Nothing is ever extracted; a member's name is a label and never a path that is opened. Reading raises what the
libraries raise for damage (`DAMAGE`).
"""

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple, cast

from cuadrilla.errors import EnvironmentProblem
from cuadrilla.messages import Message
from cuadrilla.printable import one_line

CHUNK_BYTES = 2**20
INSTALL = 'pip install "cuadrilla[data]"'
ACCEPTED = Message("text as .txt, .md, .jsonl, .parquet or TEI .xml, also packed (.gz, .zst, .xz, .bz2), .zip or .tar")
DAMAGE = (
    *(zipfile.BadZipFile, tarfile.TarError, zlib.error, lzma.LZMAError, OSError, EOFError, ValueError),
    *(NotImplementedError, RuntimeError, OverflowError, IndexError, MemoryError),
)
PACKINGS = (".gz", ".zst", ".xz", ".bz2")
PARQUET, TAR, ZIP = ".parquet", ".tar", ".zip"
_CONTENTS = {name: name for name in (".txt", ".md", ".jsonl", ".xml", PARQUET, TAR, ZIP)} | {".ndjson": ".jsonl"}
_SHORT = {".tgz": ".tar.gz", ".tzst": ".tar.zst", ".txz": ".tar.xz", ".tbz2": ".tar.bz2"}


class Form(NamedTuple):
    """How a file is read."""

    content: str
    packing: str = ""
    """One of `PACKINGS`, or ""."""


def form_of(name: str) -> Form | None:
    """The form of a file named `name`, or None if such files are not read."""
    path = PurePosixPath(name.lower())
    path = path.with_suffix(_SHORT.get(path.suffix, path.suffix))
    packing = path.suffix if path.suffix in PACKINGS else ""
    content = _CONTENTS.get(path.with_suffix("").suffix if packing else path.suffix)
    return None if content is None or (packing and content in (PARQUET, ZIP)) else Form(content, packing)


def opened(path: Path, packing: str) -> IO[bytes]:
    """The bytes that `path` holds. Streams that follow one another are read, as `cat a.gz b.gz` makes them."""
    match packing:
        case "":
            return open(path, "rb")
        case ".gz":
            return cast(IO[bytes], gzip.open(path))
        case ".xz":
            return lzma.open(path)
        case ".bz2":
            return bz2.open(path)
    try:
        import pyarrow as pa
    except ImportError as error:
        raise EnvironmentProblem("reading .zst needs pyarrow, which is not installed", hint=INSTALL) from error
    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), CHUNK_BYTES)


def members(path: Path, form: Form) -> Iterator[tuple[str, IO[bytes]]]:
    """(name, bytes) of every file in an archive, in its order; links and devices are passed over.

    The bytes are read before the next member is asked for, or not at all.
    """
    if form.content == ZIP:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.is_dir() and stat.S_IFMT(entry.external_attr >> 16) in (0, stat.S_IFREG):
                    with archive.open(entry) as member:
                        yield one_line(entry.filename), member
        return
    with opened(path, form.packing) as file:
        with tarfile.open(fileobj=file, mode="r|", errors="replace") as tar:
            while info := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]
                if info.isreg() and (content := tar.extractfile(info)):
                    yield one_line(info.name), content
        while file.read(CHUNK_BYTES):  # a packed one may be damaged behind its members
            pass
