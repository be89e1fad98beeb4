"""What models are tested on, read from files: texts and minimal pairs.

Files are decoded as those of a corpus are (any common encoding), and texts cleaned and cut into documents as
`cuadrilla data prepare` does, so that a text gives the same figure here as in a held-out split.
"""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuadrilla.data.corpus import documents_of
from cuadrilla.data.formats.encoding import read_text
from cuadrilla.data.shards import TokenStream, read_manifest
from cuadrilla.data.sources import list_sources
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError

GOOD = ("good", "sentence_good", "sen", "correct", "grammatical")
BAD = ("bad", "sentence_bad", "wrong_sen", "incorrect", "ungrammatical")
READ_TOKENS = 2**16


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
    for number, row in enumerate(_rows(path), 1):
        good, bad = (next((row[key] for key in keys if row.get(key)), None) for keys in (GOOD, BAD))
        if not isinstance(good, str) or not isinstance(bad, str):
            raise DataError(
                "{path}, row {row}: no pair of texts among the columns {columns}",
                path=path,
                row=number,
                columns=", ".join(map(str, row)),
                hint="name the columns good and bad",
            )
        pairs.append(TextPair(good=good, bad=bad))
    if not pairs:
        raise DataError("{path} holds no pairs", path=path, hint="one pair per line, under a header")
    return pairs


def _rows(path: Path) -> list[dict[str, Any]]:
    """Those of a table, by column. Raises DataError."""
    try:
        text = read_text(path).removeprefix("\ufeff")
        match path.suffix.lower():
            case ".jsonl":  # only line feeds end a line: JSON may hold others inside a text
                rows = [json.loads(line) for line in text.split("\n") if line.strip()]
            case ".csv":
                rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
            case _:  # in a .tsv quotation marks are text
                rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE))
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        hint = "use .tsv or .csv with a header, or .jsonl with an object in each line"
        raise DataError("cannot read {path}: {reason}", path=path, reason=error, hint=hint) from error
    return [row if isinstance(row, dict) else {} for row in rows]
