"""A job that another machine has: the message about it, and the files that may come back."""

import shutil
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from cuadrilla.crew.bundle import offer_whole
from cuadrilla.errors import LinkError
from cuadrilla.link.base import offered
from cuadrilla.link.jobs import CHECKPOINT_FILE, METRICS, Assignment
from cuadrilla.messages import Message
from cuadrilla.plan.decide import decide
from cuadrilla.rundir import FolderLock, RunDir, file_sha256, write_json
from cuadrilla.runfile import dump, read_run_file
from cuadrilla.train.checkpoint import (
    FILES,
    MANIFEST,
    find_newest,
    list_checkpoints,
    set_aside_newer,
    version_of,
)
from cuadrilla.train.setup import make_task
from cuadrilla.train.teachers import keep_teachers
from cuadrilla.user_file import UsersCode


@dataclass(kw_only=True)
class AssignedJob:
    """A job that a machine has now."""

    job: str
    run: RunDir
    lock: FolderLock
    """The lock of the run for as long as a machine has it."""
    began: float = field(default_factory=time.monotonic)
    keep: int = 0
    keep_steps: frozenset[int] = frozenset()
    """And the one that it began from."""
    files: Mapping[str, Path]
    """By hash: what its machine may have."""
    preempted: bool = False

    @property
    def incoming(self) -> Path:
        """The folder of files that its machine sends."""
        return self.run.path / ".incoming"

    def place_for(self, path: str) -> Path:
        """The path of a file of the job, for threads of the link. Raises LinkError where it is not wanted."""
        match = CHECKPOINT_FILE.fullmatch(path)
        if match is None:
            raise LinkError("nobody wants that file", hint="install the same version there")
        return self.incoming / f"v{int(match[1]):08d}" / match[2]


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
    assigned = AssignedJob(
        job=job,
        run=run,
        lock=lock,
        files={sha256.hex(): path for path, sha256 in {**offer.files, **begun}.values()},
        keep=config.checkpoint.keep,
        keep_steps=frozenset({*config.checkpoint.keep_steps, newest_version(run)}),
    )
    with ExitStack() as stack:
        stack.enter_context(lock)
        shutil.rmtree(assigned.incoming, ignore_errors=True)  # of a coordinator that was killed
        write_json(run.config, {"values": dump(config), "origins": resolved.origins}, private=True)
        stack.pop_all()
    return assigned, Assignment(job=job, config=offer.config, files=offered(offer.files), begun=offered(begun))


def newest_version(run: RunDir) -> int:
    return max((version_of(path) for path in list_checkpoints(run.checkpoints)), default=0)


def _begun(run: RunDir) -> dict[str, tuple[Path, bytes]]:
    """The files with which another machine goes on: the rows, and the newest checkpoint that verifies.

    Raises CheckpointError if there are some and none verifies. Newer ones would count as newer than all that machines
    send.
    """
    found = {}
    if (newest := find_newest(run.checkpoints)) is not None:
        set_aside_newer(newest)
        found = {f"checkpoints/{newest.name}/{name}": newest / name for name in (*FILES, MANIFEST)}
    if run.metrics.exists():
        found[METRICS] = run.metrics
    return {name: (path, bytes.fromhex(file_sha256(path))) for name, path in found.items()}
