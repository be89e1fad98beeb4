"""The proof that a user can run: unequal workers give what one gives.

A run's model is trained four times for a few steps, from its initial weights, with the run's own data and settings:
by one worker in this process and by a practice crew of worker processes, in strict mode and not. Strict: the SHA-256
over weights and optimizer state must be the same. Not strict, if that holds: how far apart rounding takes them.

Invariants
* Nothing is read of the run but its configuration, data and code, and nothing is written to its folder.
* Each training has a temporary folder of its own that is gone before the next one begins, also after an error, Ctrl-C
  or SIGTERM; so are the worker processes. (Only a killed process leaves folders behind; its workers still end.)
* What is compared are the final checkpoints as they were on disk, verified.
* Threads are the same for all: one for each worker, unless the run says how many.
"""

import math
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import torch
from torch import Tensor

from cuadrilla.config import Config, CrewEngine, FileTaskSection
from cuadrilla.engines.crew import OpenCrew, Opening, run_crew
from cuadrilla.engines.local import run_local
from cuadrilla.errors import ConfigError, CuadrillaError
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, storage_errors, write_json
from cuadrilla.runfile import dump
from cuadrilla.train.checkpoint import load_newest, tensors_sha256
from cuadrilla.train.precision import choose_device, choose_precision
from cuadrilla.train.setup import RunContext, assemble, make_task
from cuadrilla.train.sinks import Scalars, Sink

NEVER = 10**15
SHOWN_NAMES = 4


@dataclass(frozen=True, kw_only=True)
class ShortRun:
    """What one training came to. `state`: weights and optimizer state by name."""

    weights: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    sha256: str
    seconds: float
    most_workers: int
    """Most workers that took part in one step."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One worker and the crew, trained alike; the tensors are not kept."""

    strict: bool
    one_sha256: str
    crew_sha256: str
    one_seconds: float
    crew_seconds: float
    most_workers: int
    relative_difference: float
    """‖crew − one‖ / ‖one‖ over all weights together."""
    num_tensors: int
    differing: tuple[str, ...]
    """What differs, the largest difference first, in words."""

    @property
    def equal(self) -> bool:
        return self.one_sha256 == self.crew_sha256

    def summary(self) -> str:
        number, more = len(self.differing), len(self.differing) - SHOWN_NAMES
        shown = reduce(lambda one, other: Message("{one}, {other}", one=one, other=other), self.differing[:SHOWN_NAMES])
        told = "{number} of {all} tensors differ: {shown}"
        if more > 0:
            told = "{number} of {all} tensors differ: {shown} and {more} more"
        return Message(told, number=number, all=self.num_tensors, shown=shown, more=more)


Begin = Callable[[str, RunContext], Sequence[Sink]]
"""Told before each training what it is, such as "strict, one worker"; gives sinks for its rows, closed afterwards."""


def prove(config: Config, folder: Path, *, steps: int, begin: Begin) -> tuple[Proof, Proof | None]:
    """The strict proof, and the other one if the strict proof holds; `config.engine` is the practice crew.

    `folder` is the run's. Raises ConfigError for a run with nothing to share, KeyboardInterrupt after a signal, and
    what a training raises.
    """
    if config.sync.kind != "exact":
        raise ConfigError(
            "sync.kind = {kind!r} does not promise that a crew gives what one worker gives",
            kind=config.sync.kind,
            hint='only sync.kind = "exact" can be proved',
        )
    if len(config.engine.workers) < 2:
        raise ConfigError("a crew of one proves nothing", hint='name two workers or more: --crew "1.0,0.5"')
    if config.train.batch_sequences // config.train.unit_sequences < 2:
        raise ConfigError(
            "a step of this run is a single unit of work: there is nothing to share",
            hint="make units smaller for the proof: --set train.unit_sequences=1",
        )
    with _Stop.on_signals() as stop:

        def proof(*, strict: bool) -> Proof:
            alone, together = (
                _settings(config, folder, strict=strict, steps=steps, alone=alone) for alone in (True, False)
            )
            return compare(
                _train(alone, stop=stop, begin=begin), _train(together, stop=stop, begin=begin), strict=strict
            )

        strict = proof(strict=True)
        return strict, proof(strict=False) if strict.equal else None


def compare(one: ShortRun, crew: ShortRun, *, strict: bool) -> Proof:
    """What two trainings of the same model have in common, and what not."""
    squares = norm = 0.0
    for name, weight in one.weights.items():
        squares += float((crew.weights[name].double() - weight.double()).square().sum())
        norm += float(weight.double().square().sum())
    return Proof(
        strict=strict,
        one_sha256=one.sha256,
        crew_sha256=crew.sha256,
        one_seconds=one.seconds,
        crew_seconds=crew.seconds,
        most_workers=crew.most_workers,
        relative_difference=math.sqrt(squares / norm) if norm else math.sqrt(squares),
        num_tensors=len(one.state.keys() | crew.state.keys()),
        differing=tuple(_differing(one.state, crew.state)),
    )


def _differing(one: Mapping[str, Tensor], crew: Mapping[str, Tensor]) -> list[Message]:
    words = [Message("{name} is in only one of the two", name=name) for name in sorted(one.keys() ^ crew.keys())]
    far: list[tuple[float, str]] = []
    for name in one.keys() & crew.keys():
        if tensors_sha256({"": one[name]}) != tensors_sha256({"": crew[name]}):
            far.append((float((crew[name].double() - one[name].double()).abs().max()), name))
    told = "{name} by up to {distance:.2g}"
    return words + [Message(told, name=name, distance=distance) for distance, name in sorted(far, reverse=True)]


