"""`cuadrilla eval` and `cuadrilla generate`: use what a run has trained."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.output import emit, emit_json, emit_table, options, say
from cuadrilla.errors import ConfigError
from cuadrilla.rundir import RunDir

if TYPE_CHECKING:
    from cuadrilla.train.trained import Trained

Run = Annotated[Path, typer.Argument(help="A trained run folder.")]


def evaluate(
    run: Run,
    sequences: Annotated[int, typer.Option(min=0, help="Held-out sequences to use (0: all).")] = 0,
    stories: Annotated[int, typer.Option(min=0, help="Built-in stories: let it tell so many and check them.")] = 0,
    pairs: Annotated[int, typer.Option(min=0, help="Built-in stories: minimal pairs to choose in.")] = 0,
    temperature: Annotated[float, typer.Option(min=0, help="For the stories.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """Held-out loss and bits per byte of a trained run; for the built-in stories also grammar and coherence."""
    from cuadrilla.config import EvaluateSection
    from cuadrilla.model.gpt2 import GPT2
    from cuadrilla.model.language import LanguageTask
    from cuadrilla.train import evaluate as measures
    from cuadrilla.train.trained import load_trained

    options.json |= json
    trained = load_trained(RunDir(run.parent if run.is_file() else run), device=device)
    _introduce(trained)
    result: dict[str, object] = {"version": trained.version}
    result |= measures.evaluate(
        trained.task,
        trained.model,
        section=EvaluateSection(sequences=sequences),
        device=trained.device,
        precision=trained.precision,
    )
    if stories or pairs:
        if not (isinstance(trained.task, LanguageTask) and isinstance(trained.model, GPT2)):
            raise ConfigError("--stories and --pairs are for language models", hint="leave them out")
        report = measures.judge_stories(
            trained.task, trained.model, num_stories=stories, num_pairs=pairs, temperature=temperature, seed=seed
        )
        result |= {key: value for key, value in asdict(report).items() if key != "examples"}
    if options.json:
        emit_json(result)
        return
    emit_table([{"measure": key, "value": _shown(value)} for key, value in result.items()])


def generate(
    run: Run,
    prompt: Annotated[str, typer.Argument(help="Text to continue; `-` reads it from stdin; empty starts anew.")] = "",
    num: Annotated[int, typer.Option("--num", "-n", min=1, max=10_000, help="How many texts.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens in a text.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Only the so many likeliest tokens (0: all).")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Only the likeliest tokens of this mass.")] = 1.0,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="The texts as JSON.")] = False,
) -> None:
    """Write text with a trained run, as it comes."""
    from cuadrilla.model.generate import Sampling, generate_text
    from cuadrilla.model.gpt2 import GPT2
    from cuadrilla.model.language import LanguageTask
    from cuadrilla.train.trained import load_trained

    options.json |= json
    text = sys.stdin.read() if prompt == "-" else prompt
    trained = load_trained(RunDir(run.parent if run.is_file() else run), device=device)
    if not (isinstance(trained.task, LanguageTask) and isinstance(trained.model, GPT2)):
        raise ConfigError(f"{run} is not a language model", hint="generate is for runs with task.kind = language")
    _introduce(trained)
    written = []
    for index in range(num):
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=tokens, stop=tuple(stop or ()),
            seed=seed + index,
        )  # fmt: skip
        pieces = generate_text(trained.model, trained.task.tokenizer, text, sampling=sampling)
        if options.json:
            written.append({"prompt": text, "text": "".join(pieces), "seed": seed + index})
            continue
        sys.stdout.write(text)
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        emit("\n" if index + 1 < num else "")
    if options.json:
        emit_json(written)


def _introduce(trained: "Trained") -> None:
    say(f"step {trained.version}, {trained.device}, {trained.precision}")


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {count}" for key, count in value.items()) or "none"
    return str(value)
