"""An island: the ranks that torchrun has started train one run as one worker, each on a device of its own.

Rank 0 keeps the run directory and coordinates, as it would alone, or has the connection to a crew, and fetches what its
run needs; the others bring their device and the data, write nothing and get the weights from rank 0.

Invariants
* What all must agree on (operating system, backend, settings, data, program) is said by each in torch's own store
  before any tensor moves, so that whoever does not fit is named and not waited for; so is why a rank failed.
* When one is gone all others end, torchrun starts them again (`--max-restarts`), and the run goes on from its newest
  checkpoint. A break of the connection to a crew ends a session at all ranks, and the next one begins with what they
  have loaded.
"""

import dataclasses
import hashlib
import json
import logging
import os
import platform
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]  # exported without saying so

from cuadrilla.config import Config, LocalEngine
from cuadrilla.crew.equipment import Equipment, equip, num_cores
from cuadrilla.crew.local import run_local
from cuadrilla.crew.pulse import Pulse
from cuadrilla.errors import ConfigError, CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.host.container import read_text
from cuadrilla.host.torchrun import Place
from cuadrilla.link.base import Link, Stop
from cuadrilla.link.island import IslandBroken, IslandLink, broken, first_line
from cuadrilla.link.wire import Layout
from cuadrilla.log import TALK
from cuadrilla.messages import Message
from cuadrilla.model.task import Task
from cuadrilla.plan.decide import filled
from cuadrilla.runfile import dump, leaves, load_dumped
from cuadrilla.sync.statistics import refuse_private_buffers
from cuadrilla.train.coordinate import Outcome
from cuadrilla.train.fingerprint import code_fingerprint
from cuadrilla.train.loop import environment
from cuadrilla.train.precision import choose_device
from cuadrilla.train.setup import FREE_ON_RESUME, RunContext
from cuadrilla.train.sinks import finite

START_MINUTES = 10
"""People start torchrun on one machine after the other."""
PATIENCE_MINUTES = 30
"""Ranks wait for each other so long: while rank 0 evaluates, too. One whose process ends is missed at once, by Gloo or
NCCL, or within a minute (`pulse.py`)."""
SHOWN_DIGITS = 12
CREW, PLACE, RUN, OUTCOME, END = SUBJECTS = ("crew", "place", "run", "outcome", "end")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

log = logging.getLogger(__name__)

Facts = Mapping[str, Any]
Stopping = Callable[[Callable[[str], None]], AbstractContextManager[None]]


