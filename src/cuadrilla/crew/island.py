"""An island: ranks that torchrun has started and that are one worker together, each on a device of its own.

Rank 0 either keeps the run directory and coordinates, as a single process does, or it joins a crew and fetches what the
run needs. The other ranks bring their device and the data. They write nothing and get the weights from rank 0.

Invariants
* All ranks have the settings of rank 0's run file. Only paths, device and threads are each rank's own.
* In torch's own store rank 0 writes what is trained, and where. Then each rank writes the facts that must be equal
  (system, data, program), or why it cannot take part. A rank that differs is named before any tensor moves, and the
  others do not wait for it.
* When a rank dies, all others end. torchrun starts them again (`--max-restarts`), and the run goes on from its newest
  checkpoint. When the connection to a crew breaks, only the session ends: all ranks keep their model and data.
"""

import dataclasses
import hashlib
import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # exported without saying so

from cuadrilla.config import Config
from cuadrilla.crew.equipment import equip, num_cores
from cuadrilla.crew.local import run_local
from cuadrilla.errors import ConfigError, CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.host.torchrun import Place
from cuadrilla.link.base import Link, Stop
from cuadrilla.link.island import IslandLink, broadcast_bytes, first_line
from cuadrilla.link.wire import Layout
from cuadrilla.messages import Message
from cuadrilla.model.task import Task
from cuadrilla.rundir import finite
from cuadrilla.runfile import dump, load_dumped
from cuadrilla.sync.statistics import refuse_private_buffers
from cuadrilla.train.fingerprint import SHOWN_DIGITS, code_fingerprint
from cuadrilla.train.loop import environment
from cuadrilla.train.precision import choose_device
from cuadrilla.train.runtime import Outcome
from cuadrilla.train.setup import Equipment, RunContext

PATIENCE = timedelta(minutes=10)
"""Time for which ranks wait for each other: people start torchrun on one machine after the other, and rank 0 evaluates.
If the process of a rank ends, Gloo or NCCL notices at once."""
RUN, ALIKE = "run", "alike"

Facts = Mapping[str, Any]
Stopping = Callable[[Callable[[str], None]], AbstractContextManager[None]]
"""Takes a function that asks this rank to stop; returns a context in which the rank works."""


