"""`cuadrilla new` and `cuadrilla train`."""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.config import RunFile, Sets
from cuadrilla.cli.output import emit_json, options, say, say_at_once
from cuadrilla.cli.parent import under_a_parent
from cuadrilla.config import Config, CrewEngine, LocalEngine, ModelSection, NesterovSection, ServerSync
from cuadrilla.errors import INTERRUPTED_EXIT_CODE, ConfigError
from cuadrilla.host.environment import read_environment
from cuadrilla.log import set_up_logging, tear_down_logging
from cuadrilla.rundir import FolderLock, RunDir, make_private, typed, write_atomic, write_json
from cuadrilla.runfile import Resolved, dump, quoted, read_run_config, read_run_file

if TYPE_CHECKING:
    from cuadrilla.engines.crew import Opening
    from cuadrilla.train.coordinate import Outcome
    from cuadrilla.train.metrics import Sink
    from cuadrilla.train.setup import Parts

PRESETS = {  # tokens, batch, unit: where a first run of this size makes sense
    "micro": (3_000_000, 64, 16),
    "mini": (20_000_000, 64, 16),
    "small": (2_500_000_000, 480, 8),
}

LONG_SECONDS = 2 * 3600.0


def new(
    name: Annotated[Path, typer.Argument(help="The folder to make.")],
    preset: Annotated[str, typer.Option(help="gpt2-micro, gpt2-mini or gpt2-small.")] = "gpt2-mini",
    data: Annotated[
        str, typer.Option(help="The prepared data folder, as seen from here or the new folder.")
    ] = "../data",
) -> None:
    """Make a run folder with a commented run.toml."""
    size = preset.removeprefix("gpt2-")
    if size not in PRESETS:
        raise ConfigError(f"unknown preset {preset}", hint="use gpt2-micro, gpt2-mini or gpt2-small")
    target = name / "run.toml"
    if target.exists():
        raise ConfigError(f"{target} exists", hint="choose another name, or edit that file")
    text = run_file_text(size, data=seen_from(name, data))
    make_private(name)
    write_atomic(target, text)
    say(f"wrote {target}\n\nnext: cuadrilla train {typed(target)}")


def seen_from(run: Path, data: str) -> str:
    """A data folder as a run file names it, whether it was typed so or as seen from here."""
    return os.path.relpath(data, run) if not (run / data).exists() and Path(data).exists() else data


def run_file_text(size: str, *, data: str) -> str:
    """A commented run file for a language model of this size."""
    tokens, batch, unit = PRESETS[size]
    folder = quoted(data.replace("\\", "/"))
    return f"""\
# A run of cuadrilla. `cuadrilla config show --help-text` explains every key; what is not here has its default.
schema = 1

[run]
seed = 0                    # initial weights, order of the data, every random number

[data]
folder = {folder}        # written by `cuadrilla data prepare`

[model]
preset = "{size}"           # micro, mini, small (124M), medium, large, xl

[train]
tokens = {tokens}           # or epochs = 3, or steps = 1000
batch_sequences = {batch}   # the global batch, shared by all workers
unit_sequences = {unit}     # the atom of work
# precision = "auto"        # bf16 where the machine multiplies it natively; the choice and its reason are printed
# device = "auto"           # cuda, mps, xpu, cpu

[optim]
kind = "muon"               # Muon for the matrices, AdamW for the rest; or kind = "adamw"
# lr = 0.02

[schedule]
warmup = 0.02               # parts of the run
cooldown = 0.6

[checkpoint]
every_seconds = 60

[sample]
prompt = ""
"""


def train(
    run: RunFile = Path("run.toml"),
    sets: Sets = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume with another learning rate, batch or length.")
    ] = False,
    stop_at: Annotated[int, typer.Option(min=0, help="Checkpoint and stop at this step (0: at the end).")] = 0,
    practice: Annotated[
        str,
        typer.Option(
            metavar="SPEEDS[@LINK]",
            help="Rehearse a crew: a worker process for each speed, on a link of this shape, as in "
            '"1.0,0.5,0.25@100mbit+20ms".',
        ),
    ] = "",
) -> None:
    """Train, or go on where a run stopped. Ctrl-C saves and stops; the same command resumes."""
    more = practice_sets(practice) if practice else []
    resolved = read_run_file(run, sets=[*(sets or []), *more], processes=bool(practice))
    folder = RunDir((run if run.is_dir() else run.parent).resolve())
    say_kept(resolved)
    if isinstance(resolved.config.engine, CrewEngine):
        under_a_parent(folder)
    report_outcome(train_run(resolved, folder, allow_changes=allow_changes, stop_at=stop_at), folder)


