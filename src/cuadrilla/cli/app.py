"""The root command and the one boundary at which errors become exit codes."""

import contextlib
import errno
import logging
import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from cuadrilla import __version__
from cuadrilla.cli import check, config, crew, data, env, export, get, model, standby, train
from cuadrilla.cli.demo import demo
from cuadrilla.cli.devices import devices
from cuadrilla.cli.evaluate import evaluate
from cuadrilla.cli.imported import import_model
from cuadrilla.cli.output import options, report_error, say
from cuadrilla.cli.prove import prove
from cuadrilla.cli.report import report
from cuadrilla.engines.supervise import end_with, leave_terminal
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, CuadrillaError, TaskError
from cuadrilla.link.ciphers import allow_only_new_tls

BAD_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
"""What a path can be that no code can foresee; anything else is reported as ours."""

app = typer.Typer(
    name="cuadrilla",
    help="Train one model on all the machines you already own, and rehearse it on one.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _show_version(value: bool) -> None:
    if value:
        print(f"cuadrilla {__version__}")
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Tables and results as JSON.")] = False,
    supervised: Annotated[int, typer.Option(hidden=True, help="A pipe from the parent of this process.")] = -1,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    options.debug = debug
    options.json = json
    options.supervised = supervised >= 0
    if options.supervised:
        end_with(supervised)
        leave_terminal()


app.command()(demo)
app.command()(devices)
data.app.command("get")(get.get_command)
app.add_typer(data.app, name="data", help="Fetch text and prepare it for training.")
app.add_typer(config.app, name="config", help="See what a run file really says.")
app.command()(train.new)
app.command()(train.train)
app.command()(prove)
for verb in (crew.up, crew.join, crew.invite, crew.nodes, crew.kick, crew.trust, crew.leave, crew.down):
    app.command()(verb)
for verb in (standby.standby, standby.promote):
    app.command()(verb)
app.command(hidden=True)(crew.work)
app.add_typer(check.app, name="check", help="Try out what training will need.")
app.command("eval")(evaluate)
app.command()(model.generate)
app.command()(report)
app.command("import")(import_model)
app.add_typer(export.app, name="export", help="Write a run's language model in the forms that other programs open.")
app.add_typer(env.app, name="env", help="The installed versions, now and when a run was made.")


def main() -> None:
    """Run a command; every error ends as one line of cause, one of remedy and a documented exit code."""
    allow_only_new_tls()
    code = _run()
    if "grpc" in sys.modules:
        # Its threads may be inside C++ code; the interpreter's farewell would end them there, by an abort (signal 6).
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _run() -> int:
    """The exit code of the command."""
    try:
        app()
    except SystemExit as leaving:  # how Typer ends
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except CuadrillaError as error:
        if options.debug:
            traceback.print_exc()
        report_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return INTERRUPTED_EXIT_CODE
    except Exception as error:  # the CLI boundary: anything unforeseen is our own bug, or the user's task's
        if options.debug:
            raise
        return _report_unforeseen(error)
    return 0


def _report_unforeseen(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno in BAD_PATHS:
        report_error(ConfigError(f"{error.filename}: {error.strerror}", hint="use another name or folder"))
        return ConfigError.exit_code
    if in_task := _place_in_task(error):
        report_error(TaskError(f"{in_task}: {type(error).__name__}: {error}", hint="--debug shows the traceback"))
        return TaskError.exit_code
    say(f"error: unexpected {type(error).__name__}: {error}")
    say("\nhint: run the same command with `cuadrilla --debug ...` and report what it prints")
    return 1


def _place_in_task(error: BaseException) -> str:
    """`file.py:12 in loss` when the error came up in a user's task file or beside it; else nothing."""
    task = sys.modules.get("cuadrilla.model.task")  # not imported here: it would import torch
    prefix = getattr(task, "MODULE_PREFIX", None)
    files = [module.__file__ for name, module in sys.modules.items() if prefix and name.startswith(prefix)]
    folders = {Path(file).parent for file in files if file}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).parent in folders:
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return ""
