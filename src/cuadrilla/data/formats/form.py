"""Which reader a file's name asks for."""

from pathlib import PurePosixPath
from typing import NamedTuple

from cuadrilla.data.formats.archive import ARCHIVES
from cuadrilla.data.formats.packing import PACKINGS
from cuadrilla.messages import Message

PARQUET = ".parquet"
ACCEPTED = Message("text as .txt, .md, .jsonl, .parquet or TEI .xml, also packed (.gz, .zst, .xz, .bz2), .zip or .tar")

_FORMS = {name: name for name in (".txt", ".md", ".jsonl", ".xml", PARQUET)} | {".ndjson": ".jsonl"}


class Form(NamedTuple):
    """How a file is read, from its name."""

    content: str
    """`.txt`, `.md`, `.jsonl`, `.xml` or `.parquet`; "" for an archive."""
    packing: str = ""
    """One of `PACKINGS`, or ""."""
    archive: str = ""
    """One of `ARCHIVES`, or ""."""


def form_of(name: str) -> Form | None:
    """The form of a file named `name`, or None if such files are not read."""
    lower = name.lower()
    for archive in ARCHIVES:
        if lower.endswith(archive):
            return Form("", archive=archive)
    packing = next((packing for packing in PACKINGS if lower.endswith(packing)), "")
    content = _FORMS.get(PurePosixPath(lower.removesuffix(packing)).suffix)
    if content is None or (packing and content == PARQUET):
        return None
    return Form(content, packing=packing)
