"""Where numbers go: the `Sink` protocol with JSONL and TensorBoard behind it."""

import io
import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from cuadrilla.errors import EnvironmentProblem, ResourceError
from cuadrilla.rundir import KeptLines, KeptRecords, make_private

log = logging.getLogger(__name__)

Scalars = Mapping[str, float | int | str | Mapping[str, float]]
"""Numbers by name; a mapping holds one for each worker."""


def finite(scalars: Scalars) -> dict[str, Any]:
    """NaN and infinities become None: JSON has no name for them."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in scalars.items()
    }


class Sink(Protocol):
    """A place for one row of numbers per commit."""

    def log(self, step: int, scalars: Scalars) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class Watcher(Protocol):
    """A sink that also hears which part of a step is done, if it can be told."""

    def working(self, step: int, part: float) -> None: ...


class JsonlSink:
    """Appends a JSON object per row, at once, so that another process can follow it. NaN becomes null."""

    def __init__(self, path: Path) -> None:
        self._lines = KeptLines(path.absolute())
        self._lines.append("")

    def log(self, step: int, scalars: Scalars) -> None:
        """Raises ResourceError; the row is kept then, and written later."""
        self._lines.append(json.dumps({"version": step, **finite(scalars)}, ensure_ascii=False) + "\n")

    def close(self) -> None:
        _end_with(lambda: self._lines.append(""))


def _end_with(write: Callable[[], None]) -> None:
    """Do the last write of a sink: what fails of it costs these rows, and is no failure of a run that has ended."""
    try:
        write()
    except ResourceError as error:
        log.warning("%s: the last rows are missing there", error.message)


class TensorBoardSink:
    """Writes an event file; needs the extra `tensorboard`.

    Not by its writer, whose thread ends for good at the first write that fails.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import summary
        except ImportError as error:
            raise EnvironmentProblem(
                "TensorBoard is not installed", hint='pip install "cuadrilla[tensorboard]"'
            ) from error
        make_private(folder)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.{time.perf_counter_ns()}"
        self._records = KeptRecords(folder.absolute() / name)
        self._summary: Any = summary
        self._append(file_version="brain.Event:2")

    def log(self, step: int, scalars: Scalars) -> None:
        """Raises ResourceError; the row is kept then, and written later."""
        values: list[Any] = []
        for key, value in scalars.items():
            if isinstance(value, int | float):
                values += self._summary.scalar(key, value).value
            elif isinstance(value, Mapping):
                for name, part in value.items():
                    values += self._summary.scalar(f"{key}/{name}", part).value
            elif key == "sample":
                values += self._summary.text(key, value).value
        self._append(step=step, summary={"value": values})

    def _append(self, **event: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        record = io.BytesIO()
        RecordWriter(record).write(Event(wall_time=time.time(), **event).SerializeToString())
        self._records.append(record.getvalue())

    def close(self) -> None:
        _end_with(lambda: self._records.append(b""))
