"""The crew's verbs: `up` coordinates, `join` works for a coordinator, and who is let in or sent away.

An invite is read from a hidden prompt, from standard input or from a file, never from an argument: arguments are seen
by everybody on a machine.
"""

import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.config import RunFile, Sets
from cuadrilla.cli.output import ask, emit, emit_json, keep_answer_apart, options, say
from cuadrilla.cli.parent import pid_to_signal, under_a_parent
from cuadrilla.cli.pause import LowPriority, MaxMemory, OnPower, WhileIdle, forget, manners_of
from cuadrilla.cli.stopping import stopping
from cuadrilla.cli.train import report_outcome, say_kept, train_and_show
from cuadrilla.config import Config, CrewEngine
from cuadrilla.engines.supervise import end_with
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, EnvironmentProblem, LinkError, ResourceError
from cuadrilla.home import Home, Joined
from cuadrilla.host.torchrun import Place, find_place
from cuadrilla.link.address import Address, beside_a_vpn, dialled_address, lan_address, listening_address
from cuadrilla.link.names import OWN_WORKER
from cuadrilla.log import set_up_logging, tear_down_logging
from cuadrilla.messages import Message, language, shown
from cuadrilla.rundir import FolderLock, RunDir, make_private, storage_errors, write_json
from cuadrilla.runfile import read_run_config, read_run_file

if TYPE_CHECKING:
    from cuadrilla.engines.courtesy import Manners
    from cuadrilla.engines.crew import OpenCrew
    from cuadrilla.engines.devices import Devices
    from cuadrilla.engines.island import Island
    from cuadrilla.engines.ray.node import Consent, Ways
    from cuadrilla.link.offer import RunConnection, RunDescription

RAY = Message("Everybody in this Ray cluster can run programs as you on this machine.")
RAY_NODE_HELP = (
    "A node for this run's Ray cluster, if its owner joins with --ray."
    " Everybody in this Ray cluster can run programs as you on this machine."
)
UNFIT_SECONDS = 30.0
RAY_HELP = (
    "If the coordinator offers Ray, use it. Everybody in this Ray cluster can run programs as you on this "
    "machine. With neither option, you are asked."
)
DeviceList = Annotated[
    str,
    typer.Option(
        metavar="auto|DEVICE,…",
        help="Devices to work with, one process for each: cuda:0,cuda:1,cpu (default: each accelerator, and "
        "the processor where it helps).",
    ),
]
ListenAddress = Annotated[
    str,
    typer.Option(metavar="ADDRESS[:PORT]", help="This machine's own address to listen on (default: on its LAN)."),
]
DialledAddress = Annotated[
    str,
    typer.Option(
        metavar="HOST[:PORT]", help="The address that other machines dial, if it is not the one to listen on."
    ),
]
Uses = Annotated[int, typer.Option("--uses", min=1, max=64, help="How many machines may join with the invite.")]


def up(
    run: RunFile = Path("run.toml"),
    sets: Sets = None,
    listen: ListenAddress = "",
    address: DialledAddress = "",
    uses: Uses = 1,
    devices: DeviceList = "",
    standby: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A node that may copy this crew's keys and run, with `cuadrilla standby`."),
    ] = None,
    ray_node: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=RAY_NODE_HELP),
    ] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume with another learning rate, batch or length.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Coordinate even if a standby has taken over the crew.")
    ] = False,
) -> None:
    """Coordinate a crew on this machine and train; prints what to type on the other machines."""
    listens = listening_address(listen)
    dialled = str(dialled_address(address, port=listens.port)) if address else ""
    chosen = [f'engine.listen="{listens}"', *([f'engine.devices="{devices}"'] if devices else [])]
    resolved = read_run_file(run, sets=[*(sets or []), *chosen], processes=True)
    say_kept(resolved)
    assert isinstance(resolved.config.engine, CrewEngine)
    ray_nodes = frozenset(ray_node or [])
    check_transports(resolved.config.engine, listen=listen, ray_nodes=ray_nodes)
    folder = RunDir((run if run.is_dir() else run.parent).resolve())
    home = Home.of_user()
    make_private(home.crew)

    def opened(crew: "OpenCrew") -> None:
        show_opened(home, crew, folder=folder.path, dialled=dialled, uses=uses, ray_nodes=ray_nodes)

    if not options.supervised and not force:
        refuse_if_promoted(home)
    under_a_parent(folder, listen=str(listens))
    from cuadrilla.engines.crew import Opening

    with FolderLock(home.crew / "lock", purpose="cuadrilla up"):  # one coordinator has the keys and gets the invites
        try:
            opening = Opening(
                home=home,
                opened=opened,
                moved=partial(show_moved, home, dialled=dialled),
                standbys=frozenset(standby or []),
                ray_nodes=ray_nodes,
                listener=options.listener,
            )
            outcome = train_and_show(resolved, folder, allow_changes=allow_changes, opening=opening)
        finally:
            home.open_file.unlink(missing_ok=True)
    report_outcome(outcome, folder)


