"""Logging set-up: one rotated file per process in the run directory, each line tagged with its thread.

Warnings and worse also go to stderr; what gRPC and Ray have to say goes to the file only. Nothing in a record acts on
a terminal, in the file neither: somebody will read it on one. Called once by an entry point, never at import.
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

from cuadrilla.messages import language, shown, translated
from cuadrilla.printable import filled, printable

TALK = {"talk": True}
"""`log.info(..., extra=TALK)`: not a warning, but a person should see it."""
MAX_FILE_BYTES = 10 * 2**20
NUM_OLD_FILES = 4
FILE_FORMAT = "%(asctime)s %(levelname)s %(threadName)s | %(name)s: %(message)s"
OURS, LIBRARIES = "cuadrilla", ("grpc", "ray")


class _Console(logging.StreamHandler[TextIO]):
    """For a person: warnings, and what was logged with `extra=TALK`; `verbose`: all.

    Writes to what is stderr at the moment, which a progress bar may have replaced.
    """

    def __init__(self, *, verbose: bool) -> None:
        super().__init__()
        self._verbose = verbose

    def filter(self, record: logging.LogRecord) -> bool:
        return self._verbose or _is_talk(record) or record.levelno >= logging.WARNING

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """In the language of who reads it; the file stays English."""
        told, reads = copy.copy(record), language()
        told.msg = translated(record.msg, reads) if isinstance(record.msg, str) else record.msg
        if isinstance(record.args, tuple):
            told.args = tuple(shown(value, reads) if isinstance(value, str) else value for value in record.args)
        text = ("" if _is_talk(record) else f"{record.levelname}: ") + printable(super().format(told))
        return filled(text, shutil.get_terminal_size().columns) if sys.stderr.isatty() else text


def _is_talk(record: logging.LogRecord) -> bool:
    return bool(getattr(record, "talk", False))


class _LogFile(logging.handlers.RotatingFileHandler):
    """Not a formatter: Ray gives all handlers of its logger one of its own."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


def set_up_logging(folder: Path | None, *, worker: str = "main", verbose: bool = False) -> logging.Handler | None:
    """Log to `folder/log.WORKER.txt` (if a folder is given) and warnings of ours to stderr.

    Returns the file handler, so that a caller that outlives the run can remove it with `tear_down_logging`.
    """
    logging.raiseExceptions = False  # a full disk loses lines, and is told of by the run
    root = logging.getLogger(OURS)
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    if not any(isinstance(handler, _Console) for handler in root.handlers):
        root.addHandler(_Console(verbose=verbose))
    if folder is None:
        return None
    handler = _LogFile(
        folder / f"log.{worker}.txt", maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8"
    )
    handler.setFormatter(logging.Formatter(FILE_FORMAT))
    for name in (OURS, *LIBRARIES):
        logging.getLogger(name).addHandler(handler)
    return handler


def tear_down_logging(handler: logging.Handler | None) -> None:
    if handler is not None:
        for name in (OURS, *LIBRARIES):
            logging.getLogger(name).removeHandler(handler)
        with suppress(OSError):  # what the disk has not taken
            handler.close()


def silence_grpc() -> None:
    """For this process and its children; to be called before anything imports grpc, which reads the variable once.

    Its C++ core writes every failed handshake to stderr, with what the stranger sent as it came: it would fill a file,
    too. Who has set the variable wants to read that. A failed assertion of gRPC still ends the process (SIGABRT).
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def to_files_only(library: str) -> None:
    """For a library that was just imported: what it logs goes into our files, if there are any, and nowhere else."""
    logger = logging.getLogger(library)
    logger.propagate = False
    ours = [handler for handler in logger.handlers if isinstance(handler, _LogFile)]
    logger.handlers[:] = [*ours, logging.NullHandler()]  # without any handler Python itself writes to stderr
