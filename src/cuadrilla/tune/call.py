"""One trial of a search over a function, in a process of its own: call it, and say what it gave.

Invariants
* Only the files that the search began with are run: their hash is in the trial's folder. What is called is a function
  that the file itself defines.
* What the function prints, and a traceback, goes to the standard error, which is the trial's log
  (`cli.output.keep_answer_apart`). The answer is a little JSON with finite numbers, or the error, so short that a pipe
  takes it at once.
* The function's working directory is the trial's folder.
"""

import math
import numbers
import os
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from cuadrilla.engines.calls import REQUEST
from cuadrilla.errors import CuadrillaError, TaskError
from cuadrilla.home import read_object
from cuadrilla.messages import Message
from cuadrilla.printable import one_line
from cuadrilla.tune.function import SCORE, code_sha256, read_code, require_function
from cuadrilla.user_file import load_file

MOST_FIGURES, MOST_NAME, MOST_REASON = 100, 80, 500
"""Figures, characters of a figure's name, and of an exception's text."""
WHAT_TO_RETURN = Message("return a number, or up to 100 numbers by name, all of them finite")


def call_trial(folder: Path) -> dict[str, Any]:
    """The answer: {"complete", "figures", "seconds"}. Raises TaskError."""
    trial = read_object(folder / REQUEST)
    path, name = (folder / trial["file"]).resolve(), trial["function"]
    code = read_code(path)
    if code_sha256(code) != trial["sha256"]:
        raise TaskError("{path} has changed since the search began", path=path, hint="put it back as it was")
    require_function(path, code[path.name], name=name)
    os.chdir(folder)
    with _Raised(path, name):
        function = getattr(load_file(path), name)
        began = time.monotonic()
        figures = figures_of(function(**trial["arguments"]), name=name)
        return {"complete": True, "figures": figures, "seconds": time.monotonic() - began}


def figures_of(returned: object, *, name: str) -> dict[str, float]:
    """What a function returned, as figures by name: a single number is the score. Raises TaskError."""
    found = returned if isinstance(returned, Mapping) else {SCORE: returned}
    if len(found) > MOST_FIGURES:
        raise TaskError("{function} returned {number} figures", function=name, number=len(found), hint=WHAT_TO_RETURN)
    return {_name(key, of=name): _number(value, key=key, of=name) for key, value in found.items()}


def _name(key: object, *, of: str) -> str:
    if not isinstance(key, str) or len(key) > MOST_NAME:
        what = one_line(repr(key), most=MOST_NAME)
        raise TaskError("{function} returned a figure named {key}", function=of, key=what, hint=WHAT_TO_RETURN)
    return key


def _number(value: object, *, key: str, of: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        kind = type(value).__name__
        raise TaskError("{function} returned a {kind} as {key}", function=of, kind=kind, key=key, hint=WHAT_TO_RETURN)
    with suppress(OverflowError):
        if math.isfinite(value):
            return float(value)
    raise TaskError(
        "{function} returned {value:g} as {key}", function=of, value=float(f"{value}"), key=key, hint=WHAT_TO_RETURN
    )


class _Raised:
    """While the user's code runs: what it raises goes to the log, and becomes an error of ours."""

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            traceback.print_exception(kind, error, trace)
        with suppress(OSError, ValueError):  # closed, or a full disk: the answer does not depend on it
            sys.stdout.flush()
        if isinstance(error, SystemExit):
            raise TaskError(
                "{function} ended its process with {code!r}",
                function=self._name,
                code=error.code,
                hint="return a score, or raise an exception",
            ) from error
        if isinstance(error, Exception) and not isinstance(error, CuadrillaError):
            raise TaskError(
                "{place}: {kind}: {reason}",
                place=self._place(error),
                kind=type(error).__name__,
                reason=one_line(str(error), most=MOST_REASON),
                hint="the trial's log has the traceback",
            ) from error

    def _place(self, error: Exception) -> str:
        """The last line of the user's that it went through."""
        for frame in reversed(traceback.extract_tb(error.__traceback__)):
            if Path(frame.filename).parent == self._path.parent:
                return f"{Path(frame.filename).name}:{frame.lineno}"
        return self._path.name
