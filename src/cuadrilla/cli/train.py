"""`cuadrilla new` and `cuadrilla train`."""

import importlib.util
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.config import AllowChanges, Preset, Sets, folder_of, show_config
from cuadrilla.cli.output import advise, answered, say
from cuadrilla.cli.parent import stopping, under_a_parent
from cuadrilla.cli.progress import ProgressSink, describe_evaluation
from cuadrilla.cli.texts import is_text, run_of_texts, speed_here
from cuadrilla.config import CrewEngine
from cuadrilla.crew.run import Audience, train_run
from cuadrilla.data.folder import MANIFEST, read_manifest
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError, CuadrillaError
from cuadrilla.host.torchrun import find_place
from cuadrilla.monitor.screen import duration
from cuadrilla.plan.size import MANY_READINGS
from cuadrilla.rundir import RunDir, finite, last_rows, typed
from cuadrilla.runfile import (
    SIZES,
    Resolved,
    as_sets,
    gpt2_settings,
    make_run,
    read_run_config,
    read_run_file,
    run_file_text,
)

if TYPE_CHECKING:
    from cuadrilla.crew.up import Opening
    from cuadrilla.train.runtime import Outcome
    from cuadrilla.train.setup import RunContext
    from cuadrilla.train.sinks import Sink

PAGE = "report.html"


def new(
    name: Annotated[Path, typer.Argument(help="The folder to make.")],
    preset: Annotated[Preset, typer.Option(help="The size of the model.")] = "gpt2-mini",
    data: Annotated[Path, typer.Option(help="The folder that `data prepare` has made or will make.")] = Path("data"),
) -> None:
    """Make a run folder with a commented run.toml."""
    size = preset.removeprefix("gpt2-")
    if (name / MANIFEST).exists():
        raise ConfigError("{path} holds prepared data", path=name, hint="choose another name for the run")
    folder = str(data) if data.is_absolute() else os.path.relpath(data, name)
    text = read_manifest(data).splits["train"].num_tokens if (data / MANIFEST).exists() else 0

    def run_file(size: str) -> str:
        usual, _ = SIZES[size]
        tokens = min(usual, round(MANY_READINGS * text)) if text else usual
        return run_file_text(gpt2_settings(size, data=folder, tokens=tokens))

    made = make_run(name, run_file(size))
    say("wrote {file}", file=typed(made.run_file))
    if text:
        say("measuring  this machine: about ten seconds")
        try:
            for each in dict.fromkeys((size, *list(SIZES)[:1])):
                speed, tokens = speed_here(made, run_file(each))
                say("time       gpt2-{size} takes about {time} here", size=each, time=duration(tokens / speed))
        except CuadrillaError as error:  # the run may be for another machine
            say("           not here: {reason}", reason=error.message)
    else:
        say("data       are not there yet: cuadrilla data prepare TEXTS --out {folder}", folder=typed(data))
    advise(f"train {typed(made.path)}")


def train(
    what: Annotated[
        list[str] | None,
        typer.Argument(metavar="RUN|TEXT", help="A run folder or run file; or texts, folders of them, a corpus."),
    ] = None,
    sets: Sets = None,
    epochs: Annotated[float, typer.Option(min=0, help="train.epochs: how often the text is read.")] = 0,
    tokens: Annotated[str, typer.Option(metavar="1M", help="train.tokens: the run's length, as in 300k or 1M.")] = "",
    steps: Annotated[int, typer.Option(min=0, help="train.steps: the run's length.")] = 0,
    batch: Annotated[int, typer.Option(min=0, help="train.batch_sequences: sequences in a step.")] = 0,
    lr: Annotated[float, typer.Option(min=0, help="optim.lr: the learning rate.")] = 0,
    within: Annotated[
        str, typer.Option("--time", metavar="20m", help="For texts: how long it may take in all, as in 90s or 1h30m.")
    ] = "20m",
    name: Annotated[str, typer.Option(help="For texts: the run folder to make (TEXT-gpt2).")] = "",
    preset: Annotated[Preset | None, typer.Option(help="For texts: this size, not the one that fits the time.")] = None,
    allow_changes: AllowChanges = False,
    stop_at: Annotated[int, typer.Option(min=0, help="Checkpoint and stop at this step (0: at the end).")] = 0,
    practice: Annotated[
        str,
        typer.Option(
            metavar="SPEEDS[@LINK]",
            help="Rehearse a crew: a worker process for each speed, over a link with this bandwidth and delay, "
            'as in "1.0,0.5,0.25@100mbit+20ms".',
        ),
    ] = "",
    show: Annotated[
        bool,
        typer.Option(
            "--show-config", help="Only show every value of the run and its origin; without a run, what each key means."
        ),
    ] = False,
) -> None:
    """Train a run, or make a model of texts. Ctrl-C saves and stops; the same command goes on from there."""
    began, words = time.monotonic(), what or ["run.toml"]
    length = {"train.epochs": epochs, "train.tokens": count_of(tokens) if tokens else 0, "train.steps": steps}
    flags = {**length, "train.batch_sequences": batch, "optim.lr": lr}
    settings = {key: value for key, value in flags.items() if value}
    of_texts = is_text(words[0]) or len(words) > 1 or bool(name or preset)
    if of_texts:
        size = (preset or "").removeprefix("gpt2-")
        run = run_of_texts(words, name=name, within=within, size=size, settings=settings).path
    else:
        run = Path(words[0])
        if what and run.suffix != ".toml" and not (any(run.iterdir()) if run.is_dir() else run.exists()):
            raise ConfigError(
                "there is no text and no run {name}", name=run, hint="name a file or folder of text, or a run"
            )
    if show:
        show_config(run if what or run.exists() else None, sets or [])
        return
    more = [*(practice_sets(practice) if practice else []), *as_sets(settings)]
    resolved = read_run_file(run, sets=[*(sets or []), *more])
    folder = folder_of(run)
    if isinstance(resolved.config.engine, CrewEngine):
        under_a_parent(folder)
    outcome = train_and_show(resolved, folder, allow_changes=allow_changes, stop_at=stop_at)
    if (place := find_place()) is None or place.leads:
        if outcome.complete and not outcome.last_row:
            say("complete   nothing was left to train; more: --epochs N --allow-changes")
        if has_page := bool(outcome.version) and (of_texts or (folder.path / PAGE).exists()):
            from cuadrilla.monitor.web.page import save_page

            save_page(folder, folder.path / PAGE)
        report_outcome(outcome, folder, seconds=time.monotonic() - began, has_page=has_page)


