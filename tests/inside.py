"""Run `cuadrilla ...` in this interpreter, because a new process costs seconds. For tests that need no process.

The command gets its own arguments, working folder, environment and standard input. The output of the command and of its
child processes is captured at the file descriptors. Tests of signals, memory, open files and the end of a process use
real processes (tests/commands.py).
"""

import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from typing import BinaryIO
from unittest import mock

import cuadrilla as package
from cuadrilla.cli import app, output

ROOT = Path(__file__).parents[1]


def cuadrilla(
    *arguments: object,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    says: str = "",
    code: int | None = None,
) -> "CompletedProcess[str]":
    """Run a command to its end, and return exit code, stdout and stderr. `env`: the whole environment.

    `code`: the exit code that it must have.
    """
    words = ["cuadrilla", *map(str, arguments)]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, ExitStack() as stack:
        stack.enter_context(_caught(1, out))
        stack.enter_context(_caught(2, err))
        stack.enter_context(mock.patch.object(sys, "stdin", io.StringIO(says)))
        stack.enter_context(mock.patch.object(sys, "argv", words))
        stack.enter_context(mock.patch.object(sys, "path", [*sys.path]))
        if env is not None:
            stack.enter_context(mock.patch.dict(os.environ, env, clear=True))
        stack.enter_context(_folder(cwd))
        stack.enter_context(_fresh())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("default")  # as in a process; in the tests warnings are errors
        ended = app.run()
        stack.close()
        done = CompletedProcess(words, ended, _text(out), _text(err))
    assert code in (None, done.returncode), f"exit code {done.returncode}: {done.stderr}"
    return done


@contextmanager
def _caught(number: int, file: BinaryIO) -> Iterator[None]:
    """Redirect a standard stream of this process and of its children to `file`."""
    name = {1: "stdout", 2: "stderr"}[number]
    getattr(sys, name).flush()
    before = os.dup(number)
    os.dup2(file.fileno(), number)
    stream = io.TextIOWrapper(io.FileIO(number, "w", closefd=False), encoding="utf-8", write_through=True)
    try:
        with mock.patch.object(sys, name, stream):
            yield
    finally:
        stream.flush()
        os.dup2(before, number)
        os.close(before)


@contextmanager
def _folder(folder: Path | None) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder or before)
    try:
        yield
    finally:
        os.chdir(before)


@contextmanager
def _fresh() -> Iterator[None]:
    """Reset flags and handlers of the log, as if nothing had been run before; then forget the tasks' modules."""
    before, logger = set(sys.modules), logging.getLogger(package.__name__)
    handlers, level = list(logger.handlers), logger.level
    options = output.options.__dict__.copy()
    output.options.__dict__.update(output.Options().__dict__)
    logger.handlers.clear()
    try:
        yield
    finally:
        output.options.__dict__.update(options)
        logger.handlers[:] = handlers
        logger.setLevel(level)
        for name in set(sys.modules) - before:
            file = getattr(sys.modules[name], "__file__", None)
            if file and not Path(file).is_relative_to(sys.prefix) and not _is_ours(Path(file)):
                del sys.modules[name]


def _is_ours(file: Path) -> bool:
    """Whether a module is part of Python or of this checkout. Others are tasks, which each command must load anew."""
    return file.is_relative_to(sys.base_prefix) or file.is_relative_to(ROOT)


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="backslashreplace")
