"""A standby: another machine that could go on with the crew when the coordinator's machine is gone for good.

`follow` copies what makes a machine the coordinator (its keys, the run's data or code, the newest checkpoint) and then
the journal as it grows; `promote` turns the copy into a crew and a run of this machine, which `cuadrilla up` resumes.
Nothing is promoted by itself: from here a coordinator that is dead and one that is cut off look the same, and two that
both go on would train two models.

Invariants
* Keys are in a private folder, each file 0600 from its first byte on.
* A checkpoint is copied under a temporary name and verified before it exists here; the one before stays until then, and
  the journal is copied on meanwhile.
* A coordinator that was started anew may write another journal of the same name: each is copied again, beside the old
  copy, which it replaces when it is whole.
"""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from cuadrilla.config import Config, FileTaskSection
from cuadrilla.engines.bundle import fetch
from cuadrilla.errors import CheckpointError, ConfigError, LinkError
from cuadrilla.home import Home, Joined, read_object
from cuadrilla.link.address import Address
from cuadrilla.link.base import KnownTerm, Refused
from cuadrilla.link.grpc_client import Connection
from cuadrilla.link.grpc_standby import CHECKPOINT_FILE, JOURNAL_FILE
from cuadrilla.link.invite import SECRET_BYTES, Invite
from cuadrilla.link.tls import COORDINATOR_FILES, key_hash, load_node, open_coordinator, pinned_certificate
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, fsync_folder, make_private, storage_errors, write_atomic, write_json
from cuadrilla.runfile import to_toml
from cuadrilla.train.checkpoint import list_checkpoints, prune_checkpoints, verify_checkpoint, version_of
from cuadrilla.train.journal import has_segment, read_segment

POLL_SECONDS = 0.5
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 5.0
KEPT_CHECKPOINTS = 2
ASK_SECONDS = 2.0

Report = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Replica:
    """The copy on this machine. `listen`: where it would coordinate; `announced`: what it has heard of."""

    folder: Path
    listen: str = ""
    announced: int = 0

    @classmethod
    def of(cls, home: Home, crew: Joined) -> "Replica":
        folder = home.standby_folder(crew)
        known = read_object(folder / "standby.json")
        return cls(folder=folder, listen=str(known.get("listen", "")), announced=int(known.get("announced", 0)))

    @property
    def keys(self) -> Path:
        return self.folder / "crew"

    @property
    def run(self) -> RunDir:
        return RunDir(self.folder / "run")

    @property
    def lock(self) -> Path:
        return self.folder / "lock"

    def write(self) -> None:
        write_json(self.folder / "standby.json", {"listen": self.listen, "announced": self.announced})


def follow(home: Home, crew: Joined, *, listen: str, report: Report) -> None:
    """Follow the crew's coordinator until this process is stopped. `listen`: where this machine would coordinate.

    Raises LinkError when the coordinator refuses this node, ConfigError when this machine cannot be its replica.
    """
    replica = replace(Replica.of(home, crew), listen=listen)
    _check_free(home, crew)
    if replica.run.metrics.exists():
        problem = "the copy was promoted and is trained here: {path}"
        raise ConfigError(problem, path=replica.run.path, hint="move it away first")
    make_private(replica.keys)
    pause, told = FIRST_PAUSE_SECONDS, ""
    while True:
        term = KnownTerm(crew.term, learned=lambda value: home.remember(replace(crew, term=value)))
        connection = Connection(crew.address, identity=load_node(crew.folder), term=term)
        follower = Follower(connection, replica, report=report)
        try:
            follower.begin(home, crew)
            while True:
                follower.copy()
                pause, told = FIRST_PAUSE_SECONDS, ""
                time.sleep(POLL_SECONDS)
        except Refused:
            raise
        except (LinkError, CheckpointError) as error:
            if error.message != told:  # not every five seconds, for as long as a machine is off
                trying = "{reason}; trying again. If that machine is gone for good: cuadrilla promote"
                report(Message(trying, reason=error.message))
                told = error.message
        finally:
            replica = follower.replica
            connection.close()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


