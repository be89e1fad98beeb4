"""`cuadrilla launch`: any program as several processes that find each other."""

import hashlib
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import typer

from cuadrilla.cli.output import emit_json, error_data, options, report_error, say
from cuadrilla.engines.children import KILLED_FOR_MEMORY, ended_by
from cuadrilla.engines.ranks import Orders, RanksOutcome, Show, run_ranks
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, CuadrillaError, EnvironmentProblem, LinkError
from cuadrilla.host.card import addresses
from cuadrilla.host.devices import count_cards
from cuadrilla.host.facts import read_facts
from cuadrilla.host.group import (
    LOOPBACK,
    TORCH_PORT,
    Group,
    Machine,
    environment,
    free_ports,
    parse_hosts,
    parse_processes,
    ports_from,
)
from cuadrilla.host.lines import GONE, INTERRUPTED, Lines
from cuadrilla.host.meeting import Meeting, card_of, meet_and_stay, private_address
from cuadrilla.host.reachability import read_reachability
from cuadrilla.messages import Message

COLOURS = (36, 33, 32, 35, 34, 31)
"""Of a terminal: cyan, yellow, green, magenta, blue, red."""
CLEARED = b"\x1b[K"
BROKEN_PIPE_EXIT_CODE = 141
"""As a shell has it of a program that SIGPIPE ends."""


Processes = Annotated[
    str,
    typer.Option(
        metavar="N[,N...]", help="How many (default: one for each NVIDIA card, else 1); one number for each machine."
    ),
]
Hosts = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS,ADDRESS...",
        help="All machines by their private addresses; the same command is typed on each. Default: this one alone.",
    ),
]
Port = Annotated[
    int | None,
    typer.Option(min=1024, max=65535, help="Of torch; TensorFlow has the next ones (default: free, or 29500)."),
]


def launch(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments, after `--`.")],
    processes: Processes = "",
    hosts: Hosts = "",
    master_port: Port = None,
    log: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="What each rank writes, unchanged, also in FOLDER/RANK.log.")
    ] = None,
    grace: Annotated[
        float, typer.Option(min=0, max=3600, help="Seconds between asking a rank to end and killing it.")
    ] = 10.0,
    seconds: Annotated[float, typer.Option(min=1, max=86_400, help="How long to wait for the other machines.")] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="At the end, what became of each rank, as JSON.")] = False,
) -> None:
    """Start a program as several processes, with the variables that torch, Accelerate and TensorFlow expect.

    The first one that fails ends the others, and its exit code is that of this command. Ctrl-C is handed on; a second
    one kills. With --json everything that the program prints goes to standard error.
    """
    options.json = options.json or as_json
    _need_posix()
    cards = count_cards()
    group, network_card, lines = _find_group(processes, hosts, master_port, seconds=seconds, cards=cards)
    machine = Machine(cores=read_facts().usable_cores or 1, has_gpu=cards > 0, network_card=network_card)
    environments = {
        group.first_rank + local: environment(group, local, machine, os.environ) for local in range(group.num_local)
    }
    _introduce(group, environments[group.first_rank])
    began = time.monotonic()
    orders = Orders(command=command, environments=environments, grace_seconds=grace, logs=log, lines=lines)
    try:
        outcome = run_ranks(orders, show=shown_lines(data_to_stderr=options.json), tell=say)
    except BrokenPipeError:
        _forget_output()
        raise typer.Exit(BROKEN_PIPE_EXIT_CODE) from None
    finally:
        lines.close()
    _conclude(outcome, group, seconds=time.monotonic() - began, log=log)


def _need_posix() -> None:
    if os.name != "posix":
        raise EnvironmentProblem(
            "`cuadrilla launch` needs Linux or macOS, and this is {system}",
            system=platform.system(),
            hint="on Windows: inside WSL2",
        )


# -- the group ---------------------------------------------------------------------------------------------------------