def show_opened(
    home: Home, crew: "OpenCrew", *, folder: Path, dialled: str, uses: int, ray_nodes: frozenset[str] = frozenset()
) -> None:
    """What others type and paste to come into a crew, which coordinates what is in `folder`."""
    found = {"key_hash": crew.key_hash.hex(), "pid": pid_to_signal(), "run": str(folder)}
    write_json(home.open_file, {"address": dialled or crew.address, **found})
    say(
        "crew       {dialled} (listens on {address}); on another machine: cuadrilla join"
        if dialled
        else "crew       {address}; on another machine: cuadrilla join",
        dialled=dialled,
        address=crew.address,
    )
    if ray_nodes:
        say(
            "Ray        for {nodes} with `cuadrilla join --ray` there. {ray}",
            nodes=", ".join(sorted(ray_nodes)),
            ray=RAY,
        )
    _show_reachability(home, listens=crew.address, dialled=dialled)
    _show_invite(home, uses=uses)


def show_moved(home: Home, address: str, *, dialled: str) -> None:
    """What others type once this machine has another address."""
    say("network    this machine has another address: the crew is at {address} now", address=address)
    if dialled:
        say("network    others dial {dialled}: check that it still leads here", dialled=dialled)
        return
    write_json(home.open_file, {**home.open_crew(), "address": address})
    say("crew       {address}; on the machines that are in the crew: cuadrilla join {address}", address=address)


def refuse_if_promoted(home: Home) -> None:
    """Two coordinators would train two models. Raises LinkError."""
    if not home.standbys_file.exists():
        return  # before anything loads torch, which the parent does without

    from cuadrilla.engines.standby import taken_over

    if address := taken_over(home):
        raise LinkError(
            "a standby has taken over this crew and coordinates it at {address}",
            address=address,
            hint="work for it: get an invite there, then `cuadrilla join --new` here; or, to continue here "
            "anyway, stop it there and add --force",
        )


def check_transports(engine: CrewEngine, *, listen: str, ray_nodes: frozenset[str]) -> None:
    """Machines join over the crew link; Ray opens many ports, so its network has to be named. Raises CuadrillaError."""
    from cuadrilla.engines.ray.cluster import why_not
    from cuadrilla.link.invite import check_node_name

    if not engine.uses_link:
        raise ConfigError(
            'machines join over the crew link, which engine.kind = "ray" does not open', hint='use engine.kind = "auto"'
        )
    if not ray_nodes:
        return
    for name in ray_nodes:
        check_node_name(name)
    if not engine.uses_ray:
        raise ConfigError(
            '--ray-node: engine.kind = "crew" uses no Ray', hint="write --set 'engine.kind=\"auto\"', or no --ray-node"
        )
    if engine.ray_address:
        raise ConfigError(
            "--ray-node: this run did not start the cluster at {address}, so it cannot give away its token",
            address=engine.ray_address,
            hint="only its owner can add machines, with `ray start --address` on them",
        )
    if reason := why_not():
        raise EnvironmentProblem("{reason}", reason=reason, hint="without --ray-node all machines use the crew link")
    if not listen:
        raise ConfigError(
            "Ray opens ports on the network of this machine: name it",
            address=lan_address(),
            hint="--listen {address}, for example",
        )


def _show_reachability(home: Home, *, listens: str, dialled: str) -> None:
    """Say so if nobody on the network could dial `listens`, and what to do about it."""
    from cuadrilla.host.reachability import advice, read_reachability
    from cuadrilla.link.nodes import AllowList

    here = Address.parse(listens)
    if here.is_loopback:
        return  # a crew of this machine alone
    others = sorted(name for name in AllowList(home.nodes).nodes() if not OWN_WORKER.fullmatch(name))
    known = [Address.parse(crew.address).host for crew in home.joined()]
    found = read_reachability(here.host, system=platform.system())
    told = advice(found, listens=listens, dialled=dialled, others=[*known, *others])
    for line in told if dialled else [*told, *beside_a_vpn(here)]:
        say("network    {line}", line=line)


def invite(uses: Uses = 1) -> None:
    """Make an invite for the crew that runs on this machine: good for 15 minutes."""
    _show_invite(Home.of_user(), uses=uses)


