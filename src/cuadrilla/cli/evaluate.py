"""`cuadrilla eval`: what one run has learnt, or several models side by side."""

import lzma
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.model import Device, about
from cuadrilla.cli.output import emit_json, emit_table, named, options, say
from cuadrilla.cli.progress import shown_progress
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message

if TYPE_CHECKING:
    from cuadrilla.train.eval_metrics import Figure
    from cuadrilla.train.trained import LanguageModel, Trained

    Test = tuple[Message, Callable[[LanguageModel], Figure]]
    """A measure for all language models: what the progress bar says, and the function."""

STORY_PAIRS_SEED = 1  # no training uses pairs of this seed
SCALE_BYTES = 2**20


def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Trained runs, or folders in Hugging Face's layout; several compare."),
    ],
    stories: Annotated[int, typer.Option(min=0, help="Built-in stories: generate this many and check them.")] = 0,
    pairs: Annotated[int, typer.Option(min=0, help="Built-in stories: how many minimal pairs to test.")] = 0,
    text: Annotated[list[Path] | None, typer.Option(help="Bits per byte of this text; may be repeated.")] = None,
    device: Device = "auto",
) -> None:
    """Held-out loss and bits per byte of a run; with more models or test files, a table that compares them."""
    from cuadrilla.train.trained import load_trained, run_of

    run = run_of(models[0])
    if len(models) == 1 and run is not None and not text:
        trained = load_trained(run, device=device)
        say(about(trained))
        _say_on_what(trained)
        result: dict[str, Any] = {"version": trained.step.version, **trained.evaluate(sequences=0)}
        if stories or pairs:
            result |= judged(trained, stories=stories, pairs=pairs)
            del result["examples"]
        show_measures(result)
        if "bits_per_byte" in result:
            _say_scale(models[0])
        return
    if stories:
        hint = "leave it out, or evaluate {path} alone"
        raise ConfigError("--stories works only with one run on its own data", path=models[0], hint=hint)
    tests = _open_tests(models, texts=text or [], pairs=pairs)
    _compare(models, tests, device=device)


def _say_on_what(trained: "Trained") -> None:
    """Say on how many sequences the run is measured, because its training used fewer."""
    total, then = len(trained.task.data("val")), trained.config.evaluate.sequences
    if 0 < then < total:
        say("on all {total:,} held-out sequences; in training on {then:,}", total=total, then=then)


def _say_scale(run: Path) -> None:
    """For comparison, say how well the compressor xz does on the same text."""
    raw = "\n\n".join(_held_out_of([run])[1]()).encode()[:SCALE_BYTES]
    say("fewer are better; xz needs {bits:.2f} bits per byte", bits=8 * len(lzma.compress(raw)) / len(raw))


def judged(trained: Any, *, stories: int, pairs: int) -> dict[str, Any]:
    """Measures on built-in stories and minimal pairs. Raises ConfigError if it is not a language model."""
    from cuadrilla.model.gpt2 import GPT2
    from cuadrilla.model.language import LanguageTask
    from cuadrilla.train.evaluate import judge_stories

    if not (isinstance(trained.task, LanguageTask) and isinstance(trained.model, GPT2)):
        raise ConfigError("--stories and --pairs are for language models", hint="leave them out")
    return judge_stories(
        trained.model, trained.task.tokenizer, num_stories=stories, num_pairs=pairs, temperature=0.8, seed=0
    )


def show_measures(result: dict[str, Any]) -> None:
    """Print a table with a row for each measure; with `--json` the measures themselves."""
    if options.json:
        emit_json(result)
        return
    emit_table(
        [
            {"measure": named(key), "value": _shown(value, error=result.get(f"{key}_error"))}
            for key, value in result.items()
            if not key.endswith("_error")
        ]
    )


