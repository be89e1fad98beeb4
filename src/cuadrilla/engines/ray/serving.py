"""Services as Ray actors: each one starts `cuadrilla serve` on its machine, and a gateway stands before them.

Not as deployments of Ray Serve, for three reasons, seen in Ray 2.60. Each of its replicas listens on all addresses of
its machine (`_private/replica.py`: a gRPC port on `[::]:0` whose messages are unpickled behind Ray's token; no setting
moves or closes it), while a service of ours has one port on the machine's address in the cluster, behind a key, and
speaks HTTP. A replica that is killed loses its requests (with 12 in hand at two replicas, 9 were answered with 500),
which a gateway asks of another one. And its router counts a replica's requests, not how fast it is.

Ray chooses the machines, reserves cards, notices deaths and starts an actor again, maybe elsewhere. A machine is used
only if it offers itself (`cluster.RESOURCE`), as in training. The model's files travel through the object store.

Invariants
* A service ends with its actor, and the actor with the process that has started it.
* The key of the services is made anew each time; it is in no argument, log or file of ours.
"""

import logging
import os
import re
import secrets
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError

from cuadrilla.engines.ray.cluster import OFFER, RESOURCE
from cuadrilla.errors import ConfigError, EnvironmentProblem
from cuadrilla.model.hf import save_hf
from cuadrilla.rundir import private_folder, read_regular, storage_errors
from cuadrilla.train.trained import find_stored, run_of

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
MOST_FILE_BYTES = 2**34
BEGIN_SECONDS = 180.0
"""Ray fetches the files, and starts a process that loads torch."""
ASK_SECONDS = 5.0
END_SECONDS = 15.0
"""A service that is to end lets its requests end, for ten seconds."""
MOST_STARTS = 3
"""Of one service, by an actor that stays."""
KEPT_LINES = 20

log = logging.getLogger(__name__)

Files = Mapping[str, "np.ndarray[Any, np.dtype[np.uint8]]"]


@dataclass(frozen=True, kw_only=True)
class ServiceOrder:
    """What each actor is to serve. `num_gpus`: cards that Ray reserves for it; `device` as of `cuadrilla serve`."""

    name: str
    key: str = field(repr=False)
    device: str = "auto"
    num_gpus: int = 0


@dataclass(frozen=True, kw_only=True)
class ServicePlace:
    """Where a service is. `url` "": it has not begun to listen. `ended`: it is not there any more; its last words."""

    url: str = ""
    ended: bool = False
    said: str = ""


class RayService:
    """The actor. It stays on its machine's address in the cluster; its port is any free one."""

    def __init__(self, order: ServiceOrder, files: tuple[Any]) -> None:
        """`files`: a reference into the object store, in a tuple, so that Ray does not resolve it before the call."""
        self._order = order
        self._stack = ExitStack()
        model = self._stack.enter_context(private_folder()) / order.name
        model.mkdir()
        found: Files = ray.get(files[0])
        for name, array in found.items():
            with storage_errors(model / name):
                array.tofile(model / name)
        self._model = model
        self._lifeline, self._ours = os.pipe()
        self._said: deque[str] = deque(maxlen=KEPT_LINES)
        self._starts = 0
        self._start()

    def where(self) -> ServicePlace:
        """A service that has ended is started again, a few times."""
        if self._child.poll() is not None and self._starts < MOST_STARTS:
            self._start()
        if self._child.poll() is not None:
            return ServicePlace(ended=True, said=" ".join(self._said))
        return ServicePlace(url=self._url if self._listens() else "")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(self._address) == 0

    def pids(self) -> tuple[int, int]:
        """Of the actor and of its service."""
        return os.getpid(), self._child.pid

    def close(self) -> None:
        """Its requests may end; nothing stays on the machine."""
        self._child.terminate()
        try:
            self._child.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._stack.close()

    def _start(self) -> None:
        self._starts += 1
        host = ray.util.get_node_ip_address()
        with socket.create_server((host, 0)) as free:
            port = free.getsockname()[1]
        self._address = (host, port)
        self._url = f"http://{host}:{port}"
        order = self._order
        command = [sys.executable, "-m", "cuadrilla", f"--supervised={self._lifeline}", "serve", str(self._model)]
        options = ["--listen", f"{host}:{port}", "--key-file", "-", "--device", order.device]
        self._child = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            pass_fds=(self._lifeline,),
        )
        assert self._child.stdin is not None
        self._child.stdin.write(f"{order.key}\n")
        self._child.stdin.close()
        Thread(target=self._listen, args=(self._child,), daemon=True).start()

    def _listen(self, child: "subprocess.Popen[str]") -> None:
        assert child.stderr is not None
        for line in child.stderr:
            self._said.append(line.strip())


