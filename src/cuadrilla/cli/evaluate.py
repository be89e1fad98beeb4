"""`cuadrilla eval`: what one run has learnt, or several models side by side."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.model import Newest, about
from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.cli.stages import shown_progress
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message

if TYPE_CHECKING:
    from cuadrilla.data.tokenizer import Tokenizer
    from cuadrilla.model.language import Pair
    from cuadrilla.rundir import RunDir
    from cuadrilla.train.eval_metrics import Figure
    from cuadrilla.train.trained import LanguageModel

STORY_PAIRS_SEED = 1  # never trained on


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What to measure. `stories` and `pairs` are about the built-in stories."""

    sequences: int
    stories: int
    pairs: int
    texts: tuple[Path, ...]
    pair_files: tuple[Path, ...]
    temperature: float
    seed: int
    device: str
    newest: bool

    @property
    def compares(self) -> bool:
        """Whether anything is asked for that is measured alike for all language models."""
        return bool(self.texts or self.pair_files)


def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Trained runs, or folders in Hugging Face's layout; several compare."),
    ],
    sequences: Annotated[int, typer.Option(min=0, help="Held-out sequences to use (0: all).")] = 0,
    stories: Annotated[int, typer.Option(min=0, help="Built-in stories: generate this many and check them.")] = 0,
    pairs: Annotated[int, typer.Option(min=0, help="Built-in stories: how many minimal pairs to test.")] = 0,
    text: Annotated[list[Path] | None, typer.Option(help="Bits per byte of this text; may be repeated.")] = None,
    pairs_file: Annotated[
        list[Path] | None,
        typer.Option(help="Minimal pairs in .tsv, .csv or .jsonl with columns good and bad; may be repeated."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="For stories.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    newest: Newest = False,
    json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Held-out loss and bits per byte of a run; with more models or test files, a table that compares them."""
    from cuadrilla.train.trained import run_of

    options.json |= json
    wanted = Measurement(
        sequences=sequences, stories=stories, pairs=pairs, texts=tuple(text or ()),
        pair_files=tuple(pairs_file or ()), temperature=temperature, seed=seed, device=device, newest=newest,
    )  # fmt: skip
    run = run_of(models[0])
    if len(models) == 1 and run is not None and not wanted.compares:
        _evaluate_run(run, wanted)
    else:
        _compare(models, wanted)


def _evaluate_run(run: "RunDir", wanted: Measurement) -> None:
    """One run on its own held-out data."""
    from cuadrilla.model.gpt2 import GPT2
    from cuadrilla.model.language import LanguageTask
    from cuadrilla.train.evaluate import judge_stories
    from cuadrilla.train.trained import load_trained

    trained = load_trained(run, device=wanted.device, newest=wanted.newest)
    say(
        "{step}, {device}, {precision}",
        step=trained.step,
        device=trained.device,
        precision=trained.precision,
    )
    result: dict[str, object] = {"version": trained.step.version, **trained.evaluate(sequences=wanted.sequences)}
    if wanted.stories or wanted.pairs:
        if not (isinstance(trained.task, LanguageTask) and isinstance(trained.model, GPT2)):
            raise ConfigError("--stories and --pairs are for language models", hint="leave them out")
        report = judge_stories(
            trained.model, trained.task.tokenizer, num_stories=wanted.stories, num_pairs=wanted.pairs,
            temperature=wanted.temperature, seed=wanted.seed,
        )  # fmt: skip
        result |= {key: value for key, value in report.items() if key != "examples"}
    if options.json:
        emit_json(result)
        return
    emit_table(
        [
            {"measure": key, "value": _shown(value, error=result.get(f"{key}_error"))}
            for key, value in result.items()
            if not key.endswith("_error")
        ]
    )


def _compare(paths: Sequence[Path], wanted: Measurement) -> None:
    """Each model in its turn, so that one is in memory; a row for each figure, a column for each model."""
    from cuadrilla.train.trained import open_model

    if wanted.stories or wanted.sequences:
        name = "--stories" if wanted.stories else "--sequences"
        raise ConfigError(
            "{name} works only with one run on its own data",
            name=name,
            path=paths[0],
            hint="leave it out, or evaluate {path} alone",
        )
    measured: list[dict[str, Any]] = []
    figures: list[list[Figure]] = []
    tests = _open_tests(paths, wanted)
    for path in paths:
        model = open_model(path, device=wanted.device, newest=wanted.newest)
        say("{path}: {model}", path=path, model=about(model))
        figures.append(_measure(model, tests))
        size = sum(parameter.numel() for parameter in model.model.parameters())
        measured.append({"model": str(path), "version": model.step and model.step.version, "parameters": size})
    if options.json:
        emit_json(
            [
                {**row, "figures": [_as_json(figure) for figure in found], "differences": differences}
                for row, found, differences in zip(measured, figures, _differences(figures), strict=True)
            ]
        )
        return
    rows: list[dict[str, str]] = [{"measure": "parameters", "on": "", **_columns(measured, "parameters")}]
    for same in zip(*figures, strict=True):
        shown = {row["model"]: _shown(each.value, error=each.margin) for row, each in zip(measured, same, strict=True)}
        rows.append({"measure": same[0].name, "on": same[0].of, **shown})
    emit_table(rows)
    for path, found in zip(paths[1:], _differences(figures)[1:], strict=True):
        for each in found:
            emit(
                "{path} - {first}: {name} on {of}: {value:+.4f} ({low:+.4f} to {high:+.4f}, 95 %)",
                path=path,
                first=paths[0],
                name=each["name"],
                of=each["of"],
                value=each["value"],
                low=each["low"],
                high=each["high"],
            )
    say("± is half of the 95 % interval; --json has sums, counts and both ends")


@dataclass(frozen=True, kw_only=True)
class _Tests:
    """All that models are measured on, read before the first of them is loaded. Texts are read again for each."""

    texts: "list[tuple[str, int, Callable[[], Iterator[str]]]]"
    """Name, bytes, documents."""
    pairs: "list[tuple[str, Sequence[Pair]]]"


def _open_tests(paths: Sequence[Path], wanted: Measurement) -> _Tests:
    """Raises DataError for a file that cannot be used, ConfigError if there is nothing to measure on."""
    from cuadrilla.data import cuentos
    from cuadrilla.train import eval_data

    tests = _Tests(texts=[], pairs=[])
    if not (wanted.compares or wanted.pairs):
        name, folder, num_bytes, tokenizer = _held_out_of(paths)
        tests.texts.append((name, num_bytes, partial(eval_data.held_out_texts, folder, tokenizer)))
    for path in wanted.texts:
        num_bytes = sum(len(text.encode()) for text in eval_data.read_texts(path))
        tests.texts.append((path.name, num_bytes, partial(eval_data.read_texts, path)))
    if wanted.pairs:
        tests.pairs.append(
            (Message("built-in stories"), list(cuentos.minimal_pairs(wanted.pairs, seed=STORY_PAIRS_SEED)))
        )
    tests.pairs.extend((path.name, eval_data.read_pairs(path)) for path in wanted.pair_files)
    return tests


def _held_out_of(paths: Sequence[Path]) -> "tuple[str, Path, int, Tokenizer]":
    """The first run's held-out text, for all if no other is given: its name, data folder, size and tokenizer."""
    from cuadrilla.data.shards import MANIFEST, TOKENIZER, read_manifest
    from cuadrilla.data.tokenizer import Tokenizer
    from cuadrilla.runfile import read_run_config
    from cuadrilla.train.trained import run_of

    for path in paths:
        if (run := run_of(path)) is not None:
            folder = run.path / read_run_config(run).data.folder
            if not (folder / MANIFEST).exists():
                raise ConfigError(
                    "{folder}, the data of {path}, does not exist",
                    folder=folder,
                    path=path,
                    hint="measure on a text: --text FILE",
                )
            num_bytes = read_manifest(folder).splits["val"].num_bytes
            return Message("held-out text of {path}", path=path), folder, num_bytes, Tokenizer.load(folder / TOKENIZER)
    if not paths[0].exists():
        raise ConfigError("{path} does not exist", path=paths[0], hint="name a trained run")
    raise ConfigError(
        "{path} is not a run: there is no held-out text to measure on", path=paths[0], hint="name one with --text"
    )


def _measure(model: "LanguageModel", tests: _Tests) -> "list[Figure]":
    from cuadrilla.train import eval_metrics

    pair = (model.model, model.tokenizer)
    found = []
    with shown_progress() as progress:
        for name, num_bytes, texts in tests.texts:
            counted = _counted(texts(), partial(progress, Message("reading {name}", name=name)), num_bytes)
            found.append(eval_metrics.text_figure(*pair, counted, of=name))
        for name, pairs in tests.pairs:
            progress(Message("pairs of {name}", name=name), 0, 0)
            found.append(eval_metrics.pair_figure(*pair, pairs, of=name))
    return found


def _counted(texts: "Iterator[str]", progress: "Callable[[int, int], None]", total: int) -> "Iterator[str]":
    done = 0
    for text in texts:
        yield text
        done += len(text.encode())
        progress(min(done, total), total)


def _as_json(figure: "Figure") -> dict[str, Any]:
    return {key: value for key, value in asdict(figure).items() if key != "items"}


def _differences(figures: "Sequence[Sequence[Figure]]") -> list[list[dict[str, Any]]]:
    """How each model differs from the first one, for each figure of which both have the same items."""
    from cuadrilla.train import eval_metrics

    rows: list[list[dict[str, Any]]] = [[]]
    for found in figures[1:]:
        pairs = ((figure, eval_metrics.difference(figure, of)) for figure, of in zip(found, figures[0], strict=True))
        rows.append([{"name": figure.name, "of": figure.of, **asdict(each)} for figure, each in pairs if each])
    return rows


def _columns(rows: Sequence[dict[str, Any]], key: str) -> dict[str, str]:
    return {row["model"]: f"{row[key]:,}" for row in rows}


def _shown(value: object, *, error: object = None) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else "")
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items()) or "none"
    return str(value)
