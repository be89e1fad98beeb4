"""What reaches stdout when its encoding is not Unicode's, as in a pipe on Windows."""

import io
import json
import sys

import pytest

from cuadrilla.cli.output import emit, emit_json, emit_table, options

pytestmark = pytest.mark.unit

NAME = "año 🙂 caf\udce9"


class Pipe(io.TextIOWrapper):
    """Stands for stdout."""

    def __init__(self, encoding: str, errors: str = "strict") -> None:
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding=encoding, errors=errors, newline="\n")

    def written(self) -> bytes:
        self.flush()
        return self.raw_bytes.getvalue()


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("cp1252", "año \\U0001f642 caf\\udce9".encode("cp1252")),
        ("ascii", b"a\\xf1o \\U0001f642 caf\\udce9"),
        ("utf-8", "año 🙂 caf\\udce9".encode()),
    ],
)
def test_letters_that_cannot_be_written_are_numbers(
    encoding: str, shown: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "json", False)
    monkeypatch.setattr(sys, "stdout", pipe := Pipe(encoding))
    emit(NAME)
    assert pipe.written() == shown + b"\n"
    emit_table([{"name": NAME}])
    assert pipe.written().splitlines()[-1].rstrip() == shown
    monkeypatch.setattr(sys, "stdout", pipe := Pipe(encoding))
    emit_json({"name": NAME})
    assert json.loads(pipe.written().decode(encoding)) == {"name": NAME}


def test_a_name_that_a_locale_keeps_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", pipe := Pipe("utf-8", errors="surrogateescape"))
    emit("caf\udce9")
    assert pipe.written() == b"caf\xe9\n"
