"""`cuadrilla env`: the installed versions, now and when a run was made."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.errors import ConfigError
from cuadrilla.host.environment import compare_environments, read_environment
from cuadrilla.rundir import RunDir, read_regular

NAME_A_RUN = "name a run folder that has been trained"

app = typer.Typer(no_args_is_help=True)


@app.command()
def freeze() -> None:
    """The installed packages as a constraints file (`--json` before the verb: everything as JSON)."""
    environment = read_environment()
    if options.json:
        emit_json(environment)
        return
    emit(
        "# cuadrilla {cuadrilla}, Python {python}, {system}",
        cuadrilla=environment["cuadrilla"],
        python=environment["python"],
        system=environment["system"],
    )
    for name, version in environment["packages"].items():
        emit("{name}=={version}", name=name, version=version)


@app.command()
def diff(
    run: Annotated[Path, typer.Argument(help="A run folder, or an env.json.")],
    other: Annotated[
        Path | None, typer.Argument(help="An environment to compare with (default: this installation).")
    ] = None,
) -> None:
    """What differs between the environment of a run and this one (or another run's). Exit 3 if anything does."""
    rows = compare_environments(_read(run), _read(other) if other else read_environment())
    if rows or options.json:
        emit_table(rows)
    if not rows:
        say("no difference")
        return
    raise typer.Exit(3)


def _read(path: Path) -> dict[str, Any]:
    file = RunDir(path).env if path.is_dir() else path
    try:
        value = json.loads(read_regular(file))
    except (OSError, ValueError) as error:
        raise ConfigError("cannot read {file}: {error}", file=file, error=error, hint=NAME_A_RUN) from error
    if not isinstance(value, dict):
        raise ConfigError("{file} is not an environment", file=file, hint=NAME_A_RUN)
    return value