@dataclass(frozen=True)
class Backend:
    """What moves tensors between ranks: nccl or gloo, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return Message("{backend} ({reason})", backend=self.name, reason=self.reason)


class Island:
    """A rank's view of all of them. `device`: its own; `cores`: its part of this machine's."""

    def __init__(self, place: Place, store: Store) -> None:
        self.place = place
        self._store = store
        self._num_machines = 0
        self.device = torch.device("cpu")
        self.cores = 1
        self.backend = Backend("", "")
        self._num_links = 0
        self._pulse: Pulse | None = None

    def __str__(self) -> str:
        return Message(
            "{ranks} ranks on {machines} machines, {backend}"
            if self._num_machines > 1
            else "{ranks} ranks on one machine, {backend}",
            ranks=self.place.num_ranks,
            machines=self._num_machines,
            backend=self.backend,
        )

    def form(self, *, device: str = "auto", backend: str = "auto", settled: Facts | None = None) -> Facts:
        """Agree on a backend and open the process group; `device` as `train.device` has it.

        `settled`: what rank 0 alone knows, which all get. Raises EnvironmentProblem for ranks that cannot be in one
        group, DeviceError, LinkError.
        """
        self.device = _own_device(device, self.place)
        card = _card(self.device) if self.device.type == "cuda" and dist.is_nccl_available() else ""
        mine = {"system": platform.system(), "machine": own_machine(), "card": card, "settled": settled or {}}
        own = self._store.clone()  # type: ignore[attr-defined]  # torch does not say so
        self._pulse = Pulse(own, rank=self.place.rank, num_ranks=self.place.num_ranks)
        ranks = self.agree(PLACE, mine, minutes=START_MINUTES)
        self._pulse.watch()
        require_one_system([rank["system"] for rank in ranks])
        machines = Counter(rank["machine"] for rank in ranks)
        self._num_machines = len(machines)
        self.cores = max(1, num_cores() // machines[own_machine()])
        self.backend = choose_backend([rank["card"] for rank in ranks], asked=backend)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.backend.name == "nccl" else "gloo",
            store=PrefixStore("group", self._store),
            rank=self.place.rank,
            world_size=self.place.num_ranks,
            timeout=timedelta(minutes=PATIENCE_MINUTES),
        )
        found: Facts = ranks[0]["settled"]
        return found

    def leave(self) -> None:
        """Nobody misses this rank from now on."""
        if self._pulse is not None:
            self._pulse.end()

    def agree(self, subject: str, facts: Facts, *, minutes: float = PATIENCE_MINUTES) -> list[Facts]:
        """What each rank says about a subject, rank 0 first. Raises IslandBroken if one has failed or does not come."""
        self._store.set(_key(subject, self.place.rank), json.dumps(facts))
        keys = [_key(subject, rank) for rank in range(self.place.num_ranks)]
        try:
            self._store.wait(keys, timedelta(minutes=minutes))
            found = [json.loads(self._store.get(key)) for key in keys]
        except RuntimeError as error:
            raise IslandBroken(
                "the other ranks did not all come: {reason}",
                reason=first_line(error),
                hint="start torchrun on every machine, with the same address, port and number of machines",
            ) from error
        for rank, theirs in enumerate(found):
            if "error" in theirs and rank != self.place.rank:
                problem = "rank {rank} cannot take part: {reason}"
                raise IslandBroken(problem, rank=rank, reason=theirs["error"], hint="see what that machine says")
        return found

    def compare(self, config: Config, task: Task, model: nn.Module) -> None:
        """Raises ConfigError, at every rank, unless all train the same with the same program."""
        mine = {
            "settings": settings_hash(config),
            "data": hashlib.sha256(task.data_hash().encode()).hexdigest()[:SHOWN_DIGITS],
            "torch": torch.__version__,
            **code_fingerprint(task, model),
            **({**environment(self.device), "threads": str(config.train.threads)} if config.sync.strict else {}),
        }
        require_alike(self.agree(RUN, mine))

    def failed(self, error: BaseException) -> None:
        """Leave word why this rank ends, for those who wait."""
        if isinstance(error, IslandBroken):  # another rank failed first
            return
        reason = error.message if isinstance(error, CuadrillaError) else f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):  # the store went with the rank, or the torchrun, that kept it
            for subject in SUBJECTS:
                self._store.set(_key(subject, self.place.rank), json.dumps({"error": reason}))

    def why_broken(self) -> str:
        """What a rank that failed has said; "" if it had no time to say anything."""
        with suppress(RuntimeError):
            for rank in range(self.place.num_ranks):
                if self._store.check([_key(END, rank)]):
                    said = json.loads(self._store.get(_key(END, rank))).get("error")
                    if said:
                        return Message("rank {rank}: {reason}", rank=rank, reason=said)
        return ""

    def share_work(self, work: tuple[Config, Path] | None) -> tuple[Config, Path]:
        """The run that rank 0 has got from a crew: its settings, and the folder that their paths are relative to.
        Raises EnvironmentProblem."""
        said = {"config": dump(work[0]), "folder": str(work[1])} if work else {}
        ranks = self.agree(CREW, {"machine": own_machine(), **said})
        machines = {rank["machine"] for rank in ranks}
        if len(machines) > 1:  # rank 0 has the machine's key, and what it has fetched is there
            raise EnvironmentProblem(
                "the ranks that join a crew as one worker are on one machine, and these are on {number}",
                number=len(machines),
                hint="start torchrun --standalone with `cuadrilla join` on each machine: each is a worker of its own",
            )
        return load_dumped(json.dumps(ranks[0]["config"])), Path(ranks[0]["folder"])

    def link(
        self,
        parameters: Layout,
        *,
        inner: Link | None = None,
        farewell: Callable[[], Stop | None] = lambda: None,
        asked_to_stop: Callable[[], None] = lambda: None,
    ) -> IslandLink:
        """This rank's, once the group is formed: for one session, in which numbers of leases are used once."""
        self._num_links += 1
        return IslandLink(
            inner=inner,
            farewell=farewell,
            parameters=parameters,
            place=self.device if self.backend.name == "nccl" else torch.device("cpu"),
            store=PrefixStore(f"link/{self._num_links}", self._store),
            asked_to_stop=asked_to_stop,
            why_broken=self.why_broken,
        )


