"""The Python API: from text to a model that writes, in a script or a notebook.

    import cuadrilla

    cuadrilla.prepare(["quijote.txt"], out="data")
    run = cuadrilla.new_run("first", {"data": {"folder": "data"}, "model": {"preset": "micro"}, "train": {"epochs": 4}})
    run.train(on_step=lambda row: print(row["version"], row["loss"]))
    for piece in cuadrilla.load_model("first").generate("En un lugar de la Mancha"):
        print(piece, end="")

The functions do what the commands do, on the same folders: a run begun here can be resumed by `cuadrilla train`, and
the other way round. Only warnings are printed, by `logging`. Errors are `CuadrillaError`s with `message` and `hint`.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
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
"""A row of `metrics.jsonl`: `version` (the step's number), `loss`, `tokens`, ...; `val_loss` if it was measured."""


def prepare(
    sources: Sequence[AnyPath] | AnyPath,
    *,
    out: AnyPath,
    options: PrepareOptions | None = None,
    progress: Progress = no_progress,
    executor: Executor | None = None,
) -> Prepared:
    """Clean, deduplicate and split texts, train a tokenizer, and write the data folder `out`: `cuadrilla data prepare`.

    `sources`: one or several files and folders, or `cuentos:N` for N built-in stories. If `out` was already prepared
    from the same texts with the same options, nothing is done. `progress(stage, done, total)` is called from time to
    time. The jobs run in processes of this machine, or in the `executor`, such as that of a Dask cluster
    (`examples/prepare_dask.py`). Raises DataError, ConfigError, ResourceError.
    """
    given = [str(source) for source in ([sources] if isinstance(sources, str | PathLike) else sources)]
    options = options or PrepareOptions()
    return prepare_folder(given, out=Path(out), options=options, progress=progress, executor=executor)


def new_run(folder: AnyPath, settings: Mapping[str, Any] | str) -> "Run":
    """Make a run folder whose run file holds `settings`: a mapping of sections, or TOML text.

    In a mapping, the path of the data folder may be relative to the working directory. Raises ConfigError.
    """
    path = Path(folder)
    return Run(make_run(path, settings_text(settings, folder=path)).path)


def open_run(folder: AnyPath) -> "Run":
    """Open a run that `new_run` or a command has made. Raises ConfigError if the folder has no run file."""
    run = Run(folder)
    if not RunDir(run.path).run_file.is_file():
        hint = "make one: cuadrilla.new_run(folder, ...)"
        raise ConfigError("{path} is not a run: it has no run.toml", path=run.path, hint=hint)
    return run


def load_model(folder: AnyPath, *, device: str = "auto", newest: bool = False) -> LanguageModel:
    """Load the language model of a run, or of a folder in Hugging Face's layout. The run's data are not needed.

    From a run, the step with the lowest held-out loss is loaded, or the `newest` step. Raises ConfigError, DataError,
    CheckpointError, DeviceError.
    """
    return open_model(Path(folder), device=device, newest=newest)


class Run:
    """A run folder. No file stays open: several `Run`s and commands may use one folder at the same time."""

    def __init__(self, folder: AnyPath) -> None:
        self.path = Path(folder).resolve()
        self._folder = RunDir(self.path)
        self._request_stop: Callable[[str], None] | None = None

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def config(self) -> Config:
        """The configuration of the last training, or the run file if training has not begun. Raises ConfigError."""
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
        """Train to the end, or to step `stop_at`. A run that was begun before continues.

        `settings` override the run file like `--set`: by `section.key`, or as mappings by section. `on_step` is called
        in the calling thread with the row of each step, once that step is durable; its errors end the training.
        `tell` is called with the messages that a command would print. Ctrl-C (in the main thread) saves and raises
        KeyboardInterrupt; a second Ctrl-C raises it at once. `stop` saves and returns. Raises CuadrillaError, and the
        errors of your own task.
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
        """Make `train` save and return after the current pass. Call it from `on_step` or from another thread."""
        if self._request_stop is not None:
            self._request_stop(Message("the run was stopped by its program"))

    def evaluate(self, *, sequences: int = 0, device: str = "auto", newest: bool = False) -> dict[str, float]:
        """The task's measures (`loss`, `bits_per_byte`, ...) on this many held-out sequences (0: all).

        Raises ConfigError, DataError, CheckpointError, DeviceError.
        """
        return self.load(device=device, newest=newest).evaluate(sequences=sequences)

    def load(self, *, device: str = "auto", newest: bool = False) -> Trained:
        """The trained `model` (an nn.Module in evaluation mode) with its `task` of any kind. The run's data are needed.

        Raises ConfigError, DataError, CheckpointError, DeviceError.
        """
        return load_trained(self._folder, device=device, newest=newest)

    def metrics(self) -> list[dict[str, Any]]:
        """One row for each step. If a step was made again after a restart, its last row is returned."""
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
