"""The coordinator's I/O shell: it carries out the actions of the state machine (`sync/coordinator.py`).

One thread decides, merges and answers. In a crew it is the thread that calls `serve`. With a single worker it is the
worker's own, which calls `receive`. Each link to a worker has a thread, which puts messages into an inbox and goes on
at once. So decisions and merges need no lock, and a link never waits for a merge.

Actions are messages, merges, journal records, checkpoints, evaluations and rows of metrics. The order of a commit is:
merge, judge, journal (fsync), step, announce. An error here fails the whole run: `failure` holds it, and every worker
is sent a Stop.
"""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cuadrilla.errors import GuardError
from cuadrilla.link.base import (
    Contribution,
    Goodbye,
    Hello,
    NodeReport,
    Progress,
    Stop,
    Tensors,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.log import NOTE
from cuadrilla.messages import Message
from cuadrilla.sync import events
from cuadrilla.sync.coordinator import Coordinator
from cuadrilla.sync.merge import Merger
from cuadrilla.train.guard import Guard, Verdict
from cuadrilla.train.nodelog import NodeLogs
from cuadrilla.train.sinks import Scalars, Sink
from cuadrilla.train.store import Store
from cuadrilla.train.suspects import Suspects

log = logging.getLogger(__name__)

SendTo = Callable[[str, ToWorker], None]
TICK_SECONDS = 0.1
MESSAGE_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError, AssertionError)
MAX_LOSS = 1e15
"""Largest loss per token that an answer may have. The guard adds squares of losses, which must not overflow."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended. It is `complete`, or it stopped early for `reason`. `interrupted`: a person asked for that stop.

    `best`: the step with the lowest held-out loss, if any was measured.
    """

    version: int
    tokens: int
    complete: bool
    interrupted: bool
    reason: str
    last_row: Mapping[str, Any]
    best: int | None


