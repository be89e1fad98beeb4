"""A machine that has joined a crew becomes a node of its Ray cluster, if both owners want that and Ray works there.

`cuadrilla join` asks the coordinator first (`link/grpc_ray.py`), then the machine's owner, and says which condition
decided. Ray runs as a child of it: `ray start --block`, with the token and all that Ray writes in a folder of this
user's, and ends with it. When the head ends, the run has ended or its coordinator is being started again: it is looked
for, for a while. When the coordinator has another cluster (somebody was kicked), this machine leaves the old one within
seconds and asks anew.
"""

import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import FrameType

import psutil

from cuadrilla.config import Config
from cuadrilla.engines.courtesy import Courtesy
from cuadrilla.engines.devices import Devices
from cuadrilla.engines.ray.cluster import (
    COURTESY,
    DEVICES_LABEL,
    NAME_LABEL,
    PROGRESS_FILE,
    RESOURCE,
    SAID_SUFFIX,
    TOKEN_FILE,
    kill,
    settled,
    short_folder,
    why_not,
    write_token,
)
from cuadrilla.engines.worker import Prepare
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, LinkError
from cuadrilla.home import Joined
from cuadrilla.link import crew_pb2 as pb
from cuadrilla.link.address import Address
from cuadrilla.link.base import KnownTerm, Refused
from cuadrilla.link.grpc_client import Connection
from cuadrilla.link.grpc_ray import admits, token_hash
from cuadrilla.link.tls import Identity
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use
from cuadrilla.rundir import private_folder

STOP_SECONDS = 15.0
BACK_SECONDS = 25.0
"""A coordinator that was killed is back by then."""
RENEWED_SECONDS = 60.0
"""Another cluster runs by then; else the crew link is used."""
PAUSE_SECONDS = 1.0
LOOK_SECONDS = 2.0
MOST_NEWS_BYTES = 2**16

log = logging.getLogger(__name__)


