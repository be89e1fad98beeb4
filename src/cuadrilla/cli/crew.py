"""The commands of a crew: `up` coordinates, `join` works for a coordinator, `invite` and `kick` decide who may join.
A machine's owner decides when it works for others, which code may run on it and which crew it leaves.

An invite is read from a hidden prompt, from standard input or from a file, never from an argument: all users of a
machine can see the arguments of its processes.
"""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from getpass import getpass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if sys.platform != "win32":
    import termios

from cuadrilla.cli.config import AllowChanges, RunFile, Sets, folder_of
from cuadrilla.cli.output import answered, emit, keep_answer_apart, options, say
from cuadrilla.cli.parent import stopping, under_a_parent
from cuadrilla.config import CrewEngine
from cuadrilla.crew.children import end_with_parent
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, LinkError
from cuadrilla.home import Home, Joined
from cuadrilla.host.torchrun import find_place
from cuadrilla.link.address import Address, listening_address
from cuadrilla.log import log_to
from cuadrilla.messages import Message, language, shown
from cuadrilla.rundir import FolderLock, RunDir, make_private, storage_errors, write_json
from cuadrilla.runfile import load_dumped, read_run_file

if TYPE_CHECKING:
    from cuadrilla.crew.node import Node
    from cuadrilla.link.server import CrewServer

DeviceList = Annotated[
    str,
    typer.Option(
        metavar="auto|DEVICE,…",
        help="Devices to work with, one process for each: cuda:0,cuda:1,cpu (default: each accelerator, or "
        "the processor if there is none).",
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
InviteFile = Annotated[Path | None, typer.Option(metavar="FILE", exists=True, help="Read the invite from a file.")]
Uses = Annotated[int, typer.Option(min=1, max=64, help="How many machines may join with the invite.")]


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
    allow_changes: AllowChanges = False,
) -> None:
    """Coordinate a crew on this machine and train; prints what to type on the other machines."""
    listens = listening_address(listen)
    chosen = ['engine.kind="crew"', f'engine.listen="{listens}"', *([f'engine.devices="{devices}"'] if devices else [])]
    resolved = read_run_file(run, sets=[*(sets or []), *chosen])
    assert isinstance(resolved.config.engine, CrewEngine)
    folder = folder_of(run)
    dialled = str(Address.parse(address, port=listens.port)) if address else ""
    under_a_parent(folder, listen=str(listens))
    from cuadrilla.cli.train import report_outcome, train_and_show
    from cuadrilla.crew.up import Opening

    began = time.monotonic()
    with coordinating() as home:
        opening = Opening(
            home=home,
            opened=lambda crew, _: show_opened(crew, folder=folder.path, address=dialled, uses=uses),
            standbys=frozenset(standby or []),
        )
        outcome = train_and_show(resolved, folder, allow_changes=allow_changes, opening=opening)
    report_outcome(outcome, folder, seconds=time.monotonic() - began)


@contextmanager
def coordinating() -> Iterator[Home]:
    """Give this machine's home folder. Within this block, only this process coordinates the machine's crew."""
    home = Home.of_user()
    make_private(home.crew)
    with FolderLock(home.crew / "lock"):
        try:
            yield home
        finally:
            home.open_file.unlink(missing_ok=True)


def show_opened(crew: "CrewServer", *, folder: Path, address: str, uses: int) -> None:
    """Print what to type and paste on other machines so that they join the crew. Raises LinkError.

    `folder`: the run, search or queue of the crew. `address`: what others dial, if it is not the address listened on.
    """
    from cuadrilla.link.identity import key_hash

    home, listens = Home.of_user(), Address.parse(crew.address)
    dialled = str(Address.parse(address, port=listens.port)) if address else ""
    pid = os.getppid() if options.supervised else os.getpid()  # a parent passes the signal of `stop` on
    found = {"key_hash": key_hash(crew.keys.certificate).hex(), "pid": pid, "run": str(folder)}
    write_json(home.open_file, {"address": dialled or crew.address, **found})
    say("crew       {address}; on another machine: cuadrilla join", address=dialled or crew.address)
    if not (listens.is_loopback or dialled):  # else only this machine joins, or `address` is set
        _show_reachability(listens)
    invite(uses)


def _show_reachability(here: Address) -> None:
    """If no machine on the network can dial this address, say what to do about it."""
    from cuadrilla.host.card import HOST, read_reachability
    from cuadrilla.host.facts import read_facts

    match read_reachability(here.host, facts=read_facts()):
        case "container":
            say(
                "network    this container has a network of its own: start it with -p {host}:{port}:{port} (its host's "
                "address on your network), and cuadrilla up with --address {host}:{port}",
                host=HOST,
                port=here.port,
            )
        case "wsl-nat" | "wsl-mirrored":
            say("network    this is WSL2: `cuadrilla doctor --port {port}` says what lets others in", port=here.port)


def invite(uses: Uses = 1) -> None:
    """Make an invite for the crew that runs on this machine: good for 15 minutes."""
    from cuadrilla.link.invite import Invite, Invites

    home = Home.of_user()
    crew, secret = home.open_crew(), Invites(home.invites).issue(uses=uses)
    made = Invite(address=Address.parse(crew["address"]), key_hash=bytes.fromhex(crew["key_hash"]), secret=secret)
    say("invite     machines: {uses}, for 15 minutes; `cuadrilla invite` makes another:", uses=uses)
    if not answered({"invite": str(made), "uses": uses}):
        emit("{invite}", invite=made)


def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS:PORT", help="Default: the address in the invite.")] = "",
    name: Annotated[
        str, typer.Option(help="This machine's name in the crew, numbered if it is taken (default: its host name).")
    ] = "",
    invite_file: InviteFile = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads to compute with (0: all cores).")] = 0,
    devices: DeviceList = "",
    while_idle: Annotated[
        bool,
        typer.Option(
            "--while-idle",
            help="Work only while other programs use little of the processor, and begin only while no GPU is in use.",
        ),
    ] = False,
    on_power: Annotated[
        bool, typer.Option("--on-power", help="Work only while the machine is not on battery.")
    ] = False,
    low_priority: Annotated[bool, typer.Option("--low-priority", help="Other programs go first.")] = False,
    trust: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="Only approve the code of a run by its hash, once it has been read."),
    ] = None,
    forget: Annotated[bool, typer.Option("--forget", help="Only leave the crew: its name there becomes free.")] = False,
) -> None:
    """Work for a crew's coordinator, before or during a run. Asks for the invite the first time.

    If torchrun starts it on one machine, its processes together are one worker.
    """
    if trust is not None:
        trust_code(trust)
        return
    if forget:
        leave(address)
        return
    if address.startswith("cuadrilla1."):
        raise ConfigError("an invite is no argument: other users could read it", hint="cuadrilla join; it asks for it")
    home, place = Home.of_user(), find_place()
    leads = place is None or place.leads
    invited = read_invite(home, address, invite_file) if leads else None
    from cuadrilla.crew.equipment import choose_uses
    from cuadrilla.crew.idle_policy import IdlePolicy, OwnerRules, set_priority
    from cuadrilla.crew.node import Node
    from cuadrilla.crew.run import all_ranks

    if devices:
        choose_uses(devices)  # a wrong name fails before the invite is used up
    rules = OwnerRules(while_idle=while_idle, on_power=on_power, low_priority=low_priority)
    set_priority(rules)
    if place is not None and devices:
        raise ConfigError(
            "torchrun has started {ranks} processes, which are one worker over the crew link, each on its own device",
            ranks=place.num_ranks,
            hint="join without --devices, or without torchrun",
        )
    with all_ranks(place) as island:
        if island is not None and not leads:
            from cuadrilla.crew.island import follow

            follow(island, threads=threads)
            return
        crew = joined_crew(home, address, name=name, invited=invited)
        policy = IdlePolicy(rules, home=home, root=os.getppid() if island else None)
        node = Node(home=home, crew=crew, tell=say, report=say, idle_policy=policy)
        if island is not None:
            from cuadrilla.crew.worker import run_worker
            from cuadrilla.plan.devices import Use

            reason = run_worker(node, Use(name="", device="", threads=threads), island=island)
        else:
            reason = _work_or_do_jobs(node, devices, threads=threads)
    say("done       {reason}", reason=reason)


