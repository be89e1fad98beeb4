"""The root command and the one boundary at which errors become exit codes."""

import contextlib
import errno
import gc
import gettext
import inspect
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cuadrilla.cli.output import keep_answer_apart, options, report_error, say
from cuadrilla.cli.verbs import INSTEAD, VERBS
from cuadrilla.crew.children import end_with_parent
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, CuadrillaError, ResourceError
from cuadrilla.host.process import keep_freed_memory, sleep_early
from cuadrilla.log import show_log, silence_grpc
from cuadrilla.messages import LANGUAGES, LOCALE, VARIABLES, Message, language, translated
from cuadrilla.user_file import as_task_error, place_of
from cuadrilla.version import __version__

BAD_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
"""Errors of paths that a user has typed: reported as ConfigError. Other unforeseen errors are reported as our bugs."""
EVERYWHERE = Message("With every command: --json for data, --debug for tracebacks, --lang en|es.")
UsageError: Any = typer.BadParameter.__base__
USAGE = Message("Usage:")
OF_TYPER = (
    Message("Arguments"), Message("Options"), Message("Commands"), Message("[default: {}]"), Message("[required]"),
    Message("[OPTIONS]"), Message("COMMAND [ARGS]..."), Message("No such command {name!r}.", name=""),
    Message("Show this message and exit."), Message("Install completion for the current shell."),
    Message("Show completion for the current shell, to copy it or customize the installation."),
    Message("<int>"), Message("<float>"), Message("<str>"), Message("<path>"),
)  # fmt: skip
"""Typer's own words, listed for their translation. It asks gettext for most of them."""
log = logging.getLogger(__name__)


