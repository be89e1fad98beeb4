"""`cuadrilla eval`: what models have learnt, side by side."""

import lzma
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.model import Device, about
from cuadrilla.cli.output import answered, emit_table, named, say
from cuadrilla.cli.progress import shown_progress
from cuadrilla.errors import ConfigError, DataError
from cuadrilla.messages import Message

if TYPE_CHECKING:
    from cuadrilla.train.trained import LanguageModel, Trained

Texts = Mapping[str, Sequence[str]]
"""Documents, by what the whole text is called."""
Measures = Mapping[str, Mapping[str, Any]]
"""What was measured, by what it was measured on. NAME_error is the standard error of NAME."""
SCALE_BYTES = 2**20


def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Trained runs, or folders in Hugging Face's layout; several compare."),
    ],
    stories: Annotated[int, typer.Option(min=0, help="Built-in stories: generate this many and check them.")] = 0,
    pairs: Annotated[int, typer.Option(min=0, help="Built-in stories: how many minimal pairs to test.")] = 0,
    text: Annotated[
        list[Path] | None, typer.Option(help="Measure on this text, not on the held-out one; may be repeated.")
    ] = None,
    device: Device = "auto",
) -> None:
    """What models have learnt: bits per byte of held-out or any other text; of your own task, its own measures."""
    from cuadrilla.runfile import read_run_config
    from cuadrilla.train.trained import load_trained, open_model, run_of

    run, is_plain = run_of(models[0]), len(models) == 1 and not (text or stories or pairs)
    if run is not None and is_plain and read_run_config(run).task.kind != "language":
        trained = load_trained(run, device=device)
        _say_of(models[0], trained, is_in_training=True)
        _show([_described(models[0], trained, {Message("held-out data"): trained.evaluate()})])
        return
    texts = {str(path): read_texts(path) for path in text or []} or _held_out_texts(models)
    if not (texts or stories or pairs):
        hint = "name a trained run, or a text with --text"
        raise ConfigError("{path} is not a run: there is no held-out text to measure on", path=models[0], hint=hint)
    measured = []
    for path in models:
        model = open_model(path, device=device)
        _say_of(path, model, is_in_training=not text and len(models) == 1)
        measured.append(_described(path, model, _measure(model, texts, stories=stories, pairs=pairs)))
    _show(measured)
    if texts:
        raw = "\n\n".join(next(iter(texts.values()))).encode()[:SCALE_BYTES]
        say("fewer are better; xz needs {bits:.2f} bits per byte", bits=8 * len(lzma.compress(raw)) / len(raw))


def _measure(model: "LanguageModel", texts: Texts, *, stories: int, pairs: int) -> Measures:
    """Measure a model on texts, on so many stories that it writes, and on so many minimal pairs."""
    from cuadrilla.train.evaluate import judge_pairs, judge_stories, write_stories

    found: dict[str, Mapping[str, Any]] = {}
    with shown_progress() as progress:
        for name, documents in texts.items():
            progress(Message("reading {name}", name=name), 0, 0)
            measures = model.evaluate(documents)
            found[name] = {key: value for key, value in measures.items() if key.startswith("bits_per_byte")}
    if stories:
        found[Message("built-in stories")] = judge_stories(write_stories(model.model, model.tokenizer, num=stories))
    if pairs:
        found[Message("minimal pairs")] = judge_pairs(model.model, model.tokenizer, num=pairs)
    return found


def read_texts(path: Path) -> list[str]:
    """The documents of a file or folder, as `cuadrilla data prepare` would read them. Raises DataError."""
    from cuadrilla.data.corpus import documents_of
    from cuadrilla.data.sources import list_sources

    documents = list(documents_of(list_sources([str(path)], exclude=path / "nothing")))
    if not documents:
        raise DataError("{file} holds no text", file=path, hint="give a file of text")
    return documents


def _held_out_texts(paths: Sequence[Path]) -> Texts:
    """The held-out documents of the first run of a language model; none if there is no such run. Raises DataError."""
    import numpy as np

    from cuadrilla.data.folder import TOKENIZER, open_tokens, read_manifest
    from cuadrilla.data.tokenizer import Tokenizer
    from cuadrilla.runfile import read_run_config
    from cuadrilla.train.trained import run_of

    runs = {run: read_run_config(run) for run in map(run_of, paths) if run is not None}
    run = next((run for run, config in runs.items() if config.task.kind == "language"), None)
    if run is None:
        return {}
    folder = run.path / runs[run].data.folder
    end, tokens = read_manifest(folder).end_of_text, open_tokens(folder, "val")
    tokenizer = Tokenizer.load(folder / TOKENIZER)
    documents = np.split(tokens, np.flatnonzero(tokens == end) + 1)  # end-of-text follows each, so the last is empty
    name = Message("held-out text of {path}", path=run.path)
    return {name: [tokenizer.decode(document[:-1].tolist()) for document in documents[:-1]]}


def _say_of(path: Path, model: "LanguageModel | Trained", *, is_in_training: bool) -> None:
    """Say which model is measured. `is_in_training`: on data of which its training used a part, maybe."""
    say("{path}: {model}", path=path, model=about(model))
    if is_in_training and model.config is not None and model.config.evaluate.sequences:
        template = "on all held-out data; in training on at most {sequences:,} sequences of it"
        say(template, sequences=model.config.evaluate.sequences)


def _described(path: Path, model: "LanguageModel | Trained", measures: Measures) -> dict[str, Any]:
    parameters = sum(parameter.numel() for parameter in model.model.parameters())
    version = model.step and model.step.version
    return {"model": str(path), "version": version, "parameters": parameters, "measures": measures}


def _show(measured: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a row for each measure and a column for each model; with `--json` an object for each model."""
    if answered(measured):
        return
    models = dict(zip([each["model"] for each in measured] if len(measured) > 1 else ["value"], measured, strict=True))
    rows = [{"measure": named("parameters"), **{name: each["parameters"] for name, each in models.items()}, "on": ""}]
    for on, measures in measured[0]["measures"].items():
        for measure in measures:
            if not measure.endswith("_error"):
                values = {name: _shown(each["measures"][on], measure) for name, each in models.items()}
                rows.append({"measure": named(measure), **values, "on": on})
    emit_table(rows)
    say("± is the standard error")


def _shown(measures: Mapping[str, Any], name: str) -> object:
    value, error = measures[name], measures.get(f"{name}_error")
    if isinstance(value, dict):
        return ", ".join(f"{named(key)} {count}" for key, count in value.items()) or Message("none")
    if not isinstance(value, float):
        return value
    if error is None:
        return Message("{value:.4f}", value=value)
    return Message("{value:.4f} ± {error:.4f}", value=value, error=error)
