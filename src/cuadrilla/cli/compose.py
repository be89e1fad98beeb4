"""`cuadrilla compose`: the crew as containers, by role."""

import ipaddress
import os
import platform
from pathlib import Path
from typing import Annotated

import typer

from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.engines.compose import COMPOSE, DOCKERFILE, ENV, ROLES, ContainerHost, compose_files, with_added
from cuadrilla.errors import ConfigError, LinkError
from cuadrilla.host.reachability import read_reachability
from cuadrilla.link.address import lan_address
from cuadrilla.rundir import make_private, write_atomic

NOBODY_KNOWN = 1000
"""The user of the image, where the system has no numbers for users (Windows)."""
LOOPBACK = "127.0.0.1"


def compose(
    roles: Annotated[
        list[str] | None, typer.Argument(metavar="ROLE", help="What this machine does (default: trainer).")
    ] = None,
    to: Annotated[Path, typer.Option("--to", help="The folder for the files, which the containers see.")] = Path(),
    run: Annotated[str, typer.Option("--run", help="The run folder in it.")] = "run",
    lan: Annotated[
        str, typer.Option("--lan", metavar="ADDRESS", help="This machine's address, for others (default: found).")
    ] = "",
    source: Annotated[
        Path | None, typer.Option("--source", help="A checkout of cuadrilla to build from (default: this one).")
    ] = None,
    gpu: Annotated[bool, typer.Option("--gpu", help="With the NVIDIA cards of this machine.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
    show: Annotated[
        bool, typer.Option("--print", help="Print compose.yaml; write nothing. --json: all files.")
    ] = False,
) -> None:
    """Write a compose file with a profile for each role, and the .env of this machine; says what to type next."""
    machine = ContainerHost(
        roles=roles or ["trainer"],
        source=_seen_from(to.resolve(), _checkout(source)),
        address=_address(lan),
        uid=os.getuid() if hasattr(os, "getuid") else NOBODY_KNOWN,
        gid=os.getgid() if hasattr(os, "getgid") else NOBODY_KNOWN,
        run=run,
        gpu=gpu,
    )
    files = compose_files(machine)
    if show and options.json:
        emit_json(files)
    elif show:
        emit(files[COMPOSE], end="")
    else:
        _write(to, files, force=force)
        _explain(machine, was_found=not lan)


def _write(folder: Path, files: dict[str, str], *, force: bool) -> None:
    """All of them or none. Raises ConfigError."""
    for name in files:
        if (folder / name).exists() and not force:
            raise ConfigError("{path} exists", path=folder / name, hint="--force replaces it; --print writes nothing")
    if not folder.exists():
        make_private(folder)
    if (folder / ENV).is_file():
        files = {**files, ENV: with_added(files[ENV], (folder / ENV).read_text(encoding="utf-8", errors="replace"))}
    for name, text in files.items():
        write_atomic(folder / name, text)


def _explain(machine: ContainerHost, *, was_found: bool) -> None:
    """`was_found`: nobody has named its address."""
    emit_table(
        [{"role": role, "here": "yes" if role in machine.roles else "", "does": does} for role, does in ROLES.items()]
    )
    found = read_reachability(machine.address, system=platform.system())
    if was_found and found.hidden:
        say(
            "\nnetwork    this machine is {noticed}: in {file}, LAN_ADDRESS is to be the address of its host",
            noticed=found.noticed,
            file=ENV,
        )
    if not machine.gpu:
        say("\ngpu        none is used; with NVIDIA cards: cuadrilla compose --gpu --force")
    say(
        "\nnext: docker compose build\n"
        "      docker compose run --rm trainer cuadrilla new {run} --preset gpt2-micro\n"
        "      docker compose up -d                     # {roles}; `docker compose logs -f` shows what they say\n"
        "      docker compose down                      # save and stop",
        run=machine.run,
        roles=", ".join(machine.roles),
    )


def _checkout(given: Path | None) -> Path:
    """Raises ConfigError."""
    folder = (given or Path(__file__).parents[3]).resolve()
    if not (folder / DOCKERFILE).is_file():
        raise ConfigError(
            "{folder} has no {file}: images are built from a checkout of cuadrilla",
            folder=folder,
            file=DOCKERFILE,
            hint="clone it, and name it: --source FOLDER",
        )
    return folder


def _seen_from(folder: Path, checkout: Path) -> str:
    """With slashes; relative where it can be, so that it holds on both sides of a container's wall."""
    try:
        return Path(os.path.relpath(checkout, folder)).as_posix()
    except ValueError:  # another drive of Windows
        return checkout.as_posix()


def _address(given: str) -> str:
    """Raises ConfigError."""
    if not given:
        try:
            given = lan_address()
        except LinkError as error:
            say("network    {reason}: only containers of this machine can join", reason=error.message)
            return LOOPBACK
    try:
        address = ipaddress.IPv4Address(given)
    except ValueError:
        raise ConfigError(
            "{address!r} is not an address of four numbers", address=given, hint="for example --lan 192.168.1.50"
        ) from None
    if address.is_unspecified:
        raise ConfigError(
            "{address} would open the crew's port on every network of this machine",
            address=given,
            hint="name one: --lan 192.168.1.50, for example",
        )
    return str(address)