@contextmanager
def joined(place: Place) -> Iterator[Island]:
    """Until all ranks are done. Raises LinkError if rank 0 cannot be reached."""
    patience = timedelta(minutes=PATIENCE_MINUTES)
    try:
        store, *_ = next(rendezvous("env://", timeout=timedelta(minutes=START_MINUTES)))
    except (RuntimeError, ValueError) as error:
        if place.leads and "EADDRINUSE" in str(error):
            raise LinkError(
                "MASTER_PORT={port} is in use on this machine",
                port=os.environ.get("MASTER_PORT", ""),
                hint="end what listens there, or take another MASTER_PORT on all machines",
            ) from error
        raise LinkError(
            "rank {rank} does not reach MASTER_ADDR:MASTER_PORT: {reason}",
            rank=place.rank,
            reason=first_line(error),
            hint="start rank 0 first, and let its port through that machine's firewall",
        ) from error
    store.set_timeout(patience)
    island = Island(place, PrefixStore(f"cuadrilla/{place.attempt}", store))
    try:
        yield island
        island.agree(END, {})  # the store goes with rank 0, or with its torchrun
    except BaseException as error:
        if isinstance(error, RuntimeError) and of_the_group(error):
            raise broken(island.why_broken() or first_line(error)) from error
        island.failed(error)
        raise
    finally:
        island.leave()
        if dist.is_initialized():
            dist.destroy_process_group()


def lead(context: RunContext, island: Island, *, config: Config, tell: Callable[[str], None]) -> Outcome:
    """Rank 0: coordinate, and work with all others as one worker. Raises whatever made the run fail.

    `config`: as all ranks have it; that of the context has what followed from the text.
    """
    assert not context.strategy.moves_weights, "its contributions are no sums"
    island.compare(config, context.task, context.model)
    refuse_private_buffers(context.model)
    tell(Message("island     {island}", island=island))
    parameters = Layout.of(context.strategy.version_like(context.model))
    told: list[IslandLink] = []

    def asked_to_stop() -> None:
        context.coordination.request_stop(Message("another rank was asked to stop"))

    def around(_worker: str, inner: Link) -> Link:
        told.append(island.link(parameters, inner=inner, asked_to_stop=asked_to_stop))
        return told[0]

    outcome = run_local(context, wrap_link=around, tell=tell, cores=island.cores)
    if not told:  # there was nothing left to train
        island.link(parameters).hand_on(Stop(reason=outcome.reason))
    island.agree(OUTCOME, {**dataclasses.asdict(outcome), "last_row": finite(outcome.last_row)})
    return outcome


def follow(config: Config, folder: Path, island: Island, *, stopping: Stopping) -> Outcome:
    """Any other rank: work until rank 0 says stop. How the run ended, as rank 0 has it."""
    config = filled(config, island.form(device=config.train.device))
    equipment = _equipped(island, config, folder)
    link = island.link(equipment.parameters)
    with stopping(lambda _reason: link.ask_to_stop()):
        equipment.work(link)
    return Outcome(**island.agree(OUTCOME, {})[0])


class Ranks:
    """All of them as a worker of a crew, at rank 0. `threads` 0: this rank's part of the machine's cores.
    `everywhere`: each rank has fetched the run itself, on machines of its own.
    """

    def __init__(self, island: Island, *, threads: int = 0, everywhere: bool = False) -> None:
        self._island, self._threads, self._everywhere = island, threads, everywhere
        self._equipment: Equipment | None = None

    def equip(self, config: Config, folder: Path, *, speed: float) -> Equipment:
        if not self._everywhere:
            self._island.share_work((config, folder))
        self._island.form(device=config.train.device)
        self._equipment = _equipped(self._island, config, folder, threads=self._threads, speed=speed)
        log.info("one worker of %s", self._island, extra=TALK)
        return self._equipment

    def around(self, link: Link, *, farewell: Callable[[], Stop | None]) -> Link:
        assert self._equipment is not None, "there is a session before there is something to train"
        return self._island.link(self._equipment.parameters, inner=link, farewell=farewell)


