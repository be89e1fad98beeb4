"""A standby: another machine that can go on with the crew when the coordinator's machine is gone for good.

`follow` copies what makes a machine the coordinator: the crew's keys, the run's data or code, the newest checkpoint and
the journal as it grows. `promote` turns the copy into a crew and a run of this machine, which `cuadrilla up` resumes.
No standby promotes itself: from here a dead coordinator and one that is cut off look the same, and if both machines
went on, they would train two models.

Invariants
* Each file is 0600 from its first byte on.
* A checkpoint exists here once it is verified; the one before stays until then.
* A restarted coordinator may make other records of the same versions. So each look names the CRC of the newest copied
  one, which depends on all before. Records that do not follow any more are never read, and replaced or removed.
"""

import shutil
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

from cuadrilla.crew.bundle import Report, fetch_run
from cuadrilla.crew.node import Node
from cuadrilla.errors import CheckpointError, ConfigError, LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.link.address import Address
from cuadrilla.link.base import Download, Follow, Missing, Refused
from cuadrilla.link.client import Connection
from cuadrilla.link.identity import COORDINATOR_FILE, key_hash, load_node, open_coordinator, shown_certificate
from cuadrilla.link.standby import record_name
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, make_private, read_object, write_atomic
from cuadrilla.runfile import to_toml
from cuadrilla.train.checkpoint import (
    FILES,
    MANIFEST,
    adopt_checkpoint,
    find_newest,
    list_checkpoints,
    prune_checkpoints,
    version_of,
)
from cuadrilla.train.journal import read_records, remove_records

PAUSE_SECONDS, ASK_SECONDS, POLL_SECONDS = 2.0, 2.0, 0.5
KEPT_CHECKPOINTS = 2
NUM_CHUNKS = 4  # chunks of a checkpoint that are copied between two looks at the journal


class Copy:
    """The copy in `folder` of a coordinator's files. `listen`: where this machine would coordinate."""

    def __init__(self, folder: Path, *, listen: str, report: Report) -> None:
        self.run = RunDir(folder / "run")
        self._folder, self._listen, self._report = folder, listen, report
        self._crew_files, self._version, self._crc = "", 0, 0
        """The newest `Missing.crew_files`; version and CRC of the newest record that this process has copied."""
        for part in (folder, self.run.path, self.run.checkpoints, self.run.journal):
            make_private(part)
        with suppress(CheckpointError):  # a copy that an earlier process has begun
            if (newest := find_newest(self.run.checkpoints)) is not None:
                after = read_object(newest / "state.json")["journal"]
                for record in read_records(self.run.journal, version_of(newest), after=after):
                    self._version, self._crc = record.version, record.crc

    def pull(self, connection: Connection) -> None:
        """Copy new records, then a new checkpoint. Raises LinkError, CheckpointError, ResourceError."""
        if (version := self._pull_records(connection)) is None:
            return
        arriving = self._folder / "arriving" / f"v{version:08d}"
        shutil.rmtree(arriving.parent, ignore_errors=True)
        make_private(arriving)
        for name in (*FILES, MANIFEST):
            write_atomic(arriving / name, self._beside_records(connection, arriving.name, name), private=True)
        if (arriving / MANIFEST).stat().st_size:  # else the coordinator has removed it meanwhile
            self._keep_checkpoint(arriving)

    def _pull_records(self, connection: Connection) -> int | None:
        """Copy new records; return the version of a new checkpoint."""
        newest = list_checkpoints(self.run.checkpoints)[-1:]
        manifest = (newest[0] / MANIFEST).read_bytes() if newest else b""
        request = Follow(address=self._listen, manifest=manifest, version=self._version, crc=self._crc)
        missing = connection.reply(request, Missing, seconds=None)
        for version in missing.records:
            chunks = [*connection.ask(Download(path=record_name(version)))]
            if not chunks:  # it was removed meanwhile
                return None
            write_atomic(self.run.path / record_name(version), chunks, private=True)
            self._version, self._crc = version, int.from_bytes(chunks[0][:4], "little")
        if missing.crew_files != self._crew_files:
            write_atomic(self._folder / "standby.json", missing.crew_files, private=True)
            self._crew_files = missing.crew_files
        return missing.checkpoint

    def _beside_records(self, connection: Connection, checkpoint: str, name: str) -> Iterator[bytes]:
        """The bytes of a checkpoint's file. New records are copied after every MiB of it."""
        chunks = connection.ask(Download(path=f"checkpoints/{checkpoint}/{name}"))
        for number, chunk in enumerate(chunks, start=1):
            yield chunk
            if number % NUM_CHUNKS == 0:
                self._pull_records(connection)

    def _keep_checkpoint(self, arrived: Path) -> None:
        """Keep a complete checkpoint. Copies of what came later there go: they are another run's or were undone."""
        folder, version = self.run.checkpoints, version_of(arrived)
        adopt_checkpoint(arrived, folder)
        for undone in list_checkpoints(folder):
            if version_of(undone) > version:
                shutil.rmtree(undone)
        prune_checkpoints(folder, keep=KEPT_CHECKPOINTS, protect=())
        oldest = version_of(list_checkpoints(folder)[0])
        remove_records(self.run.journal, unwanted=lambda version: not oldest < version <= self._version)
        template = "the checkpoint of step {step} is copied; its journal is copied as it grows"
        self._report(Message(template, step=version))


def follow(home: Home, crew: Joined, *, listen: str, report: Report) -> None:
    """Follow the crew's coordinator until this process is stopped. `listen`: where this machine would coordinate.

    Raises LinkError when the coordinator refuses this node, ConfigError when this machine cannot be its standby.
    """
    _check_free(home, crew)
    folder, reported = home.standby_folder(crew), ""
    if (run := RunDir(folder / "run")).metrics.exists():
        problem = "the copy was promoted and is trained here: {path}"
        raise ConfigError(problem, path=run.path, hint="move it away first")
    node, copy = Node(home=home, crew=crew), Copy(folder, listen=listen, report=report)
    while True:
        with closing(node.connect(crew.address)) as connection:
            try:
                described = node.describe(connection)
                connection.reply(Follow(address=listen), Missing)  # refused now, not after the run's data have arrived
                config = fetch_run(connection, described, copy.run, home=home, report=report)
                write_atomic(copy.run.run_file, to_toml(config), private=True)
                reported = ""
                while True:
                    copy.pull(connection)
                    time.sleep(POLL_SECONDS)
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
    until, key, shown = time.monotonic() + seconds, key_hash(load_node(crew.folder).certificate), b""
    while time.monotonic() < until:
        with suppress(LinkError):
            shown = key_hash(shown_certificate(Address.parse(crew.address), timeout_seconds=ASK_SECONDS))
        if shown == key:
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