def _find_group(
    processes: str, hosts: str, port: int | None, *, seconds: float, cards: int
) -> tuple[Group, str, Lines]:
    """And the network card that leads to the others, who have been met, and the lines to them."""
    if hosts:
        return _group_of_several(processes, hosts, TORCH_PORT if port is None else port, seconds=seconds)
    counts = parse_processes(processes or str(max(1, cards)), machines=1)
    ports = free_ports(counts[0] + 1) if port is None else ports_from(port, counts)
    group = Group(addresses=(LOOPBACK,), processes=counts, ports=ports)
    return group, card_of(LOOPBACK, addresses()), Lines({}, number=0)


def _group_of_several(processes: str, hosts: str, port: int, *, seconds: float) -> tuple[Group, str, Lines]:
    listed = parse_hosts(hosts)
    for host in listed:
        private_address(host)
    if not processes:
        hint = "--processes 1, or one number for each machine: --processes 2,1"
        raise ConfigError("--hosts needs --processes: all machines must know how many there are", hint=hint)
    counts = parse_processes(processes, machines=len(listed))
    number = _own_number(listed)
    group = Group(addresses=listed, processes=counts, ports=ports_from(port, counts), number=number)
    say("machine {number} of {machines}: waiting for the others", number=number, machines=len(listed))
    agreed = hashlib.sha256(repr((group.addresses, group.processes, group.ports)).encode()).hexdigest()
    met = meet_and_stay(
        Meeting(
            address=listed[0], port=port, machines=len(listed), number=number, seconds=seconds, agreed=agreed
        )
    )  # fmt: skip
    lines = Lines(met.connections, number=number)
    if (own := card_of(listed[number], addresses())) != met.card:
        lines.close()
        raise ConfigError(
            "{address} belongs to the network card {own}, but {card} leads to machine 0",
            address=listed[number],
            own=own,
            card=met.card,
            hint="in --hosts, name each machine by its address on the network that they share",
        )
    return group, met.card, lines


def _own_number(listed: Sequence[str]) -> int:
    """Which of the machines this is. Raises ConfigError."""
    own = {address for found in addresses().values() for address in found}
    numbers = [number for number, host in enumerate(listed) if host in own]
    if len(numbers) == 1:
        return numbers[0]
    placed = read_reachability(listed[0], system=platform.system())
    raise ConfigError(
        "--hosts names {count} addresses of this machine, which has {addresses}",
        count=len(numbers),
        addresses=", ".join(sorted(own)),
        details=[Message("this machine is {noticed}", noticed=placed.noticed)] if placed.noticed else [],
        hint="name each machine once, by an address that is its own; a container shares its host's with --network host",
    )


def _introduce(group: Group, first: Mapping[str, str]) -> None:
    say(
        "launch: {number} processes, ranks {first} to {last} of {all}, meet at {address}",
        number=group.num_local,
        first=group.first_rank,
        last=group.first_rank + group.num_local - 1,
        all=group.num_ranks,
        address=group.meets_at,
    )
    say("        threads of each: {threads} (OMP_NUM_THREADS)", threads=first["OMP_NUM_THREADS"])
    if first.get("ACCELERATE_USE_CPU") == "true" and "ACCELERATE_USE_CPU" not in os.environ:
        say("        no NVIDIA card: Accelerate uses the CPU, unless ACCELERATE_USE_CPU=false is set")


# -- what the ranks print ----------------------------------------------------------------------------------------------


def shown_lines(*, data_to_stderr: bool) -> Show:
    """Each line behind its rank; on a terminal in a colour of its own."""
    draws_over = False

    def show(rank: int, is_error: bool, lines: Sequence[bytes]) -> None:
        nonlocal draws_over
        stream = sys.stderr if is_error or data_to_stderr else sys.stdout
        terminal = stream.isatty()
        prefix = _prefix(rank, coloured=terminal and not os.environ.get("NO_COLOR"))
        written = []
        for line in lines:
            if line == b"\r":
                continue
            written.append((CLEARED if draws_over and terminal else b"") + prefix + line)
            if not line.endswith((b"\n", b"\r")):
                written.append(b"\n")
            draws_over = line.endswith(b"\r")
        stream.flush()
        _write(stream.buffer, b"".join(written))

    return show


