"""Where metrics are written: a `Sink`, for JSONL or TensorBoard."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cuadrilla.errors import EnvironmentProblem, ResourceError
from cuadrilla.rundir import KeptLines, finite, make_private, storage_errors

FLUSH_SECONDS = 10

Scalars = Mapping[str, float | int | str | Mapping[str, float]]
"""Metrics by name. A mapping holds a number for each worker."""


class Sink:
    """Takes one row of metrics per commit."""

    def log(self, step: int, scalars: Scalars) -> None:
        """Take the row of a step."""

    def working(self, step: int, part: float) -> None:
        """Take which part of a step is done, from 0 to 1."""

    def close(self) -> None:
        """Free what is open."""


class JsonlSink(Sink):
    """Appends a JSON object per row, at once, so that another process can follow it. NaN becomes null."""

    def __init__(self, path: Path) -> None:
        self._lines = KeptLines(path.absolute())
        self._lines.append("")

    def log(self, step: int, scalars: Scalars) -> None:
        """Raises ResourceError; the row is kept then, and written later."""
        self._lines.append(json.dumps({"version": step, **finite(scalars)}, ensure_ascii=False) + "\n")

    def close(self) -> None:
        with suppress(ResourceError):  # the run has ended, and `log` has raised it before
            self._lines.append("")


class TensorBoardSink(Sink):
    """Writes an event file; needs the extra `tensorboard`. After its disk was full it writes nothing more."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise EnvironmentProblem(
                "TensorBoard is not installed", hint='pip install "cuadrilla[tensorboard]"'
            ) from error
        make_private(folder)
        self._folder = folder
        self._writer: Any = SummaryWriter(str(folder.absolute()), flush_secs=FLUSH_SECONDS)

    def log(self, step: int, scalars: Scalars) -> None:
        """Raises ResourceError."""
        with storage_errors(self._folder):
            for key, value in scalars.items():
                if isinstance(value, Mapping):
                    for name, part in value.items():
                        self._writer.add_scalar(f"{key}/{name}", part, step)
                elif isinstance(value, int | float):
                    self._writer.add_scalar(key, value, step)
                elif key == "sample":
                    self._writer.add_text(key, value, step)

    def close(self) -> None:
        with suppress(OSError):
            self._writer.close()
