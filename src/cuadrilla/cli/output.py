"""How commands talk: data to stdout, everything else to stderr, JSON on request."""

import contextlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table

from cuadrilla.errors import CuadrillaError


@dataclass
class Options:
    """The global flags, set once by the root command."""

    debug: bool = False
    json: bool = False
    supervised: bool = False
    """This process is the child that coordinates."""
    listener: int = -1
    """A descriptor of the port that it serves, from its parent."""


class TalkConsole(Console):
    """Falls silent when nobody reads stderr any more; rich's own console would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


options = Options()
stderr = TalkConsole(stderr=True, highlight=False, soft_wrap=True)


def say(text: str) -> None:
    """One line of talk, on stderr; a terminal that has gone away is no reason to fail."""
    with contextlib.suppress(OSError):
        stderr.print(text, markup=False)


def stdout() -> TextIO:
    """Where data goes. A letter that its encoding lacks (a pipe on Windows, an old locale) is written as its number."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout


def emit(text: str) -> None:
    """One line of data, on stdout."""
    print(text, file=stdout(), flush=True)


def emit_json(value: Any) -> None:
    file = stdout()
    is_unicode = (file.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(value, indent=1, ensure_ascii=not is_unicode, default=str), file=file, flush=True)


def emit_table(rows: Sequence[Mapping[str, Any]], *, title: str = "") -> None:
    """Rows with the same keys: as JSON with `--json`, else as a table that reads without colour."""
    if options.json:
        emit_json(list(rows))
        return
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for column in rows[0] if rows else []:
        table.add_column(str(column), overflow="fold")
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    Console(file=stdout(), highlight=False).print(table)


def report_error(error: CuadrillaError) -> None:
    """`error:` line, blank, `hint:` line; with `--json` also as data."""
    if options.json:
        emit_json({"error": error.message, "hint": error.hint, "exit_code": error.exit_code})
    say(f"error: {error.message}")
    if error.hint:
        say(f"\nhint: {error.hint}")
