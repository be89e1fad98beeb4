"""A whole run with an enemy in the crew: the weights are those of the undisturbed run."""

import contextlib
import logging
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from cuadrilla.engines.local import WrapLink
from cuadrilla.errors import LinkError
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link import wire
from cuadrilla.link.base import Contribution, Hello, Lease, Progress, Stop, ToWorker
from cuadrilla.link.grpc_client import SERVICE, Connection
from cuadrilla.rundir import RunDir, read_jsonl
from cuadrilla.sync.exact import contribution_like
from cuadrilla.train.coordinate import CoordinatorRuntime, Outcome
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.loop import environment
from cuadrilla.train.setup import RunContext
from tests.crews import join
from tests.faults import Script, play
from tests.hostile import (
    CEILING_SECONDS,
    HUGE,
    SEEDS,
    mutated,
    to,
)
from tests.runs import execute, final_sha256, prepare, workers
from tests.tasks import RaggedRegression
from tests.transports import _Crew

# A whole run with an enemy in the crew


def said_of(context: RunContext) -> dict[str, str]:
    """What an honest worker says about itself."""
    return {**code_fingerprint(context.task, context.model), **environment(context.device)}


class Besieged(_Crew):
    """`worker-3` is a node that turned bad: it behaves as `enemy` says. `after` is called before the link closes."""

    def __init__(
        self,
        context: RunContext,
        folder: Path,
        *,
        enemy: Callable[["Besieged", Connection, str], None],
        wrap_link: WrapLink | None = None,
        after: Callable[["Besieged"], None] | None = None,
    ) -> None:
        super().__init__(context, folder, wrap_link=wrap_link)
        self.enemy = enemy
        self.after = after
        self.address = ""

    def work(self, name: str, speed: float, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        if name != "worker-3":
            super().work(name, speed, port)
            return
        identity = join(self.folder / name, name=name, crew=self.keys)
        self.nodes.add(name, certificate=identity.certificate)
        connection = Connection(self.address, identity=identity)
        try:
            self.enemy(self, connection, name)
        finally:
            connection.close()

    def run(self) -> Outcome:
        outcome = super().run()
        if self.after is not None:
            self.after(self)
        return outcome


def besiege(
    folder: Path,
    enemy: Callable[[Besieged, Connection, str], None],
    *sets: str,
    wrap_link: WrapLink | None = None,
    after: Callable[[Besieged], None] | None = None,
) -> Outcome:
    """A strict run of two honest workers and an enemy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    context = prepare(folder, RaggedRegression(), workers([1.0, 1.0, 1.0]), "sync.strict=true", *sets)
    crew = Besieged(context, folder / "crew", enemy=enemy, wrap_link=wrap_link, after=after)
    try:
        return crew.run()
    finally:
        crew.server.close()
        for thread in crew.threads:
            thread.join()
        context.store.close()
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    execute(folder, RaggedRegression(), workers([1.0]), "sync.strict=true")
    return final_sha256(folder)


def claim(session: Any, lease_id: int, **values: Any) -> None:
    """An answer to any lease, with an upload of noise behind it that fits the model."""
    fixed = {name: torch.full(shape, 2**40, dtype=torch.int64) for name, _, shape in session._parameters.entries}
    fields = {"tokens": 3, "loss_sum": 1.0, **values}
    session.call(Contribution(lease_id=lease_id, tensors=fixed, **fields))


def test_answers_to_the_leases_of_others_are_not_counted(tmp_path: Path, undisturbed: str) -> None:
    """While honest workers hold leases, a node answers them with noise; also old ones, and ones that never were."""
    attacked = threading.Event()
    claimed: set[int] = set()

    def enemy(crew: Besieged, connection: Connection, name: str) -> None:
        coordination = crew.context.coordination
        try:
            for _attempt in range(30):
                session = connection.session(parameters=wire.Layout.of(crew.params))
                try:
                    session.call(Hello(speed_hint=1.0, environment=said_of(crew.context)))
                    if isinstance(session.next_event(), Stop):
                        return
                    others = {key for key, grant in list(coordination.leases.items()) if grant.worker != name}
                    if others:
                        near = range(max(0, min(others) - 3), max(others))  # old ones, too; the next may be its own
                        own = set(coordination.leases) - others
                        for lease_id in (*sorted(others.union(near) - own), HUGE, 2**63):
                            claim(session, lease_id)
                        claimed.update(others)
                        attacked.set()
                finally:
                    session.close()  # without a goodbye: a lease of its own goes back
        except LinkError:
            pass  # the run is over
        finally:
            attacked.set()

    wrap, played = play(
        *(
            Script(worker=name, at=0, phase="contribute", action=lambda: attacked.wait(CEILING_SECONDS) and None)
            for name in ("worker-1", "worker-2")
        )
    )
    outcome = besiege(tmp_path / "run", enemy, wrap_link=wrap)
    assert outcome.complete
    assert played
    discarded = {row["lease"] for row in read_jsonl(RunDir(tmp_path / "run").events) if row["event"] == "discarded"}
    assert claimed
    assert claimed & discarded  # those that the held-up workers had; when both have answered it is "the same again"
    assert {HUGE, 2**63} <= discarded
    assert final_sha256(tmp_path / "run") == undisturbed


def test_a_node_that_says_anything_at_all_changes_nothing(tmp_path: Path, undisturbed: str) -> None:
    chance = random.Random(13)
    seeds = [message.SerializeToString() for message in SEEDS[pb.ToCoordinator]]

    def enemy(crew: Besieged, connection: Connection, name: str) -> None:
        hello = wire.to_coordinator(Hello(speed_hint=1.0, environment=said_of(crew.context)))
        call = connection._channel.stream_stream(SERVICE + "Session")
        for _ in range(40):
            said = [hello.SerializeToString(), *(mutated(chance.choice(seeds), chance) for _ in range(5))]
            with contextlib.suppress(grpc.RpcError):
                for _answer in call(iter(said), timeout=CEILING_SECONDS):
                    pass

    outcome = besiege(tmp_path / "run", enemy)
    assert outcome.complete
    assert final_sha256(tmp_path / "run") == undisturbed


def test_joining_while_the_run_finishes(tmp_path: Path, undisturbed: str) -> None:
    """After the last step, and while the link closes: told that the run has ended, or not reached; nobody hangs."""
    told: list[str] = []
    last_joined = threading.Event()

    def enemy(crew: Besieged, connection: Connection, name: str) -> None:
        session = connection.session(parameters=wire.Layout.of(crew.params))
        session.close()  # in the crew, but not a member of the run

    def join_on_and_on(crew: Besieged) -> None:
        layout = wire.Layout.of(crew.params)
        identity = join(crew.folder / "late", name="late", crew=crew.keys)
        crew.nodes.add("late", certificate=identity.certificate)
        connection = Connection(crew.address, identity=identity)
        try:
            while True:
                session = connection.session(parameters=layout)
                try:
                    session.call(Hello(speed_hint=1.0, environment=said_of(crew.context)))
                    event = session.next_event()
                    assert isinstance(event, Stop)
                    assert not event.refused
                    told.append(event.reason)
                finally:
                    session.close()
                    last_joined.set()
        except LinkError as error:
            told.append(error.message)
        finally:
            connection.close()

    def after(crew: Besieged) -> None:
        crew.threads.append(threading.Thread(target=join_on_and_on, args=(crew,)))
        crew.threads[-1].start()
        assert last_joined.wait(CEILING_SECONDS)

    outcome = besiege(tmp_path / "run", enemy, after=after)
    assert outcome.complete
    assert told[0] == "the run has ended"
    assert set(told[:-1]) == {"the run has ended"}
    assert final_sha256(tmp_path / "run") == undisturbed


# What a member may say that the run has to survive: the state machine behind its I/O shell, without a network


class Members:
    """Members of a strict run, by what they send and are sent."""

    def __init__(self, folder: Path, *sets: str, clock: Callable[[], float] = time.monotonic) -> None:
        sets = (workers([1.0, 1.0]), "sync.strict=true", *sets)
        self.context = prepare(folder, RaggedRegression(), *sets, clock=clock)
        self.coordination: CoordinatorRuntime = self.context.coordination
        self.sent: defaultdict[str, list[ToWorker]] = defaultdict(list)
        self.coordination.open(lambda worker, message: self.sent[worker].append(message))
        self.layout = wire.Layout.of(contribution_like(self.context.model, strict=True))

    def says(self, worker: str, message: pb.ToCoordinator) -> None:
        uploads = wire.Uploads(self.layout)
        uploads.put("u", self.layout.unpack(bytearray(self.layout.num_bytes)))
        self.coordination.deliver(worker, wire.from_worker(message, uploads=uploads))

    def joins(self, worker: str, *, speed_hint: float = 1.0, **facts: str) -> None:
        said = {**said_of(self.context), **facts}
        self.says(worker, to(hello=pb.Hello(protocol=wire.PROTOCOL, speed_hint=speed_hint, environment=said)))

    def leases(self, worker: str) -> list[Lease]:
        return [message for message in self.sent[worker] if isinstance(message, Lease)]

    def answers(self, worker: str, **fields: Any) -> None:
        values = {"tokens": 9, "loss_sum": 1.0, "upload": "u", "valid": True, **fields}
        self.says(worker, to(contribute=pb.Contribute(lease_id=self.leases(worker)[-1].lease_id, **values)))


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    made = Members(tmp_path / "run")
    yield made
    made.context.store.close()


def play_rounds(members: Members, rounds: int, *, hint: float, **answer: Any) -> None:
    """`mala` claims a speed and answers its leases in its way; `ana` is honest. Then mala is gone."""
    with contextlib.suppress(LinkError):  # it may be refused
        members.joins("mala", speed_hint=hint)
    members.joins("ana")
    done: set[int] = set()
    for _ in range(rounds):
        for worker, fields in (("mala", answer), ("ana", {})):
            if (leases := members.leases(worker)) and leases[-1].lease_id not in done:
                done.add(leases[-1].lease_id)
                members.answers(worker, **fields)
    assert members.coordination.failure is None
    members.coordination.left("mala", "gone")
    assert members.coordination.failure is None


@pytest.mark.parametrize("hint", [5e-324, 1e-300, 1e-12, 1.0, 9.9e11])
@pytest.mark.parametrize("transfer", [0.0, 5e-324, 1e-9, 1e300, 1.7e308])
def test_claims_of_speed_do_not_bring_the_run_down(members: Members, hint: float, transfer: float) -> None:
    play_rounds(members, 6, hint=hint, transfer_seconds=transfer)


@pytest.mark.parametrize(
    "answer",
    [
        {"tokens": HUGE},
        {"tokens": 0},
        {"loss_sum": 1.7e308},
        {"loss_sum": -1.7e308},
        {"tokens": 0, "loss_sum": 1.7e308},
        {"loss_sum": float("nan")},
        {"upload": "other"},
        {"valid": False},
    ],
    ids=str,
)
def test_answers_do_not_bring_the_run_down(members: Members, answer: dict[str, Any]) -> None:
    """Wrong gradients are another matter: they are detected at best."""
    play_rounds(members, 6, hint=1.0, **answer)


def test_names_of_facts_reach_no_terminal_as_they_are(members: Members, caplog: pytest.LogCaptureFixture) -> None:
    """The reason of a refusal is printed here and on the other machine: no escape sequences, and not without end."""
    members.joins("ana", torch="2.10")
    with caplog.at_level(logging.WARNING, logger="cuadrilla"):
        members.joins("mala", **{"\x1b]0;owned\x07\x1b[2J": "\x1b[31m\n" + "x" * 10_000})
    stop = members.sent["mala"][-1]
    assert isinstance(stop, Stop)
    assert stop.refused
    for text in (stop.reason, caplog.text.rstrip("\n")):
        assert len(text) < 2_000
        assert "\x1b" not in text
        assert "\n" not in text


def test_a_member_that_only_claims_to_be_busy_does_not_hold_the_run(tmp_path: Path) -> None:
    """It gave one slow answer, and holds its next lease without progress: others get its units."""
    now = [0.0]
    members = Members(tmp_path / "run", 'engine.kind="crew"', clock=lambda: now[0])
    members.joins("mala")
    members.joins("ana")
    members.coordination.heard("mala", Progress(micro_steps=1))
    members.coordination.tick()
    now[0] = 9.0
    members.answers("mala", transfer_seconds=1e9)
    members.answers("ana")
    before = members.coordination.version
    for _ in range(600):
        now[0] += 1.0
        for worker in ("mala", "ana"):
            members.coordination.heard(worker, Progress(micro_steps=1))
        members.coordination.tick()
        for lease in members.leases("ana"):
            if lease.lease_id in members.coordination.leases:
                members.coordination.heard("ana", Progress(micro_steps=int(now[0]) + 2))
                members.coordination.tick()
                members.answers("ana")
    members.context.store.close()
    assert members.coordination.failure is None
    assert members.coordination.version > before + 1
