"""`cuadrilla eval`: what one run has learnt, or several models side by side."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.output import emit_json, emit_table, options, say
from cuadrilla.errors import ConfigError

if TYPE_CHECKING:
    from cuadrilla.rundir import RunDir
    from cuadrilla.train.measures import Figure
    from cuadrilla.train.trained import LanguageModel

STORY_PAIRS_SEED = 1  # never trained on


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to measure. `stories` and `pairs` are about the built-in stories."""

    sequences: int
    stories: int
    pairs: int
    texts: tuple[Path, ...]
    pair_files: tuple[Path, ...]
    last_words: tuple[Path, ...]
    samples: int
    sample_tokens: int
    temperature: float
    seed: int
    device: str

    @property
    def compares(self) -> bool:
        """Whether anything is asked for that is measured alike for all language models."""
        return bool(self.texts or self.pair_files or self.last_words or self.samples)


def evaluate(
    models: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Trained runs, or folders in Hugging Face's layout; several compare."),
    ],
    sequences: Annotated[int, typer.Option(min=0, help="Held-out sequences to use (0: all).")] = 0,
    stories: Annotated[int, typer.Option(min=0, help="Built-in stories: let it tell so many and check them.")] = 0,
    pairs: Annotated[int, typer.Option(min=0, help="Built-in stories: minimal pairs to choose in.")] = 0,
    text: Annotated[list[Path] | None, typer.Option(help="Bits per byte of this text; may be repeated.")] = None,
    pairs_file: Annotated[
        list[Path] | None,
        typer.Option(help="Minimal pairs in .tsv, .csv or .jsonl with columns good and bad; may be repeated."),
    ] = None,
    last_word: Annotated[
        list[Path] | None, typer.Option(help="Passages, one in a line, whose last word is to be guessed.")
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Write so many texts; measure repetition and variety.")] = 0,
    sample_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in each of them.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="For stories and samples.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Held-out loss and bits per byte of a run; with more models or test files, a table that compares them."""
    from cuadrilla.train.trained import run_of

    options.json |= json
    wanted = Wanted(
        sequences=sequences, stories=stories, pairs=pairs, texts=tuple(text or ()),
        pair_files=tuple(pairs_file or ()), last_words=tuple(last_word or ()), samples=samples,
        sample_tokens=sample_tokens, temperature=temperature, seed=seed, device=device,
    )  # fmt: skip
    run = run_of(models[0])
    if len(models) == 1 and run is not None and not wanted.compares:
        _evaluate_run(run, wanted)
    else:
        _compare(models, wanted)


def _evaluate_run(run: "RunDir", wanted: Wanted) -> None:
    """One run on its own held-out data."""
    from cuadrilla.config import EvaluateSection
    from cuadrilla.model.gpt2 import GPT2
    from cuadrilla.model.language import LanguageTask
    from cuadrilla.train import evaluate as measures
    from cuadrilla.train.trained import load_trained

    trained = load_trained(run, device=wanted.device)
    say(f"step {trained.version}, {trained.device}, {trained.precision}")
    result: dict[str, object] = {"version": trained.version}
    result |= measures.evaluate(
        trained.task,
        trained.model,
        section=EvaluateSection(sequences=wanted.sequences),
        device=trained.device,
        precision=trained.precision,
    )
    if wanted.stories or wanted.pairs:
        if not (isinstance(trained.task, LanguageTask) and isinstance(trained.model, GPT2)):
            raise ConfigError("--stories and --pairs are for language models", hint="leave them out")
        report = measures.judge_stories(
            trained.model, trained.task.tokenizer, num_stories=wanted.stories, num_pairs=wanted.pairs,
            temperature=wanted.temperature, seed=wanted.seed,
        )  # fmt: skip
        result |= {key: value for key, value in asdict(report).items() if key != "examples"}
    if options.json:
        emit_json(result)
        return
    emit_table([{"measure": key, "value": _shown(value)} for key, value in result.items()])


def _compare(paths: Sequence[Path], wanted: Wanted) -> None:
    """Each model in its turn, so that one is in memory; a row for each figure, a column for each model."""
    from cuadrilla.train.trained import open_model

    if wanted.stories or wanted.sequences:
        name = "--stories" if wanted.stories else "--sequences"
        raise ConfigError(f"{name} is for one run on its own data", hint=f"leave it out, or evaluate {paths[0]} alone")
    measured: list[dict[str, Any]] = []
    figures: list[list[Figure]] = []
    held_out = None if wanted.compares or wanted.pairs else _held_out_of(paths)
    for path in paths:
        model = open_model(path, device=wanted.device)
        step = "" if model.version is None else f"step {model.version}, "
        say(f"{path}: {step}{model.device}, {model.precision}")
        figures.append(_measure(model, wanted, held_out))
        size = sum(parameter.numel() for parameter in model.model.parameters())
        measured.append({"model": str(path), "version": model.version, "parameters": size})
    if options.json:
        emit_json(
            [
                {**row, "figures": [asdict(figure) for figure in found]}
                for row, found in zip(measured, figures, strict=True)
            ]
        )
        return
    rows: list[dict[str, str]] = [{"measure": "parameters", "on": "", **_columns(measured, "parameters")}]
    keyed = [_keyed(found) for found in figures]
    for key in dict.fromkeys(key for found in keyed for key in found):
        shown = {row["model"]: _figure(found.get(key)) for row, found in zip(measured, keyed, strict=True)}
        rows.append({"measure": key[0], "on": key[1], **shown})
    emit_table(rows)
    say("± is one standard error; --json has sums, counts and 95 % intervals")


def _held_out_of(paths: Sequence[Path]) -> "tuple[str, Path]":
    """The first run's held-out text is what all are measured on when no other is given: its name and data folder."""
    from cuadrilla.runfile import read_run_config
    from cuadrilla.train.trained import run_of

    for path in paths:
        if (run := run_of(path)) is not None:
            return f"held-out text of {path}", run.path / read_run_config(run).data.folder
    if not paths[0].exists():
        raise ConfigError(f"{paths[0]} does not exist", hint="name a trained run")
    raise ConfigError(f"{paths[0]} is not a run: there is no held-out text to measure on", hint="name one with --text")


def _measure(model: "LanguageModel", wanted: Wanted, held_out: "tuple[str, Path] | None") -> "list[Figure]":
    from cuadrilla.data import cuentos
    from cuadrilla.data.shards import TOKENIZER
    from cuadrilla.data.tokenizer import Tokenizer
    from cuadrilla.model.generate import Sampling
    from cuadrilla.train import measures, trials

    pair = (model.model, model.tokenizer)
    found = []
    if held_out is not None:
        name, folder = held_out
        texts = trials.held_out_texts(folder, Tokenizer.load(folder / TOKENIZER))
        found.append(measures.text_figure(*pair, texts, of=name))
    found += [measures.text_figure(*pair, trials.read_texts(path), of=path.name) for path in wanted.texts]
    if wanted.pairs:
        built_in = list(cuentos.minimal_pairs(wanted.pairs, seed=STORY_PAIRS_SEED))
        found.append(measures.pair_figure(*pair, built_in, of="built-in stories"))
    found += [measures.pair_figure(*pair, trials.read_pairs(path), of=path.name) for path in wanted.pair_files]
    found += [measures.last_word_figure(*pair, trials.read_passages(path), of=path.name) for path in wanted.last_words]
    if wanted.samples:
        sampling = Sampling(temperature=wanted.temperature, max_tokens=wanted.sample_tokens, seed=wanted.seed)
        found += measures.variety_figures(*pair, num_samples=wanted.samples, sampling=sampling)
    return found


def _columns(rows: Sequence[dict[str, Any]], key: str) -> dict[str, str]:
    return {row["model"]: f"{row[key]:,}" for row in rows}


def _keyed(figures: "Sequence[Figure]") -> "dict[tuple[str, str, int], Figure]":
    """By measure, what it was measured on, and the how-manieth of that name: a model may lack some of another's."""
    seen: Counter[tuple[str, str]] = Counter()
    found = {}
    for figure in figures:
        key = (figure.name, figure.of)
        found[*key, seen[key]] = figure
        seen[key] += 1
    return found


def _figure(figure: "Figure | None") -> str:
    if figure is None:
        return "none"
    return f"{figure.value:.4f}" + ("" if figure.error is None else f" ± {figure.error:.4f}")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items()) or "none"
    return str(value)
