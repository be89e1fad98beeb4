"""Logging set-up: one rotated file per process in the run directory, each line with the name of its thread.

Our warnings and errors also go to stderr; records of gRPC go to the file only. Control characters are escaped, in the
file too, because a file is read on a terminal. An entry point calls `show_log` once, never at import.
"""

import copy
import logging
import logging.handlers
import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from cuadrilla.messages import Message, language, shown, translated
from cuadrilla.printable import filled, printable

NOTE = 25
"""The level of what a person reads although it warns of nothing: `log.log(NOTE, ...)`."""
LEVELS = (Message("WARNING"), Message("ERROR"))
"""Names of levels that begin a line; the catalogue has them from here."""
MAX_FILE_BYTES = 10 * 2**20
NUM_OLD_FILES = 4
FILE_FORMAT = "%(asctime)s %(levelname)s %(threadName)s | %(name)s: %(message)s"
OURS, LIBRARIES = "cuadrilla", ("grpc",)


class _Console(logging.StreamHandler[TextIO]):
    """Writes to `sys.stderr`, looked up for each record, because a progress bar may have replaced it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """The record in the user's language. The file stays English."""
        told, reads = copy.copy(record), language()
        told.msg = translated(record.msg, reads) if isinstance(record.msg, str) else record.msg
        if isinstance(record.args, tuple):
            told.args = tuple(shown(value, reads) if isinstance(value, str) else value for value in record.args)
        text = ("" if record.levelno == NOTE else f"{translated(record.levelname, reads)}: ") + printable(
            super().format(told)
        )
        return filled(text, shutil.get_terminal_size().columns) if sys.stderr.isatty() else text


class _LogFile(logging.handlers.RotatingFileHandler):
    """Escapes control characters in what the formatter returns."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def show_log(*, verbose: bool = False) -> None:
    """Show warnings and notes of this process on stderr; `verbose`: all records. A second call changes nothing."""
    logging.raiseExceptions = False  # a full disk loses log lines; the run reports the disk itself
    ours = logging.getLogger(OURS)
    if not any(isinstance(handler, _Console) for handler in ours.handlers):
        logging.addLevelName(NOTE, "NOTE")
        ours.setLevel(logging.DEBUG if verbose else logging.INFO)
        console = _Console()
        console.setLevel(logging.NOTSET if verbose else NOTE)
        ours.addHandler(console)


def log_to(folder: Path, *, worker: str) -> logging.Handler:
    """Log to `folder/log.WORKER.txt`, too. A caller that outlives the run ends it with `stop_logging_to`."""
    show_log()
    handler = _LogFile(
        folder / f"log.{worker}.txt", maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8"
    )
    handler.setFormatter(logging.Formatter(FILE_FORMAT))
    for name in (OURS, *LIBRARIES):
        logging.getLogger(name).addHandler(handler)
    return handler


def stop_logging_to(handler: logging.Handler) -> None:
    for name in (OURS, *LIBRARIES):
        logging.getLogger(name).removeHandler(handler)
    with suppress(OSError):  # the last lines do not fit on a full disk
        handler.close()


def silence_grpc() -> None:
    """Silence gRPC in this process and its children. Call it before grpc is imported, which reads the variable once.

    gRPC's C++ core writes each failed handshake to stderr, with the stranger's bytes unescaped; strangers could fill a
    log file. A value set by the user stays. A failed assertion of gRPC still ends the process (SIGABRT).
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
