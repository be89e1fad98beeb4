"""The files of a run in training (checkpoints, journal, metrics, events, status); the run is restored from them.

A failed write never stops the training. The last good checkpoint stays, the first failure is logged as an alarm, and
the write is tried again at a later commit. Only the first and the last save of a run must succeed. Saves by
`checkpoint.every_seconds` take at most about 2 % of the time: their interval grows to fifty times a save's duration.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from cuadrilla.config import CheckpointSection
from cuadrilla.errors import ConfigError, ResourceError
from cuadrilla.model.weights import WEIGHTS, read_tensors
from cuadrilla.rundir import KeptLines, RunDir, event_line, finite, read_jsonl, read_object, write_json
from cuadrilla.sync.merge import Merger
from cuadrilla.train import checkpoint as files
from cuadrilla.train.guard import Guard, Verdict
from cuadrilla.train.journal import append, read_records, remove_records

MAX_SAVE_OVERHEAD = 0.02
STATUS_SECONDS = 2.0

log = logging.getLogger(__name__)

OnEvent = Callable[[str, Mapping[str, Any]], None]
"""Takes an event's kind and its fields, and returns at once."""


@dataclass(kw_only=True)
class Store:
    """Owned by the coordinator's shell, and used by its thread. `tensors`: the weights of record."""

    run: RunDir
    section: CheckpointSection
    merge: Merger
    tensors: Mapping[str, Tensor]
    with_journal: bool
    identity: Mapping[str, Any]
    on_event: OnEvent = lambda _kind, _fields: None
    """Called with each event, too. In a training run it is `Alarms.on_event`."""
    clock: Callable[[], float] = time.monotonic
    unlogged: Mapping[str, Any] | None = None
    """Metrics of the journal's last step, if the coordinator was killed before it could write that row."""
    _last_crc: int = 0
    """CRC of the journal's last record."""
    _events: KeptLines = field(init=False)
    _metrics: KeptLines = field(init=False)
    _failing: set[object] = field(default_factory=set)
    """Files and sinks whose last write failed."""
    _saved_version: int = -1
    _saved_at: float = field(init=False)
    _save_seconds: float = 0.0
    _status_at: float = -1e9
    losses: dict[int, float] = field(default_factory=dict)
    """The run's held-out losses, by the step."""
    _checkpoint_due: bool = False
    _version: int = 0
    """The run's step, for events."""

    def __post_init__(self) -> None:
        self._events, self._metrics = KeptLines(self.run.events), KeptLines(self.run.metrics)
        self._saved_at = self.clock()

    # -- coming back ---------------------------------------------------------------------------------------------------

    def recover(self, guard: Guard, *, check: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """Load the newest verified checkpoint and redo the journal. Return the coordinator's state; None for a new run.

        `check` gets the identity that the checkpoint was saved with. It raises if the run must not go on, and returns
        whether settings that decide updates have changed. Then no journal may follow: redoing its merged updates with
        other settings would give another state. Raises ConfigError if one does, CheckpointError if there are
        checkpoints and none can be used, or it is another model's.
        """
        path = files.find_newest(self.run.checkpoints, set_aside=True)
        if path is None:
            remove_records(self.run.journal, unwanted=lambda _version: True)
            return None
        state = read_object(path / files.STATE)
        changed = check(state["identity"])
        self._load(path)
        guard.load_state(state["guard"])
        self._saved_version, self._last_crc = state["version"], state["journal"]
        if changed:
            if next(read_records(self.run.journal, state["version"], after=self._last_crc), None) is not None:
                raise ConfigError(
                    "steps in the journal were made with the old settings and must be redone with them first",
                    hint="run once with the old values and --stop-at 1, then change them",
                )
            self._saved_version = -1  # save at once, so that the checkpoint says what it is trained with from now on
        state = self._redo(state, guard)
        remove_records(self.run.journal, unwanted=lambda version: version > self._version)  # none of them follows
        self.losses = files.held_out_losses(self.run, upto=self._version)
        return state

    def _load(self, checkpoint: Path) -> None:
        """Take over the weights and the optimizer's state of a verified checkpoint. Raises CheckpointError."""
        files.copy_into(self.tensors, read_tensors(checkpoint / WEIGHTS), path=checkpoint)
        self.merge.optimizer.load_state_tensors(read_tensors(checkpoint / files.OPTIMIZER))

    def _redo(self, state: dict[str, Any], guard: Guard) -> dict[str, Any]:
        """Apply the journal's records that follow `state`; return the coordinator's state after them."""
        before, row = state["version"], {}
        for record in read_records(self.run.journal, before, after=self._last_crc):
            header, version, self._last_crc = record.header, record.version, record.crc
            guard.load_state(header["guard"])
            row = header["row"]
            if header["verdict"] == Verdict.OK.value:
                norm, steps = header["norm"], header["steps"]
                row |= {"lr_factor": self.merge.step(record.update, norm=norm, version=version, steps=steps)}
            state = {"version": version, "tokens": header["tokens"]}
        self._version = state["version"]
        if redone := self._version - before:
            logged = any(row["version"] == state["version"] for row in read_jsonl(self.run.metrics))
            self.unlogged = None if logged else row
            log.info("redid %d steps from the journal of step %d", redone, before)
            self.event("redone", steps=redone)
        return state

    # -- while it trains -----------------------------------------------------------------------------------------------

    def journal(self, header: Mapping[str, Any], update: Mapping[str, Tensor]) -> None:
        """Make a merged update durable before it is applied.

        A failed write is an alarm and makes a checkpoint due. Until that is saved nothing more is appended, because a
        journal with a gap cannot be redone.
        """
        if not self.with_journal or self._checkpoint_due:
            return
        self._checkpoint_due = True
        with self.tolerating(self.run.journal):
            self._last_crc = append(self.run.journal, header, update, after=self._last_crc)
            self._checkpoint_due = False

    def after_commit(self, state: Mapping[str, Any], *, row: Mapping[str, Any], last: bool) -> None:
        """Save if a checkpoint is due, and update `status.json`. The end of the run saves the last version."""
        self._version = version = state["version"]
        if measured := "val_loss" in row:
            self.losses[version] = row["val_loss"]
        now = self.clock()
        interval = max(self.section.every_seconds, self._save_seconds / MAX_SAVE_OVERHEAD)
        due = bool(self.section.every_seconds) and now - self._saved_at >= interval
        every, before = self.section.every_steps, version - row.get("steps", 1)
        due = due or (bool(every) and version // every > before // every)
        if not last and (due or (measured and self.best == version) or self._checkpoint_due):
            self._saved_at = now  # also if the save fails
            with self.tolerating(self.run.checkpoints):
                self.save(state)
        if now - self._status_at >= STATUS_SECONDS:
            self._status_at = now
            self.status("running")

    def save(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint with this state, unless its version is saved already. Raises ResourceError."""
        version = state["version"]
        if version == self._saved_version:
            return
        began = self.clock()
        files.save_checkpoint(
            self.run.checkpoints,
            model=self.tensors,
            optimizer=self.merge.optimizer.state_tensors(),
            state={**state, "identity": self.identity, "journal": self._last_crc},
        )
        self._saved_version, self._checkpoint_due = version, False
        self._saved_at = self.clock()
        self._save_seconds = self._saved_at - began
        files.prune_checkpoints(self.run.checkpoints, keep=self.section.keep, protect={self.best})
        newest = files.list_checkpoints(self.run.checkpoints)[-self.section.keep :]  # the best one may be very old
        remove_records(self.run.journal, unwanted=lambda version: version <= files.version_of(newest[0]))
        self.event("checkpoint", seconds=round(self._save_seconds, 3))

    @property
    def best(self) -> int | None:
        """The step with the lowest held-out loss, if one was measured."""
        return files.lowest(self.losses)

    def roll_back(self) -> None:
        """Load weights and optimizer state of the newest checkpoint. The run's version, tokens and position stay."""
        path = files.find_newest(self.run.checkpoints)
        assert path is not None, "a run begins with a checkpoint"
        self._load(path)
        self._checkpoint_due = True

    def log(self, version: int, row: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl, at once: others follow the file. A failed write is only an alarm."""
        with self.tolerating(self.run.metrics):
            self._metrics.append(json.dumps({"version": version, **finite(row)}, ensure_ascii=False) + "\n")

    def event(self, kind: str, **fields: Any) -> None:
        """Append a line to events.jsonl. A failed write is only an alarm."""
        fields = {"version": self._version, **fields}
        self.on_event(kind, fields)
        with self.tolerating(self.run.events):
            self._events.append(event_line(kind, fields))

    @contextmanager
    def tolerating(self, what: object) -> Iterator[None]:
        """Context of a block that writes `what`. Catches its ResourceError; the first in a row of them is an alarm."""
        try:
            yield
        except ResourceError as error:
            if what not in self._failing:
                self._failing.add(what)
                log.error("%s; training goes on, the last checkpoint is step %d", error.message, self._saved_version)
                self.event("alarm", message=error.message)
        else:
            self._failing.discard(what)

    def status(self, state: str) -> None:
        """Write `status.json`, from which monitors read the run's state."""
        with self.tolerating(self.run.status):
            status = {"state": state, "pid": os.getpid(), "version": self._version}
            write_json(self.run.status, status, private=True)

    def close(self) -> None:
        for path, lines in ((self.run.metrics, self._metrics), (self.run.events, self._events)):
            with self.tolerating(path):
                lines.append("")
