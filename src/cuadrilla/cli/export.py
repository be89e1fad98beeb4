"""`cuadrilla export`: a run's language model in the forms that other programs open."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cuadrilla.cli.output import answered, say
from cuadrilla.errors import ConfigError
from cuadrilla.rundir import typed, write_atomic

if TYPE_CHECKING:
    from cuadrilla.train.trained import LanguageModel

app = typer.Typer(no_args_is_help=True)

Run = Annotated[Path, typer.Argument(help="A trained run folder.")]
CARD = "README.md"


@app.command("hf")
def export_hf(
    run: Run,
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
    _report(to, found, num_bytes=sum(path.stat().st_size for path in to.iterdir()))


@app.command("gguf")
def export_gguf(
    run: Run,
    to: Annotated[
        Path | None, typer.Option(help="The file to write; its name ends in .gguf (default: RUN.gguf, here).")
    ] = None,
    f16: Annotated[bool, typer.Option("--f16", help="Store the matrices in half precision (half the bytes).")] = False,
) -> None:
    """One file for llama.cpp and the programs built on it."""
    from cuadrilla.model.gguf import Description, write_gguf
    from cuadrilla.train.card import licences, num_parameters

    to = to or Path(f"{run.resolve().name}.gguf")
    if to.suffix.lower() != ".gguf" or to.is_dir():
        proposed = to / "model.gguf" if to.is_dir() else to.with_suffix(".gguf")
        raise ConfigError("{to} is not the name of a GGUF file", to=to, path=typed(proposed), hint="--to {path}")
    found = _open(run)
    assert found.run is not None
    assert found.step is not None
    model = found.model
    about = Description(
        name=found.run.path.resolve().name,
        description=f"GPT-2, {num_parameters(model):,} parameters, step {found.step.version:,}",
        licence=licences(found),
    )
    write_gguf(to, model=model, tokenizer_path=found.tokenizer_path, half=f16, about=about)
    _report(to, found, num_bytes=to.stat().st_size)


def _open(run: Path) -> "LanguageModel":
    from cuadrilla.train.trained import open_model

    found = open_model(run, device="cpu", precision="fp32")
    if found.run is None:
        raise ConfigError("{path} is not a run", path=run, hint="name a trained run")
    return found


def _report(to: Path, found: "LanguageModel", *, num_bytes: int) -> None:
    assert found.step is not None
    say("wrote {to} ({size:.1f} MB) from {step}", to=to, size=num_bytes / 1e6, step=found.step)
    answered({"path": str(to), "version": found.step.version, "num_bytes": num_bytes})