def _compare(paths: "Sequence[Path]", tests: "Sequence[Test]", *, device: str) -> None:
    """Measure one model at a time, so that one is in memory. Print a row for each figure, a column for each model."""
    from cuadrilla.train.trained import open_model

    measured: list[dict[str, Any]] = []
    figures: list[list[Figure]] = []
    for path in paths:
        model = open_model(path, device=device)
        say("{path}: {model}", path=path, model=about(model))
        found: list[Figure] = []
        with shown_progress() as progress:
            for name, test in tests:
                progress(name, 0, 0)
                found.append(test(model))
        figures.append(found)
        row: dict[str, Any] = {"model": str(path), "version": model.step and model.step.version}
        row["parameters"] = sum(parameter.numel() for parameter in model.model.parameters())
        row["figures"] = [asdict(each) for each in found]
        measured.append(row)
    if options.json:
        emit_json(measured)
        return
    sizes = {row["model"]: row["parameters"] for row in measured}
    rows: list[dict[str, object]] = [{"measure": named("parameters"), "on": "", **sizes}]
    for same in zip(*figures, strict=True):
        shown = {row["model"]: _shown(each.value, error=each.error) for row, each in zip(measured, same, strict=True)}
        rows.append({"measure": named(same[0].name), "on": same[0].of, **shown})
    emit_table(rows)
    say("± is the standard error; --json has sums, counts and intervals")


def _open_tests(paths: Sequence[Path], *, texts: Sequence[Path], pairs: int) -> "list[Test]":
    """The measures to take. Texts are read before the first model is loaded. Raises DataError for a file that cannot be
    used, ConfigError if there is nothing to measure on."""
    from cuadrilla.data import cuentos
    from cuadrilla.train import eval_metrics

    def on_text(name: str, read: Callable[[], Iterator[str]]) -> "Test":
        return Message("reading {name}", name=name), lambda model: eval_metrics.text_figure(
            model.model, model.tokenizer, read(), of=name
        )

    if not (texts or pairs):
        return [on_text(*_held_out_of(paths))]
    for path in texts:
        deque(eval_metrics.read_texts(path), maxlen=0)  # a text that cannot be read fails here
    tests = [on_text(path.name, partial(eval_metrics.read_texts, path)) for path in texts]
    if pairs:
        name, found = Message("built-in stories"), list(cuentos.minimal_pairs(pairs, seed=STORY_PAIRS_SEED))
        tests.append(
            (
                Message("pairs of {name}", name=name),
                lambda model: eval_metrics.pair_figure(model.model, model.tokenizer, found, of=name),
            )
        )
    return tests


def _held_out_of(paths: Sequence[Path]) -> tuple[str, Callable[[], Iterator[str]]]:
    """Name and documents of the first run's held-out text, on which all models are measured if no text is given."""
    from cuadrilla.data.folder import TOKENIZER, read_manifest
    from cuadrilla.data.tokenizer import Tokenizer
    from cuadrilla.runfile import read_run_config
    from cuadrilla.train.eval_metrics import held_out_texts
    from cuadrilla.train.trained import run_of

    run = next(filter(None, map(run_of, paths)), None)
    if run is None:
        hint = "name a trained run, or a text with --text"
        raise ConfigError("{path} is not a run: there is no held-out text to measure on", path=paths[0], hint=hint)
    folder = run.path / read_run_config(run).data.folder
    read_manifest(folder)  # its error is clearer than the tokenizer's if the folder is missing
    name = Message("held-out text of {path}", path=run.path)
    return name, partial(held_out_texts, folder, Tokenizer.load(folder / TOKENIZER))


def _shown(value: object, *, error: object = None) -> object:
    if isinstance(value, float) and isinstance(error, float):
        return Message("{value:.4f} ± {error:.4f}", value=value, error=error)
    if isinstance(value, float):
        return Message("{value:.4f}", value=value)
    if isinstance(value, dict):
        return ", ".join(f"{named(key)} {count}" for key, count in value.items()) or Message("none")
    return value
