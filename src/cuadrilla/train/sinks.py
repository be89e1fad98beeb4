"""Who is shown the metrics of a training: a `Sink`, such as TensorBoard. `metrics.jsonl` is the store's."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cuadrilla.rundir import make_private, storage_errors

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


class TensorBoardSink(Sink):
    """Writes an event file; needs the extra `tensorboard`. After its disk was full it writes nothing more."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

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
