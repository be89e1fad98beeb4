"""A job that another machine has: the message about it, the files that may come back, and whether they are complete.

Invariants
* What a machine brings counts after it was verified: a checkpoint's files by its manifest, its tensors by the model,
  its version by the job; the end of a run by the checkpoint and the row of its last step.
* A job takes no more disk here than the checkpoints that it keeps, `MAX_COPIES` more, and what the rows of its steps
  take.
"""

import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import safetensors

from cuadrilla.crew.bundle import offer_whole
from cuadrilla.errors import CheckpointError, LinkError
from cuadrilla.link.jobs import CHECKPOINT_FILE, METRICS, Assignment
from cuadrilla.link.offer import offered
from cuadrilla.messages import Message
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import FolderLock, RunDir, file_sha256, last_rows, storage_errors, write_json
from cuadrilla.runfile import dump, read_run_file
from cuadrilla.train.checkpoint import (
    FILES,
    MANIFEST,
    NewerFormat,
    check_finite,
    list_checkpoints,
    set_aside,
    verify_checkpoint,
    version_of,
)
from cuadrilla.train.coordinate import model_tensors
from cuadrilla.train.setup import make_model, make_task, measure_length
from cuadrilla.train.teachers import keep_teachers
from cuadrilla.user_file import UsersCode

MAX_COPIES = 4
BYTES_PER_VALUE, MORE_BYTES = 24, 64 * 2**20
"""The size of a checkpoint, at most: weights, what an optimizer keeps of each, and what does not grow with them."""
JSON_BYTES = {MANIFEST: 2**16, "state.json": 2**24}
"""The size of files that are parsed here, at most."""
ROW_BYTES, MORE_ROW_BYTES = 4096, 16 * 2**20
"""The size of a step's rows, at most, and of those that are written again after a process was killed."""

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class AssignedJob:
    """A job that a machine has now."""

    job: str
    run: RunDir
    lock: FolderLock
    """The lock of the run for as long as a machine has it."""
    incoming: Path
    """The folder of files that its machine sends, and no other machine."""
    began: float = field(default_factory=time.monotonic)
    keep: int = 0
    keep_steps: frozenset[int] = frozenset()
    """And the one that it began from."""
    steps: int = 0
    """No version is above it."""
    may_end_early: bool = False
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of its model's tensors, by name."""
    most_bytes: int = 0
    """The size of a checkpoint's files, at most."""
    files: Mapping[str, Path]
    """By hash: what its machine may have."""
    announced: dict[str, dict[str, int]] = field(default_factory=dict)
    """Bytes of the files that have been sent, by checkpoint and name."""
    announcing: threading.Lock = field(default_factory=threading.Lock)
    row_bytes: int = 0
    preempted_at: float | None = None

    @property
    def max_row_bytes(self) -> int:
        return MORE_ROW_BYTES + ROW_BYTES * self.steps

    def place_for(self, path: str, *, num_bytes: int) -> Path:
        """The path of a file of the job, for threads of the link. Raises LinkError where it is not wanted."""
        match = CHECKPOINT_FILE.fullmatch(path)
        if match is None or not 0 < int(match[1]) <= self.steps:
            raise not_wanted()
        checkpoint, file = f"v{int(match[1]):08d}", match[2]
        with self.announcing:
            sizes = self.announced.get(checkpoint, {}) | {file: num_bytes}
            others = self.announced.keys() - {checkpoint}
            fits = num_bytes <= JSON_BYTES.get(file, num_bytes) and sum(sizes.values()) <= self.most_bytes
            if not fits or len(others) >= MAX_COPIES:
                told = "its checkpoints are larger than those of its model, or too many"
                raise LinkError(told, hint="install the same version there")
            self.announced[checkpoint] = sizes
        return self.incoming / checkpoint / file

    def has_come(self, checkpoint: str) -> None:
        """Whatever comes of it: there is room for another one."""
        with self.announcing:
            self.announced.pop(checkpoint, None)

    def missing(self) -> str:
        """The part that a job lacks which is said to be complete; "": nothing."""
        newest = newest_version(self.run)
        if newest < self.steps and not (self.may_end_early and newest):
            return Message("it says that the run is complete, and has not sent the last checkpoint")
        if not any(row.get("version") == newest for row in last_rows(self.run.metrics)):
            return Message("it says that the run is complete, and has not sent its last row")
        return ""


