"""`cuadrilla import`: a run folder that begins with the weights of a model that others have trained."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tomli_w
import typer

from cuadrilla.cli.output import emit_json, options, say
from cuadrilla.config import SCHEMA
from cuadrilla.errors import ConfigError
from cuadrilla.rundir import typed, write_json
from cuadrilla.runfile import dump, make_run, resolve, seen_from

if TYPE_CHECKING:
    from cuadrilla.model.gpt2 import GPT2Config

MODEL_FOLDER = "model"
HEAD = """\
# A run of cuadrilla that begins with imported weights: `init` is read once, when the run begins. Its data are prepared
# with `cuadrilla data prepare --tokenizer model/tokenizer.json`; the learning rate is low, so that what is known stays.
# `cuadrilla train --show-config` explains every key.
"""


def import_model(
    source: Annotated[
        Path, typer.Argument(help="A folder in Hugging Face's layout, or a weights file in such a folder.")
    ],
    to: Annotated[Path, typer.Option("--to", help="The run folder to make.")],
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
    found = read_pretrained(source, trust=trust)
    text = continuing_run_file(found.model.config, data=data)
    resolved = resolve(text)  # all that can be refused is known before anything is written
    made = make_run(to, text)
    save_pretrained(found, to / MODEL_FOLDER)
    write_json(made.config, {"values": dump(resolved.config), "origins": resolved.origins}, private=True)
    size, vocab = sum(parameter.numel() for parameter in found.model.parameters()), found.model.config.vocab_size
    if options.json:
        emit_json({"path": str(to), "parameters": size, "vocabulary": vocab})
    say("wrote {path}: {size:.2f} M parameters, a vocabulary of {vocab:,}", path=to, size=size / 1e6, vocab=vocab)
    say("\nnext: cuadrilla generate {to}", to=typed(to))
    folder, tokenizer = Path(os.path.normpath(to / data)), to / MODEL_FOLDER / TOKENIZER
    say(
        "      cuadrilla data prepare YOUR_TEXTS --out {data} --tokenizer {tokenizer}",
        data=typed(folder),
        tokenizer=typed(tokenizer),
    )
    say("      cuadrilla train {to}", to=typed(to))


def continuing_run_file(shape: "GPT2Config", *, data: str) -> str:
    """A run file that continues training a model of these sizes."""
    sizes = {name: getattr(shape, name) for name in ("layers", "heads", "width", "context")}
    gelu = {"exact_gelu": True} if shape.exact_gelu else {}
    sections = {
        "schema": SCHEMA,
        "data": {"folder": data.replace("\\", "/")},
        "model": {"init": MODEL_FOLDER, **sizes, "vocab": shape.vocab_size, **gelu},
        "train": {"epochs": 1.0, "batch_sequences": 32, "unit_sequences": 8},
        "optim": {"kind": "adamw", "lr": 0.0001},
        "schedule": {"warmup": 0.05, "cooldown": 0.6},
    }
    return HEAD + tomli_w.dumps(sections)