def _show_invite(home: Home, *, uses: int) -> None:
    """The invite goes to standard output: it can be piped to where it is needed."""
    from cuadrilla.link.invite import Invite, hash_secret, new_secret

    crew = home.open_crew()
    secret = new_secret()
    home.leave_invite(hash_secret(secret), uses=uses)
    address = Address.parse(str(crew["address"]))
    made = Invite(address=address, key_hash=bytes.fromhex(crew["key_hash"]), secret=secret)
    say(
        "invite     for {uses} machines, 15 minutes; `cuadrilla invite` makes another:"
        if uses > 1
        else "invite     for {uses} machine, 15 minutes; `cuadrilla invite` makes another:",
        uses=uses,
    )
    if options.json:
        emit_json({"invite": str(made), "uses": uses})
    else:
        emit("{invite}", invite=made)


def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help="Default: the address in the invite.")] = "",
    name: Annotated[
        str, typer.Option(help="This machine's name in the crew (default: its host name, numbered if it is taken).")
    ] = "",
    invite_file: Annotated[Path | None, typer.Option(help="Read the invite from a file.")] = None,
    new: Annotated[
        bool, typer.Option("--new", help="Ask for an invite even if this machine has joined before.")
    ] = False,
    ray: Annotated[
        bool | None,
        typer.Option("--ray/--no-ray", help=RAY_HELP),
    ] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads to compute with (0: all cores).")] = 0,
    devices: DeviceList = "",
    data: Annotated[
        Path | None, typer.Option(help="The run's prepared data, if this machine has it; nothing is fetched then.")
    ] = None,
    while_idle: WhileIdle = False,
    on_power: OnPower = False,
    low_priority: LowPriority = False,
    max_memory: MaxMemory = "",
) -> None:
    """Work for a crew's coordinator, before or during a run. Asks for the invite the first time.

    Started by torchrun on one machine, all its processes are one worker.
    """
    from cuadrilla.engines.devices import Devices
    from cuadrilla.engines.enrol import enrol

    computes_with = Devices(devices, threads=threads)
    computes_with.require_named()
    manners = manners_of(while_idle=while_idle, on_power=on_power, low_priority=low_priority, max_memory=max_memory)
    with _island(find_place(), devices=devices, ray=ray) as island:
        if island is not None and not island.place.leads:
            from cuadrilla.engines.island_crew import follow_for_crew

            set_up_logging(None, worker=f"rank-{island.place.rank}", verbose=options.debug)
            follow_for_crew(island, threads=threads)
            return
        home = Home.of_user()
        crew = None if new or invite_file else home.find_crew(address)
        if crew is None:
            crew = enrol(home, read_invite(invite_file), address=address, name=name, report=say)
        set_up_logging(None, worker=crew.name, verbose=options.debug)
        known = _Known(home, crew)
        ways = _ways(
            known, consent=_consent(ray), devices=computes_with, data=data, manners=manners, apart=bool(island)
        )
        reason = _work(known, ways, island=island, threads=threads, data=data)
    say("done       {reason}", reason=reason)


@contextmanager
def _island(place: Place | None, *, devices: str, ray: bool | None) -> "Iterator[Island | None]":
    """All ranks, where torchrun has started several."""
    if place is None:
        yield None
        return
    if devices or ray:
        raise ConfigError(
            "torchrun has started {ranks} processes, which are one worker over the crew link, each on its own device",
            ranks=place.num_ranks,
            hint="join without --devices and --ray, or without torchrun",
        )
    from cuadrilla.engines.island import joined

    with joined(place) as island:
        yield island


def _consent(ray: bool | None) -> "Consent":
    from cuadrilla.engines.ray.node import Consent

    return Consent(ray, ask=_ask_for_ray if sys.stdin.isatty() else None)


def _work(known: "_Known", ways: "Ways", *, island: "Island | None", threads: int, data: Path | None) -> str:
    """Until the run ends; why it ended."""
    from cuadrilla.engines.bundle import OtherWork, Unfit
    from cuadrilla.engines.node import work_here, worker_options
    from cuadrilla.engines.ray.node import work_through_ray

    while island is None:
        try:
            return work_through_ray(ways) or work_here(ways, moved=known.move, data=data)
        except Unfit as error:
            told = "resting    this machine cannot take part in that run: {reason}; {hint}"
            say(told, reason=error.message, hint=error.hint)
            time.sleep(UNFIT_SECONDS)
        except OtherWork:
            pass
        from cuadrilla.jobs.node import NoJobs, do_jobs

        say("working    as {name} for {address}; Ctrl-C leaves", name=known.crew.name, address=known.crew.address)
        answer = Message("leaving    what is under way is saved and given back; once more: at once, without saving")
        with suppress(NoJobs), stopping(threading.Event(), answer=answer) as leaving:
            reason = do_jobs(ways, moved=known.move, data=data, leaving=leaving)
            if leaving.is_set():
                raise typer.Exit(INTERRUPTED_EXIT_CODE)
            return reason
    from cuadrilla.engines.island_crew import lead_for_crew
    from cuadrilla.plan.devices import Use

    return lead_for_crew(island, worker_options(ways, Use(name="", device="", threads=threads), moved=known.move))


