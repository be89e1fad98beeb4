"""Parquet: one column of text, row group by row group, in batches of a few megabytes.

pyarrow takes as much memory as a page says it needs, and some damaged files end its process. So it reads in a child
with limited memory and time and without network (`host/sandbox.py`), which sends the cells through a pipe:

    python -m cuadrilla.data.formats.parquet PATH FIELD

Where memory cannot be limited (macOS, Windows), a page may take 2 GiB, the most that its header can say.
"""

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuadrilla.data.formats.packing import CHUNK_BYTES, INSTALL, Budget, size_of
from cuadrilla.data.formats.record import BadRecord, Reading
from cuadrilla.data.frames import receive, send
from cuadrilla.errors import DataError, EnvironmentProblem
from cuadrilla.host.sandbox import MAX_REASON, enter_sandbox, reading_from
from cuadrilla.messages import Message

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet as pq

MAX_CELL_BYTES = 2**26
MEMORY_BYTES = 2**30
"""For a page, a batch made of it, and the copies on the way out."""

_BATCH_BYTES = 2**24
_MAX_BATCH_ROWS = 64
_MAX_NAMES = 8
_CPU_SECONDS, _CPU_SECONDS_PER_BYTE = 600, 1e-6


def records(path: Path, *, reading: Reading, counts: Counter[str]) -> Iterator[str]:
    """The cells of the column, in order. Raises DataError (EnvironmentProblem without pyarrow).

    A cell without text raises with its row's number, from 1, or is counted if `reading` skips bad records.
    """
    if find_spec("pyarrow") is None:
        raise EnvironmentProblem("reading .parquet needs pyarrow, which is not installed", hint=INSTALL)
    budget = Budget(where=str(path), packed_bytes=size_of(path))
    for number, cell in enumerate(_cells(path, reading.field), start=1):
        budget.spend(len(cell or b""))
        try:
            yield _text(cell)
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


def _cells(path: Path, field: str) -> Iterator[bytes | None]:
    with reading_from(__name__, str(path.absolute()), field, folder=path.absolute().parent) as child:
        while message := receive(child.output, most_bytes=MEMORY_BYTES):
            match message:
                case {"names": names, "nature": nature, "kind": kind}, _:
                    _check_column(path, field, names=names, nature=nature, kind=kind)
                case {"sizes": sizes}, payload:
                    position = 0
                    for size in sizes:
                        yield None if size is None else payload[position : position + size]
                        position += size or 0
                case {"needs": most}, _:
                    raise DataError(
                        "{path}: the column {field!r} needs more than {most:,} bytes at once",
                        path=path,
                        field=field,
                        most=most,
                        hint="a single text of that size belongs in a .txt file",
                    )
                case {"damage": reason}, _:
                    raise _damaged(path, reason)
                case _:
                    return
        raise _damaged(path, child.ended().reason)


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        "{path} is damaged or not parquet: {reason}",
        path=path,
        reason=reason or Message("unreadable"),
        hint="fetch it again, or leave it out",
    )


def _check_column(path: Path, field: str, *, names: Sequence[str], nature: str, kind: str) -> None:
    if not nature:
        raise DataError(
            "{path}: no column {field!r} (it has: {names})",
            path=path,
            field=field,
            names=", ".join(map(repr, names)),
            hint="--field NAME reads another column",
        )
    if nature != "text":
        hint = "--field NAME reads another column"
        if nature == "nested":
            hint = "a cell must be one text: join its parts first, or --field NAME reads another column"
        elif nature == "binary":
            hint = "if it is text, cast it to string first, or --field NAME reads another column"
        raise DataError(
            "{path}: the column {field!r} is not text but {kind}", path=path, field=field, kind=kind, hint=hint
        )


def main(path: Path, field: str) -> None:
    """The child. Its messages: what the column is, the cells of each batch, and why it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started us decides when we end
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"  # the others reserve a GiB before they use any
    import pyarrow as pa
    from pyarrow import parquet as pq

    enter_sandbox(MEMORY_BYTES, cpu_seconds=_CPU_SECONDS + int(_CPU_SECONDS_PER_BYTE * path.stat().st_size))
    out = sys.stdout.buffer
    try:
        with pq.ParquetFile(path, buffer_size=CHUNK_BYTES, pre_buffer=False) as file:
            column = _column(file.schema_arrow, field)
            send(out, column)
            if column["nature"] == "text":
                for cells in _batches(file, field):
                    sizes = [None if cell is None else len(cell) for cell in cells]
                    if max(filter(None, sizes), default=0) > MAX_CELL_BYTES:
                        send(out, {"needs": MAX_CELL_BYTES})
                        return
                    send(out, {"sizes": sizes}, b"".join(filter(None, cells)))
        send(out, {})
    except MemoryError:
        send(out, {"needs": MEMORY_BYTES})
    except (pa.ArrowException, OSError, EOFError, ValueError) as error:
        send(out, {"damage": "".join(str(error).splitlines()[:1])[:MAX_REASON]})


def _column(schema: "pa.Schema", field: str) -> dict[str, Any]:
    import pyarrow as pa

    if field not in schema.names:
        return {"names": schema.names[:_MAX_NAMES], "nature": "", "kind": ""}
    kind = schema.field(field).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    natures = {
        "text": (pa.types.is_string, pa.types.is_large_string),
        "nested": (pa.types.is_nested,),
        "binary": (pa.types.is_binary, pa.types.is_large_binary),
    }
    nature = next((name for name, tests in natures.items() if any(test(kind) for test in tests)), "other")
    return {"names": [], "nature": nature, "kind": str(kind)}


def _batches(file: "pq.ParquetFile", field: str) -> Iterator[list[bytes | None]]:
    """The cells, so many at a time that they should stay below _BATCH_BYTES; what the memory allows is what counts."""
    import pyarrow as pa

    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    largest = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=1)
    rows = max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // max(1, largest)))
    for batch in file.iter_batches(batch_size=rows, columns=[field], use_threads=False):
        cells = batch.column(0)
        if pa.types.is_dictionary(cells.type):
            cells = cells.dictionary_decode()
        yield cells.cast(pa.large_binary()).to_pylist()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