def say_kept(resolved: Resolved) -> None:
    """What still holds though it was not typed this time; once, by the process that a person started."""
    if resolved.kept and not options.supervised:
        say(f"from an earlier start: {', '.join(resolved.kept)}  (--set changes it)")


def report_outcome(outcome: "Outcome", folder: RunDir) -> None:
    """Say how a training ended and what to type next. Raises typer.Exit when it was interrupted."""
    from cuadrilla.train.metrics import finite

    if options.json:
        emit_json(
            {
                "version": outcome.version,
                "tokens": outcome.tokens,
                "complete": outcome.complete,
                **finite(outcome.last_row),
            }
        )
    if outcome.best is not None and outcome.best != outcome.version:
        say(f"best       step {outcome.best} has the lowest held-out loss: `eval` and its like take it, or --newest")
    if outcome.complete:
        say(f"\nnext: cuadrilla eval {typed(folder.path)}")
        if read_run_config(folder).task.kind == "language":
            say(f"      cuadrilla generate {typed(folder.path)}")
    elif outcome.interrupted:
        say(f"\n{outcome.reason} at step {outcome.version} and saved; the same command goes on from there")
        raise typer.Exit(INTERRUPTED_EXIT_CODE)
    else:
        say(f"\n{outcome.reason}: saved; the same command goes on from there")


def practice_sets(text: str) -> list[str]:
    """`SPEEDS[@LINK]` as values of the section `engine`. Raises ConfigError."""
    speeds, _, link = text.partition("@")
    if not re.fullmatch(r"\s*\d+(\.\d+)?\s*(,\s*\d+(\.\d+)?\s*)*", speeds):
        raise ConfigError(
            f"--practice {text}: {speeds!r} is not a list of speeds", hint='write it as "1.0,0.5,0.25@100mbit+20ms"'
        )
    workers = [float(speed) for speed in speeds.split(",")]
    return [f"engine.workers={workers}", f'engine.link="{link.strip()}"']


def train_run(
    resolved: Resolved,
    folder: RunDir,
    *,
    allow_changes: bool = False,
    stop_at: int = 0,
    opening: "Opening | None" = None,
    more_sinks: "Sequence[Sink]" = (),
) -> "Outcome":
    """Train one run directory under its lock, with progress on stderr. `opening`: of a crew that is not practice."""
    from cuadrilla.engines.ray.cluster import cluster_of

    home, engine = opening.home if opening else None, resolved.config.engine
    nodes = opening.ray_nodes if opening else frozenset[str]()
    with (
        FolderLock(folder.lock, purpose="training"),
        _logging_to(folder.logs),
        cluster_of(engine, folder, practice=home is None, nodes=nodes) as cluster,
    ):
        from cuadrilla.engines.local import run_local, stop_on_signals  # torch is loaded while Ray is being started
        from cuadrilla.train.metrics import JsonlSink
        from cuadrilla.train.setup import assemble, make_task
        from cuadrilla.train.teachers import keep_teachers

        sinks: list[Sink] = []
        try:
            task = make_task(resolved.config, folder.path)
            keep_teachers(resolved.config, folder, task=task)
            sinks.append(JsonlSink(folder.metrics))
            parts = assemble(
                resolved.config, folder, task=task, sinks=sinks, allow_changes=allow_changes, stop_at=stop_at
            )
            write_json(folder.config, {"values": dump(resolved.config), "origins": resolved.origins}, private=True)
            write_json(folder.env, read_environment(), private=True)
            sinks.extend([*_views(resolved.config, folder, parts), *more_sinks])
            _introduce(resolved.config, parts)
            with stop_on_signals(parts.coordination.request_stop, answer=say_at_once, home=home):
                match resolved.config.engine:
                    case LocalEngine():
                        return run_local(parts, tell=say)
                    case CrewEngine():
                        from cuadrilla.engines.crew import Opening, run_crew

                        return run_crew(parts, folder, opening=replace(opening or Opening(), cluster=cluster))
        finally:
            for sink in sinks:
                sink.close()


