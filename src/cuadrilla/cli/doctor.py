"""`cuadrilla doctor`: what this machine is, what will go wrong, and the exact command that repairs it."""

import itertools
import os
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from cuadrilla.cli.output import answered, emit, options
from cuadrilla.doctor.examine import examine
from cuadrilla.doctor.finding import PLACES, Finding, Level
from cuadrilla.doctor.here import this_machine
from cuadrilla.doctor.way import walk
from cuadrilla.errors import EnvironmentProblem
from cuadrilla.home import Home
from cuadrilla.host.devices import Device
from cuadrilla.host.facts import read_environment
from cuadrilla.link.address import Address
from cuadrilla.messages import ENGLISH, VARIABLES
from cuadrilla.version import __version__

Found = tuple[str, Finding]

MARKS: dict[Level, str] = {"ok": "ok", "warning": "!", "failure": "X"}
REPORTED = ("torch", "numpy", "grpcio", "safetensors", "tokenizers", "transformers", "ray", "dask", "optuna")
"""The packages whose versions explain most problems."""


def doctor(
    address: Annotated[
        str,
        typer.Argument(metavar="[HOST:PORT]", help="Also try the way to this coordinator, and name the broken step."),
    ] = "",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Also look whether this port is free, and its firewalls.")
    ] = None,
    report: Annotated[
        bool, typer.Option("--report", help="One text to paste where you ask for help: versions, devices, findings.")
    ] = False,
) -> None:
    """Examine this machine: its devices, what will go wrong when it trains, and the command that repairs it.

    Changes nothing. Exit code 3 if something is broken; 0 if all is well, or there are warnings only.
    """
    head = Address.parse(address) if address else None
    here = this_machine(port=port)
    looking = itertools.chain(examine(here), _way(head) if head else ())
    if report:  # those who help read English
        os.environ[VARIABLES[0]] = ENGLISH
    found = [*looking] if options.json else _show(looking, head=_versions() if report else [f"cuadrilla {__version__}"])
    answered(findings_data(found, here.devices))
    if any(each.level == "failure" for _, each in found):
        raise typer.Exit(EnvironmentProblem.exit_code)


def _way(address: Address) -> Iterator[Found]:
    """Findings on the way to a coordinator. This machine's keys are used if it has joined the crew at that address."""
    crew = next((crew for crew in Home.of_user().joined() if crew.address == str(address)), None)
    yield from ((f"link.{step}", each) for step, each in walk(address, crew=crew))


def findings_data(found: Sequence[Found], devices: Sequence[Device]) -> dict[str, Any]:
    """The findings and devices as data, with texts in English."""
    levels = Counter(each.level for _, each in found)
    return {
        "cuadrilla": __version__,
        "failures": levels["failure"],
        "warnings": levels["warning"],
        "devices": [asdict(device) for device in devices],
        "findings": [
            {"check": name, **asdict(each), "fields": dict(getattr(each.cause, "fields", {}))} for name, each in found
        ],
    }


def _versions() -> list[str]:
    """The versions that explain most problems. Environment variables and files of a run are not read."""
    found = read_environment()
    packages = ", ".join(f"{name} {found['packages'][name]}" for name in REPORTED if name in found["packages"])
    return [f"cuadrilla {__version__}, Python {found['python']}, {platform.platform()}", packages]


def _show(looking: Iterable[Found], *, head: Sequence[str]) -> list[Found]:
    """Print each finding as it is found, and under it what to do. No colour is needed to read it."""
    found = []
    for line in head:
        emit("{line}", line=line, fill=True)
    for name, each in looking:
        found.append((name, each))
        emit(" {mark:2} {check:20} {cause}", mark=MARKS[each.level], check=name, cause=each.cause, fill=True)
        if each.level != "ok" and each.command:
            emit("     {place}:  {command}", place=PLACES[each.shell], command=each.command)
        if each.level != "ok" and each.remedy:
            emit("     {remedy}", remedy=each.remedy, fill=True)
    levels = Counter(each.level for _, each in found)
    emit("{failures} broken, {warnings} to look at", failures=levels["failure"], warnings=levels["warning"])
    return found