class Follower:
    """One connection's worth of following."""

    def __init__(self, connection: Connection, replica: Replica, *, report: Report) -> None:
        self.replica = replica
        self._connection = connection
        self._report = report
        self._incarnation = 0
        self._whole: set[str] = set()
        """Segments that were copied from their beginning in this incarnation of the coordinator."""
        self._copied_at = 0.0

    def begin(self, home: Home, crew: Joined) -> None:
        """Everything that does not grow."""
        files = self._crew_keys(crew)
        for name, raw in files.items():
            write_atomic(self.replica.keys / name, raw, private=True)
        server = open_coordinator(self.replica.keys, now=datetime.now(UTC)).identity.certificate
        if home.joined_folder(key_hash(server)) != crew.folder:
            raise LinkError("the keys belong to another crew", hint="join it with an invite, then: cuadrilla standby")
        config, folder = fetch(self._connection, self._connection.describe(), home=home, report=self._report)
        for part in (self.replica.run.path, self.replica.run.checkpoints, self.replica.run.journal):
            make_private(part)
        if (folder / self.replica.run.teachers.name).is_dir():
            with storage_errors(self.replica.run.teachers):
                shutil.copytree(folder / self.replica.run.teachers.name, self.replica.run.teachers, dirs_exist_ok=True)
        write_atomic(self.replica.run.run_file, to_toml(_placed(config, folder)))

    def _crew_keys(self, crew: Joined) -> dict[str, bytes]:
        try:
            files = self._connection.crew_keys()
        except Refused as error:
            hint = Message("name it where the coordinator runs: cuadrilla up --standby {name} RUN", name=crew.name)
            raise Refused(error.message, hint=hint) from None
        if set(files) != set(COORDINATOR_FILES):
            raise LinkError("the coordinator's keys are incomplete", hint="install the same version on both machines")
        return files

    def copy(self) -> None:
        """What has grown since the last time."""
        files, announced = self._journal()
        versions = [int(found[1]) for path in files if (found := CHECKPOINT_FILE.fullmatch(path))]
        newest = max(versions, default=-1)
        if newest > self._newest_here():
            self._checkpoint(newest, {path: size for path, size in files.items() if CHECKPOINT_FILE.fullmatch(path)})
            _, announced = self._journal()
        if announced != self.replica.announced:
            self.replica = replace(self.replica, announced=announced)
            self.replica.write()

    def _newest_here(self) -> int:
        return max(map(version_of, list_checkpoints(self.replica.run.checkpoints)), default=-1)

    def _journal(self) -> tuple[dict[str, int], int]:
        """Copy the journal's new parts; all files that are there, by size, and the newest announced version."""
        grown = self._connection.growth(self.replica.listen)
        if grown.incarnation != self._incarnation:
            self._incarnation, self._whole = grown.incarnation, set()
        nodes = self.replica.keys / "nodes.json"
        if not nodes.exists() or nodes.read_bytes() != grown.nodes:
            write_atomic(nodes, grown.nodes, private=True)
        self._pauses(frozenset(grown.paused))
        files = {file.path: file.num_bytes for file in grown.files}
        for path in sorted(files):
            found = JOURNAL_FILE.fullmatch(path)
            if found and int(found[1]) >= self._newest_here():
                self._segment(path, end=files[path])
        self._copied_at = time.monotonic()
        return files, grown.announced

    def _pauses(self, nodes: frozenset[str]) -> None:
        copied = Home(self.replica.folder)
        if copied.paused_nodes != nodes:
            copied.pause(nodes=nodes, here=False)

    def _segment(self, path: str, *, end: int) -> None:
        target = self.replica.run.path / path
        if path in self._whole:
            self._append(path, target, end=end)
            return
        again = target.with_suffix(".part")
        again.unlink(missing_ok=True)
        self._append(path, again, end=end)
        os.replace(again, target)
        fsync_folder(target.parent)
        self._whole.add(path)

    def _append(self, path: str, target: Path, *, end: int) -> None:
        with storage_errors(target), open(target, "ab") as file:
            if file.tell() < end:
                for data in self._connection.copy(path, offset=file.tell(), end=end):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())

    def _checkpoint(self, version: int, files: dict[str, int]) -> None:
        """A checkpoint in a folder of its own until it is verified."""
        folder = self.replica.run.checkpoints
        temporary = folder / f".v{version:08d}.{os.getpid()}.tmp"
        with storage_errors(temporary):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        for path, size in files.items():
            target = temporary / Path(path).name
            with storage_errors(target), open(target, "wb") as file:
                for data in self._connection.copy(path, offset=0, end=size):
                    file.write(data)
                    if time.monotonic() - self._copied_at > POLL_SECONDS:
                        self._journal()
                file.flush()
                os.fsync(file.fileno())
        verify_checkpoint(temporary)
        os.rename(temporary, folder / f"v{version:08d}")
        fsync_folder(folder)
        prune_checkpoints(folder, keep=KEPT_CHECKPOINTS, protect=())
        oldest = version_of(list_checkpoints(folder)[0])
        for segment in self.replica.run.journal.glob("v*.log"):
            if int(segment.stem[1:]) < oldest:
                segment.unlink()
        here = "the checkpoint of step {step} is copied; its journal is copied as it grows"
        self._report(Message(here, step=version))