class Root(typer.core.TyperGroup):
    """Passes an interruption on, which Typer's own group takes for an exit."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


def root(
    supervised: Annotated[bool, typer.Option("--supervised", hidden=True, help="A child that coordinates.")] = False,
    _version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    options.supervised = supervised
    if supervised:
        end_with_parent()
        if options.json:
            keep_answer_apart()
        if hasattr(signal, "SIGTTOU"):
            signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # in the background it may still write, and move the cursor


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """The root command with only the called command, or with a list of all: to import all modules takes a second."""
    app = typer.Typer(
        name="cuadrilla",
        cls=Root,
        help="Train one model on all the machines you already own, and rehearse it on one.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(root)
    called = next((word for word in arguments if not word.startswith("-")), "")
    if called in VERBS:
        found = getattr(import_module(f"cuadrilla.cli.{VERBS[called].module}"), VERBS[called].name)
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=called, help=VERBS[called].help)
        else:
            app.command(called)(found)
        return app
    for word, verb in VERBS.items():
        app.command(word, hidden=not verb.panel, help=verb.help, rich_help_panel=verb.panel)(lambda: None)
    return app


def _completed() -> list[str]:
    """The words of the command line to complete, from the variables that Typer's shell scripts set."""
    return (os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS") or "").split()[1:]


def main() -> None:
    """Run a command; every error ends as one line of cause, one of remedy and a documented exit code."""
    keep_freed_memory()  # training, evaluation, generation and preparation allocate the same blocks again and again
    sleep_early()
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # else cuda:1 may not be nvidia-smi's card 1
    silence_grpc()
    threading.excepthook = report_thread
    code = run()
    if "grpc" in sys.modules:
        # Its threads may be inside C++ code. The interpreter's shutdown would end them there, by an abort (signal 6).
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    gc.freeze()  # else the interpreter's last collection scans torch's objects: a third of a second
    sys.exit(code)


def run() -> int:
    """Run the command in `sys.argv`, and return its exit code."""
    try:
        arguments = _without_global_flags(sys.argv[1:])
        show_log(verbose=options.debug)
        if arguments == ["--version"]:
            print(f"cuadrilla {__version__}")
            return 0
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        elif arguments and not arguments[0].startswith("-") and arguments[0] not in VERBS:
            close = get_close_matches(arguments[0], VERBS, 1) or ["--help"]
            instead = INSTEAD.get(arguments[0], close[0])
            raise ConfigError("no command {word}", word=arguments[0], hint="cuadrilla {instead}", instead=instead)
        gettext.bindtextdomain("cuadrilla", LOCALE)
        gettext.textdomain("cuadrilla")  # Typer's words are in our catalogue
        command = typer.main.get_command(command_line(arguments or _completed()))
        translate_help(command, language())
        code = command(arguments, prog_name="cuadrilla", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except UsageError as error:
        if type(error).__name__ != "NoArgsIsHelpError":  # that one has shown the help already
            report_error(_usage(error))
        return ConfigError.exit_code
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except CuadrillaError as error:
        if options.debug:
            traceback.print_exc()
        report_error(error)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return INTERRUPTED_EXIT_CODE
    except Exception as error:  # the CLI boundary: anything unforeseen is our own bug, or the user's task's
        if options.debug:
            raise
        ours = _in_words(error)
        report_error(ours)
        return ours.exit_code


def _without_global_flags(arguments: Sequence[str]) -> list[str]:
    """Apply and remove `--json`, `--debug` and `--lang`, wherever they stand before `--`. Raises ConfigError."""
    left, following = list[str](), iter(arguments)
    options.json = options.debug = False
    for word in following:
        match word.partition("="):
            case ["--", "", ""]:
                return [*left, word, *following]
            case ["--json", "", ""]:
                options.json = True
            case ["--debug", "", ""]:
                options.debug = True
            case ["--lang", _, chosen]:
                if (chosen := chosen or next(following, "")) not in LANGUAGES:
                    raise ConfigError("unknown language {chosen!r}", chosen=chosen, hint="--lang en, or --lang es")
                os.environ[VARIABLES[0]] = chosen  # so that child processes use it, too
            case _:
                left.append(word)
    return left


def translate_help(command: Any, reads: str) -> None:
    """Translate the help of a command that Typer has made, with its options and subcommands."""
    context = typer.Context(command)
    for part in (command, *command.get_params(context)):
        for name in ("help", "rich_help_panel", "options_metavar", "subcommand_metavar"):
            if text := getattr(part, name, None):
                setattr(part, name, translated(inspect.cleandoc(text), reads))
    for part in command.get_params(context):
        part.display_type_rich = partial(_kind, part.display_type_rich, reads)
    usage = command.get_usage
    command.get_usage = lambda context: usage(context).replace(USAGE, translated(USAGE, reads), 1)
    command.epilog = translated(EVERYWHERE, reads)
    for inner in getattr(command, "commands", {}).values():
        translate_help(inner, reads)


def _kind(of_typer: Callable[[Any], str], reads: str, *, ctx: Any) -> str:
    """The kind of an option's value: `<str>` for Typer's `<list[str]>`, `<int>` for `<int range>`, none for a flag."""
    return translated(re.sub(r"<bool>| range|list\[(\w+)\]", r"\1", of_typer(ctx)).lower(), reads)


def _usage(error: Any) -> ConfigError:
    """Typer's usage error as a ConfigError: Typer itself has only English texts."""
    of = error.ctx.command_path if error.ctx else "cuadrilla"
    hint = "{of} --help"
    parameter = getattr(error, "param", None)
    if option := getattr(error, "option_name", ""):
        missing = "requires an argument" in error.message
        return ConfigError(
            "{name}: a value is missing" if missing else "{name}: no such option", name=option, hint=hint, of=of
        )
    if found := re.search(r"unexpected extra argument\(s\) \((.*)\)", error.message):
        return ConfigError("too many arguments: {words}", words=found[1], hint=hint, of=of)
    if parameter is None:
        return ConfigError("{reason}", reason=error.format_message(), hint=hint, of=of)
    if not error.message:
        return ConfigError("{name} is missing", name=parameter.get_error_hint(), hint=hint, of=of)
    reason = error.message
    if isinstance(cause := error.__cause__, ValidationError):
        from cuadrilla.runfile import in_our_words

        reason = in_our_words(cause.errors()[0])
    if found := re.search(r" is not one of (.*)\.", reason):
        reason = Message("should be one of {choices}", choices=found[1])
    elif found := re.search(r"path '(.*)' does not exist", reason):
        reason = Message("{path} does not exist", path=found[1])
    return ConfigError("{name}: {reason}", name=parameter.get_error_hint(), reason=reason, hint=hint, of=of)


def _in_words(error: Exception) -> CuadrillaError:
    if isinstance(error, OSError) and error.errno in BAD_PATHS:
        hint = "use another name or folder"
        return ConfigError("{name}: {reason}", name=error.filename, reason=error.strerror, hint=hint)
    if place_of(error):
        return as_task_error(error)
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        where, reason = error.filename or Message("what this command prints"), error.strerror
        return ResourceError("cannot write {where}: {reason}", where=where, reason=reason, hint="free some space")
    hint = "run the same command with `cuadrilla --debug ...` and report what it prints"
    return CuadrillaError("unexpected {kind}: {error}", kind=type(error).__name__, error=error, hint=hint)


def report_thread(failure: threading.ExceptHookArgs) -> None:
    """Report an error that has ended a thread, often a library's: one line on stderr, the traceback in the log."""
    if options.debug or failure.exc_value is None:
        threading.__excepthook__(failure)
    elif not isinstance(failure.exc_value, SystemExit):
        name = failure.thread.name if failure.thread else "a thread"
        log.error("%s has failed: %s: %s", name, failure.exc_type.__name__, failure.exc_value)
        log.info("how it failed:", exc_info=failure.exc_value)