class Island:
    """A rank's view of the island. `device`: the rank's own. `cores`: the rank's part of this machine's cores."""

    def __init__(self, place: Place, store: Store) -> None:
        self.place = place
        self.device = torch.device("cpu")
        self.cores = max(1, num_cores() // place.ranks_here)
        self.backend = ("", "")
        self._store = store
        self._parameters = Layout(())

    def __str__(self) -> str:
        (backend, reason), machines = self.backend, math.ceil(self.place.num_ranks / self.place.ranks_here)
        return Message(
            "{ranks} ranks on {machines} machines, {backend}"
            if machines > 1
            else "{ranks} ranks on one machine, {backend}",
            ranks=self.place.num_ranks,
            machines=machines,
            backend=Message("{backend} ({reason})", backend=backend, reason=reason),
        )

    def start(self, config: Config, folder: Path = Path()) -> None:
        """At rank 0: send the others the settings of the run, and the folder to which its paths are relative."""
        self._store.set(RUN, json.dumps({"config": dump(config), "folder": str(folder)}))

    def run(self) -> tuple[Config, Path]:
        """The settings and the folder that rank 0 has sent. Raises EnvironmentProblem."""
        (said,) = self._read([RUN])
        return load_dumped(json.dumps(said["config"])), Path(said["folder"])

    def take_device(self, requested: str) -> None:
        """Choose this rank's device: the card with its local rank, unless `requested` is a certain card or no card.
        Raises DeviceError."""
        if requested in ("auto", "cuda") and torch.cuda.is_available():
            torch.cuda.set_device(self.place.local_rank % torch.cuda.device_count())
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = choose_device(requested)

    def equip(self, config: Config, folder: Path, *, threads: int = 0, speed: float = 1.0) -> Equipment:
        """Load model and data on this rank's device and form the group; called at every rank. `threads` 0: as many as
        `cores`. Raises as `form`."""
        self.take_device(config.train.device)
        made = equip(config, folder, device=str(self.device), cores=threads or self.cores, speed=speed)
        self.form(config, made.task, made.model, parameters=made.parameters[0])
        return made

    def form(self, config: Config, task: Task, model: nn.Module, *, parameters: Layout) -> None:
        """Open the process group, if all ranks have the same data and program. `parameters`: layout of a version.

        Raises EnvironmentProblem, and at every rank a ConfigError that names the rank which differs.
        """
        if config.sync.kind != "exact":
            raise ConfigError(
                "ranks can be one worker only where every step is exact; this run may train in windows",
                hint='set sync.kind = "exact" for the run, or start without torchrun: then each device is a worker',
            )
        mine = {
            "data": hashlib.sha256(task.data_hash().encode()).hexdigest()[:SHOWN_DIGITS],
            "torch": torch.__version__,
            **code_fingerprint(task, model),
            **({**environment(self.device), "threads": str(config.train.threads)} if config.sync.strict else {}),
        }
        self._parameters = parameters
        self.open_group(mine)

    def open_group(self, facts: Facts, *, backend: str = "auto") -> None:
        """Open the process group, if all ranks have the same `facts`. Call `take_device` first. Raises as `form`."""
        is_nccl = self.device.type == "cuda" and dist.is_nccl_available()
        card = str(torch.cuda.get_device_properties(self.device).uuid) if is_nccl else ""
        self._say({"facts": {"system": platform.system(), **facts}, "card": card})
        ranks = self._read([f"{ALIKE}/{rank}" for rank in range(self.place.num_ranks)])
        require_alike([rank["facts"] for rank in ranks])
        self.backend = choose_backend([rank["card"] for rank in ranks], asked=backend)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.backend[0] == "nccl" else "gloo",
            store=PrefixStore("group", self._store),
            rank=self.place.rank,
            world_size=self.place.num_ranks,
            timeout=PATIENCE,
        )

    def link(self, *, inner: Link | None = None, asked_to_stop: Callable[[], None] = lambda: None) -> IslandLink:
        """This rank's link for one session. The group must be formed."""
        return IslandLink(
            inner=inner,
            parameters=self._parameters,
            device=self.device if self.backend[0] == "nccl" else torch.device("cpu"),
            asked_to_stop=asked_to_stop,
        )

    def end(self, outcome: Facts | None = None) -> Facts:
        """Wait until all ranks have ended, as the store ends with rank 0 or its torchrun; return rank 0's outcome."""
        said: Facts = json.loads(broadcast_bytes(json.dumps(outcome or {}).encode() if self.place.leads else None))
        dist.all_reduce(torch.zeros(1))
        return said

    def cannot(self, error: BaseException) -> None:
        """Write why this rank cannot take part, for the ranks that wait for it. The store may have gone."""
        reason = error.message if isinstance(error, CuadrillaError) else f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):
            self._say({"error": reason})

    def _say(self, facts: Facts) -> None:
        self._store.set(f"{ALIKE}/{self.place.rank}", json.dumps(facts))

    def _read(self, keys: list[str]) -> list[Facts]:
        """Read what ranks have written. Raises EnvironmentProblem if one cannot take part or does not come."""
        try:
            self._store.wait(keys, PATIENCE)
            found = [json.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise EnvironmentProblem(
                "the other ranks did not all come: {reason}",
                reason=first_line(error),
                hint="start torchrun on every machine, with the same address, port and number of machines",
            ) from error
        for rank, theirs in enumerate(found):
            if "error" in theirs:
                problem = "rank {rank} cannot take part: {reason}"
                raise EnvironmentProblem(problem, rank=rank, reason=theirs["error"], hint="see what that machine says")
        return found


@contextmanager
def joined(place: Place) -> Iterator[Island]:
    """The island of this rank, until the end of the block. Raises LinkError if rank 0 cannot be reached."""
    try:
        store, *_ = next(rendezvous("env://", timeout=PATIENCE))
    except (RuntimeError, ValueError) as error:
        raise LinkError(
            "rank {rank} cannot reach the other ranks at MASTER_ADDR:MASTER_PORT: {reason}",
            rank=place.rank,
            reason=first_line(error),
            hint="start rank 0 first, let its port through that machine's firewall, or take another MASTER_PORT",
        ) from error
    store.set_timeout(PATIENCE)
    island = Island(place, PrefixStore(f"cuadrilla/{place.attempt}", store))
    try:
        yield island
    except BaseException as error:
        if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise LinkError(
                "the connection between the ranks broke: {reason}",
                reason=first_line(error),
                hint="see what the other ranks say; the same command goes on from the newest checkpoint; "
                "torchrun --max-restarts does it by itself",
            ) from error
        island.cannot(error)
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def lead(context: RunContext, island: Island, *, tell: Callable[[str], None]) -> Outcome:
    """At rank 0: coordinate, and train with all ranks as one worker. Raises what made the run fail."""
    island.form(context.config, context.task, context.model, parameters=context.parameters[0])
    refuse_private_buffers(context.model)
    tell(Message("island     {island}", island=island))
    links: list[IslandLink] = []

    def asked_to_stop() -> None:
        context.coordination.request_stop(Message("another rank was asked to stop"))

    def around(inner: Link) -> Link:
        links.append(island.link(inner=inner, asked_to_stop=asked_to_stop))
        return links[0]

    outcome = run_local(context, wrap_link=around, cores=island.cores)
    if not links:  # there was nothing left to train
        island.link().broadcast(Stop(reason=outcome.reason))
    island.end({**dataclasses.asdict(outcome), "last_row": finite(outcome.last_row)})
    return outcome


def follow(
    island: Island,
    own: tuple[Config, Path] | None = None,
    *,
    threads: int = 0,
    stopping: Stopping = lambda _ask: nullcontext(),
) -> Facts:
    """At any other rank: work until rank 0 says that the run has ended; return the outcome that rank 0 sends.

    `own`: this rank's settings, and the folder to which their paths are relative; None: those of rank 0, on the same
    machine. Raises EnvironmentProblem, ConfigError.
    """
    config, folder = island.run()
    if own is not None:
        mine, folder = own
        train = config.train.model_copy(update={"device": mine.train.device, "threads": mine.train.threads})
        config = config.model_copy(update={"train": train, "data": mine.data, "task": mine.task})
    equipment, link = island.equip(config, folder, threads=threads), island.link()
    with stopping(lambda _reason: link.ask_to_stop()):
        while equipment.work(link).again:
            link = island.link()
    return island.end()


def choose_backend(cards: Sequence[str], *, asked: str = "auto") -> tuple[str, str]:
    """Backend of the process group, and why. `cards`: the card of each rank, "" where NCCL cannot be used. Raises
    EnvironmentProblem if the backend that was `asked` for cannot be used."""
    shared = next((card for card, count in Counter(cards).items() if card and count > 1), "")
    if not all(cards):
        found = "gloo", Message("not every rank has a CUDA device")
    elif shared:
        ranks = ", ".join(str(rank) for rank, card in enumerate(cards) if card == shared)
        found = "gloo", Message("ranks {ranks} share a card, and NCCL wants one for each", ranks=ranks)
    else:
        found = "nccl", Message("each rank has a CUDA device of its own")
    if asked == "nccl" != found[0]:
        hint = "one process for each card, or --backend gloo"
        raise EnvironmentProblem("nccl cannot be used: {reason}", reason=found[1], hint=hint)
    return found if asked in ("auto", found[0]) else (asked, Message("asked for"))


def require_alike(ranks: Sequence[Facts]) -> None:
    """Raises ConfigError for the first rank that differs from rank 0."""
    ours = ranks[0]
    for rank, theirs in enumerate(ranks):
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                raise ConfigError(
                    "{what} differs: {theirs} at rank {rank}, {ours} at rank 0",
                    rank=rank,
                    what=key,
                    theirs=theirs.get(key, ""),
                    ours=ours.get(key, ""),
                    hint="the same data folder, code and versions on every machine; those of several systems can "
                    "be a crew: cuadrilla up RUN on one, cuadrilla join on the others",
                )
