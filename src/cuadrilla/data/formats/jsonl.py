"""JSON Lines: one object on each line, one of whose fields is a text.

A line is held whole, a file never. Lines longer than `MAX_LINE_BYTES` are bad ones, as are those that are not UTF-8,
not JSON, not an object, or lack the field; half of a surrogate pair in a text becomes U+FFFD. Empty lines are nothing.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator

from cuadrilla.data.formats.record import BadRecord, Reading
from cuadrilla.errors import DataError
from cuadrilla.messages import Message

MAX_LINE_BYTES = 2**24
"""An empty list takes 3 bytes of JSON and 64 of memory, so this bounds what a line can ask for to some 400 MB."""

_SURROGATES = re.compile("[\ud800-\udfff]")
_MARK = b"\xef\xbb\xbf"


def records(chunks: Iterable[bytes], *, where: str, reading: Reading, counts: Counter[str]) -> Iterator[str]:
    """The texts, in order. A bad line raises DataError with its number, or is counted if `reading` skips them."""
    for number, line, is_whole in _lines(chunks):
        try:
            if line is not None and (number == 1 and line.startswith(_MARK)):
                line = line[len(_MARK) :]
            if line is None or line.strip():
                yield _text(line, reading.field)
        except BadRecord as bad:
            if not reading.skip_bad:
                is_cut = bad.is_broken and not is_whole
                template = (
                    "{where}:{number}: the last line is cut off or broken ({why})"
                    if is_cut
                    else "{where}:{number}: {why}"
                )
                raise DataError(template, where=where, number=number, why=bad.message, hint=bad.hint) from bad
            counts[bad.reason] += 1


def _lines(chunks: Iterable[bytes]) -> Iterator[tuple[int, bytes | None, bool]]:
    """(number from 1, line or None if it is too long, whether it ends with a line end)."""
    number = 1
    held: list[bytes] = []
    size = 0
    for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            held.append(end)
            yield number, b"".join(held) if size + len(end) <= MAX_LINE_BYTES else None, True
            number, held, size = number + 1, [], 0
        size += len(rest)
        if size <= MAX_LINE_BYTES:
            held.append(rest)
        else:
            held = []
    if size:
        yield number, b"".join(held) if size <= MAX_LINE_BYTES else None, False


def _text(line: bytes | None, field: str) -> str:
    if line is None:
        raise BadRecord("records_too_long", Message("a line of more than {most:,} bytes", most=MAX_LINE_BYTES))
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
