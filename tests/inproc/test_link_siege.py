"""Runs with an enemy in the crew: the weights are those of the undisturbed run, and nothing that it says ends one."""

import contextlib
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from cuadrilla.errors import LinkError
from cuadrilla.link import wire
from cuadrilla.link.base import Contribution, Hello, Lease, Link, ToCoordinator, ToWorker
from cuadrilla.link.client import GrpcLink
from cuadrilla.train.coordinate import CoordinatorRuntime
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.loop import environment
from cuadrilla.train.setup import RunContext
from tests.faults import Died, FaultyLink
from tests.hostile import CEILING_SECONDS, SEEDS, mutated
from tests.runs import execute, final_sha256, prepare, workers
from tests.tasks import RaggedRegression
from tests.transports import run_through


def said_of(context: RunContext) -> dict[str, str]:
    """What an honest worker says about itself."""
    return {**code_fingerprint(context.task, context.model), **environment(context.device)}


class Enemy(FaultyLink):
    """A node that says anything at all, in sessions of its own."""

    def __init__(self, session: Link, hello: bytes) -> None:
        super().__init__("", session, [], [])
        assert isinstance(session, GrpcLink)
        self._connection, self._hello = session._connection, hello

    def call(self, message: ToCoordinator) -> None:
        chance = random.Random(13)
        for _ in range(40):
            said = [self._hello, *(mutated(chance.choice(SEEDS), chance) for _ in range(5))]
            with contextlib.suppress(grpc.RpcError):
                for _answer in self._connection.stream("Session", iter(said), seconds=CEILING_SECONDS):
                    pass
        raise Died("it has said enough")


def test_a_node_that_says_anything_at_all_changes_nothing(tmp_path: Path) -> None:
    execute(tmp_path / "undisturbed", RaggedRegression(), workers([1.0]), "sync.strict=true")
    context = prepare(tmp_path / "run", RaggedRegression(), workers([1.0, 1.0, 1.0]), "sync.strict=true")
    hello = wire.encode(Hello(speed_hint=1.0, environment=said_of(context)))

    def wrap(worker: str, link: Link) -> Link:
        return Enemy(link, hello) if worker == "worker-3" else link

    assert run_through("grpc", context, wrap_link=wrap).complete
    assert final_sha256(tmp_path / "run") == final_sha256(tmp_path / "undisturbed")


# What a member may say that the run has to survive: the state machine behind its I/O shell, without a network


class Members:
    """Members of a strict run, by what they send and are sent."""

    def __init__(self, folder: Path) -> None:
        self.context = prepare(folder, RaggedRegression(), workers([1.0, 1.0]), "sync.strict=true")
        self.coordination: CoordinatorRuntime = self.context.coordination
        self.sent: defaultdict[str, list[ToWorker]] = defaultdict(list)
        self.coordination.open(lambda worker, message: self.sent[worker].append(message))
        forms = self.context.strategy.contributions_like(self.context.model, self.context.recipe)
        self.layout = wire.Layout.of(forms[0])

    def says(self, worker: str, message: ToCoordinator) -> None:
        """As it arrives. Raises LinkError for what cannot be meant."""
        self.coordination.deliver(worker, wire.decode(wire.encode(message), type(message)))

    def joins(self, worker: str, *, speed_hint: float = 1.0) -> None:
        said = said_of(self.context)
        self.says(worker, Hello(speed_hint=speed_hint, environment=said))

    def leases(self, worker: str) -> list[Lease]:
        return [message for message in self.sent[worker] if isinstance(message, Lease)]

    def answers(self, worker: str, **fields: Any) -> None:
        said = Contribution(**{"lease_id": self.leases(worker)[-1].lease_id, "tokens": 9, "loss_sum": 1.0, **fields})
        heard = wire.decode(wire.encode(said), Contribution)
        empty = self.layout.unpack(
            bytearray(self.layout.header + bytes(self.layout.num_bytes - len(self.layout.header)))
        )
        self.coordination.deliver(worker, replace(heard, tensors=empty))


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
        {"tokens": 2**63 - 1},
        {"tokens": 0},
        {"loss_sum": 1.7e308},
        {"loss_sum": -1.7e308},
        {"tokens": 0, "loss_sum": 1.7e308},
        {"valid": False},
    ],
    ids=str,
)
def test_answers_do_not_bring_the_run_down(members: Members, answer: dict[str, Any]) -> None:
    """Wrong gradients are another matter: they are detected at best."""
    play_rounds(members, 6, hint=1.0, **answer)
