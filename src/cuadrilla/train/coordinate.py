"""The coordinator's I/O shell: carries out what the state machine decides.

Messages come in through `receive` and `deliver`, all of them in one thread (`thread.py`; alone, the worker's own);
actions go out as messages, merges, journal records, checkpoints, evaluations and rows of metrics. The order of a
commit is: merge, judge, journal (fsync), step, announce. A run that fails here fails as a whole: `failure` holds the
reason, its events and its status say it, and every worker is told to stop.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from cuadrilla.errors import GuardError
from cuadrilla.link.base import (
    Contribution,
    Goodbye,
    Hello,
    NodeReport,
    Progress,
    Stop,
    ToCoordinator,
    ToWorker,
    Version,
)
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.sync import events
from cuadrilla.sync.coordinator import Coordinator
from cuadrilla.sync.strategy import MergeHalf
from cuadrilla.sync.work import ALONE
from cuadrilla.train.alarms import reason_of
from cuadrilla.train.evaluate import Observer
from cuadrilla.train.guard import Guard, Verdict
from cuadrilla.train.nodelog import NodeLogs
from cuadrilla.train.sinks import Sink, Watcher
from cuadrilla.train.store import Store
from cuadrilla.train.suspects import Suspects

log = logging.getLogger(__name__)

SendTo = Callable[[str, ToWorker], None]
MESSAGE_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError, AssertionError)
MAX_LOSS = 1e15
"""Per token: squares of it are added."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: `complete`, or stopped early for `reason`; `interrupted` by a person who asked for it.

    `best`: the step with the lowest held-out loss, if any was measured.
    """

    version: int
    tokens: int
    complete: bool
    interrupted: bool
    reason: str
    last_row: Mapping[str, Any]
    best: int | None


class CoordinatorRuntime:
    """One run's coordinator, its merge half and its store. Used by one thread; `heard`, `reported` and
    `request_stop` by any.
    """

    def __init__(
        self,
        *,
        coordinator: Coordinator,
        merge: MergeHalf,
        guard: Guard,
        store: Store,
        sinks: Sequence[Sink],
        observer: Observer | None = None,
        stop_at: int = 0,
        patience: int = 0,
        max_unit_tokens: int | None = None,
        node_logs: NodeLogs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`patience`: evaluations without a lower held-out loss after which to stop (0: any number).

        `max_unit_tokens`: the most that a unit can hold, where the task knows that.
        """
        self._coordinator = coordinator
        self._work, self._rules = coordinator.work, coordinator.rules
        self._merge = merge
        self._guard = guard
        self._store = store
        self._sinks = sinks
        self._observer = observer
        self._stop_at = stop_at
        self._patience = patience
        self._max_unit_tokens = max_unit_tokens
        self._node_logs = node_logs
        self._clock = clock
        self._since = clock()
        self._heard: dict[str, tuple[Progress, float]] = {}
        self._parts: dict[str, float] = {}
        self._suspects = Suspects(merge=merge, event=store.event)
        self._send: SendTo = _nobody
        self._sent = Version(version=-1)
        is_reached = 0 < stop_at <= coordinator.version
        self._stop_reason = Message("step {step} reached", step=stop_at) if is_reached else self._out_of_patience()
        self._interrupted = False
        self._row: dict[str, Any] = {}
        self._kind = coordinator.rounds.kind
        self.outcome: Outcome | None = None
        self.failure: BaseException | None = None

    def open(self, send: SendTo) -> None:
        """Start answering workers through `send(worker, message)`.

        First the state is saved, if no checkpoint holds it yet: the initial weights, or redone steps. A row that the
        coordinator before could not write, between a step's journal and its end, is written now.
        """
        self._send = send
        actions = self._coordinator.start()
        version = self._coordinator.version
        if self._store.unlogged is not None:
            self._row = {**self._store.unlogged, **self._speed(0)}
            steps = self._row.get("steps", 1)
            self._row |= self._observer.observe(version, steps=steps) if self._observer else {}
            self._log_row(version, self._row)
            self._store.after_commit(self._snapshot, version=version, row=self._row, last=False)
        self._store.save(self._snapshot, version=version)
        self._perform(actions)

    @property
    def is_over(self) -> bool:
        """The run has ended, well or not."""
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
        """The message of a worker in this thread. Raises what makes the run fail."""
        with self._failing_together(raises=True):
            self._stop_if_asked()
            self._handle(self._received(worker, message))

    def deliver(self, worker: str, message: ToCoordinator) -> None:
        """As `receive`, for transports to other threads and processes: what makes the run fail is in `failure`."""
        with self._failing_together():
            self._stop_if_asked()  # not only at the next tick: another step may be made until then
            self._perform(self._decide(worker, message))

    def left(self, worker: str, reason: str) -> None:
        """A transport reports that a worker died."""
        with self._failing_together():
            self._heard.pop(worker, None)
            self._store.event("left", worker=worker, reason=reason)
            self._handle(events.Received(worker=worker, message=Goodbye(reason=reason)))

    def heard(self, worker: str, progress: Progress) -> None:
        """A heartbeat: never waits for a merge; counts at the next tick, with the time at which it came."""
        self._heard[worker] = (progress, self._clock())
        self._parts[worker] = progress.part

    def reported(self, worker: str, report: NodeReport) -> None:
        """How its machine is. From any thread; raises nothing."""
        if self._node_logs is not None:
            self._node_logs.report(worker, report)

    def tick(self) -> None:
        """Time has passed: a few times a second, for transports that cannot tell by themselves who is still there."""
        with self._failing_together():
            for worker in list(self._heard):
                progress, at = self._heard.pop(worker)
                self._perform(self._coordinator.handle(events.Received(worker=worker, message=progress), at))
            self._tell_progress()
            self._stop_if_asked()
            self._handle(events.Tick())

    def _stop_if_asked(self) -> None:
        if self._stop_reason and self.outcome is None:
            self._handle(events.StopRequested(reason=self._stop_reason))

    def _decide(self, worker: str, message: ToCoordinator) -> list[events.Action]:
        """What a message of another process leads to; one that cannot be handled ends its sender's session only."""
        try:
            return self._coordinator.handle(self._received(worker, message), self._clock())
        except MESSAGE_ERRORS as error:
            reason = Message("it sent a message that cannot be handled ({kind})", kind=type(error).__name__)
            log.info("how a message of %s could not be handled:", worker, exc_info=True)
            left = events.Received(worker=worker, message=Goodbye(reason=reason))
            stop = events.Send(worker=worker, message=Stop(reason=reason))
            return [*self._coordinator.handle(left, self._clock()), stop]

    def _received(self, worker: str, message: ToCoordinator) -> events.Received:
        """What the state machine is told: an answer is only valid if its numbers can be."""
        match message:
            case Hello():
                self._heard.pop(worker, None)  # of an earlier session
                self._store.event("joined", worker=worker)
            case Progress():
                self._parts[worker] = message.part
                self._tell_progress()
            case Goodbye():
                self._heard.pop(worker, None)
                if worker in self._coordinator.crew.members and not self._coordinator.finished:  # by itself
                    self._store.event("left", worker=worker, reason=message.reason)
            case Contribution():
                self._parts.pop(worker, None)
                lease = self._work.ledger.leases.get(message.lease_id)
                if message.valid and lease is not None and not self._is_possible(message, num_units=len(lease.units)):
                    message = replace(message, valid=False)
        return events.Received(worker=worker, message=message)

    def _is_possible(self, message: Contribution, *, num_units: int) -> bool:
        """Whether numbers of an answer are such as these units can have."""
        most = self._max_unit_tokens
        return (
            (most is None or message.tokens <= most * num_units)
            and abs(message.loss_sum) <= MAX_LOSS * max(message.tokens, 1)
            and self._merge.is_plausible(message.tensors, num_units=num_units)
        )

    def _tell_progress(self) -> None:
        """How far the step is, by what workers say of their leases: it may take minutes."""
        ledger, total = self._work.ledger, max(self._work.steps, 1) * self._rules.units_per_step  # none between rounds
        done = dict.fromkeys(ledger.uncounted, 0.0)
        for lease in ledger.leases.values():
            for unit in lease.units:
                done[unit] = max(done.get(unit, 0.0), self._parts.get(lease.worker, 0.0))
        part = (total - len(done) + sum(done.values())) / total
        if 0 < part < 1:
            for sink in self._sinks:
                if isinstance(sink, Watcher):
                    sink.working(self._coordinator.version + self._work.steps, part)

    # -- what the state machine wants done -----------------------------------------------------------------------------

    def _handle(self, event: events.Event) -> None:
        self._perform(self._coordinator.handle(event, self._clock()))

    def _perform(self, actions: list[events.Action]) -> None:
        for action in actions:
            match action:
                case events.Send():
                    self._tell(action.worker, action.message)
                case events.Merge():
                    self._merge_round(action)
                case events.Commit():
                    began = self._clock()
                    self._commit(action)  # may evaluate and save
                    self._coordinator.postpone(self._clock() - began)
                case events.Late():
                    log.info("%s is late with its lease: others are given its units, too", action.worker)
                    self._store.event("late", worker=action.worker, lease=action.lease_id)
                case events.Discard():
                    self._store.event("discarded", lease=action.lease_id)
                case events.Finish():
                    self._finish(action)

    def _tell(self, worker: str, message: ToWorker) -> None:
        match message:
            case Version():
                if self._sent.version != message.version:  # once for all workers: to code it takes time
                    self._sent = replace(message, parameters=dict(self._merge.version(steps=message.steps)))
                message = self._sent
            case Stop():
                self._heard.pop(worker, None)
                self._store.event("evicted", worker=worker, reason=message.reason)
                log.warning("%s: %s", worker, message.reason)
        self._send(worker, message)

    # -- a round becomes a version: merge, judge, journal, step --------------------------------------------------------

    def _merge_round(self, action: events.Merge) -> None:
        """Reduce, judge, journal, step; tell the state machine. Bad contributions are named and nothing changes."""
        contributions = [answer.contribution for answer in action.answers]
        tokens = action.tokens_before + sum(item.tokens for item in contributions)
        loss = sum(item.loss_sum for item in contributions) / max(tokens - action.tokens_before, 1)
        shares = _shares(action.answers)
        self._row = {"tokens": tokens, "loss": loss, "workers": len(shares), "shares": shares}
        if action.steps > 1:
            self._row["steps"] = action.steps
        if tokens == action.tokens_before:  # nothing to learn from: every unit was skipped, or holds no token
            self._row["loss"] = float("nan")
            nothing = float("nan")
            verdict = self._guard.judge(loss=nothing, norm=nothing) if action.skipped else Verdict.SKIP
        else:
            planned_tokens = action.steps * self._rules.step_tokens
            reduced = self._merge.reduce(action.answers, planned_tokens=planned_tokens)
            is_doubted = self._guard.doubts(loss=loss, norm=reduced.norm)
            bad, why = self._suspects.find(action, reduced, is_doubted=is_doubted)
            if bad:
                self._compute_again(action, bad, why)
                return
            if reduced.norm == 0 and loss:
                self._log_incident(Message("the gradient is exactly zero"), action, level=logging.WARNING)
            self._row["grad_norm"] = reduced.norm
            verdict = self._guard.judge(loss=loss, norm=reduced.norm)
        self._apply(action, verdict=verdict, tokens=tokens)
        confirmed = tuple(sorted(self._suspects.confirmed))
        self._suspects.forget()
        self._handle(events.Merged(confirmed=confirmed))

    def _compute_again(self, action: events.Merge, bad: Sequence[int], why: Message) -> None:
        """Give the units of contributions that cannot be right to others."""
        leases = [action.answers[index].grant for index in bad]
        for lease in leases:
            log.warning("a contribution of %s is computed again: %s (units %s)", lease.worker, why, lease.units[:8])
            named = {"worker": lease.worker, "lease": lease.lease_id, "version": action.version, "units": lease.units}
            self._store.event(why, **named)
        self._handle(events.Merged(bad_leases=tuple(lease.lease_id for lease in leases)))

    def _apply(self, action: events.Merge, *, verdict: Verdict, tokens: int) -> None:
        header = {"version": action.version, "units": action.units, "skipped": action.skipped, "tokens": tokens}
        header |= {"norm": self._row.get("grad_norm"), "verdict": verdict.value, "guard": self._guard.state()}
        header |= {"steps": action.steps, "row": dict(self._row)}
        if action.skipped:
            self._store.event("units skipped", version=action.version, units=action.skipped)
        match verdict:
            case Verdict.OK:
                self._store.journal(header, self._merge.update)
                factor = self._merge.step(norm=self._row["grad_norm"], version=action.version, steps=action.steps)
                self._row["lr_factor"] = factor
            case Verdict.SKIP:
                self._log_incident(Message("update skipped"), action, level=logging.WARNING)
                self._store.journal(header, dict)
            case Verdict.ROLL_BACK:
                self._log_incident(Message("rolled back to the last checkpoint"), action, level=logging.WARNING)
                self._store.roll_back()
            case Verdict.GIVE_UP:
                self._log_incident(Message("gave up"), action, level=logging.ERROR)
                raise GuardError(
                    "the loss keeps spiking at step {step} (loss {loss:.3g}, gradient norm {norm:.3g}) "
                    "after {rollbacks} rollbacks",
                    step=action.version,
                    loss=self._row["loss"],
                    norm=self._row.get("grad_norm", float("nan")),
                    rollbacks=self._guard.rollbacks,
                    hint="lower optim.lr, lengthen schedule.warmup, or look at the data of the units in events.jsonl",
                )

    def _log_incident(self, what: Message, action: events.Merge, *, level: int) -> None:
        """Name the step, its units, and the worker whose loss per token is the highest."""
        highest = max(action.answers, key=_loss_of, default=None)
        worker, loss = highest.grant.worker if highest else Message("none"), self._row["loss"]
        named = {"workers": sorted({answer.grant.worker for answer in action.answers}), "highest": worker}
        units = highest.grant.units if highest else ()
        self._store.event(what, version=action.version, units=action.units, loss=loss, **named, highest_units=units)
        template = "loss {loss:.4g}, units {units}, highest at {worker}"
        text = Message(template, loss=loss, units=action.units[:8], worker=worker)
        log.log(level, "%s", Message("step {step}: {what} ({text})", step=action.version, what=what, text=text))

    # -- a version is committed: evaluate, log, save -------------------------------------------------------------------

    def _commit(self, action: events.Commit) -> None:
        version, steps = action.merge.version, action.merge.steps
        self._row |= self._speed(action.tokens - action.merge.tokens_before)
        self._row |= self._observer.observe(version, steps=steps) if self._observer else {}
        self._log_row(version, self._row)
        last = version == self._rules.num_steps
        self._store.after_commit(self._snapshot, version=version, row=self._row, last=last)
        self._since = self._clock()
        if self._coordinator.rounds.kind != self._kind:
            self._kind = self._coordinator.rounds.kind
            self._tell_kind(version)
        if 0 < self._stop_at <= version:
            self._stop_reason = self._stop_reason or Message("step {step} reached", step=version)
        self._stop_reason = self._stop_reason or self._out_of_patience()

    def _tell_kind(self, version: int) -> None:
        """How a crew trains from now on: `sync.kind = "auto"` has chosen."""
        if self._kind == ALONE:
            how = Message("the fastest machine alone, sooner than with the others over this network")
        elif self._kind == 1:
            how = Message("all machines together in each step")
        else:
            how = Message(
                "each machine {steps} steps by itself, then a merge: sooner over this network", steps=self._kind
            )
        log.info("%s", Message("from step {step} on: {how}", step=version + 1, how=how), extra=TALK)
        self._store.event("rounds", version=version, steps=self._kind, reason=how)

    def _speed(self, tokens: int) -> dict[str, float]:
        """The rate of a step that counted so many tokens, since the last one was saved and evaluated."""
        seconds = max(self._clock() - self._since, 1e-9)
        return {"tokens_per_second": tokens / seconds, "seconds": seconds}

    def _out_of_patience(self) -> str:
        """Why to stop; "" to go on."""
        held_out = self._store.held_out
        if not self._patience or held_out.best is None or held_out.since_best < self._patience:
            return ""
        return Message(
            "held-out loss was lowest at step {step}, {evaluations} evaluations ago (evaluate.patience)",
            step=held_out.best[1],
            evaluations=held_out.since_best,
        )

    def _log_row(self, version: int, row: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            with self._store.trying(sink):
                sink.log(version, row)

    def _snapshot(self) -> dict[str, Any]:
        return {"coordinator": self._coordinator.snapshot(), "guard": self._guard.state()}

    # -- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, action: events.Finish) -> None:
        version, tokens = self._work.version, self._work.tokens
        self._store.save(self._snapshot, version=version)
        self._store.status("complete" if action.complete else "stopped", version=version, row=self._row)
        self._store.event("finished", version=version, complete=action.complete, reason=action.reason)
        for worker in list(self._coordinator.crew.members):
            self._send(worker, Stop(reason=action.reason))
        self.outcome = Outcome(  # last: whoever waits for it closes the transports, and workers would not hear why
            version=version,
            tokens=tokens,
            complete=action.complete,
            interrupted=self._interrupted and not action.complete,
            reason=action.reason,
            last_row=self._row,
            best=self._store.held_out.best[1] if self._store.held_out.best else None,
        )

    @contextmanager
    def _failing_together(self, *, raises: bool = False) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.fail(error)
            if raises:
                raise

    def fail(self, error: BaseException) -> None:
        """Remember the first reason and send everyone home."""
        self.note_failure(error)
        self._coordinator.finished = True
        for member in list(self._coordinator.crew.members):
            self._send(member, Stop(reason=Message("the run failed")))

    def note_failure(self, error: BaseException) -> None:
        """The first reason is the run's: it is in its status and its events, once. Who interrupts a run stops it."""
        if self.failure is not None:
            return
        self.failure = error
        if self.outcome is not None:  # its last word has been said
            return
        version, failed = self._coordinator.version, isinstance(error, Exception)
        self._store.status("failed" if failed else "stopped", version=version, row=self._row)
        if isinstance(error, Exception):
            self._store.event("failed", reason=reason_of(error))
        else:
            self._store.event("finished", version=version, complete=False, reason=Message("interrupted"))


def _nobody(_worker: str, _message: ToWorker) -> None:
    raise AssertionError("open() first")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, each storage once: what a checkpoint holds."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[name] = tensor
    return found


def _loss_of(answer: events.Answer) -> float:
    """Per token."""
    return answer.contribution.loss_sum / max(answer.contribution.tokens, 1)


def _shares(answers: Sequence[events.Answer]) -> dict[str, float]:
    """Each worker's part of a round's tokens."""
    tokens: Counter[str] = Counter()
    for answer in answers:
        tokens[answer.grant.worker] += answer.contribution.tokens
    return {worker: round(tokens[worker] / max(tokens.total(), 1), 4) for worker in sorted(tokens)}
