"""An island: ranks that torchrun has started and that are one worker together, each on a device of its own.

Rank 0 either keeps the run directory and coordinates, as a single process does, or it joins a crew and fetches what the
run needs. The other ranks bring their device and the data. They write nothing and get the weights from rank 0.

Invariants
* All ranks have the settings of rank 0's run file. Only paths, device and threads are each rank's own.
* The ranks form their group first, over Gloo, if all have the same system. Then they compare what else must be equal
  (data, program). A rank that differs is named before any tensor moves.
* When a rank dies or fails, all others end. torchrun starts them again (`--max-restarts`), and the run goes on from its
  newest checkpoint. When the connection to a crew breaks, only the session ends: all ranks keep their model and data.
"""

import dataclasses
import hashlib
import json
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]  # exported without saying so

from cuadrilla.config import Config
from cuadrilla.crew.equipment import equip_worker, num_cores
from cuadrilla.crew.local import run_local
from cuadrilla.errors import ConfigError, EnvironmentProblem, LinkError
from cuadrilla.host.torchrun import Place
from cuadrilla.link.base import Link, Stop
from cuadrilla.link.island import IslandLink, broadcast_bytes, gathered
from cuadrilla.link.wire import Layout
from cuadrilla.messages import Message
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

Facts = Mapping[str, Any]
Stopping = Callable[[Callable[[str], None]], AbstractContextManager[None]]
"""Takes a function that asks this rank to stop; returns a context in which the rank works."""


class Island:
    """A rank's view of the island, whose group is open. `device`: the rank's own. `cores`: the rank's part of this
    machine's cores."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.device = torch.device("cpu")
        self.cores = max(1, num_cores() // place.ranks_here)
        self.backend = ("", "")
        self._parameters = Layout(())

    def __str__(self) -> str:
        (backend, reason), ranks = self.backend, self.place.num_ranks
        return Message("{ranks} ranks, {backend} ({reason})", ranks=ranks, backend=backend, reason=reason)

    def share(self, config: Config | None = None, folder: Path = Path()) -> tuple[Config, Path]:
        """The run's settings, and the folder to which its paths are relative. Rank 0 passes them in; all get them."""
        mine = None if config is None else json.dumps({"config": dump(config), "folder": str(folder)}).encode()
        said = json.loads(broadcast_bytes(mine))
        return load_dumped(json.dumps(said["config"])), Path(said["folder"])

    def take_device(self, requested: str) -> None:
        """Choose this rank's device: the card with its local rank, unless `requested` is a certain card or no card.
        Raises DeviceError."""
        if requested in ("auto", "cuda") and torch.cuda.is_available():
            torch.cuda.set_device(self.place.local_rank % torch.cuda.device_count())
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.device = choose_device(requested)

    def equip(self, config: Config, folder: Path, *, threads: int = 0) -> Equipment:
        """Load model and data on this rank's device and compare them; called at every rank. `threads` 0: as many as
        `cores`. Raises as `compare`."""
        self.take_device(config.train.device)
        made = equip_worker(config, folder, device=str(self.device), cores=threads or self.cores)
        self.compare(made)
        return made

    def compare(self, equipment: Equipment) -> None:
        """Check that all ranks have the same data and program. Raises at every rank a ConfigError that names the rank
        which differs."""
        config, task = equipment.config, equipment.task
        if config.sync.kind != "exact":
            raise ConfigError(
                "ranks can be one worker only where every step is exact; this run may train in windows",
                hint='set sync.kind = "exact" for the run, or start without torchrun: then each device is a worker',
            )
        mine = {
            "data": hashlib.sha256(task.data_hash().encode()).hexdigest()[:SHOWN_DIGITS],
            "torch": torch.__version__,
            **code_fingerprint(task, equipment.model),
            **({**environment(self.device), "threads": str(config.train.threads)} if config.sync.strict else {}),
        }
        require_alike(gathered(mine))
        self._parameters = equipment.parameters[0]
        self.choose_backend()

    def choose_backend(self, *, asked: str = "auto") -> None:
        """Choose how tensors travel. Call `take_device` first. Raises as `backend_for`."""
        is_nccl = self.device.type == "cuda" and dist.is_nccl_available()
        card = str(torch.cuda.get_device_properties(self.device).uuid) if is_nccl else ""
        self.backend = backend_for(gathered(card), asked=asked)

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


