"""The Python API: from text to a model that writes, in a script or a notebook.

    import cuadrilla

    cuadrilla.prepare(["quijote.txt"], out="data")
    run = cuadrilla.new_run("first", {"data": {"folder": "data"}, "model": {"preset": "micro"}, "train": {"epochs": 4}})
    run.train(on_step=lambda row: print(row["version"], row["loss"]))
    for piece in cuadrilla.load_model("first").generate("En un lugar de la Mancha"):
        print(piece, end="")

It does what the commands do, on the same folders: a run may be begun here and resumed by `cuadrilla train`, or the
other way round. Nothing is printed but warnings, by logging. Errors are CuadrillaErrors, with `message` and `hint`.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import FrameType
from typing import Any

from cuadrilla.config import Config, CrewEngine
from cuadrilla.crew.run import Audience, train_run
from cuadrilla.crew.signals import handling
from cuadrilla.data.prepare import Prepared, PrepareOptions, no_progress
from cuadrilla.data.prepare import prepare as prepare_folder
from cuadrilla.data.sources import Progress
from cuadrilla.errors import ConfigError, CuadrillaError
from cuadrilla.log import silence_grpc
from cuadrilla.messages import Message
from cuadrilla.model.sampling import Sampling
from cuadrilla.rundir import RunDir, finite, last_rows
from cuadrilla.runfile import as_sets, leaves, make_run, read_run_config, read_run_file, settings_text
from cuadrilla.train.runtime import Outcome
from cuadrilla.train.sinks import Scalars, Sink
from cuadrilla.train.trained import LanguageModel, Trained, load_trained, open_model

__all__ = ["CuadrillaError", "LanguageModel", "Outcome", "PrepareOptions", "Prepared", "Run", "Sampling", "Trained",
           "load_model", "new_run", "open_run", "prepare"]  # fmt: skip

AnyPath = str | PathLike[str]
Row = Mapping[str, Any]
"""A row of `metrics.jsonl`: `version` (the step), `loss`, `tokens`, ..., `val_loss` where one was measured."""


def prepare(
    sources: Sequence[AnyPath] | AnyPath,
    *,
    out: AnyPath,
    options: PrepareOptions | None = None,
    progress: Progress = no_progress,
) -> Prepared:
    """Clean, deduplicate and split texts, train a tokenizer, and write the data folder `out`; `cuadrilla data prepare`.

    `sources`: files and folders, one or several, or `cuentos:N` for N built-in stories. If it was prepared from these
    already, nothing is done. `progress(stage, done, total)` is called now and then. Raises DataError, ConfigError,
    ResourceError.
    """
    given = [sources] if isinstance(sources, str | PathLike) else sources
    return prepare_folder(
        [str(source) for source in given], out=Path(out), options=options or PrepareOptions(), progress=progress
    )


def new_run(folder: AnyPath, settings: Mapping[str, Any] | str) -> "Run":
    """A new run folder whose run file holds `settings`: its sections as a mapping, or TOML text.

    A mapping may name the data folder as seen from the working directory. Raises ConfigError.
    """
    path = Path(folder)
    return Run(make_run(path, settings_text(settings, folder=path)).path)


def open_run(folder: AnyPath) -> "Run":
    """A run that was made before, here or by a command. Raises ConfigError if the folder has no run file."""
    run = Run(folder)
    if not RunDir(run.path).run_file.is_file():
        hint = "make one: cuadrilla.new_run(folder, ...)"
        raise ConfigError("{path} is not a run: it has no run.toml", path=run.path, hint=hint)
    return run


def load_model(folder: AnyPath, *, device: str = "auto", newest: bool = False) -> LanguageModel:
    """The language model of a run, or of a folder in Hugging Face's layout, ready to write; it needs no data folder.

    Of a run it is the step of the lowest held-out loss, or the `newest`. Raises ConfigError, DataError,
    CheckpointError, DeviceError.
    """
    return open_model(Path(folder), device=device, newest=newest)


class Run:
    """A run folder. It keeps nothing open: several may be of one folder, and commands may work on it meanwhile."""

    def __init__(self, folder: AnyPath) -> None:
        self.path = Path(folder).resolve()
        self._folder = RunDir(self.path)
        self._request_stop: Callable[[str], None] | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> Config:
        """What it was last trained with; before that, its run file. Raises ConfigError."""
        return read_run_config(self._folder)

    def train(
        self,
        settings: Mapping[str, Any] | None = None,
        *,
        on_step: Callable[[Row], None] | None = None,
        tell: Callable[[str], None] | None = None,
        stop_at: int = 0,
        allow_changes: bool = False,
    ) -> Outcome:
        """Train to the end, or to step `stop_at`; what was begun goes on.

        `settings`: over those of the run file, as `--set` gives them, by `section.key` or by section. `on_step` gets
        each step's row once that step cannot be lost any more, in the calling thread; an error that it raises ends the
        training.
        `tell` gets what a command would say. Ctrl-C (in the main thread) saves and raises KeyboardInterrupt, at once
        when it comes twice; `stop` saves and returns. Raises CuadrillaError, or what a task of your own raised.
        """
        resolved = read_run_file(self.path, sets=as_sets(leaves(settings or {})))
        if isinstance(resolved.config.engine, CrewEngine):
            silence_grpc()
        interrupts: list[int] = []
        audience = Audience(
            tell=tell or (lambda _text: None),
            stopping=lambda request_stop: self._stopping(request_stop, interrupts),
            sinks=lambda _parts: [_StepSink(on_step)] if on_step else [],
        )
        outcome = train_run(resolved, self._folder, allow_changes=allow_changes, stop_at=stop_at, audience=audience)
        if interrupts and outcome.interrupted:
            raise KeyboardInterrupt
        return outcome

    def stop(self) -> None:
        """Have `train` save and return after the pass at hand; from `on_step`, or from another thread."""
        if self._request_stop is not None:
            self._request_stop(Message("the run was stopped by its program"))

    def evaluate(self, *, sequences: int = 0, device: str = "auto", newest: bool = False) -> dict[str, float]:
        """The task's measures on held-out data, of so many sequences (0: all): `loss`, `bits_per_byte`, ...

        Raises ConfigError, DataError, CheckpointError, DeviceError.
        """
        return self.load(device=device, newest=newest).evaluate(sequences=sequences)

    def load(self, *, device: str = "auto", newest: bool = False) -> Trained:
        """The trained `model` (an nn.Module in evaluation mode) with its `task`, of any kind; needs the run's data.

        Raises ConfigError, DataError, CheckpointError, DeviceError.
        """
        return load_trained(self._folder, device=device, newest=newest)

    def metrics(self) -> list[dict[str, Any]]:
        """A row for each step, the last one of each where some were made again."""
        return last_rows(self._folder.metrics)

    @contextmanager
    def _stopping(self, request_stop: Callable[[str], None], interrupts: list[int]) -> Iterator[None]:
        self._request_stop = request_stop
        is_main = threading.current_thread() is threading.main_thread()

        def interrupted(number: int, frame: FrameType | None) -> None:
            interrupts.append(number)
            if len(interrupts) > 1:
                signal.default_int_handler(number, frame)
            request_stop(Message("the run was stopped by Ctrl-C"))

        try:
            with handling({signal.SIGINT: interrupted} if is_main else {}):
                yield
        finally:
            self._request_stop = None


class _StepSink(Sink):
    def __init__(self, on_step: Callable[[Row], None]) -> None:
        self._on_step = on_step

    def log(self, step: int, scalars: Scalars) -> None:
        self._on_step({"version": step, **finite(scalars)})