class RayNode:
    """Ray on this machine, as a node of the cluster at `head`: a worker for each of `uses`, without other cards.

    `folder`: a private one, with a short name. `name`: of this node.
    """

    def __init__(self, head: "Head", *, name: str, uses: Sequence[Use], courtesy: Courtesy, folder: Path) -> None:
        self.member = token_hash(head.token)
        self._family: set[psutil.Process] = set()
        self._token, self._progress = folder / "ray.token", folder / "progress"
        self._told, self._said_bytes = "", 0
        write_token(self._token, head.token)
        options = {
            "--address": head.address,
            "--node-ip-address": head.mine,
            "--temp-dir": str(folder / "ray"),
            "--resources": json.dumps({RESOURCE: len(uses)}),
            "--labels": f"{NAME_LABEL}={name}",
        }
        environment = {TOKEN_FILE: str(self._token), PROGRESS_FILE: str(self._progress)}
        environment[COURTESY] = json.dumps(courtesy.data())
        if len(uses) > 1:
            devices = "_".join(use.name.partition(".")[0].replace(":", "-") for use in uses)
            options["--labels"] += f",{DEVICES_LABEL}={devices}"
            cards = [use.environment for use in uses if use.device == "cuda"]
            options["--num-gpus"] = str(len(cards))
            for variable in cards[0] if cards else ():
                environment[variable] = ",".join(dict.fromkeys(card[variable] for card in cards))
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        self._process = subprocess.Popen(
            [*command, *(f"{option}={value}" for option, value in options.items())],
            env=settled(os.environ, environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def look(self) -> bool:
        """Whether it runs. Remembers its processes: some may survive it, and then nobody could tell whose they were."""
        if self._process.poll() is not None:
            return False
        with suppress(psutil.NoSuchProcess):
            self._family.update(psutil.Process(self._process.pid).children(recursive=True))
        return True

    def progress(self) -> list[str]:
        """What its workers have said since the last time: why they wait, and how it goes."""
        line = self._progress.read_text(encoding="utf-8") if self._progress.exists() else ""
        told, self._told = self._told, line
        return [*self._said(), *([line] if line != told else [])]

    def _said(self) -> list[str]:
        path = self._progress.with_name(self._progress.name + SAID_SUFFIX)
        if not path.exists():
            return []
        with open(path, "rb") as file:
            file.seek(self._said_bytes)
            news = file.read(MOST_NEWS_BYTES)
        whole = news[: news.rfind(b"\n") + 1]
        self._said_bytes += len(whole)
        return whole.decode("utf-8", errors="replace").splitlines()

    def stop(self) -> None:
        """End Ray here, with all its processes. Safe to call twice."""
        self.look()
        if self._process.poll() is None:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self._process.kill()  # it may wait for a head that has gone, a minute or longer
        kill(psutil.wait_procs(self._family, timeout=STOP_SECONDS)[1])
        self._process.wait()
        self._token.unlink(missing_ok=True)


class Consent:
    """What this machine's owner says about Ray: None as long as nobody has said anything.

    `ask` asks the owner, None where nobody can answer: then there is no Ray.
    """

    def __init__(self, given: bool | None, *, ask: Callable[[], bool] | None = None) -> None:
        self.given = given
        self._ask = ask

    def can_be_asked(self) -> bool:
        return self.given is None and self._ask is not None

    def ask(self) -> bool:
        assert self._ask is not None
        self.given = self._ask()
        return self.given


@dataclass(frozen=True, kw_only=True)
class Ways:
    """How a machine that has joined a crew gets to its coordinator."""

    crew: Joined
    identity: Identity
    prepare: Prepare
    consent: Consent
    term: KnownTerm
    devices: Devices
    courtesy: Courtesy
    report: Callable[[str], None]
    """Hears how the work goes."""

    def connection(self) -> Connection:
        return Connection(self.crew.address, identity=self.identity, term=self.term)


def work_through_ray(ways: Ways) -> str | None:
    """Work as a node of the run's Ray cluster until that ends; why it ended. None: the crew link is to be used.

    Raises what `prepare` raises, and Refused.
    """
    worked, deadline = False, time.monotonic()
    signal.signal(signal.SIGTERM, _leave)
    while True:
        connection = ways.connection()
        try:
            config, _ = ways.prepare(connection, connection.describe())
            head = _head_for(config, connection, ways)
            uses = ways.devices.choose(config).uses if head is not None else ()
        except Refused:
            raise
        except LinkError:
            if not worked:
                return None  # the crew link has a patience of its own
            if time.monotonic() > deadline:
                return Message("the coordinator has gone")
            time.sleep(PAUSE_SECONDS)
            continue
        finally:
            connection.close()
        if head is None:
            return None
        ways.courtesy.wait_until_welcome()  # Ray itself is some work, too
        with private_folder(where=short_folder()) as folder:
            node = RayNode(head, name=ways.crew.name, uses=uses, courtesy=ways.courtesy, folder=folder)
            try:
                reason = _stay(node, ways)
            finally:
                node.stop()
        log.info("%s", reason, extra=TALK)
        worked, deadline = True, time.monotonic() + BACK_SECONDS


def _stay(node: RayNode, ways: Ways) -> str:
    """While Ray runs and the coordinator has this cluster; why it ended. Raises Refused.

    Ray itself would notice a minute later that its head is gone.
    """
    connection = ways.connection()
    try:
        while node.look():
            if refusal := connection.ray_head(pb.RayNode(member=node.member)).refusal:
                return Message("out of the Ray cluster: {reason}", reason=refusal)
            for line in node.progress():
                ways.report(line)
            time.sleep(LOOK_SECONDS)
    except Refused:
        raise
    except LinkError:
        pass
    finally:
        connection.close()
    return Message("the coordinator does not answer: looking for it")


def _leave(_number: int, _frame: FrameType | None) -> None:
    """So that Ray here is stopped on the way out."""
    raise SystemExit(INTERRUPTED_EXIT_CODE)


@dataclass(frozen=True, kw_only=True)
class Head:
    """Where to join. `mine`: the address of this machine that the head can reach."""

    address: str
    mine: str
    token: str = field(repr=False)


def _head_for(config: Config, connection: Connection, ways: Ways) -> Head | None:
    """The head to join, if the run uses Ray, both owners want it and Ray works between the two; says why."""
    if config.engine.kind == "local" or not config.engine.uses_ray:
        return None
    try:
        head = find_head(connection, coordinator=ways.crew.address, consent=ways.consent)
    except Refused:
        raise
    except LinkError as error:
        log.info("through the crew link: %s", error.message, extra=TALK)
        return None
    log.info(
        "through Ray: both owners want it, the versions are the same, and the two machines reach each other", extra=TALK
    )
    return head


def find_head(connection: Connection, *, coordinator: str, consent: Consent) -> Head:
    """`coordinator`: HOST:PORT of the crew link. Raises LinkError with the condition that forbids it."""
    if reason := why_not():
        raise LinkError(reason)
    if consent.given is False:
        raise LinkError("the owner of this machine does not want Ray on it")
    place = Address.parse(coordinator)
    with socket.create_connection((place.host, place.port)) as way:
        mine: str = way.getsockname()[0]
    deadline = time.monotonic() + RENEWED_SECONDS
    while (answer := _ask(connection, mine, consent)).later and time.monotonic() < deadline:
        time.sleep(PAUSE_SECONDS)
    if answer.ask and consent.can_be_asked():  # a person thinks for longer than a port should be open
        if not consent.ask():
            raise LinkError("the owner of this machine does not want Ray on it")
        answer = _ask(connection, mine, consent)
    if answer.refusal:
        raise LinkError("{reason}", reason=answer.refusal)
    if not admits(answer.address, token=answer.token):
        problem = "the head at {address} does not know the token that the coordinator gave"
        raise LinkError(problem, address=answer.address)
    return Head(address=answer.address, token=answer.token, mine=mine)


def _ask(connection: Connection, mine: str, consent: Consent) -> pb.RayHead:
    with socket.create_server((mine, 0)) as called_back:
        node = pb.RayNode(
            ray=metadata.version("ray"),
            python=platform.python_version(),
            port=called_back.getsockname()[1],
            consents=bool(consent.given),
        )
        return connection.ray_head(node)
