"""Records with a text in one field: the objects on the lines of a JSON Lines file, or the rows of a Parquet table.

A record without text is skipped and counted. A file in which no record has text is an error: the field may be wrong.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cuadrilla.data.formats.files import missing
from cuadrilla.errors import DataError
from cuadrilla.messages import Message

MAX_LINE_BYTES = 2**24
MAX_BATCH_ROWS = 64
MAX_NAMES = 8
NO_TEXT = "records_without_text"
HINT = "--field NAME reads another field"


def json_lines(stream: IO[bytes], *, where: str, field: str, counts: Counter[str]) -> Iterator[str]:
    """The texts, in order. Empty lines are ignored. Raises DataError."""
    has_text, first_why = False, ""
    for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), b""), 1):
        if line.strip():
            text, why = _text_of(line, field)
            if text is None:
                counts[NO_TEXT] += 1
                first_why = first_why or Message("{where}:{number}: {why}", where=where, number=number, why=why)
            else:
                has_text = True
                yield text
    if first_why and not has_text:
        raise DataError("no record has text in that field; the first record: {why}", why=first_why, hint=HINT)


def _text_of(line: bytes, field: str) -> tuple[str | None, str]:
    """The text of a line, or None and the reason why it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        return None, Message("not JSON: {error}", error=error)
    text = record.get(field) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text, ""
    names = ", ".join(repr(name[:40]) for name in list(record)[:MAX_NAMES]) if isinstance(record, dict) else ""
    return None, Message("no text in a field {field!r} (it has: {names})", field=field, names=names)


def parquet(path: Path, *, field: str, counts: Counter[str]) -> Iterator[str]:
    """The texts in the column `field`, in order. Raises DataError, EnvironmentProblem, pyarrow's own errors."""
    try:
        import pyarrow as pa
        from pyarrow import parquet as pq
    except ImportError as error:
        raise missing("pyarrow", suffix=".parquet") from error
    with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        schema = file.schema_arrow
        kind = schema.field(field).type if field in schema.names else pa.null()
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if kind not in (pa.string(), pa.large_string()):
            names = ", ".join(map(repr, schema.names[:MAX_NAMES]))
            why = "{path}: no column {field!r} of text (it has: {names})"
            raise DataError(why, path=path, field=field, names=names, hint=HINT)
        for batch in file.iter_batches(batch_size=MAX_BATCH_ROWS, columns=[field], use_threads=False):
            for cell in batch.column(0).to_pylist():
                if cell is None:
                    counts[NO_TEXT] += 1
                else:
                    yield cell
