"""Parquet: one column of text, row group by row group, in batches of a few megabytes.

pyarrow takes as much memory as a page says it needs. So the headers of the column's pages are read first, and a page
of more than `MAX_PAGE_BYTES` is refused; the number of rows in a batch follows from the largest page. (Apache Parquet
Format 2.11: parquet.thrift, PageHeader; Thrift compact protocol.)
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from cuadrilla.data.formats.packing import CHUNK_BYTES, INSTALL, Budget
from cuadrilla.data.formats.record import BadRecord, Reading
from cuadrilla.errors import DataError, EnvironmentProblem

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet as pq

MAX_PAGE_BYTES = 2**26
"""Writers aim at 1 MiB; a page is larger if one of its cells is."""

_BATCH_BYTES = 2**26
_MAX_BATCH_ROWS = 1_024
_MAX_METADATA_BYTES = 2**26
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
        _check_metadata_size(path)
        with pq.ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as file:
            column = _column(path, file.schema_arrow, reading.field)
            rows = _batch_rows(path, file.metadata, reading.field)
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
                            raise DataError(f"{path}: row {number}: {bad}", hint=bad.hint) from bad
                        counts[bad.reason] += 1
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged or not parquet: {_first_line(error)}", hint=_DAMAGED) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or ["unreadable"])[0][:200]


def _text(cell: bytes | None) -> str:
    if cell is None:
        raise BadRecord("records_wrong_type", "the text is null")
    try:
        return cell.decode()
    except UnicodeDecodeError as error:
        raise BadRecord("records_broken", "not UTF-8") from error


def _check_metadata_size(path: Path) -> None:
    """The footer is held whole, and much larger when parsed; its length is in the last eight bytes."""
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 8))
        tail = file.read()
    if not tail.endswith(b"PAR1") or int.from_bytes(tail[:4], "little") > _MAX_METADATA_BYTES:
        raise DataError(f"{path} is damaged or not parquet: it has no usable footer", hint=_DAMAGED)


def _column(path: Path, schema: "pa.Schema", field: str) -> str:
    import pyarrow as pa

    if field not in schema.names:
        names = ", ".join(repr(name) for name in schema.names[:8])
        raise DataError(f"{path}: no column {field!r} (there: {names})", hint="--field NAME reads another column")
    kind = schema.field(field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise DataError(
            f"{path}: the column {field!r} is not text but {kind}", hint="--field NAME reads another column"
        )
    return field


def _batch_rows(path: Path, metadata: "pq.FileMetaData", field: str) -> int:
    """How many rows may be held at once, so that they stay below _BATCH_BYTES however long they are."""
    largest = 1
    with open(path, "rb") as file:
        for group in range(metadata.num_row_groups):
            row_group = metadata.row_group(group)
            for number in range(row_group.num_columns):
                column = row_group.column(number)
                if column.path_in_schema == field:
                    start = column.data_page_offset
                    if column.has_dictionary_page:
                        start = min(start, column.dictionary_page_offset)
                    largest = max(largest, _largest_page(file, start=start, num_bytes=column.total_compressed_size))
    if largest > MAX_PAGE_BYTES:
        raise DataError(
            f"{path}: a page of the column {field!r} needs {largest:,} bytes; the limit is {MAX_PAGE_BYTES:,}",
            hint="a single text of that size is rather a .txt file",
        )
    return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // largest))


def _largest_page(file: BinaryIO, *, start: int, num_bytes: int) -> int:
    """Bytes of the largest unpacked page of a column chunk, from the headers of its pages."""
    position, largest = start, 0
    while position < start + num_bytes:
        file.seek(position)
        sizes = _Thrift(file).struct()
        unpacked, packed = sizes.get(2, -1), sizes.get(3, -1)
        if unpacked < 0 or packed < 0:
            raise OSError("a page without size")
        largest = max(largest, unpacked)
        position = file.tell() + packed
    return largest


class _Thrift:
    """As much of the compact protocol as it takes to step over a page header."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def struct(self, *, depth: int = 0) -> dict[int, int]:
        """The integers among the fields, by number."""
        found: dict[int, int] = {}
        number = 0
        while head := self._byte():
            kind = head & 15
            number = number + (head >> 4) if head >> 4 else _signed(self._varint())
            value = self._value(kind, depth=depth)
            if value is not None:
                found[number] = value
        return found

    def _value(self, kind: int, *, depth: int) -> int | None:
        match kind:
            case 1 | 2:  # a boolean is its own type
                return None
            case 3:
                self._byte()
            case 4 | 5 | 6:
                return _signed(self._varint())
            case 7:
                self._skip(8)
            case 8:
                self._skip(self._varint())
            case 9 | 10:
                self._elements(depth=depth)
            case 12 if depth < 8:
                self.struct(depth=depth + 1)
            case _:
                raise OSError("a page header that cannot be read")
        return None

    def _elements(self, *, depth: int) -> None:
        head = self._byte()
        count = head >> 4 if head >> 4 < 15 else self._varint()
        for _ in range(count):
            if head & 15 in (1, 2):
                self._byte()
            else:
                self._value(head & 15, depth=depth + 1)

    def _byte(self) -> int:
        byte = self._file.read(1)
        if not byte:
            raise OSError("a page header that ends in the middle")
        return byte[0]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise OSError("a page header that cannot be read")

    def _skip(self, num_bytes: int) -> None:
        if num_bytes > _MAX_METADATA_BYTES:
            raise OSError("a page header that cannot be read")
        self._file.seek(num_bytes, 1)


def _signed(zigzag: int) -> int:
    return (zigzag >> 1) ^ -(zigzag & 1)