def _prefix(rank: int, *, coloured: bool) -> bytes:
    return f"\x1b[{COLOURS[rank % len(COLOURS)]}m[{rank}]\x1b[0m ".encode() if coloured else f"[{rank}] ".encode()


def _write(file: BinaryIO, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) or 0 :]
    file.flush()


def _forget_output() -> None:
    """Nobody reads it: what is still in buffers must not end in a message of Python's."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
        os.dup2(nothing, stream.fileno())
    os.close(nothing)


# -- the end -----------------------------------------------------------------------------------------------------------


def _conclude(outcome: RanksOutcome, group: Group, *, seconds: float, log: Path | None) -> None:
    """Raises typer.Exit unless all is well."""
    interrupted = outcome.interrupted or (outcome.elsewhere is not None and outcome.elsewhere.how == INTERRUPTED)
    error = None if interrupted else _failure_elsewhere(outcome, group) or _failure(outcome, log)
    code = INTERRUPTED_EXIT_CODE if interrupted else error.exit_code if error else 0
    if options.json:
        ranks = [
            {"rank": one.rank, "pid": one.pid, "exit_code": one.exit_code, "seconds": one.seconds}
            for one in outcome.ranks
        ]
        summary: dict[str, Any] = {
            "machine": group.number,
            "world_size": group.num_ranks,
            "meets_at": group.meets_at,
            "exit_code": code,
            "interrupted": interrupted,
            "failed_machine": outcome.elsewhere.machine if outcome.elsewhere else group.number if error else None,
            "failed_rank": outcome.failed.rank if outcome.failed else None,
            "seconds": seconds,
            "ranks": ranks,
        }
        emit_json({**summary, **(error_data(error) if error else {})})
        options.json = False  # what follows has been said as data
    if interrupted and outcome.elsewhere is not None:
        say("interrupted on machine {number}", number=outcome.elsewhere.machine)
    elif interrupted:
        say("interrupted")
    elif error:
        report_error(error)
    if code:
        raise typer.Exit(code)


def _failure_elsewhere(outcome: RanksOutcome, group: Group) -> CuadrillaError | None:
    """Which machine was the first to fail, with the exit code of its rank."""
    word = outcome.elsewhere
    if word is None:
        return None
    address = group.addresses[word.machine] if word.machine < len(group.addresses) else ""
    if word.how == GONE:
        return LinkError(
            "machine {number} ({address}) is gone: `cuadrilla launch` ended there without a word, or the network broke",
            number=word.machine,
            address=address,
            hint="type the command again on all machines",
        )
    error = CuadrillaError(
        "rank {rank} on machine {number} ({address}) was the first to fail, with exit code {code}",
        rank=word.rank,
        number=word.machine,
        address=address,
        code=word.exit_code,
        hint="that machine's screen says why",
    )
    error.exit_code = word.exit_code or 1
    return error


def _failure(outcome: RanksOutcome, log: Path | None) -> CuadrillaError | None:
    """Which rank was the first to fail, with its exit code."""
    if outcome.failed is None:
        return None
    reason = ended_by(-9 if outcome.failed.code is None else outcome.failed.code)
    if outcome.memory_ran_out and outcome.failed.code == -9:
        reason = Message(KILLED_FOR_MEMORY, reason=reason)
    hint = "its last lines begin with [{rank}]" if log is None else "see {path}"
    path = log / f"{outcome.failed.rank}.log" if log else ""
    error = CuadrillaError(
        "rank {rank} was the first to fail: {reason}", rank=outcome.failed.rank, reason=reason, hint=hint, path=path
    )
    error.exit_code = outcome.failed.exit_code
    return error