def not_wanted() -> LinkError:
    """The error for a file that is not to come."""
    return LinkError("nobody wants that file", hint="install the same version there")


def assign(job: str, run: RunDir, *, machine: str) -> tuple[AssignedJob, Assignment]:
    """The job in `run` for `machine`, and the message about it; the run is locked for as long as it has it.

    Raises ConfigError for a run that is trained by somebody else, DataError, CheckpointError, TaskError, ResourceError.
    """
    resolved = read_run_file(run.run_file)
    config, _ = decide(resolved.config.for_others(), run)
    with UsersCode():
        task = make_task(config, run.path)
    keep_teachers(config, run, task=task)
    begun = _begun(run)
    offer = offer_whole(config, run.path, goes_on=any(name != METRICS for name in begun))
    lock = FolderLock(run.lock, purpose=Message("training on {machine}", machine=machine))
    with ExitStack() as stack:
        stack.enter_context(lock)
        write_json(run.config, {"values": dump(config), "origins": resolved.origins}, private=True)
        with UsersCode():
            tensors = model_tensors(make_model(task, seed=config.run.seed))
            steps = config.train.steps or measure_length(config, task).num_steps
        assigned = AssignedJob(
            job=job,
            run=run,
            lock=lock,
            incoming=_incoming(run),
            files=_by_hash({**offer.files, **begun}),
            keep=config.checkpoint.keep,
            keep_steps=frozenset({*config.checkpoint.keep_steps, newest_version(run)}),
            steps=steps,
            may_end_early=config.evaluate.patience > 0,
            shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
            most_bytes=BYTES_PER_VALUE * sum(tensor.numel() for tensor in tensors.values()) + MORE_BYTES,
        )
        stack.pop_all()
    return assigned, Assignment(job=job, config=offer.config, files=offered(offer.files), begun=offered(begun))


def _incoming(run: RunDir) -> Path:
    """A new name, once what a coordinator that was killed has left is gone."""
    for old in run.path.glob(".incoming-*"):
        shutil.rmtree(old, ignore_errors=True)
    return run.path / f".incoming-{secrets.token_hex(8)}"


def _by_hash(files: Mapping[str, tuple[Path, bytes]]) -> dict[str, Path]:
    return {sha256.hex(): path for path, sha256 in files.values()}


def require_fit(path: Path, *, version: int, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError for one of another step, or another model, or with numbers that are not finite."""
    problem = CheckpointError("{path} belongs to another run", path=path, hint="install the same version there")
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        with safetensors.safe_open(path / "model.safetensors", framework="numpy") as file:
            found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, RecursionError, safetensors.SafetensorError) as error:
        raise problem from error
    if not isinstance(state, dict) or state.get("version") != version or found != shapes:
        raise problem
    check_finite(path)


def newest_version(run: RunDir) -> int:
    return max((version_of(path) for path in list_checkpoints(run.checkpoints)), default=0)


def _begun(run: RunDir) -> dict[str, tuple[Path, bytes]]:
    """The files with which another machine goes on: the rows, and the newest checkpoint that verifies.

    Raises NewerFormat. One that does not is set aside: it would count as newer than all that machines send.
    """
    found = {}
    for path in reversed(list_checkpoints(run.checkpoints)):
        try:
            verify_checkpoint(path)
        except NewerFormat:
            raise
        except CheckpointError as error:
            log.warning("%s; trying the one before", error.message)
            with storage_errors(path):
                set_aside(path)
            continue
        found = {f"checkpoints/{path.name}/{name}": path / name for name in (*FILES, MANIFEST)}
        break
    if run.metrics.exists():
        found[METRICS] = run.metrics
    return {name: (path, bytes.fromhex(file_sha256(path))) for name, path in found.items()}
