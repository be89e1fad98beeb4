"""A standby: another machine that can go on with the crew when the coordinator's machine is gone for good.

`follow` copies what makes a machine the coordinator: the crew's keys, the run's data or code, the newest checkpoint and
the journal as it grows. `promote` turns the copy into a crew and a run of this machine, which `cuadrilla up` resumes.
No standby promotes itself: from here a dead coordinator and one that is cut off look the same, and if both machines
went on, they would train two models.

Invariants
* Each file is 0600 from its first byte on.
* A checkpoint exists here once it is verified; the one before stays until then.
* A restarted coordinator may write another journal under the same name. So on a new connection each segment is copied
  from its beginning, beside the old copy, and replaces that when it is complete.
"""

import os
import re
import shutil
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from cuadrilla.crew.bundle import Report, fetch
from cuadrilla.errors import CheckpointError, ConfigError, LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.link.base import KnownTerm, Refused
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import COORDINATOR_FILE, key_hash, load_node, open_coordinator
from cuadrilla.link.jobs import CHECKPOINT_FILE
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, fsync_folder, make_private, open_private, read_object, storage_errors, write_atomic
from cuadrilla.runfile import to_toml
from cuadrilla.train.checkpoint import (
    MANIFEST,
    find_newest,
    list_checkpoints,
    prune_checkpoints,
    verify_checkpoint,
    version_of,
)
from cuadrilla.train.journal import read_records

PAUSE_SECONDS, ASK_SECONDS = 2.0, 2.0
KEPT_CHECKPOINTS = 2
COPIED_FILE = re.compile(rf"standby\.json|run/journal/v[0-9]{{8,12}}\.step|run/({CHECKPOINT_FILE.pattern})")


class Copy:
    """The copy in `folder`, as it comes over one connection."""

    def __init__(self, folder: Path, *, report: Report) -> None:
        self.run = RunDir(folder / "run")
        self._folder, self._arriving = folder, folder / "arriving"
        self._report = report
        self._segments: set[str] = set()
        """Journal segments that are complete for now; later bytes of them are appended."""
        shutil.rmtree(self._arriving, ignore_errors=True)
        for part in (folder, self.run.path, self.run.checkpoints, self.run.journal):
            make_private(part)

    @property
    def manifest(self) -> bytes:
        """Manifest of the newest copied checkpoint; empty if there is none."""
        newest = list_checkpoints(self.run.checkpoints)[-1:]
        return (newest[0] / MANIFEST).read_bytes() if newest else b""

    def take(self, path: str, data: bytes, num_bytes: int) -> None:
        """Append `data` to a file, which is complete for now at `num_bytes`. Raises LinkError, CheckpointError."""
        if not COPIED_FILE.fullmatch(path):
            hint = "install the same version of cuadrilla on both machines"
            raise LinkError("the coordinator offers files that no run has: {files}", files=repr(path[:100]), hint=hint)
        arriving = (self._folder if path in self._segments else self._arriving) / path
        make_private(arriving.parent)
        with storage_errors(arriving), open(arriving, "ab", opener=open_private) as file:
            file.write(data)
            if file.tell() < num_bytes:
                return
            file.flush()
            os.fsync(file.fileno())
        if arriving.name == MANIFEST:
            self._keep_checkpoint(arriving.parent)
        elif "checkpoints" not in path and path not in self._segments:
            os.replace(arriving, self._folder / path)
            fsync_folder((self._folder / path).parent)
            self._segments |= {path} - {"standby.json"}

    def _keep_checkpoint(self, arrived: Path) -> None:
        """Keep a complete checkpoint. Copies of its version or later ones go: they are another run's or were undone."""
        verify_checkpoint(arrived)
        folder = self.run.checkpoints
        for undone in list_checkpoints(folder):
            if version_of(undone) >= version_of(arrived):
                shutil.rmtree(undone)
        os.rename(arrived, folder / arrived.name)
        fsync_folder(folder)
        prune_checkpoints(folder, keep=KEPT_CHECKPOINTS, protect=())
        oldest = version_of(list_checkpoints(folder)[0])
        for segment in self.run.journal.iterdir():
            if int(segment.stem[1:]) <= oldest or f"run/journal/{segment.name}" not in self._segments:
                segment.unlink()
        template = "the checkpoint of step {step} is copied; its journal is copied as it grows"
        self._report(Message(template, step=version_of(arrived)))

    def fetch_run(self, connection: Connection, home: Home) -> None:
        """Fetch the run's settings, and its data or code into this machine's cache. Raises as `fetch`."""
        config, folder = fetch(connection, connection.describe(), home=home, report=self._report)
        if (teachers := folder / self.run.teachers.name).is_dir():
            with storage_errors(self.run.teachers):
                shutil.copytree(teachers, self.run.teachers, dirs_exist_ok=True)
        write_atomic(self.run.run_file, to_toml(config.moved(lambda path: str(folder / path))))


