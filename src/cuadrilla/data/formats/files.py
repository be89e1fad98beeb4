"""The form of a file, known by its name, and its unpacked bytes.

Reading a damaged file raises the libraries' own errors (`DAMAGE`).
"""

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from cuadrilla.errors import EnvironmentProblem
from cuadrilla.messages import Message

CHUNK_BYTES = 2**20
ACCEPTED = Message("text as .txt, .md, .jsonl, .parquet or TEI .xml, also packed as .gz, .zst, .xz or .bz2")
DAMAGE = (
    *(zlib.error, lzma.LZMAError, OSError, EOFError, ValueError),
    *(NotImplementedError, RuntimeError, OverflowError, IndexError, MemoryError),
)
PARQUET = ".parquet"
ARCHIVE = re.compile(r"\.(zip|tar(\.\w+)?|t(gz|zst|xz|bz2))$", re.IGNORECASE)
"""The end of the name of an archive, whose files are not read."""
_CONTENTS = {name: name for name in (".txt", ".jsonl", ".xml", PARQUET)} | {".md": ".txt", ".ndjson": ".jsonl"}


def missing(package: str, *, suffix: str) -> EnvironmentProblem:
    hint = 'pip install "cuadrilla[data]"'
    text = "reading {suffix} needs {package}, which is not installed"
    return EnvironmentProblem(text, suffix=suffix, package=package, hint=hint)


def _open_zstandard(path: Path) -> IO[bytes]:
    try:
        import pyarrow as pa
    except ImportError as error:
        raise missing("pyarrow", suffix=".zst") from error
    return io.BufferedReader(pa.input_stream(str(path), compression="zstd"), CHUNK_BYTES)


OPENERS: dict[str, Callable[[Path], Any]] = {
    "": partial(open, mode="rb"),
    ".gz": gzip.open,
    ".zst": _open_zstandard,
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
"""How to open each packing. All streams of a file are read if there are several, as after `cat a.gz b.gz`."""


class Form(NamedTuple):
    content: str
    packing: str = ""
    """A key of `OPENERS`."""


def form_of(name: str) -> Form | None:
    """The form of a file named `name`, or None if such files are not read."""
    path = PurePosixPath(name.lower())
    packing = path.suffix if path.suffix in OPENERS else ""
    content = _CONTENTS.get(path.with_suffix("").suffix if packing else path.suffix)
    return None if content is None or (packing and content == PARQUET) else Form(content, packing)