def _placed(config: Config, folder: Path) -> Config:
    """The run's configuration, for a run directory elsewhere than `folder`, where its data or code is."""
    if isinstance(config.task, FileTaskSection):
        task = config.task.model_copy(update={"path": str(folder / config.task.path)})
        return config.model_copy(update={"task": task})
    data = config.data.model_copy(update={"folder": str(folder / config.data.folder)})
    return config.model_copy(update={"data": data})


def _check_free(home: Home, crew: Joined) -> None:
    """A machine coordinates one crew: it cannot take over a second one beside its own. Raises ConfigError."""
    own = home.crew / "server.pem"
    if own.exists() and home.joined_folder(key_hash(own.read_bytes())) != crew.folder:
        raise ConfigError(
            "this machine has a crew of its own: {folder}",
            folder=home.crew,
            hint="move that folder away, or name another home for the standby in CUADRILLA_HOME",
        )


def check_gone(crew: Joined, *, seconds: float, report: Report) -> None:
    """Raises LinkError when the coordinator answers within this time: its parent may be starting it again."""
    asking = "asking    {address} for {seconds:.0f} s whether it is still running"
    report(Message(asking, address=crew.address, seconds=seconds))
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        connection = Connection(crew.address, identity=load_node(crew.folder))
        try:
            connection.describe()
        except Refused:
            pass  # it is there
        except LinkError:
            time.sleep(POLL_SECONDS)
            continue
        finally:
            connection.close()
        raise LinkError(
            "the coordinator at {address} answers: if both continued, they would train two models",
            address=crew.address,
            hint="stop it there (cuadrilla down), or promote anyway with --force",
        )


def promote(home: Home, crew: Joined, replica: Replica) -> int:
    """Make the crew this machine's own; the version from which its run goes on. The caller holds `replica.lock`.

    Raises CheckpointError when there is nothing to go on from, and ConfigError.
    """
    _check_free(home, crew)
    version = newest_version(replica.run)
    make_private(home.crew)
    for name in (*COORDINATOR_FILES, "nodes.json"):
        write_atomic(home.crew / name, (replica.keys / name).read_bytes(), private=True)
    home.pause(nodes=Home(replica.folder).paused_nodes, here=home.is_paused)
    home.begin_term(crew.term + 1)
    return version


def taken_over(home: Home) -> str:
    """Where a standby of this machine's crew coordinates now; empty if none answers with the crew's key."""
    if not (home.crew / "server.pem").exists():
        return ""
    expected = key_hash((home.crew / "server.pem").read_bytes())
    for address in read_object(home.standbys_file).values():
        with suppress(LinkError):
            invite = Invite(address=Address.parse(str(address)), key_hash=expected, secret=bytes(SECRET_BYTES))
            pinned_certificate(invite, timeout_seconds=ASK_SECONDS)
            return str(address)
    return ""


def newest_version(run: RunDir) -> int:
    """What checkpoints and journal of a run come to. Raises CheckpointError."""
    for path in reversed(list_checkpoints(run.checkpoints)):
        with suppress(CheckpointError):
            verify_checkpoint(path)
            version = version_of(path)
            break
    else:
        raise CheckpointError(
            "no checkpoint was copied to {path} yet",
            path=run.path,
            hint="there is nothing to continue from: recover the old machine's disk",
        )
    while has_segment(run.journal, version):
        last = max((record.version for record, _ in read_segment(run.journal, version)), default=version)
        if last == version:
            break
        version = last
    return version
