"""What is done with a trained model: `cuadrilla generate` lets it write, `export` gives it to other programs, `import`
makes a run folder that begins with the weights of a model that others have trained.
"""

import os
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.output import advise, answered, emit, options, say
from cuadrilla.config import TOP_P
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message
from cuadrilla.rundir import typed, write_atomic
from cuadrilla.runfile import make_run, run_file_text

if TYPE_CHECKING:
    from cuadrilla.model.gpt2 import GPT2Config
    from cuadrilla.train.trained import LanguageModel, Trained

Run = Annotated[Path, typer.Argument(help="A trained run folder, or a folder in Hugging Face's layout.")]
TrainedRun = Annotated[Path, typer.Argument(help="A trained run folder.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps, xpu.")]
CARD, MODEL_FOLDER, DATA = "README.md", "model", "../data"

export = typer.Typer(no_args_is_help=True)


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


@export.command("hf")
def export_hf(
    run: TrainedRun,
    to: Annotated[Path | None, typer.Option(help="The folder to write (default: RUN-hf, here).")] = None,
) -> None:
    """A folder that Hugging Face's transformers opens, with a model card."""
    from cuadrilla.model.hf import FILES, save_hf
    from cuadrilla.train.card import model_card

    to = to or Path(f"{run.resolve().name}-hf")
    there = sorted(path.name for path in to.iterdir()) if to.is_dir() else []
    strange = [name for name in there if name not in (*FILES, CARD) and not name.startswith(".")]
    if strange:
        raise ConfigError("{to} holds something else: {name}", to=to, name=strange[0], hint="name a new folder")
    found = _open(run)
    save_hf(found.model, to, tokenizer=found.tokenizer)
    write_atomic(to / CARD, model_card(found))
    _report_export(to, found, num_bytes=sum(path.stat().st_size for path in to.iterdir()))


@export.command("gguf")
def export_gguf(
    run: TrainedRun,
    to: Annotated[
        Path | None, typer.Option(help="The file to write; its name ends in .gguf (default: RUN.gguf, here).")
    ] = None,
    f16: Annotated[bool, typer.Option("--f16", help="Store the matrices in half precision (half the bytes).")] = False,
) -> None:
    """One file for llama.cpp and the programs built on it."""
    from cuadrilla.model.gguf import write_gguf
    from cuadrilla.train.card import licences, num_parameters

    to = to or Path(f"{run.resolve().name}.gguf")
    if to.suffix.lower() != ".gguf" or to.is_dir():
        proposed = to / "model.gguf" if to.is_dir() else to.with_suffix(".gguf")
        raise ConfigError("{to} is not the name of a GGUF file", to=to, path=typed(proposed), hint="--to {path}")
    found = _open(run)
    assert found.run is not None
    assert found.step is not None
    model = found.model
    about = {
        "name": found.run.path.resolve().name,
        "description": f"GPT-2, {num_parameters(model):,} parameters, step {found.step.version:,}",
        "license": licences(found),
    }
    write_gguf(to, model=model, tokenizer_path=found.tokenizer_path, half=f16, about=about)
    _report_export(to, found, num_bytes=to.stat().st_size)


def _open(run: Path) -> "LanguageModel":
    from cuadrilla.train.trained import open_model

    found = open_model(run, device="cpu", precision="fp32")
    if found.run is None:
        raise ConfigError("{path} is not a run", path=run, hint="name a trained run")
    return found


def _report_export(to: Path, found: "LanguageModel", *, num_bytes: int) -> None:
    assert found.step is not None
    say("wrote {to} ({size:.1f} MB) from {step}", to=to, size=num_bytes / 1e6, step=found.step)
    answered({"path": str(to), "version": found.step.version, "num_bytes": num_bytes})


def import_model(
    source: Annotated[
        Path, typer.Argument(help="A folder in Hugging Face's layout, or a weights file in such a folder.")
    ],
    to: Annotated[Path, typer.Option(help="The run folder to make.")],
    trust: Annotated[
        bool, typer.Option("--trust", help="Read a pickle (.bin, .pt); it may hold tensors only.")
    ] = False,
) -> None:
    """Make a run that continues from a model that others have trained: train, evaluate, generate and export it."""
    from cuadrilla.data.folder import TOKENIZER
    from cuadrilla.model.pretrained import read_pretrained, save_pretrained

    if (to.exists() and (not to.is_dir() or any(to.iterdir()))) or to.name in ("", ".."):
        raise ConfigError("{to} exists", to=to, hint="choose another name")
    if (source / "run.toml").is_file():
        raise ConfigError("{path} is a run already", path=source, hint="cuadrilla generate {run}", run=typed(source))
    found = read_pretrained(source, trust=trust)
    text = run_file_text(continuing(found.model.config))
    make_run(to, text)  # all that can be refused is known before anything is written
    save_pretrained(found, to / MODEL_FOLDER)
    size, vocab = sum(parameter.numel() for parameter in found.model.parameters()), found.model.config.vocab_size
    answered({"path": str(to), "parameters": size, "vocabulary": vocab})
    say("wrote {path}: {size:.2f} M parameters, a vocabulary of {vocab:,}", path=to, size=size / 1e6, vocab=vocab)
    folder, tokenizer = Path(os.path.normpath(to / DATA)), to / MODEL_FOLDER / TOKENIZER
    prepare = f"data prepare TEXTS --out {typed(folder)} --tokenizer {typed(tokenizer)}"
    advise(f"generate {typed(to)}", prepare, f"train {typed(to)}")


def continuing(shape: "GPT2Config") -> dict[str, Any]:
    """The settings of a run that continues training a model of these sizes."""
    sizes = {f"model.{name}": getattr(shape, name) for name in ("layers", "heads", "width", "context", "exact_gelu")}
    return {
        "data.folder": DATA,
        "model.init": MODEL_FOLDER,
        "model.vocab": shape.vocab_size,
        **sizes,
        "train.epochs": 1.0,
        "train.batch_sequences": 32,
        "train.unit_sequences": 8,
        "optim.kind": "adamw",
        "optim.lr": 0.0001,  # low, so that what is known stays
        "schedule.warmup": 0.05,
    }