@dataclass(kw_only=True)
class CoordinatorRuntime:
    """The coordinator of one run, with its merge half and its store. One thread uses it. Any thread may call `deliver`
    and `request_stop`, which raise nothing.

    `observe(version, steps)`: more values for the row of a commit. `patience`: evaluations without a lower held-out
    loss after which the run stops (0: never). `max_unit_tokens`: limit of tokens in a unit, if the task knows one.
    """

    coordinator: Coordinator
    merge: Merger
    guard: Guard
    store: Store
    sinks: Sequence[Sink]
    observe: Callable[[int, int], Scalars] = lambda _version, _steps: {}
    stop_at: int = 0
    patience: int = 0
    max_unit_tokens: int | None = None
    node_logs: NodeLogs | None = None
    clock: Callable[[], float] = time.monotonic
    outcome: Outcome | None = None
    failure: BaseException | None = None
    _parts: dict[str, float] = field(default_factory=dict)
    _sessions: Counter[str] = field(default_factory=Counter)
    """How many sessions of each worker have begun or ended, as messages arrive."""
    _sent: Version = field(default_factory=lambda: Version(version=-1))
    _interrupted: bool = False
    _row: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._work, self._rules = self.coordinator.work, self.coordinator.rules
        self._since = self.clock()
        # Not a SimpleQueue: in Python 3.11 its `get` waits for ever if a signal handler takes longer than the timeout.
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue()
        self._suspects = Suspects(merge=self.merge, event=self.store.event)
        self._stop_reason = self._why_stop(self.coordinator.version)

    def open(self, send: SendTo) -> None:
        """Start answering workers through `send(worker, message)`.

        First it saves a state that no checkpoint holds yet: the initial weights, or steps redone from the journal. It
        also writes the row of the last redone step, if the previous coordinator was killed before it did.
        """
        self._send = send
        actions, self._kind = self.coordinator.start(), self._work.kind
        if self.store.unlogged is not None:
            self._row = dict(self.store.unlogged)
            self._log_step(self.coordinator.version, tokens=0)
        self.store.save(self._state())
        self._perform(actions)

    @property
    def is_over(self) -> bool:
        return self.outcome is not None or self.failure is not None

    def result(self) -> Outcome:
        """How the run ended, once it has. Raises what made it fail."""
        if self.failure is not None:
            raise self.failure
        assert self.outcome is not None, "the run ended without an outcome"
        return self.outcome

    def request_stop(self, reason: str) -> None:
        """Checkpoint and stop at the next message of any worker, or tick. Safe in a signal handler."""
        self._stop_reason, self._interrupted = reason, True

    # -- what comes in -------------------------------------------------------------------------------------------------

    def receive(self, worker: str, message: ToCoordinator) -> None:
        """Handle a message of the worker in this thread. Raises the error that makes the run fail."""
        self.deliver(worker, message)
        self.work_off()
        if self.failure is not None:
            raise self.failure
        if isinstance(message, Progress):
            self._show_progress()

    def deliver(self, worker: str, message: ToCoordinator | NodeReport) -> None:
        """Put a message into the inbox. A heartbeat may wait there for a merge, so its time of arrival goes with it.
        For a worker that died, its transport delivers a Goodbye.
        """
        if not isinstance(message, NodeReport):
            self._sessions[worker] += isinstance(message, Hello | Goodbye)
            self._inbox.put(partial(self._take, worker, message, self.clock(), self._sessions[worker]))
        elif self.node_logs is not None:
            self.node_logs.report(worker, message)

    def serve(self, poll: Callable[[], None], *, every_seconds: float = TICK_SECONDS) -> Outcome:
        """Handle the inbox until the run ends, and `poll` now and then. Raises the error that made the run fail."""
        due = 0.0
        while not self.is_over:
            with suppress(queue.Empty):
                if (left := due - time.monotonic()) > 0:
                    self._inbox.get(timeout=left)()
                    continue
            self.tick()
            if not self.is_over:
                poll()
            due = time.monotonic() + every_seconds
        return self.result()

    def work_off(self) -> None:
        """Handle the inbox until it is empty. An error that makes the run fail goes to `failure`."""
        while not self._inbox.empty():
            self._inbox.get()()

    def _take(self, worker: str, message: ToCoordinator, arrived: float, session: int) -> None:
        if isinstance(message, Progress) and session != self._sessions[worker]:
            return  # of an earlier session: an answer would reach the worker in its next one
        with self._failing_together():
            self._stop_if_asked()  # not only at the next tick: before that, another step may be made
            self._perform(self._decide(worker, message, arrived if isinstance(message, Progress) else self.clock()))

    def tick(self) -> None:
        """Let the state machine know the time. Called a few times a second, so that silent workers are noticed."""
        self.work_off()  # what arrived during a merge counts before this tick
        with self._failing_together():
            self._show_progress()
            self._stop_if_asked()
            self._handle(events.Tick())

    def _stop_if_asked(self) -> None:
        if self._stop_reason and not self.is_over:
            self.coordinator.finished = True
            self._finish(self._stop_reason, complete=False)

    def _decide(self, worker: str, message: ToCoordinator, now: float) -> list[events.Action]:
        """Actions for a message of another process. A message that cannot be handled ends its sender's session only."""
        try:
            return self.coordinator.handle(self._event_of(worker, message), now)
        except MESSAGE_ERRORS as error:
            if self._rules.lost_after_seconds is None:  # a worker of this process: the fault is ours
                raise
            reason = Message("it sent a message that cannot be handled ({kind})", kind=type(error).__name__)
            log.info("how a message of %s could not be handled:", worker, exc_info=True)
            left = events.Received(worker=worker, message=Goodbye(reason=reason))
            stop = events.Send(worker=worker, message=Stop(reason=reason))
            return [*self.coordinator.handle(left, now), stop]

    def _event_of(self, worker: str, message: ToCoordinator) -> events.Received:
        """The event for the state machine. A contribution with impossible numbers is marked as not valid."""
        match message:
            case Hello():
                self.store.event("joined", worker=worker)
            case Progress():
                self._parts[worker] = message.part
            case Goodbye():
                self._parts.pop(worker, None)
                if worker in self.coordinator.crew.members and not self.coordinator.finished:
                    self.store.event("left", worker=worker, reason=message.reason)
            case Contribution():
                self._parts.pop(worker, None)
                lease = self._work.leases.get(worker)
                if message.valid and lease is not None and not self._is_possible(message, num_units=len(lease.units)):
                    message = replace(message, valid=False)
        return events.Received(worker=worker, message=message)

    def _is_possible(self, message: Contribution, *, num_units: int) -> bool:
        """Whether a contribution of `num_units` units can have these numbers."""
        most, steps = self.max_unit_tokens, self._work.steps
        whole = num_units == len(self._work.units)
        return (
            (most is None or message.tokens <= most * num_units)
            and abs(message.loss_sum) <= MAX_LOSS * max(message.tokens, 1)
            and self.merge.is_plausible(message.tensors, num_units=num_units, steps=steps, whole=whole)
        )

    def _show_progress(self) -> None:
        """Report to the sinks which part of the round is done, by the workers' heartbeats. A round may take minutes."""
        total = max(len(self._work.units), 1)  # none between rounds
        done = dict.fromkeys(self._work.uncounted, 0.0)
        for lease in self._work.leases.values():
            for unit in lease.units:
                done[unit] = max(done.get(unit, 0.0), self._parts.get(lease.worker, 0.0))
        part = (total - len(done) + sum(done.values())) / total
        if 0 < part < 1:
            for sink in self.sinks:
                sink.working(self.coordinator.version + self._work.steps, part)

    # -- what the state machine wants done -----------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        self._perform(self.coordinator.handle(event, self.clock()))

    def _perform(self, actions: list[events.Action]) -> None:
        for action in actions:
            match action:
                case events.Send():
                    self._send_to(action.worker, action.message)
                case events.Merge():
                    self._handle(self._merge_round(action))
                case events.Commit():
                    began = self.clock()
                    self._commit(action)  # may evaluate and save
                    self.coordinator.postpone(self.clock() - began)
                case events.Late():
                    log.info("%s is late with its lease: others are given its units, too", action.worker)
                    self.store.event("late", worker=action.worker, lease=action.lease_id)
                case events.Discard():
                    self.store.event("discarded", lease=action.lease_id)
                case events.Finish():
                    self._finish(Message("the run is complete"), complete=True)

    def _send_to(self, worker: str, message: ToWorker) -> None:
        match message:
            case Version():
                if self._sent.version != message.version:  # made once for all workers: it takes time
                    self._sent = replace(message, parameters=dict(self.merge.version(steps=message.next_round_steps)))
                message = self._sent
            case Stop():
                self._parts.pop(worker, None)
                self.store.event("evicted", worker=worker, reason=message.reason)
                log.warning("%s: %s", worker, message.reason)
        self._send(worker, message)

    # -- a round becomes a version: merge, judge, journal, step --------------------------------------------------------

    def _merge_round(self, action: events.Merge) -> events.Merged:
        """Reduce, judge, journal and step. Bad contributions are only reported."""
        contributions = [answer.contribution for answer in action.answers]
        tokens, loss = self._work.tokens + action.tokens, sum(item.loss_sum for item in contributions)
        loss /= max(action.tokens, 1)
        shares = _shares(action.answers)
        self._row = {"tokens": tokens, "loss": loss, "workers": len(shares), "shares": shares}
        if action.steps > 1:
            self._row["steps"] = action.steps
        if not action.tokens:  # nothing to learn from: every unit was skipped, or holds no token
            self._row["loss"] = nothing = float("nan")
            verdict = self.guard.judge(loss=nothing, norm=nothing) if action.skipped else Verdict.SKIP
            update: Tensors = {}
        else:
            planned_tokens = action.steps * self._rules.step_tokens
            reduced = self.merge.reduce(action.answers, planned_tokens=planned_tokens)
            is_doubted = self.guard.doubts(loss=loss, norm=reduced.norm)
            bad, why = self._suspects.find(action, reduced, is_doubted=is_doubted)
            if bad:
                return self._compute_again(action, bad, why)
            if reduced.norm == 0 and loss:
                self._log_incident(Message("the gradient is exactly zero"), action, level=logging.WARNING)
            self._row["grad_norm"] = reduced.norm
            verdict, update = self.guard.judge(loss=loss, norm=reduced.norm), reduced.update
        self._apply(action, update, verdict=verdict, tokens=tokens)
        confirmed = tuple(sorted(self._suspects.confirmed))
        self._suspects.forget()
        return events.Merged(confirmed=confirmed)

    def _compute_again(self, action: events.Merge, bad: Sequence[int], why: Message) -> events.Merged:
        """Have the units of bad contributions computed again by other workers."""
        leases = [action.answers[index].grant for index in bad]
        for lease in leases:
            log.warning("a contribution of %s is computed again: %s (units %s)", lease.worker, why, lease.units[:8])
            named = {"worker": lease.worker, "lease": lease.lease_id, "version": action.version, "units": lease.units}
            self.store.event(why, **named)
        return events.Merged(bad_leases=tuple(lease.lease_id for lease in leases))

    def _apply(self, action: events.Merge, update: Tensors, *, verdict: Verdict, tokens: int) -> None:
        header = {"version": action.version, "units": action.units, "skipped": action.skipped, "tokens": tokens}
        header |= {"norm": self._row.get("grad_norm"), "verdict": verdict.value, "guard": self.guard.state()}
        header |= {"steps": action.steps, "row": dict(self._row)}
        if action.skipped:
            self.store.event("units skipped", version=action.version, units=action.skipped)
        match verdict:
            case Verdict.OK:
                self.store.journal(header, update)
                norm, version, steps = self._row["grad_norm"], action.version, action.steps
                self._row["lr_factor"] = self.merge.step(update, norm=norm, version=version, steps=steps)
            case Verdict.SKIP:
                said = Message("unusually large loss or gradient: this update is skipped, and training continues")
                self._log_incident(said, action, level=logging.WARNING, kind="update skipped")
                self.store.journal(header, {})
            case Verdict.ROLL_BACK:
                said = Message(
                    "too many updates were skipped: back to the last checkpoint, without the data in between"
                )
                self._log_incident(said, action, level=logging.WARNING, kind="rolled back to the last checkpoint")
                self.store.roll_back()
            case Verdict.GIVE_UP:
                self._log_incident(Message("gave up"), action, level=logging.ERROR)
                raise GuardError(
                    "the loss keeps spiking at step {step} (loss {loss:.3g}, gradient norm {norm:.3g}) "
                    "after {rollbacks} rollbacks",
                    step=action.version,
                    loss=self._row["loss"],
                    norm=self._row.get("grad_norm", float("nan")),
                    rollbacks=self.guard.rollbacks,
                    hint="lower optim.lr, lengthen schedule.warmup, or look at the data of the units in events.jsonl",
                )

    def _log_incident(self, why: Message, action: events.Merge, *, level: int, kind: str = "") -> None:
        """Log `why`. Write an event, too, with the units and the worker whose loss per token is the highest."""
        highest = max(
            action.answers, key=lambda one: one.contribution.loss_sum / max(one.contribution.tokens, 1), default=None
        )
        worker, loss = highest.grant.worker if highest else Message("none"), self._row["loss"]
        units = highest.grant.units if highest else ()
        told = {"version": action.version, "units": action.units, "highest": worker, "highest_units": units}
        self.store.event(kind or why, loss=loss, **told, workers=sorted({each.grant.worker for each in action.answers}))
        log.log(level, "%s", Message("step {step}: {why} (loss {loss:.4g})", step=action.version, why=why, loss=loss))

    # -- a version is committed: evaluate, log, save -------------------------------------------------------------------

    def _commit(self, action: events.Commit) -> None:
        version = action.merge.version
        self._log_step(version, tokens=action.merge.tokens)
        before, self._kind = self._kind, self._work.kind
        if self._kind != before and not (before.alone and self._kind.alone):
            self._report_rounds(version)
        self._stop_reason = self._stop_reason or self._why_stop(version)

    def _report_rounds(self, version: int) -> None:
        """Say how the crew trains from now on: `sync.kind = "auto"` has chosen."""
        if self._kind.alone and len(self.coordinator.crew.members) == 1:
            how = Message("the only machine trains, in smaller steps")
        elif self._kind.alone:
            how = Message("only the fastest machine trains, because over this network that is faster")
        elif self._kind.steps == 1:
            how = Message("all machines together in each step")
        else:
            how = Message(
                "each machine makes {steps} steps by itself before a merge, because over this network that is faster",
                steps=self._kind.steps,
            )
        log.log(NOTE, "%s", Message("from step {step} on: {how}", step=version + 1, how=how))
        self.store.event("rounds", steps=self._kind.steps, reason=how)

    def _log_step(self, version: int, *, tokens: int) -> None:
        """Evaluate, log the row of a step with this many tokens, and save, as far as they are due. The step began when
        the step before was saved and evaluated.
        """
        seconds = max(self.clock() - self._since, 1e-9)
        self._row |= {"tokens_per_second": tokens / seconds, "seconds": seconds}
        self._row |= self.observe(version, self._row.get("steps", 1))
        self.store.log(version, self._row)
        for sink in self.sinks:
            with self.store.tolerating(sink):
                sink.log(version, self._row)
        self.store.after_commit(self._state(), row=self._row, last=version == self._rules.num_steps)
        self._since = self.clock()

    def _why_stop(self, version: int) -> str:
        """Reason to stop at this version; "" to go on."""
        if 0 < self.stop_at <= version:
            return Message("step {step} reached", step=version)
        best = self.store.best
        since = 0 if best is None else sum(measured > best for measured in self.store.losses)
        if not 0 < self.patience <= since:
            return ""
        return Message(
            "held-out loss was lowest at step {step}, {evaluations} evaluations ago (evaluate.patience)",
            step=best,
            evaluations=since,
        )

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        return {**self.coordinator.snapshot(), "guard": self.guard.state()}

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, reason: str, *, complete: bool) -> None:
        self.store.save(self._state())
        self.store.status("complete" if complete else "stopped")
        self.store.event("finished", complete=complete, reason=reason)
        for worker in list(self.coordinator.crew.members):
            self._send(worker, Stop(reason=reason))
        self.outcome = Outcome(  # last: its reader closes the transports, and workers must have their Stop by then
            version=self._work.version,
            tokens=self._work.tokens,
            complete=complete,
            interrupted=self._interrupted and not complete,
            reason=reason,
            last_row=self._row,
            best=self.store.best,
        )

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:  # noqa: BLE001  # `failure` is raised by the thread that waits for the end
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Remember the first error and stop all workers."""
        self.failure = self.failure or error
        self.coordinator.finished = True
        for member in list(self.coordinator.crew.members):
            self._send(member, Stop(reason=Message("the run failed")))


def _shares(answers: Sequence[events.Answer]) -> dict[str, float]:
    """Part of the round's tokens that each worker computed."""
    tokens: Counter[str] = Counter()
    for answer in answers:
        tokens[answer.grant.worker] += answer.contribution.tokens
    return {worker: round(tokens[worker] / max(tokens.total(), 1), 4) for worker in sorted(tokens)}
