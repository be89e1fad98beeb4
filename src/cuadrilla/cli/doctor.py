"""`cuadrilla doctor`: what this machine is, what will go wrong, and the exact command that repairs it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from cuadrilla.cli.output import ask, emit, emit_json, options, say, stdout
from cuadrilla.doctor.checks import CHECKS, examine
from cuadrilla.doctor.diagnosis import PLACES, Diagnosis, Level, well
from cuadrilla.doctor.facts import DEVICES_SECONDS, read_symptoms
from cuadrilla.doctor.link import judge, mac_forbids, walk
from cuadrilla.doctor.schema import SCHEMA, VERSION
from cuadrilla.errors import ConfigError, EnvironmentProblem
from cuadrilla.home import Home
from cuadrilla.link.address import Address
from cuadrilla.messages import LANGUAGES, Message, shown
from cuadrilla.version import __version__

Found = tuple[str, Diagnosis]

MARKS: dict[Level, str] = {"ok": "✔", "warning": "!", "failure": "✘"}
PLAIN_MARKS: dict[Level, str] = {"ok": "+", "warning": "!", "failure": "X"}
"""For terminals that lack the others."""


def doctor(
    head: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Also walk the way to this coordinator, and name the broken step.")
    ] = "",
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Also look whether others reach this port here.")
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Offer to type the commands that are safe, one by one.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="The JSON schema of what --json prints.")] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds to wait for a driver that does not answer.")
    ] = DEVICES_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Examine this machine: what it is, what will go wrong when it trains, and the command that repairs it.

    Changes nothing without --fix. Exit code 3 if something is broken; 0 if all is well, or there are warnings only.
    """
    options.json = options.json or as_json
    if schema:
        emit_json(SCHEMA)
        return
    if fix and options.json:
        raise ConfigError("--fix asks before it types: not with --json", hint="cuadrilla doctor --fix")
    address = Address.parse(head) if head else None
    if address is not None:
        address.check_dialled()
    found = [*examine(read_symptoms(port=port, devices_seconds=timeout)), *(_head(address) if address else [])]
    if options.json:
        emit_json(report(found))
    else:
        _show(found)
        if fix:
            found = _fix(found, port=port, devices_seconds=timeout)
    if any(each.level == "failure" for _, each in found):
        raise typer.Exit(EnvironmentProblem.exit_code)


def _head(address: Address) -> list[Found]:
    """The way to a coordinator, with the keys of this machine if it has some of that crew."""
    crew = next((crew for crew in Home.of_user().joined() if crew.address == str(address)), None)
    steps = [*walk(address, crew=crew)]
    forbidden = mac_forbids(steps, address)
    found = [
        (f"link.{step}", each)
        for step, each in judge(steps, address=address, joined=crew is not None, forbidden=forbidden)
    ]
    if crew is None and all(step.ok for step in steps):
        found.append(("link.member", well(Message("it answers; the rest is tested once this machine has joined"))))
    return found


def report(found: Sequence[Found]) -> dict[str, Any]:
    """As data: what `--schema` describes. Texts are the English ones, and beside them those in other languages."""
    english, *others = LANGUAGES
    rows = [
        {
            "check": name,
            "level": each.level,
            **_texts(each, english),
            "command": each.command,
            "shell": each.shell,
            "fixable": each.fixable,
            "template": getattr(each.cause, "template", each.cause),
            "fields": dict(getattr(each.cause, "fields", {})),
            "translations": {language: _texts(each, language) for language in others},
        }
        for name, each in found
    ]
    failures, warnings = _counts(found)
    return {"schema": VERSION, "cuadrilla": __version__, "failures": failures, "warnings": warnings, "findings": rows}


def _texts(each: Diagnosis, language: str) -> dict[str, str]:
    texts = {"cause": each.cause, "remedy": each.remedy, "place": PLACES[each.shell] if each.command else ""}
    return {name: shown(text, language) for name, text in texts.items()}


def _counts(found: Sequence[Found]) -> tuple[int, int]:
    levels = [each.level for _, each in found]
    return levels.count("failure"), levels.count("warning")


def _show(found: Sequence[Found]) -> None:
    """A line for each finding, and under it what to do: readable without colour."""
    unicode = (stdout().encoding or "").lower().startswith("utf")
    marks = MARKS if unicode else PLAIN_MARKS
    emit("cuadrilla {version}", version=__version__)
    for name, each in found:
        emit(" {mark} {check:20} {cause}", mark=marks[each.level], check=name, cause=each.cause)
        if each.level != "ok" and each.command:
            emit("     {place}:  {command}", place=PLACES[each.shell], command=each.command)
        if each.level != "ok" and each.remedy:
            emit("     {remedy}", remedy=each.remedy)
    failures, warnings = _counts(found)
    emit("{failures} broken, {warnings} to look at", failures=failures, warnings=warnings)
    if any(each.fixable for _, each in found):
        emit("`cuadrilla doctor --fix` offers to type some of these commands")


def _fix(found: Sequence[Found], *, port: int | None, devices_seconds: float) -> list[Found]:
    """Ask before each command, type it, look again. What was declined stays."""
    typed = [each for _, each in found if each.fixable and _type(each)]
    if not typed:
        return list(found)
    seen = read_symptoms(port=port, devices_seconds=devices_seconds)
    again = [*examine(seen), *(row for row in found if row[0] not in CHECKS)]
    for each in typed:
        still = any(other.level != "ok" and other.command == each.command for _, other in again)
        say("still there: {cause}" if still else "gone: {cause}", cause=each.cause)
    return again


def _type(each: Diagnosis) -> bool:
    """Whether the command was typed. It asks for a password by itself if it begins with sudo."""
    say("{cause}", cause=each.cause)
    if not ask(Message("type this?  {command}", command=each.command)):
        return False
    try:
        done = subprocess.run(shlex.split(each.command, posix=os.name == "posix"), check=False, stdout=sys.stderr)
    except OSError as error:
        say("it cannot be started: {reason}", reason=error.strerror or error)
        return False
    if done.returncode:
        say("it failed with exit code {code}", code=done.returncode)
    return True
