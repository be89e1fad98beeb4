"""What models are tested on, read from files: texts and minimal pairs.

Files are decoded as those of a corpus are (any common encoding), and texts cleaned and cut into documents as
`cuadrilla data prepare` does, so that a text gives the same figure here as in a held-out split.
"""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuadrilla.data.corpus import documents_of
from cuadrilla.data.formats.encoding import read_text
from cuadrilla.data.shards import TokenStream, read_manifest
from cuadrilla.data.sources import list_sources
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError
from cuadrilla.messages import Message
from cuadrilla.rundir import require_regular

GOOD = ("good", "sentence_good", "sen", "correct", "grammatical")
BAD = ("bad", "sentence_bad", "wrong_sen", "incorrect", "ungrammatical")
READ_TOKENS = 2**16
SEPARATORS = {".tsv": "\t", ".csv": ","}


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """A minimal pair from a file."""

    good: str
    bad: str
    context: str = ""


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a file or folder that `cuadrilla data prepare` would read. Raises DataError."""
    for _, text in documents_of(list_sources([str(path)], exclude=path / "nothing")):
        yield text


def held_out_texts(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """The held-out documents of a data folder, decoded: any model can be measured on them. Raises DataError."""
    end = read_manifest(folder).end_of_text
    stream = TokenStream.open(folder, "val")
    kept: list[int] = []
    for start in range(0, len(stream), READ_TOKENS):
        for token in stream.read(start, min(READ_TOKENS, len(stream) - start)).tolist():
            if token != end:
                kept.append(token)
            elif kept:
                yield tokenizer.decode(kept)
                kept = []
    if kept:
        yield tokenizer.decode(kept)


def read_pairs(path: Path) -> list[TextPair]:
    """Minimal pairs from TSV, CSV or JSONL with a column for the good text and one for the bad. Raises DataError."""
    pairs = []
    for line, row in _rows(path):
        good, bad = (next((row[key] for key in keys if row.get(key)), None) for keys in (GOOD, BAD))
        if not isinstance(good, str) or not isinstance(bad, str):
            raise DataError(
                "{path}, line {line}: no pair of texts among the columns {columns}",
                path=path,
                line=line,
                columns=", ".join(map(str, row)),
                hint="name the columns good and bad (or {good} and {bad})",
                good=", ".join(GOOD[1:3]),
                bad=", ".join(BAD[1:3]),
            )
        pairs.append(TextPair(good=good, bad=bad))
    if not pairs:
        raise DataError("{path} holds no pairs", path=path, hint="one pair per line, under a header")
    return pairs


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """(line, columns) of a table. Raises DataError."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        for line, text in _lines(path):
            yield line, _json_object(text, place=Message("{path}, line {line}", path=path, line=line))
        return
    if suffix not in SEPARATORS:
        raise DataError(
            "{path}: {suffix} is not read as a table",
            path=path,
            suffix=suffix or Message("no suffix"),
            hint="use .tsv, .csv or .jsonl",
        )
    table = io.StringIO(_decoded(path), newline="")
    reader = csv.DictReader(
        table,
        delimiter=SEPARATORS[suffix],
        strict=True,
        quoting=csv.QUOTE_NONE if suffix == ".tsv" else csv.QUOTE_MINIMAL,  # in a .tsv quotation marks are text
    )
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        raise DataError(
            "{path}, line {line}: {reason}",
            path=path,
            line=reader.line_num,
            reason=error,
            hint="save the table again",
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, line) of those that are not blank. Only line feeds end a line: JSON may hold others inside a text."""
    return ((line, text) for line, text in enumerate(_decoded(path).split("\n"), 1) if text.strip())


def _json_object(text: str, *, place: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            "{place} is not JSON: {reason}", place=place, reason=error, hint="one JSON object per line"
        ) from error
    if not isinstance(value, dict):
        raise DataError("{place} is not a JSON object", place=place, hint="one JSON object per line")
    return value


def _decoded(path: Path) -> str:
    try:
        require_regular(path)
        return read_text(path).removeprefix("\ufeff")
    except OSError as error:
        problem = "cannot read {path}: {reason}"
        raise DataError(problem, path=path, reason=error.strerror, hint="check the path") from error