@contextmanager
def joined(place: Place) -> Iterator[Island]:
    """The island of this rank, until the end of the block. Raises LinkError if another rank cannot be reached or fails,
    ConfigError if one has another system."""
    try:
        _form_group(place)
    except (RuntimeError, ValueError) as error:
        raise LinkError(
            "rank {rank} cannot reach the other ranks at MASTER_ADDR:MASTER_PORT: {reason}",
            rank=place.rank,
            reason=str(error).partition("\n")[0],  # torch adds a trace of its own code
            hint="start torchrun on every machine, with the same address, port and number of machines, rank 0 first; "
            "let its port through that machine's firewall, or take another MASTER_PORT",
        ) from error
    try:
        yield Island(place)
    except RuntimeError as error:
        if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise LinkError(
            "the connection between the ranks broke: {reason}",
            reason=str(error).partition("\n")[0],
            hint="see what the other ranks say; the same command goes on from the newest checkpoint; "
            "torchrun --max-restarts does it by itself",
        ) from error
    finally:
        dist.destroy_process_group()


def _form_group(place: Place) -> None:
    """Gloo cannot connect different systems, so these are compared before. Raises ConfigError, RuntimeError."""
    store, *_ = next(rendezvous("env://", timeout=PATIENCE))
    store.set_timeout(PATIENCE)
    store = PrefixStore(f"cuadrilla/{place.attempt}", store)
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    store.set(str(place.rank), json.dumps({"system": platform.system(), "nccl": has_nccl}))
    ranks = [json.loads(store.get(str(rank))) for rank in range(place.num_ranks)]
    require_alike([{"system": rank["system"]} for rank in ranks])
    backend = "cpu:gloo,cuda:nccl" if all(rank["nccl"] for rank in ranks) else "gloo"
    group = PrefixStore("group", store)
    dist.init_process_group(backend, store=group, rank=place.rank, world_size=place.num_ranks, timeout=PATIENCE)


def lead(context: RunContext, island: Island, *, tell: Callable[[str], None]) -> Outcome:
    """At rank 0: coordinate, and train with all ranks as one worker. Raises what made the run fail."""
    island.compare(context)
    refuse_private_buffers(context.model)
    tell(Message("island     {island}", island=island))
    asked = Message("another rank was asked to stop")
    link = island.link(asked_to_stop=lambda: context.coordination.request_stop(asked))

    def around(inner: Link) -> Link:
        link.inner = inner
        return link

    outcome = run_local(context, wrap_link=around, cores=island.cores)
    if link.inner is None:  # there was nothing left to train
        link.broadcast(Stop(reason=outcome.reason))
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
    machine. Raises ConfigError, DeviceError.
    """
    config, folder = island.share()
    if own is not None:
        mine, folder = own
        train = config.train.model_copy(update={"device": mine.train.device, "threads": mine.train.threads})
        config = config.model_copy(update={"train": train, "data": mine.data, "task": mine.task})
    equipment, link = island.equip(config, folder, threads=threads), island.link()
    with stopping(lambda _reason: link.ask_to_stop()):
        while equipment.work(link).again:
            link = island.link()
    return island.end()


def backend_for(cards: Sequence[str], *, asked: str = "auto") -> tuple[str, str]:
    """Backend for tensors, and why. `cards`: the card of each rank, "" where NCCL cannot be used. Raises
    EnvironmentProblem if the backend that was `asked` for cannot be used."""
    if all(cards) and len(set(cards)) == len(cards):
        found = "nccl", Message("each rank has a CUDA device of its own")
    else:
        found = "gloo", Message("not every rank has a CUDA device of its own")
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
