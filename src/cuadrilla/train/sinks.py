"""Where numbers go: the `Sink` protocol with JSONL and TensorBoard behind it, and the meter of tokens per second."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from cuadrilla.errors import EnvironmentProblem
from cuadrilla.rundir import make_private, open_private, storage_errors

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
    """Appends a JSON object per row, flushed at once, so that another process can follow it. NaN becomes null."""

    def __init__(self, path: Path) -> None:
        with storage_errors(path):
            self._file: TextIO = open(  # noqa: SIM115  open for the whole run
                path, "a", encoding="utf-8", buffering=1, opener=open_private
            )

    def log(self, step: int, scalars: Scalars) -> None:
        row = {"version": step, **finite(scalars)}
        with storage_errors(Path(self._file.name)):
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Writes event files; needs the extra `tensorboard`."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise EnvironmentProblem(
                "TensorBoard is not installed", hint='pip install "cuadrilla[tensorboard]"'
            ) from error
        make_private(folder)
        self._folder = folder
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, step: int, scalars: Scalars) -> None:
        with storage_errors(self._folder):
            for key, value in scalars.items():
                if isinstance(value, int | float):
                    self._writer.add_scalar(key, value, step)
                elif isinstance(value, Mapping):
                    for name, part in value.items():
                        self._writer.add_scalar(f"{key}/{name}", part, step)
                elif key == "sample":
                    self._writer.add_text(key, value, step)

    def close(self) -> None:
        self._writer.close()


class Meter:
    """Tokens per second since the last reading, from an injected clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._tokens = 0
        self._since = clock()

    def add(self, tokens: int) -> None:
        self._tokens += tokens

    def read(self) -> tuple[float, float]:
        """(tokens per second, seconds) since the last call; starts anew."""
        now = self._clock()
        seconds = max(now - self._since, 1e-9)
        rate = self._tokens / seconds
        self._tokens, self._since = 0, now
        return rate, seconds

    def pause(self) -> Callable[[], None]:
        """Leave out what happens until the returned function is called (evaluation, a checkpoint)."""
        began = self._clock()

        def resume() -> None:
            self._since += self._clock() - began

        return resume