def follow(home: Home, crew: Joined, *, listen: str, report: Report) -> None:
    """Follow the crew's coordinator until this process is stopped. `listen`: where this machine would coordinate.

    Raises LinkError when the coordinator refuses this node, ConfigError when this machine cannot be its standby.
    """
    _check_free(home, crew)
    folder, reported = home.standby_folder(crew), ""
    if (run := RunDir(folder / "run")).metrics.exists():
        problem = "the copy was promoted and is trained here: {path}"
        raise ConfigError(problem, path=run.path, hint="move it away first")
    term = KnownTerm(crew.term, learned=lambda value: home.remember(replace(crew, term=value)))
    while True:
        copy = Copy(folder, report=report)
        with closing(Connection(crew.address, identity=load_node(crew.folder), term=term)) as connection:
            try:
                arriving = connection.follow(listen, manifest=copy.manifest)
                copy.take(*next(arriving))
                copy.fetch_run(connection, home)
                reported = ""
                for part in arriving:
                    copy.take(*part)
            except Refused:
                raise
            except (LinkError, CheckpointError) as error:
                if error.message != reported:  # one report for as long as a machine is off
                    trying = "{reason}; trying again. If that machine is gone for good: cuadrilla promote"
                    report(Message(trying, reason=error.message))
                    reported = error.message
        time.sleep(PAUSE_SECONDS)


def _check_free(home: Home, crew: Joined) -> None:
    """A machine coordinates one crew: it cannot take over a second one beside its own. Raises ConfigError."""
    has_own = (home.crew / COORDINATOR_FILE).exists()
    if has_own and home.joined_folder(key_hash(open_coordinator(home.crew).certificate)) != crew.folder:
        raise ConfigError(
            "this machine has a crew of its own: {folder}",
            folder=home.crew,
            hint="move that folder away, or name another home for the standby in CUADRILLA_HOME",
        )


def check_gone(crew: Joined, *, seconds: float, report: Report) -> None:
    """Raises LinkError if the coordinator answers within this time, in which its parent may restart it."""
    asking = "asking    {address} for {seconds:.0f} s whether it is still running"
    report(Message(asking, address=crew.address, seconds=seconds))
    until, identity = time.monotonic() + seconds, load_node(crew.folder)
    while time.monotonic() < until:
        with closing(Connection(crew.address, identity=identity)) as connection:
            if connection.answers(ASK_SECONDS):
                raise LinkError(
                    "the coordinator at {address} answers: if both continued, they would train two models",
                    address=crew.address,
                    hint="stop it there (cuadrilla stop), or promote anyway with --wait 0",
                )
        time.sleep(ASK_SECONDS / 4)


def promote(home: Home, crew: Joined) -> int:
    """Make the crew this machine's own; return the version from which its run goes on. `follow` must not run meanwhile.

    Raises CheckpointError when there is nothing to go on from, and ConfigError.
    """
    _check_free(home, crew)
    folder = home.standby_folder(crew)
    known, version = read_object(folder / "standby.json"), newest_version(RunDir(folder / "run"))
    make_private(home.crew)
    for name in (COORDINATOR_FILE, "nodes.json"):
        write_atomic(home.crew / name, known[name], private=True)
    home.begin_term(crew.term + 1)
    return version


def newest_version(run: RunDir) -> int:
    """The version to which a run's checkpoints and journal lead. Raises CheckpointError."""
    checkpoint = find_newest(run.checkpoints)
    if checkpoint is None:
        hint = "there is nothing to continue from: recover the old machine's disk"
        raise CheckpointError("no checkpoint was copied to {path} yet", path=run.path, hint=hint)
    version, after = version_of(checkpoint), read_object(checkpoint / "state.json")["journal"]
    return max((record.version for record in read_records(run.journal, version, after=after)), default=version)