@contextmanager
def _logging_to(folder: Path) -> Iterator[None]:
    """From before Ray is started, which has its say at once."""
    make_private(folder)
    handler = set_up_logging(folder, worker="coordinator", verbose=options.debug)
    try:
        yield
    finally:
        tear_down_logging(handler)


def _views(config: Config, folder: RunDir, parts: "Parts") -> "list[Sink]":
    from cuadrilla.cli.progress import ProgressSink
    from cuadrilla.train.metrics import TensorBoardSink

    progress = ProgressSink(
        total_versions=parts.length.num_versions,
        done=parts.resumed_at,
        total_tokens=parts.length.total_tokens,
        counted=parts.task.defaults.counted,
        advise=partial(name_smaller, config, parts.length.total_tokens),
    )
    if importlib.util.find_spec("tensorboard") is None:
        return [progress]
    return [progress, TensorBoardSink(folder.tensorboard)]


def name_smaller(config: Config, tokens: int, seconds: float) -> str:
    """The next smaller model, where this one takes hours: what it would take by the operations that both need."""
    from cuadrilla.cli.progress import in_words

    sizes = list(PRESETS)
    position = sizes.index(config.model.preset) if config.model.preset in PRESETS else len(sizes)
    if config.task.kind != "language" or config.model.init or seconds < LONG_SECONDS or not position:
        return ""
    size = sizes[position - 1]
    smaller = operations(ModelSection.model_validate({"preset": size}).shape) * PRESETS[size][0]
    share = smaller / (operations(config.model.shape) * tokens)
    return f" (gpt2-{size} about {in_words(share * seconds)}: cuadrilla new NAME --preset gpt2-{size})"


def operations(shape: tuple[int, int, int, int]) -> float:
    """Of a token's forward and backward pass in a GPT-2 of (layers, heads, width, context), with 8,192 tokens."""
    layers, _, width, context = shape
    return 6 * (12 * layers * width**2 + 8192 * width + layers * width * context)


def _introduce(config: Config, parts: "Parts") -> None:
    from cuadrilla.train.setup import has_several_workers

    num_parameters = sum(parameter.numel() for parameter in parts.model.parameters())
    say(
        f"model      {num_parameters / 1e6:.2f} M parameters\n"
        f"device     {parts.device}, {parts.precision}\n"
        f"workers    {len(config.engine.workers)}{' processes' if config.engine.kind != 'local' else ''}\n"
        f"run        {parts.length.num_versions} steps of {parts.length.round_tokens:,} {parts.task.defaults.counted}"
    )
    if parts.resumed_at:
        say(f"resumed    at step {parts.resumed_at}")
    if isinstance(config.sync, ServerSync) and has_several_workers(config):
        say(f"sync       server: a step for each answer, staleness at most {config.sync.staleness}")
        for key, note in asynchronous_notes(config, config.sync):
            say(f"note       {key}: {note}")


def asynchronous_notes(config: Config, sync: ServerSync) -> list[tuple[str, str]]:
    """(setting, why another value may serve better) for several asynchronous workers."""
    notes, optim = [], config.optim
    if sync.staleness + 1 < len(config.engine.workers):
        notes.append(("sync.staleness", f"{sync.staleness} lets {sync.staleness + 1} workers work at a time"))
    delayed = isinstance(optim, NesterovSection) and (optim.delay > 1 or optim.momentum == 0)
    if not delayed:
        text = (
            f"{optim.kind} keeps momentum, and momentum of stale gradients slows asynchronous training\n"
            '           (arXiv 2401.09135); "nesterov" with optim.delay > 1 was made for it'
        )
        notes.append(("optim.kind", text))
    return notes