class RayServices:
    """The actors, as the process that has started them sees them."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors

    def find(self) -> list[str]:
        """Where the services are now, in their order; "" for one that Ray is starting again."""
        try:
            return [place.url if place else "" for place in self._places(ASK_SECONDS)]
        except RayError:  # Ray itself is lost: the services may go on
            return [""] * len(self.actors)

    def wait(self) -> list[str]:
        """Where they are, once Ray has placed all. Raises EnvironmentProblem."""
        deadline = monotonic() + BEGIN_SECONDS
        while True:
            places = self._places(ASK_SECONDS)
            ended = next((place for place in places if place and place.ended), None)
            if ended:
                hint = 'on each machine: pip install "cuadrilla[ray,serve]"'
                raise EnvironmentProblem("a service has ended: {said}", said=ended.said or "?", hint=hint)
            found = [place.url for place in places if place and place.url]
            if len(found) == len(self.actors):
                return found
            if monotonic() > deadline:
                raise EnvironmentProblem(
                    "{found} of {wanted} services have begun on the Ray cluster",
                    found=len(found),
                    wanted=len(self.actors),
                    hint="offer more room: ray start ... {offer}; or ask for fewer services or cards",
                    offer=OFFER,
                )
            sleep(0.1)

    def _places(self, seconds: float) -> list[ServicePlace | None]:
        asked = [actor.where.remote() for actor in self.actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=seconds)
        return [_result(each) if each in answered else None for each in asked]


def _result(reference: Any) -> ServicePlace | None:
    try:
        found: ServicePlace = ray.get(reference, timeout=ASK_SECONDS)
    except (RayError, GetTimeoutError):  # it is dead, or begins anew
        return None
    return found


@contextmanager
def services(model: Path, *, number: int, device: str, num_gpus: int) -> Iterator[tuple[RayServices, str]]:
    """So many services of a language model on the cluster that this process is connected to, and their key.

    Raises ConfigError, DataError, CheckpointError.
    """
    files = ray.put({name: np.frombuffer(raw, dtype=np.uint8) for name, raw in model_files(model).items()})
    order = ServiceOrder(name=_name(model), key=secrets.token_urlsafe(32), device=device, num_gpus=num_gpus)
    actor = ray.remote(RayService).options(
        resources={RESOURCE: 1}, num_cpus=0, num_gpus=num_gpus, max_restarts=-1, scheduling_strategy="SPREAD"
    )
    actors = [actor.remote(order, (files,)) for _ in range(number)]
    try:
        yield RayServices(actors), order.key
    finally:
        ray.wait([each.close.remote() for each in actors], num_returns=number, timeout=END_SECONDS + ASK_SECONDS)
        for each in actors:
            ray.kill(each)


def model_files(path: Path) -> dict[str, bytes]:
    """A language model in Hugging Face's layout, by the names of its files.

    Raises ConfigError, DataError, CheckpointError.
    """
    run = run_of(path)
    if run is None:
        there = [name for name in MODEL_FILES if (path / name).is_file()]
        files = {name: read_regular(path / name, most_bytes=MOST_FILE_BYTES) for name in there}
        if "config.json" not in files:
            hint = "name a run, or a folder in Hugging Face's layout"
            raise ConfigError("{path} is not a language model", path=path, hint=hint)
        return files
    stored = find_stored(run)
    with private_folder() as private:
        folder = private / "model"
        save_hf(stored.load(), folder, tokenizer_path=stored.tokenizer_path)
        return {file.name: file.read_bytes() for file in folder.iterdir()}


def _name(path: Path) -> str:
    """As `cuadrilla serve` calls a model: by its folder."""
    folder = path.resolve()
    return re.sub(r"[^\w.-]+", "-", (folder.parent if folder.is_file() else folder).name)[:64] or "model"