def _work_or_do_jobs(node: "Node", devices: str, *, threads: int) -> str:
    """Work until the run, or the coordinator's last job, ends. Returns why it ended."""
    from cuadrilla.crew.bundle import require_work
    from cuadrilla.crew.equipment import choose_uses
    from cuadrilla.crew.worker import once, work_on_all
    from cuadrilla.link.base import LEAVES

    description = once(node, node.describe)
    require_work(description, jobs=description.takes_jobs)
    if not description.takes_jobs:
        return work_on_all(node, choose_uses(devices, threads=threads, config=load_dumped(description.config)))
    from cuadrilla.jobs.node import do_jobs

    node.tell_working()
    leaving = threading.Event()
    with stopping(lambda _reason: leaving.set()):
        reason = do_jobs(node, choose_uses(devices, threads=threads).uses, leaving=leaving)
    if reason == LEAVES:
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    return reason


def work(name: Annotated[str, typer.Argument()], settings: Annotated[str, typer.Argument()]) -> None:
    """Work with one device for the coordinator, or the `join`, that started this process; ends with it.

    `settings`: as `worker_command` has it. At the coordinator of this machine `run` and its address are in it.
    """
    keep_answer_apart()
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group; the parent decides
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    from cuadrilla.crew.idle_policy import IdlePolicy, OwnerRules
    from cuadrilla.crew.node import Node
    from cuadrilla.crew.worker import run_worker
    from cuadrilla.link.practice import parse_shape
    from cuadrilla.plan.devices import Use

    home, work = Home.of_user(), json.loads(settings)
    folder, use = Path(work["crew"]), Use(name="", device=work["device"], threads=work["threads"])
    if "run" in work:
        run, shape = RunDir(Path(work["run"])), parse_shape(work["link"], speed=work["speed"])
        log_to(run.logs, worker=name)
        node = Node(home=home, crew=Joined(folder=folder, address=work["address"], name=name), run=run)
        emit(run_worker(node, use, shape=shape))
        return
    crew = next(each for each in home.joined() if each.folder == folder)  # not by address, which may have changed
    policy = IdlePolicy(OwnerRules(**work["rules"]), home=home, root=os.getppid())
    node = Node(
        home=home, crew=crew, report=lambda line: say("{device}  {line}", device=name, line=line), idle_policy=policy
    )
    emit(run_worker(node, replace(use, name=name)))