def follow_for_crew(island: Island, *, threads: int = 0, found: tuple[Config, Path] | None = None) -> str:
    """Any other rank: work until rank 0 says that the run has ended; why. `found`: what it has fetched itself. Raises
    IslandBroken."""
    config, folder = found or island.share_work(None)
    island.form(device=config.train.device)
    equipment = _equipped(island, config, folder, threads=threads)
    while (stop := equipment.work(island.link(equipment.parameters))).again:
        pass
    return Message(stop.reason)


def _equipped(island: Island, config: Config, folder: Path, *, threads: int = 0, speed: float = 1.0) -> Equipment:
    """At every rank of a group the same, on its own device. Raises ConfigError unless it is."""
    made = equip(config, folder, device=str(island.device), cores=threads or island.cores, speed=speed)
    if made.strategy.moves_weights:
        raise ConfigError(
            "several ranks cannot be one worker of this run: its workers answer with weights",
            hint="join without torchrun: each device is a worker then",
        )
    island.compare(config, made.task, made.model)
    return made


def require_one_worker(config: Config, place: Place) -> None:
    """Raises ConfigError for a run that several ranks cannot train as one worker."""
    engine = config.engine
    if not isinstance(engine, LocalEngine) or engine.workers != [1.0]:
        raise ConfigError(
            "torchrun has started {ranks} ranks, which are one worker together, and this run asks for others",
            ranks=place.num_ranks,
            hint='leave engine.kind at "local" and engine.workers at [1.0], or start it without torchrun',
        )


def require_one_system(systems: Sequence[str]) -> None:
    """Raises EnvironmentProblem where neither Gloo nor NCCL works."""
    if len(set(systems)) > 1:
        raise EnvironmentProblem(
            "the ranks run under {systems}, which cannot be in one process group",
            systems=", ".join(sorted(set(systems))),
            hint="a crew can have them all: cuadrilla up RUN on one machine, cuadrilla join on the others",
        )


def choose_backend(cards: Sequence[str], *, asked: str = "auto") -> Backend:
    """By the card of each rank, which has an empty name where NCCL cannot be used. Raises EnvironmentProblem."""
    shared = next((card for card, count in Counter(cards).items() if card and count > 1), "")
    if not all(cards):
        found = Backend("gloo", Message("not every rank has a CUDA device"))
    elif shared:
        ranks = ", ".join(str(rank) for rank, card in enumerate(cards) if card == shared)
        found = Backend("gloo", Message("ranks {ranks} share a card, and NCCL wants one for each", ranks=ranks))
    else:
        found = Backend("nccl", Message("each rank has a CUDA device of its own"))
    if asked == "nccl" != found.name:
        hint = "one process for each card, or --backend gloo"
        raise EnvironmentProblem("nccl cannot be used: {reason}", reason=found.reason, hint=hint)
    return found if asked in ("auto", found.name) else Backend(asked, Message("asked for"))


def require_alike(ranks: Sequence[Facts]) -> None:
    """Raises ConfigError for the first rank that differs from rank 0."""
    ours = ranks[0]
    for rank, theirs in enumerate(ranks):
        for key in sorted(ours.keys() | theirs.keys()):
            if ours.get(key) != theirs.get(key):
                raise ConfigError(
                    "rank {rank} has other {what} than rank 0: {theirs} and {ours}",
                    rank=rank,
                    what=key,
                    theirs=theirs.get(key, ""),
                    ours=ours.get(key, ""),
                    hint="the same run file, data folder and versions on every machine",
                )


def settings_hash(config: Config) -> str:
    """Of what decides the result; where things lie, and what is kept, may differ between machines."""
    deciding = {key: value for key, value in leaves(dump(config)).items() if not key.startswith(FREE_ON_RESUME)}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:SHOWN_DIGITS]


def of_the_group(error: RuntimeError) -> bool:
    """Whether it is about another rank: torch has no class of its own for what Gloo says."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def own_machine() -> str:
    """The same for all processes of this one only."""
    return f"{platform.node()} {read_text(BOOT_ID)}"


def _own_device(requested: str, place: Place) -> torch.device:
    """The card with this rank's number on its machine, unless a certain one, or none, is asked for."""
    if requested in ("auto", "cuda") and torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return choose_device(requested)


def _card(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)


def _key(subject: str, rank: int) -> str:
    return f"{subject}/{rank}"
