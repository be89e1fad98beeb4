"""`cuadrilla export`: a run's language model in the forms that other programs open."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.model import Newest
from cuadrilla.cli.output import emit_json, options, say
from cuadrilla.errors import ConfigError
from cuadrilla.rundir import RunDir, remove_leftovers, typed, write_atomic

if TYPE_CHECKING:
    from cuadrilla.train.checkpoint import Step

app = typer.Typer(no_args_is_help=True)

Run = Annotated[Path, typer.Argument(help="A trained run folder.")]
CARD = "README.md"
_LEFTOVER = re.compile(r"\..+\.\d+\.tmp")  # of an export that was killed


@app.callback()
def group() -> None:
    """Write a run's language model in formats that other programs open."""


@app.command("hf")
def export_hf(
    run: Run,
    to: Annotated[Path, typer.Option("--to", help="The folder to write.")],
    newest: Newest = False,
    json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """A folder that Hugging Face's transformers opens, with a model card."""
    from cuadrilla.model.hf import FILES, save_hf
    from cuadrilla.train.card import model_card
    from cuadrilla.train.trained import find_stored

    options.json |= json
    found = sorted(path.name for path in to.iterdir()) if to.is_dir() else []
    strange = [name for name in found if name not in (*FILES, CARD) and not _LEFTOVER.fullmatch(name)]
    if strange:
        raise ConfigError("{to} holds something else: {name}", to=to, name=strange[0], hint="name a new folder")
    stored = find_stored(_run_dir(run), newest=newest)
    for name in (*FILES, CARD):
        remove_leftovers(to / name)
    save_hf(stored.load(), to, tokenizer_path=stored.tokenizer_path)
    write_atomic(to / CARD, model_card(stored))
    _report(to, step=stored.step, num_bytes=sum(path.stat().st_size for path in to.iterdir()))


@app.command("gguf")
def export_gguf(
    run: Run,
    to: Annotated[Path, typer.Option("--to", help="The file to write; its name ends in .gguf.")],
    f16: Annotated[bool, typer.Option("--f16", help="Store the matrices in half precision (half the bytes).")] = False,
    newest: Newest = False,
    json: Annotated[bool, typer.Option("--json", help="The result as JSON.")] = False,
) -> None:
    """One file for llama.cpp and the programs built on it."""
    from cuadrilla.model.gguf import Description, write_gguf
    from cuadrilla.train.card import licences, manifest_of, num_parameters
    from cuadrilla.train.trained import find_stored

    options.json |= json
    if to.suffix.lower() != ".gguf" or to.is_dir():
        proposed = to / "model.gguf" if to.is_dir() else to.with_suffix(".gguf")
        raise ConfigError("{to} is not the name of a GGUF file", to=to, path=typed(proposed), hint="--to {path}")
    stored = find_stored(_run_dir(run), newest=newest)
    about = Description(
        name=stored.name,
        description=f"GPT-2, {num_parameters(stored.config):,} parameters, step {stored.step.version:,}",
        licence=", ".join(licences(manifest_of(stored))),
    )
    read = stored.load().state_dict().__getitem__
    write_gguf(to, config=stored.config, tokenizer_path=stored.tokenizer_path, read=read, half=f16, about=about)
    _report(to, step=stored.step, num_bytes=to.stat().st_size)


def _run_dir(run: Path) -> RunDir:
    from cuadrilla.train.trained import run_of

    return run_of(run) or RunDir(run.parent if run.is_file() else run)


def _report(to: Path, *, step: "Step", num_bytes: int) -> None:
    say("wrote {to} ({size:.1f} MB) from {step}", to=to, size=num_bytes / 1e6, step=step)
    if options.json:
        emit_json({"path": str(to), "version": step.version, "num_bytes": num_bytes})
