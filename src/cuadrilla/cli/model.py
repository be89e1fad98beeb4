"""`cuadrilla generate`: let a model write."""

import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.output import answered, emit, options, say
from cuadrilla.config import TOP_P
from cuadrilla.messages import Message

if TYPE_CHECKING:
    from cuadrilla.train.trained import LanguageModel, Trained

Run = Annotated[Path, typer.Argument(help="A trained run folder, or a folder in Hugging Face's layout.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu.")]


def generate(
    run: Run,
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Text to continue; `-` reads it from stdin; without, starts a new text."),
    ] = None,
    num: Annotated[int, typer.Option("--num", "-n", min=1, max=10_000, help="How many texts.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens in a text.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 always takes the most likely token.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose only among this many most likely tokens (0: all).")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Only the most likely tokens whose probabilities add up to this.")
    ] = TOP_P,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another text.")] = 0,
    device: Device = "auto",
) -> None:
    """Generate text with a trained model."""
    from cuadrilla.model.sampling import Sampling
    from cuadrilla.train.trained import open_model

    text = sys.stdin.read() if prompt == ["-"] else " ".join(prompt or [])
    opened = open_model(run, device=device)
    say(about(opened))
    written = []
    for index in range(num):
        sampling = Sampling(
            temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=tokens, stop=tuple(stop or ()),
            seed=seed + index,
        )  # fmt: skip
        pieces = opened.generate(text, sampling=sampling)
        if options.json:
            written.append({"prompt": text, "text": "".join(pieces), "seed": seed + index})
            continue
        for piece in chain((text,), pieces):
            emit("{piece}", piece=piece, end="")
        emit("\n" if index + 1 < num else "")
    answered(written)


def about(model: "LanguageModel | Trained") -> Message:
    """A line about a loaded model: its step if it is from a run, its device and its precision."""
    return Message(
        "{device}, {precision}" if model.step is None else "{step}, {device}, {precision}",
        step=model.step,
        device=model.device,
        precision=model.precision,
    )
