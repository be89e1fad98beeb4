"""Parquet: one column of text, row group by row group, in batches of a few megabytes.

pyarrow takes as much memory as a page says it needs. So the headers of the column's pages are read first, and a page
of more than `MAX_PAGE_BYTES` is refused; the number of rows in a batch follows from the largest page. (Apache Parquet
format, parquet.thrift.)
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from cuadrilla.data.formats.packing import CHUNK_BYTES, INSTALL, Budget, reason_of
from cuadrilla.data.formats.record import BadRecord, Reading
from cuadrilla.data.formats.thrift import BINARY, I32, I64, LIST, STRUCT, Compact
from cuadrilla.errors import DataError, EnvironmentProblem
from cuadrilla.messages import Message

if TYPE_CHECKING:
    import pyarrow as pa

MAX_PAGE_BYTES = 2**26
"""Writers aim at 1 MiB; a page is larger if one of its cells is."""

_BATCH_BYTES = 2**26
_MAX_BATCH_ROWS = 1_024
_MAX_FOOTER_BYTES = 2**26
_HEADER_BYTES = 2**12
_COLUMN_SIZES = (7, 9, 11)
"""ColumnMetaData.total_compressed_size, .data_page_offset, .dictionary_page_offset"""
_DAMAGED = "fetch it again, or leave it out"


def records(path: Path, *, reading: Reading, counts: Counter[str]) -> Iterator[str]:
    """The cells of the column, in order. Raises DataError (EnvironmentProblem without pyarrow).

    A cell without text raises with its row's number, from 1, or is counted if `reading` skips bad records.
    """
    try:
        import pyarrow as pa
        from pyarrow import parquet as pq
    except ImportError as error:
        raise EnvironmentProblem("reading .parquet needs pyarrow, which is not installed", hint=INSTALL) from error
    number = 0
    try:
        budget = Budget(where=str(path), packed_bytes=path.stat().st_size)
        rows = _batch_rows(path, reading.field)
        with pq.ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as file:
            column = _column(path, file.schema_arrow, reading.field)
            for batch in file.iter_batches(batch_size=rows, columns=[column], use_threads=False):
                cells = batch.column(0)
                if pa.types.is_dictionary(cells.type):
                    cells = cells.dictionary_decode()
                for cell in cells.cast(pa.large_binary()).to_pylist():
                    number += 1
                    budget.spend(len(cell or b""))
                    try:
                        yield _text(cell)
                    except BadRecord as bad:
                        if not reading.skip_bad:
                            raise DataError(
                                "{path}: row {number}: {why}", path=path, number=number, why=bad.message, hint=bad.hint
                            ) from bad
                        counts[bad.reason] += 1
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        raise DataError(
            "{path} is damaged or not parquet: {reason}", path=path, reason=_first_line(error), hint=_DAMAGED
        ) from error


def _first_line(error: Exception) -> str:
    reason = reason_of(error)
    if isinstance(reason, Message):
        return reason
    lines = reason.splitlines()
    return lines[0][:200] if lines else Message("unreadable")


def _text(cell: bytes | None) -> str:
    if cell is None:
        raise BadRecord("records_wrong_type", Message("the text is null"))
    try:
        return cell.decode()
    except UnicodeDecodeError as error:
        raise BadRecord("records_broken", Message("not UTF-8")) from error


def _footer(path: Path) -> bytes:
    """The metadata of all row groups. Its length stands in front of the mark at the end of the file."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - 8))
        tail = file.read()
        length = int.from_bytes(tail[:4], "little")
        if tail[4:] != b"PAR1" or length > min(_MAX_FOOTER_BYTES, size - 8):
            raise OSError(Message("it has no usable footer"))
        file.seek(size - 8 - length)
        return file.read(length)


def _column(path: Path, schema: "pa.Schema", field: str) -> str:
    import pyarrow as pa

    if field not in schema.names:
        names = ", ".join(repr(name) for name in schema.names[:8])
        raise DataError(
            "{path}: no column {field!r} (there: {names})",
            path=path,
            field=field,
            names=names,
            hint="--field NAME reads another column",
        )
    kind = schema.field(field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        hint = "--field NAME reads another column"
        if pa.types.is_nested(kind):
            hint = "a cell must be one text: join its parts first, or --field NAME reads another column"
        elif pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            hint = "if it is text, cast it to string first, or --field NAME reads another column"
        raise DataError(
            "{path}: the column {field!r} is not text but {kind}", path=path, field=field, kind=kind, hint=hint
        )
    return field


def _batch_rows(path: Path, field: str) -> int:
    """How many rows may be held at once, so that they stay below _BATCH_BYTES however long they are."""
    largest = 1
    with open(path, "rb") as file:
        for start, num_bytes in _column_chunks(Compact(_footer(path)), field.encode()):
            position = start
            while position < start + num_bytes:
                unpacked, next_position = _page(file, position)
                largest = max(largest, unpacked)
                position = next_position
    if largest > MAX_PAGE_BYTES:
        raise DataError(
            "{path}: a page of the column {field!r} needs {largest:,} bytes; the limit is {most:,}",
            path=path,
            field=field,
            largest=largest,
            most=MAX_PAGE_BYTES,
            hint="a single text of that size is rather a .txt file",
        )
    return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // largest))


def _column_chunks(footer: Compact, field: bytes) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of the column in each row group. The numbers are those of fields in parquet.thrift."""
    for number, kind in footer.fields():
        if (number, kind) != (4, LIST):  # FileMetaData.row_groups
            footer.skip(kind)
            continue
        for _ in footer.elements():
            for number, kind in footer.fields():
                if (number, kind) != (1, LIST):  # RowGroup.columns
                    footer.skip(kind)
                    continue
                for _ in footer.elements():
                    yield from _column_chunk(footer, field)


def _column_chunk(footer: Compact, field: bytes) -> Iterator[tuple[int, int]]:
    path: list[bytes] = []
    sizes: dict[int, int] = {}
    for number, kind in footer.fields():
        if (number, kind) != (3, STRUCT):  # ColumnChunk.meta_data
            footer.skip(kind)
            continue
        for number, kind in footer.fields():
            if (number, kind) == (3, LIST):  # ColumnMetaData.path_in_schema
                for inner in footer.elements():
                    if inner != BINARY:
                        raise OSError(Message("a column without name"))
                    path.append(footer.binary())
            elif number in _COLUMN_SIZES and kind == I64:
                sizes[number] = footer.integer()
            else:
                footer.skip(kind)
    if path == [field]:
        start = min(sizes.get(9, -1), sizes.get(11) or sizes.get(9, -1))
        if start < 0 or sizes.get(7, -1) < 0:
            raise OSError(Message("a column without place"))
        yield start, sizes[7]


def _page(file: BinaryIO, position: int) -> tuple[int, int]:
    """(bytes of a page when unpacked, where the next one begins), from its header."""
    file.seek(position)
    data = file.read(_HEADER_BYTES)
    try:
        return _page_header(data, position)
    except EOFError:  # old writers put whole cells into a header, as minimum and maximum
        return _page_header(data + file.read(MAX_PAGE_BYTES), position)


def _page_header(data: bytes, position: int) -> tuple[int, int]:
    header = Compact(data)
    sizes: dict[int, int] = {}
    for number, kind in header.fields():
        if number in (2, 3) and kind == I32:  # PageHeader.uncompressed_page_size, .compressed_page_size
            sizes[number] = header.integer()
        else:
            header.skip(kind)
    if sizes.get(2, -1) < 0 or sizes.get(3, -1) < 0:
        raise OSError(Message("a page without size"))
    return sizes[2], position + header.position + sizes[3]
