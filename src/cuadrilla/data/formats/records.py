"""Records: an object on each line of a JSON Lines file, a row of a Parquet table; one of their fields is a text."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from cuadrilla.data.formats.files import INSTALL
from cuadrilla.data.reading import Log
from cuadrilla.errors import DataError, EnvironmentProblem
from cuadrilla.messages import Message

MAX_LINE_BYTES = 2**24
MAX_BATCH_ROWS = 64
MAX_NAMES = 8


def json_lines(stream: IO[bytes], *, where: str, log: Log) -> Iterator[str]:
    """The texts, in order; empty lines are nothing. A bad line raises DataError, or is counted."""
    for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES), b""), 1):
        if line.strip():
            text, why = _text_of(line, log.reading.field)
            if text is None:
                log.refuse_record(f"{where}:{number}", why)
            else:
                yield text


def _text_of(line: bytes, field: str) -> tuple[str | None, str]:
    """The text of a line, or why it has none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        is_cut = not line.endswith(b"\n")
        cut = Message("the line is cut off or broken ({error})", error=error)
        return None, cut if is_cut else Message("not JSON: {error}", error=error)
    text = record.get(field) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text, ""
    names = ", ".join(repr(name[:40]) for name in list(record)[:MAX_NAMES]) if isinstance(record, dict) else ""
    return None, Message("no text in a field {field!r} (it has: {names})", field=field, names=names)


def parquet(path: Path, *, log: Log) -> Iterator[str]:
    """The cells of the column, in order. Raises DataError, EnvironmentProblem, pyarrow's own errors.

    A cell without text raises, too, or is counted.
    """
    try:
        from pyarrow import parquet as pq
    except ImportError as error:
        raise EnvironmentProblem("reading .parquet needs pyarrow, which is not installed", hint=INSTALL) from error
    number = 0
    with pq.ParquetFile(path, buffer_size=2**20, pre_buffer=False) as file:
        field, columns = log.reading.field, file.schema_arrow.names
        if field not in columns:
            names = ", ".join(map(repr, columns[:MAX_NAMES]))
            hint = "--field NAME reads another column"
            raise DataError(
                "{path}: no column {field!r} (it has: {names})", path=path, field=field, names=names, hint=hint
            )
        for batch in file.iter_batches(batch_size=MAX_BATCH_ROWS, columns=[field], use_threads=False):
            for cell in batch.column(0).to_pylist():
                number += 1
                if isinstance(cell, str):
                    yield cell
                else:
                    log.refuse_record(f"{path}:{number}", Message("the cell is not text"))
