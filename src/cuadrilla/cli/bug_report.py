"""`cuadrilla bug-report`: what whoever looks into a problem needs, without secrets, shown before it is written."""

import io
import sys
import zipfile
from pathlib import Path
from typing import Annotated, Any

import typer

from cuadrilla.cli.doctor import report as findings_of
from cuadrilla.cli.output import ask, emit, say
from cuadrilla.doctor.checks import examine
from cuadrilla.doctor.facts import read_symptoms
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message
from cuadrilla.monitor.bug_report import NAME_OF_FILE, run_folder, write_report
from cuadrilla.rundir import require_regular, write_atomic

STDOUT = "-"


def bug_report(
    run: Annotated[
        Path | None, typer.Argument(metavar="RUN", help="A run folder or its run.toml that the problem is about.")
    ] = None,
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="The file to write, .zip to pack it; - only prints it.")
    ] = NAME_OF_FILE,
    yes: Annotated[bool, typer.Option("--yes", help="Write it without asking.")] = False,
    with_samples: Annotated[
        bool, typer.Option("--with-samples", help="Also what the model has written, and what it was asked.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(min=0.1, max=600, help="Seconds to wait for a driver that does not answer.")
    ] = 20.0,
) -> None:
    """Collect what is needed to look into a problem: this machine, its versions, and a run's settings, events and logs.

    Keys, tokens, invites, names and addresses are taken out. The whole report is shown before it is written, nothing is
    sent anywhere. Read it: a secret that looks like a plain word is not recognised.
    """
    path = None if out == STDOUT else Path(out)
    _check(path, yes=yes)
    folder = run_folder(run) if run is not None else None
    say("looking at this machine ...")
    seen = read_symptoms(devices_seconds=timeout)
    findings: dict[str, Any] = findings_of(list(examine(seen)))
    text = write_report(folder, devices=seen.devices, findings=findings, with_samples=with_samples)
    emit("{report}", report=text, end="")
    if path is None:
        return
    if yes or ask(Message("write it to {path}?", path=path)):
        write_atomic(path, _packed(text) if path.suffix.lower() == ".zip" else text, private=True)
        say("written: {path}. Read it once more before you hand it on.", path=path)
    else:
        say("nothing was written")


def _check(path: Path | None, *, yes: bool) -> None:
    """Before the time is spent. Raises ConfigError."""
    if path is None:
        return
    if not yes and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError(
            "a report is written only when somebody has seen it, and this is no terminal",
            hint="--out - prints it; --yes writes it",
        )
    if path.exists():
        try:
            require_regular(path)
        except OSError as error:
            hint = "name the file to write: --out {name}"
            raise ConfigError(
                "cannot write {path}: {reason}", path=path, reason=error.strerror, hint=hint, name=NAME_OF_FILE
            ) from error


def _packed(text: str) -> bytes:
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w", compression=zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(NAME_OF_FILE, text)
    return raw.getvalue()
