"""Parquet: one column of text, in batches of a few megabytes."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from cuadrilla.data.formats.packing import CHUNK_BYTES, INSTALL, Limit
from cuadrilla.data.formats.record import BadRecord, Reading
from cuadrilla.errors import DataError, EnvironmentProblem
from cuadrilla.messages import Message

if TYPE_CHECKING:
    from pyarrow import parquet as pq

_BATCH_BYTES = 2**24
_MAX_BATCH_ROWS = 64
_MAX_NAMES = 8


def records(path: Path, *, reading: Reading, counts: Counter[str]) -> Iterator[str]:
    """The cells of the column, in order. Raises DataError (EnvironmentProblem without pyarrow), pyarrow's own errors.

    A cell without text raises with its row's number, from 1, or is counted if `reading` skips bad records.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet as pq
    except ImportError as error:
        raise EnvironmentProblem("reading .parquet needs pyarrow, which is not installed", hint=INSTALL) from error
    limit = Limit(path)
    number = 0
    with pq.ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as file:
        _check_column(path, file, reading.field)
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        largest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
        rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // max(1, largest)))
        for batch in file.iter_batches(batch_size=rows, columns=[reading.field], use_threads=False):
            cells = batch.column(0)
            cells = cells.dictionary_decode() if pa.types.is_dictionary(cells.type) else cells
            for cell in cells.cast(pa.large_binary()).to_pylist():
                number += 1
                try:
                    yield _text(cell)
                    limit.spend(cell)
                except BadRecord as bad:
                    if not reading.skip_bad:
                        raise DataError(
                            "{path}: row {number}: {why}", path=path, number=number, why=bad.message, hint=bad.hint
                        ) from bad
                    counts[bad.reason] += 1


def _text(cell: bytes | None) -> str:
    if cell is None:
        raise BadRecord("records_wrong_type", Message("the text is null"))
    try:
        return cell.decode()
    except UnicodeDecodeError as error:
        raise BadRecord("records_broken", Message("not UTF-8")) from error


def _check_column(path: Path, file: "pq.ParquetFile", field: str) -> None:
    import pyarrow as pa

    schema = file.schema_arrow
    if field not in schema.names:
        raise DataError(
            "{path}: no column {field!r} (it has: {names})",
            path=path,
            field=field,
            names=", ".join(map(repr, schema.names[:_MAX_NAMES])),
            hint="--field NAME reads another column",
        )
    kind = schema.field(field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(
            "{path}: the column {field!r} is not text but {kind}",
            path=path,
            field=field,
            kind=str(kind),
            hint="a cell must be one text: cast or join it to string first, or --field NAME reads another column",
        )
