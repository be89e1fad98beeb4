"""Logging set-up: one rotated file per process in the run directory, each line tagged with the worker's name.

Warnings and worse also go to stderr. Called once by an entry point, never at import.
"""

import logging
import logging.handlers
import sys
from pathlib import Path

TALK = {"talk": True}
"""`log.info(..., extra=TALK)`: not a warning, but a person should see it."""
MAX_FILE_BYTES = 10 * 2**20
NUM_OLD_FILES = 4


class _WorkerTag(logging.Filter):
    """Adds `record.worker`: the name of the thread, which workers set to their own name."""

    def __init__(self, default: str) -> None:
        super().__init__()
        self._default = default

    def filter(self, record: logging.LogRecord) -> bool:
        name = record.threadName or ""
        record.worker = name if name.startswith("worker-") else self._default
        return True


class _Talk(logging.Filter):
    """What a person should see: warnings, and what was logged with `extra=TALK`."""

    def __init__(self, *, verbose: bool) -> None:
        super().__init__()
        self._verbose = verbose

    def filter(self, record: logging.LogRecord) -> bool:
        talk = getattr(record, "talk", False)
        record.prefix = "" if talk else f"{record.levelname}: "
        return self._verbose or talk or record.levelno >= logging.WARNING


def set_up_logging(folder: Path | None, *, worker: str = "main", verbose: bool = False) -> logging.Handler | None:
    """Log to `folder/log.WORKER.txt` (if a folder is given) and warnings to stderr.

    Returns the file handler, so that a caller that outlives the run can remove it with `tear_down_logging`.
    """
    root = logging.getLogger("cuadrilla")
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    tag = _WorkerTag(worker)
    if not any(getattr(handler, "is_cuadrilla_stderr", False) for handler in root.handlers):
        console = logging.StreamHandler(sys.stderr)
        console.addFilter(_Talk(verbose=verbose))
        console.setFormatter(logging.Formatter("%(prefix)s%(message)s"))
        console.is_cuadrilla_stderr = True  # type: ignore[attr-defined]
        root.addHandler(console)
    if folder is None:
        return None
    handler = logging.handlers.RotatingFileHandler(
        folder / f"log.{worker}.txt", maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8"
    )
    handler.addFilter(tag)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(worker)s | %(name)s: %(message)s"))
    root.addHandler(handler)
    return handler


def tear_down_logging(handler: logging.Handler | None) -> None:
    """Close and remove a handler made by `set_up_logging`; None is allowed."""
    if handler is not None:
        logging.getLogger("cuadrilla").removeHandler(handler)
        handler.close()
