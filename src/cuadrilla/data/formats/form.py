"""Which reader a file's name asks for, and that reader's two halves: the survey and the texts.

A survey reads everything once, so that whatever is wrong is said before any work is done, and counted once.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from cuadrilla.data.formats import jsonl, tei
from cuadrilla.data.formats.archive import ARCHIVES
from cuadrilla.data.formats.encoding import Finding, decoded, detect
from cuadrilla.data.formats.packing import PACKINGS
from cuadrilla.data.formats.record import Reading
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


def survey_stream(
    content: str, chunks: Iterable[bytes], *, where: str, reading: Reading, counts: Counter[str]
) -> Finding | None:
    """What a stream holds; None for XML that is not TEI. `counts` grows by the bad records. Raises DataError."""
    if content == ".jsonl":
        texts = jsonl.records(chunks, where=where, reading=reading, counts=counts)
        return Finding(encoding="utf-8", num_bytes=sum(len(text.encode()) for text in texts))
    if content == ".xml":
        header = tei.survey(chunks, where=where)
        if header.root not in tei.ROOTS:
            return None
        return Finding(encoding=header.encoding, num_bytes=header.num_bytes, licence=header.licence)
    return detect(chunks, where=where, repair=reading.repair)


def read_texts(
    content: str, chunks: Iterable[bytes], *, where: str, encoding: str, reading: Reading
) -> Iterator[Iterator[str]]:
    """The texts of a stream, each in bounded pieces."""
    if content == ".jsonl":
        for text in jsonl.records(chunks, where=where, reading=reading, counts=Counter()):
            yield iter((text,))
    elif content == ".xml":
        yield from tei.texts(chunks, where=where)
    else:
        yield decoded(chunks, encoding)
