"""A worker process: connect, learn what is trained, train until the coordinator says stop; come back after a break.

It dials out, listens on nothing and keeps nothing that cannot be replaced. When the connection breaks it tries again,
with growing pauses, and joins anew; its model and its data stay loaded. It dials the coordinator and the standbys that
the coordinator has told of in turn: one of them may have been promoted.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from cuadrilla.config import Config
from cuadrilla.engines.bundle import OtherWork, Unfit
from cuadrilla.engines.courtesy import Courtesy
from cuadrilla.engines.equipment import Equipment, equip
from cuadrilla.engines.reporting import LinesKept, lines_kept, machine_facts, reporting
from cuadrilla.errors import CuadrillaError, LinkError
from cuadrilla.link.base import COME_AGAIN, KICKED, PAUSED, Link, NodeReport, Paused, Refused, Stop
from cuadrilla.link.offer import RunConnection, RunDescription, Session
from cuadrilla.link.phases import PhasedLink
from cuadrilla.link.shaped import Shape, ShapedLink
from cuadrilla.link.watched import WatchedLink
from cuadrilla.log import TALK
from cuadrilla.messages import Message

GIVE_UP_SECONDS = 600.0
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.25, 5.0
LOYAL_SECONDS = 15.0
"""A coordinator that was killed is back by then; only later the standbys are dialled, too."""
ASK_SECONDS = 30.0
"""Then it says what its owner can do."""

NO_SHAPE = Shape()

log = logging.getLogger(__name__)

Prepare = Callable[[RunConnection, RunDescription], tuple[Config, Path]]
"""Puts what a run needs where this node can read it: its configuration, and the folder that paths are relative to."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How this process takes part. `threads` 0: as many as this process may use. `device` "": what the run says.

    `connect` dials an address; `moved` is called with the address of the coordinator when it was found elsewhere.
    `report` hears now and then how the work goes. `together`: where several processes are this worker. `courtesy`: when
    to wait.
    """

    address: str
    connect: Callable[[str], RunConnection]
    prepare: Prepare
    shape: Shape = NO_SHAPE
    threads: int = 0
    device: str = ""
    give_up_seconds: float = GIVE_UP_SECONDS
    moved: Callable[[str], None] | None = None
    report: Callable[[str], None] | None = None
    together: "Together | None" = None
    courtesy: Courtesy | None = None


class Together(Protocol):
    """Several processes that act as one worker: this one has the connection."""

    def equip(self, config: Config, folder: Path, *, speed: float) -> Equipment:
        """What this process computes with, once all have theirs."""

    def around(self, link: Link, *, farewell: Callable[[], Stop | None]) -> Link:
        """The link of a session: it hands on to the others what comes over `link`, and adds up their answers.

        Where `link` has broken, all leave with the `farewell` that came before, or it raises.
        """


def run_worker(options: WorkerOptions) -> str:
    """Work until the run ends; why it ended. Raises LinkError when the coordinator refuses this node or stays away,
    OtherWork."""
    with lines_kept() as lines:
        try:
            return _work(options, lines)
        finally:
            if options.courtesy is not None:
                options.courtesy.close()


def _work(options: WorkerOptions, lines: LinesKept) -> str:
    worker: _Worker | None = None
    patience = Patience(options)
    while True:
        if options.courtesy is not None:
            patience.reached += options.courtesy.wait_until_welcome()
        began = time.monotonic()
        connection = options.connect(patience.address)
        try:
            description = connection.describe()  # raises unless the coordinator answers
            returned = worker is not None
            if worker is None:
                with _Fitting(description):
                    worker = _Worker(connection, description, options, lines=lines)
            elif description.takes_jobs or description.run != worker.run:
                raise OtherWork("the coordinator has other work for this machine", hint="cuadrilla join")
            with _Fitting(description):
                stop = worker.train(connection, answered=_back_at_work if returned else None)
                if worker.run and stop.refused:
                    ended_by(stop)
            patience.begin_anew()
            if not stop.again:
                return ended_by(stop)
            if worker.run:
                log.info("%s", stop.reason, extra=TALK)
                time.sleep(FIRST_PAUSE_SECONDS)  # it is taken back in a moment
            elif stop.reason not in (worker.held, PAUSED):
                log.warning("%s: joining again", stop.reason)
        except Refused:
            raise
        except Paused as error:
            patience.wait_paused(error)
        except LinkError as error:
            patience.wait(error, worker=worker)
        finally:
            connection.close()
            if worker is not None and worker.heard_at > began:
                patience.found_at(patience.address)


def _back_at_work() -> None:
    log.info("back at work", extra=TALK)


@dataclass(frozen=True)
class _Fitting:
    """A block in which a machine tries whether it can take part in the run that it may be lent to. Whoever has joined
    stays in the crew if it cannot."""

    description: RunDescription

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not self.description.run or not isinstance(error, CuadrillaError) or isinstance(error, OtherWork):
            return
        is_refused = isinstance(error, Refused) and error.hint != COME_AGAIN
        if is_refused or not isinstance(error, LinkError):
            raise Unfit("{reason}", reason=error.message, hint="{remedy}", remedy=error.hint) from error


def ended_by(stop: Stop) -> str:
    """What a coordinator said last. Raises Refused where it wants this node no more."""
    if stop.refused:
        raise Refused(stop.reason, hint=COME_AGAIN if stop.reason == KICKED else "see the coordinator's log")
    return Message(stop.reason)


class LastSession(Protocol):
    """What a worker knows of its coordinator from its last session."""

    @property
    def heard_at(self) -> float: ...

    @property
    def standbys(self) -> tuple[str, ...]: ...


class Patience:
    """How long to go on asking a coordinator that does not answer, and where."""

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._found = self.address = options.address
        self.begin_anew()

    def begin_anew(self) -> None:
        """A session has been."""
        self.reached, self._pause = time.monotonic(), FIRST_PAUSE_SECONDS
        self._asked = self.paused = False

    def found_at(self, address: str) -> None:
        """The coordinator has answered there."""
        if address != self._found:
            self._found = address
            if self._options.moved is not None:
                self._options.moved(address)

    def wait_paused(self, error: Paused) -> None:
        """Whose owner wants it to wait."""
        if not self.paused:
            log.info("%s", error.message, extra=TALK)
        self.paused, self.reached = True, time.monotonic()
        time.sleep(LONGEST_PAUSE_SECONDS)

    def wait(self, error: LinkError, *, worker: LastSession | None) -> None:
        """Before the next try, which may be at another address. Raises the error when that is enough."""
        if worker is not None and worker.heard_at > self.reached:
            self.reached, self._pause = worker.heard_at, FIRST_PAUSE_SECONDS
        if time.monotonic() - self.reached > self._options.give_up_seconds:
            raise error
        log.warning("%s; trying again in %.2g s", error.message, self._pause)
        if not self._asked and time.monotonic() - self.reached > ASK_SECONDS:
            self._asked = True
            log.warning(
                "the coordinator may have another address now; its screen shows it: stop this here "
                "(Ctrl-C) and type `cuadrilla join THAT_ADDRESS`"
            )
        time.sleep(self._pause)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        if time.monotonic() - self.reached > LOYAL_SECONDS:
            self.address = _next(self.address, [self._found, *(worker.standbys if worker is not None else [])])


def _next(address: str, places: Sequence[str]) -> str:
    """The place behind `address`, round and round; the first one when it is none of them."""
    return places[(places.index(address) + 1) % len(places)] if address in places else places[0]


class _Worker:
    """What a worker process loads once and keeps over sessions."""

    def __init__(
        self, connection: RunConnection, description: RunDescription, options: WorkerOptions, *, lines: LinesKept
    ) -> None:
        config, folder = options.prepare(connection, description)
        self.run = description.run
        self._together, speed = options.together, options.shape.speed
        if self._together is not None:
            self._equipment = self._together.equip(config, folder, speed=speed)
        else:
            self._equipment = equip(config, folder, device=options.device, cores=options.threads, speed=speed)
        self._shape = options.shape
        self._report = options.report
        self._lines, self._courtesy = lines, options.courtesy
        self.held = ""
        """Why it has left its session by itself."""
        self.heard_at = 0.0
        self.standbys: tuple[str, ...] = ()

    def _hold(self, session: Session, reason: str) -> None:
        self.held = reason
        with suppress(LinkError):
            self._send(session, NodeReport())
        session.hold(reason)

    def _send(self, session: Session, report: NodeReport) -> None:
        """Raises LinkError."""
        session.report(replace(report, phase="paused") if self.held else report)

    def train(self, connection: RunConnection, *, answered: Callable[[], None] | None) -> Stop:
        """One session, from Hello to Stop; `answered`: called when the coordinator has taken this worker. Raises
        LinkError when it breaks."""
        self.held = ""
        session = connection.session(parameters=self._equipment.parameters)
        link: Link = session
        if self._shape != NO_SHAPE:
            link = ShapedLink(session, shape=self._shape)
        link = phased = PhasedLink(link, answered=answered)
        if self._report is not None:
            section = self._equipment.config.train
            units = section.batch_sequences // section.unit_sequences
            counted = self._equipment.task.defaults.counted
            link = WatchedLink(link, report=self._report, units_per_round=units, counted=counted)
        if self._together is not None:
            link = self._together.around(link, farewell=session.farewell)
        try:
            facts, send = machine_facts(self._equipment.settings.device), partial(self._send, session)
            with (
                reporting(send, facts=facts, link=phased, round_trip=session.round_trip, lines=self._lines),
                self._courtesy.watching(partial(self._hold, session)) if self._courtesy is not None else nullcontext(),
            ):
                return self._equipment.work(link)
        except LinkError:
            stop = session.farewell() if self._together is None else None
            if stop is None:
                raise
            return stop
        finally:
            self.heard_at = session.heard_at
            self.standbys = session.standbys or self.standbys
            link.close()