def work_with(
    joined: Annotated[str, typer.Option("--crew")],
    name: Annotated[str, typer.Option()],
    device: Annotated[str, typer.Option()],
    threads: Annotated[int, typer.Option()] = 0,
    data: Annotated[Path | None, typer.Option()] = None,
    while_idle: WhileIdle = False,
    on_power: OnPower = False,
    low_priority: LowPriority = False,
    max_memory: MaxMemory = "",
) -> None:
    """Work with one of this machine's devices for a crew that it has joined; ends with the process that started it."""
    keep_answer_apart()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach a whole group of processes; `join` decides
        signal.signal(number, signal.SIG_IGN)
    end_with(sys.stdin.fileno())  # a pipe that nobody writes to
    from cuadrilla.engines.bundle import OtherWork
    from cuadrilla.engines.devices import Devices
    from cuadrilla.engines.node import OTHER_WORK, worker_options
    from cuadrilla.engines.ray.node import Consent
    from cuadrilla.engines.worker import run_worker
    from cuadrilla.plan.devices import Use

    home = Home.of_user()
    crew = next((crew for crew in home.joined() if crew.folder.name == joined), None)  # its address may have changed
    if crew is None:
        raise LinkError("this machine has not joined that crew", hint="see what is in CUADRILLA_HOME/joined")
    set_up_logging(None, worker=f"{crew.name}/{name}", verbose=options.debug)
    known = _Known(home, crew)
    manners = manners_of(while_idle=while_idle, on_power=on_power, low_priority=low_priority, max_memory=max_memory)
    ways = _ways(
        known, consent=Consent(False), devices=Devices(device), data=data, manners=manners, apart=True, quiet=True
    )
    ways = replace(ways, report=lambda line: say("{device}  {line}", device=name, line=line))
    try:
        emit(run_worker(worker_options(ways, Use(name=name, device=device, threads=threads), moved=known.move)))
    except OtherWork:
        emit_json(OTHER_WORK)


def _ways(
    known: "_Known",
    *,
    consent: "Consent",
    devices: "Devices",
    data: Path | None,
    manners: "Manners",
    apart: bool = False,
    quiet: bool = False,
) -> "Ways":
    """`quiet`: what is fetched has been said before. `apart`: this process was started by the one that has joined."""
    from cuadrilla.engines.bundle import fetch
    from cuadrilla.engines.courtesy import Courtesy
    from cuadrilla.engines.ray.node import Ways
    from cuadrilla.link.base import KnownTerm
    from cuadrilla.link.tls import load_node

    crew, told = known.crew, quiet

    def prepare(connection: "RunConnection", description: "RunDescription") -> tuple[Config, Path]:
        nonlocal told
        known.change()  # it has answered; to fetch may end with the question whether its code may run
        report = _say_nothing if quiet else say
        found = fetch(connection, description, home=known.home, report=report, data=data)
        if not told:  # through Ray it is prepared for each time the cluster is joined
            say("working    as {name} for {address}; Ctrl-C leaves", name=crew.name, address=crew.address)
        told = True
        return found

    term = KnownTerm(crew.term, learned=lambda value: known.change(term=value))
    return Ways(
        crew=crew,
        identity=load_node(crew.folder),
        prepare=prepare,
        consent=consent,
        term=term,
        devices=devices,
        courtesy=Courtesy(manners, home=known.home, root=os.getppid() if apart else None),
        report=say,
    )


def _say_nothing(_text: str) -> None:
    pass


def _ask_for_ray() -> bool:
    """Whether this machine is to be a node of the coordinator's Ray cluster, in words that say what that means."""
    say("Ray        the coordinator offers its Ray cluster. {ray}", ray=RAY)
    say(
        "           The crew link, without Ray, is safe among strangers: nobody can run anything here but the training."
    )
    return ask(Message("join the Ray cluster?"))


class _Known:
    """What this machine writes down about the crew it works for, from two threads."""

    def __init__(self, home: Home, crew: Joined) -> None:
        self.home, self.crew = home, crew
        self._lock = threading.Lock()

    def change(self, **changes: Any) -> None:
        with self._lock:
            self.crew = replace(self.crew, **changes)
            self.home.remember(self.crew)

    def move(self, address: str) -> None:
        self.change(address=address)


