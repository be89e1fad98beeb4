"""Everything that is known to hurt a crew, all at once, until this process is killed.

python -m tests.attackers strangers HOST:PORT SOURCE...    from these addresses; the node of CUADRILLA_HOME was kicked
python -m tests.attackers liar                             as the node of CUADRILLA_HOME, which has joined
"""

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import mkdtemp

import grpc
import torch

from cuadrilla.cli import app
from cuadrilla.errors import LinkError
from cuadrilla.home import Home
from cuadrilla.link import grpc_client, wire
from cuadrilla.link.base import Contribution, Goodbye, Hello, Progress, Tensors, ToCoordinator
from cuadrilla.link.grpc_client import SERVICE, Connection, GrpcLink
from cuadrilla.link.tls import Identity, enrol_identity, load_node
from tests.hostile import SEEDS, mutated
from tests.strangers import half_open, idle, knock, with_the_enrol_key

NUM_KNOCKERS, NUM_IDLE, HELD_SECONDS = 4, 120, 20.0
FLOOD_SECONDS = 20.0


def strangers(address: str, *sources: str) -> None:
    """Knocks of all kinds, connections that say nothing, half a TLS, enrolments, and the calls of a kicked node."""
    host, port = address.split(":")
    (crew,) = Home.of_user().joined()
    kicked = load_node(crew.folder)
    enrolling = enrol_identity(kicked.ca)
    published, own = with_the_enrol_key(Path(mkdtemp())), Path(mkdtemp())
    (own / "stranger.pem").write_bytes(kicked.certificate)
    (own / "stranger.key").write_bytes(kicked.key)

    def hold(open_them: Callable[[], list[object]]) -> None:
        held = open_them()
        time.sleep(HELD_SECONDS)
        del held

    jobs: list[Callable[[], object]] = [
        *(lambda n=n: knock(int(port), times=100, seed=n, host=host, source=sources[n]) for n in range(NUM_KNOCKERS)),
        lambda: hold(lambda: [*idle(int(port), number=NUM_IDLE, folder=published, host=host, sources=sources)]),
        lambda: hold(lambda: [*idle(int(port), number=NUM_IDLE, folder=own, host=host, sources=sources)]),
        lambda: hold(lambda: [*half_open(int(port), number=NUM_IDLE, host=host, sources=sources)]),
        lambda: _enrol(address, enrolling),
        lambda: _call_everything(address, kicked),
    ]
    _for_ever(jobs)


def liar() -> None:
    """A worker that lies until it is sent away, and floods the coordinator with calls until it may lie again."""
    (crew,) = Home.of_user().joined()
    identity = load_node(crew.folder)
    grpc_client.GrpcLink = LyingLink  # type: ignore[misc]
    while True:
        sys.argv = ["cuadrilla", "join", "--threads", "1"]
        app.run()
        until = time.monotonic() + FLOOD_SECONDS
        while time.monotonic() < until:
            _call_everything(crew.address, identity)


class LyingLink(GrpcLink):
    """A session that claims to be fast, and whose answers are of all kinds."""

    def call(self, message: ToCoordinator) -> None:
        match message:
            case Hello():
                message = replace(message, speed_hint=0.9 * wire.MAX_SPEED)
            case Progress():
                message = replace(message, micro_steps=random.choice([message.micro_steps, 2**63]))
            case Contribution():
                message = self._answer(replace(message, tensors=_false(message.tensors)))
        super().call(message)

    def _answer(self, message: Contribution) -> ToCoordinator:
        match random.randrange(9):
            case 0:
                return replace(message, tokens=2**63 - 1)
            case 1:
                return replace(message, loss_sum=random.choice([1.7e308, -1.0, float("nan"), 10 * message.loss_sum]))
            case 2:
                return replace(message, transfer_seconds=1.7e308)
            case 3:
                return replace(message, lease_id=message.lease_id + random.choice([-1, 1, 2**40]))
            case 4:
                super().call(message)  # twice
                return message
            case 5:
                time.sleep(random.choice([1.0, 12.0]))  # holds its lease, and beats
                return message
            case 6:
                return Progress(micro_steps=2**62)  # never answers
            case 7:
                super().call(Goodbye(reason="\x1b]0;owned\x07" + 500 * "x"))
                raise LinkError("comes back")
            case _:
                return message


def _false(tensors: Tensors) -> Tensors:
    """Mostly."""
    lie = random.choice([None, None, -1.0, 0.0, 1e3, 1e-6, float("nan"), float("inf")])
    if lie is None:
        return tensors
    return {name: (tensor.double() * lie).to(tensor.dtype) for name, tensor in tensors.items()}


def _enrol(address: str, identity: Identity) -> None:
    """With secrets that are none, and with nothing at all behind the call."""
    connection = Connection(address, identity=identity)
    silent = threading.Event()

    def nothing() -> Iterator[bytes]:
        silent.wait(HELD_SECONDS)
        yield b""

    with contextlib.suppress(LinkError, grpc.RpcError):
        for _ in range(12):
            connection._channel.stream_stream(SERVICE + "Enroll")(nothing(), timeout=HELD_SECONDS)
        for _ in range(20):
            with contextlib.suppress(LinkError):
                connection.enroll(secret=random.randbytes(20), request=random.randbytes(300))
    silent.set()
    connection.close()


def _call_everything(address: str, identity: Identity) -> None:
    """Calls of a node, with messages that are nearly right."""
    connection = Connection(address, identity=identity)
    for _ in range(10):
        with contextlib.suppress(LinkError):
            connection.describe()
        for kind, methods in {"ToCoordinator": ["Session"], "Chunk": ["Upload", "Send", "Average"]}.items():
            seeds = next(messages for cls, messages in SEEDS.items() if cls.__name__ == kind)
            said = [mutated(random.choice(seeds).SerializeToString(), random.Random()) for _ in range(20)]
            for method in methods:
                with contextlib.suppress(grpc.RpcError):
                    for _answer in connection._channel.stream_stream(SERVICE + method)(iter(said), timeout=5.0):
                        pass
        with (
            contextlib.suppress(LinkError),
            contextlib.closing(connection.session(parameters=wire.Layout.of({"weight": torch.zeros(2)}))) as session,
        ):
            for _ in range(50):
                session.call(Hello(speed_hint=random.choice([1e12, 0.0, float("nan")])))
                session.call(Contribution(lease_id=random.randrange(2**20), tokens=1, loss_sum=1.0, tensors={}))
    connection.close()


def _for_ever(jobs: list[Callable[[], object]]) -> None:
    def repeat(job: Callable[[], object]) -> None:
        while True:
            job()

    threads = [threading.Thread(target=repeat, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    {"strangers": strangers, "liar": liar}[sys.argv[1]](*sys.argv[2:])
