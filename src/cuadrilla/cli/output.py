"""Output of commands: data to stdout, everything else to stderr, JSON on request.

Control characters in foreign text are escaped (`printable`): in messages and tables always, in other data only on a
terminal, where a person reads it. A pipe gets other data unchanged. JSON keeps its value.
"""

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from cuadrilla.errors import CuadrillaError
from cuadrilla.messages import Message, language, shown, translated
from cuadrilla.printable import filled, one_line, printable

MAX_WIDTH = 10_000
NAMES = (
    Message("agreement"), Message("as fast as the best alone"), Message("bits per byte"), Message("bytes"),
    Message("cause"), Message("character"), Message("faults"), Message("file"), Message("files"), Message("folder"),
    Message("key"), Message("licence"), Message("loss"), Message("machine"), Message("MB/s at the coordinator"),
    Message("meaning"), Message("measure"), Message("name"), Message("number"), Message("object"), Message("on"),
    Message("origin"), Message("pairs right"), Message("parameters"), Message("punctuation"), Message("reason"),
    Message("run"), Message("score"), Message("share"), Message("state"), Message("step"), Message("stories right"),
    Message("structure"), Message("tokens"), Message("unknown word"), Message("value"), Message("waiting"),
)  # fmt: skip
"""Names of columns, measures and faults in stories, listed for their translation."""


@dataclass
class Options:
    """The global flags, set once by the root command."""

    debug: bool = False
    json: bool = False
    supervised: bool = False
    """This process is the child that trains: a coordinator, or a job."""
    answers: TextIO | None = None
    """The stdout that a child process has kept for its answer (`keep_answer_apart`)."""


class TalkConsole(Console):
    """Falls silent when nobody reads stderr any more; rich's own console would end the process."""

    def on_broken_pipe(self) -> None:
        self.quiet = True

    def tell(self, text: str, *, style: str = "") -> None:
        """Print a message in the user's language, any other text as it is. The terminal and Rich find no commands in
        it: control characters are escaped, and markup is text. A terminal that has gone away is no reason to fail."""
        with contextlib.suppress(OSError):
            text = printable(shown(text, language()))
            self.print(Text(filled(text, self.width) if self.is_terminal else text, style=style))


options = Options()
stderr = TalkConsole(stderr=True, highlight=False, soft_wrap=True)


def say(text: str, /, **fields: object) -> None:
    """Print one line on stderr: a template with its fields, or a message."""
    stderr.tell(Message(text, **fields))


def say_at_once(text: Message) -> None:
    """Print a line of ours from a signal handler, which may have interrupted another print: no lock, no buffer."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{shown(text, language())}\n".encode())


def keep_answer_apart() -> None:
    """For a child process whose parent reads its answer at the end: what a task prints from now on goes to stderr."""
    sys.stdout.flush()
    options.answers = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="backslashreplace")
    os.dup2(2, 1)


def stdout() -> TextIO:
    """The stream for data. Characters that its encoding lacks (pipe on Windows, old locale) become their numbers."""
    if options.answers is not None:
        return options.answers
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")
    return sys.stdout


def emit(text: str, /, *, end: str = "\n", fill: bool = False, **fields: object) -> None:
    """Print a line of data, or the next part of one, on stdout: a template with its fields, or any text. `fill`: on a
    terminal it is wrapped between words."""
    file, text = stdout(), shown(Message(text, **fields), language())
    if file.isatty():
        text = filled(printable(text), shutil.get_terminal_size().columns) if fill else printable(text)
    print(text, end=end, file=file, flush=True)


def answered(value: Any, *, indent: int | None = 1) -> bool:
    """With `--json` print the value. Returns whether it was printed."""
    if options.json:
        is_unicode = (stdout().encoding or "utf-8").lower().startswith("utf")
        text = json.dumps(value, indent=indent, ensure_ascii=not is_unicode, default=str)
        print(printable(text), file=stdout(), flush=True)
    return options.json


def advise(*commands: str) -> None:
    """Say which commands to type next."""
    for number, command in enumerate(commands):
        say("      cuadrilla {command}" if number else "\nnext: cuadrilla {command}", command=command)


def emit_table(rows: Sequence[Mapping[str, Any]], *, folded: Collection[str] = ()) -> None:
    """Print rows with the same keys: as JSON, or as a table that needs no colour.

    `folded`: the columns that are wrapped if the table is too wide for the terminal (none named: all columns).
    """
    if answered(list(rows)):
        return
    table = Table(box=None, pad_edge=False)
    for column in rows[0] if rows else []:
        table.add_column(Text(named(column)), overflow="fold", no_wrap=bool(folded) and column not in folded)
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    emit_drawn(table, folds="COLUMNS" in os.environ)


def emit_drawn(drawn: RenderableType, *, folds: bool = False) -> None:
    """Print tables as wide as the terminal. In pipes and files lines are not wrapped, for grep, unless `folds`."""
    console = Console(file=stdout(), highlight=False)
    if (not console.is_terminal or console.is_dumb_terminal) and not folds:
        console.width = MAX_WIDTH
    console.print(drawn)


def named(key: str) -> str:
    """The name of a column or a measure in the user's language."""
    words = key.replace("_", " ")
    return translated(words, language()) if words in NAMES else _in_line(key)


def _cell(value: object) -> Text:
    """A cell, not as a `str`: Rich would take `[es]` in a file's name for markup, and `:book:` for an emoji."""
    match value:
        case None:
            return Text()
        case bool() | str():
            return Text(_in_line(str(value) if isinstance(value, bool) else value))
        case float():
            return Text(_in_line(Message("{value:.4g}", value=value)))
    return Text(_in_line(Message("{value:,}", value=value)))


def report_error(error: CuadrillaError) -> None:
    """Print an `error:` line, a blank, a `hint:` line; with `--json` also data. Names in them cannot begin a line."""
    # In English; programs compare the template, which has no names in it.
    made_of = {"template": error.message.template, "fields": error.message.fields}
    answered({"error": error.message, "hint": error.hint, "exit_code": error.exit_code, **made_of})
    say("error: {message}", message=_in_line(error.message))
    if error.hint:
        say("\nhint: {hint}", hint=_in_line(error.hint))


def _in_line(text: str) -> str:
    """A text in the user's language, for use within a line or a table."""
    return one_line(shown(text, language()))
