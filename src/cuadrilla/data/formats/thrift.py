"""As much of Thrift's compact protocol as it takes to find a few numbers in Parquet's metadata.

pyarrow's own metadata objects end the whole process (an uncaught C++ exception) on some damaged files, and do not say
how large a page is. (Thrift compact protocol specification; kinds are its type numbers.)
"""

from collections.abc import Iterator

from cuadrilla.messages import Message

I32 = 5
I64 = 6
BINARY = 8
LIST = 9
STRUCT = 12
_TRUE, _FALSE, _BYTE, _DOUBLE, _SET = 1, 2, 3, 7, 10
_INTEGERS = (4, I32, I64)
_MAX_DEPTH = 16


class Compact:
    """A place in encoded bytes. Raises EOFError beyond their end, OSError for what is not compact protocol."""

    def __init__(self, data: bytes, position: int = 0) -> None:
        self._data = data
        self.position = position

    def fields(self) -> Iterator[tuple[int, int]]:
        """(number, kind) of each field of a struct; who gets one reads or skips its value before the next."""
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self.integer()
            yield number, head & 15

    def elements(self) -> Iterator[int]:
        """The kind of each element of a list, likewise."""
        head = self._byte()
        for _ in range(head >> 4 if head >> 4 < 15 else self._varint()):
            yield head & 15

    def integer(self) -> int:
        """A value of any of the integer kinds but the byte."""
        zigzag = self._varint()
        return (zigzag >> 1) ^ -(zigzag & 1)

    def binary(self) -> bytes:
        """A value of kind BINARY."""
        size = self._varint()
        self.position += size
        if self.position > len(self._data):
            raise EOFError(Message("it ends in the middle"))
        return self._data[self.position - size : self.position]

    def skip(self, kind: int, *, depth: int = 0) -> None:
        """Step over the value of a field."""
        if kind in (_TRUE, _FALSE):  # the kind is the value
            return
        if kind == _BYTE:
            self.position += 1
        elif kind in _INTEGERS:
            self._varint()
        elif kind == _DOUBLE:
            self.position += 8
        elif kind == BINARY:
            self.binary()
        elif kind in (LIST, _SET) and depth < _MAX_DEPTH:
            for inner in self.elements():
                self.skip(_BYTE if inner in (_TRUE, _FALSE) else inner, depth=depth + 1)
        elif kind == STRUCT and depth < _MAX_DEPTH:
            for _, inner in self.fields():
                self.skip(inner, depth=depth + 1)
        else:
            raise OSError(Message("metadata that cannot be read"))

    def _byte(self) -> int:
        if self.position >= len(self._data):
            raise EOFError(Message("it ends in the middle"))
        self.position += 1
        return self._data[self.position - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise OSError(Message("metadata that cannot be read"))
