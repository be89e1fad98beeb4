"""Output to stdout and stderr: letters that an encoding lacks, and foreign text without control characters."""

import io
import json
import sys

import pytest

from cuadrilla.cli.output import answered, emit, emit_table, options, report_error, say
from cuadrilla.errors import DataError

FOREIGN = "Marianela [es] [/x] :book: \x1b]0;owned\x07\x9b31m\u202e.txt"
SHOWN = "Marianela [es] [/x] :book: \\u001b]0;owned\\u0007\\u009b31m\\u202e.txt"
NAME = "año 🙂 caf\udce9"


class Pipe(io.TextIOWrapper):
    def __init__(self, encoding: str, errors: str = "strict") -> None:
        self.raw_bytes = io.BytesIO()
        super().__init__(self.raw_bytes, encoding=encoding, errors=errors, newline="\n")

    def written(self) -> bytes:
        self.flush()
        return self.raw_bytes.getvalue()


class Terminal(Pipe):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [
        ("cp1252", "año \\U0001f642 caf\\udce9".encode("cp1252")),
        ("ascii", b"a\\xf1o \\U0001f642 caf\\udce9"),
        ("utf-8", "año 🙂 caf\\udce9".encode()),
    ],
)
def test_letters_without_a_code_are_numbers(encoding: str, shown: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "json", False)
    monkeypatch.setattr(sys, "stdout", pipe := Pipe(encoding))
    emit(NAME)
    assert pipe.written() == shown + b"\n"
    emit_table([{"name": NAME}])
    assert pipe.written().splitlines()[-1].rstrip() == shown
    monkeypatch.setattr(sys, "stdout", pipe := Pipe(encoding))
    monkeypatch.setattr(options, "json", True)
    assert answered({"name": NAME})
    assert json.loads(pipe.written().decode(encoding)) == {"name": NAME}


def test_a_name_that_a_locale_keeps_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", pipe := Pipe("utf-8", errors="surrogateescape"))
    emit("caf\udce9")
    assert pipe.written() == b"caf\xe9\n"


def test_a_terminal_gets_nothing_to_obey_and_a_pipe_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a model comes in pieces, and a user may redirect it into a file, where it must stay as it is."""
    monkeypatch.setenv("COLUMNS", "30")
    finding = " ok machine.memory   {}three"
    for stdout, shown, rest in (
        (Terminal("utf-8"), SHOWN, f"one two\n{21 * ' '}"),
        (Pipe("utf-8"), FOREIGN, "one two "),
    ):
        monkeypatch.setattr(sys, "stdout", stdout)
        for char in FOREIGN:
            emit(char, end="")
        emit(finding.format("one two "), end="", fill=True)
        assert stdout.written().decode() == shown + finding.format(rest)


def test_tables_and_talk_show_foreign_text_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "json", False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "stdout", stdout := Pipe("utf-8"))
    monkeypatch.setattr(sys, "stderr", stderr := Pipe("utf-8"))
    emit_table([{"[b]name": FOREIGN}])
    assert [line.rstrip() for line in stdout.written().decode().splitlines()] == ["[b]name", SHOWN]
    say(FOREIGN)
    assert stderr.written().decode() == SHOWN + "\n"


ROWS = [
    {"node": "ana", "device": "cuda NVIDIA GeForce RTX 3060", "share": "61%", "said": "using bfloat16 (CUDA, 8.6)"},
    {"node": "luis", "device": None, "share": None, "said": "left: [red]cannot reach 192.168.1.50:47470"},
]


@pytest.mark.parametrize("columns", [None, 75])
def test_a_table_fits_a_terminal_and_a_pipe_gets_all_of_it(
    monkeypatch: pytest.MonkeyPatch, columns: int | None
) -> None:
    monkeypatch.setattr(options, "json", False)
    monkeypatch.setattr(sys, "stdout", stdout := Pipe("utf-8"))
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    emit_table(ROWS, folded=("device", "said"))
    lines = stdout.written().decode().splitlines()
    assert lines[0].split() == ["node", "device", "share", "said"]
    assert lines[1].startswith("ana   cuda NVIDIA GeForce")
    assert len(lines) == (3 if columns is None else 4)
    assert all(len(line) <= (columns or len(line)) for line in lines)


def test_a_name_cannot_write_a_hint_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "json", False)
    monkeypatch.setattr(sys, "stderr", stderr := Pipe("utf-8"))
    report_error(DataError("cannot read a\n\nhint: b.txt", hint="check the path"))
    assert stderr.written() == b"error: cannot read a\\n\\nhint: b.txt\n\nhint: check the path\n"