def read_invite(home: Home, address: str, file: Path | None) -> str | None:
    """The invite for a crew; None if this machine has already joined one and no file is given.

    It is asked for before the slow imports, because a user who has copied it pastes it at once.
    """
    if file is not None:
        return file.read_text(errors="replace")
    if home.find_crew(address) is not None:
        return None
    return _typed_unseen() if sys.stdin.isatty() else sys.stdin.read()


def _typed_unseen() -> str:
    """A line from the terminal, without echo. `getpass` would discard what was pasted before its prompt."""
    asked = shown(Message("invite (not shown): "), language())
    if sys.platform == "win32":  # there it discards nothing
        return getpass(asked, stream=sys.stderr)
    keyboard = sys.stdin.fileno()
    usual = termios.tcgetattr(keyboard)
    termios.tcsetattr(keyboard, termios.TCSADRAIN, [*usual[:3], usual[3] & ~termios.ECHO, *usual[4:]])
    try:
        print(asked, end="", file=sys.stderr, flush=True)
        return sys.stdin.readline()
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, usual)
        print(file=sys.stderr)


def joined_crew(home: Home, address: str, *, name: str, invited: str | None) -> Joined:
    """The crew to work for, joined with the invite if there is one."""
    from cuadrilla.crew.enrol import enrol

    known = home.find_crew(address) if invited is None else None
    return known or enrol(home, invited or "", address=address, name=name, report=say)


def pause(
    off: Annotated[bool, typer.Option("--off", help="End a pause: the machine works again.")] = False,
) -> None:
    """Let this machine wait: its work goes to the others until `cuadrilla pause --off`."""
    home = Home.of_user()
    if not off and not home.joined():
        hint = "nothing to pause; Ctrl-C stops a training. Where a crew is coordinated: cuadrilla kick here-1"
        raise LinkError("this machine works for no crew of another machine", hint=hint)
    if off and not home.is_paused:
        say("this machine was not paused")
        return
    (home.unpause if off else home.pause)()
    waits = "work for others waits on this machine; to go on: cuadrilla pause --off"
    say("this machine works again" if off else waits)


def trust_code(sha256: str) -> None:
    """Allow code to run on this machine, by its SHA-256, also before it is fetched. Raises ConfigError."""
    if not re.fullmatch("[0-9a-f]{64}", sha256):
        raise ConfigError("{text!r} is not a hash of code", text=sha256[:80], hint="copy what `cuadrilla join` printed")
    Home.of_user().trust(sha256)
    say("{hash} may run on this machine", hash=sha256)


def leave(address: str) -> None:
    """Leave a crew: this machine's name there becomes free, and the crew's folder on this machine is deleted."""
    from cuadrilla.link.base import Refused
    from cuadrilla.link.client import Connection
    from cuadrilla.link.identity import load_node

    home = Home.of_user()
    crew = home.find_crew(address)
    if crew is None or crew not in home.joined():  # with a new address it might be another crew than the one meant
        raise LinkError("this machine has not joined that crew", hint="its crews are in {home}/joined", home=home.path)
    try:
        with closing(Connection(crew.address, identity=load_node(crew.folder))) as connection, suppress(Refused):
            connection.leave()  # a kicked machine is refused
    except LinkError as error:
        say("the coordinator was not informed: {problem}", problem=error.message)
        say("there, `cuadrilla kick {name}` takes this machine off the list", name=crew.name)
    with storage_errors(crew.folder):
        shutil.rmtree(crew.folder)
    say("left the crew at {address}", address=crew.address)


def kick(name: Annotated[str, typer.Argument(help="A name that `cuadrilla monitor` shows.")]) -> None:
    """Remove a machine from this machine's crew; its work goes to the others at once."""
    from cuadrilla.link.nodes import AllowList

    AllowList(Home.of_user().nodes).remove(name)
    say("{name} is not in the crew any more; an invite that is still valid lets it join again", name=name)


def stop() -> None:
    """Stop the coordinator that runs on this machine: it saves, and the same `up` goes on from there."""
    home = Home.of_user()
    crew = home.open_crew()
    try:
        os.kill(int(crew["pid"]), signal.SIGTERM)
    except ProcessLookupError:
        home.open_file.unlink(missing_ok=True)
        home.open_crew()  # raises: no coordinator runs
    say("the coordinator of {run} saves and stops", run=crew["run"])
