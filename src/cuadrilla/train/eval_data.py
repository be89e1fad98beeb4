"""What models are tested on, read from files: texts and minimal pairs.

Files are decoded, and texts cleaned and cut into documents, as `cuadrilla data prepare` does, so that a text
gives the same figure here as in a held-out split.
"""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.data.corpus import documents_of
from cuadrilla.data.folder import open_tokens, read_manifest
from cuadrilla.data.formats.encoding import read_text
from cuadrilla.data.sources import list_sources
from cuadrilla.data.tokenizer import Tokenizer
from cuadrilla.errors import DataError

GOOD = ("good", "sentence_good", "sen")
BAD = ("bad", "sentence_bad", "wrong_sen")
"""Names of columns, those of BLiMP and of Spanish sets among them."""


@dataclass(frozen=True, kw_only=True)
class TextPair:
    """A minimal pair from a file."""

    good: str
    bad: str
    context: str = ""


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a file or folder that `cuadrilla data prepare` would read. Raises DataError."""
    return documents_of(list_sources([str(path)], exclude=path / "nothing"))


def held_out_texts(folder: Path, tokenizer: Tokenizer) -> Iterator[str]:
    """The held-out documents of a data folder, decoded: any model can be measured on them. Raises DataError."""
    end = read_manifest(folder).end_of_text
    document: list[int] = []
    for token in [*open_tokens(folder, "val").tolist(), end]:
        if token != end:
            document.append(token)
        elif document:
            yield tokenizer.decode(document)
            document = []


def read_pairs(path: Path) -> list[TextPair]:
    """Minimal pairs from TSV, CSV or JSONL with a column for the good text and one for the bad. Raises DataError."""
    try:
        text = read_text(path).removeprefix("\ufeff")
        match path.suffix.lower():
            case ".jsonl":  # only line feeds end a line: JSON may hold others inside a text
                rows = [json.loads(line) for line in text.split("\n") if line.strip()]
            case ".csv":
                rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
            case _:  # in a .tsv quotation marks are text
                rows = list(csv.DictReader(io.StringIO(text, newline=""), delimiter="\t", quoting=csv.QUOTE_NONE))
        pairs = [TextPair(good=_column(row, GOOD), bad=_column(row, BAD)) for row in rows]
    except (OSError, ValueError, csv.Error) as error:
        hint = "a .tsv or .csv whose header names columns good and bad, or a .jsonl with these keys"
        raise DataError("cannot read pairs from {path}: {reason}", path=path, reason=error, hint=hint) from error
    if not pairs:
        raise DataError("{path} holds no pairs", path=path, hint="one pair per line, under a header")
    return pairs


def _column(row: object, names: tuple[str, ...]) -> str:
    """Raises ValueError."""
    found = next((row[name] for name in names if row.get(name)), None) if isinstance(row, dict) else None
    if not isinstance(found, str):
        raise ValueError(f"{row} has no text {names[0]}")
    return found