def read_invite(file: Path | None) -> str:
    if file is not None:
        try:
            return file.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            reason = error.strerror
            raise ConfigError("cannot read {file}: {reason}", file=file, reason=reason, hint="check the path") from None
    if sys.stdin.isatty():
        return getpass(shown(Message("invite (not shown): "), language()), stream=sys.stderr)
    return sys.stdin.read()


def kick(name: Annotated[str, typer.Argument(help="A name from `cuadrilla nodes`.")]) -> None:
    """Remove a machine from this machine's crew; its work goes to the others at once."""
    from cuadrilla.link.nodes import AllowList

    AllowList(Home.of_user().nodes).remove(name)
    forget(name)
    say("{name} is not in the crew any more", name=name)


def leave(address: Annotated[str, typer.Argument(metavar="ADDRESS:PORT")] = "") -> None:
    """Leave a crew that this machine has joined: its name there becomes free, what is kept of it here is deleted."""
    crew = Home.of_user().find_crew(address)
    if crew is None or (address and crew.address != address and not crew.folder.exists()):
        raise LinkError("this machine has not joined that crew", hint="see what is in CUADRILLA_HOME/joined")
    problem, keeps_key = _tell_leaving(crew)
    with storage_errors(crew.folder):
        for file in crew.folder.iterdir():
            if not keeps_key or file.name != "node.key":
                file.unlink()
        if not keeps_key:
            crew.folder.rmdir()
    say("left the crew at {address}", address=crew.address)
    if problem:
        say("the coordinator could not be told: {problem}", problem=problem)
        say("there, `cuadrilla kick {name}` takes this machine off the list", name=crew.name)
    if keeps_key:
        say("this machine keeps its key, to come back under that name with a new invite")


def _tell_leaving(crew: Joined) -> tuple[str, bool]:
    """Have the coordinator take this machine off its list: why it did not, and whether the key is still good there."""
    from cuadrilla.link.base import Refused
    from cuadrilla.link.grpc_client import Connection
    from cuadrilla.link.tls import load_node

    try:
        connection = Connection(crew.address, identity=load_node(crew.folder))
    except LinkError as error:
        return error.message, False
    try:
        connection.leave()
    except Refused:  # it was kicked
        return "", False
    except LinkError as error:
        return error.message, True
    finally:
        connection.close()
    return "", False


def down() -> None:
    """Stop the coordinator that runs on this machine: it saves, and the same `up` goes on from there."""
    home = Home.of_user()
    crew = home.open_crew()
    with suppress(ResourceError):  # a full disk may be why it is to end
        home.announce_down()
    try:
        os.kill(int(crew["pid"]), signal.SIGTERM)
    except ProcessLookupError:
        home.open_file.unlink(missing_ok=True)
        raise LinkError(
            "the coordinator is gone already", run=crew["run"], hint="continue: cuadrilla up {run}"
        ) from None
    say("the coordinator of {run} saves and stops", run=crew["run"])


def work(
    address: Annotated[str, typer.Option()],
    identity: Annotated[Path, typer.Option()],
    folder: Annotated[Path, typer.Option()],
    name: Annotated[str, typer.Option()],
    speed: Annotated[float, typer.Option()] = 1.0,
    link: Annotated[str, typer.Option()] = "",
    threads: Annotated[int, typer.Option()] = 0,
    device: Annotated[str, typer.Option()] = "",
) -> None:
    """Work for the coordinator that started this process; ends with it."""
    keep_answer_apart()
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach a whole group of processes; the coordinator decides
        signal.signal(number, signal.SIG_IGN)
    from cuadrilla.engines.worker import WorkerOptions, run_worker
    from cuadrilla.link.grpc_client import Connection
    from cuadrilla.link.shaped import parse_shape
    from cuadrilla.link.tls import load_node

    def prepare(_connection: "RunConnection", _description: "RunDescription") -> tuple[Config, Path]:
        return read_run_config(RunDir(folder)), folder  # the same machine: everything is there

    end_with(sys.stdin.fileno())  # a pipe that nobody writes to
    handler = set_up_logging(RunDir(folder).logs, worker=name)
    keys = load_node(identity)
    try:
        run_worker(
            WorkerOptions(
                address=address,
                connect=lambda address: Connection(address, identity=keys),
                prepare=prepare,
                shape=parse_shape(link, speed=speed),
                threads=threads,
                device=device,
            )
        )
    finally:
        tear_down_logging(handler)
