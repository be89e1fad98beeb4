"""JSON Lines: one object on each line, one of whose fields is a text.

A line is held whole, a file never. Lines longer than `MAX_LINE_BYTES` are bad ones, as are those that are not UTF-8,
not JSON, not an object, or lack the field; half of a surrogate pair in a text becomes U+FFFD. Empty lines are nothing.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO

from cuadrilla.data.formats.packing import CHUNK_BYTES
from cuadrilla.data.formats.record import BadRecord, Reading
from cuadrilla.errors import DataError
from cuadrilla.messages import Message

MAX_LINE_BYTES = 2**24
"""An empty list takes 3 bytes of JSON and 64 of memory, so this bounds what a line can ask for to some 400 MB."""

_SURROGATES = re.compile("[\ud800-\udfff]")
_MARK = b"\xef\xbb\xbf"


def records(stream: IO[bytes], *, where: str, reading: Reading, counts: Counter[str]) -> Iterator[str]:
    """The texts, in order. A bad line raises DataError with its number, or is counted if `reading` skips them."""
    number = 0
    while line := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        try:
            if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := stream.readline(CHUNK_BYTES)) and not rest.endswith(b"\n"):
                    pass
                raise BadRecord("records_too_long", Message("a line of more than {most:,} bytes", most=MAX_LINE_BYTES))
            line = line.removeprefix(_MARK) if number == 1 else line
            if line.strip():
                yield _text(line, reading.field)
        except BadRecord as bad:
            if not reading.skip_bad:
                is_cut = bad.is_broken and not line.endswith(b"\n")
                template = (
                    "{where}:{number}: the last line is cut off or broken ({why})"
                    if is_cut
                    else "{where}:{number}: {why}"
                )
                raise DataError(template, where=where, number=number, why=bad.message, hint=bad.hint) from bad
            counts[bad.reason] += 1


def _text(line: bytes, field: str) -> str:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise BadRecord("records_broken", Message("not UTF-8")) from error
    except RecursionError as error:
        raise BadRecord("records_broken", Message("too deeply nested")) from error
    except ValueError as error:  # JSONDecodeError, and a number of more digits than Python converts
        raise BadRecord("records_broken", Message("not JSON: {error}", error=error)) from error
    if not isinstance(record, dict):
        raise BadRecord("records_wrong_type", Message("not an object but {kind}", kind=_kind(record)))
    if field not in record:
        names = ", ".join(repr(name[:40]) for name in list(record)[:8]) or Message("none")
        raise BadRecord(
            "records_without_field", Message("no field {field!r} (it has: {names})", field=field, names=names)
        )
    text = record[field]
    if not isinstance(text, str):
        why = Message("the field {field!r} is not text but {kind}", field=field, kind=_kind(text))
        raise BadRecord("records_wrong_type", why)
    return _SURROGATES.sub("\ufffd", text) if b"\\u" in line else text


def _kind(value: object) -> str:
    names = {
        dict: Message("an object"),
        list: Message("a list"),
        str: Message("text"),
        bool: Message("true or false"),
        type(None): Message("null"),
    }
    return names.get(type(value), Message("a number"))
