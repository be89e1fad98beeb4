"""`cuadrilla import`: a run folder that begins with the weights of a model that others have trained."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cuadrilla.cli.output import advise, answered, say
from cuadrilla.errors import ConfigError
from cuadrilla.rundir import typed
from cuadrilla.runfile import make_run, run_file_text, seen_from

if TYPE_CHECKING:
    from cuadrilla.model.gpt2 import GPT2Config

MODEL_FOLDER = "model"


def import_model(
    source: Annotated[
        Path, typer.Argument(help="A folder in Hugging Face's layout, or a weights file in such a folder.")
    ],
    to: Annotated[Path, typer.Option(help="The run folder to make.")],
    data: Annotated[
        str, typer.Option(help="The prepared data folder, as seen from here or the new folder.")
    ] = "../data",
    trust: Annotated[
        bool, typer.Option("--trust", help="Read a pickle (.bin, .pt); it may hold tensors only.")
    ] = False,
) -> None:
    """Make a run that continues from a model that others have trained: train, evaluate, generate and export it."""
    from cuadrilla.data.folder import TOKENIZER
    from cuadrilla.model.pretrained import read_pretrained, save_pretrained

    data = seen_from(to, data)
    if (to.exists() and (not to.is_dir() or any(to.iterdir()))) or to.name in ("", ".."):
        raise ConfigError("{to} exists", to=to, hint="choose another name")
    if (source / "run.toml").is_file():
        raise ConfigError("{path} is a run already", path=source, hint="cuadrilla generate {run}", run=typed(source))
    found = read_pretrained(source, trust=trust)
    text = run_file_text(continuing(found.model.config, data=data))
    make_run(to, text)  # all that can be refused is known before anything is written
    save_pretrained(found, to / MODEL_FOLDER)
    size, vocab = sum(parameter.numel() for parameter in found.model.parameters()), found.model.config.vocab_size
    answered({"path": str(to), "parameters": size, "vocabulary": vocab})
    say("wrote {path}: {size:.2f} M parameters, a vocabulary of {vocab:,}", path=to, size=size / 1e6, vocab=vocab)
    folder, tokenizer = Path(os.path.normpath(to / data)), to / MODEL_FOLDER / TOKENIZER
    prepare = f"data prepare TEXTS --out {typed(folder)} --tokenizer {typed(tokenizer)}"
    advise(f"generate {typed(to)}", prepare, f"train {typed(to)}")


def continuing(shape: "GPT2Config", *, data: str) -> dict[str, Any]:
    """The settings of a run that continues training a model of these sizes."""
    sizes = {f"model.{name}": getattr(shape, name) for name in ("layers", "heads", "width", "context", "exact_gelu")}
    return {
        "data.folder": data.replace("\\", "/"),
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