def report_outcome(outcome: "Outcome", folder: RunDir, *, seconds: float, has_page: bool = False) -> None:
    """Say how a training ended and what to type next. Raises typer.Exit if it was interrupted."""
    head = {key: getattr(outcome, key) for key in ("version", "tokens", "complete")}
    answered({**head, **finite(outcome.last_row)})
    if outcome.best is not None and outcome.best != outcome.version:
        say(
            "best       step {step} has the lowest held-out loss: `eval`, `generate` and `export` use it",
            step=outcome.best,
        )
    if outcome.complete:
        _say_what_was_learned(outcome, folder, seconds=seconds)
        verbs = ("eval", "generate", "serve") if read_run_config(folder).task.kind == "language" else ("eval",)
        advise(*(f"{verb} {typed(folder.path)}" for verb in verbs))
        if has_page:
            say("      curves, samples, settings: {page}", page=typed(folder.path / PAGE))
    elif outcome.interrupted:
        say(
            "\n{reason} at step {step} and saved; the same command continues from there",
            reason=outcome.reason,
            step=outcome.version,
        )
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    else:
        say("\n{reason}: saved; the same command continues from there", reason=outcome.reason)


def _say_what_was_learned(outcome: "Outcome", folder: RunDir, *, seconds: float) -> None:
    """Print the held-out measure and the sample of the best step."""
    rows = [row for row in last_rows(folder.metrics) if "val_loss" in row]
    if not rows:
        say(
            "done       in {time}; no measure: no held-out data, or less than one sequence",
            time=duration(seconds),
        )
        return
    best = next((row for row in rows if row["version"] == outcome.best), rows[-1])
    say("done       in {time}: {evaluation}", time=duration(seconds), evaluation=describe_evaluation(best))
    if sample := best.get("sample"):
        say("\nit writes:\n\n{sample}", sample=sample)


def count_of(text: str) -> int:
    """The number that a text such as 300k, 1M or 2.5G stands for. Raises ConfigError."""
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([kMG]?)", text)):
        raise ConfigError("{text!r} is not a number", text=text, hint="write it as 300k, 1M or 2.5G")
    return round(float(found[1]) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9}[found[2]])


def practice_sets(text: str, *, option: str = "--practice") -> list[str]:
    """`--set` values for the section `engine` from `SPEEDS[@LINK]`. Raises ConfigError."""
    speeds, _, link = text.partition("@")
    if not re.fullmatch(r"\s*\d+(\.\d+)?\s*(,\s*\d+(\.\d+)?\s*)*", speeds):
        template = "{option} {text}: {speeds!r} is not a list of speeds"
        hint = 'write it as "1.0,0.5,0.25@100mbit+20ms"'
        raise ConfigError(template, option=option, text=text, speeds=speeds, hint=hint)
    return ['engine.kind="crew"', f"engine.workers=[{speeds}]", f'engine.link="{link.strip()}"']


def train_and_show(
    resolved: Resolved,
    folder: RunDir,
    *,
    allow_changes: bool = False,
    stop_at: int = 0,
    opening: "Opening | None" = None,
    more_sinks: "Sequence[Sink]" = (),
) -> "Outcome":
    """Call `train_run` with messages and progress on stderr. `opening`: how a crew is opened, if it is not practice."""

    def sinks(context: "RunContext") -> "list[Sink]":
        from cuadrilla.train.sinks import TensorBoardSink

        counted = context.task.defaults.counted
        progress = ProgressSink(total_versions=context.length.num_steps, done=context.resumed_at, counted=counted)
        has_board = importlib.util.find_spec("tensorboard") is not None
        return [progress, *([TensorBoardSink(folder.tensorboard)] if has_board else []), *more_sinks]

    audience = Audience(tell=say, stopping=stopping, sinks=sinks)
    return train_run(resolved, folder, allow_changes=allow_changes, stop_at=stop_at, opening=opening, audience=audience)