class _Stop:
    """Ctrl-C as a wish: the training at work is asked to stop, then everything is cleaned up undisturbed.

    Worker processes are killed: one that is still loading would be waited for, and none has anything to save.
    """

    def __init__(self) -> None:
        self.reason = ""
        self._tell: Callable[[str], None] | None = None
        self._workers: list[psutil.Process] = []

    @classmethod
    @contextmanager
    def on_signals(cls) -> Iterator["_Stop"]:
        stop = cls()

        def handler(number: int, _frame: FrameType | None) -> None:
            stop.reason = Message("{signal} received", signal=signal.Signals(number).name)
            if stop._tell is not None:
                stop._tell(stop.reason)
            stop._kill()

        wanted = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
        before = {number: signal.signal(number, handler) for number in wanted}
        try:
            yield stop
        finally:
            for number, action in before.items():
                signal.signal(number, action)

    @contextmanager
    def tells(self, request_stop: Callable[[str], None]) -> Iterator[None]:
        """While a training is at work. Raises KeyboardInterrupt behind it if it was asked to stop."""
        self._tell = request_stop
        try:
            self.check()
            yield
        except CuadrillaError:  # such as: all worker processes were killed
            self.check()
            raise
        finally:
            self._tell = None
            self._workers = []
        self.check()

    def watch(self, transport: OpenCrew) -> None:
        """Worker processes have been started."""
        with suppress(psutil.Error):
            self._workers = [psutil.Process(pid) for pid in transport.pids.values()]
        if self.reason:
            self._kill()

    def check(self) -> None:
        if self.reason:
            raise KeyboardInterrupt(self.reason)

    def _kill(self) -> None:
        for worker in self._workers:
            with suppress(psutil.Error):  # gone already; psutil never takes another process for it
                worker.kill()


class _Workers:
    """A sink that counts how many took part in a step."""

    def __init__(self) -> None:
        self.most = 0

    def log(self, _step: int, scalars: Scalars) -> None:
        workers = scalars.get("workers", 0)
        assert isinstance(workers, int)
        self.most = max(self.most, workers)

    def close(self) -> None:
        pass


def _settings(config: Config, folder: Path, *, strict: bool, steps: int, alone: bool) -> Config:
    """The run's configuration for a short training elsewhere; `alone`: by one worker in this process."""
    values: dict[str, Any] = dump(config)
    if isinstance(config.task, FileTaskSection):
        file, _, name = config.task.path.rpartition(":")
        values["task"]["path"] = f"{(folder / file).resolve()}:{name}"
    if config.data.folder:
        values["data"]["folder"] = str((folder / config.data.folder).resolve())
    values["model"]["init"] = ""  # any weights will do
    precision = choose_precision(config.train.precision, device=choose_device(config.train.device))
    values["train"] |= {"steps": steps, "tokens": 0, "epochs": 0.0, "threads": config.train.threads or 1, "teacher": []}
    if precision.dtype == torch.float16:
        values["train"]["precision"] = "fp32"  # strict mode and fp16 exclude each other
    values["sync"]["strict"] = strict
    values["engine"] |= {"listen": "127.0.0.1:0"}
    if alone:
        values["engine"] = {"kind": "local", "workers": [1.0]}
    values["checkpoint"] |= {"every_seconds": 0.0, "every_steps": 0, "journal": "off"}
    values["evaluate"] |= {"every_tokens": NEVER, "sequences": 1}  # one look at the end there always is
    values["sample"]["tokens"] = 0
    return Config.model_validate(values)


def _train(config: Config, *, stop: _Stop, begin: Begin) -> ShortRun:
    """One training in a folder of its own."""
    stop.check()
    with tempfile.TemporaryDirectory(prefix="cuadrilla-prove-", ignore_cleanup_errors=True) as name:
        run = RunDir(Path(name))
        with storage_errors(run.logs):
            run.logs.mkdir()
        write_json(run.config, {"values": dump(config)})  # where worker processes look
        counted = _Workers()
        sinks: list[Sink] = [counted]
        try:
            context = assemble(config, run, task=make_task(config, run.path), sinks=sinks)
            sinks.extend(begin(_describe(config), context))
            began = time.monotonic()
            with stop.tells(context.coordination.request_stop):
                if isinstance(config.engine, CrewEngine):
                    run_crew(context, run, opening=Opening(opened=stop.watch))
                else:
                    run_local(context)
            seconds = time.monotonic() - began
        finally:
            for sink in sinks:
                sink.close()
        return _read(run, seconds=seconds, most_workers=counted.most)


def _describe(config: Config) -> str:
    if config.engine.kind == "local":
        return Message("strict, one worker" if config.sync.strict else "not strict, one worker")
    together = "strict, {number} worker processes" if config.sync.strict else "not strict, {number} worker processes"
    return Message(together, number=len(config.engine.workers))


def _read(run: RunDir, *, seconds: float, most_workers: int) -> ShortRun:
    found = load_newest(run.checkpoints)
    assert found is not None, "a run ends with a checkpoint"
    state = {**found.model, **{f"optimizer {name}": tensor for name, tensor in found.optimizer.items()}}
    sha256 = tensors_sha256(state)
    return ShortRun(weights=found.model, state=state, sha256=sha256, seconds=seconds, most_workers=most_workers)
