"""A new run folder with its run file: the commented one for a size of GPT-2, or settings as Python has them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from cuadrilla.config import SCHEMA
from cuadrilla.errors import ConfigError
from cuadrilla.messages import Message
from cuadrilla.rundir import RunDir, make_private, write_atomic
from cuadrilla.runfile import literal, resolve

SIZES = {  # tokens, and a batch where none is chosen by the rule: where a first run of this size makes sense
    "micro": (3_000_000, None),
    "mini": (20_000_000, None),
    "small": (2_500_000_000, 480),
}


def make_run(folder: Path, text: str) -> RunDir:
    """A run folder with this run file. Raises ConfigError if it has one."""
    run = RunDir(folder)
    if run.run_file.exists():
        raise ConfigError("{path} exists", path=run.run_file, hint="choose another name, or edit that file")
    make_private(folder)
    write_atomic(run.run_file, text)
    return run


def settings_text(settings: Mapping[str, Any] | str, *, folder: Path) -> str:
    """Sections of a run as the text of the run file in `folder`: a mapping, or such a text, which is checked.

    A data folder may be named as seen from here or from `folder`. Raises ConfigError.
    """
    if isinstance(settings, str):
        resolve(settings)
        return settings
    sections = {name: dict(value) if isinstance(value, Mapping) else value for name, value in settings.items()}
    data = sections.get("data")
    if isinstance(data, dict) and isinstance(data.get("folder"), str | os.PathLike):
        data["folder"] = seen_from(folder, os.fspath(data["folder"]))
    try:
        text = tomli_w.dumps({"schema": SCHEMA, **sections})
    except TypeError as error:
        hint = "sections of texts, numbers, booleans and lists"
        raise ConfigError("the settings: {reason}", reason=error, hint=hint) from None
    resolve(text, name=Message("the settings"))
    return text


def seen_from(run: Path, data: str) -> str:
    """A data folder as a run file names it, whether it was typed so or as seen from here."""
    return os.path.relpath(data, run) if not (run / data).exists() and Path(data).exists() else data


def run_file_text(size: str, *, data: str) -> str:
    """A commented run file for a language model of this size."""
    tokens, batch = SIZES[size]
    said_batch = f"batch_sequences = {batch}" if batch else "# batch_sequences = 64"
    folder = literal(data.replace("\\", "/"))
    return f"""\
# A run of cuadrilla. `cuadrilla train --explain-config` explains every key; what is not here has its default.
schema = 1

[run]
seed = 0                    # initial weights, order of the data, every random number

[data]
folder = {folder}        # written by `cuadrilla data prepare`

[model]
preset = "{size}"           # micro, mini, small (124M), medium, large, xl

[train]
tokens = {tokens}           # or epochs = 3, or steps = 1000
{said_batch}   # sequences in a step, over all workers; what is not said is chosen by `tokens`
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
