"""How a machine that has joined a crew works over the crew link: in this process, or with a process for each device.

The processes have the machine's key, and each names its device in its calls (`link/names.py`). They end with this one;
one that is killed is started again, the others go on meanwhile.
"""

import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from cuadrilla.config import Config
from cuadrilla.engines.bundle import OtherWork
from cuadrilla.engines.children import Children
from cuadrilla.engines.ray.node import Ways
from cuadrilla.engines.worker import GIVE_UP_SECONDS, LONGEST_PAUSE_SECONDS, WorkerOptions, run_worker
from cuadrilla.errors import LinkError
from cuadrilla.link.base import Refused
from cuadrilla.link.grpc_client import Connection
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.plan.devices import Use

MAX_RESTARTS = 3
OTHER_WORK = "other work"
"""What such a process says last, as JSON, when there is other work for this machine."""
LOOK_SECONDS = 0.5
END_SECONDS = 0.0
"""They have nothing to save."""

log = logging.getLogger(__name__)


def work_here(ways: Ways, *, moved: Callable[[str], None], data: Path | None) -> str:
    """Work until the run ends; why it ended. Raises what `run_worker` raises, and DeviceError."""
    use = ways.devices.only if ways.devices.is_one else None
    if use is None:
        choice = ways.devices.choose(_settings_of(ways))
        for note in choice.notes:
            ways.report(note)
        if len(choice.uses) > 1:
            return _work_apart({each.name: each for each in choice.uses}, ways, data=data)
        use = choice.uses[0]
    return run_worker(worker_options(ways, use, moved=moved))


def worker_options(ways: Ways, use: Use, *, moved: Callable[[str], None]) -> WorkerOptions:
    def connect(address: str) -> Connection:
        return Connection(address, identity=ways.identity, term=ways.term, device=use.name)

    return WorkerOptions(
        address=ways.crew.address,
        connect=connect,
        prepare=ways.prepare,
        threads=use.threads,
        device=use.device,
        moved=moved,
        report=ways.report,
        courtesy=ways.courtesy,
    )


def _settings_of(ways: Ways) -> Config:
    """What the run says, once its coordinator answers; its files are here then. Raises LinkError."""
    began = time.monotonic()
    while True:
        connection = ways.connection()
        try:
            return ways.prepare(connection, connection.describe())[0]
        except Refused:
            raise
        except LinkError as error:
            if time.monotonic() - began > GIVE_UP_SECONDS:
                raise
            log.warning("%s; trying again in %.2g s", error.message, LONGEST_PAUSE_SECONDS)
            time.sleep(LONGEST_PAUSE_SECONDS)
        finally:
            connection.close()


def _work_apart(uses: Mapping[str, Use], ways: Ways, *, data: Path | None) -> str:
    """A process for each; why they ended. Raises the error of the last one if none ended in order."""
    names = ", ".join(uses)
    log.info("a worker for each of %s", names, extra=TALK)
    children = Children(died=lambda name, reason: log.warning("%s died: %s", name, reason))
    deaths: Counter[str] = Counter()
    done = ""
    try:
        for use in uses.values():
            _start(use, children, ways, data=data)
        while children.alive:
            time.sleep(LOOK_SECONDS)
            for name, code in children.look().items():
                deaths[name] += code < 0
                if code < 0 and deaths[name] <= MAX_RESTARTS:
                    log.warning("%s is being restarted", name)
                    _start(uses[name], children, ways, data=data)
                elif code == 0:
                    done = children.last_words[name].strip()
    finally:
        children.end(finish_seconds=END_SECONDS)
    if done == json.dumps(OTHER_WORK):
        raise OtherWork("the coordinator has other work for this machine", hint="cuadrilla join")
    if not done:
        raise children.failure()
    return Message(done)


def _start(use: Use, children: Children, ways: Ways, *, data: Path | None) -> None:
    arguments = ["--crew", ways.crew.folder.name, "--name", use.name, "--device", use.device]
    arguments += ["--threads", str(use.threads), *(["--data", str(data)] if data else [])]
    arguments += ways.courtesy.manners.options
    command = [sys.executable, "-m", "cuadrilla", "--json", "work-with", *arguments]
    children.start(use.name, command, environment=use.environment)
