"""Runs with an enemy in the crew: the weights are those of the undisturbed run, and nothing that it says ends one."""

import contextlib
import random
from pathlib import Path

import grpc

from cuadrilla.link import wire
from cuadrilla.link.base import Hello, Link, ToCoordinator
from cuadrilla.link.client import GrpcLink
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

    assert run_through(context, wrap_link=wrap).complete
    assert final_sha256(tmp_path / "run") == final_sha256(tmp_path / "undisturbed")
